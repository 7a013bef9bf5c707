# SPDX-License-Identifier: Apache-2.0
"""`Order`: when a loader needs each record next, for all who may evict one; and its counts."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.lines import percent

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

NEVER: Final = 1 << 62
FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
LEFT: Final = re.compile(r"((order|counts)-)?[0-9]+-[0-9a-f]{8}")  # by a process, if it was killed
_ROWS: Final = 64
FETCHER_ROW: Final = _ROWS - 1


class Traffic(NamedTuple):
    """Counts of what the loaders of a process have read through a local cache, in all epochs.

    Attributes:
        num_read: Records read.
        num_found: Those of them that were in the cache when they were asked for.
        num_requests: Requests sent, also to read ahead.
        bytes_fetched: Bytes of the answers.
        bytes_read: Bytes of the records read.
    """

    num_read: int
    num_found: int
    num_requests: int
    bytes_fetched: int
    bytes_read: int

    def __str__(self) -> str:
        """Return it for people."""
        num_read = max(1, self.num_read)
        return (
            f"Local cache, all epochs so far: {percent(self.num_found / num_read)} of "
            f"{self.num_read:,} records were there when they were needed; "
            f"{self.num_requests / num_read:.2g} requests per record; "
            f"{percent(self.bytes_fetched / max(1, self.bytes_read))} of the bytes read were "
            "fetched."
        )


class Counts:
    """Counts of a process that iterates, its workers and its fetcher, in a file of 64 rows.

    Concurrency:
        Each writes a row of its own: a worker by its number, the fetcher the last; anybody reads.
    """

    def __init__(self, path: str, fd: int) -> None:
        """Map an open file, which is then this object's."""
        try:
            self.path = path
            self.rows = np.frombuffer(mmap.mmap(fd, 8 * _ROWS * 4), np.int64).reshape(_ROWS, 4)
        finally:
            os.close(fd)

    @classmethod
    def made(cls, folder: Path) -> Counts:
        """Return new ones."""
        path = f"{folder}/counts-{os.getpid()}-{os.urandom(4).hex()}"
        fd = os.open(path, FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        os.posix_fallocate(fd, 0, 8 * _ROWS * 4)
        return cls(path, fd)

    @classmethod
    def shared(cls, path: str) -> Counts:
        """Return another process's."""
        return cls(path, os.open(path, FLAGS))

    @property
    def traffic(self) -> Traffic:
        """Their sums."""
        num_read, num_found, bytes_read, _ = self.rows[:FETCHER_ROW].sum(axis=0).tolist()
        num_requests, bytes_fetched = self.rows[FETCHER_ROW, :2].tolist()
        return Traffic(num_read, num_found, num_requests, bytes_fetched, bytes_read)


class Order:
    """When a loader needs each record next: a file that its process, while it iterates, has locked.

        int64   how many samples the loader has used up, of this epoch and the next
        int64   how many it has asked its workers for
        int64   bytes of the records of an epoch
        int64   for each record, which of these samples it is next; `NEVER` if none that is known

    Concurrency:
        The main process writes the first two, its fetcher the rest; anybody reads.
    """

    def __init__(self, path: str, fd: int, num_records: int) -> None:
        """Map an open file, which is then this object's."""
        self.path, self._fd = path, fd
        numbers = np.frombuffer(mmap.mmap(fd, _num_bytes(num_records)), np.int64)
        self.clock, self.asked, self.epoch_bytes = numbers[:1], numbers[1:2], numbers[2:3]
        self.due = numbers[3:]

    @classmethod
    def made(cls, folder: Path, num_records: int) -> Order:
        """Return a new one, which this process keeps locked."""
        name = f"{os.getpid()}-{os.urandom(4).hex()}"
        made, path = f"{folder}/order-{name}", f"{folder}/orders/{name}"
        fd = os.open(made, FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.posix_fallocate(fd, 0, _num_bytes(num_records))
        except OSError:
            os.close(fd)
            os.unlink(made)
            raise
        order = cls(path, fd, num_records)
        order.due[:] = NEVER
        os.rename(made, path)  # nobody sees it before it is locked
        return order

    @classmethod
    def shared(cls, path: str, num_records: int) -> Order:
        """Return another process's, to be written."""
        return cls(path, os.open(path, FLAGS), num_records)

    @classmethod
    def opened(cls, path: str, num_records: int) -> Order | None:
        """Return another process's, to be read; None if that has ended."""
        with contextlib.suppress(OSError):
            fd = os.open(path, FLAGS)
            if os.fstat(fd).st_size == _num_bytes(num_records):
                order = cls(path, fd, num_records)
                return order if order.is_followed() else None
            os.close(fd)
        return None

    def is_followed(self) -> bool:
        """Return whether its process iterates; if that was killed, its file is removed."""
        if not locks(self._fd):
            return self.is_there
        self.remove()
        return False

    @property
    def is_there(self) -> bool:
        """Whether nobody has removed it."""
        return os.fstat(self._fd).st_nlink > 0

    def remove(self) -> None:
        """Unlink the file: the loader needs nothing more."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def distances(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return after how many samples records are needed."""
        distances: NDArray[np.int64] = self.due[numbers] - self.clock[0]
        return np.where(distances < 0, NEVER, distances)

    def __del__(self) -> None:
        os.close(self._fd)


def _num_bytes(num_records: int) -> int:
    return 8 * (3 + num_records)


def locks(fd: int) -> bool:
    """Lock a file if nobody else has; return whether that was so."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
