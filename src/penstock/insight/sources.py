# SPDX-License-Identifier: Apache-2.0
"""Which samples cost much, which part of a dataset they come from, and how often each was shown.

All of it is told by the indices of a batch and the times of its samples. No sample is read, and
nothing that a dataset answers or refuses to answer reaches the training.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from penstock.insight.stats import SlowSample, Source

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from penstock.engine.accounts import BatchRecord

__all__ = ["PartMap", "SampleAccounts", "integer_indices"]

_MOST_SLOWEST: Final = 20
_MOST_COUNTED: Final = 10_000_000  # samples: 4 bytes for each are held, 40 MB
_MOST_PARTS: Final = 1000
_DEEPEST: Final = 8  # subsets of subsets
_MOST_CHUNKS: Final = 64
SLOW_FACTOR: Final = 8  # times the median: beyond what sizes of images explain
SLOW_US: Final = 1000
_FEWEST_FOR_MEDIAN: Final = 32


class PartMap:
    """Which part of a dataset made of several an index leads to.

    Known are `ConcatDataset`, torch's and ours, or whatever else has `datasets` and
    `cumulative_sizes`; also below `Subset`, and below datasets that wrap another of the same
    length.
    """

    def __init__(self, ends: NDArray[np.int64], names: Sequence[str]) -> None:
        """Take the index at which each part ends, and what the parts are called."""
        self._ends = ends
        self._chosen: list[NDArray[np.int64]] = []  # indices of subsets, the outermost first
        self.names = tuple(names)

    @classmethod
    def of(cls, dataset: Any) -> Self | None:  # noqa: ANN401 - any dataset
        """Return the map of a dataset; None where it is not made of parts, or does not say.

        Example:
            >>> from penstock.data import ConcatDataset, Subset
            >>> whole = ConcatDataset([[0, 1, 2], range(3)])
            >>> parts = PartMap.of(Subset(whole, [5, 0]))
            >>> parts.names, parts.parts_of(np.array([0, 1]))
            (('datasets[0] (list)', 'datasets[1] (range)'), array([1, 0]))
        """
        try:
            return cls._of(dataset)
        except Exception:  # a dataset may answer anything; then its parts are not known
            return None

    @classmethod
    def _of(cls, dataset: Any) -> Self | None:  # noqa: ANN401
        chosen: list[NDArray[np.int64]] = []
        for _ in range(_DEEPEST):
            parts = getattr(dataset, "datasets", None)
            ends = getattr(dataset, "cumulative_sizes", None)
            if parts is not None and ends is not None:
                if not 2 <= len(parts) <= _MOST_PARTS or len(parts) != len(ends):
                    return None
                names = [_name_of_part(number, part) for number, part in enumerate(parts)]
                found = cls(np.asarray(ends, np.int64), names)
                found._chosen = chosen
                return found
            inner = getattr(dataset, "dataset", None)
            if inner is None:
                return None
            if (indices := getattr(dataset, "indices", None)) is not None:
                chosen.append(np.asarray(indices, np.int64))
            elif len(inner) != len(dataset):
                return None
            dataset = inner
        return None

    def parts_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the part that each index leads to; a fresh array.

        Raises:
            IndexError: an index leads out of the dataset.
        """
        for chosen in self._chosen:
            indices = chosen[indices]
        total = int(self._ends[-1])
        indices = np.where(indices < 0, indices + total, indices)
        parts = np.searchsorted(self._ends, indices, side="right")
        if len(parts) and int(parts.max()) >= len(self.names):
            raise IndexError(f"an index is beyond the {total} samples of the parts")
        return parts


def _name_of_part(number: int, part: object) -> str:
    root = getattr(part, "root", None)
    where = ""
    # Nothing with a scheme: an address may hold a password.
    if isinstance(root, (str, os.PathLike)) and "://" not in str(root):
        where = f", {os.fspath(root)!s:.80}"
    return f"datasets[{number}] ({type(part).__name__}{where})"


def integer_indices(indices: object) -> NDArray[np.int64] | None:
    """Return a batch's indices as int64 of shape (samples,); None where they are no integers.

    Example:
        >>> integer_indices([3, 1]), integer_indices(7), integer_indices(["a", "b"])
        (array([3, 1]), array([7]), None)
    """
    if indices is None:
        return None
    try:
        array = np.atleast_1d(np.asarray(indices))
        if array.ndim != 1 or array.dtype.kind not in "iu":
            return None
        return array.astype(np.int64, copy=False)
    except Exception:  # keys of any kind: rows of different lengths, objects that refuse
        return None


