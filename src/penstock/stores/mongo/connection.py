# SPDX-License-Identifier: Apache-2.0
"""Connections to MongoDB: one client for each process and set of options, and commands on it.

A command outlasts a restart of the server:

    first contact            at most 5 s: an address with a mistake in it is no restart
    the server goes away     `retry_s`, with growing pauses, and a line in the log after 2 s
    it refuses               not tried again

No error has a password or an option of the URI in it, nor a cause that does.

Reference:
    PyMongo's documentation, "Is PyMongo fork-safe?"; jira.mongodb.org PYTHON-1139, PYTHON-2484.
"""

from __future__ import annotations

import atexit
import logging
import random
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pymongo import MongoClient
from pymongo.errors import (
    ConnectionFailure,
    CursorNotFound,
    OperationFailure,
    PyMongoError,
)

from penstock.errors import ConfigError, StoreError, StoreUnreachable
from penstock.stores.sharing import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pymongo.database import Database

    from penstock.stores.mongo.address import MongoAddress

T = TypeVar("T")

_log = logging.getLogger("penstock")

_POOL_SIZE: Final = 2  # a worker has one thread that reads; the second is for a user's own
# Per try. The client goes on connecting between tries, so that a slow one is in time for a later.
_SELECTION_S: Final = 2.0
_FIRST_CONTACT_S: Final = 5.0  # docs/mongodb.md says so
_SILENT_S: Final = 2.0
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_COLLECTION_REPLACED: Final = 175  # while it was read
_HINTS: Final = {
    18: "Check user and password, and the database that the user belongs to: one of `admin` needs "
    "the option authSource=admin.",
    13: "The user needs the role `read` on the database to read, `readWrite` to pack.",
    14031: "The server's disk is full. What was packed so far is kept: make room, and go on with "
    "--resume.",
}
# Jitter, so that workers do not all come back at once. Not the global generator: drawing from it
# would change a user's random numbers whenever a server restarts.
_jitter: Final = random.SystemRandom()


class _Client:
    """A client."""

    def __init__(self, client: MongoClient[Any]) -> None:
        self.client = client
        self.has_answered = False
        self.selection_s = float(client.options.server_selection_timeout)


# A client that was inherited is not closed, as its sockets are the parent's.
_clients: Pool[_Client] = Pool(lambda shared: shared.client.close(), is_local=False)
atexit.register(_clients.close_all)


def _new_client(address: MongoAddress, options: Mapping[str, Any]) -> MongoClient[Any]:
    # Raised outside of the handler: with the driver's error as its context it would show secrets.
    try:
        return MongoClient(address.uri, **options)
    except (PyMongoError, TypeError, ValueError, OSError) as error:
        said = address.scrubbed(str(error), options).rstrip(".")
        refusal: Exception = ConfigError(f"the options for {address} do not fit: {said}.")
        if _is_name_failure(error):
            refusal = StoreUnreachable(f"cannot look up {address}: {said}.")
    raise refusal


def _is_name_failure(error: BaseException) -> bool:
    """Return whether a `mongodb+srv://` name was not found: pymongo calls that a wrong option."""
    return type(error.__cause__).__module__.partition(".")[0] == "dns"


class MongoConnection:
    """What one store uses of this process's client."""

    def __init__(
        self,
        address: MongoAddress,
        client_options: Mapping[str, Any],
        retry_s: float,
        *,
        is_known: bool = False,
    ) -> None:
        """Take part in a client; nothing is sent yet."""
        self._address = address
        self._options = client_options
        self._retry_s = retry_s
        self._is_known = is_known
        defaults: dict[str, object] = {
            "appname": "penstock",
            "connect": False,
            "maxPoolSize": _POOL_SIZE,
            "serverMonitoringMode": "poll",  # one connection and one thread less than "stream"
            "serverSelectionTimeoutMS": int(1000 * min(_SELECTION_S, max(0.5, retry_s / 4))),
        }
        is_set = address.option_names | set(map(str.lower, client_options))
        ours = {name: value for name, value in defaults.items() if name.lower() not in is_set}
        wanted = {**ours, **client_options}
        key = (address.uri, repr(sorted(wanted.items(), key=str)))
        self._lease = _clients.acquire(key, lambda: _Client(_new_client(address, wanted)))
        self.close = self._lease.close

    @property
    def is_usable(self) -> bool:
        """Whether it is this process's, and has neither been closed nor failed."""
        return self._lease.is_usable

    def run(
        self, doing: str, action: Callable[[Database[Any]], T], retry_s: float | None = None
    ) -> T:
        """Return what `action` returns; it is called again for as long as the server is away."""
        limit_s = self._retry_s if retry_s is None else min(retry_s, self._retry_s)
        if not (self._is_known or self._lease.thing.has_answered):
            limit_s = min(limit_s, _FIRST_CONTACT_S)
        start_s, pause_s, is_said = time.monotonic(), _FIRST_PAUSE_S, False
        while True:
            # Errors are raised outside of the handlers: none carries the driver's as its context.
            try:
                with self._lease.using() as shared:
                    found = action(shared.client[self._address.database])
                shared.has_answered = True
                return found
            except PyMongoError as error:
                refusal = self._refusal(doing, error)
                said = self._said(str(error) or type(error).__name__)
            if refusal is not None:
                break
            past_s = time.monotonic() - start_s
            if past_s >= _SILENT_S and not is_said:
                is_said = True
                _log.warning(
                    "%s does not answer (%s); waiting for it, %g s at most.",
                    self._address,
                    said,
                    limit_s,
                )
            wait_s = pause_s * _jitter.uniform(0.5, 1.0)
            is_late = past_s + wait_s + shared.selection_s > limit_s
            if is_late or not self.is_usable:  # or another thread has given up on it
                refusal = self._away(doing, said, past_s, limit_s)
                break
            time.sleep(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        # The driver keeps its last error, whose traceback has our frames, and through them the
        # store: left to the garbage collector, the client would not be closed for long.
        self.close()
        raise refusal

    def _refusal(self, doing: str, error: PyMongoError) -> StoreError | None:
        """Return what to raise at once; None if the server is away, or changes."""
        if isinstance(error, (ConnectionFailure, CursorNotFound)) or _is_name_failure(error):
            return None
        if not isinstance(error, OperationFailure):
            return StoreError(f"cannot {doing} {self._address}: {self._said(str(error))}.")
        self._lease.thing.has_answered = True
        if error.code == _COLLECTION_REPLACED:
            return None
        details = error.details or {}
        # A bulk write's details hold the documents themselves: only what the server said is shown.
        failed = details.get("writeErrors") or details.get("writeConcernErrors") or [details]
        said, code = failed[0].get("errmsg") or "it refuses", failed[0].get("code", error.code)
        hint = f" {_HINTS[code]}" if code in _HINTS else ""
        return StoreError(
            f"cannot {doing} {self._address}: the server says: {self._said(str(said))} (code "
            f"{code}).{hint}"
        )

    def _said(self, text: str) -> str:
        return self._address.scrubbed(text, self._options).partition(", Timeout:")[0].rstrip(".")

    def _away(self, doing: str, said: str, past_s: float, limit_s: float) -> StoreUnreachable:
        hint = "A larger `retry_s` waits longer."
        if limit_s < self._retry_s and not self._lease.thing.has_answered:
            hint = f"`retry_s` ({self._retry_s:g} s) is for servers that answered before."
        return StoreUnreachable(
            f"cannot {doing} {self._address}: no answer from {self._address.hosts} for "
            f"{past_s:.1f} s ({said}). Is mongod running there, can this machine reach it, "
            f"and do both use TLS or neither? {hint}"
        )
