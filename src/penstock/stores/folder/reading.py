# SPDX-License-Identifier: Apache-2.0
"""Files as they are read here: none that is waited for, none that fills the memory.

A folder of somebody else's may hold anything under any name. A named pipe called 1.xml would be
waited for without end.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from io import FileIO
    from pathlib import Path

__all__ = ["MAX_ANNOTATION_BYTES", "MAX_XML_BYTES", "open_file", "read_annotation", "read_file"]

# Of a list, or of one file for all images: a million lines of 68 points take 500 MB, and are split.
MAX_ANNOTATION_BYTES: Final = 1 << 30
# XML becomes a tree of twenty times its size. imglab's file of 100,000 faces has some 60 MB.
MAX_XML_BYTES: Final = 256 << 20


def open_file(path: str | Path) -> FileIO:
    """Return a regular file, opened for reading, without a buffer.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        return open(fd, "rb", buffering=0)
    except BaseException:
        os.close(fd)
        raise


def read_file(path: str | Path) -> bytes:
    """Return a file's bytes. A pipe of that name is not waited for.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    with open_file(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        data = os.read(file.fileno(), size_bytes + 1)
        if len(data) == size_bytes:
            return data
        return data + file.readall()  # larger than one read gives (2 GiB), or changing


def read_annotation(path: str | Path, max_bytes: int = MAX_ANNOTATION_BYTES) -> bytes:
    """Return a file of annotations, which is parsed as a whole.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no regular file, or larger than `max_bytes`.
    """
    try:
        with open_file(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        if error.errno == errno.EINVAL:  # told without its number, and without the path again
            raise ValueError("not a regular file") from error
        raise
    if size_bytes > max_bytes:
        raise ValueError(
            f"it has {size_bytes:,} bytes, and {max_bytes:,} is the most that is read of "
            "annotations like it: split it"
        )
    return read_file(path)
