# SPDX-License-Identifier: Apache-2.0
"""What the main process and its process workers say to each other, and how an exception crosses.

main process -> worker  the spec's segment (once), then BeginEpoch, Task, Task …, BeginEpoch …
worker -> main process  BatchMade, TaskFailed, ShardExhausted; Ready (once, of one that was added);
                        GeneratorsSet (once, where worker_init_fn set them); DrawingsFound (once)
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.engine.accounts import TaskTimes
from penstock.engine.epoch import ShardPosition
from penstock.engine.plan import BatchIndices, RetryHints
from penstock.faults import annotate
from penstock.transport.arena import Extent
from penstock.transport.packing import Packed

if TYPE_CHECKING:
    from penstock.engine.recover import BadSample

__all__ = [
    "BatchMade",
    "BeginEpoch",
    "DrawingsFound",
    "ExceptionReport",
    "GeneratorsSet",
    "Ready",
    "ShardExhausted",
    "Task",
    "TaskFailed",
    "decode",
    "encode",
    "report_bad",
    "report_exception",
    "revive_exception",
]


class Task(NamedTuple):
    """Make the batch of one step.

    Attributes:
        generation: Which `BeginEpoch` it belongs to.
        step: Number of the batch in it.
        indices: A 1-D int64 array of our samplers, which crosses as its bytes, or any object; or
            one of the two as `BatchIndices`.
        freed: The worker's slots whose leases have ended.
        retired: Those of them that may not be used again.
        hints: How to run it after workers have died over it; None: as usual.
        is_measured: Whether to tell what it takes.
    """

    generation: int
    step: int
    indices: object
    freed: tuple[int, ...]
    retired: tuple[int, ...]
    hints: RetryHints | None = None
    is_measured: bool = True


class BeginEpoch(NamedTuple):
    """A new epoch: iterate the dataset anew. Tasks of the epoch before are finished first.

    Attributes:
        generation: Counts the epochs of this worker. The user may begin the same epoch again.
        epoch: Number of the epoch to the user.
        is_announced: Whether the dataset is notified of that number.
        shard: Where to go on in the worker's shard of an iterable dataset; None begins it.
    """

    generation: int
    epoch: int
    is_announced: bool
    shard: ShardPosition | None


class BatchMade(NamedTuple):
    """A batch lies ready.

    Attributes:
        generation: Of the task.
        step: Of the task.
        packed: The batch.
        new_slots: (number, bytes) of slots that come with it, with one descriptor each.
        retired_slots: Numbers of slots that are gone.
        shard: How far the worker is in its shard of an iterable dataset.
        first_sample: Digest of the first sample of that shard, if this batch begins with it.
        num_asked: Samples that were asked for.
        bad: Samples that the batch goes without.
        is_empty: Whether nothing is left of it.
        times: What it took.
    """

    generation: int
    step: int
    packed: Packed
    new_slots: tuple[tuple[int, int], ...]
    retired_slots: tuple[int, ...]
    shard: ShardPosition | None
    first_sample: bytes | None
    num_asked: int = 0
    bad: tuple[BadReport, ...] = ()
    is_empty: bool = False
    times: TaskTimes | None = None


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


class BadReport(NamedTuple):
    """A bad sample on its way to another process; see `penstock.engine.recover.BadSample`."""

    index: Any
    report: ExceptionReport
    replaced_by: Any
    name: str | None
    partner_of: Any


class TaskFailed(NamedTuple):
    """The user's code raised. `shard` and `bad` are as in `BatchMade`."""

    generation: int
    step: int
    report: ExceptionReport
    shard: ShardPosition | None
    bad: tuple[BadReport, ...] = ()


class ShardExhausted(NamedTuple):
    """This worker's shard of an iterable dataset ended before `step`.

    `num_asked` and `bad` are as in `BatchMade`.
    """

    generation: int
    step: int
    num_asked: int = 0
    bad: tuple[BadReport, ...] = ()


class Ready(NamedTuple):
    """A worker that joined an epoch under way can begin; it has made no step."""

    generation: int
    step: int = -1


class GeneratorsSet(NamedTuple):
    """`worker_init_fn` has set these global generators; see `penstock.engine.constant_seeds`."""

    states: dict[str, bytes]
    generation: int = -1
    step: int = -1


class DrawingsFound(NamedTuple):
    """Functions that drew from the global generators; see `penstock.engine.generator_watch`."""

    drawings: tuple[str, ...]
    generation: int = -1
    step: int = -1


_KINDS: dict[type, int] = {
    Task: 0,
    BeginEpoch: 1,
    BatchMade: 2,
    TaskFailed: 3,
    ShardExhausted: 4,
    Ready: 5,
    GeneratorsSet: 6,
    DrawingsFound: 7,
}
_TYPES: tuple[type, ...] = tuple(_KINDS)


