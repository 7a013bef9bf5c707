# SPDX-License-Identifier: Apache-2.0
"""Rows of Ray Data's tables as samples, and as batches that equal the samples collated.

What a value of a column becomes, in a row:

    numbers, booleans       a NumPy scalar of the column's type; NaN for a missing float
    tensors                 an array of its own, that may be written to
    lists of numbers        a one-dimensional array of the list's type, its own
    anything else           what `iter_rows` gives: text, bytes, dates, dicts, lists of those
    missing (but floats)    None

So a batch has the types of the columns. Python's numbers, which `iter_rows` gives, would become
float64 and int64.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no annotations

from penstock.collate import default_collate
from penstock.errors import CollateError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from penstock.data.dataset import Allocator

__all__ = ["Part", "Rows", "batch_of", "with_types_of"]

_LOOKED_AT: Final = 1024  # elements of an array, to tell it from others


class _Arrays:
    """A column whose values are the rows of one array."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    def __getitem__(self, row: int) -> Any:  # noqa: ANN401
        value = self.array[row]
        return value.copy() if isinstance(value, np.ndarray) else value


class _Numbers:
    """A column of numbers some of which are missing."""

    def __init__(self, column: pa.ChunkedArray, dtype: np.dtype[Any]) -> None:
        self._column = column
        self._type = dtype.type

    def __getitem__(self, row: int) -> Any:  # noqa: ANN401
        value = self._column[row].as_py()
        return None if value is None else self._type(value)


class _Lists:
    """A column of lists of numbers, none of them missing."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._column = column

    def __getitem__(self, row: int) -> Any:  # noqa: ANN401
        values = self._column[row].values
        if values is None:
            return None
        return np.array(values.to_numpy(zero_copy_only=False))


class _Tensors:
    """A column of tensors whose shapes differ, or some of which are missing."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._column = column

    def __getitem__(self, row: int) -> Any:  # noqa: ANN401
        value = self._column[row].as_py()
        return value.copy() if isinstance(value, np.ndarray) else value


class _ObjectColumn:
    """Any other column."""

    def __init__(self, column: pa.ChunkedArray, *, is_text: bool) -> None:
        self._column = column
        self.is_text = is_text

    def __getitem__(self, row: int) -> Any:  # noqa: ANN401
        return self._column[row].as_py()


_Column = _Arrays | _Numbers | _Lists | _Tensors | _ObjectColumn


class Rows:
    """The rows of one table.

    Attributes:
        num_rows: How many there are.
        columns: By name, in the table's order.

    Concurrency:
        Any thread.
    """

    def __init__(self, table: pa.Table) -> None:
        """Look at a table; nothing is copied but booleans and columns that lie in several pieces.

        Args:
            table: As Ray Data's `iter_batches(batch_format="pyarrow")` gives it.
        """
        # Arrow counts the rows of a table without columns, of which Ray Data says that it has none.
        self.num_rows: int = table.num_rows if table.num_columns else 0
        self.columns: dict[str, _Column] = {
            name: _column(table.column(number)) for number, name in enumerate(table.column_names)
        }

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return a row, 0 <= row < num_rows, as a dict of the columns."""
        return {name: column[row] for name, column in self.columns.items()}

    def batch(self) -> dict[str, Any]:
        """Return all rows as `batch_of` does, but for arrays that are the table's own.

        They cannot be written to.
        """
        everything = np.arange(self.num_rows)
        batch: dict[str, Any] = {}
        for name, column in self.columns.items():
            if isinstance(column, _Arrays):
                batch[name] = column.array
            else:
                filling = _Filling(name, self.num_rows, np.empty)
                filling.add(column, everything, everything)
                batch[name] = filling.done()
        return batch

    def digest(self, row: int) -> str:
        """Return what tells a row from others, wherever it lies."""
        digest = hashlib.blake2b(digest_size=16)
        _add(digest, self[row])
        return digest.hexdigest()


def _column(column: pa.ChunkedArray) -> _Column:
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return _tensors(column)
    if pa.types.is_dictionary(kind):
        return _column(column.cast(kind.value_type))
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        if column.null_count and not pa.types.is_floating(kind):
            return _Numbers(column, np.dtype(kind.to_pandas_dtype()))
        array = column.to_numpy()
        if array.dtype != kind.to_pandas_dtype():  # float16 with missing values, say
            array = array.astype(kind.to_pandas_dtype())
        array.flags.writeable = False
        return _Arrays(array)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if (is_list or pa.types.is_fixed_size_list(kind)) and (
        pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)
    ):
        return _Lists(column)
    is_text = (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )
    return _ObjectColumn(column, is_text=is_text)


def _tensors(column: pa.ChunkedArray) -> _Column:
    """Return a column of an extension type: tensors of one shape, of many, or Python's objects."""
    chunks = [chunk for chunk in column.chunks if len(chunk)]
    if chunks and not column.null_count and hasattr(chunks[0], "to_numpy_ndarray"):
        arrays = [chunk.to_numpy_ndarray() for chunk in chunks]
        if all(array.dtype != object for array in arrays):
            array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            array = array.view()
            array.flags.writeable = False
            return _Arrays(array)
    return _Tensors(column)


