# SPDX-License-Identifier: Apache-2.0
"""The classes of a dataset's samples, found without reading one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.data.labels.names import class_names_of
from penstock.data.labels.search import LabelSearch, is_iterable, kind_of
from penstock.data.labels.values import NotLabelsError, as_labels, to_labels
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.data.ragged import RaggedArray

__all__ = [
    "as_labels",
    "class_names_of",
    "known_labels",
    "labels_given_or_known",
    "of_splits",
]


def known_labels(dataset: Any) -> NDArray[Any] | RaggedArray | None:  # noqa: ANN401
    """Return the labels of every sample, or None where the dataset does not say.

    No sample is read. Asked are the attributes `labels`, `targets`, `_labels` and the lists
    `samples`, `_samples`, `imgs` of (path, class); a method `get_labels()`; and a Hugging Face
    dataset's columns. Subsets, concatenations, stacks, datasets of tensors or arrays, and datasets
    that wrap another of the same length are looked through. Labels that do not fit the dataset's
    length are no answer.

    They are the labels as the dataset keeps them, before any `target_transform`. Texts in rows are
    numbered among those of this dataset: the numbers of two calls are not to be compared.

    Returns:
        Integers, bools or strings, shape (len(dataset),); or a `RaggedArray` where samples have
        several. May be the dataset's own array.

    Example:
        >>> from penstock.data import Subset
        >>> class Digits(list):
        ...     targets = [3, 1, 3]
        >>> known_labels(Subset(Digits("abc"), [2, 1]))
        array([3, 1])
    """
    return LabelSearch().find(dataset)


def labels_given_or_known(
    source: Any,  # noqa: ANN401
    who: str,
    column: str | int | None = None,
) -> NDArray[Any] | RaggedArray:
    """Return labels that were given, or those of the dataset that was given.

    Args:
        source: In any form that `as_labels` takes, or a dataset whose labels `known_labels` finds.
        who: What asks, for the message: the name of a sampler's class.
        column: What a dataset calls them, as for `penstock.labels_of`.

    Returns:
        As `known_labels` does.

    Raises:
        ConfigError: it is neither; the message says what was looked for.

    Example:
        >>> labels_given_or_known([1, 0, 1], "MySampler")
        array([1, 0, 1])
    """
    if is_iterable(source):
        raise ConfigError(
            f"{who} takes labels, or a dataset whose samples have numbers; {kind_of(source)} is a "
            "stream. `penstock.sampling.BalancedShuffle` balances a stream while it is read."
        )
    if isinstance(source, Mapping):
        raise ConfigError(of_splits(source, who))
    search = LabelSearch(column)
    if not _is_plain(source):
        labels = search.find(source)
        if labels is not None:
            return labels
    try:
        given = to_labels(source)
    except NotLabelsError as error:
        raise ConfigError(_refusal(source, who, search, column, str(error))) from None
    if column is not None:
        raise ConfigError(
            f"column={column!r} is of a dataset, and {who} was given labels: give it the dataset, "
            "or leave column out."
        )
    return given


def of_splits(splits: Mapping[Any, Any], who: str) -> str:
    """Return the message for a table of datasets, as a `DatasetDict` of Hugging Face is."""
    names = sorted(map(str, splits))[:8]
    return (
        f"{type(splits).__qualname__} holds {names}: give {who} one of them, as by "
        f"dataset[{next(iter(names), 'train')!r}]."
    )


def _is_plain(source: Any) -> bool:  # noqa: ANN401
    """Whether it is labels, if anything: it has nothing to look into."""
    return type(source) in (list, tuple, np.ndarray, range)


def _refusal(
    source: Any,  # noqa: ANN401
    who: str,
    search: LabelSearch,
    column: str | int | None,
    reason: str,
) -> str:
    kind = kind_of(source)
    if _is_plain(source) or hasattr(source, "dtype"):
        return (
            f"{who} takes one label per sample (integers, bools or strings), a list of class "
            f"numbers per sample, or a dataset; this {kind} is {reason}. If it holds samples, give "
            f"{who} the result of `penstock.labels_of(dataset, scan=True)`."
        )
    if search.refusal:
        return f"{who} cannot balance {kind} by {column!r}: {search.refusal}"
    asked, name = ("", "labels") if column is None else (f"column={column!r}, ", str(column))
    return (
        f"{who} cannot tell the labels of the samples of {kind} without reading them: "
        f"{search.report()}. Give the dataset an attribute `{name}` (an array with one label per "
        "sample), give the labels themselves, or read the samples once: "
        f"`{who}(penstock.labels_of(dataset, {asked}scan=True), ...)`."
    )
