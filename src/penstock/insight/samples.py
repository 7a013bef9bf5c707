# SPDX-License-Identifier: Apache-2.0
"""Cost of single samples, and of the parts of a dataset that is made of several.

All of it follows from the indices of a batch and the times of its samples. No sample is read, and
nothing that a dataset answers or refuses to answer reaches the training.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from penstock.insight.stats import SlowSample, SourceTiming

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from penstock.insight.rows import Rows

__all__ = ["PartMap", "SampleAccounts"]

_MOST_SLOWEST: Final = 20
_MOST_PARTS: Final = 1000
_DEEPEST: Final = 8  # wrappers of wrappers
_MOST_LISTED: Final = 1_000_000  # indices of a subset: 40 ms to convert, once
SLOW_FACTOR: Final = 8  # times the median: beyond what sizes of images explain
SLOW_US: Final = 1000
_FEWEST_FOR_MEDIAN: Final = 32
_STARVED: Final = 10  # a batch that lacked a core for more than a tenth of its time


def _integers(indices: object) -> NDArray[np.int64] | None:
    """Return a batch's indices as int64 of shape (samples,); None where they are no integers."""
    try:
        array = np.atleast_1d(np.asarray(indices))
    except Exception:  # keys of any kind: rows of different lengths, objects that refuse
        return None
    return array.astype(np.int64) if array.ndim == 1 and array.dtype.kind in "iu" else None


