# SPDX-License-Identifier: Apache-2.0
"""The index of a store: keys, labels and class names, without a single record being read."""

from __future__ import annotations

import array
import os
import struct
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from penstock.data.packed_list import PackedList
from penstock.data.ragged import RaggedArray
from penstock.errors import StoreError
from penstock.stores.records import header_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.stores.records import EncodedRecord

__all__ = ["Index", "IndexBuilder", "check_class_names", "joined", "labels_from", "repeated"]


@dataclass(frozen=True, eq=False)
class Index:
    """What a store knows of its records before it reads one.

    Attributes:
        keys: Name of each record, in the store's order. A key is repeated if a list or split names
            its image several times: see `distinct_keys`.
        labels: Class of each record, int64 of shape (records,); the classes of each, where there
            are several; or None.
        class_names: Name of class 0, 1, 2 …; empty where there are none.
        metadata: What whoever made the store wrote down: any JSON.
        fingerprint: Changes if keys, labels, class names or contents do.
        are_pairs: Whether every sample is known to be (image file, its label).
    """

    keys: Sequence[str]
    labels: NDArray[np.int64] | RaggedArray | None = None
    class_names: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    are_pairs: bool = False

    def __post_init__(self) -> None:
        """Keep labels from being written to: samples would not follow."""
        self._freeze()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what was pickled, and freeze it anew."""
        self.__dict__.update(state)
        self._freeze()

    def _freeze(self) -> None:
        labels = self.labels
        parts = (labels.values, labels.offsets) if isinstance(labels, RaggedArray) else (labels,)
        for part in parts:
            if not isinstance(part, (np.ndarray, type(None))):
                raise TypeError(f"labels of Index are an int64 array, not a {type(part).__name__}.")
            if part is not None:
                part.flags.writeable = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave the table of hashes behind: it is quickly made anew."""
        return {name: value for name, value in self.__dict__.items() if name != "_table"}

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.keys)

    def label_of(self, position: int) -> int | tuple[int, ...] | None:
        """Return the label of the record at `position` as a record has it."""
        if self.labels is None:
            return None
        label = self.labels[position]
        return tuple(label.tolist()) if isinstance(self.labels, RaggedArray) else int(label)

    def one_label_of(self, position: int) -> int | None:
        """Return the class of a record that has one or none, also beside records of several."""
        label = self.label_of(position)
        return (label[0] if label else None) if isinstance(label, tuple) else label

    def entries(self) -> list[tuple[str, int | tuple[int, ...] | None]]:
        """Return key and label of every record, in order, as a `StoreWriter` lists them."""
        return [(key, self.label_of(position)) for position, key in enumerate(self.keys)]

    def positions_of(self, keys: Iterable[str]) -> NDArray[np.int64]:
        """Return where records of these names are; int64, shape (keys,).

        Raises:
            StoreError: some are not there; the message names the first of them.

        Example:
            >>> Index(["a", "b", "c"]).positions_of(["c", "a"])
            array([2, 0])
        """
        wanted = list(keys)
        found = [self._find(key) for key in wanted]
        missing = [key for key, position in zip(wanted, found, strict=True) if position < 0]
        if missing:
            shown = ", ".join(repr(key) for key in missing[:5])
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise StoreError(f"no record is called {shown}{more}; the store has {len(self):,}.")
        return np.array(found, np.int64)

    def first_repeated(self) -> str | None:
        """Return a key that is there more than once, or None."""
        seen: set[str] = set()
        for key in self.keys:
            if key in seen:
                return key
            seen.add(key)
        return None

    def distinct_keys(self) -> Sequence[str]:
        """Return the keys as they are packed: repeated ones get a number.

        Example:
            >>> list(Index(["1.jpg", "2.jpg", "1.jpg"]).distinct_keys())
            ['1.jpg', '2.jpg', '1 (2).jpg']
        """
        if self.first_repeated() is None:
            return self.keys
        counts: dict[str, int] = {}
        taken = set(self.keys)
        return PackedList([_numbered(key, counts, taken) for key in self.keys])

    def _find(self, key: str) -> int:
        hashes, order = self._hashes
        wanted = _hash(key)
        start, stop = np.searchsorted(hashes, (wanted, wanted + 1))
        for position in order[start:stop].tolist():
            if self.keys[position] == key:
                return int(position)
        return -1

    @property
    def _hashes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Hashes of all keys, sorted, and whose they are: 16 bytes a key, where a dict has 150."""
        table = self.__dict__.get("_table")
        if table is None:
            hashes = np.fromiter(map(_hash, self.keys), np.int64, len(self.keys))
            order = np.argsort(hashes, kind="stable")
            table = self.__dict__["_table"] = hashes[order], order
        return table

    def to_tree(self) -> dict[str, Any]:
        """Return the index as a tree that a record can hold."""
        text, offsets = PackedList(self.keys).to_utf8()
        labels: Any = self.labels
        if isinstance(labels, RaggedArray):
            labels = {"values": labels.values, "offsets": labels.offsets}
        return {
            "keys": {"text": text, "offsets": offsets},
            "labels": labels,
            "class_names": list(self.class_names),
            "metadata": dict(self.metadata),
            "fingerprint": self.fingerprint,
            "are_pairs": self.are_pairs,
        }

    @classmethod
    def from_tree(cls, tree: Any, name: str) -> Index:  # noqa: ANN401
        """Return the index that `to_tree` made a tree of.

        Raises:
            StoreError: it is none; `name` says of which store.
        """
        try:
            keys = PackedList.from_utf8(
                _vector(tree["keys"]["text"], np.uint8), _vector(tree["keys"]["offsets"], np.int64)
            )
            labels = _labels_of(tree["labels"])
            if labels is not None and len(labels) != len(keys):
                raise ValueError(f"{len(labels)} labels for {len(keys)} keys")
            if tree["are_pairs"] and not isinstance(labels, np.ndarray):
                raise ValueError("its samples should be pairs, and have no labels")
            return cls(
                keys,
                labels,
                tuple(map(str, tree["class_names"])),
                dict(tree["metadata"]),
                str(tree["fingerprint"]),
                bool(tree["are_pairs"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(
                f"the index of {name} is damaged: {error}. Pack it anew, or restore it from a copy."
            ) from error


def _vector(value: Any, dtype: type) -> NDArray[Any]:  # noqa: ANN401
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
        raise TypeError(f"{value!r:.60} is no array of {dtype.__name__} in a row")
    return value


def _labels_of(value: Any) -> NDArray[np.int64] | RaggedArray | None:  # noqa: ANN401
    if value is None:
        return None
    if isinstance(value, dict):
        return RaggedArray(_vector(value["values"], np.int64), _vector(value["offsets"], np.int64))
    return _vector(value, np.int64)


def joined(indexes: Sequence[Index]) -> Index:
    """Return one index for the records of several stores in a row, as those of shards."""
    first, fingerprints = indexes[0], [index.fingerprint for index in indexes]
    indexes = [index for index in indexes if len(index)] or [first]
    labels: Any = None
    if all(isinstance(index.labels, np.ndarray) for index in indexes):
        labels = np.concatenate([index.labels for index in indexes])
    elif any(index.labels is not None for index in indexes):
        labels = labels_from([label for index in indexes for _, label in index.entries()])
    return Index(
        PackedList(key for index in indexes for key in index.keys),
        labels,
        first.class_names,
        first.metadata,
        "+".join(fingerprints),
        all(index.are_pairs for index in indexes),
    )


def _numbered(key: str, counts: dict[str, int], taken: set[str]) -> str:
    """Return a key, or one of its own if `counts` says that it was there before."""
    counts[key] = counts.get(key, 0) + 1
    if counts[key] == 1:
        return key
    stem, suffix = os.path.splitext(key)
    while (name := f"{stem} ({counts[key]}){suffix}") in taken:
        counts[key] += 1
    taken.add(name)
    return name


def _hash(key: str) -> int:
    return zlib.crc32(key.encode("utf-8", "surrogatepass"))


def labels_from(
    labels: Sequence[int | tuple[int, ...] | None],
) -> NDArray[np.int64] | RaggedArray | None:
    """Return labels of records as an index holds them.

    An array where each record has one, a `RaggedArray` where some have several or none, None where
    no record has any.

    Example:
        >>> labels_from([3, 1]), labels_from([None, None])
        (array([3, 1]), None)
        >>> labels_from([(3, 1), None])
        <RaggedArray of 2 samples, 2 values>
    """
    kinds = set(map(type, labels))
    if kinds <= {type(None)}:
        return None
    if kinds == {int}:
        return np.array(labels, np.int64)
    return RaggedArray.of((row,) if isinstance(row, int) else row or () for row in labels)


class IndexBuilder:
    """The index of a store that is being written: collects what it needs.

    The fingerprint is a hash over the checksums of all records, in order, and the class names: the
    same records have the same one in every kind of store.

    Example:
        >>> from penstock.stores.records import encode_record
        >>> builder = IndexBuilder(("cat", "dog"), {})
        >>> builder.add([encode_record("a", 1.5, 0), encode_record("b", 2.5, 1)])
        >>> index = builder.index()
        >>> list(index.keys), index.labels
        (['a', 'b'], array([0, 1]))
    """

    def __init__(self, class_names: Sequence[str], metadata: Mapping[str, Any] | None) -> None:
        """Begin with no record.

        Raises:
            StoreError: the name of a class cannot be written.
        """
        check_class_names(class_names)
        self.class_names = tuple(class_names)
        self._metadata = dict(metadata or {})
        self.keys: list[str] = []
        self.labels: list[int | tuple[int, ...] | None] = []
        self.checksums = array.array("Q")
        self._known: set[str] = set()
        self._digest = 0
        self._are_pairs = True

    def __len__(self) -> int:
        """Return the number of records added."""
        return len(self.keys)

    def add(self, records: Sequence[EncodedRecord]) -> None:
        """Add records, in order.

        Raises:
            StoreError: a key is there twice; then none of these is added.
        """
        keys = [record.key for record in records]
        if len(set(keys)) < len(keys) or not self._known.isdisjoint(keys):
            raise repeated(next(k for n, k in enumerate(keys) if k in self._known or k in keys[:n]))
        checksums = [header_of(record.data, f"record {record.key!r}")[1] for record in records]
        self._known.update(keys)
        for record, checksum in zip(records, checksums, strict=True):
            self.checksums.append(checksum)
            link = struct.pack("<QQ", self._digest, checksum)
            self._digest = xxhash.xxh3_64_intdigest(link)
            self.keys.append(record.key)
            self.labels.append(record.label)
            self._are_pairs = self._are_pairs and record.is_pair

    def index(self) -> Index:
        """Return the index of all records added."""
        keys = PackedList(self.keys)
        text = "\0".join((str(len(keys)), f"{self._digest:016x}", *self.class_names))
        return Index(
            keys,
            labels_from(self.labels),
            self.class_names,
            self._metadata,
            xxhash.xxh3_128_hexdigest(text.encode()),
            self._are_pairs and len(keys) > 0,
        )


def check_class_names(names: Iterable[str]) -> None:
    """Raise StoreError if the name of a class cannot be written."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise StoreError(
                f"the class {name!r} cannot be stored: its name is not UTF-8, as that of a folder "
                "from another system may be. Rename it."
            ) from error


def repeated(key: str) -> StoreError:
    """Return the error of a key that comes a second time, for the caller to raise."""
    return StoreError(f"the key {key!r} is there twice; every record of a store has its own.")
