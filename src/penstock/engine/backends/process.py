# SPDX-License-Identifier: Apache-2.0
"""Workers as processes: started side by side, each with a channel and an arena of its own.

Guarantees
    A worker's death is seen at once, through its sentinel and the end of its channel, and disturbs
    no other worker's messages. What it had finished before is still delivered. Its logbook tells
    what it was doing. Slots of its batches live on as long as somebody holds them, no longer.
    Nothing here blocks but `events`, which waits on all channels and sentinels together, and
    `close`.
    When `close` returns no worker is left, within `_GRACE_S` and twice `_TERMINATE_S` in total,
    however many there are.

Shutdown order
    Channels are shut down: a waiting worker ends at once, a busy one after its task, whatever is
    queued. After `_GRACE_S` the rest get SIGTERM, after `_TERMINATE_S` more SIGKILL. Memory needs
    no step of its own: slots live as long as a view of them does.

A forked child (another loader's worker, say) inherits copies of the channels. It closes them right
after the fork, and `close` uses shutdown(2), which no copy can hold up.
"""

from __future__ import annotations

import collections
import logging
import multiprocessing
import os
import select
import signal
import time
import warnings
import weakref
from pickle import PicklingError
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.callers import users_level
from penstock.engine.fault_log import Losses
from penstock.engine.fork_hazards import warn_of_fork
from penstock.engine.logbook import PHRASES, Logbook, Phase
from penstock.engine.map_reader import note_samples
from penstock.engine.messages import (
    BatchMade,
    BeginEpoch,
    ShareEnded,
    Task,
    TaskFailed,
    decode,
    encode,
    revive_exception,
)
from penstock.engine.order import TaskDone, WorkerDied, WorkerExhausted
from penstock.engine.pickling import share_recipe, unpicklable_error
from penstock.engine.plan import keys_of, sample_key
from penstock.engine.salvage import NO_BATCH, BadSample
from penstock.engine.surroundings import (
    Memory,
    check_descriptors,
    describe_memory,
    memory_now,
    memory_warning,
)
from penstock.engine.worker import WorkerIdentity, run_worker
from penstock.randomness.keys import Purpose, seed_sequence
from penstock.transport.arena import Arena
from penstock.transport.channel import Channel
from penstock.transport.packing import unpack

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from penstock.engine.epoch import Epoch, Share
    from penstock.engine.logbook import Entry
    from penstock.engine.messages import BadReport
    from penstock.engine.plan import Caution, Plan
    from penstock.transport.channel import Frame

__all__ = ["ProcessBackend"]

_GRACE_S: Final = 3.0  # for a worker to finish its task and its user's clean-up
_SHORT_GRACE_S: Final = 0.3  # when somebody has pressed Ctrl-C
_TERMINATE_S: Final = 1.0
_LONGEST_POLL_S: Final = 3600.0  # poll(2) counts milliseconds in an int

_log = logging.getLogger("penstock")
_told: weakref.WeakSet[type] = weakref.WeakSet()  # datasets that were logged

_channels: weakref.WeakSet[Channel] = weakref.WeakSet()  # the trainer's ends, of all loaders
_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def _keep_slots_for_child() -> None:
    for arena in list(_arenas):
        arena.retire_leased()


def _detach_channels_in_child() -> None:
    for channel in list(_channels):
        channel.detach()


# A child goes on seeing the batches that were held at the fork, so their slots are not used again.
os.register_at_fork(before=_keep_slots_for_child, after_in_child=_detach_channels_in_child)


class _Batch:
    """A batch that has arrived; its slots are leased, also if nobody ever unpacks it."""

    __slots__ = ("_message", "_slots", "_where", "share")

    def __init__(self, message: BatchMade, slots: dict[int, memoryview], where: str) -> None:
        self._message = message
        self._slots = slots
        self._where = where
        self.share = message.share

    @property
    def losses(self) -> Losses:
        return Losses(self._message.num_asked, _revived(self._message.bad, self._where))

    def result(self) -> object:
        if self._message.is_empty:
            return NO_BATCH
        slots, self._slots = self._slots, {}
        return unpack(self._message.packed, slots)


