# SPDX-License-Identifier: Apache-2.0
"""What crosses between the main process and its workers: the spec, messages, exceptions.

main process -> worker    WorkerSpec, BeginEpoch, Task, Task …, BeginEpoch …
worker -> main process    TaskResult …

Threads get copies: of an iterable dataset, and of an exception that is raised more than once.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import enum
import importlib
import io
import pickle
import sys
import traceback
import types
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np

from penstock.engine.plan import BatchIndices, RetryHints, ShardPosition
from penstock.engine.timing import NO_TIMES
from penstock.errors import ConfigError, UnpicklableError
from penstock.transport.packing import NeedsInheritance, dumps
from penstock.transport.shared import share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.engine.plan import WorkerSpec
    from penstock.faults import Failure

_ErrorT = TypeVar("_ErrorT", bound=BaseException)
_ADVICE: Final = (
    "Under the start methods spawn and forkserver everything a worker needs is pickled. Use a "
    "function or class defined at the top level of a module (functools.partial for arguments), "
    'open files and connections lazily in the worker, or use multiprocessing_context="fork".'
)
_ON_CLOUDPICKLE: Final = (
    " With cloudpickle installed (pip install cloudpickle), lambdas, local functions and classes, "
    "and those of a notebook, are sent as they are."
)
_BY_NAME: Final = (type, types.FunctionType)  # pickled as the name of something in a module


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
        keeps_states: Whether the worker answers with the states of its dataset and iterator, and
            positions hold these.
    """

    generation: int
    epoch: int
    is_announced: bool = False
    position: ShardPosition | None = None
    keeps_states: bool = False


class Task(NamedTuple):
    """Make the batch of one step.

    Attributes:
        generation: Generation of the `BeginEpoch` that it belongs to.
        step: Number of the batch in the epoch.
        indices: Indices of its samples: a 1-D int64 array of Penstock's samplers, or any object;
            either may be in a `BatchIndices`.
        hints: Hints on samples that end workers; None if there are none.
        is_measured: Whether to measure and report what the task takes.
        takes_state: Whether to report the states of the dataset and of its iterator.
        freed: Slots of the worker whose leases have ended.
        retired: Slots among them that must not be used again.
    """

    generation: int
    step: int
    indices: object
    hints: RetryHints | None = None
    is_measured: bool = True
    takes_state: bool = False
    freed: Sequence[int] = ()
    retired: Sequence[int] = ()


class Kind(enum.IntEnum):
    """Kind of a result."""

    DONE = 0  # the payload is the batch
    EMPTY = 1  # no sample of the batch is left
    FAILED = 2  # the payload is the exception that the user's code raised
    EXHAUSTED = 3  # the worker's shard of an iterable ended before this step
    READY = 4  # of no task: a worker is ready that was added during the epoch, or keeps states


