# SPDX-License-Identifier: Apache-2.0
"""Locks in a database: one writer at a time for each collection."""

from __future__ import annotations

import datetime
import os
import socket
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bson import ObjectId
from pymongo.errors import DuplicateKeyError

from penstock.errors import StoreError
from penstock.stores.mongo.layout import LOCKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pymongo.database import Database

    from penstock.stores.mongo.address import MongoAddress
    from penstock.stores.mongo.connection import MongoConnection

__all__ = ["MongoLock"]

_held_here: set[ObjectId] = set()


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
        return "" if not _is_alive(pid) else "?"
    return "" if fields[0] in "ZX" else fields[19]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
