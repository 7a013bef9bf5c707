# SPDX-License-Identifier: Apache-2.0
"""The classes of a dataset's samples, and their names, found without reading a sample."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, get_args

import numpy as np

from penstock.data.labels.columns import class_column, has_columns, labels_of_column
from penstock.data.labels.values import (
    NotLabelsError,
    Objects,
    TextRows,
    are_paths,
    chosen_labels,
    joined_labels,
    labels_by_objects,
    numbered,
    to_labels,
)
from penstock.data.names import name_samples
from penstock.data.packed_list import PackedList
from penstock.data.ragged import RaggedArray
from penstock.deprecation import removed_arguments
from penstock.errors import ConfigError, PenstockError
from penstock.faults import annotate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.data.labels.values import Labels

__all__ = [
    "class_names_of",
    "is_iterable",
    "known_labels",
    "labels_given_or_known",
    "labels_of",
]

_ATTRIBUTES: Final = ("labels", "targets", "_labels")
_PAIRS: Final = ("samples", "_samples", "imgs")  # of (path, class), as torchvision has them
_PARTS: Final = ("labels", "label", "targets", "target")  # of a stack, by name
_NAMES: Final = ("class_names", "classes")
_NO_TEXT: Final = "(none)"  # the class of objects of which a file does not say the field
_DEEPEST: Final = 32  # datasets made of datasets
_MOST_REASONS: Final = 5
_ASK: Final = "Say which by `penstock.labels_of(dataset, column=position)`"
_FUNCTION: Final = "get_label=lambda sample: sample[1]"


@removed_arguments(
    scan="get_label=, a function of a sample that returns its label",
    cache="numpy.save() to keep the labels",
    num_workers="a Loader over the dataset to read labels in workers",
    progress="get_label= with a bar of its own",
)
def labels_of(
    dataset: Any,  # noqa: ANN401 - anything with an index and a length
    *,
    get_label: Callable[[Any], Any] | None = None,
    column: str | int | None = None,
    objects: Objects = "all",
) -> NDArray[np.int64] | RaggedArray:
    """Return the class of every sample; no sample is read if the dataset knows the classes.

    Asked are the attributes `labels`, `targets`, `_labels` and the lists `samples`, `_samples`,
    `imgs` of (path, class); a method `get_labels()`; and a Hugging Face dataset's columns. Subsets,
    concatenations, stacks, datasets of tensors or arrays, and datasets that wrap another of the
    same length are looked through. Labels that do not fit the dataset's length are not used.

    They are the labels as the dataset keeps them, before any `target_transform`. Texts become
    numbers, in the order of the sorted texts of this dataset.

    Args:
        dataset: Map-style, with a length.
        get_label: Function of a sample that returns its label: an integer, bool or string, or a
            list of them. The dataset is not asked then: every sample is read, in this process.
        column: What the labels are called: a field of annotations ("pose"), a Hugging Face column
            ("objects.category" for a field), an attribute, or a part of a `StackDataset`; or the
            position among arrays, tensors or stacked datasets.
        objects: Which of a sample's classes are returned where it has several: "all", that of its
            "first" object, or the "rarest", which the fewest samples have.

    Returns:
        int64, shape (len(dataset),), which may be the dataset's own array; or a `RaggedArray` where
        samples have several classes, or none.

    Raises:
        ConfigError: the labels are not known, the function returns none, or the dataset is a
            stream.

    Example:
        >>> from penstock.data import ArrayDataset, Subset
        >>> pairs = ArrayDataset(np.zeros((4, 2)), np.array([5, 6, 6, 5]))
        >>> labels_of(Subset(pairs, [0, 2]))
        array([5, 6])
        >>> labels_of([("a", "dog"), ("b", "cat")], get_label=lambda sample: sample[1])
        array([1, 0])
    """
    if objects not in get_args(Objects):
        raise ConfigError(f"objects is 'all', 'first' or 'rarest', not {objects!r}.")
    _check_no_stream(dataset, "labels_of")
    length = _length_of(dataset)
    if length is None or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            "labels_of takes a dataset with __len__ and __getitem__; "
            f"{_kind_of(dataset)} has not both."
        )
    try:
        if get_label is not None:
            found: Labels | None = to_labels(_read(dataset, length, get_label))
        else:
            search = _Search(column)
            found = search.find(dataset)
            if found is None:
                raise ConfigError(search.refusal_of(dataset, "labels_of"))
        assert found is not None
        labels = labels_by_objects(found, objects)
        return labels if isinstance(labels, RaggedArray) else numbered(labels)
    except NotLabelsError as error:
        raise ConfigError(f"The labels of {_kind_of(dataset)} are {error}.") from None


def _read(dataset: Any, length: int, get_label: Callable[[Any], Any]) -> list[Any]:  # noqa: ANN401
    labels = []
    for index in range(length):
        try:
            labels.append(get_label(dataset[index]))
        except Exception as error:
            annotate(error, f"labels_of was reading {name_samples(dataset, [index])}.")
            raise
    return labels


def known_labels(dataset: Any) -> Labels | None:  # noqa: ANN401
    """Return the labels of every sample as `labels_of` finds them; None where there are none.

    Texts stay texts. The result may be the dataset's own array.
    """
    return _Search().find(dataset)


def labels_given_or_known(
    source: Any,  # noqa: ANN401
    who: str,
    column: str | int | None = None,
) -> Labels:
    """Return labels that were given, in a form of `to_labels`, or those that a dataset knows.

    `who` asks, and is named in the message that neither is there.
    """
    _check_no_stream(source, who)
    search = _Search(column)
    is_plain = type(source) in (list, tuple, np.ndarray, range)
    if not is_plain and (labels := search.find(source)) is not None:
        return labels
    try:
        given = to_labels(source)
    except NotLabelsError as error:
        if not is_plain and not hasattr(source, "dtype"):
            raise ConfigError(search.refusal_of(source, who)) from None
        raise ConfigError(
            f"{who} takes one label per sample (integers, bools or strings), a list of class "
            f"numbers per sample, or a dataset; this {_kind_of(source)} is {error}. If it holds "
            f"samples, give {who} `penstock.labels_of(dataset, {_FUNCTION})`."
        ) from None
    if column is not None:
        raise ConfigError(
            f"column={column!r} is of a dataset, and {who} was given labels: give it the dataset, "
            "or leave column out."
        )
    return given


def _check_no_stream(source: Any, who: str) -> None:  # noqa: ANN401
    if is_iterable(source):
        raise ConfigError(
            f"{who} takes labels, or a dataset whose samples have numbers; {_kind_of(source)} is a "
            "stream. `penstock.sampling.BalancedShuffle` balances a stream while it is read."
        )
    if isinstance(source, Mapping):  # as a `DatasetDict` of Hugging Face is
        names = sorted(map(str, source))[:8]
        raise ConfigError(
            f"{type(source).__qualname__} holds {names}: give {who} one of them, as by "
            f"dataset[{next(iter(names), 'train')!r}]."
        )


class _Search:
    """One look for the labels of a dataset; it remembers why they were not found.

    Attributes:
        reasons: What was found that is no answer, as parts of a sentence.
    """

    def __init__(self, column: str | int | None = None) -> None:
        self._column = column
        self._path: set[int] = set()
        self._refusal = ""  # of a dataset that knows its columns, and has not the one asked for
        self.reasons: list[str] = []

    def find(self, dataset: Any) -> Labels | None:  # noqa: ANN401
        """Return the labels, one per sample, or None; no sample is read.

        Raises:
            ConfigError: datasets are concatenated that number the texts of the column differently.
        """
        length = _length_of(dataset)
        if length is None or is_iterable(dataset) or id(dataset) in self._path:
            return None
        if len(self._path) >= _DEEPEST:
            return None
        self._path.add(id(dataset))
        try:
            labels = self._own(dataset, length)
            if labels is None and has_columns(dataset):
                wanted = None if self._column is None else str(self._column)
                labels = labels_of_column(dataset, wanted)
            elif labels is None:
                labels = self._of_parts(dataset, length)
            if labels is not None and len(labels) != length:
                raise NotLabelsError(f"{len(labels)} labels, for {length} samples")
        except NotLabelsError as error:
            self._note(dataset, str(error))
            return None
        finally:
            self._path.discard(id(dataset))
        return labels

    def refusal_of(self, dataset: Any, who: str) -> str:  # noqa: ANN401
        """Return what was looked for, what was found instead, and what to do."""
        if self._refusal:
            return f"{who} finds no labels in {_kind_of(dataset)}: {self._refusal}"
        if self._column is not None:
            looked, column = f"nothing called {self._column!r} holds them", f"{self._column}"
        else:
            names = ", ".join(f"`{name}`" for name in (*_ATTRIBUTES, *_PAIRS))
            looked = f"none of the attributes {names} holds them, nor a method `get_labels()`"
            column = "labels"
        found = f" ({'; '.join(self.reasons[:_MOST_REASONS])})" if self.reasons else ""
        return (
            f"{who} cannot see the labels of the samples of {_kind_of(dataset)}: "
            f"{looked}{found}. Give the dataset an attribute `{column}` (one label per sample), "
            "name what holds them by `column=`, give the samplers a list of the labels, or read "
            f"every sample by a function: `penstock.labels_of(dataset, {_FUNCTION})`."
        )

    def _note(self, dataset: object, reason: str) -> None:
        self.reasons.append(f"in {type(dataset).__qualname__}: {reason}")

    # What the dataset says itself.

    def _own(self, dataset: Any, length: int) -> Labels | None:  # noqa: ANN401
        for name, read, arguments in self._kept(dataset):
            try:
                value = read(*arguments)
                labels = _labels_in(value)
            except NotLabelsError as error:
                self._note(dataset, f"{name} is {error}")
            except PenstockError as error:
                self._note(dataset, str(error).rstrip("."))
                self._refusal = self._refusal or str(error)
            except Exception as error:
                self._note(dataset, f"{name} failed with {type(error).__name__}: {error}")
            else:
                if len(labels) == length:
                    return labels
                self._note(dataset, f"{name} has {len(labels)} entries, for {length} samples")
                if not _are_texts(value):  # the names of the classes say nothing of the others
                    raise NotLabelsError("what it keeps does not fit its length")
        return None

    def _kept(self, dataset: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:  # noqa: ANN401
        """Yield the name of each place for labels, and the call that returns them."""
        column = self._column
        for name in _ATTRIBUTES if column is None else (str(column),):
            value = _own(dataset, name)
            if value is not None and not callable(value):
                yield f"`{name}`", _itself, (value,)
        for name in _PAIRS if column is None else ():
            pairs = _own(dataset, name)
            if isinstance(pairs, (list, tuple, PackedList)) and _is_pair(pairs):
                yield f"`{name}`", _second_of_each, (pairs,)
        name = "get_labels" if column is None else "column"
        if callable(method := _own(dataset, name)):
            yield f"`{name}()`", method, () if column is None else (column,)

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
        inner, indices = _get(dataset, "dataset"), _get(dataset, "indices")
        if inner is None:
            return None
        if indices is None:  # a wrapper: of the same length, and in no order of its own
            is_same = _length_of(inner) == length and hasattr(dataset, "__getitem__")
            return self.find(inner) if is_same and not _reorders(dataset, length) else None
        labels = self.find(inner)
        return None if labels is None else chosen_labels(labels, indices)

    def _joined(self, dataset: object, parts: Sequence[Any]) -> Labels:
        if len(set().union(*(_texts_of(part, self._column) for part in parts))) > 1:
            raise ConfigError(
                f"The datasets of a {type(dataset).__qualname__} number the texts of "
                f"{self._column!r} differently: give all the same attribute_names."
            )
        found = []
        for position, part in enumerate(parts):
            labels = self.find(part)
            if labels is None:
                raise NotLabelsError(f"dataset {position} ({type(part).__qualname__}) has none")
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
        search = _Search()  # what was meant by `column` is this part
        search._path = self._path
        labels = search.find(part) if type(part) not in (list, tuple, np.ndarray) else None
        if labels is not None or isinstance(part, range):  # a range counts samples
            return labels
        try:
            labels = _labels_in(part)
        except NotLabelsError:
            return None
        # Rows of integers may be anything, unless their name says what they are.
        return None if isinstance(labels, RaggedArray) and not is_named else labels

    def _of_arrays(self, arrays: Sequence[Any]) -> Labels | None:
        if self._column is not None:
            chosen = _one(arrays, self._column)
            return to_labels(chosen[0]) if chosen else None
        found, end, reason = {}, len(arrays) - 1, ""
        for position, array in enumerate(arrays):
            if len(getattr(array, "shape", ())) <= 2:
                try:
                    labels = to_labels(array)
                except NotLabelsError as error:
                    reason = str(error) if position == end else ""
                    continue
                # Rows of zeros and ones are classes only in the last place, after others.
                if isinstance(labels, np.ndarray) or position == end > 0:
                    found[position] = labels
        if found and reason:
            raise NotLabelsError(f"the last of its arrays is {reason}. {_ASK}")
        return _only(list(found.values()))


def _itself(value: Any) -> Any:  # noqa: ANN401
    return value


def _second_of_each(pairs: Sequence[Any]) -> list[Any]:
    return [pair[1] for pair in pairs]


def _labels_in(value: Any) -> Labels:  # noqa: ANN401
    labels = None if are_paths(value) else to_labels(value)
    if labels is None or are_paths(labels):
        raise NotLabelsError("a list of file names")
    return labels


def is_iterable(dataset: object) -> bool:
    """Return whether a dataset is a stream, ours, torch's or another's: nothing has an index."""
    return _is_a(dataset, "IterableDataset")


def _kind_of(dataset: object) -> str:
    """Return the name of its class, and what it is a subset of."""
    names = [type(dataset).__qualname__]
    while len(names) < _DEEPEST and _get(dataset, "indices") is not None:
        if (dataset := _get(dataset, "dataset")) is None:
            break
        names.append(type(dataset).__qualname__)
    return " of ".join(names)


def _length_of(dataset: Any) -> int | None:  # noqa: ANN401
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


def _own(dataset: Any, name: str) -> Any:  # noqa: ANN401
    """An attribute as `_get` gives it, but none that a wrapper passes on from what it wraps.

    By `__getattr__` a subset would seem to have the labels of the whole.
    """
    value = _get(dataset, name)
    if value is None or _get(dataset, "dataset") is None:
        return value
    return None if inspect.getattr_static(dataset, name, None) is None else value


def _is_pair(pairs: Sequence[Any]) -> bool:
    """Whether the first entry is a path, or None, and a class number."""
    if not len(pairs) or not isinstance(pairs[0], (list, tuple)) or len(pairs[0]) != 2:
        return False
    path, number = pairs[0]
    is_path = path is None or isinstance(path, (str, bytes, os.PathLike))
    return is_path and isinstance(number, (int, np.integer))


def _are_texts(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], str)


def _only(found: Sequence[Labels]) -> Labels | None:
    """Return the only labels; numbers of samples, 0, 1, 2 and so on, are not counted as such."""
    if len(found) > 1:
        found = [labels for labels in found if not _is_count(labels)]
    if len(found) > 1:
        raise NotLabelsError(f"{len(found)} parts that may be the classes. {_ASK}")
    return found[0] if found else None


def _is_count(labels: Labels) -> bool:
    is_array = isinstance(labels, np.ndarray) and labels.dtype.kind in "iu"
    return is_array and np.array_equal(labels, np.arange(len(labels)))


def _is_concatenation(dataset: Any, parts: Sequence[Any]) -> bool:  # noqa: ANN401
    """Whether it says where each part ends, as torch's ConcatDataset does.

    Without it the order of the samples is not known: something may deal them out in turn.
    """
    ends, lengths = _get(dataset, "cumulative_sizes"), list(map(_length_of, parts))
    if ends is None or None in lengths:
        return False
    return list(itertools.accumulate(lengths)) == list(ends)


def _reorders(dataset: Any, length: int) -> bool:  # noqa: ANN401
    """Whether a wrapper keeps as many integers as it has samples: an order, it may be."""
    for value in getattr(dataset, "__dict__", {}).values():
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], str):
            continue  # paths of millions of samples need not become an array
        if _length_of(value) == length and length and not isinstance(value, (str, Mapping)):
            try:
                labels = to_labels(value)
            except NotLabelsError:
                continue
            if isinstance(labels, np.ndarray) and labels.dtype.kind in "iu":
                return True
    return False


def _one(parts: Sequence[Any], column: str | int) -> list[Any]:
    """The part at a position, as a list; empty if there is none."""
    if isinstance(column, int) and -len(parts) <= column < len(parts):
        return [parts[column]]
    return []


def class_names_of(
    dataset: Any,  # noqa: ANN401
    column: str | int | None = None,
) -> tuple[str, ...] | None:
    """Return the name of every class, by its number; None where the dataset does not say.

    Asked are `class_names`, `classes`, `class_to_idx`, and the `ClassLabel` of a Hugging Face
    dataset's column, also those of the datasets within; where the labels are texts, these. Names
    that leave a class of the labels out are no answer. Those of a `column` are its texts in
    `attribute_names`; "(none)" is the class of objects that lack it.
    """
    labels = _Search(column).find(dataset)
    if isinstance(labels, TextRows):
        return tuple(labels.names.tolist())
    values = labels.values if isinstance(labels, RaggedArray) else labels
    if values is not None and values.dtype.kind in "US":
        return tuple(str(name) for name in np.unique(values).tolist())
    names = _names(dataset, column, 0)
    if names is None or (values is not None and len(values) and int(values.max()) >= len(names)):
        return None
    return names


def _names(dataset: Any, column: str | int | None, depth: int) -> tuple[str, ...] | None:  # noqa: ANN401
    if dataset is None or depth > _DEEPEST:
        return None
    if (own := _own_names(dataset, column)) is not None:
        return own
    parts = getattr(dataset, "datasets", None)
    if isinstance(parts, (list, tuple)) and parts:
        first, *others = (_names(part, column, depth + 1) for part in parts)
        return first if all(names == first for names in others) else None
    return _names(getattr(dataset, "dataset", None), column, depth + 1)


def _own_names(dataset: Any, column: str | int | None) -> tuple[str, ...] | None:  # noqa: ANN401
    if has_columns(dataset):
        try:
            found = class_column(dataset, None if column is None else str(column))
        except NotLabelsError:
            return None
        names = getattr(found.feature, "names", None) if found is not None else None
        return None if names is None else tuple(names)
    texts = getattr(dataset, "attribute_names", None)
    if isinstance(texts, Mapping) and column in texts:
        return tuple(text or _NO_TEXT for text in texts[column])
    if column not in (None, "labels", "name"):
        return None
    for name in _NAMES:
        names = getattr(dataset, name, None)
        if isinstance(names, (list, tuple)) and names and all(isinstance(n, str) for n in names):
            return tuple(names)
    numbers = getattr(dataset, "class_to_idx", None)
    if isinstance(numbers, Mapping) and sorted(numbers.values()) == list(range(len(numbers))):
        return tuple(sorted(numbers, key=numbers.__getitem__))
    return None
