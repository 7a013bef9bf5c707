# SPDX-License-Identifier: Apache-2.0
"""Connections to MongoDB: one client for each process and set of options, and commands on it.

A client is made at first use, and closed when the last store that uses it is closed and nothing is
under way. The garbage collector, which may drop a store while this thread has the lock, only leaves
a note, which the next `close` reads; what is left is closed at exit. A client never crosses a fork:
a child forgets what it inherited, without closing it, as its sockets are the parent's.

A command outlasts a restart of the server:

    first contact            at most 5 s: an address with a mistake in it is no restart
    the server goes away     `retry_s`, with growing pauses, and a line in the log after 2 s
    it refuses               not tried again

No error has a password or an option of the URI in it, nor a cause that does.

A client of ours has at most 2 connections for reading and one that watches the server; more are
an option (`maxPoolSize`). Compression is left to the user: image files do not shrink.

Reference:
    PyMongo's documentation, "Is PyMongo fork-safe?"; jira.mongodb.org PYTHON-1139, PYTHON-2484.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import os
import random
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pymongo import MongoClient
from pymongo.errors import (
    ConnectionFailure,
    CursorNotFound,
    OperationFailure,
    PyMongoError,
)

from penstock.errors import ConfigError, StoreError, StoreUnreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pymongo.database import Database

    from penstock.stores.mongo.address import MongoAddress

__all__ = ["MongoConnection"]

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


class _SharedClient:
    """One client and its users.

    Attributes:
        has_answered: Whether the server ever did, through this client.
        selection_s: Seconds for which one try waits for a server.
    """

    def __init__(self, uri: str, options: Mapping[str, Any], client: MongoClient[Any]) -> None:
        self.uri = uri
        self.options = options
        self.client = client
        self.num_users = 0
        self.has_answered = False
        self.selection_s = float(client.options.server_selection_timeout)


class _OpenClients:
    """What this process has."""

    def __init__(self) -> None:
        self.clients: list[_SharedClient] = []
        self.inherited: _OpenClients | None = None
        self.let_go: collections.deque[_SharedClient] = collections.deque()  # once for each user
        self.lock = threading.Lock()  # nothing that holds it may wait

    def joined(self, made: _SharedClient | None, uri: str, options: object) -> _SharedClient | None:
        """Return the client of this URI and these options, with one user more; or add `made`."""
        with self.lock:
            same = (c for c in self.clients if c.uri == uri and c.options == options)
            shared = next(same, made)
            if shared is not None:
                shared.num_users += 1
                if shared.num_users == 1:
                    self.clients.append(shared)
            return shared

    def release(self, shared: _SharedClient) -> None:
        """Count one user less; with the last one the client is closed."""
        self.let_go.append(shared)
        unused = []
        with self.lock:
            while self.let_go:
                one = self.let_go.popleft()
                one.num_users -= 1
                if one.num_users == 0:
                    self.clients.remove(one)
                    unused.append(one)
        for one in unused:
            one.client.close()  # asks the server: not under the lock


_state = _OpenClients()


def _after_fork() -> None:
    global _state
    # With a lock of its own: a thread may have held that one.
    parents, _state = _state, _OpenClients()
    # Kept, not dropped: a client that is garbage warns of not having been closed.
    _state.inherited = parents


def _close_all() -> None:
    for shared in tuple(_state.clients):
        shared.client.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_close_all)


def _acquired(address: MongoAddress, options: Mapping[str, Any], retry_s: float) -> _SharedClient:
    """Return this process's client for an address, which has one user more."""
    defaults: dict[str, object] = {
        "appname": "penstock",
        "connect": False,
        "maxPoolSize": _POOL_SIZE,
        "serverMonitoringMode": "poll",  # one connection and one thread less than "stream"
        "serverSelectionTimeoutMS": int(1000 * min(_SELECTION_S, max(0.5, retry_s / 4))),
    }
    is_set = address.option_names | set(map(str.lower, options))
    ours = {name: value for name, value in defaults.items() if name.lower() not in is_set}
    wanted = {**ours, **options}
    shared = _state.joined(None, address.uri, wanted)
    if shared is None:
        # Not under the lock: it makes thousands of objects, and may look up names.
        made = _SharedClient(address.uri, wanted, _new_client(address, wanted))
        shared = _state.joined(made, address.uri, wanted)
        assert shared is not None
        if shared is not made:  # another thread's was there first
            made.client.close()
    return shared


def _new_client(address: MongoAddress, options: Mapping[str, Any]) -> MongoClient[Any]:
    # Raised outside of the handler: with the driver's error as its context it would show secrets.
    try:
        return MongoClient(address.uri, **options)
    except (PyMongoError, TypeError, ValueError, OSError) as error:
        said = address.scrubbed(str(error), options).rstrip(".")
        is_away = _is_name_failure(error)
    if is_away:
        raise StoreUnreachable(f"cannot look up {address}: {said}.")
    raise ConfigError(f"the options for {address} do not fit: {said}.")


def _is_name_failure(error: BaseException) -> bool:
    """Return whether a `mongodb+srv://` name was not found: pymongo calls that a wrong option."""
    return type(error.__cause__).__module__.partition(".")[0] == "dns"


