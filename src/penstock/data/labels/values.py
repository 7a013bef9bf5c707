# SPDX-License-Identifier: Apache-2.0
"""Labels in the forms that users have: arrays, lists, lists of lists, one-hot rows, tensors."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from penstock.data.packed_list import PackedList
from penstock.data.ragged import RaggedArray

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Labels: TypeAlias = NDArray[Any] | RaggedArray

Objects = Literal["all", "first", "rarest"]

_FILE_NAME: Final = re.compile(r".+\.[A-Za-z]\w{1,4}")
_LONGEST: Final = 500  # characters; numpy keeps every text as long as the longest


class NotLabelsError(Exception):
    """Something is no labels; the message says what it is instead, after "it is"."""


class TextRows(RaggedArray):
    """Rows of texts: `values` are their places among the sorted `names`, all of which occur."""

    def __init__(self, values: ArrayLike, offsets: ArrayLike, names: NDArray[np.str_]) -> None:
        """Keep the arrays."""
        super().__init__(values, offsets)
        self.names = names


def to_labels(value: Any) -> Labels:  # noqa: ANN401
    """Return labels that were given in any of the usual forms.

    One label per sample: a list, array or tensor of integers, bools or strings, on any device. A
    column of shape (n, 1) counts as one. Several per sample: a `RaggedArray`; a list of lists or
    arrays of class numbers or texts; or a two-dimensional array of zeros and ones (or rows of
    bools), where column c stands for class c. Texts in rows are numbered in their sorted order.
    Rows of one entry each are one label per sample.

    Raises:
        NotLabelsError: it is none of the forms.
    """
    if isinstance(value, RaggedArray):
        return value
    if isinstance(value, (list, tuple, PackedList)):
        return _of_list(list(value))
    if not isinstance(value, range) and not hasattr(type(value), "__array__"):
        raise NotLabelsError(f"a {type(value).__qualname__}, not an array or a list")
    if getattr(value, "ndim", 1) > 2:  # before reading what may be a file's
        raise NotLabelsError(f"of shape {tuple(value.shape)}")
    return _of_array(_as_array(value))


def _as_array(value: Any) -> NDArray[Any]:  # noqa: ANN401
    try:
        return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except Exception as error:  # of a tensor of a type that numpy has not, say
        raise NotLabelsError(f"a {type(value).__qualname__} that is no array: {error}") from error


def _of_array(values: NDArray[Any]) -> Labels:
    if values.ndim == 2:
        return _of_array(values[:, 0]) if values.shape[1] == 1 else _of_one_hot(values)
    if values.ndim != 1:
        raise NotLabelsError(f"of shape {values.shape}")
    if values.dtype.kind in "OT":  # texts of pandas, or of numpy's type for texts of any length
        return _of_list(values.tolist())
    if values.dtype.kind not in "biuUS":
        raise NotLabelsError(f"of type {values.dtype}, not integers, bools or strings")
    return values


def _of_one_hot(values: NDArray[Any]) -> RaggedArray:
    if values.dtype.kind not in "biuf" or not np.isin(values, (0, 1)).all():
        raise NotLabelsError(f"of shape {values.shape} with other values than 0 and 1")
    return RaggedArray.from_counts([np.nonzero(values)[1]], np.count_nonzero(values, axis=1))


def _of_list(items: list[Any]) -> Labels:
    kinds = set(map(type, items))
    if all(issubclass(kind, (int, np.integer, np.bool_)) for kind in kinds):
        integers = np.asarray(items) if items else np.empty(0, np.int64)
        if integers.dtype.kind not in "biu":  # numpy keeps what is too large as objects or floats
            raise NotLabelsError("a list of integers beyond 64 bits")
        return integers
    if all(issubclass(kind, str) for kind in kinds):
        if (longest := max(map(len, items))) > _LONGEST:
            raise NotLabelsError(f"a list of texts of up to {longest} characters, not of names")
        return np.array(items, np.str_)
    names = " and ".join(sorted(kind.__qualname__ for kind in kinds)[:4])
    rows = (list, tuple, np.ndarray)
    if not all(issubclass(kind, rows) or hasattr(kind, "detach") for kind in kinds):
        raise NotLabelsError(f"a list of {names}")
    arrays = [_as_array(item) for item in items]
    dimensions = {array.ndim for array in arrays}
    if dimensions == {0}:
        return _of_array(np.array([array.item() for array in arrays]))
    if dimensions != {1} or any(array.dtype.kind == "O" for array in arrays):
        raise NotLabelsError(f"a list of {names}, not of rows of classes")
    return _of_rows(arrays)


def _of_rows(rows: list[NDArray[Any]]) -> Labels:
    counts = np.array(list(map(len, rows)))
    filled = [row for row in rows if len(row)]  # an empty one is of floats
    flat = _of_array(np.concatenate(filled)) if filled else np.empty(0, np.int64)
    assert isinstance(flat, np.ndarray)
    if flat.dtype.kind == "b":
        if len(set(counts.tolist())) > 1:
            raise NotLabelsError("rows of bools of different lengths")
        return _of_one_hot(flat.reshape(len(rows), -1))
    return flat if (counts == 1).all() else check_no_columns(to_rows(flat, counts))


def to_rows(flat: NDArray[Any], counts: NDArray[np.int64]) -> RaggedArray:
    """Return rows of `counts` class numbers each; `TextRows` where the classes are texts."""
    rows = RaggedArray.from_counts([numbered(flat)], counts)
    if flat.dtype.kind in "US":
        return TextRows(rows.values, rows.offsets, np.unique(flat))
    return rows


def check_no_columns(labels: RaggedArray) -> RaggedArray:
    """Return labels as they are, unless they are rows of as many zeros and ones."""
    # Whether these are two classes or one column per class cannot be seen, and a wrong guess would
    # go unseen.
    widths = set(np.diff(labels.offsets).tolist())
    is_even = len(labels) > 1 and len(widths) == 1 and max(widths) > 1
    if isinstance(labels, TextRows) or not is_even or not np.isin(labels.values, (0, 1)).all():
        return labels
    raise NotLabelsError(
        f"rows of {max(widths)} zeros and ones each, which might be columns or classes. If there "
        "is a column for each class, make them an array of two dimensions, `np.asarray(rows)`; if "
        "they are numbers of classes, `penstock.data.RaggedArray.of(rows)`"
    )


def numbered(values: NDArray[Any]) -> NDArray[np.int64]:
    """Return labels as int64; texts by their places among the sorted ones of this call."""
    if values.dtype.kind in "US":
        return np.unique(values, return_inverse=True)[1].astype(np.int64, copy=False)
    if values.dtype.kind == "u" and len(values) and values.max() > np.iinfo(np.int64).max:
        raise NotLabelsError("integers beyond int64")
    return values.astype(np.int64, copy=False)


def are_paths(labels: Any) -> bool:  # noqa: ANN401
    """Return whether texts, some of them spread over all, are names of files, as of masks."""
    # Of a list, too, only those are looked at: as an array it might not fit in memory.
    texts = labels.names if isinstance(labels, TextRows) else labels
    if isinstance(texts, RaggedArray) or not isinstance(texts, (np.ndarray, list, tuple)):
        return False
    some = list(texts[:: max(1, len(texts) // 16)])
    return len(some) > 0 and all(
        isinstance(text, str) and _FILE_NAME.fullmatch(text) for text in some
    )


# Labels of a dataset that is a part of another, or is made of several.


def chosen_labels(labels: Labels, indices: Any) -> Labels:  # noqa: ANN401
    """Return the labels at a subset's indices; a view where these are a range.

    Rows of texts are numbered anew, by the texts that are chosen.
    """
    try:
        if isinstance(labels, TextRows):
            rows = RaggedArray(labels.values, labels.offsets)[_positions(indices)]
            return to_rows(labels.names[rows.values], np.diff(rows.offsets))
        if isinstance(indices, range) and 0 <= indices.start <= indices.stop <= len(labels):
            return labels[indices.start : indices.stop : indices.step]
        # numpy's take() is up to twice as fast as an index for what does not fit into caches.
        places = _positions(indices)
        return labels[places] if isinstance(labels, RaggedArray) else labels.take(places)
    except IndexError as error:
        raise NotLabelsError(f"its indices do not fit: {error}") from error


def _positions(indices: Any) -> NDArray[np.int64]:  # noqa: ANN401
    positions = to_labels(indices)
    if isinstance(positions, RaggedArray) or positions.dtype.kind not in "iu":
        raise NotLabelsError("its indices are no integers")
    return positions.astype(np.int64, copy=False)


def joined_labels(found: list[Labels]) -> Labels:
    """Return labels one after the other: a copy, unless there is but one."""
    of_texts = {
        isinstance(part, TextRows) or (isinstance(part, np.ndarray) and part.dtype.kind in "US")
        for part in found
        if not isinstance(part, RaggedArray) or len(part.values)
    }
    if len(of_texts) > 1:
        raise NotLabelsError("texts in some of its datasets and numbers in others")
    arrays = [labels for labels in found if isinstance(labels, np.ndarray)]
    if len(arrays) == len(found):
        if not arrays:
            return np.empty(0, np.int64)
        if np.result_type(*arrays).kind == "f":  # numpy's answer to int64 beside uint64
            arrays = list(map(numbered, arrays))
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    parts = [
        part if isinstance(part, RaggedArray) else to_rows(part, np.ones(len(part), np.int64))
        for part in found
    ]
    counts = np.concatenate([np.diff(part.offsets) for part in parts])
    texts = [part.names[part.values] for part in parts if isinstance(part, TextRows)]
    if texts:
        return to_rows(np.concatenate(texts), counts)
    return RaggedArray.from_counts([part.values for part in parts], counts)


def labels_by_objects(labels: Labels, objects: Objects) -> Labels:
    """Return the labels of samples by their "first" object, or the "rarest", which the fewest have.

    One class each, its number as before; rows of one or none where some samples have none.
    """
    if objects == "all" or not isinstance(labels, RaggedArray):
        return labels
    counts = np.diff(labels.offsets)
    values = labels.values
    if objects == "rarest":
        rows = np.repeat(np.arange(len(labels)), counts)
        classes, codes = np.unique(values, return_inverse=True)
        once = np.unique(np.stack((rows, codes)), axis=1)[1]
        num_samples = np.bincount(once, minlength=len(classes))
        values = values[np.lexsort((codes, num_samples[codes], rows))]
    has_one = counts > 0
    chosen = values[labels.offsets[:-1][has_one]]
    return chosen if has_one.all() else RaggedArray.from_counts([chosen], has_one)
