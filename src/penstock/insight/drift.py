# SPDX-License-Identifier: Apache-2.0
"""Drift: whether batches still cost what they did when the number of workers was settled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.insight.batch_costs import Costs

if TYPE_CHECKING:
    from penstock.insight.trials import Trials

__all__ = ["DriftDetector"]

_TIMES: Final = 3  # windows in a row that differ ...
_MOST_TIMES: Final = 24  # ... and twice as many after each alarm: costs may go to and fro
_LOOKS: Final = (2, 6)  # after so many unchanged windows the settings are judged once more


class DriftDetector:
    """Detects when batch costs have changed for good.

    Attributes:
        usual: What batches cost; None until a window has told.
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
