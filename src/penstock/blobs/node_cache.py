# SPDX-License-Identifier: Apache-2.0
"""`NodeCache`: records of far objects as files on this machine, shared by all its processes.

    FOLDER/DIGEST/table      the header below, then when each record was read last (8 bytes), then
                             whether it is there (1 byte)
                 /users      locked by all that use the cache
                 /orders/…   of each rank: how far it is, and when it needs each record (`Order`)
                 /1f/a03     record 0x1fa03: exactly the bytes that lie far away

A file appears by rename. Eviction is unlink: who has it open keeps it. What is counted in the table
is counted before its file is there, and no more after it is gone: a kill at any moment may leave
room that is counted and not used, which the next process that is alone with the cache gives back.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import re
import shutil
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.errors import StoreError
from penstock.forks import at_fork
from penstock.lines import parse_sized_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_MAGIC: Final = b"penstock records"
_HEADER: Final = np.dtype([("magic", "S16"), ("num", "<i8"), ("used", "<i8"), ("limit", "<i8")])
_TABLE_AT: Final = 64
_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_SPARE_BYTES: Final = 1 << 30  # of a disk, left to others
_FOLDER: Final = re.compile(r"[0-9a-f]{1,13}")
_FILE: Final = re.compile(r"[0-9a-f]{3}|new-[0-9]+-[0-9]+")
_AHEAD_SHARE: Final = 16  # this part of the cache may be had once more for what is read ahead
_AHEAD_BYTES: Final = 256 << 20  # and no more than this
_VICTIMS_SHARE: Final = 256  # of the records that are there, chosen at a time
_OF_FULL_DISK: Final = 0.95  # others want to write, too
NEVER: Final = 1 << 62


class CacheArguments(NamedTuple):
    """What all processes that share a cache know of it.

    Attributes:
        place: "FOLDER", or "FOLDER:60GB". Without a size: what the disk has free but 1 GB. The size
            that the first program gives remains, as long as one has it open.
        digest: Another text for other records.
        eviction: "foresight", or "lru": what was read last is kept.
    """

    place: str
    digest: str
    eviction: str

    def open(self, sizes: NDArray[np.int64]) -> NodeCache:
        """Return the cache."""
        return NodeCache(self, sizes)


class NodeCache:
    """Records by number, within a size.

    Without a known order, and by "foresight", nothing is evicted: in a shuffled epoch any record is
    worth as much as another. With one, the record goes that will be needed last.

    Attributes:
        folder: Where the files are.
        max_bytes: What they take at most. With an order that is known, what is read ahead comes on
            top: a sixteenth, 256 MiB at most.

    Concurrency:
        Any thread and process of this machine, all at the same time.
    """

    def __init__(self, arguments: CacheArguments, sizes: NDArray[np.int64]) -> None:
        """Open the cache, or make it; `sizes` are the bytes of each record.

        Raises:
            StoreError: the folder cannot be written.
        """
        above, max_bytes = parse_sized_path(arguments.place)
        self.folder = above / arguments.digest
        self._sizes, self._eviction = sizes, arguments.eviction
        self._victims: deque[int] = deque()
        self._orders: dict[str, Order] = {}
        self._names = itertools.count()
        self._mutex = threading.Lock()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.folder / "orders").mkdir(mode=0o700, exist_ok=True)
            self._lock_fd = -1
            self._users_fd = os.open(self.folder / "users", _FLAGS | os.O_CREAT, 0o600)
            is_alone = _locks(self._users_fd)
            if not is_alone:
                fcntl.flock(self._users_fd, fcntl.LOCK_SH)  # waits while another one sets it up
            self._map()
            if is_alone:
                self._begin(max_bytes)
                fcntl.flock(self._users_fd, fcntl.LOCK_SH)
        except OSError as error:
            self.close()
            raise StoreError(f"cannot keep records in {self.folder}: {error.strerror}.") from error
        _caches.add(self)

    def _map(self) -> None:
        num = len(self._sizes)
        states_at = _TABLE_AT + 8 * num
        fd = os.open(self.folder / "table", _FLAGS | os.O_CREAT, 0o600)
        try:
            if os.fstat(fd).st_size != states_at + num:
                os.ftruncate(fd, 0)
                os.posix_fallocate(fd, 0, states_at + num)  # a full disk must not end the process
            table = np.frombuffer(mmap.mmap(fd, states_at + num), np.uint8)
        finally:
            os.close(fd)
        self._header = table[: _HEADER.itemsize].view(_HEADER)[0]
        self._read_at = table[_TABLE_AT:states_at].view("<i8")
        self._states = table[states_at:]

    def _begin(self, max_bytes: int | None) -> None:
        """Bring table and files together, alone with the cache."""
        if self._header["magic"] != _MAGIC or self._header["num"] != len(self._sizes):
            self._states[:] = 0
            self._header["magic"], self._header["num"] = _MAGIC, len(self._sizes)
        there = np.zeros(len(self._sizes), np.uint8)
        with os.scandir(self.folder) as folders:
            for folder in folders:
                if _FOLDER.fullmatch(folder.name):
                    if not folder.is_dir(follow_symlinks=False):
                        raise StoreError(
                            f"{folder.path} is no folder of this cache. It was not made by "
                            "Penstock: take it away, or name another folder."
                        )
                    self._look_into(folder, there)
        self._states[:] = there
        self._header["used"] = int(self._sizes[there != 0].sum())
        if max_bytes is None:
            free = shutil.disk_usage(self.folder).free - _SPARE_BYTES
            max_bytes = max(0, free) + int(self._header["used"])
        self._header["limit"] = max_bytes

    def _look_into(self, folder: os.DirEntry[str], there: NDArray[np.uint8]) -> None:
        with os.scandir(folder) as files:
            for file in files:
                if not _FILE.fullmatch(file.name) or not file.is_file(follow_symlinks=False):
                    continue
                number = -1 if file.name[0] == "n" else int(folder.name + file.name, 16)
                is_known = 0 <= number < len(there) and self._states[number]
                if is_known and file.stat(follow_symlinks=False).st_size == self._sizes[number]:
                    there[number] = 1
                else:
                    os.unlink(file)

    @property
    def max_bytes(self) -> int:
        """See the class."""
        return int(self._header["limit"])

    @property
    def ahead_bytes(self) -> int:
        """How much is read ahead at most."""
        return min(self.max_bytes // _AHEAD_SHARE, _AHEAD_BYTES)

    @property
    def num_bytes(self) -> int:
        """What the files take."""
        return int(self._header["used"])

    @property
    def num_kept(self) -> int:
        """How many records there are."""
        return int(np.count_nonzero(self._states))

    def has(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which records are there, or were a moment ago."""
        are_there: NDArray[np.bool_] = self._states[numbers] != 0
        return are_there

    def _path(self, number: int) -> str:
        return f"{self.folder}/{number >> 12:x}/{number & 0xFFF:03x}"

    def get(self, number: int) -> memoryview | None:
        """Return a record; None if it is not there, whole."""
        if not self._states[number]:
            return None
        self._read_at[number] = time.monotonic_ns()
        try:
            fd = os.open(self._path(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # evicted since, or its writer was killed
            return None
        try:
            size = int(self._sizes[number])
            data = os.read(fd, size)
        finally:
            os.close(fd)
        return memoryview(data) if len(data) == size else None

    def put(self, number: int, data: memoryview) -> None:
        """Keep a record, if there is room for it, or for it rather than for others."""
        with self._locked():
            if self._states[number]:
                if os.path.exists(self._path(number)):
                    return
            elif not self._has_room(number):
                return
            self._states[number] = 1  # from here on it is counted
            self._read_at[number] = time.monotonic_ns()
        try:
            self._write(number, data)
        except OSError as error:
            self.drop(number)
            if error.errno not in _NO_ROOM:
                raise
            self._shrink()

    def _write(self, number: int, data: memoryview) -> None:
        path = self._path(number)
        new = f"{os.path.dirname(path)}/new-{os.getpid()}-{next(self._names)}"
        flags = _FLAGS | os.O_CREAT | os.O_EXCL
        try:
            fd = os.open(new, flags, 0o600)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            fd = os.open(new, flags, 0o600)
        try:
            try:
                if os.write(fd, data) < len(data):
                    raise OSError(errno.ENOSPC, "written in part")
            finally:
                os.close(fd)
            os.rename(new, path)
        except BaseException:
            os.unlink(new)
            raise

    def _has_room(self, number: int) -> bool:
        """Count a record, with others evicted for it that are needed later."""
        size, header = int(self._sizes[number]), self._header
        while header["used"] + size > self.max_bytes + (self.ahead_bytes if self._orders else 0):
            if not self._evict_for(number):
                return False
        header["used"] += size
        return True

    def _evict_for(self, number: int) -> bool:
        """Evict one record that is needed later than another; return whether there is one."""
        for is_chosen_anew in (False, True):
            if is_chosen_anew:
                self._choose_victims()
            while self._victims:
                victim = self._victims.popleft()
                if self._states[victim]:
                    if not self._is_needed_before(number, victim):
                        break  # as are those behind it
                    self._evict(victim)
                    return True
        return False

    def _is_needed_before(self, number: int, other: int) -> bool:
        if self._eviction == "lru":
            return True
        one, two = self._distances(np.array([number, other]))
        return bool(one < two)

    def _choose_victims(self) -> None:
        """Choose what is evicted next, by what is known now."""
        self._find_orders()
        self._victims.clear()
        there = np.flatnonzero(self._states)
        if len(there) == 0 or (self._eviction == "foresight" and not self._orders):
            return
        by_time = self._eviction == "lru"
        distances = -self._read_at[there] if by_time else self._distances(there)
        count = max(1, len(there) // _VICTIMS_SHARE)
        far = np.argpartition(distances, len(there) - count)[-count:]
        self._victims.extend(there[far[np.argsort(-distances[far])]].tolist())

    def _distances(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return after how many samples records are needed next, by any rank of this machine."""
        least = np.full(len(numbers), NEVER, np.int64)
        for order in self._orders.values():
            np.minimum(least, order.distances(numbers), out=least)
        return least

    def _find_orders(self) -> None:
        """Know the orders of the ranks that run, and of no others."""
        paths = {file.path for file in os.scandir(self.folder / "orders")}
        for path in paths - self._orders.keys():
            if (order := Order.opened(path, len(self._sizes))) is not None:
                self._orders[path] = order
        for path, order in list(self._orders.items()):
            if path not in paths or not order.is_followed():
                del self._orders[path]

    def _evict(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(number))
        self._states[number] = 0
        self._header["used"] -= self._sizes[number]

    def drop(self, number: int) -> bool:
        """Take a record away, as one that is damaged; return whether it was there."""
        with self._locked():
            was_there = bool(self._states[number])
            if was_there:
                self._evict(number)
        return was_there

    def _shrink(self) -> None:
        """Be content with less than there is, as the disk is full."""
        with self._locked():
            self._header["limit"] = int(self.num_bytes * _OF_FULL_DISK)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._mutex:
            if self._lock_fd < 0:  # a lock is that of an open file: none is shared by a fork
                self._lock_fd = os.open(self.folder / "lock", _FLAGS | os.O_CREAT, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def after_fork(self) -> None:
        """Hold no lock, in a process that was forked."""
        self._mutex = threading.Lock()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def close(self) -> None:
        """Let go of the files; they stay."""
        for name in ("_lock_fd", "_users_fd"):
            fd = getattr(self, name, -1)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)

    __del__ = close


_caches: Final[weakref.WeakSet[NodeCache]] = weakref.WeakSet()


def _after_fork() -> None:
    for cache in list(_caches):
        cache.after_fork()


at_fork(after_in_child=_after_fork)


class Order:
    """When a rank needs each record next: a file that its process, while it runs, has locked.

        int64   how many samples the rank has used up
        int64   for each record, which sample it is next; `NEVER` if it is none that is known

    Concurrency:
        The rank's main process counts samples, its fetcher writes the rest, anybody reads.
    """

    def __init__(self, path: str, fd: int, num_records: int) -> None:
        """Map an open file, which is then this object's."""
        self.path, self._fd = path, fd
        numbers = np.frombuffer(mmap.mmap(fd, 8 * (1 + num_records)), np.int64)
        self.clock, self.due = numbers[:1], numbers[1:]

    @classmethod
    def made(cls, cache: NodeCache, num_records: int) -> Order:
        """Return a new one, which this process keeps locked."""
        name = f"{os.getpid()}-{os.urandom(4).hex()}"
        made, path = f"{cache.folder}/order-{name}", f"{cache.folder}/orders/{name}"
        fd = os.open(made, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.posix_fallocate(fd, 0, 8 * (1 + num_records))
            order = cls(path, fd, num_records)
            order.due[:] = NEVER
            os.rename(made, path)  # nobody sees it before it is locked
        except OSError:
            os.close(fd)
            os.unlink(made)
            raise
        return order

    @classmethod
    def of_rank(cls, path: str, num_records: int) -> Order:
        """Return that of the main process, for its fetcher."""
        return cls(path, os.open(path, _FLAGS), num_records)

    @classmethod
    def opened(cls, path: str, num_records: int) -> Order | None:
        """Return another process's; None if that has ended, or is about to make it."""
        with contextlib.suppress(OSError):
            fd = os.open(path, _FLAGS)
            if os.fstat(fd).st_size == 8 * (1 + num_records):
                order = cls(path, fd, num_records)
                return order if order.is_followed() else None
            if _locks(fd):
                os.unlink(path)
            os.close(fd)
        return None

    def is_followed(self) -> bool:
        """Return whether its process runs; else its file is removed."""
        if not _locks(self._fd):
            return True
        self.remove()
        return False

    def remove(self) -> None:
        """Say that the rank needs nothing more."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def distances(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return after how many samples records are needed."""
        distances: NDArray[np.int64] = self.due[numbers] - self.clock[0]
        return np.where(distances < 0, NEVER, distances)

    def __del__(self) -> None:
        os.close(self._fd)


def _locks(fd: int) -> bool:
    """Lock a file if nobody else has; return whether that was so."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
