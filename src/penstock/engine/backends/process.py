# SPDX-License-Identifier: Apache-2.0
"""Workers as processes: started side by side, each with a channel and an arena of its own.

Guarantees
    A worker's death is detected at once, by its pidfd (its sentinel where there is none) and the
    end of its channel, and disturbs no other worker's messages. Results that it had sent are still
    delivered. Its status page shows what it was doing. Slots of its batches live exactly as long
    as views of them.
    `events` waits on all channels and processes together. Besides it only `close`, `kill` and
    `diagnose` wait, for seconds at most. Ctrl-C is held back while a worker starts, and while a
    message is taken in.
    When `close` returns no worker is left, within `_GRACE_S` and twice `_TERMINATE_S` in total,
    however many there are.

Shutdown order
    Channels are shut down: a waiting worker ends at once, a busy one after its task, whatever is
    queued. After `_GRACE_S` (`_SHORT_GRACE_S` in a hurry or after Ctrl-C) the rest get SIGTERM,
    `_TERMINATE_S` later SIGKILL. Memory needs no step: slots live as long as views of them.

A forked child (another loader's worker, say) inherits copies of the channels, which are closed
there at once (`Channel`). `close` uses shutdown(2), which no copy can hold up.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import errno
import functools
import math
import multiprocessing
import multiprocessing.process
import os
import select
import signal
import time
import warnings
import weakref
from pickle import PicklingError
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.engine.backends.process_handle import WorkerProcess, wait_for_ends
from penstock.engine.backends.process_worker import run_worker
from penstock.engine.fork_hazards import opencv_at_rest, warn_of_fork
from penstock.engine.interrupts import LONGEST_WAIT_S, HeldInterrupts
from penstock.engine.limits import (
    SystemMemory,
    advice_on_kill,
    check_descriptors,
    describe_memory,
    memory_now,
    memory_warning,
)
from penstock.engine.parent_watch import ParentWatch
from penstock.engine.pickling import share_spec, unpicklable_error
from penstock.engine.recover import NO_BATCH
from penstock.engine.status_page import StatusPage
from penstock.engine.task import Kind, WorkerIdentity, decode_result, encode_message
from penstock.engine.worker_table import WorkerProgress, WorkerTable
from penstock.errors import ConfigError
from penstock.forks import Owner
from penstock.randomness.keys import Purpose, seed_sequence
from penstock.transport.channel import Channel
from penstock.transport.packing import Packed, unpack
from penstock.warn import users_level

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engine.plan import Epoch, Plan, RetryHints
    from penstock.engine.scheduler import BackendEvent, WorkerLost
    from penstock.transport.channel import Frame

__all__ = ["ProcessBackend"]

_GRACE_S: Final = 3.0  # for a worker to finish its task and its user's clean-up
_SHORT_GRACE_S: Final = 0.3  # in a hurry, or after Ctrl-C
_TERMINATE_S: Final = 1.0
_MOST_PREFETCH: Final = 8  # the largest factor that may come during an epoch
# Over all workers. When a main process waits for its device, the slots of all batches that it was
# ahead come back together. They are kept: making and locking a slot takes longer than filling it.
_BATCHES_AHEAD_OF_DEVICE: Final = 16
_HAS_ENDED: Final = 1 << 16  # among the flags of a worker: its process has

_processes: weakref.WeakSet[Any] = weakref.WeakSet()
_backends: weakref.WeakSet[ProcessBackend] = weakref.WeakSet()


def _leave_in_child() -> None:
    # At its exit multiprocessing would end the workers, which it takes for the child's own.
    children: set[Any] = getattr(multiprocessing.process, "_children", set())
    for process in list(_processes):
        children.discard(process)


def _close_all() -> None:
    """At interpreter exit: multiprocessing would wait for ever for workers that ignore SIGTERM."""
    for backend in list(_backends):
        backend.close(in_a_hurry=True)


atexit.register(_close_all)  # runs before multiprocessing's, which was registered before


os.register_at_fork(after_in_child=_leave_in_child)


class ProcessBackend:
    """Process workers. See the module for its guarantees."""

    def __init__(self, plan: Plan) -> None:
        """Prepare workers for `plan`."""
        self.measures = True
        self._plan = plan
        self._context = plan.context or multiprocessing.get_context()
        self._table: WorkerTable[WorkerProcess] = WorkerTable(plan)
        self._leaving: dict[int, WorkerProcess] = {}  # by watch_fd; removed, not yet ended
        self._was_started: set[int] = set()  # numbers of workers
        self._parent_watch: ParentWatch | None = None
        self._held_interrupts = HeldInterrupts()
        self._shared_fd: int | None = None  # the spec, for workers that are not forked
        self._memory = SystemMemory()
        self._has_checked_memory = False
        self.processes: list[Any] = []  # by worker id; kept after `close`, for inspection
        self._num_respawned = 0
        _backends.add(self)
        self._poll = select.poll()
        self._by_fd: dict[int, WorkerProcess] = {}
        self._owner = Owner()

    def start(self) -> None:
        """Start all workers; none waits for another.

        Raises:
            UnpicklableError: the dataset (or a function) cannot be sent under this start method.
            ConfigError: this process may open too few files, or start too few processes.
        """
        check_descriptors(self._plan.num_workers)
        self._memory = memory_now()
        if self._context.get_start_method() == "fork":
            warn_of_fork(stacklevel=users_level())
        else:
            self._shared_fd = share_spec(self._plan.spec)
        try:
            self._parent_watch = ParentWatch()
            for worker_id in range(self._plan.num_workers):
                self._open_worker(worker_id)
        except BaseException:
            self.close()
            raise
        finally:
            if self._plan.spec.faults.max_respawns == 0 and not self._plan.max_workers:
                self._close_shared()

    def _open_worker(self, worker_id: int, *, joins_late: bool = False) -> WorkerProcess:
        seed = self._plan.base_seed
        if worker_id in self._was_started:
            self._num_respawned += 1
            seed = self._seed_of_respawned()
        with self._held_interrupts:
            worker = self._start_worker(worker_id, seed, joins_late=joins_late)
            self._was_started.add(worker_id)
            self._table.add(worker)
            self._list_processes()
        return worker

    def _list_processes(self) -> None:
        self.processes = [worker.process for _, worker in sorted(self._table.workers.items())]

    def _close_shared(self) -> None:
        if self._shared_fd is not None:
            os.close(self._shared_fd)
            self._shared_fd = None

    def _start_worker(
        self, worker_id: int, base_seed: int, *, joins_late: bool = False
    ) -> WorkerProcess:
        plan = self._plan
        assert self._parent_watch is not None
        spec = plan.spec if self._shared_fd is None else None
        ours, theirs = Channel.pair()
        channel = Channel(ours)
        num_workers = max(plan.num_workers, plan.max_workers)
        # Where their number changes, workers may come to be further ahead.
        prefetch = max(plan.prefetch_factor, _MOST_PREFETCH if plan.max_workers else 0)
        max_free = prefetch + 2
        if plan.page_lock is not None:
            max_free += math.ceil(_BATCHES_AHEAD_OF_DEVICE / num_workers)
        identity = WorkerIdentity(worker_id, num_workers, base_seed, joins_late, max_free)
        status_page = StatusPage()
        try:
            process = self._context.Process(  # type: ignore[attr-defined]  # every context has it
                target=run_worker,
                args=(theirs, identity, spec),
                name=f"penstock-{worker_id}",
                daemon=True,
            )
            with opencv_at_rest() if spec is not None else contextlib.nullcontext():
                process.start()
        except BaseException as error:
            channel.close()
            status_page.close()
            if spec is not None and isinstance(error, (TypeError, AttributeError, PicklingError)):
                raise unpicklable_error(spec, error) from error
            if isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.ENOMEM):
                raise ConfigError(
                    f"the system cannot start the process of worker {worker_id}: {error.strerror}. "
                    "Raise the limit of processes (`ulimit -u`, or pids.max of the container) or "
                    "the memory, end other processes, or lower num_workers."
                ) from error
            raise
        finally:
            theirs.close()
        worker = WorkerProcess(worker_id, process, channel, status_page, plan.page_lock)
        _processes.add(process)
        for fd in (channel.fileno(), worker.watch_fd):
            self._by_fd[fd] = worker
            self._poll.register(fd, select.POLLIN)
        shared = [] if self._shared_fd is None else [self._shared_fd]
        channel.post(b"", [status_page.fd, self._parent_watch.fd, *shared])
        status_page.close()
        return worker

    def respawn(self, worker_id: int) -> None:
        """Start another process, which goes on where the dead one was."""
        if self._shared_fd is None:
            warn_of_fork(stacklevel=users_level())  # threads may have been started since
        self._tell_epoch(self._open_worker(worker_id))

    def add_worker(self, worker_id: int) -> None:
        """Start one process more; a removed one of the same number may still be ending."""
        check_descriptors(1)
        if self._shared_fd is None:
            warn_of_fork(stacklevel=users_level())  # threads may have been started since
        self._tell_epoch(self._open_worker(worker_id, joins_late=True))

    def remove_worker(self, worker_id: int) -> None:
        """Close its channel: it ends by itself. Batches that it made stay valid."""
        worker = self._table.workers.pop(worker_id)
        self._list_processes()
        self._poll.unregister(worker.channel.fileno())
        del self._by_fd[worker.channel.fileno()], self._by_fd[worker.watch_fd]
        worker.is_gone = True
        worker.channel.close()
        self._leaving[worker.watch_fd] = worker

    def _release_ended(self, fd: int) -> None:
        """Release a removed worker that has ended, and what it held in the main process."""
        worker = self._leaving[fd]
        if not worker.has_ended():
            return
        del self._leaving[fd]
        self._poll.unregister(fd)
        worker.release()
        worker.process.close()

    def _seed_of_respawned(self) -> int:
        """Return a base seed that no worker had, so that a dead worker's draws do not repeat."""
        words = seed_sequence(self._plan.base_seed, Purpose.WORKERS, self._num_respawned)
        return int(words.generate_state(1, np.uint64)[0] >> np.uint64(1))

    def kill(self, worker_id: int, why: str) -> None:
        """Send SIGKILL, once its stacks are in the status page: it may ignore other signals."""
        self._table.workers[worker_id].kill(why)

    def diagnose(self, worker_id: int, *, with_stacks: bool) -> WorkerProgress:
        """Read the status page, into which the worker writes its stacks if it is asked to."""
        worker = self._table.workers[worker_id]
        snapshot = worker.status_page.read()
        stacks = ""
        if with_stacks and worker.can_show_stacks:
            worker.status_page.ask_for_stacks(worker.signal)
            stacks = worker.status_page.new_stacks()
        return self._table.progress(worker, snapshot, stacks)

    @property
    def is_whole(self) -> bool:
        """Whether every worker lives; asks the system, as a death may not have been read yet."""
        return all(worker.is_alive() for worker in self._table.workers.values())

    def begin_epoch(self, epoch: Epoch) -> None:
        """Notify every worker; results of earlier epochs are dropped."""
        self._table.begin_epoch(epoch)
        for worker in self._table.workers.values():
            self._tell_epoch(worker)

    def begin_ahead(self, epoch: Epoch) -> int:
        """Notify every worker, which handles its messages in order."""
        generation = self._table.begin_ahead(epoch)
        for worker in self._table.workers.values():
            self._tell_epoch(worker, generation)
        return generation

    def adopt_ahead(self, generation: int, epoch: Epoch) -> None:
        """Make the epoch that was begun ahead the current one."""
        self._table.adopt_ahead(generation, epoch)

    def drop_ahead(self) -> None:
        """Drop the results of the epoch that was begun ahead."""
        self._table.drop_ahead()

    def _tell_epoch(self, worker: WorkerProcess, generation: int | None = None) -> None:
        self._post(worker, encode_message(self._table.message_of(worker, generation)))

    def await_start(self) -> tuple[int, ...]:
        """Return no worker: those of this machine start at once."""
        return ()

    def submit(
        self,
        worker_id: int,
        step: int,
        indices: object,
        hints: RetryHints | None = None,
        *,
        generation: int | None = None,
    ) -> None:
        """Send the task, with the numbers of the slots that have come back."""
        worker = self._table.workers[worker_id]
        freed, retired = worker.arena.take_freed()
        task = self._table.task_of(
            worker,
            step,
            indices,
            hints,
            is_measured=self.measures,
            freed=tuple(freed),
            retired=tuple(retired),
            generation=generation,
        )
        self._post(worker, encode_message(task))

    def _post(self, worker: WorkerProcess, message: bytes) -> None:
        if worker.is_gone:
            return
        worker.channel.post(message)
        if worker.channel.has_unsent:
            self._watch_writable(worker)

    def _watch_writable(self, worker: WorkerProcess) -> None:
        wanted = select.POLLIN | (select.POLLOUT if worker.channel.has_unsent else 0)
        self._poll.modify(worker.channel.fileno(), wanted)

    def events(self, timeout_s: float | None) -> Sequence[BackendEvent]:
        """Wait on all workers together."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            ready = self._poll.poll(min(left_s, LONGEST_WAIT_S) * 1000)
            if not ready and left_s <= LONGEST_WAIT_S:
                return []
            events: list[BackendEvent] = []
            for worker, flags in self._ready_workers(ready).items():
                if flags & select.POLLOUT:
                    worker.channel.flush()
                    self._watch_writable(worker)
                if flags & ~select.POLLOUT:
                    with self._held_interrupts:
                        has_ended = bool(flags & _HAS_ENDED) and worker.has_ended()
                        events += self._read(worker, has_ended=has_ended)
            if events:
                return events

    def _ready_workers(self, ready: list[tuple[int, int]]) -> dict[WorkerProcess, int]:
        flags_of: dict[WorkerProcess, int] = {}
        for fd, flags in ready:
            if fd in self._leaving:
                self._release_ended(fd)
            elif worker := self._by_fd.get(fd):
                more = _HAS_ENDED if fd == worker.watch_fd else 0
                flags_of[worker] = flags_of.get(worker, 0) | flags | more
        return flags_of

    def _read(self, worker: WorkerProcess, *, has_ended: bool) -> list[BackendEvent]:
        # `has_ended` was found out before reading: by now all that it sent has arrived.
        events: list[BackendEvent] = []
        try:
            frames = collections.deque(worker.channel.receive())
        except EOFError:
            return [self._reap(worker)]
        try:
            while frames:
                frame = frames.popleft()
                event = self._event_of(worker, frame)
                if event is not None:
                    events.append(event)
        finally:
            for frame in frames:
                frame.close()
        if not events and has_ended:
            # It is gone, while a process that it started holds its end of the channel open.
            return [self._reap(worker)]
        return events

    def _event_of(self, worker: WorkerProcess, frame: Frame) -> BackendEvent | None:
        result, (new_slots, retired) = decode_result(frame.data)
        if frame.fds:
            worker.arena.add_all(new_slots, frame.fds)
            self._check_memory(new_slots)
        if result.kind == Kind.DONE:
            message, buffers, slots = result.payload
            # Leased before anything else: slots of a dropped batch come back through the same path.
            leases = worker.arena.lease(slots)
            result.unpack = functools.partial(unpack, Packed(message, buffers, slots), leases)
            result.payload = None
        elif result.kind == Kind.EMPTY:
            result.payload = NO_BATCH
        worker.arena.remove(retired)
        return self._table.accept(worker, result)

    def _check_memory(self, new_slots: Sequence[tuple[int, int]]) -> None:
        """Warn once if memory will not hold all batches that are to be under way."""
        if not self._has_checked_memory and new_slots:
            self._has_checked_memory = True
            batch_bytes = sum(size_bytes for _, size_bytes in new_slots)
            text = memory_warning(batch_bytes, self._plan.lookahead + 1, self._memory)
            if text is not None:
                warnings.warn(text, RuntimeWarning, stacklevel=users_level())

    def _reap(self, worker: WorkerProcess) -> WorkerLost:
        for fd in (worker.channel.fileno(), worker.watch_fd):
            self._poll.unregister(fd)
            del self._by_fd[fd]
        worker.wait_for_end()
        end, advice = worker.describe_end()
        snapshot = worker.status_page.read()
        if worker.was_killed_by_memory_perhaps:
            now, peak_bytes = memory_now(), snapshot.peak_rss_bytes or None
            memory = describe_memory(now, self._memory, peak_bytes)
            advice = f"{memory} {advice_on_kill(now, self._memory, peak_bytes)}".lstrip()
        if stacks := worker.status_page.new_stacks():
            advice += f"\nIts Python stack then:\n{stacks}"
        limit = worker.deaths_that_prove
        worker.release()
        how = (
            f"DataLoader worker (pid {worker.pid}) exited unexpectedly: worker "
            f"{worker.worker_id} {end}"
        )
        activity = self._table.activity(worker, snapshot)
        return self._table.death(worker, activity, how, advice, limit=limit)

    def close(self, *, in_a_hurry: bool = False) -> None:
        """Stop the workers and wait until they are gone."""
        workers = [*self._table.workers.values(), *self._leaving.values()]
        self._table.workers.clear()
        self._leaving.clear()
        self._close_shared()
        self._by_fd.clear()  # and with it the arenas
        if not self._owner.is_here:
            return  # a forked copy of the main process: the workers are not its children
        for worker in workers:
            worker.channel.close()
        left = wait_for_ends(workers, _SHORT_GRACE_S)
        # A Ctrl-C in the loop's own code is not seen here, but by workers that it has reached.
        if left and not in_a_hurry and not any(w.status_page.was_interrupted for w in workers):
            left = wait_for_ends(left, _GRACE_S - _SHORT_GRACE_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for worker in left:
                worker.signal(number)
            left = wait_for_ends(left, _TERMINATE_S)
        for worker in workers:
            worker.release()
        if self._parent_watch is not None:
            self._parent_watch.close()
