# SPDX-License-Identifier: Apache-2.0
"""How a packed collection is laid out. docs/mongodb.md says the same for readers.

    {_id: 0, key, label, record: Binary}     a record; _id is its position
    {_id: 1, key, label, file: ObjectId}     one above 15 MB, in GridFS: COLLECTION.penstock
    {_id: "penstock.pack", what, pack}       what is being packed, and the id of this packing
    {_id: "penstock.index.0", data}          the index as one record, in parts of at most 8 MB
    {_id: "penstock.summary", count, …}      written last: it makes the collection a store

It grows as COLLECTION.partial, and is renamed when it is complete.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import bson
import numpy as np
from bson import ObjectId
from gridfs import GridFSBucket

from penstock.errors import StoreError
from penstock.stores.index import Index
from penstock.stores.records import decode_record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from pymongo.collection import Collection
    from pymongo.database import Database

    from penstock.stores.mongo.address import MongoAddress
    from penstock.stores.mongo.connection import MongoConnection

__all__ = [
    "LAYOUT_VERSION",
    "LOCKS",
    "PACK_ID",
    "SUMMARY_ID",
    "PackedLayout",
    "bucket_of",
    "by_id",
    "find_summary",
    "hashable",
    "index_id",
    "partial_of",
    "read_files",
    "remove_other_files",
    "write_file",
]

LAYOUT_VERSION: Final = 1
SUMMARY_ID: Final = "penstock.summary"
PACK_ID: Final = "penstock.pack"
LOCKS: Final = "penstock.locks"  # the collection of the locks of writers
_TRIES: Final = 5
_CHUNK_BYTES: Final = 4 << 20  # GridFS' own 255 KiB would be 60 documents for the smallest of ours
_FIELDS: Final = {"record": 1, "file": 1, "fingerprint": 1}
_MOST_PARTS: Final = 100_000  # of the index: 800 GB


def index_id(part: int) -> str:
    """Return the `_id` of a part of the index."""
    return f"penstock.index.{part}"


def partial_of(collection: str) -> str:
    """Return the name of a collection while it grows."""
    return f"{collection}.partial"


def bucket_of(collection: str) -> str:
    """Return the GridFS bucket of a collection: ours alone, whatever the collection is called."""
    return f"{collection}.penstock"


def by_id(
    collection: Collection[Any], ids: list[Any], fields: Mapping[str, int]
) -> dict[Any, dict[str, Any]]:
    """Return the documents of these ids, those that are there, by one query.

    The C decoder of find() beat raw batches and lazily decoded documents: 4 ms for 64 records of
    30 kB, as against 6 ms, and 46 ms for 64 times find_one() (2 cores, loopback).
    """
    # With room for one more a reply that holds all of them leaves no cursor open behind it.
    found = collection.find({"_id": {"$in": ids}}, fields, batch_size=len(ids) + 1)
    return {hashable(document["_id"]): document for document in found}


def hashable(of: Any) -> Any:  # noqa: ANN401
    """Return an `_id` as `by_id` has it: one may be a document."""
    return bson.encode(of) if isinstance(of, dict) else of


def find_summary(database: Database[Any], address: MongoAddress) -> dict[str, Any] | None:
    """Return the summary of a packed collection, or None if it is none.

    Raises:
        StoreError: a later release packed it.
    """
    found: dict[str, Any] | None = database[address.collection].find_one({"_id": SUMMARY_ID})
    if found is not None and found.get("version") != LAYOUT_VERSION:
        raise StoreError(
            f"{address} has version {found.get('version')!r} of the layout; this release of "
            f"Penstock reads version {LAYOUT_VERSION}. A newer release may read it."
        )
    return found


class PackedLayout:
    """A collection that `pack` wrote."""

    def __init__(self, address: MongoAddress) -> None:
        """Remember where it is."""
        self._address = address

    def load(self, connection: MongoConnection, summary: Mapping[str, Any]) -> Index:
        """Return the index that goes with a summary, or with that of a collection put in its place.

        Raises:
            StoreError: it is damaged.
        """
        for _ in range(_TRIES):
            num_parts, count = summary.get("num_index_parts"), summary.get("count")
            if not isinstance(num_parts, int) or not 0 < num_parts <= _MOST_PARTS:
                raise self._damaged(f"its summary speaks of {num_parts!r:.40} parts of its index")
            ids: list[Any] = list(map(index_id, range(num_parts)))
            parts = connection.run("read", functools.partial(self._index_parts, ids))
            if len(parts) == len(ids):
                data = [parts[part].get("data") for part in ids]
                if not all(isinstance(part, bytes) for part in data):
                    raise self._damaged("the parts of its index are not binary")
                tree = decode_record(b"".join(data), f"the index of {self._address}").sample
                index = Index.from_tree(tree, str(self._address))
                if index.fingerprint == summary.get("fingerprint"):
                    if count != len(index):
                        raise self._damaged(
                            f"its summary speaks of {count!r:.40} records, its index of "
                            f"{len(index):,}"
                        )
                    return index
            # Was the collection replaced between our two queries?
            found = connection.run("read", lambda database: find_summary(database, self._address))
            summary = found or summary
        raise self._damaged("its index lacks a part, or is not the one that its summary speaks of")

    def _damaged(self, what: str) -> StoreError:
        return StoreError(
            f"{self._address} is damaged: {what}. Pack it anew, or restore it from a copy."
        )

    def _index_parts(self, ids: list[Any], database: Database[Any]) -> dict[Any, dict[str, Any]]:
        return by_id(database[self._address.collection], ids, {"data": 1})

    def values(
        self, connection: MongoConnection, positions: NDArray[np.int64], index: Index
    ) -> dict[int, bytes]:
        """Return the bytes of the records at `positions`, those that are there.

        Raises:
            StoreError: the collection is not the one whose index was read.
        """
        # The same query brings the summary, so no record of another packing is ever given.
        ids = [*np.unique(positions).tolist(), SUMMARY_ID]

        def read(database: Database[Any]) -> dict[int, bytes]:
            found = by_id(database[self._address.collection], ids, _FIELDS)
            self._check_same(found.pop(SUMMARY_ID, {}), index)
            files = {p: d["file"] for p, d in found.items() if isinstance(d.get("file"), ObjectId)}
            values = {
                p: d["record"] for p, d in found.items() if isinstance(d.get("record"), bytes)
            }
            if files:
                bucket = bucket_of(self._address.collection)
                contents = read_files(database, bucket, list(files.values()))
                values |= {p: contents[f] for p, f in files.items() if f in contents}
            return values

        return connection.run("read", read)

    def _check_same(self, summary: Mapping[str, Any], index: Index) -> None:
        found = summary.get("fingerprint")
        if found != index.fingerprint:
            now = "there is none" if found is None else f"it is {found}"
            raise StoreError(
                f"{self._address} is not the collection that it was: its fingerprint was "
                f"{index.fingerprint}, now {now}. It was packed anew while it was in use; make "
                "the dataset again."
            )


def read_files(
    database: Database[Any], bucket: str, ids: Sequence[ObjectId]
) -> dict[ObjectId, bytes]:
    """Return the contents of files by id, those that are there. Two queries in all.

    Raises:
        StoreError: a file lacks a part.
    """
    asked = {"$in": list(dict.fromkeys(ids))}
    found = database[f"{bucket}.files"].find({"_id": asked}, {"length": 1})
    lengths = {file["_id"]: file.get("length") for file in found}
    parts: dict[ObjectId, list[bytes]] = defaultdict(list)
    order = [("files_id", 1), ("n", 1)]
    for chunk in database[f"{bucket}.chunks"].find({"files_id": asked}, sort=order):
        data = chunk.get("data")
        parts[chunk["files_id"]].append(data if isinstance(data, bytes) else b"")
    files = {file_id: b"".join(parts[file_id]) for file_id in lengths}
    for file_id, data in files.items():
        if len(data) != lengths[file_id]:
            raise StoreError(
                f"the GridFS file {file_id} in {database.name}.{bucket} lacks a part: it has "
                f"{len(data):,} of {lengths[file_id]!r:.40} bytes. Restore it from a copy."
            )
    return files


def write_file(
    database: Database[Any], bucket: str, file_id: ObjectId, key: str, data: bytes, pack: ObjectId
) -> None:
    """Write a file, over what an interrupted try left of it; `pack` says whose it is."""
    database[f"{bucket}.chunks"].delete_many({"files_id": file_id})
    database[f"{bucket}.files"].delete_one({"_id": file_id})
    files = GridFSBucket(database, bucket_name=bucket, chunk_size_bytes=_CHUNK_BYTES)
    files.upload_from_stream_with_id(file_id, key, data, metadata={"pack": pack})


def remove_other_files(database: Database[Any], bucket: str, keep: Iterable[ObjectId]) -> None:
    """Remove what earlier packs, and interrupted ones, left in a bucket of ours."""
    kept = list(keep)
    database[f"{bucket}.files"].delete_many({"_id": {"$nin": kept}})
    database[f"{bucket}.chunks"].delete_many({"files_id": {"$nin": kept}})
