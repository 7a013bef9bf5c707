# SPDX-License-Identifier: Apache-2.0
"""The code of a worker thread, from its start to its end.

Guarantees
    Tasks are done in the order in which they came. One of an earlier epoch is broken off at its
    next sample, and so is every task once the worker is to stop: a thread cannot be ended from
    outside, so it asks whether its batch is still wanted.
    No `Exception` of the user's code ends the worker; `SystemExit` and the like do, as a death.
    Between two tasks it holds no batch, no sample and no exception.
    The generators that belong to the process are never touched.
    A process that the dataset forks ends when it returns to the worker's code, with the exit status
    of its `sys.exit` or exception: it has none of the threads that take batches.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import pickle
import queue
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

from penstock.engine.generator_watch import GeneratorWatch, note_watched, was_watched
from penstock.engine.output import PlainOutput
from penstock.engine.pickling import own_copy
from penstock.engine.plan import sample_key
from penstock.engine.remote_errors import copy_of_error
from penstock.engine.status_page import Phase, StatusSnapshot, StatusWriter, seconds_since
from penstock.engine.task import Kind, Notices, Task
from penstock.engine.task_runner import TaskRunner
from penstock.engine.timing import WORKERS_PART
from penstock.engine.worker_table import KnownWorker
from penstock.errors import ConfigError
from penstock.forks import Owner
from penstock.randomness.keys import Purpose, seed_sequence
from penstock.randomness.samples import seed_thread
from penstock.user_code import stack_of_error
from penstock.worker_info import WorkerInfo, set_thread_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.engine.batch_maker import BatchMaker
    from penstock.engine.plan import Plan, WorkerSpec
    from penstock.engine.reader import BatchItem
    from penstock.engine.scheduler import WorkerLost
    from penstock.engine.task import BeginEpoch, TaskResult, WorkerIdentity

__all__ = ["FromThread", "ThreadGeneration", "ThreadStatus", "ThreadWorker", "Unwanted"]

# A message of a worker: a result; the words of the exception that ended it, `SystemExit` say, and
# where it was raised; or a death that the main process itself puts in, of one that is stuck.
FromThread: TypeAlias = "tuple[ThreadWorker, TaskResult | tuple[str, str] | WorkerLost]"

_NOBODY: Final = -1  # wants anything of any generation
_MOST_WATCHED: Final = 16  # samples of a batch whose calls are followed; then its collate
_MOST_COMPARED: Final = 64  # items of a stream; two orders of 2 items agree half of the time


class Unwanted(BaseException):
    """Nobody wants the batch that this thread is making.

    No `Exception`: neither fault policies nor the user's code are to take it for one.
    """


class ThreadStatus(StatusWriter):
    """The status of one worker thread; and where it learns that its batch is no longer wanted.

    Concurrency:
        The worker's thread writes. Any thread may call `snapshot`, and say what is wanted.
    """

    __slots__ = ("_generation", "_replacement", "_wanted", "_watch")

    def __init__(self) -> None:
        """Begin as one that is starting, and wanted."""
        super().__init__(cpu_clock=time.thread_time_ns)
        self._wanted = 0
        self._generation = 0
        self._replacement: tuple[Any] | None = None
        self._watch: GeneratorWatch | None = None
        self.phase(Phase.STARTING)

    @property
    def is_wanted(self) -> bool:
        """Whether the worker is to do anything at all."""
        return self._wanted != _NOBODY

    def want(self, generation: int) -> None:
        """Say that only what belongs to this generation is wanted."""
        self._wanted = generation

    def want_nothing(self) -> None:
        """Say that the worker is to end."""
        self._wanted = _NOBODY

    def is_of_now(self, generation: int) -> bool:
        """Return whether what belongs to `generation` is wanted."""
        return self._wanted == generation

    def begin_generation(self, generation: int) -> None:
        """Note that an epoch begins."""
        self._generation = generation
        self.phase(Phase.BEGINNING)

    def begin_task(self, generation: int, step: int, *, measures: bool = True) -> None:
        """Note that a task begins, and whether it is measured."""
        super().begin_task(generation, step, measures=measures)
        self._generation = generation
        self._replacement = None

    def watch(self, watch: GeneratorWatch | None) -> None:
        """Let the calls of this task be followed: of its first samples, and of its collate."""
        if self._watch is not None:
            self._watch.end()
        self._watch = watch
        if watch is not None:
            watch.begin()

    def phase(self, phase: Phase) -> None:
        """Note what is being done; see `StatusWriter.phase`.

        Raises:
            Unwanted: a batch of this generation is wanted no more.
        """
        if phase == Phase.COLLATING:
            self.check()
            if self._watch is not None:
                self._watch.begin()
        super().phase(phase)
        self._replacement = None

    @property
    def follows_samples(self) -> bool:
        """Always: any thread may ask for a snapshot, and what is unwanted ends here."""
        return True

    def number_cell(self) -> None:
        """Return None: `sample` also looks whether the batch is still wanted."""
        return

    def sample(self, number: int) -> None:
        """Note which sample is being read; raises as `phase` does."""
        self.check()
        super().sample(number)
        if number == _MOST_WATCHED and self._watch is not None:
            self._watch.end()

    def item(self, phase: Phase, item: BatchItem) -> None:
        """Note what is being done with the sample of one item; raises as `phase` does."""
        self.check()
        super().item(phase, item)
        self._replacement = (sample_key(item.index),) if item.attempt else None

    def check(self) -> None:
        """Return if the generation that was begun last is still wanted.

        Raises:
            Unwanted: it is not.
        """
        if self._wanted != self._generation:
            raise Unwanted

    def snapshot(self) -> StatusSnapshot:
        """Return the status of now."""
        _, step, phase, number, _, _, begun_ns, at_it_since_ns, _ = self._cells
        replacement = self._replacement
        return StatusSnapshot(
            generation=self._generation,
            step=step,
            phase=Phase(phase),
            number=None if number < 0 else number,
            has_replacement=replacement is not None,
            replacement=None if replacement is None else replacement[0],
            peak_rss_bytes=0,
            task_s=seconds_since(begun_ns) or 0.0,
            still_s=seconds_since(at_it_since_ns),
        )


class ThreadGeneration:
    """One epoch of one backend, shared by its worker threads.

    A dataset that they share is notified of the epoch once: by the first worker, while the others
    wait. Each worker shards its own copy of a stream (`penstock.data.shard`). If these copies
    differ, samples are lost or come twice; so the first items are compared.

    Attributes:
        watch: Watch of the worker whose first task is watched, if one is.
    """

    def __init__(self, *, is_announced: bool) -> None:
        """Begin a generation; `is_announced` says whether the dataset is notified."""
        self.watch: GeneratorWatch | None = None
        # (call of `shard`, number of the item) -> the worker that was there first, item pickled
        self._dealt: dict[tuple[int, int], tuple[ThreadWorker, bytes]] = {}
        self._notifying = threading.Lock()
        self._is_to_notify = is_announced
        self._failure: Exception | None = None

    def begin(self, status: ThreadStatus, make: Callable[[bool], BatchMaker]) -> BatchMaker:
        """Return the maker that `make(is_announced)` makes, for a dataset that all workers share.

        If notifying the dataset fails, it fails for all.

        Raises:
            Unwanted: the worker is wanted no more.
        """
        with self._notifying:
            status.check()
            if self._failure is not None:
                raise copy_of_error(self._failure)
            if self._is_to_notify:
                try:
                    maker = make(True)
                except Exception as error:
                    self._failure = error
                    raise
                self._is_to_notify = False
                return maker
        return make(False)

    def comparer(self, worker: ThreadWorker) -> Callable[[Iterable[Any]], Iterator[Any]]:
        """Return a function that passes items on, and compares the first with other workers'."""
        calls = itertools.count()

        def compared(items: Iterable[Any]) -> Iterator[Any]:
            stream = iter(items)
            return itertools.chain(self._compared(stream, worker, next(calls)), stream)

        return compared

    def _compared(self, stream: Iterator[Any], worker: ThreadWorker, call: int) -> Iterator[Any]:
        for number, item in enumerate(itertools.islice(stream, _MOST_COMPARED)):
            pickled = _pickled(item)  # the item itself is the dataset's, which may change it
            first, other = self._dealt.setdefault((call, number), (worker, pickled))
            if not _are_equal(item, pickled, other):
                raise self._disagreement(number, (first, pickle.loads(other)), (worker, item))
            yield item

    def _disagreement(self, number: int, *found: tuple[ThreadWorker, object]) -> ConfigError:
        said = " and ".join(f"{item!r:.80} in {worker}" for worker, item in found)
        drawings = () if self.watch is None else self.watch.found
        named = "".join(f" ({drawing})" for drawing in drawings)
        return ConfigError(
            f"the items that shard deals out are not the same in all worker threads: item {number} "
            f"is {said}. Some samples would be lost, others would come twice. A stream that "
            f"shuffles with random, numpy.random or torch's global generator{named} draws from "
            "what all threads share: shuffle with a generator that is seeded alike in all workers, "
            "as np.random.default_rng((seed, epoch)), or use backend='process' with seed=."
        )