class _Failure:
    """An exception of the user's code."""

    __slots__ = ("_message", "_where", "share")

    def __init__(self, message: TaskFailed, where: str) -> None:
        self._message = message
        self._where = where
        self.share = message.share

    @property
    def losses(self) -> Losses:
        return Losses(0, _revived(self._message.bad, self._where))

    def result(self) -> object:
        raise revive_exception(self._message.report, self._where)


def _revived(reports: Sequence[BadReport], where: str) -> list[BadSample]:
    return [
        BadSample(
            bad.index,
            revive_exception(bad.report, where),
            bad.report.traceback,
            bad.replaced_by,
        )
        for bad in reports
    ]


class _Worker:
    """The trainer's view of one worker."""

    def __init__(
        self,
        worker_id: int,
        process: Any,  # noqa: ANN401 - any context's
        channel: Channel,
        logbook: Logbook,
    ) -> None:
        self.worker_id = worker_id
        self.process = process
        self.channel = channel
        self.logbook = logbook
        self.arena = Arena()
        self.is_gone = False
        self.killed_because: str | None = None
        self.tasks: dict[int, object] = {}  # step -> indices, of this round, not answered
        self.share: Share | None = None  # where it is in its share of an iterable

    @property
    def may_be_innocent(self) -> bool:
        """Whether it was ended by a signal that may have come from outside."""
        code = self.process.exitcode or 0
        return self.killed_because is None and -code in _SIGNALS_FROM_OUTSIDE

    def describe_end(self) -> tuple[str, str]:
        """Say how the process ended, and what to do about it; to be called when it has."""
        if self.killed_because is not None:
            return f"was killed, as {self.killed_because}", _ADVICE_ON_HANG
        code = self.process.exitcode
        if code is None:
            return "closed its channel", "Something in the dataset closes descriptors of others."
        if code >= 0:
            return f"exited with code {code}", _ADVICE_ON_EXIT
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"was killed by {name}", _ADVICE_ON_SIGNALS.get(
            name, "Somebody sent it that signal."
        )


_ADVICE_ON_EXIT: Final = (
    "What it printed before may say why. Look for sys.exit or os._exit in the dataset; under spawn "
    'and forkserver, is the main script guarded by `if __name__ == "__main__":`?'
)
_ADVICE_ON_HANG: Final = "Raise `timeout` if samples may take that long."
_ADVICE_NATIVE: Final = "That is native code under the dataset: num_workers=0 shows where."
_ADVICE_ON_MEMORY: Final = "Often memory ran out: try fewer workers or a smaller prefetch_factor."
_SIGNALS_FROM_OUTSIDE: Final = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT}
)
_ADVICE_ON_SIGNALS: Final = {
    "SIGKILL": _ADVICE_ON_MEMORY,
    "SIGSEGV": _ADVICE_NATIVE,
    "SIGABRT": _ADVICE_NATIVE,
    "SIGBUS": _ADVICE_NATIVE,
    "SIGFPE": _ADVICE_NATIVE,
    "SIGILL": _ADVICE_NATIVE,
}