def encode(
    message: Task
    | BeginEpoch
    | BatchMade
    | TaskFailed
    | ShardExhausted
    | Ready
    | GeneratorsSet
    | DrawingsFound,
) -> bytes:
    """Return `message` as bytes; plain tuples, so that no class is looked up by name."""
    fields: tuple[Any, ...] = tuple(message)
    if isinstance(message, Task):
        indices: Any = message.indices
        where = None
        if isinstance(indices, BatchIndices):
            indices, where = indices.indices, (indices.position, indices.stride)
        is_array = isinstance(indices, np.ndarray)
        if isinstance(indices, np.ndarray):
            indices = indices.tobytes()
        hints = None if message.hints is None else tuple(message.hints)
        fields = (
            *message[:2], indices, *message[3:5], is_array, where, hints, message.is_measured,
        )  # fmt: skip
    elif isinstance(message, BatchMade):
        packed = message.packed
        place = tuple(packed.pickle) if isinstance(packed.pickle, Extent) else packed.pickle
        buffers = tuple(map(tuple, packed.buffers))
        shard = None if message.shard is None else tuple(message.shard)
        rest = (*message[3:5], shard, message.first_sample, message.num_asked)
        bad = tuple(map(_plain_bad, message.bad))
        times = None if message.times is None else tuple(message.times)
        fields = (*message[:2], place, buffers, packed.slots, *rest, bad, message.is_empty, times)
    elif isinstance(message, TaskFailed):
        shard = None if message.shard is None else tuple(message.shard)
        bad = tuple(map(_plain_bad, message.bad))
        fields = (message.generation, message.step, tuple(message.report), shard, bad)
    elif isinstance(message, ShardExhausted):
        fields = (*message[:3], tuple(map(_plain_bad, message.bad)))
    elif isinstance(message, BeginEpoch):
        fields = (*message[:3], None if message.shard is None else tuple(message.shard))
    return pickle.dumps((_KINDS[type(message)], fields), protocol=5)


def decode(data: bytes) -> Any:  # noqa: ANN401 - one of the messages
    """Return the message again."""
    kind, fields = pickle.loads(data)
    if _TYPES[kind] is Task:
        number, step, indices, freed, retired, is_array, where, plain_hints, is_measured = fields
        if is_array:
            indices = np.frombuffer(indices, np.int64)
        if where is not None:
            indices = BatchIndices(indices, *where)
        hints = None if plain_hints is None else RetryHints(*plain_hints)
        return Task(number, step, indices, freed, retired, hints, is_measured)
    if _TYPES[kind] is BatchMade:
        number, step, place, buffers, slots, new_slots, retired, shard, *rest = fields
        first, num_asked, bad, is_empty, times = rest
        message = place if isinstance(place, bytes) else Extent(*place)
        packed = Packed(message, tuple(itertools.starmap(Extent, buffers)), slots)
        return BatchMade(
            number, step, packed, new_slots, retired, _shard(shard),
            first, num_asked, _bad(bad) if bad else (), is_empty,
            None if times is None else TaskTimes(*times),
        )  # fmt: skip
    if _TYPES[kind] is BeginEpoch:
        number, epoch, is_announced, shard = fields
        return BeginEpoch(number, epoch, is_announced, _shard(shard))
    if _TYPES[kind] is TaskFailed:
        number, step, report, shard, bad = fields
        return TaskFailed(number, step, ExceptionReport(*report), _shard(shard), _bad(bad))
    if _TYPES[kind] in (Ready, GeneratorsSet, DrawingsFound):
        return _TYPES[kind](*fields)
    number, step, num_asked, bad = fields
    return ShardExhausted(number, step, num_asked, _bad(bad))


def _plain_bad(bad: BadReport) -> tuple[Any, ...]:
    return bad.index, tuple(bad.report), *bad[2:]


def _bad(plain: tuple[Any, ...]) -> tuple[BadReport, ...]:
    return tuple(BadReport(index, ExceptionReport(*r), *rest) for index, r, *rest in plain)


def _shard(fields: tuple[Any, ...] | None) -> ShardPosition | None:
    return None if fields is None else ShardPosition(*fields)


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


def report_bad(bad: BadSample) -> BadReport:
    """Return a bad sample ready for another process."""
    report = report_exception(bad.error)._replace(traceback=bad.traceback)
    return BadReport(bad.index, report, bad.replaced_by, bad.name, bad.partner_of)


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
    with contextlib.suppress(Exception):  # some exceptions refuse to be changed
        error.__cause__ = WorkerTraceback(report.traceback) if report.traceback else None
    annotate(error, where)
    return error
