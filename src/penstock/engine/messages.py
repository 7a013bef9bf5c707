# SPDX-License-Identifier: Apache-2.0
"""What the trainer and its process workers say to each other, and how an exception crosses.

trainer -> worker    Setup (once, with the recipe's segment), BeginEpoch, Task
worker  -> trainer   BatchMade, TaskFailed, ShareEnded
"""

from __future__ import annotations

import pickle
import traceback
from typing import Any, NamedTuple

import numpy as np

from penstock.transport.arena import Extent
from penstock.transport.packing import Packed

__all__ = [
    "BatchMade",
    "BeginEpoch",
    "ExceptionReport",
    "ShareEnded",
    "Task",
    "TaskFailed",
    "decode",
    "encode",
    "report_exception",
    "revive_exception",
]


class Task(NamedTuple):
    """Make the batch of one step.

    Attributes:
        epoch: Epoch it belongs to.
        step: Number of the batch in it.
        indices: A 1-D int64 array of our samplers, which crosses as its bytes, or any object.
        freed: The worker's slots whose leases have ended.
        retired: Those of them that may not be used again.
    """

    epoch: int
    step: int
    indices: object
    freed: tuple[int, ...]
    retired: tuple[int, ...]


class BeginEpoch(NamedTuple):
    """A new epoch: iterate the dataset anew. Tasks of the epoch before are finished first."""

    epoch: int


class BatchMade(NamedTuple):
    """A batch lies ready. `new_slots` (number, bytes) come with one descriptor each."""

    epoch: int
    step: int
    packed: Packed
    new_slots: tuple[tuple[int, int], ...]
    retired_slots: tuple[int, ...]


class ExceptionReport(NamedTuple):
    """An exception on its way to another process.

    Attributes:
        pickled: The exception, or None where it does not survive pickling.
        text: Its type and message.
        traceback: The traceback as text.
    """

    pickled: bytes | None
    text: str
    traceback: str


class TaskFailed(NamedTuple):
    """The user's code raised."""

    epoch: int
    step: int
    report: ExceptionReport


class ShareEnded(NamedTuple):
    """This worker's share of an iterable dataset ended before `step`."""

    epoch: int
    step: int


_KINDS: dict[type, int] = {
    Task: 0,
    BeginEpoch: 1,
    BatchMade: 2,
    TaskFailed: 3,
    ShareEnded: 4,
}
_TYPES: tuple[type, ...] = tuple(_KINDS)


def encode(message: Task | BeginEpoch | BatchMade | TaskFailed | ShareEnded) -> bytes:
    """Return `message` as bytes; plain tuples, so that no class is looked up by name."""
    fields: tuple[Any, ...] = tuple(message)
    if isinstance(message, Task):
        indices = message.indices
        is_array = isinstance(indices, np.ndarray)
        if isinstance(indices, np.ndarray):
            indices = indices.tobytes()
        fields = (message.epoch, message.step, indices, message.freed, message.retired, is_array)
    elif isinstance(message, BatchMade):
        packed = message.packed
        place = tuple(packed.pickle) if isinstance(packed.pickle, Extent) else packed.pickle
        buffers = tuple(map(tuple, packed.buffers))
        fields = (message.epoch, message.step, place, buffers, packed.slots, *fields[3:])
    elif isinstance(message, TaskFailed):
        fields = (message.epoch, message.step, *message.report)
    return pickle.dumps((_KINDS[type(message)], fields), protocol=5)


def decode(data: bytes) -> Any:  # noqa: ANN401 - one of the messages
    """Return the message again."""
    kind, fields = pickle.loads(data)
    if _TYPES[kind] is Task:
        epoch, step, indices, freed, retired, is_array = fields
        if is_array:
            indices = np.frombuffer(indices, np.int64)
        return Task(epoch, step, indices, freed, retired)
    if _TYPES[kind] is BatchMade:
        epoch, step, place, buffers, slots, new_slots, retired = fields
        message = place if isinstance(place, bytes) else Extent(*place)
        packed = Packed(message, tuple(Extent(*buffer) for buffer in buffers), slots)
        return BatchMade(epoch, step, packed, new_slots, retired)
    if _TYPES[kind] is TaskFailed:
        return TaskFailed(fields[0], fields[1], ExceptionReport(*fields[2:]))
    return _TYPES[kind](*fields)


class WorkerTraceback(Exception):
    """The traceback in the worker, as text."""

    def __str__(self) -> str:
        """Return the text."""
        return f"\n\n{self.args[0]}"


def report_exception(error: BaseException) -> ExceptionReport:
    """Return `error` ready for another process; as itself only if it survives pickling."""
    text = "".join(traceback.format_exception_only(error)).strip()
    pickled = _pickle_exception(error, error)
    if pickled is None:  # a constructor with other arguments than `args`: do without it
        pickled = _pickle_exception(error, _Parts(type(error), error.args, vars(error)))
    return ExceptionReport(pickled, text, "".join(traceback.format_exception(error)))


class _Parts(NamedTuple):
    """An exception whose constructor cannot be called again with its `args`."""

    kind: type[BaseException]
    args: tuple[object, ...]
    attributes: dict[str, object]

    def assemble(self) -> BaseException:
        error = self.kind.__new__(self.kind)
        error.args = self.args
        vars(error).update(self.attributes)
        return error


def _pickle_exception(error: BaseException, value: BaseException | _Parts) -> bytes | None:
    """Return `value` pickled, if what comes out of it is like `error`."""
    try:
        pickled = pickle.dumps(value)
        again = _unpickle_exception(pickled)
        same = type(again) is type(error) and str(again) == str(error)
    except Exception:
        return None
    return pickled if same else None


def _unpickle_exception(pickled: bytes) -> BaseException:
    value: BaseException | _Parts = pickle.loads(pickled)
    return value.assemble() if isinstance(value, _Parts) else value


def revive_exception(report: ExceptionReport, where: str) -> BaseException:
    """Return the worker's exception, or a RuntimeError with its text if it did not pickle.

    Args:
        report: What the worker sent.
        where: Which worker and step, for the note.
    """
    error: BaseException | None = None
    if report.pickled is not None:
        try:
            error = _unpickle_exception(report.pickled)
        except Exception:
            error = None  # its class is not to be found here, say
    if error is None:
        error = RuntimeError(f"{report.text} (it cannot be raised as itself: it does not pickle)")
    error.__cause__ = WorkerTraceback(report.traceback)
    error.add_note(where)
    return error
