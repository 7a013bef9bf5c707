# SPDX-License-Identifier: Apache-2.0
"""Steady state: which batches count, after an epoch began or the number of workers changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.engine.timing import TimingRow, WorkerSettings

__all__ = ["SteadyState"]

_LONGEST_START_NS: Final = 10_000_000_000  # an interpreter that imports torch takes 2 to 5 s
_RARE_WAIT: Final = 0.05  # share of the time; then no worker is missed


class SteadyState:
    """Tells which batches show what the present workers can do.

    Not those that were made before it was there, nor those at the start of an epoch, when all
    workers begin at once. A new worker counts as there with its second batch.
    """

    def __init__(self, workers: WorkerSettings, num_first: int) -> None:
        """Begin with workers whose first `num_first` batches do not count."""
        self._left = num_first  # batches that do not count in any case
        self._missing = 0  # workers that may be yet to come
        self._lookahead = workers.num_workers * workers.prefetch_factor
        self._num_workers = workers.num_workers
        self._epoch: int | None = None
        self._in_epoch = 0
        self._changed_ns: int | None = None
        self._seen: dict[int, int] = {}
        self._waited_ns = 0
        self._passed_ns = 0
        self._num = 0

    def expect(self, workers: WorkerSettings) -> None:
        """Wait for other workers."""
        self._left = max(self._left, self._lookahead + 2)  # those under way
        self._missing = workers.num_workers if workers.num_workers > self._num_workers else 0
        self._num_workers = workers.num_workers
        self._lookahead = workers.num_workers * workers.prefetch_factor
        self._changed_ns = None
        self._seen = {}
        self._waited_ns = self._passed_ns = self._num = 0

    def is_steady(self, row: TimingRow) -> bool:
        """Return whether a batch counts; to be asked for each."""
        if row.epoch != self._epoch or not row.consumer_ns:  # of another iterator
            # Of a short epoch something must be left.
            short = self._in_epoch // 4 if self._epoch is not None else self._lookahead
            self._left = max(self._left, min(self._lookahead, short))
            self._epoch = row.epoch
            self._in_epoch = 0
        self._in_epoch += 1
        if self._left:
            self._left -= 1
        if self._missing:
            self._note(row)
        return not self._left and not self._missing

    def _note(self, row: TimingRow) -> None:
        if self._changed_ns is None:
            self._changed_ns = row.asked_ns
        seen = self._seen
        seen[row.worker_id] = seen.get(row.worker_id, 0) + 1
        self._num += 1
        if not self._left and row.consumer_ns:
            self._waited_ns += row.given_ns - row.asked_ns
            self._passed_ns += row.given_ns - row.asked_ns + row.consumer_ns
        are_there = sum(num >= 2 for num in seen.values()) >= self._missing
        if are_there or (self._num >= 2 * self._lookahead + 8 and self._is_vain(row)):
            self._missing = 0

    def _is_vain(self, row: TimingRow) -> bool:
        """Return whether missing workers need not be waited for: too late, or nothing to do."""
        assert self._changed_ns is not None
        is_late = row.given_ns - self._changed_ns > _LONGEST_START_NS
        return is_late or self._waited_ns <= _RARE_WAIT * self._passed_ns
