# SPDX-License-Identifier: Apache-2.0
"""The classes of a dataset's samples, found without reading one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["known_labels"]

_NAMES: Final = ("labels", "targets")
_KINDS: Final = "biuUS"  # booleans, integers, strings


def known_labels(dataset: Any) -> NDArray[Any] | None:  # noqa: ANN401
    """Return the label of every sample, or None where the dataset does not say.

    Asked are the attributes `labels` and `targets`, also those of the datasets that a subset or a
    concatenation is made of.

    Returns:
        Integers or strings, shape (len(dataset),); may be the dataset's own array.

    Example:
        >>> from penstock.data import Subset
        >>> class Digits(list):
        ...     targets = [3, 1, 3]
        >>> known_labels(Subset(Digits("abc"), [2, 1]))
        array([3, 1])
    """
    for name in _NAMES:
        labels = _as_labels(getattr(dataset, name, None))
        if labels is not None:
            return labels if len(labels) == _length(dataset) else None
    parts = getattr(dataset, "datasets", None)
    if isinstance(parts, (list, tuple)):
        return _joined(parts, _length(dataset))
    inner, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    if inner is None or indices is None:
        return None
    labels = known_labels(inner)
    return None if labels is None else labels[np.asarray(indices)]


def _as_labels(value: Any) -> NDArray[Any] | None:  # noqa: ANN401
    if value is None or callable(value):
        return None
    try:
        labels = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # ragged, or a tensor that is not on the CPU
        return None
    return labels if labels.ndim == 1 and labels.dtype.kind in _KINDS else None


def _joined(parts: Any, length: int | None) -> NDArray[Any] | None:  # noqa: ANN401
    """Return the labels of a concatenation; None for other things made of datasets."""
    found = [known_labels(part) for part in parts]
    if not found or any(labels is None for labels in found):
        return None
    labels = np.concatenate([labels for labels in found if labels is not None])
    return labels if len(labels) == length else None


def _length(dataset: Any) -> int | None:  # noqa: ANN401
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
