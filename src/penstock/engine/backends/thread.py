# SPDX-License-Identifier: Apache-2.0
"""Workers as threads of the main process: for code that releases the GIL, or Pythons without it.

Guarantees
    Batches leave as they are: nothing is copied or pickled. Each worker has recycled memory of its
    own, which serves again once the last view of a batch is garbage.
    Map-style datasets, their transforms and collate functions are shared by all workers. An
    iterable dataset is copied for each, as each worker has a position of its own.
    Generators that belong to the process (`random`, `numpy.random`, torch's) are neither seeded
    nor put back: the threads and the main process all draw from them. Functions that do so are
    found in the first batch of a dataset, and named once. `sample_rng()` is each worker's own.
    Settings of the process are left as they are, also the number of threads that OpenCV and torch
    use in an operation, which is one in process workers.
    Tasks are done in the order in which they came. Between two tasks a worker holds no batch, no
    sample and no exception.
    No `Exception` of the user's code ends a worker; `SystemExit` and the like do, as a death.
    A thread cannot be ended from outside: it asks, at each sample, whether its batch is wanted. One
    that is stuck is given up: its death is an event, its late answer is dropped, and it ends by
    itself at its next sample.
    `close` ends the wait of another thread that is in `events`.

Shutdown order
    Every worker is notified at once. A waiting one ends, a busy one at its next sample. After
    `_GRACE_S` those still busy are left behind as daemons, with a warning; in a hurry, after
    `_SHORT_GRACE_S`, without one.

A forked child has none of these threads: there `close` does nothing. A child that the dataset forks
ends when it returns to the worker's code, with the exit status of its `sys.exit` or exception.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import pickle
import queue
import sys
import threading
import time
import traceback
import warnings
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

from penstock.engine.assembly import PlainOutput
from penstock.engine.backends import LONGEST_WAIT_S, close_at_exit
from penstock.engine.pickling import copy_of_error, own_copy
from penstock.engine.plan import sample_key
from penstock.engine.scheduler import WorkerLost
from penstock.engine.status_page import Phase, StatusSnapshot, StatusWriter, seconds_since
from penstock.engine.task import Kind, Notices, Task, TaskResult, WorkerIdentity
from penstock.engine.task_runner import TaskRunner
from penstock.engine.timing import WORKERS_PART
from penstock.engine.worker_table import KnownWorker, WorkerProgress, WorkerTable
from penstock.errors import ConfigError, WorkerDied
from penstock.forks import Owner
from penstock.randomness.generator_watch import GeneratorWatch, note_watched, was_watched
from penstock.randomness.keys import Purpose, seed_sequence
from penstock.randomness.samples import seed_thread
from penstock.user_code import stack_of_error, stack_of_thread
from penstock.warn import users_level
from penstock.worker_info import WorkerInfo, set_thread_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.engine.plan import Epoch, Plan, RetryHints, WorkerSpec
    from penstock.engine.recover import BatchItem
    from penstock.engine.scheduler import BackendEvent
    from penstock.engine.task import BeginEpoch
    from penstock.engine.task_runner import BatchMaker

__all__ = ["NO_GENERATION", "ThreadBackend", "ThreadStatus", "Unwanted"]

_GRACE_S: Final = 3.0  # for a worker to finish its sample and its user's clean-up
_SHORT_GRACE_S: Final = 0.3  # after Ctrl-C, or when the interpreter ends
_ADVICE_ON_HANG: Final = (
    "Raise `timeout` if samples, or the start of a worker, may take that long. The thread goes on "
    "until its sample is made: only processes can be killed (backend='process')."
)

_SHARED_GENERATORS: Final = (
    "With backend='thread' all worker threads and the main process share them, so what is drawn is "
    "neither reproducible nor what another backend draws. Draw from penstock.sample_rng(), which "
    "is each sample's own, or use backend='process'."
)
# A worker, and its result; or the text of the exception that ended it, `SystemExit` say, and where
# that was raised; or its death, which the main process puts in if it is stuck. None: closed.
Outbox: TypeAlias = (
    "queue.SimpleQueue[tuple[ThreadWorker, TaskResult | tuple[str, str] | WorkerLost] | None]"
)

NO_GENERATION: Final = math.inf  # `wanted` of a worker that is to end
_LOOK_S: Final = 0.1  # between two looks whether a worker that others wait for was given up
_MOST_COMPARED: Final = 64  # items of a stream; two orders of 2 items agree half of the time


class Unwanted(BaseException):
    """The batch that this thread is making is not wanted.

    No `Exception`: neither fault policies nor the user's code are to take it for one.
    """


class ThreadStatus(StatusWriter):
    """Status of one worker thread; it raises `Unwanted` once the batch is no longer wanted.

    Attributes:
        watch: Watch of what the worker does between two waits, if it is watched.
        wanted: Generation whose batches are wanted; `NO_GENERATION` if the worker is to end.

    Concurrency:
        The worker's thread writes. Any thread may call `snapshot`, and set `wanted`.
    """

    __slots__ = ("_replacement", "wanted", "watch")

    def __init__(self) -> None:
        """Begin as one that is starting, and wanted."""
        super().__init__(cpu_clock=time.thread_time_ns)
        self.watch: GeneratorWatch | None = None
        self.wanted: float = 0
        self._replacement: tuple[Any] | None = None
        self.phase(Phase.STARTING)

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
        if self.watch is not None and phase == Phase.WAITING:
            self.watch.end()
        elif self.watch is not None:  # each phase has the full number of events
            self.watch.begin()

    def number_cell(self) -> None:
        """Return None: `sample` also looks whether the batch is still wanted."""

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
        if self.wanted != self._cells[0]:
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

    The first worker notifies a shared dataset of the epoch; the others wait until it has done so,
    or was given up. Each worker shards its own copy of a stream (`penstock.data.shard`). If these
    copies differ, samples are lost or come twice; so the first items are compared.

    Attributes:
        notifier: Worker that is notifying the dataset; None before and afterwards.
        watch: Watch of the worker that is watched, if one is.

    Concurrency:
        Workers call `begin`. No user's code runs under the lock.
    """

    def __init__(self, *, is_announced: bool) -> None:
        """Begin a generation; `is_announced` says whether the dataset is notified."""
        self.notifier: ThreadWorker | None = None
        self.watch: GeneratorWatch | None = None
        # (call of `shard`, number of the item) -> the worker that was there first, item pickled
        self._dealt: dict[tuple[int, int], tuple[ThreadWorker, bytes]] = {}
        self._changed = threading.Condition()
        self._is_to_notify = is_announced
        self._failure: Exception | None = None

    def begin(self, worker: ThreadWorker, make: Callable[[bool], BatchMaker]) -> BatchMaker:
        """Return the maker that `make(is_announced)` makes, for a dataset that all workers share.

        If notifying the dataset fails, it fails for all.

        Raises:
            Unwanted: the worker is wanted no more.
        """
        with self._changed:
            while (
                (other := self.notifier)
                and other.status.wanted != NO_GENERATION
                and other.thread.is_alive()
            ):
                worker.status.check()
                self._changed.wait(_LOOK_S)
            worker.status.check()
            self.notifier = worker if self._is_to_notify else None
            if self._failure is not None:
                raise copy_of_error(self._failure)
        if self.notifier is not worker:
            return make(False)
        try:
            maker = make(True)
        except Exception as error:
            self._end_notifying(worker, error)
            raise
        self._end_notifying(worker, None)
        return maker

    def _end_notifying(self, worker: ThreadWorker, failure: Exception | None) -> None:
        with self._changed:
            if self.notifier is worker:  # else it was given up, and another one notifies
                self._is_to_notify, self._failure, self.notifier = False, failure, None
                self._changed.notify_all()

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


