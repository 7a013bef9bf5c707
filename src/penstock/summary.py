# SPDX-License-Identifier: Apache-2.0
"""A one-line `repr`, made from names and values."""

from __future__ import annotations

import contextlib
import numbers
import re
from typing import TYPE_CHECKING, Any, ClassVar, Final

from penstock.redact import without_password, without_queries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_LINE: Final = 200  # characters of a repr
_IN_LINE: Final = 60  # characters of a value in it
_MOST_ITEMS: Final = 3
_DEEPEST: Final = 2
_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")


def length_or_none(value: Any) -> int | None:  # noqa: ANN401
    """Return the length of a user's object; None if it has none, or fails to say it."""
    with contextlib.suppress(Exception):
        return len(value)
    return None


class Summarized:
    """Base of classes that users print: names the attributes to show.

    Showing them reads nothing from a disk. A missing attribute ends the line: an object whose
    constructor failed may lack some.
    """

    __slots__ = ()

    _shows: ClassVar[tuple[str, ...]] = ("length",)
    """Attributes that are always shown; "length" is `len`, where there is one."""

    _shows_unless: ClassVar[dict[str, Any]] = {}
    """Attributes that are shown where they differ from these values, their defaults."""

    def _summary(self) -> Iterable[tuple[str, object]]:
        """Yield the name and value of what is shown, the most important first."""
        for name in self._shows:
            if name != "length":
                yield name, _part(name, getattr(self, name))
            elif (length := self._known_length()) is not None:
                yield name, length
        for name, default in self._shows_unless.items():
            value = getattr(self, name, default)
            if value is not default and not _is_equal(value, default):
                yield name, value

    def _known_length(self) -> int | None:
        """Return the length, if there is one and it is known."""
        return length_or_none(self)

    def __repr__(self) -> str:
        """Return one line: the class, and what is known of it by name."""
        kind = type(self).__name__
        line = ""
        for name, text in _texts(self._summary()):
            part = f"{', ' if line else ''}{name}={text}"
            if len(kind) + len(line) + len(part) > _LINE - len("(, …)"):
                line += ", …"
                break
            line += part
        return f"{kind}({line})"


def kind_of(value: object) -> str:
    """Return the class of a dataset, sampler or loader, and its length if it has one.

    Example:
        >>> kind_of([7, 8, 9]), kind_of(iter("abc"))
        ('list of 3', 'str_ascii_iterator')
    """
    length = None
    with contextlib.suppress(Exception):
        length = value._known_length() if isinstance(value, Summarized) else len(value)  # type: ignore[arg-type]
    kind = type(value).__name__
    return kind if length is None else f"{kind} of {length}"


def _texts(summary: Iterable[tuple[str, object]]) -> Iterator[tuple[str, str]]:
    """Yield names and texts, up to what cannot be had."""
    with contextlib.suppress(Exception):
        for name, value in summary:
            yield name, _shortened(_text(value))


def _part(name: str, value: Any) -> object:  # noqa: ANN401
    """Return a dataset, sampler or loader by its kind; another value as it is."""
    if name in {"dataset", "loader", "sampler"}:
        return kind_of(value)
    if name == "datasets":
        return _listed(list(value.values() if isinstance(value, dict) else value), kind_of)
    return value


def _text(value: Any, depth: int = 0) -> str:  # noqa: ANN401
    if isinstance(value, str):
        return value
    if hasattr(value, "__fspath__"):
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is None or isinstance(value, numbers.Number):
        return str(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, (list, tuple)) and depth < _DEEPEST:
        return _listed(value, lambda item: _text(item, depth + 1))
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):
        return name
    if isinstance(value, (Summarized, list, tuple, dict)):
        return kind_of(value)
    return _ADDRESS.sub("", repr(value))


def _listed(items: Sequence[Any], text: Callable[[Any], str]) -> str:
    shown = [text(item) for item in items[:_MOST_ITEMS]]
    more = [f"… {len(items)} in all"] * (len(items) > _MOST_ITEMS)
    return f"({', '.join(shown + more)})"


def _shortened(text: str) -> str:
    """Return a text in one line, without secrets, its middle left out if it is long."""
    text = " ".join(without_queries(without_password(text)).split())
    if len(text) > _IN_LINE:
        text = f"{text[: _IN_LINE // 2]}…{text[len(text) - _IN_LINE // 2 + 1 :]}"
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def _is_equal(value: object, default: object) -> bool:
    return type(value) is type(default) and value == default
