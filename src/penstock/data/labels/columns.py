# SPDX-License-Identifier: Apache-2.0
"""The column of classes of a Hugging Face `datasets.Dataset`, read from its Arrow table."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

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
    from penstock.data.labels.values import Labels

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
        labels = _read(dataset.data.column(name), fields)
    except NotLabelsError as error:
        raise NotLabelsError(f"column {column[0]!r} is {error}") from None
    order = dataset._indices  # a table of one column, or None for the rows as they lie
    return labels if order is None else chosen_labels(labels, order.column(0).to_numpy())


def _read(column: Any, fields: list[str]) -> Labels:  # noqa: ANN401 - of Arrow
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
