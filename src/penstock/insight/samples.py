# SPDX-License-Identifier: Apache-2.0
"""The samples that took longest, and how many are slow, by the times of a batch's samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.insight.stats import SlowSample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.insight.rows import Rows

_MOST_SLOWEST: Final = 20
SLOW_FACTOR: Final = 8  # times the median: beyond what sizes of images explain
SLOW_US: Final = 1000
_FEWEST_FOR_MEDIAN: Final = 32
_STARVED: Final = 10  # a batch that lacked a core for more than a tenth of its time


class SampleAccounts:
    """Costs of single samples.

    Concurrency:
        One thread at a time.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._typical_us = 0.0
        self._pids: dict[int, int] = {}  # of the workers there are
        self._slowest: dict[str, tuple[int, SlowSample]] = {}

    def fold(self, rows: Rows, indices: Sequence[object], sample_us: Sequence[bytes]) -> None:
        """Take note of the samples of some batches, in the fields of their rows as well.

        Times of a worker's first batch are left out, and those of batches for which no core was
        free: they tell nothing of the samples.
        """
        for number, (worker_id, pid) in enumerate(rows[["worker_id", "pid"]].tolist()):
            # Such a batch may have cost what its samples do not: opening files, importing.
            rows["is_workers_first"][number] = self._pids.get(worker_id) != pid
            self._pids[worker_id] = pid
        took_ns = rows["ended_ns"] - rows["begun_ns"]
        tells_nothing = (rows["is_workers_first"] > 0) | (_STARVED * rows["starved_ns"] > took_ns)
        timed = [b"" if no else us for no, us in zip(tells_nothing, sample_us, strict=True)]
        rows["timed"] = sizes = np.array([len(us) // 4 for us in timed], np.int64)
        took_us = np.frombuffer(b"".join(timed), np.uint32).astype(np.int64)
        if not len(took_us):
            return
        if len(took_us) >= _FEWEST_FOR_MEDIAN or not self._typical_us:
            self._typical_us = float(np.median(took_us))
        self._note_slowest(rows, indices, took_us)
        slow = took_us >= max(SLOW_FACTOR * self._typical_us, SLOW_US)
        sums = ("timed_us", took_us), ("slow", slow), ("slow_us", took_us * slow)
        for name, of_samples in sums:
            rows[name] = _sums(of_samples, sizes)

    def _note_slowest(
        self, rows: Rows, indices: Sequence[object], took_us: NDArray[np.int64]
    ) -> None:
        floor = 0
        if len(self._slowest) >= _MOST_SLOWEST:
            floor = min(us for us, _ in self._slowest.values())
        # Of a key that is slow again and again only the worst counts: so more are looked at.
        most = min(4 * _MOST_SLOWEST, len(took_us))
        ends, batches = np.cumsum(rows["timed"]), rows[["epoch", "step", "worker_id"]]
        for flat in np.argpartition(took_us, len(took_us) - most)[-most:].tolist():
            if (us := int(took_us[flat])) > floor:
                number = int(np.searchsorted(ends, flat, side="right"))
                size = int(rows["timed"][number])
                place = flat - int(ends[number]) + size
                index = _index_at(indices[number], place, size)
                epoch, step, worker_id = batches[number].item()
                key = f"{epoch} {step} {place}" if index is None else repr(index)
                if us > self._slowest.get(key, (0,))[0]:
                    sample = SlowSample(index, None, us / 1e6, epoch, step, worker_id)
                    self._slowest[key] = us, sample
        ranked = sorted(self._slowest.items(), key=lambda item: -item[1][0])
        self._slowest = dict(ranked[:_MOST_SLOWEST])

    def slowest(self) -> tuple[SlowSample, ...]:
        """Return the samples that took longest, each once, the longest first; without names."""
        return tuple(sample for _, sample in self._slowest.values())


def _sums(of_samples: NDArray[Any], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum over the samples of each batch; batches may be empty."""
    running = np.concatenate([[0], np.cumsum(of_samples, dtype=np.int64)])
    ends = np.cumsum(sizes)
    sums: NDArray[np.int64] = running[ends] - running[ends - sizes]
    return sums


def _index_at(indices: object, place: int, size: int) -> object:
    """Return the key of one sample of a batch; None if it is not known."""
    if indices is None:
        return None
    try:
        if isinstance(indices, (str, bytes)) or len(indices) != size:  # type: ignore[arg-type]
            return indices if size == 1 else None  # a batch of one sample is a key by itself
        index = indices[place]  # type: ignore[index]  # or it raises
        return index.item() if isinstance(index, np.generic) else index
    except Exception:  # keys of any kind
        return indices if size == 1 else None
