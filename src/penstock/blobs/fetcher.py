# SPDX-License-Identifier: Apache-2.0
"""`Fetcher`: a process that talks to object storage for one that may be forked later.

The main process of a training needs an index before its workers start, and they are forked from it.
A client's threads in it would be gone in them, with locks held (`penstock.blobs.client`).

Messages go over a Unix socket, one connection for each thread that waits: the number of bytes (8,
little-endian), and MessagePack of

    request   [method of `CachingSessions`, place, arguments]
    answer    [None, what it returned], or [name of the error's class, its text]
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from multiprocessing.spawn import get_executable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock import errors
from penstock.blobs.blobs import Blob, ByteRange
from penstock.blobs.errors import BlobChanged, BlobNotFound
from penstock.blobs.node_cache import CacheArguments
from penstock.blobs.place import Place
from penstock.errors import StoreError
from penstock.forks import at_fork

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIZE: Final = struct.Struct("<Q")
_LONGEST_FOLDER: Final = 90  # a Unix socket's path has 107 bytes at most
_ANSWERS: Final[dict[str, Any]] = {
    "read": msgspec.msgpack.Decoder(tuple[str | None, list[memoryview] | str]),
    "stat": msgspec.msgpack.Decoder(tuple[str | None, Blob | str]),
    "list": msgspec.msgpack.Decoder(tuple[str | None, list[Blob] | str]),
    "write": msgspec.msgpack.Decoder(tuple[str | None, str | None]),
    "delete": msgspec.msgpack.Decoder(tuple[str | None, str | None]),
    "keep": msgspec.msgpack.Decoder(tuple[str | None, str | None]),
    "follow": msgspec.msgpack.Decoder(tuple[str | None, bool | str]),
    "fetch": msgspec.msgpack.Decoder(tuple[str | None, list[memoryview] | str]),
}
_ARGUMENTS: Final = {
    "read": tuple[list[ByteRange]],
    "stat": tuple[str],
    "list": tuple[str, int | None],
    "write": tuple[str, memoryview, str | None],
    "delete": tuple[str],
    "keep": tuple[CacheArguments, tuple[list[str], list[str]], tuple[bytes, bytes, bytes]],
    "follow": tuple[CacheArguments, tuple[str, str, int, bytes]],
    "fetch": tuple[CacheArguments, list[int]],
}
_ERRORS: Final[dict[str, type[Exception]]] = {
    kind.__name__: kind
    for kind in (BlobChanged, BlobNotFound, StoreError, errors.StoreUnreachable, ConnectionError)
}


class FetcherClient:
    """Talks to a fetcher: this process's, or that of the main process of a worker.

    Concurrency:
        Any thread.
    """

    def __init__(self, path: str) -> None:
        """Name the fetcher's socket; it is connected to at first use."""
        self.path = path
        self._idle: list[socket.socket] = []
        self._num_starts = 0  # of the fetcher, by this process

    def call(self, place: Place, method: str, *arguments: Any) -> Any:  # noqa: ANN401
        """Return what a method of `CachingSessions` returns.

        Raises:
            ConnectionError: there is no fetcher, or it has ended.
        """
        message = msgspec.msgpack.encode((method, place, arguments))
        kind, value = _ANSWERS[method].decode(self._answer(message))
        if kind is not None:
            raise _ERRORS.get(kind, RuntimeError)(value)
        return value

    def _answer(self, message: bytes) -> memoryview:
        started = self._num_starts
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(self.path)
            except FileNotFoundError as error:  # another thread starts it anew
                connection.close()
                raise ConnectionError from error
            except BaseException:
                connection.close()
                raise
        try:
            connection.sendall(_SIZE.pack(len(message)) + message)
            (size,) = _SIZE.unpack(_received(connection, _SIZE.size))
            data = _received(connection, size)
        except BaseException:  # what comes on it next is no answer to the next request
            connection.close()
            raise
        if self._num_starts == started:
            self._idle.append(connection)
        else:
            connection.close()
        return data

    def close(self) -> None:
        """Close the connections that no thread is using."""
        while self._idle:
            self._idle.pop().close()


