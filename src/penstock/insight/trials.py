# SPDX-License-Identifier: Apache-2.0
"""What batches cost under each number of workers that the tuner tried, and what workers take.

Memory of a worker: under fork its resident memory is the main process's to begin with, and what of
it the worker has written to since, and so has for itself, is not known cheaply. It counts as 50 MB,
plus what the worker has grown by since its first batch. Under spawn and forkserver all that is
resident counts, at least 50 MB. Threads have no memory of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final, Self

from penstock.insight.model import WORKER_BYTES

if TYPE_CHECKING:
    from penstock.engine.timing import TimingRow, WorkerSettings

__all__ = ["Costs", "DriftDetector", "MemoryModel", "Trials"]

_NS: Final = 1e-9
_CLOCK_ERROR: Final = 1.05
_DRIFT: Final = 1.3
_USUAL_ERROR: Final = 0.06  # of two windows of batches that differ by 15 %
_QUICKEST_S: Final = 2e-4  # below it there is noise of the clock and of the loader itself
_TIMES: Final = 3  # windows in a row that differ ...
_MOST_TIMES: Final = 24  # ... and twice as many after each alarm: costs may go to and fro
_LOOKS: Final = (2, 6)  # after so many unchanged windows the settings are judged once more


@dataclass(slots=True)
class Costs:
    """Sums over batches, and the means that follow. Seconds per batch, unless a name says more.

    A batch is counted twice over, as the two sides have different batches that do not count: the
    main process's side leaves out those that were given while workers started, the worker's side
    the first one of each worker, which holds imports and opening files.
    """

    num_given: int = 0
    num_made: int = 0
    _cycle_ns: int = 0
    _consumer_ns: int = 0
    _trainer_cpu_ns: int = 0
    _trainer_starved_ns: int = 0
    _busy_ns: int = 0
    _busy2_ns2: int = 0
    _cpu_ns: int = 0
    _starved_ns: int = 0
    _idle_ns: int = 0
    _wall_ns: int = 0

    def add_given(self, row: TimingRow) -> None:
        """Count what a batch was to the main process."""
        self.num_given += 1
        self._cycle_ns += row.given_ns - row.asked_ns + row.consumer_ns
        self._consumer_ns += row.consumer_ns
        self._trainer_cpu_ns += row.trainer_cpu_ns
        self._trainer_starved_ns += max(row.trainer_starved_ns, 0)

    def add_made(self, row: TimingRow) -> None:
        """Count what a batch was to its worker."""
        cpu_ns, starved_ns = row.cpu_ns, max(row.starved_ns, 0)
        wall_ns = row.ended_ns - row.begun_ns
        # Time without a core says how many run, not what a batch takes. It is measured by another
        # clock than the rest: what is left cannot be less than the CPU time of one thread.
        busy_ns = max(wall_ns - starved_ns, min(cpu_ns, wall_ns))
        if wall_ns < cpu_ns <= _CLOCK_ERROR * wall_ns:
            cpu_ns = wall_ns  # beyond that, a worker has threads of its own
        self.num_made += 1
        self._busy_ns += busy_ns
        self._busy2_ns2 += busy_ns * busy_ns
        self._cpu_ns += cpu_ns
        self._starved_ns += starved_ns
        self._idle_ns += row.idle_ns
        self._wall_ns += wall_ns

    def __iadd__(self, other: Costs) -> Self:
        """Add the sums of others."""
        for field in fields(Costs):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self

    @property
    def cycle_s(self) -> float:
        """From one batch given to the next."""
        return self._per_given(self._cycle_ns)

    @property
    def wait_share(self) -> float:
        """Share of the time that the main process waited, from 0 to 1."""
        return 1 - self._consumer_ns / self._cycle_ns if self._cycle_ns else 0.0

    @property
    def trainer_s(self) -> float:
        """The main process's own code, as it would be were there always a core for it."""
        own_ns = self._consumer_ns - self._trainer_starved_ns
        return self._per_given(max(own_ns, min(self._consumer_ns, self._trainer_cpu_ns), 0))

    @property
    def consumer_s(self) -> float:
        """The main process's own code, as it was."""
        return self._per_given(self._consumer_ns)

    @property
    def trainer_cpu_s(self) -> float:
        """CPU time of the main process, while it waited included."""
        return self._per_given(self._trainer_cpu_ns)

    @property
    def worker_s(self) -> float:
        """A worker at one batch, were there always a core for it."""
        return self._per_made(self._busy_ns)

    @property
    def worker_cpu_s(self) -> float:
        """CPU time of that; above `worker_s` where a worker has threads of its own."""
        return self._per_made(self._cpu_ns)

    @property
    def worker_starved_s(self) -> float:
        """A worker without a core, on top of `worker_s`."""
        return self._per_made(self._starved_ns)

    @property
    def idle_share(self) -> float:
        """Share of the time that workers had nothing to do, from 0 to 1."""
        return self._idle_ns / max(self._idle_ns + self._wall_ns, 1)

    @property
    def variation(self) -> float:
        """Standard deviation of `worker_s` from batch to batch, as a share of it.

        Where one batch in twenty takes ten times as long as the others, it is 1.4.
        """
        if not self._busy_ns:
            return 0.0
        mean_ns = self._busy_ns / self.num_made
        return math.sqrt(max(self._busy2_ns2 / self.num_made / mean_ns**2 - 1, 0.0))

    @property
    def rate(self) -> float:
        """Batches per second that the main process gets."""
        return 1 / max(self.cycle_s, 1e-9)

    def _per_given(self, total_ns: int) -> float:
        return total_ns * _NS / self.num_given if self.num_given else 0.0

    def _per_made(self, total_ns: int) -> float:
        return total_ns * _NS / self.num_made if self.num_made else 0.0


