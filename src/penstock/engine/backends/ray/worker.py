# SPDX-License-Identifier: Apache-2.0
"""The actor: takes tasks, makes their batches in one thread, and answers.

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
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.engine.backends.in_process import PlainOutput
from penstock.engine.backends.ray.parcels import Parcel, address_of, pack_parcel, value_of
from penstock.engine.messages import (
    BatchMade,
    ExceptionReport,
    ShardExhausted,
    TaskFailed,
    decode,
    encode,
    report_bad,
    report_exception,
)
from penstock.engine.recover import NO_BATCH, drop_frames
from penstock.engine.status_page import Phase
from penstock.engine.thread_status import ThreadStatus, Unwanted
from penstock.engine.user_frames import stack_of_error, stack_of_thread
from penstock.engine.worker_setup import make_fetcher, set_up_worker
from penstock.transport.packing import Packed

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from penstock.engine.accounts import TaskTimes
    from penstock.engine.fetch import Fetcher
    from penstock.engine.messages import BeginEpoch, Task
    from penstock.engine.plan import WorkerSpec
    from penstock.engine.status_page import StatusSnapshot
    from penstock.engine.worker_setup import WorkerIdentity

__all__ = ["Answer", "Hello", "Maker", "RayWorker", "Versions"]

_NOTHING: Final = Packed(b"", (), ())
_RSS_UNIT: Final = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss


class Versions(NamedTuple):
    """What both ends have to agree upon."""

    penstock: str
    python: str
    numpy: str

    @classmethod
    def here(cls) -> Versions:
        """Return this process's."""
        return cls(sys.modules["penstock"].__version__, platform.python_version(), np.__version__)

    def __str__(self) -> str:
        """Return "penstock 0.1.0, Python 3.11.7, numpy 2.4.6"."""
        return f"penstock {self.penstock}, Python {self.python}, numpy {self.numpy}"


class Hello(NamedTuple):
    """Where a worker is.

    Attributes:
        pid: Of its process.
        node_id: Of its machine, as Ray knows it.
        address: Of its machine.
        versions: Of what it runs on.
    """

    pid: int
    node_id: str
    address: str
    versions: Versions


class Answer(NamedTuple):
    """What a task came to.

    Attributes:
        kind: "answer"; "dropped", as nobody wants it; "ended", as the user's code asked for the
            worker's end.
        message: `penstock.engine.messages`, encoded; for "ended" how, as text.
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
        """Be that worker; `open` is to follow."""
        self._maker = Maker(identity)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "penstock-worker")
        self._opening: asyncio.Future[Answer] | None = None
        self._has_moved = asyncio.Condition()  # for tasks that came before their turn
        self._has_ended = asyncio.Event()

    async def _do(self, work: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401
        """Return what comes of work in the thread, behind all that it was given before."""
        done = await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        async with self._has_moved:
            self._has_moved.notify_all()
        return done

    async def hello(self) -> Hello:
        """Return where this is; at once, however long setting up takes."""
        import ray

        context = ray.get_runtime_context()
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return Hello(os.getpid(), context.get_node_id(), address, Versions.here())

    async def open(self, parcel: Parcel) -> Answer:
        """Open the spec, and answer when that is done."""
        if self._opening is None:  # else this call has come twice
            self._opening = asyncio.ensure_future(self._do(self._maker.set_up, parcel))
        return await asyncio.shield(self._opening)

    async def make(self, begun: bytes, task: bytes, number: int, num_come: int) -> Answer:
        """Return the batch of a task; see `Maker.serve`."""
        maker, epoch = self._maker, decode(begun)
        maker.want(epoch.generation)
        async with self._has_moved:
            await self._has_moved.wait_for(lambda: maker.is_in_turn(epoch, number))
        answer: Answer = await self._do(maker.serve, epoch, decode(task), number, num_come)
        return answer

    async def try_sample(self, begun: bytes, task: bytes, number: int) -> Answer:
        """Make one sample of a task by itself; see `Maker.try_sample`."""
        epoch = decode(begun)
        self._maker.want(epoch.generation)
        answer: Answer = await self._do(self._maker.try_sample, epoch, decode(task), number)
        return answer

    async def doing(self) -> tuple[StatusSnapshot, str]:
        """Return what is being done, and where in the user's code."""
        thread = self._maker.thread
        return self._maker.status.snapshot(), "" if thread is None else stack_of_thread(thread)

    async def until_end(self) -> None:
        """Return when this worker is to end; that it fails tells who waits of a sudden end."""
        await self._has_ended.wait()

    async def close(self) -> None:
        """Drop what waits, and break off what is being made at its sample."""
        self._maker.status.want_nothing()
        await self._do(self._maker.close)
        self._has_ended.set()

    async def end(self) -> None:
        """End this process, once its iterator and memory are closed."""
        import ray

        await self.close()
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]


