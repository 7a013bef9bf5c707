# SPDX-License-Identifier: Apache-2.0
"""MongoDB clients: one for each process and set of options, and reads that outlast a restart.

Guarantees
    A client is made at first use, and closed when the last of its users has let go and nothing is
    under way. Stores of one database and the same options share it.
    It never crosses a fork: a child forgets what it inherited, without closing it, as its sockets
    are the parent's; and makes its own. It is never pickled.
    No error has a user, a password or an option of the URI in it, nor a cause that does.

A client of ours has at most 2 connections for reading and one that watches the server; whoever
needs more says so (`maxPoolSize`). Compression is left to the user: image files do not shrink.

Reference:
    PyMongo's documentation, "Is PyMongo fork-safe?"; jira.mongodb.org PYTHON-1139, PYTHON-2484.
"""

from __future__ import annotations

import contextlib
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

from penstock.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pymongo.database import Database

    from penstock.stores.mongo.address import MongoAddress

__all__ = ["MongoConnection"]

T = TypeVar("T")

_POOL_SIZE: Final = 2  # a worker has one thread that reads; the second is for a user's own
_SELECTION_S: Final = 5.0  # per try; a server that restarts is back within a few
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_WRONG_CREDENTIALS: Final = 18
_NOT_ALLOWED: Final = 13
_NO_SPACE: Final = 14031
_COLLECTION_REPLACED: Final = 175  # while it was read
_HINTS: Final = {
    _WRONG_CREDENTIALS: "Check user and password, and the database that the user belongs to: one "
    "of `admin` needs the option authSource=admin.",
    _NOT_ALLOWED: "The user needs the role `read` on the database to read, `readWrite` to pack.",
    _NO_SPACE: "The server's disk is full. What was packed so far is kept: make room, and go on "
    "with --resume.",
}
# Jitter, so that workers do not all come back at once. Not the global generator: drawing from it
# would change a user's random numbers whenever a server restarts.
_jitter: Final = random.SystemRandom()


class MongoConnection:
    """What one store uses of this process's client.

    Attributes:
        pid: The process that may use it.
        close: Lets go of the client. May be called again, from any process.
    """

    def __init__(
        self, address: MongoAddress, client_options: Mapping[str, Any], retry_s: float
    ) -> None:
        """Take part in a client; nothing is sent yet.

        Raises:
            ConfigError: an option does not fit.
        """
        self.pid = os.getpid()
        self._address = address
        self._options = client_options
        self._retry_s = retry_s
        self._shared = _acquire(address, client_options, retry_s)
        self.close = weakref.finalize(self, _release_in, self.pid, self._shared)

    @property
    def is_usable(self) -> bool:
        """Whether it is this process's, and has neither been closed nor failed."""
        return self.pid == os.getpid() and self.close.alive

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
            StoreError: the server stayed away for `retry_s`, or refuses. The connection is closed.
        """
        limit_s = self._retry_s if retry_s is None else min(retry_s, self._retry_s)
        deadline_s = time.monotonic() + limit_s
        pause_s = _FIRST_PAUSE_S
        while True:
            # Errors are raised outside of the handlers: none carries the driver's as its context.
            try:
                with self._shared.in_use() as client:
                    return action(client[self._address.database])
            except (ConnectionFailure, CursorNotFound) as error:
                said = self._said(error)
            except OperationFailure as error:
                if error.code != _COLLECTION_REPLACED:
                    refusal: StoreError = self._refused(doing, error)
                    break
                said = self._said(error)
            except PyMongoError as error:
                refusal = StoreError(f"cannot {doing} {self._address}: {self._said(error)}.")
                break
            wait_s = pause_s * _jitter.uniform(0.5, 1.0)
            if time.monotonic() + wait_s + self._shared.selection_s > deadline_s:
                refusal = self._away(doing, said, limit_s)
                break
            time.sleep(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        # The driver keeps its last error, whose traceback has our frames, and through them the
        # store: left to the garbage collector, the client would never be closed.
        self.close()
        raise refusal

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

    def _away(self, doing: str, said: str, limit_s: float) -> StoreError:
        return StoreError(
            f"cannot {doing} {self._address}: no answer from {self._address.hosts} for "
            f"{limit_s:g} s ({said}). Is mongod running there, can this machine reach it, "
            "and do both use TLS or neither? A larger `retry_s` waits longer."
        )


class _SharedClient:
    """One client and its users."""

    def __init__(self, uri: str, options: Mapping[str, Any], client: MongoClient[Any]) -> None:
        self.uri = uri
        self.options = options
        self.client = client
        self.num_users = 0
        self.selection_s = float(client.options.server_selection_timeout)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[MongoClient[Any]]:
        with _state.lock:
            if self.num_users == 0:
                raise StoreError("a MongoDB store was closed by another thread while it was used.")
            self.num_users += 1
        try:
            yield self.client
        finally:
            self.release()

    def release(self) -> None:
        with _state.lock:
            self.num_users -= 1
            if self.num_users:
                return
            _state.clients.remove(self)
        self.client.close()  # asks the server: not under the lock


class _State:
    """What this process has."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.clients: list[_SharedClient] = []
        self.inherited: _State | None = None


_state = _State()


def _after_fork() -> None:
    global _state
    parents, _state = _state, _State()
    # Kept, not dropped: a client that is garbage warns of not having been closed.
    _state.inherited = parents


os.register_at_fork(after_in_child=_after_fork)


def _acquire(address: MongoAddress, options: Mapping[str, Any], retry_s: float) -> _SharedClient:
    wanted = {**_defaults(address, options, retry_s), **options}
    with _state.lock:
        for shared in _state.clients:
            if shared.uri == address.uri and shared.options == wanted:
                break
        else:
            shared = _SharedClient(address.uri, wanted, _new_client(address, wanted))
            _state.clients.append(shared)
        shared.num_users += 1
        return shared


def _defaults(
    address: MongoAddress, options: Mapping[str, Any], retry_s: float
) -> dict[str, object]:
    """Return our options, but those that the user has set, in the URI or beside it."""
    defaults: dict[str, object] = {
        "appname": "penstock",
        "connect": False,
        "maxPoolSize": _POOL_SIZE,
        "serverMonitoringMode": "poll",  # one connection and one thread less than "stream"
        "serverSelectionTimeoutMS": int(1000 * min(_SELECTION_S, max(0.5, retry_s / 4))),
    }
    is_set = address.option_names | set(map(str.lower, options))
    return {name: value for name, value in defaults.items() if name.lower() not in is_set}


def _new_client(address: MongoAddress, options: Mapping[str, Any]) -> MongoClient[Any]:
    try:
        return MongoClient(address.uri, **options)
    except (PyMongoError, TypeError, ValueError, OSError) as error:
        said = address.scrubbed(str(error), options)
    raise ConfigError(f"the options for {address} do not fit: {said.rstrip('.')}.")


def _release_in(pid: int, shared: _SharedClient) -> None:
    if pid == os.getpid():
        shared.release()
