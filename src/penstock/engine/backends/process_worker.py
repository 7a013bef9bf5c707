# SPDX-License-Identifier: Apache-2.0
"""The code of a worker process, from its start to its end.

Guarantees
    Tasks are done in the order in which they came. Before each task the worker reads its channel: a
    closed channel ends it, whatever is still queued.
    It ends when the main process is gone, even in the middle of a task that hangs (see
    `parent_watch`).
    Ctrl-C is left to the main process: the worker notes it, and waits for its channel to close.
    No `Exception` of the user's code ends the worker; `SystemExit` and the like do, as a death. The
    status page then holds what was raised, and where.
    The worker goes on, however a process that the dataset forks may end.
"""

from __future__ import annotations

import collections
import errno
import gc
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any, Final

from penstock.engine.parent_watch import end_with_parent
from penstock.engine.recover import NO_BATCH, drop_frames
from penstock.engine.status_page import Phase, StatusWriter, open_status
from penstock.engine.task import BeginEpoch, Kind, decode_message, encode_result
from penstock.engine.task_runner import TaskRunner
from penstock.engine.worker_setup import set_up_worker
from penstock.faults import annotate
from penstock.forks import Owner
from penstock.transport.arena import SlotPool, SlotWriter
from penstock.transport.channel import Channel
from penstock.transport.packing import Packed, dumps, pack
from penstock.transport.shared import load_shared
from penstock.user_code import stack_of_error

if TYPE_CHECKING:
    import socket

    from penstock.engine.plan import WorkerSpec
    from penstock.engine.task import TaskResult, WorkerIdentity
    from penstock.transport.channel import Frame

__all__ = ["run_worker"]


_NOT_IN_MAIN: Final = (
    "A worker that is spawned imports the main script, and does not find it there: define it at "
    'the top level, not below if __name__ == "__main__", or in a module.'
)


def run_worker(sock: socket.socket, identity: WorkerIdentity, spec: WorkerSpec | None) -> None:
    """Serve tasks until the channel closes.

    Args:
        sock: This worker's end of its channel.
        identity: Identity of this worker.
        spec: Spec of the worker; None if it comes as a shared segment in the first frame, behind
            the status page.
    """
    # A forked worker may carry the main process's handler.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    owner = Owner()
    channel = Channel(sock)
    worker = _ProcessWorker(channel, identity, spec)
    # Not SIG_IGN, which programs started from here would inherit.
    signal.signal(signal.SIGINT, worker.note_interrupt)
    try:
        worker.run()
    except BaseException as error:
        is_unwanted = isinstance(error, (EOFError, BrokenPipeError, ConnectionResetError))
        if owner.is_here and is_unwanted:
            worker.note_end()  # the main process wants no more, or is gone
            return
        if owner.is_here:
            worker.say_last_words(error)
        raise
    finally:
        channel.close()
        worker.close()


def _cause_of(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "sys.exit ends a worker: raise an exception there instead."
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return (
            "The system gives it no threads: raise `ulimit -u`, or the container's limit of "
            "processes and threads (pids.max), or start fewer."
        )
    if isinstance(error, OSError) and error.errno == errno.EBADF:
        return (
            "Something in the worker has closed descriptors that are not its own: look for "
            "os.closerange and os.close in the dataset."
        )
    return "An exception outside of any sample ended it."


class _SlotOutput:
    """Packs batches into slots."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._writer = SlotWriter(pool)
        self._num_bytes = 0
        self.empty = self._writer.empty
        self.abandon = self._writer.abandon

    def begin(self, *, counts_bytes: bool) -> None:
        """Do nothing: bytes are counted in any case, as the batch is packed."""

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
        self._channel = channel
        self._identity = identity
        self._spec = spec
        self._frames: collections.deque[Frame] = collections.deque()
        self._pool = SlotPool(identity.max_free_slots)
        self._status = StatusWriter()

    def run(self) -> None:
        status_fd, parent_fd, *spec_fds = self._next_frame().fds
        self._status = open_status(status_fd)
        end_with_parent(parent_fd)
        runner = TaskRunner(_SlotOutput(self._pool), self._status, self._identity)
        runner.set_up(lambda: self._set_up(runner, spec_fds))
        # The objects that exist now, modules mostly, stay. Frozen, they cost no collections, some
        # 5 % of the time, and a forked worker goes on sharing their pages with the main process.
        gc.freeze()
        has_frozen = False
        while True:
            self._status.phase(Phase.WAITING)
            message = decode_message(self._next_frame().data)
            if isinstance(message, BeginEpoch):
                result = runner.begin_epoch(message)
                if result is not None:
                    self._send(result)
                continue
            self._pool.release(message.freed)
            self._pool.retire(message.retired)
            result = runner.run(message)
            if result is not None:
                self._send(result)
            del message, result
            if not has_frozen and self._spec is not None and not self._spec.is_iterable:
                # Freeze what the first batch has added as well: imports, files of the dataset.
                # Not with an iterable: its iterator is there too, and ends with the epoch.
                has_frozen = True
                gc.collect()  # or garbage of that batch would stay too
                gc.freeze()

    def _set_up(self, runner: TaskRunner, spec_fds: list[int]) -> WorkerSpec:
        if self._spec is None:
            (fd,) = spec_fds
            try:
                self._spec = load_shared(fd)
            except AttributeError as error:
                if "__main__" in str(error) or "__mp_main__" in str(error):
                    annotate(error, _NOT_IN_MAIN)
                raise
        assert self._spec is not None
        states = set_up_worker(self._spec, self._identity)
        if states:
            runner.notice(states=states)
        return self._spec

    def _send(self, result: TaskResult) -> None:
        packed = result.payload
        if result.kind == Kind.DONE:
            message, buffers, slots = packed
            place = message if isinstance(message, bytes) else tuple(message)
            result.payload = place, tuple(map(tuple, buffers)), slots
        elif packed is NO_BATCH:
            result.payload = None
        new = self._pool.take_new()
        sizes = tuple((slot.slot, slot.size_bytes) for slot in new)
        data = encode_result(result, sizes, tuple(self._pool.take_retired()))
        if result.kind == Kind.FAILED:
            drop_frames(packed)
        self._channel.send(data, [slot.fd for slot in new])
        for slot in new:
            os.close(slot.fd)

    def _next_frame(self) -> Frame:
        """Return the next frame; all that has arrived is read first, to see a closed channel."""
        self._frames.extend(self._channel.receive(wait=not self._frames))
        if self._channel.has_ended:
            raise EOFError  # whatever is still queued: its results would not be read
        return self._frames.popleft()

    def close(self) -> None:
        self._pool.close()

    def note_end(self) -> None:
        self._status.phase(Phase.ENDING)

    def note_interrupt(self, *_: object) -> None:
        self._status.note_interrupt()

    def say_last_words(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception_only(error)).strip()
        where = stack_of_error(error)
        self._status.say_last_words(
            f"{_cause_of(error)}\nIts last words: {text}\nWhere it was raised:\n{where}"
        )


if sys.platform == "win32":
    raise ImportError("Penstock's process workers need Unix sockets; Windows is not supported yet")
