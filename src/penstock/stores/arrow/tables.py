# SPDX-License-Identifier: Apache-2.0
"""Rows of Arrow and Parquet files by position, as pieces of tables.

Arrow's own files (IPC files and streams) are mapped into memory: a row is where it is, and only
what is read of it is loaded. Parquet's are encoded and compressed by row groups: to read one row,
the whole group is decoded; the last few are kept.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no annotations
import pyarrow.compute as pc  # type: ignore[import-untyped]  # like that
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # like that

from penstock.errors import StoreError
from penstock.opening import MAX_TREE_BYTES, open_file, read_annotation
from penstock.stores.filesystems import FileState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["MAX_ROW_GROUP_BYTES", "Tables", "hugging_face_features", "table_paths"]

_SUFFIXES: Final = (".parquet", ".arrow", ".feather")
_PARQUET_MAGIC: Final = b"PAR1"
_IPC_MAGIC: Final = b"ARROW1"
_END_OF_STREAM: Final = bytes.fromhex("ffffffff 00000000")
_OLD_END_OF_STREAM: Final = bytes(4)  # of Arrow before 0.15
MAX_ROW_GROUP_BYTES: Final = 1 << 30
"""The default of `max_row_group_size`."""
# A group that is not packed more tightly than this may be of any size: it is no bomb.
_MOST_PACKED: Final = 10
_ROW_BYTES: Final = 8  # of a row's key, at least
_VALUE_BYTES: Final = {  # of a value of each physical type, at least
    "BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4,
}  # fmt: skip
_MAX_GROUPS: Final = 4  # decoded row groups kept: of images, some 100 MB each as commonly written


def table_paths(place: Path) -> list[Path]:
    """Return the files that a path names: itself, or those of a folder in order.

    Of a folder that Hugging Face's `save_to_disk` wrote, those that its `state.json` names.

    Raises:
        StoreError: there is none.
    """
    if not place.is_dir():
        if not place.exists():
            raise StoreError(f"{place} does not exist. Name a Parquet or Arrow file, or a folder.")
        return [place]
    if (place / "dataset_dict.json").is_file():
        splits = _json(place / "dataset_dict.json").get("splits", [])
        raise StoreError(f"{place} holds several splits: name one, {place}/SPLIT, of {splits}.")
    if (place / "state.json").is_file():
        names = _names_in(place / "state.json")
    else:
        names = sorted(entry.name for entry in place.iterdir() if entry.suffix in _SUFFIXES)
    if not names:
        raise StoreError(f"{place} is a folder without a file ending in {', '.join(_SUFFIXES)}.")
    return [place / name for name in names]


def _names_in(path: Path) -> list[str]:
    files = _json(path).get("_data_files") or []
    try:
        return [os.path.basename(file["filename"]) for file in files]
    except (TypeError, KeyError) as error:
        raise StoreError(
            f"{path} is damaged: its _data_files should be a list of objects with a filename each, "
            f"and are {files!r:.100}. Save the dataset again, or name its files."
        ) from error


def _json(path: Path) -> Any:  # noqa: ANN401
    try:
        found = json.loads(read_annotation(path, MAX_TREE_BYTES))
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise StoreError(f"cannot read {path}: {error}.") from error
    return found


def hugging_face_features(schema: pa.Schema, place: Path) -> dict[str, Any]:
    """Return what Hugging Face's `datasets` wrote down of the columns; empty if it did not.

    It is in the metadata of each file, and beside the files in `dataset_info.json`.
    """
    info: Any = {}
    text = (schema.metadata or {}).get(b"huggingface")
    if text is not None:
        try:
            info = json.loads(text)["info"]
        except (ValueError, KeyError, TypeError, RecursionError):
            info = {}
    elif (place / "dataset_info.json").is_file():
        info = _json(place / "dataset_info.json")
    features = info.get("features") if isinstance(info, dict) else None
    return features if isinstance(features, dict) else {}


def _magic(path: Path) -> bytes:
    """Return the first bytes of a file, which the libraries open again by its path."""
    try:
        with open_file(path) as file:
            return file.read(6)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}.") from error


class Tables:
    """Files of one schema, open in one process; rows counted through all of them.

    Attributes:
        files: Which they are.
        schema: Of all files.
        num_rows: Of all files together.
    """

    def __init__(
        self, paths: Sequence[Path], max_row_group_size: int = MAX_ROW_GROUP_BYTES
    ) -> None:
        """Open the files.

        Args:
            paths: The files.
            max_row_group_size: Bytes that a row group of Parquet may take when it is decoded.

        Raises:
            StoreError: one cannot be read, or has other columns than the first.
        """
        self.files: list[FileState] = []
        self._sources: list[Any] = []
        self._max_row_group_size = max_row_group_size
        self._loaders: list[Callable[[list[str] | None], pa.Table]] = []  # of the pieces
        self._path_of: list[Path] = []  # that each piece is in
        self._batches: list[pa.RecordBatch] = []  # the pieces that are mapped
        self._pieces: dict[int, pa.Table] = {}  # of these, those that were verified
        self._sound: set[tuple[Path, int]] = set()  # groups whose dictionaries were looked at
        self._groups: OrderedDict[int, pa.Table] = OrderedDict()  # those that are decoded
        self._lock = threading.Lock()
        self.schema: pa.Schema | None = None
        lengths: list[int] = []
        try:
            for path in paths:
                lengths += self._add(path)
        except BaseException:
            self.close()
            raise
        if 0 < len(self._batches) < len(self._loaders):
            self.close()
            raise StoreError(f"{paths[0].parent} has Parquet and Arrow files: name one kind.")
        self._stops = np.cumsum(np.array(lengths, np.int64))
        self.num_rows = int(self._stops[-1]) if lengths else 0

    def _add(self, path: Path) -> list[int]:
        """Open one file and return the number of rows of each of its pieces."""
        try:
            self.files.append(FileState.of(path))
            magic = _magic(path)
            if magic.startswith(_PARQUET_MAGIC):
                lengths = self._add_parquet(path)
            else:
                lengths = self._add_arrow(path, is_stream=magic != _IPC_MAGIC)
            # What is open now is the file that was looked at, unless it was replaced in between.
            if FileState.of(path) != self.files[-1]:
                raise StoreError(f"{path} was changed while it was opened. Open it again.")
            return lengths
        except (OSError, ValueError, pa.ArrowException) as error:
            raise StoreError(
                f"cannot read {path}: {error}. It is damaged, or neither Parquet nor Arrow."
            ) from error

    def _add_parquet(self, path: Path) -> list[int]:
        mapped = pa.memory_map(str(path))
        self._sources.append(mapped)
        source = pq.ParquetFile(mapped)
        self._check_schema(source.schema_arrow, path)
        metadata = source.metadata
        self._check_packing(path, metadata.num_rows * _ROW_BYTES, "its rows")
        for group in range(source.num_row_groups):
            self._loaders.append(functools.partial(self._decoded, path, source, mapped, group))
            self._path_of.append(path)
        return [metadata.row_group(g).num_rows for g in range(source.num_row_groups)]

    def _decoded(
        self,
        path: Path,
        source: Any,  # noqa: ANN401
        mapped: Any,  # noqa: ANN401
        number: int,
        columns: list[str] | None,
    ) -> pa.Table:
        group = source.metadata.row_group(number)
        leaves = [group.column(place) for place in range(group.num_columns)]
        if columns is not None:
            leaves = [leaf for leaf in leaves if any(_is_part(leaf, name) for name in columns)]
        what = f"row group {number}"
        self._check_packing(path, sum(map(_decoded_bytes, leaves)), what)
        # Each value of a dictionary may come in every row. Most files end here.
        most_bytes = sum(leaf.num_values * leaf.total_uncompressed_size for leaf in leaves)
        if (path, number) not in self._sound and self._is_too_packed(path, most_bytes):
            texts = {x.path_in_schema for x in leaves if _is_expanded(x, source.schema_arrow)}
            size_bytes = sum(_expanded_bytes(mapped, source.metadata, number, x) for x in texts)
            self._check_packing(path, size_bytes, what)
            if columns is None:
                self._sound.add((path, number))
        return source.read_row_group(number, columns, use_threads=False).combine_chunks()

    def _check_packing(self, path: Path, size_bytes: int, what: str) -> None:
        """Raise if a small file says of itself that so much comes out of it."""
        if self._is_too_packed(path, size_bytes):
            in_file = _stored_bytes(path)
            raise StoreError(
                f"cannot read {path}: {what} would take {size_bytes:,} bytes or more, out of the "
                f"{in_file:,} of the file, and {self._max_row_group_size:,} is the most that is "
                "decoded: raise max_row_group_size of its store."
            )

    def _is_too_packed(self, path: Path, size_bytes: int) -> bool:
        is_large = size_bytes > self._max_row_group_size
        return is_large and size_bytes > _MOST_PACKED * _stored_bytes(path)

    def _add_arrow(self, path: Path, *, is_stream: bool) -> list[int]:
        source = pa.memory_map(str(path))
        self._sources.append(source)
        reader = pa.ipc.open_stream(source) if is_stream else pa.ipc.open_file(source)
        self._check_schema(reader.schema, path)
        if is_stream:
            batches = _streamed(reader, source, path)
        else:
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate()  # sizes and ends of its arrays; what lies between is not looked at
            self._batches.append(batch)
            self._loaders.append(functools.partial(_verified, batch))
            self._path_of.append(path)
        return [batch.num_rows for batch in batches]

    def _check_schema(self, schema: pa.Schema, path: Path) -> None:
        _ = [field.name for field in schema]  # decoded: one that is no UTF-8 is damage of the file
        if self.schema is None:
            self.schema = schema
        elif not schema.equals(self.schema):
            raise StoreError(f"{path} has other columns than the files before it.")

    def places(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the piece that each row is in, and its number in that."""
        pieces = np.searchsorted(self._stops, positions, side="right")
        starts = np.concatenate((np.zeros(1, np.int64), self._stops))
        return pieces, positions - starts[pieces]

    def piece(self, number: int) -> pa.Table:
        """Return one piece; of those that have to be decoded, the last few are kept.

        Raises:
            StoreError: it is damaged.
        """
        mapped = self._pieces.get(number)
        if mapped is not None:
            return mapped
        if self._batches:
            with self._damage_named(number):
                mapped = self._pieces[number] = self._loaders[number](None)
            return mapped
        with self._lock:
            table = self._groups.get(number)
            if table is None:
                with self._damage_named(number):
                    table = self._loaders[number](None)
                self._groups[number] = table
            self._groups.move_to_end(number)
            while len(self._groups) > _MAX_GROUPS:
                self._groups.popitem(last=False)
        return table

    @contextlib.contextmanager
    def _damage_named(self, number: int) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise StoreError(
                f"{self._path_of[number]} is damaged: {error}. Restore it from a copy."
            ) from error

    def column(self, name: str) -> pa.ChunkedArray:
        """Return one whole column; of Parquet files nothing else is read.

        Raises:
            StoreError: it is damaged.
        """
        chunks: list[pa.Array] = []
        for number, load in enumerate(self._loaders):
            with self._lock, self._damage_named(number):  # a ParquetFile is not thread-safe
                chunks += load([name])[name].chunks
        schema: Any = self.schema
        return pa.chunked_array(chunks, schema.field(name).type)

    def close(self) -> None:
        """Close the files. What was lent of their memory stays valid."""
        self._batches.clear()
        self._loaders.clear()
        self._pieces.clear()
        self._groups.clear()
        sources, self._sources = self._sources, []
        for source in sources:
            source.close()


