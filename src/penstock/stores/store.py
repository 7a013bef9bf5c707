# SPDX-License-Identifier: Apache-2.0
"""What a store is, to read and to write."""
# A store is a sequence of records in a fixed order, each with a key, and an index that is there
# without reading any. To make one, a writer writes beside its final place and puts it there at
# the end: a store is complete or absent.
#
#     SRC ── scan ──▶ encode_record ──▶ StoreWriter.put_many … .finish(index facts) ──▶ DST
#
# Guarantees, held by `penstock.testing.stores.StoreReaderContract`:
#     The same positions give the same records, in the order asked for, in any process.
#     A store may be pickled at any time, and be used in a forked or spawned process, and by several
#     threads: connections stay behind and are made anew, once per process.
#     An error names the record and the store, and never a password.

from __future__ import annotations

import abc
import contextlib
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, Self, TypeVar

import numpy as np

from penstock.errors import StoreError
from penstock.stores.index import column_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from penstock.data.ragged import RaggedArray
    from penstock.stores.index import Index
    from penstock.stores.records import EncodedRecord, Record

_SCAN_RECORDS: Final = 64  # read at a time: enough for one round trip to be nothing beside them


class Store(abc.ABC):
    """Encoded samples by position or key. Subclasses say where they lie.

    A subclass defines `address`, `_load_index`, `_read` and, where it holds something, `close`;
    what it holds is not pickled.

    Concurrency:
        Any thread. It pickles, and goes on in the other process with a connection of its own.
    """

    _index: Index | None = None  # until it was read, maybe in another process

    @property
    @abc.abstractmethod
    def address(self) -> str:
        """Where it lies, as `open_store` takes it, without any secret."""

    @abc.abstractmethod
    def _load_index(self) -> Index:
        """Return the index; called once, or by several threads at the same time."""

    @abc.abstractmethod
    def _read(
        self, positions: NDArray[np.int64], *, copy: bool
    ) -> contextlib.AbstractContextManager[list[Record]]:
        """Return the records at `positions`, in that order."""

    def close(self) -> None:  # noqa: B027 - a store may hold nothing
        """Give back what this process holds. May be called again, and the store used again."""

    @property
    def index(self) -> Index:
        """Keys, labels, class names, metadata; read at first use."""
        # No lock: two threads may both read it, and get equal ones. (functools.cached_property has
        # one for all instances on Python 3.11: waiting for a server would block every store.)
        if self._index is None:
            self._index = self._load_index()
        return self._index

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.index)

    @property
    def keys(self) -> Sequence[str]:
        """Name of each record, in order."""
        return self.index.keys

    @property
    def labels(self) -> NDArray[np.int64] | RaggedArray | None:
        """Class of each record, or its classes, or None; not a copy."""
        return self.index.labels

    @property
    def shard_lengths(self) -> NDArray[np.int64] | None:
        """Number of records of each shard, int64 (shards,): what is best read as one.

        None where records are not in shards: see `penstock.sampling.ShardSampler`.
        """
        return None

    def own_files(self) -> tuple[str, Iterable[str]] | None:
        """Return a folder, and the paths of the records' files from there.

        None where records are not in files of their own.
        """
        return None

    def column(self, name: str) -> NDArray[np.int64] | RaggedArray:
        """Return the classes of records by a field of their objects, without reading one.

        Args:
            name: The field, as "pose"; "name" is the objects' class.

        Returns:
            int64, shape (records,), where every record has one object; else the classes of the
            objects of each.

        Raises:
            ConfigError: there is no such field, or the store does not have it for all its records.
            StoreError: its data are damaged.
        """
        return column_of(self.index, name)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class; empty if they have none."""
        return self.index.class_names

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What its maker wrote down."""
        return self.index.metadata

    @property
    def fingerprint(self) -> str:
        """A short text that changes if the store's contents do."""
        return self.index.fingerprint

    def get_many(self, positions: ArrayLike) -> list[Record]:
        """Return records that are the caller's own, in the order asked for.

        Args:
            positions: Integers; negative ones count from the end.

        Raises:
            IndexError: out of range.
            StoreError: a record is missing or damaged; the message names it.
        """
        with self._read(self.checked(positions), copy=True) as records:
            return list(records)

    def borrow(self, positions: ArrayLike) -> contextlib.AbstractContextManager[list[Record]]:
        """Return records for use in a `with` block, without copying what need not be.

        Inside the block alone, images, long bytes and arrays may be read-only views of the store's
        own memory. Otherwise like `get_many`.
        """
        return self._read(self.checked(positions), copy=False)

    def get(self, keys: Iterable[str]) -> list[Record]:
        """Return the records called `keys`, in their order.

        Raises:
            StoreError: there is no such record, or it is damaged.
        """
        return self.get_many(self.index.positions_of(keys))

    @contextlib.contextmanager
    def borrow_images(self, positions: NDArray[np.int64]) -> Iterator[list[Any]]:
        """Return the image files of records whose samples are pairs (see `Index.are_pairs`).

        Args:
            positions: As `checked` returns them.

        Returns:
            bytes or views of them, valid inside the block only.
        """
        with self._read(positions, copy=False) as records:
            yield [record.sample[0].data for record in records]

    def scan(self, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        """Yield the records from `start` to `stop` (not included) in order."""
        start, stop, _ = slice(start, stop).indices(len(self))
        for first in range(start, stop, _SCAN_RECORDS):
            yield from self.get_many(np.arange(first, min(first + _SCAN_RECORDS, stop)))

    def checked(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Return positions as `borrow` takes them.

        Raises:
            IndexError: one is out of range.
            TypeError: they are no integers.
        """
        array = np.asarray(positions)
        if array.size == 0:
            return np.empty(0, np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise TypeError(f"positions are a list of integers, not {positions!r:.80}")
        array = array.astype(np.int64, copy=False)
        length = len(self)
        low, high = int(array.min()), int(array.max())
        if low < -length or high >= length:
            bad = high if high >= length else low
            raise IndexError(
                f"position {bad} is out of range: {self.address} has {length} records."
            )
        return array if low >= 0 else np.where(array < 0, array + length, array)

    def __enter__(self) -> Self:
        """Return the store, to be closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        """Return kind and address; nothing is opened, and no secret shown."""
        return f"<{type(self).__name__} {self.address}>"


class _Closable(Protocol):
    def close(self) -> None: ...


OpenT = TypeVar("OpenT", bound=_Closable)


class OpenedStore(Store, Generic[OpenT]):
    """A store that holds one open thing in each process, from its first read on."""

    _open: OpenT | None = None

    def close(self) -> None:
        """Close what is open, unless another store of this process or a thread uses it as well."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave it behind. An index that was read goes along: workers share its arrays."""
        return {**self.__dict__, "_open": None}

    def _name(self, position: int) -> str:
        return f"record {position} ({self.keys[position]!r}) of {self.address}"


class StoreWriter(Protocol):
    """Makes one store, in the order in which records come.

    Calls: `put_many` any number of times, then `finish`; `close` at the end in any case. Without
    `finish` the destination is as it was, and what was written stays beside it for a writer that
    resumes. Until the first `put_many` a writer has no thread and no connection open, so
    that workers may be forked after it was made.

    Concurrency:
        One thread of one process; a second writer to the same destination is refused.
    """

    @property
    def address(self) -> str:
        """Of the store that is made, without any secret."""

    @property
    def finished(self) -> bool:
        """Whether a writer that resumes found the store complete: nothing is left to be done."""

    def written(self) -> Sequence[tuple[str, int | tuple[int, ...] | None]]:
        """Return key and label of what an interrupted writer left, verified; empty if anew."""

    def last_checksum(self) -> int | None:
        """Return the checksum of the last record that `written` lists, if it is at hand."""

    def put_many(self, records: Sequence[EncodedRecord]) -> None:
        """Append records.

        Raises:
            StoreError: no space, the server cannot be reached, or a key comes a second time; then
                none of these records is written.
        """

    def finish(self) -> None:
        """Complete the store and put it in its place, where it takes that of an older one."""

    def close(self) -> None:
        """Let go of everything. May be called again."""


def missing_records(keys: Sequence[str], address: str) -> StoreError:
    """Return the error that says which records are not there, for the caller to raise."""
    shown = ", ".join(map(repr, keys[:5]))
    more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
    return StoreError(
        f"{len(keys)} record(s) that the index of {address} has are not there: {shown}{more}. They "
        "were removed since; pack the store anew, or leave them out with on_error='skip'."
    )


def other_source(partial: object) -> StoreError:
    """Return the error of a writer that should resume what is not its own, to be raised."""
    return StoreError(
        f"{partial} holds a part of something else: it was packed from another source or with "
        "other options. Give the same ones again, or pack without --resume."
    )
