# SPDX-License-Identifier: Apache-2.0
"""The stream of batches that workers make: carries out the scheduler's decisions on a backend."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import os
import time
import traceback
import warnings
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.engine.backends import Backend, open_backend
from penstock.engine.plan import RetryHints
from penstock.engine.recover import NO_BATCH
from penstock.engine.scheduler import (
    AbandonWorker,
    AddWorker,
    Decision,
    Deliver,
    Draw,
    Event,
    Fail,
    Finish,
    IndicesDrawn,
    IndicesExhausted,
    Quarantine,
    RemoveWorker,
    Requested,
    Respawn,
    Scheduler,
    Submit,
    TaskDone,
    WorkerExhausted,
    WorkerLost,
    WorkersChanged,
)
from penstock.engine.stream import BatchStream
from penstock.engine.task import Kind
from penstock.engine.timing import WorkerSettings
from penstock.engine.worker_table import WorkerProgress
from penstock.errors import ConfigError, TooManyFailures, WorkerDied, WorkerTimeout
from penstock.faults import annotate
from penstock.forks import Owner
from penstock.warn import users_level

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.engine.delivery_hook import DeliveryHook
    from penstock.engine.epoch import Epoch
    from penstock.engine.fault_log import FaultLog
    from penstock.engine.plan import BatchIndices, Plan
    from penstock.engine.task import TaskResult
    from penstock.engine.timing import Observer

__all__ = ["WorkerStream"]

_ADDED_AT_ONCE: Final = 2  # per batch; a fork of a large process takes tens of milliseconds

_DEEPEST: Final = 3  # a transform of a part of a dataset
_MOVES_ON: Final = 1 / 2  # of `timeout`: a worker that moved on within it is slow


class _EpochAhead:
    """The next epoch, whose first tasks workers do while the last batches of this one are taken.

    Attributes:
        generation: Generation of its tasks and results.
        epoch: Epoch as it is foreseen.
        scheduler: Scheduler of that epoch.
        drawn: Indices of its first steps, which workers have: one for each at most.
        num_to_draw: Number of steps to be drawn before its first batch is asked for.
    """

    def __init__(self, generation: int, epoch: Epoch, scheduler: Scheduler, most: int) -> None:
        self.generation = generation
        self.epoch = epoch
        self.scheduler = scheduler
        self.drawn: list[Any] = []
        self.num_to_draw = len(scheduler.start())
        self._most = most

    def draw(self) -> Submit | None:
        """Return a first step of the epoch for a worker; None if each has one, or none is left."""
        indices: Any = None
        if len(self.drawn) < min(self._most, self.num_to_draw):
            indices = next(self.epoch.indices, None)
        if indices is None:
            return None
        self.drawn.append(indices)
        (submission,) = self.scheduler.handle(IndicesDrawn(indices))
        assert isinstance(submission, Submit)
        return submission

    def is_like(self, epoch: Epoch, drawn: list[Any]) -> bool:
        """Return whether `epoch`, with as many steps drawn, is the one that was foreseen."""
        given, foreseen = epoch.progress.given, self.epoch
        return (
            not (given.num_steps or given.ahead)
            and (epoch.number, epoch.is_announced) == (foreseen.number, foreseen.is_announced)
            and len(drawn) == len(self.drawn)
            and all(map(_are_same, drawn, self.drawn))
        )


def _are_same(one: BatchIndices, other: BatchIndices) -> bool:
    return one[1:] == other[1:] and np.array_equal(one.indices, other.indices)  # type: ignore[arg-type]


def _holds_shared_state(value: object, depth: int = 0) -> bool:
    """Return whether a dataset, or a part of it, holds memory that workers share with this process.

    For example a `multiprocessing.Value`, which is set to the epoch's number before each epoch.
    """
    if type(value).__module__.partition(".")[0] in ("multiprocessing", "multiprocess"):
        return True
    is_shared = getattr(value, "is_shared", None)  # of a tensor
    if callable(is_shared) and is_shared() is True:
        return True
    members = getattr(value, "__dict__", {}) if depth < _DEEPEST else {}
    return any(_holds_shared_state(member, depth + 1) for member in members.values())


class WorkerStream(BatchStream):
    """A stream whose batches come from workers.

    Concurrency:
        One thread at a time. In a forked child the current epoch raises `WorkerDied`, the parent's
        workers are left alone, and the next epoch starts workers of its own.
    """

    def __init__(
        self,
        plan: Plan,
        epoch: Epoch,
        faults: FaultLog | None = None,
        observer: Observer | None = None,
        hook: DeliveryHook | None = None,
    ) -> None:
        """Start the workers and give them their first tasks; see `BatchStream`.

        The observer may ask for more or fewer workers.
        """
        self._begun: tuple[int, object, Exception | None] | None = None  # of a step to come
        self._overdue: Exception | None = None  # raised with the next call
        self._ahead: _EpochAhead | None = None
        self._may_begin_ahead = (
            plan.traits.begins_ahead
            and plan.keep_workers
            and not plan.max_workers
            and not _holds_shared_state(plan.spec.dataset)
        )
        self._workers = WorkerSettings(plan.num_workers, plan.prefetch_factor)
        self._lookahead = plan.num_workers * plan.prefetch_factor
        self._present: set[int] = set()
        self._to_add: collections.deque[int] = collections.deque()
        self._has_warned_of_slow_batch = False
        self._owner = Owner()  # of the workers
        self._backend: Backend
        in_process = plan.traits.shares_interpreter
        cpu_clock = time.thread_time_ns if in_process else time.process_time_ns
        super().__init__(plan, epoch, faults, observer, hook, cpu_clock=cpu_clock)

    def begin_epoch(self, epoch: Epoch) -> None:
        """Begin an epoch with the same workers; what is left of the last one is dropped."""
        self._clock.begin_epoch()
        if self._is_open and not (self._owner.is_here and self._backend.is_whole):
            # A worker died after the last batch that was asked for; or this is a forked copy, which
            # needs workers of its own.
            self.close()
        if not self._is_open:
            plan = dataclasses.replace(
                self._plan,
                num_workers=self._workers.num_workers,
                prefetch_factor=self._workers.prefetch_factor,
            )
            self._owner = Owner()
            self._backend = open_backend(plan)
            self._backend.start()
            self._present = set(range(plan.num_workers))
            self._is_open = True
        self._begin(epoch)
        self._begun = self._overdue = None
        with self._closed_on_error():
            if not self._goes_on_ahead(epoch):
                self._begin_anew(epoch)
            self._raise_overdue()
        self._clock.started()

    def _goes_on_ahead(self, epoch: Epoch) -> bool:
        """Go on in `epoch` if it was begun ahead as foreseen; return whether it was."""
        self._indices: Iterator[object] = epoch.indices
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return False
        drawn = list(itertools.islice(epoch.indices, len(ahead.drawn)))
        if not ahead.is_like(epoch, drawn):
            self._indices = itertools.chain(drawn, epoch.indices)
            self._may_begin_ahead = False  # a loop that chose an epoch does so again
            return False
        self._backend.adopt_ahead(ahead.generation, epoch)
        self._scheduler = ahead.scheduler
        self._carry_out([Draw()] * (ahead.num_to_draw - len(drawn)))
        return True

    def _begin_anew(self, epoch: Epoch) -> None:
        self._to_add.clear()
        wanted = set(range(self._workers.num_workers))
        for worker_id in self._present - wanted:  # to be removed; the last epoch ended before that
            self._remove(worker_id)
        for worker_id in sorted(wanted - self._present):  # to be added, likewise
            self._backend.add_worker(worker_id)
            self._present.add(worker_id)
        self._backend.begin_epoch(epoch)
        self._scheduler = self._scheduler_of(epoch)
        self._carry_out(self._scheduler.start())

    def _scheduler_of(self, epoch: Epoch) -> Scheduler:
        plan, given = self._plan, epoch.progress.given
        num_workers = self._workers.num_workers
        is_iterable = plan.spec.is_iterable
        any_worker = plan.is_worker_free or bool(plan.max_workers)
        return Scheduler(
            num_workers,
            self._lookahead,
            in_order=plan.in_order,
            any_worker=any_worker,
            starting=self._backend.await_start() if any_worker else (),
            first_step=given.num_steps,
            first_worker=(given.turn if is_iterable else given.num_steps) % num_workers,
            skipped=[step for start, stop in given.ahead for step in range(start, stop)],
            max_respawns=plan.spec.faults.max_respawns,
            can_quarantine=plan.spec.faults.tolerates,
        )

    def _begin_ahead_of_end(self) -> None:
        """Begin the next epoch if that is possible, as all steps of this one are drawn."""
        following = self._epoch.following
        if following is None or not self._may_begin_ahead or self._ahead is not None:
            return
        epoch = None
        with contextlib.suppress(Exception):  # it is raised when that epoch begins
            epoch = following()
        if epoch is None:
            self._may_begin_ahead = False
            return
        scheduler, num_workers = self._scheduler_of(epoch), self._workers.num_workers
        generation = self._backend.begin_ahead(epoch)
        self._ahead = _EpochAhead(generation, epoch, scheduler, num_workers)

    def _draw_ahead(self, ahead: _EpochAhead) -> None:
        """Give a worker a step of the next epoch, in the place of the batch that was taken."""
        submission = ahead.draw()
        if submission is not None:
            self._submit(submission, ahead.generation)

    def set_hook(self, hook: DeliveryHook | None) -> None:
        """Use another delivery hook from the next epoch on."""
        self._begun = None
        super().set_hook(hook)

    @property
    def backend(self) -> Backend:
        """The backend that runs the tasks."""
        return self._backend

    def _next(self) -> Any:  # noqa: ANN401 - any batch tree, or NO_BATCH
        if self._overdue is not None:
            self._raise_overdue()
        if self._is_over:
            raise StopIteration
        if not self._owner.is_here:
            raise WorkerDied(
                f"this iterator's workers belong to the process that began it (pid "
                f"{self._owner.pid}), not to this forked one (pid {os.getpid()}): iterate the "
                "loader anew here."
            )
        observer = self._observer
        num_ready = self._scheduler.num_ready if observer is not None and observer.measures else 0
        try:
            answer = self._carry_out(self._scheduler.handle(Requested()))
            while answer is None and self._overdue is None:
                answer = self._wait()
            if self._ahead is not None and isinstance(answer, Deliver):
                self._draw_ahead(self._ahead)
        except WorkerTimeout:
            raise
        except BaseException as error:  # see `_closed_on_error`; this is the hot path
            self.close(in_a_hurry=isinstance(error, KeyboardInterrupt))
            raise
        if self._overdue is not None:
            if isinstance(answer, Deliver):
                self._lose(answer)
            self._raise_overdue()
        if isinstance(answer, Deliver):
            batch = self._give(answer)
            if observer is not None and batch is not NO_BATCH:
                self._tell(observer, answer, num_ready)
            return batch
        if isinstance(answer, Fail):
            self._is_over = True
            message = self._death_message(answer)
            self.close()
            raise WorkerDied(message)
        self._end()
        raise StopIteration

    def _raise_overdue(self) -> None:
        if self._overdue is None:
            return
        error, self._overdue = self._overdue, None
        try:
            raise error
        finally:
            del error  # with its own traceback it would be a cycle

    def _drop_frames_of_overdue(self) -> None:
        if self._overdue is not None:
            self._overdue = _without_frames(
                self._overdue, "raised while the batch before was given"
            )

    def _lose(self, delivery: Deliver) -> None:
        """Count a batch as one that could not be made: the sampler raised in its place."""
        step, worker_id, outcome = delivery.step, delivery.worker_id, delivery.outcome
        self._record(outcome.bad, step, worker_id)
        self._epoch.progress.fail(step, worker_id, outcome.position)

    def _tell(self, observer: Observer, delivery: Deliver, num_ready: int) -> None:
        made: TaskResult = delivery.outcome
        if not observer.measures:
            self._observe_lightly(observer, made, self._workers.num_workers, self._lookahead)
            return
        wanted = self._observe(
            observer,
            made,
            delivery.indices,
            worker_id=delivery.worker_id,
            num_ready=num_ready,
            num_workers=min(self._workers.num_workers, self._scheduler.num_at_work),
            lookahead=self._lookahead,
        )
        # Beginning the next batch may have closed the stream; this batch is given all the same.
        if self._is_open and (self._to_add or (wanted is not None and wanted != self._workers)):
            with self._closed_on_error():
                self._change_workers(wanted)

    def _change_workers(self, workers: WorkerSettings | None) -> None:
        if workers is not None and workers != self._workers:
            self._workers = workers
            self._lookahead = workers.num_workers * workers.prefetch_factor
            self._carry_out(self._scheduler.handle(WorkersChanged(workers[0], self._lookahead)))
            self._drop_frames_of_overdue()
        self._add_some()

    def _add_some(self) -> None:
        """Start the next workers to be added: few at a time, as each start stops the loop."""
        for _ in range(min(_ADDED_AT_ONCE, len(self._to_add))):
            worker_id = self._to_add.popleft()
            try:
                self._backend.add_worker(worker_id)
            except (OSError, RuntimeError, ConfigError) as error:
                # No memory, files or threads are left.
                reason = f"it could not be started: {type(error).__name__}: {error}"
                self._carry_out(self._scheduler.handle(WorkerLost(worker_id, reason)))
            else:
                self._present.add(worker_id)

    def _abandon(self, worker_id: int, reason: str) -> None:
        self._present.discard(worker_id)
        warnings.warn(
            f"worker {worker_id}, which was to be added, never got to work, and training goes on "
            f"without it: {reason}",
            RuntimeWarning,
            stacklevel=users_level(),
        )

    def _give(self, delivery: Deliver) -> Any:  # noqa: ANN401 - any batch tree
        outcome: TaskResult = delivery.outcome
        progress, step, worker_id = self._epoch.progress, delivery.step, delivery.worker_id
        num_failed = self._record(outcome.bad, step, worker_id) if outcome.bad else 0
        try:
            batch = outcome.batch() if self._hook is None else self._deliver(delivery, self._hook)
        except BaseException as error:
            progress.fail(step, worker_id, outcome.position)
            if isinstance(error, TooManyFailures):
                self.close()
            if isinstance(error, StopIteration):
                self._refuse_stop(error)
            raise
        self._count(step, worker_id, outcome.position, outcome.num_asked, num_failed)
        return batch

    def _deliver(self, delivery: Deliver, hook: DeliveryHook) -> Any:  # noqa: ANN401
        begun = self._begin_this(delivery, hook)
        if hook.begins_ahead:
            self._begin_ahead(hook)
        if begun is NO_BATCH:
            return begun
        return self._finish(begun, hook)

    def _begin_this(self, delivery: Deliver, hook: DeliveryHook) -> Any:  # noqa: ANN401
        step, outcome = delivery.step, delivery.outcome
        ahead, self._begun = self._begun, None
        if ahead is None or ahead[0] != step:
            batch = outcome.batch()
            return batch if batch is NO_BATCH else hook.begin(batch, self._namer(step))
        _, begun, error = ahead
        if error is None:
            return begun
        try:
            raise error
        finally:
            del ahead, error  # with its own traceback it would be a cycle

    def _begin_ahead(self, hook: DeliveryHook) -> None:
        """Begin the delivery of the next batch, if it has arrived."""
        if self._scheduler.peek() is None:
            try:
                with self._closed_on_error():
                    for event in self._backend.events(0.0):
                        self._handle(event)
            except Exception as error:
                # The loop gets the present batch all the same.
                self._overdue = error
            self._drop_frames_of_overdue()
            if self._overdue is not None:
                return
        found = self._scheduler.peek()
        if found is None or found[1].kind == Kind.FAILED:  # it is raised when it is asked for
            return
        step, outcome = found
        try:
            with hook.without_autograd():
                begun = outcome.batch()
                if begun is not NO_BATCH:
                    begun = hook.begin(begun, self._namer(step))
        except Exception as error:
            # It is raised with that batch, not with the one that is given now.
            self._begun = step, None, _without_frames(error, "begun ahead")
        except BaseException:  # see `_closed_on_error`
            self.close(in_a_hurry=True)
            raise
        else:
            self._begun = step, begun, None

    def _wait(self) -> Deliver | Finish | Fail | None:
        events = self._backend.events(self._plan.timeout_s or None)
        while not events and (left_s := self._on_timeout()):
            events = self._backend.events(left_s)
        answer = None
        for event in events:
            answer = self._handle(event) or answer
        return answer

    def _handle(self, event: Event) -> Deliver | Finish | Fail | None:
        ahead = self._ahead
        if ahead is not None:
            if isinstance(event, TaskDone) and event.outcome.generation == ahead.generation:
                ahead.scheduler.handle(event)
                return None
            if isinstance(event, WorkerLost):  # its replacement has to begin this epoch first
                self._ahead = None
                self._backend.drop_ahead()
        if isinstance(event, WorkerExhausted) and event.result.num_asked:
            # Bad samples at the end of the shard, which belong to no batch.
            num_failed = self._record(event.result.bad, event.step, event.worker_id)
            progress = self._epoch.progress
            with self._closed_on_error():
                progress.counted = self._faults.spend(
                    progress.counted, event.result.num_asked, num_failed, self._epoch
                )
        return self._carry_out(self._scheduler.handle(event))

    def _on_timeout(self) -> float:
        """Kill the awaited worker, if it is stuck and another may take its place.

        One that has moved on within the time, to another sample or another task, is slow: a new one
        would take as long for its batch, so it is waited for.

        Returns:
            Seconds to wait until it counts as stuck; 0.0 if it was killed.

        Raises:
            WorkerTimeout: no other may take its place. The message holds the worker's stacks.
        """
        timeout_s, worker_id = self._plan.timeout_s, self._scheduler.awaited_worker
        is_replaced = self._plan.spec.faults.max_respawns > 0
        progress = WorkerProgress("")
        if worker_id is not None:
            progress = self._backend.diagnose(worker_id, with_stacks=not is_replaced)
        still_s = timeout_s if progress.still_s is None else progress.still_s
        is_slow = still_s < timeout_s * _MOVES_ON  # else it may as well have got stuck meanwhile
        if worker_id is not None and is_replaced:
            if is_slow:
                self._warn_of_slow_batch(worker_id, progress.pace or progress.words)
            if still_s < timeout_s:
                return timeout_s - still_s
            why = f"no batch came within timeout={timeout_s} seconds"
            self._backend.kill(worker_id, why)
            return 0.0
        message = (
            f"DataLoader timed out after {timeout_s} seconds: no batch came from "
            f"{self._plan.num_workers} workers. "
        )
        if is_slow and progress.pace:
            message += (
                f"The batch is slow, and its worker is not stuck: {progress.pace}. Raise `timeout` "
                "or lower batch_size."
            )
        else:
            message += (
                "Raise `timeout`, or look for a sample that takes that long. A FaultPolicy with "
                "max_respawns would replace the stuck worker."
            )
        if worker_id is not None:
            steps = self._scheduler.steps_of(worker_id)
            message += (
                f"\nWorker {worker_id} holds steps {steps}; it was last seen {progress.words}"
            )
        raise WorkerTimeout(message)

    def _warn_of_slow_batch(self, worker_id: int, pace: str) -> None:
        if self._has_warned_of_slow_batch:
            return
        self._has_warned_of_slow_batch = True
        warnings.warn(
            f"no batch came within timeout={self._plan.timeout_s} seconds, as worker {worker_id} "
            f"is slow and not stuck: {pace}. It is waited for; one that takes so long over a "
            "single sample is replaced. Raise `timeout` or lower batch_size.",
            RuntimeWarning,
            stacklevel=users_level(),
        )

    def _carry_out(self, decisions: list[Decision]) -> Deliver | Finish | Fail | None:
        """Carry out decisions; return the answer to the open request, if it is among them."""
        answer: Deliver | Finish | Fail | None = None
        left = decisions
        while left:
            decision, left = left[0], left[1:]
            if isinstance(decision, Submit):
                self._submit(decision)
            elif isinstance(decision, Draw):
                left = self._draw() + left
            elif isinstance(decision, Respawn):
                self._faults.note_respawn(decision.reason, self._epoch)
                if self._observer is not None:
                    self._observer.worker_replaced()
                self._backend.respawn(decision.worker_id)
            elif isinstance(decision, AddWorker):
                self._to_add.append(decision.worker_id)
            elif isinstance(decision, AbandonWorker):
                self._abandon(decision.worker_id, decision.reason)
            elif isinstance(decision, RemoveWorker):
                self._remove(decision.worker_id)
            elif isinstance(decision, Quarantine):
                self._faults.quarantined[decision.sample] = decision.reason, decision.advice
            else:
                answer = decision
        return answer

    def _remove(self, worker_id: int) -> None:
        if worker_id in self._to_add:
            self._to_add.remove(worker_id)
        else:
            self._present.remove(worker_id)
            self._backend.remove_worker(worker_id)

    def _submit(self, task: Submit, generation: int | None = None) -> None:
        quarantined = self._faults.quarantined
        hints = None
        if task.alone or quarantined:
            known = tuple((sample, *how) for sample, how in quarantined.items())
            hints = RetryHints(task.alone, known)
        observer = self._observer
        # With a timeout, the times of its samples distinguish a slow worker from a stuck one.
        is_measured = self._plan.timeout_s > 0 or (observer is not None and observer.measures)
        self._backend.measures = is_measured
        whose = {} if generation is None else {"generation": generation}
        self._backend.submit(task.worker_id, task.step, task.indices, hints, **whose)

    def _draw(self) -> list[Decision]:
        """Return what follows from the next indices; an error of the sampler is kept for `_next`.

        It is not raised here: a decision that came with this one would be lost.
        """
        if self._overdue is not None:
            return []
        event: Event
        try:
            event = IndicesDrawn(next(self._indices))
        except StopIteration:
            event = IndicesExhausted()
            self._begin_ahead_of_end()
        except Exception as error:
            self._overdue = error
            return []
        return self._scheduler.handle(event)

    def _death_message(self, failure: Fail) -> str:
        steps = self._scheduler.steps_of(failure.worker_id)
        held = f" It held steps {steps}." if steps else ""
        before = self._faults.on_respawns(self._epoch)
        return f"{failure.reason}, epoch {self._epoch.number}.{held}{before} {failure.advice}"

    def _release(self, *, in_a_hurry: bool) -> None:
        self._begun = self._overdue = self._ahead = None
        self._to_add.clear()
        self._scheduler = Scheduler(1, 0)  # the old one holds batches that are not wanted
        self._backend.close(in_a_hurry=in_a_hurry)


def _without_frames(error: Exception, when: str) -> Exception:
    """Return `error` with its traceback as text: frames would keep the stream that holds it."""
    annotate(error, f"{when}, at\n{''.join(traceback.format_tb(error.__traceback__))}")
    return error.with_traceback(None)
