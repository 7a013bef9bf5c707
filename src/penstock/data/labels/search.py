# SPDX-License-Identifier: Apache-2.0
"""Where a dataset keeps its labels: attributes, columns, and the datasets that it is made of."""

from __future__ import annotations

import inspect
import itertools
import operator
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.labels.columns import has_columns, labels_of_column
from penstock.data.labels.parts import chosen_labels, joined_labels
from penstock.data.labels.values import NotLabelsError, are_paths, as_labels, to_labels
from penstock.data.packed_list import PackedList
from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Labels = NDArray[Any] | RaggedArray

__all__ = ["LabelSearch", "is_iterable", "kind_of", "length_of"]

_ATTRIBUTES: Final = ("labels", "targets", "_labels")
_PAIRS: Final = ("samples", "_samples", "imgs")  # of (path, class), as torchvision has them
_PARTS: Final = ("labels", "label", "targets", "target")  # of a stack, by name
_DEEPEST: Final = 32  # datasets made of datasets
_MOST_REASONS: Final = 5
_ASK: Final = "Say which by `penstock.labels_of(dataset, column=position)`"


class LabelSearch:
    """One look for the labels of a dataset; it remembers why they were not found.

    Attributes:
        reasons: What was found that is no answer, as parts of a sentence.
        refusal: What a dataset said that knows its columns, and has not the one asked for; else "".
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
        self.refusal = ""

    def find(self, dataset: Any) -> Labels | None:  # noqa: ANN401
        """Return the labels, one per sample, or None; no sample is read.

        Raises:
            ConfigError: datasets are concatenated that number the texts of the column differently.
        """
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
        that = "" if self._column is not None else ", that tells them"
        return f"{looked}{that} ({'; '.join(self.reasons[:_MOST_REASONS])})"

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
            value = _own(dataset, name)
            if value is None or callable(value):
                continue
            if are_paths(value):
                self._note(dataset, f"`{name}` names files")
                continue
            try:
                labels = to_labels(value)
            except NotLabelsError as error:
                self._note(dataset, f"`{name}` is {error}")
                continue
            if are_paths(labels):
                self._note(dataset, f"`{name}` names files")
                continue
            if len(labels) != length and _are_texts(value):  # the names of the classes
                self._note(dataset, f"`{name}` has {len(labels)} texts, for {length} samples")
                continue
            self._check_lengths(dataset, name, len(labels), length)
            return labels
        return None

    def _check_lengths(self, dataset: Any, name: str, count: int, length: int) -> None:  # noqa: ANN401
        """Raise unless the labels fit the dataset, and so does what else it keeps of the kind.

        Properties are left alone: they may build a list of millions.
        """
        kept = getattr(dataset, "__dict__", {})
        others = {other: kept.get(other) for other in (*_ATTRIBUTES, *_PAIRS)}
        counts = {
            other: None if _are_texts(value) else length_of(value)
            for other, value in others.items()
        }
        counts = {other: size for other, size in counts.items() if size is not None}
        counts[name] = count
        if any(size != length for size in counts.values()):
            told = ", ".join(f"`{other}` has {size}" for other, size in counts.items())
            raise NotLabelsError(f"{told} entries, for {length} samples")

    def _pairs(self, dataset: Any, length: int) -> Labels | None:  # noqa: ANN401
        if self._column is not None:
            return None
        for name in _PAIRS:
            pairs = _own(dataset, name)
            if not isinstance(pairs, (list, tuple, PackedList)) or not _is_pair(pairs):
                continue
            self._check_lengths(dataset, name, len(pairs), length)
            try:
                return to_labels(list(map(operator.itemgetter(1), pairs)))
            except (NotLabelsError, LookupError, TypeError):
                self._note(dataset, f"`{name}` does not hold pairs of a path and a class")
        return None

    def _method(self, dataset: Any, length: int) -> Labels | None:  # noqa: ANN401
        name, asked = ("get_labels", ()) if self._column is None else ("column", (self._column,))
        method = _own(dataset, name)
        if not callable(method):
            return None
        called = f"{name}({', '.join(map(repr, asked))})"
        try:
            return to_labels(method(*asked))
        except NotLabelsError as error:
            self._note(dataset, f"what `{called}` returns is {error}")
        except PenstockError as error:
            self._note(dataset, str(error).rstrip("."))
            self.refusal = self.refusal or str(error)
        except Exception as error:
            self._note(dataset, f"`{called}` failed with {type(error).__name__}: {error}")
        return None

    # What the datasets say that it is made of.

    def _of_parts(self, dataset: Any, length: int) -> Labels | None:  # noqa: ANN401
        parts = _get(dataset, "datasets")
        if isinstance(parts, (list, tuple)) and _is_concatenation(dataset, parts):
            return self._joined(dataset, parts)
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

    def _joined(self, dataset: object, parts: Sequence[Any]) -> Labels:
        if len(set().union(*(_texts_of(part, self._column) for part in parts))) > 1:
            # Numbers that are read from the samples would be of two kinds, too.
            raise ConfigError(
                f"The datasets of a {type(dataset).__qualname__} number the texts of "
                f"{self._column!r} differently: give all the same attribute_names."
            )
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
            chosen = list(parts) if self._column is None else _one(parts, self._column)
        parts_labels = (self._part(part, is_named=is_named) for part in chosen)
        found = [labels for labels in parts_labels if labels is not None and len(labels) == length]
        return (found[0] if found else None) if is_named else _only(found)

    def _part(self, part: Any, *, is_named: bool) -> Labels | None:  # noqa: ANN401
        """Return the labels of a stacked dataset, or that dataset if it is nothing but labels."""
        # A search of its own: what was meant by `column` is this part.
        search = LabelSearch()
        search._path = self._path
        labels = search.find(part) if type(part) not in (list, tuple, np.ndarray) else None
        if labels is not None or isinstance(part, range):  # a range counts samples
            return labels
        if are_paths(part):
            return None
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
                except NotLabelsError as error:
                    last = str(error)
        # Rows of zeros and ones are classes only in the last place, after what they belong to.
        end = len(arrays) - 1
        found = {
            position: labels
            for position, labels in found.items()
            if isinstance(labels, np.ndarray) or position == end > 0
        }
        if found and end not in found and len(getattr(arrays[end], "shape", ())) <= 2:
            raise NotLabelsError(f"the last of its arrays is {last}. {_ASK}")
        return _only(list(found.values()))


def is_iterable(dataset: object) -> bool:
    """Return whether a dataset is a stream, ours, torch's or another's: nothing has an index."""
    return _is_a(dataset, "IterableDataset")


def kind_of(dataset: object) -> str:
    """Return what a dataset is called in a message: its class, and what it is a subset of.

    Example:
        >>> from penstock.data import Subset
        >>> kind_of(Subset("abc", [0]))
        'Subset of str'
    """
    names = [type(dataset).__qualname__]
    while len(names) < _DEEPEST and _get(dataset, "indices") is not None:
        if (dataset := _get(dataset, "dataset")) is None:
            break
        names.append(type(dataset).__qualname__)
    return " of ".join(names)


def length_of(dataset: Any) -> int | None:  # noqa: ANN401
    """Return the length of a dataset; None if it has none."""
    try:
        return len(dataset)
    except Exception:
        return None


def _texts_of(
    dataset: Any,  # noqa: ANN401
    column: str | int | None,
    depth: int = 0,
) -> set[tuple[str, ...]]:
    """The texts that the numbers of a column stand for, in each of the datasets within that say."""
    if dataset is None or depth > _DEEPEST:
        return set()
    names = _get(dataset, "attribute_names")
    if isinstance(names, Mapping) and column in names:
        return {tuple(names[column])}
    parts = _get(dataset, "datasets")
    within = parts if isinstance(parts, (list, tuple)) else [_get(dataset, "dataset")]
    return set().union(*(_texts_of(part, column, depth + 1) for part in within))


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
    """Whether the first entry is a path, or None, and a class number."""
    if not len(pairs) or not isinstance(pairs[0], (list, tuple)) or len(pairs[0]) != 2:
        return False
    path, number = pairs[0]
    is_path = path is None or isinstance(path, (str, bytes, os.PathLike))
    return is_path and isinstance(number, (int, np.integer))


def _are_texts(value: Any) -> bool:  # noqa: ANN401
    """Whether it is a table, or a list of texts: of the names of classes, it may be."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], str)


