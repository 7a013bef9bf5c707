# SPDX-License-Identifier: Apache-2.0
"""What one batch costs, what throughput follows from it, and how such figures are written.

    throughput = min( trainer:  1 / its own time per batch,
                      workers:  workers / their time per batch,
                      cores:    cores / CPU time per batch, of workers and trainer )

A remedy changes one of these figures, and its gain is the new minimum by what was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.insight.stats import Span

__all__ = ["HANDOVER_S", "Figures", "amount", "duration", "percent", "size"]

# How soon one batch from a worker process can follow another, however small they are, the accounts
# included (measured: 0.15 to 0.3 ms). Counted only where no worker has shown it.
HANDOVER_S: Final = 0.2e-3

_MARGIN: Final = 1.1  # workers beyond what is needed on average
_MOST_WORKERS: Final = 32  # that are advised where there were fewer: memory, servers, file handles


@dataclass(frozen=True, slots=True)
class Figures:
    """Means per batch, in seconds, without what the first batch of an iterator waited for.

    Attributes:
        batches: Batches that followed another one in their iterator.
        rate: Of these, per second.
        wait_share: Share of the time that the trainer waited for them, 0 to 1.
        trainer_s: The trainer's own code.
        trainer_starved_s: Of this, no core was free.
        trainer_cpu_s: CPU time of the trainer's process.
        busy_s: A worker's time, without waiting for a core.
        starved_s: A worker waited for a core.
        idle_share: Share of the workers' time that they had nothing to do, 0 to 1.
        cpu_s: CPU time of a worker.
        read_s: A worker waited in the dataset.
        fetch_s: A worker was in the dataset, reading and computing.
        collate_s: Making a batch of samples.
        send_s: Packing and sending.
        num_bytes: Bytes of the batch.
        num_workers: Workers; 0 if the trainer's thread makes the batches.
        cores: Cores that may be used.
        pause_s: What the trainer's rare long steps (validation, logging) take beyond the others; no
            part of `trainer_s` and `rate`.
        lock_share: Share of the time that threads hold the interpreter's lock, 0 to 1.
        lock_bound: Share for which they may hold it, as nobody saw that they do not.
    """

    batches: int
    rate: float
    wait_share: float
    trainer_s: float
    trainer_starved_s: float
    trainer_cpu_s: float
    busy_s: float
    starved_s: float
    idle_share: float
    cpu_s: float
    read_s: float
    fetch_s: float
    collate_s: float
    send_s: float
    num_bytes: float
    num_workers: int
    cores: float
    pause_s: float = 0.0
    lock_share: float = 0.0
    lock_bound: float = 0.0

    @classmethod
    def of(
        cls,
        span: Span,
        num_workers: int,
        cores: float,
        *,
        pause_s: float = 0.0,
        lock_share: float = 0.0,
    ) -> Figures | None:
        """Return the figures of some batches; None if there is nothing to divide by.

        Args:
            span: The batches, without pauses.
            num_workers: Workers.
            cores: Cores.
            pause_s: What pauses took in all.
            lock_share: As the attribute.
        """
        batches = span.batches - span.starts
        steady_wait_s = max(span.wait_s - span.first_wait_s, 0.0)
        seconds = steady_wait_s + span.consumer_s
        if batches < 1 or seconds < 1e-9:  # of no clock
            return None
        rest_s = span.seconds - span.first_wait_s  # with the steps after last batches
        made = span.batches  # workers made the first batches, too
        starved_s = min(span.starved_s, span.busy_s)
        workers_s = span.idle_s + span.busy_s
        return cls(
            batches=batches,
            rate=batches / seconds,
            wait_share=min(steady_wait_s / max(seconds + pause_s, rest_s), 1.0),
            trainer_s=span.consumer_s / batches,
            trainer_starved_s=min(span.trainer_starved_s, span.consumer_s) / batches,
            trainer_cpu_s=span.trainer_cpu_s / batches,
            busy_s=(span.busy_s - starved_s) / made,
            starved_s=starved_s / made,
            idle_share=min(span.idle_s / workers_s, 1.0) if workers_s else 0.0,
            cpu_s=min(span.worker_cpu_s, span.busy_s) / made,
            read_s=span.read_s / made,
            fetch_s=(span.read_s + span.compute_s) / made,
            collate_s=span.collate_s / made,
            send_s=span.send_s / made,
            num_bytes=span.bytes / made,
            num_workers=num_workers,
            cores=max(cores, 0.1),
            pause_s=pause_s / batches,
            lock_share=lock_share,
        )

    @property
    def trainer_rate(self) -> float:
        """Batches per second that the trainer could take; may be infinite."""
        return _per(1.0, self.trainer_s)

    @property
    def core_rate(self) -> float:
        """Batches per second that all cores could make and take; may be infinite."""
        by_cores = _per(self.cores, self.cpu_s + self.trainer_cpu_s)
        return min(by_cores, self._lock_rate)

    @property
    def _lock_rate(self) -> float:
        """Batches per second with the interpreter's lock held all the time."""
        return _per(self.rate, self.lock_share)

    @property
    def trainer_blocked_s(self) -> float:
        """The trainer's own code without CPU, while threads had some that may have held the lock.

        It may as well be waiting for its device.
        """
        blocked_s = self.trainer_s - self.trainer_cpu_s - self.trainer_starved_s
        return min(max(blocked_s, 0.0), self.cpu_s)

    def without_lock(self) -> Figures:
        """Return what could be expected of processes, if all blocked time is the lock's."""
        return replace(
            self,
            trainer_s=self.trainer_s - self.trainer_blocked_s,
            busy_s=max(self.busy_s - self.read_s, 0.0),
            read_s=0.0,
            lock_share=0.0,
            lock_bound=0.0,
        )

    @property
    def serial_rate(self) -> float:
        """Batches per second without workers: the trainer makes one, and then takes it."""
        return _per(1.0, self.trainer_s + self.fetch_s + self.collate_s)

    @property
    def cores_taken(self) -> float:
        """Cores that workers and trainer kept busy."""
        return (self.cpu_s + self.trainer_cpu_s) * self.rate

    def share(self, seconds: float) -> float:
        """Return a time's share of a worker's time per batch, 0 to 1."""
        whole_s = self.busy_s + self.starved_s
        return min(seconds / whole_s, 1.0) if whole_s > 0 else 0.0

    def needed_workers(self, rate: float) -> int:
        """Return how many workers make so many batches per second, with some margin."""
        most = max(_MOST_WORKERS, 2 * self.num_workers)
        needed = rate * self.busy_s * _MARGIN
        return max(math.ceil(min(needed, most)), 1) if not math.isnan(needed) else most

    def gain(
        self, num_workers: int, *, saved_s: float = 0.0, saved_cpu_s: float = 0.0
    ) -> float | None:
        """Return by what throughput would grow; None if it cannot be told.

        Args:
            num_workers: So many workers.
            saved_s: What a batch would cost less of a worker's time.
            saved_cpu_s: What it would cost less CPU.
        """
        cpu_s = max(self.cpu_s - saved_cpu_s, 0.0) + self.trainer_cpu_s
        rate = min(
            self.trainer_rate,
            _per(num_workers, max(self.busy_s - saved_s, 0.0)),
            _per(self.cores, cpu_s),
            _per(self.rate, max(self.lock_share, self.lock_bound)),
        )
        if not math.isfinite(rate):
            return None
        return max((1 / self.rate + self.pause_s) / (1 / rate + self.pause_s), 1.0)


