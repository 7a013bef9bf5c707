# SPDX-License-Identifier: Apache-2.0
"""Why the trainer waits: the figures of some batches, judged.

    waits at epochs' starts? ── enough batches? ── threads and the lock? ── waits at all?
    ── serial? ── what is it that workers lack (`supply`)?

The order is that of physics: whatever makes the next question senseless is asked before it. See
docs/design/insight.md.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from penstock.insight import supply
from penstock.insight.case import (
    READS,
    WAITS,
    Case,
    bounded,
    count_of_workers,
    of_it,
    throughput,
    times,
    waits,
    wanted,
)
from penstock.insight.figures import HANDOVER_S, Figures, amount, duration, percent
from penstock.insight.stats import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.insight.stats import Bottleneck, SlowSample, Source, Span

__all__ = ["judge"]

_FEWEST: Final = 8  # batches that are judged
_STARVED: Final = 0.10  # share of the trainer's time without a core that is worth a word
_OTHERS_HOLD: Final = 0.3  # share of making a batch without a core, so that a gain is "up to"
_SPARE: Final = 0.25  # share of the workers' time in which they have nothing to do
_ONE_CORE: Final = (0.8, 1.2)  # cores that threads take together if one lock holds them
_BLOCKED: Final = 0.3  # share of a batch's cost without CPU that may be the lock's
_TRAINER_HOLDS: Final = 0.3  # cores of the trainer's own
_HELD: Final = 0.5  # share of looks that found the lock held: then it is the bottleneck
_FREE: Final = 0.1
_WORTH: Final = 1.1  # a gain below is none


def judge(
    span: Span,
    *,
    num_workers: int,
    cores: float,
    num_ready: float,
    lookahead: int,
    sources: Sequence[Source] = (),
    slowest: Sequence[SlowSample] = (),
    backend: str = "process",
    run: Span | None = None,
    pause_s: float = 0.0,
    lock_share: float | None = None,
    keeps_workers: bool | None = None,
) -> Verdict:
    """Return why the trainer waits, what to do, and what that would bring.

    Args:
        span: Sums over the batches to judge, without the trainer's pauses.
        num_workers: Workers that made them; 0 if the trainer's thread did.
        cores: Cores that trainer and workers may use together.
        num_ready: Batches that lay ready when one was asked for, on average.
        lookahead: Batches under way at a time.
        sources: What samples of each part of the dataset cost, if it has parts.
        slowest: Samples that took longest, the longest first; named where they are to blame.
        backend: "serial", "process", "thread" or "ray", whose workers have cores of their own.
        run: Sums over many epochs, by which their starts are judged; None for `span`.
        pause_s: What the trainer's rare long steps took.
        lock_share: Share of looks that found the interpreter's lock held; None if nobody looked.
        keeps_workers: Whether workers are kept from epoch to epoch; None if not known.

    Returns:
        A verdict. Below 8 batches it is "nothing yet". One who waits less than 5 % of the time is
        never told to do more for it.

    Example:
        >>> from penstock.insight.stats import Span
        >>> span = Span(batches=100, seconds=2.0, wait_s=1.2, consumer_s=0.8, trainer_cpu_s=0.4,
        ...             compute_s=3.8, collate_s=0.1, idle_s=0.1, worker_cpu_s=3.8)
        >>> verdict = judge(span, num_workers=2, cores=8, num_ready=0.1, lookahead=4)
        >>> verdict.bottleneck, verdict.expected_gain
        ('workers', 2.5)
        >>> print(verdict.remedy)
        Add workers: num_workers=6 would give about 2.5 x the throughput.
    """
    starts = None if num_workers == 0 else _start(run or span, keeps_workers)
    if starts is not None:
        return starts
    if backend == "ray":  # on other machines, as many as there are
        cores = math.inf
    held = (lock_share or 0.0) if backend == "thread" else 0.0
    at = Figures.of(span, num_workers, cores, pause_s=pause_s, lock_share=held)
    if at is None or at.batches < _FEWEST:
        return Verdict(
            "nothing yet", f"Too few batches to tell: {span.batches}, and {_FEWEST} are needed."
        )
    is_seen = lock_share is not None and lock_share <= _FREE
    if backend == "thread" and not is_seen and at.cores_taken <= _ONE_CORE[1]:
        at = replace(at, lock_bound=min(at.cores_taken, 1.0))  # all of their CPU may be in Python
    case = Case(span, at, num_ready, lookahead, sources, slowest, backend, lock_share)
    for test in (*_TESTS, *supply.TESTS):
        if (verdict := test(case)) is not None:
            return verdict
    return supply.too_few_workers(case)


def _start(run: Span, keeps_workers: bool | None) -> Verdict | None:
    total_s = max(run.wait_s + run.consumer_s, run.seconds)
    first_s = min(run.first_wait_s, run.wait_s)
    few = run.starts < 2 or run.batches < _FEWEST
    if few or first_s / max(total_s, 1e-9) < WAITS or first_s < run.wait_s - first_s:
        return None
    keep = "Keep the workers from epoch to epoch: persistent_workers=True."
    longer = "it is the time that one batch takes: make longer epochs, or cheaper batches."
    if keeps_workers:
        keep, longer = "", f"As the workers are kept, {longer}"
    elif keeps_workers is None:
        longer = f"If they are kept already, {longer}"
    else:
        longer = ""
    return Verdict(
        "start",
        f"The trainer waits {percent(first_s / total_s)} of the time for the "
        f"first batches of epochs, {duration(first_s / run.starts)} each time.",
        f"{keep} {longer}".strip(),
        bounded(total_s / max(total_s - first_s, 1e-9)),
    )


def _lock(case: Case) -> Verdict | None:
    """Threads, and Python's lock: known by having looked, or one of two explanations."""
    at = case.at
    if case.backend != "thread" or not at.num_workers or at.cores <= _ONE_CORE[1]:
        return None
    has_lost = at.trainer_blocked_s * at.rate >= _STARVED and at.idle_share < _SPARE
    if at.wait_share < WAITS and not has_lost:
        return None
    if case.lock_share is not None and case.lock_share >= _HELD:
        return _locked(case, case.lock_share)
    is_refuted = (
        case.lock_share is not None
        and case.lock_share <= _FREE
        and at.trainer_cpu_s * at.rate < _TRAINER_HOLDS
    )
    is_one_core = _ONE_CORE[0] <= at.cores_taken <= _ONE_CORE[1]
    if (
        is_refuted
        or not is_one_core
        or not (has_lost or at.share(at.read_s + at.starved_s) >= _BLOCKED)
    ):
        return None
    return Verdict(
        "gil",
        f"{waits(case)}: {_threads(case)}, {_blocked(case)}. Either that is what reads and the "
        "device take, or they wait for Python's lock, which one thread has at a time.",
        'Try backend="process", which tells: if it is faster, it was the lock; if not, take more '
        "threads.",
    )


