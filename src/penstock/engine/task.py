# SPDX-License-Identifier: Apache-2.0
"""The messages between the main process and its workers: epochs, tasks and results.

main process -> worker    BeginEpoch, Task, Task …, BeginEpoch …
worker -> main process    TaskResult …
"""

from __future__ import annotations

import enum
import pickle
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.engine.pickling import report_exception
from penstock.engine.plan import BatchIndices, RetryHints, ShardPosition
from penstock.engine.timing import NO_TIMES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.faults import Failure


class WorkerIdentity(NamedTuple):
    """Identity of one worker of a loader.

    Attributes:
        worker_id: Number of the worker, from 0.
        num_workers: Number of workers; the largest possible one if it may change.
        base_seed: Seed of its generators, together with its number.
        joins_late: Whether it was added during an epoch; it then reports when it is ready.
        max_free_slots: Number of free slots of shared memory that it keeps for later batches.
    """

    worker_id: int = 0
    num_workers: int = 1
    base_seed: int = 0
    joins_late: bool = False
    max_free_slots: int = 0


class BeginEpoch(NamedTuple):
    """Begin an epoch: an iterable dataset is iterated anew.

    Messages are handled in order. A worker thread skips tasks of earlier epochs.

    Attributes:
        generation: Number that the main process gives each epoch it begins; `epoch` may repeat.
        epoch: Number of the epoch to the user.
        is_announced: Whether the dataset is notified of `epoch`.
        position: Position to go on from in the worker's shard of an iterable; None begins it.
    """

    generation: int
    epoch: int
    is_announced: bool = False
    position: ShardPosition | None = None


class Task(NamedTuple):
    """Make the batch of one step.

    Attributes:
        generation: Generation of the `BeginEpoch` that it belongs to.
        step: Number of the batch in the epoch.
        indices: Indices of its samples: a 1-D int64 array of Penstock's samplers, or any object;
            either may be in a `BatchIndices`.
        hints: Hints on samples that end workers; None if there are none.
        is_measured: Whether to measure and report what the task takes.
        freed: Slots of the worker whose leases have ended.
        retired: Slots among them that must not be used again.
    """

    generation: int
    step: int
    indices: object
    hints: RetryHints | None = None
    is_measured: bool = True
    freed: Sequence[int] = ()
    retired: Sequence[int] = ()


class Kind(enum.IntEnum):
    """Kind of a result."""

    DONE = 0  # the payload is the batch
    EMPTY = 1  # no sample of the batch is left
    FAILED = 2  # the payload is the exception that the user's code raised
    EXHAUSTED = 3  # the worker's shard of an iterable ended before this step
    READY = 4  # of no task: a worker that was added during the epoch is ready


@dataclass(slots=True, eq=False)
class TaskResult:
    """Result of one task, in a worker and in the main process.

    Attributes:
        generation: Generation of the task.
        step: Step of the task; -1 for none.
        kind: Kind of the result.
        payload: The batch; an exception, or its report (`penstock.engine.pickling`) on the
            way from another process.
        position: Position of the worker in its shard of an iterable dataset.
        num_asked: Number of samples that were asked for; 0 where they are not counted.
        bad: Samples that could not be made: the batch holds replacements, or goes without.
        times: Timing of the batch (`penstock.engine.timing`), as bytes.
        notices: Findings of the worker, sent once; usually None. "first_digest": digest of the
            first sample of its shard. "drawings": functions that drew from the global generators
            (`penstock.randomness.generator_watch`). "states": digests of generators that
            `worker_init_fn` has set.
        unpack: Function that returns a packed batch; the payload is None then.
        pid: Process ID of the worker; 0 before the main process has accepted the result.
    """

    generation: int
    step: int
    kind: Kind
    payload: Any = None
    position: ShardPosition | None = None
    num_asked: int = 0
    bad: Sequence[Failure] = ()
    times: bytes = NO_TIMES
    notices: dict[str, Any] | None = None
    unpack: Callable[[], Any] | None = None
    pid: int = 0

    def batch(self) -> Any:  # noqa: ANN401 - any batch tree
        """Return the batch, or `NO_BATCH`, once; or raise the exception of the user's code."""
        payload, self.payload = self.payload, None
        unpack, self.unpack = self.unpack, None
        if self.kind != Kind.FAILED:
            return payload if unpack is None else unpack()
        try:
            raise payload
        finally:
            del payload  # a traceback that holds its own exception would be a cycle


# What is sent for each batch is a plain tuple: pickling a named tuple looks its class up by name,
# which takes longer than a small batch.


def encode_message(message: BeginEpoch | Task) -> bytes:
    """Return a message of the main process as bytes, for `decode_message`."""
    if not isinstance(message, Task):
        return pickle.dumps(message, protocol=5)
    generation, step, indices, *others = message
    where = None
    if isinstance(indices, BatchIndices):
        indices, *where = indices
    is_array = isinstance(indices, np.ndarray)
    if isinstance(indices, np.ndarray):
        indices = indices.tobytes()
    return pickle.dumps((generation, step, indices, is_array, where, *others), protocol=5)


def decode_message(data: bytes) -> BeginEpoch | Task:
    """Return the message that `encode_message` encoded."""
    message = pickle.loads(data)
    if isinstance(message, BeginEpoch):
        return message
    generation, step, indices, is_array, where, *others = message
    if is_array:
        indices = np.frombuffer(indices, np.int64)
    if where is not None:
        indices = BatchIndices(indices, *where)
    return Task(generation, step, indices, *others)


def encode_result(result: TaskResult, *more: Any) -> bytes:  # noqa: ANN401
    """Return a worker's result as bytes, for `decode_result`."""
    payload = report_exception(result.payload) if result.kind == Kind.FAILED else result.payload
    position = None if result.position is None else tuple(result.position)
    fields = (
        result.generation, result.step, int(result.kind), payload, position, result.num_asked,
        list(map(_reported, result.bad)), result.times, result.notices,
    )  # fmt: skip
    return pickle.dumps((fields, more), protocol=5)


def _reported(bad: Failure) -> Failure:
    report = report_exception(bad.error)._replace(traceback="")  # `bad` has it
    return replace(bad, error=report)  # type: ignore[arg-type]  # `WorkerTable.accept` revives it


def decode_result(data: bytes) -> tuple[TaskResult, tuple[Any, ...]]:
    """Return the result, and what the backend added; exceptions are still reports."""
    fields, more = pickle.loads(data)
    result = TaskResult(*fields)
    result.kind = Kind(result.kind)
    if result.position is not None:
        result.position = ShardPosition(*result.position)
    return result, more
