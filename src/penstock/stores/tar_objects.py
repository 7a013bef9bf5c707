# SPDX-License-Identifier: Apache-2.0
"""`TarObjectStore`: tar shards of WebDataset's layout in object storage.

train-000.tar        samples; the files of each lie next to each other
train-000.tar.index  a record: the version of the shard, and what its headers say
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.blobs.blobs import ByteRange, is_remote
from penstock.blobs.errors import BlobNotFound
from penstock.blobs.file import buffered
from penstock.blobs.ranges import RecordRanges
from penstock.data.packed_list import PackedList
from penstock.errors import StoreError
from penstock.opening import MAX_FILE_BYTES
from penstock.stores.blob_store import PatternStore
from penstock.stores.index import vector
from penstock.stores.records import decode_record, encode_record
from penstock.stores.tar import (
    ShardListing,
    TarListing,
    TarStore,
    joined_shards,
    list_shard,
)
from penstock.warn import warn_user

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.blobs.blobs import Blob
    from penstock.stores.index import Index
    from penstock.stores.records import Record
    from penstock.stores.store import Store

_SUFFIX: Final = ".index"
_AT_ONCE: Final = 8  # shards whose headers are read; each takes a piece of a file in memory


def open_tar(place: str | Path, **options: Any) -> Store:  # noqa: ANN401
    """Return the store of tar files on this machine (`TarStore`) or in object storage."""
    if is_remote(str(place)):
        return TarObjectStore(str(place), **options)
    return TarStore(place, **options)


@dataclass(frozen=True, eq=False)
class _TarRanges(RecordRanges):
    listing: TarListing


class TarObjectStore(PatternStore):
    """Samples in tar files in object storage; see `TarStore` for what a sample is.

    A sample is read by one range, so its files have to lie next to each other. What the headers
    of a shard say is kept in an index beside it, `NAME.tar.index`. A shard without one, or whose
    index is of another version of it, has its headers read in pieces of 8 MiB: that is the whole
    shard where its files are smaller. The index is written then, if the place can be written to.

    The place is a tar file, a prefix of such, or a pattern as `s3://BUCKET/{000..015}.tar`. A
    sample has a size from the first of its files to the last.

    Concurrency:
        As `BlobStore`.
    """

    _suffix = ".tar"
    max_file_size = MAX_FILE_BYTES

    @property
    def address(self) -> str:
        """`tar:` and the place, or pattern."""
        return f"tar:{self._pattern}"

    def _load(self) -> tuple[Index, RecordRanges]:
        shards, listings = self._list()
        names = [shard.name for shard in shards]
        listing = joined_shards(self._pattern, names, listings)
        first, sizes, _ = listing.files.T
        begins = listing.starts[:-1]
        ranges = _TarRanges(
            tuple(names),
            tuple(shard.version for shard in shards),
            listing.shard_of.astype(np.int32),
            np.minimum.reduceat(first, begins),
            np.maximum.reduceat(first + sizes, begins),
            listing,
        )
        self._check_order(ranges)
        return listing.index(ranges.digest(""), self.address), ranges

    def _check_order(self, ranges: _TarRanges) -> None:
        order = np.lexsort((ranges.starts, ranges.objects))
        one, other = order[:-1], order[1:]
        mixed = (ranges.objects[one] == ranges.objects[other]) & (
            ranges.stops[one] > ranges.starts[other]
        )
        if mixed.any():
            position = int(one[mixed.argmax()])
            raise StoreError(
                f"the files of sample {ranges.listing.keys[position]!r} in "
                f"{ranges.names[ranges.objects[position]]!r} of {self.address} do not lie next to "
                "each other, so it cannot be read by one range. Pack the shard by "
                "`tar --sort=name`, or read a copy on this machine."
            )

    def _list(self) -> tuple[list[Blob], list[ShardListing]]:
        names, there = self._named()
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = list(pool.map(lambda name: self._list_one(name, there), names))
        failures = [failure for *_, failure in found if failure is not None]
        if failures:
            warn_user(
                f"the headers of {len(failures):,} shard(s) of {self.address} are read whenever "
                f"it is opened, as their index cannot be kept beside them: {failures[0]}"
            )
        return [shard for shard, *_ in found], [listing for _, listing, _ in found]

    def _list_one(
        self, name: str, there: dict[str, Blob] | None
    ) -> tuple[Blob, ShardListing, StoreError | None]:
        """Return a shard, what it holds, and why its index cannot be kept."""
        shard = self._stat(name) if there is None else there[name]
        index, failure = name + _SUFFIX, None
        try:
            if there is None or index in there:
                (view,) = self._blobs.read([ByteRange(index)])
                listing = _decoded(decode_record(view, f"{index!r}").sample, shard)
                if listing is not None:
                    return shard, listing, None
        except BlobNotFound:
            pass
        except StoreError as error:  # it is something else's: it is not replaced
            failure = error
        path = f"{self._blobs.address}/{name}"
        listing = list_shard(path, buffered(self._blobs, shard), shard.size_bytes)
        if failure is None and not self._is_web:
            try:
                self._blobs.write(index, _encoded(shard, listing))
            except StoreError as error:
                failure = error
        return shard, listing, failure

    def _record(self, position: int, view: memoryview, name: str, *, copy: bool) -> Record:
        ranges = self._both[1]
        assert isinstance(ranges, _TarRanges)
        start = int(ranges.starts[position])
        path = f"{self._blobs.address}/{ranges.names[ranges.objects[position]]}"
        return ranges.listing.record(
            position,
            self.index.one_label_of(position),
            path,
            lambda offset, size, _: bytes(view[offset - start : offset - start + size]),
            self.max_file_size,
        )


def _encoded(shard: Blob, listing: ShardListing) -> bytes:
    tree = {
        "version": shard.version,
        "names": list(listing.names),
        "counts": listing.counts,
        "files": listing.files.ravel(),
        "extension_names": list(listing.extension_names),
        "classes": listing.classes,
    }
    return encode_record(shard.name, tree).data


def _decoded(tree: Any, shard: Blob) -> ShardListing | None:  # noqa: ANN401
    """Return the listing that `_encoded` was given; None if it is none of this shard."""
    try:
        listing = ShardListing(
            PackedList(map(str, tree["names"])),
            vector(tree["counts"], np.int64),
            vector(tree["files"], np.int64).reshape(-1, 3),
            tuple(map(str, tree["extension_names"])),
            vector(tree["classes"], np.int64),
        )
        firsts, sizes, numbers = listing.files.T
        is_class = np.array([name == "cls" for name in listing.extension_names], bool)
        fits = (
            tree["version"] == shard.version
            and len(listing.names) == len(listing.counts)
            and (listing.counts > 0).all()
            and listing.counts.sum() == len(listing.files)
            and is_class[numbers].sum() == len(listing.classes)
            and min(firsts.min(initial=0), sizes.min(initial=0), numbers.min(initial=0)) >= 0
            and (firsts <= shard.size_bytes - sizes).all()
        )
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return listing if fits else None