class Fetcher(FetcherClient):
    """The process. It ends with this one, and another takes its place if it dies."""

    def __init__(self) -> None:
        """Start it."""
        folder = tempfile.mkdtemp(prefix="penstock-")
        if len(folder) > _LONGEST_FOLDER:
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="penstock-", dir="/tmp")
        super().__init__(os.path.join(folder, "fetcher"))
        self._lock = threading.Lock()
        self._start()
        _fetchers.add(self)

    def _start(self) -> None:
        self._num_starts += 1
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.path)
            listener.listen()
            fd = listener.fileno()
            self._process = subprocess.Popen(
                # -P: nothing is imported from the current folder, which may be a stranger's.
                [
                    os.fsdecode(get_executable()),
                    "-P",
                    "-c",
                    f"from {__name__} import main; main({fd})",
                ],
                stdin=subprocess.PIPE,  # its end is this process's
                pass_fds=[fd],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                process_group=0,  # a Ctrl-C is not for it
            )

    def call(self, place: Place, method: str, *arguments: Any) -> Any:  # noqa: ANN401
        """Return what a method of `CachingSessions` returns."""
        started = self._num_starts
        try:
            return super().call(place, method, *arguments)
        except ConnectionError:  # it was killed; what is asked of it may be asked twice
            with self._lock:
                if self._num_starts == started:  # else another thread has started it anew
                    self._end()
                    self._start()
                process = self._process
            try:
                return super().call(place, method, *arguments)
            except ConnectionError as error:
                raise errors.StoreUnreachable(
                    f"{place.address} cannot be reached: the process that talks to it has ended, "
                    f"with exit status {process.poll()}. What it printed may say why."
                ) from error

    def leave_to_parent(self) -> None:
        """Close what a forked process has inherited: it would keep the fetcher alive."""
        for connection in self._idle:
            connection.close()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def close(self) -> None:
        """End it."""
        with self._lock:
            self._end()
        shutil.rmtree(os.path.dirname(self.path), ignore_errors=True)

    def _end(self) -> None:
        super().close()
        self._process.kill()  # processes that were forked may hold the other end of its stdin
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


_fetchers: Final[weakref.WeakSet[Fetcher]] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for fetcher in list(_fetchers):
        fetcher.leave_to_parent()


at_fork(after_in_child=_leave_to_parent)


def _received(connection: socket.socket, size: int) -> memoryview:
    view = memoryview(bytearray(size))
    start = 0
    while start < size:
        num_bytes = connection.recv_into(view[start:])
        if num_bytes == 0:
            raise ConnectionError("the fetcher has ended")
        start += num_bytes
    return view.toreadonly()


def main(fd: int) -> None:
    """Answer on the socket `fd` until stdin ends, in the fetcher's process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    listener = socket.socket(fileno=fd)
    folder = os.path.dirname(listener.getsockname())
    asyncio.new_event_loop().run_until_complete(_serve(listener))  # and end no task of it
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # requests that nobody waits for may be under way


async def _serve(listener: socket.socket) -> None:
    from penstock.blobs.foresight import CachingSessions

    sessions = CachingSessions()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
                message = await _answered(sessions, await reader.readexactly(size))
                writer.write(_SIZE.pack(len(message)))
                writer.write(message)
                await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, sock=listener)
    ended = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(ended), sys.stdin
    )
    await ended.read()
    server.close()


async def _answered(sessions: Any, request: bytes) -> bytes:  # noqa: ANN401
    try:
        method, place, given = msgspec.msgpack.decode(request, type=tuple[str, Place, msgspec.Raw])
        arguments: Sequence[Any] = msgspec.msgpack.decode(given, type=_ARGUMENTS[method])
        return msgspec.msgpack.encode((None, await getattr(sessions, method)(place, *arguments)))
    except (StoreError, ConnectionError) as error:
        return msgspec.msgpack.encode((type(error).__name__, str(error)))
    except Exception:
        return msgspec.msgpack.encode(("RuntimeError", traceback.format_exc()))
