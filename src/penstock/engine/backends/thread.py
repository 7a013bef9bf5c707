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
    A waiting worker ends at once, a busy one at its next sample. After `_GRACE_S` those still busy
    are left behind as daemons, with a warning; in a hurry, after `_SHORT_GRACE_S`, without one.

A forked child has none of these threads: there `close` does nothing. A child that the dataset forks
ends when it returns to the worker's code, with the exit status of its `sys.exit` or exception.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import queue
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias

from penstock.data.dataset import announce_epoch
from penstock.engine.assembly import PlainOutput
from penstock.engine.backends import LONGEST_WAIT_S, close_at_exit
from penstock.engine.scheduler import WorkerLost
from penstock.engine.status_page import Phase, StatusWriter
from penstock.engine.task import Kind, Task, TaskResult, WorkerIdentity, own_copy
from penstock.engine.task_runner import TaskRunner
from penstock.engine.worker_table import KnownWorker, WorkerProgress, WorkerTable
from penstock.errors import WorkerDied
from penstock.faults import annotate
from penstock.forks import Owner
from penstock.randomness.generator_watch import note_watched, was_watched
from penstock.randomness.keys import Purpose, seed_sequence
from penstock.randomness.samples import SampleStreams, seed_thread
from penstock.user_code import stack_of_error, stack_of_thread
from penstock.warn import warn_user
from penstock.worker_info import WorkerInfo, set_thread_info

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engine.plan import Epoch, Plan, WorkerSpec
    from penstock.engine.recover import BatchItem
    from penstock.engine.scheduler import BackendEvent
    from penstock.engine.task import BeginEpoch

_GRACE_S: Final = 3.0  # for a worker to finish its sample and its user's clean-up
_SHORT_GRACE_S: Final = 0.3  # after Ctrl-C, or when the interpreter ends
_ADVICE_ON_HANG: Final = "Raise `timeout` if samples take that long; only processes can be killed."
_SHARED_GENERATORS: Final = (
    "With backend='thread' all worker threads and the main process share them, so what is drawn is "
    "neither reproducible nor what another backend draws, and a stream that shuffles with them "
    "has another order in each worker: samples are lost, and others come twice. Draw from "
    "penstock.sample_rng(), which is each sample's own, or use backend='process'."
)
# A worker, and its result; or the text of the exception that ended it, `SystemExit` say, and where
# that was raised; or its death, which the main process puts in if it is stuck. None: closed.
Outbox: TypeAlias = (
    "queue.SimpleQueue[tuple[ThreadWorker, TaskResult | tuple[str, str] | WorkerLost] | None]"
)

NO_GENERATION: Final = math.inf  # `wanted` of a worker that is to end


class Unwanted(BaseException):
    """The batch that this thread is making is not wanted.

    No `Exception`: neither fault policies nor the user's code are to take it for one.
    """


class ThreadStatus(StatusWriter):
    """Status of one worker thread; it raises `Unwanted` once the batch is no longer wanted.

    Attributes:
        wanted: Generation whose batches are wanted; `NO_GENERATION` if the worker is to end.

    Concurrency:
        The worker's thread writes. Any thread may call `snapshot`, and set `wanted`.
    """

    __slots__ = ("wanted",)

    def __init__(self, *, is_process: bool = False) -> None:
        """Begin as one that is starting, and wanted; `is_process`: it has a process of its own."""
        super().__init__(cpu_clock=time.thread_time_ns)
        self._is_process = is_process
        self.wanted: float = 0
        self.phase(Phase.STARTING)

    def begin_generation(self, generation: int) -> None:
        """Note that an epoch begins."""
        self._cells[0] = generation
        super().begin_generation(generation)

    def phase(self, phase: Phase) -> None:
        """Note what is being done; raises `Unwanted` before samples are collated in vain."""
        if phase == Phase.COLLATING:
            self._check()
        super().phase(phase)

    def number_cell(self) -> None:
        """Return None: `sample` also looks whether the batch is still wanted."""

    def sample(self, number: int) -> None:
        """Note which sample is being read; raises `Unwanted`."""
        self._check()
        super().sample(number)

    def item(self, phase: Phase, item: BatchItem) -> None:
        """Note what is being done with the sample of one item; raises `Unwanted`."""
        self._check()
        super().item(phase, item)

    def _check(self) -> None:
        if self.wanted != self._cells[0]:
            raise Unwanted


