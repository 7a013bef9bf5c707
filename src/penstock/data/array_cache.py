# SPDX-License-Identifier: Apache-2.0
"""`ArrayCache`: arrays by number, in memory or a file that all processes of a machine share.

    byte 0        16 bytes: what the file is; written last
    byte 16       8 bytes: the end of the entries
    byte 24       8 bytes: how many there are
    byte 32       8 bytes: the size of the file
    byte 64 …     8 bytes for each number: where its entry begins, 0 if there is none
    …             entries: 64 bytes (bytes, height, width, channels; 8 each), then the pixels

A process takes room for an entry under a lock, writes it, and then where it begins. A kill at any
moment wastes the room, no more. Who reads takes no lock. All is written by `pwrite`: on a full disk
that is an error, where memory that is mapped would end the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import math
import mmap
import os
import re
import shutil
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import ConfigError, StoreError
from penstock.forks import at_fork
from penstock.lines import format_bytes, parse_bytes, parse_sized_path
from penstock.system_limits import memory_now

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_RAM: Final = re.compile(r"ram(?::(.*))?")
_MAGIC: Final = b"penstock arrays1"
_END_AT, _COUNT_AT, _SIZE_AT, _TABLE_AT = 16, 24, 32, 64
_ENTRY_BYTES: Final = 64
_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
_SPARE_BYTES: Final = 1 << 30  # of a disk, left to others


class ArrayCache:
    """Arrays of uint8, shape (height, width, channels), each made once on a machine.

    Nothing is evicted: what does not fit is made anew each time.

    Attributes:
        max_bytes: What the entries take at most.

    Concurrency:
        Any thread and process. It pickles: a process of this machine that unpickles it, while the
        one that made it lives, shares the memory; another one has memory of its own. A file is
        shared by all that name it for the same data.

    Example:
        >>> cache = ArrayCache("ram:1MB", 10, "these data")
        >>> cache.get(3) is None
        True
        >>> cache.put(3, np.ones((2, 2, 3), np.uint8))
        >>> int(cache.get(3).sum()), cache.num_kept
        (12, 1)
    """

    def __init__(self, place: str | os.PathLike[str], num_arrays: int, what: str) -> None:
        """Make the memory, or open the file.

        Args:
            place: "ram:4GB", memory that is freed when the last process that shares it ends; or
                "FOLDER" or "FOLDER:20GB", a file that other ranks and runs use, too, until the
                machine restarts. Without a size: half of the free memory, or the free space of
                the disk less 1 GB.
            num_arrays: Numbers are from 0 on.
            what: Identifies the data, and how they are read.

        Raises:
            ConfigError: `place` is of another form, or more than a process can have.
            StoreError: the file cannot be made.
        """
        arguments = os.fspath(place), num_arrays, what
        begin = _begin(num_arrays)
        ram = _RAM.fullmatch(arguments[0])
        if ram is None:
            self._share(_open_file(arguments[0], f"{what} {num_arrays}", begin), arguments)
            return
        left_bytes = memory_now().left_bytes or 0
        max_bytes = parse_bytes(ram[1]) if ram[1] is not None else left_bytes // 2
        self._fd = os.memfd_create(f"penstock-arrays-{os.urandom(8).hex()}", os.MFD_CLOEXEC)
        try:
            _set_up(self._fd, begin, max_bytes)
            self._share(self._fd, arguments)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cache={arguments[0]!r}: that is more than a process can have. "
                f"{format_bytes(left_bytes)} of memory are free: give less, or no size for half "
                "of it."
            ) from error

    def _share(self, fd: int, arguments: tuple[str, int, str]) -> None:
        """Use an open file, which is then this object's."""
        self._fd, self._arguments = fd, arguments
        self._begin = _begin(arguments[1])
        self._memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._starts = self._bytes[_TABLE_AT : _TABLE_AT + 8 * arguments[1]].view("<i8")
        self.max_bytes = len(self._bytes) - self._begin
        self._is_full = False
        self.begin_anew()
        _caches.add(self)

    def begin_anew(self) -> None:
        """Hold no lock, in a process that was forked."""
        # A lock is that of an open file: this one is opened by each process for itself, and by none
        # that may be killed with it while a child has it, too.
        self._lock, self._lock_fd = threading.Lock(), -1

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            if self._lock_fd < 0:
                self._lock_fd = os.open(f"/proc/self/fd/{self._fd}", _FLAGS)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    @property
    def num_kept(self) -> int:
        """How many arrays there are."""
        return _number_at(self._fd, _COUNT_AT)

    @property
    def num_bytes(self) -> int:
        """What they take."""
        return _number_at(self._fd, _END_AT) - self._begin

    def get(self, number: int) -> NDArray[np.uint8] | None:
        """Return an array, or None; a read-only view of the shared memory."""
        start = int(self._starts[number])
        if not start:
            return None
        num_bytes, *shape = self._bytes[start : start + 32].view("<i8").tolist()
        start += _ENTRY_BYTES
        if num_bytes != math.prod(shape) or start + num_bytes > len(self._bytes):
            return None  # somebody else has written into it
        return self._bytes[start : start + num_bytes].reshape(shape)

    def put(self, number: int, array: NDArray[np.uint8]) -> None:
        """Keep an array, if there is room for it."""
        if self._is_full:
            return
        try:
            self._put(number, array)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._is_full = True

    def _put(self, number: int, array: NDArray[np.uint8]) -> None:
        head = np.zeros(_ENTRY_BYTES // 8, "<i8")
        head[:4] = array.nbytes, *array.shape
        num_bytes = _ENTRY_BYTES + array.nbytes
        size = num_bytes + -num_bytes % _ENTRY_BYTES
        with self._locked():
            start = _number_at(self._fd, _END_AT)
            if start + size > len(self._bytes) or self._starts[number]:
                return
            _put_number(self._fd, start + size, _END_AT)
        parts: list[Any] = [head, np.ascontiguousarray(array)]
        if os.pwritev(self._fd, parts, start) < num_bytes:
            raise OSError(errno.ENOSPC, "written in part")
        with self._locked():
            if not self._starts[number]:  # else another process was quicker
                _put_number(self._fd, start, _TABLE_AT + 8 * number)
                _put_number(self._fd, self.num_kept + 1, _COUNT_AT)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a way to the memory."""
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        return _unpickled, (path, os.readlink(path), self._arguments)

    def __del__(self) -> None:
        """Close the file; views keep the memory."""
        with contextlib.suppress(AttributeError):  # it could not be opened
            os.close(self._fd)
            if self._lock_fd >= 0:
                os.close(self._lock_fd)


_caches: Final[weakref.WeakSet[ArrayCache]] = weakref.WeakSet()


def _after_fork() -> None:
    for cache in list(_caches):
        if cache._lock_fd >= 0:
            os.close(cache._lock_fd)
        cache.begin_anew()


at_fork(after_in_child=_after_fork)


def _unpickled(path: str, name: str, arguments: tuple[Any, ...]) -> ArrayCache:
    if _RAM.fullmatch(arguments[0]) is not None:
        with contextlib.suppress(OSError):  # of another machine, or of a process that has ended
            if os.readlink(path) == name:
                cache = ArrayCache.__new__(ArrayCache)
                cache._share(os.open(path, _FLAGS), arguments)
                return cache
    return ArrayCache(*arguments)


def _open_file(place: str, what: str, begin: int) -> int:
    """Return the file of these arrays in a folder, new or of another process."""
    folder, max_bytes = parse_sized_path(place)
    # What was written before the machine went down may not be there.
    name = hashlib.blake2b(f"{what} {_boot_id()}".encode(), digest_size=16).hexdigest()
    path = folder / f"{name}.arrays"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, _FLAGS | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.pread(fd, len(_MAGIC), 0).strip(b"\0") == b"":  # new, or its maker was killed
                free = max(0, shutil.disk_usage(folder).free - _SPARE_BYTES)
                _set_up(fd, begin, free if max_bytes is None else max_bytes)
            is_ours = os.pread(fd, len(_MAGIC), 0) == _MAGIC
            is_whole = _number_at(fd, _SIZE_AT) == os.fstat(fd).st_size
            fcntl.flock(fd, fcntl.LOCK_UN)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise StoreError(f"cannot keep arrays in {folder}: {error.strerror}.") from error
    if not (is_ours and is_whole):
        os.close(fd)
        what = "is cut off: delete it" if is_ours else "is no file of arrays: name another folder"
        raise StoreError(f"{path} {what}.")
    return fd


def _begin(num_arrays: int) -> int:
    """Return where the entries begin."""
    end = _TABLE_AT + 8 * num_arrays
    return end + -end % _ENTRY_BYTES


def _set_up(fd: int, begin: int, max_bytes: int) -> None:
    os.ftruncate(fd, begin + max_bytes)
    os.posix_fallocate(fd, 0, begin)
    _put_number(fd, begin, _END_AT)
    _put_number(fd, begin + max_bytes, _SIZE_AT)
    os.pwrite(fd, _MAGIC, 0)


def _number_at(fd: int, place: int) -> int:
    return int.from_bytes(os.pread(fd, 8, place), "little")


def _put_number(fd: int, value: int, place: int) -> None:
    os.pwrite(fd, value.to_bytes(8, "little"), place)


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
