# SPDX-License-Identifier: Apache-2.0
"""The main process's record of its workers: their tasks, their progress, how they ended.

Backends carry tasks and results. This module interprets them, alike for all backends:

    table.begin_epoch(epoch)        begins an epoch; results of earlier ones are dropped
    table.add(worker)               adds a worker, or one in the place of one that is gone
    table.message_of(worker)        the message that begins the epoch
    table.accept(worker, result)    the scheduler's event for a result, if there is one
    table.death(worker, ...)        the event of its death, with what it was doing
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from penstock.data.dataset import length_of
from penstock.data.names import name_samples
from penstock.engine.plan import dataset_keys, sample_key
from penstock.engine.scheduler import TaskDone, WorkerExhausted, WorkerLost, WorkerReady
from penstock.engine.status_page import PHRASES, Phase
from penstock.engine.task import BeginEpoch, ExceptionReport, Kind, WorkerIdentity, revive_exception
from penstock.faults import annotate
from penstock.randomness.generator_watch import UNSEEDED, warn_of_drawings
from penstock.randomness.keys import Purpose, seed_sequence
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from penstock.engine.plan import Epoch, Plan, ShardPosition
    from penstock.engine.scheduler import BackendEvent
    from penstock.engine.status_page import StatusSnapshot
    from penstock.engine.task import Task, TaskResult

_log = logging.getLogger("penstock")
_notified: weakref.WeakSet[type] = weakref.WeakSet()  # datasets that were logged
# worker_init_fn -> by generator and digest, the base seed and worker that it was seen in first
_seen: weakref.WeakKeyDictionary[
    Callable[[int], object], dict[tuple[str, bytes], tuple[int, int]]
] = weakref.WeakKeyDictionary()
_warned: weakref.WeakSet[Callable[[int], object]] = weakref.WeakSet()


class KnownWorker:
    """The main process's record of one worker; each backend has a subclass.

    Attributes:
        worker_id: Number of the worker.
        pid: ID of the process that it is, or is in.
        tasks: Indices of its unanswered tasks, by (generation, step).
        position: Position in its shard of an iterable dataset.
        is_gone: Whether its end is known.
    """

    def __init__(self, worker_id: int, pid: int) -> None:
        """Begin as a worker without tasks."""
        self.worker_id = worker_id
        self.pid = pid
        self.tasks: dict[tuple[int, int], object] = {}
        self.position: ShardPosition | None = None
        self.is_gone = False

    def note(self, task: Task) -> None:
        """Record a task that it is given."""
        self.tasks[task.generation, task.step] = task.indices

    def __str__(self) -> str:
        """Return its name in messages: "worker 0 (pid 7)"."""
        raise NotImplementedError


WorkerT = TypeVar("WorkerT", bound=KnownWorker)


class WorkerTable(Generic[WorkerT]):
    """The workers of one backend.

    Attributes:
        workers: Workers by number.
        generation: Generation of the current epoch; the user may begin the same epoch again.
        epoch: The current epoch; None before the first.
        num_starts: Number of workers that were started, by worker number.

    Concurrency:
        One thread.
    """

    def __init__(self, plan: Plan, drawings_advice: str = UNSEEDED) -> None:
        """Begin without workers."""
        self.workers: dict[int, WorkerT] = {}
        self.generation = 0
        self.epoch: Epoch | None = None
        self.num_starts: Counter[int] = Counter()
        self._live: dict[int, Epoch] = {}  # by generation: the current one, and one begun ahead
        self._plan = plan
        self._drawings_advice = drawings_advice
        self._first_of: dict[bytes, int] = {}  # worker, by the digest of its first sample

    def identity_of(self, worker_id: int) -> WorkerIdentity:
        """Return the identity of a worker that is about to start.

        Its draws must not repeat those of earlier workers of its number.
        """
        plan, num_before = self._plan, self.num_starts[worker_id]
        self.num_starts[worker_id] += 1
        seed = plan.base_seed
        if num_before:
            words = seed_sequence(seed, Purpose.WORKERS, worker_id, num_before)
            seed = int(words.generate_state(1, np.uint64)[0] >> np.uint64(1))
        return WorkerIdentity(worker_id, max(plan.num_workers, plan.max_workers), seed)

    def add(self, worker: WorkerT) -> None:
        """Add a worker; it goes on where an earlier one of the same number was."""
        before = self.workers.get(worker.worker_id)
        if before is not None:
            worker.position = before.position
        elif self.epoch is not None:
            worker.position = self.epoch.progress.given.shards.get(worker.worker_id)
        self.workers[worker.worker_id] = worker

    def begin_epoch(self, epoch: Epoch) -> int:
        """Begin an epoch; return its generation."""
        self.adopt_ahead(self.begin_ahead(epoch), epoch)
        self._first_of.clear()
        for worker in self.workers.values():
            worker.position = epoch.progress.given.shards.get(worker.worker_id)
        return self.generation

    def begin_ahead(self, epoch: Epoch) -> int:
        """Begin an epoch beside the current one; return its generation."""
        generation = max(self._live, default=0) + 1
        self._live[generation] = epoch
        return generation

    def adopt_ahead(self, generation: int, epoch: Epoch) -> None:
        """Make a generation the current one; `epoch` is what it has turned out to be."""
        self.generation, self.epoch = generation, epoch
        self._live = {generation: epoch}
        for worker in self.workers.values():
            worker.tasks = {key: of for key, of in worker.tasks.items() if key[0] == generation}

    def message_of(self, worker: WorkerT, generation: int | None = None) -> BeginEpoch:
        """Return the message that begins the current epoch, or one begun ahead, in `worker`."""
        generation = generation or self.generation
        epoch = self._live[generation]
        keeps_states = self._plan.steps_per_state is not None
        return BeginEpoch(
            generation, epoch.number, epoch.is_announced, worker.position, keeps_states
        )

    def accept(self, worker: WorkerT, result: TaskResult) -> BackendEvent | None:
        """Return the event that follows from a result; None for a worker or an epoch that is gone.

        The result holds the generation: that of the current epoch, or of the one begun ahead.
        Reports of another process become exceptions again, with a note of where they were raised.
        """
        notices, worker_id = result.notices, worker.worker_id
        if worker.is_gone or self.workers.get(worker_id) is not worker:
            return None
        if notices is not None:
            if "states" in notices:
                _note_states(self._plan, worker_id, notices["states"])
            warn_of_drawings(notices.get("drawings", ()), self._drawings_advice)
        epoch = self._live.get(result.generation)
        if epoch is None:
            return None
        kind, step = result.kind, result.step
        if step < 0:
            if kind == Kind.FAILED:
                self._revive(worker, result, epoch)
            return WorkerReady(worker_id, result)
        worker.tasks.pop((result.generation, step), None)
        result.pid = worker.pid
        if notices is not None and "first_digest" in notices:
            other_id = self._first_of.setdefault(notices["first_digest"], worker_id)
            if other_id != worker_id:
                _note_same_start(self._plan, other_id, worker_id)
        if result.bad or kind == Kind.FAILED:
            self._revive(worker, result, epoch)
        if kind == Kind.EXHAUSTED:
            return WorkerExhausted(worker_id, step, result)
        if result.position is not None:
            worker.position = result.position = result.position.after(worker.position)
        return TaskDone(worker_id, step, result)

    def _revive(self, worker: WorkerT, result: TaskResult, epoch: Epoch) -> None:
        where = f"in {worker}, epoch {epoch.number}"
        where += f", step {result.step}" if result.step >= 0 else ""
        if result.kind == Kind.FAILED:
            result.payload = _revived(result.payload, where)
        result.bad = [replace(bad, error=_revived(bad.error, where)) for bad in result.bad]

    def activity(self, worker: WorkerT, snapshot: StatusSnapshot) -> Activity:
        """Return what `worker` was doing when it left `snapshot`."""
        doing, spec, step = PHRASES[snapshot.phase], self._plan.spec, snapshot.step
        if not Phase.READING <= snapshot.phase <= Phase.SENDING:
            return Activity(None, None, doing)
        key = snapshot.generation, step
        if snapshot.generation != self.generation or key not in worker.tasks:
            is_ahead = snapshot.generation > self.generation
            which = "the next" if is_ahead else "an earlier"
            return Activity(None, None, f"{doing} samples of {which} epoch", is_ahead)
        if spec.is_iterable:
            return Activity(step, None, f"{doing} a batch of its shard of the dataset")
        keys = dataset_keys(worker.tasks[key])
        keys = keys if spec.is_batched else [keys]
        # Another thread's status may be read while it changes: the number is then of another step.
        if snapshot.number is None or snapshot.number >= len(keys):
            named = name_samples(spec.dataset, keys)
            return Activity(step, None, f"{doing} {named} of step {step}")
        (index,) = snapshot.replacement or (keys[snapshot.number],)
        named = name_samples(spec.dataset, [index])
        return Activity(step, sample_key(index), f"{doing} {named} of step {step}")

    def progress(self, worker: WorkerT, snapshot: StatusSnapshot, stacks: str) -> WorkerProgress:
        """Return the progress of `worker`; `stacks` of its threads may be empty."""
        activity, spec = self.activity(worker, snapshot), self._plan.spec
        still_s, task_s, took = snapshot.still_s, snapshot.task_s, ""
        if activity.step is None:
            took = "" if still_s is None else f" (for {still_s:.1f} s)"
        elif still_s is None:
            took = f" (the step for {task_s:.1f} s)"
            # Where no sample of it was begun, all are read in one call.
            still_s = task_s if snapshot.number is None else None
        else:
            keys = dataset_keys(worker.tasks[self.generation, activity.step])
            count = (length_of(keys) if spec.is_batched else None) or 1  # a slice has no length
            done = count if snapshot.number is None else snapshot.number
            took = f" ({done} of {count} samples in {task_s:.1f} s, the last {still_s:.1f} s ago)"
        stacks = f":\n{stacks}" if stacks else ""
        return WorkerProgress(f"{activity.words}{took}{stacks}", still_s)

    def death(
        self, worker: WorkerT, activity: Activity, end: str, advice: str, *, limit: int = 2
    ) -> WorkerLost:
        """Return the event that `worker` is gone."""
        worker.is_gone = True
        step, sample, words, is_ahead = activity
        # A death at a sample of the next epoch does not count against `max_respawns` of this one.
        # If the next epoch reads that sample, it counts there.
        return WorkerLost(
            worker.worker_id, f"{end} {words}", advice, step, sample, limit, counts=not is_ahead
        )


def _revived(error: Any, where: str) -> BaseException:  # noqa: ANN401 - the exception, or a report
    own: BaseException = revive_exception(error) if isinstance(error, ExceptionReport) else error
    annotate(own, where)
    return own


def _note_same_start(plan: Plan, other_id: int, worker_id: int) -> None:
    """Warn that two workers began their shards of a dataset with the same sample.

    What torch's loader can do too is logged, once per class: programs count warnings.
    """
    kind = type(plan.spec.dataset)
    message = (
        f"Workers {other_id} and {worker_id} both began {kind.__name__} with the same sample: each "
        "worker iterates a copy of its own, so every sample would come "
        f"{plan.num_workers} times. In __iter__, go over `penstock.data.shard(samples)` instead of "
        "`samples`; each worker and rank then gets its share. (If different samples may be equal, "
        "this means nothing.)"
    )
    if plan.traits.shares_interpreter or plan.spec.seed is not None:
        warn_user(message)
    elif kind not in _notified:
        _notified.add(kind)
        _log.warning(message)


def _note_states(plan: Plan, worker_id: int, states: dict[str, bytes]) -> None:
    """Warn, once for each function, if a state was seen in another worker or the first epoch.

    Every epoch that starts workers has another base seed, from which each worker's generators are
    seeded. A generator in the same state after `worker_init_fn` was seeded by that: it repeats.
    """
    worker_init_fn, base_seed = plan.spec.worker_init_fn, plan.base_seed
    assert worker_init_fn is not None
    try:
        seen = _seen.setdefault(worker_init_fn, {})
    except TypeError:  # cannot be referred to weakly
        return
    for state in states.items():
        seed, other = seen.setdefault(state, (base_seed, worker_id))
        if (seed, other) == (base_seed, worker_id) or worker_init_fn in _warned:
            continue
        _warned.add(worker_init_fn)
        name = getattr(worker_init_fn, "__qualname__", type(worker_init_fn).__name__)
        same = f"worker {other}" if seed == base_seed else "another epoch"
        warn_user(
            f"worker_init_fn {name} leaves {state[0]} in worker {worker_id} in the same state "
            f"as in {same}: random augmentation that draws from it repeats. Give the loader "
            "seed=, which decides what is drawn for each sample of each epoch, or seed in the "
            "function with torch.initial_seed() % 2**32, which differs for each worker and "
            "epoch.",
        )


class Activity(NamedTuple):
    """What a worker was doing.

    Attributes:
        step: Step that it worked on; None if it was none of the current epoch.
        sample: Key of the sample that it was at; None if not at a single one.
        words: Description of both.
        is_ahead: Whether it worked on an epoch that was begun ahead.
    """

    step: int | None
    sample: Hashable | None
    words: str
    is_ahead: bool = False


class WorkerProgress(NamedTuple):
    """Progress of a worker that the main process waits for.

    Attributes:
        words: Description of its activity, with the samples that it has done, as "39 of 80 samples
            in 2.0 s", and with its threads' stacks on request.
        still_s: Seconds since it last moved on to another sample or phase; None if not known. A
            batch that is read in one call is one piece.
    """

    words: str
    still_s: float | None = None