class SampleAccounts:
    """Costs of single samples.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, dataset: object = None) -> None:
        """Take the dataset, which is looked at with the first batches, or None."""
        self._dataset = dataset
        self._is_known = False
        self._parts: PartMap | None = None
        self._typical_us = 0.0
        self._pids: dict[int, int] = {}  # of the workers there are
        self._slowest: dict[Hashable, tuple[int, SlowSample]] = {}
        self._part_sums = np.zeros((2, 0))  # of each part: samples, and their microseconds

    def fold(self, rows: Rows, indices: Sequence[object], sample_us: Sequence[bytes]) -> None:
        """Take note of the samples of some batches, in the fields of their rows as well.

        Times of a worker's first batch are left out, and those of batches for which no core was
        free: they tell nothing of the samples.

        Args:
            rows: Of the batches.
            indices: Of each, the keys of its samples.
            sample_us: Of each, the times of its samples.
        """
        if not self._is_known:
            self._is_known = True
            self._parts = None if self._dataset is None else PartMap.of(self._dataset)
            if self._parts is not None:
                self._part_sums = np.zeros((2, len(self._parts.names)))
        for number, (worker_id, pid) in enumerate(rows[["worker_id", "pid"]].tolist()):
            # Such a batch may have cost what its samples do not: opening files, importing.
            rows["is_workers_first"][number] = self._pids.get(worker_id) != pid
            self._pids[worker_id] = pid
        took_ns = rows["ended_ns"] - rows["begun_ns"]
        tells_nothing = (rows["is_workers_first"] > 0) | (_STARVED * rows["starved_ns"] > took_ns)
        timed = [b"" if no else us for no, us in zip(tells_nothing, sample_us, strict=True)]
        rows["timed"] = sizes = np.array([len(us) // 4 for us in timed], np.int64)
        took_us = np.frombuffer(b"".join(timed), np.uint32).astype(np.int64)
        if self._parts is not None:
            self._fold_parts(self._parts, indices, sizes, took_us)
        if not len(took_us):
            return
        if len(took_us) >= _FEWEST_FOR_MEDIAN or not self._typical_us:
            self._typical_us = float(np.median(took_us))
        self._note_slowest(rows, indices, took_us)
        slow = took_us >= max(SLOW_FACTOR * self._typical_us, SLOW_US)
        sums = ("timed_us", took_us), ("slow", slow), ("slow_us", took_us * slow)
        for name, of_samples in sums:
            rows[name] = _sums(of_samples, sizes)

    def _fold_parts(
        self,
        parts: PartMap,
        indices: Sequence[object],
        sizes: NDArray[np.int64],
        took_us: NDArray[np.int64],
    ) -> None:
        keys = [_integers(of_batch) for of_batch in indices]
        fits = [k is not None and len(k) == size for k, size in zip(keys, sizes, strict=True)]
        timed = [k for k, fit in zip(keys, fits, strict=True) if fit and k is not None]
        if not timed:
            return
        try:
            numbers = parts.parts_of(np.concatenate(timed))
        except IndexError:  # the dataset changed its length, or lies about it
            self._parts = None
            return
        count = len(parts.names)
        self._part_sums[0] += np.bincount(numbers, minlength=count)
        self._part_sums[1] += np.bincount(numbers, took_us[np.repeat(fits, sizes)], count)

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
                key = (epoch, step, place) if index is None else _hashable(index)
                if us > self._slowest.get(key, (0,))[0]:
                    sample = SlowSample(index, None, us / 1e6, epoch, step, worker_id)
                    self._slowest[key] = us, sample
        ranked = sorted(self._slowest.items(), key=lambda item: -item[1][0])
        self._slowest = dict(ranked[:_MOST_SLOWEST])

    def slowest(self) -> tuple[SlowSample, ...]:
        """Return the samples that took longest, each once, the longest first; without names."""
        return tuple(sample for _, sample in self._slowest.values())

    def sources(self) -> tuple[SourceTiming, ...]:
        """Return what a sample of each part cost, the costliest first."""
        if self._parts is None:
            return ()
        found = [
            SourceTiming(name, int(num), us / num / 1e6)
            for name, num, us in zip(self._parts.names, *self._part_sums.tolist(), strict=True)
            if num
        ]
        return tuple(sorted(found, key=lambda source: -source.mean_s))


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


def _hashable(index: object) -> Hashable:
    return index if isinstance(index, (int, str, type(None))) else repr(index)


class PartMap:
    """Which part of a dataset made of several an index leads to.

    Known are `ConcatDataset`, torch's and ours, or whatever else has `datasets` and
    `cumulative_sizes`; also below datasets that wrap another of the same length.
    """

    def __init__(self, ends: NDArray[np.int64], names: Sequence[str]) -> None:
        """Take the index at which each part ends, and what the parts are called."""
        self._ends = ends
        self.names = tuple(names)

    @classmethod
    def of(cls, dataset: Any) -> Self | None:  # noqa: ANN401 - any dataset
        """Return the map of a dataset; None where it is not made of parts, or does not say.

        Example:
            >>> from penstock.data import ConcatDataset
            >>> parts = PartMap.of(ConcatDataset([[0, 1, 2], range(3)]))
            >>> parts.names, parts.parts_of(np.array([5, 0]))
            (('datasets[0] (list)', 'datasets[1] (range)'), array([1, 0]))
        """
        try:
            for _ in range(_DEEPEST):
                if hasattr(dataset, "datasets") and hasattr(dataset, "cumulative_sizes"):
                    parts, ends = dataset.datasets, np.asarray(dataset.cumulative_sizes, np.int64)
                    if not 2 <= len(parts) <= _MOST_PARTS or len(parts) != len(ends):
                        return None
                    return cls(ends, [_name_of_part(*part) for part in enumerate(parts)])
                if len(dataset.dataset) != len(dataset) or hasattr(dataset, "indices"):
                    return None
                dataset = dataset.dataset
        except Exception:  # a dataset may answer anything; then its parts are not known
            return None
        return None

    def parts_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the part that each index leads to.

        Raises:
            IndexError: an index leads out of the dataset.
        """
        total = int(self._ends[-1])
        indices = np.where(indices < 0, indices + total, indices)
        if len(indices) and int(indices.max()) >= total:
            raise IndexError(f"an index is beyond the {total} samples of the parts")
        return np.searchsorted(self._ends, indices, side="right")


def _name_of_part(number: int, part: object) -> str:
    root = getattr(part, "root", None)
    where = ""
    # Nothing with a scheme: an address may hold a password.
    if isinstance(root, (str, os.PathLike)) and "://" not in str(root):
        where = f", {os.fspath(root)!s:.80}"
    return f"datasets[{number}] ({type(part).__name__}{where})"
