# SPDX-License-Identifier: Apache-2.0
"""The code of a worker thread, from its start to its end.

Guarantees
    Tasks are done in the order in which they came. One of an earlier epoch is broken off at its
    next sample, and so is every task once the worker is to stop.
    No `Exception` of the user's code ends the worker; `SystemExit` and the like do, as a death.
    Between two tasks it holds no batch, no sample and no exception.
    The generators that belong to the process are never touched.
    A process that the dataset forks ends when it returns to the worker's code, with the exit status
    of its `sys.exit` or exception: it has none of the threads that take batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import sys
import threading
import traceback
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from penstock.engine.assembly import PlainOutput
from penstock.engine.backends.thread_status import ThreadStatus, Unwanted
from penstock.engine.pickling import own_copy
from penstock.engine.status_page import Phase
from penstock.engine.task import Kind, Notices, Task
from penstock.engine.task_runner import TaskRunner
from penstock.engine.timing import WORKERS_PART
from penstock.engine.worker_table import KnownWorker
from penstock.forks import Owner
from penstock.randomness.generator_watch import GeneratorWatch, note_watched, was_watched
from penstock.randomness.samples import seed_thread
from penstock.user_code import stack_of_error
from penstock.worker_info import WorkerInfo, set_thread_info

if TYPE_CHECKING:
    import numpy as np

    from penstock.engine.backends.thread_generation import ThreadGeneration
    from penstock.engine.plan import Plan, WorkerSpec
    from penstock.engine.scheduler import WorkerLost
    from penstock.engine.task import BeginEpoch, TaskResult, WorkerIdentity

__all__ = ["FromThread", "ThreadEnd", "ThreadWorker"]


class ThreadEnd(NamedTuple):
    """The exception that ended a worker, `SystemExit` say, and where it was raised."""

    text: str
    stack: str


class FromThread(NamedTuple):
    """A message of a worker; the main process itself puts in the death of one that is stuck."""

    worker: ThreadWorker
    message: TaskResult | ThreadEnd | WorkerLost


class ThreadWorker(KnownWorker):
    """One worker thread.

    Attributes:
        thread: Daemon thread, so that one that is stuck does not keep the interpreter from ending.
        status: Status of the worker: what it is doing.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        plan: Plan,
        sequence: np.random.SeedSequence,
        outbox: queue.SimpleQueue[FromThread | None],
    ) -> None:
        """Prepare a worker. An iterable dataset is copied here.

        Args:
            identity: Identity of the worker.
            plan: Plan of the backend.
            sequence: Seed sequence of `sample_rng` where the spec has no seed.
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
        self._sequence = sequence
        self._outbox = outbox
        self._inbox: queue.SimpleQueue[Task | tuple[BeginEpoch, ThreadGeneration] | None]
        self._inbox = queue.SimpleQueue()
        # Not page-locked: fences would be made in this thread, and its calls to the device would
        # disturb a graph that the main process's thread may be capturing.
        self._output = PlainOutput()
        self._runner = TaskRunner(self._output, self.status, identity, in_thread=True)
        self._has_served = False
        self._given: ThreadGeneration | None = None  # begun last; the main process's
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
        self._leave_generation()
        self._given = generation
        self._inbox.put((begun, generation))

    def submit(self, task: Task) -> None:
        """Give it a task."""
        self._inbox.put(task)

    def stop(self) -> None:
        """Make it end, at the next sample if it is busy; does not wait."""
        self.status.want_nothing()
        self._leave_generation()
        self._inbox.put(None)

    def _leave_generation(self) -> None:
        if self._given is not None:
            self._given.give_up(self)

    @property
    def held_up_by(self) -> ThreadWorker | None:
        """The worker that it waits for, as that one notifies the dataset of the epoch; or None."""
        notifier = None if self._given is None else self._given.notifier
        snapshot = self.status.snapshot()
        is_beginning = snapshot.phase == Phase.BEGINNING and self.status.is_of_now(
            snapshot.generation
        )
        return notifier if is_beginning and notifier is not self else None

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
                self._outbox.put(FromThread(self, ThreadEnd(text, stack_of_error(error))))
        finally:
            self.status.watch(None)
            self._runner.close()  # an iterator ends in its own thread
            self._output.close()
            set_thread_info(None)
            seed_thread(None)
            self.status.close()
            self._outbox = queue.SimpleQueue()  # results in it refer to this worker

    def _serve_all(self) -> None:
        self._runner.set_up(self._set_up)
        while True:
            self.status.phase(Phase.WAITING)
            message = self._inbox.get()
            if message is None or not self.status.is_wanted:
                return
            try:
                if isinstance(message, Task):
                    self._serve(message)
                else:
                    self._begin(*message)
            except Unwanted:  # of an earlier epoch, or this worker is to end
                pass
            finally:
                del message  # it may hold an epoch's last indices
            if not self._owner.is_here:
                _leave(None)

    def _set_up(self) -> WorkerSpec:
        identity, spec = self._identity, self._spec
        seed_thread(self._sequence)
        seed = identity.base_seed + identity.worker_id
        set_thread_info(WorkerInfo(identity.worker_id, identity.num_workers, seed, spec.dataset))
        if spec.worker_init_fn is None:
            return spec
        watch = None if was_watched(self._shared_dataset) else GeneratorWatch(None)
        self.status.watch(watch)
        try:
            spec.worker_init_fn(identity.worker_id)
        finally:
            self.status.watch(None)
            if watch is not None and watch.found:
                self._runner.notice(drawings=tuple(watch.found))
        return spec

    def _begin(self, begun: BeginEpoch, generation: ThreadGeneration) -> None:
        is_shared = not self._spec.is_iterable
        # A worker that resumes from a state of its own may be at other items than the others.
        goes_on = begun.position is not None and begun.position.state is not None
        self._watch = self._first_watch(generation)
        self.status.watch(self._watch)
        try:
            result = self._runner.begin_epoch(
                begun,
                agree=lambda make: generation.begin(self, make, is_shared=is_shared),
                compared=None
                if goes_on or self._identity.num_workers == 1
                else generation.comparer(self),
            )
        finally:
            self.status.watch(None)
        if result is not None:
            self._outbox.put(FromThread(self, result))

    def _first_watch(self, generation: ThreadGeneration) -> GeneratorWatch | None:
        """Return a watch for the first task of one worker, unless there was one.

        Its cost falls on a worker's first batch, by which nothing is judged.
        """
        if self._has_served or was_watched(self._shared_dataset) or not generation.take_watch():
            return None
        generation.watch = GeneratorWatch(self._spec.dataset)
        return generation.watch

    def _serve(self, task: Task) -> None:
        if not self.status.is_of_now(task.generation):
            return
        watch = None
        if self._runner.failure is None:  # else nothing is read, and nothing found out
            watch, self._watch = self._watch, None
            self._has_served = True
        self.status.watch(watch)
        try:
            result = self._runner.run(task)
        finally:
            self.status.watch(None)
        if not self._owner.is_here:
            _leave(result.payload if result is not None and result.kind == Kind.FAILED else None)
        if result is None:
            return
        if watch is not None:
            note_watched(self._shared_dataset)
            self._report(watch, result)
        self.status.phase(Phase.WAITING)  # not for its own sake, if it waits for the GIL
        self._outbox.put(FromThread(self, result))

    def _report(self, watch: GeneratorWatch, result: TaskResult) -> None:
        """Add to a result what a watch has found; its samples took longer than others will."""
        if watch.found:
            notices = result.notices or Notices()
            drawings = *notices.drawings, *watch.found
            result.notices = notices._replace(drawings=drawings)
        result.times = result.times[: WORKERS_PART.size]


def _leave(error: BaseException | None) -> NoReturn:
    """End a forked child with its status; the end of its only thread would give 0 in any case."""
    status = 0
    try:
        if isinstance(error, SystemExit) and isinstance(error.code, int | None):
            status = error.code or 0
        elif error is not None:
            status = 1
            with contextlib.suppress(Exception):  # stderr may be closed
                is_text = isinstance(error, SystemExit)
                text = f"{error}\n" if is_text else "".join(traceback.format_exception(error))
                sys.stderr.write(text)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    finally:
        os._exit(status & 0xFF)
