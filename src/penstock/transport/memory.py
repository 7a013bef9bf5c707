# SPDX-License-Identifier: Apache-2.0
"""Nameless shared memory: make it, send its descriptor, map it, and never leave it behind.

Guarantees
    A segment has no name that could outlive a crash: `memfd_create` where the system has it,
    otherwise `shm_open` followed at once by `shm_unlink`. The kernel frees it with its last
    mapping. A mapping lives until nothing refers to it; views of it keep it alive.
    No descriptor stays open once both sides have mapped the segment, so a thousand held batches
    cost a thousand mappings and not one descriptor.

Why not `mmap.mmap`: it keeps a duplicate of the descriptor for as long as the mapping lives (until
Python 3.13's `trackfd`), which is how a loader runs into `ulimit -n`.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import secrets
import weakref
from ctypes import c_int, c_size_t, c_ssize_t, c_void_p
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from penstock.transport.page_lock import PageLock

_MAP_FAILED: Final = c_void_p(-1).value


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = c_void_p
    libc.mmap.argtypes = (c_void_p, c_size_t, c_int, c_int, c_int, c_ssize_t)
    libc.munmap.argtypes = (c_void_p, c_size_t)
    return libc


@cache
def _array_class(size_bytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    # A Python subclass, not the bare ctypes type: its instances carry attributes and can be hashed.
    members = {"_type_": ctypes.c_ubyte, "_length_": size_bytes, "__hash__": object.__hash__}
    return type("SegmentView", (ctypes.Array,), members)


class Mapping:
    """Memory mapped into this process; unmapped when the last reference and the last view are gone.

    Concurrency:
        Views may be made and dropped in any thread. A forked child shares the pages, not a lock of
        them.
    """

    __slots__ = ("__weakref__", "_token", "address", "size_bytes")

    def __init__(
        self,
        fd: int,
        size_bytes: int,
        *,
        flags: int = 0,
        page_lock: PageLock | None = None,
    ) -> None:
        """Map `size_bytes` of `fd` (-1 with `MAP_ANONYMOUS`), which the caller may close.

        No flags are `MAP_SHARED`.

        Raises:
            TransportError: the system gives no more memory.
        """
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc().mmap(None, size_bytes, protection, flags or mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            error = os.strerror(ctypes.get_errno())
            raise TransportError(
                f"cannot map {size_bytes:,} bytes of shared memory: {error}. Hold fewer batches, "
                "or raise the limit (`ulimit -v`, the container's memory, vm.max_map_count)."
            )
        self.address: int = address
        self.size_bytes = size_bytes
        unmap: Callable[[], object] = functools.partial(_libc().munmap, address, size_bytes)
        # Before the rest: if a Ctrl-C breaks this off, pages that may be locked stay mapped.
        release = None if page_lock is None else page_lock.lock(address, size_bytes)
        if release is not None:
            unmap = functools.partial(release, unmap)
        # Not in a `__del__`. Of a cycle that is garbage the finalizers run in any order, and only
        # then are references dropped: another one could read memory that is unmapped already. An
        # array is no part of any cycle, so it goes when the last of these references does.
        self._token = np.empty(0, np.uint8)
        weakref.finalize(self._token, unmap).atexit = False

    def view(self) -> ctypes.Array[ctypes.c_ubyte]:
        """Return a fresh writable view of all bytes, which keeps the mapping alive.

        Each call gives a new object, so that a weak reference to it says when this one use is
        over.
        """
        view = _array_class(self.size_bytes).from_address(self.address)
        view.mapping = self  # type: ignore[attr-defined]  # from_address itself keeps nothing alive
        return view

    def bytes(self) -> npt.NDArray[np.uint8]:
        """Return all bytes as an array, shape (size_bytes,), that keeps the mapping alive."""
        return as_bytes(self.view())


def as_bytes(view: ctypes.Array[ctypes.c_ubyte]) -> npt.NDArray[np.uint8]:
    """Return `view` as an array: ctypes' own buffers have a format that pickle refuses."""
    array: npt.NDArray[np.uint8] = np.frombuffer(view, np.uint8)  # type: ignore[call-overload]
    return array


def anonymous_mapping(size_bytes: int, page_lock: PageLock | None = None) -> Mapping:
    """Return zeroed, page-aligned memory: private, or with a lock shared with forked children.

    After a fork the first write to a private page goes to a copy of it, while a device would go on
    reading the page that was locked. So memory that is to be locked must not be private, and what
    a child may see of it is not to be written again.
    """
    sharing = mmap.MAP_PRIVATE if page_lock is None else mmap.MAP_SHARED
    return Mapping(-1, size_bytes, flags=sharing | mmap.MAP_ANONYMOUS, page_lock=page_lock)


def create_segment(size_bytes: int) -> int:
    """Return the descriptor of a new nameless segment of `size_bytes`; the caller closes it.

    Pages take memory only once they are touched.

    Raises:
        TransportError: the system gives no more descriptors or memory.
    """
    try:
        fd = _nameless_fd()
        try:
            os.ftruncate(fd, size_bytes)
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        what = (
            "Raise `ulimit -f`, the limit on the size of files, which counts for shared memory too."
            if error.errno == errno.EFBIG
            else "Check `ulimit -n` and the memory limit of the container."
        )
        raise TransportError(
            f"cannot create {size_bytes:,} bytes of shared memory: {error}. {what}"
        ) from error
    return fd


def _nameless_fd() -> int:
    if hasattr(os, "memfd_create"):
        # Not in /dev/shm: a container's 64 MB (or 1 MB) limit on that folder does not count here.
        return os.memfd_create("penstock", os.MFD_CLOEXEC)
    return _unlinked_shm_fd()


def _unlinked_shm_fd() -> int:
    """The same where there is no memfd (macOS, BSD): the name exists for a few microseconds."""
    import _posixshmem  # type: ignore[import-not-found]  # of multiprocessing.shared_memory

    name = f"/penstock-{secrets.token_hex(8)}"
    fd: int = _posixshmem.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
    _posixshmem.shm_unlink(name)
    return fd