class Maker:
    """What the actor's thread does: makes the batches of tasks, one after the other.

    Attributes:
        status: What is being done.
        thread: In which; None before it has begun.

    Concurrency:
        `want` and `is_in_turn` may be called at any time, all else in one thread.
    """

    def __init__(self, identity: WorkerIdentity) -> None:
        """Make batches for this worker; `set_up` is to follow."""
        self.status = ThreadStatus()
        self.thread: threading.Thread | None = None
        self._identity = identity
        self._wanted = 0
        self._output = _ParcelOutput()
        self._spec: WorkerSpec | None = None
        self._fetcher: Fetcher | None = None
        self._failure: ExceptionReport | None = None  # the answer to every task
        self._begun: BeginEpoch | None = None
        self._is_exhausted = False
        self._has_served = False
        self._next_number = 0
        self._kept: dict[int, Answer] = {}  # by number; of an iterable
        self._end: Answer | None = None  # the answer to every task from here on

    def want(self, generation: int) -> None:
        """Say that nothing of rounds before this one is wanted any more."""
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

    def set_up(self, parcel: Parcel) -> Answer:
        """Open the spec, which `parcel` holds, seed, and run `worker_init_fn`."""
        self.thread = threading.current_thread()
        try:
            return self._answered_by(self._set_up, parcel)
        finally:
            gc.freeze()  # see penstock.engine.worker

    def _set_up(self, parcel: Parcel) -> Answer:
        try:
            spec = value_of(parcel)
            set_up_worker(spec, self._identity)
            self._spec = spec
        except Exception as error:
            self._failure = report_exception(error)
        return Answer("answer")

    def serve(self, begun: BeginEpoch, task: Task, number: int, num_come: int) -> Answer:
        """Return what becomes of a task.

        Args:
            begun: The epoch that it belongs to, which is begun if it is a new one.
            task: What to do.
            number: Which of this generation's tasks it is, from 0.
            num_come: How many answers of this generation the main process has.
        """
        return self._answered_by(self._serve_once, begun, task, number, num_come)

    def try_sample(self, begun: BeginEpoch, task: Task, number: int) -> Answer:
        """Read, collate and pack sample `number` of a task by itself, and drop it.

        It either ends this process or it does not; what it raises, `serve` is going to raise again.
        """
        return self._answered_by(self._try_sample, begun, task, number)

    def _answered_by(self, work: Callable[..., Answer], *args: Any) -> Answer:  # noqa: ANN401
        if self._end is not None:  # an iterator that has raised would only say that it has no more
            return self._end
        try:
            return work(*args)
        except Unwanted:
            self._output.abandon()
            return Answer("dropped")
        except BaseException as error:  # SystemExit, say; of Exception nothing gets here
            text = "".join(traceback.format_exception_only(error)).strip()
            words = f"{text}\nWhere it was raised:\n{stack_of_error(error)}"
            self._end = Answer("ended", words, snapshot=self.status.snapshot())
            return self._end
        finally:
            self.status.phase(Phase.WAITING)

    def _serve_once(self, begun: BeginEpoch, task: Task, number: int, num_come: int) -> Answer:
        self._begin_if_new(begun)
        is_iterable = self._spec is not None and self._spec.is_iterable
        self._kept = {k: answer for k, answer in self._kept.items() if k >= num_come}
        if is_iterable and number < self._next_number:  # a late copy of what has come, if none
            return self._kept.get(number, Answer("dropped"))
        answer = self._serve(task)
        if is_iterable:
            self._kept[number] = answer
        self._next_number = max(self._next_number, number + 1)
        return answer

    def _try_sample(self, begun: BeginEpoch, task: Task, number: int) -> Answer:
        self._begin_if_new(begun)
        if self._failure is None:
            assert self._fetcher is not None
            self.status.begin_task(task.generation, task.step)
            self._fetcher.try_sample(task.indices, number, task.hints)
        return Answer("answer")

    def _begin_if_new(self, begun: BeginEpoch) -> None:
        if not self.status.is_of_now(begun.generation):
            raise Unwanted
        if self._begun is not None and self._begun.generation == begun.generation:
            return
        self._is_exhausted = False
        self._next_number = 0
        self._kept = {}
        self._begun = begun  # behind the numbers, as `is_in_turn` may be asked meanwhile
        if self._spec is None:
            return
        self.status.begin_generation(begun.generation)
        self._fetcher = None  # an iterator of the epoch before ends before the next begins
        try:
            self._fetcher = make_fetcher(
                self._spec, self._output, self._identity, begun, self.status
            )
            self._failure = None
        except Exception as error:
            self._failure = report_exception(error)

    def _serve(self, task: Task) -> Answer:
        if self._is_exhausted:
            return Answer("dropped")  # the main process knows that no answer comes
        if self._failure is not None:
            return Answer(
                "answer", encode(TaskFailed(task.generation, task.step, self._failure, None))
            )
        assert self._fetcher is not None
        self.status.begin_task(task.generation, task.step)
        self._output.take_num_bytes()
        try:
            parcel = self._fetcher.fetch(task.indices, task.step, task.hints)
            shard = self._fetcher.saved_position()
        except Exception as error:
            self._output.abandon()
            return self._failed(task, error, self._fetcher)
        is_empty = parcel is NO_BATCH
        message = BatchMade(
            task.generation,
            task.step,
            _NOTHING,
            (),
            (),
            shard,
            self._fetcher.take_first_digest(),
            self._fetcher.num_asked,
            tuple(map(report_bad, self._fetcher.take_bad())),
            is_empty,
            self._times(0 if is_empty else parcel.num_bytes),
        )
        self._freeze_once()
        return Answer("answer", encode(message), None if is_empty else parcel)

    def _times(self, num_bytes: int) -> TaskTimes:
        times = self.status.take_times(num_bytes=num_bytes, pool_bytes=self._output.pool_bytes)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
        return times._replace(rss_bytes=peak)

    def _failed(self, task: Task, error: Exception, fetcher: Fetcher) -> Answer:
        assert self._spec is not None
        is_end = isinstance(error, StopIteration) and self._spec.is_iterable
        report = None if is_end else report_exception(error)
        drop_frames(error)
        bad = tuple(map(report_bad, fetcher.take_bad()))
        if report is None:
            self._is_exhausted = True
            return Answer(
                "answer", encode(ShardExhausted(task.generation, task.step, len(bad), bad))
            )
        failed = TaskFailed(task.generation, task.step, report, fetcher.saved_position(), bad)
        return Answer("answer", encode(failed))

    def _freeze_once(self) -> None:
        """Freeze what the first batch has brought as well; see penstock.engine.worker."""
        if not self._has_served and self._spec is not None and not self._spec.is_iterable:
            self._has_served = True
            gc.collect()
            gc.freeze()

    def close(self) -> None:
        """Let go of the dataset, its iterator and all memory."""
        self._fetcher = self._spec = None
        self._kept.clear()
        self._output.close()
        self.status.close()


class _ParcelOutput(PlainOutput):
    """Packs batches that lie in recycled memory of this process; Ray copies them into its store.

    It does so while the next batch is being made, and an iterable's may have to be sent once more.
    So what the user's code has made, and may be about to write into again, is copied here.
    """

    def __init__(self) -> None:
        """Begin with no memory."""
        super().__init__()
        self._given: list[tuple[int, int]] = []  # addresses of the batch's memory that is ours

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
        self.abandon()
        return parcel

    def _is_ours(self, buffer: npt.NDArray[np.uint8]) -> bool:
        first = address_of(buffer)
        return any(start <= first < end for start, end in self._given)

    def abandon(self) -> None:
        """Forget what was asked for; garbage collection takes it back."""
        self._given.clear()
        self.take_num_bytes()

    def dry_run(self, batch: object) -> None:
        """Raise what packing would."""
        pack_parcel(batch)
