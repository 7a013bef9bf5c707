# SPDX-License-Identifier: Apache-2.0
"""Collections that Penstock did not pack: fields are named, and documents found by `_id`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import bson
import numpy as np
import xxhash
from bson import ObjectId

from penstock.data.packed_list import PackedList
from penstock.errors import StoreError
from penstock.opening import read_annotation
from penstock.stores.index import Index
from penstock.stores.mongo.collection import PACK_ID, by_id, hashable, partial_of, read_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray
    from pymongo.database import Database

    from penstock.stores.mongo.address import MongoAddress
    from penstock.stores.mongo.connection import MongoConnection

_BUCKET: Final = "fs"  # where drivers put GridFS files by default
_IMAGES: Final = {"$type": ["binData", "objectId"]}  # a file, or the id of one in GridFS
_LABELS: Final = range(-(2**63), 2**63)


@dataclass(frozen=True)
class MongoFields:
    """Which fields of a foreign collection are what."""

    image: str | None
    label: str | None
    key: str
    query: Mapping[str, Any] | None
    manifest: Path | None

    def are_given(self) -> bool:
        """Return whether any of them is."""
        return any((self.image, self.label, self.query, self.manifest)) or self.key != "_id"


class ForeignCollection:
    """A snapshot of ids, keys and labels, in the order of `_id`, and how to read on."""

    def __init__(
        self, connection: MongoConnection, address: MongoAddress, fields: MongoFields
    ) -> None:
        """Take the snapshot by one query; no image is read."""
        self._address = address
        self._fields = fields
        ids, keys, labels = connection.run("read", self._read)
        has_labels = fields.label is not None or fields.manifest is not None
        if fields.manifest is None:
            self._refuse_repeated(keys)
        else:
            places, keys, labels = self._listed(fields.manifest, keys)
            ids = [ids[place] for place in places]
        numbers, class_names = self._numbered(keys, labels) if has_labels else (None, ())
        # As bytes: an ObjectId takes 70 in Python, and workers would get a list of them.
        self._ids = PackedList(bson.encode({"": of}) for of in ids)
        digest = xxhash.xxh3_128(str(len(keys)).encode())
        for key, of in zip(keys, self._ids, strict=True):
            digest.update(key.encode("utf-8", "surrogatepass") + b"\0" + of)
        digest.update(b"" if numbers is None else numbers.tobytes())
        are_pairs = has_labels and len(keys) > 0
        fingerprint = digest.hexdigest()
        self.index = Index(PackedList(keys), numbers, class_names, {}, fingerprint, are_pairs)

    def _read(self, database: Database[Any]) -> tuple[list[Any], list[str], list[Any]]:
        fields, collection = self._fields, database[self._address.collection]
        first = collection.find_one(fields.query or {})
        if fields.image is None or first is None:
            raise self._unreadable(database, first)
        projection = {name: 1 for name in ("_id", fields.label, fields.key) if name is not None}
        ids, keys, labels = [], [], []
        for document in collection.find(fields.query or {}, projection, sort=[("_id", 1)]):
            key = _at(document, fields.key)
            if key is None:
                raise StoreError(
                    f"the document {document['_id']!r} of {self._address} has no field "
                    f"{fields.key!r}, which was named as the one of keys."
                )
            ids.append(document["_id"])
            keys.append(str(key))
            labels.append(_at(document, fields.label) if fields.label is not None else None)
        wanted = {"$and": [dict(fields.query or {}), {fields.image: _IMAGES}]}
        lacking = ""
        if collection.find_one(wanted, {"_id": 1}) is None:
            lacking = f"an image or the id of a GridFS file in {fields.image!r}, the image_field"
        elif fields.label is not None and not any(label is not None for label in labels):
            lacking = f"a field {fields.label!r}, the label_field"
        if lacking:
            raise StoreError(
                f"no document of {self._address} has {lacking}. The first one has "
                f"{_fields_of(first)}."
            )
        return ids, keys, labels

    def _unreadable(self, database: Database[Any], first: Mapping[str, Any] | None) -> StoreError:
        """Return the error for a collection that is empty, or of which no field was named."""
        address = self._address
        if database[partial_of(address.collection)].find_one({"_id": PACK_ID}) is not None:
            return StoreError(
                f"{address} is unfinished: its packing was interrupted, or goes on. `penstock pack "
                "--resume` with the same source and destination finishes it."
            )
        if first is None:
            fits = " that fits the query" if self._fields.query else ", or is not there"
            return StoreError(
                f"{address} has no document{fits}. `penstock pack SRC {address}` makes a new one."
            )
        return StoreError(
            f"{address} was not packed by Penstock, so say which fields are what: image_field=, "
            f"and label_field=, if there are labels. Its first document has {_fields_of(first)}."
        )

    def _refuse_repeated(self, keys: list[str]) -> None:
        twice = Index(keys).first_repeated()
        if twice is not None:
            raise StoreError(
                f"the key {twice!r} comes twice in {self._address}; every record has a key of its "
                "own. key_field='_id' always has."
            )

    def _listed(self, manifest: Path, keys: list[str]) -> tuple[list[int], list[str], list[Any]]:
        """Return the places of what a manifest lists, its names and its labels."""
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
        self._refuse_repeated(keys)
        try:
            return Index(keys).positions_of(paths).tolist(), paths, labels
        except StoreError as error:
            error.add_note(f"The manifest {manifest} lists it, for {self._address}.")
            raise

    def _numbered(
        self, keys: list[str], labels: list[Any]
    ) -> tuple[NDArray[np.int64], tuple[str, ...]]:
        """Return labels as integers, and the names of classes where they were names."""
        if all(isinstance(label, str) for label in labels):
            names, numbers = np.unique(np.array(labels, np.object_), return_inverse=True)
            return numbers.astype(np.int64), tuple(names.tolist())
        for label, key in zip(labels, keys, strict=True):
            # The mongo shell stores numbers as floating-point ones.
            is_whole = isinstance(label, int) or (isinstance(label, float) and label.is_integer())
            if not is_whole or int(label) not in _LABELS:
                raise StoreError(
                    f"the label of {key!r} in {self._address} is {label!r:.80}. All labels are "
                    "integers of 64 bits, or all are names of classes."
                )
        return np.array([int(label) for label in labels], np.int64), ()

    def values(self, connection: MongoConnection, positions: NDArray[np.int64]) -> dict[int, Any]:
        """Return the image files at `positions`, those that are there."""
        field, distinct = str(self._fields.image), np.unique(positions).tolist()
        ids = {position: bson.decode(self._ids[position])[""] for position in distinct}

        def read(database: Database[Any]) -> dict[int, Any]:
            found = by_id(database[self._address.collection], list(ids.values()), {field: 1})
            there = {p: found[hashable(of)] for p, of in ids.items() if hashable(of) in found}
            values = {position: _at(document, field) for position, document in there.items()}
            files = [value for value in values.values() if isinstance(value, ObjectId)]
            if files:  # the id of no file stays what it is
                contents = read_files(database, _BUCKET, files)
                for position, value in values.items():
                    if isinstance(value, ObjectId):
                        values[position] = contents.get(value, value)
            return values

        return connection.run("read", read)

    def image(self, value: object, name: str) -> bytes:
        """Return the image file that `values` found."""
        if isinstance(value, bytes):
            return bytes(value)  # not bson.Binary, which other kinds of binaries come as
        what = f"has a {type(value).__name__} there"
        if isinstance(value, ObjectId):
            what = f"names the GridFS file {value}, which is not there (bucket {_BUCKET!r})"
        raise StoreError(
            f"{name} has no image in {self._fields.image!r}: its document {what}. Leave such "
            "documents out with query=."
        )


def _at(document: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401
    """Return a field, of a document within the document where the name has dots."""
    value: Any = document
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _fields_of(document: Mapping[str, Any]) -> str:
    fields = [f"{name!r} ({type(value).__name__})" for name, value in document.items()]
    return f"{', '.join(fields):.1000}"
