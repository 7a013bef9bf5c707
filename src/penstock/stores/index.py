# SPDX-License-Identifier: Apache-2.0
"""The index of a store: keys, labels, class names, and what its metadata say of objects."""

from __future__ import annotations

import base64
import os
import struct
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import numpy as np
import xxhash

from penstock.data.packed_list import PackedList
from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError, StoreError
from penstock.stores.records import EncodedRecord, decode_record, header_of, is_pair

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

T = TypeVar("T")

COLUMNS: Final = "object_columns"
_NAME: Final = "name"  # as VOC's files call the class of an object
_MOST_CLASSES: Final = 1000  # a field of more texts numbers its objects, and has no classes


@dataclass(frozen=True, eq=False)
class Index:
    """Keys, labels and class names of a store's records, without reading one.

    Attributes:
        keys: Name of each record, in the store's order. A key is repeated if a list or split names
            its image several times: see `distinct_keys`.
        labels: Class of each record, int64 of shape (records,); the classes of each, where there
            are several; or None.
        class_names: Name of class 0, 1, 2 …; empty where there are none.
        metadata: What the maker of the store wrote down: any JSON.
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
        labels = self.labels
        parts = (labels.values, labels.offsets) if isinstance(labels, RaggedArray) else (labels,)
        for part in parts:
            if not isinstance(part, (np.ndarray, type(None))):
                raise TypeError(f"labels of Index are an int64 array, not a {type(part).__name__}.")
            if part is not None:
                part.flags.writeable = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what was pickled, and freeze it anew."""
        self.__dict__.update(state)
        self.__post_init__()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the table of keys behind: it is quickly made anew."""
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

        The first call makes a table of all keys, of some 150 bytes for each.

        Raises:
            StoreError: some are not there; the message names the first of them.

        Example:
            >>> Index(["a", "b", "c"]).positions_of(["c", "a"])
            array([2, 0])
        """
        table = self.__dict__.get("_table")
        if table is None:  # of keys that repeat the first position counts
            numbers = range(len(self) - 1, -1, -1)
            table = self.__dict__["_table"] = {self.keys[number]: number for number in numbers}
        wanted = list(keys)
        missing = [key for key in wanted if key not in table]
        if missing:
            shown = ", ".join(map(repr, missing[:5]))
            raise StoreError(f"{len(missing)} keys not among the store's {len(self):,}: {shown}.")
        return np.array([table[key] for key in wanted], np.int64)

    def first_repeated(self) -> str | None:
        """Return a key that is there more than once, or None."""
        return next((key for key, count in Counter(self.keys).items() if count > 1), None)

    def distinct_keys(self) -> Sequence[str]:
        """Return the keys as they are packed: repeated ones get a number.

        Example:
            >>> list(Index(["1.jpg", "2.jpg", "1.jpg"]).distinct_keys())
            ['1.jpg', '2.jpg', '1 (2).jpg']
        """
        if self.first_repeated() is None:
            return self.keys
        counts: dict[str, int] = {}
        names = []
        for key in self.keys:
            counts[key] = count = counts.get(key, 0) + 1
            stem, suffix = os.path.splitext(key)
            names.append(key if count == 1 else f"{stem} ({count}){suffix}")
        return PackedList(names)

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
                vector(tree["keys"]["text"], np.uint8), vector(tree["keys"]["offsets"], np.int64)
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


def vector(value: Any, dtype: type) -> NDArray[Any]:  # noqa: ANN401
    """Return an array out of a tree, as a check of its kind."""
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
        raise TypeError(f"{value!r:.60} is no array of {dtype.__name__} in a row")
    return value


def _labels_of(value: Any) -> NDArray[np.int64] | RaggedArray | None:  # noqa: ANN401
    if value is None:
        return None
    if isinstance(value, dict):
        return RaggedArray(vector(value["values"], np.int64), vector(value["offsets"], np.int64))
    return vector(value, np.int64)


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


def labels_from(
    labels: Sequence[int | tuple[int, ...] | None],
) -> NDArray[np.int64] | RaggedArray | None:
    """Return labels of records as an index holds them."""
    kinds = set(map(type, labels))
    if kinds <= {type(None)}:
        return None
    if kinds == {int}:
        return np.array(labels, np.int64)
    return RaggedArray.of((row,) if isinstance(row, int) else row or () for row in labels)


class _ObjectColumns(msgspec.Struct):
    num_objects: int
    zlib_base64_u32: dict[str, str]


