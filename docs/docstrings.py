# SPDX-License-Identifier: Apache-2.0
"""Makes of docstrings what the reference shows: what the source has and Griffe does not know."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from griffe import Extension

if TYPE_CHECKING:
    from griffe import Class, Object

NAME = re.compile(r"`(penstock(?:\.\w+)+)`")
# Python calls these; what they do is what everybody expects.
UNREMARKABLE = {
    "__eq__", "__getstate__", "__hash__", "__new__", "__reduce__", "__repr__", "__setstate__",
    "__str__",
}  # fmt: skip
PAGE = re.compile(r"`?\bdocs/([\w/-]+\.md(?:#\w+)?)`?")


class Docstrings(Extension):
    """Reads `Example:` as the section it is, and makes links of the names and pages in the text."""

    def on_object(self, *, obj: Object, **kwargs: object) -> None:
        """Change the docstring of an object that has been loaded."""
        if obj.docstring is not None:
            # Griffe has the plural alone; the other would be a box of text, not code.
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            text = NAME.sub(r'<autoref optional identifier="\1">`\1`</autoref>', text)
            # As seen from a page in reference/.
            obj.docstring.value = PAGE.sub(r"[docs/\1](../\1)", text)

    def on_class(self, *, cls: Class, **kwargs: object) -> None:
        """Leave out methods that tell a reader nothing; lead from an error to its explanation."""
        for name in UNREMARKABLE & cls.members.keys():
            cls.del_member(name)
        if cls.parent is not None and cls.parent.path == "penstock.errors" and cls.docstring:
            place = f"troubleshooting.md#{cls.name.lower()}"
            cls.docstring.value += f"\n\nWhat to do: [docs/{place}](../{place})."
