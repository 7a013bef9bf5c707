# SPDX-License-Identifier: Apache-2.0
"""The actor: carries tasks to a `TaskRunner`, which makes their batches in one thread.

Guarantees
    Calls of an actor may come in any order, and twice, as Ray sends again what a broken link may
    have swallowed. So tasks are numbered, and done in the order of their numbers. One of a
    map-style dataset that comes again is done again, which gives the same batch. Of an iterable
    one, each is done once, and its answer is kept until the main process says that it has come.
    Nothing that the user's code raises ends the actor; `SystemExit` and the like are answered as
    its end.

Datasets and batches cross as Ray's object store takes them: a small pickle, and arrays beside it.
Ray copies the arrays that a call returns into its store, at the speed of memory, and gives out
views of it; on the same machine that takes no further copy.
What is defined in the main process's `__main__`, as in a notebook, is pickled by value
(cloudpickle).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import importlib
import io
import os
import pickle
import platform
import sys
import threading
import traceback
import warnings
from collections import ChainMap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.engine.assembly import PlainOutput
from penstock.engine.backends.process_worker import set_up_worker
from penstock.engine.backends.thread import NO_GENERATION, ThreadStatus, Unwanted
from penstock.engine.recover import drop_frames
from penstock.engine.status_page import Phase
from penstock.engine.task import Kind, decode_message, encode_result
from penstock.engine.task_runner import TaskRunner
from penstock.transport.packing import REDUCERS, take_large
from penstock.user_code import stack_of_error, stack_of_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from penstock.engine.plan import WorkerSpec
    from penstock.engine.status_page import StatusSnapshot
    from penstock.engine.task import BeginEpoch, Task, TaskResult, WorkerIdentity


class SerializedTree(NamedTuple):
    """A pickled tree.

    Attributes:
        pickled: The tree, without its large buffers.
        buffers: Those, in the order in which the pickle asks for them; each 1-D, uint8.
    """

    pickled: bytes
    buffers: list[npt.NDArray[np.uint8]]


@functools.cache
def _pickler_class() -> Any:  # noqa: ANN401 - a class of Ray's
    base: Any = importlib.import_module("ray.cloudpickle").CloudPickler
    # Of the class: C reads it when a pickler is made, and not what is assigned to one later.
    return type("TreePickler", (base,), {"dispatch_table": ChainMap(REDUCERS, base.dispatch_table)})


def serialize_tree(tree: object) -> SerializedTree:
    """Return `tree` serialized, with buffers that are views of the tree's own memory.

    Raises:
        Exception: whatever pickling raises.
    """
    buffers: list[npt.NDArray[np.uint8]] = []
    file = io.BytesIO()
    _pickler_class()(file, protocol=5, buffer_callback=take_large(buffers)).dump(tree)
    return SerializedTree(file.getvalue(), buffers)


def value_of(serialized: SerializedTree) -> Any:  # noqa: ANN401 - any tree at all
    """Return the tree again; its large arrays alias the buffers, and are as read-only as these."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return pickle.loads(serialized.pickled, buffers=[b.data for b in serialized.buffers])


def versions_here() -> str:
    """Return what both ends have to agree upon: "penstock 0.2.0, Python 3.11.7, numpy 2.4.6"."""
    ours = sys.modules["penstock"].__version__
    return f"penstock {ours}, Python {platform.python_version()}, numpy {np.__version__}"


class Handshake(NamedTuple):
    """Where a worker is.

    Attributes:
        pid: Of its process.
        node_id: Ray's ID of its machine.
        address: Of its machine.
        versions: What it runs on, in words.
    """

    pid: int
    node_id: str
    address: str
    versions: str


