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
_DEEPEST: Final = 8  # subsets of subsets
_MOST_LISTED: Final = 1_000_000  # indices of a subset: 40 ms to convert, once
_CHUNK: Final = 128  # batches
_MOST_CHUNKS: Final = 64
SLOW_FACTOR: Final = 8  # times the median: beyond what sizes of images explain
SLOW_US: Final = 1000
_FEWEST_FOR_MEDIAN: Final = 32
_STARVED: Final = 10  # a batch that lacked a core for more than a tenth of its time


def _integers(indices: object) -> NDArray[np.int64] | None:
    """Return a batch's indices as int64 of shape (samples,); None where they are no integers."""
    try:
        array = np.atleast_1d(np.asarray(indices))
        is_known = array.ndim == 1 and array.dtype.kind in "iu"
        return array.astype(np.int64, copy=False) if is_known else None
    except Exception:  # keys of any kind: rows of different lengths, objects that refuse
        return None


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
        self._chunks: list[tuple[int, NDArray[np.float64]]] = []

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
        workers = zip(rows["worker_id"].tolist(), rows["pid"].tolist(), strict=True)
        rows["is_workers_first"] = [self._is_first_of_worker(*worker) for worker in workers]
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
        told = ("timed_us", took_us), ("slow", slow), ("slow_us", took_us * slow)
        for name, of_samples in told:
            rows[name] = _sums(of_samples, sizes)

    def _is_first_of_worker(self, worker_id: int, pid: int) -> bool:
        """Whether a batch may have cost what its samples do not: opening files, importing."""
        if self._pids.get(worker_id) == pid:
            return False
        self._pids[worker_id] = pid
        return True

    def _fold_parts(
        self,
        parts: PartMap,
        indices: Sequence[object],
        sizes: NDArray[np.int64],
        took_us: NDArray[np.int64],
    ) -> None:
        listed = [_integers(keys) for keys in indices]
        fits = [keys is not None and len(keys) == n for keys, n in zip(listed, sizes, strict=True)]
        timed = [keys for keys, fit in zip(listed, fits, strict=True) if fit and keys is not None]
        sums = np.zeros((2, len(parts.names)))
        if timed:
            try:
                numbers = parts.parts_of(np.concatenate(timed))
            except Exception:  # the dataset changed its length, or lies about it
                self._parts, self._chunks = None, []
                return
            sums[0] = np.bincount(numbers, minlength=sums.shape[1])
            sums[1] = np.bincount(numbers, took_us[np.repeat(fits, sizes)], sums.shape[1])
        if self._chunks and self._chunks[-1][0] + len(listed) <= _CHUNK:
            num_batches, before = self._chunks.pop()
            self._chunks.append((num_batches + len(listed), before + sums))
        else:
            self._chunks.append((len(listed), sums))
        del self._chunks[:-_MOST_CHUNKS]

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
        selections: list[tuple[Any, int, int]] = []
        for _ in range(_DEEPEST):
            parts = getattr(dataset, "datasets", None)
            ends = getattr(dataset, "cumulative_sizes", None)
            if parts is not None and ends is not None:
                if not 2 <= len(parts) <= _MOST_PARTS or len(parts) != len(ends):
                    return None
                names = [_name_of_part(number, part) for number, part in enumerate(parts)]
                found = cls(np.asarray(ends, np.int64), names)
                # Only now, as millions of them take their time.
                found._chosen = [_selection(*selection) for selection in selections]
                return found
            inner = dataset.dataset
            if (indices := getattr(dataset, "indices", None)) is not None:
                selections.append((indices, len(dataset), len(inner)))
            elif len(inner) != len(dataset):
                return None
            dataset = inner
        return None

    def parts_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the part that each index leads to.

        Raises:
            IndexError: an index leads out of the dataset.
        """
        for chosen in self._chosen:
            indices = chosen[indices]
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


def _selection(indices: Any, length: int, of_length: int) -> NDArray[np.int64]:  # noqa: ANN401
    """Return which samples a subset has, if that is what its indices say.

    Raises:
        ValueError: they may mean anything else, such as a mask, windows or names.
    """
    is_listed = isinstance(indices, (list, tuple, range)) and length <= _MOST_LISTED
    if not (is_listed or hasattr(indices, "__array__")) or len(indices) != length:
        raise ValueError("no list of indices")
    found = np.asarray(indices)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError("no indices of single samples")
    if length and not -of_length <= int(found.min()) <= int(found.max()) < of_length:
        raise ValueError("they lead out of the dataset")
    return found.astype(np.int64)