class IndexBuilder:
    """The index of a store that is being written: collects what it needs."""

    def __init__(
        self,
        class_names: Sequence[str],
        metadata: Mapping[str, Any] | None,
        *,
        known: set[str] | None = None,
    ) -> None:
        """Begin with no record."""
        for name in class_names:
            try:
                name.encode()
            except UnicodeEncodeError as error:
                raise StoreError(
                    f"the class {name!r} cannot be stored: its name is not UTF-8, as that of a "
                    "folder from another system may be. Rename it."
                ) from error
        self.class_names = tuple(class_names)
        self._metadata = dict(metadata or {})
        self.keys: list[str] = []
        self.labels: list[int | tuple[int, ...] | None] = []
        self.last_checksum: int | None = None  # of a record
        self._known = set() if known is None else known
        self._digest = 0
        self._are_pairs = True

    def __len__(self) -> int:
        """Return the number of records added."""
        return len(self.keys)

    def add(self, records: Sequence[EncodedRecord]) -> None:
        """Add records, in order."""
        keys = [record.key for record in records]
        if len(set(keys)) < len(keys) or not self._known.isdisjoint(keys):
            key = next(k for n, k in enumerate(keys) if k in self._known or k in keys[:n])
            raise StoreError(f"the key {key!r} is there twice; each record of a store has its own.")
        checksums = [header_of(record.data, f"record {record.key!r}")[1] for record in records]
        self._known.update(keys)
        for record, checksum in zip(records, checksums, strict=True):
            link = struct.pack("<QQ", self._digest, checksum)
            self._digest = xxhash.xxh3_64_intdigest(link)
            self.keys.append(record.key)
            self.labels.append(record.label)
            self._are_pairs = self._are_pairs and record.is_pair
            self.last_checksum = checksum

    def take_over(self, data: bytes, name: str) -> None:
        """Add a record that an interrupted writer left, verified; `name` is for errors."""
        record = decode_record(data, name, copy=False)
        pair = is_pair(record.sample, record.label)
        self.add([EncodedRecord(record.key, record.label, data, pair)])

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


def packed_columns(columns: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Return the class of each object by each field, as JSON: about 100 bytes for 1,000 objects."""
    packed = {
        name: packed_numbers(values)
        for name, values in columns.items()
        if not len(values) or values.max() < _MOST_CLASSES
    }
    num_objects = max(map(len, columns.values()), default=0)
    return {"num_objects": num_objects, "zlib_base64_u32": packed}


def column_of(index: Index, name: str) -> NDArray[np.int64] | RaggedArray:
    """Return the classes of the records of an index by a field of their objects."""
    labels = index.labels
    none = {"num_objects": 0, "zlib_base64_u32": {}}
    said = from_metadata(index.metadata, COLUMNS, _ObjectColumns, none)
    packed = said.zlib_base64_u32
    if labels is None or name not in (_NAME, *packed):
        columns = [] if labels is None else [_NAME, *sorted(packed)]
        raise ConfigError(
            f"there is no column {name!r}; there are {', '.join(map(repr, columns)) or 'none'}. "
            f"If objects have it, make the dataset with attributes=[{name!r}] or classes=[…], or "
            f"pack it by `penstock pack SRC DST --objects --attributes {name}`."
        )
    if isinstance(labels, np.ndarray):
        labels = RaggedArray(labels, np.arange(len(labels) + 1))
    if name == _NAME:
        values = labels.values
    elif said.num_objects != len(labels.values):
        raise ConfigError(
            f"column {name!r} is that of {said.num_objects:,} objects, and the store has "
            f"{len(labels.values):,}: samples were left out when it was packed. labels_of(dataset, "
            f"get_label=...) reads every sample."
        )
    else:
        values = unpacked_numbers(packed[name], len(labels.values), name)
    is_one_each = len(values) == len(labels) and bool((np.diff(labels.offsets) == 1).all())
    return values if is_one_each else RaggedArray(values, labels.offsets)


def from_metadata(metadata: Mapping[str, Any], name: str, kind: type[T], default: object) -> T:
    """Return what the metadata of a store say by a name of ours."""
    try:
        return msgspec.convert(metadata.get(name, default), kind)
    except msgspec.ValidationError as error:
        raise StoreError(f"the metadata {name!r} of the store are damaged: {error}.") from error


def packed_numbers(numbers: NDArray[np.int64]) -> str:
    """Return numbers from 0 to 2**32 - 1, compressed."""
    data = zlib.compress(np.ascontiguousarray(numbers, "<u4").tobytes())
    return base64.b64encode(data).decode()


def unpacked_numbers(text: Any, count: int, name: str) -> NDArray[np.int64]:  # noqa: ANN401
    """Return the numbers that the metadata of a store have by a name, in new memory."""
    try:
        data = base64.b64decode(text, validate=True)
        raw = zlib.decompressobj().decompress(data, 4 * count + 1)
        if len(raw) != 4 * count:
            raise ValueError(f"they are not of {count} numbers")
    except (TypeError, ValueError, zlib.error) as error:
        raise StoreError(f"the metadata {name!r} of the store are damaged: {error}.") from error
    return np.frombuffer(raw, "<u4").astype(np.int64)
