# SPDX-License-Identifier: Apache-2.0
"""LMDB files that are open for reading: each once in a process, as lmdb.h demands.

Closing one of two environments of a file would drop the locks of both. A forked child closes what
it inherited: py-lmdb refuses to open a file that the process it was forked from had open. One in
which a thread was reading cannot be closed, as views of it may be in use: the child goes on with
it, which is safe without locks.

Files are opened `readonly, lock=False`: a store is written once and put in its place complete, so
readers need no lock file, may lie on a read-only disk, and may be any number.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import TYPE_CHECKING, Any

import lmdb

from penstock.errors import StoreError
from penstock.sharing import Pool
from penstock.stores.lmdb.pages import check_pages, check_size

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

FileVersion = tuple[str, int, int, int, int]
"""A file as it was at a moment: path, device, inode, bytes, time of the last change."""

_files: Pool[Any] = Pool(lambda env: env.close(), is_local=True)


class Environment:
    """A file that is open for reading."""

    def __init__(
        self,
        path: Path,
        *,
        readahead: bool = False,
        verify_tree: bool = True,
        verified: Collection[FileVersion] = (),
    ) -> None:
        """Open a file; of one that is open in this process already, the first decides how."""
        self.path = path
        file = path / "data.mdb" if path.is_dir() else path
        try:
            self.version = _version_of(os.path.realpath(file))
            is_due = verify_tree and self.version not in verified
            (check_pages if is_due else check_size)(file)
        except OSError as error:
            raise StoreError(
                f"cannot open {path}: {error.strerror}. `penstock pack SRC lmdb:{path}` makes it."
            ) from error
        self._lease = _files.acquire(
            self.version[:3], functools.partial(_opened, path, readahead, self.version)
        )
        self.close = self._lease.close

    @contextlib.contextmanager
    def reading(self) -> Iterator[Any]:
        """Return a read transaction whose values are views, valid inside the block."""
        with self._lease.using() as env:
            try:
                with env.begin(buffers=True) as transaction:
                    yield transaction
            except lmdb.Error as error:
                raise StoreError(f"cannot read {self.path}: {error}") from error


def _opened(path: Path, readahead: bool, version: FileVersion) -> Any:  # noqa: ANN401
    try:
        env = lmdb.open(
            os.fspath(path),
            subdir=path.is_dir(),
            readonly=True,
            lock=False,
            readahead=readahead,
            create=False,
        )
    except lmdb.Error as error:
        raise StoreError(
            f"cannot open {path} as an LMDB file: {error}. A file that other code has open, in "
            "this process or before its fork, has to be closed there first."
        ) from error
    if _version_of(version[0]) != version:
        env.close()
        raise StoreError(f"{path} was replaced while it was opened. Open it again.")
    return env


def _version_of(file: str) -> FileVersion:
    status = os.stat(file)
    return file, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
