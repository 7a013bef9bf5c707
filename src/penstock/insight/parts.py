# SPDX-License-Identifier: Apache-2.0
"""Which part of a dataset made of several a sample comes from."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["PartMap"]

_MOST_PARTS: Final = 1000
_DEEPEST: Final = 8  # subsets of subsets
_MOST_CHOSEN: Final = 10_000_000
_MOST_LISTED: Final = 1_000_000  # 40 ms to convert, once


class PartMap:
    """Which part of a dataset made of several an index leads to.

    Known are `ConcatDataset`, torch's and ours, or whatever else has `datasets` and
    `cumulative_sizes`; also below `Subset`, and below datasets that wrap another of the same
    length.
    """

    def __init__(self, ends: NDArray[np.int64], names: Sequence[str]) -> None:
        """Take the index at which each part ends, and what the parts are called."""
        self._ends = ends
        self._chosen: list[NDArray[np.int64]] = []  # indices of subsets, the outermost first
        self.names = tuple(names)

    @classmethod
    def of(cls, dataset: Any) -> Self | None:  # noqa: ANN401 - any dataset
        """Return the map of a dataset; None where it is not made of parts, or does not say.

        Example:
            >>> from penstock.data import ConcatDataset, Subset
            >>> whole = ConcatDataset([[0, 1, 2], range(3)])
            >>> parts = PartMap.of(Subset(whole, [5, 0]))
            >>> parts.names, parts.parts_of(np.array([0, 1]))
            (('datasets[0] (list)', 'datasets[1] (range)'), array([1, 0]))
        """
        try:
            return cls._of(dataset)
        except Exception:  # a dataset may answer anything; then its parts are not known
            return None

    @classmethod
    def _of(cls, dataset: Any) -> Self | None:  # noqa: ANN401
        selections: list[tuple[Any, int, int]] = []
        for _ in range(_DEEPEST):
            parts = getattr(dataset, "datasets", None)
            ends = getattr(dataset, "cumulative_sizes", None)
            if parts is not None and ends is not None:
                if not 2 <= len(parts) <= _MOST_PARTS or len(parts) != len(ends):
                    return None
                names = [_name_of_part(number, part) for number, part in enumerate(parts)]
                found = cls(np.asarray(ends, np.int64), names)
                # Only now, as millions of them take their time.
                found._chosen = [_selection(*selection) for selection in selections]
                return found
            inner = getattr(dataset, "dataset", None)
            if inner is None:
                return None
            if (indices := getattr(dataset, "indices", None)) is not None:
                selections.append((indices, len(dataset), len(inner)))
            elif len(inner) != len(dataset):
                return None
            dataset = inner
        return None

    def parts_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the part that each index leads to; a fresh array.

        Raises:
            IndexError: an index leads out of the dataset.
        """
        for chosen in self._chosen:
            indices = chosen[indices]
        total = int(self._ends[-1])
        indices = np.where(indices < 0, indices + total, indices)
        parts = np.searchsorted(self._ends, indices, side="right")
        if len(parts) and int(parts.max()) >= len(self.names):
            raise IndexError(f"an index is beyond the {total} samples of the parts")
        return parts


def _name_of_part(number: int, part: object) -> str:
    root = getattr(part, "root", None)
    where = ""
    # Nothing with a scheme: an address may hold a password.
    if isinstance(root, (str, os.PathLike)) and "://" not in str(root):
        where = f", {os.fspath(root)!s:.80}"
    return f"datasets[{number}] ({type(part).__name__}{where})"


def _selection(indices: Any, length: int, of_length: int) -> NDArray[np.int64]:  # noqa: ANN401
    """Return which samples a subset has, if that is what its indices say.

    Raises:
        ValueError: they may mean anything else, such as a mask, windows or names.
    """
    is_array = hasattr(indices, "__array__")
    if not (is_array or isinstance(indices, (list, tuple, range))) or len(indices) != length:
        raise ValueError("no list of indices")
    if length > (_MOST_CHOSEN if is_array else _MOST_LISTED):
        raise ValueError("too many to look at")
    found = np.asarray(indices)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError("no indices of single samples")
    if length and not -of_length <= int(found.min()) <= int(found.max()) < of_length:
        raise ValueError("they lead out of the dataset")
    return found.astype(np.int64)
