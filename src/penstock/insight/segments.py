# SPDX-License-Identifier: Apache-2.0
"""When each worker was in which stage, and the main process too: what charts and traces draw.

    worker       | idle | read | compute | collate | send |
    main process | its own code | waits |

Approximations
    What is measured of a task is how long each stage took in all, not when: samples are read and
    computed in turn. Stages are drawn one after the other from the moment at which the task was
    taken up; what is left until its end belongs to none. Reading and computing are told apart by
    CPU time (see `penstock.engine.timing`).
    "Send" is drawn without the message of the batch before, which is part of its sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.engine.backends import traits_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.insight.recording import Recording

__all__ = [
    "TRAINER_STAGES",
    "WORKER_STAGES",
    "Columns",
    "Stage",
    "trainer_stages",
    "worked_on",
    "worker_stages",
]

WORKER_STAGES: Final = ("idle", "read", "compute", "collate", "send")
TRAINER_STAGES: Final = ("own", "wait")
_NEVER_NEGATIVE: Final = ("asked_ns", "given_ns", "begun_ns", "ended_ns", "worker", "samples")


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
        self._is_threads = traits_of(recording.stats.backend).shares_interpreter
        self._seats: NDArray[np.int64] | None = None
        self._seat_names: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._lists["step"])

    def __getitem__(self, name: str) -> NDArray[np.int64]:
        """Return a column, int64 of shape (batches,); what is not known is 0."""
        if name not in self._arrays:
            values = [0 if value is None else value for value in self._lists[name]]
            self._arrays[name] = np.array(values, np.int64)
        return self._arrays[name]

    def check(self) -> None:
        """Turn every column into an array.

        Raises:
            OverflowError: a number is none of 64 bits.
            ValueError: a moment or a worker's number is negative.
        """
        for name in self._lists:
            if self[name].min(initial=0) < 0 and name in _NEVER_NEGATIVE:
                raise ValueError(f"column {name} has a negative number")

    @property
    def seats(self) -> NDArray[np.int64]:
        """Of each batch, the row of a drawing that it belongs to, shape (batches,).

        Two iterators of one loader have workers of the same numbers at the same time: each has a
        row of its own. Workers that came after those of an earlier epoch go on in their rows.
        """
        if self._seats is None:
            self._seats, self._seat_names = _seats_of(self, self._is_threads)
        return self._seats

    @property
    def seat_names(self) -> list[str]:
        """The name of each row, as "worker 0", and "worker 0 (2)" of a second one."""
        assert len(self.seats) == len(self)
        return [
            f"worker {worker}" + (f" ({copy + 1})" if copy else "")
            for worker, copy in self._seat_names
        ]

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
    """Return when the task before in the same row was over; 0 for its first."""
    seats, begun = columns.seats, columns["begun_ns"]
    ended = np.maximum(columns["ended_ns"], begun)
    before = np.zeros(len(columns), np.int64)
    for seat in range(len(columns.seat_names)):
        mine = np.flatnonzero(seats == seat)
        mine = mine[np.lexsort((ended[mine], begun[mine]))]
        before[mine[1:]] = np.maximum.accumulate(ended[mine])[:-1]
    return before


def _seats_of(
    columns: Columns, is_threads: bool
) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
    """Return the row of each batch, and worker and copy of each row, in that order."""
    # Threads of two iterators have one process: what tells them apart is the epoch.
    who = columns["epoch"] if is_threads else columns["pid"]
    keys = np.stack((columns["worker"], who), axis=1)
    members, member_of = np.unique(keys, axis=0, return_inverse=True)
    member_of = member_of.reshape(-1)
    begun, ended = np.full(len(members), np.iinfo(np.int64).max), np.zeros(len(members), np.int64)
    np.minimum.at(begun, member_of, columns["begun_ns"])
    np.maximum.at(ended, member_of, np.maximum(columns["ended_ns"], columns["begun_ns"]))
    free_from: dict[tuple[int, int], int] = {}  # by worker and copy
    places = {}
    for member in np.argsort(begun, kind="stable").tolist():
        worker, copy = int(members[member, 0]), 0
        while free_from.get((worker, copy), 0) > begun[member]:
            copy += 1
        places[member] = worker, copy
        free_from[worker, copy] = int(ended[member])
    names = sorted(free_from)
    number_of = {name: number for number, name in enumerate(names)}
    of_member = np.array([number_of[places[m]] for m in range(len(members))], np.int64)
    return of_member[member_of], names


def trainer_stages(columns: Columns) -> list[Stage]:
    """Return the stages of `TRAINER_STAGES`: its own code before it asked, and its wait after."""
    given = np.maximum(columns["given_ns"], columns["asked_ns"])
    before = np.zeros(len(columns), np.int64)
    before[1:] = np.maximum.accumulate(given)[:-1]
    asked = np.maximum(columns["asked_ns"], before)
    own_from = np.maximum(asked - np.maximum(columns["consumer_ns"], 0), before)
    return [Stage("own", own_from, asked), Stage("wait", asked, np.maximum(given, asked))]


def worked_on(stage: Stage, columns: Columns) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return epoch and step of the batch that each entry of a stage was about.

    The main process's own code, which is told with the batch that it then asks for, is work on the
    batch before.
    """
    epochs, steps = columns["epoch"], columns["step"]
    if stage.name != "own" or not len(columns):
        return epochs, steps
    return np.append(epochs[0], epochs[:-1]), np.append(steps[0] - 1, steps[:-1])
