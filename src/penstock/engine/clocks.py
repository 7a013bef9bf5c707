# SPDX-License-Identifier: Apache-2.0
"""Clocks: of the consumer, between its batches; of CPU time, and of waiting for a core.

`status_page.StatusWriter` times a worker's phases. Reading the monotonic clock is no system call.
Reading CPU time or the scheduler's figures is one, and is done for measured batches alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from typing import TYPE_CHECKING, Final

from penstock.engine.timing import UNKNOWN, EpochEnd

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ConsumerClock", "CoreTime", "RunQueue"]


# Reading the run queue takes 5 us, 15 to 30 after a sleep, and is done twice for a piece of work:
# half a per cent of this at the most.
_ASKED_ONCE_IN_NS: Final = 15_000_000
_OF_LAST: Final = 1 / 4  # weight of the last piece; a change is to show soon


class RunQueue:
    """How long one thread has waited for a core, by the scheduler's count.

    Concurrency:
        It is about the thread that made it, and any thread may read it. A forked copy stays about
        that thread.

    Reference:
        The kernel's Documentation/scheduler/sched-stats.rst: the second number of a thread's
        `schedstat` is the time spent waiting on a run queue, in nanoseconds.
    """

    _fd = -1  # also for one that Ctrl-C did not let begin

    def __init__(self) -> None:
        """Open the calling thread's statistics, if the system has any."""
        with contextlib.suppress(OSError):  # another system, or a kernel built without
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def waited_ns(self) -> int | None:
        """Return the time since the thread was made; None where the system does not say."""
        if self._fd < 0:
            return None
        try:
            return int(os.pread(self._fd, 64, 0).split(b" ", 2)[1])
        except (OSError, IndexError, ValueError):  # the thread has ended
            return None

    def close(self) -> None:
        """Give the descriptor back; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


class CoreTime:
    """CPU time of pieces of work, and their time of waiting for a core.

    CPU time is measured for each piece, waiting only for some: for all where pieces take 15 ms, for
    few where they are short. These are drawn at random, so that no periodic pattern is missed. For
    the others, the share of waiting in the time without CPU is that of the last drawn ones, so that
    sums over many pieces are right.

    Concurrency:
        One thread at a time. A piece that another one takes over is not measured.
    """

    __slots__ = (
        "_blocked_ns", "_cpu_at_ns", "_cpu_clock", "_draw", "_is_drawn", "_mean_ns", "_run_queue",
        "_starved_ns", "_thread", "_waited_ns",
    )  # fmt: skip

    def __init__(self, cpu_clock: Callable[[], int]) -> None:
        """Know nothing yet.

        Args:
            cpu_clock: CPU time in nanoseconds: of the process, or of the thread alone.
        """
        self._cpu_clock = cpu_clock
        self._draw = random.Random(0).random
        self._run_queue: RunQueue | None = None
        self._thread = 0  # that began the piece
        self._is_drawn = False
        self._cpu_at_ns = 0
        self._waited_ns: int | None = None
        self._mean_ns = float(_ASKED_ONCE_IN_NS)  # what the last pieces took
        self._blocked_ns = self._starved_ns = 0.0  # decaying sums over the drawn pieces

    def begin(self) -> None:
        """A piece of work begins right after this call."""
        thread = threading.get_ident()
        if self._run_queue is None or thread != self._thread:
            self.close()  # it was the other thread's
            self._run_queue, self._thread = RunQueue(), thread
        self._is_drawn = self._draw() * _ASKED_ONCE_IN_NS < self._mean_ns
        if self._is_drawn:
            self._waited_ns = self._run_queue.waited_ns()
        self._cpu_at_ns = self._cpu_clock()

    def end(self, took_ns: int) -> tuple[int, int]:
        """Return CPU time and waiting for a core of the piece, which ended right before the call.

        Args:
            took_ns: How long it took.

        Returns:
            Nanoseconds. Work that another thread has taken over counts as CPU time.
        """
        if self._run_queue is None or threading.get_ident() != self._thread:
            return took_ns, UNKNOWN
        cpu_ns = self._cpu_clock() - self._cpu_at_ns
        self._mean_ns += (took_ns - self._mean_ns) * _OF_LAST
        blocked_ns = max(took_ns - cpu_ns, 0)
        before_ns = self._waited_ns  # None where the system does not say
        now_ns = self._run_queue.waited_ns() if self._is_drawn else None
        if before_ns is None:
            return cpu_ns, UNKNOWN
        if now_ns is None:
            share = min(self._starved_ns / max(self._blocked_ns, 1), 1)
            return cpu_ns, int(share * blocked_ns)
        starved_ns = now_ns - before_ns
        self._blocked_ns += blocked_ns - self._blocked_ns * _OF_LAST
        self._starved_ns += starved_ns - self._starved_ns * _OF_LAST
        return cpu_ns, starved_ns

    def close(self) -> None:
        """Give back what it holds of the system; a second call does nothing."""
        if self._run_queue is not None:
            self._run_queue.close()
            self._run_queue = None


class ConsumerClock:
    """Measures one consumer, between the batches that it takes.

    Attributes:
        taken_ns: When the consumer's own code began last; 0 before its first batch.

    Concurrency:
        The consumer's thread.
    """

    def __init__(self, cpu_clock: Callable[[], int]) -> None:
        """Begin before the first batch.

        Args:
            cpu_clock: CPU time of the consumer in nanoseconds: of its process, or of its thread
                alone where workers are in the same process.
        """
        self.taken_ns = 0
        self._core_time = CoreTime(cpu_clock)
        self._is_light = False
        self._is_measuring = False  # the consumer's CPU time since it took its last batch
        self._begun_ns = self._starting_ns = self._arrived_ns = 0
        self._asked_ns = self._consumer_ns = self._cpu_ns = 0
        self._starved_ns = UNKNOWN

    def begin_epoch(self) -> None:
        """The consumer begins an epoch; what it did since its last batch does not count."""
        self.taken_ns = 0
        self._begun_ns = time.monotonic_ns()

    def started(self) -> None:
        """The workers are started; the consumer has waited for that."""
        self._starting_ns = time.monotonic_ns() - self._begun_ns

    def ask(self, *, lightly: bool = False, at_ns: int | None = None) -> None:
        """The consumer asks for a batch, now if `at_ns` is None.

        `lightly` reads no CPU clock.
        """
        self._asked_ns = asked_ns = time.monotonic_ns() if at_ns is None else at_ns
        self._consumer_ns = asked_ns - self.taken_ns if self.taken_ns else 0
        self._cpu_ns, self._starved_ns = 0, UNKNOWN
        self._arrived_ns = 0
        self._is_light = lightly
        if not self.taken_ns:
            self._asked_ns -= self.take_starting_ns()
        elif self._is_measuring and not lightly:
            self._cpu_ns, self._starved_ns = self._core_time.end(self._consumer_ns)

    def take_starting_ns(self) -> int:
        """Return, once, what starting the workers took: it is part of waiting for a first batch."""
        starting_ns, self._starting_ns = self._starting_ns, 0
        return starting_ns

    def arrived(self) -> None:
        """The batch is there; the time from now on is the consumer's own."""
        self._arrived_ns = time.monotonic_ns()
        if not self._is_light:
            self._core_time.begin()
            self._is_measuring = True

    def give(self) -> tuple[int, int, int, int, int]:
        """Return what it measured of a batch that the consumer gets now, whose own code begins.

        Returns:
            The fields of `TimingRow` from trainer_cpu_ns to consumer_ns.
        """
        if not self._arrived_ns:
            self.arrived()
        self.taken_ns, self._arrived_ns = self._arrived_ns, 0
        return self._cpu_ns, self._starved_ns, self._asked_ns, self.taken_ns, self._consumer_ns

    def take(self) -> None:
        """The consumer's own code begins without a batch; up to here it waited."""
        self.give()

    def give_lightly(self) -> tuple[int, int, int]:
        """Return asked_ns, given_ns and consumer_ns of a batch that the consumer gets now."""
        self._is_measuring = False
        self.taken_ns, self._arrived_ns = self._arrived_ns or time.monotonic_ns(), 0
        return self._asked_ns, self.taken_ns, self._consumer_ns

    def given_until(self, taken_ns: int, asked_ns: int | None = None) -> None:
        """Note batches that the consumer was given without being measured.

        Args:
            taken_ns: When the consumer's own code began last; 0 if it has no batch yet.
            asked_ns: When it asked for another one; None if it has not.
        """
        self._is_measuring = False
        self.taken_ns, self._arrived_ns = taken_ns, 0
        if asked_ns is not None:
            self.ask(lightly=True, at_ns=asked_ns)

    def end(self, num_failed: int) -> EpochEnd:
        """Return what came after the last batch; the consumer is notified that there is no more."""
        return EpochEnd(self._asked_ns, self._consumer_ns, num_failed)

    def close(self) -> None:
        """Give back what it holds of the system; a second call does nothing."""
        self._core_time.close()
