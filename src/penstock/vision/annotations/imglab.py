# SPDX-License-Identifier: Apache-2.0
"""The XML of dlib's imglab: one file for many images, with boxes and the landmarks in them.

Pixels are counted from 0, and a box over the whole of a 640 x 480 image is top=0, left=0,
width=640, height=480. A `part` is a landmark; it has a name, and a box may lack some of them.

Reference:
    D. E. King, dlib 19, tools/imglab and `load_image_dataset_metadata`.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import StoreError
from penstock.opening import MAX_TREE_BYTES, read_annotation
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
from penstock.vision.annotations.reading import (
    MAX_LANDMARK_NAMES,
    coordinate,
    key_of,
    listed_path,
    whole_number,
    xml_escaped,
)
from penstock.vision.annotations.voc_files import parse_xml, xml_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from xml.etree.ElementTree import Element

_SIDES: Final = ("left", "top", "width", "height")
_FLAGS: Final = ("truncated", "occluded", "difficult")
_VALUES_OF_FLAG: Final = {"0": False, "false": False, "1": True, "true": True}
_BOX_ATTRIBUTES: Final = {*_SIDES, *_FLAGS}


def read_imglab(path: str | Path) -> list[AnnotatedImage]:
    """Return the images of an imglab file, in its order."""
    path = Path(path)
    try:
        root = parse_xml(xml_text(read_annotation(path, MAX_TREE_BYTES)))
        if root.tag != "dataset":
            raise ValueError(f"the root element is <{root.tag}>, not <dataset>")
        names = sorted({_part_name(part) for part in root.iterfind("images/image/box/part")})
        if len(names) > MAX_LANDMARK_NAMES:
            most = f"{MAX_LANDMARK_NAMES:,} is the most"
            raise ValueError(f"its parts have {len(names):,} names; {most}")
        images = enumerate(root.iterfind("images/image"))
        return [_image(item, number, names, path) for number, item in images]
    except ValueError as error:
        raise StoreError(f"cannot read {path}: {error}.") from error


def _part_name(part: Element) -> str:
    name = part.get("name", "").strip()
    if not name:
        raise ValueError("a part has no name")
    return name


def _image(item: Element, number: int, names: list[str], path: Path) -> AnnotatedImage:
    file = item.get("file", "").strip()
    if not file:
        raise ValueError(f"image {number} names no file")
    where = f"image {number} ({file})"
    boxes = enumerate(item.findall("box"))
    return AnnotatedImage(
        listed_path(file, path.parent),
        key_of(file),
        _length(item, "width", where),
        _length(item, "height", where),
        tuple(_object(box, f"{where}: box {n}", names) for n, box in boxes),
        f"{path}, image {number}",
    )


def _length(item: Element, name: str, where: str) -> int | None:
    text = item.get(name, "0")
    length = whole_number(text)
    if length is None or length < 0:
        raise ValueError(f"{where}: {name} is {text[:40]!r}, not a number of pixels")
    return length or None


def _object(box: Element, where: str, names: list[str]) -> AnnotatedObject:
    left, top, width, height = (_number(box, side, where) for side in _SIDES)
    points = _points(box, where)
    return AnnotatedObject(
        class_name=(box.findtext("label") or "").strip(),
        box_xyxy_px=(left, top, left + width, top + height),
        landmarks_xy_px=tuple(points.get(n, (math.nan, math.nan)) for n in names if points),
        landmark_names=tuple(names) if points else (),
        extra={n: value.strip() for n, value in box.items() if n not in _BOX_ATTRIBUTES},
        difficult=_flag(box, "difficult", where),
        truncated=_flag(box, "truncated", where),
        occluded=_flag(box, "occluded", where),
    )


def _number(item: Element, name: str, where: str) -> float:
    text = item.get(name)
    if text is None:
        raise ValueError(f"{where} has no {name}")
    try:
        return coordinate(text)
    except ValueError as error:
        raise ValueError(f"{where}: {name} {error}") from None


def _points(box: Element, where: str) -> dict[str, tuple[float, float]]:
    points: dict[str, tuple[float, float]] = {}
    for part in box.findall("part"):
        name = _part_name(part)
        if name in points:
            raise ValueError(f"{where} has part {name!r} twice")
        place = f"{where}: part {name!r}"
        points[name] = (_number(part, "x", place), _number(part, "y", place))
    return points


def _flag(box: Element, name: str, where: str) -> bool | None:
    text = box.get(name)
    if text is None:
        return None
    if text.strip().lower() not in _VALUES_OF_FLAG:
        raise ValueError(f"{where}: {name} is {text[:40]!r}, not 0 or 1")
    return _VALUES_OF_FLAG[text.strip().lower()]


def write_imglab(
    images: Iterable[AnnotatedImage], *, name_of: Callable[[AnnotatedImage], str] | None = None
) -> bytes:
    """Return an imglab file, in UTF-8."""
    lines = ["<?xml version='1.0' encoding='UTF-8'?>", "<dataset>", "<images>"]
    for image in images:
        name = os.fspath(image.path) if name_of is None else name_of(image)
        size = (("width", image.width_px), ("height", image.height_px))
        attributes = _attributes([("file", name), *((n, str(v)) for n, v in size if v)])
        lines.append(f"  <image{attributes}>")
        for found in image.objects:
            lines += _box_lines(found)
        lines.append("  </image>")
    return "\n".join([*lines, "</images>", "</dataset>", ""]).encode()


def _attributes(pairs: Sequence[tuple[str, str]]) -> str:
    return "".join(f' {name}="{xml_escaped(value)}"' for name, value in pairs)


def _box_lines(found: AnnotatedObject) -> list[str]:
    if found.box_xyxy_px is None:
        return []
    left, top, right, bottom = map(whole_px, found.box_xyxy_px)
    sides = (("top", top), ("left", left), ("width", right - left), ("height", bottom - top))
    flags = [(name, getattr(found, name)) for name in _FLAGS]
    attributes = [
        *((name, str(value)) for name, value in sides),
        *((name, str(int(value))) for name, value in flags if value is not None),
        *((name, value) for name, value in found.extra.items() if can_be_attribute(name)),
    ]
    lines = [f"    <box{_attributes(attributes)}>"]
    if found.class_name:
        lines.append(f"      <label>{xml_escaped(found.class_name)}</label>")
    for number, (x, y) in enumerate(found.landmarks_xy_px):
        if not (math.isnan(x) or math.isnan(y)):
            place = [("x", str(whole_px(x))), ("y", str(whole_px(y)))]
            pairs = [("name", part_name(found, number)), *place]
            lines.append(f"      <part{_attributes(pairs)}/>")
    return [*lines, "    </box>"]


def whole_px(value: float) -> int:
    """Return the nearest whole number of pixels, .5 upwards, so that edges keep their order."""
    return math.floor(value + 0.5)


def part_name(found: AnnotatedObject, number: int) -> str:
    """Return what a landmark is called; a number that sorts in its place where it has no name."""
    if found.landmark_names:
        return found.landmark_names[number]
    return f"{number:0{max(2, len(str(len(found.landmarks_xy_px) - 1)))}d}"


def can_be_attribute(name: str) -> bool:
    """Return whether imglab's box can have an attribute of this name."""
    is_name = name.isascii() and name.replace("_", "a").replace("-", "a").isalnum()
    return is_name and name[0].isalpha() and name not in _BOX_ATTRIBUTES
