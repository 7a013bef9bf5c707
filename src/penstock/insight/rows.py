# SPDX-License-Identifier: Apache-2.0
"""Batches as rows of integers: what they take to keep, to add up and to cut a window out of."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.engine.accounts import BatchRecord, LightRow, TaskTimes
from penstock.insight.stats import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = [
    "AT",
    "Ring",
    "Sums",
    "light_rows",
    "mean_ready",
    "records_of",
    "rows_of",
    "window_of",
    "without_pauses",
]

_FIRST_SIZE: Final = 128
_WINDOW_BATCHES: Final = 64
_WINDOW_NS: Final = 10_000_000_000
FIELDS: Final = (
    *("epoch", "step", "worker_id", "pid", "asked_ns", "given_ns", "consumer_ns"),
    *("trainer_cpu_ns", "trainer_starved_ns", "num_samples", "num_failed", "num_ready"),
    *("num_workers", "lookahead", "begun_ns", "ended_ns", "idle_ns", "fetch_ns", "collate_ns"),
    *("send_ns", "slot_ns", "cpu_ns", "starved_ns", "num_bytes", "pool_bytes", "rss_bytes"),
    "seed_ns",
)  # as told; what follows is made of them
_DERIVED: Final = (
    *("wait_ns", "first_wait_ns", "is_first", "read_ns"),
    "since_ns",  # when the first batch of the iterator was asked for
    "spare_ns",  # the worker had nothing to do since then
    "tail_ns",  # the main process's own code after an epoch's last batch
    "is_measured",  # a worker told what it took
)
OF_SAMPLES: Final = ("is_workers_first", "timed", "timed_us", "slow", "slow_us")
AT: Final = {name: at for at, name in enumerate((*FIELDS, *_DERIVED, *OF_SAMPLES))}
_LONG_AGO: Final = np.iinfo(np.int64).min // 2
_PAUSE: Final = 8  # times the main process's median step
_SHORTEST_PAUSE_NS: Final = 20_000_000
_RARE: Final = 0.1  # share of steps that are pauses at most
_UNKNOWN: Final = -1  # starved time where the system does not say
_MAY_BE_UNKNOWN: Final = ("trainer_starved_ns", "starved_ns")
_NANOSECONDS: Final = {
    "wait_s": "wait_ns",
    "first_wait_s": "first_wait_ns",
    "consumer_s": "consumer_ns",
    "trainer_cpu_s": "trainer_cpu_ns",
    "trainer_starved_s": "trainer_starved_ns",
    "idle_s": "spare_ns",
    "read_s": "read_ns",
    "collate_s": "collate_ns",
    "send_s": "send_ns",
    "slot_s": "slot_ns",
    "starved_s": "starved_ns",
    "worker_cpu_s": "cpu_ns",
    "seed_s": "seed_ns",
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

    def add_tail(self, tail_ns: int, num_failed: int) -> None:
        """Add the main process's own code after an epoch's last batch, and bad samples after it."""
        self._totals[AT["tail_ns"]] += tail_ns
        self._totals[AT["num_failed"]] += num_failed

    def span(self) -> Span:
        """Return the sums in seconds."""
        total = dict(zip(AT, self._totals.tolist(), strict=True))
        seconds = {name: total[ns] / 1e9 for name, ns in _NANOSECONDS.items()}
        return Span(
            batches=self._batches,
            samples=int(total["num_samples"]),
            failed=int(total["num_failed"]),
            bytes=int(total["num_bytes"]),
            seconds=(total["wait_ns"] + total["consumer_ns"] + total["tail_ns"]) / 1e9,
            starts=int(total["is_first"]),
            measured=int(total["is_measured"]),
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

    def add_tail(self, tail_ns: int, num_failed: int) -> None:
        """Add the main process's own code after the last row, and bad samples after it."""
        if self._count:
            row = self._rows[(self._count - 1) % len(self._rows)]
            row[AT["tail_ns"]] = tail_ns
            row[AT["num_failed"]] += num_failed

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


def rows_of(records: Sequence[BatchRecord], since_ns: int = _LONG_AGO) -> NDArray[np.int64]:
    """Return what batches tell, and what follows from it; columns of samples are 0.

    Args:
        records: The batches.
        since_ns: When the iterator that goes on asked for its first batch.

    Returns:
        Shape (batches, len(AT)), int64.
    """
    rows = np.zeros((len(records), len(AT)), np.int64)
    rows[:, : len(FIELDS)] = [_row(record) for record in records]
    _derive(rows, since_ns)
    return rows


