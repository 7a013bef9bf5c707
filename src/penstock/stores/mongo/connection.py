# SPDX-License-Identifier: Apache-2.0
"""Addresses of MongoDB collections, and connections: one client per process and set of options.

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
import contextlib
import logging
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar
from urllib.parse import unquote, unquote_plus

from pymongo import MongoClient
from pymongo.errors import ConnectionFailure, CursorNotFound, OperationFailure, PyMongoError
from pymongo.uri_parser import split_options

from penstock.errors import ConfigError, StoreError, StoreUnreachable
from penstock.sharing import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pymongo.database import Database

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
_FORM: Final = "mongodb://USER:PASSWORD@HOST:PORT/DATABASE.COLLECTION?OPTIONS"
_URI: Final = re.compile(r"(mongodb(?:\+srv)?://)([^/]*)/([^?]*)(?:\?(.*))?", re.DOTALL)
_ESCAPED: Final = r"(?:[^:@/?#\[\]%\s]|%[0-9A-Fa-f]{2})"
_USER: Final = re.compile(rf"{_ESCAPED}*(?::{_ESCAPED}*)?")
_HOST: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._%-]+)(?::\d{1,5})?")
_USER_OF_A_URI: Final = re.compile(r"(//)[^/@\s]*@")
_SECRET_OPTION: Final = re.compile("passw|propert|token|secret", re.IGNORECASE)
_LEAST_SECRET: Final = 3  # characters; shorter ones are parts of any text
# Jitter, so that workers do not all come back at once. Not the global generator: drawing from it
# would change a user's random numbers whenever a server restarts.
_jitter: Final = random.SystemRandom()


@dataclass(frozen=True)
class MongoAddress:
    """A collection's address, taken apart. Neither its repr nor its text has a secret in it."""

    shown: str
    hosts: str
    database: str
    collection: str
    uri: str = field(repr=False)
    secrets: frozenset[str] = field(repr=False)
    option_names: frozenset[str] = field(repr=False)

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Take an address apart."""
        # Whatever is wrong, the part that is may be one of the password: nothing is quoted.
        found = _URI.fullmatch(uri)
        scheme, server, path, query = found.groups(default="") if found else ("", "", "", "")
        user, at, hosts = server.rpartition("@")
        if not _USER.fullmatch(user) or "@" in path + query:
            raise ConfigError(
                "a MongoDB address has a user or a password with characters that have to be "
                "percent-escaped, as urllib.parse.quote(password, safe='') does it, or its "
                f"options have a '@', to be written %40. The form is {_FORM}."
            )
        database, dot, collection = unquote_plus(path).partition(".")
        if not all(map(_HOST.fullmatch, hosts.split(","))) or not (database and collection):
            raise ConfigError(f"a MongoDB address names host, database and collection: {_FORM}.")
        options = _options(query)
        plain_path = path.split(".")[0] + ("?" + query if query else "")
        return cls(
            f"{scheme}{hosts}/{database}{dot}{collection}",
            hosts,
            database,
            collection,
            f"{scheme}{user}{at}{hosts}/{plain_path}",
            frozenset(_secrets(user.partition(":")[2], options)),
            frozenset(map(str.lower, options)),
        )

    def sibling(self, collection: str) -> str:
        """Return what errors call another collection of the same database."""
        return f"{self.shown.removesuffix(self.collection)}{collection}"

    def scrubbed(self, text: str, options: Mapping[str, object] | None = None) -> str:
        """Return what the driver says, without the secrets of the address or of client options."""
        text = _USER_OF_A_URI.sub(r"\1***@", text)
        secrets = self.secrets | set(_secrets("", options or {}))
        for secret in sorted(secrets, key=len, reverse=True):
            if len(secret) >= _LEAST_SECRET:
                text = text.replace(secret, "***")
        return text

    def __str__(self) -> str:
        """Return the address without secrets."""
        return self.shown


def _options(query: str) -> dict[str, str]:
    """Return the options of a URI; pymongo would only warn of wrong ones, values included."""
    options = {}
    for part in filter(None, re.split("[&;]", query)):
        name, equals, options[name] = part.partition("=")
        with contextlib.suppress(PyMongoError, ValueError, TypeError, OSError):
            split_options(part, validate=True, warn=False)
            continue
        # Raised outside of the handler, as the driver's error has the value.
        shown = repr(name) if equals and re.fullmatch("[A-Za-z_]{1,40}", name) else "one"
        raise ConfigError(
            f"the options of a MongoDB address: {shown} is unknown to pymongo, or has a value "
            "that does not fit. They are the driver's, as name=value pairs joined by '&'; "
            "those of Penstock are arguments, as in MongoDataset(address, image_field=...)."
        )
    return options


def _secrets(password: str, options: Mapping[str, object]) -> Iterator[str]:
    """Yield secrets, also those of properties such as NAME:VALUE,NAME:VALUE, and unescaped."""
    texts = [password]
    for name, value in options.items():
        if _SECRET_OPTION.search(name):
            texts += map(str, value.values()) if isinstance(value, Mapping) else [str(value)]
            texts += [part.partition(":")[2] for part in str(value).split(",")]
    for text in filter(None, texts):
        yield from {text, unquote(text), unquote_plus(text)}


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
    # pymongo 4.10 and 4.11 name no cause.
    return type(error.__cause__ or error.__context__).__module__.partition(".")[0] == "dns"


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
