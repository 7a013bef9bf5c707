# SPDX-License-Identifier: Apache-2.0
"""`RepairCount`: how many files were repaired, counted by all processes that read a dataset."""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import Final

__all__ = ["RepairCount"]

_NAME: Final = "penstock-repairs"


class RepairCount:
    """A number that any process which has a copy of this object may raise.

    It is the size of a nameless file in memory: appending a byte to a file is one step, whoever
    does it. A copy made by pickling finds the file through the process that made it, on Linux;
    elsewhere, or if that process has ended, the copy counts for itself.

    Example:
        >>> count = RepairCount()
        >>> count.add()
        >>> count.value()
        1
    """

    def __init__(self) -> None:
        """Begin with 0."""
        self._fd = _new_file()

    def add(self) -> None:
        """Count one more."""
        os.write(self._fd, b"+")

    def value(self) -> int:
        """Return the number."""
        return os.fstat(self._fd).st_size

    def __getstate__(self) -> dict[str, object]:
        """Say where the file can be found."""
        return {"pid": os.getpid(), "fd": self._fd, "inode": os.fstat(self._fd).st_ino}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Find it, or begin with 0."""
        self._fd = -1
        with contextlib.suppress(OSError):
            fd = os.open(f"/proc/{state['pid']}/fd/{state['fd']}", os.O_RDWR | os.O_APPEND)
            if os.fstat(fd).st_ino == state["inode"] and _is_ours(fd):
                self._fd = fd
            else:
                os.close(fd)
        if self._fd < 0:
            self._fd = _new_file()

    def __del__(self) -> None:
        """Close the file."""
        if self.__dict__.get("_fd", -1) >= 0:
            os.close(self._fd)
            self._fd = -1


def _new_file() -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(_NAME)
    else:
        import tempfile

        fd, path = tempfile.mkstemp()
        os.unlink(path)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return fd


def _is_ours(fd: int) -> bool:
    return _NAME in os.readlink(f"/proc/self/fd/{fd}")