def _are_equal(one: object, other: object) -> bool:  # equal items may pickle differently
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

    def __init__(self, identity: WorkerIdentity, plan: Plan, outbox: Outbox) -> None:
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
        # The first to begin is watched until its first task is done, whose samples are not timed.
        if not was_watched(self._shared_dataset):
            self.status.watch = GeneratorWatch(self._spec.dataset)
        self._owner = Owner()
        name = f"penstock-{self.worker_id}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __str__(self) -> str:
        """Return "worker 0 (thread penstock-0)"."""
        return f"worker {self.worker_id} (thread {self.thread.name})"

    def begin(self, begun: BeginEpoch, generation: ThreadGeneration) -> None:
        """Make it begin an epoch; its tasks of earlier ones are dropped."""
        self.status.wanted = begun.generation
        self.inbox.put((begun, generation))

    def stop(self) -> None:
        """Make it end, at the next sample if it is busy; does not wait."""
        self.status.wanted = NO_GENERATION
        self.inbox.put(None)

    # From here on: in the thread.

    def _run(self) -> None:
        try:
            self._serve_all()
        except BaseException as error:
            if not self._owner.is_here:
                _leave(error)
            if self.status.wanted != NO_GENERATION:
                text = "".join(traceback.format_exception_only(error)).strip()
                self._outbox.put((self, (text, stack_of_error(error))))
        finally:
            self._runner.close()  # an iterator ends in its own thread
            self._output.close()
            self.status.close()
            self._outbox = queue.SimpleQueue()  # results in it refer to this worker

    def _serve_all(self) -> None:
        self.status.phase(Phase.STARTING)
        self._runner.set_up(self._set_up)
        while True:
            self.status.phase(Phase.WAITING)
            message = self.inbox.get()
            if message is None or self.status.wanted == NO_GENERATION:
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
            spec.worker_init_fn(identity.worker_id)
        return spec

    def _begin(self, begun: BeginEpoch, generation: ThreadGeneration) -> TaskResult | None:
        watch = generation.watch = generation.watch or self.status.watch
        if self.status.watch is not watch:
            self.status.watch = None
        if not self._spec.is_iterable:
            agree = functools.partial(generation.begin, self)
            return self._runner.begin_epoch(begun, agree=agree)
        # A worker that resumes from a state of its own may be at other items than the others.
        goes_on = begun.position is not None and begun.position.state is not None
        is_compared = self._identity.num_workers > 1 and not goes_on
        compared = generation.comparer(self) if is_compared else None
        return self._runner.begin_epoch(begun, compared=compared)

    def _serve(self, task: Task) -> TaskResult | None:
        if self.status.wanted != task.generation:
            return None
        if (watch := self.status.watch) is None or self._runner.failure is not None:
            return self._runner.run(task)  # after a failure to begin nothing is read
        watch.begin()
        result = self._runner.run(task)
        if result is not None:
            watch.end()
            note_watched(self._shared_dataset)
            if watch.found:
                notices = result.notices or Notices()
                drawings = *notices.drawings, *watch.found
                result.notices = notices._replace(drawings=drawings)
            result.times = result.times[: WORKERS_PART.size]  # its samples took longer than usual
            self.status.watch = None
        return result


