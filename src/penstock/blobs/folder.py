# SPDX-License-Identifier: Apache-2.0
"""`FolderBlobs`: the files of a folder as objects."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.blobs.blobs import Blob, Blobs
from penstock.blobs.errors import (
    BlobNotFound,
    changed_since,
    checked_name,
    cut_off,
    not_found,
    replaced,
)
from penstock.errors import StoreError
from penstock.opening import open_descriptor, read_whole
from penstock.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.blobs.blobs import ByteRange


PARTIAL: Final = re.compile(r"\.[0-9a-f]+-[0-9a-f]+\.partial")  # a file that is being written


class FolderBlobs(Blobs):
    """The files of a folder, also in folders below it; links are followed.

    Example:
        >>> import tempfile
        >>> from penstock.blobs.blobs import ByteRange
        >>> folder = tempfile.TemporaryDirectory()
        >>> blobs = FolderBlobs(folder.name)
        >>> blobs.write("a/b", b"some bytes")
        >>> [bytes(view) for view in blobs.read([ByteRange("a/b", 5), ByteRange("a/b", 0, 4)])]
        [b'bytes', b'some']
        >>> folder.cleanup()
    """

    def __init__(self, address: str) -> None:
        """Name the folder, which need not be there."""
        self._path = Path(address)

    @property
    def address(self) -> str:
        """The path."""
        return os.fspath(self._path)

    def list(self, prefix: str = "", *, at_most: int | None = None) -> Sequence[Blob]:
        """Return the files, but those that are being written."""
        found = []
        above = prefix.rpartition("/")[0]
        try:
            for folder, _, names in os.walk(self._path / above, onerror=_raise, followlinks=True):
                for name in names:
                    path = os.path.join(folder, name)
                    below = os.path.relpath(path, self._path).replace(os.sep, "/")
                    if below.startswith(prefix) and not PARTIAL.fullmatch(name):
                        with contextlib.suppress(FileNotFoundError):  # it is gone since
                            found.append(_blob(below, os.stat(path)))
        except OSError as error:
            raise StoreError(f"cannot list {self._path}: {error.strerror}.") from error
        return sorted(found)[:at_most]

    def stat(self, name: str) -> Blob:
        """Return one file."""
        try:
            return _blob(name, os.stat(self._path / checked_name(name)))
        except OSError as error:
            raise self._failure(error, name) from error

    def read(self, ranges: Sequence[ByteRange]) -> Sequence[memoryview]:
        """Return bytes of files; each is opened once."""
        places: dict[str, list[int]] = {}
        for place, wanted in enumerate(ranges):
            places.setdefault(wanted.name, []).append(place)
        views: list[memoryview] = [memoryview(b"")] * len(ranges)
        for name, of_file in places.items():
            try:
                fd, status = open_descriptor(self._path / checked_name(name))
                try:
                    blob = _blob(name, status)
                    for place in of_file:
                        views[place] = self._read_one(fd, ranges[place], blob)
                finally:
                    os.close(fd)
            except OSError as error:
                raise self._failure(error, name) from error
        return views

    def _read_one(self, fd: int, wanted: ByteRange, blob: Blob) -> memoryview:
        if wanted.version and wanted.version != blob.version:
            raise changed_since(wanted.name, self.address)
        stop = blob.size_bytes if wanted.stop is None else wanted.stop
        if stop > blob.size_bytes:  # nothing is allocated for what is not there
            raise cut_off(wanted, self.address, max(0, blob.size_bytes - wanted.start))
        size = max(0, stop - wanted.start)
        data = read_whole(fd, size, wanted.start)
        if len(data) < size:
            raise cut_off(wanted, self.address, len(data))
        return memoryview(data)

    def write(self, name: str, data: bytes | memoryview, *, replaces: str | None = None) -> None:
        """Write a file beside its place, bring it to the disk, and rename it.

        Two that replace the same version at the same time are not told apart: a lock is theirs.
        """
        path = self._path / checked_name(name)
        if replaces is not None and replaces != self._version(name):
            raise replaced(name, self.address)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, bytes(data), to_disk=True)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}.") from error

    def _version(self, name: str) -> str:
        try:
            return self.stat(name).version
        except BlobNotFound:
            return ""

    def delete(self, name: str) -> None:
        """Unlink a file."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path / checked_name(name))

    def _failure(self, error: OSError, name: str) -> StoreError:
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return not_found(name, self.address)
        return StoreError(f"cannot read {self._path / name}: {error.strerror}.")


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # as a prefix under which nothing lies
        raise error


def _blob(name: str, status: os.stat_result) -> Blob:
    version = f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"
    return Blob(name, status.st_size, version)
