# SPDX-License-Identifier: Apache-2.0
"""Collections that Penstock packed, and collections of other making.

Of the latter fields are named, and documents found by `_id`. A packed one is laid out so
(docs/mongodb.md says the same for readers):

    {_id: 0, key, label, record: Binary}     a record; _id is its position
    {_id: 1, key, label, file: ObjectId}     one above 15 MB, in GridFS: COLLECTION.penstock
    {_id: "penstock.pack", what, pack}       what is being packed, and the id of this packing
    {_id: "penstock.index.0", data}          the index as one record, in parts of at most 8 MB
    {_id: "penstock.summary", count, …}      written last: it makes the collection a store

It grows as COLLECTION.partial, and is renamed when it is complete.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import bson
import numpy as np
import xxhash
from bson import ObjectId
from bson.int64 import Int64
from gridfs import GridFSBucket

from penstock.data.packed_list import PackedList
from penstock.errors import StoreError
from penstock.opening import read_annotation
from penstock.stores.index import Index
from penstock.stores.records import decode_record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

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
    "ForeignLayout",
    "MongoFields",
    "PackedLayout",
    "bucket_of",
    "find_summary",
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
                data: list[Any] = [parts[part].get("data") for part in ids]
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
        raise self._damaged("the index lacks a part, or is not the one that its summary speaks of")

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


_BUCKET: Final = "fs"  # where drivers put GridFS files unless told otherwise
_IMAGES: Final = {"$type": ["binData", "objectId"]}  # a file, or the id of one in GridFS
_LABELS: Final = range(-(2**63), 2**63)


@dataclass(frozen=True)
class MongoFields:
    """Which fields of a foreign collection are what.

    Attributes:
        image: The image file's bytes, or the id of a file in GridFS.
        label: The class: an integer or a name; None where there is none.
        key: The record's name, different in each.
        query: Which documents belong to it, as `find` takes it.
        manifest: A JSON file of `path_list` and `label_list`, which then decide on order and
            labels.
    """

    image: str | None
    label: str | None
    key: str
    query: Mapping[str, Any] | None
    manifest: Path | None

    def are_given(self) -> bool:
        """Return whether any of them is."""
        return any((self.image, self.label, self.query, self.manifest)) or self.key != "_id"


class ForeignLayout:
    """A collection of somebody's own: a snapshot of ids, keys and labels, and how to read on."""

    def __init__(self, address: MongoAddress, image_field: str, ids: _Ids) -> None:
        """Remember where the images are."""
        self._address = address
        self._image_field = image_field
        self._ids = ids

    @classmethod
    def load(
        cls, connection: MongoConnection, address: MongoAddress, fields: MongoFields
    ) -> tuple[ForeignLayout, Index]:
        """Read ids, keys and labels by one query, in the order of `_id`; never an image.

        Raises:
            StoreError: no field of images is named, or one that no document has; a key comes
                twice, a label is neither an integer nor a name, or the manifest does not fit.
        """
        image_field = fields.image
        if image_field is None:
            raise connection.run("read", lambda database: _fields_to_name(database, address))
        found = connection.run("read", lambda database: _snapshot(database, address, fields))
        connection.run("read", lambda database: _check_fields(database, address, fields, found))
        if fields.manifest is not None:
            found = _as_listed(found, fields.manifest, address)
        labels, class_names = _numbered(found, address)
        ids = _Ids(found.ids)
        # A manifest may name a document several times, to have as many samples of it.
        is_listed = fields.manifest is not None
        keys = PackedList(found.keys) if is_listed else _distinct(found.keys, address)
        fingerprint = _fingerprint(found.keys, labels, ids)
        are_pairs = labels is not None and len(keys) > 0
        index = Index(keys, labels, class_names, {}, fingerprint, are_pairs)
        return cls(address, image_field, ids), index

    def values(
        self, connection: MongoConnection, positions: NDArray[np.int64], _: Index
    ) -> dict[int, Any]:
        """Return the image files at `positions`, those that are there."""
        distinct = np.unique(positions)
        ids = self._ids.at(distinct)

        def read(database: Database[Any]) -> dict[int, Any]:
            found = by_id(database[self._address.collection], ids, {self._image_field: 1})
            values = {
                position: _at(found[hashable(of)], self._image_field)
                for position, of in zip(distinct.tolist(), ids, strict=True)
                if hashable(of) in found
            }
            files = [value for value in values.values() if isinstance(value, ObjectId)]
            contents = read_files(database, _BUCKET, files) if files else {}
            for position, value in values.items():
                if isinstance(value, ObjectId):  # that of no file stays what it is
                    values[position] = contents.get(value, value)
            return values

        return connection.run("read", read)

    def image(self, value: object, name: str) -> bytes:
        """Return the image file that `values` found.

        Raises:
            StoreError: it is none; `name` says whose.
        """
        if isinstance(value, bytes):
            return bytes(value)  # not bson.Binary, which other kinds of binaries come as
        field, advice = self._image_field, ""
        if isinstance(value, ObjectId):
            problem = f"names the GridFS file {value}, which is not there (bucket {_BUCKET!r})"
        elif value is None:
            problem, advice = "has no such field", "{'$ne': None}"
        else:
            problem, advice = f"has a {type(value).__name__} there", f"{_IMAGES}"
        if advice:
            advice = f" Leave such documents out with query={{{field!r}: {advice}}}."
        raise StoreError(f"{name} has no image in {field!r}: its document {problem}.{advice}")


