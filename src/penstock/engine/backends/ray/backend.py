# SPDX-License-Identifier: Apache-2.0
"""The main process's side of workers on a Ray cluster.

Guarantees
    Answers come through the callbacks of Ray's futures into one queue: nothing is polled, and an
    object on another machine is on its way as soon as it is made. How many there may be is bounded
    by the tasks under way (`prefetch_factor` for each worker).
    A batch's arrays lie in Ray's object store; it goes when the last view of them is garbage.
    A worker's death is seen at once, by a call that never returns. What the object store had of its
    batches by then is delivered, unless its machine is gone too: then they are made again.
    A link that breaks is no death. Ray sends what was under way once more when the link is back,
    and the actor knows it again (see `worker`). Only when Ray declares the machine dead, by its
    own health checks, its workers are dead; that is nobody's fault, and is not counted.
    Nothing is left in the cluster when `close` returns, nor when the main process is killed: Ray
    ends the actors of a program that is gone.

Finding the sample that ends workers
    A worker's last note dies with it. So of a batch over which one has died, the samples are made
    one by one (`try_sample`), each call sent when the one before has returned: the one that does
    not return had the sample. No other task is under way on that worker meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import queue
import time
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.engine.backends.ray.cluster import RayOptions, connect, is_node_dead, what_is_free
from penstock.engine.backends.ray.parcels import WritableMemory, open_parcel, pack_parcel
from penstock.engine.backends.ray.remote_worker import RemoteWorker
from penstock.engine.backends.ray.worker import RayWorker, versions_here
from penstock.engine.interrupts import LONGEST_WAIT_S
from penstock.engine.pickling import unpicklable_error
from penstock.engine.recover import NO_BATCH
from penstock.engine.scheduler import WorkerReady
from penstock.engine.task import Kind, WorkerIdentity, decode_result
from penstock.engine.worker_table import WorkerProgress, WorkerTable
from penstock.errors import ConfigError, WorkerDied
from penstock.forks import Owner
from penstock.randomness.keys import Purpose, seed_sequence
from penstock.warn import users_level

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.engine.backends.ray.remote_worker import Actor, Call, Come
    from penstock.engine.backends.ray.worker import Answer, Hello
    from penstock.engine.plan import Epoch, Plan, RetryHints
    from penstock.engine.scheduler import BackendEvent
    from penstock.engine.worker_table import Activity

__all__ = ["RayBackend"]

_GRACE_S: Final = 3.0  # for a worker to finish its sample and its user's clean-up
_SHORT_GRACE_S: Final = 0.3  # when somebody has pressed Ctrl-C
_STACKS_S: Final = 5.0  # for a worker to say what it is doing
_MOST_LOSSES: Final = 5  # of one batch on its way, before its worker is given up
_ACTOR_OPTIONS: Final = {
    "max_restarts": 0,  # the order of steps has to know of every death
    "max_task_retries": -1,  # a call is sent again when only the link broke: tasks are numbered
    "max_concurrency": 10_000,  # calls that wait for their turn
}
_ADVICE_ON_PICKLING: Final = (
    "Ray's workers are other processes, perhaps on other machines. Leave out of __getstate__ what "
    "belongs to this one (locks, files, connections, generators), and open it lazily in the worker."
)

_backends: weakref.WeakSet[RayBackend] = weakref.WeakSet()


def _close_all() -> None:
    """At interpreter exit, in case that it comes before Ray's own end."""
    for backend in list(_backends):
        backend.close(in_a_hurry=True)


atexit.register(_close_all)