def _stored_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512  # without holes


def _is_part(leaf: Any, name: str) -> bool:  # noqa: ANN401
    """Return whether a column of Parquet is a column of the table, or lies in that."""
    return f"{leaf.path_in_schema}.".startswith(f"{name}.")


def _decoded_bytes(leaf: Any) -> int:  # noqa: ANN401
    """Return how many bytes a column of a row group takes at least, as the file's end says.

    It is more where long texts repeat: then the file has each of them once.
    """
    of_values = leaf.num_values * _VALUE_BYTES.get(leaf.physical_type, 1)
    return int(max(leaf.total_uncompressed_size, of_values))


def _is_expanded(leaf: Any, schema: pa.Schema) -> bool:  # noqa: ANN401
    """Return whether texts are stored in a dictionary, and each row gets a copy of its own."""
    if leaf.physical_type != "BYTE_ARRAY" or not leaf.has_dictionary_page:
        return False
    return not any(pa.types.is_dictionary(x.type) for x in schema if _is_part(leaf, x.name))


def _expanded_bytes(mapped: Any, metadata: Any, number: int, name: str) -> int:  # noqa: ANN401
    """Return how many bytes the texts of a column take, without making them."""
    source = pq.ParquetFile(mapped, metadata=metadata, read_dictionary=[name])
    columns = source.read_row_group(number, [name], use_threads=False).columns
    size_bytes = 0
    for array in [array for column in columns for array in column.chunks]:
        while pa.types.is_nested(array.type):
            array = array.field(0) if pa.types.is_struct(array.type) else array.values
        if pa.types.is_dictionary(array.type):  # decimals are none
            lengths = pc.take(pc.binary_length(array.dictionary), array.indices)
            size_bytes += pc.sum(lengths).as_py() or 0
    return size_bytes


