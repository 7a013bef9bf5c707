# SPDX-License-Identifier: Apache-2.0
"""The timing row: integers measured for one batch, in the worker and in the main process.

    worker        | idle | fetch: read, compute | collate | send |     `WORKERS_PART`, as bytes
    main process  | its own code | waits for the batch |               `TimingRow`

All moments are of CLOCK_MONOTONIC, which every process of a machine shares. The time of waiting
for a core is -1 (`UNKNOWN`) where the system does not say.

A worker sends its fields as the bytes of `WORKERS_PART`; where samples were timed, the microseconds
of each follow in order, as a uint32 array. The main process puts its own fields before them. Of a
batch that is not measured, it notes the fields of `LIGHT` alone: two readings of the clock.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections import deque

    from penstock.engine.plan import Epoch

__all__ = [
    "LIGHT",
    "NO_TIMES",
    "UNKNOWN",
    "WORKERS_PART",
    "EpochEnd",
    "Observer",
    "TimingRow",
    "WorkerSettings",
    "light_times",
    "num_samples_of",
    "replaced",
    "row_of_worker",
    "sample_us_of",
]

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


class Observer(Protocol):
    """Receives the timing of every batch, in the consumer's thread, whose time it takes.

    Attributes:
        measures: Whether it receives each batch's whole row (`batch_given`). Otherwise the fields
            of `LIGHT` are appended to `light`.
    """

    measures: bool

    @property
    def light(self) -> deque[tuple[int, ...]]:
        """Rows that `fold` has not added up yet; always the same object."""

    def batches_are_long(self) -> None:
        """Take note that batches take so long that measuring them costs next to nothing."""

    def fold(self) -> None:
        """Add up what `light` holds."""

    def batch_given(
        self, row: TimingRow, indices: object, sample_us: bytes, epoch: Epoch
    ) -> WorkerSettings | None:
        """Take note of a batch of `epoch`.

        Args:
            row: Timing of the batch.
            indices: Keys of its samples as the sampler drew them (a list, an int64 array, a key);
                None for an iterable's.
            sample_us: Times of its samples; see `sample_us_of`.
            epoch: Epoch that it belongs to.

        Returns:
            New settings; None to leave them.
        """

    def worker_replaced(self) -> None:
        """Take note that a worker died, and that another takes its place."""

    def epoch_ended(self, epoch: Epoch, end: EpochEnd) -> None:
        """Take note that the consumer asked for a batch after the last one."""

    def epoch_left(self, epoch: Epoch) -> None:
        """Take note that no more batches of `epoch` come: it is over, or was left."""
