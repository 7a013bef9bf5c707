# SPDX-License-Identifier: Apache-2.0
"""Which step goes to which worker, and which batch comes next: a pure state machine.

No queue, process, clock or lock in here. Events go in, decisions come out, at once:

    driver                                 Scheduler
    start() ─────────────────────────────▶ [Draw] * lookahead
    IndicesDrawn(indices) ───────────────▶ [Submit(worker, step, indices)]
    IndicesExhausted() ──────────────────▶ [] or [Finish]
    WorkerReady(worker) ─────────────────▶ [Draw] …           (one that was starting can begin)
    WorkersChanged(count, lookahead) ────▶ [AddWorker(worker)] [Draw] … [RemoveWorker(worker)]
    Requested()   (the user wants one) ──▶ [] or [Draw, Deliver(step, outcome)] or [Finish]
    TaskDone(worker, step, outcome) ─────▶ [] or [Draw, Deliver(step, outcome)]
    WorkerExhausted(worker, step) ───────▶ [Draw] …           (an iterable's shard is exhausted)
    WorkerLost(newcomer, reason …) ──────▶ [AbandonWorker(worker)]  (that was not ready yet)
    WorkerLost(worker, reason …) ────────▶ [Quarantine(sample)] [Respawn(worker), Submit …]
                                           or [Fail(reason)]      (what is ready is delivered first)

Guarantees
    Every step is delivered once, in the order of steps if `in_order`, unless the worker that owns
    it ran out of data, or the epoch fails.
    A dead worker's steps go to the one that takes its place, in the same order, `max_respawns`
    times. One death proves nothing. A sample that a worker had in its hands when it died is
    quarantined at the second one (`limit`), and the step goes on without it. Where only the batch
    is known, its samples are tried alone; then the batch's deaths count for each of them. A batch
    whose samples all pass alone, and that still kills, ends the epoch.
    Steps go round the active workers in turn, whatever their speed. So which worker makes which
    batch, and hence what its generators draw, is the same in every run, and the same as torch's
    loader does it. Only where nothing depends on the worker (`any_worker`) the one with the least
    to do gets the next step. A new index is drawn per delivered batch, not earlier: a sampler that
    draws from a shared generator sees the same moments as under torch.
    Workers are numbered from 0. If there are to be fewer, the first ones stay: the others get no
    new steps and are removed once they have answered what they hold. One that is added gets its
    first step when it is ready, so that no step waits for a process to start; one that never gets
    there is abandoned, and costs nothing. Only where any worker may make any step can their number
    change. There no step waits for a worker in `starting`, even one that never comes up. At most
    one request is open at a time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable

__all__ = [
    "AbandonWorker",
    "AddWorker",
    "BackendEvent",
    "Decision",
    "Deliver",
    "Draw",
    "Event",
    "Fail",
    "Finish",
    "IndicesDrawn",
    "IndicesExhausted",
    "Quarantine",
    "RemoveWorker",
    "Requested",
    "Respawn",
    "Scheduler",
    "Submit",
    "TaskDone",
    "WorkerExhausted",
    "WorkerLost",
    "WorkerReady",
    "WorkersChanged",
]


class IndicesDrawn(NamedTuple):
    """The sampler gave the indices of one more batch."""

    indices: object


@dataclass(frozen=True, slots=True)
class IndicesExhausted:
    """The sampler has no more."""


@dataclass(frozen=True, slots=True)  # not an empty NamedTuple, which would be false
class Requested:
    """The user asked for the next batch."""


class TaskDone(NamedTuple):
    """A worker made a batch, or failed to; `outcome` says which and is handed through unread."""

    worker_id: int
    step: int
    outcome: Any


class WorkerExhausted(NamedTuple):
    """A worker's shard of an iterable dataset ended before `step`; it answers no later step.

    `result` says what its last samples cost, and is not read here.
    """

    worker_id: int
    step: int
    result: Any = None


class WorkerLost(NamedTuple):
    """A worker is gone.

    Attributes:
        worker_id: Which.
        reason: How it ended.
        advice: What to do about it.
        step: The step that it was making; None if it was not making any.
        or_steps: Others that it may have been making instead, where that is not known.
        sample: Key of the one sample that it was at; None if it was not at a single one.
        limit: With how many deaths a sample is to blame.
        counts: Whether it counts against `max_respawns`; not if something outside of the worker is
            to blame: its machine has gone, say.
    """

    worker_id: int
    reason: str
    advice: str = ""
    step: int | None = None
    sample: Hashable | None = None
    limit: int = 2
    counts: bool = True
    or_steps: tuple[int, ...] = ()


class WorkerReady(NamedTuple):
    """A worker that was added can begin."""

    worker_id: int


class WorkersChanged(NamedTuple):
    """From here on there are to be this many workers.

    Attributes:
        num_workers: At least 1.
        lookahead: Steps under way at a time, over all of them.
    """

    num_workers: int
    lookahead: int


BackendEvent = TaskDone | WorkerExhausted | WorkerLost | WorkerReady
Event = BackendEvent | IndicesDrawn | IndicesExhausted | Requested | WorkersChanged


@dataclass(frozen=True, slots=True)
class Draw:
    """Take the next indices from the sampler: `IndicesDrawn` or `IndicesExhausted` answers."""


class Submit(NamedTuple):
    """Send this task to this worker; `alone`: its samples are first to be tried one by one."""

    worker_id: int
    step: int
    indices: object
    alone: bool = False


class Respawn(NamedTuple):
    """Start another worker in the place of this dead one."""

    worker_id: int
    reason: str = ""


class AddWorker(NamedTuple):
    """Start one worker more."""

    worker_id: int


class RemoveWorker(NamedTuple):
    """Stop a worker; it has no tasks."""

    worker_id: int


class AbandonWorker(NamedTuple):
    """Go on without a worker that was added and could not be started."""

    worker_id: int
    reason: str


class Quarantine(NamedTuple):
    """Never make this sample again: it ends workers."""

    sample: Hashable
    reason: str
    advice: str = ""


class Deliver(NamedTuple):
    """Give this outcome of this worker to the user: it answers the open request."""

    step: int
    worker_id: int
    outcome: Any
    indices: object = None


@dataclass(frozen=True, slots=True)
class Finish:
    """The epoch is over: it answers the open request."""


class Fail(NamedTuple):
    """The epoch cannot go on."""

    worker_id: int
    reason: str
    advice: str = ""


Decision = (
    Draw
    | Submit
    | Deliver
    | Finish
    | Fail
    | Respawn
    | Quarantine
    | AddWorker
    | RemoveWorker
    | AbandonWorker
)

_DRAW: Final = Draw()


class Scheduler:
    """Schedules the steps of one epoch, whose state is all in here; a new epoch takes a new one."""

    def __init__(
        self,
        num_workers: int,
        lookahead: int,
        *,
        in_order: bool = True,
        any_worker: bool = False,
        first_step: int = 0,
        first_worker: int = 0,
        skipped: Collection[int] = (),
        max_respawns: int = 0,
        can_quarantine: bool = False,
        starting: Collection[int] = (),
    ) -> None:
        """Begin an epoch, or go on in one.

        Args:
            num_workers: Workers that take tasks, at least 1.
            lookahead: Steps drawn before the first request. 0: each is drawn when it is asked for,
                as a loader without workers does.
            in_order: Whether batches leave in the order of their steps, or as they come.
            any_worker: Whether a step may go to whoever has the least to do.
            first_step: Number of the first step to be drawn.
            first_worker: Whose turn it is.
            skipped: Later steps that are drawn but not made.
            max_respawns: How many dead workers are replaced.
            can_quarantine: Whether the epoch goes on without a sample that kills workers.
            starting: Workers that have not started yet, and get their first step when they are
                ready; only with `any_worker` and a `lookahead`.
        """
        self._num_workers = num_workers
        self._lookahead = lookahead
        self._in_order = in_order
        self._any_worker = any_worker
        self._skipped = frozenset(skipped)
        self._next_step = first_step  # the step that the next indices become
        self._next_worker = first_worker
        self._head = first_step  # every step before it is delivered or abandoned
        self._owner: dict[int, int] = {}  # step -> worker, for steps that are not delivered
        # step -> (outcome, indices), in order of arrival
        self._done: dict[int, tuple[object, object]] = {}
        self._present = set(range(num_workers))  # those that are leaving included
        self._starting = set(starting)  # not ready yet
        self._joining: set[int] = set()  # those of them that were added in mid-epoch
        self._active = [True] * num_workers
        self._load = [0] * num_workers  # steps submitted to each worker and not delivered
        self._unanswered = [0] * num_workers  # … and not answered
        # Steps under way at a time, for now.
        self._target = lookahead - lookahead // num_workers * len(self._starting)
        self._surplus = 0  # steps under way beyond that, as it has been lowered
        self._drained = False
        self._requested = False
        self._failure: Fail | None = None
        self._tasks: dict[int, object] = {}  # step -> indices, for steps that are not answered
        self._respawns_left = max_respawns
        self._can_quarantine = can_quarantine
        self._deaths_at: Counter[int] = Counter()  # by step, where no single sample was known
        self._deaths_of: Counter[Hashable] = Counter()  # by sample

    def start(self) -> list[Decision]:
        """Return what to do before the first request."""
        return [_DRAW] * self._target

    @property
    def awaited_worker(self) -> int | None:
        """The worker whose answer, or start, the user waits for; None if there is none."""
        waiting = (w for s, w in self._owner.items() if s not in self._done and self._active[w])
        return next(waiting, next(iter(self._starting), None))

    @property
    def num_pending(self) -> int:
        """Steps that were submitted and neither delivered nor abandoned."""
        return len(self._owner)

    @property
    def num_at_work(self) -> int:
        """Workers that are ready, of those that are to be."""
        return self._num_workers - len(self._starting)

    @property
    def num_ready(self) -> int:
        """Steps that were answered and not delivered."""
        return len(self._done)

    def peek(self) -> tuple[int, Any] | None:
        """Return step and outcome of what the next request is going to get, if it is there."""
        self._skip_abandoned()
        step = self._deliverable()
        return None if step is None else (step, self._done[step][0])

    def steps_of(self, worker_id: int) -> list[int]:
        """Return the steps that this worker holds and has not answered."""
        if not self._active[worker_id]:
            return []
        return [s for s, w in self._owner.items() if w == worker_id and s not in self._done]

    def handle(self, event: Event) -> list[Decision]:
        """Return what follows from `event`, to be carried out in this order."""
        return _HANDLERS[type(event)](self, event)

    def _on_done(self, event: TaskDone) -> list[Decision]:
        self._unanswered[event.worker_id] -= 1
        indices = self._tasks.pop(event.step, None)
        if event.step in self._owner:  # else: abandoned, its worker was said to have no more
            self._done[event.step] = event.outcome, indices
        if event.worker_id < self._num_workers:
            return self._answer()
        return [*self._remove_idle(), *self._answer()]

    def _on_request(self, _: Requested) -> list[Decision]:
        self._requested = True
        if self._lookahead == 0 and not self._owner and not self._drained:
            return [_DRAW]
        return self._answer()

    def _on_indices(self, event: IndicesDrawn) -> list[Decision]:
        if self._next_step in self._skipped:
            self._next_step += 1
            return [_DRAW]
        return [self._assign(event.indices), *self._answer()]

    def _on_no_indices(self, _: IndicesExhausted) -> list[Decision]:
        self._drained = True
        return self._answer()

    def _on_exhausted(self, event: WorkerExhausted) -> list[Decision]:
        self._active[event.worker_id] = False
        self._drained = self._drained or not any(self._active)
        # The answer waits for the draw: what is drawn may be the epoch's only open step.
        return self._draw() or self._answer()

    def _on_workers_changed(self, event: WorkersChanged) -> list[Decision]:
        wanted = range(event.num_workers)
        added = [w for w in wanted if w not in self._present]
        num_new = max(event.num_workers - len(self._active), 0)
        self._active += [True] * num_new
        self._load += [0] * num_new
        self._unanswered += [0] * num_new
        self._present.update(added)
        self._starting.update(added)
        self._joining.update(added)
        self._num_workers, self._lookahead = event.num_workers, event.lookahead
        self._starting.intersection_update(wanted)
        self._joining.intersection_update(wanted)
        removals = self._remove_idle()
        return [*map(AddWorker, added), *self._draw_to_target(), *removals]

    def _on_ready(self, event: WorkerReady) -> list[Decision]:
        self._starting.discard(event.worker_id)
        self._joining.discard(event.worker_id)
        return self._draw_to_target()

    def _draw_to_target(self) -> list[Decision]:
        """Draw what is to be under way now: the share of workers that are not ready has to wait.

        The others would do it all by themselves, and the newcomers find nothing to do.
        """
        share = self._lookahead // self._num_workers
        target = self._lookahead - share * len(self._starting)
        more = target - self._target - self._surplus
        self._target, self._surplus = target, max(-more, 0)
        return [] if self._drained else [_DRAW] * max(more, 0)

    def _remove_idle(self) -> list[Decision]:
        leaving = [w for w in self._present if w >= self._num_workers and not self._unanswered[w]]
        self._present.difference_update(leaving)
        return list(map(RemoveWorker, leaving))

    def _on_death(self, event: WorkerLost) -> list[Decision]:
        if not self._active[event.worker_id]:
            return []  # it had given all it had
        if event.worker_id in self._joining:  # it has no steps, and its share stays withheld
            self._present.discard(event.worker_id)
            return [AbandonWorker(event.worker_id, event.reason)]
        is_guilty = self._count_death(event)
        may_respawn = self._respawns_left > 0 or not event.counts
        if self._failure is None and may_respawn and self._is_survivable(event, is_guilty):
            self._respawns_left -= event.counts
            quarantined = (
                [Quarantine(event.sample, event.reason, event.advice)] if is_guilty else []
            )
            held = self.steps_of(event.worker_id)
            again = [Submit(event.worker_id, s, self._tasks[s], s in self._deaths_at) for s in held]
            return [*quarantined, Respawn(event.worker_id, event.reason), *again]
        self._failure = self._failure or Fail(event.worker_id, event.reason, event.advice)
        return self._answer()

    def _count_death(self, event: WorkerLost) -> bool:
        """Return whether the death proves the sample bad."""
        if event.step is None:
            return False
        if event.sample is None:
            self._deaths_at.update((event.step, *event.or_steps))
            return False
        self._deaths_of[event.sample] += 1
        deaths = self._deaths_of[event.sample] + self._deaths_at.get(event.step, 0)
        return deaths >= event.limit

    def _is_survivable(self, event: WorkerLost, is_guilty: bool) -> bool:
        if is_guilty:
            return self._can_quarantine
        if event.step is None or event.sample is not None:
            return True
        return any(self._deaths_at[s] < event.limit for s in (event.step, *event.or_steps))

    def _draw(self) -> list[Decision]:
        return [] if self._drained or self._lookahead == 0 else [_DRAW]

    def _assign(self, indices: object) -> Submit:
        worker_id = self._worker_in_turn()
        step = self._next_step
        self._next_step += 1
        self._owner[step] = worker_id
        self._tasks[step] = indices
        self._load[worker_id] += 1
        self._unanswered[worker_id] += 1
        return Submit(worker_id, step, indices)

    def _worker_in_turn(self) -> int:
        if self._any_worker:
            ready = [w for w in range(self._num_workers) if w not in self._starting]
            return min(ready or range(self._num_workers), key=self._unanswered.__getitem__)
        for _ in range(self._num_workers):
            worker_id = self._next_worker
            self._next_worker = (worker_id + 1) % self._num_workers
            if self._active[worker_id] and (self._in_order or self._has_room(worker_id)):
                return worker_id
        active = [w for w in range(self._num_workers) if self._active[w]]
        return min(active, key=self._load.__getitem__)

    def _has_room(self, worker_id: int) -> bool:
        # Out of order a fast worker gets more than its turn, yet never all the work there is.
        return self._load[worker_id] < max(self._lookahead, 1) // sum(self._active)

    def _answer(self) -> list[Decision]:
        """Answer the open request, if there is one and it can be answered now."""
        if not self._requested:
            return []
        self._skip_abandoned()
        step = self._deliverable()
        if step is not None:
            self._requested = False
            worker_id = self._owner.pop(step)
            self._load[worker_id] -= 1
            draws = self._draw()
            if self._surplus:
                self._surplus -= 1
                draws = []
            return [*draws, Deliver(step, worker_id, *self._done.pop(step))]
        if self._failure is not None:
            return [self._failure]
        if self._head >= self._next_step and (self._drained or not self._starting):
            self._requested = False
            return [Finish()]
        return []

    def _skip_abandoned(self) -> None:
        while self._head < self._next_step:
            owner = self._owner.get(self._head)
            if owner is not None and (self._head in self._done or self._active[owner]):
                return
            self._owner.pop(self._head, None)
            self._tasks.pop(self._head, None)
            self._head += 1

    def _deliverable(self) -> int | None:
        if self._in_order:
            return self._head if self._head in self._done else None
        return next(iter(self._done), None)


# Of functions and not of bound methods, which would make a cycle of every Scheduler: batches that
# it holds would wait for a garbage collection.
_HANDLERS: Final[dict[type, Callable[[Scheduler, Any], list[Decision]]]] = {
    TaskDone: Scheduler._on_done,
    Requested: Scheduler._on_request,
    IndicesDrawn: Scheduler._on_indices,
    IndicesExhausted: Scheduler._on_no_indices,
    WorkerExhausted: Scheduler._on_exhausted,
    WorkerLost: Scheduler._on_death,
    WorkersChanged: Scheduler._on_workers_changed,
    WorkerReady: Scheduler._on_ready,
}
