# SPDX-License-Identifier: Apache-2.0
"""Rows of an Arrow table by number, as rows and as batches of NumPy.

What a value becomes, in a row:

    numbers, booleans          a NumPy scalar of the column's type; NaN for a missing float
    lists of those             an array of the list's type, of its own
    lists of a fixed size      likewise, also of several dimensions
    text, bytes                `str`, `bytes`
    structs                    a dict
    anything else              what pyarrow makes of it
    missing (but floats)       None

A batch is what the default collate makes of the rows, if no value is missing. A missing float is
NaN in a batch too, and a missing text None in its list; any other missing value is an error.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

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


class Column:
    """A column of any type, read value by value.

    Attributes:
        num_missing: How many of its values are null.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        """Look at a column; nothing is copied."""
        self.num_missing: int = column.null_count
        self._chunks = column.chunks
        self._stops = np.cumsum([len(chunk) for chunk in self._chunks], dtype=np.int64)
        self._starts = np.concatenate(([np.int64(0)], self._stops[:-1]))

    def take(self, rows: NDArray[np.int64], alloc: Allocator) -> Any:  # noqa: ANN401
        """Return rows, 0 <= row < length, at least one, as a batch's column.

        Raises:
            CollateError: a row lacks a value that a batch needs, or shapes differ.
            TypeError: values that cannot be collated.
        """
        return default_collate(_complete(self._taken(rows)).to_pylist())

    def value(self, row: int) -> Any:  # noqa: ANN401
        """Return one row's value; None for a missing one."""
        return self._taken(np.array([row]))[0].as_py()

    def _taken(self, rows: NDArray[np.int64]) -> pa.Array:
        # `ChunkedArray.take` takes 300 us where a table has 1,000 pieces, and older releases join
        # all pieces first; a slice takes 1 us.
        if len(self._chunks) == 1:
            return self._chunks[0].take(pa.array(rows))
        pieces = np.searchsorted(self._stops, rows, side="right")
        places = zip(pieces.tolist(), (rows - self._starts[pieces]).tolist(), strict=True)
        return pa.concat_arrays([self._chunks[piece].slice(place, 1) for piece, place in places])


def rows_of(
    columns: dict[str, Column], rows: NDArray[np.int64], alloc: Allocator
) -> dict[str, Any]:
    """Return rows as a batch; raises as `Column.take`, with a note that names the column."""
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
    kind = column.type
    if _is_number(kind):
        return Numbers(column)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return Texts(column)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return Texts(column)
    if pa.types.is_struct(kind) and not column.null_count:
        return _Structs(column)
    return Lists.found(column) or Column(column)


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    )


def _complete(array: pa.Array) -> pa.Array:
    """Return an array without nulls; with one, raise the error that names its row."""
    if array.null_count:
        row = int(np.flatnonzero(array.is_null())[0])
        raise CollateError(
            "{first} has no value (a null), and an array has no place for none. Fill it "
            "(dataset.map), leave out the row (dataset.filter) or the column (columns=), or give a "
            "collate_fn.",
            (row, row),
        )
    return array


def _write(numbers: pa.Array, out: NDArray[Any]) -> None:
    if not pa.types.is_floating(numbers.type):
        _complete(numbers)
    with np.errstate(over="ignore"):  # float64 beyond float32 is infinite, as elsewhere
        out[...] = numbers.to_numpy(zero_copy_only=False).reshape(out.shape)


class _Arrays(Column):
    """Values that become NumPy's."""

    def value(self, row: int) -> Any:  # noqa: ANN401
        """Return a scalar or an array of its own; None for a missing one."""
        try:
            return self.take(np.array([row]), np.empty)[0]
        except CollateError:
            return None


class Numbers(_Arrays):
    """Numbers or booleans.

    Attributes:
        dtype: Of the array of a batch.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        """Look at a column of numbers."""
        super().__init__(column)
        self.dtype: np.dtype[Any] = np.dtype(column.type.to_pandas_dtype())

    def take(
        self, rows: NDArray[np.int64], alloc: Allocator, dtype: DTypeLike | None = None
    ) -> NDArray[Any]:
        """Return an array, shape (rows,), of the column's type or another."""
        out = alloc((len(rows),), self.dtype if dtype is None else dtype)
        _write(self._taken(rows), out)
        return out


