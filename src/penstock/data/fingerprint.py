# SPDX-License-Identifier: Apache-2.0
"""Whether a dataset's contents are still those of an earlier day."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["fingerprint_of"]

_DEEPEST: Final = 8  # datasets made of datasets


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
