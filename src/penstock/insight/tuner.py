# SPDX-License-Identifier: Apache-2.0
"""`num_workers="auto"`: how many workers there are to be, judged by what batches took.

    warm-up ──▶ window ──▶ other workers ──▶ window: do they pay? ── no ──▶ those before
                  ▲            (the model's number)       │                      │
                  └── costs change for good ── settled ◀──┴──────────────────────┘

A window is of 12 batches or more, as times differ by 10 to 20 % from batch to batch. Threads wait
for each other's lock, which looks like reading: the model is not believed, and they are doubled as
long as that pays.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.engine.timing import WorkerSettings
from penstock.insight.model import WORKER_BYTES, Means, WorkerLimits
from penstock.insight.rows import Sums, rows_of
from penstock.lines import amount, counted, duration

if TYPE_CHECKING:
    from penstock.engine.timing import TimingRow
    from penstock.insight.budgets import Auto

_PREFETCH: Final = 2
_WARM_UP: Final = 4  # batches that do not count at the very start
_WINDOW: Final = 12  # batches; at least
_SETTLED_WINDOW: Final = 24
_SMALLEST_GAIN: Final = 0.04  # what brings less is given back
_GAIN_OF_THREADS: Final = 0.15  # from twice as many
_NOISE: Final = 0.3  # on a machine that others use too
_CAPACITY_GAIN: Final = 0.2  # more of it is more than noise of the workers' own times
_A_WAIT_NS: Final = 150_000  # a batch that lies ready is there in some 50 us
_STEP: Final = 1.25  # numbers that differ by less are not worth a try
_SHORT_WAIT: Final = 0.03  # share of the time; below it no more workers are needed
_LONGEST_START_NS: Final = 10_000_000_000  # an interpreter that imports torch takes 2 to 5 s
_DRIFT: Final = 1.3
_USUAL_VARIATION: Final = 0.3  # of batches; those that differ more keep others waiting
_QUICKEST_S: Final = 2e-4  # below it there is noise of the clock and of the loader itself
_PATIENCE: Final = 3  # windows in a row that differ ...
_MOST_PATIENCE: Final = 24  # ... and twice as many after each alarm: costs may go to and fro


class Tuner:
    """Decides on the workers while training runs. Pure: no clock, no look at the machine.

    Attributes:
        workers: What there is to be, now.
        reason: Of the last change, in words; empty before any.
        max_workers: It never asks for more: 32, or 4 per core if that is more, within memory.

    Example:
        >>> from penstock.insight.budgets import Auto
        >>> Tuner(Auto(), cores=8.0).workers
        WorkerSettings(num_workers=2, prefetch_factor=2)
    """

    def __init__(
        self,
        limits: Auto,
        *,
        cores: float,
        memory_left_bytes: int | None = None,
        prefetch_factor: int | None = None,
        shares_lock: bool = False,
        is_forked: bool = True,
    ) -> None:
        """Begin small.

        Args:
            limits: The user's.
            cores: What the process is allowed, as `cores_of_rank` says.
            memory_left_bytes: This process's part of what is left; None if not known.
            prefetch_factor: The user's; None is 2.
            shares_lock: Workers are threads.
            is_forked: Workers are processes that share the main process's memory: their resident
                memory is not their own, and each counts as 50 MB.
        """
        memory_bytes = limits.memory
        if memory_bytes is None and memory_left_bytes is not None:
            memory_bytes = memory_left_bytes // 2
        cpu_budget = None if limits.cpu is None else min(limits.cpu, cores)
        self._limits = WorkerLimits(cores, cpu_budget, memory_bytes, shares_lock)
        self.workers = WorkerSettings(self._limits.first_workers, prefetch_factor or _PREFETCH)
        self.reason = ""
        self.max_workers = self._limits.max_workers
        self._steady = SteadyState(self.workers, _WARM_UP)
        self._batch_bytes = 0  # of the largest
        self._own_bytes = 0 if shares_lock else WORKER_BYTES  # of the largest worker
        self._knows_rss = not (shares_lock or is_forked)
        self._known_workers: set[tuple[int, int]] = set()
        self._patience = _PATIENCE
        self._forget()

    def _forget(self, variation: float = 0.0) -> None:
        """Begin anew: nothing is known of the costs but their variation."""
        self._rows: list[TimingRow] = []
        self._num_before = 0  # batches that may be left out before the window begins
        self._variation = variation  # of a batch in a worker; the largest of any window
        self._basis: Means | None = None  # costs under the first workers, which hardly queue
        self._before: tuple[int, Means] | None = None  # workers before those on trial, and costs
        self._most = self.max_workers  # workers beyond it brought nothing
        self._least = 1  # fewer cost throughput
        self._usual: Means | None = None  # costs when it settled; None until then
        self._usual_variation = variation
        self._num_unusual = 0

    def observe(self, row: TimingRow) -> WorkerSettings | None:
        """Take note of a batch; returns other settings if there are to be any, else None."""
        self._batch_bytes = max(self._batch_bytes, row.num_bytes)
        if self._knows_rss:  # slots are counted by batches
            self._own_bytes = max(self._own_bytes, row.rss_bytes - row.pool_bytes)
        is_steady = self._steady.is_steady(row)
        worker = (row.worker_id, row.pid)
        if worker not in self._known_workers:  # its first batch holds imports and opening files
            self._known_workers.add(worker)
            return None
        # An iterator's first has no time of the main process's before it.
        if not is_steady or not row.consumer_ns:
            return None
        # Workers that began together end together. A window that begins and ends when nothing lies
        # ready holds no part of such a bunch.
        is_waited_for = row.given_ns - row.asked_ns > _A_WAIT_NS
        if self._num_before:
            self._num_before = 0 if is_waited_for else self._num_before - 1
            return None
        self._rows.append(row)
        num_more = len(self._rows) - self._window
        if num_more < 0 or (num_more < self.workers.num_workers and not is_waited_for):
            return None
        before = self.workers
        self._judge()
        return None if self.workers == before else self.workers

    @property
    def _window(self) -> int:
        least = _WINDOW if self._usual is None else _SETTLED_WINDOW
        return max(least, math.prod(self.workers))

    def _judge(self) -> None:
        """Decide, now that a window is full."""
        rows = rows_of(self._rows)
        now = Means.of(Sums.of(rows).span(), self.workers.num_workers, self._limits.cores)
        busy = rows["ended_ns"] - rows["begun_ns"] - np.maximum(rows["starved_ns"], 0)
        variation = float(busy.std() / max(busy.mean(), 1.0))
        self._variation = max(self._variation, variation)
        if (most := self._limits.by_memory(self._per_worker())) < self.workers.num_workers:
            self._change(
                most,
                f"batches of {self._batch_bytes / 1e6:.3g} MB, and {self._own_bytes / 1e6:.3g} MB "
                f"for a worker itself: memory is enough for {counted(most, 'worker')}",
            )
            self._forget()
        elif self._usual is not None and not self._has_drifted(self._usual, now):
            self._rows = []
        else:
            if self._usual is not None:
                self._forget(variation)
            self._weigh(now)

    def _weigh(self, now: Means) -> None:
        """Judge the workers on trial, if there are any, and try others, or settle."""
        num = self.workers.num_workers
        self._basis = self._basis or now
        if self._before is not None:
            num_before, before = self._before
            self._before = None
            if not self._has_paid(before, now):
                self._most = num_before if num > num_before else self._most
                self._least = num_before if num < num_before else self._least
                self._change(
                    num_before,
                    f"{counted(num, 'worker')} gave {amount(now.rate)} batches/s, {num_before} "
                    f"gave {amount(before.rate)}: back to the latter",
                )
                self._usual, self._usual_variation = before, self._variation
                return
        attempt = self._more(now) or self._fewer(now)
        if attempt is not None:
            self._before = num, now
            self._change(*attempt)
            return
        self._usual, self._usual_variation = now, self._variation
        self._rows = []

    def _has_paid(self, before: Means, now: Means) -> bool:
        """Return whether the workers on trial are worth keeping."""
        gain = now.rate / before.rate - 1
        num_before, num = before.num_workers, now.num_workers
        if num < num_before:
            return gain > -_SMALLEST_GAIN or now.wait_share < _SHORT_WAIT
        if self._limits.shares_lock:
            return gain > _GAIN_OF_THREADS * math.log2(num / num_before)
        if gain > _SMALLEST_GAIN:
            return True
        # So it is where workers could make more, and do not get the cores: others have them.
        capacity_gain = num * before.worker_s / max(num_before * now.worker_s, 1e-9) - 1
        return gain > -_NOISE and capacity_gain > _CAPACITY_GAIN

    def _more(self, now: Means) -> tuple[int, str] | None:
        """Return the number of workers that the model says, if it is larger."""
        num = self.workers.num_workers
        target, reason = self._target()
        reachable = min(target, self._most, 2 * num if self._limits.shares_lock else target)
        if reachable <= num or now.wait_share < _SHORT_WAIT:
            return None
        return reachable, reason if reachable == target else f"{reason}; tries {reachable}"

    def _fewer(self, now: Means) -> tuple[int, str] | None:
        """Return fewer workers if these cannot all be at work."""
        num = self.workers.num_workers
        enough = max(self._target()[0], self._least)
        if now.batches < _SETTLED_WINDOW or enough > num / _STEP:
            return None
        return enough, (
            f"{now.rate * now.made_s:.1f} of {num} workers are at work: a batch takes "
            f"{duration(now.worker_s)} in a worker, and the main process gets one every "
            f"{duration(1 / now.rate)}"
        )

    def _target(self) -> tuple[int, str]:
        """Return the number of workers that the model says, and why."""
        assert self._basis is not None
        spare = max(self._variation - _USUAL_VARIATION, 0.0)
        return self._limits.target(self._basis, self._per_worker(), spare)

    def _per_worker(self) -> int:
        # A slot for each batch under way, and one to fill while the main process holds the last.
        return self._own_bytes + (self.workers.prefetch_factor + 1) * self._batch_bytes

    def _has_drifted(self, usual: Means, now: Means) -> bool:
        """Return whether costs have changed for good, or differ more than was known."""
        if self._variation > self._usual_variation + 2 * _USUAL_VARIATION:
            return True
        pairs = ((usual.trainer_s, now.trainer_s), (usual.worker_s, now.worker_s))
        ratios = [max(new_s, _QUICKEST_S) / max(old_s, _QUICKEST_S) for old_s, new_s in pairs]
        is_unusual = max(ratios) > _DRIFT or min(ratios) < 1 / _DRIFT
        self._num_unusual = self._num_unusual + 1 if is_unusual else 0
        if self._num_unusual < self._patience:
            return False
        self._patience = min(2 * self._patience, _MOST_PATIENCE)
        return True

    def _change(self, num_workers: int, reason: str) -> None:
        self.workers = self.workers._replace(num_workers=num_workers)
        self.reason = reason
        self._steady.expect(self.workers)
        self._rows, self._num_before = [], num_workers


class SteadyState:
    """Tells which batches show what the present workers can do.

    Not those that were made before it was there, nor those at the start of an epoch, when all
    workers begin at once. A new worker counts as there with its second batch.
    """

    def __init__(self, workers: WorkerSettings, num_first: int) -> None:
        """Begin with workers whose first `num_first` batches do not count."""
        self._workers = workers
        self._left = num_first  # batches that do not count in any case
        self._missing = 0  # workers that may be yet to come
        self._seen: dict[int, int] = {}  # batches of each worker since then
        self._given_up_ns = 0
        self._epoch: int | None = None
        self._in_epoch = 0

    def expect(self, workers: WorkerSettings) -> None:
        """Wait for other workers."""
        self._left = max(self._left, math.prod(self._workers) + 2)  # those under way
        self._missing = workers.num_workers * (workers.num_workers > self._workers.num_workers)
        self._workers, self._seen = workers, {}

    def is_steady(self, row: TimingRow) -> bool:
        """Return whether a batch counts; to be asked for each."""
        if row.epoch != self._epoch or not row.consumer_ns:  # of another iterator
            lookahead = math.prod(self._workers)
            # Of a short epoch something must be left.
            short = self._in_epoch // 4 if self._epoch is not None else lookahead
            self._left = max(self._left, min(lookahead, short))
            self._epoch, self._in_epoch = row.epoch, 0
        self._in_epoch += 1
        if self._left:
            self._left -= 1
        if self._missing:
            if not self._seen:
                self._given_up_ns = row.asked_ns + _LONGEST_START_NS
            self._seen[row.worker_id] = self._seen.get(row.worker_id, 0) + 1
            are_there = sum(num >= 2 for num in self._seen.values()) >= self._missing
            if are_there or row.given_ns > self._given_up_ns:
                self._missing = 0
        return not self._left and not self._missing
