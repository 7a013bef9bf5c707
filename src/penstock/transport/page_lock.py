# SPDX-License-Identifier: Apache-2.0
"""What the arena has to know of page-locking: memory that a device copies from by itself.

    lock(mapping) ── batches come and go ── unlock(mapping), before it is unmapped

A copy from page-locked memory goes on after the call that began it. So memory whose last view is
garbage may still be read: a fence tells when all that had been begun by then is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Fence", "PageLock"]


class Fence(Protocol):
    """A moment: whatever devices had been told to do by then."""

    def is_over(self) -> bool:
        """Return whether all of it is done; once it is, it stays so. Does not wait."""


class PageLock(Protocol):
    """Locks memory for the devices of one process.

    Concurrency:
        Any thread. `unlock` may be called by a garbage collection.
    """

    def lock(self, address: int, size_bytes: int) -> Callable[[], None] | None:
        """Lock some pages.

        Args:
            address: Where they begin.
            size_bytes: How much.

        Returns:
            What unlocks them again, after whatever reads them has ended; it raises nothing, and
            does nothing in a forked process. None if they cannot be locked: memory of that kind is
            then handed out as it is, and nothing is lost but speed.
        """

    def fence(self) -> Fence | None:
        """Return a fence around all that was begun until now; None if nothing is to be waited for.

        It is not where whoever copies keeps the memory until the copy is over.
        """