def _per(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 1e-12 else math.inf


def amount(number: float) -> str:
    """Return a number with two or three digits that mean something.

    Example:
        >>> amount(3.14159), amount(47.9), amount(1234.5), amount(float("inf"))
        ('3.1', '48', '1,234', 'any number')
    """
    if math.isinf(number):
        return "any number"
    return f"{number:,.1f}" if number < 9.95 else f"{number:,.0f}"


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it.

    Example:
        >>> duration(0.0412), duration(2.5), duration(0.00031)
        ('41 ms', '2.5 s', '0.31 ms')
    """
    if seconds >= 1:
        return f"{amount(seconds)} s"
    ms = seconds * 1e3
    return f"{ms:.2f} ms" if ms < 0.995 else f"{amount(ms)} ms"


def percent(share: float) -> str:
    """Return a share of 1 in percent.

    Example:
        >>> percent(0.618), percent(0.004)
        ('62 %', '0.4 %')
    """
    return f"{share * 100:.1f} %" if 0 < share < 0.01 else f"{share * 100:.0f} %"


def size(num_bytes: float) -> str:
    """Return a number of bytes in the unit that suits it.

    Example:
        >>> size(38.5e6), size(512)
        ('38 MB', '0.5 kB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= factor:
            return f"{amount(num_bytes / factor)} {unit}"
    return f"{amount(num_bytes / 1e3)} kB"
