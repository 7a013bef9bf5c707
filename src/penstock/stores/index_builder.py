# SPDX-License-Identifier: Apache-2.0
"""The index of a store that is being written."""

from __future__ import annotations

import array
import struct
from typing import TYPE_CHECKING, Any

import xxhash

from penstock.data.packed_list import PackedList
from penstock.errors import StoreError
from penstock.stores.index import Index, labels_from
from penstock.stores.records import header_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.stores.records import EncodedRecord

__all__ = ["IndexBuilder", "check_class_names", "repeated"]


class IndexBuilder:
    """Collects what an index needs while records are written.

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