class Answer(NamedTuple):
    """What a call of the actor returns.

    Attributes:
        kind: "answer"; "dropped", as the task is not wanted any more; "ended", as the user's code
            asked for the worker's end.
        message: The `TaskResult`, encoded; for "ended" how, as text.
        serialized: The batch, if there is one.
        snapshot: For "ended": what was being done.
    """

    kind: str
    message: bytes | str = b""
    serialized: SerializedTree | None = None
    snapshot: StatusSnapshot | None = None


class RayWorker:
    """The actor, in a process of its own on some machine of the cluster; see the module.

    Every public method is a coroutine, so that it answers while the thread works.

    Concurrency:
        Ray calls its coroutines in one event loop. The other methods run in the worker's thread,
        one after the other, unless they say otherwise.
    """

    def __init__(self, identity: WorkerIdentity) -> None:
        """Become that worker; `open` is to follow."""
        self._identity = identity
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "penstock-worker")
        self._has_moved = asyncio.Condition()  # for tasks that came before their turn
        self._has_ended = asyncio.Event()
        self._status = ThreadStatus(is_process=True)
        self._working_thread: threading.Thread | None = None
        self._runner = TaskRunner(_ParcelOutput(), self._status, identity)
        self._is_iterable = False
        self._begun: BeginEpoch | None = None
        self._next_number = 0
        self._kept: dict[int, Answer] = {}  # by number; of an iterable
        self._end: Answer | None = None  # the answer to every task from here on

    async def handshake(self) -> Handshake:
        """Return where this is; at once, however long setting up takes."""
        import ray

        context = ray.get_runtime_context()
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return Handshake(os.getpid(), context.get_node_id(), address, versions_here())

    async def open(self, serialized: SerializedTree) -> Answer:
        """Open the spec, and answer when that is done."""
        return await self._do(self._set_up, serialized)

    async def make(
        self, begun: bytes, task: bytes, number: int, num_come: int, trial: int | None = None
    ) -> Answer:
        """Do a task when its turn has come, and return the answer."""
        epoch: Any = decode_message(begun)
        # Tasks of earlier generations are dropped.
        self._status.wanted = max(self._status.wanted, epoch.generation)
        async with self._has_moved:
            await self._has_moved.wait_for(lambda: self._is_in_turn(epoch, number))
        return await self._do(self._serve, epoch, decode_message(task), number, num_come, trial)

    async def doing(self) -> tuple[StatusSnapshot, str]:
        """Return what is being done, and where in the user's code."""
        thread = self._working_thread
        return self._status.snapshot(), "" if thread is None else stack_of_thread(thread)

    async def until_end(self) -> None:
        """Return when this worker is to end; the call fails if the process ends before."""
        await self._has_ended.wait()

    async def close(self) -> None:
        """Drop what waits, and break off what is being made at its sample."""
        self._status.wanted = NO_GENERATION
        await self._do(self._close)
        self._has_ended.set()

    async def end(self) -> None:
        """End this process, once its iterator and memory are closed."""
        import ray

        await self.close()
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]

    async def _do(self, work: Callable[..., Answer], *args: object) -> Answer:
        """Do `work` in the thread, after all earlier work, and return its answer."""
        loop = asyncio.get_running_loop()
        done = await loop.run_in_executor(self._thread, self._answer, work, *args)
        async with self._has_moved:
            self._has_moved.notify_all()
        return done

    def _is_in_turn(self, begun: BeginEpoch, number: int) -> bool:
        """Return whether a task may be served now: those before it have been, or it is unwanted.

        Concurrency:
            The event loop asks, while the thread may be beginning the epoch.
        """
        if self._status.wanted != begun.generation:
            return True
        if self._begun is None or begun.generation != self._begun.generation:
            return number == 0
        return number <= self._next_number

    def _answer(self, work: Callable[..., Answer], *args: object) -> Answer:
        """Return what `work` answers, one of the methods below; or that it is not wanted."""
        if self._end is not None:  # an iterator that has raised would only say that it has no more
            return self._end
        try:
            return work(*args)
        except Unwanted:
            return Answer("dropped")
        except BaseException as error:  # SystemExit, say; of Exception nothing gets here
            text = "".join(traceback.format_exception_only(error)).strip()
            words = f"{text}\nWhere it was raised:\n{stack_of_error(error)}"
            self._end = Answer("ended", words, snapshot=self._status.snapshot())
            return self._end
        finally:
            self._status.phase(Phase.WAITING)

    def _set_up(self, serialized: SerializedTree) -> Answer:
        """Open the spec, which `serialized` holds, seed, and run `worker_init_fn`."""
        if self._working_thread is None:  # else this call has come twice
            self._working_thread = threading.current_thread()
            self._runner.set_up(lambda: self._load(serialized))
        return Answer("answer")

    def _load(self, serialized: SerializedTree) -> WorkerSpec:
        spec: WorkerSpec = value_of(serialized)
        if states := set_up_worker(spec, self._identity):
            self._runner.notices["states"] = states
        self._is_iterable = spec.is_iterable
        return spec

    def _serve(
        self, begun: BeginEpoch, task: Task, number: int, num_come: int, trial: int | None
    ) -> Answer:
        if self._status.wanted != begun.generation:
            raise Unwanted
        if self._begun is None or self._begun.generation != begun.generation:
            self._next_number = 0
            self._kept = {}
            self._begun = begun  # after the numbers: `_is_in_turn` may read them meanwhile
            self._runner.begin_epoch(begun)
        self._kept = {k: answer for k, answer in self._kept.items() if k >= num_come}
        if self._is_iterable and number < self._next_number:
            return self._kept.get(number, Answer("dropped"))  # a late copy, of what has come
        answer = _answer_of(self._runner.run(task)) if trial is None else self._tried(task, trial)
        if self._is_iterable:
            self._kept[number] = answer
        self._next_number = max(self._next_number, number + 1)
        return answer

    def _tried(self, task: Task, number: int) -> Answer:
        """Read, collate and pack one sample by itself, and drop it.

        Only whether it ends this process counts: what it raises, the batch will raise again.
        """
        if self._runner.maker is not None:
            self._status.begin_task(task.generation, task.step)
            self._runner.maker.try_sample(task.indices, number, task.hints)
        return Answer("answer")

    def _close(self) -> Answer:
        """Let go of the dataset's iterator."""
        self._runner.close()
        self._status.close()
        return Answer("answer")


