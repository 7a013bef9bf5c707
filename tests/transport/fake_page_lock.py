# SPDX-License-Identifier: Apache-2.0
"""A page lock without a device: its copies are read late, from raw memory, when a test says so."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from functools import partial
from typing import NamedTuple


def kind_of_memory(address):
    """Return how `address` is mapped, "rw-s" or "rw-p"; None if it is not."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            bounds, kind, *_ = line.split()
            start, stop = (int(bound, 16) for bound in bounds.split("-"))
            if start <= address < stop:
                return kind
    return None


class Copy(NamedTuple):
    """Bytes that a device was noted to read, and what they were then."""

    address: int
    data: bytes


class Fence(NamedTuple):
    """Over once the device has done as much as it had been noted by then."""

    device: FakePageLock
    num_begun: int

    def is_over(self):
        return self.device.num_done >= self.num_begun


class FakePageLock:
    """A device that reads the memory of copies long after it was noted to.

    Attributes:
        locked: Address -> bytes of what is locked now.
        num_locks: Calls that locked something.
        num_begun: Copies that it was noted.
        num_done: Those that it has made.
        mistakes: What should never be: memory that changed before it was read, a second unlock, ...
    """

    def __init__(self, *, refuses=False):
        self.locked = {}
        self.num_locks = 0
        self.num_begun = 0
        self.num_done = 0
        self.mistakes = []
        self._refuses = refuses
        self._copies = deque()
        self._lock = threading.RLock()  # unlocking may be part of a collection inside this class
        self._pid = os.getpid()

    def lock(self, address, size_bytes):
        if self._refuses:
            return None
        with self._lock:
            if kind_of_memory(address) != "rw-s":
                self.mistakes.append("locked memory that a fork would part from the device's")
            if address in self.locked:
                self.mistakes.append("locked twice, or unmapped while it was locked")
            self.locked[address] = size_bytes
            self.num_locks += 1
        return partial(self._release, address)

    def _release(self, address, unmap):
        if os.getpid() != self._pid:
            unmap()
            return
        with self._lock:
            self.go_on()
            if self.locked.pop(address, None) is None:
                self.mistakes.append("unlocked twice")
            if kind_of_memory(address) is None:
                self.mistakes.append("unmapped before it was unlocked")
            unmap()

    def fence(self):
        return Fence(self, self.num_begun)

    def begin_to_copy(self, array):
        """Begin, as `.to(device, non_blocking=True)` does: nothing keeps `array` until it ends."""
        with self._lock:
            self._copies.append(Copy(array.ctypes.data, array.tobytes()))
            self.num_begun += 1

    def go_on(self, until_behind=0):
        """Make copies until so many are left."""
        with self._lock:
            while len(self._copies) > until_behind:
                copy = self._copies.popleft()
                if kind_of_memory(copy.address) is None:
                    self.mistakes.append(f"copy {self.num_done} reads memory that is unmapped")
                elif ctypes.string_at(copy.address, len(copy.data)) != copy.data:
                    self.mistakes.append(f"copy {self.num_done} reads another batch")
                self.num_done += 1

    @property
    def size_bytes(self):
        """Bytes that are locked."""
        return sum(self.locked.values())
