# SPDX-License-Identifier: Apache-2.0
"""Labels as people hand them over: arrays, lists, lists of lists, one-hot rows, tensors."""

from __future__ import annotations

import array
import itertools
import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.packed_list import PackedList
from penstock.data.ragged import RaggedArray

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import ArrayLike, NDArray

__all__ = [
    "NotLabelsError",
    "TextRows",
    "are_paths",
    "as_labels",
    "check_no_columns",
    "numbered",
    "rows_of_texts",
    "to_labels",
]

_FILE_NAME: Final = re.compile(r".+\.[A-Za-z]\w{1,4}")
_KINDS: Final = "biuUS"  # booleans, integers, strings
_ROWS: Final = (list, tuple, set, frozenset, np.ndarray)
_LONGEST: Final = 500  # characters; numpy keeps every text as long as the longest


class NotLabelsError(Exception):
    """Something is no labels; the message says what it is instead."""


class TextRows(RaggedArray):
    """Rows of texts: `values` are their places among the sorted `names`, all of which occur."""

    def __init__(self, values: ArrayLike, offsets: ArrayLike, names: NDArray[np.str_]) -> None:
        """Keep the arrays."""
        super().__init__(values, offsets)
        self.names = names


def as_labels(value: Any) -> NDArray[Any] | RaggedArray | None:  # noqa: ANN401
    """Return labels that were given in any of the usual forms; None if they are none.

    One label per sample: a list, array or tensor of integers, bools or strings, on any device. A
    column of shape (n, 1) counts as one.

    Several per sample: a `RaggedArray`; a list of lists (or arrays), which are taken as class
    numbers or texts; or a two-dimensional array of zeros and ones (or rows of bools), where column
    c stands for class c. Texts in rows are numbered, in their sorted order, by each call for what
    it was given: numbers of two calls are not to be compared. Rows of integers that are all of one
    width above one and hold only 0 and 1 are none of these: they might be either. Rows of one
    entry each are one label per sample.

    Returns:
        Integers, bools or strings of shape (n,), the array itself if one was given; or rows of
        class numbers.

    Example:
        >>> as_labels(["cat", "dog"])
        array(['cat', 'dog'], dtype='<U3')
        >>> list(as_labels([[2, 0], []]))
        [array([2, 0]), array([], dtype=int64)]
        >>> list(as_labels(np.array([[1, 0, 1], [0, 0, 0]])))
        [array([0, 2]), array([], dtype=int64)]
        >>> as_labels([0.5, 1.5]) is None
        True
    """
    try:
        return to_labels(value)
    except NotLabelsError:
        return None


def to_labels(value: Any) -> NDArray[Any] | RaggedArray:  # noqa: ANN401
    """Return what `as_labels` does.

    Raises:
        NotLabelsError: it is none of the forms; the message goes on a sentence "it is ...".
    """
    if isinstance(value, RaggedArray):
        return value
    if isinstance(value, (list, tuple, PackedList)):
        labels = _of_list(value if isinstance(value, list) else list(value))
        is_told = isinstance(labels, RaggedArray) and _is_told(value[0])
        return labels if is_told else check_no_columns(labels)
    if getattr(value, "ndim", 1) > 2:  # before reading what may be a file's
        raise NotLabelsError(f"of shape {tuple(getattr(value, 'shape', ()))}")
    return _of_array(_as_array(value))


def _as_array(value: Any) -> NDArray[Any]:  # noqa: ANN401
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, (range, array.array)) and not hasattr(type(value), "__array__"):
        raise NotLabelsError(f"a {type(value).__qualname__}, not an array or a list")
    try:
        if hasattr(value, "detach") and hasattr(value, "cpu"):  # a tensor
            value = value.detach().cpu()
        return np.asarray(value)
    except Exception as error:
        raise NotLabelsError(f"a {type(value).__qualname__} that is no array: {error}") from error


def _of_array(values: NDArray[Any]) -> NDArray[Any] | RaggedArray:
    if values.ndim == 2:
        return _of_array(values[:, 0]) if values.shape[1] == 1 else _of_one_hot(values)
    if values.ndim != 1:
        raise NotLabelsError(f"of shape {values.shape}")
    if values.dtype.kind in "OT":  # texts of pandas, or of numpy's type for texts of any length
        return to_labels(values.tolist())
    if values.dtype.kind == "f":
        raise NotLabelsError(f"of type {values.dtype}: floats are no classes")
    if values.dtype.kind not in _KINDS:
        raise NotLabelsError(f"of type {values.dtype}, not integers, bools or strings")
    return values


def _of_one_hot(values: NDArray[Any]) -> RaggedArray:
    is_set = values.astype(np.bool_, copy=False) if values.dtype.kind in "biuf" else None
    if is_set is None or not np.array_equal(is_set, values):
        raise NotLabelsError(
            f"of shape {values.shape} with other values than 0 and 1, so not one column per class"
        )
    rows, classes = np.nonzero(is_set)
    return RaggedArray(classes, _offsets(np.bincount(rows, minlength=len(values))))


def _of_list(items: list[Any]) -> NDArray[Any] | RaggedArray:
    if not items:
        return np.empty(0, np.int64)
    kinds = set(map(type, items))
    if all(issubclass(kind, (int, np.integer, np.bool_)) for kind in kinds):
        return _of_array(_integers(items))
    if all(issubclass(kind, str) for kind in kinds):
        if (longest := max(map(len, items))) > _LONGEST:
            raise NotLabelsError(f"a list of texts of up to {longest} characters, not of names")
        return np.array(items, np.str_)
    if all(issubclass(kind, _ROWS) or hasattr(kind, "detach") for kind in kinds):
        return _of_items(items)
    names = sorted(kind.__qualname__ for kind in kinds)
    raise NotLabelsError(f"a list of {' and '.join(names[:4])}")


