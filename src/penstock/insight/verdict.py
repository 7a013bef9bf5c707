# SPDX-License-Identifier: Apache-2.0
"""Why the main process waits: the figures of some batches, judged.

    waits at epochs' starts? ── enough batches? ── threads and the lock? ── waits at all?
    ── seeding? ── serial? ── what is it that workers lack (`bottlenecks`)?

The order is that of physics: whatever makes the next question senseless is asked before it. A
remedy whose gain is not clearly above the model's error is not named. See docs/design/insight.md.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from penstock.engine.backends import traits_of
from penstock.insight import bottlenecks
from penstock.insight.inputs import (
    READS,
    WAITS,
    Inputs,
    count_of_workers,
    of_it,
    throughput,
    times,
    waits,
    worth,
)
from penstock.insight.means import Means
from penstock.insight.stats import Verdict
from penstock.insight.units import amount, duration, percent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.insight.stats import Bottleneck, SlowSample, SourceTiming, Span

__all__ = ["judge", "not_measured"]

_FEWEST: Final = 8  # batches that are judged
_STARVED: Final = 0.10  # share of the main process's steps without a core that is worth a word
_OTHERS_HOLD: Final = 0.3  # share of making a batch without a core, so that a gain is "up to"
_SPARE: Final = 0.25  # share of the workers' time in which they have nothing to do
_ONE_CORE: Final = (0.8, 1.2)  # cores that threads take together if one lock holds them
_BLOCKED: Final = 0.3  # share of a batch's cost without CPU that may be the lock's
_TRAINER_HOLDS: Final = 0.3  # cores of the main process's own
_HELD: Final = 0.5  # share of looks that found the lock held: then it is the bottleneck
_FREE: Final = 0.1
_SEEDED: Final = 0.4  # share of a batch's cost


def judge(
    span: Span,
    *,
    num_workers: int,
    cores: float,
    num_ready: float,
    lookahead: int,
    sources: Sequence[SourceTiming] = (),
    slowest: Sequence[SlowSample] = (),
    backend: str = "process",
    run: Span | None = None,
    pause_s: float = 0.0,
    lock_share: float | None = None,
    keeps_workers: bool | None = None,
    is_auto: bool = False,
) -> Verdict:
    """Return why the main process waits, what to do, and what that would bring.

    Args:
        span: Sums over the batches to judge, without the main process's pauses.
        num_workers: Workers that made them; 0 if the main process's thread did.
        cores: Cores that main process and workers may use together.
        num_ready: Batches that lay ready when one was asked for, on average.
        lookahead: Batches under way at a time.
        sources: What samples of each part of the dataset cost, if it has parts.
        slowest: Samples that took longest, the longest first; named where they are to blame.
        backend: "serial", "process", "thread" or "ray", whose workers have cores of their own.
        run: Sums over many epochs, by which their starts are judged; None for `span`.
        pause_s: What the main process's rare long steps took.
        lock_share: Share of looks that found the interpreter's lock held; None if nobody looked.
        keeps_workers: Whether workers are kept from epoch to epoch; None if not known.
        is_auto: Whether `num_workers="auto"` chooses workers and prefetch factor.

    Returns:
        A verdict. Below 8 batches, besides the first of each epoch, it is "nothing yet". A remedy
        is named only if the loop waits 5 % of the time or more, and it brings 1.15 x or more.

    Example:
        >>> from penstock.insight.stats import Span
        >>> span = Span(batches=100, seconds=2.0, wait_s=1.2, consumer_s=0.8, trainer_cpu_s=0.4,
        ...             compute_s=3.8, collate_s=0.1, idle_s=0.1, worker_cpu_s=3.8)
        >>> verdict = judge(span, num_workers=2, cores=8, num_ready=0.1, lookahead=4)
        >>> verdict.bottleneck, round(verdict.expected_gain, 1)
        ('workers', 2.3)
        >>> print(verdict.remedy)
        Add workers: num_workers=6 would give about 2.3 x the throughput.
    """
    starts = None if num_workers == 0 else _start(run or span, keeps_workers)
    if starts is not None:
        return starts
    traits = traits_of(backend)
    if not traits.is_local:  # on other machines, as many as there are
        cores = math.inf
    held = (lock_share or 0.0) if traits.shares_interpreter else 0.0
    at = Means.of(span, num_workers, cores, pause_s=pause_s, lock_share=held)
    if at is None or at.batches < _FEWEST:
        return _too_few(span)
    is_seen = lock_share is not None and lock_share <= _FREE
    if traits.shares_interpreter and not is_seen and at.cores_taken <= _ONE_CORE[1]:
        at = replace(at, lock_bound=min(at.cores_taken, 1.0))  # all of their CPU may be in Python
    inputs = Inputs(span, at, num_ready, lookahead, sources, slowest, traits, lock_share, is_auto)
    for test in (*_TESTS, *(bottlenecks.TESTS if num_workers else ())):
        verdict = test(inputs)
        if verdict is not None and (verdict.expected_gain is None or worth(verdict.expected_gain)):
            return verdict
    return _nothing_known(inputs)


def not_measured(span: Span, *, is_measured_now: bool) -> Verdict:
    """Return the verdict on batches of which only the waiting is known.

    Args:
        span: Sums over the batches.
        is_measured_now: Whether those to come are measured.
    """
    if span.batches - span.starts < _FEWEST:
        return _too_few(span)
    share = span.wait_share
    if share < WAITS:
        return Verdict("trainer", f"The main process waits {percent(share)} of the time.")
    if is_measured_now:
        when = 'Why is measured from this question on, or from the start with monitor="full".'
    else:
        when = 'Why is not measured under monitor="light".'
    return Verdict("unknown", f"The main process waits {percent(share)} of the time. {when}")


def _too_few(span: Span) -> Verdict:
    besides = " besides the first of each epoch" if span.starts else ""
    num = max(span.batches - span.starts, 0)
    return Verdict(
        "nothing yet", f"Too few batches to tell: {num}{besides}, and {_FEWEST} are needed."
    )


def _nothing_known(inputs: Inputs) -> Verdict:
    """Return the verdict where no setting is known that would bring clearly more."""
    at = inputs.at
    if not worth(1 / max(1 - at.wait_share, 1e-9)):
        if _lacks_cores(at):
            return _contention(inputs)
        return Verdict(
            "trainer", f"{waits(inputs)}. No setting of the loader would bring as much as 15 %."
        )
    made = f"making a batch takes {duration(at.made_s)}{of_it(inputs)}"
    cheaper = "make samples cheaper (smaller images, a cheaper transform, packed resized)"
    if not worth(at.core_rate / at.rate):
        return Verdict(
            "cpu",
            f"{waits(inputs)}: {made}, and {amount(at.cores_taken)} of {amount(at.cores)} cores "
            "are busy.",
            f"More workers would not help: {cheaper}, or use more cores.",
        )
    if at.is_cheap:
        return Verdict(
            "transport",
            f"{waits(inputs)}: {made}, and a worker would take about as long to hand it over.",
            "Workers would not help: make larger batches, or whole ones (`get_batch(indices, "
            "empty)` in the dataset).",
        )
    return Verdict(
        "workers",
        f"{waits(inputs)}: {made}.",
        f"Another number of workers would bring little: {cheaper}.",
    )


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
        f"The main process waits {percent(first_s / total_s)} of the time for the "
        f"first batches of epochs, {duration(first_s / run.starts)} each time.",
        f"{keep} {longer}".strip(),
        max(total_s / max(total_s - first_s, 1e-9), 1.0),
    )


def _lock(inputs: Inputs) -> Verdict | None:
    """Threads, and Python's lock: known by having looked, or one of two explanations."""
    at = inputs.at
    if not (inputs.traits.shares_interpreter and at.num_workers) or at.cores <= _ONE_CORE[1]:
        return None
    has_lost = at.trainer_blocked_s * at.rate >= _STARVED and at.idle_share < _SPARE
    if at.wait_share < WAITS and not has_lost:
        return None
    if inputs.lock_share is not None and inputs.lock_share >= _HELD:
        return _locked(inputs, inputs.lock_share)
    is_refuted = (
        inputs.lock_share is not None
        and inputs.lock_share <= _FREE
        and at.trainer_cpu_s * at.rate < _TRAINER_HOLDS
    )
    is_one_core = _ONE_CORE[0] <= at.cores_taken <= _ONE_CORE[1]
    if (
        is_refuted
        or not is_one_core
        or not (has_lost or at.share(at.read_s + at.worker_starved_s) >= _BLOCKED)
        or not worth(_as_processes(at)[1])
    ):
        return None
    return Verdict(
        "gil",
        f"{waits(inputs)}: {_threads(inputs)}, {_blocked(inputs)}. Either that is what reads and "
        "the device take, or they wait for Python's lock, which one thread has at a time.",
        'Try backend="process", which tells: if it is faster, it was the lock; if not, take more '
        "threads.",
    )


