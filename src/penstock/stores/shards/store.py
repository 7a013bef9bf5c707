# SPDX-License-Identifier: Apache-2.0
"""`ShardStore`: records one after the other in large objects, in a folder or in object storage.

    index                    a record: keys, labels …, the shards, where each record ends
    shards/ID-00000.shard    records (`penstock.stores.records`), nothing between them
    shards/ID-00001.shard …  ID is of the run that packed them: two runs never share a name

An index names its shards, and is written behind them: who reads one finds all that it names. To
replace a store is to replace its index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.blobs.blobs import ByteRange
from penstock.blobs.errors import BlobNotFound, checked_name
from penstock.blobs.ranges import RecordRanges
from penstock.errors import StoreError
from penstock.stores.blob_store import BlobStore
from penstock.stores.index import Index, vector
from penstock.stores.records import decode_record

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.blobs.blobs import Blobs
    from penstock.stores.records import Record

INDEX_NAME: Final = "index"
_MOST_BYTES: Final = 1 << 56  # of all records; a damaged index must not ask for more


@dataclass(frozen=True, eq=False)
class Shards:
    """Where records lie.

    Attributes:
        names: The objects.
        firsts: Number of the first record of each; int64, shape (shards,).
        ends: Byte behind each record, all shards in a row; int64, shape (records + 1,), from 0 on.
    """

    names: tuple[str, ...]
    firsts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def ranges(self) -> RecordRanges:
        """Return where each record is."""
        numbers = np.searchsorted(self.firsts, np.arange(len(self.ends) - 1), "right") - 1
        bases = self.ends[self.firsts[numbers]]
        return RecordRanges(
            self.names,
            ("",) * len(self.names),
            numbers.astype(np.int32),
            self.ends[:-1] - bases,
            self.ends[1:] - bases,
        )

    def followed_by(self, other: Shards) -> Shards:
        """Return these shards, and others behind them."""
        return Shards(
            self.names + other.names,
            np.concatenate((self.firsts, other.firsts + len(self.ends) - 1)),
            np.concatenate((self.ends, other.ends[1:] + self.ends[-1])),
        )

    def to_tree(self) -> dict[str, Any]:
        """Return them as a tree that a record can hold."""
        return {"names": list(self.names), "firsts": self.firsts, "ends": self.ends}

    @classmethod
    def from_tree(cls, tree: Any, num_records: int, address: str) -> Shards:  # noqa: ANN401
        """Return the shards that `to_tree` made a tree of.

        Raises:
            StoreError: it is none.
        """
        try:
            names = tuple(map(str, tree["names"]))
            firsts, ends = vector(tree["firsts"], np.int64), vector(tree["ends"], np.int64)
            fits = len(ends) == num_records + 1 and len(firsts) == len(names)
            if not fits or ends[0] != 0 or (ends[1:] <= ends[:-1]).any() or ends[-1] > _MOST_BYTES:
                raise ValueError("its records lie in no order")
            bounds = [0, *firsts.tolist(), num_records]
            if bounds != sorted(bounds) or (num_records and (not names or firsts[0] != 0)):
                raise ValueError("its shards lie in no order")
            for name in names:
                checked_name(name)
        except (KeyError, TypeError, ValueError) as error:  # ConfigError of a name is the last
            raise StoreError(
                f"the index of {address} is damaged: {error}. Pack it anew, or restore it."
            ) from error
        return cls(names, firsts, ends)


class ShardStore(BlobStore):
    """Records in large objects, with one index; read by ranges, a batch at a time.

    Any sample is one ranged read away, so that shuffling needs no buffer; those of a batch come at
    the same time. The index is read once, in full: 8 bytes, the label and the key of each record.
    For arguments and concurrency see `BlobStore`.

    Example:
        >>> import tempfile
        >>> from penstock.stores import pack
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = pack([("one", 1), ("two", 2)], f"shards:{folder.name}/numbers")
        >>> with ShardStore(f"{folder.name}/numbers") as store:
        ...     store.get_many([1])
        [Record(key='1', label=2, sample=('two', 2))]
        >>> folder.cleanup()
    """

    @property
    def address(self) -> str:
        """`shards:` and the place."""
        return f"shards:{self._blobs.address}"

    def _load(self) -> tuple[Index, RecordRanges]:
        found = read_index(self._blobs, self.address)
        return found.index, found.shards.ranges()

    def _record(self, position: int, view: memoryview, name: str, *, copy: bool) -> Record:
        record = decode_record(view, name, copy=copy)
        if record.key != self.keys[position]:
            raise StoreError(f"{name} is another one, {record.key!r}. Pack the store anew.")
        return record


@dataclass(frozen=True, eq=False)
class PackedShards:
    """What the index of a store of shards says.

    Attributes:
        index: Keys, labels …
        shards: Where records lie.
        what: It was packed from.
        run: ID of the run that wrote the index.
        num_before: Records that this run appended to.
    """

    index: Index
    shards: Shards
    what: str
    run: str
    num_before: int


def read_index(blobs: Blobs, address: str) -> PackedShards:
    """Return what the index of a store of shards says."""
    try:
        (view,) = blobs.read([ByteRange(INDEX_NAME)])
    except BlobNotFound as error:
        raise StoreError(
            f"{address} has no index: it is no store of shards, or its packing was not finished, "
            "which `penstock pack SRC DST --resume` does. Images in folders, tar and MDS shards, "
            "and Parquet files are named with their kind, as folder:s3://BUCKET/PREFIX."
        ) from error
    tree = decode_record(view, f"the index of {address}").sample
    if not isinstance(tree, dict) or "shards" not in tree:
        raise StoreError(f"the index of {address} is none of a store of shards.")
    index = Index.from_tree(tree, address)
    shards = Shards.from_tree(tree["shards"], len(index), address)
    num_before = tree.get("num_before")
    return PackedShards(
        index,
        shards,
        str(tree.get("what", "")),
        str(tree.get("run", "")),
        num_before if isinstance(num_before, int) else 0,
    )