def _answer_of(result: TaskResult | None) -> Answer:
    if result is None:
        return Answer("dropped")
    payload = result.payload
    if result.kind != Kind.FAILED:
        result.payload = None  # it goes beside
    message = encode_result(result)
    if result.kind == Kind.FAILED:
        drop_frames(payload)
    return Answer("answer", message, payload if result.kind == Kind.DONE else None)


class _ParcelOutput(PlainOutput):
    """Packs batches that lie in recycled memory of this process; Ray copies them into its store.

    It does so while the next batch is being made, and an iterable's may have to be sent once more.
    So what the user's code has made, and may be about to write into again, is copied here.
    """

    def __init__(self) -> None:
        """Begin with no memory."""
        super().__init__()
        self._given: set[int] = set()  # addresses of the arrays that the batch was given

    def begin(self) -> None:
        """Begin a batch; see `Output`."""
        super().begin()
        self._given.clear()

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Return memory for an array; see `PlainOutput.empty`."""
        array = super().empty(shape, dtype)
        self._given.add(array.ctypes.data)
        return array

    def finish(self, batch: object) -> SerializedTree:
        """Return the batch, serialized."""
        pickled, buffers = serialize_tree(batch)
        buffers = [b if b.ctypes.data in self._given else b.copy() for b in buffers]
        self._num_bytes = len(pickled) + sum(buffer.nbytes for buffer in buffers)
        return SerializedTree(pickled, buffers)

    def dry_run(self, batch: object) -> None:
        """Raise what packing would."""
        serialize_tree(batch)
