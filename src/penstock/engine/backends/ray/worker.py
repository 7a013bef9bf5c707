# SPDX-License-Identifier: Apache-2.0
"""The actor: carries tasks to a `TaskRunner`, which makes their batches in one thread.

Guarantees
    Calls of an actor may come in any order, and twice, as Ray sends again what a broken link may
    have swallowed. So tasks are numbered, and done in the order of their numbers. One of a
    map-style dataset that comes again is done again, which gives the same batch. Of an iterable
    one, each is done once, and its answer is kept until the main process says that it has come.
    Nothing that the user's code raises ends the actor; `SystemExit` and the like are answered as
    its end.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import platform
import resource
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np

from penstock.engine.assembly import PlainOutput
from penstock.engine.backends.process_worker import set_up_worker
from penstock.engine.backends.ray.parcels import Parcel, address_of, pack_parcel, value_of
from penstock.engine.backends.thread import ThreadStatus, Unwanted
from penstock.engine.recover import drop_frames
from penstock.engine.status_page import Phase
from penstock.engine.task import Kind, decode_message, encode_result
from penstock.engine.task_runner import TaskRunner
from penstock.engine.timing import replaced
from penstock.user_code import stack_of_error, stack_of_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from penstock.engine.plan import WorkerSpec
    from penstock.engine.status_page import StatusSnapshot
    from penstock.engine.task import BeginEpoch, Task, TaskResult, WorkerIdentity

__all__ = ["Answer", "Hello", "RayWorker", "TaskServer", "versions_here"]

T = TypeVar("T")

_RSS_UNIT: Final = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss


def versions_here() -> str:
    """Return what both ends have to agree upon: "penstock 0.1.0, Python 3.11.7, numpy 2.4.6"."""
    ours = sys.modules["penstock"].__version__
    return f"penstock {ours}, Python {platform.python_version()}, numpy {np.__version__}"


class Hello(NamedTuple):
    """Where a worker is.

    Attributes:
        pid: Of its process.
        node_id: Of its machine, as Ray knows it.
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
        parcel: The batch, if there is one.
        snapshot: For "ended": what was being done.
    """

    kind: str
    message: bytes | str = b""
    parcel: Parcel | None = None
    snapshot: StatusSnapshot | None = None


class RayWorker:
    """Runs in a process of its own on some machine of the cluster; see the module.

    Every method is a coroutine, so that it answers while its thread works.

    Concurrency:
        Ray calls its coroutines in one event loop.
    """

    def __init__(self, identity: WorkerIdentity) -> None:
        """Become that worker; `open` is to follow."""
        self._server = TaskServer(identity)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "penstock-worker")
        self._opening: asyncio.Future[Answer] | None = None
        self._has_moved = asyncio.Condition()  # for tasks that came before their turn
        self._has_ended = asyncio.Event()

    async def _do(self, work: Callable[..., T], *args: object) -> T:
        """Return what comes of work in the thread, behind all that it was given before."""
        done = await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        async with self._has_moved:
            self._has_moved.notify_all()
        return done

    async def _answer(self, work: Callable[..., Answer], *args: object) -> Answer:
        return await self._do(self._server.answer, work, *args)

    async def hello(self) -> Hello:
        """Return where this is; at once, however long setting up takes."""
        import ray

        context = ray.get_runtime_context()
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return Hello(os.getpid(), context.get_node_id(), address, versions_here())

    async def open(self, parcel: Parcel) -> Answer:
        """Open the spec, and answer when that is done."""
        if self._opening is None:  # else this call has come twice
            self._opening = asyncio.ensure_future(self._answer(self._server.set_up, parcel))
        return await asyncio.shield(self._opening)

    async def make(self, begun: bytes, task: bytes, number: int, num_come: int) -> Answer:
        """Return the batch of a task; see `TaskServer.serve`."""
        server = self._server
        epoch: Any = decode_message(begun)
        server.want(epoch.generation)
        async with self._has_moved:
            await self._has_moved.wait_for(lambda: server.is_in_turn(epoch, number))
        return await self._answer(server.serve, epoch, decode_message(task), number, num_come)

    async def try_sample(self, begun: bytes, task: bytes, number: int) -> Answer:
        """Make one sample of a task by itself; see `TaskServer.try_sample`."""
        server = self._server
        epoch: Any = decode_message(begun)
        server.want(epoch.generation)
        return await self._answer(server.try_sample, epoch, decode_message(task), number)

    async def doing(self) -> tuple[StatusSnapshot, str]:
        """Return what is being done, and where in the user's code."""
        thread = self._server.thread
        return self._server.status.snapshot(), "" if thread is None else stack_of_thread(thread)

    async def until_end(self) -> None:
        """Return when this worker is to end; that it fails tells its caller of a sudden end."""
        await self._has_ended.wait()

    async def close(self) -> None:
        """Drop what waits, and break off what is being made at its sample."""
        self._server.status.want_nothing()
        await self._do(self._server.close)
        self._has_ended.set()

    async def end(self) -> None:
        """End this process, once its iterator and memory are closed."""
        import ray

        await self.close()
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]


