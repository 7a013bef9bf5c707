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

    __slots__ = ("_replacement", "_wanted")

    def __init__(self) -> None:
        """Begin as one that is starting, and wanted."""
        super().__init__(cpu_clock=time.thread_time_ns)
        self._wanted = 0
        self._replacement: tuple[Any] | None = None
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
        self._cells[0] = generation
        super().begin_generation(generation)

    def phase(self, phase: Phase) -> None:
        """Note what is being done; see `StatusWriter.phase`.

        Raises:
            Unwanted: a batch of this generation is wanted no more.
        """
        if phase == Phase.COLLATING:
            self.check()
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
        if self._wanted != self._cells[0]:
            raise Unwanted

    def snapshot(self) -> StatusSnapshot:
        """Return the status of now."""
        generation, step, phase, number, _, _, begun_ns, at_it_since_ns, _ = self._cells
        replacement = self._replacement
        return StatusSnapshot(
            generation=generation,
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
        watch: Watch of the worker that is watched, if one is.
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
            try:
                pickled = pickle.dumps(item, protocol=5)  # the dataset may change the item itself
            except Exception:  # it holds a lock, say: it is not compared
                pickled = b""
            first, other = self._dealt.setdefault((call, number), (worker, pickled))
            if pickled and other and pickled != other and not _are_equal(pickle.loads(other), item):
                found = "" if self.watch is None else "".join(f" ({d})" for d in self.watch.found)
                raise ConfigError(
                    "the items that shard deals out are not the same in all worker threads: item "
                    f"{number} is {pickle.loads(other)!r:.80} in {first} and {item!r:.80} in "
                    f"{worker}. Some samples would be lost, others would come twice. A stream that "
                    "shuffles with random, numpy.random or torch's global generator"
                    f"{found} draws from what all threads share: shuffle with a generator that is "
                    "seeded alike in all workers, as np.random.default_rng((seed, epoch)), or use "
                    "backend='process' with seed=."
                )
            yield item


def _are_equal(one: object, other: object) -> bool:  # equal items may pickle unlike
    try:
        return bool(one == other)
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
        # One worker is watched until its first task is done: by a first batch nothing is judged.
        self._watch: GeneratorWatch | None = None
        if self.worker_id == 0 and not was_watched(self._shared_dataset):
            self._watch = GeneratorWatch(self._spec.dataset)
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
        if self._watch is not None:
            self._watch.begin()
        self._runner.set_up(self._set_up)
        while True:
            if self._watch is not None:
                self._watch.end()
            self.status.phase(Phase.WAITING)
            message = self.inbox.get()
            if message is None or not self.status.is_wanted:
                return
            if self._watch is not None:
                self._watch.begin()
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
            spec.worker_init_fn(identity.worker_id)
        return spec

    def _begin(self, begun: BeginEpoch, generation: ThreadGeneration) -> TaskResult | None:
        if not self._spec.is_iterable:
            agree = functools.partial(generation.begin, self.status)
            return self._runner.begin_epoch(begun, agree=agree)
        if self._watch is not None:
            generation.watch = self._watch
        # A worker that resumes from a state of its own may be at other items than the others.
        goes_on = begun.position is not None and begun.position.state is not None
        is_compared = self._identity.num_workers > 1 and not goes_on
        compared = generation.comparer(self) if is_compared else None
        return self._runner.begin_epoch(begun, compared=compared)

    def _serve(self, task: Task) -> TaskResult | None:
        if not self.status.is_of_now(task.generation):
            return None
        result = self._runner.run(task)
        # After a failure to begin nothing was read, and nothing found out.
        if self._watch is not None and result is not None and self._runner.failure is None:
            self._watch.end()
            note_watched(self._shared_dataset)
            if self._watch.found:
                notices = result.notices or Notices()
                drawings = *notices.drawings, *self._watch.found
                result.notices = notices._replace(drawings=drawings)
            result.times = result.times[: WORKERS_PART.size]  # its samples took longer than usual
            self._watch = None
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