def _locked(case: Case, share: float) -> Verdict | None:
    at = case.at
    freed = at.without_lock()
    workers = max(wanted(freed), at.num_workers)
    gain = freed.gain(workers)
    if gain is not None and gain < _WORTH:
        return None
    return Verdict(
        "gil",
        f"{waits(case)}, and {percent(share)} of the times that it looked, another thread held "
        f"Python's lock, which one has at a time: {_threads(case)}, {_blocked(case)}.",
        f'Use processes: backend="process", num_workers={workers} would give up to '
        f"{throughput(gain)}.",
        gain,
    )


def _threads(case: Case) -> str:
    at = case.at
    who = "1 thread" if at.num_workers == 1 else f"{at.num_workers} threads"
    return f"{who} and the trainer take {amount(at.cores_taken)} of {amount(at.cores)} cores"


def _blocked(case: Case) -> str:
    at = case.at
    blocked_s, whole_s = at.read_s + at.starved_s, at.busy_s + at.starved_s
    own_s = max(at.trainer_s - at.trainer_cpu_s - at.trainer_starved_s, 0.0)
    return (
        f"and pass {duration(blocked_s)} of a batch's {duration(whole_s)} and {duration(own_s)} of "
        f"a step's {duration(at.trainer_s)} without CPU"
    )