@dataclass(slots=True, eq=False)
class TaskResult:
    """Result of one task, in a worker and in the main process.

    Attributes:
        generation: Generation of the task.
        step: Step of the task; -1 for none.
        kind: Kind of the result.
        payload: The batch; an exception, or its `ExceptionReport` on the way from
            another process.
        position: Position of the worker in its shard of an iterable dataset, or its states.
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


def share_spec(spec: WorkerSpec) -> int | None:
    """Return the descriptor of a segment that holds `spec`, pickled once for all workers.

    None where the spec holds something that can only be handed to a child while it is being started
    (a lock, a queue, a tensor in shared memory): then `multiprocessing` has to pickle it.

    What plain pickle cannot send (a lambda, a class of a notebook) is pickled by value where
    cloudpickle is installed.

    Raises:
        UnpicklableError: it cannot be pickled at all; names the attributes that cannot.
    """
    plain = pickle.Pickler if _can_import_main() else _MainPickler
    try:
        return share(spec, plain)
    except Exception as error:
        # multiprocessing's own objects say it in these words
        if isinstance(error, NeedsInheritance) or "through inheritance" in str(error):
            return None
        by_value = _cloud_pickler()
        if by_value is not None:
            with contextlib.suppress(Exception):  # the error of plain pickle is reported
                return share(spec, by_value)
        advice = _ADVICE if by_value is not None else _ADVICE + _ON_CLOUDPICKLE
        raise unpicklable_error(spec, error, advice=advice, base=by_value or plain) from error


def _can_import_main() -> bool:
    """Return whether a new process can run the main module: not of a notebook, or of a prompt."""
    main = sys.modules["__main__"]
    return hasattr(main, "__file__") or getattr(main, "__spec__", None) is not None


class _MainPickler(pickle.Pickler):
    """Refuses what a worker would look for in a main module that it cannot import."""

    dispatch_table = copyreg.dispatch_table

    def reducer_override(self, value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, _BY_NAME) and value.__module__ == "__main__":
            raise pickle.PicklingError(
                f"{value.__qualname__} is defined in a notebook, or at a prompt (__main__), which "
                "a new process cannot import: put it into a module (a .py file) and import it"
            )
        return NotImplemented


def _cloud_pickler() -> type[pickle.Pickler] | None:
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        return None
    base: type[pickle.Pickler] = cloudpickle.CloudPickler
    # An open text file would arrive as a copy of all that is in it.
    table = {kind: how for kind, how in base.dispatch_table.items() if kind is not io.TextIOWrapper}
    return type(base.__name__, (base,), {"dispatch_table": table})


def unpicklable_error(
    spec: WorkerSpec,
    error: Exception,
    *,
    advice: str = _ADVICE,
    base: type[pickle.Pickler] = pickle.Pickler,
) -> UnpicklableError:
    """Return an error that names what of `spec` made pickling by `base` fail with `error`."""
    parts = [(name, getattr(spec, name)) for name in ("dataset", "collate_fn", "worker_init_fn")]
    found = next(_find_unpicklable(parts, set(), base), ("the dataset", spec.dataset, error))
    path, culprit, cause = found
    return UnpicklableError(
        f"{path} cannot be sent to a worker: {type(cause).__name__}: {cause}. "
        f"It is {culprit!r:.80}. {advice}"
    )


def _find_unpicklable(
    members: Iterable[tuple[str, object]], seen: set[int], base: type[pickle.Pickler]
) -> Iterator[tuple[str, object, Exception]]:
    """Yield path, object and error of the innermost things that do not pickle."""
    for path, value in members:
        if id(value) in seen:
            continue
        seen.add(id(value))
        try:
            dumps(value, lambda _buffer: False, base=base)
        except Exception as error:
            yield from _find_unpicklable(_children(path, value), seen, base)
            yield path, value, error


def _children(path: str, value: Any) -> Iterator[tuple[str, object]]:  # noqa: ANN401
    if isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", member) for key, member in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"{path}[{k}]", member) for k, member in enumerate(value))
    elif not isinstance(value, _BY_NAME):
        with contextlib.suppress(Exception):
            state = value.__reduce_ex__(4)[2]  # of a `functools.partial`, its keywords too
            for attributes in state if isinstance(state, tuple) else (state,):
                if isinstance(attributes, dict):
                    yield from ((f"{path}.{name}", of) for name, of in attributes.items())


def own_copy(dataset: Any, num_workers: int) -> Any:  # noqa: ANN401
    """Return a copy of an iterable dataset for one of `num_workers` threads.

    As a process worker's is, but for arrays, whose memory stays shared where they can be pickled.
    What can be copied in no way goes to a single worker as it is.

    Raises:
        ConfigError: it cannot be copied, and there are several workers.
    """
    buffers: list[pickle.PickleBuffer] = []
    try:
        data = pickle.dumps(dataset, protocol=5, buffer_callback=buffers.append)
        return pickle.loads(data, buffers=buffers)
    except Exception:  # a class inside a function, a lambda, an open file
        buffers.clear()
    try:
        return copy.deepcopy(dataset)
    except Exception as error:  # it holds a lock, say
        if num_workers == 1:
            return dataset
        kind = type(dataset).__name__
        raise ConfigError(
            f"{kind} cannot be copied ({type(error).__name__}: {error}), and each of "
            f"{num_workers} worker threads iterates a copy of its own. Let {kind}.__getstate__ "
            "leave out what cannot be copied and __setstate__ make it anew, or use num_workers=1, "
            "or backend='process' with multiprocessing_context='fork'."
        ) from error


class ExceptionReport(NamedTuple):
    """An exception on its way to another process.

    Attributes:
        pickled: The exception, or None where it does not survive pickling.
        text: Its type and message.
        traceback: The traceback as text; empty if it is reported otherwise.
    """

    pickled: bytes | None
    text: str
    traceback: str


class WorkerTraceback(Exception):
    """The traceback in the worker, as text."""

    def __str__(self) -> str:
        """Return the text."""
        return f"\n\n{self.args[0]}"


class _InParts:
    """An exception that is pickled without its constructor, which may take other arguments."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[object, ...]:
        return _assemble, (type(self._error), self._error.args, vars(self._error))


def _assemble(
    kind: type[_ErrorT], args: tuple[object, ...], attributes: dict[str, object]
) -> _ErrorT:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(attributes)
    return error


def report_exception(error: BaseException) -> ExceptionReport:
    """Return a report of `error` for another process; it holds `error` if that can be pickled."""
    text = "".join(traceback.format_exception_only(error)).strip()
    for value in (error, _InParts(error)):
        with contextlib.suppress(Exception):
            pickled = pickle.dumps(value)
            if _is_like(pickle.loads(pickled), error):
                break
    else:
        pickled = None
    return ExceptionReport(pickled, text, "".join(traceback.format_exception(error)))


def revive_exception(report: ExceptionReport) -> BaseException:
    """Return the worker's exception, or a RuntimeError with its text if it did not pickle."""
    error: BaseException = RuntimeError(
        f"{report.text} (it cannot be raised as itself: it does not pickle)"
    )
    if report.pickled is not None:
        with contextlib.suppress(Exception):  # its class cannot be imported here, say
            error = pickle.loads(report.pickled)
    with contextlib.suppress(Exception):  # some exceptions refuse to be changed
        error.__cause__ = WorkerTraceback(report.traceback) if report.traceback else None
    return error


def copy_of_error(error: Exception) -> Exception:
    """Return a copy of `error`, to raise in its place; `error` if it cannot be copied.

    Each raise adds frames to an exception, and all that they hold.
    """
    with contextlib.suppress(Exception):  # its class does not allow that
        again = _assemble(type(error), error.args, vars(error))
        again.__notes__ = list(getattr(error, "__notes__", ()))
        if _is_like(again, error):
            return again.with_traceback(error.__traceback__)
    return error


def _is_like(again: object, error: BaseException) -> bool:
    return type(again) is type(error) and str(again) == str(error)
