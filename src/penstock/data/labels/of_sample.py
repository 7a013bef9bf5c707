# SPDX-License-Identifier: Apache-2.0
"""The label within one sample, and the labels of many samples as arrays."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from penstock.data.labels.parts import chosen_labels
from penstock.data.labels.values import NotLabelsError, TextRows, numbered, rows_of_texts, to_labels
from penstock.data.ragged import RaggedArray

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

__all__ = ["COLUMNS_HINT", "Found", "ReadLabels", "as_found", "label_of_sample"]

Found: TypeAlias = int | str | tuple[int, ...] | tuple[str, ...]
"""A label as it comes from a worker: one class or several, by number or name."""

COLUMNS_HINT: Final = (
    ": if it has a number for each class, give get_label=lambda sample: np.asarray(sample[-1], "
    "bool)"
)
"""What to do where a sample's label is a row of zeros and ones."""

_KEYS: Final = ("labels", "label", "targets", "target")


def label_of_sample(sample: Any, column: str | int | None = None) -> Found:  # noqa: ANN401
    """Return the label of a sample by the usual rules.

    It is the last of a tuple or list; in a dict what is called "labels", "label", "targets" or
    "target". A tuple may end in such a dict. A label is an integer, a bool or a string, also as an
    array or tensor without dimensions; or a row of integers or strings: one for each object.

    Args:
        sample: As the dataset gives it.
        column: The key in a dict, or the place in a tuple, if the user said it.

    Raises:
        NotLabelsError: there is none; the message goes on a sentence about the sample.

    Example:
        >>> label_of_sample((np.zeros((2, 2)), np.int64(7)))
        7
        >>> label_of_sample({"image": b"", "labels": [3, 3]})
        (3, 3)
    """
    if isinstance(sample, Mapping):
        return as_found(_of_dict(sample, column))
    if not isinstance(sample, (tuple, list)):
        raise NotLabelsError(f"is {_kind(sample)}, neither a pair nor a dict")
    if isinstance(column, int):
        if not -len(sample) <= column < len(sample):
            raise NotLabelsError(
                f"is a {type(sample).__name__} of {len(sample)}, without [{column}]"
            )
        return as_found(sample[column])
    if len(sample) < 2 and not (sample and isinstance(sample[-1], Mapping)):
        raise NotLabelsError(f"is a {type(sample).__name__} of {len(sample)}, not a pair")
    last = sample[-1]
    if isinstance(last, Mapping):
        return as_found(_of_dict(last, column))
    if column is not None:  # the last entry is something else
        raise NotLabelsError(f"is a {type(sample).__name__} of {len(sample)}, without {column!r}")
    return as_found(last)


def _of_dict(sample: Mapping[Any, Any], column: str | int | None) -> Any:  # noqa: ANN401
    for key in _KEYS if column is None else (column,):
        if key in sample:
            return sample[key]
    wanted = " or ".join(map(repr, _KEYS)) if column is None else repr(column)
    raise NotLabelsError(f"is a dict of {sorted(map(str, sample))[:8]}, without {wanted}")


def as_found(label: Any) -> Found:  # noqa: ANN401
    """Return a label as a plain number, text or tuple of either.

    A row of bools, one for each class, gives the places of the true ones.

    Raises:
        NotLabelsError: it is none; the message goes on a sentence about the sample.
    """
    if isinstance(label, str):
        return str(label)
    if isinstance(label, (int, np.integer, np.bool_)):
        return int(label)
    array = _as_array(label)
    if array.ndim == 0 and array.dtype.kind in "biuU":
        return str(array) if array.dtype.kind == "U" else int(array)
    if array.ndim != 1 or (array.dtype.kind not in "biuU" and len(array)):
        hint = COLUMNS_HINT if array.ndim == 1 and np.isin(array, (0, 1)).all() else ""
        raise NotLabelsError(f"{_no_label(label)} ({array.dtype}, shape {array.shape}){hint}")
    if array.dtype.kind == "b":
        array = np.flatnonzero(array)
    return tuple(array.tolist())


