# SPDX-License-Identifier: Apache-2.0
"""Where a worker's time goes: by phase, by sample, on a core or waiting for one.

Some 2 us a batch: a clock is read at every change of phase, and twice a task the CPU time and what
the scheduler tells. Samples are timed one by one only where they take long enough for it.
"""

from __future__ import annotations

import contextlib
import os
import time
from array import array
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from penstock.engine.accounts import TaskTimes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RunQueue", "Stopwatch"]

# Timing one takes 0.1 us in a busy loop, and 2 us after a sleep, when the caches are cold: of a
# sample that takes this long, half a per cent.
_SHORTEST_TIMED_NS: Final = 400_000
# Of a task shorter than this nobody asks what it waited for: it is taken for computing.
_QUICK_NS: Final = 300_000
_TIMED_ANYWAY: Final = 16  # every so many batches their samples are timed all the same


class RunQueue:
    """How long one thread has waited for a core, as the scheduler tells it.

    Concurrency:
        It is about the thread that made it, and any thread may read it. A forked copy goes on
        telling of that thread.

    Reference:
        The kernel's Documentation/scheduler/sched-stats.rst: the second number of a thread's
        `schedstat` is the time spent waiting on a run queue, in nanoseconds.
    """

    def __init__(self) -> None:
        """Open the calling thread's statistics, if the system has any."""
        self._fd = -1
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


class Stopwatch:
    """Adds up the time of one worker, in the phases that it says it is in.

    Concurrency:
        The worker's own thread.
    """

    __slots__ = (
        "_begun_ns",
        "_cpu_at_ns",
        "_cpu_clock",
        "_has_marked",
        "_is_quick",
        "_marks",
        "_marks_end_ns",
        "_num_taken",
        "_phase",
        "_run_queue",
        "_since_ns",
        "_spent_ns",
        "_starved_at_ns",
        "_times_samples",
        "num_samples",
    )  # fmt: skip

    def __init__(
        self, num_phases: int, cpu_clock: Callable[[], int] = time.process_time_ns
    ) -> None:
        """Begin in phase 0.

        Args:
            num_phases: Phases are numbers below this.
            cpu_clock: The worker's CPU time: of its process, or of its thread alone.
        """
        self._cpu_clock = cpu_clock
        self._run_queue: RunQueue | None = None  # of the thread that does the first task
        self._spent_ns = [0] * num_phases
        self._phase = 0
        self._since_ns = time.monotonic_ns()
        self._begun_ns = self._cpu_at_ns = 0
        self._starved_at_ns: int | None = None
        self._marks = array("q")
        self._marks_end_ns = 0
        self._has_marked = False
        self._times_samples = True
        self._num_taken = 0
        self._is_quick = False  # as the last task was
        self.num_samples = 0  # of the batch under way; for whoever knows it to set

    def enter(self, phase: int) -> None:
        """Begin another phase."""
        now = time.monotonic_ns()
        self._spent_ns[self._phase] += now - self._since_ns
        self._since_ns = now
        self._phase = phase
        if self._has_marked:
            self._has_marked = False
            self._marks_end_ns = now

    def begin_task(self, phase: int, carried: tuple[int, ...]) -> None:
        """Begin a task, in `phase`; only the time in the phases `carried` goes over into it."""
        if self._run_queue is None:
            self._run_queue = RunQueue()
        if not self._is_quick:  # before the clock: waiting in between is none of the task's
            self._cpu_at_ns = self._cpu_clock()
            self._starved_at_ns = self._run_queue.waited_ns()
        self.enter(phase)
        self._spent_ns[:] = [spent if k in carried else 0 for k, spent in enumerate(self._spent_ns)]
        self._begun_ns = self._since_ns
        self.num_samples = 0
        if self._marks:
            del self._marks[:]
        self._marks_end_ns = 0

    def begin_sample(self) -> None:
        """Begin another sample of the batch."""
        if self._times_samples:
            self._has_marked = True
            self._marks.append(time.monotonic_ns())

    def take(
        self,
        *,
        idle: int,
        fetch: int,
        collate: int,
        send: int,
        slot_ns: int = 0,
        num_bytes: int = 0,
        pool_bytes: int = 0,
        rss_bytes: int = 0,
    ) -> TaskTimes:
        """Return what the task took until now, and begin to count anew.

        Args:
            idle: The phase in which the worker waits for work.
            fetch: The phase in which samples are read.
            collate: The phase in which a batch is made of them.
            send: The phase in which it is packed and sent.
            slot_ns: See `TaskTimes`, as for the others.
            num_bytes: Of the batch.
            pool_bytes: Of the worker's slots.
            rss_bytes: Of the worker.
        """
        self.enter(self._phase)
        now, spent = self._since_ns, self._spent_ns
        cpu_ns, starved_ns = self._cpu_and_starved()
        self._is_quick = now - self._begun_ns < _QUICK_NS
        times = TaskTimes(
            self._begun_ns,
            now,
            spent[idle],
            spent[fetch],
            spent[collate],
            spent[send],
            slot_ns,
            cpu_ns,
            starved_ns,
            num_bytes,
            self._sample_us(),
            pool_bytes,
            rss_bytes,
            self.num_samples,
        )
        count = max(self.num_samples, 1)
        self._num_taken += 1
        takes_long = spent[fetch] >= _SHORTEST_TIMED_NS * count
        self._times_samples = takes_long or self._num_taken % _TIMED_ANYWAY == 0
        self._spent_ns = [0] * len(spent)
        return times

    def _cpu_and_starved(self) -> tuple[int, int | None]:
        if self._is_quick:
            return self._since_ns - self._begun_ns, None
        starved_at, starved_now = self._starved_at_ns, None
        if starved_at is not None and self._run_queue is not None:
            starved_now = self._run_queue.waited_ns()
        starved_ns = None if starved_at is None or starved_now is None else starved_now - starved_at
        return self._cpu_clock() - self._cpu_at_ns, starved_ns

    def _sample_us(self) -> bytes:
        """Return microseconds per sample; nothing unless each was begun just once."""
        marks = self._marks
        if not self._marks_end_ns or len(marks) != self.num_samples:
            return b""
        marks.append(self._marks_end_ns)
        # Not numpy, which takes 20 us for a short batch when the caches are cold.
        try:
            return array("I", [(end - begin) // 1000 for begin, end in pairwise(marks)]).tobytes()
        except OverflowError:  # a sample of 72 minutes: somebody is debugging it
            return b""

    def close(self) -> None:
        """Give back what the system holds; a second call does nothing."""
        if self._run_queue is not None:
            self._run_queue.close()
