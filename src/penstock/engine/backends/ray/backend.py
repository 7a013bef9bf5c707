# SPDX-License-Identifier: Apache-2.0
"""The main process's side of workers on a Ray cluster.

Guarantees
    Answers come through the callbacks of Ray's futures into one queue: nothing is polled, and an
    object on another machine is on its way as soon as it is made. How many there may be is bounded
    by the tasks under way (`prefetch_factor` for each worker).
    Answers of a worker are taken in the order of its tasks, whatever the order in which they come.
    A batch's arrays lie in an object of Ray's store, which goes when their last view is garbage.
    They may be written: Ray gives out read-only arrays, as any number of processes may see an
    object, but a batch has one reader, the main process that it was made for.
    A worker's death is seen at once: a call that never returns fails. Its batches that have come by
    then are delivered. Those behind one that has not come, and those in the store of a machine that
    is gone, are made again.
    A link that breaks is no death. Ray sends what was under way once more when the link is back,
    and the actor recognizes it (see `worker`). Only if Ray's health checks declare a machine dead
    are its workers dead, which is not counted. Where Ray loses a batch on its way, another actor
    makes it; for the first `_MOST_LOSSES` actors this is not counted.
    Nothing is left in the cluster when `close` returns, nor when the main process is killed: Ray
    ends the actors of a program that is gone.

Finding the sample that ends workers
    A worker's status dies with it. So the samples of a batch over which one has died are tried one
    by one, each call sent when the one before has returned: the call that does not return names the
    sample. Then the batch is made. Nothing else is under way on that worker meanwhile.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import math
import pickle
import queue
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.engine.backends import LONGEST_WAIT_S
from penstock.engine.backends.ray.cluster import connect, what_is_free
from penstock.engine.backends.ray.worker import Answer, RayWorker, serialize_tree, versions_here
from penstock.engine.plan import dataset_keys
from penstock.engine.recover import NO_BATCH
from penstock.engine.scheduler import WorkerReady
from penstock.engine.status_page import Phase, StatusSnapshot
from penstock.engine.task import BeginEpoch, Kind, decode_result, encode_message, unpicklable_error
from penstock.engine.timing import replaced, row_of_worker
from penstock.engine.worker_table import KnownWorker, WorkerProgress, WorkerTable
from penstock.errors import ConfigError, WorkerDied
from penstock.forks import Owner
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    from penstock.engine.backends.ray.worker import Handshake, SerializedTree
    from penstock.engine.plan import Epoch, Plan, WorkerSpec
    from penstock.engine.scheduler import BackendEvent
    from penstock.engine.task import Task, TaskResult

_GRACE_S: Final = 3.0  # for a worker to finish its sample and its user's clean-up
_SHORT_GRACE_S: Final = 0.3  # after Ctrl-C
_STACKS_S: Final = 5.0  # for a worker to say what it is doing
_DOUBT_S: Final = 30.0  # for Ray to start a worker, before a warning
_CHECK_S: Final = 5.0  # between two looks at the workers; asking one costs a millisecond
_LAST_WORDS_S: Final = 10.0  # from the first sign of a death to the last of what was made before
_MOST_LOSSES: Final = 5  # starts of a worker up to which a lost batch is not counted
_ACTOR_OPTIONS: Final = {
    "max_restarts": 0,  # the order of steps has to know of every death
    "max_task_retries": -1,  # a call is sent again when only the link broke: tasks are numbered
    "max_concurrency": 10_000,  # calls that wait for their turn
}
# Ray sends less than that inside the answer, which costs a copy in any case.
_COPIED_BYTES: Final = 100 * 1024
_DEAD_NODE: Final = "its node has died"  # in Ray's words on a dead actor
_ADVICE_ON_EXIT: Final = (
    "Ray's logs on that machine (session_latest/logs) may say why, and num_workers=0 shows native "
    "code that crashes. Or memory ran out, or a program killed it."
)
_ADVICE_ON_HANG: Final = "Raise `timeout` if samples, or the start of a worker, may take that long."
_ADVICE_ON_NODE: Final = "Its work is done elsewhere as soon as the cluster has room for it."
_ADVICE_ON_INSTALL: Final = (
    "Install the same versions of Python, penstock and what the dataset imports on every machine, "
    'or let Ray: Ray(runtime_env={"pip": [...], "working_dir": "."}).'
)
_ADVICE_ON_PICKLING: Final = (
    "Ray's workers are other processes. Leave out of __getstate__ what belongs to this one (locks, "
    "files, connections, generators), and open it lazily in the worker."
)

_Actor = Any  # Ray's own type of a handle does not know the methods


class RayBackend:
    """Workers on a Ray cluster. See the module for its guarantees.

    Concurrency:
        One thread. Ray calls back in threads of its own, which only put into a queue.
    """

    def __init__(self, plan: Plan) -> None:
        """Prepare workers for `plan`."""
        self._plan = plan
        self._options = plan.backend_options
        self._ray: Any = None
        self._actor_class: Any = None
        self._spec: object = None  # a reference to the spec
        self._table: WorkerTable[RemoteWorker] = WorkerTable(plan)
        self._awaited: set[int] = set()  # workers whose `WorkerReady` is to come
        self._inbox: queue.SimpleQueue[Come] = queue.SimpleQueue()
        self._check_at = 0.0
        self._connection = ""  # Ray's ID of this process; empty before the start and after `close`
        self._owner = Owner()

    def start(self) -> None:
        """Ask Ray for the workers; none waits for another.

        Raises:
            MissingExtraError: Ray is not installed.
            ConfigError: the cluster cannot be reached, or runs another version.
            UnpicklableError: the dataset (or a function) cannot be sent.
        """
        try:
            serialized = serialize_tree(self._plan.spec)
        except Exception as error:
            advice = _ADVICE_ON_PICKLING
            raise unpicklable_error(self._plan.spec, error, advice=advice) from error
        self._ray = connect(self._options)
        given = {**_outside_of_trainers_group(self._ray), **self._options.actor}
        self._actor_class = self._ray.remote(RayWorker).options(**{**given, **_ACTOR_OPTIONS})
        self._connection = self._ray.get_runtime_context().get_worker_id()
        try:
            self._spec = self._ray.put(serialized)  # there for as long as the reference is
            for worker_id in range(self._plan.num_workers):
                self._open_worker(worker_id)
        except BaseException:
            self.close()
            raise

    def _open_worker(self, worker_id: int) -> None:
        """Ask for an actor, on whatever machine there is room; does not wait for it."""
        actor = self._actor_class.remote(self._table.identity_of(worker_id))
        worker = RemoteWorker(worker_id, actor, self._plan.spec, self._inbox)
        self._table.add(worker)
        if self._table.epoch is not None:
            worker.begin_generation(self._table.message_of(worker))

    @property
    def is_whole(self) -> bool:
        """Whether every worker lives, by all that Ray has said up to now."""
        workers = self._table.workers.values()
        return all(worker.is_open and not worker.until_end.done() for worker in workers)

    def begin_epoch(self, epoch: Epoch) -> int:
        """Note it: workers get it with a task. Answers of earlier ones are dropped."""
        generation = self._table.begin_epoch(epoch)
        for worker in self._table.workers.values():
            worker.begin_generation(self._table.message_of(worker))
        return generation

    def await_start(self) -> set[int]:
        """Return the workers for which Ray has yet to find a place, or whose dataset is opened."""
        workers = self._table.workers.values()
        self._awaited = {w.worker_id for w in workers if not w.is_ready and w.is_open}
        return set(self._awaited)

    def submit(self, worker_id: int, task: Task) -> None:
        """Send the task; behind trials of its samples, if it is to be done with care."""
        self._check_connection()
        self._table.workers[worker_id].submit(task)

    def events(self, timeout_s: float | None) -> Sequence[BackendEvent]:
        """Wait on one queue; Ctrl-C interrupts the wait.

        Time does not count while Ray has not started a worker: a cluster may have to grow first.

        Raises:
            ConfigError: a worker runs on other versions.
            WorkerDied: the connection was ended.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        events: list[BackendEvent] = []
        while not events:
            self._check_connection()
            if time.monotonic() >= self._check_at:
                self._check_at = time.monotonic() + _CHECK_S
                events += self._check_workers()
            # Whether nothing is under way but in workers that Ray has not started.
            at_work = [w for w in self._table.workers.values() if w.is_open]
            at_work = [w for w in at_work if w.tasks or not w.is_ready]
            is_starting = all(w.handshake is None for w in at_work)
            left_s = 0.0 if events else deadline - time.monotonic()
            with contextlib.suppress(queue.Empty):
                come = self._inbox.get(timeout=max(min(left_s, LONGEST_WAIT_S), 0.0))
                events += self._events_of(come)
                del come  # this frame may wait again; the batch is not to wait with it
            if is_starting and timeout_s:
                deadline = time.monotonic() + timeout_s
            elif time.monotonic() >= deadline:
                break
        return events

    @property
    def _is_connected(self) -> bool:
        ray = self._ray
        is_on: bool = ray.is_initialized()
        return is_on and ray.get_runtime_context().get_worker_id() == self._connection

    def _check_connection(self) -> None:
        if not self._is_connected:
            raise WorkerDied(
                "the connection to Ray was ended by ray.shutdown(), or the iterator was closed by "
                "another thread: its workers are gone. Iterate the loader anew."
            )

    def _check_workers(self) -> list[BackendEvent]:
        """Look after workers that say nothing; return deaths of which no more is to be awaited."""
        now = time.monotonic()
        workers = list(self._table.workers.values())
        for worker in workers:
            if worker.is_open and worker.handshake is not None:
                worker.ask_for_hello()
        missing = [w for w in workers if w.is_open and w.handshake is None]
        if any(worker.doubt_at < now for worker in missing):
            for worker in missing:
                worker.doubt_at = math.inf
            warn_user(
                f"{len(missing)} of {len(workers)} workers wait for Ray to start them: "
                f"{what_is_free(self._ray, self._options)} Fewer workers (num_workers), or such "
                "that ask for less (Ray(num_cpus=...)), would start at once.",
                RuntimeWarning,
            )
        dead = [w for w in workers if now - w.dying_since > _LAST_WORDS_S and not w.is_gone]
        return [self._reap(worker) for worker in dead]

    def _events_of(self, come: Come) -> list[BackendEvent]:
        worker = come.call.worker
        worker.num_out -= 1
        if worker.is_gone or self._table.workers.get(worker.worker_id) is not worker:
            return []
        error = come.future.exception()
        if isinstance(error, self._ray.exceptions.RayTaskError):
            raise error  # of this library itself: what the user's code raises comes as an answer
        events = self._answered(come) if error is None else []
        # It is dead, or Ray has lost it or one batch, perhaps because its node has died.
        if error is not None and (worker.is_open or _DEAD_NODE in str(error)):
            self._end(worker, error)
        is_silent = worker.dying_since < math.inf and worker.num_out == 0
        return [*events, self._reap(worker)] if is_silent else events

    def _answered(self, come: Come) -> list[BackendEvent]:
        call, worker, answer = come.call, come.call.worker, come.future.result()
        if call.kind == "end" or (call.task and call.task.generation != self._table.generation):
            return []
        if call.kind == "handshake":
            self._on_handshake(worker, answer)
            return []
        if answer.kind == "ended":
            worker.last_snapshot = answer.snapshot
            self._end(worker, answer)
            return []
        events: list[BackendEvent] = []
        if call.kind == "open":
            worker.is_ready = True
            if worker.worker_id in self._awaited:
                self._awaited.remove(worker.worker_id)
                events.append(WorkerReady(worker.worker_id))
        else:
            results = [self._table.accept(worker, result) for result in worker.take(come)]
            events += [event for event in results if event is not None]
        worker.send()
        return events

    def _on_handshake(self, worker: RemoteWorker, handshake: Handshake) -> None:
        ours = versions_here()
        if handshake.versions != ours:
            raise ConfigError(
                f"worker {worker.worker_id} (pid {handshake.pid} on {handshake.address}) runs on "
                f"{handshake.versions}, and the main process on {ours}: what they send each "
                f"other, and what samples draw, may differ. {_ADVICE_ON_INSTALL}"
            )
        if worker.handshake is None:
            worker.open(self._spec)
        worker.handshake, worker.pid = handshake, handshake.pid

    def _end(self, worker: RemoteWorker, end: Exception | Answer | str) -> None:
        """Let a worker's end take its course; also if Ray has only lost sight of it."""
        worker.note_end(end)
        self._kill(worker)

    def _reap(self, worker: RemoteWorker) -> BackendEvent:
        """Return the event of a worker's death."""
        node_id = worker.handshake.node_id if worker.handshake is not None else ""
        is_node_gone = _DEAD_NODE in str(worker.end) or any(
            node["NodeID"] == node_id and not node["Alive"] for node in self._ray.nodes()
        )
        activity, others = self._table.activity(worker, worker.snapshot()), worker.other_steps
        if others:
            listed = " or ".join(map(str, others))
            activity = activity._replace(words=f"{activity.words}, or already at step {listed}")
        end, advice = worker.describe_end(is_node_gone=is_node_gone)
        how = (
            f"DataLoader worker ({worker.place}) exited unexpectedly: worker "
            f"{worker.worker_id} {end}"
        )
        # Ray does not say whether an end came from outside.
        limit = 3 if isinstance(worker.end, Exception) else 2
        death = self._table.death(worker, activity, how, advice, limit=limit)
        is_lost = isinstance(worker.end, self._ray.exceptions.ObjectLostError)
        if is_node_gone or (is_lost and self._table.num_starts[worker.worker_id] <= _MOST_LOSSES):
            return death._replace(step=None, sample=None, counts=False)
        return death._replace(or_steps=others)

    def respawn(self, worker_id: int) -> None:
        """Ask for another actor, on whatever machine there is room, to go on where this one was."""
        self._table.workers[worker_id].forget()
        self._open_worker(worker_id)

    def add_worker(self, worker_id: int) -> None:
        """Ask for one actor more, which joins the current epoch; an event says when it has."""
        self._awaited.add(worker_id)
        self._open_worker(worker_id)

    def remove_worker(self, worker_id: int) -> None:
        """Let an actor go that has no tasks; does not wait."""
        self._let_end(self._table.workers.pop(worker_id))

    def kill(self, worker_id: int, why: str) -> None:
        """End an actor that is stuck, once it has said what it is doing, if it still can."""
        worker = self._table.workers[worker_id]
        if worker.is_open and worker.handshake is not None:  # one that has not started is not stuck
            worker.last_snapshot, worker.last_stack = self._ask(worker)
            self._end(worker, why)

    def _ask(self, worker: RemoteWorker) -> tuple[StatusSnapshot | None, str]:
        """Return what an actor is doing, and its stack; None if it does not answer."""
        doing: tuple[StatusSnapshot | None, str] = None, ""
        if worker.handshake is not None:
            with contextlib.suppress(Exception):  # native code holds the interpreter, or no link
                doing = self._ray.get(worker.actor.doing.remote(), timeout=_STACKS_S)
        return doing

    def diagnose(self, worker_id: int, *, with_stacks: bool) -> WorkerProgress:
        """Ask the actor; one that does not answer in time is known by its tasks alone."""
        worker = self._table.workers[worker_id]
        snapshot, stacks = self._ask(worker)
        if snapshot is None:
            words = self._table.activity(worker, worker.snapshot()).words
            why = "it has not started, native code holds its interpreter, or no link is"
            return WorkerProgress(f"{words}. It does not answer: {why}")
        return self._table.progress(worker, snapshot, stacks if with_stacks else "")

    def close(self, *, in_a_hurry: bool = False) -> None:
        """End the workers, and wait until they are gone."""
        workers = list(self._table.workers.values())
        self._table.workers.clear()
        if not self._connection or not self._owner.is_here:
            return  # in a forked copy of the main process Ray cannot be used
        is_connected, self._connection = self._is_connected, ""
        try:
            left = [worker for worker in workers if not worker.is_gone]
            if is_connected and left:
                self._end_all(left, _SHORT_GRACE_S if in_a_hurry else _GRACE_S)
        finally:  # also if a second Ctrl-C comes
            for worker in workers:
                worker.forget()
            self._spec = None
            self._inbox = queue.SimpleQueue()  # what is in there is not wanted

    def _end_all(self, workers: Sequence[RemoteWorker], grace_s: float) -> None:
        """Let them end, and end those that do not, or have not even started."""
        ends = [self._let_end(worker) for worker in workers]
        try:
            for worker in workers:
                if worker.handshake is None:
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


