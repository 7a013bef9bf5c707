# SPDX-License-Identifier: Apache-2.0
"""`ArrowStore`: rows of Parquet and Arrow files, and of Hugging Face datasets saved to disk.

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
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no annotations
import pyarrow.compute as pc  # type: ignore[import-untyped]  # like that
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # like that

from penstock.data.packed_list import PackedList
from penstock.errors import ConfigError, StoreError
from penstock.opening import MAX_TREE_BYTES, FileState, fingerprint_of, open_file, read_annotation
from penstock.sharing import Lease, Pool
from penstock.stores.index import Index, labels_from
from penstock.stores.records import EncodedImage, Record
from penstock.stores.store import OpenedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

_SUFFIXES: Final = (".parquet", ".arrow", ".feather")
_PARQUET_MAGIC: Final = b"PAR1"
_ENCRYPTED_MAGIC: Final = b"PARE"
_IPC_MAGIC: Final = b"ARROW1"
# The second is that of Arrow before 0.15.
_ENDS_OF_STREAM: Final = (bytes.fromhex("ffffffff 00000000"), bytes(4))
_MAX_ROW_GROUP_BYTES: Final = 1 << 30
# A group that is not packed more tightly than this may be of any size: it is no bomb.
_MOST_PACKED: Final = 10
_ROW_BYTES: Final = 8  # of a row's key, at least
_VALUE_BYTES: Final = {  # of a value of each physical type, at least
    "BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4,
}  # fmt: skip
_FOOTER_END_BYTES: Final = 8  # its length, and the magic number
_SIGNATURE_BYTES: Final = 28
_FEWEST_GROUPS: Final = 4  # decoded row groups kept, if they fit; more if they are asked for again
_MAX_KEPT_BYTES: Final = 1 << 29
_LABEL_NAMES: Final = frozenset(("class", "cls", "label", "labels", "target", "targets", "y"))


def table_paths(place: Path) -> list[Path]:
    """Return the files that a path names: itself, or those of a folder in order."""
    if not place.is_dir():
        if not place.exists():
            raise StoreError(f"{place} does not exist. Name a Parquet or Arrow file, or a folder.")
        return [place]
    if (place / "dataset_dict.json").is_file():
        splits = _json(place / "dataset_dict.json").get("splits", [])
        raise StoreError(f"{place} holds several splits: name one, {place}/SPLIT, of {splits}.")
    names = sorted(entry.name for entry in place.iterdir() if entry.suffix in _SUFFIXES)
    if (place / "state.json").is_file():
        files = _json(place / "state.json").get("_data_files") or []
        try:
            names = [os.path.basename(file["filename"]) for file in files]
        except (TypeError, KeyError) as error:
            raise StoreError(f"{place}/state.json is damaged: _data_files={files!r:.80}") from error
    if not names:
        raise StoreError(f"{place} is a folder without a file ending in {', '.join(_SUFFIXES)}.")
    return [place / name for name in names]


def _json(path: Path) -> Any:  # noqa: ANN401
    try:
        found = json.loads(read_annotation(path, MAX_TREE_BYTES))
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise StoreError(f"cannot read {path}: {error}.") from error
    return found


def _hugging_face_features(schema: pa.Schema, place: str) -> dict[str, Any]:
    """Return what Hugging Face's `datasets` wrote down of the columns; empty if it did not."""
    info: Any = None
    text = (schema.metadata or {}).get(b"huggingface")
    if text is not None:
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            info = json.loads(text)["info"]
    elif (path := Path(place, "dataset_info.json")).is_file():
        info = _json(path)
    features = info.get("features") if isinstance(info, dict) else None
    return features if isinstance(features, dict) else {}


