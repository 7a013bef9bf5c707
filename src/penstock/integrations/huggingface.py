# SPDX-License-Identifier: Apache-2.0
"""Hugging Face `datasets`, read a batch at a time out of their Arrow tables.

A `datasets.Dataset` may be given to both loaders as it is, and gives the batches that it gives to
torch's loader. Where it can be done with the same result, those are gathered from the table too:
`batch_reader` imports this module when it meets one. `from_huggingface` gives the columns' own
types, whatever the dataset's format, and images by Penstock's decoder.

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

import functools
import sys
from typing import TYPE_CHECKING, Any, Final

import datasets
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no annotations

from penstock.collate import check_shapes, default_collate
from penstock.data.dataset import (
    Dataset,
    IterableDataset,
    counted_from_start,
    register_batch_reader,
)
from penstock.errors import CollateError, ConfigError
from penstock.opening import read_file
from penstock.worker_info import current_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import DTypeLike, NDArray

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
        ConfigError: a transform (`set_transform`), which has no types.
        ValueError: no such column.
        TypeError: something else than a dataset: a `DatasetDict`, say.

    Example:
        >>> import datasets
        >>> table = datasets.Dataset.from_dict({"id": [1, 2, 3], "x": [[0.5, 1.0]] * 3})
        >>> from penstock import Loader
        >>> next(iter(Loader(from_huggingface(table), batch_size=2)))["x"].shape
        (2, 2)
    """
    if not isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        splits = f" Choose one of {sorted(dataset)}." if isinstance(dataset, dict) else ""
        raise TypeError(
            "from_huggingface takes a datasets.Dataset or datasets.IterableDataset, got "
            f"{type(dataset).__name__}.{splits}"
        )
    if columns is not None:
        dataset = dataset.select_columns(list(columns))
    if isinstance(dataset, datasets.IterableDataset):
        return HuggingFaceStream(dataset)
    if dataset.format["type"] == "custom":
        raise ConfigError(
            "values of a transform (set_transform, with_transform) have no types in a table: "
            "give the dataset itself to the loader, or dataset.with_format(None) here."
        )
    names = dataset.format["columns"] if columns is None else columns
    return HuggingFaceRows(dataset, names, decode)


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
        columns: Sequence[str],
        decode: Callable[[bytes], NDArray[Any]] | None = None,
    ) -> None:
        """See `from_huggingface`."""
        self.dataset = dataset
        self.columns = tuple(columns)
        self._decode = decode

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.dataset)

    @functools.cached_property
    def _opened(self) -> dict[str, _Column]:
        table, opened = self.dataset.data.table, {}
        for name in self.columns:
            feature = self.dataset.features[name]
            decode = None
            if isinstance(feature, datasets.Image) and feature.decode:
                from penstock.images import decode_image

                decode = self._decode or decode_image
            opened[name] = _Column(table.column(name), decode)
        return opened

    @functools.cached_property
    def _mapping(self) -> _Column | None:
        """Which rows `select`, `shuffle` and the like have left; None if all are there in order."""
        mapping = self.dataset._indices  # not public; there is no other way to see it
        return None if mapping is None else _Column(mapping.table.column(0))

    def _rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which rows of the table are meant by indices, negative from the end."""
        chosen = counted_from_start(indices, len(self), f"{len(self)} rows")
        if self._mapping is not None and len(chosen):
            chosen = self._mapping.take(chosen, np.empty).astype(np.int64)
        return chosen

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one row as a dict of the columns."""
        (row,) = self._rows(np.array([index], np.int64)).tolist()
        return {name: column.value(row) for name, column in self._opened.items()}

    def get_batch(
        self,
        indices: NDArray[np.int64],
        alloc: Allocator,
        dtypes: Mapping[str, DTypeLike] | None = None,
    ) -> dict[str, Any]:
        """Return rows as one batch: a dict of arrays, and of lists of text.

        Raises:
            IndexError: an index outside the dataset.
            CollateError: a row lacks a value, or lists or images of several shapes; see there.
            TypeError: values that cannot be collated.
        """
        rows, batch = self._rows(indices), {}
        for name, column in self._opened.items():
            try:
                batch[name] = column.take(rows, alloc, (dtypes or {}).get(name))
            except (CollateError, TypeError) as error:
                error.add_note(f"in the column {name!r}")
                raise
        return batch

    def __getstate__(self) -> dict[str, Any]:
        """Return all but what was found out about the table's memory."""
        found = ("_opened", "_mapping")
        return {name: value for name, value in vars(self).items() if name not in found}


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