class RayBackend:
    """Workers on a Ray cluster. See the module for its guarantees.

    Concurrency:
        One thread. Ray calls back in threads of its own, which only put into a queue.
    """

    def __init__(self, plan: Plan) -> None:
        """Prepare workers for `plan`."""
        self.measures = True
        self._plan = plan
        self._options = plan.backend_options or RayOptions()
        self._ray: Any = None
        self._actor_class: Any = None
        self._parcel: object = None  # a reference to the spec
        self._table: WorkerTable[RemoteWorker] = WorkerTable(plan)
        self._num_starts: dict[int, int] = {}  # by worker id
        self._inbox: queue.SimpleQueue[Come | None] = queue.SimpleQueue()  # None: it is closed
        self._memory = WritableMemory()
        self._is_started = False
        self._connection = ""  # what Ray knows this process by
        self._owner = Owner()

    def start(self) -> None:
        """Ask Ray for the workers; none waits for another.

        Raises:
            MissingExtraError: Ray is not installed.
            ConfigError: the cluster cannot be reached, or runs another version.
            UnpicklableError: the dataset (or a function) cannot be sent.
        """
        try:
            parcel = pack_parcel(self._plan.spec)
        except Exception as error:
            advice = _ADVICE_ON_PICKLING
            raise unpicklable_error(self._plan.spec, error, advice=advice) from error
        self._ray = connect(self._options)
        options = {**_outside_of_trainers_group(self._ray), **self._options.actor}
        self._actor_class = self._ray.remote(RayWorker).options(**{**options, **_ACTOR_OPTIONS})
        self._connection = self._ray.get_runtime_context().get_worker_id()
        self._is_started = True
        _backends.add(self)
        try:
            self._parcel = self._ray.put(parcel)  # it is there for as long as the reference is
            for worker_id in range(self._plan.num_workers):
                self._open_worker(worker_id)
        except BaseException:
            self.close()
            raise

    @property
    def actors(self) -> list[Actor]:
        """The handles of the actors, by worker id."""
        return [worker.actor for _, worker in sorted(self._table.workers.items())]

    def _open_worker(self, worker_id: int) -> RemoteWorker:
        """Ask for an actor, on whatever machine there is room; does not wait for it."""
        plan = self._plan
        num_before = self._num_starts.get(worker_id, 0)
        self._num_starts[worker_id] = num_before + 1
        seed = plan.base_seed
        if num_before:  # it is not to draw again what another drew
            words = seed_sequence(seed, Purpose.WORKERS, worker_id, num_before)
            seed = int(words.generate_state(1, np.uint64)[0] >> np.uint64(1))
        identity = WorkerIdentity(worker_id, max(plan.num_workers, plan.max_workers), seed)
        actor = self._actor_class.remote(identity)
        worker = RemoteWorker(worker_id, actor, plan.spec, self._inbox)
        self._table.add(worker)
        if self._table.epoch is not None:
            worker.begin_generation(self._table.message_of(worker))
        return worker

    @property
    def is_whole(self) -> bool:
        """Whether every worker lives, by all that Ray has said up to now."""
        for _ in range(self._inbox.qsize()):
            come = self._inbox.get_nowait()
            if come is None or come.future.exception() is None:
                self._inbox.put(come)  # answers are left for `events`
            elif self._is_of_use(come):
                self._on_error(come.call, come.future.exception())
        return all(worker.is_open for worker in self._table.workers.values())

    def begin_epoch(self, epoch: Epoch) -> None:
        """Note it: workers learn of it with a task. Answers of earlier ones are dropped."""
        self._table.begin_epoch(epoch)
        for worker in self._table.workers.values():
            worker.begin_generation(self._table.message_of(worker))

    def await_start(self) -> list[int]:
        """Return the workers for which Ray has yet to find a place, or whose dataset is opened."""
        starting = [w for w in self._table.workers.values() if not w.is_ready and w.is_open]
        for worker in starting:
            worker.joins_late = True
        return [worker.worker_id for worker in starting]

    def submit(
        self, worker_id: int, step: int, indices: object, hints: RetryHints | None = None
    ) -> None:
        """Send the task; behind trials of its samples, if it is to be done with care."""
        self._check_connection()
        worker = self._table.workers[worker_id]
        worker.submit(self._table.task_of(worker, step, indices, hints, is_measured=self.measures))

    def events(self, timeout_s: float | None) -> Sequence[BackendEvent]:
        """Wait on one queue; Ctrl-C interrupts the wait.

        Time does not count while Ray has not started a worker: a cluster may have to grow first.

        Raises:
            ConfigError: a worker runs on other versions.
            WorkerDied: another thread has closed the backend.
        """
        self._check_connection()
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = min(deadline - time.monotonic(), LONGEST_WAIT_S)
            due = min((worker.due for worker in self._table.workers.values()), default=math.inf)
            patience_s = max(due - time.monotonic(), 0.0)  # for which only answers are looked after
            events = [] if patience_s else self._overdue()
            with contextlib.suppress(queue.Empty):
                come = self._inbox.get(timeout=max(min(left_s, patience_s), 0.0))
                num_starting = self._num_starting
                events += self._event_of(come)
                del come  # this frame may wait again; the batch is not to wait with it
                if timeout_s and self._num_starting != num_starting:
                    deadline = time.monotonic() + timeout_s
            if events:
                return events
            self._check_connection()
            if time.monotonic() >= deadline:
                if not (timeout_s and self._is_starting):
                    return []
                deadline = time.monotonic() + timeout_s

    @property
    def _num_starting(self) -> int:
        return sum(w.hello is None for w in self._table.workers.values())

    @property
    def _is_starting(self) -> bool:
        """Whether nothing is under way but in workers that Ray has not started."""
        workers = self._table.workers.values()
        busy = [w for w in workers if w.is_open and (w.tasks or not w.is_ready)]
        return all(worker.hello is None for worker in busy)

    @property
    def _is_connected(self) -> bool:
        ray = self._ray
        is_on: bool = ray.is_initialized()
        return is_on and ray.get_runtime_context().get_worker_id() == self._connection

    def _check_connection(self) -> None:
        if not self._is_connected:
            raise WorkerDied(
                "the connection to Ray was ended, by ray.shutdown() in this process, while the "
                "loader was iterated: its workers are gone with it. Iterate the loader anew."
            )

    def _overdue(self) -> list[BackendEvent]:
        """Look after workers that say nothing; return deaths of which no more is to be awaited."""
        now = time.monotonic()
        late = [worker for worker in self._table.workers.values() if worker.due <= now]
        for worker in late:
            if worker.is_open and worker.hello is not None:
                worker.knock()
        if any(worker.is_open and worker.hello is None for worker in late):
            self._tell_who_is_missing()
        dying = [worker for worker in late if worker.dying_since is not None]
        return [event for worker in dying for event in self._reap(worker)]

    def _tell_who_is_missing(self) -> None:
        workers = self._table.workers.values()
        missing = [w for w in workers if w.is_open and w.hello is None]
        waited_s = time.monotonic() - min(worker.started_at for worker in missing)
        for worker in missing:
            worker.doubt_s = 10 * max(worker.doubt_s, waited_s)
        if self._plan.is_worker_free and len(missing) < len(workers):
            meanwhile = "The others make their batches meanwhile."
        else:
            meanwhile = "No batch comes without them, so training waits."
        warnings.warn(
            f"{len(missing)} of {len(workers)} workers have waited {waited_s:.0f} s for Ray to "
            f"start them: {what_is_free(self._ray, self._options)} {meanwhile} Fewer workers "
            "(num_workers), or such that ask for less (ray_options), would start at once.",
            RuntimeWarning,
            stacklevel=users_level(),
        )

    def _event_of(self, come: Come | None) -> list[BackendEvent]:
        if come is None:
            self._inbox.put(None)  # for whoever asks again
            raise WorkerDied(
                "the loader's iterator was closed while it was asked for a batch: its workers are "
                "gone. Iterate the loader anew."
            )
        if not self._is_of_use(come):
            return []
        events, worker = self._outcome_of(come), come.call.worker
        return [*events, *self._reap(worker)] if worker.is_silent else events

    def _is_of_use(self, come: Come) -> bool:
        """Note that a call is under way no more; return whether its worker is still one."""
        worker = come.call.worker
        worker.note_come(come.call)
        return self._table.workers.get(worker.worker_id) is worker and not worker.is_gone

    def _outcome_of(self, come: Come) -> list[BackendEvent]:
        call, worker = come.call, come.call.worker
        if come.future.exception() is not None:
            self._on_error(call, come.future.exception())
            return []
        if call.kind == "hello":
            self._on_hello(worker, come.future.result())
            return []
        if call.kind == "end" or (call.kind != "open" and not worker.is_awaited(call)):
            return []
        answer: Answer = come.future.result()
        if answer.kind == "ended":
            worker.last_snapshot = answer.snapshot
            self._end(worker, answer)
            return []
        events: list[BackendEvent] = []
        if call.kind == "open":
            worker.is_ready = True
            events += [WorkerReady(worker.worker_id)] if worker.joins_late else []
            worker.joins_late = False
        elif call.kind == "try":
            worker.trial = None
        else:
            events += self._events_of(worker.take(come))
        worker.send()
        return events

    def _on_error(self, call: Call, error: Exception) -> None:
        """Take note of a worker's end; send again what was lost on its way."""
        worker, errors = call.worker, self._ray.exceptions
        if isinstance(error, errors.RayTaskError):
            raise error  # of this library itself: what the user's code raises comes as an answer
        if isinstance(error, (errors.ObjectLostError, errors.GetTimeoutError)):
            if call.kind == "make" and not worker.is_awaited(call):
                return
            if call.kind == "make" and worker.num_lost < _MOST_LOSSES:
                worker.num_lost += 1
                if worker.is_open:
                    worker.send_again(call.number)
                return
        if worker.dying_since is None:
            self._end(worker, error)

    def _end(self, worker: RemoteWorker, end: Exception | Answer | str) -> None:
        """Let a worker's end take its course; also if Ray has only lost sight of it."""
        worker.note_end(end)
        self._kill(worker)

    def _on_hello(self, worker: RemoteWorker, hello: Hello) -> None:
        ours = versions_here()
        if hello.versions != ours:
            raise ConfigError(
                f"worker {worker.worker_id} (pid {hello.pid} on {hello.address}) runs on "
                f"{hello.versions}, and the main process on {ours}: what they send each "
                "other, and what samples draw, may differ. Install the same on every machine, or "
                'let Ray: ray_options={"runtime_env": {"pip": [...]}}.'
            )
        if worker.hello is None:
            worker.open(self._parcel)
        worker.hello, worker.pid = hello, hello.pid

    def _events_of(self, answers: Iterator[Come]) -> list[BackendEvent]:
        events = map(self._event, answers)
        return [event for event in events if event is not None]

    def _event(self, come: Come) -> BackendEvent | None:
        worker, answer = come.call.worker, come.future.result()
        if answer.kind == "dropped":
            return None  # its shard is exhausted
        result, _ = decode_result(answer.message)
        if result.kind == Kind.DONE:
            result.unpack = functools.partial(open_parcel, answer.parcel, self._memory)
        elif result.kind == Kind.EMPTY:
            result.payload = NO_BATCH
        if result.times is not None:
            span = {"sent_ns": come.call.sent_ns, "received_ns": come.received_ns}
            result.times = worker.clock.by_ours(result.times, **span)
        return self._table.accept(worker, result)

    def _reap(self, worker: RemoteWorker) -> list[BackendEvent]:
        """Return the last batches of a worker that is gone, and its death."""
        events = self._events_of(worker.take_rest())
        is_node_gone = worker.died_with_node or (
            worker.hello is not None and is_node_dead(self._ray, worker.hello.node_id)
        )
        activity = self._activity(worker)
        end, advice = worker.describe_end(is_node_gone=is_node_gone)
        place, number = worker.place, worker.worker_id
        how = f"DataLoader worker ({place}) exited unexpectedly: worker {number} {end}"
        limit = worker.deaths_that_prove
        death = self._table.death(worker, activity, how, advice, limit=limit)
        if is_node_gone:
            death = death._replace(step=None, sample=None, counts=False)
        else:
            death = death._replace(or_steps=worker.other_steps(activity))
        return [*events, death]

    def _activity(self, worker: RemoteWorker) -> Activity:
        activity = self._table.activity(worker, worker.snapshot())
        if others := worker.other_steps(activity):
            listed = " or ".join(map(str, others))
            return activity._replace(words=f"{activity.words}, or already at step {listed}")
        return activity

    def respawn(self, worker_id: int) -> None:
        """Ask for another actor, on whatever machine there is room, to go on where this one was."""
        dead = self._table.workers[worker_id]
        dead.forget()
        self._open_worker(worker_id).joins_late = dead.joins_late

    def add_worker(self, worker_id: int) -> None:
        """Ask for one actor more, which joins the current epoch; an event says when it has."""
        self._open_worker(worker_id).joins_late = True

    def remove_worker(self, worker_id: int) -> None:
        """Let an actor go that has no tasks; does not wait."""
        self._let_end(self._table.workers.pop(worker_id))

    def kill(self, worker_id: int, why: str) -> None:
        """End an actor that is stuck, once it has said what it is doing, if it still can."""
        worker = self._table.workers[worker_id]
        if not worker.is_open or worker.hello is None:  # one that has not started is not stuck
            return
        self._ask(worker)
        self._end(worker, why)

    def _ask(self, worker: RemoteWorker) -> None:
        worker.last_snapshot, worker.last_stack = None, ""
        if worker.hello is not None:
            with contextlib.suppress(Exception):  # native code holds the interpreter, or no link
                call = worker.actor.doing.remote()
                worker.last_snapshot, worker.last_stack = self._ray.get(call, timeout=_STACKS_S)

    def diagnose(self, worker_id: int, *, with_stacks: bool) -> WorkerProgress:
        """Ask the actor; one that does not answer in time is known by its tasks alone."""
        worker = self._table.workers[worker_id]
        if worker.hello is None:
            waited_s = time.monotonic() - worker.started_at
            free = what_is_free(self._ray, self._options)
            return WorkerProgress(f"waiting for Ray to start it, for {waited_s:.0f} s: {free}")
        self._ask(worker)
        stacks = worker.last_stack if with_stacks else ""
        if worker.last_snapshot is None:
            why = "It does not answer: native code holds its interpreter, or no link is"
            return WorkerProgress(f"{self._activity(worker).words}. {why}")
        return self._table.progress(worker, worker.last_snapshot, stacks)

    def close(self, *, in_a_hurry: bool = False) -> None:
        """End the workers, and wait until they are gone."""
        workers = list(self._table.workers.values())
        self._table.workers.clear()
        _backends.discard(self)
        if not self._is_started or not self._owner.is_here:
            return  # in a forked copy of the main process Ray cannot be used
        self._is_started = False
        self._inbox.put(None)
        try:
            if self._is_connected:
                left = [worker for worker in workers if not worker.is_gone]
                self._end_all(left, _SHORT_GRACE_S if in_a_hurry else _GRACE_S)
        finally:  # also if a second Ctrl-C comes
            for worker in workers:
                worker.forget()
            self._parcel = None
            with contextlib.suppress(queue.Empty):  # nobody will ask for what is in there
                while True:
                    self._inbox.get_nowait()
            self._inbox.put(None)

    def _end_all(self, workers: Sequence[RemoteWorker], grace_s: float) -> None:
        """Let them end, and end those that do not, or have not even started."""
        if not workers:
            return
        ends = [self._let_end(worker) for worker in workers]
        try:
            for worker in workers:
                if worker.hello is None:
                    self._kill(worker)
            self._ray.wait(ends, num_returns=len(ends), timeout=grace_s)
        finally:  # also if a second Ctrl-C comes
            for worker in workers:
                self._kill(worker)
        self._ray.wait(ends, num_returns=len(ends), timeout=grace_s)

    def _let_end(self, worker: RemoteWorker) -> object:
        """Let it finish its sample, and end; return the reference of a call that fails then."""
        # Not to be sent again: Ray would say in the log that it will be.
        return worker.actor.end.options(max_task_retries=0).remote()

    def _kill(self, worker: RemoteWorker) -> None:
        with contextlib.suppress(Exception):  # it is gone, or the cluster is
            self._ray.kill(worker.actor, no_restart=True)


def _outside_of_trainers_group(ray: Any) -> dict[str, Any]:  # noqa: ANN401 - the module
    """Return the option by which actors of a main process in a placement group are not to be in it.

    A group that captures what is started in it, as those of Ray Tune and Ray Train do, has room for
    the main processes alone: workers would wait for ever.
    """
    if not ray.get_runtime_context().should_capture_child_tasks_in_placement_group:
        return {}
    strategies = ray.util.scheduling_strategies
    return {"scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(None)}
