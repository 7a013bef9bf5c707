# SPDX-License-Identifier: Apache-2.0
"""`NodeCache`: records of far objects as files on this machine, shared by all its processes.

    FOLDER/DIGEST/table      the header below, then when each record was read last (8 bytes), its
                             checksum (8 bytes), and whether it is there (1 byte)
                 /users      locked by all processes that use the cache
                 /lock       locked by the process that changes the table
                 /orders/…   when each rank needs each record: `penstock.blobs.order`
                 /1f/a03     record 0x1fa03: exactly the bytes that lie far away

A file appears by rename. Eviction unlinks it; a process that has it open can still read it. The
table counts a record from before its file is there until after it is gone. So a kill at any moment
may leave space that is counted but not used; the next process that is alone with the cache corrects
that. A failure of the disk does not end the training: what cannot be kept is read from far away
again.
"""

from __future__ import annotations

import contextlib
import fcntl
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
import xxhash

from penstock.blobs.order import FLAGS, LEFT, NEVER, Order, locks
from penstock.errors import StoreError
from penstock.forks import at_fork
from penstock.lines import parse_sized_path
from penstock.opening import read_whole
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_MAGIC: Final = b"penstock records"
_HEADER: Final = np.dtype(
    [("magic", "S16"), ("num", "<i8"), ("used", "<i8"), ("limit", "<i8"), ("spared", "<i8")]
)
_TABLE_AT: Final = 64
_SPARE_BYTES: Final = 1 << 30  # of a disk, left to others
_FOLDER: Final = re.compile(r"[0-9a-f]{1,13}")
_FILE: Final = re.compile(r"[0-9a-f]{3}|new-[0-9a-f]{16}")
_AHEAD_SHARE: Final = 16  # one part in 16 of the cache comes on top for what is read ahead
_LEAST_AHEAD_BYTES: Final = 16 << 20  # unless the cache is smaller
MOST_AHEAD_BYTES: Final = 256 << 20
_VICTIMS_SHARE: Final = 256  # one part in 256 of the records that are there is chosen at a time
_PAUSE_S: Final = 5.0  # after a write that failed


class CacheArguments(NamedTuple):
    """What all processes that share a cache know of it.

    Attributes:
        place: "FOLDER", or "FOLDER:60GB". Without a size: the free space of the disk less 1 GB. The
            first program's size holds while any program has the cache open.
        digest: Identifies the records.
        eviction: "foresight": the record needed last is evicted; "lru": the one read longest ago.
    """

    place: str
    digest: str
    eviction: str

    def open(self, sizes: NDArray[np.int64]) -> NodeCache:
        """Return the cache."""
        return NodeCache(self, sizes)


