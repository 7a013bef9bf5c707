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
import functools
import os
import socket
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bson import ObjectId
from bson.binary import Binary
from pymongo.errors import AutoReconnect, BulkWriteError, DuplicateKeyError, OperationFailure
from pymongo.write_concern import WriteConcern

from penstock.errors import StoreError
from penstock.stores.index import IndexBuilder
from penstock.stores.mongo.address import MongoAddress
from penstock.stores.mongo.connection import MongoConnection
from penstock.stores.mongo.layouts import (
    LAYOUT_VERSION,
    LOCKS,
    PACK_ID,
    SUMMARY_ID,
    PackedLayout,
    bucket_of,
    find_summary,
    index_id,
    partial_of,
    read_files,
    remove_other_files,
    write_file,
)
from penstock.stores.placing import already_there
from penstock.stores.records import EncodedRecord, decode_record, encode_record, is_pair
from penstock.stores.store import other_source

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pymongo.collection import Collection
    from pymongo.database import Database

    from penstock.stores.index import Index

__all__ = ["MongoWriter"]

_MESSAGE_BYTES: Final = 16_000_000  # MongoDB takes 48 MB at a time; what is lost is sent again
_MESSAGE_S: Final = 10.0  # of work to lose in a kill
_CLOSE_S: Final = 10.0  # a Ctrl-C may come because the server is away
_FILE_BYTES: Final = 15_000_000  # from here on a record is a file: a document has at most 16 MiB
_INDEX_PART_BYTES: Final = 8_000_000
_DUPLICATE_KEY: Final = 11000
_NO_SUCH_COLLECTION: Final = 26
_SERVER_LEAVES: Final = (91, 189, 10107, 11600, 11602, 13435)  # the retryable ones of its errors
_RECORDS: Final = {"_id": {"$gte": 0}}  # numbers alone: the other documents are named


_held_here: set[ObjectId] = set()