class _Snapshot(NamedTuple):
    """What one query finds, or a manifest makes of it. Without labels, `labels` is None."""

    ids: list[Any]
    keys: list[str]
    labels: list[Any] | None


def _snapshot(database: Database[Any], address: MongoAddress, fields: MongoFields) -> _Snapshot:
    projection = {name: 1 for name in ("_id", fields.label, fields.key) if name is not None}
    found = _Snapshot([], [], None if fields.label is None else [])
    collection = database[address.collection]
    for document in collection.find(fields.query or {}, projection, sort=[("_id", 1)]):
        found.ids.append(document["_id"])
        key = _at(document, fields.key)
        if key is None:
            raise StoreError(
                f"the document {document['_id']!r} of {address} has no field {fields.key!r}, "
                "which was named as the one of keys."
            )
        found.keys.append(str(key))
        if found.labels is not None:
            found.labels.append(_at(document, fields.label or ""))
    if not found.ids:
        what = "no document that fits the query" if fields.query else "no document, or is not there"
        raise StoreError(f"{address} has {what}. `penstock pack SRC {address}` fills a new one.")
    return found


def _check_fields(
    database: Database[Any], address: MongoAddress, fields: MongoFields, found: _Snapshot
) -> None:
    """Refuse fields that no document has: names with a typing mistake in them."""
    collection, chosen = database[address.collection], dict(fields.query or {})
    lacking = None
    if collection.find_one({"$and": [chosen, {fields.image: _IMAGES}]}, {"_id": 1}) is None:
        lacking = f"an image or the id of a GridFS file in {fields.image!r}", "image_field"
    elif found.labels is not None and all(label is None for label in found.labels):
        lacking = f"a field {fields.label!r}", "label_field"
    if lacking is not None:
        whose = "that fits the query " if chosen else ""
        raise StoreError(
            f"no document of {address} {whose}has {lacking[0]}, which was named as {lacking[1]}. "
            f"The first one has {_fields_of(collection.find_one(chosen) or {})}."
        )


