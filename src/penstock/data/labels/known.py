# SPDX-License-Identifier: Apache-2.0
"""The classes of a dataset's samples, and their names, found without reading a sample."""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, get_args

import numpy as np

from penstock.data.labels.values import (
    NotLabelsError,
    Objects,
    TextRows,
    are_paths,
    check_no_columns,
    chosen_labels,
    joined_labels,
    labels_by_objects,
    numbered,
    to_labels,
    to_rows,
)
from penstock.data.names import name_samples
from penstock.data.packed_list import PackedList
from penstock.data.ragged import RaggedArray
from penstock.deprecation import removed_arguments
from penstock.errors import ConfigError
from penstock.faults import annotate
from penstock.summary import length_or_none

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.data.labels.values import Labels

    Column: TypeAlias = str | int | None

_ATTRIBUTES: Final = ("labels", "targets", "_labels")
_PAIRS: Final = ("samples", "_samples", "imgs")  # of (path, class), as torchvision has them
_PARTS: Final = ("labels", "label", "targets", "target")  # of a stack, by name
_NO_TEXT: Final = "(none)"  # the class of objects of which a file does not say the field
_DEEPEST: Final = 32  # datasets made of datasets
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
    """Return the class of every sample; no sample is read if the dataset has the classes.

    Searched are the attributes `labels`, `targets`, `_labels` and the lists `samples`, `_samples`,
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
    try:
        found = (
            to_labels(_read(dataset, get_label))
            if get_label is not None
            else labels_given_or_known(dataset, "labels_of", column, is_dataset=True)
        )
        labels = labels_by_objects(found, objects)
        return labels if isinstance(labels, RaggedArray) else numbered(labels)
    except NotLabelsError as error:
        raise ConfigError(f"The labels of {_kind_of(dataset)} are {error}.") from None


def _read(dataset: Any, get_label: Callable[[Any], Any]) -> list[Any]:  # noqa: ANN401
    labels = []
    for index in range(len(dataset)):
        try:
            labels.append(get_label(dataset[index]))
        except Exception as error:
            annotate(error, f"labels_of was reading {name_samples(dataset, [index])}.")
            raise
    return labels


def known_labels(dataset: Any, column: str | int | None = None) -> Labels | None:  # noqa: ANN401
    """Return the labels of every sample as `labels_of` finds them; None where there are none.

    Texts stay texts. The result may be the dataset's own array.
    """
    try:
        return _found(dataset, column, 0)
    except NotLabelsError:
        return None


def labels_given_or_known(
    source: Any,  # noqa: ANN401
    who: str,
    column: str | int | None = None,
    *,
    is_dataset: bool = False,
) -> Labels:
    """Return labels that were given, in a form of `to_labels`, or those that a dataset has.

    The error names `who`. A list may hold labels, unless it `is_dataset`.
    """
    _check_no_stream(source, who)
    is_plain = not is_dataset and type(source) in (list, tuple, np.ndarray, range)
    reason = f"column={column!r} is of a dataset, and labels were given"
    if not is_plain:
        try:
            return _found(source, column, 0)
        except NotLabelsError as error:
            reason = str(error)
    if column is None and not is_dataset:
        try:
            return to_labels(source)
        except NotLabelsError as error:
            if is_plain or hasattr(source, "dtype"):
                reason = f"it is {error}"
    if column is not None:
        raise ConfigError(f"{who} finds no labels in {_kind_of(source)}: {reason}.")
    raise ConfigError(
        f"{who} cannot see the labels of the samples of {_kind_of(source)}: {reason}. Give one "
        "label per sample (integers, bools or strings), a list of class numbers per sample, or a "
        "dataset with an attribute `labels`; name what holds them by `column=`; or read every "
        f"sample: `penstock.labels_of(dataset, {_FUNCTION})`."
    )


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


# The search. What raises `NotLabelsError` says what was found instead; no sample is read.


def _found(dataset: object, column: Column, depth: int) -> Labels:
    """Return the labels of a dataset, one per sample."""
    length = length_or_none(dataset)
    if length is None or is_iterable(dataset) or depth > _DEEPEST:
        raise NotLabelsError(f"{_kind_of(dataset)} has no length and index")
    labels, reason = _own_labels(dataset, length, column)
    try:
        if labels is None and has_columns(dataset):
            labels = labels_of_column(dataset, None if column is None else str(column))
        elif labels is None:
            labels = _labels_of_parts(dataset, length, column, depth + 1)
        if labels is not None and len(labels) != length:
            raise NotLabelsError(f"{len(labels)} labels, for {length} samples")
    except NotLabelsError as error:
        raise NotLabelsError(f"{reason}; {error}" if reason else str(error)) from None
    if labels is None:
        names = ", ".join(f"`{name}`" for name in (*_ATTRIBUTES, *_PAIRS))
        looked = f"none of the attributes {names} holds them, nor a method `get_labels()`"
        if column is not None:
            looked = f"nothing called {column!r} holds them"
        raise NotLabelsError(looked + (f" (in {_kind_of(dataset)}: {reason})" if reason else ""))
    return labels


def _own_labels(dataset: object, length: int, column: Column) -> tuple[Labels | None, str]:
    """Return what the dataset itself says; or None, and why something is no answer."""
    reason = ""
    for name, value in _places(dataset, column):
        try:
            kept = value() if callable(value) else value
            labels = _checked(kept)
        except NotLabelsError as error:
            reason = reason or f"`{name}` is {error}"
        except Exception as error:
            reason = reason or f"`{name}` failed with {type(error).__name__}: {error}"
        else:
            if len(labels) == length:
                return labels, ""
            reason = reason or f"`{name}` has {len(labels)} entries, for {length} samples"
            # Names of the classes say nothing of the other places.
            if not (isinstance(kept, (list, tuple)) and kept and isinstance(kept[0], str)):
                raise NotLabelsError(reason)
    return None, reason


def _places(dataset: Any, column: str | int | None) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """Yield the name of each place for labels, and what it holds, or the call that returns it."""
    for name in _ATTRIBUTES if column is None else (str(column),):
        value = _own(dataset, name)
        if value is not None and not callable(value):
            yield name, value
    for name in _PAIRS if column is None else ():
        pairs = _own(dataset, name)
        if isinstance(pairs, (list, tuple, PackedList)) and _is_pair(pairs):
            yield name, [pair[1] for pair in pairs]
    name = "get_labels" if column is None else "column"
    if callable(method := _own(dataset, name)):
        yield f"{name}()", method if column is None else partial(method, column)


def _checked(value: Any) -> Labels:  # noqa: ANN401
    labels = None if are_paths(value) else to_labels(value)
    if labels is None or are_paths(labels):
        raise NotLabelsError("a list of file names")
    return labels


def _labels_of_parts(dataset: object, length: int, column: Column, depth: int) -> Labels | None:
    """Return what the datasets say that it is made of."""
    parts = _get(dataset, "datasets")
    if isinstance(parts, (list, tuple)) and _is_concatenation(dataset, parts):
        return _joined(parts, column, depth)
    if parts is not None and _is_a(dataset, "StackDataset"):
        if not isinstance(parts, dict):
            is_named = column is not None
            return _only(parts, column, partial(_labels_of_part, depth=depth, is_named=is_named))
        names = _PARTS if column is None else (column,)
        name = next((name for name in names if name in parts), None)
        return None if name is None else _labels_of_part(parts[name], depth, is_named=True)
    for kind, name in (("TensorDataset", "tensors"), ("ArrayDataset", "arrays")):
        if _is_a(dataset, kind):
            return _only(getattr(dataset, name), column, to_labels, needs_last=True)
    inner, indices = _get(dataset, "dataset"), _get(dataset, "indices")
    if inner is None:
        return None
    if indices is not None:
        return chosen_labels(_found(inner, column, depth), indices)
    # A wrapper, of the same length; unless it keeps as many integers: an order, it may be.
    kept = filter(_are_integers, getattr(dataset, "__dict__", {}).values())
    is_same = length_or_none(inner) == length and hasattr(dataset, "__getitem__")
    if not is_same or length in map(length_or_none, kept):
        return None
    return _found(inner, column, depth)


def _are_integers(value: Any) -> bool:  # noqa: ANN401
    first = value[0] if isinstance(value, (list, tuple)) and value else None
    return isinstance(first, int) or "int" in str(getattr(value, "dtype", ""))


def _joined(parts: Sequence[Any], column: Column, depth: int) -> Labels:
    found = [_names(part, column, depth) for part in parts] if column is not None else []
    names = sorted(filter(None, found), key=len)
    for some, more in itertools.pairwise(names):
        if some != more[: len(some)]:
            raise NotLabelsError(
                f"its datasets number the classes of {column!r} differently: give all the same "
                f"attribute_names or class names, not {some!r:.80} and {more!r:.80}"
            )
    labels = []
    for position, part in enumerate(parts):
        try:
            labels.append(_found(part, column, depth))
        except NotLabelsError as error:
            kind = type(part).__qualname__
            raise NotLabelsError(f"dataset {position} ({kind}) has none: {error}") from None
    return joined_labels([part for part in labels if len(part)])


def _only(
    parts: Sequence[Any],
    column: str | int | None,
    read: Callable[[Any], Labels],
    *,
    needs_last: bool = False,
) -> Labels:
    """Return the labels at a position; or those of the only part that may be labels."""
    if column is not None:
        if isinstance(column, int) and -len(parts) <= column < len(parts):
            return read(parts[column])
        raise NotLabelsError(f"there is no part {column!r}, but 0 to {len(parts) - 1}")
    found, last, reason = [], len(parts) - 1, ""
    for position, part in enumerate(parts):
        try:
            labels = read(part)
        except NotLabelsError as error:
            is_table = needs_last and position == last and len(getattr(part, "shape", ())) <= 2
            reason = f"the last of its parts is {error}" if is_table else ""
            continue
        # Rows of zeros and ones are classes only in the last place, after others.
        if not needs_last or isinstance(labels, np.ndarray) or position == last > 0:
            found.append(labels)
    if len(found) != 1 or reason:
        raise NotLabelsError(
            f"{reason or f'{len(found)} parts that may be the classes'}. Say which by "
            "`penstock.labels_of(dataset, column=position)`"
        )
    return found[0]


def _labels_of_part(part: Any, depth: int, *, is_named: bool) -> Labels:  # noqa: ANN401
    """Return the labels of a stacked dataset, or that dataset if it is nothing but labels."""
    if isinstance(part, range):
        raise NotLabelsError("numbers of samples")
    if type(part) not in (list, tuple, np.ndarray) and not hasattr(part, "dtype"):
        return _found(part, None, depth)
    labels = _checked(part)
    if isinstance(labels, RaggedArray) and not is_named:
        raise NotLabelsError("rows of integers, which may be anything")
    return labels


def is_iterable(dataset: object) -> bool:
    """Return whether a dataset is a stream, ours, torch's or another's: nothing has an index."""
    return _is_a(dataset, "IterableDataset")


def _kind_of(dataset: object) -> str:
    """Return the name of its class, and what it is a part of."""
    inner = _get(dataset, "dataset")
    own = type(dataset).__qualname__
    return own if inner is None else f"{own} of {type(inner).__qualname__}"


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
    """An attribute as `_get` gives it, but none that a wrapper passes on from what it wraps."""
    # By `__getattr__` a subset would seem to have the labels of the whole.
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


def _is_concatenation(dataset: Any, parts: Sequence[Any]) -> bool:  # noqa: ANN401
    """Whether it says where each part ends, as torch's ConcatDataset does."""
    # Without it the order of the samples is not known: something may deal them out in turn.
    ends, lengths = _get(dataset, "cumulative_sizes"), list(map(length_or_none, parts))
    if ends is None or None in lengths:
        return False
    return list(itertools.accumulate(lengths)) == list(ends)