def _integers(items: list[Any]) -> NDArray[Any]:
    try:
        integers = np.asarray(items)
    except OverflowError:
        integers = np.empty(0, object)
    if integers.dtype.kind not in "biu":  # numpy keeps what is too large as objects, or as floats
        raise NotLabelsError("a list of integers beyond 64 bits")
    return integers


def _of_items(items: list[Any]) -> NDArray[Any] | RaggedArray:
    """Return labels of tensors, arrays or lists: each a single value, or each a row."""
    if any(hasattr(item, "detach") for item in items):
        items = [_as_array(item) if hasattr(item, "detach") else item for item in items]
    dimensions = {item.ndim for item in items if isinstance(item, np.ndarray)}
    if dimensions == {0} and all(isinstance(item, np.ndarray) for item in items):
        return _of_array(np.array([item.item() for item in items]))
    if not dimensions <= {1}:
        raise NotLabelsError(f"a list of arrays of {sorted(dimensions)} dimensions")
    return _of_rows(items)


def _of_rows(rows: list[Any]) -> NDArray[Any] | RaggedArray:
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    if all(isinstance(row, np.ndarray) for row in rows):
        filled = [row for row in rows if len(row)]  # an empty one is often of floats
        flat = _of_array(np.concatenate(filled)) if filled else np.empty(0, np.int64)
    else:
        items = list(itertools.chain.from_iterable(map(_plain, rows)))
        if any(issubclass(kind, _ROWS) for kind in set(map(type, items))):
            raise NotLabelsError("a list of lists of lists")
        flat = _of_list(items)
    if isinstance(flat, RaggedArray):
        raise NotLabelsError("a list of rows of rows")
    if flat.dtype.kind == "b" and len(flat):
        if len(set(counts.tolist())) > 1:
            raise NotLabelsError("rows of bools of different lengths")
        return _of_one_hot(flat.reshape(len(rows), -1))
    if len(counts) and (counts == 1).all():  # a column
        return flat
    return rows_of_texts(flat, counts)


def rows_of_texts(flat: NDArray[Any], counts: NDArray[np.int64]) -> RaggedArray:
    """Return rows of class numbers; `TextRows` where the classes are texts.

    Args:
        flat: The classes of all rows, one row after the other.
        counts: How many each row has.

    Raises:
        NotLabelsError: a number beyond int64.
    """
    if flat.dtype.kind not in "US":
        return RaggedArray(numbered(flat), _offsets(counts))
    names, codes = np.unique(flat, return_inverse=True)
    return TextRows(codes, _offsets(counts), names)


def _is_told(row: Any) -> bool:  # noqa: ANN401
    """Whether rows like it are columns, being bools, or classes, being sets."""
    return (
        isinstance(row, (set, frozenset))
        or str(getattr(row, "dtype", "")).endswith("bool")
        or (
            isinstance(row, (list, tuple)) and len(row) > 0 and isinstance(row[0], (bool, np.bool_))
        )
    )


def check_no_columns(labels: NDArray[Any] | RaggedArray) -> NDArray[Any] | RaggedArray:
    """Return labels as they are, unless they are rows of as many zeros and ones.

    One cannot see whether these are two classes or one column per class, and a wrong guess would
    go unseen.

    Raises:
        NotLabelsError: they are; the message says how to tell which.
    """
    if not isinstance(labels, RaggedArray) or isinstance(labels, TextRows) or len(labels) < 2:
        return labels
    width = int(labels.offsets[1])
    if width < 2 or len(labels.values) != width * len(labels):
        return labels
    if (np.diff(labels.offsets) != width).any() or not np.isin(labels.values, (0, 1)).all():
        return labels
    raise NotLabelsError(
        f"rows of {width} zeros and ones each, which might be columns or classes. If there is a "
        "column for each class, make them an array of two dimensions, `np.asarray(rows)`; if they "
        "are numbers of classes, `penstock.data.RaggedArray.of(rows)`"
    )


def _plain(row: Any) -> Iterable[Any]:  # noqa: ANN401
    if isinstance(row, np.ndarray):
        values: list[Any] = row.tolist()
        return values
    return sorted(row) if isinstance(row, (set, frozenset)) else row


def numbered(values: NDArray[Any]) -> NDArray[np.int64]:
    """Return labels as int64; texts by their places among the sorted ones of this call.

    Raises:
        NotLabelsError: a number beyond int64.
    """
    if values.dtype.kind in "US":
        return np.unique(values, return_inverse=True)[1].astype(np.int64, copy=False)
    if values.dtype.kind == "u" and len(values) and values.max() > np.iinfo(np.int64).max:
        raise NotLabelsError("integers beyond int64")
    return values.astype(np.int64, copy=False)


def are_paths(labels: Any) -> bool:  # noqa: ANN401
    """Whether texts, some of them spread over all, are names of files: of masks or annotations.

    A list, too, of which nothing but those is looked at: as an array it might not fit in memory.
    """
    texts = labels.names if isinstance(labels, TextRows) else labels
    if isinstance(texts, RaggedArray) or not isinstance(texts, (np.ndarray, list, tuple)):
        return False
    some = list(texts[:: max(1, len(texts) // 16)])
    return len(some) > 0 and all(
        isinstance(text, str) and _FILE_NAME.fullmatch(text) for text in some
    )


def _offsets(counts: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets
