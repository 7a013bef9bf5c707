# SPDX-License-Identifier: Apache-2.0
"""Memory model: bytes that a worker takes, with its batches.

Assumptions
    Under fork the resident memory of a worker is the main process's to begin with, and what of it
    the worker has written to since, and so has for itself, nobody tells cheaply. It counts as 50
    MB, plus what the worker has grown by since its first batch. Under spawn and forkserver all that
    is resident counts, at least 50 MB. Threads have no memory of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.engine.timing import TimingRow

__all__ = ["WORKER_BYTES", "MemoryModel"]

# Pages that a forked worker has for itself: its interpreter's counts of references, its own
# allocations. Pages of the dataset are shared. An order of magnitude, not a measurement.
WORKER_BYTES: Final = 50_000_000


class MemoryModel:
    """Memory per worker, from the largest batch and the largest worker so far.

    Attributes:
        batch_bytes: Of the largest batch.
        own_bytes: Of the largest worker, without batches.
    """

    def __init__(self, *, is_thread: bool, is_forked: bool) -> None:
        """Know nothing yet."""
        self.batch_bytes = 0
        self.own_bytes = 0 if is_thread else WORKER_BYTES
        self._is_forked = is_forked
        self._at_first: dict[int, int] = {}  # by process

    def add(self, row: TimingRow) -> None:
        """Take note of a batch."""
        if row.num_bytes > self.batch_bytes:
            self.batch_bytes = row.num_bytes
        if row.rss_bytes and self.own_bytes:
            own_bytes = row.rss_bytes - row.pool_bytes  # slots are counted by batches
            if self._is_forked:
                own_bytes += WORKER_BYTES - self._at_first.setdefault(row.pid, own_bytes)
            if own_bytes > self.own_bytes:
                self.own_bytes = own_bytes

    def per_worker(self, prefetch_factor: int) -> int:
        """Return the bytes of a worker with its batches.

        It has a slot for each batch that it may have under way, and one that it fills while the
        main process still holds the last.
        """
        return self.own_bytes + (prefetch_factor + 1) * self.batch_bytes
