# SPDX-License-Identifier: Apache-2.0
"""What goes to a terminal or into a pipe: names that stay in their line, sizes, no passwords."""

from __future__ import annotations

import sys

from penstock.secrets import without_password

__all__ = ["amount", "printable", "without_password"]


def printable(text: str) -> str:
    """Return what stays in its line, whatever bytes a file's name has: others are escaped."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def amount(num_bytes: float) -> str:
    """Return a number of bytes in the unit that suits it.

    Example:
        >>> amount(999), amount(12_345), amount(3.1e8), amount(2e12)
        ('999 B', '12.3 kB', '310.0 MB', '2,000.0 GB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:.0f} B"
