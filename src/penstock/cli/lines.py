# SPDX-License-Identifier: Apache-2.0
"""What goes to a terminal or into a pipe: names that stay in their line, sizes, no passwords."""

from __future__ import annotations

import re
import sys
from typing import Final

__all__ = ["amount", "printable", "without_password"]

# To the last @ of the line, or of the word: somebody may have typed one of the password's own
# without escaping it, or a space. Slashes may be folded, as paths fold them, or missing.
_PASSWORDS: Final = (
    # MongoDB's; a port is none.
    re.compile(r"(mongo[a-z+.-]*[:/]+[^:@/\s]*):(?!\d{1,5}(?:[/,\s]|$))[^\n]*@", re.IGNORECASE),
    re.compile(r"([a-z][a-z0-9+.-]*:?/+[^:@/\s]*):\S*@", re.IGNORECASE),
    re.compile(r"([^:@/\s]*):[^/\s]*@"),
)
_SECRET_OPTION: Final = re.compile(
    r"([?&](?:\w*(?:password|token|secret)\w*|authMechanismProperties)=)[^&\s]*", re.IGNORECASE
)


def without_password(text: str) -> str:
    """Return a text with the secrets of all addresses in it left out.

    Example:
        >>> without_password("cannot reach mongodb://me:pa@ss@host/db.photos?proxyPassword=x&w=1")
        'cannot reach mongodb://me:***@host/db.photos?proxyPassword=***&w=1'
        >>> without_password("mongodb:/me:pass@host does not exist")
        'mongodb:/me:***@host does not exist'
    """
    for password in _PASSWORDS:
        text = password.sub(r"\1:***@", text)
    return _SECRET_OPTION.sub(r"\1***", text)


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
