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

    from penstock.insight.rows import Rows

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
            self._look_at_dataset()
        if self._shown is not None and _are_too_quick(rows):
            self._shown = None
        workers = zip(rows["worker_id"].tolist(), rows["pid"].tolist(), strict=True)
        rows["is_workers_first"] = [self._is_first_of_worker(*worker) for worker in workers]
        took_ns = rows["ended_ns"] - rows["begun_ns"]
        tells_nothing = (rows["is_workers_first"] > 0) | (_STARVED * rows["starved_ns"] > took_ns)
        timed = [b"" if no else us for no, us in zip(tells_nothing, sample_us, strict=True)]
        rows["timed"] = sizes = np.array([len(us) // 4 for us in timed], np.int64)
        took_us = np.frombuffer(b"".join(timed), np.uint32).astype(np.int64)
        if self._parts is not None or self._shown is not None:
            self._fold_indices(indices, sizes, took_us)
        if not len(took_us):
            return
        if len(took_us) >= _FEWEST_FOR_MEDIAN or not self._typical_us:
            self._typical_us = float(np.median(took_us))
        self._note_slowest(rows, indices, took_us)
        slow = took_us >= max(SLOW_FACTOR * self._typical_us, SLOW_US)
        told = ("timed_us", took_us), ("slow", slow), ("slow_us", took_us * slow)
        for name, of_samples in told:
            rows[name] = _sums(of_samples, sizes)

    def _is_first_of_worker(self, worker_id: int, pid: int) -> bool:
        """Whether a batch may have cost what its samples do not: opening files, importing."""
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
        self, indices: Sequence[object], sizes: NDArray[np.int64], took_us: NDArray[np.int64]
    ) -> None:
        listed = [integer_indices(keys) for keys in indices]
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
        if self._chunks and self._chunks[-1][0] + len(listed) <= _CHUNK:
            num_batches, before = self._chunks.pop()
            self._chunks.append((num_batches + len(listed), before + sums))
        else:
            self._chunks.append((len(listed), sums))
        del self._chunks[:-_MOST_CHUNKS]

    def _count(self, indices: NDArray[np.int64]) -> None:
        shown = self._shown
        assert shown is not None
        if len(indices) and (indices.min() < 0 or indices.max() >= len(shown)):
            indices = np.where(indices < 0, indices + len(shown), indices)
            indices = indices[(indices >= 0) & (indices < len(shown))]
        np.add.at(shown, indices, np.uint32(1))  # 30 times as fast as with another type

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


def _are_too_quick(rows: Rows) -> bool:
    """Return whether counting samples would take some per cent of the time."""
    num = int(rows["num_samples"].sum())
    took_ns = int(rows["given_ns"][-1] - rows["asked_ns"][0] + rows["consumer_ns"][0])
    return num >= _FEWEST_FOR_RATE and num * _QUICKEST_COUNTED_NS > took_ns


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
