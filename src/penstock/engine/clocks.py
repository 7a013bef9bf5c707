# SPDX-License-Identifier: Apache-2.0
"""The clocks of both sides: where a worker's time goes, and where the consumer's does.

`Stopwatch` is a worker's: time by phase, and by sample. `ConsumerClock` is that of the loop: time
in its own code, and time waiting for batches. Both tell how much of it was CPU time, and how much
was waiting for a core (`CoreTime`).

A clock is read at every change of phase, which is a call without the kernel. Asking for CPU time
and for the scheduler's figures is not, and is done for batches that are measured. Samples are timed
one by one only where they take long enough for it.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import time
from array import array
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from penstock.engine.timing import UNKNOWN, WORKERS_PART, EpochEnd

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ConsumerClock", "CoreTime", "Phase", "RunQueue", "Stopwatch"]

# Timing one takes 0.1 us in a busy loop, and 2 us after a sleep, when the caches are cold: of a
# sample that takes this long, half a per cent.
_SHORTEST_TIMED_NS: Final = 400_000
_TIMED_ANYWAY: Final = 16  # every so many batches their samples are timed all the same


class Phase(enum.IntEnum):
    """What a worker is doing."""

    ABSENT = 0  # it has not got the status page yet
    STARTING = 1  # until its dataset is there and worker_init_fn has returned
    WAITING = 2
    BEGINNING = 3  # an epoch: the dataset is notified, or iterated
    READING = 4
    COLLATING = 5
    SENDING = 6
    ENDING = 7


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
    """How much of a piece of work was CPU time, and how much of it waiting for a core.

    A piece costs two looks at the CPU clock and at the run queue, 3 to 12 us.

    Concurrency:
        One thread at a time. Of a piece during which another one takes over nothing is measured.
    """

    __slots__ = ("_begun", "_cpu_clock", "_run_queue", "_thread")

    def __init__(self, cpu_clock: Callable[[], int]) -> None:
        """Know nothing yet.

        Args:
            cpu_clock: CPU time of whoever works: of its process, or of its thread alone.
        """
        self._cpu_clock = cpu_clock
        self._run_queue: RunQueue | None = None
        self._thread = 0  # that began the piece
        self._begun: tuple[int | None, int] = None, 0

    def begin(self) -> None:
        """A piece of work begins right after this call."""
        thread = threading.get_ident()
        if self._run_queue is None or thread != self._thread:
            self.close()  # it was the other thread's
            self._run_queue, self._thread = RunQueue(), thread
        self._begun = self._run_queue.waited_ns(), self._cpu_clock()

    def end(self, took_ns: int) -> tuple[int, int]:
        """Return CPU time and waiting for a core of the piece, which ended right before the call.

        Args:
            took_ns: How long it took.

        Returns:
            Nanoseconds. Of work that another thread has taken over all counts as CPU time.
        """
        if self._run_queue is None or threading.get_ident() != self._thread:
            return took_ns, UNKNOWN
        (waited_ns, cpu_at_ns), cpu_ns = self._begun, self._cpu_clock()
        now_ns = None if waited_ns is None else self._run_queue.waited_ns()
        starved_ns = UNKNOWN if waited_ns is None or now_ns is None else now_ns - waited_ns
        return cpu_ns - cpu_at_ns, starved_ns

    def close(self) -> None:
        """Give back what it holds of the system; a second call does nothing."""
        if self._run_queue is not None:
            self._run_queue.close()
            self._run_queue = None


class Stopwatch:
    """Adds up the time of one worker, in the phases that it says it is in.

    Attributes:
        measures: Whether the task under way is measured.
        times_samples: Whether its samples are timed; if not, `begin_sample` need not be called.
        num_samples: Number of samples of the batch under way; for whoever knows it to set.
        seed_ns: Time spent on seeding the global generators for it; likewise.

    Concurrency:
        The worker's own thread.
    """

    __slots__ = (
        "_begun_ns", "_core_time", "_marks", "_num_taken", "_phase", "_samples_end_ns", "_since_ns",
        "_spent_ns", "measures", "num_samples", "seed_ns", "times_samples",
    )  # fmt: skip

    def __init__(self, cpu_clock: Callable[[], int] = time.process_time_ns) -> None:
        """Begin in the first phase.

        Args:
            cpu_clock: The worker's CPU time: of its process, or of its thread alone.
        """
        self.measures = self.times_samples = True
        self.num_samples = self.seed_ns = 0
        self._core_time = CoreTime(cpu_clock)
        self._spent_ns = [0] * len(Phase)
        self._phase = Phase.ABSENT
        self._since_ns = time.monotonic_ns()
        self._begun_ns = self._samples_end_ns = self._num_taken = 0
        self._marks = array("q")

    def enter(self, phase: Phase) -> int:
        """Begin another phase; return the moment."""
        now = time.monotonic_ns()
        self._spent_ns[self._phase] += now - self._since_ns
        if self._phase is Phase.READING:
            self._samples_end_ns = now
        self._since_ns = now
        self._phase = phase
        return now

    def begin_task(self) -> None:
        """Begin a task. Time since the last one, waiting and sending, goes into its account."""
        if not self.measures:  # nor was what lies before this moment
            self.measures = self.times_samples = True
            self._since_ns = time.monotonic_ns()
            self._spent_ns = [0] * len(Phase)
        self._core_time.begin()  # before the clock: waiting in between is none of the task's
        self._begun_ns = self.enter(Phase.READING)
        self._spent_ns[Phase.READING] = self._spent_ns[Phase.COLLATING] = 0  # of one that failed
        self.num_samples = self.seed_ns = 0
        if self._marks:
            del self._marks[:]

    def skip_task(self) -> None:
        """Begin a task that is not measured."""
        self.num_samples = 0
        self.measures = self.times_samples = False

    def begin_sample(self) -> int:
        """Begin another sample of the batch; return the moment, 0 where samples are not timed."""
        if not self.times_samples:
            return 0
        now = time.monotonic_ns()
        self._marks.append(now)
        return now

    def take(
        self, *, slot_ns: int = 0, num_bytes: int = 0, pool_bytes: int = 0, rss_bytes: int = 0
    ) -> bytes:
        """Return what the task took until now (`penstock.engine.timing`), and count anew.

        Args:
            slot_ns: See `TimingRow`, as for the others.
            num_bytes: Of the batch.
            pool_bytes: Of the worker's slots.
            rss_bytes: Of the worker.
        """
        now = self.enter(self._phase)
        _, _, idle_ns, _, fetch_ns, collate_ns, send_ns, _ = self._spent_ns  # as phases follow
        times = WORKERS_PART.pack(
            self.num_samples, self._begun_ns, now, idle_ns, fetch_ns, collate_ns, send_ns, slot_ns,
            *self._core_time.end(now - self._begun_ns), num_bytes, pool_bytes, rss_bytes,
            self.seed_ns,
        )  # fmt: skip
        self._num_taken += 1
        takes_long = fetch_ns >= _SHORTEST_TIMED_NS * max(self.num_samples, 1)
        self.times_samples = takes_long or self._num_taken % _TIMED_ANYWAY == 0
        self._spent_ns = [0] * len(Phase)
        return times + self._sample_us()

    def _sample_us(self) -> bytes:
        """Return microseconds per sample; nothing unless each was begun just once."""
        marks = self._marks
        if not marks or len(marks) != self.num_samples:
            return b""
        marks.append(self._samples_end_ns)
        # Not numpy, which takes 20 us for a short batch when the caches are cold.
        try:
            return array("I", [(end - begin) // 1000 for begin, end in pairwise(marks)]).tobytes()
        except OverflowError:  # a sample of 72 minutes: somebody is debugging it
            return b""

    def close(self) -> None:
        """Give back what the stopwatch holds of the system; a second call does nothing."""
        self._core_time.close()


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

        `lightly` reads no clock of the CPU.
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
