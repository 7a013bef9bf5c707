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
    A thread cannot be killed. One that is stuck is given up: its death is an event, its late answer
    is dropped, and it ends by itself at its next sample.
    `close` ends the wait of another thread that is in `events`.

Shutdown order
    Every worker is notified at once. A waiting one ends, a busy one at its next sample. After
    `_GRACE_S` those still busy are left behind as daemons, with a warning; in a hurry, after
    `_SHORT_GRACE_S`, without one.

A forked child has none of these threads: there `close` does nothing.
"""

from __future__ import annotations

import atexit
import math
import queue
import threading
import time
import warnings
import weakref
from typing import TYPE_CHECKING, Final

from penstock.engine.backends.thread_generation import ThreadGeneration
from penstock.engine.backends.thread_worker import FromThread, ThreadEnd, ThreadWorker
from penstock.engine.interrupts import LONGEST_WAIT_S
from penstock.engine.scheduler import WorkerLost
from penstock.engine.task import TaskResult, WorkerIdentity
from penstock.engine.worker_table import WorkerProgress, WorkerTable
from penstock.errors import WorkerDied
from penstock.forks import Owner
from penstock.randomness.keys import Purpose, seed_sequence
from penstock.user_code import stack_of_thread
from penstock.warn import users_level

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engine.plan import Epoch, Plan, RetryHints
    from penstock.engine.scheduler import BackendEvent

__all__ = ["ThreadBackend"]

_GRACE_S: Final = 3.0  # for a worker to finish its sample and its user's clean-up
_SHORT_GRACE_S: Final = 0.3  # after Ctrl-C, or when the interpreter ends
_ADVICE_ON_EXIT: Final = "Look for sys.exit in the dataset."
_ADVICE_ON_HANG: Final = (
    "Raise `timeout` if samples, or the start of a worker, may take that long. The thread goes on "
    "until its sample is made: only processes can be killed (backend='process')."
)

_backends: weakref.WeakSet[ThreadBackend] = weakref.WeakSet()
_SHARED_GENERATORS: Final = (
    "With backend='thread' all worker threads and the main process share them, so what is drawn is "
    "neither reproducible nor what another backend draws. Draw from penstock.sample_rng(), which "
    "is each sample's own, or use backend='process'."
)


def _close_all() -> None:
    """At interpreter exit: a thread in native code is not to find the interpreter gone."""
    for backend in list(_backends):
        backend.close(in_a_hurry=True)


atexit.register(_close_all)


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
        self._num_starts: dict[int, int] = {}  # by worker id
        # Removed, and not yet ended: the table no longer has them.
        self._leaving: weakref.WeakSet[ThreadWorker] = weakref.WeakSet()
        self._outbox: queue.SimpleQueue[FromThread | None] = queue.SimpleQueue()  # None: closed
        self._generation = ThreadGeneration(0, 0, is_announced=False)
        self._owner = Owner()

    def start(self) -> None:
        """Start the threads; none waits for another."""
        _backends.add(self)
        try:
            for worker_id in range(self._plan.num_workers):
                self._start_worker(worker_id)
        except BaseException:  # the system gives no more threads
            self.close()
            raise

    def _start_worker(self, worker_id: int, *, joins_late: bool = False) -> ThreadWorker:
        # A worker that takes the place of earlier ones must not repeat their draws.
        num_before = self._num_starts.get(worker_id, 0)
        self._num_starts[worker_id] = num_before + 1
        again = (num_before,) if num_before else ()
        plan = self._plan
        sequence = seed_sequence(plan.base_seed, Purpose.WORKERS, worker_id, *again)
        num_workers = max(plan.num_workers, plan.max_workers)
        identity = WorkerIdentity(worker_id, num_workers, plan.base_seed, joins_late)
        worker = ThreadWorker(identity, plan, sequence, self._outbox)
        worker.thread.start()
        self._table.add(worker)
        return worker

    @property
    def threads(self) -> list[threading.Thread]:
        """The workers' threads, by worker id."""
        return [worker.thread for _, worker in sorted(self._table.workers.items())]

    @property
    def is_whole(self) -> bool:
        """Whether every worker lives."""
        return all(w.thread.is_alive() and not w.is_gone for w in self._table.workers.values())

    def begin_epoch(self, epoch: Epoch) -> None:
        """Notify every worker; batches of earlier epochs are broken off and dropped."""
        self._table.begin_epoch(epoch)
        number, is_announced = self._table.generation, epoch.is_announced
        self._generation = ThreadGeneration(number, epoch.number, is_announced=is_announced)
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
        worker.submit(self._table.task_of(worker, step, indices, hints, is_measured=is_measured))

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
            event = self._event_of(came.worker, came.message)
            del came  # this frame may wait again, and would keep the batch
            if event is not None:
                return [event]

    def _event_of(
        self, worker: ThreadWorker, message: TaskResult | ThreadEnd | WorkerLost
    ) -> BackendEvent | None:
        if isinstance(message, TaskResult):
            return self._table.accept(worker, message)
        if self._table.workers.get(worker.worker_id) is not worker:
            return None  # it was given up, and another has its place
        if isinstance(message, WorkerLost):
            return message
        return None if worker.is_gone else self._reap(worker, message)

    def _reap(self, worker: ThreadWorker, end: ThreadEnd) -> WorkerLost:
        """Return the event of a worker's death, with all that is known of it."""
        activity = self._table.activity(worker, worker.status.snapshot())
        how = (
            f"DataLoader worker (thread {worker.thread.name}) exited unexpectedly: worker "
            f"{worker.worker_id} ended with {end.text}"
        )
        advice = f"{_ADVICE_ON_EXIT}\nWhere it was raised:\n{end.stack}"
        return self._table.death(worker, activity, how, advice)

    def respawn(self, worker_id: int) -> None:
        """Start another thread, which goes on where the dead one was."""
        self._table.workers[worker_id].stop()
        worker = self._start_worker(worker_id)
        worker.begin(self._table.message_of(worker), self._generation)

    def add_worker(self, worker_id: int) -> None:
        """Start one thread more, which joins the current epoch and reports when it has."""
        worker = self._start_worker(worker_id, joins_late=True)
        if self._table.epoch is not None:
            worker.begin(self._table.message_of(worker), self._generation)

    def remove_worker(self, worker_id: int) -> None:
        """Stop a thread that has no tasks; does not wait for its end."""
        worker = self._table.workers.pop(worker_id)
        worker.stop()
        self._leaving.add(worker)

    def kill(self, worker_id: int, why: str) -> None:
        """Give up a worker: its death is an event now, and its late results are dropped.

        If it only waits for another one, which hangs while it notifies the dataset of the epoch,
        that one is given up: one hang is one death.
        """
        worker = self._table.workers[worker_id]
        worker = worker.held_up_by or worker
        if worker.is_gone:
            return
        advice = _ADVICE_ON_HANG
        if stack := stack_of_thread(worker.thread):
            advice += f"\nIts Python stack then:\n{stack}"
        activity = self._table.activity(worker, worker.status.snapshot())
        worker.stop()
        how = (
            f"DataLoader worker (thread {worker.thread.name}) is stuck: worker "
            f"{worker.worker_id} was given up, as {why},"
        )
        death = self._table.death(worker, activity, how, advice)
        self._outbox.put(FromThread(worker, death))

    def diagnose(self, worker_id: int, *, with_stacks: bool) -> WorkerProgress:
        """Return its status, and its stack."""
        worker = self._table.workers[worker_id]
        if (notifier := worker.held_up_by) is not None:
            stack = f":\n{stack_of_thread(notifier.thread)}" if with_stacks else ""
            return WorkerProgress(
                f"waiting for {notifier}, which is in set_epoch of the dataset{stack}"
            )
        stack = stack_of_thread(worker.thread) if with_stacks else ""
        return self._table.progress(worker, worker.status.snapshot(), stack)

    def close(self, *, in_a_hurry: bool = False) -> None:
        """Stop the workers, and wait until they are gone, but for those that are stuck."""
        workers = [*self._table.workers.values(), *self._leaving]
        self._table.workers.clear()
        self._leaving.clear()
        _backends.discard(self)
        if not self._owner.is_here:
            return  # a forked copy of the main process, which has no such threads
        for worker in workers:
            worker.stop()
        self._outbox.put(None)
        grace_s = _SHORT_GRACE_S if in_a_hurry else _GRACE_S
        left = _wait_for_ends([worker for worker in workers if not worker.is_gone], grace_s)
        _drain(self._outbox)
        self._outbox.put(None)
        if left and not in_a_hurry:
            _warn_of_stuck(left, grace_s)