def _verified(batch: pa.RecordBatch, columns: list[str] | None) -> pa.Table:
    if columns is not None:
        batch = batch.select(columns)
    for array in batch.columns:
        _verify(array)
    return pa.Table.from_batches([batch])


def _verify(array: pa.Array) -> None:
    """Raise ArrowInvalid if its offsets are damaged, over which Arrow would end the process.

    The bytes of texts are not read: damage among them is found when a text is decoded.
    """
    if pa.types.is_string(array.type):
        array = array.view(pa.binary())
    elif pa.types.is_large_string(array.type):
        array = array.view(pa.large_binary())
    array.validate(full=True)


def _streamed(reader: Any, source: Any, path: Path) -> list[pa.RecordBatch]:  # noqa: ANN401
    """Return the batches of a stream."""
    batches = []
    end = source.tell()
    for batch in reader:
        batches.append(batch)
        end = source.tell()
    source.seek(end)
    rest = source.read(len(_END_OF_STREAM) + 1)
    if rest not in (_END_OF_STREAM, _OLD_END_OF_STREAM):
        num_rows = sum(batch.num_rows for batch in batches)
        what = "goes on behind the mark of its end" if rest else "has no mark of its end"
        raise StoreError(
            f"{path} {what}: it is a stream of Arrow's, and after {num_rows:,} rows, at byte "
            f"{end:,}, it should end. Was it cut, or not closed by its writer? Copy or write it "
            "again."
        )
    return batches
