# SPDX-License-Identifier: Apache-2.0
"""Why the main process waits: the figures of some batches, judged by a table of rules.

`RULES` is that table. The first rule that holds, and whose gain is clearly above the model's error
or not known, is the verdict. A new verdict is an entry there: its name, when it holds, what it says
and its remedy. The order is that of physics: what makes another question senseless comes before it.
See docs/design/insight.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.engine.backends import traits_of
from penstock.insight.model import DELIVERY_S, Means
from penstock.insight.stats import Verdict
from penstock.lines import amount, counted, duration, format_bytes, percent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.insight.stats import SlowSample, Span

_FEWEST: Final = 8  # batches that are judged
_WAITS: Final = 0.05  # share of the time below which a remedy would not be noticed
_WORTH: Final = 1.15  # a gain below it may be an error of the model
_STARVED: Final = 0.10  # share of the main process's steps without a core that is worth a word
_ONE_CORE: Final = (0.7, 1.2)  # cores that threads take together if one lock holds them
_READS: Final = 0.5  # share of a batch's cost
_MOSTLY: Final = 0.4  # share of a batch's cost that makes a stage the bottleneck
_KEEP_FAR: Final = (
    'data in object storage, local_cache="/fast/disk:60GB" keeps what was read and reads ahead'
)
_KEEP_MORE: Final = "data in object storage, a larger local_cache= fetches less"
_IDLE: Final = 0.25  # share of workers' time: beyond it what they make is enough on average
_WORKERS_STARVED: Final = 0.25
_LACKS_CORES: Final = 0.1  # share of a batch's cost, beyond which it explains late batches
_EXCESS: Final = 0.3  # share of all samples' time that slow ones take beyond their due
_FEW: Final = 0.1  # more than this share of samples are not "some samples"
_MOST_PREFETCH: Final = 8  # batches per worker: further ahead costs memory and brings little
_COPIED_PER_S: Final = 10e9  # bytes: the least that collating a batch takes


@dataclass(frozen=True)
class Inputs:
    """What a verdict is judged by.

    Attributes:
        span: Sums over the batches to judge, without the main process's pauses.
        num_workers: Workers that made them; 0 if the main process's thread did.
        num_ready: Batches that lay ready when one was asked for, on average.
        lookahead: Batches under way at a time.
        run: Sums over many epochs, by which their starts are judged; None for `span`.
        pause_s: What the main process's rare long steps took.
        is_measured: Whether the batches were measured; else only the waiting is known.
        has_local_cache: Whether the dataset keeps what it reads from far away.
    """

    span: Span
    num_workers: int
    cores: float
    num_ready: float
    lookahead: int
    slowest: Sequence[SlowSample] = ()
    backend: str = "process"
    run: Span | None = None
    pause_s: float = 0.0
    keeps_workers: bool = False
    is_auto: bool = False
    is_measured: bool = True
    has_local_cache: bool = False

    @property
    def for_far_data(self) -> str:
        """What helps data that are far away."""
        return _KEEP_MORE if self.has_local_cache else _KEEP_FAR

    @cached_property
    def at(self) -> Means:
        """Mean costs per batch."""
        cores = self.cores if self.is_local else math.inf  # on others as many as there are
        at = Means.of(self.span, self.num_workers, cores, self.pause_s)
        if self.are_threads and at.cores_taken <= _ONE_CORE[1]:
            # All of their CPU may be in Python, of which one thread at a time runs.
            at = replace(at, lock_share=min(at.cores_taken, 1.0))
        return at

    @cached_property
    def are_threads(self) -> bool:
        """Whether workers share the interpreter's lock with the main process."""
        return self.num_workers > 0 and traits_of(self.backend).shares_interpreter

    def share(self, what: str) -> float:
        """Return what share of a worker's time for a batch something takes, as "read", 0 to 1."""
        return self.at.share(getattr(self.at, f"{what}_s"))

    @cached_property
    def is_local(self) -> bool:
        """Whether workers are on this machine."""
        return traits_of(self.backend).is_local

    @cached_property
    def lacks_cores(self) -> bool:
        """Whether workers take cores from the main process, however long it waits besides."""
        at = self.at
        may_take_them = at.num_workers > 0 and self.is_local
        return may_take_them and at.trainer_starved_s >= _STARVED * at.consumer_s > 0

    @cached_property
    def is_uneven(self) -> bool:
        """Whether some batches take so long that the others wait behind them."""
        # Workers that lack cores are late, too, and working ahead does not give them cores.
        if not self.num_workers or self.at.is_cheap or self.share("worker_starved") >= _LACKS_CORES:
            return False
        return self.at.shortfall >= _WORTH

    @property
    def are_too_few(self) -> bool:
        """Whether there are workers, and fewer than are enough."""
        return 0 < self.num_workers < self.at.enough_workers

    @cached_property
    def excess(self) -> float:
        """Share of samples' time that slow ones take beyond their due."""
        span = self.span
        others = span.timed - span.slow
        if not 0 < span.slow <= _FEW * span.timed or others < 1 or span.timed_s <= 0:
            return 0.0
        others_s = max(span.timed_s - span.slow_s, 0.0) / others
        return min(max(span.slow_s - span.slow * others_s, 0.0) / span.timed_s, 1.0)

    @property
    def waits(self) -> str:
        """How long the main process waits, as the beginning of a sentence."""
        return f"The main process waits {percent(self.at.wait_share)} of the time"

    @property
    def made(self) -> str:
        """What a batch costs, and what most of that is, as a part of a sentence."""
        at = self.at
        most = f"{duration(at.worker_cpu_s)} of it CPU"
        if self.share("read") >= _READS:
            most = f"{duration(at.read_s)} of it waiting for reads"
        return f"{duration(at.made_s)}, {most}"

    @property
    def names(self) -> str:
        """The slowest samples as a sentence; empty if none has a key."""
        known = [s for s in self.slowest if s.name is not None or s.index is not None][:3]
        listed = ", ".join(
            f"{s.name or f'sample {s.index!r:.40}'} ({duration(s.seconds)})" for s in known
        )
        return f" The slowest: {listed}." if known else ""

    @property
    def per_second(self) -> str:
        """How many batches the workers could make in a second."""
        made = self.at.num_workers / max(self.at.made_s, 1e-9)
        return f"{counted(self.at.num_workers, 'worker')} could make {amount(made)} a second"


