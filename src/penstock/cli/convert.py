# SPDX-License-Identifier: Apache-2.0
"""`penstock convert`: annotations of one form, or of several, into another."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads the annotations at run time
from typing import Annotated, Any

import typer

from penstock.cli import options
from penstock.errors import ConfigError
from penstock.lines import counted, say

# Those of `penstock.vision.convert.reading.FORMATS`.
Form = StrEnum(
    "Form",
    {"voc": "voc", "imglab": "imglab", "yolo": "yolo", "coco": "coco", "landmarks": "landmarks",
     "image_list": "image-list"},
)  # fmt: skip
Placing = StrEnum("Placing", ["reference", "link", "copy"])
Polygons = StrEnum("Polygons", ["error", "box"])


@options.takes(list_columns=options.LIST_OPTIONS)
def convert(
    src: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC",
            help="Folders or files; FORMAT:PATH where the path does not say its format.",
        ),
    ],
    dst: Annotated[
        Path, typer.Argument(metavar="DST", help="A folder to make, of VOC or YOLO; else a file.")
    ],
    to: Annotated[Form, typer.Option("--to", help="Format to write.")],
    images: Annotated[
        Placing | None,
        typer.Option(
            help="Copy image files (of voc and yolo), link to them, or leave them where they are.",
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
    bad_boxes: options.BadBoxesOption = options.BadBoxes.keep,
    follow_links: options.FollowLinks = False,
    *,
    list_columns: dict[str, Any],
) -> None:
    """Convert annotations: VOC, YOLO, COCO, imglab and text lists.

    Several sources become one data set: what they say of the same image is put together. Nothing
    is ever replaced. A line goes to stdout for all that DST's format has no place for; the last one
    says what was written. The options of landmark lists are those of the sources, and of DST where
    no source is one.
    """
    from penstock.vision.annotations.lists import LandmarkColumns
    from penstock.vision.convert import Source
    from penstock.vision.convert import convert as convert_to
    from penstock.vision.convert.reading import FORMATS

    sources = []
    for text in src:  # what stands before the first colon is its format, if there is such one
        form, colon, path = text.partition(":")
        is_named = colon and path and form in FORMATS
        sources.append(Source(path, form) if is_named else Source(text))
    given = {**list_columns, "split": split, "polygons": polygons and polygons.value}
    given = {name: value for name, value in given.items() if value is not None}
    columns = None
    if to is Form.landmarks and not any(source.takes("layout") for source in sources):
        names = [name for name in given if name in LandmarkColumns.__dataclass_fields__]
        columns = LandmarkColumns(**{n: given.pop(n) for n in names}) if names else None
    for name in given:
        if not any(source.takes(name) for source in sources):
            raise ConfigError(f"{options.option_of(name)} is of no use to any of these sources.")
    sources = [
        replace(source, options={n: value for n, value in given.items() if source.takes(n)})
        for source in sources
    ]
    placing: Any = images and images.value
    policy: Any = (bad_boxes or options.BadBoxes.keep).value
    report = convert_to(
        sources,
        dst,
        target_format=to.value,
        images=placing,
        strict=strict,
        columns=columns,
        default_class=default_class,
        bad_boxes=policy,
        follow_links=follow_links,
    )
    if boxes := options.bad_boxes_text(report.box_counts):
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
