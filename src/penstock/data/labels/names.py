# SPDX-License-Identifier: Apache-2.0
"""What the classes of a dataset are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from penstock.data.labels.columns import class_column, has_columns
from penstock.data.labels.search import LabelSearch
from penstock.data.labels.values import NotLabelsError, TextRows
from penstock.data.ragged import RaggedArray

__all__ = ["class_names_of"]

_NAMES: Final = ("class_names", "classes")
_NO_TEXT: Final = "(none)"  # the class of objects of which a file does not say the field
_DEEPEST: Final = 32  # datasets made of datasets


def class_names_of(
    dataset: Any,  # noqa: ANN401
    column: str | int | None = None,
) -> tuple[str, ...] | None:
    """Return the name of every class, by its number; None where the dataset does not say.

    Asked are `class_names`, `classes`, `class_to_idx`, and the `ClassLabel` of a Hugging Face
    dataset's column, also those of the datasets within. Where the labels are strings, the names
    are these, sorted, as `penstock.labels_of` numbers them. Names that leave a class of the labels
    out are no answer. Those of a `column` are its texts in `attribute_names`; "(none)" is the class
    of objects that lack it.

    Example:
        >>> from penstock.data import Subset
        >>> class Pets(list):
        ...     class_to_idx = {"dog": 1, "cat": 0}
        >>> class_names_of(Subset(Pets("abc"), [2]))
        ('cat', 'dog')
    """
    labels = LabelSearch(column).find(dataset)
    values = labels.values if isinstance(labels, RaggedArray) else labels
    if isinstance(labels, TextRows):
        return tuple(labels.names.tolist())
    if values is not None and values.dtype.kind in "US":
        return tuple(str(name) for name in np.unique(values).tolist())
    names = _names(dataset, column, 0)
    if names is None or (values is not None and len(values) and int(values.max()) >= len(names)):
        return None
    return names


def _names(dataset: Any, column: str | int | None, depth: int) -> tuple[str, ...] | None:  # noqa: ANN401
    if dataset is None or depth > _DEEPEST:
        return None
    if (own := _own(dataset, column)) is not None:
        return own
    parts = getattr(dataset, "datasets", None)
    if isinstance(parts, (list, tuple)) and parts:
        first, *others = (_names(part, column, depth + 1) for part in parts)
        return first if all(names == first for names in others) else None
    return _names(getattr(dataset, "dataset", None), column, depth + 1)


def _own(dataset: Any, column: str | int | None) -> tuple[str, ...] | None:  # noqa: ANN401
    if has_columns(dataset):
        return _of_feature(dataset, column)
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


def _of_feature(dataset: Any, wanted: str | int | None) -> tuple[str, ...] | None:  # noqa: ANN401
    try:
        column = class_column(dataset, None if wanted is None else str(wanted))
    except NotLabelsError:
        return None
    names = getattr(column.feature, "names", None) if column is not None else None
    return None if names is None else tuple(names)