class MongoWriter:
    """Writes one collection. See `StoreWriter` for the calls.

    Attributes:
        address: `mongodb://HOST/DATABASE.COLLECTION`.
        finished: Whether a writer that resumes found the collection complete.
    """

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
        message_bytes: int = _MESSAGE_BYTES,
        message_s: float = _MESSAGE_S,
    ) -> None:
        """Begin a store, or go on with one.

        Args and errors as for `create_store`; beside them:
            client_options: For `pymongo.MongoClient`.
            retry_s: Seconds for which a write waits for a server that went away; one that has never
                answered is waited for 5 s at most.
            message_bytes: Size from which records are sent.
            message_s: Seconds after which they are sent, however small they are.
        """
        self._address = MongoAddress.parse(uri)
        self.address = self._address.shown
        self.finished = False
        self._partial_name = self._address.sibling(partial_of(self._address.collection))
        self._client_options = dict(client_options or {})
        self._retry_s = retry_s
        self._what = what
        self._message_bytes = message_bytes
        self._message_s = message_s
        self._pack = ObjectId()
        self._files: list[ObjectId] = []
        self._built = IndexBuilder(class_names, metadata)
        self._found: list[tuple[str, int | tuple[int, ...] | None]] = []
        self._num_inserted = 0
        self._waiting: list[EncodedRecord] = []
        self._waiting_bytes = 0
        self._insertion: _Insertion | None = None  # of what waits: one was begun, and broke off
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
        if not overwrite and run("read", self._is_there):
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
        run, target = self._connection().run, self._address.collection
        pack = run("read", lambda database: database[target].find_one({"_id": PACK_ID}))
        if pack is None or not self._is_same(pack):
            return None
        summary = run("read", lambda database: find_summary(database, self._address))
        if summary is None:
            return None
        return PackedLayout(self._address).load(self._connection(), summary)

    def _check_destination(self, database: Database[Any]) -> None:
        """Refuse to drop what is somebody else's."""
        target = self._address.collection
        for name, ours in ((target, SUMMARY_ID), (partial_of(target), PACK_ID)):
            there = database[name]
            if there.find_one({}, {"_id": 1}) and not there.find_one({"_id": ours}, {"_id": 1}):
                raise StoreError(
                    f"{self._address.sibling(name)} holds documents that Penstock did not write, "
                    "and packing would drop them. Pack under another name, or drop them yourself."
                )

    def _is_there(self, database: Database[Any]) -> bool:
        return database[self._address.collection].find_one({}, {"_id": 1}) is not None

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
        while records := run("read", self._next_written):
            self._built.add(records)
            self._num_inserted += len(records)

    def _next_written(self, database: Database[Any]) -> list[EncodedRecord]:
        """Return some of the records behind those taken over."""
        first = self._num_inserted
        there = self._partial(database)
        found = there.find({"_id": {"$gte": first}}, sort=[("_id", 1)], limit=16)
        records = []
        for position, document in enumerate(found, first):
            name = f"record {document['_id']} of {self._partial_name}"
            if document["_id"] != position:
                raise StoreError(f"{name} follows on {position - 1}. Pack without --resume.")
            data = document.get("record")
            if not isinstance(data, bytes):
                data = self._file(database, document.get("file"), name)
            record = decode_record(data, name, copy=False)
            pair = is_pair(record.sample, record.label)
            records.append(EncodedRecord(record.key, record.label, data, pair))
        return records

    def _file(self, database: Database[Any], file_id: object, name: str) -> bytes:
        wanted = [file_id] if isinstance(file_id, ObjectId) else []
        files = read_files(database, bucket_of(self._address.collection), wanted)
        if not isinstance(file_id, ObjectId) or file_id not in files:
            raise StoreError(f"{name} has no file in GridFS. Pack without --resume.")
        self._files.append(file_id)
        return files[file_id]

    def written(self) -> Sequence[tuple[str, int | tuple[int, ...] | None]]:
        """Return key and label of the records that were found."""
        return self._found

    def checksum_at(self, number: int) -> int:
        """Return the checksum of a record that `written` lists."""
        return self._built.checksums[number]

    def put_many(self, records: Sequence[EncodedRecord]) -> None:
        """Append records; they are in the server's journal some 16 MB or 10 s later, or at the end.

        Raises:
            StoreError: a key comes a second time, and none of these is written; or the server
                refuses them.
            StoreUnreachable: it does not answer.
        """
        if self.finished and records:
            raise StoreError(f"{self.address} is complete; pack without --resume to make it anew.")
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
        while self._waiting:
            try:
                self._insert(retry_s)
            except Exception:
                self._has_failed = True  # what was refused once need not be tried again at the end
                raise

    def _insert(self, retry_s: float | None) -> None:
        """Insert what waits. An insertion that a Ctrl-C broke off is done again, as it was."""
        insertion = self._insertion
        if insertion is None:
            documents = [
                self._document(position, record)
                for position, record in enumerate(self._waiting, self._num_inserted)
            ]
            insertion = self._insertion = _Insertion(self._partial, documents)
        self._connection().run("write", insertion, retry_s)
        rest = self._waiting[insertion.stop - self._num_inserted :]
        rest_bytes = sum(len(record.data) for record in rest)
        self._waiting, self._waiting_bytes = rest, rest_bytes
        self._num_inserted, self._insertion = insertion.stop, None
        self._waiting_since_s = time.monotonic()

    def _document(self, position: int, record: EncodedRecord) -> dict[str, Any]:
        document = {"_id": position, "key": record.key, "label": record.label}
        if len(record.data) < _FILE_BYTES:
            return {**document, "record": Binary(record.data)}
        file_id = ObjectId()

        def write(database: Database[Any]) -> None:
            surely = database.with_options(write_concern=_journaled(database))
            bucket = bucket_of(self._address.collection)
            write_file(surely, bucket, file_id, record.key, record.data, self._pack)

        self._connection().run("write", write)
        self._files.append(file_id)
        return {**document, "file": file_id}

    def finish(self) -> None:
        """Complete the collection and put it in its place."""
        if self.finished:
            return
        self._flush()
        index = self._built.index()
        data = encode_record("index", index.to_tree()).data
        parts = [data[at : at + _INDEX_PART_BYTES] for at in range(0, len(data), _INDEX_PART_BYTES)]
        documents: dict[str, dict[str, Any]] = {
            index_id(number): {"data": Binary(part)} for number, part in enumerate(parts)
        }
        documents[SUMMARY_ID] = {
            "count": len(index),
            "fingerprint": index.fingerprint,
            "num_index_parts": len(parts),
            "version": LAYOUT_VERSION,
        }
        run = self._connection().run
        run("write", self._check_complete)
        for name, document in documents.items():  # in order: the summary comes last
            run("write", functools.partial(self._put, name, document))
        run("write", self._rename)
        run("write", self._remove_old_files)
        self.close()

    def _put(self, name: str, document: Mapping[str, Any], database: Database[Any]) -> None:
        self._partial(database).replace_one({"_id": name}, document, upsert=True)

    def _check_complete(self, database: Database[Any]) -> None:
        count = self._partial(database).count_documents(_RECORDS)
        if count != len(self._built):
            raise StoreError(
                f"{self._partial_name} has {count:,} records instead of {len(self._built):,}: the "
                "server lost some, or another program wrote to it. Pack without --resume."
            )

    def _rename(self, database: Database[Any]) -> None:
        try:
            self._partial(database).rename(self._address.collection, dropTarget=True)
        except OperationFailure as error:
            # An answer that was lost: then the collection is in its place already.
            placed = database[self._address.collection].find_one({"_id": PACK_ID}) or {}
            if error.code != _NO_SUCH_COLLECTION or placed.get("pack") != self._pack:
                raise

    def _remove_old_files(self, database: Database[Any]) -> None:
        bucket = bucket_of(self._address.collection)
        if database.list_collection_names(filter={"name": f"{bucket}.chunks"}):
            remove_other_files(database, bucket, self._files)

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
        return database.get_collection(name, write_concern=_journaled(database))

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


