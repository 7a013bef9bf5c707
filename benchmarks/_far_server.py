# SPDX-License-Identifier: Apache-2.0
"""An object store on loopback that is as far away as it is told to be, and counts what it sends.

    python benchmarks/_far_server.py FOLDER --latency-ms 20 --mbs 50

It serves the files of a folder, FOLDER/BUCKET/NAME, by S3's requests (ranges, HEAD, PUT, lists in
pages) and as a web server. It signs and checks nothing. It prints its port, and ends when its
standard input does.

Latency is time to the first byte of an answer; of some requests, drawn by a fixed seed, it is
longer. All connections share one bandwidth: each slice of an answer waits for its turn on one
clock, first come, first served. Files are mapped into memory and sent from there, so that the
server has little to do for a byte.

    GET /-/counts    requests and bytes since the start, as JSON; not counted and not delayed

Reference:
    Amazon S3 API, https://docs.aws.amazon.com/AmazonS3/latest/API/.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import mmap
import random
import re
import socket
import sys
import zlib
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Mapping

_COUNTS: Final = "/-/counts"
_SLICE_S: Final = 0.004  # of the bandwidth: what one connection sends before others have a turn
_BURST_S: Final = 0.002  # a wait that is shorter than a timer can be is left out
_PAGE: Final = 1000
_RANGE: Final = re.compile(r"bytes=(\d*)-(\d*)")
_DATE: Final = formatdate(1_700_000_000, usegmt=True)


@dataclass(frozen=True, slots=True)
class Distance:
    """How far away the server is.

    Attributes:
        latency_s: From a request to the first byte of its answer.
        slow_share: Share of the requests that take `slow_times` as long.
        slow_times: How many times.
        bytes_per_s: Of all connections together.
    """

    latency_s: float
    bytes_per_s: float
    slow_share: float = 0.02
    slow_times: float = 5.0


class FarServer:
    """Answers requests, late and not too fast.

    Attributes:
        counts: "gets": requests for objects; "others": HEAD, lists and PUT; "bytes": of bodies.
    """

    def __init__(self, folder: Path, distance: Distance) -> None:
        """Map all files into memory."""
        self.counts = {"gets": 0, "others": 0, "bytes": 0}
        self._distance = distance
        self._free_s = 0.0  # until then the line is taken
        self._slice = max(16 << 10, int(distance.bytes_per_s * _SLICE_S))
        self._random = random.Random(0)
        self._objects: dict[str, memoryview] = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                with path.open("rb") as file:
                    data = (
                        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                        if path.stat().st_size
                        else b""
                    )
                self._objects[path.relative_to(folder).as_posix()] = memoryview(data)

    async def serve(self) -> None:
        """Serve until standard input ends."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        listener.setblocking(False)
        print(listener.getsockname()[1], flush=True)
        accepting = asyncio.create_task(self._accept(listener))
        await asyncio.to_thread(sys.stdin.read)
        accepting.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        loop, tasks = asyncio.get_running_loop(), set()
        while True:
            connection, _ = await loop.sock_accept(listener)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = loop.create_task(self._converse(connection))
            tasks.add(task)  # else it is collected as garbage
            task.add_done_callback(tasks.discard)

    async def _converse(self, connection: socket.socket) -> None:
        loop, received = asyncio.get_running_loop(), b""
        # A client that has heard enough breaks off: that is no error of the server.
        with connection, contextlib.suppress(ConnectionError):
            while True:
                while b"\r\n\r\n" not in received:
                    more = await loop.sock_recv(connection, 1 << 16)
                    if not more:
                        return
                    received += more
                head, _, received = received.partition(b"\r\n\r\n")
                first, *lines = head.decode("latin-1").split("\r\n")
                method, target, _ = first.split(" ", 2)
                fields = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in lines)
                }
                size = int(fields.get("content-length", 0))
                if size and "100-continue" in fields.get("expect", "").lower():
                    await loop.sock_sendall(connection, b"HTTP/1.1 100 Continue\r\n\r\n")
                pieces = [received]
                missing = size - len(received)
                while missing > 0:
                    more = await loop.sock_recv(connection, 1 << 20)
                    if not more:
                        return
                    pieces.append(more)
                    missing -= len(more)
                received = b"".join(pieces)
                body, received = received[:size], received[size:]
                await self._answer(connection, method, target, fields, body)

    async def _answer(
        self,
        connection: socket.socket,
        method: str,
        target: str,
        fields: Mapping[str, str],
        body: bytes,
    ) -> None:
        if target == _COUNTS:
            status, more, data = 200, "", memoryview(json.dumps(self.counts).encode())
        else:
            status, more, data = self._found(method, target, fields, body)
            is_slow = self._random.random() < self._distance.slow_share
            times = self._distance.slow_times if is_slow else 1.0
            await asyncio.sleep(self._distance.latency_s * times)
        head = (
            f"HTTP/1.1 {status} Some\r\nContent-Length: {len(data)}\r\nAccept-Ranges: bytes\r\n"
            f"Last-Modified: {_DATE}\r\n{more}\r\n"
        ).encode()
        loop = asyncio.get_running_loop()
        if method == "HEAD" or not data:
            await loop.sock_sendall(connection, head)
            return
        for start in range(0, len(data), self._slice):
            part = data[start : start + self._slice]
            if target != _COUNTS:
                await self._turn(len(part))
                self.counts["bytes"] += len(part)
            if start == 0:
                await loop.sock_sendall(connection, head)
            await loop.sock_sendall(connection, part)

    async def _turn(self, num_bytes: int) -> None:
        """Return when the line has carried all that was asked for before, and this."""
        now_s = asyncio.get_running_loop().time()
        self._free_s = max(self._free_s, now_s) + num_bytes / self._distance.bytes_per_s
        if self._free_s - now_s > _BURST_S:
            await asyncio.sleep(self._free_s - now_s)

    def _found(
        self, method: str, target: str, fields: Mapping[str, str], body: bytes
    ) -> tuple[int, str, memoryview]:
        """Return status, further lines of the head, and the body."""
        address = urlsplit(target)
        name = unquote(address.path).lstrip("/")
        query = parse_qs(address.query, keep_blank_values=True)
        bucket, _, key = name.partition("/")
        data = self._objects.get(name)
        self.counts["gets" if method == "GET" and key else "others"] += 1
        if method == "PUT":
            self._objects[name] = memoryview(body)
            return 200, f"ETag: {_tag(name, body)}\r\n", memoryview(b"")
        if method not in ("GET", "HEAD"):
            return 405, "", memoryview(b"")
        if not key:
            page = self._page(bucket, {title: values[0] for title, values in query.items()})
            return 200, "Content-Type: application/xml\r\n", memoryview(page.encode())
        if data is None:
            return 404, "", memoryview(b"<Error><Code>NoSuchKey</Code></Error>")
        head = f"ETag: {_tag(name, data)}\r\nContent-Type: application/octet-stream\r\n"
        asked = _RANGE.fullmatch(fields.get("range", ""))
        if asked is None:
            return 200, head, data
        first = int(asked[1]) if asked[1] else max(0, len(data) - int(asked[2]))
        last = min(int(asked[2]), len(data) - 1) if asked[1] and asked[2] else len(data) - 1
        if first > last:
            return 416, "", memoryview(b"<Error><Code>InvalidRange</Code></Error>")
        head += f"Content-Range: bytes {first}-{last}/{len(data)}\r\n"
        return 206, head, data[first : last + 1]

    def _page(self, bucket: str, query: Mapping[str, str]) -> str:
        """Return a page of a list, as S3's ListObjectsV2 makes it."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token", query.get("start-after", ""))
        entries: dict[str, str] = {}
        for name in sorted(self._objects):
            key = name.removeprefix(f"{bucket}/")
            if key == name or not key.startswith(prefix):
                continue
            rest = key.removeprefix(prefix)
            if delimiter and delimiter in rest:
                key = prefix + rest.partition(delimiter)[0] + delimiter
                entries[key] = f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>"
            else:
                data = self._objects[name]
                entries[key] = (
                    f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size>"
                    f"<ETag>{_tag(name, data)}</ETag>"
                    "<LastModified>2026-01-02T03:04:05.000Z</LastModified></Contents>"
                )
        keys = [key for key in entries if key > after]
        most = min(_PAGE, int(query.get("max-keys", _PAGE)))
        page, rest_of_keys = keys[:most], keys[most:]
        token = (
            f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
            if rest_of_keys and page
            else ""
        )
        return (
            f"<ListBucketResult><Name>{escape(bucket)}</Name><KeyCount>{len(page)}</KeyCount>"
            f"<IsTruncated>{str(bool(token)).lower()}</IsTruncated>{token}"
            + "".join(entries[key] for key in page)
            + "</ListBucketResult>"
        )


def _tag(name: str, data: bytes | memoryview) -> str:
    # Not of the contents: to read them all takes longer than to answer.
    return f'"{zlib.crc32(name.encode()):08x}{len(data):08x}"'


def main() -> None:
    """Serve a folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency-ms", type=float, required=True)
    parser.add_argument("--mbs", type=float, required=True)
    options = parser.parse_args()
    distance = Distance(options.latency_ms / 1e3, options.mbs * 1e6)
    asyncio.run(FarServer(options.folder, distance).serve())


if __name__ == "__main__":
    main()
