# SPDX-License-Identifier: Apache-2.0
"""Slots of the arena, page-locked for CUDA: torch finds them pinned, and need not copy them.

    slot is mapped ── cudaHostRegister ── batches ── a fence ── cudaHostUnregister ── unmapped

What is copied with `non_blocking=True` is read after the call. torch notes which streams read
pinned memory of its own; of other memory it has no note. So a slot whose last view is gone waits
for everything that was under way at that moment on any of torch's streams, of any device.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from penstock.torch.device.accelerator import with_index
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.transport.page_lock import Fence, PageLock, Release

_PORTABLE: Final = 1  # cudaHostRegisterPortable: locked for all devices, not for the current one
_POOL_SIZE: Final = 32  # streams that torch has per device and priority, and hands out in turn
_PRIORITIES: Final = (0, -1, -2, -3)
# A fence asks 129 streams per device, 0.3 ms on an H100, so it serves three batches: each asks for
# it, and whether it is over. Two batches more cool for it.
_ASKED_FIRST: Final = 6


def page_lock_for(device: torch.device) -> PageLock | None:
    """Return how to lock memory for `device`; None where torch alone can pin."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return CudaPageLock(device)


class CudaPageLock:
    """Locks memory by `cudaHostRegister`; see `penstock.transport.page_lock.PageLock`.

    The first refusal is warned of, and nothing more is locked: torch's `pin_memory()` then copies
    into its own pinned buffers, which it uses again.

    Concurrency:
        Any thread.

    Reference:
        CUDA Runtime API, Memory Management: cudaHostRegister pins pages that the caller owns, and
        the caller unregisters them before they are unmapped.
    """

    def __init__(self, device: torch.device) -> None:
        """Take the device in whose context memory is locked; it is put to use with the first."""
        self._device = with_index(device)
        self._has_failed = False
        self._pid = os.getpid()
        self._fence: _StreamsFence | None = None

    def lock(self, address: int, size_bytes: int) -> Release | None:
        """Lock some pages; see `PageLock.lock`."""
        # A forked process must not touch CUDA: a loader that goes on in one locks nothing more.
        if self._has_failed or os.getpid() != self._pid:
            return None
        _released.drain()
        # Another thread's current device is the first, where it would make a context of its own.
        cudart: Any = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            code = int(cudart.cudaHostRegister(address, size_bytes, _PORTABLE))
        if not code:
            return functools.partial(_released.add, self._device, address, self._pid)
        self._has_failed = True
        _forget_error(self._device)
        warn_user(
            f"{size_bytes:,} bytes of shared memory could not be page-locked for {self._device} "
            f"(cudaHostRegister: error {code}), so pinned batches are copied once more, into "
            "torch's own pinned memory. Known causes: a container's memory limit, and systems that "
            "let no shared memory be locked.",
            RuntimeWarning,
        )
        return None

    def fence(self) -> Fence:
        """Return a fence around what all streams of torch have been given; see `PageLock.fence`.

        It is made a few calls later, for all who asked by then.
        """
        _released.drain()
        if self._fence is None or self._fence.is_made:
            self._fence = _StreamsFence(self._pid, _ASKED_FIRST)
        self._fence.ask()
        return self._fence