class Call(NamedTuple):
    """A call that is under way.

    Attributes:
        worker: Worker that is called.
        kind: "handshake", "open", "make" or "end".
        task: Task of a "make".
        trial: Number of the sample that is tried by itself; None makes the batch.
        is_alone: Whether nothing else may be under way meanwhile.
        number: Number of a "make" among those of its worker and epoch.
    """

    worker: RemoteWorker
    kind: str
    task: Any = None
    trial: int | None = None
    is_alone: bool = False
    number: int = -1


class Come(NamedTuple):
    """A call that has returned, or failed."""

    call: Call
    future: Any
    received_ns: int


class RemoteWorker(KnownWorker):
    """One actor, seen from the main process.

    Attributes:
        actor: Ray's handle.
        is_ready: Whether the actor has opened the spec, so that it may be sent tasks.
        handshake: Where it is; None until it has started.
        doubt_at: Moment at which to warn that it has not started, by the monotonic clock.
        num_out: Number of calls under way.
        until_end: Future of a call that never returns, and fails when the actor ends.
        dying_since: Moment when the first sign of its end came; infinite before.
        end: Cause of its end: Ray's exception, its own answer, or why the main process killed it.
        last_snapshot: Its last report of its status.
        last_stack: Its stack at that moment.
        sent: Calls that were sent and whose answers were not taken, by number.
    """

    def __init__(
        self, worker_id: int, actor: _Actor, spec: WorkerSpec, inbox: queue.SimpleQueue[Come]
    ) -> None:
        """Greet an actor that was asked for; after its handshake, `open` is to follow."""
        super().__init__(worker_id, 0)
        self.is_ready = False
        self.actor = actor
        self._spec = spec
        self._inbox: queue.SimpleQueue[Come] | None = inbox
        self.handshake: Handshake | None = None
        self.doubt_at = time.monotonic() + _DOUBT_S
        self.dying_since = math.inf
        self.end: Exception | Answer | str = ""
        self.last_snapshot: StatusSnapshot | None = None
        self.last_stack = ""
        self.num_out = 0
        self.begin_generation(BeginEpoch(0, 0))
        self.ask_for_hello()
        self.until_end = self._listen(Call(self, "end"), self.actor.until_end.remote())

    def __str__(self) -> str:
        """Return "worker 0 (pid 7 on 10.0.0.2)"."""
        return f"worker {self.worker_id} ({self.place})"

    @property
    def is_open(self) -> bool:
        """Whether it may be sent anything: no sign of its end has come."""
        return self.dying_since == math.inf and not self.is_gone

    @property
    def place(self) -> str:
        """Where it is, in words."""
        if self.handshake is None:
            return "not yet started"
        return f"pid {self.handshake.pid} on {self.handshake.address}"

    def open(self, serialized: object) -> None:
        """Let the actor open the spec; `serialized` is the reference of it."""
        self._listen(Call(self, "open"), self.actor.open.remote(serialized))

    def ask_for_hello(self) -> None:
        """Ask for a sign of life.

        If the actor's end of a connection was given up while no packets came through, this end
        does not learn of it before something is sent: then Ray connects anew, and sends all that
        was under way once more.
        """
        self._listen(Call(self, "handshake"), self.actor.handshake.remote())

    def _listen(self, call: Call, reference: Any) -> Any:  # noqa: ANN401 - Ray's reference, a future
        self.num_out += 1

        def come(future: Any) -> None:  # noqa: ANN401
            if (inbox := self._inbox) is not None:
                inbox.put(Come(call, future, time.monotonic_ns()))

        future = reference.future()
        future.add_done_callback(come)
        return future

    def forget(self) -> None:
        """Take note of nothing any more, and hold nothing in the object store.

        Ray may keep the callback of a call for long after this.
        """
        self._inbox = None
        self._early.clear()

    def begin_generation(self, begun: BeginEpoch) -> None:
        """Forget what was sent; the actor learns of the epoch with its first task."""
        self._generation = begun.generation
        self._to_send: collections.deque[Call] = collections.deque()
        self.sent: dict[int, Call] = {}
        self._next_number = 0
        self._num_taken = 0
        self._early: dict[int, Come] = {}  # by number
        self._begun_message = encode_message(begun)
        # The dataset's state may be large: it is sent until the actor has it.
        self._begun_already = encode_message(begun._replace(position=None))

    def submit(self, task: Task) -> None:
        """Send a task, behind trials of its samples if it is to be done alone."""
        self.note(task)
        hints = task.hints
        is_alone = hints is not None and hints.alone
        if hints is not None and is_alone:
            task = task._replace(hints=hints._replace(alone=False))
            keys = dataset_keys(task.indices) if self._spec.is_batched else [task.indices]
            can_try = not self._spec.is_iterable and hasattr(keys, "__len__")
            trials = range(len(keys) if can_try else 0)
            self._to_send.extend(Call(self, "make", task, k, is_alone=True) for k in trials)
        self._to_send.append(Call(self, "make", task, is_alone=is_alone))
        self.send()

    def send(self) -> None:
        """Send what may be sent: what is to be alone if nothing is under way, nothing beside it."""
        while self._to_send and self.is_open and self.is_ready:
            call = self._to_send[0]
            if self.sent and (call.is_alone or next(iter(self.sent.values())).is_alone):
                return
            self._to_send.popleft()
            number, self._next_number = self._next_number, self._next_number + 1
            call = call._replace(number=number)
            self.sent[number] = call
            begun = self._begun_already if self._num_taken else self._begun_message
            args = begun, encode_message(call.task), number, self._num_taken, call.trial
            self._listen(call, self.actor.make.remote(*args))

    def take(self, come: Come) -> Iterator[TaskResult]:
        """Yield the results whose turn it is now that this answer has come."""
        self._early[come.call.number] = come
        while self._num_taken in self._early:
            come = self._early.pop(self._num_taken)
            del self.sent[self._num_taken]
            self._num_taken += 1
            if come.call.trial is None:
                del self.tasks[self._generation, come.call.task.step]
                if come.future.result().kind != "dropped":  # as its shard is exhausted
                    yield _result_of(come)

    def snapshot(self) -> StatusSnapshot:
        """Return what it is doing, by what it has said, or else by what it was sent."""
        if self.last_snapshot is not None:
            return self.last_snapshot
        phase, step, number = Phase.WAITING, -1, None
        if not self.is_ready:
            phase = Phase.ABSENT if self.handshake is None else Phase.STARTING
        elif self.sent:
            call = next(iter(self.sent.values()))
            phase, step, number = Phase.READING, call.task.step, call.trial
        return StatusSnapshot(self._generation, step, phase, number, (), 0, 0.0)

    @property
    def other_steps(self) -> tuple[int, ...]:
        """Steps that it may have been making instead of its snapshot's.

        Tasks are done in their order, but what it has made may not have left its process yet.
        """
        if self.last_snapshot is not None:
            return ()
        return tuple(call.task.step for call in list(self.sent.values())[1:])

    def note_end(self, end: Exception | Answer | str) -> None:
        """Note that it is dying; a kill says more than its own words, and these more than Ray."""
        self.dying_since = time.monotonic()
        if not self.end or isinstance(self.end, Exception):
            self.end = end

    def describe_end(self, *, is_node_gone: bool) -> tuple[str, str]:
        """Return how it ended, and what to do about it; to be called when it has."""
        if isinstance(self.end, str):
            stack = f"\nIts Python stack then:\n{self.last_stack}" if self.last_stack else ""
            return f"was killed, as {self.end},", _ADVICE_ON_HANG + stack
        if isinstance(self.end, Answer):
            text = str(self.end.message)
            end = f"ended with {text.splitlines()[0]}"
            return end, f"Look for sys.exit in the dataset.\n{text}"
        if is_node_gone:
            return f"was lost with its machine ({self.place})", _ADVICE_ON_NODE
        # Without what Ray says of every dead actor.
        said = " ".join(str(self.end).rpartition("The actor is dead because ")[2].split())
        if self.handshake is None:
            return f"could not be started: {said}", _ADVICE_ON_INSTALL
        return "is gone", f"Ray says: {said}\n{_ADVICE_ON_EXIT}"


