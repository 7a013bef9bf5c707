# SPDX-License-Identifier: Apache-2.0
"""Elements of the page. Text is escaped when they are written, whatever it holds."""

from __future__ import annotations

import json
import unicodedata
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree

if TYPE_CHECKING:
    from penstock.insight.report.chart import Table

__all__ = ["Element", "data_block", "element", "table", "to_html"]

Element = ElementTree.Element

_VERBATIM: Final = ("script", "style")
_HIDDEN: Final = ("Cc", "Cf", "Cs")
_NARROW: Final = 14  # characters: longer texts get a column with room for words


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
        if isinstance(child, str):
            _add_text(made, child if tag in _VERBATIM else _visible(child))
        elif child is not None:
            made.append(child)
    return made


def _visible(text: str) -> str:
    """Return a text whose control characters, and those of direction, can be seen."""
    if text.isprintable():
        return text
    return "".join(
        repr(c)[1:-1] if c not in "\n\t" and unicodedata.category(c) in _HIDDEN else c for c in text
    )


def _add_text(parent: Element, text: str) -> None:
    if len(parent):
        parent[-1].tail = (parent[-1].tail or "") + text
    else:
        parent.text = (parent.text or "") + text


def data_block(key: str, data: Any) -> Element:  # noqa: ANN401 - whatever JSON has
    """Return a script element that runs nothing and holds data.

    Its text is not escaped when it is written, so there is no `<` in it.
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return element("script", text, type="application/json", id=key)


def table(content: Table, *, label: str, **attributes: object) -> Element:
    """Return a table in a box that scrolls, with a keyboard as well.

    Args:
        content: The table.
        label: What it is, for screen readers.
        attributes: Of the table.
    """
    kinds = [_kind(content, column) for column in range(len(content.header))]
    head = element(
        "tr",
        *(
            element("th", name, scope="col", class_=kind)
            for name, kind in zip(content.header, kinds, strict=True)
        ),
    )
    rows = [
        element(
            "tr", *(element("td", cell or "", class_=k) for cell, k in zip(row, kinds, strict=True))
        )
        for row in content.rows
    ]
    whole = element("table", element("thead", head), element("tbody", *rows), **attributes)
    return element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=label)


def _kind(content: Table, column: int) -> str:
    if column >= content.num_texts:
        return "number"
    longest = max((len(row[column] or "") for row in content.rows), default=0)
    return "text wide" if longest > _NARROW else "text"


def to_html(root: Element) -> str:
    """Return an element as HTML. Texts of scripts and styles are written as they are."""
    return ElementTree.tostring(root, encoding="unicode", method="html")
