# SPDX-License-Identifier: Apache-2.0
"""Ray Data's blocks as a map-style dataset, and their rows as samples and batches.

What a value of a column becomes, in a row:

    numbers, booleans       a NumPy scalar of the column's type; NaN for a missing float
    tensors                 an array of its own, that may be written to
    lists of numbers        a one-dimensional array of the list's type, its own
    anything else           what `iter_rows` gives: text, bytes, dates, dicts, lists of those
    missing (but floats)    None
"""

from __future__ import annotations

import operator
import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no annotations
import ray
from pyarrow.types import (  # type: ignore[import-untyped]
    is_boolean,
    is_dictionary,
    is_floating,
    is_integer,
)
from ray.data._internal.delegating_block_builder import DelegatingBlockBuilder
from ray.data.block import BlockAccessor

from penstock.collate import default_collate
from penstock.data.dataset import Dataset
from penstock.errors import CollateError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.data.dataset import Allocator

__all__ = ["RayTable", "batch_of", "joined", "samples_of"]

_TEXT: Final = ("string", "large_string", "binary", "large_binary")
_MOST_OPEN: Final = 8  # blocks that a table keeps at hand; Ray Data makes them of 128 MB at most


def _typed(table: pa.Table, schema: pa.Schema | None) -> pa.Table:
    """Return a table with the types that its columns have in the whole dataset.

    A block that was made of Python's values lacks the type of a column without any.
    """
    for number, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        position = -1 if schema is None else schema.get_field_index(name)
        kind = column.type if position < 0 else schema.field(position).type  # type: ignore[union-attr]
        kind = kind.value_type if is_dictionary(kind) else kind
        kinds = {column.type, kind}
        if len(kinds) > 1 and not any(isinstance(k, pa.BaseExtensionType) for k in kinds):
            table = table.set_column(number, name, column.cast(kind))
    return table


