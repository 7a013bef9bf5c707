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

import contextlib
import errno
import functools
import math
import multiprocessing
import multiprocessing.process
import os
import select
import signal
import socket
import threading
import time
import weakref

# What `signal` wraps, without making an enumeration of every answer: 0.7 us a block instead of 8.
from _signal import getsignal, signal as set_handler  # type: ignore[import-not-found]  # isort: skip
from multiprocessing.connection import wait
from pickle import PicklingError
from typing import TYPE_CHECKING, Any, Final

from penstock.engine.backends import LONGEST_WAIT_S, close_at_exit
from penstock.engine.backends.process_worker import run_worker
from penstock.engine.recover import NO_BATCH
from penstock.engine.status_page import Phase, StatusPage
from penstock.engine.task import Kind, decode_result, encode_message, share_spec, unpicklable_error
from penstock.engine.worker_table import KnownWorker, WorkerProgress, WorkerTable
from penstock.errors import ConfigError
from penstock.fork_hazards import opencv_at_rest, warn_of_fork
from penstock.forks import Owner
from penstock.system_limits import (
    SystemMemory,
    advice_on_kill,
    check_descriptors,
    memory_now,
    memory_warning,
    signal_name,
)
from penstock.transport.arena import Arena
from penstock.transport.channel import Channel
from penstock.transport.packing import Packed, unpack
from penstock.warn import users_level, warn_user

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engine.plan import Epoch, Plan
    from penstock.engine.scheduler import BackendEvent, WorkerLost
    from penstock.engine.task import Task
    from penstock.transport.channel import Frame

_GRACE_S: Final = 3.0  # for a worker to finish its task and its user's clean-up
_SHORT_GRACE_S: Final = 0.3  # in a hurry, or after Ctrl-C
_TERMINATE_S: Final = 1.0
# Over all workers. When a main process waits for its device, the slots of all batches that it was
# ahead come back together. They are kept: making and locking a slot takes longer than filling it.
_BATCHES_AHEAD_OF_DEVICE: Final = 16
_ADVICE_ON_EXIT: Final = (
    "It said no last words, so it was no exception, nor sys.exit: look for os._exit in the "
    "dataset, or a library that ends the process. What it printed before may say why."
)
_ADVICE_ON_START: Final = (
    "What it printed before may say why. Under spawn and forkserver: is the main script guarded by "
    '`if __name__ == "__main__":`?'
)
_ADVICE_ON_UNKNOWN: Final = (
    "SIGCHLD is ignored in this process, or a handler of the program took the status of all "
    "children. signal.signal(signal.SIGCHLD, signal.SIG_DFL) lets the next message say more."
)
_ADVICE_ON_HANG: Final = "Raise `timeout` if samples, or the start of a worker, may take that long."
_ADVICE_NATIVE: Final = "That is native code under the dataset: num_workers=0 shows where."
_NATIVE_SIGNALS: Final = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
)
_SIGNALS_FROM_OUTSIDE: Final = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT}
)
_LAST_WORDS_S: Final = 3.0  # from the end of a channel to that of its process, torch unloaded
_SIGINT: Final = int(signal.SIGINT)

_processes: weakref.WeakSet[Any] = weakref.WeakSet()
_watch_fds: set[int] = set()  # of the parent-death watches of all backends


def _leave_to_parent() -> None:
    """In a forked child: leave the workers to the main process."""
    # At the child's exit multiprocessing would end them as its own.
    children: set[Any] = getattr(multiprocessing.process, "_children", set())
    children.difference_update(_processes)
    while _watch_fds:
        os.close(_watch_fds.pop())


os.register_at_fork(after_in_child=_leave_to_parent)


