# SPDX-License-Identifier: Apache-2.0
"""What keeps workers from making batches as fast as the main process takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.insight.inputs import (
    READS,
    Inputs,
    count_of_workers,
    names_of,
    of_it,
    per_second,
    throughput,
    times,
    waits,
    worth,
)
from penstock.insight.stats import Verdict
from penstock.insight.throughput_model import DELIVERY_S
from penstock.insight.units import amount, duration, percent, size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.insight.stats import SourceTiming

__all__ = ["TESTS"]

_IDLE: Final = 0.25  # share of workers' time: beyond it what they make is enough on average
_MOSTLY: Final = 0.4  # share of a batch's cost that makes a stage the bottleneck
_WORKERS_STARVED: Final = 0.25
_EXCESS: Final = 0.3  # share of all samples' time that slow ones take beyond their due
_COSTLIER: Final = 3.0  # times the other parts
_FEW: Final = 0.1  # more than this share of samples are not "some samples"
_FEWEST_OF_PART: Final = 16  # timed samples
_LACKS_CORES: Final = 0.1  # share of a batch's cost, beyond which it explains late batches
_MOST_PREFETCH: Final = 8  # batches per worker: further ahead costs memory and brings little


def _delivery(inputs: Inputs) -> Verdict | None:
    """Batches that are made sooner than one comes over from a worker."""
    at = inputs.at
    if not inputs.traits.is_local:
        return None
    gain = at.gain(0)
    return Verdict(
        "transport",
        f"{waits(inputs)}: making a batch takes a worker {duration(at.fetch_s + at.collate_s)}, "
        f"and one comes every {duration(1 / at.rate)}, as handing it over takes longer than that.",
        f"Do without workers: num_workers=0 would give {throughput(gain)}. Or make larger "
        "batches, which are handed over more seldom.",
        gain,
    )


def _slow_source(inputs: Inputs) -> Verdict | None:
    of_part, of_samples = _excess_of_part(inputs), _excess_of_samples(inputs)
    excess = max(of_part, of_samples)
    if excess < _EXCESS:
        return None
    at = inputs.at
    saved_s = min(excess, 1.0) * at.fetch_s
    gain = at.gain(at.num_workers, saved_s=saved_s) * at.shortfall
    if of_part >= of_samples:
        worst = inputs.sources[0]
        text = (
            f"{waits(inputs)}: a sample of {worst.name} takes {duration(worst.mean_s)}, one of the "
            f"others {duration(_mean_of(inputs.sources[1:]))}."
        )
    else:
        span = inputs.span
        text = (
            f"{waits(inputs)}: {percent(span.slow / span.timed)} of the samples take "
            f"{percent(min(span.slow_s / span.timed_s, 1.0))} of the time."
            f"{names_of(inputs.slowest)}"
        )
    remedy = f"Look at them: if they cost what the others do, it would go {times(gain)} as fast."
    return Verdict("slow source", text, remedy, gain)


def _excess_of_part(inputs: Inputs) -> float:
    """Return the share of samples' time that the costliest part takes beyond its due."""
    sources = inputs.sources
    total_s = sum(source.samples * source.mean_s for source in sources)
    if len(sources) < 2 or sources[0].samples < _FEWEST_OF_PART or total_s <= 0:
        return 0.0
    others_s = _mean_of(sources[1:])
    if sources[0].mean_s < _COSTLIER * others_s:
        return 0.0
    return sources[0].samples * (sources[0].mean_s - others_s) / total_s


def _excess_of_samples(inputs: Inputs) -> float:
    """Return the same for single samples."""
    span = inputs.span
    others = span.timed - span.slow
    if not 0 < span.slow <= _FEW * span.timed or others < 1 or span.timed_s <= 0:
        return 0.0
    others_s = max(span.timed_s - span.slow_s, 0.0) / others
    return min(max(span.slow_s - span.slow * others_s, 0.0) / span.timed_s, 1.0)


def _mean_of(sources: Sequence[SourceTiming]) -> float:
    num = sum(source.samples for source in sources)
    return sum(source.samples * source.mean_s for source in sources) / num if num else 0.0


def _bursts(inputs: Inputs) -> Verdict | None:
    return _uneven(inputs) if inputs.at.idle_share >= _IDLE else None