class Trials:
    """Costs of batches, pooled and per workers tried, until they change for good.

    Attributes:
        first: Of the first window: made by few workers.
        pool: Of all windows.
        under: Of the last window of each setting.
        variation: Of a batch in a worker, the largest of any window.
    """

    def __init__(self, costs: Costs) -> None:
        """Begin without windows; of these costs only the variation is kept."""
        self.first = Costs()
        self.pool = Costs()
        self.under: dict[WorkerSettings, Costs] = {}
        self.variation = costs.variation

    def note(self, workers: WorkerSettings, costs: Costs) -> None:
        """Take note of a window under `workers`."""
        self.under[workers] = costs
        self.variation = max(self.variation, costs.variation)
        if not self.first.num_made:
            self.first = costs

    def gain(self, before: WorkerSettings, now: WorkerSettings) -> float:
        """Return by how much batches come quicker than with the settings before; 0.1 is 10 %."""
        return self.under[now].rate / self.under[before].rate - 1

    def capacity_gain(self, before: WorkerSettings, now: WorkerSettings) -> float:
        """Return by how much more the workers can make than the ones before, were there cores.

        Where storage or a lock is at its limit that is nothing, as a batch takes them longer. Where
        other processes take the cores it is much, as time without a core is left out.
        """
        old, new = self.under[before].worker_s, self.under[now].worker_s
        return now.num_workers * old / max(before.num_workers * new, 1e-9) - 1

    @property
    def has_slowed(self) -> bool:
        """Whether batches take longer than at first, when fewer workers made them."""
        drift = self._drift(self.first, self.pool)
        return self.pool.worker_s > drift * self.first.worker_s

    @property
    def basis(self) -> Costs:
        """The costs to reckon with: all there are.

        But batches that take longer the more workers there are (storage at its limit, a lock) would
        call for yet more workers: those of the first window tell what one takes.
        """
        return self.first if self.has_slowed else self.pool

    def error(self, *costs: Costs) -> float:
        """Return the standard error of what a batch takes in a worker, beyond what is usual."""
        error = self.variation * math.sqrt(sum(1 / max(c.num_made, 1) for c in costs))
        return max(error - _USUAL_ERROR, 0)

    def differ(self, usual: Costs, costs: Costs) -> bool:
        """Return whether these costs are others than the usual ones."""
        pairs = ((usual.trainer_s, costs.trainer_s), (usual.worker_s, costs.worker_s))
        ratios = [max(new_s, _QUICKEST_S) / max(old_s, _QUICKEST_S) for old_s, new_s in pairs]
        drift = self._drift(usual, costs)
        return any(ratio > drift or ratio < 1 / drift for ratio in ratios)

    def _drift(self, *costs: Costs) -> float:
        return _DRIFT + 3 * self.error(*costs)


