# SPDX-License-Identifier: Apache-2.0
"""Writing a store to an LMDB file, beside its place until it is complete.

    DST.partial      grows, one transaction of some 64 MiB after the other, each on disk at its end
    DST              the old file, or none, until the finished one takes its name in one step

A kill at any moment leaves DST as it was, and a DST.partial whose last transaction is whole: a
writer that resumes goes on behind it. Keys rise, so pages are filled in order and never rewritten:
the file is as compact as LMDB's own compacting copy.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import functools
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import lmdb
import numpy as np

from penstock.errors import StoreError
from penstock.opening import open_file
from penstock.stores.index import IndexBuilder, check_class_names, repeated
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
from penstock.stores.placing import (
    Lock,
    already_there,
    no_room_for,
    no_space,
    put_in_place,
    remove,
)
from penstock.stores.records import EncodedRecord, decode_record, encode_record, is_pair
from penstock.stores.store import other_source

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["LMDBWriter", "ShardedLMDBWriter", "create_lmdb"]

_TRANSACTION_S: Final = 10.0  # for records that take long to make
_TRANSACTION_BYTES: Final = 64 << 20  # a few seconds of work to lose; an fsync for each is cheap
_LMDB_MAGIC_END: Final = 20  # of the first page: a header of 16 bytes, and then the magic
_FIRST_MAP_BYTES: Final = 1 << 30  # address space, not memory: doubled as often as it is full


def create_lmdb(
    path: str,
    *,
    num_shards: int = 1,
    num_records: int = 0,
    **facts: Any,  # noqa: ANN401
) -> LMDBWriter | ShardedLMDBWriter:
    """Return a writer of one file or of a folder of shards; see `create_store`."""
    if num_shards > 1:
        return ShardedLMDBWriter(path, num_shards, num_records, **facts)
    return LMDBWriter(path, **facts)


class _Destination:
    """Where a store will be, where it grows, and the lock on both; the base of both writers.

    Attributes:
        address: `lmdb:` and the path, as it was given.
        finished: Whether a writer that resumes found the store complete.
    """

    def __init__(
        self, path: str | Path, names: Sequence[str], what: str, *, resume: bool, overwrite: bool
    ) -> None:
        """Take the lock and look at what is there."""
        self.address = f"lmdb:{path}"
        self._path = Path(os.path.realpath(path))  # through a link, its target is replaced
        self._partial = self._path.with_name(self._path.name + ".partial")
        self._names = names
        self._found: list[tuple[str, int | tuple[int, ...] | None]] = []
        self._check_replaceable()
        self._lock = Lock(self._partial, self._path)
        try:
            there = [_what_is_in(self._path / name) for name in names or [""]]
            self.finished = resume and all(found == what for found in there)
            is_taken = bool(os.listdir(self._path)) if self._path.is_dir() else there[0] is not None
            if is_taken and not overwrite and not self.finished:
                raise already_there(self.address, resume=resume)
            _check_partial(self._partial)
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

    def _go_on(self) -> None:
        """Take over what an interrupted writer left, if it left anything."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of everything; what is not finished stays in `DST.partial`."""
        self._lock.close()

    def written(self) -> Sequence[tuple[str, int | tuple[int, ...] | None]]:
        """Return key and label of the records that were found."""
        return self._found

    def _check_replaceable(self) -> None:
        """Raise unless there is nothing, an empty file, or a store at the path."""
        path = self._path
        if not path.exists():
            return
        if self._names and not path.is_dir():
            raise StoreError(f"{path} is a file, and shards lie in a folder: name another.")
        if self._names:
            others = [name for name in os.listdir(path) if not is_shard(name)]
            if others:
                raise StoreError(
                    f"{path} holds something else than the shards of a store ({others[0]!r}), and "
                    "would be replaced as a whole: name another folder, or remove it."
                )
        elif path.is_dir():
            raise StoreError(f"{path} is a folder, and the new store a file: name another.")
        elif path.stat().st_size and _what_is_in(path) is None:
            raise StoreError(
                f"{path} is a file that Penstock did not pack, or a damaged one, and would be "
                "replaced: name another, or remove it."
            )


