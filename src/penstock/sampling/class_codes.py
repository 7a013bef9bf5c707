# SPDX-License-Identifier: Apache-2.0
"""`ClassCodes`: which classes occur among labels, and which of them each label is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ClassCodes"]

_BLOCK: Final = 1 << 20  # labels looked at at a time: copies of all of them would double the memory
# Whole numbers that span no more than so many, or so many times the labels, are looked up in a
# table, not searched for.
_LEAST_TABLE: Final = 1 << 16
_TABLE_PER_LABEL: Final = 4


class ClassCodes:
    """The classes that occur, and the position among them of any label.

    Attributes:
        classes: The labels' own values, each once, ascending, shape (classes,): integers, bools
            or strings.
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
        self._table: NDArray[np.int64] | None = None
        if labels.dtype.kind in "iu":
            self._least, most = int(labels.min()), int(labels.max())
            if most - self._least < max(_LEAST_TABLE, _TABLE_PER_LABEL * len(labels)):
                self._make_table(labels, most)
        if self._table is None:
            self.classes: NDArray[Any] = np.unique(labels)
        if is_bool:
            self.classes = self.classes.astype(np.bool_)
        self.dtype: np.dtype[Any] = np.min_scalar_type(len(self.classes))

    def _make_table(self, labels: NDArray[Any], most: int) -> None:
        occurs = np.zeros(most - self._least + 1, np.bool_)
        for start in range(0, len(labels), _BLOCK):
            occurs[self._above_least(labels[start : start + _BLOCK])] = True
        kind = np.uint64 if labels.dtype == np.uint64 else np.int64
        self.classes = np.flatnonzero(occurs).astype(kind) + kind(self._least)
        self._table = np.cumsum(occurs, dtype=np.int64) - 1

    def of(self, labels: NDArray[Any]) -> NDArray[np.unsignedinteger[Any]]:
        """Return the position of each label in `classes`: a fresh array of type `dtype`.

        Args:
            labels: Some of those that were given, shape (n,).
        """
        labels = _as_numbers(labels)
        codes = np.empty(len(labels), self.dtype)
        for start in range(0, len(labels), _BLOCK):
            block = labels[start : start + _BLOCK]
            if self._table is None:
                codes[start : start + _BLOCK] = np.searchsorted(self.classes, block)
            else:
                codes[start : start + _BLOCK] = self._table[self._above_least(block)]
        return codes

    def _above_least(self, labels: NDArray[Any]) -> NDArray[np.int64]:
        """How far labels are above the least one, which may be beyond what their type holds."""
        if labels.dtype == np.uint64:
            return (labels - np.uint64(self._least)).astype(np.int64)
        return labels.astype(np.int64) - self._least


def _as_numbers(labels: NDArray[Any]) -> NDArray[Any]:
    return labels.view(np.uint8) if labels.dtype.kind == "b" else labels
