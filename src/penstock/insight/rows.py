# SPDX-License-Identifier: Apache-2.0
"""Batches as rows of integers: what they take to keep, to add up and to cut a window out of."""

from __future__ import annotations

import os
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.engine.timing import LIGHT, TimingRow
from penstock.insight.stats import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Rows = NDArray[np.void]  # of the type `ROW`

_WINDOW_BATCHES: Final = 64
_WINDOW_NS: Final = 10_000_000_000
ROW: Final = np.dtype(
    [
        (name, np.int64)
        for name in (
            *TimingRow._fields,  # as measured; what follows is made of them
            *("wait_ns", "first_wait_ns", "is_first"),
            "read_ns",  # in the dataset without CPU: storage, a network, a lock, a sleep
            "since_ns",  # when the first batch of the iterator was asked for
            "spare_ns",  # the worker had nothing to do since then
            "tail_ns",  # the main process's own code after an epoch's last batch
            "is_measured",  # its making was
            *("is_workers_first", "timed", "timed_us", "slow", "slow_us"),  # of its samples
        )
    ]
)
_AT: Final = {name: at for at, name in enumerate(ROW.names or ())}
_LONG_AGO: Final = np.iinfo(np.int64).min // 2
_PAUSE: Final = 8  # times the main process's median step
_SHORTEST_PAUSE_NS: Final = 20_000_000
_RARE: Final = 0.1  # share of steps that are pauses at most
_SECONDS: Final = (
    "wait", "first_wait", "consumer", "trainer_cpu", "trainer_starved", "read", "collate", "send",
    "slot", "starved", "seed",
)  # fmt: skip


class Sums:
    """Sums over batches."""

    __slots__ = ("_batches", "_totals")

    def __init__(self) -> None:
        """Begin with nothing."""
        self._batches = 0
        self._totals = np.zeros(len(_AT), np.float64)  # 2**53 ns is 104 days, and then still exact

    @classmethod
    def of(cls, rows: Rows) -> Sums:
        """Return the sums of some rows."""
        sums = cls()
        sums.add(rows)
        return sums

    def add(self, rows: Rows) -> None:
        """Add rows."""
        self._batches += len(rows)
        self._totals += np.maximum(_numbers(rows), 0).sum(axis=0, dtype=np.float64)

    def add_tail(self, tail_ns: int, num_failed: int) -> None:
        """Add the main process's own code after an epoch's last batch, and bad samples after it."""
        self._totals[_AT["tail_ns"]] += tail_ns
        self._totals[_AT["num_failed"]] += num_failed

    def span(self) -> Span:
        """Return the sums in seconds."""
        total = dict(zip(_AT, self._totals.tolist(), strict=True))
        seconds = {f"{name}_s": total[f"{name}_ns"] / 1e9 for name in _SECONDS}
        return Span(
            batches=self._batches,
            samples=int(total["num_samples"]),
            failed=int(total["num_failed"]),
            bytes=int(total["num_bytes"]),
            seconds=(total["wait_ns"] + total["consumer_ns"] + total["tail_ns"]) / 1e9,
            starts=int(total["is_first"]),
            measured=int(total["is_measured"]),
            idle_s=total["spare_ns"] / 1e9,
            worker_cpu_s=total["cpu_ns"] / 1e9,
            compute_s=max(total["fetch_ns"] - total["read_ns"], 0) / 1e9,
            timed=int(total["timed"]),
            timed_s=total["timed_us"] / 1e6,
            slow=int(total["slow"]),
            slow_s=total["slow_us"] / 1e6,
            **seconds,
        )


