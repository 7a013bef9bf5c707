# SPDX-License-Identifier: Apache-2.0
"""Where a worker's time goes: by phase, by sample, on a core or waiting for one.

A clock is read at every change of phase, which is a call without the kernel. Asking for CPU time
and the scheduler's figures is not, and is done once in 15 ms of work. Samples are timed one by one
only where they take long enough for it.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from array import array
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from penstock.engine.timing import UNKNOWN, WORKERS_PART

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CoreTime", "RunQueue", "Stopwatch"]

# Timing one takes 0.1 us in a busy loop, and 2 us after a sleep, when the caches are cold: of a
# sample that takes this long, half a per cent.
_SHORTEST_TIMED_NS: Final = 400_000
# A look at the CPU clock and the run queue takes 5 us, 15 to 30 after a sleep, and there are two
# to a piece of work: half a per cent of this at the most.
_MEASURED_ONCE_IN_NS: Final = 15_000_000
_MEASURED_AT_FIRST: Final = 8  # whatever they take: the first pieces are unlike the others
_OF_LAST: Final = 1 / 4  # what the last one weighs; other settings are to show soon
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
    """How much of some work was CPU time, and how much of it waiting for a core.

    Work comes in pieces. Of one that takes 15 ms the CPU time is measured. Of shorter ones some are
    drawn, by chance so that no rhythm of theirs can hide; of any drawn the run queue is asked, too.
    The others are taken to be like the last measured ones of about their length. So sums over many
    pieces are right, and a single short one may be an estimate.

    Concurrency:
        One thread at a time. A piece during which another one takes over is estimated.
    """

    __slots__ = (
        "_cpu_at_ns", "_cpu_clock", "_draw", "_is_drawn", "_known", "_mean_ns", "_num_drawn",
        "_run_queue", "_starved_at_ns", "_thread",
    )  # fmt: skip

    def __init__(self, cpu_clock: Callable[[], int]) -> None:
        """Know nothing yet.

        Args:
            cpu_clock: CPU time of whoever works: of its process, or of its thread alone.
        """
        self._cpu_clock = cpu_clock
        self._draw = random.Random(0).random
        self._run_queue: RunQueue | None = None
        self._thread = 0  # that began the piece
        self._is_drawn = False
        self._num_drawn = 0
        self._mean_ns = 0.0  # of the last pieces
        self._known: dict[int, _Shares] = {}  # by binary digits of the length; 0: of any
        self._cpu_at_ns = 0
        self._starved_at_ns: int | None = None

    def begin(self) -> None:
        """A piece of work begins right after this call."""
        thread = threading.get_ident()
        if thread != self._thread:
            self._thread = thread
            self.close()  # it was the other thread's
        self._is_drawn = (
            self._num_drawn < _MEASURED_AT_FIRST
            or self._draw() * _MEASURED_ONCE_IN_NS < self._mean_ns
        )
        if self._is_drawn:
            if self._run_queue is None:
                self._run_queue = RunQueue()
            self._starved_at_ns = self._run_queue.waited_ns()
        self._cpu_at_ns = self._cpu_clock()

    def end(self, took_ns: int) -> tuple[int, int | None]:
        """Return CPU time and waiting for a core of the piece, which ended right before the call.

        Args:
            took_ns: How long it took.

        Returns:
            Nanoseconds; the second is None where the system does not say.
        """
        self._mean_ns += (took_ns - self._mean_ns) * _OF_LAST
        known = self._known.get(took_ns.bit_length()) or self._known.get(0)
        cpu_ns = took_ns if known is None else int(known.cpu * took_ns)
        starved_ns = None
        if known is not None and known.starved is not None:
            starved_ns = int(known.starved * took_ns)
        if threading.get_ident() != self._thread:
            return cpu_ns, starved_ns
        if self._is_drawn or took_ns >= _MEASURED_ONCE_IN_NS:
            cpu_ns = self._cpu_clock() - self._cpu_at_ns
        if self._is_drawn:
            self._is_drawn = False
            self._num_drawn += 1
            starved_ns = self._starved_ns()
            for key in (took_ns.bit_length(), 0):
                self._known.setdefault(key, _Shares()).add(took_ns, cpu_ns, starved_ns)
        return cpu_ns, starved_ns

    def _starved_ns(self) -> int | None:
        at = self._starved_at_ns
        if at is None or self._run_queue is None:
            return None
        now = self._run_queue.waited_ns()
        return None if now is None else now - at

    def close(self) -> None:
        """Give back what it holds of the system; a second call does nothing."""
        if self._run_queue is not None:
            self._run_queue.close()
            self._run_queue = None


class _Shares:
    """Shares of the last pieces, out of sums: a long one counts for what it is."""

    __slots__ = ("_cpu_ns", "_ns", "_starved_ns", "_tells_starved")

    def __init__(self) -> None:
        self._ns = self._cpu_ns = self._starved_ns = 0.0
        self._tells_starved = False

    def add(self, took_ns: int, cpu_ns: int, starved_ns: int | None) -> None:
        self._ns += took_ns - self._ns * _OF_LAST
        self._cpu_ns += cpu_ns - self._cpu_ns * _OF_LAST
        self._starved_ns += (starved_ns or 0) - self._starved_ns * _OF_LAST
        self._tells_starved = starved_ns is not None

    @property
    def cpu(self) -> float:
        return self._cpu_ns / self._ns if self._ns else 1.0

    @property
    def starved(self) -> float | None:
        if not self._tells_starved:
            return None
        return self._starved_ns / self._ns if self._ns else 0.0


class Stopwatch:
    """Adds up the time of one worker, in the phases that it says it is in.

    Concurrency:
        The worker's own thread.
    """

    __slots__ = (
        "_begun_ns", "_core_time", "_has_marked", "_marks", "_marks_end_ns", "_num_taken", "_phase",
        "_since_ns", "_spent_ns", "num_samples", "seed_ns", "times_samples",
    )  # fmt: skip

    def __init__(
        self, num_phases: int, cpu_clock: Callable[[], int] = time.process_time_ns
    ) -> None:
        """Begin in phase 0.

        Args:
            num_phases: Phases are numbers below this.
            cpu_clock: The worker's CPU time: of its process, or of its thread alone.
        """
        self._core_time = CoreTime(cpu_clock)
        self._spent_ns = [0] * num_phases
        self._phase = 0
        self._since_ns = time.monotonic_ns()
        self._begun_ns = 0
        self._marks = array("q")
        self._marks_end_ns = 0
        self._has_marked = False
        self.times_samples = True  # of this task; where not, `begin_sample` need not be called
        self._num_taken = 0
        self.num_samples = 0  # of the batch under way; for whoever knows it to set
        self.seed_ns = 0  # likewise

    def enter(self, phase: int) -> int:
        """Begin another phase; return the moment."""
        now = time.monotonic_ns()
        self._spent_ns[self._phase] += now - self._since_ns
        self._since_ns = now
        self._phase = phase
        if self._has_marked:
            self._has_marked = False
            self._marks_end_ns = now
        return now

    def begin_task(self, phase: int, carried: tuple[int, ...]) -> None:
        """Begin a task, in `phase`; only the time in the phases `carried` goes over into it."""
        self._core_time.begin()  # before the clock: waiting in between is none of the task's
        self.enter(phase)
        spent = [0] * len(self._spent_ns)
        for k in carried:
            spent[k] = self._spent_ns[k]
        self._spent_ns = spent
        self._begun_ns = self._since_ns
        self.num_samples = self.seed_ns = 0
        if self._marks:
            del self._marks[:]
        self._marks_end_ns = 0

    def skip_task(self) -> None:
        """Begin a task that is not measured."""
        self.num_samples = 0
        self.times_samples = False

    def restart(self) -> None:
        """Forget what lies before this moment: it was not measured."""
        self._since_ns = time.monotonic_ns()
        self._spent_ns = [0] * len(self._spent_ns)
        self.times_samples = True

    def begin_sample(self) -> int:
        """Begin another sample of the batch; return the moment, 0 where samples are not timed."""
        if not self.times_samples:
            return 0
        self._has_marked = True
        now = time.monotonic_ns()
        self._marks.append(now)
        return now

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
    ) -> bytes:
        """Return what the task took until now (`penstock.engine.timing`), and count anew.

        Args:
            idle: The phase in which the worker waits for work.
            fetch: The phase in which samples are read.
            collate: The phase in which a batch is made of them.
            send: The phase in which it is packed and sent.
            slot_ns: See `TimingRow`, as for the others.
            num_bytes: Of the batch.
            pool_bytes: Of the worker's slots.
            rss_bytes: Of the worker.
        """
        self.enter(self._phase)
        now, spent = self._since_ns, self._spent_ns
        cpu_ns, starved_ns = self._core_time.end(now - self._begun_ns)
        times = WORKERS_PART.pack(
            self.num_samples, self._begun_ns, now, spent[idle], spent[fetch], spent[collate],
            spent[send], slot_ns, cpu_ns, UNKNOWN if starved_ns is None else starved_ns, num_bytes,
            pool_bytes, rss_bytes, self.seed_ns,
        )  # fmt: skip
        count = max(self.num_samples, 1)
        self._num_taken += 1
        takes_long = spent[fetch] >= _SHORTEST_TIMED_NS * count
        self.times_samples = takes_long or self._num_taken % _TIMED_ANYWAY == 0
        self._spent_ns = [0] * len(spent)
        return times + self._sample_us()

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
        self._core_time.close()
