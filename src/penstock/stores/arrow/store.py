# SPDX-License-Identifier: Apache-2.0
"""`ArrowStore`: rows of Parquet and Arrow files, and of Hugging Face datasets saved to disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no annotations

from penstock.data.packed_list import PackedList
from penstock.errors import ConfigError, StoreError
from penstock.stores.arrow.tables import (
    MAX_ROW_GROUP_BYTES,
    Tables,
    hugging_face_features,
    table_paths,
)
from penstock.stores.index import Index, labels_from
from penstock.stores.lending import Lending
from penstock.stores.records import EncodedImage, Record
from penstock.stores.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.stores.filesystems import FileState

__all__ = ["ArrowStore"]

_LABEL_NAMES: Final = frozenset(("class", "cls", "label", "labels", "target", "targets", "y"))


class _Columns(NamedTuple):
    """Which column is what."""

    image: str | None
    label: str | None
    key: str | None
    others: tuple[str, ...]
    label_names: tuple[str, ...]  # that Hugging Face's datasets wrote down


class _OpenedFiles(NamedTuple):
    """What was found when the files were opened first."""

    files: tuple[FileState, ...]
    schema: pa.Schema
    columns: _Columns


class ArrowStore(Store):
    """Rows of Parquet files, of Arrow files (IPC, as a file or a stream), or of a folder of those.

    A folder that Hugging Face's `Dataset.save_to_disk` wrote is one. To be read only.

    A sample is the pair (image, class) where there are no other columns than these and the key; the
    image alone where there is no class; otherwise a dict of all columns. Images are columns of
    bytes, or of structs that have `bytes`, as Hugging Face's. Classes are integers, or texts: then
    the class names are the texts, sorted. Files that were changed since they were opened first are
    an error.

    Arrow files are mapped and read in place, in any order. Of Parquet files a whole row group is
    decoded for one row, and the last four are kept: read them in order, or convert them once with
    `penstock pack`. See docs/stores-read-only.md.

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
        max_row_group_size: int = MAX_ROW_GROUP_BYTES,
    ) -> None:
        """Name the files; they are opened at first use.

        Args:
            path: A file, or a folder of files.
            image_column: The column of images. None takes the only one that holds bytes, or structs
                with `bytes`.
            label_column: The column of classes. None takes the only one that Hugging Face's
                datasets call a ClassLabel; else the only one of integers or texts that is called
                class, cls, label, labels, target, targets or y. If there is none, but an image
                column and several columns of integers, and no lists or structs beside them, that
                is an error: it may be any of these. False says that there is no class.
            key_column: The column of keys, all different: texts or integers. None takes the number
                of the row.
            max_row_group_size: Bytes that a row group of Parquet may take when it is decoded; one
                that takes more, and ten times what the file has, is an error.
        """
        self._path = Path(path)
        self._max_row_group_size = max_row_group_size
        self._wanted = image_column, label_column, key_column
        # At most one; of two threads that open it first, the first one's is everybody's.
        self._seen: list[_OpenedFiles] = []
        self._open: Lending[Tables] = Lending()

    @property
    def address(self) -> str:
        """`arrow:` and the path."""
        return f"arrow:{self._path}"

    def close(self) -> None:
        """Close the files that are open, when no thread is reading them any more."""
        self._open.close()

    def _opened(self) -> Tables:
        """Open the files, if they are those that were there at first."""
        seen = [Path(file.path) for file in self._seen[0].files] if self._seen else None
        tables = Tables(seen or table_paths(self._path), self._max_row_group_size)
        try:
            if not self._seen:
                schema = tables.schema if tables.schema is not None else pa.schema([])
                columns = _choose(schema, self._path, *self._wanted)
                self._seen.append(_OpenedFiles(tuple(tables.files), schema, columns))
            self._check_unchanged(tables)
        except BaseException:
            tables.close()
            raise
        return tables

    def _check_unchanged(self, tables: Tables) -> None:
        seen = self._seen[0]
        for before, now in zip(seen.files, tables.files, strict=True):
            if before != now:
                raise StoreError(
                    f"{now.path} was changed since its index was read: it had {before.size_bytes:,}"
                    f" bytes, it has {now.size_bytes:,} and another time, or only that. Open the "
                    "store again, in a new ArrowStore or dataset."
                )
        if tables.schema is not None and not tables.schema.equals(seen.schema, check_metadata=True):
            raise StoreError(f"{self._path} was changed since: it has other columns.")

    def _load_index(self) -> Index:
        with self._open.lent(self._opened) as tables:
            return self._index_of(tables, self._seen[0].columns)

    def _index_of(self, tables: Tables, columns: _Columns) -> Index:
        labels, names = None, columns.label_names
        if columns.label is not None:
            labels, names = _labels(tables.column(columns.label), columns, self._path)
        keys = self._keys(tables, columns)
        index = Index(
            keys,
            labels,
            names,
            fingerprint=self._fingerprint_of(tables, columns),
            are_pairs=bool(len(keys))
            and isinstance(labels, np.ndarray)
            and columns.image is not None
            and not columns.others,
        )
        twice = index.first_repeated()
        if twice is not None:
            raise StoreError(f"the column {columns.key!r} of {self._path} has {twice!r} twice.")
        return index

    def _keys(self, tables: Tables, columns: _Columns) -> PackedList[str]:
        if columns.key is None:
            width = len(str(max(0, tables.num_rows - 1)))
            return PackedList(f"{number:0{width}}" for number in range(tables.num_rows))
        values = tables.column(columns.key)
        if values.null_count:
            raise StoreError(f"the column {columns.key!r} of {self._path} lacks some keys.")
        return PackedList(str(value.as_py()) for value in values)

    def _fingerprint_of(self, tables: Tables, columns: _Columns) -> str:
        digest = hashlib.blake2b(f"{tables.num_rows}\0{columns}".encode(), digest_size=16)
        for file in tables.files:
            digest.update(
                f"{os.path.basename(file.path)}\0{file.size_bytes}\0{file.time_ns}\0".encode()
            )
        return digest.hexdigest()

    @contextlib.contextmanager
    def _read(self, positions: NDArray[np.int64], *, copy: bool) -> Iterator[list[Record]]:
        index = self.index
        with self._open.lent(self._opened) as tables:
            records = self._records(index, tables, positions, copy=copy)
        yield records  # what they show of the files is theirs, and stays when these are closed

    def _records(
        self, index: Index, tables: Tables, positions: NDArray[np.int64], *, copy: bool
    ) -> list[Record]:
        columns = self._seen[0].columns
        records: list[Any] = [None] * len(positions)
        pieces, rows = tables.places(positions)
        for place in np.argsort(pieces, kind="stable").tolist():
            position = int(positions[place])
            table = tables.piece(int(pieces[place]))
            label = index.one_label_of(position)
            try:
                sample = self._sample(table, int(rows[place]), columns, label, copy=copy)
            except (ValueError, OverflowError, pa.ArrowException) as error:
                raise StoreError(
                    f"cannot read record {position} ({index.keys[position]!r}) of "
                    f"{self.address}: {error}."
                ) from error
            records[place] = Record(index.keys[position], label, sample)
        return records

    def _sample(
        self, table: pa.Table, row: int, columns: _Columns, label: int | None, *, copy: bool
    ) -> Any:  # noqa: ANN401
        image = None
        if columns.image is not None:
            image = self._image(table.column(columns.image), row, copy=copy)
            if not columns.others:
                return (image, label) if columns.label is not None else image
        names = [name for name in (columns.key, *columns.others) if name is not None]
        sample = {name: table.column(name)[row].as_py() for name in names}
        if columns.image is not None:
            sample[columns.image] = image
        if columns.label is not None:
            sample[columns.label] = label
        return {name: sample[name] for name in table.column_names}

    def _image(self, column: pa.ChunkedArray, row: int, *, copy: bool) -> EncodedImage:
        value = column[row]
        if pa.types.is_struct(column.type):
            if value.is_valid and not value["bytes"].is_valid:
                raise StoreError(
                    f"row {row} of a part of {self._path} has no image in it, but a path: "
                    f"{value['path'].as_py() if 'path' in value else None!r}. Save the dataset "
                    "with its images embedded."
                )
            value = value["bytes"] if value.is_valid else value
        if not value.is_valid:
            raise StoreError(f"row {row} of a part of {self._path} has no image.")
        buffer = value.as_buffer()
        return EncodedImage(buffer.to_pybytes() if copy else memoryview(buffer))


