# SPDX-License-Identifier: Apache-2.0
"""What a sample is called by people: its file, or its key."""

from __future__ import annotations

import bisect
from typing import Any, Final

__all__ = ["describe_sample"]

_LISTS: Final = ("samples", "imgs")  # of (path, class), as torchvision's folders have it
_DEEPEST: Final = 8  # datasets made of datasets


def describe_sample(dataset: Any, index: Any) -> str | None:  # noqa: ANN401
    """Return the name of a sample; None if the dataset says none.

    Asked are the dataset's method `describe(index)`, or its list `samples` (or `imgs`) of paths, or
    of tuples that begin with one; those of the datasets, too, that a subset or a concatenation is
    made of. What fails over a broken sample says nothing: this is asked while another error is
    being told.

    Example:
        >>> from penstock.data import Subset
        >>> class Folder(list):
        ...     samples = [("cat.jpg", 0), ("dog.jpg", 1)]
        >>> describe_sample(Subset(Folder("ab"), [1]), 0)
        'dog.jpg'
    """
    try:
        return _name(dataset, index, 0)
    except Exception:
        return None


def _name(dataset: Any, index: Any, depth: int) -> str | None:  # noqa: ANN401
    if index is None or depth > _DEEPEST:
        return None
    describe = getattr(dataset, "describe", None)
    if callable(describe):
        name = describe(index)
        return None if name is None else str(name)
    for name in _LISTS:
        if isinstance(known := getattr(dataset, name, None), (list, tuple)):
            entry = known[index]
            path = entry[0] if isinstance(entry, (list, tuple)) else entry
            return str(path)
    inner, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    if inner is not None and indices is not None:
        return _name(inner, indices[index], depth + 1)
    parts, ends = getattr(dataset, "datasets", None), getattr(dataset, "cumulative_sizes", None)
    if parts is not None and ends is not None:
        index = range(ends[-1])[index]
        part = bisect.bisect_right(ends, index)
        return _name(parts[part], index - (ends[part - 1] if part else 0), depth + 1)
    return None
