# SPDX-License-Identifier: Apache-2.0
"""`MongoStore`: records in a MongoDB collection, of `pack` or of other making."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, StoreError
from penstock.stores.mongo.address import MongoAddress
from penstock.stores.mongo.collection import find_summary, load_index, packed_values
from penstock.stores.mongo.connection import MongoConnection
from penstock.stores.mongo.foreign import ForeignCollection, MongoFields
from penstock.stores.records import (
    EncodedImage,
    Record,
    decode_record,
    is_pair,
)
from penstock.stores.store import OpenedStore, missing_records

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from penstock.stores.index import Index


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
        manifest: str | Path | None = None,
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
            manifest: A JSON file {"path_list": [...], "label_list": [...]}: then order and labels
                are the manifest's, and documents are found by `key_field`.
            verify: Whether the checksum of each packed record is compared.

        Raises:
            ConfigError: the URI or an option is wrong.
        """
        self._address = MongoAddress.parse(uri)
        self._client_options = dict(client_options or {})
        if not retry_s >= 0:
            raise ConfigError(f"retry_s={retry_s}: a number of seconds is not negative.")
        self._retry_s = float(retry_s)
        path = None if manifest is None else Path(manifest)
        self._fields = MongoFields(image_field, label_field, key_field, query, path)
        if manifest is not None and label_field is not None:
            raise ConfigError("labels come from the manifest or from `label_field`, not from both.")
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
        summary = connection.run("read", lambda database: find_summary(database, self._address))
        if summary is None:
            foreign = ForeignCollection(connection, self._address, self._fields)
            return foreign.index, foreign
        if self._fields.are_given():
            raise ConfigError(
                f"{self.address} was packed by Penstock: it has its own keys and labels. The "
                "fields, query and manifest are for collections of other making."
            )
        return load_index(connection, self._address, summary), None

    def _connection(self) -> MongoConnection:
        connection = self._open
        if connection is None or not connection.is_usable:
            connection = MongoConnection(
                self._address,
                self._client_options,
                self._retry_s,
                is_known=self._opened is not None,
            )
            self._open = connection
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