class Tables:
    """Files of one schema, open in one process; rows counted through all of them."""

    def __init__(
        self,
        paths: Sequence[Path | str],
        max_row_group_size: int = _MAX_ROW_GROUP_BYTES,
        max_kept_size: int = _MAX_KEPT_BYTES,
    ) -> None:
        """Open the files."""
        self.files: list[FileState] = []
        self.schema: Any = None  # until the first is open
        self._sources: list[Any] = []
        self._max_row_group_size = max_row_group_size
        self._max_kept_size = max_kept_size
        self._loaders: list[Callable[[list[str] | None], pa.Table]] = []  # of the pieces
        self._path_of: list[Path | str] = []  # that each piece is in
        self._loaded: dict[int, pa.Table] = {}  # pieces: those that were verified, or decoded
        self._sound: set[tuple[Path | str, int]] = set()  # row groups whose texts fit
        self._num_kept = _FEWEST_GROUPS
        # Bytes of the pieces decoded last, twice as many as may be kept; the last of them are kept.
        self._recent: dict[int, int] = {}
        self._lock = threading.RLock()
        lengths: list[int] = []
        kinds = set()
        try:
            for path in paths:
                is_parquet, of_file = self._add(path)
                kinds.add(is_parquet)
                lengths += of_file
                self._path_of += [path] * len(of_file)
            if len(kinds) > 1:
                where = os.path.dirname(path)
                raise StoreError(f"{where} has Parquet and Arrow files: name one kind.")
        except (OSError, ValueError, pa.ArrowException) as error:
            self.close()
            raise StoreError(
                f"cannot read {path}: {error}. It is damaged, or neither Parquet nor Arrow."
            ) from error
        except BaseException:
            self.close()
            raise
        self._are_mapped = kinds == {False}
        self.lengths = np.array(lengths, np.int64)  # of the pieces
        self._stops = np.cumsum(self.lengths)
        self.num_rows = sum(lengths)

    def _add(self, path: Path | str) -> tuple[bool, list[int]]:
        """Open one file; return whether it is Parquet, and the rows of each of its pieces."""
        state = FileState.of(path)
        self.files.append(state)
        with open_file(path) as file:  # which the libraries open again by its path
            magic = file.read(6)
        source = pa.memory_map(str(path))
        self._sources.append(source)
        is_parquet = magic.startswith((_PARQUET_MAGIC, _ENCRYPTED_MAGIC))
        if is_parquet:
            lengths = self._add_parquet(path, source)
        else:
            lengths = self._add_ipc(path, source, is_stream=magic != _IPC_MAGIC)
        # What is open now is the file that was looked at, unless it was replaced since.
        if FileState.of(path) != state:
            raise StoreError(f"{path} was changed while it was opened. Open it again.")
        return is_parquet, lengths

    def _add_parquet(self, path: Path | str, source: Any, metadata: Any = None) -> list[int]:  # noqa: ANN401
        if metadata is None:
            source.seek(max(0, source.size() - _FOOTER_END_BYTES))
            metadata = read_footer(path, source, source.read())
        parquet = pq.ParquetFile(source, metadata=metadata)
        self._check_schema(parquet.schema_arrow, path)
        self._check_packing(path, metadata.num_rows * _ROW_BYTES, "its rows")
        groups = range(parquet.num_row_groups)
        decoded = functools.partial(self._decoded, path, source, parquet)
        self._loaders += [functools.partial(decoded, group) for group in groups]
        return [metadata.row_group(group).num_rows for group in groups]

    def _add_ipc(self, path: Path | str, source: Any, *, is_stream: bool) -> list[int]:  # noqa: ANN401
        reader = pa.ipc.open_stream(source) if is_stream else pa.ipc.open_file(source)
        self._check_schema(reader.schema, path)
        if is_stream:
            batches = _streamed(reader, source, path)
        else:
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate()  # sizes and ends of its arrays; what lies between is not looked at
            self._loaders.append(functools.partial(_verified, batch))
        return [batch.num_rows for batch in batches]

    def _check_schema(self, schema: pa.Schema, path: Path | str) -> None:
        _ = [field.name for field in schema]  # decoded: one that is no UTF-8 is damage of the file
        if self.schema is None:
            self.schema = schema
        elif not schema.equals(self.schema):
            raise StoreError(f"{path} has other columns than the files before it.")

    def _decoded(
        self,
        path: Path | str,
        mapped: Any,  # noqa: ANN401
        source: Any,  # noqa: ANN401
        number: int,
        columns: list[str] | None,
    ) -> pa.Table:
        group = source.metadata.row_group(number)
        leaves = [group.column(place) for place in range(group.num_columns)]
        if columns is not None:
            leaves = [leaf for leaf in leaves if any(is_part(leaf, name) for name in columns)]
        what = f"row group {number}"
        self._check_packing(path, sum(map(_decoded_bytes, leaves)), what)
        # Each value of a dictionary may come in every row. Most files end here.
        most_bytes = sum(leaf.num_values * leaf.total_uncompressed_size for leaf in leaves)
        if (path, number) not in self._sound and self._is_too_packed(path, most_bytes):
            texts = {leaf.path_in_schema for leaf in leaves if _is_expanded(leaf, self.schema)}
            size_bytes = sum(_expanded_bytes(mapped, source.metadata, number, x) for x in texts)
            self._check_packing(path, size_bytes, what)
            if columns is None:
                self._sound.add((path, number))
        return source.read_row_group(number, columns, use_threads=False).combine_chunks()

    def _check_packing(self, path: Path | str, size_bytes: int, what: str) -> None:
        """Raise if a small file says of itself that so much comes out of it."""
        if self._is_too_packed(path, size_bytes):
            raise StoreError(
                f"cannot read {path}: {what} would take {size_bytes:,} bytes or more, out of the "
                f"{self._stored_bytes(path):,} of the file, and {self._max_row_group_size:,} is "
                "the most that is decoded: raise max_row_group_size of its store."
            )

    def _is_too_packed(self, path: Path | str, size_bytes: int) -> bool:
        is_large = size_bytes > self._max_row_group_size
        return is_large and size_bytes > _MOST_PACKED * self._stored_bytes(path)

    def _stored_bytes(self, path: Path | str) -> int:
        status = os.stat(path)
        # Linux: without holes.
        return int(getattr(status, "st_blocks", status.st_size / 512) * 512)

    def fingerprint(self, what: str) -> str:
        """Return a hash of the files and of `what`."""
        return fingerprint_of(self.files, what)

    def places(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the piece that each row is in, and its number in that."""
        pieces = np.searchsorted(self._stops, positions, side="right")
        starts = np.concatenate((np.zeros(1, np.int64), self._stops))
        return pieces, positions - starts[pieces]

    def piece(self, number: int) -> pa.Table:
        """Return one piece; of those that have to be decoded, the last ones are kept."""
        table = self._loaded.get(number)
        if table is None:
            with self._lock:
                table = self._loaded.get(number)  # by another thread
                if table is None:
                    table = self._loaded[number] = self._load(number, None)
                    if not self._are_mapped:
                        self._let_go(number, table.nbytes)
        return table

    def _let_go(self, number: int, size_bytes: int) -> None:
        """Drop what was decoded first, now that a piece was decoded.

        One more is kept from now on if this one was dropped a short while ago: an order that never
        goes back needs few, one that mixes some needs all of these.
        """
        recent, loaded = self._recent, self._loaded
        self._num_kept += recent.pop(number, None) is not None
        recent[number] = size_bytes
        while len(loaded) > 1 and (
            len(loaded) > self._num_kept or sum(recent[k] for k in loaded) > self._max_kept_size
        ):
            del loaded[next(iter(loaded))]
        while len(recent) > 1 and sum(recent.values()) > 2 * self._max_kept_size:
            del recent[next(iter(recent))]

    def pieces(self, numbers: Sequence[int]) -> Iterator[pa.Table]:
        """Yield pieces in this order."""
        return map(self.piece, numbers)

    def order(self, pieces: NDArray[np.int64]) -> list[int]:
        """Return the places of `pieces` in the order in which fewest have to be decoded."""
        # What is kept comes first: what is decoded may take its place.
        absent = np.array([number not in self._loaded for number in pieces.tolist()])
        places: list[int] = np.lexsort((pieces, absent)).tolist()
        return places

    def _load(self, number: int, columns: list[str] | None) -> pa.Table:
        try:
            with self._lock:  # a ParquetFile is not thread-safe
                return self._loaders[number](columns)
        except (OSError, pa.ArrowException) as error:
            raise StoreError(
                f"{self._path_of[number]} is damaged: {error}. Restore it from a copy."
            ) from error

    def chunks(self, name: str) -> Iterator[pa.Array]:
        """Yield one column piece by piece; of Parquet files nothing else is read."""
        for number in range(len(self._loaders)):
            yield from self._load(number, [name])[name].chunks

    def column(self, name: str) -> pa.ChunkedArray:
        """Return one whole column; of Parquet files nothing else is read."""
        return pa.chunked_array(list(self.chunks(name)), self.schema.field(name).type)

    def close(self) -> None:
        """Close the files. What was lent of their memory stays valid."""
        self._loaders.clear()
        self._loaded.clear()
        sources, self._sources = self._sources, []
        for source in sources:
            source.close()


def read_footer(path: Path | str, source: Any, end: bytes) -> Any:  # noqa: ANN401
    """Return what the end of a Parquet file says of its row groups, unless it is encrypted.

    Where columns are and the footer is not, pyarrow ends the process when it looks at one. The
    footer is signed then, which takes 28 bytes. Reference: Apache Parquet, Modular Encryption, 5.4.
    """
    if not end.endswith(_ENCRYPTED_MAGIC):
        metadata = pq.ParquetFile(source).metadata
        if int.from_bytes(end[-8:-4], "little") != metadata.serialized_size + _SIGNATURE_BYTES:
            return metadata
    raise StoreError(f"{path} is encrypted. Decrypt it, or write it without encryption.")


def is_part(leaf: Any, name: str) -> bool:  # noqa: ANN401
    """Return whether a column of Parquet is a column of the table, or lies in that."""
    return f"{leaf.path_in_schema}.".startswith(f"{name}.")


def _decoded_bytes(leaf: Any) -> int:  # noqa: ANN401
    """Return how many bytes a column of a row group takes at least; more where texts repeat."""
    of_values = leaf.num_values * _VALUE_BYTES.get(leaf.physical_type, 1)
    return int(max(leaf.total_uncompressed_size, of_values))


def _is_expanded(leaf: Any, schema: pa.Schema) -> bool:  # noqa: ANN401
    """Return whether texts are stored in a dictionary, and each row gets a copy of its own."""
    if leaf.physical_type != "BYTE_ARRAY" or not leaf.has_dictionary_page:
        return False
    return not any(pa.types.is_dictionary(x.type) for x in schema if is_part(leaf, x.name))


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
    """Return a batch whose offsets are sound: damaged ones would end the process."""
    if columns is not None:
        batch = batch.select(columns)
    for array in batch.columns:
        if pa.types.is_string(array.type):
            array = array.view(pa.binary())
        elif pa.types.is_large_string(array.type):
            array = array.view(pa.large_binary())
        array.validate(full=True)
    return pa.Table.from_batches([batch])


def _streamed(reader: Any, source: Any, path: Path | str) -> list[pa.RecordBatch]:  # noqa: ANN401
    """Return the batches of a stream."""
    batches = []
    end = source.tell()
    for batch in reader:
        batches.append(batch)
        end = source.tell()
    source.seek(end)
    rest = source.read(len(_ENDS_OF_STREAM[0]) + 1)
    if rest not in _ENDS_OF_STREAM:
        num_rows = sum(batch.num_rows for batch in batches)
        what = "goes on behind the mark of its end" if rest else "has no mark of its end"
        raise StoreError(
            f"{path} {what}: it is a stream of Arrow's, and after {num_rows:,} rows, at byte "
            f"{end:,}, it should end. Was it cut, or not closed by its writer? Copy or rewrite it."
        )
    return batches


class _Columns(NamedTuple):
    """Which column is what."""

    image: str | None
    label: str | None
    key: str | None
    others: tuple[str, ...]
    label_names: tuple[str, ...]  # that Hugging Face's datasets wrote down


class _Seen(NamedTuple):
    """What was found when the files were opened first."""

    files: tuple[FileState, ...]
    columns: _Columns
    lengths: NDArray[np.int64]  # of row groups or batches


_tables: Pool[Tables] = Pool(Tables.close, is_local=True)


class ArrowStore(OpenedStore[Lease[Tables]]):
    """Rows of Parquet files, of Arrow files (IPC, as a file or a stream), or of a folder of those.

    A folder that Hugging Face's `Dataset.save_to_disk` wrote is one. To be read only.

    A sample is the pair (image, class) where there are no other columns than these and the key; the
    image alone where there is no class; otherwise a dict of all columns. Images are columns of
    bytes, or of structs that have `bytes`, as Hugging Face's. Classes are integers, or texts: then
    the class names are the texts, sorted. Files that were changed since they were opened first are
    an error.

    Arrow files are mapped and read in place, in any order. Of Parquet files a whole row group is
    decoded for one row, and the last ones are kept: read them in order or by a `ShardSampler`, or
    convert them once with `penstock pack`. See docs/stores-read-only.md.

    Concurrency:
        Any thread or process; each process opens the files for itself. Closed while another thread
        reads, they stay open until it has read.

    Example:
        >>> import tempfile
        >>> import pyarrow.parquet as pq
        >>> folder = tempfile.TemporaryDirectory()
        >>> table = pa.table({"image": [b"...", b"...."], "label": ["dog", "cat"]})
        >>> pq.write_table(table, f"{folder.name}/a.parquet")
        >>> with ArrowStore(f"{folder.name}/a.parquet") as store:
        ...     store.class_names, store.get_many([0])
        (('cat', 'dog'), [Record(key='0', label=1, sample=(<EncodedImage of 3 bytes>, 1))])
        >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | Path,
        *,
        image_column: str | None = None,
        label_column: str | Literal[False] | None = None,
        key_column: str | None = None,
        max_row_group_size: int = _MAX_ROW_GROUP_BYTES,
        max_kept_size: int = _MAX_KEPT_BYTES,
    ) -> None:
        """Name the files; they are opened at first use.

        Args:
            path: A file, or a folder of files.
            image_column: The column of images. None takes the only one that holds bytes, or structs
                with `bytes`.
            label_column: The column of classes. None takes the only one that Hugging Face's
                datasets call a ClassLabel; else the only one of integers or texts that is called
                class, cls, label, labels, target, targets or y. False says that there is no class.
            key_column: The column of keys, all different: texts or integers. None takes the number
                of the row.
            max_row_group_size: Bytes that a row group of Parquet may take when it is decoded; one
                that takes more, and ten times what the file has, is an error.
            max_kept_size: Bytes of decoded row groups that each process keeps, beside the one that
                it decodes. So many are kept only if they are asked for again.
        """
        self._place = str(Path(path))
        self._limits = max_row_group_size, max_kept_size
        self._wanted = image_column, label_column, key_column
        # At most one; of two threads that open it first, the first one's is everybody's.
        self._seen: list[_Seen] = []

    @property
    def address(self) -> str:
        """`arrow:` and the path."""
        return f"arrow:{self._place}"

    @property
    def shard_lengths(self) -> NDArray[np.int64]:
        """Number of rows of each row group of Parquet, or batch of Arrow; int64 (pieces,)."""
        len(self)  # opens the files, if they were not
        return self._seen[0].lengths

    def _using(self) -> contextlib.AbstractContextManager[Tables]:
        lease = self._open
        if lease is None or not lease.is_usable:
            # Not what a thread had in use when this process was forked: its lock may be held.
            # By a proxy, as a store that its lease held would not be closed when it is dropped.
            make = functools.partial(ArrowStore._opened, weakref.proxy(self))
            lease = self._open = _tables.acquire((os.getpid(), id(self)), make)
        return lease.using()

    def _opened(self) -> Tables:
        """Open the files, if they are those that were there at first."""
        tables = self._new_tables()
        try:
            if not self._seen:
                columns = _choose(tables.schema, self._place, *self._wanted)
                self._seen.append(_Seen(tuple(tables.files), columns, tables.lengths))
            changed = [now.path for now in tables.files if now not in self._seen[0].files]
            if changed:
                raise StoreError(f"{changed[0]} was changed since its index was read. Reopen it.")
        except BaseException:
            tables.close()
            raise
        return tables

    def _new_tables(self) -> Tables:
        paths = [Path(file.path) for file in self._seen[0].files] if self._seen else None
        return Tables(paths or table_paths(Path(self._place)), *self._limits)

    def _load_index(self) -> Index:
        with self._using() as tables:
            columns = self._seen[0].columns
            labels, names = None, columns.label_names
            if columns.label is not None:
                labels, names = _labels(tables.column(columns.label), columns, self._place)
            index = Index(
                self._keys(tables, columns),
                labels,
                names,
                fingerprint=tables.fingerprint(f"{tables.num_rows}\0{columns}"),
                are_pairs=tables.num_rows > 0
                and isinstance(labels, np.ndarray)
                and columns.image is not None
                and not columns.others,
            )
        twice = index.first_repeated()
        if twice is not None:
            raise StoreError(f"the column {columns.key!r} of {self._place} has {twice!r} twice.")
        return index

    def _keys(self, tables: Tables, columns: _Columns) -> PackedList[str]:
        if columns.key is None:
            width = len(str(max(0, tables.num_rows - 1)))
            return PackedList(f"{number:0{width}}" for number in range(tables.num_rows))
        values = tables.column(columns.key)
        if values.null_count:
            raise StoreError(f"the column {columns.key!r} of {self._place} lacks some keys.")
        return PackedList(str(value.as_py()) for value in values)

    @contextlib.contextmanager
    def _read(self, positions: NDArray[np.int64], *, copy: bool) -> Iterator[list[Record]]:
        index = self.index
        records: list[Any] = [None] * len(positions)
        with self._using() as tables:
            pieces, rows = tables.places(positions)
            order = tables.order(pieces)
            for place, table in zip(order, tables.pieces(pieces[order].tolist()), strict=True):
                position = int(positions[place])
                label = index.one_label_of(position)
                try:
                    sample = self._sample(table, int(rows[place]), label, copy=copy)
                except (ValueError, OverflowError, pa.ArrowException) as error:
                    raise StoreError(f"cannot read {self._name(position)}: {error}.") from error
                records[place] = Record(index.keys[position], label, sample)
        yield records  # what they show of the files is theirs, and stays when these are closed

    def _sample(self, table: pa.Table, row: int, label: int | None, *, copy: bool) -> Any:  # noqa: ANN401
        columns = self._seen[0].columns
        image = None
        if columns.image is not None:
            image = self._image(table.column(columns.image), row, copy=copy)
            if not columns.others:
                return (image, label) if columns.label is not None else image
        known = {columns.image: image, columns.label: label}
        return {
            name: known[name] if name in known else table.column(name)[row].as_py()
            for name in table.column_names
        }

    def _image(self, column: pa.ChunkedArray, row: int, *, copy: bool) -> EncodedImage:
        data = value = column[row]
        if pa.types.is_struct(column.type) and value.is_valid:
            data = value["bytes"]
        if not data.is_valid:
            raise StoreError(
                f"row {row} of a part of {self._place} has no image, but {value.as_py()!r:.200}. "
                "Save the dataset with its images embedded."
            )
        buffer = data.as_buffer()
        return EncodedImage(buffer.to_pybytes() if copy else memoryview(buffer))


