# SPDX-License-Identifier: Apache-2.0
"""Batches as rows of integers: what they take to keep, to add up and to cut a window out of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.engine.accounts import BatchRecord, TaskTimes
from penstock.insight.stats import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["AT", "Ring", "Sums", "mean_ready", "records_of", "rows_of", "window_of"]

_FIRST_SIZE: Final = 128
_WINDOW_BATCHES: Final = 64
_WINDOW_NS: Final = 10_000_000_000
FIELDS: Final = (
    *("epoch", "step", "worker_id", "pid", "asked_ns", "given_ns", "consumer_ns"),
    *("trainer_cpu_ns", "trainer_starved_ns", "num_samples", "num_failed", "num_ready"),
    *("num_workers", "lookahead", "begun_ns", "ended_ns", "idle_ns", "fetch_ns", "collate_ns"),
    *("send_ns", "slot_ns", "cpu_ns", "starved_ns", "num_bytes", "pool_bytes", "rss_bytes"),
)  # as told; what follows is made of them
_DERIVED: Final = ("wait_ns", "first_wait_ns", "is_first", "read_ns")
_OF_SAMPLES: Final = ("timed", "timed_us", "slow", "slow_us")
AT: Final = {name: at for at, name in enumerate((*FIELDS, *_DERIVED, *_OF_SAMPLES))}
_UNKNOWN: Final = -1  # starved time where the system does not say
_MAY_BE_UNKNOWN: Final = ("trainer_starved_ns", "starved_ns")
_NANOSECONDS: Final = {
    "wait_s": "wait_ns",
    "first_wait_s": "first_wait_ns",
    "consumer_s": "consumer_ns",
    "trainer_cpu_s": "trainer_cpu_ns",
    "trainer_starved_s": "trainer_starved_ns",
    "idle_s": "idle_ns",
    "read_s": "read_ns",
    "collate_s": "collate_ns",
    "send_s": "send_ns",
    "slot_s": "slot_ns",
    "starved_s": "starved_ns",
    "worker_cpu_s": "cpu_ns",
}


class Sums:
    """Sums over batches."""

    __slots__ = ("_batches", "_totals")

    def __init__(self) -> None:
        """Begin with nothing."""
        self._batches = 0
        self._totals = np.zeros(len(AT), np.float64)  # 2**53 ns is 104 days, and then still exact

    @classmethod
    def of(cls, rows: NDArray[np.int64]) -> Sums:
        """Return the sums of some rows."""
        sums = cls()
        sums.add(rows)
        return sums

    def add(self, rows: NDArray[np.int64]) -> None:
        """Add rows."""
        self._batches += len(rows)
        self._totals += np.maximum(rows, 0).sum(axis=0, dtype=np.float64)

    def span(self) -> Span:
        """Return the sums in seconds."""
        total = dict(zip(AT, self._totals.tolist(), strict=True))
        seconds = {name: total[ns] / 1e9 for name, ns in _NANOSECONDS.items()}
        return Span(
            batches=self._batches,
            samples=int(total["num_samples"]),
            failed=int(total["num_failed"]),
            bytes=int(total["num_bytes"]),
            seconds=(total["wait_ns"] + total["consumer_ns"]) / 1e9,
            starts=int(total["is_first"]),
            compute_s=max(total["fetch_ns"] - total["read_ns"], 0) / 1e9,
            timed=int(total["timed"]),
            timed_s=total["timed_us"] / 1e6,
            slow=int(total["slow"]),
            slow_s=total["slow_us"] / 1e6,
            **seconds,
        )


class Ring:
    """The last rows."""

    def __init__(self, keep: int) -> None:
        """Take how many to keep; memory grows up to that."""
        self._keep = keep
        self._rows = np.zeros((min(keep, _FIRST_SIZE), len(AT)), np.int64)
        self._count = 0  # ever added

    def extend(self, rows: NDArray[np.int64]) -> None:
        """Add rows; the oldest go."""
        self._grow(self._count + len(rows))
        self._count += len(rows)
        rows = rows[-self._keep :]
        at = np.arange(self._count - len(rows), self._count) % len(self._rows)
        self._rows[at] = rows

    def _grow(self, needed: int) -> None:
        size = len(self._rows)
        if needed <= size or size == self._keep:
            return
        rows = np.zeros((min(self._keep, max(needed, 2 * size)), len(AT)), np.int64)
        rows[: self._count] = self._rows[: self._count]
        self._rows = rows

    def last(self, most: int | None = None) -> NDArray[np.int64]:
        """Return the last rows, oldest first; a copy."""
        num = min(self._count, self._keep, self._keep if most is None else most)
        return self._rows[np.arange(self._count - num, self._count) % len(self._rows)]


def rows_of(records: Sequence[BatchRecord]) -> NDArray[np.int64]:
    """Return what batches tell, and what follows from it; columns of samples are 0.

    Returns:
        Shape (batches, len(AT)), int64.
    """
    rows = np.zeros((len(records), len(AT)), np.int64)
    rows[:, : len(FIELDS)] = [_row(record) for record in records]
    _derive(rows)
    return rows


def _row(record: BatchRecord) -> tuple[Any, ...]:
    times = record.times
    starved, trainer_starved = times.starved_ns, record.trainer_starved_ns
    return (
        *record[:8],
        _UNKNOWN if trainer_starved is None else trainer_starved,
        *record[9:11],
        *record[12:15],
        *times[:8],
        _UNKNOWN if starved is None else starved,
        times.num_bytes,
        times.pool_bytes,
        times.rss_bytes,
    )


def records_of(rows: NDArray[np.int64]) -> list[BatchRecord]:
    """Return the batches again, without indices and times of samples."""
    of_times, of_record = set(TaskTimes._fields), set(BatchRecord._fields)
    found = []
    for row in rows[:, : len(FIELDS)].tolist():
        named: dict[str, Any] = {
            name: None if value == _UNKNOWN and name in _MAY_BE_UNKNOWN else value
            for name, value in zip(FIELDS, row, strict=True)
        }
        times = TaskTimes(**{name: v for name, v in named.items() if name in of_times})
        known = {name: v for name, v in named.items() if name in of_record}
        found.append(BatchRecord(**known, indices=None, times=times))
    return found


def _derive(rows: NDArray[np.int64]) -> None:
    """Fill the columns that follow from others."""

    def column(name: str) -> NDArray[np.int64]:
        return rows[:, AT[name]]

    column("wait_ns")[:] = column("given_ns") - column("asked_ns")
    column("is_first")[:] = column("consumer_ns") == 0
    column("first_wait_ns")[:] = column("wait_ns") * column("is_first")
    busy = column("ended_ns") - column("begun_ns")
    blocked = busy - column("cpu_ns") - np.maximum(column("starved_ns"), 0)
    column("read_ns")[:] = np.minimum(np.maximum(blocked, 0), column("fetch_ns"))


def window_of(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return those of the last rows that tell how things stand now."""
    if not len(rows):
        return rows
    others = np.flatnonzero(rows[:, AT["num_workers"]] != rows[-1, AT["num_workers"]])
    rows = rows[others[-1] + 1 :] if len(others) else rows
    since = rows[-1, AT["given_ns"]] - _WINDOW_NS
    recent = int((rows[:, AT["asked_ns"]] >= since).sum())
    return rows[-max(recent, _WINDOW_BATCHES) :]


def mean_ready(rows: NDArray[np.int64]) -> float:
    """Return how many batches lay ready when one was asked for, but for the first of an epoch."""
    steady = rows[rows[:, AT["is_first"]] == 0, AT["num_ready"]]
    return float(steady.mean()) if len(steady) else 0.0
