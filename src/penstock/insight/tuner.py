# SPDX-License-Identifier: Apache-2.0
"""`num_workers="auto"`: how many workers there are to be, judged by what batches took.

    warming up ──▶ measuring ──▶ changing the crew ──▶ settling ──┐
                       ▲  │                                       │
                       │  └──▶ settled ──(costs change for good)  │
                       └──────────────────────────────────────────┘

Guarantees
    A model (see `crew_model`) says from what batches cost how many workers are enough, so the first
    change goes at once to about the right number. What it brought is then measured, in batches that
    the trainer is given per second: workers that bring nothing are given back.
    It ends. What brought nothing bounds what is tried next, from above or from below, until costs
    change for good, which must show in three windows in a row.

Assumptions
    Times are noisy: 10 to 20 % from batch to batch. Means over 12 batches or more are compared, and
    a result that speaks against the model is measured twice.
    The trainer's own time has outliers that count: where a GPU is waited for only now and then, the
    mean tells what a batch takes, and the median does not.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from penstock.engine.accounts import Crew
from penstock.insight.arrivals import Arrivals
from penstock.insight.batch_costs import Costs
from penstock.insight.crew_model import Room, Wish, milliseconds

if TYPE_CHECKING:
    from penstock.engine.accounts import BatchRecord
    from penstock.insight.budgets import Limits

__all__ = ["Tuner"]

_FIRST_PREFETCH: Final = 2
_MOST_PREFETCH: Final = 8
_WARM_UP: Final = 4  # batches that do not count at the very start
_MIN_WINDOW: Final = 12  # batches given; at least
_WATCH_WINDOW: Final = 24
_WATCH_TIMES: Final = 3  # windows in a row
_LOOKS: Final = (2, 6)  # after so many quiet windows the crew is judged once more
_DRIFT: Final = 1.3
_SMALLEST_GAIN: Final = 0.04  # what brings less is given back
_HARM: Final = 0.1
_A_WAIT_NS: Final = 150_000  # a batch that lies ready is there in some 50 us
_DOUBT: Final = 1.5
_USUAL_ERROR: Final = 0.06  # of two windows of batches that differ by 15 %
_STEP: Final = 1.25  # a crew that differs by less is not worth a try
_SHORT_WAIT: Final = 0.03  # share of the time; below it nobody needs more workers
_LONG_WAIT: Final = 0.05
_SLACK: Final = 1.15  # workers for each that is at work all the time
_SHORTFALL: Final = 0.94  # of what the model says; below it workers have to wait in between


class Tuner:
    """Decides on the crew while training runs. Pure: no clock, no look at the machine.

    It lives on from epoch to epoch. `observe` takes some 3 us, and once per window some 50.

    Attributes:
        crew: Who there is to be, now.
        reason: Of the last change, in words; empty before any.
        max_workers: It never asks for more: 32, or 4 per core if that is more, within memory.

    Concurrency:
        One thread.

    Example:
        >>> from penstock.insight.budgets import Limits
        >>> Tuner(Limits(), cores=8.0).crew
        Crew(num_workers=2, prefetch_factor=2)
    """

    def __init__(
        self,
        limits: Limits,
        *,
        cores: float,
        memory_left_bytes: int | None = None,
        prefetch_factor: int | None = None,
    ) -> None:
        """Begin small.

        Args:
            limits: The user's.
            cores: What the process is allowed, as `cores_allowed` says.
            memory_left_bytes: What the machine and the control group leave; None if not known.
            prefetch_factor: The user's, which is kept; None chooses it.
        """
        self._room = Room.of(limits, cores, memory_left_bytes)
        self.crew = Crew(self._room.first_workers, prefetch_factor or _FIRST_PREFETCH)
        self._is_prefetch_given = prefetch_factor is not None
        self.reason = ""
        self.max_workers = self._room.max_workers
        self._arrivals = Arrivals(self.crew, _WARM_UP)
        self._batch_bytes = 0
        self._known_workers: set[tuple[int, int]] = set()
        self._before: Crew | None = None  # the crew that the one on trial replaced
        self._is_settled = False
        self._forget(Costs())

    def _forget(self, costs: Costs) -> None:
        """Begin anew: nothing is known but these costs."""
        self._now = costs  # of this window
        self._first = Costs()  # of the first window of these times: by few workers
        self._pool = Costs()  # of all windows of these times
        self._rates: dict[Crew, float] = {}  # batches per second
        self._looks: dict[Crew, int] = {}  # of how many batches these come
        self._variation = costs.variation  # from batch to batch, the largest of any window
        self._too_many = self.max_workers + 1
        self._too_few = 0
        self._prefetches = {self.crew.prefetch_factor}
        self._has_halved = False
        self._is_second_look = False
        self._most_before = 0  # batches that may be left out before the window begins
        self._watched: list[Costs] = []

    def observe(self, record: BatchRecord) -> Crew | None:
        """Take note of a batch; returns another crew if there is to be one, else None."""
        times = record.times
        if times.num_bytes > self._batch_bytes:
            self._batch_bytes = times.num_bytes
        worker = (record.worker_id, record.pid)
        is_steady = self._arrivals.is_steady(record)
        if worker not in self._known_workers:
            self._known_workers.add(worker)
        elif is_steady:
            self._now.add_made(record)
        # An iterator's first has no time of the trainer's before it.
        if not is_steady or not record.consumer_ns or not self._is_begun(record):
            return None
        self._now.add_given(record)
        return self._judge() if self._is_full(record) else None

    def _is_begun(self, record: BatchRecord) -> bool:
        """Return whether the window has begun, which it does after a batch that was waited for.

        Workers that began together end together. A window that begins and ends when nothing lies
        ready holds neither a part of such a bunch, nor what had been made ahead before it.
        """
        if self._most_before == 0:
            return True
        self._most_before = 0 if _is_waited_for(record) else self._most_before - 1
        return False

    def _is_full(self, record: BatchRecord) -> bool:
        now, size = self._now, self._window
        if now.num_given < size or now.num_made < size // 2:
            return False
        return _is_waited_for(record) or now.num_given >= size + self.crew.num_workers

    @property
    def _window(self) -> int:
        lookahead = self.crew.num_workers * self.crew.prefetch_factor
        looks = 2 if self._is_second_look else 1
        return looks * max(_WATCH_WINDOW if self._is_settled else _MIN_WINDOW, lookahead)

    def _judge(self) -> Crew | None:
        """Decide, now that a window is full."""
        before = self.crew
        if self._fit_memory():
            pass
        elif self._is_settled:
            self._watch()
        else:
            self._weigh()
        return None if self.crew == before else self.crew

    def _weigh(self) -> None:
        """Judge the crew on trial, if there is one, and try another, or settle."""
        costs = self._now
        self._note(costs)
        if not self._first.num_made:
            self._first = costs
        if self._before is not None and not self._has_paid(costs):
            if not self._is_second_look:
                self._is_second_look = True  # the window goes on, to twice its length
                return
            self._give_back(costs)
            return
        if self._before is not None and self._before.num_workers > self.crew.num_workers:
            self._too_many = self.crew.num_workers + 1
        self._before = None
        self._go_on(costs)

    def _has_paid(self, costs: Costs) -> bool:
        """Return whether the crew on trial is worth keeping."""
        before, now = self._before, self.crew
        assert before is not None
        gain = self._rates[now] / self._rates[before] - 1
        # Where batches differ much, so many say little, and the model is trusted.
        doubt = _DOUBT * self._error(costs.num_made, self._looks[before])
        if now.num_workers < before.num_workers:
            return gain > -_SMALLEST_GAIN or costs.wait_share < _SHORT_WAIT
        return gain > _SMALLEST_GAIN - doubt

    def _give_back(self, costs: Costs) -> None:
        """Return to the crew before, or to one between."""
        self._pool += costs
        before, tried = self._before, self.crew
        assert before is not None
        rate, old_rate = self._rates[tried], self._rates[before]
        found = f"{_named(tried)} gave {rate:.3g} batches/s, {_named(before)} {old_rate:.3g}"
        self._before = None
        if tried.num_workers < before.num_workers:
            self._too_few = before.num_workers - 1
        elif tried.num_workers > before.num_workers:
            self._too_many = before.num_workers + 1
            half = math.isqrt(before.num_workers * tried.num_workers)
            if rate < (1 - _HARM) * old_rate and not self._has_halved:
                self._has_halved = True
                if half >= _STEP * before.num_workers:
                    self._before = before
                    self._change(Crew(half, tried.prefetch_factor), f"{found}: tries between")
                    return
        self._change(before, f"{found}: back to the latter")
        self._settle(costs=None)

    def _go_on(self, costs: Costs) -> None:
        """Try what the model says, or settle."""
        self._pool += costs
        attempt = self._next(costs)
        if attempt is None:
            self._settle(costs)
            return
        self._before = self.crew
        self._change(*attempt)

    def _next(self, costs: Costs) -> tuple[Crew, str] | None:
        """Return a crew that is worth a try, and why; None if there is none."""
        now = self.crew.num_workers
        basis = self._basis()
        wish = self._room.wish(basis, self._batch_bytes, self.crew.prefetch_factor)
        wished = wish.num_workers
        if wished > now and self._is_worth(wished, costs):
            wished = min(wished, self._too_many - 1)
            return Crew(wished, self.crew.prefetch_factor), self._room.explain(
                wish._replace(num_workers=wished), basis
            )
        fewer = self._fewer(wish, basis, costs)
        if fewer is not None:
            return fewer
        return self._other_prefetch(costs)

    def _basis(self) -> Costs:
        """Return the costs to reckon with: all there are of these times.

        But batches that take longer the more workers there are (storage at its limit, a lock) would
        call for yet more workers: those of the first window, made by few, tell what one takes.
        """
        first, pool = self._first, self._pool
        drift = _DRIFT + 3 * self._error(first.num_made, pool.num_made)
        return pool if pool.worker_s <= drift * first.worker_s else first

    def _is_worth(self, wished: int, costs: Costs) -> bool:
        now = self.crew.num_workers
        reachable = min(wished, self._too_many - 1)
        if reachable <= now or costs.wait_share < _SHORT_WAIT:
            return False
        return reachable >= _STEP * now or costs.wait_share >= _LONG_WAIT

    def _fewer(self, wish: Wish, basis: Costs, costs: Costs) -> tuple[Crew, str] | None:
        """Return a smaller crew if this one cannot all be at work."""
        now = self.crew.num_workers
        # As many workers as would be at work all the time, if a batch took what it took at first.
        at_work = self._rates[self.crew] * (basis.worker_s + costs.worker_starved_s)
        needed = math.ceil((_SLACK + 2 * self._error(basis.num_made)) * at_work)
        enough = max(min(wish.num_workers, needed), self._too_few + 1, 1)
        if enough > now / _STEP:
            return None
        reason = (
            f"{at_work:.1f} of {now} workers are at work: a batch takes "
            f"{milliseconds(costs.worker_s)} in a worker, and the trainer gets one every "
            f"{milliseconds(costs.cycle_s)}"
        )
        return Crew(enough, self.crew.prefetch_factor), reason

    def _other_prefetch(self, costs: Costs) -> tuple[Crew, str] | None:
        """Return the crew working further ahead, if it should be faster than it is."""
        now = self.crew
        factor = 2 * now.prefetch_factor
        rate = self._room.rate(costs, now.num_workers)
        if (
            self._is_prefetch_given
            or costs.wait_share < _LONG_WAIT
            or self._rates[now] > _SHORTFALL * rate
            or factor > _MOST_PREFETCH
            or factor in self._prefetches
            or self._room.by_memory(self._batch_bytes, factor) < now.num_workers
        ):
            return None
        self._prefetches.add(factor)
        reason = (
            f"{_named(now)} could give {rate:.3g} batches/s and give {self._rates[now]:.3g}, as "
            "batches do not all take the same: works further ahead"
        )
        return now._replace(prefetch_factor=factor), reason

    def _fit_memory(self) -> bool:
        """Return whether batches have grown beyond memory, and the crew had to shrink."""
        now = self.crew
        if self._room.by_memory(self._batch_bytes, now.prefetch_factor) >= now.num_workers:
            return False
        factor = max(1, min(now.prefetch_factor // 2, _FIRST_PREFETCH))
        if self._is_prefetch_given:
            factor = now.prefetch_factor
        most = min(self._room.by_memory(self._batch_bytes, factor), now.num_workers)
        if Crew(most, factor) == now:
            return False
        self._before = None
        self._change(
            Crew(most, factor),
            f"batches of {self._batch_bytes / 1e6:.3g} MB: memory is enough for {most} workers",
        )
        self._forget(Costs())
        self._is_settled = False
        return True

    def _settle(self, costs: Costs | None) -> None:
        """Leave it at that, and watch whether costs stay what they are."""
        self._is_settled = True
        self._usual = None
        if costs is not None:
            self._usual = Costs()
            self._usual += costs
        self._num_usual = 0
        self._watched = []
        self._now = Costs()

    def _watch(self) -> None:
        """Begin anew if costs have changed for good."""
        costs, self._now = self._now, Costs()
        if self._usual is None:
            self._usual = costs
            return  # a crew that was given back is measured anew
        self._watched.append(costs)
        if not self._differ(self._usual, costs):
            self._add_usual()
            return
        if len(self._watched) < _WATCH_TIMES:
            return
        new = Costs()
        for watched in self._watched[1:]:  # the first may be half of what was before
            new += watched
        self._forget(new)
        self._is_settled = False
        self._weigh()

    def _add_usual(self) -> None:
        """Know better what batches cost, and look at it again once or twice."""
        usual, watched = self._usual, self._watched
        assert usual is not None
        self._watched = []
        if self._num_usual >= _LOOKS[-1]:
            return
        before = self._num_usual
        for costs in watched:
            usual += costs
            self._pool += costs
        self._num_usual += len(watched)
        if any(before < look <= self._num_usual for look in _LOOKS):
            self._note(usual)
            attempt = self._next(usual)
            if attempt is not None:
                self._is_settled = False
                self._before = self.crew
                self._change(*attempt)

    def _note(self, costs: Costs) -> None:
        self._rates[self.crew] = costs.rate
        self._looks[self.crew] = costs.num_made
        self._variation = max(self._variation, costs.variation)

    def _error(self, *nums: int) -> float:
        """Return the standard error of means over so many batches, beyond what is usual."""
        error = self._variation * math.sqrt(sum(1 / max(num, 1) for num in nums))
        return max(error - _USUAL_ERROR, 0)

    def _differ(self, usual: Costs, costs: Costs) -> bool:
        pairs = ((usual.trainer_s, costs.trainer_s), (usual.worker_s, costs.worker_s))
        # Below 0.2 ms it is noise of the clock and of the loader itself.
        ratios = [(max(new_s, 2e-4) / max(old_s, 2e-4)) for old_s, new_s in pairs]
        drift = _DRIFT + 3 * self._error(usual.num_made, costs.num_made)
        return any(ratio > drift or ratio < 1 / drift for ratio in ratios)

    def _change(self, crew: Crew, reason: str) -> None:
        self._arrivals.expect(crew)
        self.crew = crew
        self.reason = reason
        self._is_second_look = False
        self._now = Costs()
        self._most_before = crew.num_workers


def _is_waited_for(record: BatchRecord) -> bool:
    return record.given_ns - record.asked_ns > _A_WAIT_NS


def _named(crew: Crew) -> str:
    workers = "1 worker" if crew.num_workers == 1 else f"{crew.num_workers} workers"
    return f"{workers} (prefetch_factor={crew.prefetch_factor})"
