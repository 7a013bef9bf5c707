# SPDX-License-Identifier: Apache-2.0
"""`MongoStore`: records in a MongoDB collection, of `pack` or of other making."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import bson
import msgspec
import numpy as np
import xxhash
from bson import ObjectId

from penstock.data.packed_list import PackedList
from penstock.errors import ConfigError, StoreError
from penstock.opening import read_annotation
from penstock.stores.index import Index
from penstock.stores.mongo.collection import (
    PACK_ID,
    by_id,
    hashable,
    index_in,
    own_documents,
    packed_values,
    partial_of,
    read_files,
)
from penstock.stores.mongo.connection import MongoAddress, MongoConnection
from penstock.stores.records import EncodedImage, Record, decode_record, is_pair
from penstock.stores.store import OpenedStore, missing_records

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray
    from pymongo.database import Database

_BUCKET: Final = "fs"  # where drivers put GridFS files by default
# An image file, or the id of one in GridFS.
_IMAGES: Final[Mapping[str, Any]] = {"$type": ["binData", "objectId"]}
_ANY: Final[Mapping[str, Any]] = {"$ne": None}
_LABELS: Final = range(-(2**63), 2**63)


class MongoFields(NamedTuple):
    """Which fields of a collection of other making are what, and which documents belong to it."""

    image: str | None = None
    label: str | None = None
    key: str = "_id"
    query: Mapping[str, Any] | None = None
    manifest: str | Path | Mapping[str, Any] | None = None


class _Manifest(msgspec.Struct):
    path_list: list[Any]
    label_list: list[Any]


class ForeignCollection:
    """A snapshot of ids, keys and labels, in the order of `_id`, and how to read on."""

    def __init__(
        self, connection: MongoConnection, address: MongoAddress, fields: MongoFields
    ) -> None:
        """Take the snapshot by one query; no image is read."""
        self._address = address
        self._fields = fields
        ids, keys, labels = connection.run("read", self._read)
        twice = Index(keys).first_repeated()
        if twice is not None:
            raise StoreError(f"key {twice!r} comes twice in {address}; key_field='_id' is unique.")
        if fields.manifest is not None:
            places, keys, labels = self._listed(fields.manifest, keys)
            ids = [ids[place] for place in places]
        has_labels = fields.label is not None or fields.manifest is not None
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
        named = ("image_field", fields.image, _IMAGES), ("label_field", fields.label, _ANY)
        for argument, name, kind in named:
            wanted = {"$and": [dict(fields.query or {}), {str(name): kind}]}
            if name is not None and collection.find_one(wanted, {"_id": 1}) is None:
                raise StoreError(
                    f"no document of {self._address} has what {argument}={name!r} says (of an "
                    f"image: bytes, or a GridFS file's id). The first one has {_fields_of(first)}."
                )
        projection = {name: 1 for name in ("_id", fields.label, fields.key) if name is not None}
        ids, keys, labels = [], [], []
        for document in collection.find(fields.query or {}, projection, sort=[("_id", 1)]):
            key = _at(document, fields.key)
            if key is None and fields.manifest is not None:
                continue  # what the manifest does not list may be anything
            if key is None:
                raise StoreError(
                    f"the document {document['_id']!r} of {self._address} has no field "
                    f"{fields.key!r}, which was named as the one of keys."
                )
            ids.append(document["_id"])
            keys.append(str(key))
            labels.append(_at(document, fields.label) if fields.label is not None else None)
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

    def _listed(
        self, manifest: str | Path | Mapping[str, Any], keys: list[str]
    ) -> tuple[list[int], list[str], list[Any]]:
        """Return the places of what a manifest lists, its keys and its labels."""
        given, name = manifest, "given" if isinstance(manifest, Mapping) else manifest
        try:
            if not isinstance(given, Mapping):
                given = msgspec.json.decode(read_annotation(given))
            listed = msgspec.convert(given, _Manifest)
            paths, labels = list(map(str, listed.path_list)), listed.label_list
            if len(paths) != len(labels):
                raise StoreError(f"there are {len(paths):,} paths and {len(labels):,} labels.")
            return Index(keys).positions_of(paths).tolist(), paths, labels
        except (msgspec.DecodeError, StoreError) as error:
            raise StoreError(
                f"the manifest {name} of {self._address} should be JSON, "
                f'{{"path_list": [keys], "label_list": [integers or names]}}: {error}'
            ) from error

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
            f"{name} has no image in {self._fields.image!r}: it {what}. query= leaves it out."
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


class MongoStore(OpenedStore[MongoConnection]):
    """A store in a MongoDB collection.

    A batch is one query. While the server is away, as in a restart, reading waits for it; but not
    longer than 5 s before it has answered once.

    Of a collection that Penstock did not make, one query takes a snapshot of ids, keys and labels,
    in the order of `_id`. A sample is the pair (`EncodedImage`, label), or the `EncodedImage` alone
    where there are no labels.

    Concurrency:
        Any thread. A forked or spawned process connects for itself, at first use. What is pickled
        has the URI in it, password included: another process could not connect without.

    Example:
        >>> MongoStore("mongodb://ada:secret@localhost/photos.train?authSource=admin")
        <MongoStore mongodb://localhost/photos.train>
    """

    # Maybe in another process; without the second it was packed.
    _opened: tuple[Index, ForeignCollection | None] | None = None

    def __init__(
        self,
        uri: str,
        *,
        client_options: Mapping[str, Any] | None = None,
        retry_s: float = 60.0,
        image_field: str | None = None,
        label_field: str | None = None,
        key_field: str = "_id",
        query: Mapping[str, Any] | None = None,
        manifest: str | Path | Mapping[str, Any] | None = None,
        verify: bool = True,
    ) -> None:
        """Name the collection; it is opened at first use.

        Args:
            uri: `mongodb://USER:PASSWORD@HOST/DATABASE.COLLECTION?OPTIONS`, or `mongodb+srv://`.
            client_options: For `pymongo.MongoClient`: `tls`, `tlsCAFile`, `authSource`,
                `compressors` …
            retry_s: Seconds for which a read waits for a server that went away.
            image_field: Of a collection that Penstock did not make: the field of the image file, or
                of its id in GridFS. Dots lead into documents within documents.
            label_field: The field of the class: an integer or a name. Names are numbered in their
                order.
            key_field: The field that names a record, different in each.
            query: Which documents belong to it, as `find` takes it.
            manifest: A JSON file {"path_list": [...], "label_list": [...]}, or the dict or the
                document itself: order and labels are those that it lists, and documents are found
                by `key_field`. Documents without that field may be anything.
            verify: Whether the checksum of each packed record is compared.

        Raises:
            ConfigError: the URI or an option is wrong.
        """
        self._address = MongoAddress.parse(uri)
        self._client_options = dict(client_options or {})
        if not retry_s >= 0:
            raise ConfigError(f"retry_s={retry_s}: a number of seconds is not negative.")
        self._retry_s = float(retry_s)
        if manifest is not None and label_field is not None:
            raise ConfigError("labels come from the manifest or from `label_field`, not from both.")
        self._fields = MongoFields(image_field, label_field, key_field, query, manifest)
        self._verify = verify

    @property
    def address(self) -> str:
        """`mongodb://HOST/DATABASE.COLLECTION`."""
        return self._address.shown

    def _load_index(self) -> Index:
        return self._loaded()[0]

    def _loaded(self) -> tuple[Index, ForeignCollection | None]:
        if self._opened is None:
            try:
                # Of threads that come here together the first one's is kept by all: positions in
                # the index of one are not those in the snapshot of another.
                self.__dict__.setdefault("_opened", self._load())
            except BaseException:
                self.close()  # who could not open it has nothing to close
                raise
        assert self._opened is not None
        return self._opened

    def _load(self) -> tuple[Index, ForeignCollection | None]:
        connection = self._connection()
        index = index_in(own_documents(connection, self._address), self._address)
        if index is None:
            foreign = ForeignCollection(connection, self._address, self._fields)
            return foreign.index, foreign
        if self._fields != MongoFields():
            raise ConfigError(
                f"{self.address} was packed by Penstock: it has its own keys and labels. The "
                "fields, query and manifest are for collections of other making."
            )
        return index, None

    def _connection(self) -> MongoConnection:
        connection = self._open
        if connection is None or not connection.is_usable:
            connection = self._open = MongoConnection(
                self._address,
                self._client_options,
                self._retry_s,
                is_known=self._opened is not None,
            )
        return connection

    def _values(self, positions: NDArray[np.int64]) -> list[Any]:
        """Return what lies at `positions`, in their order."""
        index, foreign = self._loaded()
        if not len(positions):
            return []
        connection = self._connection()
        if foreign is None:
            found = packed_values(connection, self._address, positions, index)
        else:
            found = foreign.values(connection, positions)
        wanted = positions.tolist()
        absent = dict.fromkeys(position for position in wanted if position not in found)
        if absent:
            raise missing_records([index.keys[position] for position in absent], self.address)
        return [found[position] for position in wanted]

    @contextlib.contextmanager
    def _read(self, positions: NDArray[np.int64], *, copy: bool) -> Iterator[list[Record]]:
        values = zip(positions.tolist(), self._values(positions), strict=True)
        yield [self._record(position, value, copy=copy) for position, value in values]

    def _record(self, position: int, value: Any, *, copy: bool) -> Record:  # noqa: ANN401
        index, foreign = self._loaded()
        name, key = self._name(position), index.keys[position]
        if foreign is not None:
            image, label = EncodedImage(foreign.image(value, name)), index.label_of(position)
            return Record(key, label, image if label is None else (image, label))
        record = decode_record(value, name, verify=self._verify, copy=copy)
        if record.key != key:
            raise StoreError(
                f"{name} is damaged: the record of {record.key!r} lies there. Restore the "
                "collection from a copy, or pack it anew."
            )
        return record

    @contextlib.contextmanager
    def borrow_images(self, positions: NDArray[np.int64]) -> Iterator[list[Any]]:
        """As in `Store`.

        Raises:
            StoreError: a record is missing, damaged, or not the pair that the index promises.
        """
        with self._read(positions, copy=False) as records:
            pairs = zip(positions.tolist(), records, strict=True)
            yield [self._image(position, record) for position, record in pairs]

    def _image(self, position: int, record: Record) -> Any:  # noqa: ANN401
        # To decode a record takes 3 us, as against 70 for reading it: no shortcut to its image,
        # which would take whatever lies there for one.
        if not is_pair(record.sample, self.index.label_of(position)):
            raise StoreError(
                f"{self._name(position)} is damaged: it is not an image with the label that the "
                "index has. Restore the collection from a copy, or pack it anew."
            )
        return record.sample[0].data
