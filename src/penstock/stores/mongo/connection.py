# SPDX-License-Identifier: Apache-2.0
"""What one store or writer uses of a client: commands that outlast a restart of the server.

    first contact            at most 5 s: an address with a mistake in it is no restart
    the server goes away     `retry_s`, with growing pauses, and a line in the log after 2 s
    it refuses               not tried again

No error has a password or an option of the URI in it, nor a cause that does.
"""

from __future__ import annotations

import logging
import os
import random
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pymongo.errors import (
    ConnectionFailure,
    CursorNotFound,
    OperationFailure,
    PyMongoError,
)

from penstock.errors import StoreError, StoreUnreachable
from penstock.stores.mongo.clients import acquire, is_name_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pymongo.database import Database

    from penstock.stores.mongo.address import MongoAddress

__all__ = ["MongoConnection"]

T = TypeVar("T")

_log = logging.getLogger("penstock")

_FIRST_CONTACT_S: Final = 5.0  # docs/mongodb.md says so
_SILENT_S: Final = 2.0
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
        self._shared = acquire(address, client_options, retry_s)
        self._letting_go = weakref.finalize(self, self._shared.abandon)
        self._letting_go.atexit = False

    @property
    def is_usable(self) -> bool:
        """Whether it is this process's, and has neither been closed nor failed."""
        return self.pid == os.getpid() and self._letting_go.alive

    def close(self) -> None:
        """Let go of the client. May be called again, from any process."""
        if self._letting_go.detach() is not None and self.pid == os.getpid():
            self._shared.release()

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
        waiting = _ServerWait(self._limit_s(retry_s))
        while True:
            # Errors are raised outside of the handlers: none carries the driver's as its context.
            try:
                with self._shared.in_use() as client:
                    found = action(client[self._address.database])
                self._shared.has_answered = True
                return found
            except PyMongoError as error:
                refusal = self._refusal(doing, error)
                said = self._said(error)
            if refusal is not None:
                break
            waiting.log(self._address, said)
            # `is_usable`: another thread has given up on it.
            if not self.is_usable or not waiting.wait(self._shared.selection_s):
                refusal = self._away(doing, said, waiting)
                break
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
        if isinstance(error, (ConnectionFailure, CursorNotFound)) or is_name_failure(error):
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

    def _away(self, doing: str, said: str, waiting: _ServerWait) -> StoreUnreachable:
        hint = "A larger `retry_s` waits longer."
        if waiting.limit_s < self._retry_s and not self._shared.has_answered:
            hint = f"`retry_s` ({self._retry_s:g} s) is for servers that answered before."
        return StoreUnreachable(
            f"cannot {doing} {self._address}: no answer from {self._address.hosts} for "
            f"{waiting.past_s:.1f} s ({said}). Is mongod running there, can this machine reach it, "
            f"and do both use TLS or neither? {hint}"
        )


class _ServerWait:
    """The waiting of one command for a server that is away."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._start_s = time.monotonic()
        self._pause_s = _FIRST_PAUSE_S
        self._is_said = False

    @property
    def past_s(self) -> float:
        return time.monotonic() - self._start_s

    def wait(self, try_s: float) -> bool:
        """Wait for a moment; False if a try of `try_s` after it would take longer than allowed."""
        pause_s = self._pause_s * _jitter.uniform(0.5, 1.0)
        if self.past_s + pause_s + try_s > self.limit_s:
            return False
        time.sleep(pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return True

    def log(self, address: MongoAddress, said: str) -> None:
        if self.past_s >= _SILENT_S and not self._is_said:
            self._is_said = True
            _log.warning(
                "%s does not answer (%s); waiting for it, %g s at most.",
                address,
                said,
                self.limit_s,
            )