class ThreadWorker(KnownWorker):
    """One worker thread.

    Attributes:
        thread: Daemon thread, so that one that is stuck does not keep the interpreter from ending.
        status: Status of the worker: what it is doing.
        inbox: Queue of its tasks, and of the epochs that it is to begin; None ends it.
    """

    def __init__(self, identity: WorkerIdentity, plan: Plan, outbox: Outbox) -> None:
        """Prepare a worker. An iterable dataset is copied here.

        Raises:
            ConfigError: an iterable dataset cannot be copied for several workers.
        """
        super().__init__(identity.worker_id, os.getpid())
        self.status = ThreadStatus()
        self._identity = identity
        self._spec: WorkerSpec = plan.spec
        if plan.spec.is_iterable:
            dataset = plan.spec.dataset
            own = own_copy(dataset, identity.num_workers)
            self._spec = dataclasses.replace(plan.spec, dataset=own)
            if identity.worker_id or was_watched(dataset):
                note_watched(own)  # one of the copies is watched, once
            note_watched(dataset)
        self._outbox = outbox
        self.inbox: queue.SimpleQueue[Task | BeginEpoch | None] = queue.SimpleQueue()
        # Not page-locked: fences would be made in this thread, and its calls to the device would
        # disturb a graph that the main process's thread may be capturing.
        self._output = PlainOutput()
        self._runner = TaskRunner(self._output, self.status, identity, in_thread=True)
        self._owner = Owner()
        name = f"penstock-{self.worker_id}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __str__(self) -> str:
        """Return "worker 0 (thread penstock-0)"."""
        return f"worker {self.worker_id} (thread {self.thread.name})"

    def begin(self, begun: BeginEpoch) -> None:
        """Make it begin an epoch; its tasks of earlier ones are dropped."""
        if not self._spec.is_iterable:
            begun = begun._replace(is_announced=False)  # the backend has notified the dataset
        self.status.wanted = begun.generation
        self.inbox.put(begun)

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
                if not isinstance(message, Task):
                    result = self._runner.begin_epoch(message)
                elif self.status.wanted == message.generation:
                    result = self._runner.run(message)
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


def _leave(error: BaseException | None) -> NoReturn:
    """End a forked child with its status; the end of its only thread would give 0 in any case."""
    status = 0 if error is None else 1
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        status = error.code or 0
    elif error is not None:
        traceback.print_exception(error)
    for stream in sys.stdout, sys.stderr:
        with contextlib.suppress(BaseException):  # it may be closed
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
        self._plan = plan
        self._table: WorkerTable[ThreadWorker] = WorkerTable(plan, _SHARED_GENERATORS)
        self._outbox: Outbox = queue.SimpleQueue()
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
            worker.begin(self._table.message_of(worker))

    @property
    def is_whole(self) -> bool:
        """Whether every worker lives."""
        return all(w.thread.is_alive() and not w.is_gone for w in self._table.workers.values())

    def begin_epoch(self, epoch: Epoch) -> int:
        """Notify every worker, and a shared dataset; batches of earlier epochs are dropped."""
        generation = self._table.begin_epoch(epoch)
        for worker in self._table.workers.values():
            if not worker.is_gone:
                worker.begin(self._table.message_of(worker))
        spec = self._plan.spec
        if not epoch.is_announced or spec.is_iterable:
            return generation
        try:
            with contextlib.ExitStack() as stack:
                if spec.seed is not None:
                    streams = SampleStreams(spec.seed, epoch.number, seeds_globals=False)
                    stack.enter_context(streams.active())
                    streams.begin_iterator()
                announce_epoch(spec.dataset, epoch.number)
        except Exception as error:
            annotate(error, f"while epoch {epoch.number} began")
            raise
        return generation

    def await_start(self) -> tuple[int, ...]:
        """Return no worker: those of this machine start at once."""
        return ()

    def submit(self, worker_id: int, task: Task) -> None:
        """Put the task into the worker's queue."""
        worker = self._table.workers[worker_id]
        worker.note(task)
        worker.inbox.put(task)

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
        """Give up a worker: its death is an event now, and its late results are dropped."""
        worker = self._table.workers[worker_id]
        if worker.is_gone:
            return
        stack = stack_of_thread(worker.thread)
        advice = f"{_ADVICE_ON_HANG}\nIts Python stack then:\n{stack}"
        worker.stop()
        how = f"is stuck: worker {worker.worker_id} was given up, as {why},"
        self._outbox.put((worker, self._death(worker, how, advice)))

    def diagnose(self, worker_id: int, *, with_stacks: bool) -> WorkerProgress:
        """Return its status, and its stack."""
        worker = self._table.workers[worker_id]
        stack = stack_of_thread(worker.thread) if with_stacks else ""
        return self._table.progress(worker, worker.status.snapshot(), stack)

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
            warn_user(
                f"{len(left)} worker thread(s) did not end within {grace_s} s, and are left "
                "behind: a thread cannot be killed. Each ends by itself once its sample is made; "
                f"with backend='process' it could be. They are at:\n{listed}",
                RuntimeWarning,
            )
