# SPDX-License-Identifier: Apache-2.0
"""Hugging Face `datasets`, read a batch at a time out of their Arrow tables.

A `datasets.Dataset` may be given to both loaders as it is, and gives the batches that it gives to
torch's loader. Where it can be done with the same result, those are gathered from the table too:
`batch_reader` imports this module when it meets one. `from_huggingface` gives the columns' own
types, whatever the dataset's format, and images by Penstock's decoder.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import datasets
import numpy as np

from penstock.collate import default_collate
from penstock.data.dataset import Dataset, IterableDataset, register_batch_reader
from penstock.errors import ConfigError
from penstock.integrations.huggingface_rows import (
    Column,
    Images,
    Lists,
    Numbers,
    Texts,
    column_of,
    rows_of,
)
from penstock.worker_info import current_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.data.dataset import Allocator, BatchReader

__all__ = ["from_huggingface"]


def from_huggingface(
    dataset: Any,  # noqa: ANN401 - datasets.Dataset or datasets.IterableDataset
    columns: Sequence[str] | None = None,
    *,
    decode: Callable[[bytes], NDArray[Any]] | None = None,
) -> HuggingFaceRows | HuggingFaceStream:
    """Return a dataset for both loaders, whose batches are gathered from the Arrow table.

    What becomes of values is in docs/guide/huggingface-datasets.md: numbers keep the type that they
    have in `dataset.features`, and so do lists, `Array2D` to `Array5D`; text stays a list.
    `select`, `shuffle`, `filter` and the like of the dataset are kept, and so are the columns of
    its `set_format`; its type of format does not count. Nothing is copied before batches are.

    Args:
        dataset: A `datasets.Dataset`. Of a `datasets.IterableDataset` a stream is made that deals
            its shards out to workers and ranks; its samples are those of its own format.
        columns: Names, in this order. None: all, or those of `set_format`.
        decode: Makes an array of the bytes of an image file; None is
            `penstock.images.decode_image`: uint8 (height, width, 3), RGB, upright. In batches
            all images of a column have to be of one shape, so crop or resize them here.

    Raises:
        ConfigError: no such column; a transform (`set_transform`), which has no types.
        TypeError: something else than a dataset: a `DatasetDict`, say.

    Example:
        >>> import datasets
        >>> table = datasets.Dataset.from_dict({"id": [1, 2, 3], "x": [[0.5, 1.0]] * 3})
        >>> from penstock import Loader
        >>> next(iter(Loader(from_huggingface(table), batch_size=2)))["x"].shape
        (2, 2)
    """
    if isinstance(dataset, datasets.IterableDataset):
        if columns is not None:
            dataset = dataset.select_columns(list(columns))
        return HuggingFaceStream(dataset)
    if not isinstance(dataset, datasets.Dataset):
        splits = f" Choose one of {sorted(dataset)}." if isinstance(dataset, dict) else ""
        raise TypeError(
            "from_huggingface takes a datasets.Dataset or datasets.IterableDataset, got "
            f"{type(dataset).__name__}.{splits}"
        )
    return HuggingFaceRows(dataset, columns, decode=decode)


class HuggingFaceRows(Dataset[dict[str, Any]]):
    """Rows of a `datasets.Dataset`, by index; make one with `from_huggingface`.

    Concurrency:
        Any thread. A pickle holds the dataset's own, which for files mapped into memory is their
        paths.
    """

    is_drawless = True  # reading draws no random number

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401
        columns: Sequence[str] | None = None,
        *,
        decode: Callable[[bytes], NDArray[Any]] | None = None,
    ) -> None:
        """See `from_huggingface`."""
        if dataset.format["type"] == "custom":
            raise ConfigError(
                "values of a transform (set_transform, with_transform) have no types in a table: "
                "give the dataset itself to the loader, or dataset.with_format(None) here."
            )
        names = dataset.format["columns"] if columns is None else list(columns)
        if unknown := [name for name in names if name not in dataset.column_names]:
            raise ConfigError(f"no column {unknown[0]!r}; there are {dataset.column_names}.")
        self.dataset = dataset
        self.columns: tuple[str, ...] = tuple(names)
        self._decode = decode
        self._table: _HuggingFaceTable | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.dataset)

    def _opened(self) -> _HuggingFaceTable:
        if self._table is None:
            self._table = _HuggingFaceTable(self.dataset, self.columns, self._decode or _decoded)
        return self._table

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one row as a dict of the columns."""
        table = self._opened()
        (row,) = table.rows(np.array([index], np.int64)).tolist()
        return {name: column.value(row) for name, column in table.columns.items()}

    def get_batch(self, indices: NDArray[np.int64], alloc: Allocator) -> dict[str, Any]:
        """Return rows as one batch: a dict of arrays, and of lists of text.

        Raises:
            IndexError: an index outside the dataset.
            CollateError: a row lacks a value, or lists or images of several shapes; see there.
            TypeError: values that cannot be collated.
        """
        table = self._opened()
        return rows_of(table.columns, table.rows(indices), alloc)

    def __getstate__(self) -> dict[str, Any]:
        """Return all but what was found out about the table's memory."""
        return {**self.__dict__, "_table": None}


