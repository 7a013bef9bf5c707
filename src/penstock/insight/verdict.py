# SPDX-License-Identifier: Apache-2.0
"""Why the trainer waits: the figures of some batches, judged.

    enough batches? ── waits at epochs' starts? ── waits at all? ── serial? ── threads and the lock?
    ── workers idle all the same? ── a slow source? ── collate? ── transport? ── cores all taken?
    ── reads? ── so it is too few workers

The order is that of physics: whatever makes the next question senseless is asked before it. See
docs/design/insight.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.insight.figures import Figures, amount, duration, percent, size
from penstock.insight.stats import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.insight.stats import Bottleneck, SlowSample, Source, Span

__all__ = ["judge"]

_FEWEST: Final = 8  # batches that are judged
_WAITS: Final = 0.05  # share of the time below which nobody would notice a remedy
_STARVED: Final = 0.10  # share of the trainer's time without a core that is worth a word
_IDLE: Final = 0.25  # share of workers' time: beyond it the supply is enough on average
_MOSTLY: Final = 0.4  # share of a batch's cost that makes a stage the bottleneck
_READS: Final = 0.5
_TAKEN: Final = 0.87  # share of all cores: the system and other programs want some, too
_WORKERS_STARVED: Final = 0.25
_EXCESS: Final = 0.3  # share of all samples' time that slow ones take beyond their due
_COSTLIER: Final = 3.0  # times the other parts
_FEW: Final = 0.1  # more than this share of samples are not "some samples"
_LOCKED: Final = (0.8, 1.2)  # cores that threads take together if one lock holds them
_FEWEST_OF_PART: Final = 16  # timed samples


@dataclass(frozen=True, slots=True)
class _Case:
    """All that is known."""

    span: Span
    at: Figures
    num_ready: float
    lookahead: int
    sources: Sequence[Source]
    slowest: Sequence[SlowSample]
    backend: str


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
) -> Verdict:
    """Return why the trainer waits, what to do, and what that would bring.

    Args:
        span: Sums over the batches to judge.
        num_workers: Workers that made them; 0 if the trainer's thread did.
        cores: Cores that trainer and workers may use together.
        num_ready: Batches that lay ready when one was asked for, on average.
        lookahead: Batches under way at a time.
        sources: What samples of each part of the dataset cost, if it has parts.
        slowest: Samples that took longest, the longest first; named where they are to blame.
        backend: "serial", "process" or "thread".

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
    at = Figures.of(span, num_workers, cores)
    if at is None or at.batches < _FEWEST:
        return Verdict(
            "nothing yet", f"Too few batches to tell: {span.batches}, and {_FEWEST} are needed."
        )
    case = _Case(span, at, num_ready, lookahead, sources, slowest, backend)
    for test in _TESTS:
        if (verdict := test(case)) is not None:
            return verdict
    return _workers(case)


def _start(case: _Case) -> Verdict | None:
    span, total_s = case.span, case.span.wait_s + case.span.consumer_s
    first_s = min(span.first_wait_s, span.wait_s)
    few = span.starts < 2 or case.at.num_workers == 0
    if few or first_s / total_s < _WAITS or first_s < span.wait_s - first_s:
        return None
    each_s = first_s / span.starts
    return Verdict(
        "start",
        f"The trainer waits {percent(first_s / total_s)} of the time for the "
        f"first batch of an epoch, {duration(each_s)} each time.",
        "Keep the workers from epoch to epoch: persistent_workers=True. If they are kept already, "
        "it is the time that one batch takes: make longer epochs, or cheaper batches.",
        _bounded(total_s / max(total_s - first_s, 1e-9)),
    )