class Lists(_Arrays):
    """Lists of numbers, of any or of a fixed size, and arrays of several dimensions.

    Attributes:
        dtype: Of the array of a batch.
        num_dims: Of the array of a row.
        has_missing_elements: Whether an element of a list is null.
    """

    def __init__(
        self,
        column: pa.ChunkedArray,
        num_missing: int,
        elements: Sequence[pa.Array],
        kind: pa.DataType,
        inner: tuple[int, ...],
    ) -> None:
        """See `found`."""
        super().__init__(column)
        self.num_missing = num_missing
        self._inner = inner
        self.dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        self.num_dims = 1 + len(inner)
        self.has_missing_elements = any(array.null_count for array in elements)

    @classmethod
    def found(cls, column: pa.ChunkedArray) -> Lists | None:
        """Return the column; None if it is none of numbers, or lists of any size lie in lists."""
        num_missing, kind, arrays, shape = column.null_count, column.type, column.chunks, None
        if isinstance(kind, pa.BaseExtensionType):
            shape = getattr(kind, "shape", None)  # that of datasets' Array2D to Array5D
            if shape is None:
                return None
            arrays, kind = [array.storage for array in arrays], kind.storage_type
            column = pa.chunked_array(arrays, kind)
        sizes: list[int | None] = []
        while not _is_number(kind):
            is_fixed = pa.types.is_fixed_size_list(kind)
            if not (is_fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind)):
                return None
            if sizes and any(array.null_count for array in arrays):
                return None
            sizes.append(kind.list_size if is_fixed else None)
            arrays, kind = [array.values for array in arrays], kind.value_type
        inner = [size for size in (sizes[1:] if shape is None else shape[1:]) if size is not None]
        if not sizes or len(inner) != len(sizes) - 1:
            return None
        if not pa.types.is_floating(kind) and any(array.null_count for array in arrays):
            return None
        return cls(column, num_missing, arrays, kind, tuple(inner))

    def take(
        self, rows: NDArray[np.int64], alloc: Allocator, dtype: DTypeLike | None = None
    ) -> NDArray[Any]:
        """Return an array, shape (rows, …), of the column's type or another."""
        array, lengths = self._lists(rows)
        if (lengths != lengths[0]).any():
            check_shapes([(length, *self._inner) for length in lengths.tolist()])
        shape = (len(rows), int(lengths[0]), *self._inner)
        out = alloc(shape, self.dtype if dtype is None else dtype)
        if math.prod(shape):
            while not _is_number(array.type):
                array = array.flatten()
            _write(array, out)
        return out

    def lengths(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the length of each of these rows."""
        return self._lists(rows)[1]

    def _lists(self, rows: NDArray[np.int64]) -> tuple[pa.Array, NDArray[np.int64]]:
        array = _complete(self._taken(rows))
        if pa.types.is_fixed_size_list(array.type):
            return array, np.full(len(rows), array.type.list_size)
        return array, array.value_lengths().to_numpy().astype(np.int64)


class Texts(Column):
    """Text or bytes; a batch is a list, with None where one is missing."""

    def take(self, rows: NDArray[np.int64], alloc: Allocator) -> list[Any]:
        """Return a list."""
        values: list[Any] = self._taken(rows).to_pylist()
        return values


class _Structs(Column):
    """Structs, none of them missing."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        super().__init__(column)
        self._fields = {
            field.name: column_of(
                pa.chunked_array([chunk.field(number) for chunk in column.chunks], field.type)
            )
            for number, field in enumerate(column.type)
        }

    def take(self, rows: NDArray[np.int64], alloc: Allocator) -> dict[str, Any]:
        return rows_of(self._fields, rows, alloc)

    def value(self, row: int) -> dict[str, Any]:
        return {name: field.value(row) for name, field in self._fields.items()}


class Images(Column):
    """Image files as uint8 (height, width, 3), or what `decode` makes of their bytes."""

    def __init__(self, column: pa.ChunkedArray, decode: Callable[[bytes], NDArray[Any]]) -> None:
        """Decode a column of structs of `bytes` and `path`, either of which may be missing."""
        super().__init__(column)
        self._decode = decode

    def take(self, rows: NDArray[np.int64], alloc: Allocator) -> NDArray[Any]:
        """Return an array, shape (rows, height, width, 3)."""
        images = [self._decoded(file) for file in _complete(self._taken(rows)).to_pylist()]
        check_shapes([image.shape for image in images])
        out = alloc((len(images), *images[0].shape), images[0].dtype)
        return np.stack(images, out=out)

    def _decoded(self, file: dict[str, Any]) -> NDArray[Any]:
        data = file["bytes"]
        if data is None:
            if file["path"] is None:
                raise ValueError("an image has neither bytes nor a path in its column.")
            data = read_file(file["path"], remedy="embed it in the table")
        return self._decode(data)

    def value(self, row: int) -> Any:  # noqa: ANN401
        """Return an image, or None."""
        file = super().value(row)
        return None if file is None else self._decoded(file)
