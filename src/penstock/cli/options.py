# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have."""

from __future__ import annotations

import functools
import inspect
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer

from penstock.lines import say

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.vision.datasets.rules import BoxCounts

SOURCE_HELP: Final = (
    "A folder, a store's address, or module:name of a dataset, or of a function or class that "
    "makes one; it is run."
)
ANY_SOURCE: Final = (
    f"{SOURCE_HELP} Also YOLO's folder or yaml file, imglab's XML, COCO's JSON, a list of "
    "landmarks or of images."
)

BadBoxes = StrEnum("BadBoxes", {"keep": "keep", "drop": "drop", "fix": "fix", "error": "raise"})
ClassOf = StrEnum("ClassOf", ["all", "first", "rarest"])
LandmarkLayout = StrEnum("LandmarkLayout", ["xxyy", "xyxy"])
BoxForm = StrEnum("BoxForm", ["xyxy", "xywh"])
BoxAt = StrEnum("BoxAt", ["before", "after"])

BadBoxesOption = Annotated[
    BadBoxes | None,
    typer.Option(
        "--bad-boxes",
        help="What becomes of boxes without area, inverted ones, and those beyond their image.",
    ),
]
ClassOfOption = Annotated[
    ClassOf, typer.Option("--class-of", help="Which objects of an image say its class.")
]
Column = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Take classes from this field: an element or attribute of XML, as pose or difficult, "
        "or a column that --classes names.",
        show_default="the class",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Give one JSON object for programs.")]
FollowLinks = Annotated[
    bool,
    typer.Option(
        "--follow-links", help="Take files outside of SRC too, where links or names lead to them."
    ),
]
Split = Annotated[
    str | None, typer.Option(metavar="NAME", help="Which part of a folder, as in VOC's.")
]


def _field_option(what: str, things: str) -> Any:  # noqa: ANN401 - typer's
    names = (f"--{what}-field", f"--{what}-column")
    text = f"Field (MongoDB) or column (Parquet, Arrow) of {things}."
    return Annotated[str | None, typer.Option(*names, metavar="NAME", help=text)]


# Parameters that `takes` gives to a command, by the names that the readers have for them.
FIELD_OPTIONS: Final[dict[str, Any]] = {
    "image_field": _field_option("image", "images"),
    "label_field": _field_option("label", "classes"),
    "key_field": _field_option("key", "keys"),
}
LIST_OPTIONS: Final[dict[str, Any]] = {
    "num_landmarks": Annotated[
        int | None,
        typer.Option("--landmarks", min=0, metavar="K", help="Landmarks in a line of a list."),
    ],
    "layout": Annotated[
        LandmarkLayout | None, typer.Option(help="x1 .. xn y1 .. yn, or x1 y1 x2 y2 ..")
    ],
    "has_box": Annotated[bool, typer.Option("--box", help="Lines of the list have a box.")],
    "box_format": Annotated[
        BoxForm | None, typer.Option(help="Left, top, and right, bottom or width, height.")
    ],
    "box_at": Annotated[
        BoxAt | None, typer.Option(help="The box comes before or after the landmarks.")
    ],
    "classes": Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Columns at the end of a landmark list; 'class' is the object's class.",
        ),
    ],
    "missing": Annotated[
        float | None,
        typer.Option(metavar="X", help="x and y of landmarks that are not marked, besides nan."),
    ],
    "origin": Annotated[
        int | None,
        typer.Option(
            min=0,
            max=1,
            help="Number of the first pixel, of VOC and landmark lists.",
            show_default="1 for voc, 0 for lists",
        ),
    ],
    "root": Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the paths in lists start from.")
    ],
    "separator": Annotated[
        str | None, typer.Option(metavar="TEXT", help="Separates columns.", show_default="blanks")
    ],
}
TEXT_OPTIONS: Final[dict[str, Any]] = {
    "tokenizer": Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="For tokens:PATH: a tokenizer.json of Hugging Face's; without it the corpus has "
            "token IDs.",
        ),
    ],
    "text_key": Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Field or column of the texts, or of the token IDs.",
            show_default="text, or input_ids",
        ),
    ],
    "append_token": Annotated[
        str | None,
        typer.Option(metavar="TOKEN", help="End each document with this token, as '</s>' or 2."),
    ],
}
_SPELLED: Final = {"num_landmarks": "landmarks", "has_box": "box"}


def option_of(name: str) -> str:
    """Return the option of an argument.

    Example:
        >>> option_of("has_box"), option_of("box_format")
        ('--box', '--box-format')
    """
    return f"--{_SPELLED.get(name, name).replace('_', '-')}"


def takes(**groups: dict[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command groups of options: its parameter of that name is a dict of those used."""

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_options(**arguments: Any) -> None:  # noqa: ANN401
            for group, options in groups.items():
                given = {name: arguments.pop(name) for name in options}
                arguments[group] = {
                    name: _plain(name, value)
                    for name, value in given.items()
                    if value is not None and value is not False
                }
            command(**arguments)

        # What typer reads: the parameters with their types.
        types = get_type_hints(command, include_extras=True)
        parameters = [
            parameter.replace(annotation=types[name])
            for name, parameter in inspect.signature(command).parameters.items()
            if name not in groups
        ]
        keyword: Any = inspect.Parameter.KEYWORD_ONLY
        for options in groups.values():
            parameters += [
                inspect.Parameter(name, keyword, default=None, annotation=kind)
                for name, kind in options.items()
            ]
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_options

    return decorated


def _plain(name: str, value: Any) -> Any:  # noqa: ANN401
    if name == "classes":
        return tuple(word.strip() for word in value.split(",") if word.strip())
    return value.value if isinstance(value, StrEnum) else value


def bad_boxes_text(counts: BoxCounts) -> str:
    """Return a line on boxes that cannot be right, and what became of them; "" if all are.

    Example:
        >>> from penstock.vision.datasets.rules import BoxCounts
        >>> bad_boxes_text(BoxCounts(9, 7, zero_area=2, outside=1, clipped=1, dropped=2))
        'bad boxes: 2 zero_area, 1 outside; 1 clipped, 2 dropped (--bad-boxes)'
    """
    kinds, done = (
        ", ".join(f"{getattr(counts, n):,} {n}" for n in names if getattr(counts, n))
        for names in (("zero_area", "inverted", "outside"), ("swapped", "clipped", "dropped"))
    )
    return f"bad boxes: {kinds}; {done or 'kept as they are'} (--bad-boxes)" if kinds else ""


def warn_of_bad_boxes(dataset: object) -> None:
    """Say on stderr how many objects a dataset leaves out or changes because of their boxes."""
    counts = getattr(dataset, "box_counts", None)
    if counts is not None and (text := bad_boxes_text(counts)):
        say(f"{text.removesuffix(' (--bad-boxes)')}, as for training", err=True)