def _trainer(case: _Case) -> Verdict | None:
    at = case.at
    if at.wait_share >= _WAITS:
        return None
    starved = at.trainer_starved_s * at.rate
    if at.num_workers and starved >= _STARVED:
        return _contention(case, starved)
    ready = f": {amount(case.num_ready)} batches lie ready" if case.num_ready >= 0.5 else ""
    text = f"The trainer waits {percent(at.wait_share)} of the time{ready}. There is nothing to do."
    enough = at.needed_workers(at.rate)
    if enough < at.num_workers:
        text += f" {_workers_count(enough)} of the {at.num_workers} would do."
    return Verdict("trainer", text)


def _contention(case: _Case, starved: float) -> Verdict:
    at = case.at
    own_rate = 1 / max(at.trainer_s - at.trainer_starved_s, 1e-12)
    gain = _bounded(min(own_rate, at.core_rate) / at.rate)
    text = (
        f"The trainer hardly waits for batches, but {percent(starved)} of the time it waits for a "
        f"core: {_workers_count(at.num_workers)} and the trainer share {amount(case.at.cores)}."
    )
    fewer = min(at.needed_workers(at.rate), at.num_workers - 1)
    if fewer < 1:
        return Verdict("contention", text, "Give the job more cores, or fewer threads.", gain)
    remedy = f"Take fewer workers: with num_workers={fewer} it would go {_times(gain)} as fast."
    return Verdict("contention", text, remedy, gain)


def _serial(case: _Case) -> Verdict | None:
    at = case.at
    if at.num_workers:
        return None
    best = min(at.trainer_rate, at.core_rate)
    workers = at.needed_workers(best)
    gain = at.gain(workers)
    gain = None if gain is None else min(gain, workers + 1.0)  # the trainer works on meanwhile
    is_storage = at.share(at.read_s) >= _READS
    text = (
        f"The trainer spends {percent(at.wait_share)} of the time making batches itself: one takes "
        f"{duration(at.busy_s + at.starved_s)}{_of_it(case)}."
    )
    remedy = f"Let workers do it meanwhile: num_workers={workers} would give {_throughput(gain)}."
    bottleneck: Bottleneck = "storage" if is_storage else "workers"
    if gain is not None and gain < 1.05:
        remedy = (
            "All cores are taken by it already, and workers would not help: make samples cheaper "
            "(smaller images, a cheaper transform), or use a machine with more cores."
        )
        bottleneck = "cpu"
    return Verdict(bottleneck, text, remedy, gain)


def _gil(case: _Case) -> Verdict | None:
    at = case.at
    is_locked = _LOCKED[0] <= at.cores_taken <= _LOCKED[1] < at.cores
    if case.backend != "thread" or at.num_workers < 2 or not is_locked:
        return None
    if at.share(at.read_s) < _EXCESS:
        return None
    gain = at.gain(at.num_workers, saved_s=at.read_s)
    return Verdict(
        "gil",
        f"{_waits(case)}: {at.num_workers} threads and the trainer take {amount(at.cores_taken)} "
        f"of {amount(at.cores)} cores together, and {duration(at.read_s)} of a batch's "
        f"{duration(at.busy_s + at.starved_s)} pass without CPU. They seem to wait for the "
        "interpreter's lock, which Python code holds.",
        f'Use processes: backend="process" would give {_throughput(gain)}, if it is the lock.',
        gain,
    )


def _bursts(case: _Case) -> Verdict | None:
    return _uneven(case) if case.at.idle_share >= _IDLE else None