def class_names_of(dataset: object, column: Column = None) -> tuple[str, ...] | None:
    """Return the name of every class, by its number; None where the dataset does not say.

    Searched are `class_names`, `classes`, and the `ClassLabel` of a Hugging Face dataset's column,
    and those of the datasets within; where the labels are texts, these. Names that leave a class of
    the labels out are no answer. Those of a `column` are its texts in `attribute_names`; "(none)"
    is the class of objects that lack it.
    """
    labels = known_labels(dataset, column)
    if isinstance(labels, TextRows):
        return tuple(labels.names.tolist())
    values = labels.values if isinstance(labels, RaggedArray) else labels
    if values is not None and values.dtype.kind in "US":
        return tuple(str(name) for name in np.unique(values).tolist())
    names = _names(dataset, column, 0)
    if names is None or (values is not None and len(values) and int(values.max()) >= len(names)):
        return None
    return names


def _names(dataset: Any, column: Column, depth: int) -> tuple[str, ...] | None:  # noqa: ANN401
    if dataset is None or depth > _DEEPEST:
        return None
    if (own := _own_names(dataset, column)) is not None:
        return own
    parts = getattr(dataset, "datasets", None)
    if isinstance(parts, (list, tuple)) and parts:
        first, *others = (_names(part, column, depth + 1) for part in parts)
        return first if all(names == first for names in others) else None
    return _names(getattr(dataset, "dataset", None), column, depth + 1)


