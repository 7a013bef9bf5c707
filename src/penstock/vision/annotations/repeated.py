# SPDX-License-Identifier: Apache-2.0
"""Which of some names comes twice, found in one pass: files may have very many."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["first_repeated"]


def first_repeated(names: Iterable[str]) -> str | None:
    """Return the first name that was there before; None if each is another.

    Example:
        >>> first_repeated(["a", "b", "a"]), first_repeated(["a", "b"])
        ('a', None)
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
