# SPDX-License-Identifier: Apache-2.0
"""Files as they are at a moment, and copies on a local disk."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable


class FileState(NamedTuple):
    """A file as it is at a moment."""

    path: str
    size_bytes: int
    time_ns: int

    @classmethod
    def of(cls, path: str | Path) -> FileState:
        """Return the file at `path` as it is now."""
        status = os.stat(path)
        return cls(os.fspath(path), status.st_size, status.st_mtime_ns)


def fingerprint_of(files: Iterable[FileState], what: str = "") -> str:
    """Return a hash of names, sizes and times, and of `what`."""
    digest = hashlib.blake2b(what.encode(), digest_size=16)
    for file in files:
        name = os.path.basename(file.path)
        digest.update(f"{name}\0{file.size_bytes}\0{file.time_ns}\0".encode())
    return digest.hexdigest()


def copy_to_local(path: Path, folder: Path) -> Path:
    """Return a copy of a file or folder in `folder`, made now unless one is there already."""
    try:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        states = [(file.name, *FileState.of(file)[1:]) for file in files]
        digest = hashlib.blake2b(repr(states).encode(), digest_size=8).hexdigest()
        name = f"{path.stem}-{digest}{path.suffix}"
        copy = folder / name
        if copy.exists():
            return copy
        folder.mkdir(parents=True, exist_ok=True)
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