def _uneven(case: _Case) -> Verdict:
    at = case.at
    now = max(case.lookahead // at.num_workers, 1)
    gain = at.gain(at.num_workers)
    names = _names(case.slowest) if case.span.slow else ""
    supply = (
        f"workers have nothing to do {percent(at.idle_share)} of theirs"
        if at.idle_share >= _IDLE
        else f"{_workers_count(at.num_workers)} could make {amount(_per_second(at))} a second"
    )
    return Verdict(
        "bursts",
        f"{_waits(case)}, and yet {supply}. That is enough on average, but some batches take much "
        f"longer than others.{names}",
        f"Work further ahead: prefetch_factor={2 * now} instead of {now}, or more, would give up "
        f"to {_times(gain)} the throughput.",
        gain,
    )


def _slow_source(case: _Case) -> Verdict | None:
    of_part, of_samples = _excess_of_part(case), _excess_of_samples(case)
    excess = max(of_part, of_samples)
    if excess < _EXCESS:
        return None
    at = case.at
    saved_s = min(excess, 1.0) * at.fetch_s
    gain = at.gain(at.num_workers, saved_s=saved_s, saved_cpu_s=at.cpu_s * at.share(saved_s))
    if of_part >= of_samples:
        worst = case.sources[0]
        text = (
            f"{_waits(case)}: a sample of {worst.name} takes {duration(worst.mean_s)}, one of the "
            f"others {duration(_mean_of(case.sources[1:]))}."
        )
    else:
        span = case.span
        text = (
            f"{_waits(case)}: {percent(span.slow / span.timed)} of the samples take "
            f"{percent(min(span.slow_s / span.timed_s, 1.0))} of the time.{_names(case.slowest)}"
        )
    remedy = f"Look at them: if they cost what the others do, it would go {_times(gain)} as fast."
    return Verdict("slow source", text, remedy, gain)


def _excess_of_part(case: _Case) -> float:
    """Return the share of samples' time that the costliest part takes beyond its due."""
    sources = case.sources
    total_s = sum(source.samples * source.mean_s for source in sources)
    if len(sources) < 2 or sources[0].samples < _FEWEST_OF_PART or total_s <= 0:
        return 0.0
    others_s = _mean_of(sources[1:])
    if sources[0].mean_s < _COSTLIER * others_s:
        return 0.0
    return sources[0].samples * (sources[0].mean_s - others_s) / total_s


def _excess_of_samples(case: _Case) -> float:
    """Return the same for single samples."""
    span = case.span
    others = span.timed - span.slow
    if not 0 < span.slow <= _FEW * span.timed or others < 1 or span.timed_s <= 0:
        return 0.0
    others_s = max(span.timed_s - span.slow_s, 0.0) / others
    return min(max(span.slow_s - span.slow * others_s, 0.0) / span.timed_s, 1.0)


def _mean_of(sources: Sequence[Source]) -> float:
    num = sum(source.samples for source in sources)
    return sum(source.samples * source.mean_s for source in sources) / num if num else 0.0


def _collate(case: _Case) -> Verdict | None:
    at = case.at
    if at.share(at.collate_s) < _MOSTLY or at.collate_s < at.send_s:
        return None
    gain = at.gain(at.num_workers, saved_s=at.collate_s, saved_cpu_s=at.collate_s)
    return Verdict(
        "collate",
        f"{_waits(case)}: making one batch of its samples takes {duration(at.collate_s)} of the "
        f"{duration(at.busy_s + at.starved_s)} that a batch costs a worker.",
        "Let the dataset make whole batches (`get_batch(indices, empty)`), or a simpler "
        f"collate_fn, of arrays rather than lists: at best {_times(gain)} the throughput.",
        gain,
    )


def _transport(case: _Case) -> Verdict | None:
    at = case.at
    if at.share(at.send_s) < _MOSTLY:
        return None
    gain = at.gain(at.num_workers, saved_s=at.send_s, saved_cpu_s=at.send_s)
    return Verdict(
        "transport",
        f"{_waits(case)}: packing and sending a batch of {size(at.num_bytes)} takes "
        f"{duration(at.send_s)} of the {duration(at.busy_s + at.starved_s)} that it costs a "
        "worker.",
        "Send less: uint8 instead of float32, converted on the device; arrays instead of lists "
        f"and objects; drop batches that are not needed. At best {_times(gain)} the throughput.",
        gain,
    )


def _cpu(case: _Case) -> Verdict | None:
    at = case.at
    are_taken = at.cores_taken >= _TAKEN * at.cores
    if not are_taken and at.share(at.starved_s) < _WORKERS_STARVED:
        return None
    # Half the CPU, and half the queueing for it, which the others keep up.
    saved_s = (at.cpu_s - at.starved_s) / 2
    gain = at.gain(at.num_workers, saved_s=saved_s, saved_cpu_s=at.cpu_s / 2)
    who = "" if are_taken else ", and other programs seem to take the rest"
    return Verdict(
        "cpu",
        f"{_waits(case)}: a batch takes {duration(at.cpu_s + at.trainer_cpu_s)} of CPU, "
        f"{duration(at.trainer_cpu_s)} of it the trainer's. That keeps "
        f"{amount(at.cores_taken)} of {amount(at.cores)} cores busy{who}, so more workers would "
        "not help.",
        "Make samples cheaper (decode smaller images, do less in transforms, pack them resized), "
        f"or use more cores: half the CPU per batch would give {_throughput(gain)}.",
        gain,
    )


def _storage(case: _Case) -> Verdict | None:
    at = case.at
    workers = _wanted(at)
    if at.share(at.read_s) < _READS or workers <= at.num_workers:
        return None
    gain = at.gain(workers)
    return Verdict(
        "storage",
        f"{_waits(case)}: a batch takes {duration(at.busy_s + at.starved_s)} of a worker's time, "
        f"{duration(at.read_s)} of it waiting for reads, which takes no CPU.",
        f"Let more reads wait at a time: num_workers={workers} would give {_throughput(gain)}. Or "
        "shorten them: pack the data set into one file on a local disk (`penstock pack`).",
        gain,
    )


def _workers(case: _Case) -> Verdict:
    at = case.at
    workers = _wanted(at)
    if workers <= at.num_workers:
        return _uneven(case)
    gain = at.gain(workers)
    made, verb = _per_second(at), "makes" if at.num_workers == 1 else "make"
    return Verdict(
        "workers",
        f"{_waits(case)}: a batch takes {duration(at.busy_s + at.starved_s)} of a worker's time"
        f"{_of_it(case)}, and {_workers_count(at.num_workers)} {verb} {amount(made)} a second, "
        f"while the trainer could take {amount(at.trainer_rate)}.",
        f"Add workers: num_workers={workers} would give {_throughput(gain)}.",
        gain,
    )


def _wanted(at: Figures) -> int:
    return at.needed_workers(min(at.trainer_rate, at.core_rate))


def _per_second(at: Figures) -> float:
    whole_s = at.busy_s + at.starved_s
    return at.num_workers / whole_s if whole_s > 0 else math.inf


def _waits(case: _Case) -> str:
    return f"The trainer waits {percent(case.at.wait_share)} of the time"


def _of_it(case: _Case) -> str:
    at = case.at
    if at.share(at.read_s) >= _READS:
        return f", {duration(at.read_s)} of it waiting for reads"
    return f", {duration(at.cpu_s)} of it CPU"


def _names(slowest: Sequence[SlowSample]) -> str:
    """Return a sentence with the slowest samples; empty if there are none with a key."""
    known = [s for s in slowest if s.name is not None or s.index is not None][:3]
    if not known:
        return ""
    listed = ", ".join(
        f"{s.name or f'sample {s.index!r:.40}'} ({duration(s.seconds)})" for s in known
    )
    return f" The slowest: {listed}."


def _workers_count(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


def _times(gain: float | None) -> str:
    return "several times" if gain is None else f"about {gain:.1f} x"


def _throughput(gain: float | None) -> str:
    return f"{_times(gain)} the throughput"


def _bounded(gain: float) -> float | None:
    return max(gain, 1.0) if math.isfinite(gain) else None


_TESTS: Final[tuple[Callable[[_Case], Verdict | None], ...]] = (
    _start,
    _trainer,
    _serial,
    _gil,
    _bursts,
    _slow_source,
    _collate,
    _transport,
    _cpu,
    _storage,
)
