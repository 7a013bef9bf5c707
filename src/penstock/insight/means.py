# SPDX-License-Identifier: Apache-2.0
"""Mean costs per batch, and the gain that another setting would bring.

A remedy changes some of the costs, or the number of workers; the throughput model
(`throughput_model`) says what rate follows. A gain is that rate by the present one, as measured or
as the model has it, whichever is higher: what the model does not know of slows the other setting as
well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from penstock.insight.throughput_model import DELIVERY_S, WorkerLimits

if TYPE_CHECKING:
    from penstock.insight.stats import Span

__all__ = ["Means"]

# What the loader itself takes for a batch without workers (measured: 0.02 to 0.04 ms), and what
# keeping the user's generators takes besides where samples are seeded (0.1 ms).
_SERIAL_S: Final = 0.05e-3
_KEPT_S: Final = 0.15e-3
_COPIED_PER_S: Final = 10e9  # bytes: the least that collating a batch takes
_MOST_WORKERS: Final = 32  # that are advised where there were fewer: memory, servers, file handles
_CHEAP: Final = 0.25  # share of the time from one batch to the next
_FULL: Final = 0.87  # share of all cores: the system wants some, too
_MANY_CORES: Final = 1e6


@dataclass(frozen=True, slots=True)
class Means:
    """Means per batch, in seconds, without what the first batch of an iterator waited for.

    Attributes:
        batches: Batches that followed another one in their iterator.
        rate: Of these, per second.
        wait_share: Share of the time that the main process waited for them, 0 to 1.
        consumer_s: The main process's own code.
        trainer_starved_s: Of this, no core was free.
        trainer_cpu_s: CPU time of the main process.
        worker_s: A worker's time, without waiting for a core.
        worker_starved_s: A worker waited for a core.
        idle_share: Share of the workers' time that they had nothing to do, 0 to 1.
        worker_cpu_s: CPU time of a worker.
        read_s: A worker waited in the dataset.
        fetch_s: A worker was in the dataset, reading and computing.
        collate_s: Making a batch of samples.
        send_s: Packing and sending.
        seed_s: Seeding the global generators for each of the samples; part of the others.
        num_bytes: Bytes of the batch.
        num_samples: Samples of the batch.
        num_workers: Workers; 0 if the main process's thread makes the batches.
        cores: Cores that may be used.
        pause_s: What the main process's rare long steps (validation, logging) take beyond the
            others; no part of `consumer_s` and `rate`.
        lock_share: Share of the time that threads hold the interpreter's lock, 0 to 1.
        lock_bound: Share for which they may hold it, as nobody saw that they do not.
    """

    batches: int
    rate: float
    wait_share: float
    consumer_s: float
    trainer_starved_s: float
    trainer_cpu_s: float
    worker_s: float
    worker_starved_s: float
    idle_share: float
    worker_cpu_s: float
    read_s: float
    fetch_s: float
    collate_s: float
    send_s: float
    seed_s: float
    num_bytes: float
    num_samples: float
    num_workers: int
    cores: float
    pause_s: float = 0.0
    lock_share: float = 0.0
    lock_bound: float = 0.0

    @classmethod
    def of(
        cls,
        span: Span,
        num_workers: int,
        cores: float,
        *,
        pause_s: float = 0.0,
        lock_share: float = 0.0,
    ) -> Means | None:
        """Return the means of some batches; None if there is nothing to divide by.

        Args:
            span: The batches, without pauses.
            num_workers: Workers.
            cores: Cores.
            pause_s: What pauses took in all.
            lock_share: As the attribute.
        """
        batches = span.batches - span.starts
        steady_wait_s = max(span.wait_s - span.first_wait_s, 0.0)
        seconds = steady_wait_s + span.consumer_s
        if batches < 1 or seconds < 1e-9:  # of no clock
            return None
        rest_s = span.seconds - span.first_wait_s  # with the steps after last batches
        made = span.batches  # workers made the first batches, too
        starved_s = min(span.starved_s, span.busy_s)
        workers_s = span.idle_s + span.busy_s
        return cls(
            batches=batches,
            rate=batches / seconds,
            wait_share=min(steady_wait_s / max(seconds + pause_s, rest_s), 1.0),
            consumer_s=span.consumer_s / batches,
            trainer_starved_s=min(span.trainer_starved_s, span.consumer_s) / batches,
            trainer_cpu_s=span.trainer_cpu_s / batches,
            worker_s=(span.busy_s - starved_s) / made,
            worker_starved_s=starved_s / made,
            idle_share=min(span.idle_s / workers_s, 1.0) if workers_s else 0.0,
            worker_cpu_s=min(span.worker_cpu_s, span.busy_s) / made,
            read_s=span.read_s / made,
            fetch_s=(span.read_s + span.compute_s) / made,
            collate_s=span.collate_s / made,
            send_s=span.send_s / made,
            seed_s=span.seed_s / made,
            num_bytes=span.bytes / made,
            num_samples=span.samples / made,
            num_workers=num_workers,
            cores=max(cores, 0.1),
            pause_s=pause_s / batches,
            lock_share=lock_share,
        )

    @property
    def trainer_s(self) -> float:
        """The main process's own code, were there always a core for it."""
        return self.consumer_s - self.trainer_starved_s

    @property
    def trainer_rate(self) -> float:
        """Batches per second that the main process could take."""
        return 1 / (self.consumer_s + DELIVERY_S)

    @property
    def core_rate(self) -> float:
        """Batches per second that all cores could make and take; may be infinite."""
        return _per(self.cores, self.worker_cpu_s + self.trainer_cpu_s)

    @property
    def lock_rate(self) -> float:
        """Batches per second with the interpreter's lock held all the time; may be infinite."""
        return _per(self.rate, max(self.lock_share, self.lock_bound))

    @property
    def trainer_blocked_s(self) -> float:
        """Main process without CPU while threads had some, and may have held the lock.

        It may as well be waiting for its device.
        """
        return min(max(self.trainer_s - self.trainer_cpu_s, 0.0), self.worker_cpu_s)

    def without_lock(self) -> Means:
        """Return what could be expected of processes, if all blocked time is the lock's."""
        return replace(
            self,
            consumer_s=self.consumer_s - self.trainer_blocked_s,
            worker_s=self.worker_cpu_s + DELIVERY_S,
            worker_cpu_s=self.worker_cpu_s + DELIVERY_S,
            read_s=0.0,
            lock_share=0.0,
            lock_bound=0.0,
        )

    @property
    def serial_rate(self) -> float:
        """Batches per second without workers: the main process makes one, and then takes it."""
        own_s = _SERIAL_S + (_KEPT_S if self.seed_s else 0.0)
        made_s = self.fetch_s + self.collate_s
        if self.num_workers and self.fills_cores:  # they took the cores from each other
            made_s *= 1 - self.share(self.worker_starved_s)
        return 1 / (self.consumer_s + made_s + own_s)

    @property
    def fills_cores(self) -> bool:
        """Whether workers and main process keep all cores busy, so that no other programs can."""
        all_s = self.worker_cpu_s + self.trainer_cpu_s + (DELIVERY_S if self.num_workers else 0.0)
        return self.rate * all_s >= _FULL * self.cores

    @property
    def cores_taken(self) -> float:
        """Cores that workers and main process kept busy."""
        return (self.worker_cpu_s + self.trainer_cpu_s) * self.rate

    @property
    def made_s(self) -> float:
        """A worker's time, waiting for a core included."""
        return self.worker_s + self.worker_starved_s

    @property
    def copied_s(self) -> float:
        """The least that copying the batch once takes."""
        return self.num_bytes / _COPIED_PER_S

    def share(self, seconds: float) -> float:
        """Return a time's share of a worker's time per batch, 0 to 1."""
        return min(seconds / self.made_s, 1.0) if self.made_s > 0 else 0.0

    @property
    def _limits(self) -> WorkerLimits:
        return WorkerLimits(min(self.cores, _MANY_CORES))

    @property
    def with_workers(self) -> Means:
        """Return these means, if batches are made without workers as they would be with some."""
        if self.num_workers:
            return self
        return replace(
            self,
            worker_s=self.worker_s + DELIVERY_S,
            worker_cpu_s=self.worker_cpu_s + DELIVERY_S,
        )

    @property
    def is_cheap(self) -> bool:
        """Whether handing a batch over may be much of the time from one to the next."""
        return self.rate * DELIVERY_S >= _CHEAP

    @property
    def enough_workers(self) -> int:
        """How many workers keep up with the consumer, or as well as cores and the lock allow."""
        at, limits = self.with_workers, self._limits
        rate = min(limits.best_rate(at), self.lock_rate)
        return min(limits.enough(at, rate), max(_MOST_WORKERS, 2 * self.num_workers))

    def rate_with(self, num_workers: int) -> float:
        """Return the batches per second with so many workers, at least 1."""
        at = self.with_workers
        if num_workers < self.num_workers:  # what they take of the main process's cores is reckoned
            at = replace(at, consumer_s=at.trainer_s, trainer_starved_s=0.0)
        return min(self._limits.rate(at, num_workers), self.lock_rate)

    def gain(
        self, num_workers: int, *, saved_s: float = 0.0, saved_cpu_s: float | None = None
    ) -> float:
        """Return by what factor throughput would grow, at least 1.

        Args:
            num_workers: So many workers.
            saved_s: What a batch would cost less of a worker's time.
            saved_cpu_s: What it would cost less CPU; None: the same share of it.
        """
        if saved_cpu_s is None:
            saved_cpu_s = self.worker_cpu_s * self.share(saved_s)
        left = max(1 - self.share(saved_s), 0.0)
        changed = replace(
            self,
            worker_s=self.worker_s * left,
            worker_starved_s=self.worker_starved_s * left,
            worker_cpu_s=max(self.worker_cpu_s - saved_cpu_s, 0.0),
            fetch_s=max(self.fetch_s - saved_s, 0.0),
        )
        return self.grown(changed.rate_with(num_workers) if num_workers else changed.serial_rate)

    @property
    def shortfall(self) -> float:
        """By what factor the model's rate is above the measured one, at least 1.

        Where batches differ much, workers wait behind one that takes long.
        """
        return max(self.rate_with(self.num_workers) / self.rate, 1.0)

    def grown(self, rate: float) -> float:
        """Return the factor by which `rate` is more than the present one, at least 1."""
        now = self.rate * (self.shortfall if self.num_workers else 1.0)
        return max((1 / now + self.pause_s) / (1 / rate + self.pause_s), 1.0)


def _per(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 1e-12 else math.inf