def _choose(
    schema: pa.Schema,
    place: Path,
    image: str | None,
    label: str | Literal[False] | None,
    key: str | None,
) -> _Columns:
    """Return which column is what."""
    features = hugging_face_features(schema, place)
    listed = ", ".join(f"{field.name} ({field.type})" for field in schema)
    for name in (image, label, key):
        if isinstance(name, str) and schema.names.count(name) != 1:
            raise ConfigError(f"{place} has no column {name!r}, or two. It has: {listed}.")
    if image is None:
        found = [f.name for f in schema if _holds_images(f.type) and f.name not in (label, key)]
        image = _only(found, "image", place, listed)
    if label is None:
        others = [field for field in schema if field.name not in (image, key)]
        label = _only(_that_may_be_labels(others, features), "label", place, listed)
        if label is None and image is not None:
            _refuse_unnamed_labels(others, place, listed)
    label = label or None
    return _Columns(
        image,
        label,
        key,
        tuple(name for name in schema.names if name not in (image, label, key)),
        (_class_names(features, label) if label is not None else None) or (),
    )


def _that_may_be_labels(fields: list[pa.Field], features: dict[str, Any]) -> list[str]:
    """Return the columns that are called labels: by Hugging Face's datasets, else by their name."""
    found = [field.name for field in fields if _class_names(features, field.name) is not None]
    return found or [
        field.name
        for field in fields
        if field.name.lower() in _LABEL_NAMES and _holds_classes(field.type)
    ]