class HeldInterrupts:
    """A context in which SIGINT is noted, and acted upon at its end.

    A descriptor that has just been received, or a process that has just been started, would be
    lost between two bytecodes; and Python ignores what is raised in a hook of `os.fork`. Not
    `pthread_sigmask`: the kernel then gives the signal to another thread, and Python raises in the
    main thread all the same.

    Concurrency:
        Does nothing outside of the main thread, where no KeyboardInterrupt is ever raised. May be
        used again, not nested.
    """

    _handler: Any = None
    _is_noted = False

    def __enter__(self) -> None:
        """Begin to hold."""
        handler = getsignal(_SIGINT)
        if callable(handler) and threading.get_ident() == threading.main_thread().ident:
            self._is_noted = False
            set_handler(_SIGINT, self._note)
            self._handler = handler

    def _note(self, *_: object) -> None:
        self._is_noted = True

    def __exit__(self, *_: object) -> None:
        """Put the handler back, and let it have what was held."""
        if self._handler is not None:
            set_handler(_SIGINT, self._handler)
            self._handler = None
            if self._is_noted:
                signal.raise_signal(signal.SIGINT)


class WorkerProcess(KnownWorker):
    """One worker process.

    Attributes:
        process: Process object of `multiprocessing`.
        channel: Channel to it, at the main process's end.
        status_page: Status page into which it writes what it is doing.
        arena: Arena with the slots of its batches.
        watch_fd: Descriptor that is readable once the process has ended.
        exit_code: Exit code once it has ended; negative for a signal, None if it is unknown.
    """

    def __init__(
        self,
        worker_id: int,
        process: Any,  # noqa: ANN401 - any context's
        channel: Channel,
        status_page: StatusPage,
        arena: Arena,
    ) -> None:
        """Take over the resources of a process that has just been started."""
        super().__init__(worker_id, process.pid)
        self.process = process
        self.channel = channel
        self.status_page = status_page
        self.arena = arena
        self._end: tuple[str, str] | None = None  # how, and what to do, if we ended it
        self._has_ended = False
        self.exit_code: int | None = None
        self._pidfd = self._open_pidfd()
        # The sentinel is a pipe, which a process that the worker forked holds open after its end.
        self.watch_fd: int = process.sentinel if self._pidfd is None else self._pidfd

    def __str__(self) -> str:
        """Return "worker 0 (pid 7)"."""
        return f"worker {self.worker_id} (pid {self.pid})"

    def _open_pidfd(self) -> int | None:
        try:
            return os.pidfd_open(self.process.pid)
        except ProcessLookupError:  # it has ended already, and its exit status was taken elsewhere
            self._note_end()
        except (OSError, AttributeError):  # another system
            pass
        return None

    def has_ended(self) -> bool:
        """Return whether it has ended, and take its exit status once it has.

        `multiprocessing` finds an end by its exit status, and misses it if that was taken before:
        by the system, if SIGCHLD is ignored, or by a handler that waits for all children.
        """
        if not self._has_ended:
            pidfd = self._pidfd
            is_over = wait([pidfd], 0) if pidfd is not None else not self.process.is_alive()
            if is_over:
                self._note_end()
        return self._has_ended

    def _note_end(self) -> None:
        popen = self.process._popen
        if popen.method == "forkserver":
            self.process.join(_LAST_WORDS_S)  # the server is about to pass the exit status on
        self.exit_code = self.process.exitcode
        if self.exit_code is None:
            # Else multiprocessing would take it for alive, and signal the next process of its
            # number.
            popen.returncode = 255  # as multiprocessing has it where the server has died
        self.process.join()  # at once: it takes it off the list of children
        self._has_ended = True

    def is_alive(self) -> bool:
        """Return whether it lives, by asking the system."""
        return not self.is_gone and not self.has_ended()

    def signal(self, number: int) -> None:
        """Send a signal, if the process is still there; never to another of the same number."""
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number)
            elif not self.has_ended():
                os.kill(self.process.pid, number)

    def kill(self, why: str) -> None:
        """Kill a worker that is stuck; its stacks are in the status page then."""
        self._end = f"was killed, as {why},", _ADVICE_ON_HANG
        self.ask_for_stacks()
        self.signal(signal.SIGKILL)

    def ask_for_stacks(self) -> bool:
        """Have it write its stacks into the status page; return whether it can."""
        # Before its set-up the signal would end it.
        can = self.is_alive() and self.status_page.read().phase is not Phase.ABSENT
        if can:
            self.status_page.ask_for_stacks(self.signal)
        return can

    def wait_for_end(self) -> None:
        """Wait for a process whose channel has ended; kill it if it does not end."""
        left = wait_for_ends([self], _LAST_WORDS_S)
        if left:
            self._end = (
                "closed its channel and was killed, as it did not end,",
                "A thread or exit handler went on, or the dataset closes descriptors of others.",
            )
            self.signal(signal.SIGKILL)
            wait_for_ends([self], _LAST_WORDS_S)

    def release(self) -> None:
        """Close the main process's descriptors of a process that has ended."""
        self.channel.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    @property
    def was_ended_from_outside(self) -> bool:
        """Whether it may have been ended from outside: not by a sample, nor by this process."""
        return self._end is None and (
            self.exit_code is None or -self.exit_code in _SIGNALS_FROM_OUTSIDE
        )

    def describe_end(self) -> tuple[str, str]:
        """Return how the process ended, and what to do about it; call it after the end."""
        code = self.exit_code
        if self._end is not None:
            end, advice = self._end
        elif code is None:
            end, advice = "ended with an exit status that is unknown", _ADVICE_ON_UNKNOWN
        elif code >= 0:
            end = f"exited with code {code}"
            has_begun = self.status_page.read().phase is not Phase.ABSENT
            advice = _ADVICE_ON_EXIT if has_begun else _ADVICE_ON_START
        else:
            end = f"was killed by {signal_name(-code)}"
            is_native = -code in _NATIVE_SIGNALS
            advice = _ADVICE_NATIVE if is_native else "Another process sent it that signal."
        return end, self.status_page.last_words() or advice


