# SPDX-License-Identifier: Apache-2.0
"""The one class of a sample, to count and compare by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from penstock.data.labels.values import NotLabelsError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

__all__ = ["class_of_sample"]

_KEYS: Final = ("labels", "label", "targets", "target")


def class_of_sample(sample: Any, get_label: Callable[[Any], Any] | None = None) -> Hashable:  # noqa: ANN401
    """Return the class of a sample, equal for equal labels.

    Without `get_label` it is the last of a tuple or list; of a dict, or of one that stands last,
    what is called "labels", "label", "targets" or "target".

    Raises:
        NotLabelsError: it has no class, or several; the message goes on a sentence about it.

    Example:
        >>> class_of_sample(("pixels", 3)), class_of_sample({"image": 0, "label": "cat"})
        (3, 'cat')
        >>> class_of_sample("cat 7", str.split)
        Traceback (most recent call last):
        penstock.data.labels.values.NotLabelsError: has a list as its label, which cannot be hashed
    """
    label = _usual_label(sample) if get_label is None else get_label(sample)
    if getattr(label, "ndim", None) == 0 and hasattr(label, "item"):
        label = label.item()  # a tensor's hash is that of the object
    kind = type(label).__qualname__
    if label is None:
        raise NotLabelsError("has None as its label")
    if getattr(label, "shape", ()):
        raise NotLabelsError(f"has a {kind} of shape {tuple(label.shape)} as its label")
    if get_label is None and isinstance(label, (list, tuple)):
        raise NotLabelsError(f"has {len(label)} labels")
    try:
        hash(label)
    except TypeError as error:
        raise NotLabelsError(f"has a {kind} as its label, which cannot be hashed") from error
    if label != label:  # every NaN would be a class of its own
        raise NotLabelsError("has a label that is not a number (NaN)")
    name: Hashable = label
    return name


def _usual_label(sample: Any) -> Any:  # noqa: ANN401
    if isinstance(sample, (tuple, list)) and sample and isinstance(sample[-1], Mapping):
        sample = sample[-1]
    if isinstance(sample, Mapping):
        for key in _KEYS:
            if key in sample:
                return sample[key]
        keys = sorted(map(str, sample))[:8]
        raise NotLabelsError(f"is a dict of {keys}, without {' or '.join(map(repr, _KEYS))}")
    if not isinstance(sample, (tuple, list)) or len(sample) < 2:
        raise NotLabelsError(f"is a {type(sample).__qualname__}, neither a pair nor a dict")
    return sample[-1]
