# SPDX-License-Identifier: Apache-2.0
"""Writing a store of shards: shard by shard, and the index at the end.

    packing                a record: the run's ID and what it packs; there until the index is
    shards/ID-00000.shard …

A kill at any moment leaves the old index or the new one. A writer that resumes reads back the
shards of its ID, and goes on behind the last one that is whole. The index takes the place of the
one that was there when the run began, or the run fails: of two runs in one bucket the second that
comes to its end. What no index names is removed after that.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.blobs.blobs import ByteRange, is_remote, open_blobs
from penstock.blobs.errors import BlobChanged, BlobNotFound
from penstock.blobs.folder import PARTIAL
from penstock.errors import ConfigError, StoreError
from penstock.stores.index import IndexBuilder, joined
from penstock.stores.placing import Lock, already_there
from penstock.stores.records import (
    begins_as_record,
    check_record,
    decode_record,
    encode_record,
    size_of,
)
from penstock.stores.shards.store import INDEX_NAME, Shards, read_index
from penstock.stores.store import other_source
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.stores.records import EncodedRecord
    from penstock.stores.shards.store import PackedShards

SHARD_BYTES: Final = 64 << 20
_MOST_SHARD_BYTES: Final = 2 << 30
_MARK_NAME: Final = "packing"
_FOLDER: Final = "shards/"
_SHARD: Final = re.compile(_FOLDER + r"[0-9a-f]{8}-\d{5,}\.shard")


class ShardWriter:
    """Writes one store. See `StoreWriter` for the calls.

    Attributes:
        address: `shards:` and the place.
        finished: Whether a writer that resumes found the store complete.
        num_before: Records that are there, and are appended to.
    """

    def __init__(
        self,
        place: str | Path,
        *,
        class_names: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        what: str = "",
        resume: bool = False,
        overwrite: bool = True,
        append: bool = False,
        shard_size: int = SHARD_BYTES,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Begin a store, or go on with one.

        Args and errors as for `create_store`. With `append` the store that is there keeps its
        records, and the new ones come behind them. A shard has at least `shard_size` bytes, but the
        last; `options` are those of the place, as `endpoint`.
        """
        if not 1 <= shard_size <= _MOST_SHARD_BYTES:
            raise ConfigError(
                f"{shard_size=}: it is a number of bytes, 1 to {_MOST_SHARD_BYTES:,}."
            )
        self._blobs = open_blobs(str(place), **options)
        self.address = f"shards:{self._blobs.address}"
        self.finished = False
        self.num_before = 0
        self._shard_size = shard_size
        self._what = what
        self._facts = class_names, metadata
        self._before: PackedShards | None = None  # what is appended to, or complete
        self._version = ""  # of the index that was there
        self._run = secrets.token_hex(4)
        self._is_marked = False
        self._names: list[str] = []
        self._firsts: list[int] = []
        self._sizes: list[int] = []
        self._waiting: list[EncodedRecord] = []
        self._waiting_bytes = 0
        self._lock = None
        if not is_remote(str(place)):
            self._lock = Lock(Path(place) / _MARK_NAME, Path(place))
        try:
            if self._lock is not None:
                _remove_partial(Path(place))
            self._begin(resume=resume, overwrite=overwrite, append=append)
        except BaseException:
            self.close()
            raise

    def _begin(self, *, resume: bool, overwrite: bool, append: bool) -> None:
        there = self._packed(may_be_damaged=overwrite and not append)
        left = self._mark() if resume else None
        if there is not None and left is not None and left[0] == there.run:
            left = None  # it was killed after the index
        is_complete = resume and left is None and there is not None and there.what == self._what
        if is_complete and append:
            raise StoreError(
                f"{self.address} has no interrupted run to go on with: without --resume the "
                "records are appended."
            )
        if is_complete:
            self.finished, self._before = True, there
        elif there is not None and append:
            self._check_classes(there)
            self._before, self.num_before = there, len(there.index)
        elif self._version and not overwrite:
            raise already_there(self.address, resume=resume)
        known = set() if self._before is None else set(self._before.index.keys)
        self._built = IndexBuilder(*self._facts, known=known)
        if left is not None:
            self._run, what = left
            if what != self._what:
                raise other_source(f"{self._blobs.address}/{_MARK_NAME}")
            self._take_over()
            self._is_marked = True

    def _packed(self, *, may_be_damaged: bool) -> PackedShards | None:
        """Return what the store that is there says; None if there is none that can be read."""
        try:
            there = self._blobs.stat(INDEX_NAME)
            self._version = there.version
            return read_index(self._blobs, self.address)
        except BlobNotFound:
            return None
        except StoreError as error:
            if not (may_be_damaged and type(error) is StoreError and self._version):
                raise
            (data,) = self._blobs.read([ByteRange(INDEX_NAME, 0, min(there.size_bytes, 16))])
            if begins_as_record(data):
                return None
            raise StoreError(
                f"{INDEX_NAME!r} in {self._blobs.address} is no index that Penstock wrote, so it "
                "is not replaced. Remove it, or name another prefix."
            ) from error

    def _check_classes(self, there: PackedShards) -> None:
        """Raise unless labels mean the same in both parts."""
        if there.index.class_names != tuple(self._facts[0]):
            raise StoreError(
                f"{self.address} has the classes {list(there.index.class_names)}, and what is to "
                f"be appended {list(self._facts[0])}: one label would mean two classes."
            )

    def _mark(self) -> tuple[str, str] | None:
        """Return ID and source of an interrupted run."""
        try:
            (view,) = self._blobs.read([ByteRange(_MARK_NAME)])
        except BlobNotFound:
            return None
        mark = decode_record(view, f"{_MARK_NAME} of {self._blobs.address}").sample
        if not isinstance(mark, dict) or {"run", "what"} - mark.keys():
            raise other_source(f"{self._blobs.address}/{_MARK_NAME}")
        return str(mark["run"]), str(mark["what"])

    def _take_over(self) -> None:
        """Go on behind the shards of this run that are whole, each record of them verified."""
        for number, blob in enumerate(self._blobs.list(f"{_FOLDER}{self._run}-")):
            (data,) = self._blobs.read([ByteRange(blob.name)])
            records = _records_in(data)
            if blob.name != self._name(number) or records is None:
                break
            for record in records:
                self._built.take_over(record, f"a record of {blob.name} in {self.address}")
            self._note_shard(blob.name, [len(record) for record in records])

    def _name(self, number: int) -> str:
        return f"{_FOLDER}{self._run}-{number:05}.shard"

    def _note_shard(self, name: str, sizes: Sequence[int]) -> None:
        self._names.append(name)
        self._firsts.append(len(self._sizes))
        self._sizes += sizes

    def written(self) -> Sequence[tuple[str, int | tuple[int, ...] | None]]:
        """Return key and label of the records that were found."""
        if self.finished:
            there = self._before
            return [] if there is None else there.index.entries()[there.num_before :]
        return list(zip(self._built.keys, self._built.labels, strict=True))

    def last_checksum(self) -> int | None:
        """Return the checksum of the last record that `written` lists."""
        return self._built.last_checksum

    def put_many(self, records: Sequence[EncodedRecord]) -> None:
        """Append records; a shard is written as soon as it is full.

        Raises:
            StoreError: the store is `finished`, or a key comes a second time.
        """
        if self.finished:
            raise StoreError(f"{self.address} is complete, and nothing can be added to it.")
        self._built.add(records)
        self._waiting += records
        self._waiting_bytes += sum(len(record.data) for record in records)
        if self._waiting_bytes >= self._shard_size:
            self._flush()

    def _flush(self) -> None:
        """Write what waits as a shard; if that fails, it waits on."""
        if not self._waiting:
            return
        if not self._is_marked:
            mark = encode_record(_MARK_NAME, {"run": self._run, "what": self._what})
            self._blobs.write(_MARK_NAME, mark.data)
            self._is_marked = True
            if self._lock is None and not self._version:
                self._warn_of_others()
        name = self._name(len(self._names))
        self._blobs.write(name, b"".join(record.data for record in self._waiting))
        self._note_shard(name, [len(record.data) for record in self._waiting])
        self._waiting, self._waiting_bytes = [], 0

    def _warn_of_others(self) -> None:
        """Warn if a bucket's prefix without a store has other objects: it may be a wrong one."""
        names = (blob.name for blob in self._blobs.list(at_most=1))  # of one page
        other = next((n for n in names if n != _MARK_NAME and not _SHARD.fullmatch(n)), None)
        if other is not None:
            warn_user(
                f"{self._blobs.address} has other objects, such as {other!r}. They stay; the store "
                f"lies between them, as {INDEX_NAME} and {_FOLDER}."
            )

    def finish(self) -> None:
        """Write the index, which takes the place of an older one; then remove that one's shards."""
        if self.finished:
            return
        self._flush()
        self._check_shards()
        ends = np.concatenate(([0], np.cumsum(np.array(self._sizes, np.int64)))).astype(np.int64)
        shards = Shards(tuple(self._names), np.array(self._firsts, np.int64), ends)
        index = self._built.index()
        if self._before is not None:
            index = joined([self._before.index, index])
            shards = self._before.shards.followed_by(shards)
        tree = index.to_tree() | {
            "shards": shards.to_tree(),
            "what": self._what,
            "run": self._run,
            "num_before": self.num_before,
        }
        try:
            data = encode_record("index", tree).data
            self._blobs.write(INDEX_NAME, data, replaces=self._version)
        except BlobChanged as error:
            raise StoreError(
                f"another run has packed into {self.address} since this one began, and its store "
                "is there. Pack anew, one run at a time."
            ) from error
        self.finished = True
        self._blobs.delete(_MARK_NAME)
        kept = set(shards.names)
        for blob in self._blobs.list(_FOLDER):
            if _SHARD.fullmatch(blob.name) and blob.name not in kept:
                self._blobs.delete(blob.name)
        self.close()

    def _check_shards(self) -> None:
        """Raise if a shard is not there: nothing keeps two runs off one bucket."""
        there = {blob.name for blob in self._blobs.list(f"{_FOLDER}{self._run}-")}
        gone = [name for name in self._names if name not in there]
        if gone:
            raise StoreError(
                f"{len(gone):,} of the {len(self._names):,} shards written to {self.address} are "
                f"not there ({gone[0]} …). Another run that packs to it has removed them: pack "
                "anew, one run at a time."
            )

    def close(self) -> None:
        """Let go of everything; what is not finished stays for a writer that resumes."""
        try:
            if not self.finished:
                self._flush()
        finally:
            self._blobs.close()
            if self._lock is not None:
                self._lock.close()


def _remove_partial(folder: Path) -> None:
    """Remove what writers that were killed have left."""
    for path in (*folder.glob(".*"), *folder.glob(f"{_FOLDER}.*")):
        if PARTIAL.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _records_in(data: memoryview) -> list[bytes] | None:
    """Return the records of a shard; None if it is not whole."""
    records, start = [], 0
    try:
        while start < len(data):
            stop = start + size_of(data[start:], "")
            check_record(data[start:stop], "")
            records.append(bytes(data[start:stop]))
            start = stop
    except StoreError:
        return None
    return records
