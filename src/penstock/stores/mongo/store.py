# SPDX-License-Identifier: Apache-2.0
"""`MongoStore`: records in a MongoDB collection, of `pack` or of somebody's own."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.stores.mongo.address import MongoAddress
from penstock.stores.mongo.clients import MongoConnection
from penstock.stores.mongo.foreign import ForeignLayout, MongoFields
from penstock.stores.mongo.layout import PackedLayout, find_summary
from penstock.stores.records import (
    EncodedImage,
    Record,
    check_record,
    decode_record,
    header_of,
    image_start,
)
from penstock.stores.store import Store, missing_records

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from penstock.stores.index import Index

__all__ = ["MongoStore"]


class MongoStore(Store):
    """A store in a MongoDB collection.

    A batch is one query. While the server is away, as in a restart, reading waits for it.

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
            retry_s: Seconds for which a read waits for a server that is away.
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
        self._fields.check()
        self._verify = verify
        self._layout: PackedLayout | ForeignLayout | None = None
        self._open: MongoConnection | None = None

    @property
    def address(self) -> str:
        """`mongodb://HOST/DATABASE.COLLECTION`."""
        return self._address.shown

    def close(self) -> None:
        """Let go of the client, which is closed unless another store of this process uses it."""
        connection, self._open = self._open, None
        if connection is not None:
            connection.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the client behind. An index that was read goes along: workers share its arrays."""
        return {**self.__dict__, "_open": None}

    def _load_index(self) -> Index:
        connection = self._connection()
        summary = connection.run("read", lambda database: find_summary(database, self._address))
        if summary is None:
            self._layout, index = ForeignLayout.load(connection, self._address, self._fields)
            return index
        if self._fields.are_given():
            raise ConfigError(
                f"{self.address} was packed by Penstock: it has its own keys and labels. The "
                "fields, query and manifest are for collections of other making."
            )
        layout = PackedLayout(self._address)
        index = layout.load(connection, summary)
        self._layout = layout
        return index

    def _connection(self) -> MongoConnection:
        connection = self._open
        if connection is None or not connection.is_usable:
            connection = MongoConnection(self._address, self._client_options, self._retry_s)
            self._open = connection
        return connection

    def _values(self, positions: NDArray[np.int64]) -> list[Any]:
        """Return what lies at `positions`, in their order."""
        index = self.index  # which finds out the layout
        assert self._layout is not None
        if not len(positions):
            return []
        found: Mapping[int, Any] = self._layout.values(self._connection(), positions, index)
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
        name = self._name(position)
        if not isinstance(self._layout, ForeignLayout):
            return decode_record(value, name, verify=self._verify, copy=copy)
        image = EncodedImage(self._layout.image(value, name))
        label = self.index.label_of(position)
        return Record(self.keys[position], label, image if label is None else (image, label))

    @contextlib.contextmanager
    def borrow_images(self, positions: NDArray[np.int64]) -> Iterator[list[Any]]:
        """As in `Store`; without decoding the records."""
        values = zip(positions.tolist(), self._values(positions), strict=True)
        yield [self._image(position, value) for position, value in values]

    def _image(self, position: int, value: Any) -> Any:  # noqa: ANN401
        name = self._name(position)
        if isinstance(self._layout, ForeignLayout):
            return self._layout.image(value, name)
        head_bytes = check_record(value, name) if self._verify else header_of(value, name)[0]
        return memoryview(value)[image_start(head_bytes) :]

    def _name(self, position: int) -> str:
        return f"record {position} ({self.keys[position]!r}) of {self.address}"
