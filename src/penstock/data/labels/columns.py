# SPDX-License-Identifier: Apache-2.0
"""The column of classes of a Hugging Face `datasets.Dataset`, read from its Arrow table.

Neither `datasets` nor pyarrow is imported: the objects that are there are asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.data.labels.values import (
    NotLabelsError,
    check_no_columns,
    chosen_labels,
    to_labels,
    to_rows,
)
from penstock.data.ragged import RaggedArray

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["class_column", "has_columns", "labels_of_column"]

_NAMES: Final = ("label", "labels", "target", "targets")


class _Column(NamedTuple):
    path: tuple[str, ...]  # its name; more than one for a field within the column
    feature: Any

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def is_class(self) -> bool:
        return type(self.feature).__name__ == "ClassLabel"


def has_columns(dataset: object) -> bool:
    """Return whether a dataset is an Arrow table with features, as those of Hugging Face are."""
    return (
        isinstance(getattr(dataset, "features", None), Mapping)
        and hasattr(dataset, "column_names")
        and hasattr(getattr(dataset, "data", None), "column")
    )


def class_column(dataset: Any, wanted: str | None = None) -> _Column | None:  # noqa: ANN401
    """Return the column of the classes; None if no column looks like it.

    It is the only one whose feature is a `ClassLabel`, or a list of them; a whole column goes
    before a field within one, as `objects.category` is. Without any it is the one called "label",
    "labels", "target" or "targets".
    """
    columns = [
        column for name, feature in dataset.features.items() for column in _leaves((name,), feature)
    ]
    if wanted is not None:
        for column in columns:
            if column.name == wanted:
                return column
        names = ", ".join(column.name for column in columns)
        raise NotLabelsError(f"there is no column {wanted!r}; there are {names}")
    classes = [column for column in columns if column.is_class]
    whole = [column for column in classes if len(column.path) == 1]
    if len(whole or classes) > 1:
        names = ", ".join(column.name for column in whole or classes)
        raise NotLabelsError(
            f"several columns are classes ({names}): choose one, as by "
            f"`penstock.labels_of(dataset, column={(whole or classes)[0].name!r})`"
        )
    if classes:
        return (whole or classes)[0]
    by_name = {column.name: column for column in columns}
    return next((by_name[name] for name in _NAMES if name in by_name), None)


def _leaves(path: tuple[str, ...], feature: Any) -> Iterator[_Column]:  # noqa: ANN401
    while not isinstance(feature, Mapping) and hasattr(feature, "feature"):  # a list of them
        feature = feature.feature
    if not isinstance(feature, Mapping):
        yield _Column(path, feature)
        return
    for name, inner in feature.items():
        yield from _leaves((*path, name), inner)


def labels_of_column(
    dataset: Any,  # noqa: ANN401
    wanted: str | None = None,
) -> NDArray[Any] | RaggedArray:
    """Return what the column of the classes holds, in the order of the dataset's rows.

    That order is the dataset's own, after `select`, `shuffle`, `sort` and the like. No copy is made
    where the table is in one piece.
    """
    column = class_column(dataset, wanted)
    if column is None:
        raise NotLabelsError(
            f"none of its columns ({', '.join(map(str, dataset.column_names))}) is a ClassLabel or "
            "called `label`: choose one, as by "
            f"`penstock.labels_of(dataset, column={next(iter(dataset.column_names), 'label')!r})`"
        )
    if not hasattr(dataset, "_indices"):  # then what select() and shuffle() did is not known
        raise NotLabelsError("its table does not tell the order of the rows")
    try:
        labels = _read(dataset.data.column(column.path[0]), column.path[1:])
    except NotLabelsError as error:
        raise NotLabelsError(f"column {column.name!r} is {error}") from None
    order = dataset._indices  # a table of one column, or None for the rows as they lie
    return labels if order is None else chosen_labels(labels, order.column(0).to_numpy())


def _read(column: Any, fields: tuple[str, ...]) -> NDArray[Any] | RaggedArray:  # noqa: ANN401
    if not fields and str(column.type).startswith(("int", "uint")) and not column.null_count:
        integers: NDArray[Any] = column.to_numpy()
        return integers
    pieces = [_unnested(chunk, fields) for chunk in column.chunks]
    if not pieces:
        return np.empty(0, np.int64)
    values = np.concatenate([values for values, _ in pieces])
    if pieces[0][1] is None:
        return to_labels(values)
    counts = np.concatenate([counts for _, counts in pieces])
    if values.dtype.kind in "fb" and len(set(counts.tolist())) == 1:  # a number for every class
        return to_labels(values.reshape(len(counts), -1))
    flat = to_labels(values)
    if isinstance(flat, RaggedArray):
        raise NotLabelsError("lists of lists")
    if len(counts) and (counts == 1).all():
        return flat
    return check_no_columns(to_rows(flat, counts))


def _unnested(
    chunk: Any,  # noqa: ANN401 - an Arrow array
    fields: tuple[str, ...],
) -> tuple[NDArray[Any], Any]:
    """Follow fields down through structs and one list; return values, and counts of a row's."""
    counts = None
    while True:
        if chunk.null_count:
            raise NotLabelsError(f"without a value in {chunk.null_count} rows")
        kind = str(chunk.type)
        if kind.startswith("struct") and fields:
            names = [field.name for field in chunk.type]
            chunk, fields = chunk.flatten()[names.index(fields[0])], fields[1:]
        elif "list" in kind.split("<")[0] and counts is None:
            counts = _counts(chunk)
            chunk = chunk.flatten()
        elif "<" in kind:
            raise NotLabelsError(f"of type {kind}")
        else:
            return chunk.to_numpy(zero_copy_only=False), counts


def _counts(chunk: Any) -> NDArray[np.int64]:  # noqa: ANN401
    if hasattr(chunk, "offsets"):
        offsets: NDArray[Any] = chunk.offsets.to_numpy()
        return np.diff(offsets).astype(np.int64)
    return np.full(len(chunk), chunk.type.list_size, np.int64)
