# SPDX-License-Identifier: Apache-2.0
"""Files read from front to back: decompressed, and cut where lines end."""

from __future__ import annotations

import gzip
import os
import zlib
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import StoreError
from penstock.opening import MAX_TREE_BYTES
from penstock.optional import missing_extra

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import FileIO

COMPRESSED: Final = (".gz", ".zst")
DAMAGE: Final = (EOFError, zlib.error, gzip.BadGzipFile)
"""What `unpacked` raises of a file that is cut off, or other than its name says."""
_ZSTANDARD_BYTES: Final = 1 << 10  # at a time: they may become 32,000 times as many


def damaged(path: object, after: str, error: object) -> StoreError:
    """Return the error for a file that cannot be read on; `after` is what was read: "line 3"."""
    return StoreError(
        f"{path} is cut off or damaged, after {after}: {error}. Fetch it again, and compare its "
        "size with that of the original."
    )


def whole_lines(path: object, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield pieces that end where a line ends."""
    parts: list[bytes] = []
    for block in blocks:
        cut = block.rfind(b"\n") + 1
        if cut:
            yield b"".join([*parts, block[:cut]])
            parts = [block[cut:]] if cut < len(block) else []
        else:
            parts.append(block)
            if sum(map(len, parts)) > MAX_TREE_BYTES:
                raise StoreError(
                    f"{path} has a line of more than {MAX_TREE_BYTES:,} bytes: it is not a file "
                    "of lines."
                )
    if parts:
        yield b"".join(parts)


def unpacked(path: str, file: FileIO, block_bytes: int) -> Iterator[bytes]:
    """Yield what is in a file, decompressed as its name says, in blocks of about this size."""
    if path.endswith(COMPRESSED) and not os.fstat(file.fileno()).st_size:
        raise EOFError("it is empty")  # not even a header
    if path.endswith(".zst"):
        yield from _of_zstandard(path, file, block_bytes)
        return
    whole: Any = gzip.GzipFile(fileobj=file) if path.endswith(".gz") else file
    while block := whole.read(block_bytes):
        yield block


def _of_zstandard(path: str, file: FileIO, block_bytes: int) -> Iterator[bytes]:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise missing_extra(error, path) from error
    # Not `stream_reader`, which does not notice that a file is cut off.
    frame = None
    parts: list[bytes] = []
    num_bytes = 0
    try:
        while block := file.read(block_bytes // 4):
            for first in range(0, len(block), _ZSTANDARD_BYTES):
                data = block[first : first + _ZSTANDARD_BYTES]
                while data:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    parts.append(frame.decompress(data))
                    num_bytes += len(parts[-1])
                    data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
                if num_bytes >= block_bytes:
                    yield b"".join(parts)
                    parts, num_bytes = [], 0
        yield b"".join(parts)
    except zstandard.ZstdError as error:
        raise zlib.error(str(error)) from error
    if frame is not None:
        raise EOFError("the last frame has no end")