def _forget_error(device: torch.device) -> None:
    """Take back the error that CUDA keeps, which torch's next kernel would raise."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


class _Pages(NamedTuple):
    """Locked pages that nothing refers to any more."""

    device: torch.device
    address: int
    unmap: Callable[[], object]


class _Released:
    """Pages that are unlocked and unmapped as soon as no stream may be reading them.

    Concurrency:
        Any thread, a garbage collection inside this very code included.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._new: deque[_Pages] = deque()
        self._cooling: deque[tuple[Fence, _Pages]] = deque()
        self._is_busy = threading.Lock()
        self._thread = 0  # that locks memory

    def add(
        self, device: torch.device, address: int, pid: int, unmap: Callable[[], object]
    ) -> None:
        """Take over some pages; see `penstock.transport.page_lock.Release`."""
        if sys.is_finalizing():  # the end of the process unlocks and unmaps everything
            return
        if os.getpid() != pid:
            unmap()
            return
        self._new.append(_Pages(device, address, unmap))
        # Another thread must ask the device nothing while the consumer's captures a graph.
        if threading.get_ident() == self._thread:
            self.drain()

    def drain(self) -> None:
        """Unlock and unmap what can be; the rest at another call. Waits for nothing.

        For the consumer's thread, or whichever locks memory and makes fences.
        """
        if os.getpid() != self._pid:
            self._forget()
            return
        self._thread = threading.get_ident()
        if not (self._new or self._cooling) or not self._is_busy.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(RuntimeError):  # of CUDA: torch's next call raises it
                self._drain()
        finally:
            self._is_busy.release()

    def _forget(self) -> None:
        """In a forked process: unmap what was inherited; none of it is locked here."""
        self._pid, self._is_busy = os.getpid(), threading.Lock()
        self._new.extend(pages for _, pages in self._cooling)
        self._cooling.clear()
        while self._new:
            self._new.popleft().unmap()

    def _drain(self) -> None:
        if self._new:
            num_new = len(self._new)  # what a collection adds meanwhile is for the next fence
            fence = _StreamsFence(self._pid)
            self._cooling.extend((fence, self._new.popleft()) for _ in range(num_new))
        while self._cooling and self._cooling[0][0].is_over():
            self._unlock(self._cooling.popleft()[1])

    def _unlock(self, pages: _Pages) -> None:
        with torch.cuda.device(pages.device):
            cudart: Any = torch.cuda.cudart()
            code = int(cudart.cudaHostUnregister(pages.address))
        if code:  # they stay mapped: a device may still read them
            _forget_error(pages.device)
        else:
            pages.unmap()


_released = _Released()


class _StreamsFence:
    """Events behind all that is on any stream when it has been asked for `num_asked` times."""

    __slots__ = ("_events", "_num_left", "_pid")

    def __init__(self, pid: int, num_asked: int = 0) -> None:
        self._pid = pid
        self._events: list[Any] | None = None
        self._num_left = num_asked
        self.ask()

    @property
    def is_made(self) -> bool:
        return self._events is not None

    def ask(self) -> None:
        """Count a call; the last makes the fence."""
        self._num_left -= 1
        if self._num_left < 0:
            self._make()

    def is_over(self) -> bool:
        """See `Fence.is_over`; in a forked process always, as its devices are none."""
        if os.getpid() != self._pid:
            return True
        self.ask()
        if self._events and not torch.cuda.is_current_stream_capturing():
            while self._events and self._events[-1].query():
                self._events.pop()
        return self._events == []

    def _make(self) -> None:
        """Record the events, if they are not; while a graph is captured that has to wait."""
        if self._events is not None:
            return
        if os.getpid() != self._pid or not torch.cuda.is_initialized():  # nothing was ever begun
            self._events = []
        elif not torch.cuda.is_current_stream_capturing():
            self._events = [
                stream.record_event()
                for index in _used_devices()
                # The current one may be another library's.
                for stream in (*_pools_of(index), torch.cuda.current_stream(index))
                if not stream.query()
            ]


def _used_devices() -> list[int]:
    """Return the devices that this process has a context on; asking another would make one."""
    runtime: Any = torch._C
    return [i for i in range(torch.cuda.device_count()) if runtime._cuda_hasPrimaryContext(i)]


@functools.cache
def _pools_of(index: int) -> list[Any]:
    """Return every stream that torch gives out on a device: the default one, and its pools.

    The streams of a pool are handed out in turn, to other threads too.
    """
    pools = [
        torch.cuda.Stream(index, priority=priority)
        for priority in _PRIORITIES
        for _ in range(8 * _POOL_SIZE)  # other threads may take some meanwhile
    ]
    return list(dict.fromkeys([torch.cuda.default_stream(index), *pools]))
