# SPDX-License-Identifier: Apache-2.0
"""Numbers of things, in words."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1.

    Example:
        >>> counted(1, "sample"), counted(2000, "class"), counted(0, "batch")
        ('1 sample', '2,000 classes', '0 batches')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"