def light_rows(light: Sequence[tuple[int, ...]], since_ns: int = _LONG_AGO) -> NDArray[np.int64]:
    """Return what is known of batches that were not measured (`LightRow`); `since_ns` as above."""
    rows = np.zeros((len(light), len(AT)), np.int64)
    rows[:, [AT[name] for name in LightRow._fields]] = light
    rows[:, AT["pid"]] = os.getpid()
    rows[:, [AT[name] for name in _MAY_BE_UNKNOWN]] = _UNKNOWN
    _derive(rows, since_ns)
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
        times.seed_ns,
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


def _derive(rows: NDArray[np.int64], since_ns: int) -> None:
    """Fill the columns that follow from others."""

    def column(name: str) -> NDArray[np.int64]:
        return rows[:, AT[name]]

    column("wait_ns")[:] = column("given_ns") - column("asked_ns")
    column("is_first")[:] = column("consumer_ns") == 0
    column("first_wait_ns")[:] = column("wait_ns") * column("is_first")
    begins = np.where(column("is_first"), column("asked_ns"), since_ns)
    column("since_ns")[:] = np.maximum.accumulate(begins)
    # Between two epochs nobody has anything to do.
    since_begun = np.maximum(column("begun_ns") - column("since_ns"), 0)
    column("is_measured")[:] = column("ended_ns") > 0
    column("spare_ns")[:] = np.minimum(column("idle_ns"), since_begun)
    busy = column("ended_ns") - column("begun_ns")
    blocked = busy - column("cpu_ns") - np.maximum(column("starved_ns"), 0)
    column("read_ns")[:] = np.minimum(np.maximum(blocked, 0), column("fetch_ns"))


def window_of(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return those of the last rows that tell how things stand now."""
    if not len(rows):
        return rows
    others = np.flatnonzero(rows[:, AT["num_workers"]] != rows[-1, AT["num_workers"]])
    if len(others):
        rows = _settled(rows[others[-1] + 1 :])
    if not len(rows):
        return rows
    since = rows[-1, AT["given_ns"]] - _WINDOW_NS
    recent = int((rows[:, AT["asked_ns"]] >= since).sum())
    return rows[-max(recent, _WINDOW_BATCHES) :]


def _settled(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return what came after new workers got going: each has made a batch, and those ahead."""
    workers, firsts = np.unique(rows[:, AT["worker_id"]], return_index=True)
    if len(workers) < rows[-1, AT["num_workers"]]:
        return rows[:0]
    return rows[int(firsts.max()) + 1 + int(rows[-1, AT["lookahead"]]) :]


def without_pauses(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return rows in which rare long steps (logging, validation) take what others do.

    What workers had nothing to do meanwhile is taken out as well. A copy, or the rows themselves.
    """
    consumer_ns = rows[:, AT["consumer_ns"]]
    steps = consumer_ns[consumer_ns > 0]
    if not len(steps):
        return rows
    usual_ns = int(np.median(steps))
    pauses = np.flatnonzero(consumer_ns > max(_PAUSE * usual_ns, _SHORTEST_PAUSE_NS))
    if not 0 < len(pauses) <= _RARE * len(steps):
        return rows
    rows = rows.copy()
    spare_ns = rows[:, AT["spare_ns"]]
    until = rows[:, AT["begun_ns"]]
    begun = until - spare_ns
    for pause in pauses:
        end = rows[pause, AT["asked_ns"]]
        overlap = np.minimum(until, end) - np.maximum(begun, end - consumer_ns[pause])
        spare_ns -= np.maximum(overlap, 0)
    np.maximum(spare_ns, 0, out=spare_ns)
    share = usual_ns / consumer_ns[pauses]
    for name in ("trainer_cpu_ns", "trainer_starved_ns", "consumer_ns"):
        rows[pauses, AT[name]] = (rows[pauses, AT[name]] * share).astype(np.int64)
    return rows


def mean_ready(rows: NDArray[np.int64]) -> float:
    """Return how many batches lay ready when one was asked for, but for the first of an epoch."""
    steady = rows[rows[:, AT["is_first"]] == 0, AT["num_ready"]]
    return float(steady.mean()) if len(steady) else 0.0