def _own_names(dataset: Any, column: Column) -> tuple[str, ...] | None:  # noqa: ANN401
    if has_columns(dataset):
        try:
            found = class_column(dataset, None if column is None else str(column))
        except NotLabelsError:
            return None
        names = None if found is None else getattr(found[1], "names", None)
        return None if names is None else tuple(names)
    texts = getattr(dataset, "attribute_names", None)
    if isinstance(texts, Mapping) and column in texts:
        return tuple(text or _NO_TEXT for text in texts[column])
    for name in ("class_names", "classes") if column in (None, "labels", "name") else ():
        names = getattr(dataset, name, None)
        if isinstance(names, (list, tuple)) and names and all(isinstance(n, str) for n in names):
            return tuple(names)
    return None


# The column of a Hugging Face `datasets.Dataset`, read from its Arrow table.

_NAMES: Final = ("label", "labels", "target", "targets")


def has_columns(dataset: object) -> bool:
    """Return whether a dataset is an Arrow table with features, as those of Hugging Face are."""
    return (
        isinstance(getattr(dataset, "features", None), Mapping)
        and hasattr(dataset, "_indices")
        and hasattr(getattr(dataset, "data", None), "column")
    )


def class_column(dataset: Any, wanted: str | None = None) -> tuple[str, Any] | None:  # noqa: ANN401
    """Return name and feature of the column of the classes; None if no column looks like it.

    It is the only one whose feature is a `ClassLabel`, or a list of them; a whole column goes
    before a field within one, as `objects.category` is. Without any it is the one called "label",
    "labels", "target" or "targets".
    """
    columns = dict(_leaves("", dataset.features))
    if wanted is not None:
        if wanted not in columns:
            raise NotLabelsError(f"there is no column {wanted!r}; there are {', '.join(columns)}")
        return wanted, columns[wanted]
    classes = [name for name, feature in columns.items() if type(feature).__name__ == "ClassLabel"]
    classes = [name for name in classes if "." not in name] or classes
    if len(classes) > 1:
        raise NotLabelsError(
            f"several columns are classes ({', '.join(classes)}): choose one, as by "
            f"`penstock.labels_of(dataset, column={classes[0]!r})`"
        )
    usual = [name for name in _NAMES if name in columns]
    name = next(iter([*classes, *usual]), None)
    return None if name is None else (name, columns[name])


