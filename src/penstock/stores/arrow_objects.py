# SPDX-License-Identifier: Apache-2.0
"""`ParquetObjectStore`: rows of Parquet files in object storage, read by row groups.

footer    of each file, at the end: where its row groups and their columns are
group 0   bytes of one range, which a local cache may keep
…
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no annotations

from penstock.blobs.blobs import ByteRange, is_remote
from penstock.blobs.file import BlobFile
from penstock.blobs.ranges import RecordRanges
from penstock.data.packed_list import PackedList
from penstock.errors import StoreError
from penstock.stores.arrow import ArrowStore, Tables, is_part, read_footer
from penstock.stores.blob_store import PatternStore
from penstock.stores.index import Index
from penstock.stores.records import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.blobs.blobs import Blob
    from penstock.blobs.order import Traffic
    from penstock.stores.store import Store

_TAIL_BYTES: Final = 64 << 10  # of a file, which most footers fit into
_AHEAD_BYTES: Final = 64 << 20  # of a batch's row groups, before they are decoded
_AT_ONCE: Final = 8  # files of which nothing but the name is known

_OPTIONS: Final = {
    "image_column", "label_column", "key_column", "max_row_group_size", "max_kept_size",
}  # fmt: skip


def open_arrow(place: str | Path, **options: Any) -> Store:  # noqa: ANN401
    """Return the store of Arrow and Parquet files here (`ArrowStore`), or far away."""
    if is_remote(str(place)):
        return ParquetObjectStore(str(place), **options)
    return ArrowStore(place, **options)


class ParquetObjectStore(ArrowStore):
    """Rows of Parquet files in object storage; see `ArrowStore` for what a sample is.

    A row group is read by one range, and decoded whole. When the store is opened the footer of each
    file is read, and the columns of classes and keys; Arrow's own files have no such parts, and are
    refused.

    Concurrency:
        As `ArrowStore`; each process makes connections of its own.
    """

    def __init__(self, place: str, **options: Any) -> None:  # noqa: ANN401
        """Name the files; nothing is opened.

        Args:
            place: A Parquet file, a prefix of such, or a pattern, `s3://BUCKET/{000..015}.parquet`.
            options: Of `ArrowStore`, of `BlobStore` (`local_cache` keeps row groups), and of the
                place, as `endpoint`.

        Raises:
            ConfigError: an argument is of another form.
        """
        own = {name: options.pop(name) for name in _OPTIONS & options.keys()}
        super().__init__(place, **own)
        self._place = place
        self._groups = _RowGroups(place, **options)

    def close(self) -> None:
        """Close the files and the connections."""
        super().close()
        self._groups.close()

    @property
    def follow(self) -> Callable[..., Callable[[int, int], None] | None] | None:
        """Has row groups read ahead, see `CachedRecords.follow`; None without a local cache."""
        follow = self._groups.follow
        return None if follow is None else functools.partial(self._follow, follow)

    def _follow(
        self, follow: Callable[..., Callable[[int, int], None] | None], *parts: NDArray[np.int64]
    ) -> Callable[[int, int], None] | None:
        stops = np.cumsum(self.shard_lengths)
        rows = (np.where(part < 0, part + len(self), part) for part in parts)
        return follow(*(np.searchsorted(stops, part, side="right") for part in rows))

    @property
    def traffic(self) -> Traffic | None:
        """Row groups that this rank has read by way of the local cache; None without one."""
        return self._groups.traffic

    def _new_tables(self) -> Tables:
        return _ObjectTables(self._groups, *self._limits)


@dataclass(frozen=True, eq=False)
class _GroupRanges(RecordRanges):
    blobs: tuple[Blob, ...]
    footers: tuple[Any, ...]


class _RowGroups(PatternStore):
    """Row groups as they are stored, each a record."""

    _suffix = ".parquet"

    @property
    def address(self) -> str:
        """`arrow:` and the place, or pattern."""
        return f"arrow:{self._pattern}"

    def path(self, name: str) -> str:
        """Return what a file is called in errors."""
        return f"{self._blobs.address}/{name}"

    @property
    def ranges(self) -> _GroupRanges:
        """Where the groups are."""
        ranges = self._both[1]
        assert isinstance(ranges, _GroupRanges)
        return ranges

    def _load(self) -> tuple[Index, RecordRanges]:
        names, there = self._named()
        if there is None:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                blobs = list(pool.map(self._stat, names))
        else:
            blobs = [there[name] for name in names]
        footers, rows, keys = [], [], []
        for number, (blob, tail) in enumerate(zip(blobs, self._tails(blobs), strict=True)):
            footers.append(self._footer(blob, tail))
            for k in range(footers[-1].num_row_groups):
                chunks = [part for part, _ in _chunks(footers[-1].row_group(k))]
                for start, stop in chunks:
                    if not 0 <= start <= stop <= blob.size_bytes:
                        raise StoreError(
                            f"{self.path(blob.name)} is damaged: a column of row group {k} is said "
                            f"to be at bytes {start:,} to {stop:,} of {blob.size_bytes:,}. Restore "
                            "it from a copy."
                        )
                start, _ = min(chunks, default=(0, 0))
                rows.append((number, start, max((stop for _, stop in chunks), default=0)))
                keys.append(f"row group {k} of {blob.name}")
        objects, starts, stops = np.array(rows, np.int64).reshape(-1, 3).T
        ranges = _GroupRanges(
            tuple(blob.name for blob in blobs),
            tuple(blob.version for blob in blobs),
            objects.astype(np.int32),
            starts.copy(),
            stops.copy(),
            tuple(blobs),
            tuple(footers),
        )
        return Index(PackedList(keys), None, (), fingerprint=ranges.digest("")), ranges

    def _tails(self, blobs: Sequence[Blob]) -> Sequence[memoryview]:
        """Return the ends of files, with their footers in them."""
        tails = list(self._read_tails(blobs, [_TAIL_BYTES] * len(blobs)))
        sizes = [int.from_bytes(tail[-8:-4], "little") + 8 for tail in tails]
        long = [k for k, tail in enumerate(tails) if len(tail) < sizes[k] <= blobs[k].size_bytes]
        views = self._read_tails([blobs[k] for k in long], [sizes[k] for k in long])
        for k, view in zip(long, views, strict=True):
            tails[k] = view
        return tails

    def _read_tails(self, blobs: Sequence[Blob], sizes: Sequence[int]) -> Sequence[memoryview]:
        return self._blobs.read(
            [
                ByteRange(blob.name, max(0, blob.size_bytes - size), blob.size_bytes, blob.version)
                for blob, size in zip(blobs, sizes, strict=True)
            ]
        )

    def _footer(self, blob: Blob, tail: memoryview) -> Any:  # noqa: ANN401
        file = self.file(blob)
        file.at_hand = [(blob.size_bytes - len(tail), tail)]
        try:
            return read_footer(self.path(blob.name), pa.PythonFile(file, "r"), bytes(tail[-8:]))
        except (OSError, pa.ArrowException) as error:
            raise StoreError(
                f"cannot read {self.path(blob.name)}: {error}. It is damaged, or no Parquet file; "
                "only those are read from object storage."
            ) from error

    def file(self, blob: Blob) -> _FileInParts:
        """Return an object as a file."""
        return _FileInParts(self._blobs, blob)

    def bytes_of(self, ranges: Sequence[ByteRange]) -> Sequence[memoryview]:
        """Return bytes of the files that are no whole groups."""
        return self._blobs.read(ranges)

    def _record(self, position: int, view: memoryview, name: str, *, copy: bool) -> Record:
        return Record(self.keys[position], None, view)


def _chunks(group: Any) -> Iterator[tuple[tuple[int, int], Any]]:  # noqa: ANN401
    """Yield where each column of a row group is, first byte and behind the last, and the column."""
    for column in map(group.column, range(group.num_columns if group.num_rows else 0)):
        start = column.data_page_offset
        if column.has_dictionary_page and column.dictionary_page_offset:
            start = min(start, column.dictionary_page_offset)
        yield (start, start + column.total_compressed_size), column


class _FileInParts(BlobFile):
    """An object as a file, of which some parts are at hand: from which byte on, and the bytes."""

    def __init__(self, *args: Any) -> None:  # noqa: ANN401
        super().__init__(*args)
        self.at_hand: list[tuple[int, memoryview]] = []

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401
        """Fill a buffer, by a request if it is not at hand."""
        start, size = self.tell(), len(buffer)
        for at, view in self.at_hand:
            if at <= start and start + size <= at + len(view):
                buffer[:] = view[start - at : start - at + size]
                self.seek(start + size)
                return size
        return super().readinto(buffer)


class _ObjectTables(Tables):
    """Parquet objects, open in one process."""

    def __init__(self, groups: _RowGroups, *limits: int) -> None:
        self._groups, self._ranges = groups, groups.ranges
        self._opened: dict[Path | str, _FileInParts] = {}
        self._at_hand: dict[int, list[tuple[int, memoryview]]] = {}  # parts of row groups
        super().__init__([groups.path(name) for name in self._ranges.names], *limits)

    def _add(self, path: Path | str) -> tuple[bool, list[int]]:
        number = len(self._opened)
        file = self._opened[path] = self._groups.file(self._ranges.blobs[number])
        source = pa.PythonFile(file, "r")
        self._sources.append(source)
        return True, self._add_parquet(path, source, self._ranges.footers[number])

    def _stored_bytes(self, path: Path | str) -> int:
        return self._opened[path].size()

    def fingerprint(self, what: str) -> str:
        """Return a hash of the files and of `what`."""
        return self._ranges.digest(what)

    def pieces(self, numbers: Sequence[int]) -> Iterator[pa.Table]:
        """Yield pieces in this order; those that are absent are fetched at the same time."""
        ahead: dict[int, memoryview] = {}
        for k, number in enumerate(numbers):
            if number not in self._loaded and number not in ahead:
                absent = [n for n in dict.fromkeys(numbers[k:]) if n not in self._loaded]
                num = max(1, int((np.cumsum(self._ranges.sizes[absent]) <= _AHEAD_BYTES).sum()))
                records = self._groups.get_many(absent[:num])
                ahead = {n: record.sample for n, record in zip(absent, records, strict=False)}
            with self._lock:
                if (view := ahead.pop(number, None)) is not None:
                    self._at_hand[number] = [(int(self._ranges.starts[number]), view)]
                try:
                    table = self.piece(number)
                finally:
                    self._at_hand.pop(number, None)
            yield table

    def _load(self, number: int, columns: list[str] | None) -> pa.Table:
        with self._lock:
            parts = self._at_hand.get(number)
            if parts is None:
                (record,) = self._groups.get_many([number])
                parts = [(int(self._ranges.starts[number]), record.sample)]
            file = self._opened[self._path_of[number]]
            file.at_hand = parts
            try:
                return super()._load(number, columns)
            finally:
                file.at_hand = []

    def column(self, name: str) -> pa.ChunkedArray:
        """Return one whole column; of others nothing is read, and of this all at the same time."""
        wanted: list[tuple[int, ByteRange]] = []
        piece = 0
        for blob, footer in zip(self._ranges.blobs, self._ranges.footers, strict=True):
            for group in map(footer.row_group, range(footer.num_row_groups)):
                chunks = [chunk for chunk, leaf in _chunks(group) if is_part(leaf, name)]
                wanted += [(piece, ByteRange(blob.name, *chunk, blob.version)) for chunk in chunks]
                piece += 1
        with self._lock:
            views = self._groups.bytes_of([part for _, part in wanted])
            for (piece, part), view in zip(wanted, views, strict=True):
                self._at_hand.setdefault(piece, []).append((part.start, view))
            try:
                return super().column(name)
            finally:
                self._at_hand.clear()