class Ring:
    """The last rows, as the arrays that they came in."""

    def __init__(self, keep: int) -> None:
        """Take how many to keep."""
        self._keep = keep
        self._parts: deque[Rows] = deque()
        self._count = 0  # in them

    def extend(self, rows: Rows) -> None:
        """Add rows; the oldest go."""
        self._parts.append(rows)
        self._count += len(rows)
        while self._count - len(self._parts[0]) >= self._keep:
            self._count -= len(self._parts.popleft())

    def add_tail(self, tail_ns: int, num_failed: int) -> None:
        """Add the main process's own code after the last row, and bad samples after it."""
        if self._parts:
            row = self._parts[-1][-1]
            row["tail_ns"] = tail_ns
            row["num_failed"] += num_failed

    def last(self, most: int | None = None) -> Rows:
        """Return the last rows, oldest first; a copy."""
        most = self._keep if most is None else min(most, self._keep)
        numbers = np.concatenate([_numbers(part) for part in (np.zeros(0, ROW), *self._parts)])
        numbers = np.ascontiguousarray(numbers[-most:])
        return numbers.view(ROW).reshape(len(numbers))


def rows_of(noted: Sequence[tuple[int, ...]], since_ns: int = _LONG_AGO) -> Rows:
    """Return batches as rows, and what follows from that; fields of samples are 0.

    Args:
        noted: A `TimingRow` of each, or of each the fields of `LIGHT`.
        since_ns: When the iterator that goes on asked for its first batch.
    """
    rows = np.zeros(len(noted), ROW)
    fields = _numbers(rows)[:, : len(TimingRow._fields)]
    if noted and len(noted[0]) < len(TimingRow._fields):
        fields[:] = TimingRow(pid=os.getpid())
        fields = fields[:, LIGHT]
    fields[:] = np.fromiter(chain.from_iterable(noted), np.int64).reshape(fields.shape)
    rows["wait_ns"] = rows["given_ns"] - rows["asked_ns"]
    rows["is_first"] = rows["consumer_ns"] == 0
    begins = np.where(rows["is_first"], rows["asked_ns"], since_ns)
    rows["since_ns"] = np.maximum.accumulate(begins)
    # Between two epochs workers have nothing to do.
    since_begun = np.maximum(rows["begun_ns"] - rows["since_ns"], 0)
    rows["is_measured"] = rows["ended_ns"] > 0
    rows["spare_ns"] = np.minimum(rows["idle_ns"], since_begun)
    busy = rows["ended_ns"] - rows["begun_ns"]
    blocked = busy - rows["cpu_ns"] - np.maximum(rows["starved_ns"], 0)
    rows["read_ns"] = np.minimum(np.maximum(blocked, 0), rows["fetch_ns"])
    return rows


def _numbers(rows: Rows) -> NDArray[np.int64]:
    """Return the same memory as a table, which numpy copies 30 times as fast."""
    return rows.view(np.int64).reshape(len(rows), len(_AT))


def window_of(rows: Rows) -> Rows:
    """Return those of the last rows that tell how things stand now."""
    if not len(rows):
        return rows
    others = np.flatnonzero(rows["num_workers"] != rows["num_workers"][-1])
    if len(others):
        rows = _settled(rows[others[-1] + 1 :])
    if not len(rows):
        return rows
    since = rows["given_ns"][-1] - _WINDOW_NS
    recent = int((rows["asked_ns"] >= since).sum())
    return rows[-max(recent, _WINDOW_BATCHES) :]


def _settled(rows: Rows) -> Rows:
    """Return what came after new workers got going: each has made a batch, and those ahead."""
    workers, firsts = np.unique(rows["worker_id"], return_index=True)
    if len(workers) < rows["num_workers"][-1]:
        return rows[:0]
    return rows[int(firsts.max()) + 1 + int(rows["lookahead"][-1]) :]


def without_pauses(rows: Rows) -> Rows:
    """Return rows but those before which the main process took a rare long step (validation)."""
    consumer_ns = rows["consumer_ns"]
    steps = consumer_ns[consumer_ns > 0]
    if not len(steps):
        return rows
    is_pause = consumer_ns > max(_PAUSE * np.median(steps), _SHORTEST_PAUSE_NS)
    is_rare = is_pause.sum() <= _RARE * len(steps)
    return rows.take(np.flatnonzero(~is_pause)) if is_rare else rows


def mean_ready(rows: Rows) -> float:
    """Return how many batches lay ready when one was asked for, but for the first of an epoch."""
    steady = rows["num_ready"][rows["is_first"] == 0]
    return float(steady.mean()) if len(steady) else 0.0