def _journaled(database: Database[Any]) -> WriteConcern:
    """Return how to write: a server that is killed forgets 0.1 s of what is not in its journal."""
    return WriteConcern(**{**database.write_concern.document, "j": True})


class _Insertion:
    """An insert that may be done again: what came through the first time is passed over."""

    def __init__(
        self,
        collection_in: Callable[[Database[Any]], Collection[Any]],
        documents: list[dict[str, Any]],
    ) -> None:
        self.stop = int(documents[-1]["_id"]) + 1  # position behind the last
        self._collection_in = collection_in
        self._documents = documents
        self._is_again = False

    def __call__(self, database: Database[Any]) -> None:
        is_again, self._is_again = self._is_again, True
        try:
            self._collection_in(database).insert_many(self._documents, ordered=not is_again)
        except BulkWriteError as error:
            codes = {failed["code"] for failed in error.details["writeErrors"]}
            if is_again and codes == {_DUPLICATE_KEY}:
                return
            if not codes and _is_leaving(error):
                raise AutoReconnect("the server shuts down") from error
            raise


def _is_leaving(error: BulkWriteError) -> bool:
    concerns = error.details["writeConcernErrors"]
    return any(concern["code"] in _SERVER_LEAVES for concern in concerns)


class MongoLock:
    """A document that says which process writes a collection.

    The server cannot tell that a process has ended, so the next one looks: a lock of a process of
    the same host that is no more is taken over. Of another host's nobody can know here.
    """

    def __init__(self, connection: MongoConnection, address: MongoAddress) -> None:
        """Take it.

        Raises:
            StoreError: another process holds it.
        """
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
        text = (
            f"another process is writing {self._address}: process {holder['pid']} on "
            f"{holder['host']}, since {holder['time']:%Y-%m-%d %H:%M:%S} UTC. Wait for it to end."
        )
        if holder["host"] == socket.gethostname():
            return text
        return (
            f"{text} If it is no more, remove its lock in mongosh: "
            f'db.getCollection("{LOCKS}").deleteOne({{_id: "{self._address.collection}"}})'
        )

    def release(self, connection: MongoConnection, retry_s: float) -> None:
        """Give it back. May be called again.

        Args:
            connection: To the server.
            retry_s: Seconds for which a server that is away is waited for; then it stays, and a
                warning says so.
        """
        if self._token not in _held_here:
            return
        _held_here.discard(self._token)
        mine = {"_id": self._address.collection, "token": self._token}
        try:
            connection.run("write", lambda database: database[LOCKS].delete_one(mine), retry_s)
        except StoreError as error:
            warnings.warn(
                f"the lock on {self._address} stays: {error} The next writer on this host takes "
                "it over.",
                RuntimeWarning,
                stacklevel=3,
            )


def _is_dead(holder: Mapping[str, Any]) -> bool:
    """Return whether the holder of a lock is known to be no more."""
    if holder["host"] != socket.gethostname():
        return False
    if holder["pid"] == os.getpid():
        return holder["token"] not in _held_here
    return bool(_started(holder["pid"]) != holder["started"])


def _started(pid: int) -> str:
    """Return something that tells a process from a later one of the same number; "" if it ended."""
    try:
        # proc(5): field 22, counted behind the name, which may have blanks and brackets in it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
