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
from typing import TYPE_CHECKING, Any, Final
from xml.etree.ElementTree import Element

from penstock.opening import MAX_TREE_BYTES, read_annotation
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
from penstock.vision.annotations.reading import (
    MAX_LANDMARK_NAMES,
    add_element,
    coordinate,
    flag,
    key_of,
    length_px,
    listed_path,
    parse_xml,
    reading,
    xml_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

_FLAGS: Final = ("truncated", "occluded", "difficult")
_BOX_ATTRIBUTES: Final = {"left", "top", "width", "height", *_FLAGS}


def read_imglab(path: str | Path) -> list[AnnotatedImage]:
    """Return the images of an imglab file, in its order."""
    path = Path(path)
    with reading(path):
        root = parse_xml(read_annotation(path, MAX_TREE_BYTES), "dataset")
        names = sorted({_part_name(part) for part in root.iterfind("images/image/box/part")})
        if len(names) > MAX_LANDMARK_NAMES:
            most = f"{MAX_LANDMARK_NAMES:,} is the most"
            raise ValueError(f"its parts have {len(names):,} names; {most}")
        images = enumerate(root.iterfind("images/image"))
        return [_image(item, number, names, path) for number, item in images]


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
        length_px(item.get("width"), f"{where}: width"),
        length_px(item.get("height"), f"{where}: height"),
        tuple(_object(box, f"{where}: box {n}", names) for n, box in boxes),
        f"{path}, image {number}",
    )


def _object(box: Element, where: str, names: list[str]) -> AnnotatedObject:
    left, top, width, height = (
        _number(box, side, where) for side in ("left", "top", "width", "height")
    )
    points: dict[str, tuple[float, float]] = {}
    for part in box.findall("part"):
        name = _part_name(part)
        if name in points:
            raise ValueError(f"{where} has part {name!r} twice")
        place = f"{where}: part {name!r}"
        points[name] = _number(part, "x", place), _number(part, "y", place)
    flags: Any = {name: flag(box.get(name), f"{where}: {name}") for name in _FLAGS}
    return AnnotatedObject(
        class_name=(box.findtext("label") or "").strip(),
        box_xyxy_px=(left, top, left + width, top + height),
        landmarks_xy_px=tuple(points.get(n, (math.nan, math.nan)) for n in names if points),
        landmark_names=tuple(names) if points else (),
        extra={n: value.strip() for n, value in box.items() if n not in _BOX_ATTRIBUTES},
        **flags,
    )


def _number(item: Element, name: str, where: str) -> float:
    text = item.get(name)
    if text is None:
        raise ValueError(f"{where} has no {name}")
    return coordinate(text, f"{where}: {name}")


def write_imglab(images: Iterable[AnnotatedImage]) -> bytes:
    """Return an imglab file, in UTF-8."""
    root = Element("dataset")
    listed = add_element(root, "images")
    for image in images:
        size = {"width": image.width_px, "height": image.height_px}
        sides = {side: str(length) for side, length in size.items() if length}
        item = add_element(listed, "image", "", {"file": os.fspath(image.path), **sides})
        for found in image.objects:
            if found.box_xyxy_px is not None:
                _add_box(item, found, found.box_xyxy_px)
    return xml_bytes(root)


def _add_box(
    item: Element, found: AnnotatedObject, box_xyxy_px: tuple[float, float, float, float]
) -> None:
    left, top, right, bottom = map(whole_px, box_xyxy_px)
    sides = {"top": top, "left": left, "width": right - left, "height": bottom - top}
    flags = {name: getattr(found, name) for name in _FLAGS}
    attributes = {
        **{name: str(int(value)) for name, value in (sides | flags).items() if value is not None},
        **{name: value for name, value in found.extra.items() if can_be_attribute(name)},
    }
    box = add_element(item, "box", "", attributes)
    if found.class_name:
        add_element(box, "label", found.class_name)
    points = found.landmarks_xy_px
    digits = max(2, len(str(len(points) - 1)))  # so that numbers sort in their order
    for number, (x, y) in enumerate(points):
        if not (math.isnan(x) or math.isnan(y)):
            name = found.landmark_names[number] if found.landmark_names else f"{number:0{digits}d}"
            place = {"name": name, "x": str(whole_px(x)), "y": str(whole_px(y))}
            add_element(box, "part", "", place)


def whole_px(value: float) -> int:
    """Return the nearest whole number of pixels, .5 upwards, so that edges keep their order."""
    return math.floor(value + 0.5)


def can_be_attribute(name: str) -> bool:
    """Return whether imglab's box can have an attribute of this name."""
    is_name = name.isascii() and name.replace("_", "a").replace("-", "a").isalnum()
    return is_name and name[0].isalpha() and name not in _BOX_ATTRIBUTES
