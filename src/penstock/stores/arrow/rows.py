# SPDX-License-Identifier: Apache-2.0
"""Rows of an Arrow table by number, gathered as whole columns.

`pyarrow.Table.take` joins all pieces of a table before it takes anything, which for a file mapped
into memory reads the whole file; taking row by row costs Python for each. Here NumPy gathers out of
all pieces at once, as if they were one array, and into the slot where it can. That array begins at
the piece with the lowest address and ends with the one of the highest. What lies between two pieces
may be anything, or no memory at all, and is never read: each index is that of an element.

What a value becomes, in a row:

    numbers, booleans          a NumPy scalar of the column's type; NaN for a missing float
    lists of those             an array of the list's type, of its own
    lists of a fixed size      likewise, also of several dimensions
    text, bytes                `str`, `bytes`
    structs                    a dict
    anything else              what pyarrow makes of it
    missing (but floats)       None

and a batch is what the default collate makes of the rows, if no value is missing. A missing float
is NaN in a batch too, and a missing text None in its list, also where it comes first; any other
missing value is an error that names its row, where collating makes an array of objects or fails.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no annotations

from penstock.collate import check_shapes, default_collate
from penstock.errors import CollateError
from penstock.opening import read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import DTypeLike, NDArray

    from penstock.data.dataset import Allocator

__all__ = ["Column", "Images", "Lists", "Numbers", "Texts", "column_of", "rows_of"]

_MOST_INDEXED: Final = 256  # elements of a row that are gathered one by one, not as a block
# On average per row. A byte costs an index of eight; above this, a slice per row is cheaper.
_MOST_GATHERED_BYTES: Final = 100


class Column(Protocol):
    """One column of a table.

    Attributes:
        num_missing: How many of its values are null.
    """

    num_missing: int

    def take(self, rows: NDArray[np.int64], alloc: Allocator) -> Any:  # noqa: ANN401
        """Return rows, 0 <= row < length, at least one, as a batch's column.

        Raises:
            CollateError: a row lacks a value that a batch needs, or shapes differ.
            TypeError: values that cannot be collated.
        """

    def value(self, row: int) -> Any:  # noqa: ANN401
        """Return one row's value; None for a missing one."""


def rows_of(
    columns: dict[str, Column], rows: NDArray[np.int64], alloc: Allocator
) -> dict[str, Any]:
    """Return rows as a batch.

    Raises:
        CollateError: as `Column.take`, with a note that names the column.
        TypeError: likewise.
    """
    batch = {}
    for name, column in columns.items():
        try:
            batch[name] = column.take(rows, alloc)
        except (CollateError, TypeError) as error:
            error.add_note(f"in the column {name!r}")
            raise
    return batch


def column_of(column: pa.ChunkedArray) -> Column:
    """Return a column as it can be read best."""
    found = _found(list(column.chunks), column.type)
    return _ValueColumn(column) if found is None else found


def _found(arrays: list[pa.Array], kind: pa.DataType) -> Column | None:
    if _is_number(kind):
        return Numbers(arrays, kind)
    if (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    ):
        return Texts(arrays, kind)
    if pa.types.is_struct(kind) and not any(array.null_count for array in arrays):
        fields = {
            kind.field(number).name: _found(
                [array.field(number) for array in arrays], kind.field(number).type
            )
            for number in range(kind.num_fields)
        }
        members = {name: field for name, field in fields.items() if field is not None}
        return _Structs(members) if len(members) == kind.num_fields else None
    return Lists.found(arrays, kind)


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    )


class Numbers:
    """Numbers or booleans.

    Attributes:
        num_missing: How many are null.
        dtype: Of the array of a batch.
    """

    def __init__(self, arrays: Sequence[pa.Array], kind: pa.DataType) -> None:
        """Look at the pieces of a column of type `kind`."""
        self.num_missing = _count_missing(arrays)
        self._pieces = _Pieces(arrays)
        self._elements = _Elements(arrays, kind)
        self.dtype = self._elements.dtype

    def take(
        self, rows: NDArray[np.int64], alloc: Allocator, dtype: DTypeLike | None = None
    ) -> NDArray[Any]:
        """Return an array, shape (rows,), of the column's type or another."""
        out = alloc((len(rows),), self.dtype if dtype is None else dtype)
        pieces, places = self._pieces.places(rows)
        self._elements.blocks(pieces, places, 1, out[:, None])
        return out

    def value(self, row: int) -> Any:  # noqa: ANN401
        """Return a NumPy scalar, or None."""
        try:
            return self.take(np.array([row]), np.empty)[0]
        except CollateError:
            return None