def _result_of(come: Come) -> TaskResult:
    answer: Any = come.future.result()
    result, _ = decode_result(answer.message)
    if result.kind == Kind.DONE:
        result.unpack = functools.partial(deserialize_tree, answer.serialized)
    elif result.kind == Kind.EMPTY:
        result.payload = NO_BATCH
    result.times = times_by_our_clock(result.times, come.received_ns)
    return result


def times_by_our_clock(times: bytes, received_ns: int) -> bytes:
    """Return the times of a task by our clock; those of one that was not measured as they are.

    The monotonic clocks of two machines differ: the batch is taken to have ended when it came.

    Example:
        >>> from penstock.engine.timing import NO_TIMES
        >>> times = replaced(NO_TIMES, begun_ns=1000, ended_ns=1600)
        >>> row = row_of_worker(times_by_our_clock(times, 70_800))
        >>> row.begun_ns, row.ended_ns
        (70200, 70800)
    """
    row = row_of_worker(times)
    begun_ns = received_ns - (row.ended_ns - row.begun_ns)
    return replaced(times, begun_ns=begun_ns, ended_ns=received_ns) if row.begun_ns else times


def deserialize_tree(serialized: SerializedTree) -> Any:  # noqa: ANN401 - any tree at all
    """Return the tree of `serialized`; its large arrays alias the buffers, and may be written.

    Small buffers, which lie in the answer itself, are copied.
    """
    return pickle.loads(serialized.pickled, buffers=map(_writable, serialized.buffers))


def _writable(buffer: npt.NDArray[np.uint8]) -> memoryview:
    if buffer.flags.writeable:
        return buffer.data
    if buffer.nbytes < _COPIED_BYTES:
        return buffer.copy().data
    # It lies in Ray's object store, which is mapped writable, whatever the array says.
    whole = (ctypes.c_ubyte * buffer.nbytes).from_address(buffer.ctypes.data)
    whole.owner = buffer  # type: ignore[attr-defined]  # an instance of a class made just now
    return memoryview(whole).cast("B")
