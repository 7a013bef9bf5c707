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

import re
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

    from penstock.stores.mongo.connection import MongoAddress, MongoConnection

LAYOUT_VERSION: Final = 1
SUMMARY_ID: Final = "penstock.summary"
PACK_ID: Final = "penstock.pack"
LOCKS: Final = "penstock.locks"  # the collection of the locks of writers
_FIELDS: Final = {"record": 1, "file": 1, "fingerprint": 1}
INDEX_ID: Final = "penstock.index."  # and the number of the part
# No wider: documents of other making may have ids that begin with "penstock.".
_OURS: Final = {"$in": [SUMMARY_ID, PACK_ID, re.compile(r"^penstock\.index\.")]}


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


def own_documents(connection: MongoConnection, address: MongoAddress) -> dict[Any, dict[str, Any]]:
    """Return what a collection has beside its records, by `_id`: summary, index, description."""

    # One query, so that all are of one packing: the server ends it if the collection is replaced.
    def read(database: Database[Any]) -> dict[Any, dict[str, Any]]:
        found = database[address.collection].find({"_id": _OURS})
        return {document["_id"]: document for document in found}

    return connection.run("read", read)


def index_in(documents: Mapping[Any, Mapping[str, Any]], address: MongoAddress) -> Index | None:
    """Return the index of a packed collection, from its own documents; None if it is none."""
    summary = documents.get(SUMMARY_ID)
    if summary is None:
        return None
    if summary.get("version") != LAYOUT_VERSION:
        raise StoreError(
            f"{address} has version {summary.get('version')!r} of the layout; this release of "
            f"Penstock reads version {LAYOUT_VERSION}. A newer release may read it."
        )
    num_parts = sum(name.startswith(INDEX_ID) for name in documents)
    data: list[Any] = [documents.get(f"{INDEX_ID}{n}", {}).get("data") for n in range(num_parts)]
    if num_parts != summary.get("num_index_parts") or not all(isinstance(p, bytes) for p in data):
        raise _damaged(
            address,
            f"its summary speaks of {summary.get('num_index_parts')!r:.40} parts of its index, and "
            f"{num_parts} are there, or not all are binary",
        )
    tree = decode_record(b"".join(data), f"the index of {address}").sample
    index = Index.from_tree(tree, str(address))
    facts = summary.get("count"), summary.get("fingerprint")
    if facts != (len(index), index.fingerprint):
        raise _damaged(
            address,
            f"its summary speaks of {facts[0]!r:.40} records with the fingerprint "
            f"{facts[1]!r:.40}, its index of {len(index)} with {index.fingerprint!r}",
        )
    return index


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
