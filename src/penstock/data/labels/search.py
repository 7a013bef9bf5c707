# SPDX-License-Identifier: Apache-2.0
"""Where a dataset keeps its labels: attributes, columns, and the datasets that it is made of."""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.labels.columns import has_columns, labels_of_column
from penstock.data.labels.parts import chosen_labels, joined_labels
from penstock.data.labels.values import NotLabelsError, are_paths, as_labels, to_labels
from penstock.data.packed_list import PackedList
from penstock.data.ragged import RaggedArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Labels = NDArray[Any] | RaggedArray

__all__ = ["LabelSearch", "is_iterable", "length_of"]

_ATTRIBUTES: Final = ("labels", "targets", "_labels")
_PAIRS: Final = ("samples", "_samples", "imgs")  # of (path, class), as torchvision has them
_PARTS: Final = ("labels", "label", "targets", "target")  # of a stack, by name
_DEEPEST: Final = 32  # datasets made of datasets
_MOST_REASONS: Final = 5


class LabelSearch:
    """One look for the labels of a dataset; it remembers why they were not found.

    Attributes:
        reasons: What was found that is no answer, as parts of a sentence.
    """

    def __init__(self, column: str | int | None = None) -> None:
        """Look for nothing yet.

        Args:
            column: The name that the labels have, if the user said it: of an attribute, a column,
                or a part of a stack; or the position among tensors, arrays or stacked datasets.
        """
        self._column = column
        self._path: set[int] = set()
        self.reasons: list[str] = []

    def find(self, dataset: Any) -> Labels | None:  # noqa: ANN401
        """Return the labels, one per sample, or None; no sample is read."""
        length = length_of(dataset)
        if length is None or is_iterable(dataset) or id(dataset) in self._path:
            return None
        if len(self._path) >= _DEEPEST:
            return None
        self._path.add(id(dataset))
        try:
            labels = self._look(dataset, length)
            if labels is not None and len(labels) != length:
                raise NotLabelsError(f"there are {len(labels)} labels for {length} samples")
        except NotLabelsError as error:
            self._note(dataset, str(error))
            return None
        finally:
            self._path.discard(id(dataset))
        return labels

    def report(self) -> str:
        """Return what was looked for, and what was found instead."""
        if self._column is not None:
            looked = f"nothing called {self._column!r} holds them"
        else:
            names = ", ".join(f"`{name}`" for name in (*_ATTRIBUTES, *_PAIRS))
            looked = f"it has none of the attributes {names}, nor a method `get_labels()`"
        if not self.reasons:
            return looked
        return f"{looked}, that tells them ({'; '.join(self.reasons[:_MOST_REASONS])})"

    def _note(self, dataset: object, reason: str) -> None:
        self.reasons.append(f"in {type(dataset).__qualname__}: {reason}")

    def _look(self, dataset: Any, length: int) -> Labels | None:  # noqa: ANN401
        for source in (self._attribute, self._pairs, self._method):
            labels = source(dataset, length)
            if labels is not None:
                return labels
        if has_columns(dataset):
            wanted = None if self._column is None else str(self._column)
            return labels_of_column(dataset, wanted)
        return self._of_parts(dataset, length)

    # What the dataset says itself.

    def _attribute(self, dataset: Any, length: int) -> Labels | None:  # noqa: ANN401
        names = _ATTRIBUTES if self._column is None else (str(self._column),)
        for name in names:
            value = _get(dataset, name)
            if value is None or callable(value):
                continue
            try:
                labels = to_labels(value)
            except NotLabelsError as error:
                self._note(dataset, f"`{name}` is {error}")
                continue
            if are_paths(labels):
                self._note(dataset, f"`{name}` names files")
                continue
            self._check_lengths(dataset, name, len(labels), length)
            return labels
        return None

    def _check_lengths(self, dataset: Any, name: str, count: int, length: int) -> None:  # noqa: ANN401
        """Raise unless the labels fit the dataset, and so does what else it keeps of the kind.

        Properties are left alone: they may build a list of millions.
        """
        kept = getattr(dataset, "__dict__", {})
        counts = {other: length_of(kept.get(other)) for other in (*_ATTRIBUTES, *_PAIRS)}
        counts = {other: size for other, size in counts.items() if size is not None}
        counts[name] = count
        if any(size != length for size in counts.values()):
            told = ", ".join(f"`{other}` has {size}" for other, size in counts.items())
            raise NotLabelsError(f"{told} entries, for {length} samples")

    def _pairs(self, dataset: Any, length: int) -> Labels | None:  # noqa: ANN401
        if self._column is not None:
            return None
        for name in _PAIRS:
            pairs = _get(dataset, name)
            if not isinstance(pairs, (list, tuple, PackedList)) or not _is_pair(pairs):
                continue
            self._check_lengths(dataset, name, len(pairs), length)
            try:
                return to_labels(list(map(operator.itemgetter(1), pairs)))
            except (NotLabelsError, LookupError, TypeError):
                self._note(dataset, f"`{name}` does not hold pairs of a path and a class")
        return None

    def _method(self, dataset: Any, length: int) -> Labels | None:  # noqa: ANN401
        method = _get(dataset, "get_labels") if self._column is None else None
        if not callable(method):
            return None
        try:
            return to_labels(method())
        except NotLabelsError as error:
            self._note(dataset, f"what `get_labels()` returns is {error}")
        except Exception as error:
            self._note(dataset, f"`get_labels()` failed with {type(error).__name__}: {error}")
        return None

    # What the datasets say that it is made of.

    def _of_parts(self, dataset: Any, length: int) -> Labels | None:  # noqa: ANN401
        parts = _get(dataset, "datasets")
        if isinstance(parts, (list, tuple)) and _is_concatenation(dataset, parts):
            return self._joined(parts)
        if parts is not None and _is_a(dataset, "StackDataset"):
            return self._stacked(parts, length)
        for kind, name in (("TensorDataset", "tensors"), ("ArrayDataset", "arrays")):
            if _is_a(dataset, kind):
                return self._of_arrays(getattr(dataset, name))
        inner = _get(dataset, "dataset")
        if inner is None:
            return None
        indices = _get(dataset, "indices")
        if indices is None:  # a wrapper: of the same length, and in no order of its own
            is_same = length_of(inner) == length and hasattr(dataset, "__getitem__")
            return self.find(inner) if is_same and not _reorders(dataset, length) else None
        labels = self.find(inner)
        return None if labels is None else chosen_labels(labels, indices)

    def _joined(self, parts: Sequence[Any]) -> Labels:
        found = []
        for position, part in enumerate(parts):
            labels = self.find(part)
            if labels is None:
                raise NotLabelsError(f"dataset {position} ({type(part).__qualname__}) tells none")
            if len(labels):
                found.append(labels)
        return joined_labels(found)

    def _stacked(self, parts: Any, length: int) -> Labels | None:  # noqa: ANN401
        is_named = isinstance(parts, dict) or self._column is not None
        if isinstance(parts, dict):
            names = _PARTS if self._column is None else (self._column,)
            chosen = [parts[name] for name in names if name in parts]
        else:
            chosen = list(reversed(parts)) if self._column is None else _one(parts, self._column)
        for part in chosen:
            labels = self._part(part, is_named=is_named)
            if labels is not None and len(labels) == length:
                return labels
        return None

    def _part(self, part: Any, *, is_named: bool) -> Labels | None:  # noqa: ANN401
        """Return the labels of a stacked dataset, or that dataset if it is nothing but labels."""
        # A search of its own: what was meant by `column` is this part.
        search = LabelSearch()
        search._path = self._path
        labels = search.find(part) if type(part) not in (list, tuple, np.ndarray) else None
        if labels is not None or isinstance(part, range):  # a range counts samples
            return labels
        try:
            labels = to_labels(part)
        except NotLabelsError:
            return None
        # Rows of integers may be anything, unless their name says what they are.
        is_other = are_paths(labels) or (isinstance(labels, RaggedArray) and not is_named)
        return None if is_other else labels

    def _of_arrays(self, arrays: Sequence[Any]) -> Labels | None:
        if self._column is not None:
            chosen = _one(arrays, self._column)
            return to_labels(chosen[0]) if chosen else None
        found = {}
        for position, array in enumerate(arrays):
            if len(getattr(array, "shape", ())) <= 2:
                try:
                    found[position] = to_labels(array)
                except NotLabelsError:
                    continue
        flat = [labels for labels in found.values() if isinstance(labels, np.ndarray)]
        # Zeros and ones by class come last, after what they are the classes of.
        return flat[-1] if flat else found.get(len(arrays) - 1 or -1)