# Rows of an Arrow table by number


class _Column:
    """A column of a table, whose rows are taken by their numbers; nothing is copied before."""

    def __init__(
        self, column: pa.ChunkedArray, decode: Callable[[bytes], NDArray[Any]] | None = None
    ) -> None:
        """Keep a column; with `decode`, of image files: structs of `bytes` and `path`."""
        self._decode = decode
        self._chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._gathered = _Gathered.of(column.type, self._chunks)
        self._stops = np.cumsum([len(chunk) for chunk in self._chunks], dtype=np.int64)
        self._starts = np.concatenate(([np.int64(0)], self._stops[:-1]))

    def take(
        self, rows: NDArray[np.int64], alloc: Allocator, dtype: DTypeLike | None = None
    ) -> Any:  # noqa: ANN401
        """Return rows, 0 <= row < length, at least one, as a batch's column.

        Numbers, and lists of them, become an array of `dtype`; None: of the column's own.

        Raises:
            CollateError: a row lacks a value that a batch needs, or shapes differ.
            TypeError: values that cannot be collated.
        """
        if self._gathered is not None:
            return self._gathered.take(*self._places(rows), alloc, dtype)
        array = self._taken(rows)
        if self._decode is None:
            return _batch(array, alloc, dtype)
        images = [self._image(file) for file in _complete(array).to_pylist()]
        check_shapes([image.shape for image in images])
        out = alloc((len(images), *images[0].shape), images[0].dtype)
        return np.stack(images, out=out)

    def value(self, row: int) -> Any:  # noqa: ANN401
        """Return one row's value; None for a missing one."""
        value = _value(self._taken(np.array([row])))
        return value if self._decode is None or value is None else self._image(value)

    def _taken(self, rows: NDArray[np.int64]) -> pa.Array:
        # `ChunkedArray.take` takes 300 us where a table has 1,000 pieces, and older releases join
        # all pieces first; a slice takes 1 us.
        if len(self._chunks) == 1:
            return self._chunks[0].take(pa.array(rows))
        places = zip(*(part.tolist() for part in self._places(rows)), strict=True)
        return pa.concat_arrays([self._chunks[piece].slice(place, 1) for piece, place in places])

    def _places(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return in which piece each row lies, and where in it."""
        pieces = np.searchsorted(self._stops, rows, side="right")
        return pieces, rows - self._starts[pieces]

    def _image(self, file: dict[str, Any]) -> NDArray[Any]:
        assert self._decode is not None
        data = file["bytes"]
        if data is None:
            if file["path"] is None:
                raise ValueError("an image has neither bytes nor a path in its column.")
            data = read_file(file["path"], remedy="embed it in the table")
        return self._decode(data)


class _Memory:
    """A buffer of each piece of a column, as one array from the lowest address to the highest."""

    # What lies between two buffers may be anything, or no memory at all, and is never read.

    def __init__(
        self, buffers: Sequence[pa.Buffer], offsets: Sequence[int], dtype: DTypeLike
    ) -> None:
        size_of_one = np.dtype(dtype).itemsize
        addresses = np.array([buffer.address for buffer in buffers])
        low = addresses.min()
        size = max(buffer.address + buffer.size for buffer in buffers) - low
        memory = pa.foreign_buffer(low, size - size % size_of_one, buffers)
        self.array: NDArray[Any] = np.frombuffer(memory, dtype)
        self.is_aligned = not (addresses % size_of_one).any()  # else numpy would copy it all
        self._starts = (addresses - low) // size_of_one + np.array(offsets)

    def at(self, pieces: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where in the array some places of some pieces are."""
        return self._starts[pieces] + places  # type: ignore[no-any-return]


class _Gathered:
    """Numbers, lists of them, or text, none of them null: rows of all pieces are taken at once."""

    def __init__(self, kind: pa.DataType, data: _Memory, offsets: _Memory | None) -> None:
        self._is_bytes, self._is_str = _is_text(kind), kind in (pa.string(), pa.large_string())
        self._data = data
        self._offsets = offsets

    @classmethod
    def of(cls, kind: pa.DataType, chunks: Sequence[pa.Array]) -> _Gathered | None:
        """Return a column, given its pieces that have rows; None if it is of another kind."""
        is_list, is_text = isinstance(kind, pa.ListType | pa.LargeListType), _is_text(kind)
        parts = [chunk.values for chunk in chunks] if is_list else chunks
        of_part = pa.uint8() if is_text else kind.value_type if is_list else kind
        buffers = [part.buffers()[-1] for part in parts] if _is_number(of_part) else []
        if of_part == pa.bool_() or not all(buffers) or not buffers:
            return None
        if any(part.null_count for part in (*chunks, *parts)):
            return None
        offsets, starts = None, [0 if is_text else part.offset for part in parts]
        data = _Memory(buffers, starts, of_part.to_pandas_dtype())
        if is_list or is_text:
            buffers, starts = [c.buffers()[1] for c in chunks], [c.offset for c in chunks]
            is_large = kind in (pa.large_string(), pa.large_binary())
            is_large = is_large or pa.types.is_large_list(kind)
            offsets = _Memory(buffers, starts, np.int64 if is_large else np.int32)
        is_aligned = data.is_aligned and (offsets is None or offsets.is_aligned)
        return cls(kind, data, offsets) if is_aligned else None

    def take(
        self,
        pieces: NDArray[np.int64],
        places: NDArray[np.int64],
        alloc: Allocator,
        dtype: DTypeLike | None,
    ) -> Any:  # noqa: ANN401
        """Return row `places[i]` of piece `pieces[i]` for each i, as a batch's column."""
        array = self._data.array
        if self._offsets is None:
            values = array.take(self._data.at(pieces, places), mode="clip")
        else:
            at = self._offsets.at(pieces, places)
            first = self._offsets.array.take(at, mode="clip").astype(np.int64)
            sizes = self._offsets.array.take(at + 1, mode="clip") - first
            starts, size = self._data.at(pieces, first), int(sizes[0])
            if self._is_bytes:
                data = array.data
                ends = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
                if self._is_str:
                    return [str(data[start:stop], "utf-8") for start, stop in ends]
                return [bytes(data[start:stop]) for start, stop in ends]
            if (sizes != size).any():
                check_shapes([(size,) for size in sizes.tolist()])
            values = np.lib.stride_tricks.sliding_window_view(array, size)[starts]
        out = alloc(values.shape, array.dtype if dtype is None else dtype)
        with np.errstate(over="ignore"):  # float64 beyond float32 is infinite, as elsewhere
            out[...] = values
        return out


def _is_text(kind: pa.DataType) -> bool:
    """Return whether a type is text or bytes."""
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _kind_of_rows(kind: pa.DataType) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """Return the dtype and shape of rows of a type, -1 for the length of a list.

    None if they are neither numbers nor lists of them, or if lists of any length lie in lists.
    """
    shape = None
    if isinstance(kind, pa.BaseExtensionType):
        shape = getattr(kind, "shape", ())  # that of datasets' Array2D to Array5D
        kind = kind.storage_type
    sizes = []
    while not _is_number(kind):
        if not isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType):
            return None
        sizes.append(getattr(kind, "list_size", -1))
        kind = kind.value_type
    if shape is not None:
        if not shape or len(shape) != len(sizes):
            return None
        sizes = list(shape)
    if -1 in sizes[1:]:
        return None
    return np.dtype(kind.to_pandas_dtype()), tuple([-1, *sizes[1:]] if sizes else [])


