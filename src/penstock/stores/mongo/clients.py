# SPDX-License-Identifier: Apache-2.0
"""MongoDB clients: one for each process and set of options.

Guarantees
    A client is made at first use, and closed when the last of its users has let go and nothing is
    under way. Stores of one database and the same options share it.
    It never crosses a fork: a child forgets what it inherited, without closing it, as its sockets
    are the parent's; and makes its own. It is never pickled.
    Letting go never waits for a lock. The garbage collector may let go of a store at any moment,
    also while this thread has the lock, or pymongo one of its own: it only leaves a note, and the
    next that takes a client or lets go of one reads it. What is left is closed at exit.

A client of ours has at most 2 connections for reading and one that watches the server; whoever
needs more says so (`maxPoolSize`). Compression is left to the user: image files do not shrink.

Reference:
    PyMongo's documentation, "Is PyMongo fork-safe?"; jira.mongodb.org PYTHON-1139, PYTHON-2484.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any, Final

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from penstock.errors import ConfigError, StoreError, StoreUnreachable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.stores.mongo.address import MongoAddress

__all__ = ["SharedClient", "acquire", "is_name_failure"]

_POOL_SIZE: Final = 2  # a worker has one thread that reads; the second is for a user's own
# Per try. The client goes on connecting between tries, so that a slow one is in time for a later.
_SELECTION_S: Final = 2.0


class SharedClient:
    """One client and its users.

    Attributes:
        has_answered: Whether the server ever did, through this client.
        selection_s: Seconds for which one try waits for a server.
    """

    def __init__(
        self, state: _OpenClients, uri: str, options: Mapping[str, Any], client: MongoClient[Any]
    ) -> None:
        """Keep a client that nobody uses yet."""
        self.uri = uri
        self.options = options
        self.client = client
        self.num_users = 0
        self.has_answered = False
        self.selection_s = float(client.options.server_selection_timeout)
        self._state = state

    @contextlib.contextmanager
    def in_use(self) -> Iterator[MongoClient[Any]]:
        """Return the client, which is not closed before the block is left.

        Raises:
            StoreError: it is closed already.
        """
        with self._state.locked():
            is_open = self.num_users > 0
            self.num_users += is_open
        if not is_open:
            raise StoreError("a MongoDB store was closed by another thread while it was used.")
        try:
            yield self.client
        finally:
            self.release()

    def release(self) -> None:
        """Count one user less; with the last one the client is closed."""
        self.abandon()
        self._state.settle()

    def abandon(self) -> None:
        """Count one user less, some time later: for the garbage collector to call."""
        self._state.let_go.append(self)


class _OpenClients:
    """What this process has."""

    def __init__(self) -> None:
        self.clients: list[SharedClient] = []
        self.let_go: collections.deque[SharedClient] = collections.deque()  # once for each user
        self.inherited: _OpenClients | None = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock; nothing in the block may wait, or do more than count."""
        with self._lock:
            yield
        self.settle()  # what could not be, as the lock was held

    def settle(self) -> None:
        """Count who let go, and close what nobody uses. Whoever has the lock does so after it."""
        while self.let_go and self._lock.acquire(blocking=False):
            try:
                unused = self._count()
            finally:
                self._lock.release()
            for shared in unused:
                shared.client.close()  # asks the server: not under the lock

    def _count(self) -> list[SharedClient]:
        unused = []
        while self.let_go:
            shared = self.let_go.popleft()
            shared.num_users -= 1
            if shared.num_users == 0:
                self.clients.remove(shared)
                unused.append(shared)
        return unused

    def joined(self, made: SharedClient | None, uri: str, options: object) -> SharedClient | None:
        """Return the client of this URI and these options, with one user more; or add `made`."""
        with self.locked():
            for shared in self.clients:
                if shared.uri == uri and shared.options == options:
                    break
            else:
                if made is None:
                    return None
                shared = made
                self.clients.append(shared)
            shared.num_users += 1
            return shared


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


def acquire(address: MongoAddress, options: Mapping[str, Any], retry_s: float) -> SharedClient:
    """Return this process's client for an address, which has one user more: `release` it.

    Raises:
        ConfigError: an option does not fit.
        StoreUnreachable: the name of a `mongodb+srv://` address cannot be looked up.
    """
    state = _state
    wanted = {**_defaults(address, options, retry_s), **options}
    shared = state.joined(None, address.uri, wanted)
    if shared is None:
        # Not under the lock: it makes thousands of objects, and may look up names.
        made = SharedClient(state, address.uri, wanted, _new_client(address, wanted))
        shared = state.joined(made, address.uri, wanted)
        assert shared is not None
        if shared is not made:  # another thread's was there first
            made.client.close()
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
    # Raised outside of the handler: with the driver's error as its context it would show secrets.
    try:
        return MongoClient(address.uri, **options)
    except (PyMongoError, TypeError, ValueError, OSError) as error:
        said = address.scrubbed(str(error), options).rstrip(".")
        is_away = is_name_failure(error)
    if is_away:
        raise StoreUnreachable(f"cannot look up {address}: {said}.")
    raise ConfigError(f"the options for {address} do not fit: {said}.")


def is_name_failure(error: BaseException) -> bool:
    """Return whether a `mongodb+srv://` name was not found: pymongo calls that a wrong option."""
    return type(error.__cause__).__module__.partition(".")[0] == "dns"
