# SPDX-License-Identifier: Apache-2.0
"""`RaggedArray`: a list of integer arrays of different lengths, held in two arrays."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["RaggedArray"]


class RaggedArray(Sequence["NDArray[np.int64]"]):
    """The classes of many samples that have several each: `ragged[i]` is those of sample i.

    Attributes:
        values: All of them in a row, int64, shape (total,). Not a copy where int64 was given.
        offsets: Sample i has `values[offsets[i] : offsets[i + 1]]`; int64, shape (samples + 1,).

    Concurrency:
        Any thread or process; workers share both arrays.

    Example:
        >>> classes = RaggedArray.of([[0, 2], [], [1]])
        >>> classes[0], len(classes), classes.values
        (array([0, 2]), 3, array([0, 2, 1]))
    """

    def __init__(self, values: ArrayLike, offsets: ArrayLike) -> None:
        """Keep both arrays.

        Raises:
            ValueError: the offsets do not begin with 0, go back, or do not end with `len(values)`;
                or the values are no integers, or beyond int64.
        """
        self.values = _integers(values)
        self.offsets = _integers(offsets)
        if (
            self.values.ndim != 1
            or self.offsets.ndim != 1
            or not len(self.offsets)
            or self.offsets[0] != 0
            or self.offsets[-1] != len(self.values)
            or bool(np.any(np.diff(self.offsets) < 0))
        ):
            raise ValueError(
                f"offsets rise from 0 to {len(self.values)}, the number of values; these do not."
            )

    @classmethod
    def of(cls, rows: Iterable[Iterable[int]]) -> RaggedArray:
        """Return the rows, packed.

        Raises:
            ValueError: a row holds something else than integers, or one beyond int64.
        """
        arrays = [
            _integers(row if isinstance(row, (np.ndarray, list)) else list(row)) for row in rows
        ]
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([len(array) for array in arrays], out=offsets[1:])
        values = np.concatenate(arrays) if arrays else np.empty(0, np.int64)
        return cls(values, offsets)

    @classmethod
    def joined(cls, parts: Sequence[RaggedArray]) -> RaggedArray:
        """Return the rows of all parts, one part after the other; a copy.

        Example:
            >>> a, b = RaggedArray.of([[7], []]), RaggedArray.of([[8, 9]])
            >>> [row.tolist() for row in RaggedArray.joined([a, b, a])]
            [[7], [], [8, 9], [7], []]
        """
        if not parts:
            return cls(np.empty(0, np.int64), np.zeros(1, np.int64))
        counts = np.concatenate([np.diff(part.offsets) for part in parts])
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        return cls(np.concatenate([part.values for part in parts]), offsets)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.offsets) - 1

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - an integer, or many
        """Return a view of one sample's values; a `RaggedArray` for a slice or index array.

        A slice without a step, too, is a view; indices and masks give a copy.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self._run(start, stop) if step == 1 else self._take(np.arange(start, stop, step))
        if isinstance(index, list) or (isinstance(index, np.ndarray) and index.ndim):
            return self._take(self._positions(np.asarray(index)))
        position = operator.index(index)
        if not -len(self) <= position < len(self):
            raise IndexError(f"index {position} is out of range for {len(self)} samples.")
        position %= len(self)
        return self.values[self.offsets[position] : self.offsets[position + 1]]

    def _run(self, start: int, stop: int) -> RaggedArray:
        offsets = self.offsets[start : max(start, stop) + 1]
        return RaggedArray(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def _positions(self, index: NDArray[Any]) -> NDArray[np.int64]:
        """Return an index array or a mask as positions from 0."""
        if index.dtype == np.bool_:
            if index.shape != (len(self),):
                raise IndexError(f"a mask of shape {index.shape} for {len(self)} samples.")
            return np.flatnonzero(index)
        if not index.size:  # an empty list is an array of floats
            return np.empty(0, np.int64)
        if index.ndim != 1 or index.dtype.kind not in "iu":
            raise IndexError(f"indices are a row of integers; got {index.dtype} {index.shape}.")
        smallest, largest = int(index.min()), int(index.max())
        if smallest < -len(self) or largest >= len(self):
            wrong = smallest if smallest < -len(self) else largest
            raise IndexError(f"index {wrong} is out of range for {len(self)} samples.")
        index = index.astype(np.int64, copy=False)
        return np.where(index < 0, index + len(self), index) if smallest < 0 else index

    def _take(self, positions: NDArray[np.int64]) -> RaggedArray:
        starts = self.offsets[positions]
        offsets = np.zeros(len(positions) + 1, np.int64)
        np.cumsum(self.offsets[positions + 1] - starts, out=offsets[1:])
        # Value k of the result lies as far behind the start of its row here as it does there.
        places = np.repeat(starts - offsets[:-1], np.diff(offsets))
        places += np.arange(offsets[-1])
        return RaggedArray(self.values[places], offsets)

    def __contains__(self, row: object) -> bool:
        """Refuse: whether it is a class or a row that is meant cannot be seen.

        Raises:
            TypeError: always; it says what to ask.
        """
        raise TypeError(
            "`in` on a RaggedArray could mean a class or a whole row: ask `5 in ragged.values` for "
            "a class, `[1, 5] in [row.tolist() for row in ragged]` for a row."
        )

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """Yield a view for each sample."""
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Return whether `other` holds the same values for the same samples."""
        if not isinstance(other, RaggedArray):
            return NotImplemented
        return np.array_equal(self.values, other.values) and np.array_equal(
            self.offsets, other.offsets
        )

    __hash__ = None  # type: ignore[assignment]  # it is mutable through its arrays

    def __repr__(self) -> str:
        """Return sizes, not the values."""
        return f"<RaggedArray of {len(self)} samples, {len(self.values)} values>"


def _integers(values: ArrayLike) -> NDArray[np.int64]:
    """Return integers as int64, without a copy where they are; what is empty has any type."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"a RaggedArray holds integers; got {array.dtype}.")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"a RaggedArray holds int64; got {array.max()}.")
    return array.astype(np.int64, copy=False)
