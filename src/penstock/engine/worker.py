# SPDX-License-Identifier: Apache-2.0
"""The life of a process worker.

Guarantees
    Tasks are done in the order in which they came. Between two tasks the worker looks whether it is
    still wanted: a closed channel ends it, whatever is still queued.
    It ends when the main process is gone, even in the middle of a task that hangs (see
    `parent_watch`). Ctrl-C is the main process's business: the worker notes it, and waits for the
    main process. Nothing the user's code raises ends the worker; `SystemExit` and the like do, as a
    death. Its last words in the status page say what was raised, and where.
    A process that the dataset forks may end as it likes: the worker goes on.
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

from penstock.engine.messages import (
    BatchMade,
    BeginEpoch,
    DrawingsFound,
    ExceptionReport,
    GeneratorsSet,
    Ready,
    ShardExhausted,
    Task,
    TaskFailed,
    decode,
    encode,
    report_bad,
    report_exception,
)
from penstock.engine.parent_watch import end_with_parent
from penstock.engine.recover import NO_BATCH, drop_frames
from penstock.engine.status_page import Phase, StatusWriter, open_status
from penstock.engine.user_frames import stack_of_error
from penstock.engine.worker_setup import make_fetcher, set_up_worker
from penstock.faults import annotate
from penstock.forks import Owner
from penstock.transport.arena import SlotPool, SlotWriter
from penstock.transport.channel import Channel
from penstock.transport.packing import Packed, dumps, pack
from penstock.transport.shared import load_shared

if TYPE_CHECKING:
    import socket

    from penstock.engine.accounts import TaskTimes
    from penstock.engine.fetch import Fetcher
    from penstock.engine.plan import WorkerSpec
    from penstock.engine.worker_setup import WorkerIdentity
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
        identity: Which worker this is.
        spec: How to make batches; None if it comes as a shared segment in the first frame,
            behind the status page.
    """
    # a forked worker may carry the main process's handler
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    owner = Owner()
    channel = Channel(sock)
    worker = _ProcessWorker(channel, identity, spec)
    # Not SIG_IGN, which programs started from here would inherit.
    signal.signal(signal.SIGINT, worker.note_interrupt)
    try:
        worker.open_status_page()
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

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer
        self.empty = writer.empty
        self.abandon = writer.abandon

    def finish(self, batch: Any) -> Packed:  # noqa: ANN401
        return pack(batch, self._writer)

    def dry_run(self, batch: Any) -> None:  # noqa: ANN401
        dumps(batch)