def _trainer(case: Case) -> Verdict | None:
    at = case.at
    if at.wait_share >= WAITS:
        return None
    starved = at.trainer_starved_s * at.rate
    if at.num_workers and starved >= _STARVED:
        return _contention(case, starved)
    ready = f": {amount(case.num_ready)} batches lie ready" if case.num_ready >= 0.5 else ""
    text = f"The trainer waits {percent(at.wait_share)} of the time{ready}. There is nothing to do."
    enough = at.needed_workers(at.rate)
    if enough < at.num_workers:
        text += f" {count_of_workers(enough)} of the {at.num_workers} would do."
    return Verdict("trainer", text)


def _contention(case: Case, starved: float) -> Verdict:
    at = case.at
    own_rate = 1 / max(at.trainer_s - at.trainer_starved_s, 1e-12)
    gain = bounded(min(own_rate, at.core_rate) / at.rate)
    if case.backend == "ray":
        return Verdict(
            "contention",
            f"The trainer hardly waits for batches, but {percent(starved)} of the time it waits "
            "for a core of its machine, which workers or other programs take.",
            "Leave it some: let Ray have fewer cores of that machine (`ray start --num-cpus`), or "
            "place the workers on others (ray_options).",
            gain,
        )
    text = (
        f"The trainer hardly waits for batches, but {percent(starved)} of the time it waits for a "
        f"core: {count_of_workers(at.num_workers)} and the trainer share "
        f"{amount(case.at.cores)} cores."
    )
    fewer = min(at.needed_workers(at.rate), at.num_workers - 1)
    if fewer < 1:
        return Verdict("contention", text, "Give the job more cores, or fewer threads.", gain)
    remedy = f"Take fewer workers: with num_workers={fewer} it would go {times(gain)} as fast."
    return Verdict("contention", text, remedy, gain)


def _serial(case: Case) -> Verdict | None:
    at = case.at
    if at.num_workers:
        return None
    best = min(at.trainer_rate, at.core_rate)
    workers = at.needed_workers(best)
    gain = at.gain(workers)
    handed_over = 1 / max(at.trainer_s, HANDOVER_S) / at.rate
    # The trainer works on meanwhile, and takes what they have made.
    gain = min(workers + 1.0, handed_over, math.inf if gain is None else gain)
    is_storage = at.share(at.read_s) >= READS
    text = (
        f"The trainer spends {percent(at.wait_share)} of the time making batches itself: one takes "
        f"{duration(at.busy_s + at.starved_s)}{of_it(case)}."
    )
    remedy = f"Let workers do it meanwhile: num_workers={workers} would give {throughput(gain)}."
    bottleneck: Bottleneck = "storage" if is_storage else "workers"
    if handed_over < _WORTH:
        remedy = (
            "Workers would not help, as handing a batch over takes about as long as making it: "
            "make larger batches, or whole ones (`get_batch(indices, empty)` in the dataset)."
        )
        bottleneck, gain = "transport", None
    elif gain < 1.05:
        remedy = (
            "All cores are taken by it already, and workers would not help: make samples cheaper "
            "(smaller images, a cheaper transform), or use a machine with more cores."
        )
        bottleneck = "cpu"
    elif (starved := at.share(at.starved_s)) >= _OTHERS_HOLD:
        text += f" For {percent(starved)} of that no core was free: other programs have them."
        gain = min(gain, max(at.cores, 1.0))
        remedy = (
            f"Let workers do it meanwhile: num_workers={workers} would give up to "
            f"{throughput(gain)}, as far as other programs leave them cores."
        )
        if gain < _WORTH:
            bottleneck, remedy = "cpu", "End what takes them, or use a machine with more cores."
    return Verdict(bottleneck, text, remedy, gain)


_TESTS: Final[tuple[Callable[[Case], Verdict | None], ...]] = (_lock, _trainer, _serial)
