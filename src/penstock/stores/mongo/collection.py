# SPDX-License-Identifier: Apache-2.0
"""What a packed collection consists of (docs/mongodb.md says the same for readers).

    {_id: 0, key, label, record: Binary}     a record; _id is its position
    {_id: 1, key, label, file: ObjectId}     one that an earlier release put into GridFS, in the
                                             bucket COLLECTION.penstock, as it had above 15 MB
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

from penstock.errors import StoreError
from penstock.stores.index import Index
from penstock.stores.records import decode_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from pymongo.collection import Collection
    from pymongo.database import Database

    from penstock.stores.mongo.address import MongoAddress
    from penstock.stores.mongo.connection import MongoConnection

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


def by_id(
    collection: Collection[Any], ids: list[Any], fields: Mapping[str, int]
) -> dict[Any, dict[str, Any]]:
    """Return the documents of these ids, those that are there, by one query."""
    # With room for one more a reply that holds all of them leaves no cursor open behind it.
    found = collection.find({"_id": {"$in": ids}}, fields, batch_size=len(ids) + 1)
    return {hashable(document["_id"]): document for document in found}


def hashable(of: Any) -> Any:  # noqa: ANN401
    """Return an `_id` as `by_id` has it: one may be a document."""
    return bson.encode(of) if isinstance(of, dict) else of


def find_summary(database: Database[Any], address: MongoAddress) -> dict[str, Any] | None:
    """Return the summary of a packed collection, or None if it is none."""
    found: dict[str, Any] | None = database[address.collection].find_one({"_id": SUMMARY_ID})
    if found is not None and found.get("version") != LAYOUT_VERSION:
        raise StoreError(
            f"{address} has version {found.get('version')!r} of the layout; this release of "
            f"Penstock reads version {LAYOUT_VERSION}. A newer release may read it."
        )
    return found


def load_index(
    connection: MongoConnection, address: MongoAddress, summary: Mapping[str, Any]
) -> Index:
    """Return the index that goes with a summary, or with that of a collection put in its place."""
    for _ in range(_TRIES):
        num_parts, count = summary.get("num_index_parts"), summary.get("count")
        if not isinstance(num_parts, int) or not 0 < num_parts <= _MOST_PARTS:
            raise _damaged(address, f"its summary speaks of {num_parts!r:.40} parts of its index")
        ids: list[Any] = list(map(index_id, range(num_parts)))
        parts = connection.run("read", functools.partial(_index_parts, address, ids))
        if len(parts) == num_parts:
            data: list[Any] = [parts[part].get("data") for part in ids]
            if not all(isinstance(part, bytes) for part in data):
                raise _damaged(address, "the parts of its index are not binary")
            tree = decode_record(b"".join(data), f"the index of {address}").sample
            index = Index.from_tree(tree, str(address))
            if index.fingerprint == summary.get("fingerprint"):
                if count != len(index):
                    what = f"its summary speaks of {count!r:.40} records, its index of {len(index)}"
                    raise _damaged(address, what)
                return index
        # Was the collection replaced between our two queries?
        found = connection.run("read", lambda database: find_summary(database, address))
        summary = found or summary
    raise _damaged(address, "the index lacks a part, or is not the one that its summary speaks of")


def _index_parts(
    address: MongoAddress, ids: list[Any], database: Database[Any]
) -> dict[Any, dict[str, Any]]:
    return by_id(database[address.collection], ids, {"data": 1})


def _damaged(address: MongoAddress, what: str) -> StoreError:
    return StoreError(f"{address} is damaged: {what}. Pack it anew, or restore it from a copy.")


def packed_values(
    connection: MongoConnection, address: MongoAddress, positions: NDArray[np.int64], index: Index
) -> dict[int, Any]:
    """Return the bytes of the records at `positions`, those that are there."""
    # The same query brings the summary, so no record of another packing is ever given.
    ids = [*np.unique(positions).tolist(), SUMMARY_ID]

    def read(database: Database[Any]) -> dict[int, Any]:
        found = by_id(database[address.collection], ids, _FIELDS)
        now = found.pop(SUMMARY_ID, {}).get("fingerprint")
        if now != index.fingerprint:
            raise StoreError(
                f"{address} is not the collection that it was: its fingerprint was "
                f"{index.fingerprint}, now {'there is none' if now is None else f'it is {now}'}. "
                "It was packed anew while it was in use; make the dataset again."
            )
        values = {p: d["record"] for p, d in found.items() if isinstance(d.get("record"), bytes)}
        files = {p: d["file"] for p, d in found.items() if isinstance(d.get("file"), ObjectId)}
        if files:
            contents = read_files(database, f"{address.collection}.penstock", list(files.values()))
            values |= {p: contents[f] for p, f in files.items() if f in contents}
        return values

    return connection.run("read", read)


def read_files(
    database: Database[Any], bucket: str, ids: Sequence[ObjectId]
) -> dict[ObjectId, bytes]:
    """Return the contents of files by id, those that are there. Two queries in all."""
    wanted = {"$in": list(dict.fromkeys(ids))}
    found = database[f"{bucket}.files"].find({"_id": wanted}, {"length": 1})
    lengths = {file["_id"]: file.get("length") for file in found}
    parts: dict[ObjectId, list[bytes]] = defaultdict(list)
    order = [("files_id", 1), ("n", 1)]
    for chunk in database[f"{bucket}.chunks"].find({"files_id": wanted}, sort=order):
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