def _leave(error: BaseException | None) -> NoReturn:
    """End a forked child with its status; the end of its only thread would give 0 in any case."""
    status, said = 0, ""
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        status = error.code or 0
    elif error is not None:
        is_text = isinstance(error, SystemExit)
        status, said = 1, f"{error}\n" if is_text else "".join(traceback.format_exception(error))
    for stream, text in (sys.stdout, ""), (sys.stderr, said):
        with contextlib.suppress(BaseException):  # it may be closed
            stream.write(text)
            stream.flush()
    os._exit(status & 0xFF)


class ThreadBackend:
    """Thread workers. See the module for its guarantees.

    Concurrency:
        One thread calls it. `close` may be called by any, also by a worker's, in which a garbage
        collection may call it.
    """

    def __init__(self, plan: Plan) -> None:
        """Prepare workers for `plan`."""
        self.measures = True
        self._plan = plan
        self._table: WorkerTable[ThreadWorker] = WorkerTable(
            plan, drawings_advice=_SHARED_GENERATORS, warns=True
        )
        self._outbox: Outbox = queue.SimpleQueue()
        self._generation = ThreadGeneration(is_announced=False)
        self._owner = Owner()

    def start(self) -> None:
        """Start the threads; none waits for another."""
        close_at_exit(self)  # a thread in native code is not to find the interpreter gone
        try:
            for worker_id in range(self._plan.num_workers):
                self._start_worker(worker_id)
        except BaseException:  # the system gives no more threads
            self.close()
            raise

    def _start_worker(self, worker_id: int, *, joins_late: bool = False) -> None:
        identity = self._table.identity_of(worker_id)._replace(joins_late=joins_late)
        worker = ThreadWorker(identity, self._plan, self._outbox)
        worker.thread.start()
        self._table.add(worker)
        if self._table.epoch is not None:
            worker.begin(self._table.message_of(worker), self._generation)

    @property
    def is_whole(self) -> bool:
        """Whether every worker lives."""
        return all(w.thread.is_alive() and not w.is_gone for w in self._table.workers.values())

    def begin_epoch(self, epoch: Epoch) -> None:
        """Notify every worker; batches of earlier epochs are broken off and dropped."""
        self._table.begin_epoch(epoch)
        self._generation = ThreadGeneration(is_announced=epoch.is_announced)
        for worker in self._table.workers.values():
            if not worker.is_gone:
                worker.begin(self._table.message_of(worker), self._generation)

    def await_start(self) -> tuple[int, ...]:
        """Return no worker: those of this machine start at once."""
        return ()

    def submit(
        self, worker_id: int, step: int, indices: object, hints: RetryHints | None = None
    ) -> None:
        """Put the task into the worker's queue."""
        worker, is_measured = self._table.workers[worker_id], self.measures
        worker.inbox.put(self._table.task_of(worker, step, indices, hints, is_measured=is_measured))

    def events(self, timeout_s: float | None) -> Sequence[BackendEvent]:
        """Wait on one queue; Ctrl-C interrupts the wait.

        Raises:
            WorkerDied: another thread has closed the backend.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            try:
                came = self._outbox.get(timeout=min(left_s, LONGEST_WAIT_S))
            except queue.Empty:
                if left_s <= LONGEST_WAIT_S:
                    return []
                continue
            if came is None:
                self._outbox.put(None)  # for the next call
                raise WorkerDied(
                    "the loader's iterator was closed, by another thread or in a worker, while "
                    "it was asked for a batch: its workers are gone. Iterate the loader anew."
                )
            event = self._event_of(*came)
            del came  # this frame may wait again, and would keep the batch
            if event is not None:
                return [event]

    def _event_of(
        self, worker: ThreadWorker, message: TaskResult | tuple[str, str] | WorkerLost
    ) -> BackendEvent | None:
        if isinstance(message, TaskResult):
            return self._table.accept(worker, message)
        if isinstance(message, WorkerLost):
            return message
        if worker.is_gone or self._table.workers.get(worker.worker_id) is not worker:
            return None  # it was given up, and another may have its place
        text, stack = message
        how = f"exited unexpectedly: worker {worker.worker_id} ended with {text}"
        return self._death(
            worker, how, f"Look for sys.exit in the dataset.\nWhere it was raised:\n{stack}"
        )

    def _death(self, worker: ThreadWorker, how: str, advice: str) -> WorkerLost:
        activity = self._table.activity(worker, worker.status.snapshot())
        end = f"DataLoader worker (thread {worker.thread.name}) {how}"
        return self._table.death(worker, activity, end, advice)

    def respawn(self, worker_id: int) -> None:
        """Start another thread, which goes on where the dead one was."""
        self._start_worker(worker_id)

    def add_worker(self, worker_id: int) -> None:
        """Start one thread more, which joins the current epoch and reports when it has."""
        self._start_worker(worker_id, joins_late=True)

    def remove_worker(self, worker_id: int) -> None:
        """Stop a thread that has no tasks; it ends at once, unless it is starting."""
        worker = self._table.workers.pop(worker_id)
        worker.stop()
        worker.thread.join(_SHORT_GRACE_S)

    def kill(self, worker_id: int, why: str) -> None:
        """Give up a worker: its death is an event now, and its late results are dropped.

        If it only waits for one that hangs in `set_epoch`, that one is given up instead: one hang
        is one death.
        """
        worker = self._stuck_with(worker_id)
        if worker.is_gone:
            return
        stack = stack_of_thread(worker.thread)
        advice = f"{_ADVICE_ON_HANG}\nIts Python stack then:\n{stack}"
        worker.stop()
        how = f"is stuck: worker {worker.worker_id} was given up, as {why},"
        self._outbox.put((worker, self._death(worker, how, advice)))

    def _stuck_with(self, worker_id: int) -> ThreadWorker:
        """Return the worker, or the one in `set_epoch` that it waits for."""
        worker, notifier = self._table.workers[worker_id], self._generation.notifier
        snapshot = worker.status.snapshot()
        waits = snapshot.phase == Phase.BEGINNING and worker.status.wanted == snapshot.generation
        return notifier if waits and notifier is not None else worker

    def diagnose(self, worker_id: int, *, with_stacks: bool) -> WorkerProgress:
        """Return its status, and its stack."""
        worker, stuck = self._table.workers[worker_id], self._stuck_with(worker_id)
        stack = stack_of_thread(stuck.thread) if with_stacks else ""
        progress = self._table.progress(stuck, stuck.status.snapshot(), stack)
        whom = "" if stuck is worker else f"waiting for {stuck}: "
        return progress._replace(words=f"{whom}{progress.words}")

    def close(self, *, in_a_hurry: bool = False) -> None:
        """Stop the workers, and wait until they are gone, but for those that are stuck."""
        workers = list(self._table.workers.values())
        self._table.workers.clear()
        if not self._owner.is_here:
            return  # a forked copy of the main process, which has no such threads
        for worker in workers:
            worker.stop()
        self._outbox.put(None)
        grace_s = _SHORT_GRACE_S if in_a_hurry else _GRACE_S
        left = [w for w in workers if not w.is_gone and w.thread is not threading.current_thread()]
        deadline = time.monotonic() + grace_s
        for worker in left:
            while worker.thread.is_alive() and (left_s := deadline - time.monotonic()) > 0:
                worker.thread.join(min(left_s, LONGEST_WAIT_S))
        left = [worker for worker in left if worker.thread.is_alive()]
        # Results left in the queue refer to workers, and these to the queue: a cycle.
        with contextlib.suppress(queue.Empty):
            while True:
                self._outbox.get_nowait()
        self._outbox.put(None)
        if left and not in_a_hurry:
            listed = "\n".join(f"{worker}:\n{stack_of_thread(worker.thread)}" for worker in left)
            warnings.warn(
                f"{len(left)} worker thread(s) did not end within {grace_s} s, and are left "
                "behind: a thread cannot be killed. Each ends by itself once its sample is made; "
                f"with backend='process' it could be. They are at:\n{listed}",
                RuntimeWarning,
                stacklevel=users_level(),
            )