def _leaves(name: str, feature: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    while not isinstance(feature, Mapping) and hasattr(feature, "feature"):  # a list of them
        feature = feature.feature
    if not isinstance(feature, Mapping):
        yield name, feature
        return
    for inner, of_inner in feature.items():
        yield from _leaves(f"{name}.{inner}" if name else inner, of_inner)


def labels_of_column(dataset: Any, wanted: str | None = None) -> Labels:  # noqa: ANN401
    """Return what the column of the classes holds, in the order of the dataset's rows.

    That order is the dataset's own, after `select`, `shuffle`, `sort` and the like. No copy is made
    where the table is in one piece.
    """
    column = class_column(dataset, wanted)
    if column is None:
        names = list(map(str, dataset.features))
        raise NotLabelsError(
            f"none of its columns ({', '.join(names)}) is a ClassLabel or called `label`: choose "
            f"one, as by `penstock.labels_of(dataset, column={next(iter(names), 'label')!r})`"
        )
    # A name may have a dot of its own, as after `flatten()`.
    name, *fields = column[:1] if column[0] in dataset.features else column[0].split(".")
    try:
        labels = _read_column(dataset.data.column(name), fields)
    except NotLabelsError as error:
        raise NotLabelsError(f"column {column[0]!r} is {error}") from None
    order = dataset._indices  # a table of one column, or None for the rows as they lie
    return labels if order is None else chosen_labels(labels, order.column(0).to_numpy())


def _read_column(column: Any, fields: list[str]) -> Labels:  # noqa: ANN401 - of Arrow
    """Follow fields down through structs and one list."""
    pc: Any = importlib.import_module("pyarrow.compute")  # the dataset is made of its tables
    counts = None
    while True:
        kind = str(column.type)
        if column.null_count:
            raise NotLabelsError(f"without a value in {column.null_count} rows")
        if kind.startswith("struct") and fields:
            column, fields = pc.struct_field(column, fields[0]), fields[1:]
        elif "list" in kind.split("<")[0] and counts is None:
            counts = pc.list_value_length(column).to_numpy().astype(np.int64)
            column = pc.list_flatten(column)
        elif "<" in kind:
            raise NotLabelsError(f"of type {kind}")
        else:
            break
    values = column.to_numpy()
    if counts is None:
        return values if values.dtype.kind in "iu" else to_labels(values)
    if values.dtype.kind in "fb" and len(set(counts.tolist())) == 1:  # a number for every class
        return to_labels(values.reshape(len(counts), -1))
    flat = to_labels(values)
    if isinstance(flat, RaggedArray):
        raise NotLabelsError("lists of lists")
    return flat if len(counts) and (counts == 1).all() else check_no_columns(to_rows(flat, counts))