def _drain(outbox: queue.SimpleQueue[FromThread | None]) -> None:
    """Drop the results that are left: they refer to workers, which refer to the queue."""
    while True:
        try:
            outbox.get_nowait()
        except queue.Empty:
            return


def _wait_for_ends(workers: Sequence[ThreadWorker], timeout_s: float) -> list[ThreadWorker]:
    """Wait for all of them together, and return those that are still there."""
    deadline = time.monotonic() + timeout_s
    others = [w for w in workers if w.thread is not threading.current_thread()]
    for worker in others:
        while worker.thread.is_alive() and (left_s := deadline - time.monotonic()) > 0:
            worker.thread.join(min(left_s, LONGEST_WAIT_S))
    return [worker for worker in others if worker.thread.is_alive()]


def _warn_of_stuck(left: Sequence[ThreadWorker], grace_s: float) -> None:
    listed = "\n".join(f"{worker}:\n{stack_of_thread(worker.thread)}" for worker in left)
    warnings.warn(
        f"{len(left)} worker thread(s) did not end within {grace_s} s, and are left behind: a "
        "thread cannot be killed. Each ends by itself once its sample is made; with "
        f"backend='process' it could be. They are at:\n{listed}",
        RuntimeWarning,
        stacklevel=users_level(),
    )
