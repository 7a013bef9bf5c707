# SPDX-License-Identifier: Apache-2.0
"""Framed messages, with file descriptors, over one socket pair: one channel per worker.

Guarantees
    Frames arrive whole, in order, each with the descriptors that were sent with it.
    A channel belongs to the process that made it: a forked child closes its copy right after the
    fork, and nothing that the child does, its exit included, reaches the peer.
    `receive` and `post` never block, so the main process cannot wait for a worker that waits for
    the main process: what the socket does not take now is kept and sent later.
    `close` ends both directions at once, also where a forked process still holds a copy of the
    socket. A peer that dies half way through a frame shows as `EOFError`, never as a hang.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.errors import TransportError
from penstock.forks import at_fork

if TYPE_CHECKING:
    from collections.abc import Sequence

_HEADER: Final = struct.Struct("<IB")
_FD_BYTES: Final = array.array("i").itemsize
_MAX_FDS: Final = 64  # of one frame; Linux takes 253
# A garbage collection may finalise a socket before the stream that is going to close it, and Python
# warns of that. What is held here is no garbage before it is closed.
_open_sockets: Final[set[socket.socket]] = set()
_RECEIVE_BYTES: Final = 64 * 1024


class Frame(NamedTuple):
    """One message; the descriptors are the receiver's to close."""

    data: bytes
    fds: tuple[int, ...]

    def close(self) -> None:
        """Close the descriptors, where they are not going to be used."""
        _close_all(self.fds)


class Channel:
    """One end of a socket pair.

    Concurrency:
        One thread per end.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take over `sock`, connected, of type SOCK_STREAM."""
        self._socket = sock
        _open_sockets.add(sock)
        _channels.add(self)
        self._received = bytearray()
        self._received_fds: deque[int] = deque()
        self._unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()  # what is left, descriptors
        self._landing = bytearray(_RECEIVE_BYTES)
        self.has_ended = False

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 once closed."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something to do once the socket is writable."""
        return bool(self._unsent)

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send one frame and wait until the socket took it all; `fds` stay the caller's.

        Raises:
            OSError: the peer is gone.
        """
        message = _HEADER.pack(len(data), len(fds)) + data
        sent = self._start(message, fds, flags=0)
        if sent < len(message):
            self._socket.sendall(memoryview(message)[sent:])

    def post(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send one frame without waiting; what does not fit now goes with `flush`.

        The descriptors are duplicated if they have to wait; `fds` stay the caller's.
        """
        message = _HEADER.pack(len(data), len(fds)) + data
        if not (fds or self._unsent):  # nearly always
            with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                message = message[self._socket.send(message, socket.MSG_DONTWAIT) :]
                if not message:
                    return
        self._unsent.append((message, tuple(map(os.dup, fds))))
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it; `receive` says if the peer is gone."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                message, fds = self._unsent[0]
                message = message[self._start(message, fds, socket.MSG_DONTWAIT) :]
                self._unsent.popleft()
                _close_all(fds)
                if message:
                    self._unsent.appendleft((message, ()))

    def _start(self, message: bytes, fds: Sequence[int], flags: int) -> int:
        if not fds:
            return self._socket.send(message, flags)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        return self._socket.sendmsg([message], [rights], flags)

    def receive(self, *, wait: bool = False) -> list[Frame]:
        """Return all frames that are here, oldest first; with `wait`, at least one.

        When it returns, nothing is left to read; `has_ended` says whether the peer is gone.

        Raises:
            EOFError: the peer closed its end or died.
            TransportError: a descriptor was lost because this process may open no more files.
        """
        frames: list[Frame] = []
        while True:
            try:
                self._read(0 if wait and not frames else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return frames
            except (EOFError, ConnectionResetError):
                self.has_ended = True
                if frames:
                    return frames
                raise EOFError from None
            frames += self._take_frames()

    def _read(self, flags: int) -> None:
        size, ancillary, message_flags, _ = self._socket.recvmsg_into(
            [self._landing], socket.CMSG_LEN(_MAX_FDS * _FD_BYTES), flags
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i", data[: len(data) - len(data) % _FD_BYTES])
                self._received_fds.extend(fds)
        if message_flags & socket.MSG_CTRUNC:
            raise TransportError(
                "a worker's shared memory could not be received: this process may open no more "
                "files. Raise the limit (`ulimit -n`) or close files that are not needed."
            )
        if size == 0:
            raise EOFError
        self._received += memoryview(self._landing)[:size]

    def _take_frames(self) -> list[Frame]:
        frames = []
        start = 0
        while len(self._received) >= start + _HEADER.size:
            length, num_fds = _HEADER.unpack_from(self._received, start)
            stop = start + _HEADER.size + length
            if len(self._received) < stop:
                break
            fds = tuple(self._received_fds.popleft() for _ in range(num_fds))
            frames.append(Frame(bytes(self._received[start + _HEADER.size : stop]), fds))
            start = stop
        if start:
            del self._received[:start]
        return frames

    def close(self) -> None:
        """End both directions and close the socket; may be called again."""
        with contextlib.suppress(OSError):
            # shutdown, not only close: a forked process may hold a copy, and the peer must see the
            # end.
            self._socket.shutdown(socket.SHUT_RDWR)
        self.detach()

    def detach(self) -> None:
        """Close this process's descriptors only, as a forked child has to."""
        self._socket.close()
        _open_sockets.discard(self._socket)
        _close_all(self._received_fds)
        self._received_fds.clear()
        for _, fds in self._unsent:
            _close_all(fds)
        self._unsent.clear()

    def __del__(self) -> None:
        if hasattr(self, "_socket"):
            self.detach()


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _detach_in_child() -> None:
    for channel in list(_channels):
        channel.detach()


at_fork(after_in_child=_detach_in_child)


def _close_all(fds: Sequence[int] | deque[int]) -> None:
    for fd in fds:
        os.close(fd)