class DriftDetector:
    """Detects when batch costs have changed for good.

    Attributes:
        usual: What batches cost; None before the first window.
        is_look_due: Whether so much more is known of it that the settings are to be judged once
            more.
    """

    def __init__(self) -> None:
        """Begin without usual costs."""
        self.usual: Costs | None = None
        self.is_look_due = False
        self._times = _TIMES
        self._num_usual = 0
        self._in_a_row: list[Costs] = []

    def begin(self, costs: Costs | None) -> None:
        """Begin with what is usual; None takes it from the next window."""
        self.usual = None
        if costs is not None:
            self.usual = Costs()
            self.usual += costs
        self.is_look_due = False
        self._num_usual = 0
        self._in_a_row = []

    def see(self, costs: Costs, trials: Trials) -> Costs | None:
        """Take note of a window; returns the new costs if they have changed for good."""
        self.is_look_due = False
        if self.usual is None:
            self.usual = costs
            return None
        self._in_a_row.append(costs)
        if not trials.differ(self.usual, costs):
            self._add_usual(trials)
            return None
        if len(self._in_a_row) < self._times:
            return None
        self._times = min(2 * self._times, _MOST_TIMES)
        new = Costs()
        for differing in self._in_a_row[1:]:  # the first may be half of what was before
            new += differing
        return new

    def _add_usual(self, trials: Trials) -> None:
        in_a_row, self._in_a_row = self._in_a_row, []
        if self._num_usual >= _LOOKS[-1]:
            return
        assert self.usual is not None
        before = self._num_usual
        for costs in in_a_row:
            self.usual += costs
            trials.pool += costs
        self._num_usual += len(in_a_row)
        self.is_look_due = any(before < look <= self._num_usual for look in _LOOKS)


class MemoryModel:
    """Memory per worker, from the largest batch and the largest worker so far.

    Attributes:
        batch_bytes: Of the largest batch.
        own_bytes: Of the largest worker, without batches.
    """

    def __init__(self, *, is_thread: bool, is_forked: bool) -> None:
        """Know nothing yet."""
        self.batch_bytes = 0
        self.own_bytes = 0 if is_thread else WORKER_BYTES
        self._is_forked = is_forked
        self._at_first: dict[int, int] = {}  # by process

    def add(self, row: TimingRow) -> None:
        """Take note of a batch."""
        if row.num_bytes > self.batch_bytes:
            self.batch_bytes = row.num_bytes
        if row.rss_bytes and self.own_bytes:
            own_bytes = row.rss_bytes - row.pool_bytes  # slots are counted by batches
            if self._is_forked:
                own_bytes += WORKER_BYTES - self._at_first.setdefault(row.pid, own_bytes)
            if own_bytes > self.own_bytes:
                self.own_bytes = own_bytes

    def per_worker(self, prefetch_factor: int) -> int:
        """Return the bytes of a worker with its batches.

        It has a slot for each batch that it may have under way, and one that it fills while the
        main process still holds the last.
        """
        return self.own_bytes + (prefetch_factor + 1) * self.batch_bytes
