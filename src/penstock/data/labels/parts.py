# SPDX-License-Identifier: Apache-2.0
"""Labels of a dataset that is a part of another, or is made of several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.labels.values import (
    NotLabelsError,
    TextRows,
    numbered,
    rows_of_texts,
    to_labels,
)
from penstock.data.ragged import RaggedArray

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Labels = NDArray[Any] | RaggedArray

__all__ = ["chosen_labels", "joined_labels"]

_TEXTS: Final = "US"
_TWO_KINDS: Final = "some of its datasets have labels that are texts, others numbers"


def joined_labels(found: list[Labels]) -> Labels:
    """Return labels one after the other: a copy, unless there is but one.

    Raises:
        NotLabelsError: some are texts, others numbers, or numbers are beyond int64.
    """
    if any(isinstance(labels, RaggedArray) for labels in found):
        return _joined_rows([_as_rows(labels) for labels in found])
    arrays = [labels for labels in found if isinstance(labels, np.ndarray)]
    if len({array.dtype.kind in _TEXTS for array in arrays}) > 1:
        raise NotLabelsError(_TWO_KINDS)
    if not arrays:
        return np.empty(0, np.int64)
    if np.result_type(*arrays).kind == "f":  # numpy's answer to int64 beside uint64
        arrays = list(map(numbered, arrays))
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def chosen_labels(labels: Labels, indices: Any) -> Labels:  # noqa: ANN401
    """Return the labels at a subset's indices; a view where these are a range.

    Rows of texts are numbered anew, by the texts that are chosen.

    Raises:
        NotLabelsError: indices that are no integers, or out of range.
    """
    if isinstance(labels, TextRows):
        rows = chosen_labels(RaggedArray(labels.values, labels.offsets), indices)
        assert isinstance(rows, RaggedArray)
        return rows_of_texts(labels.names[rows.values], np.diff(rows.offsets))
    if isinstance(indices, range) and indices.step > 0 and 0 <= indices.start <= indices.stop:
        if indices and indices[-1] >= len(labels):
            raise NotLabelsError(f"index {indices[-1]} is out of range for {len(labels)} samples")
        chosen: Labels = labels[indices.start : indices.stop : indices.step]
        return chosen
    positions = to_labels(indices)
    if isinstance(positions, RaggedArray) or positions.dtype.kind not in "iu":
        raise NotLabelsError("its indices are no integers")
    positions = positions.astype(np.int64, copy=False)
    try:
        # numpy's take() is up to twice as fast as an index for what does not fit into caches.
        return labels[positions] if isinstance(labels, RaggedArray) else labels.take(positions)
    except IndexError as error:
        raise NotLabelsError(f"its indices do not fit: {error}") from error


def _as_rows(labels: Labels) -> RaggedArray:
    if isinstance(labels, RaggedArray):
        return labels
    return rows_of_texts(labels, np.ones(len(labels), np.int64))


def _joined_rows(parts: list[RaggedArray]) -> RaggedArray:
    """Join rows; texts are numbered by all parts together."""
    joined = RaggedArray.joined(parts)
    of_texts = [part for part in parts if isinstance(part, TextRows)]
    if not of_texts:
        return joined
    if any(len(part.values) and not isinstance(part, TextRows) for part in parts):
        raise NotLabelsError(_TWO_KINDS)
    names = np.unique(np.concatenate([part.names for part in of_texts]))
    codes = [np.searchsorted(names, part.names)[part.values] for part in of_texts]
    return TextRows(np.concatenate(codes), joined.offsets, names)