def _numbers_in(array: pa.Array) -> pa.Array | None:
    """Return the numbers in lists, in a row; None if one of them, no float, or a list is null."""
    array = _stored(array)
    while not _is_number(array.type):
        if array.null_count:
            return None
        array = array.flatten()
    return None if array.null_count and not pa.types.is_floating(array.type) else array


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    )


def _stored(array: pa.Array) -> pa.Array:
    return array.storage if isinstance(array.type, pa.BaseExtensionType) else array


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


def _batch(array: pa.Array, alloc: Allocator, dtype: DTypeLike | None = None) -> Any:  # noqa: ANN401
    if _is_text(array.type):
        return array.to_pylist()
    if not pa.types.is_floating(array.type):
        _complete(array)
    if pa.types.is_struct(array.type):
        return {name: _batch(part, alloc) for name, part in _fields(array)}
    found = _as_array(array, alloc, dtype)
    return default_collate(array.to_pylist()) if found is None else found


def _value(array: pa.Array) -> Any:  # noqa: ANN401
    """Return the value of an array of one."""
    if array.null_count and not pa.types.is_floating(array.type):
        return None
    if pa.types.is_struct(array.type):
        return {name: _value(part) for name, part in _fields(array)}
    found = _as_array(array, np.empty)
    return array[0].as_py() if found is None else found[0]


