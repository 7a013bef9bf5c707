# SPDX-License-Identifier: Apache-2.0
"""Rows of Arrow and Parquet files by position, as pieces of tables.

Arrow's own files (IPC files and streams) are mapped into memory: a row is where it is, and only
what is read of it is loaded. Parquet's are encoded and compressed by row groups: to read one row,
the whole group is decoded; the last few are kept.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no annotations
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # like that

from penstock.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["TableFile", "Tables", "hugging_face_features", "table_paths"]

_SUFFIXES: Final = (".parquet", ".arrow", ".feather")
_PARQUET_MAGIC: Final = b"PAR1"
_IPC_MAGIC: Final = b"ARROW1"
_END_OF_STREAM: Final = bytes.fromhex("ffffffff 00000000")
_OLD_END_OF_STREAM: Final = bytes(4)  # of Arrow before 0.15
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
        files = _json(place / "state.json").get("_data_files") or []
        names = [os.path.basename(str(file.get("filename"))) for file in files]
    else:
        names = sorted(entry.name for entry in place.iterdir() if entry.suffix in _SUFFIXES)
    if not names:
        raise StoreError(f"{place} is a folder without a file ending in {', '.join(_SUFFIXES)}.")
    return [place / name for name in names]


def _json(path: Path) -> Any:  # noqa: ANN401
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError, RecursionError) as error:
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


class TableFile(NamedTuple):
    """A file as it was when it was opened.

    Attributes:
        path: Where it lies.
        size_bytes: Its size.
        time_ns: When it was changed last.
    """

    path: Path
    size_bytes: int
    time_ns: int

    @classmethod
    def of(cls, path: Path) -> TableFile:
        """Return the file at `path` as it is now."""
        status = path.stat()
        return cls(path, status.st_size, status.st_mtime_ns)


class Tables:
    """Files of one schema, open in one process; rows counted through all of them.

    Attributes:
        files: Which they are.
        schema: Of all files.
        num_rows: Of all files together.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Open the files.

        Raises:
            StoreError: one cannot be read, or has other columns than the first.
        """
        self.files: list[TableFile] = []
        self._sources: list[Any] = []
        self._loaders: list[Callable[[], pa.Table]] = []  # of the pieces
        self._pieces: dict[int, pa.Table] = {}  # those that are mapped
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
        if 0 < len(self._pieces) < len(self._loaders):
            self.close()
            raise StoreError(f"{paths[0].parent} has Parquet and Arrow files: name one kind.")
        self._stops = np.cumsum(np.array(lengths, np.int64))
        self.num_rows = int(self._stops[-1]) if lengths else 0

    def _add(self, path: Path) -> list[int]:
        """Open one file and return the number of rows of each of its pieces."""
        try:
            self.files.append(TableFile.of(path))
            with path.open("rb") as file:
                magic = file.read(6)
            if magic.startswith(_PARQUET_MAGIC):
                lengths = self._add_parquet(path)
            else:
                lengths = self._add_arrow(path, is_stream=magic != _IPC_MAGIC)
            # What is open now is the file that was looked at, unless it was replaced in between.
            if TableFile.of(path) != self.files[-1]:
                raise StoreError(f"{path} was changed while it was opened. Open it again.")
            return lengths
        except (OSError, pa.ArrowException) as error:
            raise StoreError(
                f"cannot read {path}: {error}. It is damaged, or neither Parquet nor Arrow."
            ) from error

    def _add_parquet(self, path: Path) -> list[int]:
        source = pq.ParquetFile(path, memory_map=True)
        self._sources.append(source)
        self._check_schema(source.schema_arrow, path)
        for group in range(source.num_row_groups):
            read = functools.partial(source.read_row_group, group, use_threads=False)
            self._loaders.append(read)
        metadata = source.metadata
        return [metadata.row_group(g).num_rows for g in range(source.num_row_groups)]

    def _add_arrow(self, path: Path, *, is_stream: bool) -> list[int]:
        source = pa.memory_map(str(path))
        self._sources.append(source)
        reader = pa.ipc.open_stream(source) if is_stream else pa.ipc.open_file(source)
        self._check_schema(reader.schema, path)
        batches = _streamed(reader, source, path) if is_stream else _batches(reader)
        for batch in batches:
            batch.validate()  # sizes and ends of its arrays; what lies between is not looked at
            self._pieces[len(self._loaders)] = pa.Table.from_batches([batch])
            self._loaders.append(pa.Table.from_batches)  # never called: the piece is there
        return [batch.num_rows for batch in batches]

    def _check_schema(self, schema: pa.Schema, path: Path) -> None:
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
        """Return one piece; of those that have to be decoded, the last few are kept."""
        mapped = self._pieces.get(number)
        if mapped is not None:
            return mapped
        with self._lock:
            table = self._groups.get(number)
            if table is None:
                table = self._loaders[number]().combine_chunks()
                self._groups[number] = table
            self._groups.move_to_end(number)
            while len(self._groups) > _MAX_GROUPS:
                self._groups.popitem(last=False)
        return table

    def column(self, name: str) -> pa.ChunkedArray:
        """Return one whole column; of Parquet files nothing else is read."""
        is_parquet = [isinstance(source, pq.ParquetFile) for source in self._sources]
        if all(is_parquet):
            columns = [source.read([name], use_threads=False)[name] for source in self._sources]
        else:
            columns = [self._pieces[number][name] for number in range(len(self._loaders))]
        chunks = [chunk for column in columns for chunk in column.chunks]
        return pa.chunked_array(chunks, self._type_of(name))

    def _type_of(self, name: str) -> pa.DataType:
        schema: Any = self.schema
        return schema.field(name).type

    def close(self) -> None:
        """Close the files. What was lent of their memory stays valid."""
        self._pieces.clear()
        self._groups.clear()
        sources, self._sources = self._sources, []
        for source in sources:
            source.close()


def _batches(reader: Any) -> list[pa.RecordBatch]:  # noqa: ANN401
    return [reader.get_batch(number) for number in range(reader.num_record_batches)]


def _streamed(reader: Any, source: Any, path: Path) -> list[pa.RecordBatch]:  # noqa: ANN401
    """Return the batches of a stream.

    Raises:
        StoreError: it lacks the mark at its end. Arrow lets a stream end without one; but so does
            one that was cut between two messages, and nothing else would tell that rows are gone.
    """
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