def _choose(
    schema: pa.Schema,
    place: str,
    image: str | None,
    label: str | Literal[False] | None,
    key: str | None,
) -> _Columns:
    """Return which column is what."""
    features = _hugging_face_features(schema, place)
    listed = ", ".join(f"{field.name} ({field.type})" for field in schema)
    for name in (image, label, key):
        if isinstance(name, str) and schema.names.count(name) != 1:
            raise ConfigError(f"{place} has no column {name!r}, or two. It has: {listed}.")
    if image is None:
        found = [f.name for f in schema if _holds_images(f.type) and f.name not in (label, key)]
        image = _only(found, "image", place, listed)
    if label is None:
        others = [field for field in schema if field.name not in (image, key)]
        found = [field.name for field in others if _class_names(features, field.name) is not None]
        found = found or [f.name for f in others if f.name.lower() in _LABEL_NAMES and _is_class(f)]
        label = _only(found, "label", place, listed)
    return _Columns(
        image,
        label or None,
        key,
        tuple(name for name in schema.names if name not in (image, label, key)),
        (_class_names(features, label) if label else None) or (),
    )


def _only(found: list[str], what: str, place: str, listed: str) -> str | None:
    if len(found) > 1:
        raise ConfigError(
            f"{place} has {len(found)} columns that may hold the {what}s: {', '.join(found)}. Name "
            f'one: {what}_column="{found[0]}". Its columns: {listed}.'
        )
    return found[0] if found else None