def _fields(structs: pa.Array) -> list[tuple[str, pa.Array]]:
    return [(field.name, structs.field(number)) for number, field in enumerate(structs.type)]


def _as_array(
    array: pa.Array, alloc: Allocator, dtype: DTypeLike | None = None
) -> NDArray[Any] | None:
    """Return numbers or lists of them, none of them null; None if they are neither."""
    kind, numbers = _kind_of_rows(array.type), None
    if kind is None or (numbers := _numbers_in(array)) is None:
        return None
    own_dtype, shape = kind
    if shape:
        lists = _stored(array)
        if pa.types.is_fixed_size_list(lists.type):
            lengths = [lists.type.list_size] * len(lists)
        else:
            lengths = lists.value_lengths().to_pylist()
        if len(set(lengths)) > 1:
            check_shapes([(length, *shape[1:]) for length in lengths])
        shape = (lengths[0], *shape[1:])
    out = alloc((len(array), *shape), own_dtype if dtype is None else dtype)
    with np.errstate(over="ignore"):  # float64 beyond float32 is infinite, as elsewhere
        out[...] = numbers.to_numpy(zero_copy_only=False).reshape(out.shape)
    return out


# Datasets as they are


class _AsItIs:
    """Reads batches of a dataset as collating its rows would give them."""

    def __init__(self, dataset: Any, names: Sequence[str]) -> None:  # noqa: ANN401
        self._format = dataset.format["type"]
        self._rows = HuggingFaceRows(dataset, names)
        columns = {name: dataset.data.table.column(name) for name in names}
        self._kinds = {name: _kind_of_rows(column.type) for name, column in columns.items()}
        types = {"b": "?", "i": "i8", "u": "i8", "f": "f8" if self._format is None else "f4"}
        self._dtypes = {name: types[kind[0].kind] for name, kind in self._kinds.items() if kind}
        self.can_read = all(map(self._is_known, columns.values(), self._kinds.values()))

    def _is_known(self, column: Any, kind: Any) -> bool:  # noqa: ANN401 - pyarrow's
        """Return whether a column is of a kind that is known to come out equal."""
        if column.null_count:
            return False
        if kind is None:
            return _is_text(column.type) and self._format != "numpy"  # NumPy has a str of its own
        dtype, shape = kind
        if dtype == np.uint64 or (len(shape) > 1 and self._format is None):
            return False
        if not shape:
            # In the format "numpy" rows and batches are of different types, but for these.
            return self._format != "numpy" or dtype in ("?", "i8", "f4")
        numbers = map(_numbers_in, column.chunks)
        return all(found is not None and not found.null_count for found in numbers)

    def __call__(self, indices: NDArray[np.int64], alloc: Allocator) -> dict[str, Any]:
        if not len(indices):
            raise IndexError("a batch has one row at least")
        batch = self._rows.get_batch(indices, alloc, self._dtypes)
        for name, kind in self._kinds.items():
            if kind is None and self._format is not None:
                # The formatter has text in an array of NumPy's, which knows no zeros at its end.
                batch[name] = np.asarray(batch[name]).tolist()
            elif kind is not None and kind[1] and self._format is None:
                # A row is a Python list, so place k of all rows is an array by itself.
                places = alloc(batch[name].T.shape, self._dtypes[name])
                places[...] = batch[name].T
                batch[name] = list(places)
        return batch


def _reader(dataset: Any) -> BatchReader | None:  # noqa: ANN401
    form = dataset.format
    is_known = form["type"] in (None, "torch", "numpy")
    if not is_known or form["format_kwargs"] or form["output_all_columns"]:
        return None
    names = [name for name in dataset.column_names if name in form["columns"]]
    if not names or not all(map(_is_plain, (dataset.features[name] for name in names))):
        return None
    reader = _AsItIs(dataset, names)
    return reader if reader.can_read else None


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
_LISTS: Final = (getattr(datasets, "List", ()), getattr(datasets, "LargeList", ()))

register_batch_reader(datasets.Dataset, _reader)
