# SPDX-License-Identifier: Apache-2.0
"""The timing row: integers measured for one batch; and the clocks that measure them.

    worker        | idle | fetch: read, compute | collate | send |     `WORKERS_PART`, as bytes
    main process  | its own code | waits for the batch |               `TimingRow`

All moments are of CLOCK_MONOTONIC, which every process of a machine shares. The time of waiting
for a core is -1 (`UNKNOWN`) where the system does not say.

A worker sends its fields as the bytes of `WORKERS_PART`; where samples were timed, the microseconds
of each follow in order, as a uint32 array. The main process puts its own fields before them. Of a
batch that is not measured, it notes the fields of `LIGHT` alone: two readings of the clock.
`status_page.StatusWriter` times a worker's phases.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

UNKNOWN: Final = -1  # starved time where the system does not say


class TimingRow(NamedTuple):
    """One batch that the consumer got. Times are nanoseconds, unless a name says otherwise.

    Attributes:
        worker_id: Number of the worker that made it; 0 without workers.
        pid: ID of that worker's process.
        num_ready: Number of batches that lay ready when it was asked for.
        trainer_cpu_ns: CPU time of the main process since the consumer had the batch before,
            without that of workers. Measured as `cpu_ns` is.
        trainer_starved_ns: Time since then that the consumer's thread waited for a core.
        asked_ns: Moment when the consumer asked for it; for an iterator's first, earlier by the
            time that starting the workers took.
        given_ns: Moment when the consumer got it.
        consumer_ns: Time of the consumer's own code since it had the batch before; 0 for an
            iterator's first.
        epoch: Number of its epoch.
        step: Number of the batch in it.
        num_failed: Number of bad samples that are new in the epoch, of this batch and of those
            before it of which no sample was left.
        num_workers: Number of workers that were ready when it was asked for; 0 without.
        lookahead: Number of batches under way at a time, once all workers are ready.
        num_samples: Number of samples in it; 0 where counting would take time. This field and
            those below come from the worker.
        begun_ns: Moment when the worker took up the task.
        ended_ns: Moment when the batch lay ready, but for its message to the main process; 0 if
            it was not measured.
        idle_ns: Time that the worker waited for the task, or for a slot.
        fetch_ns: Time in the dataset: reading, decoding, transforming.
        collate_ns: Time to make one batch of the samples.
        send_ns: Time to pack it into its slot, and to send the message of the batch before.
        slot_ns: Part of these times spent on making slots, as none was free.
        cpu_ns: CPU time from `begun_ns` to `ended_ns`, of the worker's process, or of its thread.
        starved_ns: Time that the worker waited for a core.
        num_bytes: Bytes of the batch; of one in slots, the bytes there.
        pool_bytes: Bytes of all slots that the worker has, in use and free.
        rss_bytes: Largest resident memory of the worker's process so far; 0 if not known.
        seed_ns: Part of these times spent on seeding the global generators.
    """

    worker_id: int = 0
    pid: int = 0
    num_ready: int = 0
    trainer_cpu_ns: int = 0
    trainer_starved_ns: int = UNKNOWN
    asked_ns: int = 0
    given_ns: int = 0
    consumer_ns: int = 0
    epoch: int = 0
    step: int = 0
    num_failed: int = 0
    num_workers: int = 0
    lookahead: int = 0
    num_samples: int = 0
    begun_ns: int = 0
    ended_ns: int = 0
    idle_ns: int = 0
    fetch_ns: int = 0
    collate_ns: int = 0
    send_ns: int = 0
    slot_ns: int = 0
    cpu_ns: int = 0
    starved_ns: int = UNKNOWN
    num_bytes: int = 0
    pool_bytes: int = 0
    rss_bytes: int = 0
    seed_ns: int = 0


_NOTHING: Final = TimingRow()
_WORKERS_AT: Final = TimingRow._fields.index("num_samples")
LIGHT: Final = slice(TimingRow._fields.index("asked_ns"), _WORKERS_AT + 1)
WORKERS_PART: Final = struct.Struct(f"{len(_NOTHING) - _WORKERS_AT}q")
NO_TIMES: Final = WORKERS_PART.pack(*_NOTHING[_WORKERS_AT:])
_COUNT: Final = struct.Struct("q")


def light_times(num_samples: int) -> bytes:
    """Return the worker's bytes for a batch that was not measured."""
    return _COUNT.pack(num_samples) + NO_TIMES[_COUNT.size :]


def num_samples_of(times: bytes) -> int:
    """Return the number of samples in a batch, by its worker's bytes."""
    return int(_COUNT.unpack_from(times)[0])


def sample_us_of(times: bytes) -> bytes:
    """Return the times of a batch's samples; empty if they were too quick, or read together."""
    return times[WORKERS_PART.size :]


