# SPDX-License-Identifier: Apache-2.0
"""The status page: shared memory in which a worker writes what it is doing; and its timing.

The main process reads it when the worker is dead or stuck, and can no longer be asked. The first
cells hold the status, next are the worker's last words, if an exception ended it; behind them
`faulthandler` writes the worker's stacks, when a signal kills it or the main process asks for them.
A write costs a few stores, no system call.
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import os
import pickle
import re
import signal
import sys
import time
from array import array
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.engine.plan import sample_key
from penstock.engine.timing import WORKERS_PART, CoreTime, light_times
from penstock.transport.memory import Mapping, create_segment

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.engine.recover import BatchItem

_SIZE_BYTES: Final = 256 * 1024  # pages that are not written take no memory
_WORDS_AT: Final = 4096
_TEXT_AT: Final = 2 * 4096
_NUM_CELLS: Final = 9
(
    _GENERATION, _STEP, _PHASE, _NUMBER, _KEY_BYTES, _PEAK_RSS, _SINCE, _AT_IT_SINCE, _INTERRUPTED,
) = range(_NUM_CELLS)  # fmt: skip
_KEY_AT: Final = 8 * _NUM_CELLS
_USAGE_INTERVAL: Final = 8  # tasks from one look at the memory to the next
_RSS_UNIT: Final = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
# Asks a worker for its stacks. A real-time signal: no program uses this one by habit.
_STACKS_SIGNAL: Final[int] = getattr(signal, "SIGRTMAX", 34) - 3  # on macOS 31, SIGUSR2
_LONGEST_DUMP_S: Final = 2.0
# In a dump of stacks: a thread's frames from the engine's first on; a thread of the engine's own.
_OURS: Final = re.compile(r'^(Thread .*\n)?  File ".*/penstock/engine/.*\n(  .*\n)*', re.MULTILINE)
_INTERRUPTED_LATELY_S: Final = 5.0  # an interrupted program may do some things before it ends
_READS: Final = 100  # of a page that changes while it is read; one takes some microseconds
# Timing a sample takes 0.1 us in a busy loop, and 2 us after a sleep, when the caches are cold:
# half a per cent of this.
_SHORTEST_TIMED_NS: Final = 400_000
_TIMED_ANYWAY: Final = 16  # every so many batches their samples are timed all the same
_MOST_US: Final = 2**32 - 1  # a sample of 72 minutes: a debugger holds it


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


PHRASES: Final = {
    Phase.ABSENT: "while it was starting",
    Phase.STARTING: "while it was starting (unpickling the dataset, or in worker_init_fn)",
    Phase.WAITING: "between two tasks",
    Phase.BEGINNING: "while it began an epoch (set_epoch or iter() of the dataset)",
    Phase.READING: "while reading",
    Phase.COLLATING: "while collating",
    Phase.SENDING: "while pickling and sending",
    Phase.ENDING: "while it was ending",
}


class StatusSnapshot(NamedTuple):
    """What a status page says: what a worker is doing, or was when it died.

    Attributes:
        generation: Which `BeginEpoch` the task belongs to.
        step: The step that it was making.
        phase: What it was doing.
        number: With which sample of the batch; None if not with a single one.
        replacement: In a tuple, the key of another sample than the batch's own; empty if none.
        peak_rss_bytes: Its largest resident memory, looked at every few tasks.
        task_s: Seconds since the task began.
        still_s: Seconds since it moved on last, to another sample or phase; None where samples are
            too quick to be timed.
    """

    generation: int
    step: int
    phase: Phase
    number: int | None
    replacement: tuple[Any, ...]
    peak_rss_bytes: int
    task_s: float
    still_s: float | None = None


class StatusWriter:
    """Writer of a worker's status, which also adds up the time of each phase.

    Without a page, as for a worker in the main process, no memory is reported: it would be that
    process's.

    Attributes:
        is_watched: Whether it notes when each sample begins, also where samples are quick: a
            worker that does not move on is replaced.
        num_samples: Number of samples in the batch of the task under way.
        seed_ns: What seeding the global generators took for it, in nanoseconds.
    """

    __slots__ = (
        "_cells", "_core_time", "_is_process", "_key", "_marks", "_measures", "_num_taken",
        "_num_tasks", "_page", "_samples_end_ns", "_since_ns", "_spent_ns", "_times_samples",
        "is_watched", "num_samples", "seed_ns",
    )  # fmt: skip

    def __init__(
        self,
        page: memoryview | None = None,
        cpu_clock: Callable[[], int] = time.process_time_ns,
    ) -> None:
        """Write into a page."""
        self.is_watched = False
        self._is_process = page is not None
        self._page = memoryview(bytearray(_WORDS_AT)) if page is None else page
        self._cells = self._page[:_KEY_AT].cast("q")
        self._key = self._page[_KEY_AT:_WORDS_AT]
        self._measures = self._times_samples = True  # of the task under way
        self.num_samples = self.seed_ns = 0
        self._num_tasks = self._num_taken = self._samples_end_ns = 0
        self._marks = array("q")  # when each of its samples was begun
        self._core_time = CoreTime(cpu_clock)
        self._spent_ns = [0] * len(Phase)
        self._since_ns = time.monotonic_ns()  # time until here is added up

    def begin_task(self, generation: int, step: int, *, measures: bool = True) -> None:
        """Note that a task begins, and whether it is measured.

        The time since the last one, waiting and sending, counts as its own.
        """
        if measures:
            if not self._measures:  # nor was the time before this moment
                self._times_samples = True
                self._since_ns = time.monotonic_ns()
                self._spent_ns = [0] * len(Phase)
            now = time.monotonic_ns()
            self._core_time.begin()
            self._add_up(now)
            self._spent_ns[Phase.READING] = self._spent_ns[Phase.COLLATING] = 0  # of a failed one
            del self._marks[:]
        else:
            now = time.monotonic_ns()
            self._times_samples = False
        self._measures = measures
        self.num_samples = self.seed_ns = 0
        cells = self._cells
        cells[_NUMBER] = -1
        cells[_KEY_BYTES] = 0
        cells[_GENERATION] = generation
        cells[_STEP] = step
        cells[_SINCE] = now
        cells[_AT_IT_SINCE] = 0
        if self._is_process and self._num_tasks % _USAGE_INTERVAL == 0:
            with contextlib.suppress(ImportError):  # Windows
                import resource

                cells[_PEAK_RSS] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._num_tasks += 1
        cells[_PHASE] = Phase.READING

    def _add_up(self, now_ns: int) -> None:
        """Add the time up to this moment to the phase that ends with it."""
        phase = self._cells[_PHASE]
        self._spent_ns[phase] += now_ns - self._since_ns
        self._since_ns = now_ns
        if phase == Phase.READING:
            self._samples_end_ns = now_ns

    def begin_generation(self, generation: int) -> None:
        """Note that an epoch begins."""
        self.phase(Phase.BEGINNING)

    def phase(self, phase: Phase) -> None:
        """Note what is being done, not with a single sample."""
        now = time.monotonic_ns()
        if self._measures:
            self._add_up(now)
        cells = self._cells
        cells[_NUMBER] = -1
        cells[_KEY_BYTES] = 0
        cells[_PHASE] = phase
        cells[_AT_IT_SINCE] = now

    def sample(self, number: int) -> None:
        """Note which sample of the batch is being read."""
        self._cells[_NUMBER] = number
        if self._times_samples or self.is_watched:
            self._cells[_AT_IT_SINCE] = now = time.monotonic_ns()
            if self._times_samples:
                self._marks.append(now)

    def number_cell(self) -> memoryview[int] | None:
        """Return a cell for the number of each sample, in place of `sample`; None for `sample`."""
        if self._times_samples or self.is_watched:
            return None
        return self._cells[_NUMBER : _NUMBER + 1]

    def item(self, phase: Phase, item: BatchItem) -> None:
        """Note what is being done with the sample of one item."""
        cells, now = self._cells, time.monotonic_ns()
        cells[_KEY_BYTES] = 0
        cells[_NUMBER] = item.number
        if cells[_PHASE] != phase:
            self._add_up(now)
            cells[_PHASE] = phase
        if phase == Phase.READING and self._times_samples:
            self._marks.append(now)
        cells[_AT_IT_SINCE] = now  # for `WorkerStream._on_timeout`
        if item.attempt:
            key = pickle.dumps(sample_key(item.index))
            if len(key) <= len(self._key):
                self._key[: len(key)] = key
                cells[_KEY_BYTES] = len(key)

    def note_interrupt(self) -> None:
        """Note a Ctrl-C, which a terminal sends to the main process and its workers alike."""
        self._cells[_INTERRUPTED] = time.monotonic_ns()

    def say_last_words(self, text: str) -> None:
        """Leave a text for the main process, which needs neither a descriptor nor a thread."""
        words = text.encode("utf-8", "replace")[: _TEXT_AT - _WORDS_AT]
        self._page[_WORDS_AT : _WORDS_AT + len(words)] = words

    def snapshot(self) -> StatusSnapshot:
        """Return the status of now, for another thread of this process."""
        return _snapshot_of(self._page)

    def take_times(self, *, num_bytes: int = 0, pool_bytes: int = 0, slot_ns: int = 0) -> bytes:
        """Return what the task took up to this moment; to be called when its batch is packed.

        For one that is not measured, it is only the number of its samples.
        """
        if not self._measures:
            return light_times(self.num_samples)
        now, begun_ns = time.monotonic_ns(), self._cells[_SINCE]
        self._add_up(now)
        _, _, idle_ns, _, fetch_ns, collate_ns, send_ns, _ = self._spent_ns  # as in `Phase`
        times = WORKERS_PART.pack(
            self.num_samples, begun_ns, now, idle_ns, fetch_ns, collate_ns, send_ns, slot_ns,
            *self._core_time.end(now - begun_ns), num_bytes, pool_bytes,
            self._cells[_PEAK_RSS] * _RSS_UNIT, self.seed_ns,
        )  # fmt: skip
        # Asking for CPU time is no sending: a busy system often switches tasks at such a call.
        self._since_ns = time.monotonic_ns()
        self._num_taken += 1
        takes_long = fetch_ns >= _SHORTEST_TIMED_NS * max(self.num_samples, 1)
        self._times_samples = takes_long or self._num_taken % _TIMED_ANYWAY == 0
        self._spent_ns = [0] * len(Phase)
        return times + self._sample_us()

    def _sample_us(self) -> bytes:
        """Return microseconds per sample; nothing unless each was begun just once."""
        marks = self._marks
        if not marks or len(marks) != self.num_samples:
            return b""
        marks.append(self._samples_end_ns)
        # Not numpy, which takes 20 us for a short batch when the caches are cold.
        took_us = [(end - begin) // 1000 for begin, end in pairwise(marks)]
        return array("I", [min(us, _MOST_US) for us in took_us]).tobytes()

    def close(self) -> None:
        """Give back what it holds of the system; a second call does nothing."""
        self._core_time.close()


def _snapshot_of(page: memoryview) -> StatusSnapshot:
    for _ in range(_READS):
        cells = page[:_KEY_AT].cast("q").tolist()
        key = bytes(page[_KEY_AT : _KEY_AT + cells[_KEY_BYTES]])
        if cells == page[:_KEY_AT].cast("q").tolist():
            break
    else:  # it never held still: its samples are quick, and which one it is matters little
        cells[_NUMBER], key = -1, b""
    return StatusSnapshot(
        generation=cells[_GENERATION],
        step=cells[_STEP],
        phase=Phase(cells[_PHASE]),
        number=None if cells[_NUMBER] < 0 else cells[_NUMBER],
        replacement=(pickle.loads(key),) if key else (),
        peak_rss_bytes=cells[_PEAK_RSS] * _RSS_UNIT,
        task_s=_seconds_since(cells[_SINCE]) or 0.0,
        still_s=_seconds_since(cells[_AT_IT_SINCE]),
    )


def open_status(fd: int) -> StatusWriter:
    """Return a worker's end of the status page `fd`, which is kept open for `faulthandler`.

    From here on a fatal signal, or the main process, has the worker's stacks written there.
    """
    page = memoryview(Mapping(fd, _SIZE_BYTES).view()).cast("B")
    os.set_inheritable(fd, False)
    if sys.platform != "darwin":  # there segments are mapped, and no more: no stacks can be read
        os.lseek(fd, _TEXT_AT, os.SEEK_SET)
    faulthandler.enable(fd)
    faulthandler.register(_STACKS_SIGNAL, fd, all_threads=True)
    status = StatusWriter(page)
    status.phase(Phase.STARTING)
    return status


class StatusPage:
    """The main process's end of a status page."""

    def __init__(self) -> None:
        """Make an empty page; `fd` is to be closed once the worker has got it.

        Raises:
            TransportError: the system gives no more descriptors or memory.
        """
        self.fd = create_segment(_SIZE_BYTES)
        self._mapping = Mapping(self.fd, _SIZE_BYTES)
        self._bytes = memoryview(self._mapping.view()).cast("B")
        self._read_to = _TEXT_AT

    def close(self) -> None:
        """Close the descriptor, which is on its way to the worker; the page can still be read."""
        os.close(self.fd)
        self.fd = -1

    def read(self) -> StatusSnapshot:
        """Return a snapshot of the status, which the worker may be changing meanwhile."""
        return _snapshot_of(self._bytes)

    @property
    def was_interrupted(self) -> bool:
        """Whether a Ctrl-C has reached the worker in the last seconds."""
        since_s = _seconds_since(self._bytes[:_KEY_AT].cast("q")[_INTERRUPTED])
        return since_s is not None and since_s < _INTERRUPTED_LATELY_S

    def last_words(self) -> str:
        """Return what a worker that an exception ended has left; empty if there is nothing."""
        text = bytes(self._bytes[_WORDS_AT:_TEXT_AT])
        return text.partition(b"\0")[0].decode("utf-8", "replace")

    def new_stacks(self) -> str:
        """Return the stacks that were written since the last call; empty if none."""
        text = self._unread_stacks()
        self._read_to += len(text)
        dump = text.decode("utf-8", "replace").partition("Extension modules:")[0]
        return _OURS.sub("", dump).strip()

    def _unread_stacks(self) -> bytes:
        return bytes(self._bytes[self._read_to :]).partition(b"\0")[0]

    def ask_for_stacks(self, send: Callable[[int], None]) -> None:
        """Let a worker write its stacks, for `new_stacks`; waits 2 s at most."""
        self.new_stacks()
        send(_STACKS_SIGNAL)
        deadline = time.monotonic() + _LONGEST_DUMP_S
        while time.monotonic() < deadline and not self._unread_stacks():
            time.sleep(0.02)
        time.sleep(0.02)  # nothing says when a dump is complete; it takes a millisecond


def _seconds_since(moment_ns: int) -> float | None:
    """Return how long ago a moment was, by the monotonic clock; None for 0, which is no moment."""
    return (time.monotonic_ns() - moment_ns) / 1e9 if moment_ns else None