class _ProcessWorker:
    def __init__(self, channel: Channel, identity: WorkerIdentity, spec: WorkerSpec | None) -> None:
        self._channel = channel
        self._identity = identity
        self._frames: collections.deque[Frame] = collections.deque()
        self._pool = SlotPool(identity.max_free_slots)
        self._writer = SlotWriter(self._pool)
        self._output = _SlotOutput(self._writer)
        self._status = StatusWriter()
        self._spec_fds: list[int] = []
        self._spec = spec
        self._fetcher: Fetcher | None = None
        self._failure: ExceptionReport | None = None  # of setting up: the answer to every task
        self._is_set_up = True
        self._is_expected = identity.joins_late
        self._has_served = False
        self._is_exhausted = False

    def open_status_page(self) -> None:
        status_fd, watch_fd, *self._spec_fds = self._next_frame().fds
        self._status = open_status(status_fd)
        end_with_parent(watch_fd)

    def run(self) -> None:
        try:
            self._set_up()
        except Exception as error:
            self._failure = report_exception(error)
            self._is_set_up = False
        # What is here, modules mostly, stays: the collector need not go over it again and again,
        # some 5 % of the time, nor touch pages that a forked worker shares with the main process.
        gc.freeze()
        while True:
            self._status.phase(Phase.WAITING)
            message = decode(self._next_frame().data)
            if isinstance(message, BeginEpoch):
                self._begin_epoch(message)
                self._announce(message)
            else:
                self._pool.release(message.freed)
                self._pool.retire(message.retired)
                self._serve(message)
                del message
                self._freeze_once()

    def _announce(self, begun: BeginEpoch) -> None:
        if self._is_expected:
            self._is_expected = False
            self._channel.send(encode(Ready(begun.generation)))

    def _freeze_once(self) -> None:
        """Freeze what the first batch has brought as well: what it imports, what datasets open.

        Not with an iterable: its iterator is there too, and ends with the epoch.
        """
        if not self._has_served and self._spec is not None and not self._spec.is_iterable:
            self._has_served = True
            gc.collect()  # or garbage of that batch would stay too
            gc.freeze()

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

    def _set_up(self) -> None:
        identity = self._identity
        if self._spec is None:
            (fd,) = self._spec_fds
            try:
                self._spec = load_shared(fd)
            except AttributeError as error:
                if "__main__" in str(error) or "__mp_main__" in str(error):
                    annotate(error, _NOT_IN_MAIN)
                raise
        states = set_up_worker(self._spec, identity)
        if states:
            self._channel.send(encode(GeneratorsSet(states)))

    def _begin_epoch(self, message: BeginEpoch) -> None:
        self._is_exhausted = False
        if not self._is_set_up:
            return
        assert self._spec is not None
        self._status.phase(Phase.BEGINNING)
        self._fetcher = None  # an iterator of the epoch before ends before the next begins
        try:
            self._fetcher = make_fetcher(
                self._spec, self._output, self._identity, message, self._status
            )
            self._failure = None
        except Exception as error:
            self._failure = report_exception(error)

    def _next_frame(self) -> Frame:
        """Return the next frame; all that is here is read first, to see a closed channel."""
        self._frames.extend(self._channel.receive(wait=not self._frames))
        if self._channel.has_ended:
            raise EOFError  # whatever is still queued: nobody would take the answer
        return self._frames.popleft()

    def _serve(self, task: Task) -> None:
        if self._is_exhausted:
            return  # the main process knows that no answer comes
        if self._failure is not None:
            self._channel.send(encode(TaskFailed(task.generation, task.step, self._failure, None)))
            return
        assert self._fetcher is not None
        assert self._spec is not None
        self._status.begin_task(task.generation, task.step, measures=task.is_measured)
        try:
            packed = self._fetcher.fetch(task.indices, task.step, task.hints)
            shard = self._fetcher.saved_position()
            is_empty = packed is NO_BATCH
        except StopIteration as error:
            self._writer.abandon()
            if self._spec.is_iterable:
                self._is_exhausted = True
                bad = tuple(map(report_bad, self._fetcher.take_bad()))
                self._channel.send(
                    encode(ShardExhausted(task.generation, task.step, len(bad), bad))
                )
            else:
                self._send_failure(task, error)
        except Exception as error:
            self._writer.abandon()
            self._send_failure(task, error)
        else:
            if drawings := self._fetcher.take_drawings():
                self._channel.send(encode(DrawingsFound(drawings)))
            new = self._pool.take_new()
            message = BatchMade(
                task.generation,
                task.step,
                _NOTHING if is_empty else packed,
                tuple((slot.slot, slot.size_bytes) for slot in new),
                tuple(self._pool.take_retired()),
                shard,
                self._fetcher.take_first_digest(),
                self._fetcher.num_asked,
                tuple(map(report_bad, self._fetcher.take_bad())),
                is_empty,
                self._times(task, packed),
            )
            self._channel.send(encode(message), [slot.fd for slot in new])
            for slot in new:
                os.close(slot.fd)

    def _times(self, task: Task, packed: Any) -> TaskTimes:  # noqa: ANN401 - packed, or NO_BATCH
        if not task.is_measured:
            return self._status.take_times()
        num_bytes = 0 if packed is NO_BATCH else sum(extent[2] for extent in packed.buffers)
        return self._status.take_times(
            num_bytes=num_bytes,
            pool_bytes=self._pool.size_bytes,
            slot_ns=self._pool.take_making_ns(),
        )

    def _send_failure(self, task: Task, error: Exception) -> None:
        report = report_exception(error)
        drop_frames(error)
        assert self._fetcher is not None
        shard = self._fetcher.saved_position()
        bad = tuple(map(report_bad, self._fetcher.take_bad()))
        self._channel.send(encode(TaskFailed(task.generation, task.step, report, shard, bad)))


_NOTHING = Packed(b"", (), ())


if sys.platform == "win32":
    raise ImportError("Penstock's process workers need Unix sockets; Windows is not supported yet")
