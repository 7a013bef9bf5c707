# SPDX-License-Identifier: Apache-2.0
"""The code of a worker process, from its start to its end.

Guarantees
    Tasks are done in the order in which they came. Before each task the worker reads its channel: a
    closed channel ends it, whatever is still queued.
    It ends when the main process is gone, even in the middle of a task that hangs (see
    `end_with_parent`).
    Ctrl-C is left to the main process: the worker notes it, and waits for its channel to close.
    A dataset that was sent to the worker, not inherited by `fork`, is finalized as the worker ends.
    No `Exception` of the user's code ends the worker; `SystemExit` and the like do, as a death. The
    status page then holds what was raised, and where.
    The worker goes on, however a process that the dataset forks may end.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import hashlib
import importlib
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any, Final

from penstock.engine.recover import NO_BATCH, drop_frames
from penstock.engine.status_page import Phase, StatusWriter, open_status
from penstock.engine.task import BeginEpoch, Kind, decode_message, encode_result
from penstock.engine.task_runner import TaskRunner
from penstock.faults import annotate
from penstock.forks import Owner
from penstock.optional import when_imported
from penstock.randomness.generators import GlobalStates, seed_worker
from penstock.randomness.keys import Purpose, seed_sequence
from penstock.randomness.samples import forget_streams, seed_fallback
from penstock.transport.arena import SlotPool, SlotWriter
from penstock.transport.channel import Channel
from penstock.transport.packing import Packed, dumps, pack
from penstock.transport.shared import load_shared
from penstock.user_code import stack_of_error
from penstock.worker_info import WorkerInfo, info_unasked, set_worker_info

if TYPE_CHECKING:
    import socket

    from penstock.engine.plan import WorkerSpec
    from penstock.engine.task import Task, TaskResult, WorkerIdentity
    from penstock.transport.channel import Frame

_NOT_IN_MAIN: Final = 'Define it at the top level of a module, not below if __name__ == "__main__".'


def run_worker(sock: socket.socket, identity: WorkerIdentity, spec: WorkerSpec | None) -> None:
    """Serve tasks until the channel closes."""
    # A forked worker may carry the main process's handler.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    owner = Owner()
    channel = Channel(sock)
    worker = _ProcessWorker(channel, identity, spec)
    # Not SIG_IGN, which programs started from here would inherit.
    signal.signal(signal.SIGINT, lambda *_: worker.status.note_interrupt())
    try:
        worker.run()
    except BaseException as error:
        if not owner.is_here:
            raise
        if not isinstance(error, (EOFError, BrokenPipeError, ConnectionResetError)):
            worker.status.say_last_words(_last_words_of(error))
            raise
        worker.status.phase(Phase.ENDING)  # the main process wants no more, or is gone
    finally:
        channel.close()
    # The process's exit would not finalize the dataset.
    set_worker_info(None)
    if worker.adapter in sys.modules:
        sys.modules[worker.adapter].prepare_worker(None)


def _last_words_of(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        cause = "sys.exit ends a worker: raise an exception there instead."
    else:
        cause = "An exception outside of any sample ended it."
    text = "".join(traceback.format_exception_only(error)).strip()
    where = stack_of_error(error)
    return f"{cause}\nIts last words: {text}\nWhere it was raised:\n{where}"


def end_with_parent(fd: int) -> None:
    """Make this worker process end with its main process, whatever it is doing then.

    When the main process is gone the kernel sends SIGIO, which ends a process even while native
    code holds the interpreter.
    """
    import fcntl  # here, as Ray's workers import this module on Windows too

    # Opened anew: all workers share the owner and the flags of what was sent.
    with contextlib.suppress(OSError):  # a system without: the end of the channel has to do
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK)
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGIO])
        fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    os.close(fd)


def set_up_worker(spec: WorkerSpec, identity: WorkerIdentity) -> dict[str, bytes]:
    """Seed a process as a worker, call `worker_init_fn`; return digests of what that has seeded.

    Raises:
        Exception: what `worker_init_fn` raises.
    """
    forget_streams()
    seed_worker(identity.base_seed, identity.worker_id)
    seed_fallback(seed_sequence(identity.base_seed, Purpose.WORKERS, identity.worker_id))
    seed = identity.base_seed + identity.worker_id
    set_worker_info(WorkerInfo(identity.worker_id, identity.num_workers, seed, spec.dataset))
    if spec.framework is not None:
        adapter = spec.framework.adapter
        # Asked then, as a worker that never imports torch is not to hold the dataset by this.
        prepare = lambda: importlib.import_module(adapter).prepare_worker(info_unasked())  # noqa: E731
        when_imported(spec.framework.root, prepare)
    # One thread for each worker, as in torch's loader. OpenCV gets 0: with 1, a forked worker waits
    # for threads that do not exist there.
    for module, function, number in (("cv2", "setNumThreads", 0), ("torch", "set_num_threads", 1)):
        when_imported(module, functools.partial(_set_num_threads, module, function, number))
    states = {}
    if spec.worker_init_fn is not None:
        before = GlobalStates.now()
        spec.worker_init_fn(identity.worker_id)
        states = _changed_states(before) if spec.seed is None else {}
    # The objects that exist now, modules mostly, stay. Frozen, they cost no collections, some
    # 5 % of the time, and a forked worker goes on sharing their pages with the main process.
    gc.freeze()
    return states


_NAMES: Final = ("random", "numpy.random", "torch")  # of the fields of `GlobalStates`


def _changed_states(before: GlobalStates) -> dict[str, bytes]:
    """Return a digest of each global generator whose state has changed since `before`."""
    old, new = (
        [hashlib.blake2b(_plain(state), digest_size=16).digest() for state in states]
        for states in (before, GlobalStates.now())
    )
    named = zip(_NAMES, old, new, strict=True)
    return {name: digest for name, former, digest in named if digest != former}


def _plain(state: Any) -> bytes:  # noqa: ANN401 - a tensor, or equal if its text is
    plain: bytes = state.numpy().tobytes() if hasattr(state, "numpy") else repr(state).encode()
    return plain


def _set_num_threads(module: str, function: str, number: int) -> None:
    set_num_threads = getattr(sys.modules.get(module), function, None)
    if set_num_threads is not None:  # cv2 is imported twice, the first time without its functions
        set_num_threads(number)


class _SlotOutput:
    """Packs batches into slots."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._writer = SlotWriter(pool)
        self._num_bytes = 0
        self.empty = self._writer.empty
        self.abandon = self._writer.abandon

    def begin(self) -> None:
        """Do nothing: bytes are counted as the batch is packed."""

    def finish(self, batch: Any) -> Packed:  # noqa: ANN401
        packed = pack(batch, self._writer)
        self._num_bytes = sum(extent[2] for extent in packed.buffers)
        return packed

    def dry_run(self, batch: Any) -> None:  # noqa: ANN401
        dumps(batch)

    def take_cost(self) -> tuple[int, int, int]:
        num_bytes, self._num_bytes = self._num_bytes, 0
        return num_bytes, self._pool.size_bytes, self._pool.take_making_ns()


