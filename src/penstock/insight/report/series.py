# SPDX-License-Identifier: Apache-2.0
"""Amounts over time: what lasted from one moment to another, shared out over equal spans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.insight.segments import Columns, trainer_stages, worker_stages

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.insight.segments import Stage

__all__ = ["Series", "Timescale", "series_of", "spread"]

_MOST_POINTS: Final = 240
_BATCHES_PER_POINT: Final = 4  # fewer, and a line shows every batch's luck


@dataclass(frozen=True, slots=True)
class Timescale:
    """The unit of a time axis.

    Attributes:
        unit: Its sign.
        seconds: How long it is.
    """

    unit: str
    seconds: float

    @classmethod
    def of(cls, longest_s: float) -> Timescale:
        """Return the unit that suits an axis of some length.

        Example:
            >>> Timescale.of(3.0).unit, Timescale.of(3_000.0).unit, Timescale.of(30_000.0).unit
            ('s', 'min', 'h')
        """
        if longest_s > 3 * 3600:
            return cls("h", 3600.0)
        return cls("min", 60.0) if longest_s > 600 else cls("s", 1.0)

    def __call__(self, seconds: NDArray[np.float64]) -> list[float]:
        """Return moments in this unit."""
        scaled: list[float] = np.round(seconds / self.seconds, 6).tolist()
        return scaled


@dataclass(frozen=True, slots=True)
class Series:
    """What happened in each of some equal spans of time; arrays of shape (points,).

    Attributes:
        edges_s: Where spans begin and end, seconds from the first moment, shape (points + 1,).
        own_s: The trainer's own code.
        wait_s: The trainer waited.
        samples: Given to the trainer; one batch may be shared out over several spans.
        stages_s: Seconds of workers, by the name of the stage.
    """

    edges_s: NDArray[np.float64]
    own_s: NDArray[np.float64]
    wait_s: NDArray[np.float64]
    samples: NDArray[np.float64]
    stages_s: dict[str, NDArray[np.float64]]

    @property
    def centres_s(self) -> NDArray[np.float64]:
        """The middle of each span."""
        middle: NDArray[np.float64] = (self.edges_s[1:] + self.edges_s[:-1]) / 2
        return middle

    @property
    def step_s(self) -> float:
        """How long each span is."""
        return float(self.edges_s[1] - self.edges_s[0]) if len(self.edges_s) > 1 else 0.0

    @property
    def active_s(self) -> NDArray[np.float64]:
        """How much of each span was training; the rest lay between epochs."""
        return self.own_s + self.wait_s

    def per_active(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return values per second of training; NaN where there was next to none.

        A span of which only a part was training is told together with those beside it: an epoch's
        first batch may have taken no time at all.
        """
        is_whole = self.active_s > 0.9 * self.step_s
        amounts = np.where(is_whole, values, _with_neighbours(values))
        seconds = np.where(is_whole, self.active_s, _with_neighbours(self.active_s))
        rates = np.full(len(values), np.nan)
        np.divide(amounts, seconds, out=rates, where=self.active_s > 0.02 * self.step_s)
        return rates


def _with_neighbours(values: NDArray[np.float64]) -> NDArray[np.float64]:
    summed: NDArray[np.float64] = np.convolve(values, np.ones(3))[1:-1]
    return summed


def series_of(columns: Columns) -> Series:
    """Return a recording's batches over time, at 240 points at most."""
    own, wait = trainer_stages(columns)
    last_s = float(wait.stops.max(initial=0)) / 1e9
    points = min(_MOST_POINTS, max(min(len(columns), 12), len(columns) // _BATCHES_PER_POINT))
    edges_s = np.linspace(0.0, last_s, points + 1) if last_s > 0 else np.zeros(1)
    return Series(
        edges_s=edges_s,
        own_s=_seconds(own, edges_s),
        wait_s=_seconds(wait, edges_s),
        samples=spread(own.starts / 1e9, wait.stops / 1e9, columns["samples"], edges_s),
        stages_s={stage.name: _seconds(stage, edges_s) for stage in worker_stages(columns)},
    )


def _seconds(stage: Stage, edges_s: NDArray[np.float64]) -> NDArray[np.float64]:
    return spread(stage.starts / 1e9, stage.stops / 1e9, stage.seconds, edges_s)


def spread(
    starts: NDArray[np.float64],
    stops: NDArray[np.float64],
    amounts: NDArray[np.float64] | NDArray[np.int64],
    edges: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return how much of some amounts falls between edges, each flowing evenly while it lasts.

    Args:
        starts: When each begins, shape (n,).
        stops: When each ends, shape (n,), not before.
        amounts: Of each, shape (n,).
        edges: Ascending, shape (m + 1,).

    Returns:
        Float64 of shape (m,).

    Example:
        >>> one = np.array([1.0]), np.array([3.0]), np.array([8.0])
        >>> spread(*one, np.array([0.0, 2.0, 4.0, 6.0])).tolist()
        [4.0, 4.0, 0.0]
    """
    if len(edges) < 2:
        return np.zeros(0)
    lasts = stops > starts
    at_once, _ = np.histogram(starts[~lasts], edges, weights=amounts[~lasts])
    if not lasts.any():
        return at_once.astype(np.float64)
    starts, stops, amounts = starts[lasts], stops[lasts], amounts[lasts]
    flows = amounts / (stops - starts)
    moments = np.concatenate((starts, stops))
    order = np.argsort(moments, kind="stable")
    moments = moments[order]
    flow = np.cumsum(np.concatenate((flows, -flows))[order])
    so_far = np.concatenate(([0.0], np.cumsum(flow[:-1] * np.diff(moments))))
    flowed = np.maximum(np.diff(np.interp(edges, moments, so_far)), 0.0)
    parts: NDArray[np.float64] = flowed + at_once
    return parts