class ProcessBackend:
    """Process workers. See the module for its guarantees."""

    def __init__(self, plan: Plan) -> None:
        """Prepare workers for `plan`."""
        self._plan = plan
        self._context = plan.context or multiprocessing.get_context()
        self._workers: list[_Worker] = []
        self._shared_fd: int | None = None  # the recipe, for workers that are not forked
        self._begun: Epoch | None = None
        self._memory = Memory()
        self._has_weighed = False
        self.processes: list[Any] = []  # by worker id; kept after `close`, for who wants to look
        self._round = 0  # the user may begin the same epoch again; rounds are all different
        self._epoch = 0
        self._first_samples: dict[bytes, int] = {}
        self._num_respawned = 0
        self._poll = select.poll()
        self._by_fd: dict[int, _Worker] = {}
        self._owner_pid = os.getpid()

    def start(self) -> None:
        """Start all workers; none waits for another.

        Raises:
            UnpicklableError: the dataset (or a function) cannot be sent under this start method.
            ConfigError: this process may open too few files.
        """
        check_descriptors(self._plan.num_workers)
        self._memory = memory_now()
        if self._context.get_start_method() == "fork":
            warn_of_fork(stacklevel=users_level())
        else:
            self._shared_fd = share_recipe(self._plan.recipe)
        try:
            for worker_id in range(self._plan.num_workers):
                worker = self._start_worker(worker_id, self._plan.base_seed)
                self._workers.append(worker)
                self.processes.append(worker.process)
        except BaseException:
            self.close()
            raise
        finally:
            if self._plan.recipe.faults.max_respawns == 0:
                self._close_shared()

    def _close_shared(self) -> None:
        if self._shared_fd is not None:
            os.close(self._shared_fd)
            self._shared_fd = None

    def _start_worker(self, worker_id: int, base_seed: int) -> _Worker:
        plan = self._plan
        recipe = plan.recipe if self._shared_fd is None else None
        ours, theirs = Channel.pair()
        channel = Channel(ours)
        _channels.add(channel)
        identity = WorkerIdentity(worker_id, plan.num_workers, base_seed, plan.prefetch_factor + 2)
        try:
            logbook = Logbook()
            process = self._context.Process(  # type: ignore[attr-defined]  # every context has it
                target=run_worker,
                args=(theirs, identity, recipe),
                name=f"penstock-{worker_id}",
                daemon=True,
            )
            process.start()
        except BaseException as error:
            channel.close()
            if recipe is not None and isinstance(error, (TypeError, AttributeError, PicklingError)):
                raise unpicklable_error(recipe, error) from error
            raise
        finally:
            theirs.close()
        worker = _Worker(worker_id, process, channel, logbook)
        _arenas.add(worker.arena)
        for fd in (channel.fileno(), process.sentinel):
            self._by_fd[fd] = worker
            self._poll.register(fd, select.POLLIN)
        fds = [logbook.fd] if self._shared_fd is None else [logbook.fd, self._shared_fd]
        channel.post(b"", fds)
        logbook.close()
        return worker

    def respawn(self, worker_id: int) -> None:
        """Start another process, which goes on where the dead one was."""
        assert self._begun is not None
        dead = self._workers[worker_id]
        self._num_respawned += 1
        worker = self._start_worker(worker_id, self._seed_of_respawned())
        worker.share = dead.share
        self._workers[worker_id] = worker
        self.processes[worker_id] = worker.process
        self._tell_epoch(worker)

    def _seed_of_respawned(self) -> int:
        """Return a base seed that no worker had: it is not to draw again what a dead one drew."""
        words = seed_sequence(self._plan.base_seed, Purpose.WORKERS, self._num_respawned)
        return int(words.generate_state(1, np.uint64)[0] >> np.uint64(1))

    def kill(self, worker_id: int, why: str) -> None:
        """Send SIGKILL: what is stuck may not hear anything else."""
        worker = self._workers[worker_id]
        worker.killed_because = why
        worker.process.kill()

    def diagnose(self, worker_id: int) -> str:
        """Read its logbook, into which it writes its stacks."""
        worker = self._workers[worker_id]
        entry = worker.logbook.read()
        _, _, doing = self._last_deed(worker, entry)
        if worker.is_gone or entry.phase is Phase.ABSENT:
            return doing  # nobody there to understand the signal, which would end it
        stacks = worker.logbook.ask_for_stacks(worker.process.pid)
        return f"{doing}:\n{stacks}" if stacks else doing

    @property
    def is_whole(self) -> bool:
        """Whether every worker lives; asks the system, as nobody may have read of a death yet."""
        return all(not w.is_gone and w.process.is_alive() for w in self._workers)

    def begin_epoch(self, epoch: Epoch) -> None:
        """Tell every worker; what still comes of earlier epochs is dropped."""
        self._round += 1
        self._epoch = epoch.number
        self._begun = epoch
        self._first_samples.clear()
        for worker in self._workers:
            worker.share = epoch.progress.shares.get(worker.worker_id)
            worker.tasks.clear()
            self._tell_epoch(worker)

    def _tell_epoch(self, worker: _Worker) -> None:
        assert self._begun is not None
        begin = BeginEpoch(self._round, self._epoch, self._begun.is_announced, worker.share)
        self._post(worker, encode(begin))

    def submit(
        self, worker_id: int, step: int, indices: object, caution: Caution | None = None
    ) -> None:
        """Send the task, with the numbers of the slots that have come back."""
        worker = self._workers[worker_id]
        worker.tasks[step] = indices
        freed, retired = worker.arena.take_freed()
        task = Task(self._round, step, indices, tuple(freed), tuple(retired), caution)
        self._post(worker, encode(task))

    def _post(self, worker: _Worker, message: bytes) -> None:
        if worker.is_gone:
            return
        worker.channel.post(message)
        self._watch_writable(worker)

    def _watch_writable(self, worker: _Worker) -> None:
        wanted = select.POLLIN | (select.POLLOUT if worker.channel.has_unsent else 0)
        self._poll.modify(worker.channel.fileno(), wanted)

    def events(self, timeout_s: float | None) -> Sequence[TaskDone | WorkerExhausted | WorkerDied]:
        """Wait on all workers together."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            ready = self._poll.poll(None if left_s is None else min(left_s, _LONGEST_POLL_S) * 1000)
            if not ready and left_s is not None and left_s <= _LONGEST_POLL_S:
                return []
            events: list[TaskDone | WorkerExhausted | WorkerDied] = []
            for worker, flags in self._ready_workers(ready).items():
                if flags & select.POLLOUT:
                    worker.channel.flush()
                    self._watch_writable(worker)
                if flags & ~select.POLLOUT:
                    events += self._read(worker)
            if events:
                return events

    def _ready_workers(self, ready: list[tuple[int, int]]) -> dict[_Worker, int]:
        flags_of: dict[_Worker, int] = {}
        for fd, flags in ready:
            if worker := self._by_fd.get(fd):
                flags_of[worker] = flags_of.get(worker, 0) | flags
        return flags_of

    def _read(self, worker: _Worker) -> list[TaskDone | WorkerExhausted | WorkerDied]:
        events: list[TaskDone | WorkerExhausted | WorkerDied] = []
        # Asked before reading: what a process that is gone had to say is all there by then.
        was_alive = worker.process.is_alive()
        try:
            frames = collections.deque(worker.channel.receive())
        except EOFError:
            return [self._bury(worker)]
        try:
            while frames:
                frame = frames.popleft()
                event = self._understand(worker, decode(frame.data), frame)
                if event is not None:
                    events.append(event)
        finally:
            for frame in frames:
                frame.close()
        if not events and not was_alive:
            # Gone, while somebody that it started holds its end of the channel open.
            return [self._bury(worker)]
        return events

    def _understand(
        self,
        worker: _Worker,
        message: Any,  # noqa: ANN401 - one of the messages
        frame: Frame,
    ) -> TaskDone | WorkerExhausted | None:
        outcome: _Batch | _Failure
        if isinstance(message, BatchMade):
            worker.arena.add_all(message.new_slots, frame.fds)
            # Leased before anything else: slots of a dropped batch come back through the same path.
            slots = worker.arena.lease(message.packed.slots)
            outcome = _Batch(message, slots, self._where(worker, message))
            worker.arena.remove(message.retired_slots)
            self._weigh(message)
        elif isinstance(message, TaskFailed):
            outcome = _Failure(message, self._where(worker, message))
        if message.round != self._round:
            return None
        worker.tasks.pop(message.step, None)
        if not isinstance(message, ShareEnded) and message.share is not None:
            worker.share = message.share.after(worker.share)
        if isinstance(message, BatchMade) and message.first_sample is not None:
            self._compare_first_samples(worker.worker_id, message.first_sample)
        if isinstance(message, ShareEnded):
            return WorkerExhausted(worker.worker_id, message.step)
        return TaskDone(worker.worker_id, message.step, outcome)

    def _compare_first_samples(self, worker_id: int, digest: bytes) -> None:
        other_id = self._first_samples.setdefault(digest, worker_id)
        if other_id == worker_id:
            return
        recipe = self._plan.recipe
        message = (
            f"Workers {other_id} and {worker_id} both began {type(recipe.dataset).__name__} with "
            "the same sample: each worker iterates a copy of its own, so every sample would come "
            f"{self._plan.num_workers} times. In __iter__, go over "
            "`penstock.data.shard(samples)` instead of `samples`; each worker and rank then gets "
            "its share. (If different samples may be equal, this means nothing.)"
        )
        if recipe.seed is not None:
            warnings.warn(message, stacklevel=users_level())
        elif type(recipe.dataset) not in _told:
            # Not a warning: torch gives none, and programs count them.
            _told.add(type(recipe.dataset))
            _log.warning(message)

    def _weigh(self, message: BatchMade) -> None:
        """Say so once if memory will not hold as many batches as are to be under way."""
        if not self._has_weighed and message.new_slots:
            self._has_weighed = True
            batch_bytes = sum(size_bytes for _, size_bytes in message.new_slots)
            text = memory_warning(batch_bytes, self._plan.lookahead + 1, self._memory)
            if text is not None:
                warnings.warn(text, RuntimeWarning, stacklevel=users_level())

    def _where(self, worker: _Worker, message: TaskFailed | BatchMade) -> str:
        return (
            f"in worker {worker.worker_id} (pid {worker.process.pid}), epoch {self._epoch}, "
            f"step {message.step}"
        )

    def _bury(self, worker: _Worker) -> WorkerDied:
        worker.process.join(_TERMINATE_S)  # the channel ends a moment before the process does
        worker.is_gone = True
        for fd in (worker.channel.fileno(), worker.process.sentinel):
            self._poll.unregister(fd)
            del self._by_fd[fd]
        worker.channel.close()
        end, advice = worker.describe_end()
        entry = worker.logbook.read()
        step, sample, doing = self._last_deed(worker, entry)
        reason = (
            f"DataLoader worker (pid {worker.process.pid}) exited unexpectedly: worker "
            f"{worker.worker_id} {end} {doing}"
        )
        if worker.process.exitcode == -signal.SIGKILL and worker.killed_because is None:
            memory = describe_memory(memory_now(), self._memory, entry.peak_rss_bytes or None)
            advice = f"{memory} {advice}"
        if stacks := worker.logbook.new_stacks():
            advice += f"\nIts Python stack then:\n{stacks}"
        limit = 3 if worker.may_be_innocent else 2
        return WorkerDied(worker.worker_id, reason, advice, step, sample, limit)

    def _last_deed(self, worker: _Worker, entry: Entry) -> tuple[int | None, Hashable, str]:
        """Return the step that the worker was making, the sample it was at, and both in words."""
        doing = PHRASES[entry.phase]
        if entry.round != self._round or entry.step not in worker.tasks:
            return None, None, doing
        if entry.phase not in (Phase.READING, Phase.COLLATING, Phase.SENDING):
            return None, None, doing
        recipe = self._plan.recipe
        indices = keys_of(worker.tasks[entry.step])
        if recipe.is_iterable:
            return entry.step, None, f"{doing} a batch of its share of the dataset"
        indices = list(indices) if recipe.is_batched else [indices]
        if entry.number is None:
            return entry.step, None, f"{doing} samples {indices} of step {entry.step}"
        index = indices[entry.number] if entry.substitute is None else entry.substitute
        what = f"{doing} {note_samples(recipe.dataset, [index])} of step {entry.step}"
        return entry.step, sample_key(index), what

    def close(self, *, in_a_hurry: bool = False) -> None:
        """Stop the workers and wait until they are gone."""
        workers, self._workers = self._workers, []
        self._close_shared()
        self._by_fd.clear()  # and with it the arenas
        if os.getpid() != self._owner_pid:
            return  # a forked copy of the trainer: the workers are not its children
        for worker in workers:
            worker.channel.close()
        grace_s = _SHORT_GRACE_S if in_a_hurry else _GRACE_S
        left = _join([worker.process for worker in workers], grace_s)
        for process in left:
            process.terminate()
        left = _join(left, _TERMINATE_S)
        for process in left:
            process.kill()
        _join(left, _TERMINATE_S)


def _join(processes: list[Any], timeout_s: float) -> list[Any]:
    """Wait for all processes together, and return those that are still there."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.0))
    return [process for process in processes if process.is_alive()]
