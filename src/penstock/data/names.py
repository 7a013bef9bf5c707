# SPDX-License-Identifier: Apache-2.0
"""What a dataset says of itself: the name of a sample, and the fingerprint of the contents."""

from __future__ import annotations

import bisect
from typing import Any, Final

import numpy as np

_LISTS: Final = ("samples", "imgs")  # of (path, class), as torchvision's folders have it
_DEEPEST: Final = 8  # datasets made of datasets
_MOST_LISTED: Final = 16


def name_samples(dataset: Any, indices: Any) -> str:  # noqa: ANN401
    """Return "sample 3 (photos/cat.jpg)", or "samples [3, 4]"; indices may be of any kind."""
    try:
        listed = indices.tolist() if isinstance(indices, np.ndarray) else list(indices)
    except TypeError:  # a slice, say
        return f"samples {indices!r}"
    if len(listed) > _MOST_LISTED:
        first = ", ".join(map(repr, listed[:_MOST_LISTED]))
        return f"samples [{first}, … {len(listed)} in all]"
    if len(listed) != 1:
        return f"samples {listed}"
    name = describe_sample(dataset, listed[0])
    return f"sample {listed[0]!r}" + ("" if name is None else f" ({name})")


def describe_sample(dataset: Any, index: Any) -> str | None:  # noqa: ANN401
    """Return the name of a sample; None if the dataset says none."""
    # Searched are the dataset's method `describe(index)`, or its list `samples` (or `imgs`) of
    # paths, or of tuples that begin with one; those of the datasets, too, that a subset or a
    # concatenation is made of. What fails returns None: this is called while another error is
    # raised.
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


def fingerprint_of(dataset: Any) -> str | None:  # noqa: ANN401
    """Return the `fingerprint` of a dataset, or of the one that it is a part of; None without one.

    Stores have one, and any dataset may: a short text that changes when the contents do.
    """
    for _ in range(_DEEPEST):
        found = getattr(dataset, "fingerprint", None)
        if isinstance(found, str):
            return found
        dataset = getattr(dataset, "dataset", None)
    return None