def wait_for_ends(workers: Sequence[WorkerProcess], timeout_s: float) -> list[WorkerProcess]:
    """Wait for all processes together, and return those that are still there."""
    deadline = time.monotonic() + timeout_s
    left = [worker for worker in workers if not worker.has_ended()]
    while left and (left_s := deadline - time.monotonic()) > 0:
        wait([worker.watch_fd for worker in left], min(left_s, LONGEST_WAIT_S))
        left = [worker for worker in left if not worker.has_ended()]
    return left


class ProcessBackend:
    """Process workers. See the module for its guarantees."""

    def __init__(self, plan: Plan) -> None:
        """Prepare workers for `plan`."""
        self._plan = plan
        self._context = plan.context or multiprocessing.get_context()
        self._table: WorkerTable[WorkerProcess] = WorkerTable(plan)
        # Both ends of the pipe of `end_with_parent`; empty before the start and after `close`.
        self._watch: tuple[int, ...] = ()
        self._held_interrupts = HeldInterrupts()
        self._shared_fds: list[int] = []  # the spec's, for workers that are not forked
        self._memory = SystemMemory()
        self._has_checked_memory = False
        self._poll = select.poll()
        # By channel and `watch_fd`; a worker that was removed stays until it has ended.
        self._by_fd: dict[int, WorkerProcess] = {}
        self._ended: list[Any] = []  # the processes there were; programs ask an iterator for them
        self._owner = Owner()
        close_at_exit(self)

    @property
    def processes(self) -> list[Any]:
        """The processes of the workers, by worker id; also once they have ended."""
        return [worker.process for _, worker in sorted(self._table.workers.items())] or self._ended

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
            fd = share_spec(self._plan.spec)
            self._shared_fds += [] if fd is None else [fd]
        try:
            self._watch = os.pipe()
            _watch_fds.update(self._watch)
            for worker_id in range(self._plan.num_workers):
                with self._held_interrupts:
                    self._start_worker(worker_id)
        except BaseException:
            self.close()
            raise
        finally:
            if self._plan.spec.faults.max_respawns == 0 and not self._plan.max_workers:
                self._close_shared()

    def _close_shared(self) -> None:
        while self._shared_fds:
            os.close(self._shared_fds.pop())

    def _start_worker(self, worker_id: int, *, joins_late: bool = False) -> WorkerProcess:
        plan, identity = self._plan, self._table.identity_of(worker_id)
        max_free = plan.prefetch_factor + 2
        if plan.page_lock is not None:
            max_free += math.ceil(_BATCHES_AHEAD_OF_DEVICE / identity.num_workers)
        identity = identity._replace(joins_late=joins_late, max_free_slots=max_free)
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        status_page = StatusPage()
        try:
            process = self._context.Process(  # type: ignore[attr-defined]  # every context has it
                target=run_worker,
                args=(theirs, identity, None if self._shared_fds else plan.spec),
                name=f"penstock-{worker_id}",
                daemon=True,
            )
            with opencv_at_rest():
                process.start()
        except BaseException as error:
            channel.close()
            status_page.close()
            if isinstance(error, (TypeError, AttributeError, PicklingError)):
                raise unpicklable_error(plan.spec, error) from error
            if isinstance(error, ChildProcessError):  # CPython waits for its parent's server
                raise ConfigError(
                    f"worker {worker_id} cannot be started: the fork server is no child of this "
                    'process, which was forked from one that had used "forkserver", or has killed '
                    'the server. Here, use multiprocessing_context="spawn", or "fork".'
                ) from error
            if isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.ENOMEM):
                raise ConfigError(
                    f"the system cannot start the process of worker {worker_id}: {error.strerror}. "
                    "Raise the limit of processes (`ulimit -u`, or pids.max of the container) or "
                    "the memory, end other processes, or lower num_workers."
                ) from error
            raise
        finally:
            theirs.close()
        worker = WorkerProcess(worker_id, process, channel, status_page, Arena(plan.page_lock))
        _processes.add(process)
        for fd in (channel.fileno(), worker.watch_fd):
            self._by_fd[fd] = worker
            self._poll.register(fd, select.POLLIN)
        channel.post(b"", [status_page.fd, self._watch[0], *self._shared_fds])
        status_page.close()
        self._table.add(worker)
        return worker

    def respawn(self, worker_id: int, *, joins_late: bool = False) -> None:
        """Start another process, which goes on where the dead one was."""
        if not self._shared_fds:
            warn_of_fork(stacklevel=users_level())  # threads may have been started since
        with self._held_interrupts:
            worker = self._start_worker(worker_id, joins_late=joins_late)
        self._post(worker, encode_message(self._table.message_of(worker)))

    def add_worker(self, worker_id: int) -> None:
        """Start one process more; a removed one of the same number may still be ending."""
        check_descriptors(1)
        self.respawn(worker_id, joins_late=True)

    def remove_worker(self, worker_id: int) -> None:
        """Close its channel: it ends by itself. Batches that it made stay valid."""
        worker = self._table.workers.pop(worker_id)
        worker.is_gone = True
        self._unwatch(worker.channel.fileno())
        worker.channel.close()

    def _unwatch(self, *fds: int) -> None:
        for fd in fds:
            self._poll.unregister(fd)
            del self._by_fd[fd]

    def kill(self, worker_id: int, why: str) -> None:
        """Send SIGKILL, once its stacks are in the status page: it may ignore other signals."""
        self._table.workers[worker_id].kill(why)

    def diagnose(self, worker_id: int, *, with_stacks: bool) -> WorkerProgress:
        """Read the status page, into which the worker writes its stacks if it is asked to."""
        worker = self._table.workers[worker_id]
        snapshot = worker.status_page.read()
        stacks = ""
        if with_stacks and worker.ask_for_stacks():
            stacks = worker.status_page.new_stacks()
        return self._table.progress(worker, snapshot, stacks)

    @property
    def is_whole(self) -> bool:
        """Whether every worker lives; asks the system, as a death may not have been read yet."""
        return all(worker.is_alive() for worker in self._table.workers.values())

    def begin_epoch(self, epoch: Epoch) -> int:
        """Notify every worker; results of earlier epochs are dropped."""
        generation = self._table.begin_epoch(epoch)
        for worker in self._table.workers.values():
            self._post(worker, encode_message(self._table.message_of(worker)))
        return generation

    def begin_ahead(self, epoch: Epoch) -> int:
        """Notify every worker, which handles its messages in order."""
        generation = self._table.begin_ahead(epoch)
        for worker in self._table.workers.values():
            self._post(worker, encode_message(self._table.message_of(worker, generation)))
        return generation

    def adopt_ahead(self, generation: int, epoch: Epoch) -> None:
        """Make the epoch that was begun ahead the current one."""
        self._table.adopt_ahead(generation, epoch)

    def await_start(self) -> tuple[int, ...]:
        """Return no worker: those of this machine start at once."""
        return ()

    def submit(self, worker_id: int, task: Task) -> None:
        """Send the task, with the numbers of the slots that have come back."""
        worker = self._table.workers[worker_id]
        worker.note(task)
        freed, retired = worker.arena.take_freed()
        self._post(worker, encode_message(task._replace(freed=freed, retired=retired)))

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
            for fd, flags in ready:
                worker = self._by_fd.get(fd)
                if worker is None:  # its death is among the events
                    continue
                if flags & select.POLLOUT:
                    worker.channel.flush()
                    self._watch_writable(worker)
                if flags & ~select.POLLOUT:
                    with self._held_interrupts:
                        # Asked before reading: all that it sent before its end has arrived.
                        has_ended = fd == worker.watch_fd and worker.has_ended()
                        events += self._read(worker, has_ended=has_ended)
            if events:
                return events

    def _read(self, worker: WorkerProcess, *, has_ended: bool) -> list[BackendEvent]:
        if worker.is_gone:  # it was removed
            if has_ended:
                self._unwatch(worker.watch_fd)
                worker.release()
            return []
        try:
            frames = iter(worker.channel.receive())
        except EOFError:
            return [self._reap(worker)]
        try:
            found = [self._event_of(worker, frame) for frame in frames]
        finally:
            for frame in frames:  # those behind one that failed
                frame.close()
        events = [event for event in found if event is not None]
        if not events and has_ended:
            # It is gone, while a process that it started holds its end of the channel open.
            return [self._reap(worker)]
        return events

    def _event_of(self, worker: WorkerProcess, frame: Frame) -> BackendEvent | None:
        result, (new_slots, retired) = decode_result(frame.data)
        if frame.fds:
            worker.arena.add(new_slots, frame.fds)
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
            num_batches = self._plan.num_workers * self._plan.prefetch_factor + 1  # the loop's too
            text = memory_warning(batch_bytes, num_batches, self._memory)
            if text is not None:
                warn_user(text, RuntimeWarning)

    def _reap(self, worker: WorkerProcess) -> WorkerLost:
        self._unwatch(worker.channel.fileno(), worker.watch_fd)
        worker.wait_for_end()
        end, advice = worker.describe_end()
        snapshot = worker.status_page.read()
        if worker.was_ended_from_outside and worker.exit_code == -signal.SIGKILL:
            advice = advice_on_kill(memory_now(), self._memory, snapshot.peak_rss_bytes or None)
        if stacks := worker.status_page.new_stacks():
            advice += f"\nIts Python stack then:\n{stacks}"
        worker.release()
        number = worker.worker_id
        how = f"DataLoader worker (pid {worker.pid}) exited unexpectedly: worker {number} {end}"
        activity = self._table.activity(worker, snapshot)
        limit = 3 if worker.was_ended_from_outside else 2
        return self._table.death(worker, activity, how, advice, limit=limit)

    def close(self, *, in_a_hurry: bool = False) -> None:
        """Stop the workers and wait until they are gone."""
        workers = list(dict.fromkeys(self._by_fd.values()))
        self._ended = self.processes
        self._table.workers.clear()
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
        _watch_fds.difference_update(self._watch)
        for fd in self._watch:
            os.close(fd)
        self._watch = ()
