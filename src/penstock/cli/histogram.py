# SPDX-License-Identifier: Apache-2.0
"""Histograms with edges that can be read, for terminals and JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Histogram", "histogram"]

_MOST_BINS: Final = 14
_WIDE: Final = 40.0  # largest to smallest, from which on bins grow with their values
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"


class Histogram(NamedTuple):
    """How many values lie between edges.

    Attributes:
        edges: float64 (bins + 1,), rising; each bin has its lower edge, not its upper.
        counts: int64 (bins,).
        is_whole: Whether the values are whole numbers.
    """

    edges: NDArray[np.float64]
    counts: NDArray[np.int64]
    is_whole: bool = True

    def record(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"edges": self.edges.tolist(), "counts": self.counts.tolist()}

    def lines(self, width: int = 40, *, in_ascii: bool = False) -> list[str]:
        """Return a line for each bin: its values, a bar of up to `width` characters, its count.

        Args:
            width: Of the longest bar.
            in_ascii: Whether bars are made of "#".

        Example:
            >>> for line in histogram(np.array([1, 1, 1, 1, 2, 4])).lines(8):
            ...     print(line)
            1  ████████ 4
            2  ██ 1
            3   0
            4  ██ 1
        """
        names = [self._name(k) for k in range(len(self.counts))]
        longest, most = max(map(len, names), default=0), max(self.counts.max(initial=0), 1)
        return [
            f"{name:>{longest}}  {_bar(count / most * width, in_ascii=in_ascii)} {count:,}"
            for name, count in zip(names, self.counts.tolist(), strict=True)
        ]

    def _name(self, k: int) -> str:
        low, high = self.edges[k], self.edges[k + 1] - self.is_whole
        return f"{low:,.0f} to {high:,.0f}" if high > low else f"{low:,.0f}"


def _bar(length: float, *, in_ascii: bool) -> str:
    if in_ascii:
        return "#" * (round(length) or int(length > 0))
    eighths = round(length * 8) or int(length > 0)  # however little: there is something
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def histogram(values: NDArray[Any]) -> Histogram:
    """Return the histogram of values not below 0, in bins of whole numbers.

    One bin per number where these are few; otherwise equal ones, or for a wide range ones that grow
    by 1, 2, 5, 10, 20 …

    Example:
        >>> found = histogram(np.array([3, 90, 91, 4000]))
        >>> found.edges[:4].tolist(), found.counts.sum()
        ([2.0, 5.0, 10.0, 20.0], np.int64(4))
    """
    if not len(values):
        return Histogram(np.array([0.0, 1.0]), np.zeros(1, np.int64))
    edges = np.array(_edges(float(values.min()), float(values.max())), np.float64)
    places = np.searchsorted(edges, values, side="right") - 1
    counts = np.bincount(places, minlength=len(edges) - 1).astype(np.int64)
    return Histogram(edges, counts, values.dtype.kind in "iu")


def _edges(least: float, most: float) -> list[float]:
    if math.floor(most) - math.floor(least) < _MOST_BINS:
        start = math.floor(least)
        return [float(n) for n in range(start, math.floor(most) + 2)]
    if least > 0 and most / least > _WIDE:
        return _growing(least, most)
    step = next(s for s in _steps() if (most - least) / s < _MOST_BINS - 1)
    first = math.floor(least / step)
    return [step * n for n in range(first, math.floor(most / step) + 2)]


def _growing(least: float, most: float) -> list[float]:
    steps = [0.0, *(step for _, step in zip(range(48), _steps(), strict=False))]
    start = max(k for k, step in enumerate(steps) if step <= least)
    stop = min(k for k, step in enumerate(steps) if step > most)
    return steps[start : stop + 1]


def _steps() -> Any:  # noqa: ANN401 - a generator of floats
    """Yield 1, 2, 5, 10, 20 … without end in sight."""
    for power in range(16):
        yield from (factor * 10.0**power for factor in (1, 2, 5))
