# SPDX-License-Identifier: Apache-2.0
"""The timing row: what one batch took, as integers, in the worker and in the main process.

    worker        | idle | fetch: read, compute | collate | send |     `WORKERS_PART`, as bytes
    main process  | its own code | waits for the batch |               `TimingRow`

All moments are of CLOCK_MONOTONIC, which every process of a machine shares. A time for which
somebody waited for a core is -1 (`UNKNOWN`) where the system does not say.

What a worker tells of a batch crosses as the bytes of `WORKERS_PART`; behind them, where its
samples were timed, the microseconds of each in their order, as a uint32 array. The main process
puts its own fields before them. Of a batch that nobody wants to know more of, it notes the fields
of `LIGHT` alone: two readings of the clock.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections import deque

    from penstock.engine.epoch import Epoch

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
    """One batch that was given to the main process. Nanoseconds, unless a name says otherwise.

    Attributes:
        worker_id: Who made it; 0 without workers.
        pid: Process of that worker.
        num_ready: Batches that lay ready when it was asked for.
        trainer_cpu_ns: CPU time of the main process since the consumer had the batch before,
            without that of workers. Measured as `cpu_ns` is.
        trainer_starved_ns: The consumer's thread could have run since then, and no core was free.
        asked_ns: When the consumer asked for it; for an iterator's first, earlier by what starting
            the workers had taken.
        given_ns: When the consumer got it.
        consumer_ns: The consumer's own code since it had the batch before; 0 for an iterator's
            first.
        epoch: Number of its epoch.
        step: Number of the batch in it.
        num_failed: Bad samples that were not met before in the epoch, of this batch and of those
            before it of which nothing was left.
        num_workers: Workers that were ready when it was asked for; 0 without.
        lookahead: Batches under way at a time, once all workers are ready.
        num_samples: Samples in it; 0 where counting them would take time. From here on the worker
            tells it.
        begun_ns: When the worker took up the task.
        ended_ns: When the batch lay ready, but for its message to the main process; 0 of one that
            was not measured.
        idle_ns: The worker had nothing to do for so long before it.
        fetch_ns: In the dataset: reading, decoding, transforming.
        collate_ns: Making one batch of the samples.
        send_ns: Packing it into its slot, and the message of the batch before.
        slot_ns: Of all these: making slots, as none was free. Nobody waits for a free slot.
        cpu_ns: CPU time from `begun_ns` to `ended_ns`, of the worker's process, or of its thread.
            Of tasks below 15 ms some are measured, and the others estimated by them.
        starved_ns: The worker could have run and no core was free.
        num_bytes: Of the batch, where it lies in slots.
        pool_bytes: All slots that the worker has, in use and free.
        rss_bytes: Largest resident memory of the worker's process so far; 0 if not known.
        seed_ns: Of all these: seeding the global generators.
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
    """Return what a worker tells of a batch that was not measured."""
    return _COUNT.pack(num_samples) + NO_TIMES[_COUNT.size :]


def num_samples_of(times: bytes) -> int:
    """Return how many samples a batch has by what its worker told."""
    return int(_COUNT.unpack_from(times)[0])


def sample_us_of(times: bytes) -> bytes:
    """Return the times of a batch's samples; empty if they were too quick, or read at once."""
    return times[WORKERS_PART.size :]


def row_of_worker(times: bytes) -> TimingRow:
    """Return the row of a batch of which only its worker has told."""
    return TimingRow(*_NOTHING[:_WORKERS_AT], *WORKERS_PART.unpack_from(times))


def replaced(times: bytes, **fields: int) -> bytes:
    """Return what a worker told with other values of some of its fields.

    Example:
        >>> row_of_worker(replaced(NO_TIMES, rss_bytes=7)).rss_bytes
        7
    """
    row = row_of_worker(times)._replace(**fields)
    return WORKERS_PART.pack(*row[_WORKERS_AT:]) + sample_us_of(times)


class EpochEnd(NamedTuple):
    """What came after an epoch's last batch, up to its end.

    Attributes:
        asked_ns: When the consumer asked for a batch, and there was none.
        consumer_ns: The consumer's own code since it had the last batch.
        num_failed: As in `TimingRow`, of what came after the last batch.
    """

    asked_ns: int
    consumer_ns: int
    num_failed: int = 0


class WorkerSettings(NamedTuple):
    """How many workers there are to be, and how far they work ahead.

    Attributes:
        num_workers: At least 1.
        prefetch_factor: Batches under way per worker, at least 1.
    """

    num_workers: int
    prefetch_factor: int


class Observer(Protocol):
    """Hears of every batch, in the consumer's thread; what it does there is the consumer's time.

    Attributes:
        measures: Whether it is to be told all of each batch (`batch_given`). Else the fields of
            `LIGHT` are appended to `light`.
    """

    measures: bool

    @property
    def light(self) -> deque[tuple[int, ...]]:
        """Rows that `fold` was not called for yet; always the same object."""

    def batches_are_long(self) -> None:
        """Take note that batches take so long that measuring them costs next to nothing."""

    def fold(self) -> None:
        """Add up what `light` holds."""

    def batch_given(
        self, row: TimingRow, indices: object, sample_us: bytes, epoch: Epoch
    ) -> WorkerSettings | None:
        """Take note of a batch of `epoch`.

        Args:
            row: What it took.
            indices: Keys of its samples as the sampler drew them (a list, an int64 array, a key);
                None for an iterable's.
            sample_us: See `sample_us_of`.
            epoch: That it belongs to.

        Returns:
            Other settings if there are to be any.
        """

    def worker_replaced(self) -> None:
        """Take note that a worker died, and another takes its place."""

    def epoch_ended(self, epoch: Epoch, end: EpochEnd) -> None:
        """Take note that the consumer was notified that there is no more."""

    def epoch_left(self, epoch: Epoch) -> None:
        """Take note that no batch of it comes any more: it is over, or was left."""