class _ProcessWorker:
    def __init__(self, channel: Channel, identity: WorkerIdentity, spec: WorkerSpec | None) -> None:
        self.pool = SlotPool(identity.max_free_slots)
        self.status = StatusWriter()
        self._channel = channel
        self._identity = identity
        self._inherited = spec
        self.adapter = ""  # of its spec's framework
        self._messages: collections.deque[BeginEpoch | Task | Exception] = collections.deque()

    def run(self) -> None:
        first, *others = self._channel.receive(wait=True)
        if self._channel.has_ended:
            raise EOFError  # the loader was closed meanwhile: a set-up would delay its end
        self._take_in(others)
        status_fd, parent_fd, *spec_fds = first.fds
        self.status = open_status(status_fd)
        end_with_parent(parent_fd)
        runner = TaskRunner(_SlotOutput(self.pool), self.status, self._identity)
        runner.set_up(lambda: self._set_up(runner, spec_fds))
        while True:
            self.status.phase(Phase.WAITING)
            message = self._next_message()
            if isinstance(message, BeginEpoch):
                result = runner.begin_epoch(message)
                if result is not None:
                    self._send(result)
                continue
            result = runner.run(message)
            if result is not None:
                self._send(result)
            del message, result

    def _set_up(self, runner: TaskRunner, spec_fds: list[int]) -> WorkerSpec:
        spec = self._inherited
        if spec is None:
            (fd,) = spec_fds
            try:
                spec = load_shared(fd)
            except AttributeError as error:
                if "__main__" in str(error) or "__mp_main__" in str(error):
                    annotate(error, _NOT_IN_MAIN)
                raise
        assert spec is not None
        self.adapter = "" if spec.framework is None else spec.framework.adapter
        if states := set_up_worker(spec, self._identity):
            runner.notices["states"] = states
        return spec

    def _send(self, result: TaskResult) -> None:
        packed = result.payload
        if result.kind == Kind.DONE:
            message, buffers, slots = packed
            place = message if isinstance(message, bytes) else tuple(message)
            result.payload = place, tuple(map(tuple, buffers)), slots
        elif packed is NO_BATCH:
            result.payload = None
        new = self.pool.take_new()
        sizes = tuple((slot.slot, slot.size_bytes) for slot in new)
        data = encode_result(result, sizes, tuple(self.pool.take_retired()))
        if result.kind == Kind.FAILED:
            drop_frames(packed)
        self._channel.send(data, [slot.fd for slot in new])
        for slot in new:
            os.close(slot.fd)

    def _next_message(self) -> BeginEpoch | Task:
        """Return the next message; all that has arrived is read first, to see a closed channel."""
        while True:
            self._take_in(self._channel.receive(wait=not self._messages))
            if self._channel.has_ended:
                raise EOFError  # whatever is still queued: its results would not be read
            if self._messages:
                message = self._messages.popleft()
                if isinstance(message, Exception):
                    raise message
                return message

    def _take_in(self, frames: list[Frame]) -> None:
        """Queue messages; slots that they bring back are free at once."""
        for frame in frames:
            try:
                message = decode_message(frame.data)
            except Exception as error:  # indices that do not unpickle: raised in their turn
                self._messages.append(error)
                continue
            if not isinstance(message, BeginEpoch):
                self.pool.release(message.freed)
                self.pool.retire(message.retired)
            self._messages.append(message)
