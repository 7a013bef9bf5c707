# SPDX-License-Identifier: Apache-2.0
"""`penstock convert`: annotations of one form, or of several, into another."""

from __future__ import annotations

import contextlib
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.lines import printable
from penstock.cli.stopping import INTERRUPTED, TERMINATED, Termination
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.vision.annotations.landmark_list import LandmarkColumns
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


class Layout(StrEnum):
    """Order of coordinates in a landmark list."""

    xxyy = "xxyy"
    xyxy = "xyxy"


class BoxForm(StrEnum):
    """Columns of a box in a landmark list."""

    xyxy = "xyxy"
    xywh = "xywh"


class BoxAt(StrEnum):
    """Where the box of a landmark list is."""

    before = "before"
    after = "after"


class Polygons(StrEnum):
    """What happens to polygons in YOLO's label files."""

    error = "error"
    box = "box"


def convert(
    src: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC...",
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
    landmarks: Annotated[
        int | None,
        typer.Option(min=0, metavar="K", help="Landmarks in a line.", show_default="found out"),
    ] = None,
    layout: Annotated[
        Layout | None, typer.Option(help="x1 .. xn y1 .. yn, or x1 y1 x2 y2 ..")
    ] = None,
    box: Annotated[
        bool, typer.Option("--box", help="Lines of the landmark list have a box.")
    ] = False,
    box_format: Annotated[
        BoxForm | None, typer.Option(help="Left, top, and right, bottom or width, height.")
    ] = None,
    box_at: Annotated[
        BoxAt | None, typer.Option(help="The box comes before or after the landmarks.")
    ] = None,
    classes: Annotated[
        str,
        typer.Option(metavar="A,B", help="Columns at the end; 'class' is the object's class."),
    ] = "",
    missing: Annotated[
        float | None,
        typer.Option(metavar="X", help="x and y of landmarks that are not marked, besides nan."),
    ] = None,
    origin: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=1,
            help="Number of the first pixel, of VOC and landmark lists.",
            show_default="1 for voc, 0 for lists",
        ),
    ] = None,
    root: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the paths in lists start from.")
    ] = None,
    separator: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Separates columns.", show_default="blanks")
    ] = None,
    polygons: Annotated[
        Polygons | None, typer.Option(help="Refuse YOLO's polygons, or take the box around.")
    ] = None,
    default_class: Annotated[
        str, typer.Option(metavar="NAME", help="Class of objects without one, in VOC and YOLO.")
    ] = "object",
) -> None:
    """Convert annotations between VOC, YOLO, imglab and text lists.

    Several sources become one data set: what they say of the same image is put together. Nothing
    is ever replaced. A line goes to stdout for all that DST's format has no place for; the last one
    says what was written. The options of landmark lists are those of the sources, and of DST where
    no source is one.
    """
    from penstock.vision.convert import convert as convert_to

    of_list = {
        "num_landmarks": landmarks,
        "layout": _value(layout),
        "has_box": box or None,
        "box_format": _value(box_format),
        "box_at": _value(box_at),
        "classes": tuple(name.strip() for name in classes.split(",") if name.strip()) or None,
        "missing": missing,
        "separator": separator,
        "origin": origin,
    }
    sources = [_source(text, _value(from_)) for text in src]
    others = {"split": split, "root": root, "polygons": _value(polygons)}
    options = {name: v for name, v in {**of_list, **others}.items() if v is not None}
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
        )
    _report(report)


@contextlib.contextmanager
def _stopping() -> Iterator[None]:
    """Let SIGTERM remove what is half written, as a Ctrl-C does, and say so."""
    with Termination() as termination:
        try:
            yield
        except KeyboardInterrupt:
            sys.stderr.write("penstock: stopped; what was half written has been removed.\n")
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
    from penstock.vision.annotations.landmark_list import LandmarkColumns

    names = LandmarkColumns.__dataclass_fields__
    given = {name: options.pop(name) for name in list(options) if name in names}
    return LandmarkColumns(**given) if given else None


def _with_options(sources: list[Source], options: dict[str, Any]) -> list[Source]:
    """Return the sources with the options that each has; one that none has is an error."""
    from penstock.vision.convert import Source

    for name in options:
        if not any(source.takes(name) for source in sources):
            shown = {"num_landmarks": "landmarks", "has_box": "box"}.get(name, name)
            raise ConfigError(f"--{shown.replace('_', '-')} is of no use to any of these sources.")
    return [
        Source(source.path, source.form, {n: v for n, v in options.items() if source.takes(n)})
        for source in sources
    ]


def _report(report: ConvertReport) -> None:
    for what, count in report.losses.items():
        line = f"{what}: {count:,} lost; {report.form} has no place for it"
        sys.stdout.write(f"{printable(line)}\n")
    for note in report.notes:
        sys.stdout.write(f"{printable(note)}\n")
    joined = f", {report.num_joined:,} of them told of twice" if report.num_joined else ""
    sys.stdout.write(
        f"{printable(str(report.path))}: {report.num_images:,} images, "
        f"{report.num_objects:,} objects{joined}\n"
    )
    sys.stdout.flush()
