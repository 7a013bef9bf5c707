# SPDX-License-Identifier: Apache-2.0
"""What batches cost on average under the same settings: sums, added to as batches are given."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from penstock.engine.timing import TimingRow

__all__ = ["Costs"]

_NS: Final = 1e-9
_CLOCK_ERROR: Final = 1.05


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
        # Time without a core says how many run, not what a batch takes. It is told by another
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
