# SPDX-License-Identifier: Apache-2.0
"""Putting a finished file or folder in its place in one step, and keeping others off meanwhile."""

from __future__ import annotations

import ctypes
import os
import shutil
import weakref
from typing import TYPE_CHECKING, Final

from penstock.errors import StoreError
from penstock.forks import at_fork
from penstock.whole_file import fsync_folder, refuse_special

if TYPE_CHECKING:
    from pathlib import Path

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


class Lock:
    """Keeps other writers off a destination: a file that one process at a time may hold."""

    def __init__(self, partial: Path, destination: Path) -> None:
        """Take it."""
        self._path = path = partial.with_name(partial.name + ".lock")
        try:
            import fcntl
        except ImportError as error:
            raise StoreError(
                f"cannot write {destination}: this system has no flock(2) to keep other writers "
                "off. Pack on Linux, in WSL2 or a container; what is packed can be read here."
            ) from error
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        try:
            refuse_special(destination)
            refuse_special(partial, follow_links=False)
            refuse_special(path, follow_links=False)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, flags, 0o666)
        except OSError as error:
            raise StoreError(f"cannot write {destination}: {error.strerror}.") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have removed it between our two calls: then it guards nothing.
            is_held = os.path.samestat(os.fstat(self._fd), os.stat(path))
        except OSError:
            is_held = False
        if not is_held:
            os.close(self._fd)
            self._fd = -1
            raise StoreError(
                f"another process is writing {destination} (it holds {path}). Wait for it to end."
            )
        _held.add(self)

    def close(self) -> None:
        """Give it back and remove the file. May be called again."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            self.forget()

    def forget(self) -> None:
        """Close the file alone, which in a forked child gives nothing back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_held):
        lock.forget()


at_fork(after_in_child=_after_fork)


def put_in_place(made: Path, destination: Path) -> None:
    """Give `made` the name `destination`, which at every moment is the old one or the new one."""
    refuse_special(destination)
    if made.is_dir() and destination.exists():
        _exchange(made, destination)
        fsync_folder(destination.parent)
        remove(made)
    else:
        os.replace(made, destination)
    fsync_folder(destination.parent)


def _exchange(one: Path, other: Path) -> None:
    # glibc 2.28 and newer, Linux alone
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    arguments = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if renameat2 is None or renameat2(*arguments) != 0:
        code = ctypes.get_errno()
        raise StoreError(
            f"{other} cannot be replaced in one step ({os.strerror(code)}). The new store is "
            f"complete at {one}: remove the old one, and rename it."
        )


def remove(path: Path) -> None:
    """Remove a file or a folder with all in it, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def already_there(address: str, *, resume: bool) -> StoreError:
    """Return the error of a store that is not to be replaced, for the caller to raise."""
    which = ", of another source or with other options" if resume else ""
    return StoreError(
        f"{address} is there already{which}. Name another place, or give --overwrite "
        "(overwrite=True in Python): then it is replaced as soon as the new store is complete."
    )