def _as_array(label: Any) -> NDArray[Any]:  # noqa: ANN401
    try:
        if hasattr(label, "detach") and hasattr(label, "cpu"):
            label = label.detach().cpu()
        array = np.asarray(label)
    except Exception as error:
        raise NotLabelsError(_no_label(label)) from error
    if array.dtype.kind == "O" or (isinstance(label, (list, tuple)) and _is_mixed(label, array)):
        raise NotLabelsError(_no_label(label))
    return array


def _is_mixed(label: Sequence[Any], array: NDArray[Any]) -> bool:
    """Whether numpy made texts of what are not all texts."""
    return array.dtype.kind == "U" and not all(isinstance(item, str) for item in label)


def _no_label(value: object) -> str:
    return f"has {_kind(value)} where its label should be"


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__qualname__}"


class ReadLabels(NamedTuple):
    """The labels of samples, as arrays.

    Attributes:
        labels: int64, shape (samples,); or a `RaggedArray` where samples have several.
        names: The texts that became numbers, sorted, each of which occurs; None if labels were
            numbers.
    """

    labels: NDArray[np.int64] | RaggedArray
    names: NDArray[np.str_] | None

    @classmethod
    def of(cls, found: Sequence[Found], name: Callable[[int], str]) -> ReadLabels:
        """Return labels as arrays; names become their places among the sorted ones.

        Args:
            found: One label for each sample.
            name: Says what a sample is called, for the message.

        Raises:
            NotLabelsError: labels of several kinds, or numbers that are too large.
        """
        _check_alike(found, name)
        if not found or not isinstance(found[0], tuple):
            labels = to_labels(list(found))
            assert isinstance(labels, np.ndarray)
            return cls._of_flat(labels, None)
        counts = np.fromiter(map(len, found), np.int64, len(found))  # type: ignore[arg-type]
        flat = to_labels(list(itertools.chain.from_iterable(found)))  # type: ignore[arg-type]
        assert isinstance(flat, np.ndarray)
        return cls._of_flat(flat, counts)

    @classmethod
    def _of_flat(cls, flat: NDArray[Any], counts: NDArray[np.int64] | None) -> ReadLabels:
        """Return rows of these lengths; one label each where that is all they have."""
        if counts is None or (counts == 1).all():
            return cls(numbered(flat), np.unique(flat) if flat.dtype.kind in "US" else None)
        rows = rows_of_texts(flat, counts)
        return cls(rows, rows.names if isinstance(rows, TextRows) else None)

    def chosen(self, indices: NDArray[np.int64]) -> ReadLabels:
        """Return the labels of these samples only; texts are numbered among those that occur."""
        labels = chosen_labels(self.labels, indices)
        values = labels.values if isinstance(labels, RaggedArray) else labels
        flat = values if self.names is None else self.names[values]
        counts = np.diff(labels.offsets) if isinstance(labels, RaggedArray) else None
        return self._of_flat(flat, counts)

    def agree(self, positions: Sequence[int], found: Sequence[Found]) -> bool:
        """Return whether the samples at `positions` have the labels `found`."""
        mine = [self._found(position) for position in positions]
        return mine == [
            one[0]
            if isinstance(one, tuple) and len(one) == 1 and isinstance(self.labels, np.ndarray)
            else one
            for one in found
        ]

    def _found(self, position: int) -> Found:
        label = self.labels[position].tolist()
        if self.names is None:
            return tuple(label) if isinstance(label, list) else label
        names = self.names[label].tolist()
        return tuple(names) if isinstance(names, list) else names


def _check_alike(found: Sequence[Found], name: Callable[[int], str]) -> None:
    """Raise if labels differ in kind."""
    first_of: dict[str, int] = {}
    for position, label in enumerate(found):
        first_of.setdefault(_kind_of(label), position)
    if first_of.keys() & {"texts", "numbers"}:
        first_of.pop("nothing", None)  # a sample may have no object
    if len(first_of) > 1:
        told = ", ".join(f"that of {name(k)} is {found[k]!r}" for k in first_of.values())
        raise NotLabelsError(f"labels are of several kinds: {told}")


def _kind_of(label: Found) -> str:
    if not isinstance(label, tuple):
        return "a text" if isinstance(label, str) else "a number"
    if not label:
        return "nothing"
    return "texts" if isinstance(label[0], str) else "numbers"
