# SPDX-License-Identifier: Apache-2.0
"""The one class of a sample, to count and compare by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.data.labels.of_sample import label_of_sample
from penstock.data.labels.values import NotLabelsError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

__all__ = ["class_of_sample"]


def class_of_sample(sample: Any, get_label: Callable[[Any], Any] | None = None) -> Hashable:  # noqa: ANN401
    """Return the class of a sample, equal for equal labels.

    Arrays and tensors without dimensions count as their number: a tensor's hash is that of the
    object, so two tensors of one value would be two classes.

    Args:
        sample: As a stream gives it.
        get_label: Returns its label, anything that can be hashed. None goes by the rules of
            `label_of_sample`: the last of a tuple, or what a dict has under "label" and the like.

    Raises:
        NotLabelsError: it has no class, or several; the message goes on a sentence about it.

    Example:
        >>> class_of_sample(("pixels", 3)), class_of_sample({"image": 0, "label": "cat"})
        (3, 'cat')
        >>> class_of_sample("cat 7", str.split)
        Traceback (most recent call last):
        penstock.data.labels.values.NotLabelsError: has a list as its label, which cannot be hashed
    """
    if get_label is None:
        found = label_of_sample(sample)
        if isinstance(found, tuple):
            raise NotLabelsError(f"has {len(found)} labels")
        return found
    label = get_label(sample)
    if getattr(label, "ndim", None) == 0 and hasattr(label, "item"):
        label = label.item()
    _check(label)
    name: Hashable = label
    return name


def _check(label: Any) -> None:  # noqa: ANN401
    kind = type(label).__qualname__
    if label is None:
        raise NotLabelsError("has None as its label")
    if getattr(label, "shape", ()):
        raise NotLabelsError(f"has a {kind} of shape {tuple(label.shape)} as its label")
    try:
        hash(label)
    except TypeError as error:
        raise NotLabelsError(f"has a {kind} as its label, which cannot be hashed") from error
    if label != label:  # every NaN would be a class of its own
        raise NotLabelsError("has a label that is not a number (NaN)")
