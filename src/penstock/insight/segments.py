# SPDX-License-Identifier: Apache-2.0
"""Stages of a recording's batches over time: what the charts and the trace draw.

    worker       | idle | read | compute | collate | send |
    main process | its own code | waits |

Approximations
    A worker measures how long each stage of a task took, not when: samples are read and computed in
    turn. Stages are drawn one after the other from the moment at which the task was taken up. What
    is left until its end belongs to none. "send" lacks the message of the batch before, which lies
    between two tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.insight.recording import Recording

    Columns = dict[str, NDArray[np.int64]]

WORKER_STAGES: Final = ("idle", "read", "compute", "collate", "send")
TRAINER_STAGES: Final = ("own", "wait")
_NEVER_NEGATIVE: Final = ("asked_ns", "given_ns", "begun_ns", "ended_ns", "worker", "samples")


class Stage(NamedTuple):
    """Moments at which one stage of every batch began and ended, int64 ns of shape (batches,)."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]


def columns_of(recording: Recording) -> Columns:
    """Return the columns of a recording as int64 arrays of shape (batches,); unknown values are 0.

    Raises:
        OverflowError: a number is none of 64 bits.
        ValueError: a moment or a worker's number is negative.
    """
    columns = {
        name: np.array([0 if value is None else value for value in values], np.int64)
        for name, values in recording.batches.items()
    }
    for name in _NEVER_NEGATIVE:
        if columns[name].min(initial=0) < 0:
            raise ValueError(f"column {name} has a negative number")
    return columns


def stages_of(columns: Columns) -> dict[str, Stage]:
    """Return every stage by its name. Those of the main process, or of one worker, do not overlap.

    "own", the main process's own code before it asked for a batch, was work on the batch before.
    """
    given = np.maximum(columns["given_ns"], columns["asked_ns"])
    before = np.zeros(len(given), np.int64)
    before[1:] = np.maximum.accumulate(given)[:-1]
    asked = np.maximum(columns["asked_ns"], before)
    own_from = np.maximum(asked - np.maximum(columns["consumer_ns"], 0), before)
    free = _free_from(columns)
    begun = np.maximum(columns["begun_ns"], free)
    ended = np.maximum(columns["ended_ns"], begun)
    fetch = np.maximum(columns["fetch_ns"], 0)
    read = np.clip(columns["read_ns"], 0, fetch)
    stages = {
        "own": Stage(own_from, asked),
        "wait": Stage(asked, np.maximum(given, asked)),
        "idle": Stage(np.maximum(begun - np.maximum(columns["idle_ns"], 0), free), begun),
    }
    start = begun
    took = (read, fetch - read, columns["collate_ns"], columns["send_ns"])
    for name, length in zip(WORKER_STAGES[1:], took, strict=True):
        stop = np.minimum(start + np.maximum(length, 0), ended)
        stages[name], start = Stage(start, stop), stop
    return stages


def _free_from(columns: Columns) -> NDArray[np.int64]:
    """Return when each batch's worker had ended the task before; 0 for its first."""
    begun = columns["begun_ns"]
    ended = np.maximum(columns["ended_ns"], begun)
    free = np.zeros(len(begun), np.int64)
    for worker in np.unique(columns["worker"]):
        own = np.flatnonzero(columns["worker"] == worker)
        own = own[np.lexsort((ended[own], begun[own]))]
        free[own[1:]] = np.maximum.accumulate(ended[own])[:-1]
    return free
