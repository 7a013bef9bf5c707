# SPDX-License-Identifier: Apache-2.0
"""Measured batch costs per number of workers tried, until costs change for good."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from penstock.insight.batch_costs import Costs

if TYPE_CHECKING:
    from penstock.engine.timing import WorkerSettings

__all__ = ["Trials"]

_DRIFT: Final = 1.3
_USUAL_ERROR: Final = 0.06  # of two windows of batches that differ by 15 %
_QUICKEST_S: Final = 2e-4  # below it there is noise of the clock and of the loader itself


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
