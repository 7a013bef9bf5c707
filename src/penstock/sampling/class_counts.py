# SPDX-License-Identifier: Apache-2.0
"""How many of something each class has, before and after a sampler, and how even that is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ClassCounts"]


@dataclass(frozen=True, eq=False, slots=True)
class ClassCounts:
    """How many of something each class has: in the data set, and in a mean epoch of a sampler.

    Attributes:
        before: In the data set, where each sample comes once; int64 of shape (classes,).
        after: In an epoch; float64 of shape (classes,), the mean of the epochs that were counted.
    """

    before: NDArray[np.int64]
    after: NDArray[np.float64]

    @property
    def shares_before(self) -> NDArray[np.float64]:
        """Part of all classes' sum that each has, 0 to 1; a fresh array."""
        return _shares(self.before)

    @property
    def shares_after(self) -> NDArray[np.float64]:
        """Likewise, in an epoch."""
        return _shares(self.after)

    @property
    def ratio_before(self) -> float:
        """Largest class to smallest; infinite if one has none, 1 if there is no class."""
        return _ratio(self.before)

    @property
    def ratio_after(self) -> float:
        """Likewise, in an epoch."""
        return _ratio(self.after)

    @property
    def effective_before(self) -> float:
        """Number of equal classes of the same entropy, exp(-sum(p ln p)); 0 if all are empty."""
        return _effective(self.before)

    @property
    def effective_after(self) -> float:
        """Likewise, in an epoch."""
        return _effective(self.after)

    @property
    def progress(self) -> float:
        """How much of the way to equal classes was made, of ln(classes) - entropy; -1 to 1.

        1 is all of it, 0 nothing. Below 0 it is the wrong way: so much of the way that is left now
        was added. -1 is all of it, where classes were equal before.
        """
        equal = math.log(max(len(self.before), 1))
        before = equal - math.log(self.effective_before or 1)
        after = equal - math.log(self.effective_after or 1)
        longer = max(before, after)
        return (before - after) / longer if longer > 1e-9 else 0.0

    def record(self) -> dict[str, Any]:
        """Return the sums of it as JSON has them; null where the smallest class has none."""
        before, after = self.ratio_before, self.ratio_after
        return {
            "total_before": int(self.before.sum()),
            "total_after": float(self.after.sum()),
            "largest_to_smallest_before": before if math.isfinite(before) else None,
            "largest_to_smallest_after": after if math.isfinite(after) else None,
            "effective_classes_before": self.effective_before,
            "effective_classes_after": self.effective_after,
            "progress": self.progress,
        }


def _shares(counts: NDArray[Any]) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = counts / max(float(counts.sum()), 1e-300)
    return shares


def _ratio(counts: NDArray[Any]) -> float:
    if not counts.any():
        return 1.0
    least = float(counts.min())
    return float(counts.max()) / least if least else math.inf


def _effective(counts: NDArray[Any]) -> float:
    there = _shares(counts[counts > 0])
    return math.exp(-float((there * np.log(there)).sum())) if len(there) else 0.0
