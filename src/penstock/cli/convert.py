# SPDX-License-Identifier: Apache-2.0
"""`penstock convert`: annotations of one form, or of several, into another."""

from __future__ import annotations

import contextlib
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads the annotations at run time
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

__all__ = ["convert"]


class Form(StrEnum):
    """Formats of annotations; those of `penstock.vision.convert.FORMATS`."""

    voc = "voc"
    imglab = "imglab"
    yolo = "yolo"
    landmarks = "landmarks"
    image_list = "image-list"


Placing = StrEnum("Placing", ["reference", "link", "copy"])
Polygons = StrEnum("Polygons", ["error", "box"])


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
    from penstock.vision.annotations.lists import LandmarkColumns
    from penstock.vision.convert import FORMATS, Source
    from penstock.vision.convert import convert as convert_to

    sources = []
    for text in src:  # what stands before the first colon is its format, if there is such one
        form, colon, path = text.partition(":")
        is_named = colon and path and form in FORMATS
        sources.append(Source(path, form) if is_named else Source(text, from_ and from_.value))
    options = {**list_columns, "split": split, "polygons": polygons and polygons.value}
    options = {name: value for name, value in options.items() if value is not None}
    columns = None
    if to is Form.landmarks and not any(source.takes("layout") for source in sources):
        names = [name for name in options if name in LandmarkColumns.__dataclass_fields__]
        columns = LandmarkColumns(**{n: options.pop(n) for n in names}) if names else None
    for name in options:
        if not any(source.takes(name) for source in sources):
            raise ConfigError(f"{option_of(name)} is of no use to any of these sources.")
    placing: Any = images and images.value
    with _stopping():
        report = convert_to(
            sources,
            dst,
            target_format=to.value,
            images=placing,
            strict=strict,
            columns=columns,
            default_class=default_class,
            bad_boxes=bad_boxes.policy,
            follow_links=follow_links,
            **options,
        )
    boxes = bad_boxes_text(report.box_counts)
    if boxes:
        say(boxes)
    for what, count in report.losses.items():
        say(f"{what}: {count:,} lost; {report.form} has no place for it")
    for note in report.notes:
        say(note)
    joined = f", {report.num_joined:,} of them of two sources" if report.num_joined else ""
    say(
        f"{report.path}: {counted(report.num_images, 'image')}, "
        f"{counted(report.num_objects, 'object')}{joined}"
    )


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
