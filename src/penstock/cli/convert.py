# SPDX-License-Identifier: Apache-2.0
"""`penstock convert`: annotations of one form, or of several, into another."""

from __future__ import annotations

import contextlib
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.arguments import BadBoxes, FollowLinksOption, bad_boxes_text
from penstock.cli.list_options import option_of, takes_list_options
from penstock.cli.sigterm import INTERRUPTED, TERMINATED, Termination
from penstock.errors import ConfigError
from penstock.lines import say
from penstock.plural import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.vision.annotations.lists import LandmarkColumns
    from penstock.vision.convert import ConvertReport, Source

__all__ = ["convert"]


class Form(StrEnum):
    """Forms of annotations; those of `penstock.vision.convert.FORMATS`."""

    voc = "voc"
    imglab = "imglab"
    yolo = "yolo"
    landmarks = "landmarks"
    image_list = "image-list"


class Placing(StrEnum):
    """What happens to image files."""

    reference = "reference"
    link = "link"
    copy = "copy"


class Polygons(StrEnum):
    """What happens to polygons in YOLO's label files."""

    error = "error"
    box = "box"


@takes_list_options
def convert(
    src: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC",
            help="Folders or files; FORMAT:PATH where the path does not say its format.",
        ),
    ],
    dst: Annotated[
        Path, typer.Argument(metavar="DST", help="A folder to make; or a file, for lists.")
    ],
    to: Annotated[Form, typer.Option("--to", help="Format to write.")],
    from_: Annotated[
        Form | None, typer.Option("--from", help="Format of the sources that do not say theirs.")
    ] = None,
    images: Annotated[
        Placing | None,
        typer.Option(
            help="Leave image files where they are, link to them, or copy them.",
            show_default="copy for voc and yolo, else reference",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Write nothing if DST's format would lose something.")
    ] = False,
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help="Take this part only, of VOC or YOLO.")
    ] = None,
    polygons: Annotated[
        Polygons | None, typer.Option(help="Refuse YOLO's polygons, or take the box around.")
    ] = None,
    default_class: Annotated[
        str, typer.Option(metavar="NAME", help="Class of objects without one, in VOC and YOLO.")
    ] = "object",
    bad_boxes: Annotated[
        BadBoxes,
        typer.Option(
            "--bad-boxes",
            help="What becomes of boxes without area, inverted ones, and those beyond their image.",
        ),
    ] = BadBoxes.keep,
    follow_links: FollowLinksOption = False,
    *,
    list_columns: dict[str, Any],
) -> None:
    """Convert annotations between VOC, YOLO, imglab and text lists.

    Several sources become one data set: what they say of the same image is put together. Nothing
    is ever replaced. A line goes to stdout for all that DST's format has no place for; the last one
    says what was written. The options of landmark lists are those of the sources, and of DST where
    no source is one.
    """
    from penstock.vision.convert import convert as convert_to

    sources = [_source(text, _value(from_)) for text in src]
    others = {"split": split, "polygons": _value(polygons)}
    options = {name: v for name, v in {**list_columns, **others}.items() if v is not None}
    columns = None
    if to is Form.landmarks and not any(source.takes("layout") for source in sources):
        columns = _taken_columns(options)
    with _stopping():
        report = convert_to(
            _with_options(sources, options),
            dst,
            target_format=to.value,
            images=_value(images),
            strict=strict,
            columns=columns,
            default_class=default_class,
            bad_boxes=bad_boxes.policy,
            follow_links=follow_links,
        )
    _report(report)


@contextlib.contextmanager
def _stopping() -> Iterator[None]:
    """Let SIGTERM remove what is half written, as a Ctrl-C does, and say so."""
    with Termination() as termination:
        try:
            yield
        except KeyboardInterrupt:
            say("penstock: stopped; what was half written has been removed.", err=True)
            code = TERMINATED if termination.is_noted else INTERRUPTED
            raise typer.Exit(code) from None


def _value(choice: StrEnum | None) -> Any:  # noqa: ANN401
    return None if choice is None else choice.value


def _source(text: str, form: str | None) -> Source:
    """Return a source; what stands before the first colon is its format, if there is such one."""
    from penstock.vision.convert import FORMATS, Source

    before, colon, path = text.partition(":")
    if colon and before in FORMATS and path:
        return Source(Path(path), before)
    return Source(Path(text), form)


def _taken_columns(options: dict[str, Any]) -> LandmarkColumns | None:
    """Return the columns to write, and take their options away; None if none was given."""
    from penstock.vision.annotations.lists import LandmarkColumns

    names = LandmarkColumns.__dataclass_fields__
    given = {name: options.pop(name) for name in list(options) if name in names}
    return LandmarkColumns(**given) if given else None


def _with_options(sources: list[Source], options: dict[str, Any]) -> list[Source]:
    """Return the sources with the options that each has; one that none has is an error."""
    from penstock.vision.convert import Source

    for name in options:
        if not any(source.takes(name) for source in sources):
            raise ConfigError(f"{option_of(name)} is of no use to any of these sources.")
    return [
        Source(source.path, source.form, {n: v for n, v in options.items() if source.takes(n)})
        for source in sources
    ]


def _report(report: ConvertReport) -> None:
    boxes = bad_boxes_text(report.box_counts)
    if boxes:
        say(boxes)
    for what, count in report.losses.items():
        say(f"{what}: {count:,} lost; {report.form} has no place for it")
    for note in report.notes:
        say(note)
    joined = f", {report.num_joined:,} of them told of twice" if report.num_joined else ""
    say(
        f"{report.path}: {counted(report.num_images, 'image')}, "
        f"{counted(report.num_objects, 'object')}{joined}"
    )