def _pickled(item: object) -> bytes:
    try:
        return pickle.dumps(item, protocol=5)
    except Exception:  # it holds a lock, say: it is not compared
        return b""


def _are_equal(item: object, pickled: bytes, other: bytes) -> bool:
    """Return whether two items are equal, or cannot be compared; equal ones may pickle unlike."""
    if pickled == other or not (pickled and other):
        return True
    try:
        return bool(pickle.loads(other) == item)
    except Exception:  # arrays, whose bytes differ
        return False


class ThreadWorker(KnownWorker):
    """One worker thread.

    Attributes:
        thread: Daemon thread, so that one that is stuck does not keep the interpreter from ending.
        status: Status of the worker: what it is doing.
        inbox: Queue of its tasks, and of the epochs that it is to begin; None ends it.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        plan: Plan,
        outbox: queue.SimpleQueue[FromThread | None],
    ) -> None:
        """Prepare a worker. An iterable dataset is copied here.

        Args:
            identity: Identity of the worker.
            plan: Plan of the backend.
            outbox: Queue of its results.

        Raises:
            ConfigError: an iterable dataset cannot be copied for several workers.
        """
        super().__init__(identity.worker_id, os.getpid())
        self.status = ThreadStatus()
        self._identity = identity
        self._shared_dataset = plan.spec.dataset
        self._spec: WorkerSpec = plan.spec
        if plan.spec.is_iterable:
            own = own_copy(plan.spec.dataset, identity.num_workers)
            self._spec = dataclasses.replace(plan.spec, dataset=own)
        self._outbox = outbox
        self.inbox: queue.SimpleQueue[Task | tuple[BeginEpoch, ThreadGeneration] | None]
        self.inbox = queue.SimpleQueue()
        # Not page-locked: fences would be made in this thread, and its calls to the device would
        # disturb a graph that the main process's thread may be capturing.
        self._output = PlainOutput()
        self._runner = TaskRunner(self._output, self.status, identity, in_thread=True)
        # One worker's first task is watched: by a first batch nothing is judged.
        self._may_watch = self.worker_id == 0
        self._watch: GeneratorWatch | None = None  # of an epoch's begin, for its first task
        self._owner = Owner()
        name = f"penstock-{self.worker_id}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __str__(self) -> str:
        """Return "worker 0 (thread penstock-0)"."""
        return f"worker {self.worker_id} (thread {self.thread.name})"

    def begin(self, begun: BeginEpoch, generation: ThreadGeneration) -> None:
        """Make it begin an epoch; its tasks of earlier ones are dropped."""
        self.status.want(begun.generation)
        self.inbox.put((begun, generation))

    def stop(self) -> None:
        """Make it end, at the next sample if it is busy; does not wait."""
        self.status.want_nothing()
        self.inbox.put(None)

    # From here on: in the thread.

    def _run(self) -> None:
        try:
            self._serve_all()
        except Unwanted:
            pass
        except BaseException as error:
            if not self._owner.is_here:
                _leave(error)
            if self.status.is_wanted:
                text = "".join(traceback.format_exception_only(error)).strip()
                self._outbox.put((self, (text, stack_of_error(error))))
        finally:
            self._runner.close()  # an iterator ends in its own thread
            self._output.close()
            self.status.close()
            self._outbox = queue.SimpleQueue()  # results in it refer to this worker

    def _serve_all(self) -> None:
        self._runner.set_up(self._set_up)
        while True:
            self.status.watch(None)
            self.status.phase(Phase.WAITING)
            message = self.inbox.get()
            if message is None or not self.status.is_wanted:
                return
            result = None
            try:
                if isinstance(message, Task):
                    result = self._serve(message)
                else:
                    result = self._begin(*message)
            except Unwanted:  # of an earlier epoch, or this worker is to end
                pass
            if not self._owner.is_here:
                _leave(result.payload if result and result.kind == Kind.FAILED else None)
            if result is not None:
                self.status.phase(Phase.WAITING)  # not for its own sake, if it waits for the GIL
                self._outbox.put((self, result))
            del message, result  # they hold a batch, and may hold an epoch's last indices

    def _set_up(self) -> WorkerSpec:
        identity, spec = self._identity, self._spec
        seed_thread(seed_sequence(identity.base_seed, Purpose.WORKERS, identity.worker_id))
        seed = identity.base_seed + identity.worker_id
        set_thread_info(WorkerInfo(identity.worker_id, identity.num_workers, seed, spec.dataset))
        if spec.worker_init_fn is not None:
            watch = None if was_watched(self._shared_dataset) else GeneratorWatch(None)
            self.status.watch(watch)
            spec.worker_init_fn(identity.worker_id)
            if watch is not None and watch.found:
                self._runner.notice(drawings=tuple(watch.found))
        return spec

    def _begin(self, begun: BeginEpoch, generation: ThreadGeneration) -> TaskResult | None:
        self._watch = None
        if self._may_watch and not was_watched(self._shared_dataset):
            self._watch = generation.watch = GeneratorWatch(self._spec.dataset)
        self.status.watch(self._watch)
        if not self._spec.is_iterable:
            agree = functools.partial(generation.begin, self.status)
            return self._runner.begin_epoch(begun, agree=agree)
        # A worker that resumes from a state of its own may be at other items than the others.
        goes_on = begun.position is not None and begun.position.state is not None
        is_compared = self._identity.num_workers > 1 and not goes_on
        compared = generation.comparer(self) if is_compared else None
        return self._runner.begin_epoch(begun, compared=compared)

    def _serve(self, task: Task) -> TaskResult | None:
        if not self.status.is_of_now(task.generation):
            return None
        watch = None
        if self._runner.failure is None:  # else nothing is read, and nothing found out
            watch, self._watch = self._watch, None
            self._may_watch = False
        self.status.watch(watch)
        result = self._runner.run(task)
        if watch is not None and result is not None:
            note_watched(self._shared_dataset)
            if watch.found:
                notices = result.notices or Notices()
                drawings = *notices.drawings, *watch.found
                result.notices = notices._replace(drawings=drawings)
            result.times = result.times[: WORKERS_PART.size]  # its samples took longer than usual
        return result


def _leave(error: BaseException | None) -> NoReturn:
    """End a forked child with its status; the end of its only thread would give 0 in any case."""
    status = 0
    try:
        sys.stdout.flush()
        if isinstance(error, SystemExit) and isinstance(error.code, int | None):
            status = error.code or 0
        elif error is not None:
            status = 1
            traceback.print_exception(error)
    finally:
        os._exit(status & 0xFF)
