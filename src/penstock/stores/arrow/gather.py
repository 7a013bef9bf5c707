# SPDX-License-Identifier: Apache-2.0
"""Elements of Arrow arrays in pieces, gathered by NumPy as if they were one array.

The array begins at the piece with the lowest address and ends with the one of the highest. What
lies between two pieces may be anything, or no memory at all, and is never read: each index is that
of an element.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no annotations

from penstock.errors import CollateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike, NDArray

__all__ = [
    "Bits",
    "BufferArray",
    "Elements",
    "Pieces",
    "count_missing",
    "missing_value",
    "validity_of",
]

_MOST_INDEXED: Final = 256  # elements of a row that are gathered one by one, not as a block


def count_missing(arrays: Sequence[pa.Array]) -> int:
    """Return how many elements of arrays are null, without those of lists in them."""
    return sum(array.null_count for array in arrays)


class Pieces:
    """Where each piece of a column begins, in rows."""

    def __init__(self, arrays: Sequence[pa.Array]) -> None:
        """Count the rows of each piece."""
        self._stops = np.cumsum([len(array) for array in arrays], dtype=np.int64)
        self._starts = np.concatenate(([np.int64(0)], self._stops[:-1]))

    def places(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return in which piece each row lies, and which one of it."""
        if len(self._stops) == 1:
            return np.zeros(len(rows), np.int64), rows
        pieces = np.searchsorted(self._stops, rows, side="right")
        return pieces, rows - self._starts[pieces]


class BufferArray:
    """Buffers with elements of one type, as one array.

    Attributes:
        array: Of all elements, and of whatever lies between the buffers. Read-only.
        bases: Where in it each buffer begins.
    """

    def __init__(
        self, buffers: Sequence[pa.Buffer | None], offsets: Sequence[int], dtype: DTypeLike
    ) -> None:
        """Look at buffers; they are kept, not copied.

        Args:
            buffers: None, or an empty one, for a piece that has no elements.
            offsets: Which element of each is the first that counts.
            dtype: Of the elements.
        """
        dtype = np.dtype(dtype)
        there = [buffer for buffer in buffers if buffer is not None and buffer.size]
        low = min((buffer.address for buffer in there), default=0)
        bases = [
            (buffer.address - low if buffer is not None and buffer.size else 0)
            for buffer in buffers
        ]
        if low % dtype.alignment or any(base % dtype.itemsize for base in bases):
            # Aligned by less than an element, which Arrow's own writers never do: copied. NumPy
            # itself would copy an array that is not aligned as a whole, gaps included.
            pieces = [b"" if buffer is None else buffer.to_pybytes() for buffer in buffers]
            pieces = [piece + bytes(-len(piece) % dtype.itemsize) for piece in pieces]
            bases = [0, *itertools.accumulate(map(len, pieces))][:-1]
            there = [pa.py_buffer(b"".join(pieces))]
            low = there[0].address
        high = max((buffer.address + buffer.size for buffer in there), default=0)
        size = (high - low) // dtype.itemsize * dtype.itemsize
        self._kept = there
        self.array: NDArray[Any] = (
            np.frombuffer(pa.foreign_buffer(low, size, there), dtype)
            if size
            else np.empty(0, dtype)
        )
        assert self.array.flags.aligned
        self.bases = np.array(bases, np.int64) // dtype.itemsize + np.array(offsets, np.int64)


class Bits:
    """Bitmaps of several pieces; a piece without one has all its bits set."""

    def __init__(self, buffers: Sequence[pa.Buffer | None], offsets: Sequence[int]) -> None:
        """Look at bitmaps; each begins at a bit of its own."""
        self._memory = BufferArray(buffers, [0] * len(buffers), np.uint8)
        self._bases = self._memory.bases * 8 + np.array(offsets, np.int64)
        self._are_set = np.array([buffer is None for buffer in buffers])

    def take(self, pieces: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return bits; `pieces` and `places` broadcast."""
        bits = self._bases[pieces] + places
        read = (self._memory.array.take(bits >> 3, mode="clip") >> (bits & 7)) & 1
        found: NDArray[np.bool_] = np.asarray(read, np.bool_) | self._are_set[pieces]
        return found


def validity_of(arrays: Sequence[pa.Array]) -> Bits | None:
    """Return bits that are not set where a value is null; None where none is."""
    if not count_missing(arrays):
        return None
    return Bits(
        [array.buffers()[0] if array.null_count else None for array in arrays],
        [array.offset for array in arrays],
    )


class Elements:
    """Numbers or booleans in pieces.

    Attributes:
        dtype: Of the elements, as NumPy has it.
        has_missing: Whether one is null.
    """

    def __init__(self, arrays: Sequence[pa.Array], kind: pa.DataType) -> None:
        """Look at the values of arrays of type `kind`; nothing is copied."""
        self.dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        buffers = [array.buffers()[1] if len(array) else None for array in arrays]
        offsets = [array.offset for array in arrays]
        self._bits = Bits(buffers, offsets) if self.dtype == np.bool_ else None
        self._memory = BufferArray(buffers, offsets, self.dtype) if self._bits is None else None
        self._validity = validity_of(arrays)
        self.has_missing = self._validity is not None

    def blocks(
        self,
        pieces: NDArray[np.int64],
        first: NDArray[np.int64],
        count: int,
        out: NDArray[Any],
    ) -> None:
        """Write `count` elements from `first[i]` of piece `pieces[i]` to row i of `out`.

        Args:
            pieces: Shape (rows,).
            first: Likewise.
            count: The same for all rows.
            out: C-contiguous, shape (rows, count).
        """
        if not out.size:
            return
        if self._bits is not None or self._validity is not None or count <= _MOST_INDEXED:
            places = first[:, None] + np.arange(count)
            self._each(pieces[:, None], places, out)
            return
        assert self._memory is not None
        starts = self._memory.bases[pieces] + first
        array = self._memory.array
        if not (starts % count).any():
            # Rows of one matrix, as in a table of one piece: copied once, row by row.
            rows = array[: len(array) // count * count].reshape(-1, count)
            _take(rows, starts // count, out, axis=0)
        else:
            windows = np.lib.stride_tricks.sliding_window_view(array, count)
            with np.errstate(over="ignore"):
                out[...] = windows[starts]

    def _each(
        self, pieces: NDArray[np.int64], places: NDArray[np.int64], out: NDArray[Any]
    ) -> None:
        if self._bits is not None:
            out[...] = self._bits.take(pieces, places)
        else:
            assert self._memory is not None
            _take(self._memory.array, self._memory.bases[pieces] + places, out)
        if self._validity is not None:
            missing = ~self._validity.take(pieces, places)
            if missing.any():
                if self.dtype.kind != "f":
                    row = int(np.argwhere(missing)[0][0])
                    raise missing_value(row)
                out[missing] = np.nan


def _take(
    array: NDArray[Any], indices: NDArray[np.int64], out: NDArray[Any], axis: int | None = None
) -> None:
    if out.dtype == array.dtype:
        # "clip" cannot happen here; "raise", the default, goes by a copy of `out`.
        np.take(array, indices, axis=axis, out=out, mode="clip")
    else:
        with np.errstate(over="ignore"):  # float64 beyond float32 is infinite, as elsewhere
            out[...] = np.take(array, indices, axis=axis, mode="clip")


def missing_value(row: int) -> CollateError:
    """Return the error for a row of a batch that lacks a value."""
    return CollateError(
        "{first} has no value (a null), and an array has no place for none. Fill it (dataset.map), "
        "leave out the row (dataset.filter) or the column (columns=), or give a collate_fn.",
        (row, row),
    )
