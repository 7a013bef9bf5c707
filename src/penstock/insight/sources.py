# SPDX-License-Identifier: Apache-2.0
"""Cost of samples and of the parts of a dataset, and how often each sample was shown.

All of it is told by the indices of a batch and the times of its samples. No sample is read, and
nothing that a dataset answers or refuses to answer reaches the training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.insight.parts import PartMap
from penstock.insight.stats import SlowSample, SourceTiming

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from penstock.engine.accounts import BatchRecord

__all__ = ["SampleAccounts", "integer_indices"]

_MOST_SLOWEST: Final = 20
_MOST_COUNTED: Final = 10_000_000  # samples: 4 bytes for each are held, 40 MB
_QUICKEST_COUNTED_NS: Final = 1000  # a sample: counting one takes 20 to 40 ns
_FEWEST_FOR_RATE: Final = 8192
_CHUNK: Final = 128  # batches
_MOST_CHUNKS: Final = 64
SLOW_FACTOR: Final = 8  # times the median: beyond what sizes of images explain
SLOW_US: Final = 1000
_FEWEST_FOR_MEDIAN: Final = 32
_STARVED: Final = 10  # a batch that lacked a core for more than a tenth of its time


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
        self._pids: dict[int, int] = {}  # of the workers there are
        self._slowest: dict[Hashable, tuple[int, SlowSample]] = {}
        self._chunks: list[tuple[int, NDArray[np.float64]]] = []

    @property
    def shown(self) -> NDArray[np.uint32] | None:
        """How often each sample of a map-style dataset was asked for; None where not counted.

        Not counted are those of more than 10,000,000, and more than 1,000,000 a second.
        """
        return self._shown

    def fold(self, records: Sequence[BatchRecord]) -> NDArray[np.int64]:
        """Take note of the samples of some batches.

        Times of a worker's first batch are left out, and those of batches for which no core was
        free: they tell nothing of the samples.

        Returns:
            Shape (batches, 5), int64: whether it is its worker's first, samples timed, what they
            took in microseconds, slow ones among them, what these took.
        """
        if not self._is_known:
            self._look_at_dataset()
        if self._shown is not None and _are_too_quick(records):
            self._shown = None
        first = [self._is_first_of_worker(record) for record in records]
        timed = [
            b"" if is_first or _was_starved(record) else record.times.sample_us
            for is_first, record in zip(first, records, strict=True)
        ]
        sizes = np.array([len(of_batch) // 4 for of_batch in timed], np.int64)
        took_us = np.frombuffer(b"".join(timed), np.uint32).astype(np.int64)
        if self._parts is not None or self._shown is not None:
            self._fold_indices(records, sizes, took_us)
        found = np.zeros((len(records), 5), np.int64)
        found[:, 0] = first
        if not len(took_us):
            return found
        if len(took_us) >= _FEWEST_FOR_MEDIAN or not self._typical_us:
            self._typical_us = float(np.median(took_us))
        self._note_slowest(records, sizes, took_us)
        slow = took_us >= max(SLOW_FACTOR * self._typical_us, SLOW_US)
        found[:, 1] = sizes
        for column, of_samples in enumerate((took_us, slow, took_us * slow), 2):
            found[:, column] = _sums(of_samples, sizes)
        return found

    def _is_first_of_worker(self, record: BatchRecord) -> bool:
        """Whether a batch may have cost what its samples do not: opening files, importing."""
        worker_id, pid = record.worker_id, record.pid
        if self._pids.get(worker_id) == pid:
            return False
        self._pids[worker_id] = pid
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
            except Exception:  # the dataset changed its length, or lies about it
                self._parts, self._chunks = None, []
                return
            cost_us = took_us[np.repeat(fits, sizes)]
            sums[0] = np.bincount(parts, minlength=sums.shape[1])
            sums[1] = np.bincount(parts, cost_us, sums.shape[1])
        if self._chunks and self._chunks[-1][0] + len(records) <= _CHUNK:
            num_batches, before = self._chunks.pop()
            self._chunks.append((num_batches + len(records), before + sums))
        else:
            self._chunks.append((len(records), sums))
        del self._chunks[:-_MOST_CHUNKS]

    def _count(self, indices: NDArray[np.int64]) -> None:
        shown = self._shown
        assert shown is not None
        if len(indices) and (indices.min() < 0 or indices.max() >= len(shown)):
            indices = np.where(indices < 0, indices + len(shown), indices)
            indices = indices[(indices >= 0) & (indices < len(shown))]
        np.add.at(shown, indices, np.uint32(1))  # 30 times as fast as with another type

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

    def sources(self, batches: int) -> tuple[SourceTiming, ...]:
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
            SourceTiming(name, int(num), us / num / 1e6)
            for name, num, us in zip(self._parts.names, *sums.tolist(), strict=True)
            if num
        ]
        return tuple(sorted(found, key=lambda source: -source.mean_s))


def _are_too_quick(records: Sequence[BatchRecord]) -> bool:
    """Return whether counting samples would take some per cent of the time."""
    num = sum(record.num_samples for record in records)
    took_ns = records[-1].given_ns - records[0].asked_ns + records[0].consumer_ns
    return num >= _FEWEST_FOR_RATE and num * _QUICKEST_COUNTED_NS > took_ns


def _was_starved(record: BatchRecord) -> bool:
    times = record.times
    return _STARVED * (times.starved_ns or 0) > times.ended_ns - times.begun_ns


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
