# SPDX-License-Identifier: Apache-2.0
"""A training that is only reckoned: a main process, workers, cores and storage, event by event.

What needs a core while there are more such than cores gets an equal share of them; so it is with
reads, of which storage serves `parallel_reads` at full speed. Batches are given in order, a step
goes to the worker with the least to do, and what the tuner asks for is done at once. With
0 workers the main process makes its batches itself.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.engine.timing import UNKNOWN, TimingRow, WorkerSettings
from penstock.insight.stats import Change

if TYPE_CHECKING:
    from collections.abc import Callable

NEVER = float("inf")


@dataclass(frozen=True)
class Regime:
    """What a batch costs, in seconds, and what there is for it."""

    read_s: float = 0.0
    compute_s: float = 0.0
    seed_s: float = 0.0  # of that: the global generators are seeded for every sample
    collate_s: float = 0.0
    send_s: float = 0.0  # a worker packs the batch ...
    take_s: float = 0.0  # ... and the main process takes it, on a core
    serial_s: float = 0.0  # without workers: what the loader itself takes
    trainer_s: float = 0.0  # a GPU: takes no core
    trainer_cpu_s: float = 0.0001
    cores: float = 4
    parallel_reads: float = NEVER
    noise: float = 0.15  # standard deviation, of 1
    slow_every: int = 0  # one batch in so many, by chance, ...
    slow_factor: float = 1.0  # ... costs the worker so many times more
    start_s: float = 0.01
    first_s: float = 0.02  # more for the first batch of a worker: it opens files
    batches_per_epoch: int = 1_000_000
    keeps_workers: bool = True
    batch_bytes: int = 1_000_000
    num_samples: int = 1
    tells_starved: bool = True
    others: int = 0  # processes of others, each of which keeps a core busy
    lock_share: float = 0.0  # of all CPU work that holds a lock: threads do not tell who waits
    threads: float = 1.0  # cores that a worker's own threads keep busy
    rss_bytes: int = 0


class _Job:
    def __init__(self, kind: str, seconds: float) -> None:
        self.kind = kind
        self.left_s = seconds


class _Worker:
    def __init__(self, worker_id: int, pid: int, start_s: float) -> None:
        self.worker_id = worker_id
        self.pid = pid
        self.queue: list[int] = []
        self.step: int | None = None
        self.jobs: list[_Job] = [_Job("sleep", start_s)]
        self.is_new = True
        self.leaves = False
        self.begun_s = self.cpu_s = self.starved_s = self.idle_s = 0.0
        self.factor = 1.0
        self.ended_s: float | None = None


class Training:
    """Runs one regime, or several one after the other; `records` is what a tuner would be fed."""

    def __init__(self, regime: Regime, workers: WorkerSettings, *, seed: int = 0) -> None:
        self.regime = regime
        self.workers = workers
        self.records: list[TimingRow] = []
        self.changes: list[Change] = []
        self._rng = np.random.default_rng(seed)
        self._now_s = 1.0
        self._pids = itertools.count(100)
        self._workers: list[_Worker] = []
        self._done: dict[int, tuple[_Worker, TimingRow]] = {}
        self._next_step = self._head = 0
        self._epoch = -1

    def run(
        self,
        num_batches: int,
        observe: Callable[[TimingRow], WorkerSettings | None] | None = None,
        reason: Callable[[], str] = str,
    ) -> None:
        """Give so many batches more."""
        for _ in range(num_batches):
            record = self._one()
            self.records.append(record)
            workers = observe(record) if observe is not None else None
            if workers is not None:
                assert workers != self.workers
                self.workers = workers
                self.changes.append(Change(record.epoch, len(self.records), *workers, reason()))

    def rate(self, last: int) -> float:
        """Batches per second over the last ones."""
        records = self.records[-last:]
        return last / (sum(r.given_ns - r.asked_ns + r.consumer_ns for r in records) * 1e-9)

    def leave_epoch(self) -> None:
        """Have another iterator begin, in an epoch of the same number."""
        self._head = self.regime.batches_per_epoch
        self._epoch -= 1

    def _one(self) -> TimingRow:
        if self._epoch < 0 or self._head == self.regime.batches_per_epoch:
            self._begin_epoch()
            own_s = starved_s = cpu_s = 0.0
        else:
            own_s, cpu_s, starved_s = self._train()
        self._fill()
        asked_s, num_ready = self._now_s, len(self._done)
        if self.workers.num_workers:
            while self._head not in self._done:
                self._advance([])
            worker, times = self._done.pop(self._head)
            self._work([_Job("cpu", self.regime.take_s)])
        else:
            worker, times = _Worker(0, 1, 0.0), self._make()
        self._head += 1
        return times._replace(
            epoch=self._epoch,
            step=self._head - 1,
            worker_id=worker.worker_id,
            pid=worker.pid,
            asked_ns=_ns(asked_s),
            given_ns=_ns(self._now_s),
            consumer_ns=_ns(own_s),
            trainer_cpu_ns=_ns(cpu_s),
            trainer_starved_ns=_ns(starved_s) if self.regime.tells_starved else UNKNOWN,
            num_ready=num_ready,
            num_workers=self.workers.num_workers,
            lookahead=self._lookahead,
        )

    @property
    def _lookahead(self) -> int:
        return self.workers.num_workers * self.workers.prefetch_factor

    def _begin_epoch(self) -> None:
        self._epoch += 1
        self._next_step = self._head = 0
        self._done = {}
        if not self.regime.keeps_workers:
            self._workers = []
        self._change_workers()

    def _change_workers(self) -> None:
        staying = [w for w in self._workers if not w.leaves]
        for worker in staying[self.workers.num_workers :]:
            worker.leaves = True
        for worker_id in range(len(staying), self.workers.num_workers):
            self._workers.append(_Worker(worker_id, next(self._pids), self.regime.start_s))

    def _fill(self) -> None:
        self._change_workers()
        staying = [w for w in self._workers if not w.leaves]
        last = min(self._head + self._lookahead, self.regime.batches_per_epoch)
        while self.workers.num_workers and self._next_step < last:
            worker = min(staying, key=lambda w: len(w.queue) + (w.step is not None))
            worker.queue.append(self._next_step)
            self._next_step += 1

    def _train(self) -> tuple[float, float, float]:
        regime = self.regime
        begun_s, factor = self._now_s, self._factor()
        cpu_s = regime.trainer_cpu_s * factor
        starved_s = self._work([_Job("cpu", cpu_s), _Job("sleep", regime.trainer_s * factor)])
        return self._now_s - begun_s, cpu_s, starved_s

    def _work(self, jobs: list[_Job]) -> float:
        """Have the main process's thread do these; returns how long it was without a core."""
        starved_s = 0.0
        for job in jobs:
            while job.left_s > 1e-12:
                starved_s += self._advance([job])
        return starved_s

    def _make(self) -> TimingRow:
        """Make a batch in the main process's thread."""
        regime, factor, begun_s = self.regime, self._factor(), self._now_s
        cpu_s = (regime.compute_s + regime.collate_s) * factor
        starved_s = self._work([_Job("read", regime.read_s * factor), _Job("cpu", cpu_s)])
        times = self._times(begun_s, cpu_s, starved_s, factor, send_s=0.0)
        self._work([_Job("cpu", regime.serial_s)])
        return times

    def _times(
        self, begun_s: float, cpu_s: float, starved_s: float, factor: float, *, send_s: float
    ) -> TimingRow:
        """Return what a batch that is whole now took."""
        regime, took_s = self.regime, self._now_s - begun_s
        collate_s = regime.collate_s * factor
        # What shares cores takes longer for everything.
        stretch = 1 + starved_s / max(cpu_s, 1e-9) if regime.threads == 1 else 1.0
        collate_s, send_s = collate_s * stretch, send_s * stretch
        return TimingRow(
            begun_ns=_ns(begun_s),
            ended_ns=_ns(self._now_s),
            cpu_ns=_ns(cpu_s),
            starved_ns=_ns(starved_s) if regime.tells_starved else UNKNOWN,
            fetch_ns=_ns(max(took_s - collate_s - send_s, 0.0)),
            collate_ns=_ns(collate_s),
            send_ns=_ns(send_s),
            num_bytes=regime.batch_bytes,
            num_samples=regime.num_samples,
            seed_ns=_ns(regime.seed_s * factor),
        )

    def _advance(self, others: list[_Job]) -> float:
        """Go on until some job is done; returns how long `others` were without a core."""
        for worker in self._workers:
            self._take_up(worker)
        at_work = [w for w in self._workers if w.jobs]
        jobs = [w.jobs[0] for w in at_work] + others
        kinds = [job.kind for job in jobs]
        regime = self.regime
        num_cpu = kinds.count("cpu")
        on_cores = min(1.0, regime.cores / max(num_cpu * regime.threads + regime.others, 1e-9))
        # What one has of the lock, and so how much of all can be at work.
        by_lock = min(1.0, 1 / max(num_cpu * regime.lock_share, 1e-9))
        speed = {
            "sleep": 1.0,
            "cpu": min(on_cores, by_lock),
            "read": min(1.0, self.regime.parallel_reads / max(kinds.count("read"), 1)),
        }
        assert jobs, "none is at work, and the main process waits"
        took_s = max(min(job.left_s / speed[job.kind] for job in jobs), 1e-12)
        self._now_s += took_s
        for job in jobs:
            job.left_s -= took_s * speed[job.kind]
        for worker in at_work:
            if worker.jobs[0].kind == "cpu":
                worker.cpu_s += took_s * speed["cpu"] * regime.threads
                worker.starved_s += took_s * (1 - on_cores)
            self._finish(worker)
        return sum(took_s * (1 - on_cores) for job in others if job.kind == "cpu")

    def _take_up(self, worker: _Worker) -> None:
        if worker.jobs or not worker.queue:
            return
        worker.step = worker.queue.pop(0)
        regime, factor = self.regime, self._factor()
        if regime.slow_every and self._rng.random() < 1 / regime.slow_every:
            factor *= regime.slow_factor
        first_s = regime.first_s if worker.is_new else 0.0
        worker.is_new = False
        worker.jobs = [
            _Job("read", regime.read_s * factor),
            _Job("cpu", (regime.compute_s + regime.collate_s) * factor + regime.send_s + first_s),
        ]
        worker.factor = factor
        worker.begun_s, worker.cpu_s, worker.starved_s = self._now_s, 0.0, 0.0
        worker.idle_s = 0.0 if worker.ended_s is None else self._now_s - worker.ended_s

    def _finish(self, worker: _Worker) -> None:
        while worker.jobs and worker.jobs[0].left_s <= 1e-12:
            worker.jobs.pop(0)
        if worker.jobs or worker.step is None:
            return
        regime = self.regime
        worker.ended_s = self._now_s
        times = self._times(
            worker.begun_s, worker.cpu_s, worker.starved_s, worker.factor, send_s=regime.send_s
        )._replace(
            idle_ns=_ns(worker.idle_s),
            rss_bytes=regime.rss_bytes,
        )
        self._done[worker.step] = (worker, times)
        worker.step = None
        if worker.leaves and not worker.queue:
            self._workers.remove(worker)

    def _factor(self) -> float:
        return max(0.2, 1 + self.regime.noise * float(self._rng.standard_normal()))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def fixed_rate(regime: Regime, workers: WorkerSettings, *, seed: int = 0) -> float:
    """Return the batches per second that settings give which never change."""
    steady = replace(regime, batches_per_epoch=1_000_000, start_s=0.0)
    training = Training(steady, workers, seed=seed)
    lookahead = workers.num_workers * workers.prefetch_factor
    training.run(2 * lookahead + 20)
    # What lies ready at the start counts for nothing: many times that is measured.
    num_batches = 300 + 4 * lookahead
    training.run(num_batches)
    return training.rate(num_batches)


def best_rate(regime: Regime) -> float:
    """Return the most that any fixed settings give."""
    tried = [WorkerSettings(n, 2) for n in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)]
    tried += [WorkerSettings(n, 8) for n in (1, 2, 3, 4, 6, 8)]
    return max(fixed_rate(regime, workers) for workers in tried)