def _decoded(data: bytes) -> NDArray[Any]:
    from penstock.images import decode_image

    return decode_image(data)


class _HuggingFaceTable:
    """A dataset's table, with the mapping that `select`, `shuffle` and the like leave behind."""

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401
        names: Sequence[str],
        decode: Callable[[bytes], NDArray[Any]] | None,
    ) -> None:
        table = dataset.data.table
        self._length = len(dataset)
        mapping = dataset._indices  # not public; there is no other way to see it
        self._mapping: Column | None = None
        if mapping is not None:
            self._mapping = column_of(mapping.table.column(0))
        self.columns: dict[str, Column] = {}
        for name in names:
            column = table.column(name)
            feature = dataset.features[name]
            if decode is not None and isinstance(feature, datasets.Image) and feature.decode:
                self.columns[name] = Images(column, decode)
            else:
                self.columns[name] = column_of(column)

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which rows of the table are meant by indices, negative from the end."""
        length = self._length
        wrong = indices[(indices < -length) | (indices >= length)]
        if len(wrong):
            raise IndexError(f"index {wrong[0]} is out of range for {length} rows.")
        chosen = np.where(indices < 0, indices + length, indices)
        if self._mapping is not None and len(chosen):
            chosen = self._mapping.take(chosen, np.empty).astype(np.int64)
        return chosen


class HuggingFaceStream(IterableDataset[dict[str, Any]]):
    """A `datasets.IterableDataset`, dealt out by its shards; make one with `from_huggingface`.

    Each worker of each rank reads whole shards (`dataset.num_shards`), so there should be as many
    shards as workers of all ranks, or a multiple of it; workers without one have nothing to do. A
    dataset that knows its ranks (`datasets.distributed.split_dataset_by_node`) keeps its share.

    Concurrency:
        One thread iterates at a time.
    """

    def __init__(self, dataset: Any) -> None:  # noqa: ANN401
        """See `from_huggingface`."""
        self.dataset = dataset
        self._epoch: int | None = None  # None: as the dataset has it
        self._share: Any = None
        self._begin_at: dict[str, Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration shuffle for this epoch, if the dataset is shuffled."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield this worker's and rank's samples."""
        info = current_shard()
        worker, num_workers = info.worker_id, info.num_workers
        if _splits_by_itself():
            worker, num_workers = 0, 1
        rank, world_size = info.rank, info.world_size
        if getattr(self.dataset, "_distributed", None) is not None:
            rank, world_size = 0, 1
        count, number = num_workers * world_size, num_workers * rank + worker
        self._share = None
        if number >= self.dataset.num_shards:
            return
        part = self.dataset
        if count > 1:
            part = part.shard(num_shards=count, index=number, contiguous=False)
        if self._epoch is not None:
            part.set_epoch(self._epoch)
        if self._begin_at is not None:
            part.load_state_dict(self._begin_at)
            self._begin_at = None
        self._share = part
        yield from part

    def state_dict(self) -> dict[str, Any]:
        """Return the place in this worker's shard, as the dataset tells it."""
        return {"place": None if self._share is None else self._share.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where `state` was saved."""
        self._begin_at = state["place"]

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the share that is being read."""
        return {**self.__dict__, "_share": None}


def _splits_by_itself() -> bool:
    """Return whether a stream of datasets sees torch's worker, and reads that one's part."""
    torch_data: Any = sys.modules.get("torch.utils.data")
    return torch_data is not None and torch_data.get_worker_info() is not None


# Datasets as they are


_TYPES: Final[Mapping[str | None, Mapping[str, str]]] = {
    None: {"b": "?", "i": "i8", "u": "i8", "f": "f8"},
    "torch": {"b": "?", "i": "i8", "u": "i8", "f": "f4"},
    "numpy": {"b": "?", "i": "i8", "u": "i8", "f": "f4"},
}
"""Format -> kind of a column's dtype -> dtype of a batch."""


class _AsItIs:
    """Reads batches of a dataset as collating its rows would give them."""

    def __init__(self, dataset: Any, names: Sequence[str]) -> None:  # noqa: ANN401
        self._format = dataset.format["type"]
        self._table = _HuggingFaceTable(dataset, names, None)

    def can_read(self) -> bool:
        """Return whether all columns are of kinds that are known to come out equal."""
        return all(map(self._is_known, self._table.columns.values()))

    def _is_known(self, column: Column) -> bool:
        if column.num_missing:
            return False
        if isinstance(column, Lists):
            is_flat = column.num_dims == 1 or self._format is not None
            return is_flat and not column.has_missing_elements and column.dtype != np.uint64
        if isinstance(column, Numbers):
            # In the format "numpy" rows and batches are of different types, but for these.
            is_same = self._format != "numpy" or column.dtype in ("?", "i8", "f4")
            return is_same and column.dtype != np.uint64
        return isinstance(column, Texts) and self._format != "numpy"  # NumPy's own kind of str

    def __call__(self, indices: NDArray[np.int64], alloc: Allocator) -> dict[str, Any]:
        rows = self._table.rows(indices)
        if not len(rows):
            raise IndexError("a batch has one row at least")
        types = _TYPES[self._format]
        batch: dict[str, Any] = {}
        for name, column in self._table.columns.items():
            if isinstance(column, Numbers):
                batch[name] = column.take(rows, alloc, types[column.dtype.kind])
            elif isinstance(column, Lists):
                dtype = types[column.dtype.kind]
                if self._format is not None:
                    batch[name] = column.take(rows, alloc, dtype)
                    continue
                lengths = column.lengths(rows)
                if (lengths != lengths[0]).any():
                    default_collate([range(length) for length in lengths.tolist()])  # raises
                # A row is a Python list, so place k of all rows is an array by itself.
                transposed = alloc((int(lengths[0]), len(rows)), dtype)
                transposed[...] = column.take(rows, np.empty).T
                batch[name] = list(transposed)
            else:
                values: Any = column.take(rows, alloc)
                # The formatter has text in an array of NumPy's, which knows no zeros at its end.
                batch[name] = values if self._format is None else np.asarray(values).tolist()
        return batch


def _reader(dataset: Any) -> BatchReader | None:  # noqa: ANN401
    form = dataset.format
    if form["type"] not in _TYPES or form["format_kwargs"] or form["output_all_columns"]:
        return None
    names = [name for name in dataset.column_names if name in form["columns"]]
    if not names or not all(map(_is_plain, (dataset.features[name] for name in names))):
        return None
    reader = _AsItIs(dataset, names)
    return reader if reader.can_read() else None


def _is_plain(feature: Any) -> bool:  # noqa: ANN401
    """Return whether values of a feature are what the table has, and not decoded."""
    if isinstance(feature, _SCALARS):
        return True
    if isinstance(feature, _LISTS):
        return isinstance(feature.feature, _SCALARS)
    return isinstance(
        feature, datasets.Array2D | datasets.Array3D | datasets.Array4D | datasets.Array5D
    )


_SCALARS: Final = (datasets.Value, datasets.ClassLabel)
# `List` came with datasets 4: before, lists are left to datasets itself.
_LISTS: Final = tuple(
    getattr(datasets, name) for name in ("List", "LargeList") if hasattr(datasets, name)
)

register_batch_reader(datasets.Dataset, _reader)
