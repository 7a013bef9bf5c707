# SPDX-License-Identifier: Apache-2.0
"""Putting a finished file or folder in its place in one step, and keeping others off meanwhile."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import weakref
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import StoreError
from penstock.whole_file import refuse_special

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Lock", "already_there", "no_room_for", "no_space", "put_in_place", "remove"]

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


class Lock:
    """Keeps other writers off a destination: a file that one process at a time may hold.

    It lies beside the unfinished store, as DST.partial.lock; not as DST.lock, which for a folder
    called uv would be a file of somebody's. It is held for as long as the process lives. Forked
    children do not hold it: workers that outlive a killed packer by a moment would keep the next
    one off.
    """

    def __init__(self, partial: Path, destination: Path) -> None:
        """Take it.

        Args:
            partial: Where the store lies until it is complete.
            destination: Where it will be.

        Raises:
            StoreError: another process holds it; it cannot be made; the destination is neither a
                file nor a folder; or what lies beside it is a link, which may lead anywhere.
        """
        self._path = path = partial.with_name(partial.name + ".lock")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
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


os.register_at_fork(after_in_child=_after_fork)


def put_in_place(made: Path, destination: Path) -> None:
    """Give `made` the name `destination`, which at every moment is the old one or the new one.

    Both are on one disk, and both are files or both are folders, if there is an old one. What was
    there is removed afterwards. The new name is on disk when this returns.

    Raises:
        StoreError: there is a folder where a file should go, or a file where a folder should.
        OSError: there is something that is neither; or it cannot be done.
    """
    refuse_special(destination)
    if destination.exists() and destination.is_dir() != made.is_dir():
        kinds = ("file", "folder")
        raise StoreError(
            f"{destination} is a {kinds[destination.is_dir()]}, and the new store a "
            f"{kinds[made.is_dir()]}. It is complete at {made}: move one of them away, and rename."
        )
    if made.is_dir() and destination.exists():
        _exchange(made, destination)
        _sync(destination.parent)
        remove(made)
    else:
        os.replace(made, destination)
    _sync(destination.parent)


def _exchange(one: Path, other: Path) -> None:
    renameat2 = _renameat2()
    if renameat2 is not None:
        arguments = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
        if renameat2(*arguments) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            raise OSError(code, os.strerror(code), os.fspath(other))
    # A system or file system that cannot: for a moment there is neither. Killed then, the old one
    # lies aside under a name that is nobody else's, and a packer that resumes brings the new one.
    aside = tempfile.mkdtemp(prefix=f".{other.name}.", suffix=".replaced", dir=other.parent)
    os.rename(other, aside)  # over an empty folder
    try:
        os.rename(one, other)
    except BaseException:
        os.rename(aside, other)
        raise
    os.rename(aside, one)


@cache
def _renameat2() -> Any:  # noqa: ANN401
    libc = ctypes.CDLL(None, use_errno=True)
    return getattr(libc, "renameat2", None)  # glibc 2.28 and newer, Linux alone


def remove(path: Path) -> None:
    """Remove a file or a folder with all in it, if there is one.

    Hidden files go last: they say of a folder whose it is, also if a kill leaves the rest.
    """
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name.startswith(".")):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
    path.rmdir()


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def already_there(address: str, *, resume: bool) -> StoreError:
    """Return the error of a store that nobody asked to be replaced, for the caller to raise."""
    which = ", of another source or with other options" if resume else ""
    return StoreError(
        f"{address} is there already{which}. Name another place, or give --overwrite "
        "(overwrite=True in Python): then it is replaced as soon as the new store is complete."
    )


def no_room_for(path: Path, size_bytes: int) -> OSError | None:
    """Return what the system says to a file at `path` growing by `size_bytes`; None if it may.

    For libraries that do not pass on why they could not write.
    """
    end = path.stat().st_size if path.exists() else 0
    try:
        with tempfile.TemporaryFile(dir=path.parent) as probe:
            os.posix_fallocate(probe.fileno(), end, size_bytes + 2 * mmap.PAGESIZE)
    except OSError as error:
        return error
    return None


def no_space(destination: Path, partial: Path) -> StoreError:
    """Return the error of a full disk, for the caller to raise."""
    return StoreError(
        f"no space left on the disk of {destination}. What was there is untouched, what was packed "
        f"so far is in {partial}: make room and run the same again with --resume, or remove it."
    )
