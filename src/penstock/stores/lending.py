# SPDX-License-Identifier: Apache-2.0
"""Open files of a store, shared by the threads of a process and closed when no one reads.

Guarantees
    They are opened at first need, once in each process. A forked child opens its own and leaves
    what it inherited alone: by then the numbers of its descriptors may be those of other files.
    `close` never takes a file from a thread that reads: that thread closes it when it is done.
    A child that is forked while another thread opens or closes does not hang: locks are its own.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Lending"]


class _Closable(Protocol):
    def close(self) -> object:
        """Give back what it holds."""


T = TypeVar("T", bound=_Closable)


class _Lent(Generic[T]):
    """One thing that is open, and how many have it."""

    def __init__(self, thing: T) -> None:
        self.thing = thing
        self.num_users = 0


class _OfProcess(Generic[T]):
    """What one process has open."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.current: _Lent[T] | None = None


class Lending(Generic[T]):
    """Lends what a store has open in this process.

    Concurrency:
        Any thread. It pickles as one that has nothing open.

    Example:
        >>> import io
        >>> files = Lending()
        >>> with files.lent(io.BytesIO) as file:
        ...     files.close()
        ...     file.closed
        False
        >>> file.closed
        True
    """

    def __init__(self) -> None:
        """Begin with nothing open."""
        self._of_processes: dict[int, _OfProcess[T]] = {}

    @contextlib.contextmanager
    def lent(self, make: Callable[[], T]) -> Iterator[T]:
        """Lend it, and call `make` first if it is not open. It stays open inside the block."""
        mine = self._mine()
        with mine.lock:
            if mine.current is None:
                mine.current = _Lent(make())
            lent = mine.current
            lent.num_users += 1
        try:
            yield lent.thing
        finally:
            with mine.lock:
                lent.num_users -= 1
                is_done = lent.num_users == 0 and lent is not mine.current
            if is_done:
                lent.thing.close()

    def close(self) -> None:
        """Close it, as soon as no one has it. May be called again."""
        mine = self._mine()
        with mine.lock:
            lent, mine.current = mine.current, None
            is_idle = lent is not None and lent.num_users == 0
        if lent is not None and is_idle:
            lent.thing.close()

    def _mine(self) -> _OfProcess[T]:
        pid = os.getpid()
        # In one step: of two threads that come first in a child, both get the same one.
        return self._of_processes.get(pid) or self._of_processes.setdefault(pid, _OfProcess())

    def __reduce__(self) -> tuple[type[Lending[T]], tuple[()]]:
        """Pickle without what is open."""
        return type(self), ()
