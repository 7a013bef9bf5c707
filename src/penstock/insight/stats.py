# SPDX-License-Identifier: Apache-2.0
"""What `loader.stats()` returns: sums over the last batches, over the epoch, and a verdict."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar

from penstock.summary import Summarized

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Stats"]


@dataclass(frozen=True, slots=True, repr=False)
class Span(Summarized):
    """Sums over some batches, one after the other.

    Seconds of the main process are of the one main process. Seconds of workers add up over all of
    them: two workers that are busy all the time have 2 s per second.

    Attributes:
        batches: Batches given to the main process.
        samples: Samples in them.
        failed: Bad samples, left out or replaced: each counted once an epoch, however often it was
            drawn, as in `loader.failures`.
        measured: Batches whose making was measured (`monitor=`). Of these alone are the bytes, all
            times of workers, `trainer_cpu_s` and `trainer_starved_s`.
        bytes: Of the batches in their slots.
        seconds: `wait_s`, `consumer_s`, and the main process's own code after the last batch of an
            iterator that has ended: what lies between epochs (a validation, a checkpoint) is no
            part of it.
        wait_s: The main process waited for a batch.
        first_wait_s: Of these, for the first batch of an iterator, while nothing lay ready, and for
            the first one of a worker.
        starts: How many batches were such a first one.
        consumer_s: The main process's own code ran.
        trainer_cpu_s: CPU time of the main process, without that of workers.
        trainer_starved_s: The main process could have run, and no core was free.
        idle_s: Workers had nothing to do, while an iterator was at work.
        read_s: Workers waited in the dataset: for storage, a network, a lock.
        compute_s: Workers decoded and transformed.
        collate_s: Workers made batches of samples.
        send_s: Workers packed and sent batches.
        slot_s: Workers made new slots, as none was free.
        starved_s: Workers could have run, and no core was free; part of the other stages.
        worker_cpu_s: CPU time of the workers.
        timed: Samples that were timed one by one; not those of a worker's first batch, and of
            batches that lacked a core for a tenth of their time.
        timed_s: What these took.
        slow: Timed samples that took 8 times the typical one or more, and at least 1 ms.
        slow_s: What these took.
        seed_s: Workers seeded the global generators for single samples; part of the other stages.
    """

    batches: int = 0
    samples: int = 0
    failed: int = 0
    bytes: int = 0
    seconds: float = 0.0
    wait_s: float = 0.0
    first_wait_s: float = 0.0
    starts: int = 0
    consumer_s: float = 0.0
    trainer_cpu_s: float = 0.0
    trainer_starved_s: float = 0.0
    idle_s: float = 0.0
    read_s: float = 0.0
    compute_s: float = 0.0
    collate_s: float = 0.0
    send_s: float = 0.0
    slot_s: float = 0.0
    starved_s: float = 0.0
    worker_cpu_s: float = 0.0
    timed: int = 0
    timed_s: float = 0.0
    slow: int = 0
    slow_s: float = 0.0
    seed_s: float = 0.0
    measured: int = 0

    def _summary(self) -> Iterator[tuple[str, object]]:
        yield "samples_per_s", self.samples_per_s
        yield "wait_share", self.wait_share
        yield from ((f.name, value) for f in fields(self) if (value := getattr(self, f.name)))

    @property
    def samples_per_s(self) -> float:
        """Samples per second; 0.0 if nothing was measured."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second; 0.0 if nothing was measured."""
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the time that the main process waited, from 0 to 1."""
        total_s = max(self.wait_s + self.consumer_s, self.seconds)
        return self.wait_s / total_s if total_s else 0.0

    @property
    def busy_s(self) -> float:
        """Workers were busy, whatever with."""
        return self.read_s + self.compute_s + self.collate_s + self.send_s


@dataclass(frozen=True, slots=True, repr=False)
class Verdict(Summarized):
    """Why the main process waits, and what to do.

    Attributes:
        bottleneck: What it is, in a word: one of `penstock.insight.verdict.BOTTLENECKS`.
        text: The same in a sentence, with figures.
        remedy: What to do; empty if there is nothing.
        expected_gain: Factor by which throughput should grow by it, at least 1.0; None if nothing
            can be said.
    """

    bottleneck: str
    text: str
    remedy: str = ""
    expected_gain: float | None = None

    _shows = ("bottleneck", "text")
    _shows_unless: ClassVar = {"remedy": "", "expected_gain": None}

    def __str__(self) -> str:
        """Return text and remedy."""
        return f"{self.text} {self.remedy}".strip()


@dataclass(frozen=True, slots=True)
class Change:
    """What `num_workers="auto"` did once.

    Attributes:
        epoch: In which epoch.
        step: After which batch of it.
        num_workers: Workers from then on.
        prefetch_factor: Batches under way per worker from then on.
        reason: Why, in words.
    """

    epoch: int
    step: int
    num_workers: int
    prefetch_factor: int
    reason: str


@dataclass(frozen=True, slots=True)
class SlowSample:
    """One of the samples that took longest.

    Attributes:
        index: Key of the sample; None for an iterable's.
        name: File, URL or key in the store, if the dataset has one.
        seconds: What it took.
        epoch: In which epoch.
        step: In which batch.
        worker_id: By whom.
    """

    index: object
    name: str | None
    seconds: float
    epoch: int
    step: int
    worker_id: int


@dataclass(frozen=True, slots=True, repr=False)
class Stats(Summarized):
    """Where the time of the main process and of the workers went.

    Attributes:
        verdict: Why the main process waits, judged by `window`.
        window: The last batches (see `penstock.insight.history`).
        epoch: The epoch that is under way, or the last one.
        run: Everything since the loader was made.
        epoch_number: Number of that epoch.
        backend: "serial", "process", "thread" or "ray".
        num_workers: Workers now.
        prefetch_factor: Batches under way per worker.
        num_ready: Batches that lay ready, on average over the window.
        slot_bytes: Memory of all slots at its peak.
        worker_rss_bytes: Largest resident memory that each worker has had, by its number.
        changes: What `num_workers="auto"` did, in order.
        slowest: The samples that took longest since the loader was made, each once, the longest
            first: 20 at most.
        cores: Cores that this process may use.
        replaced_workers: Workers that died, or were ended as they were stuck, and that others
            replaced, since the loader was made.
        first_batch_s: From `iter()` to the first batch of the first epoch.
        reading: What the dataset says of its reading, as of a local cache; else empty.
    """

    verdict: Verdict
    window: Span = field(default_factory=Span)
    epoch: Span = field(default_factory=Span)
    run: Span = field(default_factory=Span)
    epoch_number: int = 0
    backend: str = "serial"
    num_workers: int = 0
    prefetch_factor: int = 0
    num_ready: float = 0.0
    slot_bytes: int = 0
    worker_rss_bytes: dict[int, int] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    slowest: tuple[SlowSample, ...] = ()
    cores: float = 0.0
    replaced_workers: int = 0
    first_batch_s: float = 0.0
    reading: str = ""

    def _summary(self) -> Iterator[tuple[str, object]]:
        window = self.window
        yield "bottleneck", self.verdict.bottleneck
        yield "samples_per_s", window.samples_per_s
        yield "wait_share", window.wait_share
        yield "batches", window.batches
        yield "num_workers", self.num_workers
        yield "backend", self.backend
        yield "epoch", self.epoch_number
        yield "verdict", str(self.verdict)

    def __str__(self) -> str:
        """Return the verdict, and below it what it is judged by."""
        span = self.window
        return (
            f"{self.verdict}\n"
            f"Last {span.batches} batches: {span.wait_s:.3g} s of {span.seconds:.3g} s waited for; "
            f"backend {self.backend!r}, {self.num_workers} workers"
            + (f"\n{self.reading}" if self.reading else "")
        )