class MongoConnection:
    """What one store uses of this process's client.

    Attributes:
        pid: The process that may use it.
    """

    def __init__(
        self,
        address: MongoAddress,
        client_options: Mapping[str, Any],
        retry_s: float,
        *,
        is_known: bool = False,
    ) -> None:
        """Take part in a client; nothing is sent yet.

        Args:
            address: Of the collection.
            client_options: For `pymongo.MongoClient`.
            retry_s: Seconds for which a command waits for a server that went away.
            is_known: Whether the server has answered before: then it is waited for at first
                contact as well. A worker that starts while the server restarts knows it.

        Raises:
            ConfigError: an option does not fit.
        """
        self.pid = os.getpid()
        self._address = address
        self._options = client_options
        self._retry_s = retry_s
        self._is_known = is_known
        self._state = _state
        self._shared = _acquired(address, client_options, retry_s)
        self._dropped = weakref.finalize(self, self._state.let_go.append, self._shared)
        self._dropped.atexit = False

    @property
    def is_usable(self) -> bool:
        """Whether it is this process's, and has neither been closed nor failed."""
        return self.pid == os.getpid() and self._dropped.alive

    def close(self) -> None:
        """Let go of the client. May be called again, from any process."""
        if self._dropped.detach() is not None and self.pid == os.getpid():
            self._state.release(self._shared)

    @contextlib.contextmanager
    def _client(self) -> Iterator[MongoClient[Any]]:
        """Return the client, which is not closed before the block is left."""
        with self._state.lock:
            if self._shared.num_users == 0:
                raise StoreError("a MongoDB store was closed by another thread while it was used.")
            self._shared.num_users += 1
        try:
            yield self._shared.client
        finally:
            self._state.release(self._shared)

    def run(
        self, doing: str, action: Callable[[Database[Any]], T], retry_s: float | None = None
    ) -> T:
        """Return what `action` returns; it is called again for as long as the server is away.

        Args:
            doing: What errors say could not be done: "read", "write".
            action: Called with the database. It must do no harm if it is called again after it was
                carried out.
            retry_s: Instead of the connection's own, where that is longer.

        Raises:
            StoreUnreachable: the server stayed away for `retry_s`, or for 5 s before it ever
                answered. The connection is closed.
            StoreError: it refuses. The connection is closed.
        """
        limit_s = self._limit_s(retry_s)
        start_s, pause_s, is_said = time.monotonic(), _FIRST_PAUSE_S, False
        while True:
            # Errors are raised outside of the handlers: none carries the driver's as its context.
            try:
                with self._client() as client:
                    found = action(client[self._address.database])
                self._shared.has_answered = True
                return found
            except PyMongoError as error:
                refusal = self._refusal(doing, error)
                said = self._said(error)
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
            is_late = past_s + wait_s + self._shared.selection_s > limit_s
            if is_late or not self.is_usable:  # or another thread has given up on it
                refusal = self._away(doing, said, past_s, limit_s)
                break
            time.sleep(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        # The driver keeps its last error, whose traceback has our frames, and through them the
        # store: left to the garbage collector, the client would not be closed for long.
        self.close()
        raise refusal

    def _limit_s(self, retry_s: float | None) -> float:
        limit_s = self._retry_s if retry_s is None else min(retry_s, self._retry_s)
        is_first = not (self._is_known or self._shared.has_answered)
        return min(limit_s, _FIRST_CONTACT_S) if is_first else limit_s

    def _refusal(self, doing: str, error: PyMongoError) -> StoreError | None:
        """Return what to raise at once; None if the server is away, or changes."""
        if isinstance(error, (ConnectionFailure, CursorNotFound)) or _is_name_failure(error):
            return None
        if isinstance(error, OperationFailure):
            self._shared.has_answered = True
            return None if error.code == _COLLECTION_REPLACED else self._refused(doing, error)
        return StoreError(f"cannot {doing} {self._address}: {self._said(error)}.")

    def _said(self, error: PyMongoError) -> str:
        text = str(error) or type(error).__name__
        return self._address.scrubbed(text, self._options).partition(", Timeout:")[0].rstrip(".")

    def _refused(self, doing: str, error: OperationFailure) -> StoreError:
        details = error.details or {}
        # A bulk write's details hold the documents themselves: only what the server said is shown.
        failed = details.get("writeErrors") or details.get("writeConcernErrors") or [details]
        first = failed[0]
        said = self._address.scrubbed(str(first.get("errmsg") or "it refuses"), self._options)
        code = first.get("code", error.code)
        hint = _HINTS.get(code, "") if isinstance(code, int) else ""
        return StoreError(
            f"cannot {doing} {self._address}: the server says: {said.rstrip('.')} (code {code}). "
            f"{hint}".rstrip()
        )

    def _away(self, doing: str, said: str, past_s: float, limit_s: float) -> StoreUnreachable:
        hint = "A larger `retry_s` waits longer."
        if limit_s < self._retry_s and not self._shared.has_answered:
            hint = f"`retry_s` ({self._retry_s:g} s) is for servers that answered before."
        return StoreUnreachable(
            f"cannot {doing} {self._address}: no answer from {self._address.hosts} for "
            f"{past_s:.1f} s ({said}). Is mongod running there, can this machine reach it, "
            f"and do both use TLS or neither? {hint}"
        )
