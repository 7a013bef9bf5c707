# SPDX-License-Identifier: Apache-2.0
"""The index of a store that is being written."""

from __future__ import annotations

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

__all__ = ["IndexBuilder"]


class IndexBuilder:
    """Collects what an index needs while records are written.

    The fingerprint is a hash over the checksums of all records, in order, and the class names: the
    same records have the same one in every kind of store.

    Example:
        >>> from penstock.stores.records import encode_record
        >>> builder = IndexBuilder()
        >>> builder.add([encode_record("a", 1.5, 0), encode_record("b", 2.5, 1)])
        >>> index = builder.index(("cat", "dog"), {})
        >>> list(index.keys), index.labels
        (['a', 'b'], array([0, 1]))
    """

    def __init__(self) -> None:
        """Begin with no record."""
        self.keys: list[str] = []
        self.labels: list[int | tuple[int, ...] | None] = []
        self._digest = 0
        self._are_pairs = True

    def __len__(self) -> int:
        """Return the number of records added."""
        return len(self.keys)

    def add(self, records: Iterable[EncodedRecord]) -> None:
        """Add records, in order."""
        for record in records:
            _, checksum = header_of(record.data, f"record {record.key!r}")
            link = struct.pack("<QQ", self._digest, checksum)
            self._digest = xxhash.xxh3_64_intdigest(link)
            self.keys.append(record.key)
            self.labels.append(record.label)
            self._are_pairs = self._are_pairs and record.is_pair

    def index(self, class_names: Sequence[str], metadata: Mapping[str, Any]) -> Index:
        """Return the index of all records added.

        Raises:
            StoreError: a key is there twice.
        """
        keys = PackedList(self.keys)
        text = "\0".join((str(len(keys)), f"{self._digest:016x}", *class_names))
        index = Index(
            keys,
            labels_from(self.labels),
            tuple(class_names),
            dict(metadata),
            xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass")),
            self._are_pairs and len(keys) > 0,
        )
        twice = index.first_repeated()
        if twice is not None:
            raise StoreError(
                f"the key {twice!r} is there twice; every record of a store has a key of its own."
            )
        return index