def _locked(inputs: Inputs, share: float) -> Verdict | None:
    at = inputs.at
    workers, gain = _as_processes(at)
    return Verdict(
        "gil",
        f"{waits(inputs)}, and {percent(share)} of the times that it looked, another thread held "
        f"Python's lock, which one has at a time: {_threads(inputs)}, {_blocked(inputs)}.",
        f'Use processes: backend="process", num_workers={workers} would give up to '
        f"{throughput(gain)}.",
        gain,
    )


def _as_processes(at: Means) -> tuple[int, float]:
    """Return how many processes to take instead of threads, and what they would bring."""
    freed = at.without_lock()
    workers = freed.enough_workers
    return workers, at.grown(freed.rate_with(workers))


def _threads(inputs: Inputs) -> str:
    at = inputs.at
    who = "1 thread" if at.num_workers == 1 else f"{at.num_workers} threads"
    return f"{who} and the main process take {amount(at.cores_taken)} of {amount(at.cores)} cores"


def _blocked(inputs: Inputs) -> str:
    at = inputs.at
    blocked_s = at.read_s + at.worker_starved_s
    own_s = max(at.trainer_s - at.trainer_cpu_s, 0.0)
    return (
        f"and pass {duration(blocked_s)} of a batch's {duration(at.made_s)} and {duration(own_s)} "
        f"of a step's {duration(at.consumer_s)} without CPU"
    )


