# SPDX-License-Identifier: Apache-2.0
"""Files as they are at a moment, the file systems they are on, and copies on a local one.

LMDB maps its file. Over a network that is slow, and where the file changes on the server it is a
crash: lmdb.h says not to use it on remote file systems.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Final, NamedTuple

from penstock.errors import StoreError
from penstock.warn import users_level

__all__ = ["FileState", "copy_to_local", "remote_type", "warn_if_remote"]

MOUNTS: Final = Path("/proc/self/mountinfo")
_REMOTE: Final = frozenset(
    (
        "afs", "beegfs", "ceph", "cifs", "fhgfs", "fuse", "glusterfs", "gpfs", "lustre", "nfs",
        "nfs4", "ncpfs", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs",
    )
)  # fmt: skip
# What users mount through FUSE is mostly remote (sshfs, s3fs, gcsfuse …); these are not.
_LOCAL_FUSE: Final = frozenset(("fuse.ntfs-3g", "fuse.overlayfs", "fuse.fuse-overlayfs"))


class FileState(NamedTuple):
    """A file as it is at a moment.

    Attributes:
        path: Where it lies.
        size_bytes: Its size.
        time_ns: When it was changed last.
    """

    path: str
    size_bytes: int
    time_ns: int

    @classmethod
    def of(cls, path: str | Path) -> FileState:
        """Return the file at `path` as it is now."""
        status = os.stat(path)
        return cls(os.fspath(path), status.st_size, status.st_mtime_ns)


def remote_type(path: str | Path, mounts: Path | None = None) -> str | None:
    """Return the type of the network file system that `path` is on; None if on a local one.

    Args:
        path: Need not exist.
        mounts: What the system says of its mounts, as in Linux' /proc/self/mountinfo; where there
            is no such file, nothing is known and None returned. None takes that file.
    """
    try:
        lines = (mounts or MOUNTS).read_text().splitlines()
    except OSError:
        return None
    real = os.path.realpath(path)
    found, length = "", -1
    for line in lines:  # a later mount hides an earlier one at the same place
        fields, _, source = line.partition(" - ")
        place = fields.split()[4].encode().decode("unicode_escape")  # a space is written \\040
        is_above = real == place or real.startswith(place.rstrip("/") + "/")
        if is_above and len(place) >= length:
            found, length = source.split()[0], len(place)
    is_remote = found in _REMOTE or (found.startswith("fuse.") and found not in _LOCAL_FUSE)
    return found if is_remote else None


def warn_if_remote(path: Path) -> None:
    """Warn if `path` is on a network file system."""
    kind = remote_type(path)
    if kind is not None:
        warnings.warn(
            f"{path} is on a network file system ({kind}), where memory-mapped files are slow and "
            "a lost connection ends the process. Give copy_local=FOLDER to read a copy on a local "
            "disk (on the command line: --copy-local FOLDER).",
            RuntimeWarning,
            stacklevel=users_level(),
        )


def copy_to_local(path: Path, folder: Path) -> Path:
    """Return a copy of a file or folder in `folder`, made now unless one is there already.

    The copy's name holds sizes and times of all files of the original, so that a changed one is
    copied again. Older copies stay.
    Several processes may ask at once: each copies, and one copy stays.

    Raises:
        StoreError: there is no original, or no space for the copy.
    """
    try:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        states = [FileState.of(file) for file in files]
        size_bytes = sum(state.size_bytes for state in states)
        marks = [(os.path.basename(state.path), *state[1:]) for state in states]
        digest = hashlib.blake2b(repr(marks).encode(), digest_size=8).hexdigest()
        name = f"{path.stem}-{digest}{path.suffix}"
        copy = folder / name
        if copy.exists():
            return copy
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < size_bytes:
            raise StoreError(
                f"cannot copy {path} to {folder}: it has {size_bytes:,} bytes, {free:,} are free."
            )
        with tempfile.TemporaryDirectory(prefix=f"{name}.", dir=folder) as beside:
            made = Path(beside) / name
            if path.is_dir():
                shutil.copytree(path, made)
            else:
                shutil.copyfile(path, made)
            try:
                os.rename(made, copy)
            except OSError:  # a folder that another process has put there meanwhile
                if not copy.exists():
                    raise
    except OSError as error:
        raise StoreError(f"cannot copy {path} to {folder}: {error}.") from error
    return copy
