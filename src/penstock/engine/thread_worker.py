# SPDX-License-Identifier: Apache-2.0
"""The life of a worker that is a thread of the main process.

Guarantees
    Tasks are done in the order in which they came. One of an earlier epoch is broken off at its
    next sample, and so is everything once the worker is wanted no more.
    Nothing that the user's code raises ends the worker; `SystemExit` and the like do, as a death.
    Between two tasks it holds no batch, no sample and no exception.
    The generators that belong to the process are never touched.
    A process that the dataset forks ends with what it was to do there, with the exit status of its
    `sys.exit` or exception: it has none of the threads that take batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from penstock.engine.backends.in_process import Made, PlainOutput, Raised
from penstock.engine.fault_log import NO_LOSSES, Losses
from penstock.engine.fetch import Fetcher
from penstock.engine.generator_watch import GeneratorWatch, note_watched, was_watched
from penstock.engine.own_copy import own_copy
from penstock.engine.scheduler import TaskDone, WorkerExhausted, WorkerLost, WorkerReady
from penstock.engine.status_page import Phase
from penstock.engine.thread_generation import copy_of_error
from penstock.engine.thread_status import ThreadStatus, Unwanted
from penstock.engine.user_frames import stack_of_error
from penstock.faults import annotate
from penstock.forks import Owner
from penstock.randomness.samples import seed_thread
from penstock.worker_info import WorkerInfo, set_thread_info

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from penstock.engine.epoch import ShardPosition
    from penstock.engine.generator_watch import Drawing
    from penstock.engine.plan import Plan, RetryHints, WorkerSpec
    from penstock.engine.scheduler import BackendEvent
    from penstock.engine.thread_generation import ThreadGeneration

__all__ = ["ThreadAnswer", "ThreadTask", "ThreadWorker"]


class ThreadTask(NamedTuple):
    """Make the batch of one step; see `penstock.engine.messages.Task`."""

    generation: int
    step: int
    indices: object
    hints: RetryHints | None
    is_measured: bool = True


class _Begin(NamedTuple):
    """A new epoch, and where to go on in it."""

    generation: ThreadGeneration
    shard: ShardPosition | None


class ThreadAnswer(NamedTuple):
    """What a worker tells.

    Attributes:
        worker: Who. The main process drops what comes of one that it has given up.
        generation: Number of the generation that it is about.
        event: For the scheduler; None where nothing but the rest is told.
        first_sample: Digest of the first sample of a shard, if the batch begins with it.
        drawings: Functions that draw from generators of the process.
    """

    worker: ThreadWorker
    generation: int
    event: BackendEvent | None
    first_sample: bytes | None = None
    drawings: tuple[Drawing, ...] = ()


class ThreadWorker:
    """One worker thread, and what the main process keeps of it.

    Attributes:
        worker_id: Its number.
        thread: A daemon, so that one that is stuck does not keep the interpreter from ending.
        status: What it is doing.
        tasks: Step -> indices of the epoch's tasks that it has not answered; the main process's.
        shard: How far it is in its shard of an iterable dataset; the main process's.
        is_gone: Whether its end is known; the main process's.
    """

    def __init__(
        self,
        worker_id: int,
        plan: Plan,
        sequence: np.random.SeedSequence,
        outbox: queue.SimpleQueue[ThreadAnswer | None],
        *,
        joins_late: bool = False,
    ) -> None:
        """Prepare a worker. An iterable dataset is copied here.

        Args:
            worker_id: Its number.
            plan: What to do.
            sequence: Seeds what `sample_rng` gives where the spec has no seed.
            outbox: Where its answers go.
            joins_late: Whether it is to say when it has begun its first generation.

        Raises:
            ConfigError: an iterable dataset cannot be copied for several workers.
        """
        self.worker_id = worker_id
        self.status = ThreadStatus()
        self.tasks: dict[int, object] = {}
        self.shard: ShardPosition | None = None
        self.is_gone = False
        self._plan = plan
        self._num_workers = max(plan.num_workers, plan.max_workers)
        self._spec: WorkerSpec = plan.spec
        if plan.spec.is_iterable:
            own = own_copy(plan.spec.dataset, self._num_workers)
            self._spec = dataclasses.replace(plan.spec, dataset=own)
        self._sequence = sequence
        self._outbox = outbox
        self._inbox: queue.SimpleQueue[ThreadTask | _Begin | None] = queue.SimpleQueue()
        # Not locked: its fences would be made here, while the main process's thread may be
        # capturing a graph, which no other thread's questions to the device may disturb.
        self._output = PlainOutput()
        self._fetcher: Fetcher | None = None
        self._generation: ThreadGeneration | None = None
        self._failure: Exception | None = None  # of setting up: the answer to every task
        self._is_set_up = True
        self._is_exhausted = False
        self._is_expected = joins_late
        self._has_served = False
        # the last that it was notified of; the main process's
        self._given: ThreadGeneration | None = None
        self._drawings: tuple[Drawing, ...] = ()  # of worker_init_fn, to be told
        self._watch: GeneratorWatch | None = None  # of an epoch's begin, for its first task
        self._owner = Owner()
        self.thread = threading.Thread(target=self._run, name=f"penstock-{worker_id}", daemon=True)

    def __str__(self) -> str:
        """Return "worker 0 (thread penstock-0)"."""
        return f"worker {self.worker_id} (thread {self.thread.name})"

    def begin(self, generation: ThreadGeneration) -> None:
        """Let it begin an epoch, where `shard` says; what it has of others is wanted no more."""
        self.status.want(generation.number)
        self._leave_generation()
        self._given = generation
        self._inbox.put(_Begin(generation, self.shard))

    def submit(self, task: ThreadTask) -> None:
        """Give it a task."""
        self.tasks[task.step] = task.indices
        self._inbox.put(task)

    def stop(self) -> None:
        """Let it end, at the next sample if it is busy; does not wait."""
        self.status.want_nothing()
        self._leave_generation()
        self._inbox.put(None)

    def _leave_generation(self) -> None:
        if self._given is not None:
            self._given.give_up(self)

    @property
    def held_up_by(self) -> ThreadWorker | None:
        """The worker that it waits for until it has notified the dataset of the epoch, if any."""
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
            self._tell_end(error)
        finally:
            self.status.watch(None)
            self._fetcher = self._failure = None  # an iterator ends in its own thread
            self._output.close()
            set_thread_info(None)
            seed_thread(None)
            self.status.close()
            self._outbox = queue.SimpleQueue()  # answers in it refer to this worker

    def _tell_end(self, error: BaseException) -> None:
        if not self.status.is_wanted:
            return
        text = "".join(traceback.format_exception_only(error)).strip()
        stack = stack_of_error(error)
        end = WorkerLost(self.worker_id, f"ended with {text}", f"\nWhere it was raised:\n{stack}")
        self._outbox.put(ThreadAnswer(self, 0, end))

    def _serve_all(self) -> None:
        try:
            self._set_up()
        except Exception as error:
            annotate(error, f"in {self}, while it was starting")
            self._failure = error
            self._is_set_up = False
        while True:
            self.status.phase(Phase.WAITING)
            command = self._inbox.get()
            if command is None or not self.status.is_wanted:
                return
            try:
                self._obey(command)
            except Unwanted:  # of an earlier epoch, or this worker is to end
                pass
            finally:
                del command  # it may hold an epoch's last indices
            if not self._owner.is_here:
                _leave(None)

    def _obey(self, command: ThreadTask | _Begin) -> None:
        if isinstance(command, _Begin):
            self._begin(command)
            if self._is_expected:
                self._is_expected = False
                ready = WorkerReady(self.worker_id)
                self._outbox.put(ThreadAnswer(self, command.generation.number, ready))
        elif self.status.is_of_now(command.generation) and not self._is_exhausted:
            answer = self._serve(command)
            self.status.phase(Phase.WAITING)  # not for its own sake, if it waits for the GIL
            self._outbox.put(answer)

    def _set_up(self) -> None:
        plan = self._plan
        seed_thread(self._sequence)
        set_thread_info(
            WorkerInfo(
                id=self.worker_id,
                num_workers=self._num_workers,
                seed=plan.base_seed + self.worker_id,
                dataset=self._spec.dataset,
            )
        )
        if plan.spec.worker_init_fn is not None:
            self._initialise(plan.spec.worker_init_fn)

    def _initialise(self, worker_init_fn: Callable[[int], object]) -> None:
        if was_watched(self._plan.spec.dataset):
            worker_init_fn(self.worker_id)
            return
        watch = GeneratorWatch(None)
        self.status.watch(watch)
        try:
            worker_init_fn(self.worker_id)
        finally:
            self.status.watch(None)
            self._drawings = tuple(watch.found)

    def _begin(self, command: _Begin) -> None:
        self._is_exhausted = False
        if not self._is_set_up:
            return
        generation, shard = command
        self._generation = generation
        self.status.begin_generation(generation.number)
        self._fetcher = None  # an iterator of the epoch before ends before the next begins
        self._watch = self._first_watch(generation)
        self.status.watch(self._watch)
        try:
            self._fetcher = generation.begin(
                self,
                lambda is_announced: self._make_fetcher(generation, shard, is_announced),
                is_shared=not self._spec.is_iterable,
            )
            self._failure = None
        except Exception as error:
            annotate(error, f"in {self}, while it began epoch {generation.epoch}")
            self._failure = error
        finally:
            self.status.watch(None)

    def _first_watch(self, generation: ThreadGeneration) -> GeneratorWatch | None:
        """Return a watch for the first task of one worker, unless there was one.

        What it takes is told as that of a worker's first batch, which nobody judges by.
        """
        if self._has_served or was_watched(self._plan.spec.dataset) or not generation.take_watch():
            return None
        generation.watch = GeneratorWatch(self._spec.dataset)
        return generation.watch

    def _make_fetcher(
        self, generation: ThreadGeneration, shard: ShardPosition | None, is_announced: bool
    ) -> Fetcher:
        begins = shard is None or shard.state is None  # else each worker where it was
        return Fetcher(
            self._spec,
            self._output,
            base_seed=self._plan.base_seed,
            epoch=generation.epoch,
            is_announced=is_announced,
            worker_id=self.worker_id,
            num_workers=self._num_workers,
            shard=shard,
            in_thread=True,
            compared=generation.comparer(self) if begins and self._num_workers > 1 else None,
            status=self.status,
        )

    def _serve(self, task: ThreadTask) -> ThreadAnswer:
        if self._failure is not None:
            raised = Raised(copy_of_error(self._failure), None, NO_LOSSES)
            return ThreadAnswer(self, task.generation, TaskDone(self.worker_id, task.step, raised))
        assert self._fetcher is not None
        assert self._generation is not None
        watch, self._watch = self._watch, None
        self._has_served = True
        self.status.begin_task(task.generation, task.step, measures=task.is_measured)
        self._output.take_num_bytes()
        self.status.watch(watch)
        try:
            event = self._make(task, self._fetcher, is_timed=watch is None)
        finally:
            self.status.watch(None)
        drawings, self._drawings = self._drawings, ()
        if watch is not None:
            note_watched(self._plan.spec.dataset)
            drawings += tuple(watch.found)
        return ThreadAnswer(
            self, task.generation, event, self._fetcher.take_first_digest(), drawings
        )

    def _make(
        self, task: ThreadTask, fetcher: Fetcher, *, is_timed: bool
    ) -> TaskDone | WorkerExhausted:
        # No exception is kept in a variable that outlives its handler: with the frames of its
        # traceback that would be a cycle, which keeps samples until a garbage collection.
        try:
            batch = fetcher.fetch(task.indices, task.step, task.hints)
            shard = fetcher.saved_position()
        except Exception as error:
            if not self._owner.is_here:
                raise
            if isinstance(error, StopIteration) and self._spec.is_iterable:
                self._is_exhausted = True
                bad = self._take_bad(task)
                return WorkerExhausted(self.worker_id, task.step, Losses(len(bad), bad))
            annotate(error, self._where(task))
            losses = Losses(0, self._take_bad(task))
            return TaskDone(
                self.worker_id, task.step, Raised(error, fetcher.saved_position(), losses)
            )
        bad = self._take_bad(task)
        losses = Losses(fetcher.num_asked, bad) if fetcher.num_asked else NO_LOSSES
        times = self.status.take_times(
            num_bytes=self._output.take_num_bytes(), pool_bytes=self._output.pool_bytes
        )
        if not is_timed:
            times = times._replace(sample_us=b"")
        return TaskDone(self.worker_id, task.step, Made(batch, shard, losses, times))

    def _take_bad(self, task: ThreadTask) -> list[Any]:
        assert self._fetcher is not None
        bad = self._fetcher.take_bad()
        for sample in bad:
            annotate(sample.error, self._where(task))
        return bad

    def _where(self, task: ThreadTask) -> str:
        assert self._generation is not None
        return f"in {self}, epoch {self._generation.epoch}, step {task.step}"


def _leave(error: BaseException | None) -> NoReturn:
    """End a forked child; the end of its only thread would be status 0, whatever was raised."""
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
