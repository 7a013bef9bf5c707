# SPDX-License-Identifier: Apache-2.0
"""Throughput model: how many workers a training can use, and what rate they come to.

With n workers, batches come no faster than

    1 / (t + h)        a main process whose own step takes t, and which takes h to receive a batch
    n / b              workers that take b for each
    C / (c + u + h)    C cores, where each costs c of a worker's CPU time and u of the consumer's

So the least n that is enough is b times the least of the other two. A worker that waits for
storage takes no core: with b far above c, many workers to a core are right; with b = c, one.

The tuner (`num_workers="auto"`) and the verdict use it alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from penstock.insight.memory_model import WORKER_BYTES
from penstock.plural import counted

if TYPE_CHECKING:
    from penstock.insight.batch_costs import Costs
    from penstock.insight.budgets import Auto

__all__ = ["DELIVERY_S", "BatchCosts", "WorkerLimits", "WorkerTarget", "milliseconds"]

# What receiving a batch takes the main process, and packing it a worker, however small it is. Each
# was measured at 0.1 to 0.35 ms; the upper end, so that no gain is promised that it eats up.
DELIVERY_S: Final = 0.4e-3

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
_MOST_WORKERS: Final = 32
_WORKERS_PER_CORE: Final = 4
_IDLE: Final = 0.8
_CLOCKS_DIFFER: Final = 0.1  # fraction of a worker's time within which two clocks may differ


class BatchCosts(Protocol):
    """What a batch costs on average, in seconds; see `penstock.insight.batch_costs.Costs`."""

    @property
    def worker_s(self) -> float:
        """A worker at one batch, were there always a core for it."""

    @property
    def worker_cpu_s(self) -> float:
        """CPU time of that."""

    @property
    def worker_starved_s(self) -> float:
        """A worker without a core, on top of `worker_s`."""

    @property
    def consumer_s(self) -> float:
        """The main process's own code, as it was."""

    @property
    def trainer_s(self) -> float:
        """The same, were there always a core for it."""

    @property
    def trainer_cpu_s(self) -> float:
        """CPU time of the main process."""


class WorkerTarget(NamedTuple):
    """The number of workers that is enough, and what limits it.

    Attributes:
        num_workers: At least 1.
        limit: What more of them would not help against: "trainer", "cpu", "budget", "memory" or
            "workers".
    """

    num_workers: int
    limit: str


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What workers may use: cores, CPU budget, memory.

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

    @classmethod
    def of(
        cls,
        limits: Auto,
        cores: float,
        memory_left_bytes: int | None,
        *,
        shares_lock: bool = False,
    ) -> WorkerLimits:
        """Return what the user's limits, or their defaults, come to on this machine."""
        memory_bytes = limits.memory
        if memory_bytes is None and memory_left_bytes is not None:
            memory_bytes = memory_left_bytes // 2
        budget = limits.cpu
        budget = None if budget is None else min(budget, cores)
        return cls(cores, budget, memory_bytes, shares_lock)

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
        if self.shares_lock:
            return 1
        cores = self.cores - 1 if self.cpu_budget is None else self.cpu_budget
        return min(2 if cores >= 2 else 1, self.max_workers)

    def by_memory(self, per_worker_bytes: int) -> int:
        """Return how many workers memory allows; at least 1, as less would be no loader."""
        if self.memory_bytes is None:
            return 1 << 16
        return max(1, self.memory_bytes // max(per_worker_bytes, 1))

    def by_cpu(self, costs: BatchCosts) -> int:
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

    def rate(self, costs: BatchCosts, num_workers: int) -> float:
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

    def best_rate(self, costs: BatchCosts) -> float:
        """Return the batches per second that no number of workers exceeds."""
        by_cores = self.cores / (costs.worker_cpu_s + costs.trainer_cpu_s + DELIVERY_S)
        return min(by_cores, 1 / (costs.trainer_s + DELIVERY_S))

    def enough(self, costs: BatchCosts, rate: float) -> int:
        """Return how many workers give so many batches per second, and no more than cores can."""
        needed = math.ceil(_HEADROOM * costs.worker_s * rate - _TOLERANCE)
        return max(1, min(needed, self.by_cpu(costs)))

    def has_idle_cores(self, costs: Costs) -> bool:
        """Return whether workers and main process leave a fifth of the cores, and of the budget."""
        workers, trainer = costs.rate * costs.worker_cpu_s, costs.rate * costs.trainer_cpu_s
        budget = self.cores if self.cpu_budget is None else self.cpu_budget
        return workers + trainer < _IDLE * self.cores and workers < _IDLE * budget

    def target(self, costs: BatchCosts, per_worker_bytes: int) -> WorkerTarget:
        """Return how many workers are enough."""
        by_trainer = self.enough(costs, 1 / _trainer_s(costs))
        cpu = "cpu" if self.cpu_budget is None else "budget"
        targets = [
            WorkerTarget(max(1, by_trainer), "trainer"),
            WorkerTarget(self.by_cpu(costs), cpu),
            WorkerTarget(self.by_memory(per_worker_bytes), "memory"),
            WorkerTarget(self.max_workers, "workers"),
        ]
        return min(targets, key=lambda target: target.num_workers)

    def explain(self, target: WorkerTarget, costs: BatchCosts) -> str:
        """Return why, in words with figures."""
        both = (
            f"a batch takes {milliseconds(costs.worker_s)} in a worker and "
            f"{milliseconds(costs.trainer_s)} in the main process"
        )
        workers = counted(target.num_workers, "worker")
        verb = "s" if target.num_workers == 1 else ""
        if target.limit == "trainer":
            return f"{both}: {workers} keep{verb} up"
        if target.limit == "cpu":
            busy = f"{milliseconds(costs.worker_cpu_s)} of CPU time"
            cores = "1 core" if self.cores == 1 else f"{self.cores:g} cores"
            return f"{both}, {busy}: {workers} keep{verb} {cores} busy"
        if target.limit == "budget":
            return f"{both}: {workers} fit{verb} Auto(cpu={self.cpu_budget:g})"
        if target.limit == "memory":
            return f"{both}: memory is enough for {workers}"
        return f"{both}: {workers} are the most there can be"


def _trainer_s(costs: BatchCosts) -> float:
    return max(costs.trainer_s, min(costs.trainer_cpu_s, _FASTEST_TRAINER_S), 5e-5)


def milliseconds(seconds: float) -> str:
    """Return a time for people.

    Example:
        >>> milliseconds(0.0412), milliseconds(0.00123)
        ('41 ms', '1.2 ms')
    """
    ms = seconds * 1e3
    return f"{ms:.0f} ms" if ms >= 9.95 else f"{ms:.1f} ms"
