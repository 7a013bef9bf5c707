# SPDX-License-Identifier: Apache-2.0
"""Writing a store to an LMDB file, or to a folder of shards, beside its place until it is complete.

    DST.partial      grows, one transaction of some 64 MiB after the other, each on disk at its end
    DST              the old store, or none, until the finished one takes its name in one step

A kill at any moment leaves DST as it was, and a DST.partial whose last transaction is whole: a
writer that resumes goes on behind it. Keys rise, so pages are filled in order and never rewritten:
the file is as compact as LMDB's own compacting copy.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import lmdb
import numpy as np

from penstock.errors import StoreError
from penstock.opening import open_file
from penstock.stores.index import IndexBuilder
from penstock.stores.lmdb.pages import LMDB_MAGIC, append_checksums, check_unfinished
from penstock.stores.lmdb.store import (
    INDEX_KEY,
    PACK_KEY,
    SUMMARY_KEY,
    LMDBStore,
    is_shard,
    position_keys,
    shard_name,
)
from penstock.stores.placing import Lock, already_there, put_in_place, remove
from penstock.stores.records import decode_record, encode_record
from penstock.stores.store import other_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.stores.records import EncodedRecord

_TRANSACTION_S: Final = 10.0  # for records that take long to make
_LMDB_MAGIC_END: Final = 20  # of the first page: a header of 16 bytes, and then the magic
_LEAST_FREE_BYTES: Final = 1 << 20


class LMDBWriter:
    """Writes one file, or a folder of files that are each a store. See `StoreWriter` for the calls.

    Attributes:
        address: `lmdb:` and the path, as it was given.
        finished: Whether a writer that resumes found the store complete.
    """

    _map_bytes = 1 << 30  # address space, not memory: doubled as often as it is full
    _transaction_bytes = 64 << 20  # a few seconds of work to lose; an fsync for each is cheap

    def __init__(
        self,
        path: str | Path,
        *,
        num_shards: int = 1,
        num_records: int = 0,
        class_names: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        what: str = "",
        resume: bool = False,
        overwrite: bool = True,
    ) -> None:
        """Begin a store, or go on with one.

        Args and errors as for `create_store`.
        """
        self.address = f"lmdb:{path}"
        self._path = Path(os.path.realpath(path))  # through a link, its target is replaced
        self._partial = self._path.with_name(self._path.name + ".partial")
        self._is_folder = num_shards > 1
        names = [shard_name(number, num_shards) for number in range(num_shards)]
        self._names = names if self._is_folder else [""]
        if self._is_folder:
            what = f"{what}, {num_records} records in {num_shards} shards"
        # Where each shard ends, but the last, which takes what is left.
        self._stops = [(k + 1) * num_records // num_shards for k in range(num_shards - 1)]
        self._what = what
        self._facts = class_names, metadata
        self._seen: set[str] = set()
        self._found: list[tuple[str, int | tuple[int, ...] | None]] = []
        self._num_put = 0
        self._file: _GrowingFile | None = None  # the one under way
        self._number = 0  # of its shard
        self._new_index()  # its errors come before anything is touched
        self._check_replaceable()
        self._lock = Lock(self._partial, self._path)
        try:
            there = [_what_is_in(self._path / name) for name in self._names]
            self.finished = resume and all(found == what for found in there)
            is_taken = bool(os.listdir(self._path)) if self._path.is_dir() else there[0] is not None
            if is_taken and not overwrite and not self.finished:
                raise already_there(self.address, resume=resume)
            self._check_partial()
            if self.finished or not resume:
                remove(self._partial)  # the old folder, if it was killed after exchanging
            if self.finished:
                with LMDBStore(self._path) as store:
                    self._found = store.index.entries()
            else:
                self._go_on()
        except BaseException:
            self.close()
            raise

    def _new_index(self) -> IndexBuilder:
        return IndexBuilder(*self._facts, known=self._seen)

    def _growing(self, number: int) -> _GrowingFile:
        path = self._partial / self._names[number]
        return _GrowingFile(path, self._what, self._new_index(), self._map_bytes)

    def _go_on(self) -> None:
        """Take over what an interrupted writer left, if it left anything."""
        if self._partial.exists() and self._partial.is_dir() != self._is_folder:
            raise other_source(self._partial)
        if self._is_folder:
            self._partial.mkdir(exist_ok=True)
        there = [n for n, name in enumerate(self._names) if (self._partial / name).exists()]
        for number in there[:-1]:  # those before the last are complete
            path = self._partial / self._names[number]
            with LMDBStore(path) as shard:
                if shard.what() != self._what:
                    raise other_source(self._partial)
                self._found += shard.index.entries()
                self._seen.update(shard.keys)
        last = there[-1] if there else 0
        self._file = self._growing(last)
        with self._failures():
            self._file.begin(self._partial)
        built = self._file.built
        self._found += zip(built.keys, built.labels, strict=True)
        self._num_put = len(self._found)
        self._number = last

    def written(self) -> Sequence[tuple[str, int | tuple[int, ...] | None]]:
        """Return key and label of the records that were found."""
        return self._found

    def last_checksum(self) -> int | None:
        """Return the checksum of the last record that `written` lists."""
        return self._file.built.last_checksum if self._file is not None else None

    def put_many(self, records: Sequence[EncodedRecord]) -> None:
        """Append records; they are on disk some 64 MiB or 10 s later, or after `finish`.

        Raises:
            StoreError: the store is `finished`, or a key comes a second time.
        """
        if self.finished:
            raise StoreError(f"{self._path} is complete, and nothing can be added to it.")
        while records:
            shard = bisect.bisect_right(self._stops, self._num_put)
            is_last = shard == len(self._stops)
            num_free = len(records) if is_last else self._stops[shard] - self._num_put
            file = self._file_of(shard)
            with self._failures():
                file.put(records[:num_free], self._transaction_bytes)
            self._num_put += len(records[:num_free])
            records = records[num_free:]

    def _file_of(self, number: int) -> _GrowingFile:
        """Return the file of a shard; the one before it is completed first."""
        while self._file is None or self._number < number:
            if self._file is not None:
                with self._failures():
                    self._file.finish()
                self._number += 1
            self._file = self._growing(self._number)
        return self._file

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except (OSError, lmdb.Error) as error:
            free = shutil.disk_usage(self._path.parent).free
            waiting_bytes = 0 if self._file is None else self._file.waiting_bytes
            # LMDB calls a full disk an input/output error.
            is_full = free < waiting_bytes + _LEAST_FREE_BYTES
            if is_full or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                raise StoreError(
                    f"no space left on the disk of {self._path}. What was there is untouched, what "
                    f"was packed is in {self._partial}: make room and --resume, or remove it."
                ) from error
            raise StoreError(f"cannot write {self._path}: {error}.") from error

    def finish(self) -> None:
        """Complete the store and put it in its place."""
        if self.finished:
            return
        file = self._file_of(len(self._names) - 1)
        with self._failures():
            file.finish()
            self._check_replaceable()  # what is there now may not be what was there then
            put_in_place(self._partial, self._path)
        self.close()

    def close(self) -> None:
        """Let go of everything; what is not finished stays in `DST.partial`, on disk."""
        if self._file is not None:
            with contextlib.suppress(OSError, lmdb.Error):  # its disk is full: that was said before
                self._file.flush()
            self._file.close()
        self._lock.close()

    def _check_replaceable(self) -> None:
        """Raise unless there is nothing, an empty file, or a store at the path."""
        path = self._path
        if not path.exists():
            return
        if path.is_dir() != self._is_folder:
            kinds = ("a file", "a folder")
            raise StoreError(
                f"{path} is {kinds[path.is_dir()]}, and the new store {kinds[self._is_folder]}: "
                "name another."
            )
        if self._is_folder:
            others = [name for name in os.listdir(path) if not is_shard(name)]
            if others:
                raise StoreError(
                    f"{path} holds something else than the shards of a store ({others[0]!r}), and "
                    "would be replaced as a whole: name another folder, or remove it."
                )
        elif path.stat().st_size and _what_is_in(path) is None:
            raise StoreError(
                f"{path} is a file that Penstock did not pack, or a damaged one, and would be "
                "replaced: name another, or remove it."
            )

    def _check_partial(self) -> None:
        """Raise unless there is nothing, or what an interrupted writer left."""
        path = self._partial
        files = list(path.iterdir()) if path.is_dir() else [path]
        for file in files:
            is_ours = file is path or is_shard(file.name)
            if not is_ours or file.is_symlink() or not _is_lmdb_or_empty(file):
                raise StoreError(
                    f"{path} should hold what an interrupted packing left, and holds something "
                    f"else ({file.name!r}). Move it away, or pack to another name."
                )


class _GrowingFile:
    """One LMDB file that is being written."""

    def __init__(self, path: Path, what: str, built: IndexBuilder, map_bytes: int) -> None:
        self.path = path
        self.built = built
        self.waiting_bytes = 0
        self._what = what
        self._map_bytes = map_bytes
        self._num_flushed = 0
        self._flushed_s = time.monotonic()
        self._waiting: list[EncodedRecord] = []
        self._env: Any = None
        self._is_begun = False

    def begin(self, partial: Path) -> None:
        """Take over the records that are there, each of them verified; `partial` is for errors."""
        if _size_bytes(self.path):
            check_unfinished(self.path)
            self._open()
            with self._env.begin(buffers=True) as transaction:
                if transaction.stat()["entries"]:
                    if _what_is_packed(transaction) != self._what:
                        raise other_source(partial)
                    self._take_over(transaction)
        self._mark()
        self.close()  # workers may be forked before the first record comes

    def _take_over(self, transaction: Any) -> None:  # noqa: ANN401
        names = (PACK_KEY, INDEX_KEY, SUMMARY_KEY)
        named = sum(transaction.get(name) is not None for name in names)
        self._num_flushed = transaction.stat()["entries"] - named
        for position in range(self._num_flushed):
            value = transaction.get(position_keys(np.array([position]))[0])
            name = f"record {position} of {self.path}"
            if value is None:
                raise StoreError(f"{name} is missing. Pack without --resume.")
            self.built.take_over(value, name)

    def _mark(self) -> None:
        """Mark the file as unfinished; it was not if its writer was killed before the rename."""

        def mark(transaction: Any) -> None:  # noqa: ANN401
            transaction.put(PACK_KEY, self._what.encode())
            transaction.delete(INDEX_KEY)
            transaction.delete(SUMMARY_KEY)

        self._is_begun = True
        self._write(mark)

    def put(self, records: Sequence[EncodedRecord], transaction_bytes: int) -> None:
        """Append records."""
        self.built.add(records)
        self._waiting += records
        self.waiting_bytes += sum(len(record.data) for record in records)
        is_late = time.monotonic() - self._flushed_s > _TRANSACTION_S
        if self.waiting_bytes >= transaction_bytes or is_late:
            self.flush()

    def flush(self) -> None:
        """Bring to disk what waits."""
        if not self._waiting:
            return
        first = self._num_flushed
        keys = position_keys(np.arange(first, first + len(self._waiting)))
        items = [(k, record.data) for k, record in zip(keys, self._waiting, strict=True)]

        def put(transaction: Any) -> None:  # noqa: ANN401
            with transaction.cursor() as cursor:
                cursor.putmulti(items, append=True)

        self._write(put)
        self._num_flushed += len(self._waiting)
        self._waiting, self.waiting_bytes = [], 0
        self._flushed_s = time.monotonic()

    def _open(self) -> None:
        self._env = lmdb.open(
            os.fspath(self.path),
            subdir=False,
            map_size=max(self._map_bytes, 2 * _size_bytes(self.path)),
            lock=False,  # ours keeps other writers off, and there are no readers yet
            max_readers=1,
        )

    def _write(self, put: Callable[[Any], object]) -> None:
        """Do one transaction, in a larger map if it does not fit."""
        if not self._is_begun:
            self._mark()
        if self._env is None:
            self._open()
        while True:
            try:
                with self._env.begin(write=True) as transaction:
                    put(transaction)
                return
            except lmdb.MapFullError:
                self._map_bytes = 2 * int(self._env.info()["map_size"])
                self._env.set_mapsize(self._map_bytes)

    def finish(self) -> None:
        """Complete the file: index, summary, checksums of its pages."""
        self.flush()
        index = self.built.index()
        summary = {"count": len(index), "fingerprint": index.fingerprint, "what": self._what}

        def put(transaction: Any) -> None:  # noqa: ANN401
            transaction.put(INDEX_KEY, encode_record("index", index.to_tree()).data)
            transaction.put(SUMMARY_KEY, encode_record("summary", summary).data)
            transaction.delete(PACK_KEY)

        self._write(put)
        self.close()
        append_checksums(self.path)

    def close(self) -> None:
        """Close the file; what waits is dropped unless it was flushed."""
        if self._env is not None:
            self._env.close()
            self._env = None


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _what_is_packed(transaction: Any) -> str | None:  # noqa: ANN401
    """Return what an unfinished file, or one that is finished and has not got its name, holds."""
    what = transaction.get(PACK_KEY)
    if what is not None:
        return bytes(what).decode(errors="replace")  # it may be damaged
    summary = transaction.get(SUMMARY_KEY)
    said = None if summary is None else decode_record(summary, "the summary").sample.get("what")
    return said if isinstance(said, str) else None


def _is_lmdb_or_empty(path: Path) -> bool:
    if not path.exists():
        return True
    with open_file(path) as file:
        start = file.read(_LMDB_MAGIC_END)
    return not start or start.endswith(LMDB_MAGIC)


def _what_is_in(path: Path) -> str | None:
    """Return what a finished file was packed from; None if there is no such file."""
    if not path.is_file() or not _is_lmdb_or_empty(path):
        return None
    with contextlib.suppress(StoreError), LMDBStore(path) as store:
        return store.what()
    return None