def _holds_images(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(field.name == "bytes" and _holds_images(field.type) for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_class(field: pa.Field) -> bool:
    is_text = pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
    return bool(is_text or pa.types.is_integer(field.type) or pa.types.is_dictionary(field.type))


def _class_names(features: dict[str, Any], name: str) -> tuple[str, ...] | None:
    feature = features.get(name)
    if not isinstance(feature, dict) or feature.get("_type") != "ClassLabel":
        return None
    names = feature.get("names")
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _labels(column: pa.ChunkedArray, columns: _Columns, place: str) -> tuple[Any, tuple[str, ...]]:
    """Return the classes of all rows, and the names of the classes."""
    if pa.types.is_integer(column.type):
        try:
            column = column.cast(pa.int64())
        except pa.ArrowInvalid as error:
            raise StoreError(
                f"the column {columns.label!r} of {place} has a class beyond int64: {error}."
            ) from error
        if not column.null_count:
            return np.array(column.to_numpy()), columns.label_names  # no view of a mapped file
        return labels_from(column.to_pylist()), columns.label_names
    texts = column.to_pylist()
    if not all(isinstance(text, str) or text is None for text in texts):
        raise ConfigError(
            f"column {columns.label!r} of {place} is {column.type}; classes are integers or texts."
        )
    names = tuple(sorted({text for text in texts if text is not None}))
    number = {name: k for k, name in enumerate(names)}
    return labels_from([None if text is None else number[text] for text in texts]), names
