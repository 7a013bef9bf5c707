# SPDX-License-Identifier: Apache-2.0
"""The stream of batches that workers make: carries out the scheduler's decisions on a backend."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import traceback
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.dataset import reads_in_turn
from penstock.engine import scheduler
from penstock.engine.backends import Backend, open_backend
from penstock.engine.plan import RetryHints
from penstock.engine.recover import NO_BATCH
from penstock.engine.stream import BatchStream
from penstock.engine.task import Kind, Task
from penstock.engine.timing import WorkerSettings
from penstock.errors import ConfigError, WorkerDied, WorkerTimeout
from penstock.faults import annotate
from penstock.forks import Owner
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.engine.plan import Epoch, Plan
    from penstock.engine.stream import DeliveryHook
    from penstock.engine.task import TaskResult
    from penstock.insight.monitor import Monitor

_ADDED_AT_ONCE: Final = 2  # per batch; a fork of a large process takes tens of milliseconds
_DEEPEST: Final = 3  # a transform of a part of a dataset


@dataclasses.dataclass
class _EpochAhead:
    """The next epoch, whose first tasks workers do while the last batches of this one are taken.

    Attributes:
        epoch: Epoch as it is foreseen; None once a worker has died, whose successor lacks its
            tasks.
        generation: Generation of its tasks and results.
        tasks: First steps, one for each worker, that are not sent yet.
        sent: Those that are.
        events: Batches that have come.
    """

    epoch: Epoch | None
    generation: int
    tasks: Iterator[tuple[int, Any]]
    sent: list[tuple[int, Any]] = dataclasses.field(default_factory=list)
    events: list[scheduler.TaskDone] = dataclasses.field(default_factory=list)


def _comparable(epoch: Epoch, tasks: list[tuple[int, Any]]) -> tuple[Any, ...]:
    first = [(step, *of[1:], np.asarray(of.indices).tolist()) for step, of in tasks]
    return epoch.number, epoch.is_announced, epoch.progress.given, first


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

    def _prepare(self, plan: Plan) -> None:
        self._ahead_begun: tuple[int, object] | None = None  # a step, and what the hook began
        self._overdue: list[Exception] = []  # raised with the next call
        self._ahead: _EpochAhead | None = None
        self._may_begin_ahead = (
            plan.backend == "process"  # threads see at once what is set in the dataset
            and plan.keep_workers
            and not plan.max_workers
            and not _holds_shared_state(plan.spec.dataset)
        )
        self._wanted = self._workers = WorkerSettings(plan.num_workers, plan.prefetch_factor)
        self._has_warned_of_slow_batch = False
        self._owner = Owner()  # of the workers
        self.backend: Backend

    def _open(self) -> None:
        if self._is_open and not (self._owner.is_here and self.backend.is_whole):
            # A worker died after the last batch that was asked for; or this is a forked copy, which
            # needs workers of its own.
            self.close()
        if not self._is_open:
            plan = dataclasses.replace(self._plan, **self._wanted._asdict())
            self._owner = Owner()
            self.backend = open_backend(plan)
            self.backend.start()
            self._scheduler = scheduler.Scheduler(plan.num_workers, 0)

    def _begin(self, epoch: Epoch) -> None:
        self._ahead_begun = None
        self._overdue.clear()
        self._tasks: Iterator[tuple[int, object]] = epoch.tasks()
        # The last epoch may have ended before all workers were added or removed.
        present, wanted = self._scheduler.present, set(range(self._wanted.num_workers))
        for worker_id in present - wanted:
            self.backend.remove_worker(worker_id)
        for worker_id in sorted(wanted - present):
            self.backend.add_worker(worker_id)
        self._workers = self._wanted
        ahead = self._adopted_ahead(epoch)
        if ahead is None:
            self._generation = self.backend.begin_epoch(epoch)
        plan, given = self._plan, epoch.progress.given
        num_workers, prefetch_factor = self._wanted
        # With a seed it shows nowhere which worker makes a batch, but of a stream.
        is_alike = plan.spec.seed is not None and not plan.spec.is_iterable
        is_alike = is_alike and not reads_in_turn(plan.spec.dataset)
        any_worker = is_alike or bool(plan.max_workers)
        turn = given.turn if plan.spec.is_iterable else given.num_steps
        self._scheduler = scheduler.Scheduler(
            num_workers,
            num_workers * prefetch_factor,
            in_order=plan.in_order,
            any_worker=any_worker,
            starting=self.backend.await_start() if any_worker else (),
            first_step=given.num_steps,
            first_worker=turn % num_workers,
            max_respawns=plan.spec.faults.max_respawns,
            can_quarantine=plan.spec.faults.tolerates,
        )
        decisions = self._scheduler.refill()
        if ahead is not None:
            for task in ahead.sent:
                self._scheduler.drawn(*task)  # to the worker that has it
            del decisions[: len(ahead.sent)]
            for event in ahead.events:
                self._scheduler.handle(event)
        self._carry_out(decisions)
        if self._overdue:
            raise self._overdue.pop()

    def _adopted_ahead(self, epoch: Epoch) -> _EpochAhead | None:
        """Go on in `epoch` if it was begun ahead as foreseen; return None if it was not."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.epoch is None:
            return None
        drawn = list(itertools.islice(self._tasks, len(ahead.sent)))
        if _comparable(epoch, drawn) != _comparable(ahead.epoch, ahead.sent):
            self._tasks = itertools.chain(drawn, self._tasks)
            self._may_begin_ahead = False  # a loop that chose an epoch does so again
            return None
        self.backend.adopt_ahead(ahead.generation, epoch)
        self._generation = ahead.generation
        return ahead

    def _begin_ahead_of_end(self) -> None:
        """Begin the next epoch if that is possible, as all steps of this one are drawn."""
        following = self.epoch.following
        if following is None or not self._may_begin_ahead or self._ahead is not None:
            return
        epoch = None
        with contextlib.suppress(Exception):  # it is raised when that epoch begins
            epoch = following()
        if epoch is not None:
            first = itertools.islice(epoch.tasks(), self._wanted.num_workers)
            self._ahead = _EpochAhead(epoch, self.backend.begin_ahead(epoch), first)

    def _send_ahead(self, ahead: _EpochAhead) -> None:
        """Give a worker a step of the next epoch, in the place of the batch that was taken."""
        for step, indices in itertools.islice(ahead.tasks, 1):
            ahead.sent.append((step, indices))
            # The scheduler of that epoch begins with worker 0, and goes round once.
            self._submit(scheduler.Submit(step, step, indices), ahead.generation)

    def _next(self) -> Any:  # noqa: ANN401 - any batch tree, or NO_BATCH
        if self._overdue:
            raise self._overdue.pop()
        if self._is_over:
            raise StopIteration
        if not self._owner.is_here:
            raise WorkerDied(
                f"this iterator's workers belong to the process that began it (pid "
                f"{self._owner.pid}), not to this forked one (pid {os.getpid()}): iterate the "
                "loader anew here."
            )
        observer = self._observer
        num_ready = len(self._scheduler.done) if observer is not None and observer.measures else 0
        try:
            answer = self._carry_out(self._scheduler.request())
            while answer is None and not self._overdue:
                answer = self._wait()
            if self._ahead is not None and isinstance(answer, scheduler.Deliver):
                self._send_ahead(self._ahead)
        except WorkerTimeout:
            raise
        except Exception:  # see `_closed_on_error`; this is the hot path
            self.close()
            raise
        if self._overdue:
            if isinstance(answer, scheduler.Deliver):  # it is lost: the sampler raised in its place
                step, worker_id, outcome, _ = answer
                self._record(outcome.bad, step, worker_id)
                self.epoch.progress.failed.append((step, worker_id, outcome.position))
            raise self._overdue.pop()
        if isinstance(answer, scheduler.Deliver):
            batch = self._give(answer.step, answer.worker_id, answer.outcome)
            if observer is not None and batch is not NO_BATCH:
                self._tell(observer, answer, num_ready)
            return batch
        if isinstance(answer, scheduler.Fail):
            self._is_over = True
            message = self._death_message(answer)
            self.close()
            raise WorkerDied(message)
        self._end()
        raise StopIteration

    def _tell(self, observer: Monitor, delivery: scheduler.Deliver, num_ready: int) -> None:
        _, worker_id, made, indices = delivery
        num_workers, prefetch_factor = self._wanted
        lookahead = num_workers * prefetch_factor
        if observer.measures:
            num_workers = min(num_workers, self._scheduler.num_at_work)
        wanted = self._observe(
            observer, made, indices, worker_id, num_ready, num_workers, lookahead
        )
        self._wanted = wanted or self._wanted
        # Beginning the next batch may have closed the stream; this batch is given all the same.
        if self._is_open and self._workers != self._wanted:
            with self._closed_on_error():
                # Few are added at a time: the loop stands still at each start.
                num_workers, prefetch_factor = self._wanted
                num_workers = min(num_workers, self._workers.num_workers + _ADDED_AT_ONCE)
                self._workers = WorkerSettings(num_workers, prefetch_factor)
                lookahead = num_workers * prefetch_factor
                self._carry_out(self._scheduler.change_workers(num_workers, lookahead))
                self._overdue[:] = map(_without_frames, self._overdue)

    def _begun(self, step: int, outcome: TaskResult, hook: DeliveryHook) -> Any:  # noqa: ANN401
        ahead, self._ahead_begun = self._ahead_begun, None
        if ahead is not None and ahead[0] == step:
            begun = ahead[1]
        else:
            begun = super()._begun(step, outcome, hook)
        if hook.begins_ahead:
            self._begin_next(hook)
        return begun

    def _begin_next(self, hook: DeliveryHook) -> None:
        """Begin the delivery of the next batch, if it has arrived."""
        if self._scheduler.peek() is None:
            try:
                with self._closed_on_error():
                    for event in self.backend.events(0.0):
                        self._handle(event)
            except Exception as error:  # the loop gets the batch that is there all the same
                self._overdue.append(error)
            self._overdue[:] = map(_without_frames, self._overdue)
        found = self._scheduler.peek()
        if found is None or found[1].kind == Kind.FAILED:  # it is raised when it is asked for
            return
        step, outcome = found
        try:
            with hook.without_autograd():
                begun = super()._begun(step, outcome, hook)
        except Exception as error:  # it is raised with that batch, not with this one
            outcome.kind, outcome.payload = Kind.FAILED, _without_frames(error)
        else:
            self._ahead_begun = step, begun

    def _wait(self) -> scheduler.Answer | None:
        events = self.backend.events(self._plan.timeout_s or None)
        while not events and (left_s := self._on_timeout()):
            events = self.backend.events(left_s)
        answer = None
        for event in events:
            answer = self._handle(event) or answer
        return answer

    def _handle(self, event: scheduler.BackendEvent) -> scheduler.Answer | None:
        ahead = self._ahead
        if ahead is not None and isinstance(event, scheduler.TaskDone):
            if event.outcome.generation == ahead.generation:
                ahead.events.append(event)
                return None
        elif ahead is not None and isinstance(event, scheduler.WorkerLost):
            ahead.epoch, ahead.tasks = None, iter(())
        if isinstance(event, scheduler.WorkerExhausted):
            self._count_rest(event.result, event.worker_id)
        return self._carry_out(self._scheduler.handle(event))

    def _on_timeout(self) -> float:
        """Kill the awaited worker if it is stuck; else return the seconds until it counts as that.

        One that has moved on within the time, to another sample or another task, is slow: a new one
        would take as long for its batch, so it is waited for.

        Raises:
            WorkerTimeout: no other may take its place. The message holds the worker's stacks.
        """
        timeout_s, worker_id = self._plan.timeout_s, self._scheduler.awaited_worker
        is_replaced = self._plan.spec.faults.max_respawns > 0
        progress = self.backend.diagnose(worker_id, with_stacks=not is_replaced)
        still_s = timeout_s if progress.still_s is None else progress.still_s
        none_came = f"no batch came within timeout={timeout_s} seconds"
        if not is_replaced:
            raise WorkerTimeout(
                f"DataLoader timed out after {timeout_s} seconds: no batch came from "
                f"{self._plan.num_workers} workers. Raise `timeout` if the batch is slow, or look "
                "for a sample that takes that long. A FaultPolicy with max_respawns would replace "
                f"a stuck worker.\nWorker {worker_id} holds steps "
                f"{self._scheduler.steps_of(worker_id)}; it was last seen {progress.words}"
            )
        if still_s >= timeout_s:
            self.backend.kill(worker_id, none_came)
            return 0.0
        if still_s < timeout_s / 2 and not self._has_warned_of_slow_batch:  # else it may be stuck
            self._has_warned_of_slow_batch = True
            warn_user(
                f"{none_came}, as worker {worker_id} is slow and not stuck: it was last seen "
                f"{progress.words}. It is waited for; one that takes so long over a single sample "
                "is replaced. Raise `timeout` or lower batch_size.",
                RuntimeWarning,
            )
        return timeout_s - still_s

    def _carry_out(self, decisions: list[scheduler.Decision]) -> scheduler.Answer | None:
        """Carry out decisions; return the answer to the open request, if it is among them."""
        answer: scheduler.Answer | None = None
        left = decisions
        while left:
            decision, left = left[0], left[1:]
            if isinstance(decision, scheduler.Submit):
                self._submit(decision, self._generation)
            elif isinstance(decision, scheduler.Draw):
                left = self._draw() + left
            elif isinstance(decision, scheduler.Respawn):
                self._faults.note_respawn(decision.reason, self.epoch)
                if self._observer is not None:
                    self._observer.worker_replaced()
                self.backend.respawn(decision.worker_id)
            elif isinstance(decision, scheduler.AddWorker):
                left = self._add(decision.worker_id) + left
            elif isinstance(decision, scheduler.RemoveWorker):
                self._remove(decision)
            elif isinstance(decision, scheduler.Quarantine):
                self._faults.quarantined[decision.sample] = decision.reason, decision.advice
            else:
                answer = decision
        return answer

    def _add(self, worker_id: int) -> list[scheduler.Decision]:
        try:
            self.backend.add_worker(worker_id)
        except (OSError, RuntimeError, ConfigError) as error:
            # No memory, files or threads are left.
            reason = f"it could not be started: {type(error).__name__}: {error}"
            return self._scheduler.handle(scheduler.WorkerLost(worker_id, reason))
        return []

    def _remove(self, removal: scheduler.RemoveWorker) -> None:
        if not removal.reason:
            self.backend.remove_worker(removal.worker_id)
            return
        warn_user(
            f"worker {removal.worker_id}, which was to be added, never got to work, and training "
            f"goes on without it: {removal.reason}",
            RuntimeWarning,
        )

    def _submit(self, submit: scheduler.Submit, generation: int) -> None:
        worker_id, step, indices, alone = submit
        quarantined = self._faults.quarantined
        hints = None
        if alone or quarantined:
            known = tuple((sample, *how) for sample, how in quarantined.items())
            hints = RetryHints(alone, known)
        observer = self._observer
        # With a timeout, the times of its samples distinguish a slow worker from a stuck one.
        is_measured = self._plan.timeout_s > 0 or (observer is not None and observer.measures)
        takes_state = self._takes_state(step)
        task = Task(generation, step, indices, hints, is_measured, takes_state)
        self.backend.submit(worker_id, task)

    def _takes_state(self, step: int) -> bool:
        """Return whether the worker is to report its states with a step."""
        return False

    def _draw(self) -> list[scheduler.Decision]:
        """Return what follows from the next step; an error of the sampler is kept for `_next`.

        It is not raised here: a decision that came with this one would be lost.
        """
        if self._overdue:
            return []
        try:
            step, indices = next(self._tasks)
        except StopIteration:
            self._begin_ahead_of_end()
            return self._scheduler.drained()
        except Exception as error:
            self._overdue.append(error)
            return []
        return self._scheduler.drawn(step, indices)

    def _death_message(self, failure: scheduler.Fail) -> str:
        steps = self._scheduler.steps_of(failure.worker_id)
        held = f" It held steps {steps}." if steps else ""
        num_deaths, most = self.epoch.progress.num_deaths, self._plan.spec.faults.max_respawns
        before = f" Before it, {num_deaths} died and were replaced, of max_respawns={most}."
        before = before if num_deaths else ""
        return f"{failure.reason}, epoch {self.epoch.number}.{held}{before} {failure.advice}"

    def _release(self, *, in_a_hurry: bool) -> None:
        self._ahead_begun = self._ahead = None
        self._overdue.clear()
        self._scheduler = scheduler.Scheduler(1, 0)  # the old one holds batches that are not wanted
        self.backend.close(in_a_hurry=in_a_hurry)


def _without_frames(error: Exception) -> Exception:
    """Return `error` with its traceback as text: frames would keep the stream that holds it."""
    annotate(error, f"raised at\n{''.join(traceback.format_tb(error.__traceback__))}")
    return error.with_traceback(None)
