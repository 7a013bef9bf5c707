# SPDX-License-Identifier: Apache-2.0
"""`ClassCodes`: which classes occur among labels, and which of them each label is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ClassCodes"]

_BLOCK: Final = 1 << 20  # labels looked at at a time: copies of all of them would double the memory
# Whole numbers that span no more than so many, or than there are labels, are looked up in a table,
# not searched for.
_LEAST_TABLE: Final = 1 << 16
_FEW: Final = 1 << 12  # classes that are searched as fast in any order


class ClassCodes:
    """The classes that occur, and the position among them of any label.

    Attributes:
        classes: The labels' own values, each once, ascending, shape (classes,). Integers are uint64
            if the labels are, and int64 otherwise; bools and strings as the labels are.
        dtype: The smallest type of integers that holds every position, and one more.

    Concurrency:
        Any number of threads may use one.

    Example:
        >>> codes = ClassCodes(np.array([7, -3, 7]))
        >>> codes.classes, codes.of(np.array([7, 7, -3]))
        (array([-3,  7]), array([1, 1, 0], dtype=uint8))
    """

    def __init__(self, labels: NDArray[Any]) -> None:
        """Find the classes.

        Args:
            labels: Integers, bools or strings, shape (n,), n above 0.
        """
        is_bool = labels.dtype.kind == "b"
        labels = _as_numbers(labels)
        self._table: NDArray[np.unsignedinteger[Any]] | None = None
        if labels.dtype.kind in "iu":
            self._least, most = int(labels.min()), int(labels.max())
            if most - self._least < max(_LEAST_TABLE, len(labels)):
                self._make_table(labels, most)
        if self._table is None:
            self.classes: NDArray[Any] = _distinct(labels)
        if is_bool:
            self.classes = self.classes.astype(np.bool_)
        self.dtype: np.dtype[Any] = np.min_scalar_type(len(self.classes))

    def _make_table(self, labels: NDArray[Any], most: int) -> None:
        occurs = np.zeros(most - self._least + 1, np.bool_)
        for start in range(0, len(labels), _BLOCK):
            occurs[self._above_least(labels[start : start + _BLOCK])] = True
        above_least = np.flatnonzero(occurs)
        kind = _wide(labels.dtype)
        self.classes = above_least.astype(kind) + kind.type(self._least)
        self._table = np.cumsum(occurs, dtype=np.min_scalar_type(len(above_least)))
        self._table -= 1  # the least one occurs, so all were 1 or more

    def of(self, labels: NDArray[Any]) -> NDArray[np.unsignedinteger[Any]]:
        """Return the position of each label in `classes`: a fresh array of type `dtype`.

        Args:
            labels: Some of those that were given, shape (n,).
        """
        labels = _as_numbers(labels)
        codes = np.empty(len(labels), self.dtype)
        for start in range(0, len(labels), _BLOCK):
            block = labels[start : start + _BLOCK]
            codes[start : start + _BLOCK] = self._of_block(block)
        return codes

    def _of_block(self, labels: NDArray[Any]) -> NDArray[np.integer[Any]]:
        if self._table is not None:
            return self._table[self._above_least(labels)]
        if len(self.classes) <= _FEW:
            return np.searchsorted(self.classes, labels)
        # No cache holds so many classes, but neighbours are found side by side.
        order = np.argsort(labels)
        codes = np.empty(len(labels), np.int64)
        codes[order] = np.searchsorted(self.classes, labels[order])
        return codes

    def _above_least(self, labels: NDArray[Any]) -> NDArray[np.int64]:
        """How far labels are above the least one, which may be beyond what their type holds."""
        if _wide(labels.dtype) == np.uint64:
            return (labels - np.uint64(self._least)).astype(np.int64)
        return labels.astype(np.int64) - self._least


def _as_numbers(labels: NDArray[Any]) -> NDArray[Any]:
    return labels.view(np.uint8) if labels.dtype.kind == "b" else labels


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type of 8 bytes that holds all integers of a type."""
    return np.dtype(np.uint64 if dtype.kind == "u" and dtype.itemsize == 8 else np.int64)


def _distinct(labels: NDArray[Any]) -> NDArray[Any]:
    """Return the values that occur, ascending: integers in the wide type."""
    if labels.dtype.kind not in "iu":
        return np.unique(labels)
    blocks = [labels[start : start + _BLOCK] for start in range(0, len(labels), _BLOCK)]
    parts = [_distinct_integers(block.astype(_wide(labels.dtype))) for block in blocks]
    return _distinct_integers(np.concatenate(parts))


def _distinct_integers(values: NDArray[Any]) -> NDArray[Any]:
    """Return the values that occur, ascending; sorts what was given."""
    # np.unique hashes integers first, and takes ten times as long where most of them differ.
    values.sort()
    is_first = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=is_first[1:])
    return np.asarray(values[is_first])
