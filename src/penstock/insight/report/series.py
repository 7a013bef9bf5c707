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


class TrainingTime:
    """Seconds of training: what lies between epochs, a night perhaps, takes no time.

    Example:
        >>> from penstock.insight.segments import Stage
        >>> own = Stage("own", np.array([0, 9]) * 10**9, np.array([1, 10]) * 10**9)
        >>> wait = Stage("wait", np.array([1, 10]) * 10**9, np.array([3, 12]) * 10**9)
        >>> TrainingTime(own, wait)(np.array([2, 3, 6, 9, 10]) * 10**9).tolist()
        [2.0, 3.0, 3.0, 3.0, 4.0]
    """

    def __init__(self, own: Stage, wait: Stage, longest_pause_s: float = 0.0) -> None:
        """Take the main process's stages, and how long a pause is drawn at most."""
        if not len(own.starts):
            self._moments, self._seconds = np.zeros(1), np.zeros(1)
            return
        moments = np.stack((own.starts, wait.stops), axis=1).reshape(-1) / 1e9
        took = np.diff(moments, prepend=0.0)
        took[::2] = np.minimum(took[::2], longest_pause_s)
        took[0] = 0.0
        self._moments, self._seconds = moments, np.cumsum(took)

    def __call__(self, moments_ns: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return moments on the axis of the charts."""
        return np.interp(moments_ns / 1e9, self._moments, self._seconds)

    @property
    def whole_s(self) -> float:
        """How long all of it took."""
        return float(self._seconds[-1])


@dataclass(frozen=True, slots=True)
class Series:
    """What happened in each of some equal spans of time; arrays of shape (points,).

    Attributes:
        time: Moments on the axis.
        edges_s: Where spans begin and end, in seconds of training, shape (points + 1,).
        own_s: The main process's own code.
        wait_s: The main process waited.
        samples: Given to the main process; one batch may be shared out over several spans.
        stages_s: Seconds of workers, by the name of the stage; not those between epochs.
    """

    time: TrainingTime
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


def series_of(columns: Columns) -> Series:
    """Return a recording's batches over time, at 240 points at most."""
    own, wait = trainer_stages(columns)
    time = TrainingTime(own, wait)
    points = min(_MOST_POINTS, max(min(len(columns), 12), len(columns) // _BATCHES_PER_POINT))
    edges_s = np.linspace(0.0, time.whole_s, points + 1) if time.whole_s > 0 else np.zeros(1)
    return Series(
        time=time,
        edges_s=edges_s,
        own_s=_seconds(own, time, edges_s),
        wait_s=_seconds(wait, time, edges_s),
        samples=spread(time(own.starts), time(wait.stops), columns["samples"], edges_s),
        stages_s={stage.name: _seconds(stage, time, edges_s) for stage in worker_stages(columns)},
    )


def _seconds(stage: Stage, time: TrainingTime, edges_s: NDArray[np.float64]) -> NDArray[np.float64]:
    starts, stops = time(stage.starts), time(stage.stops)
    return spread(starts, stops, stops - starts, edges_s)


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
