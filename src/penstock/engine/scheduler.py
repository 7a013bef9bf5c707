# SPDX-License-Identifier: Apache-2.0
"""Which step goes to which worker, and which batch comes next: a pure state machine.

No queue, process, clock or lock in here. Events go in, decisions come out, at once:

    driver                                 Scheduler
    refill() ────────────────────────────▶ [Draw] * lookahead
    drawn(step, indices) ────────────────▶ [Submit(worker, step, indices)]
    drained()  (the sampler has no more) ─▶ [] or [Finish]
    change_workers(count, lookahead) ────▶ [AddWorker(worker)] [Draw] … [RemoveWorker(worker)]
    request()  (the user wants a batch) ──▶ [] or [Draw, Deliver(step, outcome)] or [Finish]
    handle(
      TaskDone(worker, step, outcome)) ───▶ [] or [Draw, Deliver(step, outcome)]
      WorkerReady(worker)) ───────────────▶ [Draw] …          (one that was starting can begin)
      WorkerExhausted(worker, step)) ─────▶ [Draw] …          (an iterable's shard is exhausted)
      WorkerLost(newcomer, reason …)) ────▶ [RemoveWorker(worker, reason)]  (not ready yet)
      WorkerLost(worker, reason …)) ──────▶ [Quarantine(sample)] [Respawn(worker), Submit …]
                                            or [Fail(reason)]  (what is ready is delivered first)

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

import itertools
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable


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
    """A worker that was added can begin; one that keeps states has begun.

    `result` says how that went, and is not read here.
    """

    worker_id: int
    result: Any = None


BackendEvent = TaskDone | WorkerExhausted | WorkerLost | WorkerReady


class Draw:
    """Take the next step from the sampler, and call `drawn` or `drained`."""


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
    """Stop a worker that has no tasks; `reason` says why one that was added never began."""

    worker_id: int
    reason: str = ""


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


class Finish:
    """The epoch is over: it answers the open request."""


class Fail(NamedTuple):
    """The epoch cannot go on."""

    worker_id: int
    reason: str
    advice: str = ""


Answer = Deliver | Finish | Fail  # to the open request
Decision = Answer | Draw | Submit | Respawn | Quarantine | AddWorker | RemoveWorker

_DRAW: Final = Draw()


class Scheduler:
    """The state machine of one epoch; each epoch has its own.

    Attributes:
        present: Numbers of the workers, including those that are to leave.
        done: Outcomes that were not delivered, by step, in order of arrival.
    """

    def __init__(
        self,
        num_workers: int,
        lookahead: int,
        *,
        in_order: bool = True,
        any_worker: bool = False,
        first_step: int = 0,
        first_worker: int = 0,
        max_respawns: int = 0,
        can_quarantine: bool = False,
        starting: Collection[int] = (),
    ) -> None:
        """Begin an epoch, or go on in one."""
        self.present = set(range(num_workers))
        self._num_workers = num_workers
        self._lookahead = lookahead
        self._in_order = in_order
        self._any_worker = any_worker
        self._next_worker = first_worker
        self._head = self._end = first_step  # steps before `_head` are done, `_end` is drawn next
        self._tasks: dict[int, tuple[int, object]] = {}  # step -> worker, indices; not delivered
        self.done: dict[int, Any] = {}
        # Workers that are not ready -> whether they were added in mid-epoch.
        self._starting = dict.fromkeys(starting, False)
        self._exhausted: set[int] = set()  # workers
        self._load: defaultdict[int, int] = defaultdict(int)  # each worker's unanswered steps
        self._target = 0  # steps under way at a time, for now
        self._credit = 0  # steps to be drawn; below 0 while more than the target are under way
        self._is_drained = False
        self._is_requested = False
        self._failure: Fail | None = None
        self._respawns_left = max_respawns
        self._can_quarantine = can_quarantine
        self._deaths_at: Counter[int] = Counter()  # by step, where no single sample was known
        self._deaths_of: Counter[Hashable] = Counter()  # by sample

    @property
    def awaited_worker(self) -> int:
        """The worker whose answer, or start, an open request waits for."""
        unanswered = (worker_id for _, worker_id in self._unanswered())
        return next(itertools.chain(unanswered, self._starting), 0)  # no task: one that begins

    @property
    def num_at_work(self) -> int:
        """Workers that are ready, of those that are to be."""
        return self._num_workers - len(self._starting)

    def peek(self) -> tuple[int, Any] | None:
        """Return step and outcome of what the next request is going to get, if it is there."""
        self._skip_abandoned()
        step = self._deliverable()
        return None if step is None else (step, self.done[step])

    def steps_of(self, worker_id: int) -> list[int]:
        """Return the steps that this worker holds and has not answered."""
        return [step for step, owner in self._unanswered() if owner == worker_id]

    def _unanswered(self) -> list[tuple[int, int]]:
        tasks = [(step, worker_id) for step, (worker_id, _) in self._tasks.items()]
        return [(s, w) for s, w in tasks if s not in self.done and w not in self._exhausted]

    def refill(self) -> list[Decision]:
        """Draw what is to be under way now: the share of workers that are not ready has to wait.

        The others would do it all by themselves, and the newcomers find nothing to do.
        """
        share = self._lookahead // self._num_workers
        target = self._lookahead - share * len(self._starting)
        self._credit += target - self._target
        self._target = target
        return self._draw()

    def _draw(self) -> list[Decision]:
        if self._is_drained or self._credit <= 0:
            return []
        num, self._credit = self._credit, 0
        return [_DRAW] * num

    def drawn(self, step: int, indices: object) -> list[Decision]:
        """Take the next step of the sampler; in a resumed epoch, numbers may be missing."""
        worker_id = self._worker_in_turn()
        self._end = step + 1
        self._tasks[step] = worker_id, indices
        self._load[worker_id] += 1
        return [Submit(worker_id, step, indices), *self._answer()]

    def drained(self) -> list[Decision]:
        """Note that the sampler has no more."""
        self._is_drained = True
        return self._answer()

    def request(self) -> list[Decision]:
        """Note that the user wants the next batch."""
        self._is_requested = True
        return self._answer()

    def change_workers(self, num_workers: int, lookahead: int) -> list[Decision]:
        """Change the number of workers, and of steps under way."""
        added = [w for w in range(self._num_workers, num_workers) if w not in self.present]
        self.present.update(added)
        self._starting.update(dict.fromkeys(added, True))
        self._num_workers, self._lookahead = num_workers, lookahead
        self._starting = {w: joins for w, joins in self._starting.items() if w < num_workers}
        removals = self._remove_idle()
        return [*map(AddWorker, added), *self.refill(), *removals]

    def _remove_idle(self) -> list[Decision]:
        leaving = [w for w in self.present if w >= self._num_workers and not self._load[w]]
        self.present.difference_update(leaving)
        return list(map(RemoveWorker, leaving))

    def handle(self, event: BackendEvent) -> list[Decision]:
        """Return what follows from `event`, to be carried out in this order."""
        if isinstance(event, TaskDone):
            return self._on_done(event)
        if isinstance(event, WorkerExhausted):
            return self._on_exhausted(event)
        if isinstance(event, WorkerLost):
            return self._on_death(event)
        self._starting.pop(event.worker_id, None)
        return self.refill()

    def _on_done(self, event: TaskDone) -> list[Decision]:
        self._load[event.worker_id] -= 1
        if event.step in self._tasks:  # else: abandoned, as its worker was exhausted
            self.done[event.step] = event.outcome
        if event.worker_id < self._num_workers:
            return self._answer()
        return [*self._remove_idle(), *self._answer()]

    def _on_exhausted(self, event: WorkerExhausted) -> list[Decision]:
        self._exhausted.add(event.worker_id)
        self._is_drained = self._is_drained or len(self._exhausted) == self._num_workers
        self._credit += 1
        # The answer waits for the draw: what is drawn may be the epoch's only open step.
        return self._draw() or self._answer()

    def _on_death(self, event: WorkerLost) -> list[Decision]:
        if event.worker_id in self._exhausted:
            return []  # it had given all it had
        if self._starting.get(event.worker_id):  # it has no steps, and its share stays withheld
            self.present.discard(event.worker_id)
            return [RemoveWorker(event.worker_id, event.reason), *self._answer()]
        is_guilty, is_survivable = self._judge(event)
        may_respawn = self._respawns_left > 0 or not event.counts
        if self._failure is None and may_respawn and is_survivable:
            self._respawns_left -= event.counts
            quarantined = (
                [Quarantine(event.sample, event.reason, event.advice)] if is_guilty else []
            )
            again = [
                Submit(event.worker_id, step, self._tasks[step][1], step in self._deaths_at)
                for step in self.steps_of(event.worker_id)
            ]
            return [*quarantined, Respawn(event.worker_id, event.reason), *again]
        self._failure = self._failure or Fail(event.worker_id, event.reason, event.advice)
        return self._answer()

    def _judge(self, event: WorkerLost) -> tuple[bool, bool]:
        """Return whether the death proves the sample bad, and whether the epoch may go on."""
        if event.step is None:
            return False, True
        if event.sample is None:
            steps = event.step, *event.or_steps
            self._deaths_at.update(steps)
            return False, any(self._deaths_at[step] < event.limit for step in steps)
        self._deaths_of[event.sample] += 1
        deaths = self._deaths_of[event.sample] + self._deaths_at.get(event.step, 0)
        is_guilty = deaths >= event.limit
        return is_guilty, self._can_quarantine or not is_guilty

    def _worker_in_turn(self) -> int:
        workers = range(self._num_workers)
        if self._any_worker:
            ready = [w for w in workers if w not in self._starting]
            return min(ready or workers, key=self._load.__getitem__)
        # Out of order a fast worker gets more than its turn, yet never all the work there is.
        num_active = self._num_workers - len(self._exhausted)
        held = [] if self._in_order else [w for w, _ in self._tasks.values()]  # undelivered steps
        for _ in workers:
            worker_id = self._next_worker
            self._next_worker = (worker_id + 1) % self._num_workers
            has_room = self._in_order or held.count(worker_id) < self._lookahead // num_active
            if has_room and worker_id not in self._exhausted:
                return worker_id
        return min((w for w in workers if w not in self._exhausted), key=held.count)

    def _answer(self) -> list[Decision]:
        """Answer the open request, if there is one and it can be answered now."""
        if not self._is_requested:
            return []
        self._skip_abandoned()
        step = self._deliverable()
        if step is not None:
            self._is_requested = False
            worker_id, indices = self._tasks.pop(step)
            self._credit += 1
            return [*self._draw(), Deliver(step, worker_id, self.done.pop(step), indices)]
        if self._failure is not None:
            return [self._failure]
        may_draw_more = not (self._is_drained or self._starting.keys().isdisjoint(self.present))
        if self._head >= self._end and not may_draw_more:
            self._is_requested = False
            return [Finish()]
        return []

    def _skip_abandoned(self) -> None:
        while self._head < self._end:
            task = self._tasks.get(self._head)
            if task is not None and (self._head in self.done or task[0] not in self._exhausted):
                return
            self._tasks.pop(self._head, None)
            self._head += 1

    def _deliverable(self) -> int | None:
        if self._in_order:
            return self._head if self._head in self.done else None
        return next(iter(self.done), None)
