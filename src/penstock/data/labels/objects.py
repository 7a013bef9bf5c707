# SPDX-License-Identifier: Apache-2.0
"""One class for a sample that has several: that of its first object, or the rarest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from penstock.data.ragged import RaggedArray

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Labels = NDArray[Any] | RaggedArray

__all__ = ["Objects", "labels_by_objects"]

Objects = Literal["all", "first", "rarest"]


def labels_by_objects(labels: Labels, objects: Objects) -> Labels:
    """Return the labels of samples by one object of each.

    Args:
        labels: As `to_labels` returns them.
        objects: "all" changes nothing; "first" takes the first class of each sample, "rarest" the
            one that the fewest samples have, of several such the smallest.

    Returns:
        One class each, its number as before; rows of one or none where some samples have none.

    Example:
        >>> labels_by_objects(RaggedArray.of([[0, 1], [0], [0]]), "rarest")
        array([1, 0, 0])
    """
    if objects == "all" or not isinstance(labels, RaggedArray):
        return labels
    counts = np.diff(labels.offsets)
    values = labels.values
    if objects == "rarest":
        rows = np.repeat(np.arange(len(labels)), counts)
        classes, codes = np.unique(values, return_inverse=True)
        once = np.unique(np.stack((rows, codes)), axis=1)[1]
        num_samples = np.bincount(once, minlength=len(classes))
        values = values[np.lexsort((codes, num_samples[codes], rows))]
    has_one = counts > 0
    chosen = values[labels.offsets[:-1][has_one]]
    if has_one.all():
        return chosen
    return RaggedArray(chosen, np.concatenate([[0], np.cumsum(has_one)]))
