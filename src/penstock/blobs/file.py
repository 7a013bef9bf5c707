# SPDX-License-Identifier: Apache-2.0
"""`BlobFile`: an object as a file, for code that reads files."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any, Final

from penstock.blobs.blobs import ByteRange

if TYPE_CHECKING:
    from penstock.blobs.blobs import Blob, Blobs

_PIECE_BYTES: Final = 8 << 20  # one request


class BlobFile(io.RawIOBase):
    """An object as a file to be read. Each read is a request: see `buffered`.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, blobs: Blobs, blob: Blob) -> None:
        """Name the object, of which no other version is read."""
        self._blobs, self._blob = blobs, blob
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def size(self) -> int:
        """Return its size in bytes."""
        return self._blob.size_bytes

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._blob.size_bytes}
        self._position = max(0, base[whence] + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401
        """Fill a buffer."""
        start, (name, size_bytes, version) = self._position, self._blob
        stop = min(start + len(buffer), size_bytes)
        if stop <= start:
            return 0
        (view,) = self._blobs.read([ByteRange(name, start, stop, version)])
        buffer[: len(view)] = view
        self._position = stop
        return len(view)


def buffered(blobs: Blobs, blob: Blob) -> io.BufferedReader:
    """Return an object as a file of which large pieces are read at once."""
    return io.BufferedReader(BlobFile(blobs, blob), _PIECE_BYTES)
