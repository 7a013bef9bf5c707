# SPDX-License-Identifier: Apache-2.0
"""Writing a store to a MongoDB collection, beside its place until it is complete.

    COLLECTION.partial      grows by some 16 MB or 10 s at a time, each in the server's journal
    COLLECTION              the old collection, or none, until the finished one takes its name

A kill at any moment leaves COLLECTION as it was; a writer that resumes goes on behind the last
record of the partial one. A writer that is closed before it finished inserts what waits. A record's
`_id` is its position: an insert whose answer was lost can be sent again without doubling anything.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import time
import warnings
from typing import TYPE_CHECKING, Any, Final

from bson import ObjectId
from bson.binary import Binary
from pymongo import ReplaceOne
from pymongo.errors import AutoReconnect, BulkWriteError, DuplicateKeyError, OperationFailure
from pymongo.write_concern import WriteConcern

from penstock.errors import StoreError
from penstock.stores.index import IndexBuilder
from penstock.stores.mongo.collection import (
    INDEX_ID,
    LAYOUT_VERSION,
    LOCKS,
    PACK_ID,
    SUMMARY_ID,
    index_in,
    own_documents,
    partial_of,
)
from penstock.stores.mongo.connection import MongoAddress, MongoConnection
from penstock.stores.placing import already_there
from penstock.stores.records import encode_record
from penstock.stores.store import other_source
from penstock.usage import stat_fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pymongo.collection import Collection
    from pymongo.database import Database

    from penstock.stores.index import Index
    from penstock.stores.records import EncodedRecord

_CLOSE_S: Final = 10.0  # a Ctrl-C may come because the server is away
_MOST_BYTES: Final = 16_000_000  # a document has at most 16 MiB
_INDEX_PART_BYTES: Final = 8_000_000
_NO_SUCH_COLLECTION: Final = 26
_IS_THERE: Final = 11000  # MongoDB's DuplicateKey
_SERVER_LEAVES: Final = {91, 189, 10107, 11600, 11602, 13435}  # the retryable ones of its errors


_held_here: set[ObjectId] = set()


class MongoWriter:
    """Writes one collection. See `StoreWriter` for the calls.

    Attributes:
        address: `mongodb://HOST/DATABASE.COLLECTION`.
        finished: Whether a writer that resumes found the collection complete.
    """

    _message_bytes = 16_000_000  # MongoDB takes 48 MB at a time; what is lost is sent again
    _message_s = 10.0  # of work to lose in a kill

    def __init__(
        self,
        uri: str,
        *,
        class_names: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        what: str = "",
        resume: bool = False,
        overwrite: bool = True,
        client_options: Mapping[str, Any] | None = None,
        retry_s: float = 60.0,
    ) -> None:
        """Begin a store, or go on with one.

        Args and errors as for `create_store`; beside them:
            client_options: For `pymongo.MongoClient`.
            retry_s: Seconds for which a write waits for a server that went away; one that has never
                answered is waited for 5 s at most.
        """
        self._address = MongoAddress.parse(uri)
        self.address = self._address.shown
        self.finished = False
        self._partial_name = self._address.sibling(partial_of(self._address.collection))
        self._client_options = dict(client_options or {})
        self._retry_s = retry_s
        self._what = what
        self._pack = ObjectId()
        self._built = IndexBuilder(class_names, metadata)
        self._found: list[tuple[str, int | tuple[int, ...] | None]] = []
        self._num_inserted = 0
        self._waiting: list[EncodedRecord] = []
        self._waiting_bytes = 0
        self._waiting_since_s = 0.0
        self._open: MongoConnection | None = None
        self._lock: MongoLock | None = None
        self._has_failed = False
        try:
            self._lock = MongoLock(self._connection(), self._address)
            self._begin(resume=resume, overwrite=overwrite)
        except BaseException:
            self.close()
            raise
        self._disconnect()  # workers may be forked before the first records come

    def _begin(self, *, resume: bool, overwrite: bool) -> None:
        run = self._connection().run
        run("write", self._check_destination)
        pack = run("write", lambda database: self._partial(database).find_one({"_id": PACK_ID}))
        done = self._complete() if resume and pack is None else None
        if done is not None:
            self.finished, self._found = True, done.entries()
            return
        target = self._address.collection
        if not overwrite and run("read", lambda database: database[target].find_one({})):
            raise already_there(self.address, resume=resume)
        if not resume or pack is None:
            run("write", self._start_anew)
        elif not self._is_same(pack):
            raise other_source(self._partial_name)
        else:
            self._pack = pack["pack"]
            self._take_over()
            self._found = list(zip(self._built.keys, self._built.labels, strict=True))

    def _is_same(self, pack: Mapping[str, Any]) -> bool:
        """Return whether a collection was packed from the same source, in this layout."""
        known = isinstance(pack.get("pack"), ObjectId) and pack.get("version") == LAYOUT_VERSION
        return known and pack.get("what") == self._what

    def _complete(self) -> Index | None:
        """Return the index of the collection in place, if it is the one that is to be packed."""
        documents = own_documents(self._connection(), self._address)
        is_same = self._is_same(documents.get(PACK_ID, {}))
        return index_in(documents, self._address) if is_same else None

    def _check_destination(self, database: Database[Any]) -> None:
        """Refuse to drop what Penstock did not write."""
        target = self._address.collection
        for name, ours in ((target, SUMMARY_ID), (partial_of(target), PACK_ID)):
            there = database[name]
            if there.find_one({}, {"_id": 1}) and not there.find_one({"_id": ours}, {"_id": 1}):
                raise StoreError(
                    f"{self._address.sibling(name)} holds documents that Penstock did not write, "
                    "and packing would drop them. Pack under another name, or drop them yourself."
                )

    def _start_anew(self, database: Database[Any]) -> None:
        partial = self._partial(database)
        partial.drop()
        first = {"what": self._what, "pack": self._pack, "version": LAYOUT_VERSION}
        partial.replace_one({"_id": PACK_ID}, first, upsert=True)

    def _take_over(self) -> None:
        """Take over the records that are there, each of them verified."""
        run = self._connection().run
        index = {"_id": {"$type": "string", "$ne": PACK_ID}}
        run("write", lambda database: self._partial(database).delete_many(index))
        while documents := run("read", self._next_written):
            for document in documents:
                name = f"record {document['_id']} of {self._partial_name}"
                if document["_id"] != self._num_inserted:
                    raise StoreError(f"{name} lacks the one before it. Pack without --resume.")
                data = document.get("record")
                if not isinstance(data, bytes):
                    raise StoreError(f"{name} holds no record. Pack without --resume.")
                self._built.take_over(data, name)
                self._num_inserted += 1

    def _next_written(self, database: Database[Any]) -> list[dict[str, Any]]:
        """Return some of the documents behind the records taken over."""
        behind = {"_id": {"$gte": self._num_inserted}}
        return list(self._partial(database).find(behind, sort=[("_id", 1)], limit=16))

    def written(self) -> Sequence[tuple[str, int | tuple[int, ...] | None]]:
        """Return key and label of the records that were found."""
        return self._found

    def last_checksum(self) -> int | None:
        """Return the checksum of the last record that `written` lists."""
        return self._built.last_checksum

    def put_many(self, records: Sequence[EncodedRecord]) -> None:
        """Append records; they are in the server's journal some 16 MB or 10 s later, or at the end.

        Raises:
            StoreError: a key comes a second time, and none of these is written; or the server
                refuses them.
            StoreUnreachable: it does not answer.
        """
        if self.finished and records:
            raise StoreError(f"{self.address} is complete; pack without --resume to make it anew.")
        for record in records:
            if len(record.data) > _MOST_BYTES:
                raise StoreError(
                    f"record {record.key!r} has {len(record.data):,} bytes, and a document of "
                    f"MongoDB holds {_MOST_BYTES:,} at most. Pack into an LMDB file."
                )
        self._built.add(records)
        if not self._waiting:
            self._waiting_since_s = time.monotonic()
        for record in records:
            self._waiting.append(record)
            self._waiting_bytes += len(record.data)
            if self._waiting_bytes >= self._message_bytes:
                self._flush()
        if time.monotonic() - self._waiting_since_s >= self._message_s:
            self._flush()

    def _flush(self, retry_s: float | None = None) -> None:
        documents = [
            {"_id": position, "key": one.key, "label": one.label, "record": Binary(one.data)}
            for position, one in enumerate(self._waiting, self._num_inserted)
        ]
        try:
            self._write(documents, retry_s)
        except Exception:
            self._has_failed = True  # what was refused once need not be tried again at the end
            raise
        self._num_inserted += len(documents)
        self._waiting, self._waiting_bytes = [], 0

    def _write(self, documents: list[dict[str, Any]], retry_s: float | None = None) -> None:
        """Write documents in order. Done again after a Ctrl-C or a lost answer it doubles none."""

        def write(database: Database[Any]) -> None:
            try:
                _put(self._partial(database), documents)
            except BulkWriteError as error:
                codes = {concern["code"] for concern in error.details["writeConcernErrors"]}
                if codes & _SERVER_LEAVES and not error.details["writeErrors"]:
                    raise AutoReconnect("the server shuts down") from error
                raise

        if documents:
            self._connection().run("write", write, retry_s)

    def finish(self) -> None:
        """Complete the collection and put it in its place."""
        if self.finished:
            return
        self._flush()
        index = self._built.index()
        data = encode_record("index", index.to_tree()).data
        parts = [data[at : at + _INDEX_PART_BYTES] for at in range(0, len(data), _INDEX_PART_BYTES)]
        documents: list[dict[str, Any]] = [
            {"_id": f"{INDEX_ID}{n}", "data": Binary(part)} for n, part in enumerate(parts)
        ]
        summary = {
            "_id": SUMMARY_ID,
            "count": len(index),
            "fingerprint": index.fingerprint,
            "num_index_parts": len(parts),
            "version": LAYOUT_VERSION,
        }
        run = self._connection().run
        run("write", self._check_complete)
        self._write([*documents, summary])
        run("write", self._rename)
        run("write", self._drop_files)
        self.close()

    def _check_complete(self, database: Database[Any]) -> None:
        count = self._partial(database).count_documents({"_id": {"$gte": 0}})  # numbers alone
        if count != len(self._built):
            raise StoreError(
                f"{self._partial_name} has {count:,} records instead of {len(self._built):,}: the "
                "server lost some, or another program wrote to it. Pack without --resume."
            )

    def _drop_files(self, database: Database[Any]) -> None:
        """Drop what an earlier release put into GridFS for the collection that was replaced."""
        for part in ("files", "chunks"):
            database[f"{self._address.collection}.penstock.{part}"].drop()

    def _rename(self, database: Database[Any]) -> None:
        try:
            self._partial(database).rename(self._address.collection, dropTarget=True)
        except OperationFailure as error:
            # An answer that was lost: then the collection is in its place already.
            placed = database[self._address.collection].find_one({"_id": PACK_ID}) or {}
            if error.code != _NO_SUCH_COLLECTION or placed.get("pack") != self._pack:
                raise

    def close(self) -> None:
        """Let go of everything; what is not finished stays in `COLLECTION.partial`.

        Records that wait are inserted, so that a writer that resumes goes on behind the last one.
        """
        lock = self._lock
        try:
            if lock is not None and not self._has_failed:
                with contextlib.suppress(StoreError):  # whatever ended the writing comes first
                    self._flush(_CLOSE_S)
        finally:
            self._lock = None
            if lock is not None:
                lock.release(self._connection(), 1.0 if self._has_failed else _CLOSE_S)
            self._disconnect()

    def _partial(self, database: Database[Any]) -> Collection[Any]:
        name = partial_of(self._address.collection)
        # A server that is killed forgets 0.1 s of what is not in its journal.
        written = WriteConcern(**{**database.write_concern.document, "j": True})
        return database.get_collection(name, write_concern=written)

    def _connection(self) -> MongoConnection:
        if self._open is None or not self._open.is_usable:
            self._open = MongoConnection(
                self._address, self._client_options, self._retry_s, is_known=self._lock is not None
            )
        return self._open

    def _disconnect(self) -> None:
        connection, self._open = self._open, None
        if connection is not None:
            connection.close()


def _put(collection: Collection[Any], documents: list[dict[str, Any]]) -> None:
    """Insert documents; if one is there from before, replace all. A replace takes twice as long."""
    try:
        collection.insert_many(documents)
    except BulkWriteError as error:
        if all(one["code"] != _IS_THERE for one in error.details["writeErrors"]):
            raise
        collection.bulk_write(
            [ReplaceOne({"_id": one["_id"]}, one, upsert=True) for one in documents]
        )


class MongoLock:
    """A document that says which process writes a collection."""

    def __init__(self, connection: MongoConnection, address: MongoAddress) -> None:
        """Take it."""
        self._address = address
        self._token = ObjectId()
        self._document = {
            "_id": address.collection,
            "token": self._token,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "time": datetime.datetime.now(datetime.UTC),
        }
        connection.run("write", self._take)
        _held_here.add(self._token)

    def _take(self, database: Database[Any]) -> None:
        locks = database[LOCKS]
        while True:
            try:
                locks.insert_one(self._document)
                return
            except DuplicateKeyError:
                holder = locks.find_one({"_id": self._address.collection})
            if holder is None:  # given back between our two calls
                continue
            if holder["token"] == self._token:  # an insert whose answer was lost
                return
            if not _is_dead(holder):
                raise StoreError(self._who_holds(holder))
            same = {"_id": holder["_id"], "token": holder["token"]}
            if locks.replace_one(same, self._document).matched_count:
                return

    def _who_holds(self, holder: Mapping[str, Any]) -> str:
        return (
            f"another process is writing {self._address}: process {holder['pid']} on "
            f"{holder['host']}, since {holder['time']:%Y-%m-%d %H:%M:%S} UTC. Wait for it to end. "
            f'If it is no more, remove its lock in mongosh: db.getCollection("{LOCKS}")'
            f'.deleteOne({{_id: "{self._address.collection}"}})'
        )

    def release(self, connection: MongoConnection, retry_s: float) -> None:
        """Give it back; a warning says if it stays."""
        _held_here.discard(self._token)
        mine = {"_id": self._address.collection, "token": self._token}
        try:
            connection.run("write", lambda database: database[LOCKS].delete_one(mine), retry_s)
        except StoreError as error:
            said = f"the lock on {self._address} stays: {error} The next writer takes it over."
            warnings.warn(said, RuntimeWarning, stacklevel=3)


def _is_dead(holder: Mapping[str, Any]) -> bool:
    """Return whether the holder of a lock is known to be no more."""
    if holder["host"] != socket.gethostname():
        return False
    if holder["pid"] == os.getpid():
        return holder["token"] not in _held_here
    return bool(_started(holder["pid"]) != holder["started"])


def _started(pid: int) -> str:
    """Return something that tells a process from a later one of the same number; "" if it ended."""
    fields = stat_fields(pid)
    return "" if not fields or fields[0] in "ZX" else fields[19]  # proc(5): the 22nd of all