def _refuse_unnamed_labels(fields: list[pa.Field], place: Path, listed: str) -> None:
    """Raise if several columns are what labels are, and none is called so.

    Lists and structs beside them are annotations; then integers are widths and the like.
    """
    found = [field.name for field in fields if pa.types.is_integer(field.type)]
    if len(found) < 2 or any(pa.types.is_nested(field.type) for field in fields):
        return
    raise ConfigError(
        f"{place} has {len(found)} columns that may hold the labels, and none is called so: "
        f'{", ".join(found)}. Name one: label_column="{found[0]}"; or say that there is none: '
        f"label_column=False. Its columns: {listed}."
    )


def _only(found: list[str], what: str, place: Path, listed: str) -> str | None:
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


def _holds_classes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_dictionary(kind)
    )


def _class_names(features: dict[str, Any], name: str) -> tuple[str, ...] | None:
    feature = features.get(name)
    if not isinstance(feature, dict) or feature.get("_type") != "ClassLabel":
        return None
    names = feature.get("names")
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _labels(column: pa.ChunkedArray, columns: _Columns, place: Path) -> tuple[Any, tuple[str, ...]]:
    """Return the classes of all rows, and the names of the classes."""
    if pa.types.is_integer(column.type):
        try:
            column = column.cast(pa.int64())
        except pa.ArrowInvalid as error:
            raise StoreError(
                f"the column {columns.label!r} of {place} has a class that 64 bits with a sign do "
                f"not hold: {error}."
            ) from error
        if not column.null_count:
            return np.array(column.to_numpy()), columns.label_names  # no view of a mapped file
        return labels_from(column.to_pylist()), columns.label_names
    texts = column.to_pylist()
    if not all(isinstance(text, str) or text is None for text in texts):
        raise ConfigError(
            f"the column {columns.label!r} of {place} is {column.type}; classes are integers or "
            "texts."
        )
    names = tuple(sorted({text for text in texts if text is not None}))
    number = {name: k for k, name in enumerate(names)}
    return labels_from([None if text is None else number[text] for text in texts]), names
