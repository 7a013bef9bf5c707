# SPDX-License-Identifier: Apache-2.0
"""`PickledLMDBStore`: the LMDB layout that scripts make by hand, to be read and converted.

    b"0", b"1" …     pickled (bytes, label), or any sample
    b"__keys__"      pickled list of those keys, in order      … one of the two
    b"__len__"       pickled number of samples

A pickle is a program: whoever wrote the file decides what runs when it is read.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.packed_list import PackedList
from penstock.errors import ConfigError, StoreError
from penstock.stores.filesystems import warn_if_remote
from penstock.stores.index import Index
from penstock.stores.lmdb import environments
from penstock.stores.lmdb.store import SUMMARY_KEY
from penstock.stores.records import EncodedImage, Record
from penstock.stores.store import Store, missing_records

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.stores.lmdb.environments import Environment, FileState, VerifyTree

__all__ = ["PickledLMDBStore"]

_KEYS: Final = b"__keys__"
_LENGTH: Final = b"__len__"
# JPEG, PNG, GIF, BMP, TIFF of either order, WebP: how image files begin.
_IMAGES: Final = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"RIFF")


class PickledLMDBStore(Store):
    """An LMDB file of pickles. Labels are not known before the samples are read.

    Concurrency:
        As `LMDBStore`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        trusted: bool,
        verify_tree: VerifyTree = "first",
        readahead: bool = False,
    ) -> None:
        """Name the file; it is opened at first use.

        Args:
            path: The file, or the folder with a `data.mdb` in it.
            trusted: Whether its pickles may be decoded.
            verify_tree: As for `LMDBStore`.
            readahead: Whether the system reads ahead: for scans in order.

        Raises:
            ConfigError: `trusted` is not true, or `verify_tree` none of the three.
        """
        environments.check_verify_tree(verify_tree)
        if trusted is not True:
            raise ConfigError(
                f'{path}: layout="pickle" decodes pickles, which can run any program that their '
                "writer wanted to be run. If you trust who made the file, add trusted=True."
            )
        self._path = Path(path)
        self._verify_tree: VerifyTree = verify_tree
        self._verified: tuple[FileState, ...] = ()
        self._readahead = readahead
        self._open: _OpenFile | None = None

    @property
    def address(self) -> str:
        """`lmdb:` and the path."""
        return f"lmdb:{self._path}"

    def close(self) -> None:
        """Close the file, unless another store of this process uses it as well."""
        file, self._open = self._open, None
        if file is not None:
            file.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the open file behind."""
        return {**self.__dict__, "_open": None}

    def _environment(self) -> Environment:
        if self._open is None or self._open.environment.pid != os.getpid():
            self._open = _OpenFile(
                self._path,
                readahead=self._readahead,
                verify_tree=self._verify_tree,
                verified=self._verified,
            )
            self._verified = (self._open.environment.state,)
            if self._index is not None and self._mark() != self._index.fingerprint:
                raise StoreError(
                    f"{self.address} is not the file that it was: it was written to while it was "
                    "in use; make the dataset again."
                )
        return self._open.environment

    def _mark(self) -> str:
        """Return size and time of the file: it has no fingerprint of its own."""
        file = self._path / "data.mdb" if self._path.is_dir() else self._path
        status = os.stat(file)
        return f"{status.st_size:x}-{status.st_mtime_ns:x}"

    def _load_index(self) -> Index:
        warn_if_remote(self._path)
        with self._environment().reading() as transaction:
            keys = transaction.get(_KEYS)
            length = transaction.get(_LENGTH)
            if keys is not None:
                names = [_text(key) for key in self._unpickled(keys, _KEYS)]
            elif length is not None:
                names = [str(number) for number in range(self._unpickled(length, _LENGTH))]
            elif transaction.get(SUMMARY_KEY) is not None:
                raise StoreError(f"{self.address} is no file of pickles: open it without layout.")
            else:
                raise StoreError(
                    f"{self.address} has neither __keys__ nor __len__: it is not of this layout."
                )
        return Index(PackedList(names), fingerprint=self._mark())

    def _unpickled(self, value: Any, key: bytes) -> Any:  # noqa: ANN401
        if key == _LENGTH and bytes(value).isdigit():  # some write it as text
            return int(value)
        try:
            return pickle.loads(value)
        except Exception as error:  # a damaged pickle raises nearly anything
            raise StoreError(
                f"the value of {key!r} in {self.address} cannot be unpickled: "
                f"{type(error).__name__}: {error}."
            ) from error

    @contextlib.contextmanager
    def _read(self, positions: NDArray[np.int64], *, copy: bool) -> Iterator[list[Record]]:
        keys = [self.keys[position] for position in positions.tolist()]
        with self._environment().reading() as transaction:
            values = [transaction.get(key.encode()) for key in keys]
            absent = [key for key, value in zip(keys, values, strict=True) if value is None]
            if absent:
                raise missing_records(absent, self.address)
            pairs = zip(keys, values, strict=True)
            yield [_record(key, self._unpickled(value, key.encode())) for key, value in pairs]


class _OpenFile:
    """The file, open in one process, for as long as somebody holds this."""

    def __init__(self, path: Path, **options: Any) -> None:  # noqa: ANN401
        self.environment = environments.acquire(path, **options)
        self.close = weakref.finalize(self, self.environment.release)


def _text(key: bytes | str) -> str:
    return key if isinstance(key, str) else key.decode("utf-8", "surrogateescape")


def _record(key: str, sample: Any) -> Record:  # noqa: ANN401
    if isinstance(sample, (tuple, list)) and len(sample) == 2:
        data, label = sample
        if isinstance(data, bytes) and data.startswith(_IMAGES):
            data = EncodedImage(data)
        known = int(label) if isinstance(label, (int, np.integer)) else None
        return Record(key, known, (data, label if known is None else known))
    if isinstance(sample, bytes) and sample.startswith(_IMAGES):
        sample = EncodedImage(sample)
    return Record(key, None, sample)