class Lists:
    """Lists of numbers, of any or of a fixed size, and arrays of several dimensions.

    Attributes:
        num_missing: How many are null.
        dtype: Of the array of a batch.
        num_dims: Of the array of a row.
        has_missing_elements: Whether an element of a list is null.
    """

    def __init__(
        self,
        arrays: Sequence[pa.Array],
        levels: list[_Level],
        elements: _Elements,
        inner: tuple[int, ...],
    ) -> None:
        """See `found`."""
        self.num_missing = _count_missing(arrays)
        self._pieces = _Pieces(arrays)
        self._levels = levels
        self._validity = _validity_of(arrays)
        self._elements = elements
        self._inner = inner
        self.dtype = elements.dtype
        self.num_dims = 1 + len(inner)
        self.has_missing_elements = elements.has_missing

    @classmethod
    def found(cls, arrays: list[pa.Array], kind: pa.DataType) -> Lists | None:
        """Return the column, or None if it is none of numbers, or lists lie in lists."""
        given, shape = arrays, None
        if isinstance(kind, pa.BaseExtensionType):
            shape = getattr(kind, "shape", None)  # that of datasets' Array2D to Array5D
            if shape is None:
                return None
            arrays, kind = [array.storage for array in arrays], kind.storage_type
        levels: list[_Level] = []
        sizes: list[int | None] = []
        while not _is_number(kind):
            is_fixed = pa.types.is_fixed_size_list(kind)
            if not (is_fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind)):
                return None
            if levels and _count_missing(arrays):
                return None
            levels.append(_Fixed(arrays, kind) if is_fixed else _Offsets(arrays, kind))
            sizes.append(kind.list_size if is_fixed else None)
            arrays, kind = [array.values for array in arrays], kind.value_type
        inner = tuple(sizes[1:] if shape is None else shape[1:])
        if not levels or None in inner:
            return None
        elements = _Elements(arrays, kind)
        if _count_missing(arrays) and elements.dtype.kind != "f":
            return None
        return cls(given, levels, elements, tuple(size for size in inner if size is not None))

    def take(
        self, rows: NDArray[np.int64], alloc: Allocator, dtype: DTypeLike | None = None
    ) -> NDArray[Any]:
        """Return an array, shape (rows, …), of the column's type or another."""
        pieces, first, count = self._placed(rows)
        size = math.prod(self._inner)
        lengths = count // size if size else np.zeros_like(count)
        if (count != count[0]).any():
            check_shapes([(length, *self._inner) for length in lengths.tolist()])
        shape = (len(rows), int(lengths[0]), *self._inner)
        out = alloc(shape, self.dtype if dtype is None else dtype)
        self._elements.blocks(pieces, first, int(count[0]), out.reshape(len(rows), -1))
        return out

    def lengths(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many elements each of these rows has."""
        return self._placed(rows)[2]

    def _placed(
        self, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return in which piece the elements of each row lie, from which on, and how many."""
        pieces, places = self._pieces.places(rows)
        if self._validity is not None:
            missing = np.flatnonzero(~self._validity.take(pieces, places))
            if len(missing):
                raise _missing_value(int(missing[0]))
        first, stop = places, places + 1
        for level in self._levels:
            first, stop = level.inside(pieces, first), level.inside(pieces, stop)
        return pieces, first, stop - first

    def value(self, row: int) -> Any:  # noqa: ANN401
        """Return an array of its own, or None."""
        if self._validity is not None:
            pieces, places = self._pieces.places(np.array([row]))
            if not self._validity.take(pieces, places)[0]:
                return None
        return self.take(np.array([row]), np.empty)[0]


class _Level(Protocol):
    def inside(self, pieces: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which of the lists' values are the first ones of lists."""


class _Fixed:
    def __init__(self, arrays: Sequence[pa.Array], kind: pa.DataType) -> None:
        self._size = kind.list_size
        self._offsets = np.array([array.offset for array in arrays], np.int64)

    def inside(self, pieces: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        firsts: NDArray[np.int64] = (self._offsets[pieces] + places) * self._size
        return firsts


class _Offsets:
    def __init__(self, arrays: Sequence[pa.Array], kind: pa.DataType) -> None:
        is_large = (
            pa.types.is_large_list(kind)
            or pa.types.is_large_string(kind)
            or pa.types.is_large_binary(kind)
        )
        self._memory = _BufferArray(
            [array.buffers()[1] if len(array) else None for array in arrays],
            [array.offset for array in arrays],
            np.int64 if is_large else np.int32,
        )
        self._are_empty = np.array([not len(array) for array in arrays])

    def inside(self, pieces: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(self._memory.array):
            return np.zeros_like(places)
        # Lists of lists may be all empty in a piece, which then has no offsets.
        are_empty = self._are_empty[pieces]
        at = np.where(are_empty, 0, self._memory.bases[pieces] + places)
        return np.where(are_empty, 0, self._memory.array.take(at, mode="clip").astype(np.int64))


class Texts:
    """Text or bytes.

    Attributes:
        num_missing: How many are null; a batch has None for them.
    """

    def __init__(self, arrays: Sequence[pa.Array], kind: pa.DataType) -> None:
        """Look at the pieces of a column of type `kind`."""
        self.num_missing = _count_missing(arrays)
        self._is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        self._pieces = _Pieces(arrays)
        self._offsets = _Offsets(arrays, kind)
        self._validity = _validity_of(arrays)
        self._memory = _BufferArray(
            [array.buffers()[2] for array in arrays], [0] * len(arrays), "u1"
        )

    def take(self, rows: NDArray[np.int64], alloc: Allocator) -> list[Any]:
        """Return a list."""
        pieces, places = self._pieces.places(rows)
        first = self._offsets.inside(pieces, places)
        counts = self._offsets.inside(pieces, places + 1) - first
        stops = np.cumsum(counts)
        if stops[-1] > _MOST_GATHERED_BYTES * len(rows):
            values = self._sliced(self._memory.bases[pieces] + first, counts)
        else:
            values = self._gathered(self._memory.bases[pieces] + first, counts, stops)
        if self._validity is not None:
            for row in np.flatnonzero(~self._validity.take(pieces, places)).tolist():
                values[row] = None
        return values

    def _sliced(self, first: NDArray[np.int64], counts: NDArray[np.int64]) -> list[Any]:
        data = self._memory.array.data
        parts = (data[a:b] for a, b in zip(first.tolist(), (first + counts).tolist(), strict=True))
        return [str(part, "utf-8") for part in parts] if self._is_text else list(map(bytes, parts))

    def _gathered(
        self, first: NDArray[np.int64], counts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> list[Any]:
        at = np.repeat(first - (stops - counts), counts)
        at += np.arange(len(at))
        data = self._memory.array.take(at, mode="clip")
        gathered = pa.Array.from_buffers(
            pa.large_string() if self._is_text else pa.large_binary(),
            len(counts),
            [None, pa.py_buffer(np.concatenate(([0], stops))), pa.py_buffer(data)],
        )
        values: list[Any] = gathered.to_numpy(zero_copy_only=False).tolist()
        return values

    def value(self, row: int) -> Any:  # noqa: ANN401
        """Return `str`, `bytes` or None."""
        return self.take(np.array([row]), np.empty)[0]


class _Structs:
    """Structs, none of them missing."""

    num_missing = 0

    def __init__(self, fields: dict[str, Column]) -> None:
        self._fields = fields

    def take(self, rows: NDArray[np.int64], alloc: Allocator) -> dict[str, Any]:
        return rows_of(self._fields, rows, alloc)

    def value(self, row: int) -> dict[str, Any]:
        return {name: field.value(row) for name, field in self._fields.items()}


class Images:
    """Image files as uint8 (height, width, 3), or whatever `decode` makes of their bytes.

    Attributes:
        num_missing: How many are null.
    """

    def __init__(self, column: pa.ChunkedArray, decode: Callable[[bytes], NDArray[Any]]) -> None:
        """Decode a column of structs of `bytes` and `path`, either of which may be missing."""
        arrays = list(column.chunks)
        self.num_missing = _count_missing(arrays)
        self._validity = _validity_of(arrays)
        self._pieces = _Pieces(arrays)
        self._decode = decode
        self._bytes, self._paths = (
            Texts([array.field(name) for array in arrays], column.type.field(name).type)
            for name in ("bytes", "path")
        )

    def take(self, rows: NDArray[np.int64], alloc: Allocator) -> NDArray[Any]:
        """Return an array, shape (rows, height, width, 3)."""
        if self._validity is not None:
            missing = np.flatnonzero(~self._validity.take(*self._pieces.places(rows)))
            if len(missing):
                raise _missing_value(int(missing[0]))
        paths = self._paths.take(rows, alloc)
        files = self._bytes.take(rows, alloc)
        images = [self._decoded(*both) for both in zip(files, paths, strict=True)]
        check_shapes([image.shape for image in images])
        out = alloc((len(images), *images[0].shape), images[0].dtype)
        return np.stack(images, out=out)

    def _decoded(self, data: bytes | None, path: str | None) -> NDArray[Any]:
        if data is None:
            if path is None:
                raise ValueError("an image has neither bytes nor a path in its column.")
            data = read_file(path, remedy="embed it in the table")
        return self._decode(data)

    def value(self, row: int) -> Any:  # noqa: ANN401
        """Return an image, or None."""
        chosen = np.array([row])
        if self._validity is not None and not self._validity.take(*self._pieces.places(chosen))[0]:
            return None
        return self._decoded(self._bytes.value(row), self._paths.value(row))


class _ValueColumn:
    """Any other column, value by value."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._column = column
        self.num_missing: int = column.null_count

    def take(self, rows: NDArray[np.int64], alloc: Allocator) -> Any:  # noqa: ANN401
        values = [self._column[row].as_py() for row in rows.tolist()]
        for place, value in enumerate(values):
            if value is None:
                raise _missing_value(place)
        return default_collate(values)

    def value(self, row: int) -> Any:  # noqa: ANN401
        return self._column[row].as_py()


def _count_missing(arrays: Sequence[pa.Array]) -> int:
    """Return how many elements of arrays are null, without those of lists in them."""
    return sum(array.null_count for array in arrays)


class _Pieces:
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


class _BufferArray:
    """Buffers with elements of one type, as one array.

    Attributes:
        array: Of all elements, and of whatever lies between the buffers. Read-only.
        bases: Where in it each buffer begins.
    """

    def __init__(
        self, buffers: Sequence[pa.Buffer | None], offsets: Sequence[int], dtype: DTypeLike
    ) -> None:
        """Look at buffers; they are kept, not copied."""
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


class _Bits:
    """Bitmaps of several pieces; a piece without one has all its bits set."""

    def __init__(self, buffers: Sequence[pa.Buffer | None], offsets: Sequence[int]) -> None:
        """Look at bitmaps; each begins at a bit of its own."""
        self._memory = _BufferArray(buffers, [0] * len(buffers), np.uint8)
        self._bases = self._memory.bases * 8 + np.array(offsets, np.int64)
        self._are_set = np.array([buffer is None for buffer in buffers])

    def take(self, pieces: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return bits; `pieces` and `places` broadcast."""
        bits = self._bases[pieces] + places
        read = (self._memory.array.take(bits >> 3, mode="clip") >> (bits & 7)) & 1
        found: NDArray[np.bool_] = np.asarray(read, np.bool_) | self._are_set[pieces]
        return found


def _validity_of(arrays: Sequence[pa.Array]) -> _Bits | None:
    """Return bits that are not set where a value is null; None where none is."""
    if not _count_missing(arrays):
        return None
    return _Bits(
        [array.buffers()[0] if array.null_count else None for array in arrays],
        [array.offset for array in arrays],
    )


class _Elements:
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
        self._bits = _Bits(buffers, offsets) if self.dtype == np.bool_ else None
        self._memory = _BufferArray(buffers, offsets, self.dtype) if self._bits is None else None
        self._validity = _validity_of(arrays)
        self.has_missing = self._validity is not None

    def blocks(
        self,
        pieces: NDArray[np.int64],
        first: NDArray[np.int64],
        count: int,
        out: NDArray[Any],
    ) -> None:
        """Write `count` elements from `first[i]` of piece `pieces[i]` to row i of `out`."""
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
                    raise _missing_value(row)
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


def _missing_value(row: int) -> CollateError:
    """Return the error for a row of a batch that lacks a value."""
    return CollateError(
        "{first} has no value (a null), and an array has no place for none. Fill it (dataset.map), "
        "leave out the row (dataset.filter) or the column (columns=), or give a collate_fn.",
        (row, row),
    )