class LMDBWriter(_Destination):
    """Writes one file. See `StoreWriter` for the calls."""

    def __init__(
        self,
        path: str | Path,
        *,
        class_names: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        what: str = "",
        resume: bool = False,
        overwrite: bool = True,
        map_bytes: int = _FIRST_MAP_BYTES,
        transaction_bytes: int = _TRANSACTION_BYTES,
    ) -> None:
        """Begin a store, or go on with one.

        Args and errors as for `create_store`; beside them:
            map_bytes: Address space to begin with; it is doubled as often as it is full.
            transaction_bytes: Size from which records are brought to disk.
        """
        self._what = what
        self._map_bytes = map_bytes
        self._transaction_bytes = transaction_bytes
        self._built = IndexBuilder(class_names, metadata)
        self._num_flushed = 0
        self._flushed_s = time.monotonic()
        self._waiting: list[EncodedRecord] = []
        self._waiting_bytes = 0
        self._env: Any = None
        super().__init__(path, (), what, resume=resume, overwrite=overwrite)

    def _go_on(self) -> None:
        """Take over the records that are there, each of them verified."""
        if _size_bytes(self._partial):
            check_unfinished(self._partial)
        self._open()
        with self._env.begin(buffers=True) as transaction:
            is_new = transaction.stat()["entries"] == 0
            if not is_new and _what_is_packed(transaction) != self._what:
                raise other_source(self._partial)
        self._write(self._reopen)
        if not is_new:
            with self._env.begin(buffers=True) as transaction:
                self._take_over(transaction)
        self._found = list(zip(self._built.keys, self._built.labels, strict=True))
        self._close_file()  # workers may be forked before the first record comes

    def _open(self) -> None:
        try:
            self._env = lmdb.open(
                os.fspath(self._partial),
                subdir=False,
                map_size=max(self._map_bytes, 2 * _size_bytes(self._partial)),
                lock=False,  # ours keeps other writers off, and nobody reads yet
                max_readers=1,
            )
        except lmdb.Error as error:
            raise self._failure(error) from error

    def _reopen(self, transaction: Any) -> None:  # noqa: ANN401
        """Mark the file as unfinished; it was not if its writer was killed before the rename."""
        transaction.put(PACK_KEY, self._what.encode())
        transaction.delete(INDEX_KEY)
        transaction.delete(SUMMARY_KEY)

    def _take_over(self, transaction: Any) -> None:  # noqa: ANN401
        num_records = transaction.stat()["entries"] - 1
        for position in range(num_records):
            value = transaction.get(position_keys(np.array([position]))[0])
            name = f"record {position} of {self._partial}"
            if value is None:
                raise StoreError(f"{name} is missing. Pack without --resume.")
            record = decode_record(value, name, copy=False)
            pair = is_pair(record.sample, record.label)
            self._built.add([EncodedRecord(record.key, record.label, value, pair)])
        self._num_flushed = num_records

    def checksum_at(self, number: int) -> int:
        """Return the checksum of a record that `written` lists, if it is not `finished`."""
        return self._built.checksums[number]

    def put_many(self, records: Sequence[EncodedRecord]) -> None:
        """Append records; they are on disk some 64 MiB or 10 s later, or after `finish`.

        Raises:
            StoreError: the store is `finished`, or a key comes a second time.
        """
        if self.finished:
            raise StoreError(f"{self._path} is complete, and nothing can be added to it.")
        self._built.add(records)
        self._waiting += records
        self._waiting_bytes += sum(len(record.data) for record in records)
        is_late = time.monotonic() - self._flushed_s > _TRANSACTION_S
        if self._waiting_bytes >= self._transaction_bytes or is_late:
            self._flush()

    def _flush(self) -> None:
        first = self._num_flushed
        keys = position_keys(np.arange(first, first + len(self._waiting)))
        items = [(k, record.data) for k, record in zip(keys, self._waiting, strict=True)]

        def put(transaction: Any) -> None:  # noqa: ANN401
            with transaction.cursor() as cursor:
                cursor.putmulti(items, append=True)

        self._write(put)
        self._num_flushed += len(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        self._flushed_s = time.monotonic()

    def _write(self, put: Callable[[Any], object]) -> None:
        """Do one transaction, in a larger map if it does not fit."""
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
            except lmdb.Error as error:
                raise self._failure(error) from error

    def finish(self) -> None:
        """Complete the file and put it in its place."""
        if self.finished:
            return
        self._flush()
        index = self._built.index()
        summary = {"count": len(index), "fingerprint": index.fingerprint, "what": self._what}

        def put(transaction: Any) -> None:  # noqa: ANN401
            transaction.put(INDEX_KEY, encode_record("index", index.to_tree()).data)
            transaction.put(SUMMARY_KEY, encode_record("summary", summary).data)
            transaction.delete(PACK_KEY)

        self._write(put)
        self._close_file()
        try:
            append_checksums(self._partial)
            self._check_replaceable()  # what is there now may not be what was there then
            put_in_place(self._partial, self._path)
        except OSError as error:
            raise self._failure(error) from error
        self.close()

    def close(self) -> None:
        """Let go of everything; what is not finished stays in `DST.partial`, on disk."""
        if self._waiting:
            with contextlib.suppress(StoreError):  # its disk is full: that was said before
                self._flush()
        self._close_file()
        super().close()

    def _close_file(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _failure(self, error: Exception) -> StoreError:
        cause = error
        if not isinstance(error, OSError):  # LMDB calls a short write an input/output error
            cause = no_room_for(self._partial, self._waiting_bytes) or error
        if getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            return no_space(self._path, self._partial)
        return StoreError(f"cannot write {self._path}: {cause}.")


class ShardedLMDBWriter(_Destination):
    """Writes a folder of files, each a store by itself with its part of the records, in order."""

    def __init__(
        self,
        path: str | Path,
        num_shards: int,
        num_records: int,
        *,
        what: str = "",
        resume: bool = False,
        overwrite: bool = True,
        **facts: Any,  # noqa: ANN401
    ) -> None:
        """Begin a store, or go on with one.

        Args and errors as for `create_store`; `facts` are for the writer of each shard.
        """
        what = f"{what}, {num_records} records in {num_shards} shards"
        self._facts = {"what": what, **facts}
        # Where each shard ends, but the last, which takes what is left.
        self._stops = [(k + 1) * num_records // num_shards for k in range(num_shards - 1)]
        self._seen: set[str] = set()
        # Of each shard that was found, the number of its first record, and what reads checksums.
        self._parts: list[tuple[int, Callable[[int], int]]] = []
        self._num_put = 0
        self._writer: LMDBWriter | None = None  # of the shard under way
        check_class_names(facts.get("class_names", ()))
        names = [shard_name(number, num_shards) for number in range(num_shards)]
        super().__init__(path, names, what, resume=resume, overwrite=overwrite)

    def _go_on(self) -> None:
        self._partial.mkdir(exist_ok=True)
        for name in self._names:
            path = self._partial / name
            if path.exists():
                with LMDBStore(path) as shard:
                    if shard.what() != self._facts["what"]:
                        raise other_source(self._partial)
                    self._parts.append((len(self._found), functools.partial(_checksum_in, path)))
                    self._found += shard.index.entries()
            elif path.with_name(name + ".partial").exists():
                self._writer = LMDBWriter(path, resume=True, **self._facts)
                self._parts.append((len(self._found), self._writer.checksum_at))
                self._found += self._writer.written()
        self._num_put = len(self._found)
        self._seen.update(key for key, _ in self._found)

    def checksum_at(self, number: int) -> int:
        """Return the checksum of a record that `written` lists, if it is not `finished`."""
        start, checksum_at = next(part for part in reversed(self._parts) if part[0] <= number)
        return checksum_at(number - start)

    def put_many(self, records: Sequence[EncodedRecord]) -> None:
        """Append records to one shard after the other; the last takes all that are left."""
        for record in records:
            if record.key in self._seen:
                raise repeated(record.key)
            self._seen.add(record.key)
        while records:
            shard = bisect.bisect_right(self._stops, self._num_put)
            is_last = shard == len(self._stops)
            num_free = len(records) + 1 if is_last else self._stops[shard] - self._num_put
            self._of_shard(shard).put_many(records[:num_free])
            self._num_put += len(records[:num_free])
            if len(records) >= num_free:
                self._finish_shard()
            records = records[num_free:]

    def _of_shard(self, number: int) -> LMDBWriter:
        if self._writer is None:
            self._writer = LMDBWriter(self._partial / self._names[number], **self._facts)
        return self._writer

    def _finish_shard(self) -> None:
        if self._writer is not None:
            self._writer.finish()
            self._writer = None

    def finish(self) -> None:
        """Complete the last shards and put the folder in its place."""
        if self.finished:
            return
        self._finish_shard()
        for number in range(len(self._names)):  # those that no record is left for
            if not (self._partial / self._names[number]).exists():
                self._of_shard(number)
                self._finish_shard()
        self._check_replaceable()
        put_in_place(self._partial, self._path)
        self.close()

    def close(self) -> None:
        """Let go of everything; what is not finished stays in `DST.partial`."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        super().close()


def _checksum_in(path: Path, position: int) -> int:
    with LMDBStore(path, verify_tree="never") as shard:  # it was verified when it was found
        return shard.checksum_at(position)


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


def _check_partial(path: Path) -> None:
    """Raise unless there is nothing, or what an interrupted writer left."""
    if path.is_dir():
        strangers = [entry.name for entry in os.scandir(path) if not _is_of_shard(entry)]
    else:
        strangers = [path.name] if not _is_lmdb_or_empty(path) else []
    if strangers:
        raise StoreError(
            f"{path} should hold what an interrupted packing left, and holds something else "
            f"({strangers[0]!r}). Move it away, or pack to another name."
        )


def _is_of_shard(entry: os.DirEntry[str]) -> bool:
    name = entry.name.removesuffix(".lock").removesuffix(".partial")
    return is_shard(name) and entry.is_file(follow_symlinks=False)


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
