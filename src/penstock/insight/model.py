# SPDX-License-Identifier: Apache-2.0
"""Throughput model: what rate a number of workers comes to, and how many are enough.

With n workers, batches come no faster than

    1 / (t + h)        a main process whose own step takes t, and which takes h to receive a batch
    n / b              workers that take b for each
    C / (c + u + h)    C cores, where each costs c of a worker's CPU time and u of the consumer's

So the least n that is enough is b times the least of the other two. A worker that waits for
storage takes no core: with b far above c, many workers to a core are right; with b = c, one.

`Means` are the figures of some batches. The tuner and the verdict use them, and `WorkerLimits`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from penstock.lines import counted, duration

if TYPE_CHECKING:
    from penstock.insight.stats import Span

# What receiving a batch takes the main process, and packing it a worker, however small it is. Each
# was measured at 0.1 to 0.35 ms; the upper end, so that no gain is promised that it eats up.
DELIVERY_S: Final = 0.4e-3
# Pages that a forked worker has for itself: its interpreter's counts of references, its own
# allocations. Pages of the dataset are shared. An order of magnitude, not a measurement.
WORKER_BYTES: Final = 50_000_000

# Batches do not all take the same: with workers that are just enough on average, the main process
# waits for every second one.
_HEADROOM: Final = 1.2
# Of a worker: below so much, one more is not worth having, and figures are no better than that.
_TOLERANCE: Final = 0.15
# Of workers that compute and read in turn, now more and now fewer want a core: so many standard
# deviations of that number (it is binomial) more of them keep all cores at work; at most twice.
_OVERLAP: Final = 1.5
# Below so much the loader's own work per batch (some 0.1 ms) is what limits a main process.
_FASTEST_TRAINER_S: Final = 0.0002
_MOST_WORKERS: Final = 32  # memory, servers, file handles
_WORKERS_PER_CORE: Final = 4
_CLOCKS_DIFFER: Final = 0.1  # fraction of a worker's time within which two clocks may differ
# What the loader itself takes for a batch without workers (measured: 0.02 to 0.04 ms), and what
# keeping the user's generators takes besides where samples are seeded (0.1 ms).
_SERIAL_S: Final = 0.05e-3
_KEPT_S: Final = 0.15e-3
_CHEAP: Final = 0.25  # share of the time from one batch to the next
_FULL: Final = 0.87  # share of all cores: the system wants some, too
_MANY_CORES: Final = 1e6


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What workers may use.

    Attributes:
        cores: What the process is allowed.
        cpu_budget: What workers may keep busy of it; None: whatever the main process leaves.
        memory_bytes: For batches under way and workers; None: no limit is known.
        shares_lock: Workers are threads, which cost no memory of their own, and of which only one
            runs Python code at a time.
    """

    cores: float
    cpu_budget: float | None = None
    memory_bytes: int | None = None
    shares_lock: bool = False

    @property
    def max_workers(self) -> int:
        """Never more, whatever they cost: 32, or 4 per core if that is more, within memory."""
        least = 0 if self.shares_lock else WORKER_BYTES
        most = max(_MOST_WORKERS, math.ceil(_WORKERS_PER_CORE * self.cores))
        return max(1, min(most, self.by_memory(least)))

    @property
    def first_workers(self) -> int:
        """How many to begin with, when nothing is measured and a core is left for the main process.

        Of threads one: what it takes shows no waiting for another one's lock.
        """
        cores = self.cores - 1 if self.cpu_budget is None else self.cpu_budget
        return min(1 if self.shares_lock or cores < 2 else 2, self.max_workers)

    def by_memory(self, per_worker_bytes: int) -> int:
        """Return how many workers memory allows; at least 1, as less would be no loader."""
        if self.memory_bytes is None:
            return 1 << 16
        return max(1, self.memory_bytes // max(per_worker_bytes, 1))

    def by_cpu(self, costs: Means) -> int:
        """Return how many workers the cores can keep at work."""
        worker_s, cpu_s = costs.worker_s, costs.worker_cpu_s
        all_s = max(cpu_s + costs.trainer_cpu_s, 1e-9)
        blocked = max(1 - cpu_s / worker_s, 0.0) if worker_s else 0.0
        if blocked < _CLOCKS_DIFFER:
            blocked, worker_s = 0.0, min(worker_s, cpu_s)
        even = self.cores / all_s * worker_s  # were it that always the same number needs a core
        spread = math.sqrt(even * blocked / max(1 - blocked, 1e-3))
        most = math.ceil(even + min(_OVERLAP * spread, even) - _TOLERANCE)
        if self.cpu_budget is not None and self.cpu_budget < self.cores:
            most = min(most, math.floor(self.cpu_budget * worker_s / max(cpu_s, 1e-9) + 0.05))
        return max(1, most)

    def rate(self, costs: Means, num_workers: int) -> float:
        """Return the batches per second that so many workers and the main process come to at least.

        What workers wait for a core counts: other processes take it. So does what they take of the
        main process's cores, if all of them are at work while it is.
        """
        worker_s = max(costs.worker_s, 1e-9)
        at_work = num_workers * min(costs.worker_cpu_s / worker_s, 1.0) + 1
        own_cpu_s = min(costs.trainer_cpu_s, costs.trainer_s)
        shared_s = costs.trainer_s + own_cpu_s * max(at_work / self.cores - 1, 0.0)
        return min(
            num_workers / (worker_s + costs.worker_starved_s),
            1 / (max(shared_s, costs.consumer_s) + DELIVERY_S),
            self.best_rate(costs),
        )

    def best_rate(self, costs: Means) -> float:
        """Return the batches per second that no number of workers exceeds."""
        by_cores = self.cores / (costs.worker_cpu_s + costs.trainer_cpu_s + DELIVERY_S)
        return min(by_cores, 1 / (costs.trainer_s + DELIVERY_S))

    def enough(self, costs: Means, rate: float, spare: float = 0.0) -> int:
        """Return how many workers give so many batches per second, and no more than cores can.

        Args:
            costs: Of batches.
            rate: Batches per second.
            spare: Workers more than are busy on average, as a share of these, for uneven batches.
        """
        needed = math.ceil((_HEADROOM + spare) * costs.worker_s * rate - _TOLERANCE)
        return max(1, min(needed, self.by_cpu(costs)))

    def target(self, costs: Means, per_worker_bytes: int, spare: float) -> tuple[int, str]:
        """Return how many workers are enough, at least 1, and why no more of them."""
        trainer_s = max(costs.trainer_s, min(costs.trainer_cpu_s, _FASTEST_TRAINER_S), 5e-5)
        num_workers, why = min(
            (self.enough(costs, 1 / trainer_s, spare), "can keep up"),
            (self.by_cpu(costs), f"keep {self.cores:g} cores busy, or those of Auto(cpu=)"),
            (self.by_memory(per_worker_bytes), "are what memory is enough for"),
            (self.max_workers, "at most"),
            key=lambda target: target[0],
        )
        return num_workers, (
            f"a batch takes {duration(costs.worker_s)} in a worker and {duration(costs.trainer_s)} "
            f"in the main process: {counted(num_workers, 'worker')} {why}"
        )


@dataclass(frozen=True, slots=True)
class Means:
    """Means per batch, in seconds, without what the first batch of an iterator waited for.

    `wait_share`, `pause_s`, and what begins with `trainer_` or `consumer_` are of the main process;
    the other times are of a worker, or with `num_workers=0` of the main process as it makes the
    batch, which counts as waiting. Shares are from 0 to 1.
    """

    batches: int  # that followed another one in their iterator
    rate: float  # of these, per second
    wait_share: float
    consumer_s: float
    trainer_starved_s: float  # part of `consumer_s`: no core was free
    trainer_cpu_s: float
    worker_s: float  # without waiting for a core
    worker_starved_s: float
    idle_share: float  # of the workers' time
    worker_cpu_s: float
    read_s: float
    fetch_s: float  # reading and computing
    collate_s: float
    send_s: float
    seed_s: float  # part of the others
    num_bytes: float
    num_samples: float
    num_workers: int = 0  # 0 if the main process's thread makes the batches
    cores: float = 1.0
    # What the main process's rare long steps (validation, logging) take beyond the others; no part
    # of `consumer_s` and `rate`.
    pause_s: float = 0.0
    lock_share: float = 0.0  # of the time that threads may hold the interpreter's lock

    @classmethod
    def of(cls, span: Span, num_workers: int, cores: float, pause_s: float = 0.0) -> Means:
        """Return the means of some batches; `pause_s` is what all pauses took."""
        batches = max(span.batches - span.starts, 0)
        steady_wait_s = max(span.wait_s - span.first_wait_s, 0.0)
        seconds = steady_wait_s + span.consumer_s
        if seconds < 1e-9:  # of no clock
            batches = 0
        given, made = max(batches, 1), max(span.batches, 1)  # workers made the first ones, too
        rest_s = span.seconds - span.first_wait_s  # with the steps after last batches
        starved_s = min(span.starved_s, span.busy_s)
        workers_s = span.idle_s + span.busy_s
        return cls(
            batches=batches,
            rate=given / max(seconds, 1e-9),
            wait_share=min(steady_wait_s / max(seconds + pause_s, rest_s, 1e-9), 1.0),
            consumer_s=span.consumer_s / given,
            trainer_starved_s=min(span.trainer_starved_s, span.consumer_s) / given,
            trainer_cpu_s=span.trainer_cpu_s / given,
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
            pause_s=pause_s / given,
        )

    @property
    def trainer_s(self) -> float:
        """The main process's own code, were there always a core for it."""
        return self.consumer_s - self.trainer_starved_s

    @property
    def made_s(self) -> float:
        """A worker's time, waiting for a core included."""
        return self.worker_s + self.worker_starved_s

    @property
    def cpu_s(self) -> float:
        """CPU time of worker and main process."""
        return self.worker_cpu_s + self.trainer_cpu_s

    @property
    def cores_taken(self) -> float:
        """Cores that workers and main process kept busy."""
        return self.cpu_s * self.rate

    @property
    def fills_cores(self) -> bool:
        """Whether workers and main process keep all cores busy, so that no other programs can."""
        all_s = self.cpu_s + (DELIVERY_S if self.num_workers else 0.0)
        return self.rate * all_s >= _FULL * self.cores

    @property
    def is_cheap(self) -> bool:
        """Whether handing a batch over may be much of the time from one to the next."""
        return self.rate * DELIVERY_S >= _CHEAP

    def share(self, seconds: float) -> float:
        """Return a time's share of a worker's time per batch, 0 to 1."""
        return min(seconds / self.made_s, 1.0) if self.made_s > 0 else 0.0

    def without_lock(self) -> Means:
        """Return what could be expected of processes, if all blocked time is the lock's."""
        cpu_s = self.worker_cpu_s + DELIVERY_S
        return replace(self, worker_s=cpu_s, worker_cpu_s=cpu_s, read_s=0.0, lock_share=0.0)

    @property
    def enough_workers(self) -> int:
        """How many workers keep up with the consumer, or as well as cores and the lock allow."""
        at, limits = self._with_workers(), self._limits
        rate = min(limits.best_rate(at), self._lock_rate)
        return min(limits.enough(at, rate), max(_MOST_WORKERS, 2 * self.num_workers))

    @property
    def shortfall(self) -> float:
        """By what factor the model's rate is above the measured one, at least 1.

        Where batches differ much, workers wait behind one that takes long.
        """
        return max(self._rate_with(self.num_workers) / self.rate, 1.0)

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
        return self.gain_to(changed, num_workers)

    def gain_to(self, changed: Means, num_workers: int) -> float:
        """Return the factor by which throughput would grow with other costs, at least 1.

        What the model leaves out slows the other setting as well: so the model's rate then is
        compared with the present rate, measured or of the model, whichever is higher.
        """
        rate = changed._rate_with(num_workers) if num_workers else changed._serial_rate
        now = self.rate * (self.shortfall if self.num_workers else 1.0)
        return max((1 / now + self.pause_s) / (1 / rate + self.pause_s), 1.0)

    @property
    def _limits(self) -> WorkerLimits:
        return WorkerLimits(min(self.cores, _MANY_CORES))

    @property
    def _lock_rate(self) -> float:
        return self.rate / self.lock_share if self.lock_share > 1e-12 else math.inf

    def _with_workers(self) -> Means:
        """Return these means, if batches are made without workers as they would be with some."""
        if self.num_workers:
            return self
        worker_s, cpu_s = self.worker_s + DELIVERY_S, self.worker_cpu_s + DELIVERY_S
        return replace(self, worker_s=worker_s, worker_cpu_s=cpu_s)

    def _rate_with(self, num_workers: int) -> float:
        at = self._with_workers()
        if num_workers < self.num_workers:  # what they take of the main process's cores is reckoned
            at = replace(at, consumer_s=at.trainer_s, trainer_starved_s=0.0)
        return min(self._limits.rate(at, num_workers), self._lock_rate)

    @property
    def _serial_rate(self) -> float:
        """Batches per second without workers: the main process makes one, and then takes it."""
        own_s = _SERIAL_S + (_KEPT_S if self.seed_s else 0.0)
        made_s = self.fetch_s + self.collate_s
        if self.num_workers and self.fills_cores:  # they took the cores from each other
            made_s *= 1 - self.share(self.worker_starved_s)
        return 1 / (self.consumer_s + made_s + own_s)
