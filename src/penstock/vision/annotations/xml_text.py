# SPDX-License-Identifier: Apache-2.0
"""Text for XML files, as UTF-8 that every parser reads back."""

from __future__ import annotations

import re
from typing import Final
from xml.sax.saxutils import escape

__all__ = ["element_line", "xml_escaped"]

# XML 1.0 has no way to say these, escaped or not; lone surrogates are no characters.
_UNSAYABLE: Final = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")
# Parsers make line feeds of carriage returns, and blanks of all of these in attributes.
_ENTITIES: Final = {"\r": "&#13;", "\n": "&#10;", "\t": "&#9;", '"': "&quot;", "'": "&apos;"}


def xml_escaped(text: str) -> str:
    """Return text as an element or an attribute can hold it.

    Raises:
        ValueError: it has a character that XML cannot hold.

    Example:
        >>> xml_escaped("a < b & 'c'")
        'a &lt; b &amp; &apos;c&apos;'
    """
    unsayable = _UNSAYABLE.search(text)
    if unsayable:
        raise ValueError(f"{text[:80]!r} has {unsayable[0]!r}, which XML cannot hold")
    return escape(text, _ENTITIES)


def element_line(tag: str, text: str) -> str:
    """Return the line of an element that holds text alone, indented by a tab."""
    return f"\t<{tag}>{xml_escaped(text)}</{tag}>"