def _trainer(inputs: Inputs) -> Verdict | None:
    at = inputs.at
    if at.wait_share >= WAITS:
        return None
    if _lacks_cores(at):
        return _contention(inputs)
    ready = f": {amount(inputs.num_ready)} batches lie ready" if inputs.num_ready >= 0.5 else ""
    text = (
        f"The main process waits {percent(at.wait_share)} of the time{ready}. "
        "There is nothing to do."
    )
    enough = at.enough_workers
    if enough < at.num_workers:
        text += f" {count_of_workers(enough)} of the {at.num_workers} would do."
    return Verdict("trainer", text)


def _lacks_cores(at: Means) -> bool:
    """Return whether workers take cores from the main process, however long it waits besides."""
    return bool(at.num_workers) and at.trainer_starved_s >= _STARVED * at.consumer_s > 0


def _contention(inputs: Inputs) -> Verdict:
    at = inputs.at
    starved = percent(at.trainer_starved_s * at.rate)
    if at.wait_share < WAITS:
        both = (
            f"The main process hardly waits for batches, but {starved} of the time it waits for a "
            "core"
        )
    else:
        both = f"{waits(inputs)} for batches, and for {starved} of it for a core"
    if not inputs.traits.is_local:
        return Verdict(
            "contention",
            f"{both} of its machine, which workers or other programs take.",
            "Leave it some: let Ray have fewer cores of that machine (`ray start --num-cpus`), or "
            "place the workers on others (Ray(resources=...)).",
        )
    workers = count_of_workers(at.num_workers)
    text = f"{both}: {workers} and the main process share {amount(at.cores)} cores."
    fewer = min(at.enough_workers, at.num_workers - 1)
    gain = at.gain(fewer) if fewer else 1.0
    if not worth(gain):
        return Verdict("contention", text, "Give the job more cores, or make samples cheaper.")
    remedy = f"Take fewer workers: with num_workers={fewer} it would go {times(gain)} as fast."
    return Verdict("contention", text, remedy, gain)


def _seeding(inputs: Inputs) -> Verdict | None:
    """Samples that cost less than seeding the global generators before each of them."""
    at = inputs.at
    if at.share(at.seed_s) < _SEEDED or at.num_samples <= 1:
        return None
    gain = at.gain(at.num_workers, saved_s=at.seed_s * (1 - 1 / at.num_samples))
    return Verdict(
        "seeding",
        f"{waits(inputs)}: seeding `random`, numpy and torch for each sample takes "
        f"{duration(at.seed_s)} of the {duration(at.made_s)} that a batch costs, "
        f"{duration(at.seed_s / at.num_samples)} a sample.",
        "Let the dataset read the samples of a batch at once (`__getitems__(indices)`, or "
        "`get_batch(indices, alloc)`), which are seeded once, and draw from `sample_rng(k)`: "
        f"{throughput(gain)}.",
        gain,
    )


def _serial(inputs: Inputs) -> Verdict | None:
    at = inputs.at
    if at.num_workers:
        return None
    workers = at.enough_workers
    gain = at.gain(workers)
    text = (
        f"The main process spends {percent(at.wait_share)} of the time making batches itself: one "
        "takes "
        f"{duration(at.made_s)}{of_it(inputs)}."
    )
    remedy = f"Let workers do it meanwhile: num_workers={workers} would give {throughput(gain)}."
    bottleneck: Bottleneck = "storage" if at.share(at.read_s) >= READS else "workers"
    if (starved := at.share(at.worker_starved_s)) >= _OTHERS_HOLD:
        text += f" For {percent(starved)} of that no core was free: other programs have them."
        gain = min(gain, max(at.cores, 1.0))
        remedy = (
            f"Let workers do it meanwhile: num_workers={workers} would give up to "
            f"{throughput(gain)}, as far as other programs leave them cores."
        )
        if not worth(gain):
            remedy = "End what takes them, or use a machine with more cores."
            return Verdict("cpu", text, remedy)
    return Verdict(bottleneck, text, remedy, gain)


_TESTS: Final[tuple[Callable[[Inputs], Verdict | None], ...]] = (_lock, _trainer, _seeding, _serial)