def is_iterable(dataset: object) -> bool:
    """Return whether a dataset is a stream, ours, torch's or another's: nothing has an index."""
    return _is_a(dataset, "IterableDataset")


def length_of(dataset: Any) -> int | None:  # noqa: ANN401
    """Return the length of a dataset; None if it has none."""
    try:
        return len(dataset)
    except Exception:
        return None


def _is_a(dataset: object, name: str) -> bool:
    """Whether a class of that name is among a dataset's, without importing torch to ask."""
    return any(cls.__name__ == name for cls in type(dataset).__mro__)


def _get(dataset: Any, name: str) -> Any:  # noqa: ANN401
    """An attribute; None if it is not there, or a property that fails."""
    try:
        return getattr(dataset, name, None)
    except Exception:
        return None


def _is_pair(pairs: Sequence[Any]) -> bool:
    """Whether the first entry is something and a class number."""
    if not len(pairs) or not isinstance(pairs[0], (list, tuple)) or len(pairs[0]) != 2:
        return False
    return isinstance(pairs[0][1], (int, np.integer))


def _is_concatenation(dataset: Any, parts: Sequence[Any]) -> bool:  # noqa: ANN401
    """Whether it tells where each part ends, as torch's ConcatDataset does.

    Without it the order of the samples is not known: something may deal them out in turn.
    """
    ends = _get(dataset, "cumulative_sizes")
    lengths = [length_of(part) for part in parts]
    if ends is None or any(length is None for length in lengths):
        return False
    return list(itertools.accumulate(length for length in lengths if length is not None)) == list(
        ends
    )


def _reorders(dataset: Any, length: int) -> bool:  # noqa: ANN401
    """Whether a wrapper keeps as many integers as it has samples: an order, it may be."""
    for value in getattr(dataset, "__dict__", {}).values():
        if isinstance(value, (list, tuple, range, np.ndarray)) or hasattr(value, "detach"):
            labels = as_labels(value) if length_of(value) == length and length else None
            if isinstance(labels, np.ndarray) and labels.dtype.kind in "iu":
                return True
    return False


def _one(parts: Sequence[Any], column: str | int) -> list[Any]:
    """The part at a position, as a list; empty if there is none."""
    if not isinstance(column, int) or not -len(parts) <= column < len(parts):
        return []
    return [parts[column]]
