# SPDX-License-Identifier: Apache-2.0
"""Opening files of a data set: regular files alone, and none read whole above a limit.

A folder of somebody else's may hold anything under any name. A FIFO called 1.xml would be waited
for without end; a link to /dev/zero, or a file of 3 GB that is one hole, would fill the memory.
"""

from __future__ import annotations

import errno
import os
import stat
from numbers import Integral
from typing import TYPE_CHECKING, Final

from penstock.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from io import FileIO
    from pathlib import Path

__all__ = [
    "MAX_ANNOTATION_BYTES",
    "MAX_FILE_BYTES",
    "MAX_TREE_BYTES",
    "checked_max_file_size",
    "open_descriptor",
    "open_file",
    "read_annotation",
    "read_file",
]

MAX_FILE_BYTES: Final = 1 << 30
"""The default of `max_file_size`: an image, or what a sample has in a tar file."""
MAX_ANNOTATION_BYTES: Final = 1 << 30
"""Of a list, or of one file for all images: a million lines of 68 points take 500 MB."""
MAX_TREE_BYTES: Final = 256 << 20
"""Of XML and JSON, which become a tree of twenty times their size. imglab's file of 100,000 faces
has some 60 MB."""

_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_KINDS: Final = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a folder",
}
_LEAST_PART_ON_DISK: Final = 64  # of its size
_PART_BYTES: Final = 1 << 24


def checked_max_file_size(value: object) -> int:
    """Return `value`, which a store was opened with.

    Raises:
        ConfigError: no number of bytes.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
        raise ConfigError(
            f"max_file_size is a number of bytes, 1 or more, not {value!r}. 1 GiB is 1 << 30."
        )
    return int(value)


def open_descriptor(path: str | Path) -> tuple[int, os.stat_result]:
    """Return the descriptor of a regular file, opened for reading, and what `fstat` says of it.

    Raises:
        OSError: as `open_file` does.
    """
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
    """Return a regular file, opened for reading, without a buffer.

    Raises:
        OSError: it cannot be opened, or is no regular file; `strerror` says which.
    """
    fd, _ = open_descriptor(path)
    return open(fd, "rb", buffering=0)


def read_file(
    path: str | Path,
    max_bytes: int | None = MAX_FILE_BYTES,
    *,
    remedy: str = "raise max_file_size of its store",
) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: The file.
        max_bytes: A larger file is an error, before memory is taken for it. None reads any that
            lies on the disk: above 1 GiB a sparse one is an error.
        remedy: What the error tells to do.

    Raises:
        OSError: it cannot be read, is no regular file, or too large; `strerror` says which.
    """
    fd, status = open_descriptor(path)
    size_bytes = status.st_size
    try:
        _check_size(path, size_bytes, max_bytes, remedy)
        _check_sparse(path, status)
        data = os.read(fd, size_bytes + 1)
        if len(data) == size_bytes:
            return data
        # Larger than one read gives (2 GiB), or changing, or of a size that the system does not
        # know before, as in /proc.
        parts = [data]
        while parts[-1]:
            parts.append(os.read(fd, _PART_BYTES))
            size_bytes = sum(map(len, parts))
            _check_size(path, size_bytes, max_bytes, remedy)
        return b"".join(parts)
    finally:
        os.close(fd)


def read_annotation(path: str | Path, max_bytes: int = MAX_ANNOTATION_BYTES) -> bytes:
    """Return the bytes of a file of annotations, or of another text, which is parsed as a whole.

    Raises:
        StoreError: it cannot be read, is no regular file, or has more than `max_bytes`.
    """
    try:
        return read_file(path, max_bytes, remedy="split it")
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}.") from error


def _irregular(path: str | Path, mode: int) -> OSError:
    kind = _KINDS.get(stat.S_IFMT(mode), "of another kind")
    return OSError(errno.EINVAL, f"not a regular file, but {kind}", os.fspath(path))


def _check_sparse(path: str | Path, status: os.stat_result) -> None:
    on_disk = status.st_blocks * 512  # compressed file systems have less than the size as well
    if status.st_size > MAX_FILE_BYTES and on_disk < status.st_size // _LEAST_PART_ON_DISK:
        said = f"it is sparse: of its {status.st_size:,} bytes {on_disk:,} are on the disk"
        raise OSError(errno.EFBIG, said, os.fspath(path))


def _check_size(path: str | Path, size_bytes: int, max_bytes: int | None, remedy: str) -> None:
    if max_bytes is not None and size_bytes > max_bytes:
        said = f"it has {size_bytes:,} bytes, and {max_bytes:,} is the most that is read: {remedy}"
        raise OSError(errno.EFBIG, said, os.fspath(path))
