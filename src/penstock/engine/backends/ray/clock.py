# SPDX-License-Identifier: Apache-2.0
"""What a worker's clock says, by the trainer's: the monotonic clocks of two machines differ."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.engine.accounts import TaskTimes

__all__ = ["WorkerClock"]


class WorkerClock:
    """Learns how far a worker's clock is from ours, from the order of cause and effect.

    A task is taken up after it was sent, and its batch has come after it was made. Each task so
    bounds the difference from both sides. Where no difference at all is within the bounds, as on
    one machine, it is taken for none; otherwise the middle is taken, which is off by half of the
    quickest round trip at most.

    Example:
        >>> from penstock.engine.accounts import TaskTimes
        >>> clock = WorkerClock()
        >>> told = clock.by_ours(TaskTimes(1000, 1600), sent_ns=70_000, received_ns=70_800)
        >>> told.begun_ns, told.ended_ns
        (70100, 70700)
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._least_ns = -math.inf
        self._most_ns = math.inf

    def by_ours(self, times: TaskTimes, *, sent_ns: int, received_ns: int) -> TaskTimes:
        """Return the times of a task by our clock.

        Args:
            times: By the worker's clock.
            sent_ns: When the task was sent, by ours.
            received_ns: When its batch had come, by ours.
        """
        self._least_ns = max(self._least_ns, sent_ns - times.begun_ns)
        self._most_ns = min(self._most_ns, received_ns - times.ended_ns)
        if self._least_ns > self._most_ns:  # a clock was set, or drifts: what is new counts
            self._least_ns = sent_ns - times.begun_ns
            self._most_ns = received_ns - times.ended_ns
        if self._least_ns <= 0 <= self._most_ns:
            return times
        ahead_ns = int(self._least_ns + self._most_ns) // 2
        return times._replace(
            begun_ns=times.begun_ns + ahead_ns, ended_ns=times.ended_ns + ahead_ns
        )
