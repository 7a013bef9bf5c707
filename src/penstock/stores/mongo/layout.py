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
from typing import TYPE_CHECKING, Any, Final

import bson
import numpy as np
from bson import ObjectId

from penstock.errors import StoreError
from penstock.stores.index import Index
from penstock.stores.mongo.files import read_files
from penstock.stores.records import decode_record

if TYPE_CHECKING:
    from collections.abc import Mapping

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
]

LAYOUT_VERSION: Final = 1
SUMMARY_ID: Final = "penstock.summary"
PACK_ID: Final = "penstock.pack"
LOCKS: Final = "penstock.locks"  # the collection of the locks of writers
_TRIES: Final = 5
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
            ids: list[Any] = [index_id(part) for part in range(_num_parts(summary, self._address))]
            parts = connection.run("read", functools.partial(self._index_parts, ids))
            if len(parts) == len(ids):
                index = self._index([parts[part].get("data") for part in ids])
                if index.fingerprint == summary.get("fingerprint"):
                    self._check_count(index, summary)
                    return index
            # Was the collection replaced between our two queries?
            found = connection.run("read", lambda database: find_summary(database, self._address))
            summary = found or summary
        raise StoreError(
            f"the index of {self._address} lacks a part, or is not the one that its summary speaks "
            "of. Pack it anew, or restore it from a copy."
        )

    def _index(self, parts: list[Any]) -> Index:
        if not all(isinstance(part, bytes) for part in parts):
            raise StoreError(
                f"the index of {self._address} is damaged: its parts are not binary. Pack it anew, "
                "or restore it from a copy."
            )
        tree = decode_record(b"".join(parts), f"the index of {self._address}").sample
        return Index.from_tree(tree, str(self._address))

    def _check_count(self, index: Index, summary: Mapping[str, Any]) -> None:
        if summary.get("count") != len(index):
            raise StoreError(
                f"{self._address} is damaged: its summary speaks of {summary.get('count')!r:.40} "
                f"records, its index of {len(index):,}. Pack it anew, or restore it from a copy."
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


def _num_parts(summary: Mapping[str, Any], address: MongoAddress) -> int:
    found = summary.get("num_index_parts")
    if not isinstance(found, int) or not 0 < found <= _MOST_PARTS:
        raise StoreError(
            f"the summary of {address} is damaged: it speaks of {found!r:.40} parts of the index. "
            "Pack it anew, or restore it from a copy."
        )
    return found