class TaskServer:
    """Serves numbered tasks in the actor's thread, one after the other.

    Attributes:
        status: What is being done.
        thread: In which; None before it has begun.

    Concurrency:
        `want` and `is_in_turn` may be called at any time, all else in one thread.
    """

    def __init__(self, identity: WorkerIdentity) -> None:
        """Serve as this worker; `set_up` is to follow."""
        self.status = ThreadStatus()
        self.thread: threading.Thread | None = None
        self._identity = identity
        self._wanted = 0
        self._output = _ParcelOutput()
        self._runner = TaskRunner(self._output, self.status, identity)
        self._is_iterable = False
        self._has_frozen = False
        self._begun: BeginEpoch | None = None
        self._next_number = 0
        self._kept: dict[int, Answer] = {}  # by number; of an iterable
        self._end: Answer | None = None  # the answer to every task from here on

    def want(self, generation: int) -> None:
        """Drop what belongs to generations before this one."""
        if generation > self._wanted and self.status.is_wanted:
            self._wanted = generation
            self.status.want(generation)

    def is_in_turn(self, begun: BeginEpoch, number: int) -> bool:
        """Return whether a task may be served now: those before it have been, or none is wanted."""
        if not self.status.is_of_now(begun.generation):
            return True
        if self._begun is None or begun.generation != self._begun.generation:
            return number == 0
        return number <= self._next_number

    def answer(self, work: Callable[..., Answer], *args: Any) -> Answer:  # noqa: ANN401
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
            self._end = Answer("ended", words, snapshot=self.status.snapshot())
            return self._end
        finally:
            self.status.phase(Phase.WAITING)

    def set_up(self, parcel: Parcel) -> Answer:
        """Open the spec, which `parcel` holds, seed, and run `worker_init_fn`."""
        self.thread = threading.current_thread()
        self._runner.set_up(lambda: self._load(parcel))
        gc.freeze()  # see `process_worker`
        return Answer("answer")

    def _load(self, parcel: Parcel) -> WorkerSpec:
        spec: WorkerSpec = value_of(parcel)
        if states := set_up_worker(spec, self._identity):
            self._runner.notice(states=states)
        self._is_iterable = spec.is_iterable
        return spec

    def serve(self, begun: BeginEpoch, task: Task, number: int, num_come: int) -> Answer:
        """Return what becomes of a task.

        Args:
            begun: The epoch that it belongs to, which is begun if it is a new one.
            task: What to do.
            number: Which of this generation's tasks it is, from 0.
            num_come: How many answers of this generation the main process has.
        """
        self._begin_if_new(begun)
        self._kept = {k: answer for k, answer in self._kept.items() if k >= num_come}
        if self._is_iterable and number < self._next_number:
            return self._kept.get(number, Answer("dropped"))  # a late copy, of what has come
        result = self._runner.run(task)
        answer = Answer("dropped") if result is None else _answer_of(result)
        if self._is_iterable:
            self._kept[number] = answer
        elif not self._has_frozen:  # what the first batch has brought as well; see `process_worker`
            self._has_frozen = True
            gc.collect()
            gc.freeze()
        self._next_number = max(self._next_number, number + 1)
        return answer

    def try_sample(self, begun: BeginEpoch, task: Task, number: int) -> Answer:
        """Read, collate and pack sample `number` of a task by itself, and drop it.

        It either ends this process or it does not; what it raises, `serve` is going to raise again.
        """
        self._begin_if_new(begun)
        if self._runner.maker is not None:
            self.status.begin_task(task.generation, task.step)
            self._runner.maker.try_sample(task.indices, number, task.hints)
        return Answer("answer")

    def _begin_if_new(self, begun: BeginEpoch) -> None:
        if not self.status.is_of_now(begun.generation):
            raise Unwanted
        if self._begun is not None and self._begun.generation == begun.generation:
            return
        self._next_number = 0
        self._kept = {}
        self._begun = begun  # behind the numbers, as `is_in_turn` may be asked meanwhile
        self._runner.begin_epoch(begun)

    def close(self) -> None:
        """Let go of the dataset's iterator and of all memory."""
        self._runner.close()
        self._kept.clear()
        self._output.close()
        self.status.close()


def _answer_of(result: TaskResult) -> Answer:
    payload = result.payload
    if result.kind != Kind.FAILED:
        result.payload = None  # it goes beside
    if result.times is not None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
        result.times = replaced(result.times, rss_bytes=peak)
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
        self._given: list[tuple[int, int]] = []  # addresses of the batch's memory that is ours

    def begin(self, *, counts_bytes: bool) -> None:
        """Begin a batch; see `Output`."""
        super().begin(counts_bytes=counts_bytes)
        self._given.clear()

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Return memory for an array; see `PlainOutput.empty`."""
        array = super().empty(shape, dtype)
        start = address_of(array)
        self._given.append((start, start + array.nbytes))
        return array

    def finish(self, batch: object) -> Parcel:
        """Return the batch as a parcel."""
        pickled, buffers = pack_parcel(batch)
        parcel = Parcel(pickled, [b if self._is_ours(b) else b.copy() for b in buffers])
        self._num_bytes = parcel.num_bytes
        return parcel

    def _is_ours(self, buffer: npt.NDArray[np.uint8]) -> bool:
        first = address_of(buffer)
        return any(start <= first < end for start, end in self._given)

    def abandon(self) -> None:
        """Forget what was asked for; garbage collection takes it back."""
        self._given.clear()

    def dry_run(self, batch: object) -> None:
        """Raise what packing would."""
        pack_parcel(batch)