class SampleAccounts:
    """Costs and counts of single samples.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, dataset: object = None) -> None:
        """Take the dataset, which is looked at with the first batches, or None."""
        self._dataset = dataset
        self._is_known = False
        self._parts: PartMap | None = None
        self._shown: NDArray[np.uint32] | None = None
        self._typical_us = 0.0
        self._workers: set[tuple[int, int]] = set()
        self._slowest: dict[Hashable, tuple[int, SlowSample]] = {}
        self._chunks: list[tuple[int, NDArray[np.float64]]] = []

    @property
    def shown(self) -> NDArray[np.uint32] | None:
        """How often each sample of a map-style dataset was asked for; None where not counted."""
        return self._shown

    def fold(self, records: Sequence[BatchRecord]) -> NDArray[np.int64]:
        """Take note of the samples of some batches.

        Times of a worker's first batch are left out.

        Returns:
            Shape (batches, 4), int64: samples timed, what they took in microseconds, slow ones
            among them, what these took.
        """
        if not self._is_known:
            self._look_at_dataset()
        timed = [b"" if self._is_first_of_worker(r) else r.times.sample_us for r in records]
        sizes = np.array([len(of_batch) // 4 for of_batch in timed], np.int64)
        took_us = np.frombuffer(b"".join(timed), np.uint32).astype(np.int64)
        if self._parts is not None or self._shown is not None:
            self._fold_indices(records, sizes, took_us)
        if not len(took_us):
            return np.zeros((len(records), 4), np.int64)
        if len(took_us) >= _FEWEST_FOR_MEDIAN or not self._typical_us:
            self._typical_us = float(np.median(took_us))
        self._note_slowest(records, sizes, took_us)
        slow = took_us >= max(SLOW_FACTOR * self._typical_us, SLOW_US)
        sums = [_sums(of_samples, sizes) for of_samples in (took_us, slow, took_us * slow)]
        return np.stack([sizes, *sums], axis=1)

    def _is_first_of_worker(self, record: BatchRecord) -> bool:
        """Whether a batch may have cost what its samples do not: opening files, importing."""
        worker = record.pid, record.worker_id
        if worker in self._workers:
            return False
        self._workers.add(worker)
        return True

    def _look_at_dataset(self) -> None:
        self._is_known = True
        if self._dataset is None:
            return
        self._parts = PartMap.of(self._dataset)
        try:
            length = len(self._dataset)  # type: ignore[arg-type]  # or it raises
            if hasattr(self._dataset, "__getitem__") and 0 < length <= _MOST_COUNTED:
                self._shown = np.zeros(length, np.uint32)
        except Exception:  # of no length, or one that it does not tell
            self._shown = None

    def _fold_indices(
        self, records: Sequence[BatchRecord], sizes: NDArray[np.int64], took_us: NDArray[np.int64]
    ) -> None:
        listed = [integer_indices(r.indices) for r in records]
        known = [array for array in listed if array is not None]
        if self._shown is not None and known:
            self._count(np.concatenate(known))
        if self._parts is None:
            return
        fits = np.array(
            [array is not None and len(array) == n for array, n in zip(listed, sizes, strict=True)]
        )
        timed = [
            array for array, fit in zip(listed, fits, strict=True) if fit and array is not None
        ]
        sums = np.zeros((2, len(self._parts.names)))
        if timed:
            try:
                parts = self._parts.parts_of(np.concatenate(timed))
            except IndexError:  # the dataset changed its length, or lies about it
                self._parts, self._chunks = None, []
                return
            cost_us = took_us[np.repeat(fits, sizes)]
            sums[0] = np.bincount(parts, minlength=sums.shape[1])
            sums[1] = np.bincount(parts, cost_us, sums.shape[1])
        self._chunks.append((len(records), sums))
        del self._chunks[:-_MOST_CHUNKS]

    def _count(self, indices: NDArray[np.int64]) -> None:
        shown = self._shown
        assert shown is not None
        indices = np.where(indices < 0, indices + len(shown), indices)
        there = (indices >= 0) & (indices < len(shown))
        np.add.at(shown, indices[there], np.uint32(1))  # 30 times as fast as with another type

    def _note_slowest(
        self,
        records: Sequence[BatchRecord],
        sizes: NDArray[np.int64],
        took_us: NDArray[np.int64],
    ) -> None:
        floor = 0
        if len(self._slowest) >= _MOST_SLOWEST:
            floor = min(us for us, _ in self._slowest.values())
        # Of a key that is slow again and again only the worst counts: so more are looked at.
        most = min(4 * _MOST_SLOWEST, len(took_us))
        ends = np.cumsum(sizes)
        for flat in np.argpartition(took_us, len(took_us) - most)[-most:].tolist():
            if (us := int(took_us[flat])) > floor:
                number = int(np.searchsorted(ends, flat, side="right"))
                place = flat - int(ends[number] - sizes[number])
                self._note_slow(records[number], place, int(sizes[number]), us)
        ranked = sorted(self._slowest.items(), key=lambda item: -item[1][0])
        self._slowest = dict(ranked[:_MOST_SLOWEST])

    def _note_slow(self, record: BatchRecord, place: int, size: int, us: int) -> None:
        index = _index_at(record.indices, place, size)
        key: Hashable = (record.epoch, record.step, place) if index is None else _hashable(index)
        known = self._slowest.get(key)
        if known is None or known[0] < us:
            sample = SlowSample(index, None, us / 1e6, record.epoch, record.step, record.worker_id)
            self._slowest[key] = us, sample

    def slowest(self) -> tuple[SlowSample, ...]:
        """Return the samples that took longest, each once, the longest first; without names."""
        return tuple(sample for _, sample in self._slowest.values())

    def sources(self, batches: int) -> tuple[Source, ...]:
        """Return what a sample of each part cost in the last batches, the costliest first."""
        if self._parts is None:
            return ()
        sums = np.zeros((2, len(self._parts.names)))
        for num_batches, of_chunk in reversed(self._chunks):
            if batches <= 0:
                break
            sums += of_chunk
            batches -= num_batches
        found = [
            Source(name, int(num), us / num / 1e6)
            for name, num, us in zip(self._parts.names, *sums.tolist(), strict=True)
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
    """Return the key of one sample of a batch; None if it cannot be told."""
    if indices is None:
        return None
    try:
        if isinstance(indices, (str, bytes)) or not hasattr(indices, "__len__"):
            return indices if size == 1 else None
        if len(indices) != size:
            return indices if isinstance(indices, tuple) and size == 1 else None
        index = indices[place]  # type: ignore[index]  # or it raises
        return index.item() if isinstance(index, np.generic) else index
    except Exception:  # keys of any kind
        return None


def _hashable(index: object) -> Hashable:
    try:
        hash(index)
    except TypeError:
        return repr(index)
    return index
