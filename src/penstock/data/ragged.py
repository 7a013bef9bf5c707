# SPDX-License-Identifier: Apache-2.0
"""`RaggedArray`: a list of integer arrays of different lengths, held in two arrays."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


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
        steps = np.diff(self.offsets)
        ends = self.offsets[[0, -1]].tolist() if len(self.offsets) else None
        if ends != [0, len(self.values)] or bool(np.any(steps < 0)):
            raise ValueError(f"offsets should rise from 0 to {len(self.values)} values.")

    @classmethod
    def of(cls, rows: Iterable[Iterable[int]]) -> RaggedArray:
        """Return the rows, packed.

        Raises:
            ValueError: a row holds something else than integers, or one beyond int64.
        """
        arrays = [_integers(row if isinstance(row, np.ndarray) else list(row)) for row in rows]
        return cls.from_counts(arrays, [len(array) for array in arrays])

    @classmethod
    def from_counts(cls, values: Sequence[NDArray[Any]], counts: ArrayLike) -> RaggedArray:
        """Return rows of so many values each, which are those of some arrays one after the other.

        Example:
            >>> RaggedArray.from_counts([np.array([7, 8]), np.array([9])], [1, 0, 2])[2]
            array([8, 9])
        """
        joined = np.concatenate(values) if len(values) else np.empty(0, np.int64)
        return RaggedArray(joined, np.append(0, np.cumsum(counts, dtype=np.int64)))

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.offsets) - 1

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - an integer, or many
        """Return a view of one sample's values; a `RaggedArray` for a slice or index array.

        A slice without a step, too, is a view; indices and masks give a copy.

        Raises:
            IndexError: a sample that is not there, or an array of something else than integers.
        """
        if isinstance(index, slice) and index.step in (None, 1):
            start, stop, _ = index.indices(len(self))
            offsets = self.offsets[start : max(start, stop) + 1]
            return RaggedArray(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])
        if not isinstance(index, (slice, list, np.ndarray)):
            if not -len(self) <= index < len(self):
                raise IndexError(f"index {index} is out of range for {len(self)} samples.")
            place = operator.index(index) % len(self)
            return self.values[self.offsets[place] : self.offsets[place + 1]]
        positions = np.arange(len(self))[index]
        first = self.offsets[positions]
        counts = self.offsets[positions + 1] - first
        # Value k of the result lies as far behind the start of its row here as it does there.
        places = np.repeat(first - (np.cumsum(counts) - counts), counts)
        places += np.arange(len(places))
        return RaggedArray.from_counts([self.values[places]], counts)

    def __eq__(self, other: object) -> bool:
        """Return whether `other` holds the same values for the same samples."""
        if not isinstance(other, RaggedArray):
            return NotImplemented
        return np.array_equal(self.values, other.values) and np.array_equal(
            self.offsets, other.offsets
        )

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