class Advice(NamedTuple):
    """What a verdict says: text, remedy, and the gain that follows from the figures, if known."""

    text: str
    remedy: str = ""
    gain: float | None = None


class Rule(NamedTuple):
    """A verdict: its name, whether it holds, and what it says where it does.

    One whose gain is known, and below `least_gain`, is passed over.
    """

    bottleneck: str
    holds: Callable[[Inputs], bool]
    says: Callable[[Inputs], Advice]
    least_gain: float = _WORTH


def judge(inputs: Inputs) -> Verdict:
    """Return why the main process waits, what to do, and what that would bring.

    Returns:
        A verdict. A remedy is named only if it brings 1.15 x or more.

    Example:
        >>> from penstock.insight.stats import Span
        >>> span = Span(batches=100, seconds=2.0, wait_s=1.2, consumer_s=0.8, trainer_cpu_s=0.4,
        ...             compute_s=3.8, collate_s=0.1, idle_s=0.1, worker_cpu_s=3.8)
        >>> verdict = judge(Inputs(span, num_workers=2, cores=8, num_ready=0.1, lookahead=4))
        >>> verdict.bottleneck, round(verdict.expected_gain, 1)
        ('workers', 2.3)
        >>> print(verdict.remedy)
        Add workers: num_workers=6 would give about 2.3 x the throughput.
    """
    for rule in RULES:
        if rule.holds(inputs):
            advice = rule.says(inputs)
            if advice.gain is None or advice.gain >= rule.least_gain:
                return Verdict(rule.bottleneck, *advice)
    raise AssertionError("the last rule always holds")


def _times(gain: float) -> str:
    return f"about {gain:.1f} x"


def _first_waits(inputs: Inputs) -> tuple[Span, float, float]:
    """Return the run, its seconds, and those for which the first batches of epochs were waited."""
    run = inputs.run or inputs.span
    total_s = max(run.wait_s + run.consumer_s, run.seconds, 1e-9)
    return run, total_s, min(run.first_wait_s, run.wait_s)


def _starts_late(inputs: Inputs) -> bool:
    run, total_s, first_s = _first_waits(inputs)
    if not inputs.is_measured or not inputs.num_workers or run.starts < 2 or run.batches < _FEWEST:
        return False
    return first_s / total_s >= _WAITS and first_s >= run.wait_s - first_s


def _start(inputs: Inputs) -> Advice:
    run, total_s, first_s = _first_waits(inputs)
    return Advice(
        f"The main process waits {percent(first_s / total_s)} of the time for the first batches of "
        f"epochs, {duration(first_s / run.starts)} each time.",
        "Make longer epochs, or cheaper batches: the workers are kept already."
        if inputs.keeps_workers
        else "Keep the workers from epoch to epoch: persistent_workers=True.",
        max(total_s / max(total_s - first_s, 1e-9), 1.0),
    )