def with_types_of(schema: pa.Schema | None, table: pa.Table) -> pa.Table:
    """Return a table of the types that its columns have in the whole dataset, where they are known.

    A block that was made of Python's values may lack the type of a column that has none in it, or
    have integers where others have floats.
    """
    if schema is None:
        return table
    for number, column in enumerate(table.columns):
        name = table.column_names[number]
        position = schema.get_field_index(name)
        kind = column.type if position < 0 else schema.field(position).type
        if column.type != kind and not (
            isinstance(kind, pa.BaseExtensionType) or isinstance(column.type, pa.BaseExtensionType)
        ):
            table = table.set_column(number, name, column.cast(kind))
    return table


class Part(NamedTuple):
    """Some rows of a table, and where they go in a batch.

    Attributes:
        rows: The table's.
        taken: Their numbers in it.
        places: Their places in the batch.
    """

    rows: Rows
    taken: NDArray[np.int64]
    places: NDArray[np.int64]


def batch_of(parts: Iterable[Part], count: int, alloc: Allocator) -> dict[str, Any]:
    """Return rows as one batch: a dict of arrays, and of lists of text.

    It is what the default collate makes of the rows, but that text may be missing (None). Each part
    is dropped before the next one is asked for.

    Args:
        parts: Where the rows are; at least one.
        count: Rows in all.
        alloc: Gives memory for the arrays.

    Raises:
        CollateError: a row lacks a value, or shapes or columns differ.
        TypeError: values that cannot be collated.
    """
    fillings: dict[str, _Filling] | None = None
    first = 0
    for part in parts:
        columns = part.rows.columns
        if fillings is None:
            fillings = {name: _Filling(name, count, alloc) for name in columns}
            first = int(part.places[0])
        if columns.keys() != fillings.keys():
            raise CollateError(
                f"{{first}} has the columns {_shown(list(fillings))} and {{other}} has "
                f"{_shown(list(columns))}. Let every block have the same (ds.select_columns).",
                (first, int(part.places[0])),
            )
        for name, filling in fillings.items():
            filling.add(columns[name], part.taken, part.places)
    assert fillings is not None
    return {name: filling.done() for name, filling in fillings.items()}


class _Filling:
    """One column of a batch, as its rows come: an array as long as they are of one kind."""

    def __init__(self, name: str, count: int, alloc: Allocator) -> None:
        self._name = name
        self._count = count
        self._alloc = alloc
        self._array: NDArray[Any] | None = None
        self._filled: list[NDArray[np.int64]] = []  # places in it
        self._values: list[Any] | None = None
        self._is_text = False

    def add(self, column: _Column, taken: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        """Put rows of a table's column in their places."""
        if isinstance(column, _Arrays) and self._values is None:
            array = column.array
            if self._array is None:
                self._array = self._alloc((self._count, *array.shape[1:]), array.dtype)
            if self._array.dtype == array.dtype and self._array.shape[1:] == array.shape[1:]:
                self._array[places] = array[taken]
                self._filled.append(places)
                return
        values = self._as_values()
        for row, place in zip(taken.tolist(), places.tolist(), strict=True):
            values[place] = column[row]
        self._is_text |= isinstance(column, _ObjectColumn) and column.is_text

    def _as_values(self) -> list[Any]:
        if self._values is None:
            self._values = [None] * self._count
            if self._array is not None:
                for place in np.concatenate(self._filled or [np.empty(0, np.int64)]).tolist():
                    self._values[place] = self._array[place]
        return self._values

    def done(self) -> Any:  # noqa: ANN401
        """Return the column."""
        if self._values is None:
            return self._array
        if self._is_text:
            return self._values
        for place, value in enumerate(self._values):
            if value is None:
                raise CollateError(
                    f"{{first}} has no value in the column {_shown(self._name)} (a null), and an "
                    "array has no place for none. Fill it in Ray Data (map_batches), leave out the "
                    "row (filter) or the column (drop_columns), or give a collate_fn.",
                    (place, place),
                )
        try:
            return default_collate(self._values)
        except (CollateError, TypeError) as error:
            error.add_note(f"in the column {self._name!r}")
            raise


def _add(digest: hashlib.blake2b, value: object) -> None:
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        digest.update(f"{value.dtype.str}{value.shape}".encode())
        digest.update(value.ravel()[:: max(1, value.size // _LOOKED_AT)].tobytes())
    elif isinstance(value, dict):
        digest.update(f"dict{len(value)}".encode())
        for key, member in value.items():
            _add(digest, key)
            _add(digest, member)
    elif isinstance(value, (list, tuple, np.ndarray)):
        digest.update(f"list{len(value)}".encode())
        for member in value:
            _add(digest, member)
    elif isinstance(value, bytes):
        digest.update(f"bytes{len(value)}".encode() + value)
    else:
        digest.update(f"{type(value).__name__}{value!r}\0".encode())


def _shown(names: object) -> str:
    """Return names as they are shown in a template of `CollateError`."""
    return repr(names).replace("{", "{{").replace("}", "}}")
