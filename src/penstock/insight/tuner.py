# SPDX-License-Identifier: Apache-2.0
"""`num_workers="auto"`: how many workers there are to be, judged by what batches took.

    warming up ──▶ measuring ──▶ changing workers ──▶ settling ──┐
                       ▲  │                                       │
                       │  └──▶ settled ──(costs change for good)  │
                       └──────────────────────────────────────────┘

Guarantees
    A model (`penstock.insight.model`) says from what batches cost how many workers are enough, so
    the first change goes at once to about the right number. What it brought is then measured, in
    batches that the main process is given per second: workers that bring nothing are given back.
    It ends. What brought nothing bounds what is tried next, from above or from below, until costs
    change for good, which must show in three windows in a row.

Assumptions
    Times are noisy: 10 to 20 % from batch to batch, more where others use the machine. Means over
    12 batches or more are compared, and a result that speaks against the model is measured twice.
    Fewer workers are tried only when much is known, and measured twice in any case.
    Threads wait for each other's lock, which looks like reading: the model is not believed, and
    they are doubled as long as that pays.
    The main process's own time has outliers that count: where a GPU is waited for only now and
    then, the mean tells what a batch takes, and the median does not.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from penstock.engine.timing import WorkerSettings
from penstock.insight.model import WorkerLimits
from penstock.insight.trials import Costs, DriftDetector, MemoryModel, Trials
from penstock.insight.units import amount, duration
from penstock.plural import counted

if TYPE_CHECKING:
    from penstock.engine.timing import TimingRow
    from penstock.insight.budgets import Auto

__all__ = ["SteadyState", "Tuner"]

_FIRST_PREFETCH: Final = 2
_MOST_PREFETCH: Final = 8
_WARM_UP: Final = 4  # batches that do not count at the very start
_MIN_WINDOW: Final = 12  # batches given; at least
_SETTLED_WINDOW: Final = 24
_MANY: Final = 2 * _SETTLED_WINDOW  # so many say enough to try fewer workers
_UNEVEN_WINDOW: Final = 8  # batches, times the square of their variation ...
_LONGEST_WINDOW: Final = 96  # ... but no more than that
_VERY_UNEVEN: Final = 1.0  # standard deviation from batch to batch, as a share of the mean
_SMALLEST_GAIN: Final = 0.04  # what brings less is given back
_GAIN_OF_THREADS: Final = 0.15  # from twice as many
_NOISE: Final = 0.3  # on a machine that others use too
_CAPACITY_GAIN: Final = 0.2  # more of it is more than noise of the workers' own times
_A_WAIT_NS: Final = 150_000  # a batch that lies ready is there in some 50 us
_DOUBT: Final = 1.5
_STEP: Final = 1.25  # settings that differ by less are not worth a try
_SHORT_WAIT: Final = 0.03  # share of the time; below it no more workers are needed
_LONG_WAIT: Final = 0.05
_TOO_LONG_WAIT: Final = 0.1  # more workers than the model says are worth a try
_SLACK: Final = 1.15  # workers for each that is at work all the time
_IDLE_SHARE: Final = 0.05  # of workers' time; below it there was always something to do
_LONGEST_START_NS: Final = 10_000_000_000  # an interpreter that imports torch takes 2 to 5 s
_SHORTFALL: Final = 0.94  # of what the model says; below it workers have to wait in between


class Tuner:
    """Decides on the workers while training runs. Pure: no clock, no look at the machine.

    It lives on from epoch to epoch. `observe` takes some 3 us, and once per window some 50.

    Attributes:
        workers: What there is to be, now.
        reason: Of the last change, in words; empty before any.
        max_workers: It never asks for more: 32, or 4 per core if that is more, within memory.

    Concurrency:
        One thread.

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
            prefetch_factor: The user's, which is kept; None chooses it.
            shares_lock: Workers are threads.
            is_forked: Workers are processes that share the main process's memory.
        """
        self._limits = WorkerLimits.of(limits, cores, memory_left_bytes, shares_lock=shares_lock)
        self.workers = WorkerSettings(
            self._limits.first_workers, prefetch_factor or _FIRST_PREFETCH
        )
        self._is_prefetch_given = prefetch_factor is not None
        self.reason = ""
        self.max_workers = self._limits.max_workers
        self._steady = SteadyState(self.workers, _WARM_UP)
        self._memory = MemoryModel(is_thread=shares_lock, is_forked=is_forked)
        self._known_workers: set[tuple[int, int]] = set()
        self._before: WorkerSettings | None = None  # the settings before those on trial
        self._is_settled = False
        self._drift_detector = DriftDetector()
        self._forget(Costs())

    def _forget(self, costs: Costs) -> None:
        """Begin anew: nothing is known but these costs."""
        self._now = costs  # of this window
        self._trials = Trials(costs)
        self._is_settled = False
        self._too_many = self.max_workers + 1
        self._too_few = 0
        self._prefetches = {self.workers.prefetch_factor}
        self._is_second_look = False
        self._most_before = 0  # batches that may be left out before the window begins

    def observe(self, row: TimingRow) -> WorkerSettings | None:
        """Take note of a batch; returns other settings if there are to be any, else None."""
        self._memory.add(row)
        worker = (row.worker_id, row.pid)
        is_steady = self._steady.is_steady(row)
        if worker not in self._known_workers:
            self._known_workers.add(worker)
        elif is_steady:
            self._now.add_made(row)
        # An iterator's first has no time of the main process's before it.
        if not is_steady or not row.consumer_ns or not self._is_begun(row):
            return None
        self._now.add_given(row)
        return self._judge() if self._is_full(row) else None

    def _is_begun(self, row: TimingRow) -> bool:
        """Return whether the window has begun, which it does after a batch that was waited for.

        Workers that began together end together. A window that begins and ends when nothing lies
        ready holds neither a part of such a bunch, nor what had been made ahead before it.
        """
        if self._most_before == 0:
            return True
        self._most_before = 0 if _is_waited_for(row) else self._most_before - 1
        return False

    def _is_full(self, row: TimingRow) -> bool:
        now, size = self._now, self._window
        if now.num_given < size or now.num_made < size // 2:
            return False
        return _is_waited_for(row) or now.num_given >= size + self.workers.num_workers

    @property
    def _window(self) -> int:
        lookahead = self.workers.num_workers * self.workers.prefetch_factor
        looks = 2 if self._is_second_look else 1
        # Where one batch in fifty takes long, a window is to hold some of them.
        uneven = min(int(_UNEVEN_WINDOW * self._trials.variation**2), _LONGEST_WINDOW)
        least = _SETTLED_WINDOW if self._is_settled else _MIN_WINDOW
        return looks * max(least, lookahead, uneven)

    def _judge(self) -> WorkerSettings | None:
        """Decide, now that a window is full."""
        before = self.workers
        if self._fit_memory():
            pass
        elif self._is_settled:
            self._look_on()
        else:
            self._weigh()
        return None if self.workers == before else self.workers

    def _weigh(self) -> None:
        """Judge the settings on trial, if there are any, and try others, or settle."""
        costs, before, now = self._now, self._before, self.workers
        self._trials.note(now, costs)
        if before is not None:
            is_smaller = now.num_workers < before.num_workers
            has_paid = self._has_paid(before, costs)
            if not self._is_second_look and (is_smaller or not has_paid):
                self._is_second_look = True  # the window goes on, to twice its length
                return
            if not has_paid:
                self._give_back(before, costs)
                return
            if is_smaller:
                self._too_many = now.num_workers + 1
            elif self._trials.gain(before, now) > _SMALLEST_GAIN:
                self._too_few = max(self._too_few, min(before.num_workers, now.num_workers - 1))
        self._before = None
        self._trials.pool += costs
        if not self._try_next(costs):
            self._settle(costs)

    def _has_paid(self, before: WorkerSettings, costs: Costs) -> bool:
        """Return whether the settings on trial are worth keeping."""
        trials, now = self._trials, self.workers
        gain = trials.gain(before, now)
        if now.num_workers < before.num_workers:
            return gain > -_SMALLEST_GAIN or costs.wait_share < _SHORT_WAIT
        if now.num_workers > before.num_workers and self._limits.shares_lock:
            return gain > _GAIN_OF_THREADS * math.log2(now.num_workers / before.num_workers)
        # Where batches differ much, so many say little, and the model is trusted. So it is where
        # workers can make more, and only do not get the cores: others have them, for a while.
        doubt = _DOUBT * trials.error(costs, trials.under[before])
        if gain > _SMALLEST_GAIN - doubt:
            return True
        is_within_target = before.num_workers < now.num_workers <= self._target_workers
        return (
            is_within_target
            and gain > -_NOISE
            and trials.capacity_gain(before, now) > _CAPACITY_GAIN
        )

    @property
    def _target_workers(self) -> int:
        per_worker = self._memory.per_worker(self.workers.prefetch_factor)
        return self._limits.target(self._trials.basis, per_worker).num_workers

    def _give_back(self, before: WorkerSettings, costs: Costs) -> None:
        """Return to the settings before."""
        trials, tried = self._trials, self.workers
        trials.pool += costs
        found = (
            f"{_named(tried)} gave {amount(costs.rate)} batches/s, {_named(before)} "
            f"{amount(trials.under[before].rate)}"
        )
        self._before = None
        if tried.num_workers < before.num_workers:
            self._too_few = before.num_workers - 1
        elif tried.num_workers > before.num_workers:
            self._too_many = before.num_workers + 1
        self._change(before, f"{found}: back to the latter")
        self._settle(costs=None)

    def _try_next(self, costs: Costs) -> bool:
        """Try settings that are worth it; returns False if there are none."""
        attempt = (
            self._more(costs)
            or self._fewer(costs)
            or self._other_prefetch(costs)
            or self._beyond_model(costs)
        )
        if attempt is None:
            return False
        self._is_settled = False
        self._before = self.workers
        self._change(*attempt)
        return True

    def _more(self, costs: Costs) -> tuple[WorkerSettings, str] | None:
        """Return the settings that the model says."""
        now, factor = self.workers
        basis = self._trials.basis
        target = self._limits.target(basis, self._memory.per_worker(factor))
        reachable = min(target.num_workers, self._too_many - 1)
        if self._limits.shares_lock:
            reachable = min(reachable, 2 * now)
        is_short = costs.wait_share < _SHORT_WAIT
        is_small_step = reachable < _STEP * now and costs.wait_share < _LONG_WAIT
        if reachable <= now or is_short or is_small_step:
            return None
        reason = target.reason
        if reachable < target.num_workers:
            reason += f"; tries {reachable}"
        return WorkerSettings(reachable, factor), reason

    def _fewer(self, costs: Costs) -> tuple[WorkerSettings, str] | None:
        """Return fewer workers if these cannot all be at work."""
        if costs.num_made < _MANY:
            return None
        now, trials = self.workers.num_workers, self._trials
        basis, enough = trials.basis, self._target_workers
        # As many workers as would be at work all the time, if a batch took what it took at first.
        at_work = costs.rate * (basis.worker_s + costs.worker_starved_s)
        if trials.has_slowed:  # the model knows nothing of what makes them wait
            enough = min(enough, math.ceil((_SLACK + 2 * trials.error(basis)) * at_work))
        enough = max(enough, self._too_few + 1, 1)
        if enough > now / _STEP:
            return None
        reason = (
            f"{at_work:.1f} of {now} workers are at work: a batch takes "
            f"{duration(costs.worker_s)} in a worker, and the main process gets one every "
            f"{duration(costs.cycle_s)}"
        )
        return WorkerSettings(enough, self.workers.prefetch_factor), reason

    def _other_prefetch(self, costs: Costs) -> tuple[WorkerSettings, str] | None:
        """Return settings that work further ahead, if they should be faster than it is."""
        now, factor = self.workers, 2 * self.workers.prefetch_factor
        rate = self._limits.rate(costs, now.num_workers)
        if (
            self._is_prefetch_given
            or costs.wait_share < _LONG_WAIT
            or costs.rate > _SHORTFALL * rate
            or costs.idle_share < _IDLE_SHARE
            or factor > _MOST_PREFETCH
            or factor in self._prefetches
            or self._by_memory(factor) < now.num_workers
        ):
            return None
        self._prefetches.add(factor)
        reason = (
            f"{_named(now)} could give {amount(rate)} batches/s and give {amount(costs.rate)}, as "
            "batches do not all take the same: works further ahead"
        )
        return now._replace(prefetch_factor=factor), reason

    def _beyond_model(self, costs: Costs) -> tuple[WorkerSettings, str] | None:
        """Return more workers than the model says, where few batches take very long.

        The main process waits for them while cores are idle: the more workers, the further ahead.
        """
        now, factor = self.workers
        more = min(2 * now, self._too_many - 1, self._by_memory(factor))
        if (
            more <= now
            or self._trials.variation < _VERY_UNEVEN
            or costs.wait_share < _TOO_LONG_WAIT
            or not self._limits.has_idle_cores(costs)
        ):
            return None
        reason = f"the main process waits {costs.wait_share:.0%} of the time, and cores are idle"
        return WorkerSettings(more, factor), f"{reason}: tries {more} workers"

    def _by_memory(self, prefetch_factor: int) -> int:
        return self._limits.by_memory(self._memory.per_worker(prefetch_factor))

    def _fit_memory(self) -> bool:
        """Return whether batches have grown beyond memory, and workers had to go."""
        now = self.workers
        if self._by_memory(now.prefetch_factor) >= now.num_workers:
            return False
        factor = max(1, min(now.prefetch_factor // 2, _FIRST_PREFETCH))
        factor = now.prefetch_factor if self._is_prefetch_given else factor
        most = min(self._by_memory(factor), now.num_workers)
        if WorkerSettings(most, factor) == now:
            return False
        self._before = None
        memory = self._memory
        reason = f"batches of {memory.batch_bytes / 1e6:.3g} MB"
        if memory.own_bytes:
            reason += f", and {memory.own_bytes / 1e6:.3g} MB for a worker itself"
        self._change(WorkerSettings(most, factor), f"{reason}: memory is enough for {most} workers")
        self._forget(Costs())
        return True

    def _settle(self, costs: Costs | None) -> None:
        """Leave it at that, and watch whether costs stay what they are."""
        self._is_settled = True
        self._drift_detector.begin(costs)
        self._now = Costs()

    def _look_on(self) -> None:
        """Begin anew if costs have changed for good; or judge the settings by all that is known."""
        costs, self._now = self._now, Costs()
        new = self._drift_detector.see(costs, self._trials)
        if new is not None:
            self._forget(new)
            self._weigh()
        elif self._drift_detector.is_look_due:
            usual = self._drift_detector.usual
            assert usual is not None
            self._trials.note(self.workers, usual)
            self._try_next(usual)

    def _change(self, workers: WorkerSettings, reason: str) -> None:
        self._steady.expect(workers)
        self.workers = workers
        self.reason = reason
        self._is_second_look = False
        self._now = Costs()
        self._most_before = workers.num_workers


def _is_waited_for(row: TimingRow) -> bool:
    return row.given_ns - row.asked_ns > _A_WAIT_NS


def _named(workers: WorkerSettings) -> str:
    return f"{counted(workers.num_workers, 'worker')} (prefetch_factor={workers.prefetch_factor})"


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