def _too_few(inputs: Inputs) -> Advice:
    span = inputs.span
    besides = " besides the first of each epoch" if span.starts else ""
    num = max(span.batches - span.starts, 0)
    return Advice(f"Too few batches to tell: {num}{besides}, and {_FEWEST} are needed.")


def _unmeasured(inputs: Inputs) -> Advice:
    share = inputs.span.wait_share
    why = ' monitor="full" measures why; monitor="auto" does from the first call of stats() on.'
    text = f"The main process waits {percent(share)} of the time."
    return Advice(text + why if share >= _WAITS else text)


def _may_be_locked(inputs: Inputs) -> bool:
    """Whether the threads take about one core together, as if Python's lock held them up."""
    at = inputs.at
    if not inputs.are_threads or at.cores <= _ONE_CORE[1] or at.wait_share < _WAITS:
        return False
    # Who holds the lock, and has no core as other programs take them, keeps it.
    held = at.cores_taken + at.rate * (at.worker_starved_s + at.trainer_starved_s)
    return held >= _ONE_CORE[0] and at.cores_taken <= _ONE_CORE[1]


def _locked(inputs: Inputs) -> Advice:
    at, freed = inputs.at, inputs.at.without_lock()
    workers = freed.enough_workers
    gain = at.gain_to(freed, workers)
    return Advice(
        f"{inputs.waits}: {counted(at.num_workers, 'thread')} and the main process take "
        f"{amount(at.cores_taken)} of {amount(at.cores)} cores, and pass "
        f"{duration(at.read_s + at.worker_starved_s)} of a batch's {duration(at.made_s)} without "
        "CPU. They may wait for Python's lock, which one thread has at a time.",
        f'Try processes: if it was the lock, backend="process", num_workers={workers} would give '
        f"up to {_times(gain)} the throughput; if not, take more threads.",
        gain,
    )


def _nothing_to_do(inputs: Inputs) -> Advice:
    at, enough = inputs.at, inputs.at.enough_workers
    ready = f": {amount(inputs.num_ready)} batches lie ready" if inputs.num_ready >= 0.5 else ""
    text = f"{inputs.waits}{ready}. There is nothing to do."
    if enough < at.num_workers:
        text += f" {counted(enough, 'worker')} of the {at.num_workers} would do."
    return Advice(text)


def _contention(inputs: Inputs) -> Advice:
    at = inputs.at
    starved = percent(at.trainer_starved_s * at.rate)
    both = f"{inputs.waits} for batches, and for {starved} of it for a core"
    if at.worker_cpu_s < at.trainer_starved_s / 2:  # they cannot take more than they use
        return Advice(
            f"{both}. Workers are not the cause: a batch takes {duration(at.worker_cpu_s)} of "
            "their CPU. Other programs, or threads of the loop itself, take the "
            f"{amount(at.cores)} cores.",
            "Give the job more cores, or the loop fewer threads (torch.set_num_threads).",
        )
    workers = counted(at.num_workers, "worker")
    text = f"{both}: {workers} and the main process share {amount(at.cores)} cores."
    fewer = min(at.enough_workers, at.num_workers - 1)
    gain = at.gain(fewer) if fewer else 1.0
    if gain < _WORTH:
        return Advice(text, "Give the job more cores, or make samples cheaper.")
    remedy = f"Take fewer workers: with num_workers={fewer} it would go {_times(gain)} as fast."
    return Advice(text, remedy, gain)


def _seeding(inputs: Inputs) -> Advice:
    at = inputs.at
    gain = at.gain(at.num_workers, saved_s=at.seed_s * (1 - 1 / at.num_samples))
    return Advice(
        f"{inputs.waits}: seeding `random`, numpy and torch for each sample takes "
        f"{duration(at.seed_s)} of the {duration(at.made_s)} that a batch costs, "
        f"{duration(at.seed_s / at.num_samples)} a sample.",
        "Let the dataset read the samples of a batch at once (`__getitems__(indices)`, or "
        "`get_batch(indices, alloc)`), which are seeded once, and draw from `sample_rng(k)`: "
        f"{_times(gain)} the throughput.",
        gain,
    )


def _serial(inputs: Inputs) -> Advice:
    workers = inputs.at.enough_workers
    gain = inputs.at.gain(workers)
    reads = f" Of {inputs.for_far_data}." if inputs.share("read") >= _READS else ""
    return Advice(
        f"The main process spends {percent(inputs.at.wait_share)} of the time making batches "
        f"itself: one takes {inputs.made}.",
        f"Let workers do it meanwhile: num_workers={workers} would give {_times(gain)} the "
        f"throughput.{reads}",
        gain,
    )