def _uneven(inputs: Inputs) -> Verdict | None:
    """Batches of which some take so long that the others wait behind them."""
    at, gain = inputs.at, inputs.at.shortfall
    # Workers that lack cores are late, too, and working ahead does not give them cores.
    if at.is_cheap or at.share(at.worker_starved_s) >= _LACKS_CORES or not worth(gain):
        return None
    now = max(inputs.lookahead // at.num_workers, 1)
    names = names_of(inputs.slowest) if inputs.span.slow else ""
    capacity = (
        f"workers have nothing to do {percent(at.idle_share)} of theirs"
        if at.idle_share >= _IDLE
        else f"{count_of_workers(at.num_workers)} could make {amount(per_second(at))} a second"
    )
    text = (
        f"{waits(inputs)}, and yet {capacity}. That is enough on average, but some batches take "
        f"much longer than others.{names}"
    )
    if inputs.is_auto or now >= _MOST_PREFETCH:
        return Verdict("bursts", text, "Look at what makes them differ: `stats().slowest`.")
    return Verdict(
        "bursts",
        text,
        f"Work further ahead: prefetch_factor={2 * now} instead of {now} would give up to "
        f"{throughput(gain)}.",
        gain,
    )


def _collate(inputs: Inputs) -> Verdict | None:
    at = inputs.at
    if at.share(at.collate_s) < _MOSTLY or at.collate_s < at.send_s:
        return None
    # The batch's bytes are copied once, whichever process makes it.
    gain = at.gain(at.num_workers, saved_s=max(at.collate_s - at.copied_s, 0.0))
    return Verdict(
        "collate",
        f"{waits(inputs)}: making one batch of its samples takes {duration(at.collate_s)} of the "
        f"{duration(at.made_s)} that a batch costs a worker.",
        "Let the dataset make whole batches (`get_batch(indices, alloc)`), or a simpler "
        f"collate_fn, of arrays rather than lists: at best {throughput(gain)}.",
        gain,
    )


def _transport(inputs: Inputs) -> Verdict | None:
    at = inputs.at
    if at.share(at.send_s) < _MOSTLY:
        return None
    gain = at.gain(at.num_workers, saved_s=max(at.send_s - DELIVERY_S, 0.0))
    return Verdict(
        "transport",
        f"{waits(inputs)}: packing and sending a batch of {size(at.num_bytes)} takes "
        f"{duration(at.send_s)} of the {duration(at.made_s)} that it costs a worker.",
        "Send less: arrays instead of lists and objects, and only what the training uses. At best "
        f"{throughput(gain)}.",
        gain,
    )


def _cpu(inputs: Inputs) -> Verdict | None:
    at = inputs.at
    are_taken = at.fills_cores
    if not are_taken and at.share(at.worker_starved_s) < _WORKERS_STARVED:
        return None
    if not inputs.traits.is_local:
        return _cpu_of_cluster(inputs)
    # Half the CPU, and half the queueing for it, which the others keep up.
    gain = at.gain(at.num_workers, saved_s=at.made_s / 2, saved_cpu_s=at.worker_cpu_s / 2)
    who = (
        "" if are_taken else f", and a worker waits {duration(at.worker_starved_s)} a batch for one"
    )
    # With a core for each of them they have none to wait for but what others take.
    if not are_taken and at.num_workers + 1 <= at.cores:
        who += ": other programs seem to take the rest"
    return Verdict(
        "cpu",
        f"{waits(inputs)}: a batch takes {duration(at.worker_cpu_s + at.trainer_cpu_s)} of CPU, "
        f"{duration(at.trainer_cpu_s)} of it the main process's. That keeps "
        f"{amount(at.cores_taken)} of {amount(at.cores)} cores busy{who}. More workers would not "
        "help.",
        "Make samples cheaper (decode smaller images, do less in transforms, pack them resized), "
        f"or use more cores: half the CPU per batch would give {throughput(gain)}.",
        gain,
    )


def _cpu_of_cluster(inputs: Inputs) -> Verdict:
    at = inputs.at
    gain = at.gain(at.num_workers, saved_s=at.worker_starved_s)
    return Verdict(
        "cpu",
        f"{waits(inputs)}: a worker waits {duration(at.worker_starved_s)} of the "
        f"{duration(at.made_s)} that a batch takes for a core of its machine. More "
        "workers there would not help.",
        "Let Ray reserve what workers use, backend=Ray(num_cpus=2) say, keep other programs "
        f"off those machines, or add some: at best {times(gain)} the throughput.",
        gain,
    )


def _storage(inputs: Inputs) -> Verdict | None:
    at = inputs.at
    workers = at.enough_workers
    if at.share(at.read_s) < READS or workers <= at.num_workers:
        return None
    text = (
        f"{waits(inputs)}: a batch takes {duration(at.made_s)} of a worker's time, "
        f"{duration(at.read_s)} of it waiting for reads, which takes no CPU."
    )
    shorter = "pack the data set into one file on a local disk (`penstock pack`)."
    if inputs.is_auto:
        return Verdict("storage", text, f"Shorten the reads: {shorter}")
    gain = at.gain(workers)
    return Verdict(
        "storage",
        text,
        f"Let more reads wait at a time: num_workers={workers} would give up to "
        f"{throughput(gain)}, if the storage serves so many at once. Or shorten them: {shorter}",
        gain,
    )


def _too_few_workers(inputs: Inputs) -> Verdict | None:
    """Workers that lack nothing: they are too few, or too uneven."""
    at = inputs.at
    workers = at.enough_workers
    if workers <= at.num_workers:
        return _uneven(inputs)
    gain = None if inputs.is_auto else at.gain(workers)
    made, verb = per_second(at), "makes" if at.num_workers == 1 else "make"
    return Verdict(
        "workers",
        f"{waits(inputs)}: a batch takes {duration(at.made_s)} of a worker's time"
        f"{of_it(inputs)}, and {count_of_workers(at.num_workers)} {verb} {amount(made)} a second, "
        f"while the main process could take {amount(at.trainer_rate)}.",
        'num_workers="auto" adds workers, within its budgets of CPU and memory.'
        if gain is None
        else f"Add workers: num_workers={workers} would give {throughput(gain)}.",
        gain,
    )


TESTS: Final[tuple[Callable[[Inputs], Verdict | None], ...]] = (
    _delivery,
    _slow_source,
    _bursts,
    _collate,
    _transport,
    _cpu,
    _storage,
    _too_few_workers,
)
