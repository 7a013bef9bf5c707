# SPDX-License-Identifier: Apache-2.0
"""A user's dataset as the store that `penstock pack` would make of it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.data.labels.known import known_labels
from penstock.data.packed_list import PackedList
from penstock.data.ragged import RaggedArray
from penstock.stores.index import Index, labels_from
from penstock.stores.pack_source import pack_source
from penstock.stores.records import decode_record
from penstock.stores.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.stores.records import Record

__all__ = ["DatasetStore"]


class DatasetStore(Store):
    """The samples of a dataset, each encoded when it is asked for.

    Example:
        >>> store = DatasetStore([("a cat", 0), ("a dog", 1)], "mine:texts")
        >>> store.labels, store.get_many([1])
        (array([0, 1]), [Record(key='1', label=1, sample=('a dog', 1))])
    """

    def __init__(self, dataset: Any, name: str) -> None:  # noqa: ANN401
        """Take a dataset.

        Args:
            dataset: With `__len__` and `__getitem__`.
            name: As it was named on the command line.

        Raises:
            ConfigError: it has not both.
        """
        self._dataset = dataset
        self._name = name
        self._source = pack_source(dataset, resize=None, quality=None, limit=None)

    @property
    def address(self) -> str:
        """The name."""
        return self._name

    def _load_index(self) -> Index:
        """Return the labels that the dataset knows; otherwise all samples are read for them."""
        labels = known_labels(self._dataset)
        if isinstance(labels, RaggedArray):  # copies: an index's own are made read-only
            of_all: Any = RaggedArray(labels.values.copy(), labels.offsets.copy())
        elif labels is not None and labels.dtype.kind in "biu":
            of_all = np.array(labels, np.int64)
        else:
            of_all = labels_from([self._source[n].label for n in range(len(self._source))])
        keys = PackedList([str(n) for n in range(len(self._source))])
        return Index(keys, of_all, self._source.class_names, self._source.metadata)

    @contextlib.contextmanager
    def _read(self, positions: NDArray[Any], *, copy: bool) -> Iterator[list[Record]]:
        encoded = [self._source[position] for position in positions.tolist()]
        yield [decode_record(record.data, f"sample {record.key!r}") for record in encoded]
