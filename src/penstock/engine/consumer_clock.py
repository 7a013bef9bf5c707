# SPDX-License-Identifier: Apache-2.0
"""The consumer's clock: time in its own code, and time waiting for batches."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.engine.stopwatch import CoreTime
from penstock.engine.timing import UNKNOWN, EpochEnd

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ConsumerClock"]


class ConsumerClock:
    """Measures one consumer, between the batches that it takes.

    Concurrency:
        The consumer's thread.
    """

    def __init__(self, cpu_clock: Callable[[], int]) -> None:
        """Begin before the first batch.

        Args:
            cpu_clock: CPU time of the consumer in nanoseconds: of its process, or of its thread
                alone where workers are in the same process.
        """
        self._core_time = CoreTime(cpu_clock)
        self._has_taken = False
        self._is_measuring = False  # the consumer's CPU time since it took its last batch
        self._begun_ns = self._starting_ns = self._taken_ns = 0
        self._asked_ns = self._consumer_ns = self._cpu_ns = 0
        self._starved_ns = UNKNOWN
        self._arrived_ns: int | None = None

    def begin_epoch(self) -> None:
        """The consumer begins an epoch; what it did since its last batch does not count."""
        self._has_taken = False
        self._begun_ns = time.monotonic_ns()

    def started(self) -> None:
        """The workers are started; the consumer has waited for that."""
        self._starting_ns = time.monotonic_ns() - self._begun_ns

    def ask(self, *, lightly: bool = False) -> None:
        """The consumer asks for a batch; `lightly` reads no clock of the CPU."""
        self._asked_ns = now = time.monotonic_ns()
        self._arrived_ns = None
        self._cpu_ns, self._starved_ns = 0, UNKNOWN
        if not self._has_taken:
            self._asked_ns -= self.take_starting_ns()
            self._consumer_ns = 0
            return
        self._consumer_ns = now - self._taken_ns
        if self._is_measuring and not lightly:
            self._cpu_ns, starved_ns = self._core_time.end(self._consumer_ns)
            self._starved_ns = UNKNOWN if starved_ns is None else starved_ns

    def take_starting_ns(self) -> int:
        """Return, once, what starting the workers took: it is part of waiting for a first batch."""
        starting_ns, self._starting_ns = self._starting_ns, 0
        return starting_ns

    def arrived(self) -> None:
        """The batch is there; the time from now on is the consumer's own."""
        self._arrived_ns = time.monotonic_ns()
        self._core_time.begin()
        self._is_measuring = True

    def give(self) -> tuple[int, int, int, int, int]:
        """Return what it measured of a batch that the consumer gets now, whose own code begins.

        Returns:
            The fields of `TimingRow` from trainer_cpu_ns to consumer_ns.
        """
        given_ns = self._arrived_ns or time.monotonic_ns()
        self.take(given_ns)
        return self._cpu_ns, self._starved_ns, self._asked_ns, given_ns, self._consumer_ns

    def give_lightly(self) -> tuple[int, int, int]:
        """Return asked_ns, given_ns and consumer_ns of a batch that the consumer gets now."""
        given_ns = self._arrived_ns or time.monotonic_ns()
        self._is_measuring, self._has_taken = False, True
        self._taken_ns, self._arrived_ns = given_ns, None
        return self._asked_ns, given_ns, self._consumer_ns

    @property
    def taken_ns(self) -> int:
        """When the consumer's own code began last; 0 before its first batch."""
        return self._taken_ns if self._has_taken else 0

    def given_until(self, taken_ns: int, asked_ns: int | None = None) -> None:
        """Note batches that the consumer was given without being measured.

        Args:
            taken_ns: When the consumer's own code began last; 0 if it has no batch yet.
            asked_ns: When it asked for another one; None if it has not.
        """
        self._is_measuring = False
        self._has_taken = taken_ns > 0
        self._taken_ns = taken_ns
        self._arrived_ns = None
        if asked_ns is not None:
            self._asked_ns = asked_ns
            self._consumer_ns = asked_ns - taken_ns if taken_ns else 0
            self._cpu_ns, self._starved_ns = 0, UNKNOWN

    def end(self, num_failed: int) -> EpochEnd:
        """Return what came after the last batch; the consumer is notified that there is no more."""
        return EpochEnd(self._asked_ns, self._consumer_ns, num_failed)

    def take(self, given_ns: int | None = None) -> None:
        """The consumer's own code begins, now if `given_ns` is None; up to here it waited."""
        has_begun = given_ns is not None and self._arrived_ns is not None
        self._arrived_ns = None
        self._has_taken = True
        self._taken_ns = time.monotonic_ns() if given_ns is None else given_ns
        if not has_begun:
            self._core_time.begin()
            self._is_measuring = True

    def close(self) -> None:
        """Give back what it holds of the system; a second call does nothing."""
        self._core_time.close()
