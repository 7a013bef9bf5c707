# SPDX-License-Identifier: Apache-2.0
"""LMDB environments for reading: one for each file in each process.

Guarantees
    A file is opened once per process, whoever asks: LMDB's own caveats forbid a second time, as
    closing one of the two would drop the locks of both. A file that has been replaced under the
    same name is another file.
    A forked child opens its own. What it inherited is closed at once, in the child alone: py-lmdb
    refuses to open a file that the process it was forked from had open.
    It is closed when its last user has let go and nobody is reading.
    Damage over which LMDB would end the process is found before LMDB opens a file.

Files are opened `readonly, lock=False`: a store is written once and put in its place complete, so
readers need no lock file, may lie on a read-only disk, and may be any number.

Reference:
    lmdb.h, "Restrictions/caveats"; py-lmdb's documentation, "Forking & multiprocessing".
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any, Literal

import lmdb

from penstock.errors import StoreError
from penstock.stores.lmdb.pages import check_pages, check_size

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

__all__ = ["Environment", "FileVersion", "VerifyTree", "acquire"]

VerifyTree = Literal["first", "open", "never"]

FileVersion = tuple[str, int, int, int, int]
"""A file as it was at a moment: path, device, inode, bytes, time of the last change."""

FileIdentity = tuple[str, int, int]


class Environment:
    """An open file, shared by all of its users in this process.

    Attributes:
        path: As it was asked for first.
        pid: The process that may use it.
        state: The file when it was opened.
        num_users: How many hold it; the lock is needed to change it.
    """

    def __init__(self, path: Path, state: FileVersion, *, readahead: bool) -> None:
        """Open `path`; `acquire` calls this."""
        self.path = path
        self.pid = os.getpid()
        self.state = state
        self.num_users = 0
        self._num_readers = 0
        try:
            self._env = lmdb.open(
                os.fspath(path),
                subdir=path.is_dir(),
                readonly=True,
                lock=False,
                readahead=readahead,
                create=False,
            )
        except lmdb.Error as error:
            text, hint = str(error).rstrip("."), ""
            if "already open" in text:
                hint = (
                    " Other code has it open, in this process or before its fork: close it there."
                )
            raise StoreError(f"cannot open {path} as an LMDB file: {text}.{hint}") from error

    @contextlib.contextmanager
    def reading(self) -> Iterator[Any]:
        """Return a read transaction whose values are views, valid inside the block.

        Raises:
            StoreError: it was closed meanwhile, or LMDB finds the file damaged.
        """
        with _state.lock:
            if self.num_users == 0:
                raise StoreError(f"{self.path} was closed by another thread while it was read.")
            self.num_users += 1
            self._num_readers += 1
        try:
            with self._env.begin(buffers=True) as transaction:
                yield transaction
        except lmdb.Error as error:
            raise StoreError(f"cannot read {self.path}: {error}") from error
        finally:
            with _state.lock:
                self._num_readers -= 1
                self._release()
                _state.drain()

    def close_inherited(self) -> bool:
        """Close it in a forked child; return False if it was being read, and is kept instead."""
        if self._num_readers:
            self.pid = os.getpid()
            return False
        self._env.close()
        return True

    def release(self) -> None:
        """Count one user less; with the last one the file is closed. Any thread, at any moment.

        Also from a finalizer, which the garbage collector may run while this very thread holds the
        lock: then whoever holds it does it when it is done.
        """
        if self.pid != os.getpid():
            return
        _state.dropped.append(self)
        if _state.lock.acquire(blocking=False):
            try:
                _state.drain()
            finally:
                _state.lock.release()

    def _release(self) -> None:
        self.num_users -= 1
        if self.num_users == 0:
            _state.environments.pop(self.state[:3], None)
            self._env.close()


class _OpenEnvironments:
    """What this process has open."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.environments: dict[FileIdentity, Environment] = {}
        self.dropped: collections.deque[Environment] = collections.deque()

    def drain(self) -> None:
        """Release what finalizers have dropped; the lock is held."""
        while self.dropped:
            self.dropped.popleft()._release()

    def inherit(self, parents: _OpenEnvironments) -> None:
        """Close the environments of the process that this one was forked from.

        One in which a thread was reading cannot be closed, as views of it may be in use here: this
        process goes on with it. That is safe without locks; nothing but the map is shared.
        """
        for identity, environment in parents.environments.items():
            if not environment.close_inherited():
                self.environments[identity] = environment


_state = _OpenEnvironments()


def _before_fork() -> None:
    # No other thread is opening or closing a file at that moment: py-lmdb would remember it in the
    # child, and we would not know of it.
    _state.lock.acquire()


def _after_fork_in_parent() -> None:
    _state.lock.release()


def _after_fork_in_child() -> None:
    global _state
    parents, _state = _state, _OpenEnvironments()
    _state.inherit(parents)


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)


def acquire(
    path: Path,
    *,
    readahead: bool,
    verify_tree: VerifyTree = "first",
    verified: Collection[FileVersion] = (),
) -> Environment:
    """Return this process's environment of a file; `release` it when done.

    Args:
        path: The file, or a folder with a `data.mdb` in it.
        readahead: Whether the system reads ahead: good for scans, bad for random access to a file
            larger than memory. Who opens it first decides.
        verify_tree: Whether the tree's pages are verified before LMDB opens the file: "first"
            unless it is among the `verified`, "open" always, "never".
        verified: Files whose pages were verified, maybe by another process.

    Raises:
        StoreError: there is no such file, it is no LMDB file, it is truncated, or its tree damaged.
    """
    file = path / "data.mdb" if path.is_dir() else path
    try:
        status = os.stat(file)
    except OSError as error:
        raise StoreError(
            f"cannot open {path}: {error.strerror}. `penstock pack SRC lmdb:{path}` makes it."
        ) from error
    state = (
        os.path.realpath(file), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns,
    )  # fmt: skip
    with _state.lock:
        environment = _state.environments.get(state[:3])
        if environment is not None:
            return _shared(environment)
    # Without the lock: it may take a second, and a fork waits for the lock.
    is_due = verify_tree == "open" or (verify_tree == "first" and state not in verified)
    try:
        (check_pages if is_due else check_size)(file)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}.") from error
    with _state.lock:
        environment = _state.environments.get(state[:3])
        if environment is None:
            environment = Environment(path, state, readahead=readahead)
            _state.environments[state[:3]] = environment
        return _shared(environment)


def _shared(environment: Environment) -> Environment:
    """Count one user more; the lock is held."""
    environment.num_users += 1
    _state.drain()
    return environment