def row_of_worker(times: bytes) -> TimingRow:
    """Return the row of a worker's bytes; the main process's fields are empty."""
    return TimingRow(*_NOTHING[:_WORKERS_AT], *WORKERS_PART.unpack_from(times))


def replaced(times: bytes, **fields: int) -> bytes:
    """Return a worker's bytes with other values of some fields.

    Example:
        >>> row_of_worker(replaced(NO_TIMES, rss_bytes=7)).rss_bytes
        7
    """
    row = row_of_worker(times)._replace(**fields)
    return WORKERS_PART.pack(*row[_WORKERS_AT:]) + sample_us_of(times)


class EpochEnd(NamedTuple):
    """Timing of an epoch's end, after its last batch.

    Attributes:
        asked_ns: Moment when the consumer asked for a batch, and there was none.
        consumer_ns: Time of the consumer's own code since it had the last batch.
        num_failed: Number of new bad samples, as in `TimingRow`, after the last batch.
    """

    asked_ns: int
    consumer_ns: int
    num_failed: int = 0


class WorkerSettings(NamedTuple):
    """Number of workers that is wanted, and how far they work ahead.

    Attributes:
        num_workers: Number of workers, at least 1.
        prefetch_factor: Number of batches under way per worker, at least 1.
    """

    num_workers: int
    prefetch_factor: int


def _read_with_gil(fd: int, num_bytes: int, offset: int) -> bytes:
    """Read as `os.pread` does, but without handing the GIL to another thread of the loader."""
    line = ctypes.create_string_buffer(num_bytes)
    ctypes.pythonapi.pread(fd, line, ctypes.c_size_t(num_bytes), ctypes.c_long(offset))
    return line.value


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
        with contextlib.suppress(OSError, AttributeError):  # another system; a kernel without
            self._read = os.pread if threading.active_count() == 1 else _read_with_gil
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def waited_ns(self) -> int | None:
        """Return the time since the thread was made; None where the system does not say."""
        if self._fd < 0:
            return None
        try:
            return int(self._read(self._fd, 64, 0).split(b" ", 2)[1])
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

    Concurrency:
        One thread at a time. A piece that another one takes over is not measured.
    """

    __slots__ = ("_cpu_at_ns", "_cpu_clock", "_run_queue", "_thread", "_waited_ns")

    def __init__(self, cpu_clock: Callable[[], int]) -> None:
        """Begin with none; `cpu_clock` is the CPU time of the process, or the thread, in ns."""
        self._cpu_clock = cpu_clock
        self._run_queue: RunQueue | None = None
        self._thread = 0  # that began the piece
        self._cpu_at_ns = 0
        self._waited_ns: int | None = None

    def begin(self) -> None:
        """Note that a piece of work has begun; its duration counts from before this call.

        A busy system often switches tasks as a system call ends. At each end of a piece its clock
        is read before the run queue, so that such a wait is in both or in neither.
        """
        thread = threading.get_ident()
        if self._run_queue is None or thread != self._thread:
            self.close()  # it was the other thread's
            self._run_queue, self._thread = RunQueue(), thread
        self._waited_ns = self._run_queue.waited_ns()
        self._cpu_at_ns = self._cpu_clock()

    def end(self, took_ns: int) -> tuple[int, int]:
        """Return CPU time and waiting for a core of a piece that took so long, in nanoseconds.

        Work that another thread has taken over counts as CPU time.
        """
        if self._run_queue is None or threading.get_ident() != self._thread:
            return took_ns, UNKNOWN
        waited_ns = self._run_queue.waited_ns()  # first: see `begin`
        cpu_ns = self._cpu_clock() - self._cpu_at_ns
        if waited_ns is None or self._waited_ns is None:
            return cpu_ns, UNKNOWN
        return cpu_ns, waited_ns - self._waited_ns

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
        """Begin before the first batch."""
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
        """Return what it measured of a batch that the consumer gets now, whose own code begins."""
        if not self._arrived_ns:
            self.arrived()
        self.taken_ns, self._arrived_ns = self._arrived_ns, 0
        return self._cpu_ns, self._starved_ns, self._asked_ns, self.taken_ns, self._consumer_ns

    def give_lightly(self) -> tuple[int, int, int]:
        """Return asked_ns, given_ns and consumer_ns of a batch that the consumer gets now."""
        self._is_measuring = False
        self.taken_ns, self._arrived_ns = self._arrived_ns or time.monotonic_ns(), 0
        return self._asked_ns, self.taken_ns, self._consumer_ns

    def given_until(self, taken_ns: int, asked_ns: int | None = None) -> None:
        """Note batches that the consumer was given without being measured."""
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