def _delivery(inputs: Inputs) -> Advice:
    at, gain = inputs.at, inputs.at.gain(0)
    return Advice(
        f"{inputs.waits}: making a batch takes a worker {duration(at.fetch_s + at.collate_s)}, and "
        f"one comes every {duration(1 / at.rate)}, as handing it over takes longer than that.",
        f"Do without workers: num_workers=0 would give {_times(gain)} the throughput. Or make "
        "larger batches, which are handed over more seldom.",
        gain,
    )


def _slow_source(inputs: Inputs) -> Advice:
    at, span = inputs.at, inputs.span
    gain = at.gain(at.num_workers, saved_s=inputs.excess * at.fetch_s) * at.shortfall
    return Advice(
        f"{inputs.waits}: {percent(span.slow / span.timed)} of the samples take "
        f"{percent(min(span.slow_s / span.timed_s, 1.0))} of the time.{inputs.names}",
        f"Look at them: if they cost what the others do, it would go {_times(gain)} as fast.",
        gain,
    )


def _bursts(inputs: Inputs) -> Advice:
    at, gain = inputs.at, inputs.at.shortfall
    now = max(inputs.lookahead // at.num_workers, 1)
    names = inputs.names if inputs.span.slow else ""
    text = (
        f"{inputs.waits}, and yet {inputs.per_second}. That is enough on average, but some batches "
        f"take much longer than others.{names}"
    )
    if now >= _MOST_PREFETCH:
        return Advice(text, "Look at what makes them differ: `stats().slowest`.")
    return Advice(
        text,
        f"Work further ahead: prefetch_factor={2 * now} instead of {now} would give up to "
        f"{_times(gain)} the throughput.",
        gain,
    )


def _collate(inputs: Inputs) -> Advice:
    at = inputs.at
    # The batch's bytes are copied once, whichever process makes it.
    gain = at.gain(at.num_workers, saved_s=max(at.collate_s - at.num_bytes / _COPIED_PER_S, 0.0))
    return Advice(
        f"{inputs.waits}: making one batch of its samples takes {duration(at.collate_s)} of the "
        f"{duration(at.made_s)} that a batch costs a worker.",
        "Let the dataset make whole batches (`get_batch(indices, alloc)`), or a simpler "
        f"collate_fn, of arrays rather than lists: at best {_times(gain)} the throughput.",
        gain,
    )


def _transport(inputs: Inputs) -> Advice:
    at = inputs.at
    gain = at.gain(at.num_workers, saved_s=max(at.send_s - DELIVERY_S, 0.0))
    return Advice(
        f"{inputs.waits}: packing and sending a batch of {format_bytes(round(at.num_bytes))} takes "
        f"{duration(at.send_s)} of the {duration(at.made_s)} that it costs a worker.",
        "Send less: arrays instead of lists and objects, and only what the training uses. At best "
        f"{_times(gain)} the throughput.",
        gain,
    )


def _mostly_collates(inputs: Inputs) -> bool:
    is_most = inputs.share("collate") >= _MOSTLY and inputs.at.collate_s >= inputs.at.send_s
    return inputs.num_workers > 0 and is_most


def _lack_cores(inputs: Inputs) -> bool:
    is_starved = inputs.share("worker_starved") >= _WORKERS_STARVED
    return inputs.num_workers > 0 and (inputs.at.fills_cores or is_starved)


def _cpu(inputs: Inputs) -> Advice:
    at = inputs.at
    # Half the CPU, and half the queueing for it, which the others keep up.
    gain = at.gain(at.num_workers, saved_s=at.made_s / 2, saved_cpu_s=at.worker_cpu_s / 2)
    who = ""
    if not at.fills_cores:
        who = f", and a worker waits {duration(at.worker_starved_s)} a batch for one"
        # With a core for each of them they have none to wait for but what others take.
        if at.num_workers + 1 <= at.cores:
            who += ": other programs seem to take the rest"
    return Advice(
        f"{inputs.waits}: a batch takes {duration(at.cpu_s)} of CPU, "
        f"{duration(at.trainer_cpu_s)} of it the main process's. That keeps "
        f"{amount(at.cores_taken)} cores busy{who}. More workers would not help.",
        "Make samples cheaper (decode smaller images, do less in transforms, pack them resized), "
        f"or use more cores: half the CPU per batch would give {_times(gain)} the throughput.",
        gain,
    )


def _storage(inputs: Inputs) -> Advice:
    at, workers = inputs.at, inputs.at.enough_workers
    text = (
        f"{inputs.waits}: a batch takes {duration(at.made_s)} of a worker's time, "
        f"{duration(at.read_s)} of it waiting for reads, which takes no CPU."
    )
    shorter = (
        "pack the data set into one file on a local disk (`penstock pack`); of "
        f"{inputs.for_far_data}."
    )
    if inputs.is_auto:
        return Advice(text, f"Shorten the reads: {shorter}")
    gain = at.gain(workers)
    return Advice(
        text,
        f"Let more reads wait at a time: num_workers={workers} would give up to {_times(gain)} the "
        f"throughput, if the storage serves so many at once. Or shorten them: {shorter}",
        gain,
    )


def _too_few_workers(inputs: Inputs) -> Advice:
    at, workers = inputs.at, inputs.at.enough_workers
    text = (
        f"{inputs.waits}: a batch takes {inputs.made}. {inputs.per_second}, and the main process "
        f"could take {amount(1 / (at.consumer_s + DELIVERY_S))}."
    )
    if inputs.is_auto:
        return Advice(
            text, 'num_workers="auto" adds workers, within its budgets of CPU and memory.'
        )
    gain = at.gain(workers)
    remedy = f"Add workers: num_workers={workers} would give {_times(gain)} the throughput."
    return Advice(text, remedy, gain)


def _no_setting(inputs: Inputs) -> Advice:
    return Advice(f"{inputs.waits}. No setting of the loader would bring as much as 15 %.")


def _none_of_these(inputs: Inputs) -> Advice:
    return Advice(
        f"{inputs.waits}: making a batch takes {inputs.made}.",
        "Another number of workers would bring little: make samples cheaper (smaller images, a "
        "cheaper transform, packed resized) or batches larger, or use more cores.",
    )


def _waits_little(inputs: Inputs) -> bool:
    """Whether even a remedy that ended all waiting would not be worth naming."""
    return 1 / max(1 - inputs.at.wait_share, 1e-9) < _WORTH


RULES: Final = (
    # First batches of epochs, while nothing lies ready.
    Rule("start", _starts_late, _start, least_gain=1.0),
    Rule("nothing yet", lambda i: i.at.batches < _FEWEST, _too_few),
    Rule("trainer", lambda i: not i.is_measured and i.span.wait_share < _WAITS, _unmeasured),
    Rule("unknown", lambda i: not i.is_measured, _unmeasured),
    Rule("gil", _may_be_locked, _locked),
    # Processes would bring little then, as other programs take the cores. What single samples took
    # is no evidence, as they may have waited for the lock.
    Rule("cpu", lambda i: _may_be_locked(i) and not _waits_little(i), _none_of_these),
    # Below 5 % of waiting a remedy would not be noticed.
    Rule("contention", lambda i: i.at.wait_share < _WAITS and i.lacks_cores, _contention),
    Rule("trainer", lambda i: i.at.wait_share < _WAITS, _nothing_to_do),
    # Samples cost less than seeding the global generators before each of them.
    Rule("seeding", lambda i: i.share("seed") >= _MOSTLY and i.at.num_samples > 1, _seeding),
    # Without workers.
    Rule("storage", lambda i: not i.num_workers and i.share("read") >= _READS, _serial),
    Rule("workers", lambda i: not i.num_workers, _serial),
    # Batches are made sooner than one comes over from a worker.
    Rule("transport", lambda i: i.num_workers > 0 and i.is_local, _delivery),
    Rule("slow source", lambda i: i.num_workers > 0 and i.excess >= _EXCESS, _slow_source),
    Rule("bursts", lambda i: i.is_uneven and i.at.idle_share >= _IDLE, _bursts),
    Rule("collate", _mostly_collates, _collate),
    Rule("transport", lambda i: i.num_workers > 0 and i.share("send") >= _MOSTLY, _transport),
    Rule("cpu", _lack_cores, _cpu),
    Rule("storage", lambda i: i.are_too_few and i.share("read") >= _READS, _storage),
    Rule("workers", lambda i: i.are_too_few, _too_few_workers),
    Rule("bursts", lambda i: i.is_uneven and not i.are_too_few, _bursts),
    # No setting is known that would bring clearly more.
    Rule("contention", lambda i: _waits_little(i) and i.lacks_cores, _contention),
    Rule("trainer", _waits_little, _no_setting),
    Rule("cpu", lambda i: i.at.cores < _WORTH * i.at.cores_taken, _none_of_these),
    Rule("transport", lambda i: i.at.is_cheap, _none_of_these),
    Rule("workers", lambda _: True, _none_of_these),
)
BOTTLENECKS: Final = tuple(dict.fromkeys(rule.bottleneck for rule in RULES))
