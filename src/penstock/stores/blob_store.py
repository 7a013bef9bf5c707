# SPDX-License-Identifier: Apache-2.0
"""`BlobStore`: the base of stores whose records are ranges of bytes in objects."""

from __future__ import annotations

import abc
import contextlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.blobs.blobs import is_remote, open_blobs
from penstock.blobs.errors import BlobNotFound
from penstock.errors import ConfigError, StoreError
from penstock.lines import parse_sized_path
from penstock.opening import checked_max_file_size
from penstock.stores.braces import expand_braces
from penstock.stores.store import Store, missing_records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.blobs.blobs import Blob, Blobs, ByteRange
    from penstock.blobs.cached import CachedRecords
    from penstock.blobs.order import Traffic
    from penstock.blobs.ranges import RecordRanges
    from penstock.stores.index import Index
    from penstock.stores.records import Record


class BlobStore(Store):
    """Records that lie in objects, in a folder or in object storage, each in one piece.

    A subclass defines `_load` and `_record`.

    Attributes:
        max_file_size: Bytes of the largest record that is read; inf for no limit. May be set.

    Concurrency:
        Any thread. A forked or spawned process makes connections of its own, at first use.
    """

    max_file_size: float = math.inf
    _loaded: tuple[Index, RecordRanges] | None = None
    _cached: CachedRecords | None = None

    def __init__(
        self,
        place: str,
        *,
        local_cache: str | None = None,
        eviction: str = "foresight",
        max_file_size: int | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Name the place; nothing is opened.

        Args:
            place: A folder, or an address as `s3://BUCKET/PREFIX`.
            local_cache: The folder of this machine that keeps remote records: "FOLDER" or
                "FOLDER:60GB", see docs/guide/caching.md.
            eviction: What a full cache evicts: "foresight" (needed last), "lru" (read longest ago).
            max_file_size: Bytes of the largest record that is read; a larger one is an error. None
                takes the default of the kind of store.
            options: Options of the place, such as `endpoint`.

        Raises:
            ConfigError: an argument is invalid, such as `local_cache` for a folder.
        """
        if eviction not in ("foresight", "lru"):
            raise ConfigError(f'{eviction=}: it is "foresight" or "lru".')
        self._blobs: Blobs = open_blobs(str(place), **options)
        if local_cache is not None and not is_remote(str(place)):
            raise ConfigError(f"local_cache= is for data that are far away; {place} is a folder.")
        self._local_cache = None if local_cache is None else str(local_cache)
        if self._local_cache is not None:
            folder, _ = parse_sized_path(self._local_cache)
            if str(folder).lower() == "ram" or is_remote(self._local_cache):
                raise ConfigError(
                    f"local_cache={self._local_cache!r} is no folder of this machine, as "
                    "/fast/disk:60GB. /dev/shm/cache:4GB is one in memory."
                )
        self._eviction = eviction
        if max_file_size is not None:
            self.max_file_size = checked_max_file_size(max_file_size)

    @abc.abstractmethod
    def _load(self) -> tuple[Index, RecordRanges]:
        """Return the index, and where the records are."""

    @abc.abstractmethod
    def _record(self, position: int, view: memoryview, name: str, *, copy: bool) -> Record:
        """Return a record of its bytes; `name` is what errors call it."""

    def close(self) -> None:
        """Close the connections."""
        if self._cached is not None:
            self._cached.close()
        self._blobs.close()

    def _load_index(self) -> Index:
        return self._both[0]

    @property
    def _both(self) -> tuple[Index, RecordRanges]:
        """Index and ranges of one reading: another may find another store."""
        both = self._loaded
        if both is None:
            try:
                both = self._load()
            except BaseException:
                self.close()  # nobody else will
                raise
            self._loaded = both
        return both

    @property
    def shard_lengths(self) -> NDArray[np.int64] | None:
        """Number of records of each object, int64 (objects,); None if each has its own."""
        ranges = self._both[1]
        lengths = np.bincount(ranges.objects, minlength=len(ranges.names))
        return None if len(lengths) >= len(ranges) > 1 else lengths

    @property
    def _cached_records(self) -> CachedRecords | None:
        if self._local_cache is not None and self._cached is None:
            from penstock.blobs.cached import CachedRecords
            from penstock.blobs.objects import ObjectBlobs

            ranges = self._both[1]
            assert isinstance(self._blobs, ObjectBlobs)
            self._cached = CachedRecords(self._blobs, ranges, self._local_cache, self._eviction)
        return self._cached

    @property
    def follow(self) -> Callable[..., Callable[[int, int], None] | None] | None:
        """Starts reading ahead, see `CachedRecords.follow`; None without a local cache."""
        cached = self._cached_records
        return None if cached is None else cached.follow

    @property
    def traffic(self) -> Traffic | None:
        """Counts of what this rank has read through the local cache; None without one."""
        return None if self._cached is None else self._cached.traffic

    @contextlib.contextmanager
    def _read(self, positions: NDArray[np.int64], *, copy: bool) -> Iterator[list[Record]]:
        ranges = self._both[1].at(positions)
        self._check_sizes(ranges)
        cached = self._cached_records
        try:
            views = self._blobs.read(ranges) if cached is None else cached.read(positions)
        except BlobNotFound as error:
            raise self._missing(positions, ranges, error) from error
        records = []
        for k, position in enumerate(positions.tolist()):
            name = (
                f"record {position} ({self.keys[position]!r}) of {self.address} (byte "
                f"{ranges[k].start:,} of {ranges[k].name})"
            )
            records.append(self._record(position, views[k], name, copy=copy))
        yield records

    def _check_sizes(self, ranges: Sequence[ByteRange]) -> None:
        for name, start, stop, _ in ranges:
            size = (stop or 0) - start
            if size > self.max_file_size:
                raise StoreError(
                    f"cannot read byte {start:,} on of {name!r} in {self.address}: the sample has "
                    f"{size:,} bytes, and {self.max_file_size:,} is the most that is read: raise "
                    "max_file_size of its store."
                )

    def _missing(
        self, positions: NDArray[np.int64], ranges: Sequence[ByteRange], error: BlobNotFound
    ) -> StoreError:
        pairs = zip(positions.tolist(), ranges, strict=True)
        gone = {self.keys[p] for p, wanted in pairs if repr(wanted.name) in str(error)}
        return missing_records(sorted(gone), self.address)


class PatternStore(BlobStore):
    """Records that lie in files of one kind: one, those directly in a folder, or of a pattern."""

    _suffix: str

    def __init__(self, place: str, **options: Any) -> None:  # noqa: ANN401
        """Name the files, the last part of the place by braces or the suffix; nothing is opened."""
        self._pattern = place
        folder, self._names = place, ""
        if "{" in place or place.endswith(self._suffix):
            end = place.partition("{")[0].rindex("/")
            folder, self._names = place[:end], place[end + 1 :]
            if not is_remote(f"{folder}/") or folder.endswith("/"):
                raise ConfigError(f"{place!r} names no bucket or host before the names of files.")
        super().__init__(folder, **options)

    @property
    def _is_web(self) -> bool:
        return self._pattern.startswith("http")

    def _stat(self, name: str) -> Blob:
        try:
            return self._blobs.stat(name)
        except BlobNotFound as error:
            raise StoreError(
                f"{error.args[0]} A folder is named with a slash at its end: {self._pattern}/"
            ) from error

    def _named(self) -> tuple[list[str], dict[str, Blob] | None]:
        """Return the names of the files; with them what a list says of all objects, if it was read.

        Raises:
            ConfigError: a web server has no lists.
            StoreError: there is no such file.
        """
        if self._names:
            names = expand_braces(self._names)
            if len(set(names)) < len(names):
                raise ConfigError(f"{self._pattern} names a file twice.")
            return names, None
        if self._is_web:
            raise ConfigError(
                f"a web server has no lists: name its files, as {self.address}/"
                f"{{000..015}}{self._suffix}."
            )
        there = {blob.name: blob for blob in self._blobs.list()}
        names = [name for name in there if name.endswith(self._suffix) and "/" not in name]
        if not names:
            raise StoreError(
                f"{self._pattern} has no object directly in it that ends in {self._suffix}."
            )
        return names, there