def _values(column: pa.ChunkedArray) -> NDArray[Any] | list[Any]:
    """Return the values of a column, as one array where they are of one dtype and shape."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        if len(column) and not column.null_count and hasattr(column.chunk(0), "to_numpy_ndarray"):
            arrays = [chunk.to_numpy_ndarray() for chunk in column.chunks if len(chunk)]
            if len({(a.dtype, a.shape[1:]) for a in arrays}) == 1 and arrays[0].dtype != object:
                return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return [value.as_py() for value in column]
    if is_floating(kind) or is_integer(kind) or is_boolean(kind):
        dtype = np.dtype(kind.to_pandas_dtype())
        if is_floating(kind) or not column.null_count:
            return np.asarray(column.to_numpy().astype(dtype, copy=False))
        return [None if value is None else dtype.type(value) for value in column.to_pylist()]
    if hasattr(kind, "value_type") and (
        is_integer(kind.value_type) or is_floating(kind.value_type)
    ):
        lists = (value.values for value in column)
        return [None if v is None else np.array(v.to_numpy(zero_copy_only=False)) for v in lists]
    return list(column.to_pylist())


def samples_of(table: pa.Table, schema: pa.Schema | None) -> list[dict[str, Any]]:
    """Return the rows of a table."""
    table = _typed(table, schema)
    columns = {
        name: [
            value.copy() if isinstance(value, np.ndarray) else value for value in _values(column)
        ]
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    return [{name: column[k] for name, column in columns.items()} for k in range(table.num_rows)]


def batch_of(table: pa.Table, schema: pa.Schema | None) -> dict[str, Any]:
    """Return the rows of a table as one batch: what the default collate makes of them.

    Text may be missing (None). Arrays may be the table's own, which cannot be written to.

    Raises:
        CollateError: a row lacks a value, or shapes differ.
        TypeError: values that cannot be collated.
    """
    batch = {}
    table = _typed(table, schema)
    for name, column in zip(table.column_names, table.columns, strict=True):
        batch[name] = values = _values(column)
        if isinstance(values, np.ndarray) or str(column.type) in _TEXT:
            continue
        if None in [value if value is None else 0 for value in values]:
            place = next(k for k, value in enumerate(values) if value is None)
            shown = repr(name).replace("{", "{{").replace("}", "}}")
            raise CollateError(
                f"{{first}} has no value in the column {shown} (a null), and an array has no place "
                "for none. Fill it in Ray Data (map_batches), leave out the row (filter) or the "
                "column (drop_columns), or give a collate_fn.",
                (place, place),
            )
        try:
            batch[name] = default_collate(values)
        except (CollateError, TypeError) as error:
            error.add_note(f"in the column {name!r}")
            raise
    return batch


def joined(parts: Sequence[pa.Table]) -> pa.Table:
    """Return tables as one, of the types that suit all of them."""
    if len(parts) == 1:
        return parts[0]
    builder: Any = DelegatingBlockBuilder()  # type: ignore[no-untyped-call]
    for part in parts:
        builder.add_block(part)
    return builder.build()


class RayTable(Dataset[dict[str, Any]]):
    """Rows of a materialised `ray.data.Dataset`, by index; `from_ray_data` makes one.

    Blocks are read in place where the node has them, and fetched by Ray where it has not. A pickle
    holds references, no rows, and is good for as long as the process that made the blocks lives.

    Concurrency:
        Any thread, and Ray's workers. Not worker processes: they have no connection to Ray.
    """

    is_drawless = True  # reading draws no random number

    def __init__(self, dataset: Any, schema: pa.Schema | None) -> None:  # noqa: ANN401
        """Take references to the blocks."""
        self._blocks = []  # reference, and first row in it
        lengths = []
        for bundle in dataset.iter_internal_ref_bundles():
            slices = getattr(bundle, "slices", None) or [None] * len(bundle.block_refs)
            for ref, of, part in zip(bundle.block_refs, bundle.metadata, slices, strict=True):
                start, stop = (part.start_offset, part.end_offset) if part else (0, of.num_rows)
                self._blocks.append((ref, start))
                lengths.append(stop - start)
        self._ends = np.cumsum([0, *lengths], dtype=np.int64)
        self._schema = schema
        self.__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the open blocks."""
        return {name: value for name, value in vars(self).items() if name not in ("_pid", "_open")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin with no open block."""
        vars(self).update(state)
        self._pid = os.getpid()
        self._open: dict[int, Any] = {}  # by the number of the block, the oldest first

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> dict[str, Any]:  # noqa: ANN401 - any integer
        """Return a row; raises as `__getitems__` does."""
        (row,) = self.__getitems__([operator.index(index)])
        return row

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows.

        Raises:
            IndexError: there is none with one of the numbers.
            ConfigError: this process has no connection to Ray.
        """
        return samples_of(self._rows(np.asarray(indices, np.int64)), self._schema)

    def get_batch(self, indices: NDArray[np.int64], alloc: Allocator) -> dict[str, Any]:
        """Return rows as one batch; see `batch_of`. Raises as `__getitems__` does besides."""
        try:
            batch = batch_of(self._rows(indices), self._schema)
        except CollateError as error:
            error.name_samples(indices.tolist())
            raise
        for name, value in batch.items():
            if isinstance(value, np.ndarray) and not value.flags.writeable:
                batch[name] = alloc(value.shape, value.dtype)
                batch[name][...] = value
        return batch

    def _rows(self, indices: NDArray[np.int64]) -> pa.Table:
        # A forked worker has its parent's module, which believes itself connected.
        if os.getpid() != self._pid or not ray.is_initialized():
            raise ConfigError(
                "these rows are in Ray's object store, and this process has no connection to Ray. "
                "Load with num_workers=0, backend='thread' or backend='ray'; worker processes "
                "cannot read them."
            )
        count = len(self)
        wrong = indices[(indices < -count) | (indices >= count)]
        if len(wrong) or not len(indices):
            raise IndexError(f"index {[*wrong, None][0]} is out of range: there are {count} rows")
        indices = np.where(indices < 0, indices + count, indices)
        numbers = np.searchsorted(self._ends, indices, side="right") - 1
        order = np.argsort(numbers, kind="stable")
        parts = []
        for number in np.unique(numbers).tolist():
            _, start = self._blocks[number]
            rows = indices[numbers == number] - self._ends[number] + start
            parts.append(BlockAccessor.for_block(self._block(number)).take(rows.tolist()))
        table = joined(parts)
        if len(parts) > 1:  # they are in the order of blocks
            table = BlockAccessor.for_block(table).take(np.argsort(order).tolist())
        return table

    def _block(self, number: int) -> pa.Table:
        block = self._open.get(number)
        if block is None:
            # Ray Data has some as pandas' frames.
            block = BlockAccessor.for_block(ray.get(self._blocks[number][0])).to_arrow()
            self._open[number] = block
            for oldest in list(self._open)[:-_MOST_OPEN]:
                self._open.pop(oldest, None)  # another thread may have
        return block
