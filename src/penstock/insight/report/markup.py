# SPDX-License-Identifier: Apache-2.0
"""Elements of the page. Text is escaped when they are written, whatever it holds."""

from __future__ import annotations

import unicodedata
from typing import Final
from xml.etree import ElementTree

Element = ElementTree.Element

_HIDDEN: Final = ("Cc", "Cf", "Cs")


def element(tag: str, *children: Element | str | None, **attributes: object) -> Element:
    """Return an element.

    Args:
        tag: Its name.
        children: Elements and texts, in order; None is left out.
        attributes: `class_` is "class", other underscores are hyphens. None is left out.

    Example:
        >>> to_html(element("p", "1 < 2", element("b", "!"), class_="big", data_n=3))
        '<p class="big" data-n="3">1 &lt; 2<b>!</b></p>'
    """
    made = Element(tag)
    for name, value in attributes.items():
        if value is not None:
            made.set(name.rstrip("_").replace("_", "-"), _visible(str(value)))
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif child is not None and len(made):
            made[-1].tail = (made[-1].tail or "") + _visible(child)
        elif child is not None:
            made.text = (made.text or "") + _visible(child)
    return made


def _visible(text: str) -> str:
    """Return a text whose control characters, and those of direction, can be seen."""
    if text.isprintable():
        return text
    return "".join(
        repr(c)[1:-1] if c not in "\n\t" and unicodedata.category(c) in _HIDDEN else c for c in text
    )


def to_html(root: Element) -> str:
    """Return an element as HTML. The text of a style is written as it is."""
    return ElementTree.tostring(root, encoding="unicode", method="html")
