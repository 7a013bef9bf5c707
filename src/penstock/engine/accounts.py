# SPDX-License-Identifier: Apache-2.0
"""Per-batch timing, measured in the worker and in the main process.

    worker    | idle | fetch: read, compute | collate | send |            -> TaskTimes
    consumer  | its own code | waits for the batch |                   -> BatchRecord

All moments are of CLOCK_MONOTONIC, which every process of a machine shares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections import deque

    from penstock.engine.epoch import Epoch

__all__ = ["BatchRecord", "EpochEnd", "LightRow", "Observer", "TaskTimes", "WorkerSettings"]


class TaskTimes(NamedTuple):
    """What making one batch took. Nanoseconds, unless a name says otherwise.

    Attributes:
        begun_ns: When the worker took up the task.
        ended_ns: When the batch lay ready, but for its message to the main process.
        idle_ns: The worker had nothing to do for so long before it.
        fetch_ns: In the dataset: reading, decoding, transforming.
        collate_ns: Making one batch of the samples.
        send_ns: Packing it into its slot, and the message of the batch before.
        slot_ns: Of all these: making slots, as none was free. Nobody waits for a free slot.
        cpu_ns: CPU time from `begun_ns` to `ended_ns`, of the worker's process, or of its thread.
            Of tasks below 15 ms some are measured, and the others estimated by them.
        starved_ns: The worker could have run and no core was free; None where the system does not
            say.
        num_bytes: Of the batch, where it lies in slots.
        sample_us: Microseconds of every sample of the batch in their order, as the bytes of a
            uint32 array. Empty where samples are too quick to be timed, or are read at once.
        pool_bytes: All slots that the worker has, in use and free.
        rss_bytes: Largest resident memory of the worker's process so far; 0 if not known.
        num_samples: Samples of the batch.
        seed_ns: Of all these: seeding the global generators.
    """

    begun_ns: int
    ended_ns: int
    idle_ns: int = 0
    fetch_ns: int = 0
    collate_ns: int = 0
    send_ns: int = 0
    slot_ns: int = 0
    cpu_ns: int = 0
    starved_ns: int | None = None
    num_bytes: int = 0
    sample_us: bytes = b""
    pool_bytes: int = 0
    rss_bytes: int = 0
    num_samples: int = 0
    seed_ns: int = 0

    @property
    def busy_ns(self) -> int:
        """From taking up the task to the batch."""
        return self.ended_ns - self.begun_ns

    @property
    def read_ns(self) -> int:
        """Time in the dataset that took no CPU: waiting for storage, a network, a lock, a sleep.

        What the page cache serves takes CPU, and counts as computing.
        """
        blocked = self.busy_ns - self.cpu_ns - (self.starved_ns or 0)
        return min(max(blocked, 0), self.fetch_ns)

    @property
    def compute_ns(self) -> int:
        """Time in the dataset otherwise: decoding and transforming, and waiting for a core."""
        return self.fetch_ns - self.read_ns


class BatchRecord(NamedTuple):
    """One batch that was given to the main process.

    Attributes:
        epoch: Number of its epoch.
        step: Number of the batch in it.
        worker_id: Who made it; 0 without workers.
        pid: Process of that worker.
        asked_ns: When the consumer asked for it; for an iterator's first, earlier by what starting
            the workers had taken.
        given_ns: When the consumer got it.
        consumer_ns: The consumer's own code since it had the batch before; 0 for an iterator's
            first.
        trainer_cpu_ns: CPU time of the main process since then, without that of workers.
            Measured as `TaskTimes.cpu_ns` is.
        trainer_starved_ns: The consumer's thread could have run since then, and no core was free;
            None where the system does not say.
        num_samples: Samples in it.
        num_failed: Bad samples that were not met before in the epoch, of this batch and of those
            before it of which nothing was left.
        indices: Keys of its samples as the sampler drew them (a list, an int64 array, a key);
            None for an iterable's.
        num_ready: Batches that lay ready when it was asked for.
        num_workers: Workers that were ready at that time; 0 without.
        lookahead: Batches under way at a time, once all workers are ready.
        times: What the worker tells of it.
    """

    epoch: int
    step: int
    worker_id: int
    pid: int
    asked_ns: int
    given_ns: int
    consumer_ns: int
    trainer_cpu_ns: int
    trainer_starved_ns: int | None
    num_samples: int
    num_failed: int
    indices: object
    num_ready: int
    num_workers: int
    lookahead: int
    times: TaskTimes

    @property
    def wait_ns(self) -> int:
        """How long the consumer waited for it."""
        return self.given_ns - self.asked_ns


class EpochEnd(NamedTuple):
    """What came after an epoch's last batch, up to its end.

    Attributes:
        epoch: Number of the epoch.
        asked_ns: When the consumer asked for a batch, and there was none.
        ended_ns: When it was notified; workers that are not kept are gone by then.
        consumer_ns: The consumer's own code since it had the last batch.
        trainer_cpu_ns: As in `BatchRecord`.
        trainer_starved_ns: As in `BatchRecord`.
        num_failed: As in `BatchRecord`, of what came after the last batch.
    """

    epoch: int
    asked_ns: int
    ended_ns: int
    consumer_ns: int
    trainer_cpu_ns: int
    trainer_starved_ns: int | None
    num_failed: int = 0


class WorkerSettings(NamedTuple):
    """How many workers there are to be, and how far they work ahead.

    Attributes:
        num_workers: At least 1.
        prefetch_factor: Batches under way per worker, at least 1.
    """

    num_workers: int
    prefetch_factor: int


class LightRow(NamedTuple):
    """What is kept of a batch where nothing more is asked for: two readings of the clock.

    Attributes:
        epoch: As in `BatchRecord`, like the others.
        step: See there.
        asked_ns: See there.
        given_ns: See there.
        consumer_ns: See there.
        num_samples: See there; 0 where counting them would take time.
        num_failed: See there.
        num_workers: See there.
        lookahead: See there.
    """

    epoch: int
    step: int
    asked_ns: int
    given_ns: int
    consumer_ns: int
    num_samples: int
    num_failed: int
    num_workers: int
    lookahead: int


class Observer(Protocol):
    """Hears of every batch, in the consumer's thread; what it does there is the consumer's time.

    Attributes:
        measures: Whether it is to be told all of each batch (`batch_given`). Else the fields of a
            `LightRow` are appended to `light`.
    """

    measures: bool

    @property
    def light(self) -> deque[tuple[int, ...]]:
        """Rows that `fold` was not called for yet; always the same object."""

    def batches_are_long(self) -> None:
        """Take note that batches take so long that measuring them costs next to nothing."""

    def fold(self) -> None:
        """Add up what `light` holds."""

    def batch_given(self, record: BatchRecord, epoch: Epoch) -> WorkerSettings | None:
        """Take note of a batch of `epoch`; returns other settings if there are to be any."""

    def worker_replaced(self) -> None:
        """Take note that a worker died, and another takes its place."""

    def epoch_ended(self, epoch: Epoch, end: EpochEnd) -> None:
        """Take note that the consumer was notified that there is no more."""

    def epoch_left(self, epoch: Epoch) -> None:
        """Take note that no batch of it comes any more: it is over, or was left."""
