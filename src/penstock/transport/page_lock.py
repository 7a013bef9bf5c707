# SPDX-License-Identifier: Apache-2.0
"""What the arena uses of page-locking: memory that a device copies from by itself.

    lock ── batches come and go ── release: unlocked and unmapped, once nothing reads the memory

A copy from page-locked memory goes on after the call that began it. So memory whose last view is
garbage may still be read: a fence says when all that had been begun by then is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Fence(Protocol):
    """A moment: all work that was queued on the devices by then."""

    def is_over(self) -> bool:
        """Return whether all of it is done; once it is, it stays so. Does not wait."""


class Release(Protocol):
    """Unlocks and unmaps some pages."""

    def __call__(self, unmap: Callable[[], object]) -> None:
        """Call `unmap` once nothing reads the pages any more: now or later.

        It waits for nothing and raises nothing; a garbage collection may call it, in any thread.
        Pages that cannot be unlocked stay mapped: a device would take whatever comes to lie at
        their addresses for what lay there before. A forked process unmaps at once, and unlocks
        nothing.
        """


class PageLock(Protocol):
    """Locks memory for the devices of one process.

    Concurrency:
        Any thread.
    """

    def lock(self, address: int, size_bytes: int) -> Release | None:
        """Lock pages; return what unlocks and unmaps them, or None if they cannot be locked."""

    def fence(self) -> Fence:
        """Return a fence around all that was begun until now."""
