# SPDX-License-Identifier: Apache-2.0
"""The options that say what the columns of a landmark list are, alike in all commands."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer

from penstock.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["in_words_of_options", "option_of", "takes_list_options"]


LandmarkLayout = StrEnum("LandmarkLayout", ["xxyy", "xyxy"])
BoxForm = StrEnum("BoxForm", ["xyxy", "xywh"])
BoxAt = StrEnum("BoxAt", ["before", "after"])
# By the names that they have in `LandmarkColumns` and its readers: type, option, and what it says.
_OPTIONS: Final[dict[str, tuple[Any, Any]]] = {
    "num_landmarks": (
        int | None,
        typer.Option(
            "--landmarks", min=0, metavar="K", help="Landmarks in a line.", show_default="found out"
        ),
    ),
    "layout": (
        LandmarkLayout | None,
        typer.Option("--layout", help="x1 .. xn y1 .. yn, or x1 y1 x2 y2 .."),
    ),
    "has_box": (bool, typer.Option("--box", help="Lines of the landmark list have a box.")),
    "box_format": (
        BoxForm | None,
        typer.Option("--box-format", help="Left, top, and right, bottom or width, height."),
    ),
    "box_at": (
        BoxAt | None,
        typer.Option("--box-at", help="The box comes before or after the landmarks."),
    ),
    "classes": (
        str,
        typer.Option(
            "--classes",
            metavar="A,B",
            help="Columns at the end of a landmark list; 'class' is the object's class.",
        ),
    ),
    "missing": (
        float | None,
        typer.Option(
            "--missing",
            metavar="X",
            help="x and y of landmarks that are not marked, besides nan.",
        ),
    ),
    "origin": (
        int | None,
        typer.Option(
            "--origin",
            min=0,
            max=1,
            help="Number of the first pixel, of VOC and landmark lists.",
            show_default="1 for voc, 0 for lists",
        ),
    ),
    "root": (
        Path | None,
        typer.Option("--root", metavar="DIR", help="Where the paths in lists start from."),
    ),
    "separator": (
        str | None,
        typer.Option(
            "--separator", metavar="TEXT", help="Separates columns.", show_default="blanks"
        ),
    ),
}
_DEFAULTS: Final[dict[str, Any]] = {"has_box": False, "classes": ""}
_SPELLED: Final = {"num_landmarks": "landmarks", "has_box": "box"}
_NAMED: Final = re.compile(rf"\b({'|'.join(_OPTIONS)})\b")
_SAYING: Final = "Say which columns there are: "


def option_of(name: str) -> str:
    """Return how an argument of a list's reader is called on the command line.

    Example:
        >>> option_of("has_box"), option_of("box_format"), option_of("split")
        ('--box', '--box-format', '--split')
    """
    return f"--{_SPELLED.get(name, name).replace('_', '-')}"


def takes_list_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of landmark lists.

    Its parameter `list_columns` gets those that were used: a dict, by the names that the readers
    have for them.
    """

    @functools.wraps(command)
    def with_options(**arguments: Any) -> None:  # noqa: ANN401
        said = {name: arguments.pop(name) for name in _OPTIONS}
        with in_words_of_options():
            command(**arguments, list_columns=_used(said))

    # What typer reads: the parameters in their order, with their types, as PEP 362 has it.
    types = get_type_hints(command, include_extras=True)
    parameters = [
        parameter.replace(annotation=types[name])
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "list_columns"
    ]
    parameters += [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_DEFAULTS.get(name),
            annotation=Annotated[kind, option],
        )
        for name, (kind, option) in _OPTIONS.items()
    ]
    signature = inspect.Signature(parameters)
    with_options.__signature__ = signature  # type: ignore[attr-defined]  # any function may have it
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options


def _used(said: dict[str, Any]) -> dict[str, Any]:
    classes = tuple(name.strip() for name in said["classes"].split(",") if name.strip())
    values = {**said, "classes": classes or None, "has_box": said["has_box"] or None}
    return {
        name: value.value if isinstance(value, StrEnum) else value
        for name, value in values.items()
        if value is not None
    }


@contextlib.contextmanager
def in_words_of_options() -> Iterator[None]:
    """Let an error that asks for the columns of a list name options, and not Python's arguments."""
    try:
        yield
    except StoreError as error:
        before, saying, names = str(error).partition(_SAYING)
        if not saying:
            raise
        told = _NAMED.sub(lambda found: option_of(found[1]), names)
        raise StoreError(f"{before}{saying}{told}") from error