def _only(found: Sequence[Labels]) -> Labels | None:
    """Return the only labels; numbers of samples, 0, 1, 2 and so on, are not counted as such.

    Raises:
        NotLabelsError: there are several.
    """
    if len(found) > 1:
        found = [labels for labels in found if not _is_count(labels)]
    if len(found) > 1:
        raise NotLabelsError(f"{len(found)} of its parts may be the classes. {_ASK}")
    return found[0] if found else None


def _is_count(labels: Labels) -> bool:
    if isinstance(labels, RaggedArray) or labels.dtype.kind not in "iu" or not len(labels):
        return False
    is_likely = labels[0] == 0 and labels[-1] == len(labels) - 1
    return bool(is_likely) and np.array_equal(labels, np.arange(len(labels)))


def _own(dataset: Any, name: str) -> Any:  # noqa: ANN401
    """An attribute as `_get` gives it, but none that a wrapper passes on from what it wraps.

    By `__getattr__` a subset would seem to have the labels of the whole.
    """
    value = _get(dataset, name)
    if value is None or _get(dataset, "dataset") is None:
        return value
    return None if inspect.getattr_static(dataset, name, None) is None else value


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
        is_list = isinstance(value, (list, tuple)) and len(value) > 0
        if is_list and not isinstance(value[0], (int, np.integer)) and not _is_scalar(value[0]):
            continue  # paths of millions of samples need not become an array
        if is_list or isinstance(value, (range, np.ndarray)) or hasattr(value, "detach"):
            labels = as_labels(value) if length_of(value) == length and length else None
            if isinstance(labels, np.ndarray) and labels.dtype.kind in "iu":
                return True
    return False


def _is_scalar(value: Any) -> bool:  # noqa: ANN401 - as a tensor of one number
    return getattr(value, "ndim", None) == 0


def _one(parts: Sequence[Any], column: str | int) -> list[Any]:
    """The part at a position, as a list; empty if there is none."""
    if not isinstance(column, int) or not -len(parts) <= column < len(parts):
        return []
    return [parts[column]]
