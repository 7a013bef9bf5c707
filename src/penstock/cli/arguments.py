# SPDX-License-Identifier: Apache-2.0
"""Arguments that several commands have."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from penstock.errors import ConfigError
from penstock.lines import say

if TYPE_CHECKING:
    from penstock.vision.datasets.rules import BadBoxes as Policy
    from penstock.vision.datasets.rules import BoxCounts

__all__ = [
    "ANNOTATED_HELP",
    "SOURCE_HELP",
    "BadBoxes",
    "BadBoxesOption",
    "ClassOf",
    "ClassOfOption",
    "Column",
    "FollowLinksOption",
    "ImageField",
    "KeyField",
    "LabelField",
    "bad_boxes_text",
    "tell_bad_boxes",
    "workers_of",
]

SOURCE_HELP: Final = (
    "A folder, a store's address, or module:name of a dataset, or of a function or class that "
    "makes one; it is run."
)

ANNOTATED_HELP: Final = (
    " Also YOLO's folder or yaml file, imglab's XML, a list of landmarks or of images."
)


class BadBoxes(StrEnum):
    """What becomes of boxes that cannot be right; see `penstock.vision.datasets.rules`."""

    keep = "keep"
    drop = "drop"
    fix = "fix"
    error = "raise"

    @property
    def policy(self) -> Policy:
        """What the library calls it."""
        return self.value


FollowLinksOption = Annotated[
    bool,
    typer.Option(
        "--follow-links", help="Take files outside of SRC too, where links or names lead to them."
    ),
]

BadBoxesOption = Annotated[
    BadBoxes | None,
    typer.Option(
        "--bad-boxes",
        help="What becomes of boxes without area, inverted ones, and those beyond their image.",
        show_default="fix",
    ),
]


def bad_boxes_text(counts: BoxCounts) -> str:
    """Return a line on boxes that cannot be right, and what became of them; "" if all are.

    Example:
        >>> from penstock.vision.datasets.rules import BoxCounts
        >>> bad_boxes_text(BoxCounts(9, 9, zero_area=2, outside=1))
        'bad boxes: 2 zero_area, 1 outside; kept as they are (--bad-boxes)'
        >>> bad_boxes_text(BoxCounts(9, 7, zero_area=2, outside=1, clipped=1, dropped=2))
        'bad boxes: 2 zero_area, 1 outside; 1 clipped, 2 dropped (--bad-boxes)'
    """
    kinds = _counted(counts, "zero_area", "inverted", "outside")
    if not kinds:
        return ""
    done = _counted(counts, "swapped", "clipped", "dropped")
    return f"bad boxes: {kinds}; {done or 'kept as they are'} (--bad-boxes)"


def tell_bad_boxes(dataset: object) -> None:
    """Say on stderr which objects a dataset leaves out, or changes, for the sake of their boxes."""
    counts = getattr(dataset, "box_counts", None)
    if counts is not None and (text := bad_boxes_text(counts)):
        say(f"{text.removesuffix(' (--bad-boxes)')}, as for training", err=True)


def _counted(counts: BoxCounts, *names: str) -> str:
    return ", ".join(f"{getattr(counts, n):,} {n}" for n in names if getattr(counts, n))


class ClassOf(StrEnum):
    """Which objects of an image say its class; see `penstock.labels_of`."""

    all = "all"
    first = "first"
    rarest = "rarest"


Column = Annotated[
    str | None,
    typer.Option(
        "--column",
        metavar="NAME",
        help="Take classes from this field: an element or attribute of XML, as pose or difficult, "
        "or a column that --classes names.",
        show_default="the class",
    ),
]
ClassOfOption = Annotated[
    ClassOf,
    typer.Option("--class-of", help="Which objects of an image say its class."),
]


def _field_option(what: str, things: str) -> Any:  # noqa: ANN401 - typer's
    """Return the option of a MongoDB field and of a table's column: one, with two names."""
    return typer.Option(
        f"--{what}-field",
        f"--{what}-column",
        metavar="NAME",
        help=f"Field (MongoDB) or column (Parquet, Arrow) of {things}.",
    )


ImageField = Annotated[str | None, _field_option("image", "images")]
LabelField = Annotated[str | None, _field_option("label", "classes")]
KeyField = Annotated[str | None, _field_option("key", "keys")]


def workers_of(text: str) -> int | Literal["auto"]:
    """Return what `--workers` means.

    Raises:
        ConfigError: neither a number nor "auto".
    """
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise ConfigError(f'--workers must be a number from 0 on, or "auto", got {text!r}.')
    return int(text)
