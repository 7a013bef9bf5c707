# SPDX-License-Identifier: Apache-2.0
"""What several stores of a process share: open LMDB files, clients of MongoDB.

A thing is closed when its last user lets go of it and no thread is using it. It never crosses a
fork: a child begins with none. Finalizers wait for no lock, as the garbage collector may run them
in the thread that holds it: they leave a note for its holder.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

from penstock.forks import at_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

T = TypeVar("T")


class _Entry(Generic[T]):
    """A thing, and how many have it; the lock of its pool is held to change that."""

    def __init__(self, key: Hashable, thing: T) -> None:
        self.pid = os.getpid()
        self.key = key
        self.thing = thing
        self.num_users = 0
        self.num_in_use = 0


class Pool(Generic[T]):
    """Things by key, one of each in a process."""

    def __init__(self, close: Callable[[T], object], *, is_local: bool) -> None:
        """Begin with nothing."""
        self._close = close
        self._is_local = is_local
        self._lock = threading.Lock()
        self._entries: dict[Hashable, _Entry[T]] = {}
        self._let_go: collections.deque[_Entry[T]] = collections.deque()
        self._forgotten: list[_Entry[T]] = []  # kept: a client that is garbage warns
        at_fork(
            before=lambda: self._lock.acquire(),
            after_in_parent=lambda: self._lock.release(),
            after_in_child=self._after_fork,
        )

    def acquire(self, key: Hashable, make: Callable[[], T]) -> Lease[T]:
        """Return a lease on the thing of this key; `make` makes it if it is not there."""
        with self._lock:
            return Lease(self, self._taken(key, make), make)

    def _taken(self, key: Hashable, make: Callable[[], T]) -> _Entry[T]:
        self._drain()
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(key, make())
        entry.num_users += 1
        return entry

    def release(self, entry: _Entry[T], *, in_use: bool = False) -> None:
        """Count one user less."""
        with self._lock:
            entry.num_in_use -= in_use
            self._let_go.append(entry)
            self._drain()

    def use(self, entry: _Entry[T], make: Callable[[], T]) -> _Entry[T]:
        """Count one user more, for the time of a call; what another thread closed is made anew."""
        with self._lock:
            if entry.num_users == 0:
                entry = self._taken(entry.key, make)
            else:
                entry.num_users += 1
            entry.num_in_use += 1
        return entry

    def close_all(self) -> None:
        """Close everything, at the end of the process."""
        for entry in tuple(self._entries.values()):
            self._close(entry.thing)

    def note(self, entry: _Entry[T]) -> None:
        """Count one user less, in a finalizer."""
        self._let_go.append(entry)
        if self._is_local and self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def _drain(self) -> None:
        while self._let_go:
            entry = self._let_go.popleft()
            if entry.pid != os.getpid():
                continue
            entry.num_users -= 1
            if entry.num_users == 0:
                del self._entries[entry.key]
                self._close(entry.thing)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        inherited, self._entries = self._entries, {}
        for key, entry in inherited.items():
            if not self._is_local:
                self._forgotten.append(entry)
            elif entry.num_in_use:
                self._entries[key] = entry
            else:
                self._close(entry.thing)


class Lease(Generic[T]):
    """One user of a thing. It is given back when it is dropped, too."""

    def __init__(self, pool: Pool[T], entry: _Entry[T], make: Callable[[], T]) -> None:
        """See `Pool.acquire`."""
        self._pid = os.getpid()
        self._pool = pool
        self._entry = entry
        self.thing = entry.thing
        self._make = make
        self._dropped = weakref.finalize(self, pool.note, entry)
        self._dropped.atexit = False

    @property
    def is_usable(self) -> bool:
        """Whether it is this process's, and was not given back."""
        return self._pid == os.getpid() and self._dropped.alive

    @contextlib.contextmanager
    def using(self) -> Iterator[T]:
        """Return the thing, which is not closed before the block is left."""
        entry = self._pool.use(self._entry, self._make)
        try:
            yield entry.thing
        finally:
            self._pool.release(entry, in_use=True)

    def close(self) -> None:
        """Give it back. May be called again, from any process."""
        if self._dropped.detach() is not None and self._pid == os.getpid():
            self._pool.release(self._entry)