def _at(document: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401
    """Return a field, of a document within the document where the name has dots."""
    value: Any = document
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _as_listed(found: _Snapshot, manifest: Path, address: MongoAddress) -> _Snapshot:
    """Return what a manifest lists, in its order and with its labels."""
    try:
        tree = json.loads(read_annotation(manifest))
        paths, labels = list(map(str, tree["path_list"])), list(tree["label_list"])
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(
            f"the manifest {manifest} is not JSON of the form "
            f'{{"path_list": [...], "label_list": [...]}}: {error!r:.200}.'
        ) from error
    if len(paths) != len(labels):
        raise StoreError(
            f"the manifest {manifest} has {len(paths):,} paths and {len(labels):,} labels."
        )
    try:
        positions = Index(_distinct(found.keys, address)).positions_of(paths).tolist()
    except StoreError as error:
        error.add_note(f"The manifest {manifest} lists it, for {address}.")
        raise
    return _Snapshot([found.ids[position] for position in positions], paths, labels)


def _distinct(keys: list[str], address: MongoAddress) -> PackedList[str]:
    packed = PackedList(keys)
    twice = Index(packed).first_repeated()
    if twice is not None:
        raise StoreError(
            f"the key {twice!r} comes twice in {address}; every record has a key of its "
            "own. key_field='_id' always has."
        )
    return packed


def _numbered(
    found: _Snapshot, address: MongoAddress
) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """Return labels as integers, and the names of classes where they were names."""
    labels = found.labels
    if labels is None:
        return None, ()
    if all(isinstance(label, str) for label in labels):
        names, numbers = np.unique(np.array(labels, np.object_), return_inverse=True)
        return numbers.astype(np.int64), tuple(names.tolist())
    for label, key in zip(labels, found.keys, strict=True):
        if not _is_class(label):
            raise StoreError(
                f"the label of {key!r} in {address} is {label!r:.80}. All labels are integers of "
                "64 bits, or all are names of classes."
            )
    return np.array([int(label) for label in labels], np.int64), ()


def _is_class(label: object) -> bool:
    # The mongo shell stores numbers as floating-point ones.
    if isinstance(label, float):
        return label.is_integer() and int(label) in _LABELS
    return isinstance(label, int) and label in _LABELS


def _fingerprint(keys: list[str], labels: NDArray[np.int64] | None, ids: _Ids) -> str:
    digest = xxhash.xxh3_128(str(len(keys)).encode())
    for key in keys:
        digest.update(key.encode("utf-8", "surrogatepass") + b"\0")
    digest.update(b"" if labels is None else labels.tobytes())
    digest.update(ids.to_bytes())
    return digest.hexdigest()


class _Ids:
    """Values of `_id`: 12 bytes for an ObjectId and 8 for an integer, where Python takes 70."""

    def __init__(self, ids: list[Any]) -> None:
        kinds = set(map(type, ids))
        self._values: Any = ids
        if kinds <= {int, Int64}:
            self._values = np.array(ids, np.int64)
        elif kinds == {ObjectId}:
            joined = b"".join(value.binary for value in ids)
            self._values = np.frombuffer(joined, np.uint8).reshape(-1, 12)
        elif kinds == {str}:
            self._values = PackedList(ids)

    def at(self, positions: NDArray[np.int64]) -> list[Any]:
        """Return some of them, as the driver takes them."""
        if not isinstance(self._values, np.ndarray):
            return [self._values[position] for position in positions.tolist()]
        chosen = self._values[positions]
        if chosen.ndim == 1:
            return chosen.tolist()  # type: ignore[no-any-return]
        return [ObjectId(row.tobytes()) for row in chosen]

    def to_bytes(self) -> bytes:
        """Return all of them as bytes, for a hash."""
        if isinstance(self._values, np.ndarray):
            return self._values.tobytes()
        return b"".join(bson.encode({"": value}) for value in self._values)


def _fields_to_name(database: Database[Any], address: MongoAddress) -> StoreError:
    """Return the error for a collection of somebody's, none of whose fields was named."""
    if database[partial_of(address.collection)].find_one({"_id": PACK_ID}) is not None:
        return StoreError(
            f"{address} is unfinished: its packing was interrupted, or goes on. `penstock pack "
            "--resume` with the same source and destination finishes it."
        )
    first = database[address.collection].find_one()
    if first is None:
        return StoreError(
            f"{address} is not there, or is empty. `penstock pack SRC {address}` makes it."
        )
    images = [name for name, value in first.items() if isinstance(value, bytes)]
    return StoreError(
        f"{address} was not packed by Penstock, so say which fields are what: "
        f"image_field={images[0] if images else 'NAME'!r}, and label_field=, if there are labels. "
        f"Its first document has {_fields_of(first)}."
    )


def _fields_of(document: Mapping[str, Any]) -> str:
    fields = []
    for name, value in document.items():
        is_binary = isinstance(value, bytes)
        kind = f"binary, {len(value):,} bytes" if is_binary else type(value).__name__
        fields.append(f"{name!r} ({kind})")
    return f"{', '.join(fields):.1000}"