class NodeCache:
    """Records by number, in files of a limited total size.

    With "foresight", the record that will be needed last is evicted. While no order is known,
    nothing is evicted: in a shuffled epoch, all records are worth the same.

    Attributes:
        folder: Where the files are.
        max_bytes: What they take at most. While an order is known, what is read ahead comes on top:
            a sixteenth of this, at least 16 MiB (unless the cache is smaller), at most 256 MiB.

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
        self._num_chosen = self._num_refused = (
            0  # victims at a time; records for which there is none
        )
        self._keep_at = 0.0  # not before, on the monotonic clock
        self._mutex = threading.Lock()
        self._lock_fd = self._users_fd = -1
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.folder / "orders").mkdir(mode=0o700, exist_ok=True)
            self._users_fd = os.open(self.folder / "users", FLAGS | os.O_CREAT, 0o600)
            self._open_lock()
            while not self._is_open(max_bytes):
                fcntl.flock(self._users_fd, fcntl.LOCK_UN)  # the one that set it up was killed
        except OSError as error:
            self.close()
            raise StoreError(
                f"cannot keep records in {self.folder}: {error.strerror}. Give local_cache= a "
                "folder that can be written."
            ) from error
        _caches.add(self)

    def _is_open(self, max_bytes: int | None) -> bool:
        """Open the cache, and set it up if no other process has it; return whether it is set up."""
        if locks(self._users_fd):
            self._map(is_alone=True)
            self._set_up(max_bytes)
            fcntl.flock(self._users_fd, fcntl.LOCK_SH)
            return True
        fcntl.flock(self._users_fd, fcntl.LOCK_SH)  # waits while another one sets it up
        return self._map(is_alone=False) and self._header["magic"] == _MAGIC

    def _open_lock(self) -> None:
        self._lock_fd = os.open(self.folder / "lock", FLAGS | os.O_CREAT, 0o600)

    def _map(self, *, is_alone: bool) -> bool:
        num = len(self._sizes)
        sums_at = _TABLE_AT + 8 * num
        states_at = sums_at + 8 * num
        fd = os.open(self.folder / "table", FLAGS | os.O_CREAT, 0o600)
        try:
            if os.fstat(fd).st_size != states_at + num:
                if not is_alone:
                    return False
                os.ftruncate(fd, 0)
                os.posix_fallocate(fd, 0, states_at + num)  # a full disk must not end the process
            table = np.frombuffer(mmap.mmap(fd, states_at + num), np.uint8)
        finally:
            os.close(fd)
        self._header = table[: _HEADER.itemsize].view(_HEADER)[0]
        self._read_at = table[_TABLE_AT:sums_at].view("<i8")
        self._sums = table[sums_at:states_at].view("<u8")
        self._states = table[states_at:]
        return True

    def _set_up(self, max_bytes: int | None) -> None:
        """Make table and files agree, while no other process has the cache."""
        header = self._header
        if header["magic"] != _MAGIC:
            self._states[:] = 0
        header["magic"] = b""
        self._read_at[:] = 0  # the clock began anew with the machine
        there = np.zeros(len(self._sizes), np.uint8)
        for entry in list(os.scandir(self.folder)):
            if _FOLDER.fullmatch(entry.name):
                if not entry.is_dir(follow_symlinks=False):
                    raise StoreError(
                        f"{entry.path} is no folder of this cache. It was not made by Penstock: "
                        "remove it, or name another folder for the cache."
                    )
                self._look_into(entry, there)
        for path in (*self.folder.glob("*-*"), *self.folder.glob("orders/*")):
            if LEFT.fullmatch(path.name):
                path.unlink()
        self._states[:] = there
        header["used"] = int(self._sizes[there != 0].sum())
        if max_bytes is None:
            free = shutil.disk_usage(self.folder).free - _SPARE_BYTES
            max_bytes = max(0, free) + int(header["used"])
        header["limit"] = max_bytes
        for number in np.flatnonzero(there).tolist():  # its limit may have been larger
            if header["used"] <= max_bytes:
                break
            self._evict(number)
        header["magic"] = _MAGIC

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
        """What comes on top of `max_bytes` for what is read ahead."""
        least = _LEAST_AHEAD_BYTES if self.max_bytes >= _LEAST_AHEAD_BYTES else 0
        return min(max(least, self.max_bytes // _AHEAD_SHARE), MOST_AHEAD_BYTES)

    @property
    def num_bytes(self) -> int:
        """What the files take."""
        return int(self._header["used"])

    @property
    def num_free_bytes(self) -> int:
        """What more the files may take, including what is read ahead."""
        return self.max_bytes + self.ahead_bytes - self.num_bytes

    @property
    def evicts_by_time(self) -> bool:
        """Whether what was read longest ago is evicted."""
        return self._eviction == "lru"

    @property
    def num_spared_bytes(self) -> int:
        """Running count of the bytes that may be evicted at no loss; only differences matter."""
        return int(self._header["spared"])

    def spare(self, num_bytes: int) -> None:
        """Count bytes of records that are used up and would be evicted before their next use."""
        if num_bytes:
            with self._locked():
                self._header["spared"] += num_bytes

    def has(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which records are there, or were a moment ago."""
        are_there: NDArray[np.bool_] = self._states[numbers] != 0
        return are_there

    def _path(self, number: int) -> str:
        return f"{self.folder}/{number >> 12:x}/{number & 0xFFF:03x}"

    @property
    def is_keeping(self) -> bool:
        """False for some seconds after a write that failed."""
        return time.monotonic() >= self._keep_at

    def get(self, number: int) -> memoryview | None:
        """Return a record; None if it is not there, not as it was, or cannot be read."""
        if not self._states[number]:
            return None
        self._read_at[number] = time.monotonic_ns()
        size = int(self._sizes[number])
        try:
            fd = os.open(self._path(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                data = read_whole(fd, size, 0)
            finally:
                os.close(fd)
        except OSError:  # evicted since, or its writer was killed, or the disk fails
            return None
        if len(data) != size or xxhash.xxh3_64_intdigest(data) != self._sums[number]:
            with contextlib.suppress(OSError):
                self.drop(number)  # what was damaged on the disk comes anew
            return None
        return memoryview(data)

    def put(self, number: int, data: memoryview) -> None:
        """Keep a record, if there is room, or if records that are needed later can make room.

        If the disk takes nothing, there is a warning, and the next try is some seconds later.
        """
        if not self.is_keeping:
            return
        new = f"{os.path.dirname(self._path(number))}/new-{os.urandom(8).hex()}"
        try:
            with self._locked():
                if self._states[number]:
                    if os.path.exists(self._path(number)):
                        return
                elif not self._has_room(number):
                    return
                self._sums[number] = xxhash.xxh3_64_intdigest(data)
                self._states[number] = 1  # from here on it is counted
                self._read_at[number] = time.monotonic_ns()
            try:
                _write(new, data)
                with self._locked():
                    if self._states[number]:  # else it was evicted meanwhile
                        os.rename(new, self._path(number))
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(new)
        except OSError as error:
            self._keep_at = time.monotonic() + _PAUSE_S
            with contextlib.suppress(OSError):
                self.drop(number)
            warn_user(
                f"{self.folder} takes no more records ({error.strerror}): those that it lacks are "
                "read from far away each time. Free some space, or name another folder."
            )

    def _has_room(self, number: int) -> bool:
        """Make room for a record, by evicting others that are needed later; count it if it fits."""
        size, header = int(self._sizes[number]), self._header
        if size > self.max_bytes:
            return False
        while header["used"] + size > self.max_bytes + (self.ahead_bytes if self._orders else 0):
            if not self._evict_for(number):
                return False
        header["used"] += size
        return True

    def _evict_for(self, number: int) -> bool:
        """Evict one record that is needed later than another; return whether there is one."""
        self._forget_ended()
        victim = self._first_victim()
        if victim is None or not self._is_needed_before(number, victim):
            self._num_refused += 1
            if victim is not None and self._num_refused < self._num_chosen:
                return False  # choosing anew for each record would take long, and in vain
            self._choose_victims()
            victim = self._first_victim()
            if victim is None or not self._is_needed_before(number, victim):
                return False
        self._victims.popleft()
        self._evict(victim)
        return True

    def _first_victim(self) -> int | None:
        while self._victims and not self._states[self._victims[0]]:
            self._victims.popleft()
        return self._victims[0] if self._victims else None

    def _is_needed_before(self, number: int, other: int) -> bool:
        if self.evicts_by_time:
            return True
        one, two = self.distances(np.array([number, other]))
        return bool(one < two)

    def _choose_victims(self) -> None:
        """Choose what is evicted next, by what is known now."""
        self.find_orders()
        self._victims.clear()
        self._num_chosen = self._num_refused = 0
        by_time = self.evicts_by_time
        if not by_time and not self._orders:
            return
        there = np.flatnonzero(self._states)
        if len(there) == 0:
            return
        distances = -self._read_at[there] if by_time else self.distances(there)
        count = self._num_chosen = max(1, len(there) // _VICTIMS_SHARE)
        far = np.argpartition(distances, len(there) - count)[-count:]
        self._victims.extend(there[far[np.argsort(-distances[far])]].tolist())

    def distances(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return after how many samples records are needed next, by any rank of this machine."""
        least = np.full(len(numbers), NEVER, np.int64)
        for order in self._orders.values():
            np.minimum(least, order.distances(numbers), out=least)
        return least

    def find_orders(self) -> int:
        """Find the orders of the loaders that run; return the bytes of their epochs."""
        paths = {file.path for file in os.scandir(self.folder / "orders")}
        for path in paths - self._orders.keys():
            if (order := Order.opened(path, len(self._sizes))) is not None:
                self._orders[path] = order
        self._forget_ended()
        return sum(int(order.epoch_bytes[0]) for order in self._orders.values())

    def _forget_ended(self) -> None:
        """Forget the orders of loaders that have ended, and what was chosen by them."""
        for path, order in list(self._orders.items()):
            if not order.is_followed():
                del self._orders[path]
                self._victims.clear()

    def _evict(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(number))
        self._states[number] = 0
        self._header["used"] -= self._sizes[number]
        self._header["spared"] -= self._sizes[number]

    def drop(self, number: int) -> None:
        """Remove a record, such as one that is damaged."""
        with self._locked():
            if self._states[number]:
                self._evict(number)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._mutex:
            if self._lock_fd < 0:  # a lock belongs to an open file, which a fork must not share
                self._open_lock()
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def after_fork(self) -> None:
        """Drop the inherited locks, in a process that was forked."""
        self._mutex = threading.Lock()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def close(self) -> None:
        """Close the files; they stay on the disk."""
        with self._mutex:
            self._close()

    def _close(self) -> None:
        for name in ("_lock_fd", "_users_fd"):
            fd = getattr(self, name, -1)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)

    __del__ = _close


def _write(path: str, data: memoryview) -> None:
    flags = FLAGS | os.O_CREAT | os.O_EXCL
    try:
        fd = os.open(path, flags, 0o600)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        fd = os.open(path, flags, 0o600)
    try:
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)


_caches: Final[weakref.WeakSet[NodeCache]] = weakref.WeakSet()


def _after_fork() -> None:
    for cache in list(_caches):
        cache.after_fork()


at_fork(after_in_child=_after_fork)
