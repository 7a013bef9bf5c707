# SPDX-License-Identifier: Apache-2.0
"""When each worker was in which stage, and the trainer too: what charts and traces draw.

    worker    | idle | read | compute | collate | send |
    trainer   | its own code | waits |

Approximations
    What is measured of a task is how long each stage took in all, not when: samples are read and
    computed in turn. Stages are drawn one after the other from the moment at which the task was
    taken up; what is left until its end belongs to none. Reading and computing are told apart by
    CPU time (see `penstock.engine.accounts`).
    "Send" is drawn without the message of the batch before, which is part of its sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.insight.recording import Recording

__all__ = [
    "TRAINER_STAGES",
    "WORKER_STAGES",
    "Columns",
    "Stage",
    "moments_of_steps",
    "trainer_stages",
    "worker_stages",
]

WORKER_STAGES: Final = ("idle", "read", "compute", "collate", "send")
TRAINER_STAGES: Final = ("own", "wait")


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of every batch.

    Attributes:
        name: Of `WORKER_STAGES` or `TRAINER_STAGES`.
        starts: When it began, int64 nanoseconds of shape (batches,).
        stops: When it was over; never before it began.
    """

    name: str
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    @property
    def seconds(self) -> NDArray[np.float64]:
        """How long it took, shape (batches,)."""
        took: NDArray[np.float64] = (self.stops - self.starts) / 1e9
        return took


class Columns:
    """The columns of a recording as arrays.

    Example:
        >>> from penstock.insight.recording import Recording
        >>> from penstock.insight.stats import Stats, Verdict
        >>> columns = Columns(Recording({}, Stats(Verdict("nothing yet", ""))))
        >>> len(columns), columns["given_ns"].shape
        (0, (0,))
    """

    def __init__(self, recording: Recording) -> None:
        """Turn the columns into arrays, when they are asked for."""
        self._lists = recording.batches
        self._arrays: dict[str, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return len(self._lists["step"])

    def __getitem__(self, name: str) -> NDArray[np.int64]:
        """Return a column, int64 of shape (batches,); what is not known is 0."""
        if name not in self._arrays:
            values = [0 if value is None else value for value in self._lists[name]]
            self._arrays[name] = np.array(values, np.int64)
        return self._arrays[name]

    @property
    def end_ns(self) -> int:
        """The last moment of all."""
        if not len(self):
            return 0
        return int(max(self["given_ns"].max(), self["ended_ns"].max()))


def worker_stages(columns: Columns) -> list[Stage]:
    """Return the stages of `WORKER_STAGES` in their order, those of one worker never overlapping.

    What would go beyond the end of a task is cut off. That is the message of the batch before,
    which counts as sending and lies between the tasks.
    """
    begun, ended = columns["begun_ns"], columns["ended_ns"]
    free = _ended_before(columns)
    begun = np.maximum(begun, free)
    ended = np.maximum(ended, begun)
    idle_from = np.maximum(begun - np.maximum(columns["idle_ns"], 0), free)
    read = np.clip(columns["read_ns"], 0, np.maximum(columns["fetch_ns"], 0))
    parts = [
        read,
        np.maximum(columns["fetch_ns"], 0) - read,
        np.maximum(columns["collate_ns"], 0),
        np.maximum(columns["send_ns"], 0),
    ]
    edges = [begun]
    for part in parts:
        edges.append(np.minimum(edges[-1] + part, ended))
    stages = [Stage("idle", idle_from, begun)]
    for name, start, stop in zip(WORKER_STAGES[1:], edges[:-1], edges[1:], strict=True):
        stages.append(Stage(name, start, stop))
    return stages


def _ended_before(columns: Columns) -> NDArray[np.int64]:
    """Return when the same worker's task before was over; 0 for its first."""
    workers, begun = columns["worker"], columns["begun_ns"]
    ended = np.maximum(columns["ended_ns"], begun)
    before = np.zeros(len(columns), np.int64)
    for worker in np.unique(workers).tolist():
        mine = np.flatnonzero(workers == worker)
        mine = mine[np.lexsort((ended[mine], begun[mine]))]
        before[mine[1:]] = np.maximum.accumulate(ended[mine])[:-1]
    return before


def trainer_stages(columns: Columns) -> list[Stage]:
    """Return the stages of `TRAINER_STAGES`: its own code before it asked, and its wait after."""
    given = np.maximum(columns["given_ns"], columns["asked_ns"])
    before = np.zeros(len(columns), np.int64)
    before[1:] = np.maximum.accumulate(given)[:-1]
    asked = np.maximum(columns["asked_ns"], before)
    own_from = np.maximum(asked - np.maximum(columns["consumer_ns"], 0), before)
    return [Stage("own", own_from, asked), Stage("wait", asked, np.maximum(given, asked))]


def moments_of_steps(columns: Columns) -> dict[tuple[int, int], int]:
    """Return when each batch was given, in nanoseconds, by its epoch and step."""
    steps = zip(columns["epoch"].tolist(), columns["step"].tolist(), strict=True)
    return dict(zip(steps, columns["given_ns"].tolist(), strict=True))
