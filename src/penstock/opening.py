# SPDX-License-Identifier: Apache-2.0
"""Opening files of a data set: regular files alone, and none read whole above a limit.

A downloaded folder may hold anything under any name. A FIFO called 1.xml would be waited
for without end; a link to /dev/zero, or a file of 3 GB that is one hole, would fill the memory.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from numbers import Integral
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from io import FileIO
    from pathlib import Path

MAX_FILE_BYTES: Final = 1 << 30
"""The default of `max_file_size`: an image, or what a sample has in a tar file."""
MAX_ANNOTATION_BYTES: Final = 1 << 30
"""Of a list, or of one file for all images: a million lines of 68 points take 500 MB."""
MAX_TREE_BYTES: Final = 256 << 20
"""Of XML and JSON, which become a tree of twenty times their size. imglab's file of 100,000 faces
has some 60 MB."""

# Of these Windows has the last alone, without which a read translates line ends.
_FLAGS: Final = sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_BINARY"))
KINDS: Final = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a folder",
}
_PART_BYTES: Final = 1 << 24
_seeking: Final = threading.Lock()


class FileState(NamedTuple):
    """A file as it is at a moment."""

    path: str
    size_bytes: int
    time_ns: int

    @classmethod
    def of(cls, path: str | Path) -> FileState:
        """Return the file at `path` as it is now."""
        status = os.stat(path)
        return cls(os.fspath(path), status.st_size, status.st_mtime_ns)


def fingerprint_of(files: Iterable[FileState], what: str = "") -> str:
    """Return a hash of names, sizes and times, and of `what`."""
    digest = hashlib.blake2b(what.encode(), digest_size=16)
    for file in files:
        name = os.path.basename(file.path)
        digest.update(f"{name}\0{file.size_bytes}\0{file.time_ns}\0".encode())
    return digest.hexdigest()


def checked_max_file_size(value: object) -> int:
    """Return `value`, which a store was opened with."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
        raise ConfigError(
            f"max_file_size is a number of bytes, 1 or more, not {value!r}. 1 GiB is 1 << 30."
        )
    return int(value)


def open_descriptor(path: str | Path) -> tuple[int, os.stat_result]:
    """Return the descriptor of a regular file, opened for reading, and what `fstat` says of it."""
    try:
        fd = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise _irregular(path, os.stat(path).st_mode) from error  # a socket cannot be opened
    except ValueError as error:  # a name with a null byte
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _irregular(path, status.st_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd, status


def open_file(path: str | Path) -> FileIO:
    """Return a regular file, opened for reading, without a buffer."""
    fd, _ = open_descriptor(path)
    return open(fd, "rb", buffering=0)


def read_at(fd: int, size_bytes: int, offset: int) -> bytes:
    """Read as `os.pread` does; on Windows, which lacks it, one thread at a time."""
    if hasattr(os, "pread"):
        return os.pread(fd, size_bytes, offset)
    with _seeking:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, size_bytes)


def read_whole(fd: int, size_bytes: int, offset: int) -> bytes:
    """Read as `read_at` does, until there is no more: one call gives 2 GiB at most."""
    data = read_at(fd, size_bytes, offset)
    if len(data) == size_bytes or not data:
        return data
    parts = [data]
    num_read = len(data)
    while num_read < size_bytes and (data := read_at(fd, size_bytes - num_read, offset + num_read)):
        parts.append(data)
        num_read += len(data)
    return b"".join(parts)


def read_file(
    path: str | Path,
    max_bytes: int = MAX_FILE_BYTES,
    *,
    remedy: str = "raise max_file_size of its store",
) -> bytes:
    """Return the bytes of a regular file."""
    fd, status = open_descriptor(path)
    size_bytes = status.st_size
    try:
        _check_size(path, size_bytes, max_bytes, remedy)
        data = os.read(fd, size_bytes + 1)
        parts = [data]
        # Larger than one read gives (2 GiB), or changing, or of a size that the system does not
        # have before, as in /proc.
        while len(data) != size_bytes and parts[-1]:
            parts.append(os.read(fd, _PART_BYTES))
            _check_size(path, sum(map(len, parts)), max_bytes, remedy)
        return data if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(fd)


def read_annotation(path: str | Path, max_bytes: int = MAX_ANNOTATION_BYTES) -> bytes:
    """Return the bytes of a file of annotations, or of another text, which is parsed as a whole."""
    try:
        return read_file(path, max_bytes, remedy="split it")
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}.") from error


def _irregular(path: str | Path, mode: int) -> OSError:
    kind = KINDS.get(stat.S_IFMT(mode), "of another kind")
    return OSError(errno.EINVAL, f"not a regular file, but {kind}", os.fspath(path))


def _check_size(path: str | Path, size_bytes: int, max_bytes: int, remedy: str) -> None:
    if size_bytes > max_bytes:
        said = f"it has {size_bytes:,} bytes, and {max_bytes:,} is the most that is read: {remedy}"
        raise OSError(errno.EFBIG, said, os.fspath(path))
