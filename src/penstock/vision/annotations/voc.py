# SPDX-License-Identifier: Apache-2.0
"""Pascal VOC's annotations: an XML file for each image.

VOC counts pixels from 1 and includes both ends: a box over the whole of a 640 x 480 image is
xmin=1, ymin=1, xmax=640, ymax=480. Here boxes are 0-based and half-open, so that the same box is
(0, 0, 640, 480), its width 640 - 0, and its pixels `image[0:480, 0:640]`:

    x1, y1, x2, y2 = xmin - origin, ymin - origin, xmax, ymax        origin = 1

Tools that count from 0 write the box's edges, (0, 0, 640, 480) for the same one: then origin is 0,
and the numbers are taken as they are. A landmark is a point, and becomes x - origin, y - origin.

VOC has no landmarks itself, and tools add them in several ways. These are read:

    <landmarks><landmark><name>nose</name><x>7</x><y>9</y><visibility>2</visibility></landmark> …
    <landmarks><landmark name="nose" x="7" y="9" visibility="2"/> …     also <point>, <keypoint>
    <landmarks><nose><x>7</x><y>9</y></nose> …                          the element is the name
    <landmarks><x1>7</x1><y1>9</y1><x2>8</x2> …                         numbers, from any first one
    <landmarks>7 9 8 9 …</landmarks>                                    x1 y1 x2 y2 …
    <lm><x1>7</x1><y1>9</y1> …</lm>                                     as in WIDER FACE's copies

There `<has_lm>0</has_lm>` says that the numbers mean nothing, and the object has no landmarks.
`keypoints` may stand for `landmarks`. The first form is the one written. `visibility` is COCO's: 0
not marked, 1 hidden, 2 seen; `visible` is 0 for hidden, 1 for seen. "nan" says that a point is not
marked.

Reference:
    Everingham and others, "The PASCAL Visual Object Classes Challenge 2012 development kit".
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from xml.etree.ElementTree import Element

import numpy as np

from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
from penstock.vision.annotations.reading import (
    add_element,
    coordinate,
    coordinate_text,
    first_repeated,
    flag,
    length_px,
    parse_xml,
    xml_bytes,
)
from penstock.vision.arguments import checked_choice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_SIDES: Final = ("xmin", "ymin", "xmax", "ymax")
_FLAG_NAMES: Final = ("truncated", "occluded", "difficult")
_LANDMARK_TAGS: Final = ("landmarks", "keypoints", "lm")
_KNOWN: Final = {"name", "bndbox", "pose", "part", "attributes", *_FLAG_NAMES, *_LANDMARK_TAGS}
_POINT_TAGS: Final = frozenset(("landmark", "point", "keypoint", "lm"))
_NUMBERED: Final = re.compile(r"([xy])_?([0-9]{1,6})")
_OF_VISIBLE: Final = {"0": "1", "1": "2"}
_ASIDE: Final = frozenset(("visible", "visibility", "blur"))  # beside the points, and no points

_Point = tuple[float, float, str, int | None]  # x, y, name, visibility


def read_voc(
    data: bytes | str, *, path: str | Path, key: str, origin: int = 1, source: str = ""
) -> AnnotatedImage:
    """Return what one XML file says of its image."""
    return voc_image(voc_root(data), Path(path), key, origin, source)


def voc_root(data: bytes | str) -> Element:
    """Return the `<annotation>` element of a file."""
    return parse_xml(data, "annotation")


def voc_image(root: Element, path: Path, key: str, origin: int, source: str) -> AnnotatedImage:
    """Return what an `<annotation>` element says of its image."""
    checked_choice("origin", origin, (0, 1))
    objects = enumerate(root.findall("object"))
    return AnnotatedImage(
        path,
        key,
        length_px(root.findtext("size/width"), "size: width"),
        length_px(root.findtext("size/height"), "size: height"),
        tuple(_object(item, f"object {number}", origin) for number, item in objects),
        source,
    )


def _object(item: Element, where: str, origin: int) -> AnnotatedObject:
    """Return what an `<object>` or a `<part>` says; errors call it `where`, and by its class."""
    name = (item.findtext("name") or "").strip()
    if not name:
        raise ValueError(f"{where} has no name")
    where = f"{where} ({name})"
    box = None
    if (sides := item.find("bndbox")) is not None:
        left, top = (_number(sides, side, where, origin) for side in _SIDES[:2])
        right, bottom = (_number(sides, side, where, 0) for side in _SIDES[2:])
        box = left, top, right, bottom
    points = _landmarks(item, where, origin)
    is_named = any(name for _, _, name, _ in points)
    is_seen = any(visibility is not None for *_, visibility in points)
    parts = enumerate(item.findall("part"))
    flags: Any = {name: flag(item.findtext(name), f"{where}: {name}") for name in _FLAG_NAMES}
    return AnnotatedObject(
        class_name=name,
        box_xyxy_px=box,
        landmarks_xy_px=tuple((x, y) for x, y, _, _ in points),
        landmark_names=tuple(name for _, _, name, _ in points) if is_named else (),
        visibility=tuple((0 if math.isnan(x) else 2) if v is None else v for x, _, _, v in points)
        if is_seen
        else (),
        pose=(item.findtext("pose") or "").strip(),
        extra=_extra(item),
        parts=tuple(_object(part, f"{where}: part {n}", origin) for n, part in parts),
        **flags,
    )


def _number(item: Element, name: str, where: str, minus: int) -> float:
    """Return the number of an element that has to be there."""
    text = item.findtext(name)
    if text is None:
        raise ValueError(f"{where}: {name} is missing")
    return coordinate(text, f"{where}: {name}", minus)


def _extra(item: Element) -> dict[str, str]:
    """Return what else is in an object, by name or path; one that comes again as x[2], x[3]."""
    found: dict[str, str] = {}
    times: Counter[str] = Counter()
    for name, value in (*_attributes(item), *_leaves(item)):
        times[name] += 1
        if name:
            unique = name if times[name] == 1 else f"{name}[{times[name]}]"
            found.setdefault(unique, (value or "").strip())
    return found


def _attributes(item: Element) -> Iterator[tuple[str, str | None]]:
    for attribute in item.findall("attributes/attribute"):
        name = (attribute.findtext("name") or attribute.get("name") or "").strip()
        value = attribute.findtext("value")
        yield name, attribute.text if value is None else value


def _leaves(item: Element, path: str = "") -> Iterator[tuple[str, str | None]]:
    for child in item:
        here = f"{path}{child.tag}"
        if not path and child.tag in _KNOWN:
            continue
        if len(child):
            yield from _leaves(child, f"{here}/")
        else:
            yield here, child.text


def _landmarks(item: Element, where: str, origin: int) -> list[_Point]:
    holders = [child for child in item if child.tag in _LANDMARK_TAGS]
    if not holders or (item.findtext("has_lm") or "").strip() == "0":
        return []
    if len(holders) > 1:
        raise ValueError(f"{where} has landmarks twice: <{holders[0].tag}>, <{holders[1].tag}>")
    points = _points(holders[0], f"{where}: {holders[0].tag}", origin)
    names = [name for _, _, name, _ in points]
    if any(names) and not all(names):
        raise ValueError(f"{where}: landmark {names.index('')} has no name, and others have one")
    twice = first_repeated(names)
    if twice:
        raise ValueError(f"{where}: two landmarks are called {twice!r}")
    return points


def _points(holder: Element, where: str, origin: int) -> list[_Point]:
    """Return the points in any of the forms that the top of this module shows."""
    if not len(holder):
        words = (holder.text or "").replace(",", " ").split()
        if len(words) % 2:
            raise ValueError(f"{where} has {len(words)} numbers; x and y of each point are even")
        values = [_side(word, f"{where}: number {n}", origin) for n, word in enumerate(words)]
        return [(x, y, "", None) for x, y in zip(values[::2], values[1::2], strict=True)]
    children = [child for child in holder if child.tag not in _ASIDE]
    numbered = [_NUMBERED.fullmatch(child.tag) for child in children]
    if not children or None in numbered:
        return [_point(c, f"{where}: <{c.tag}> {n}", origin) for n, c in enumerate(children)]
    sides: dict[tuple[int, str], str] = {}
    for child, found in zip(children, numbered, strict=True):
        assert found is not None
        place = int(found[2]), found[1]
        if place in sides:
            raise ValueError(f"{where} has <{child.tag}> twice")
        sides[place] = child.text or ""
    numbers = sorted({number for number, _ in sides})
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise ValueError(f"{where} has points {numbers[0]} to {numbers[-1]}, but not all")
    found_points: list[_Point] = []
    for number in numbers:
        x, y = (_side(sides.get((number, s)), f"{where}: {number}: {s}", origin) for s in "xy")
        found_points.append((x, y, "", None))
    return found_points


def _side(text: str | None, where: str, origin: int) -> float:
    if text is None:
        raise ValueError(f"{where} is missing")
    return math.nan if text.strip().lower() == "nan" else coordinate(text, where, origin)


def _point(child: Element, where: str, origin: int) -> _Point:
    """Return a point that is an element, with x and y as attributes or as elements within."""
    names = ("name", "x", "y", "visibility", "visible")
    said = {name: child.get(name, child.findtext(name)) for name in names}
    if said["x"] is None and said["y"] is None:
        raise ValueError(f"{where} is no point: it has no x and y")
    x, y = (_side(said[side], f"{where}: {side}", origin) for side in "xy")
    visible = (said["visible"] or "").strip()
    seen = (said["visibility"] or "").strip() or _OF_VISIBLE.get(visible, visible)
    if seen not in ("", "0", "1", "2"):
        raise ValueError(f"{where}: visibility is {seen[:40]!r}, not 0 or 1 or 2")
    name = (said["name"] or "").strip() or (child.tag if child.tag not in _POINT_TAGS else "")
    return x, y, name, int(seen) if seen else None


def write_voc(image: AnnotatedImage, *, origin: int = 1) -> bytes:
    """Return the XML file of an image, in UTF-8; `read_voc` reads the same image from it."""
    checked_choice("origin", origin, (0, 1))
    root = Element("annotation")
    add_element(root, "filename", image.path.name)
    if image.width_px and image.height_px:
        size = add_element(root, "size")
        for name, length in (("width", image.width_px), ("height", image.height_px), ("depth", 3)):
            add_element(size, name, str(length))
    for number, found in enumerate(image.objects):
        _add_object(root, found, f"object {number}", origin)
    return xml_bytes(root)


def _add_object(
    parent: Element, found: AnnotatedObject, where: str, origin: int, tag: str = "object"
) -> None:
    if not found.class_name.strip():
        raise ValueError(f"{where} has no class, and VOC has no object without a <name>")
    where = f"{where} ({found.class_name})"
    points, names, visibility = found.landmarks_xy_px, found.landmark_names, found.visibility
    item = add_element(parent, tag)
    add_element(item, "name", found.class_name)
    if found.pose:
        add_element(item, "pose", found.pose)
    for name in _FLAG_NAMES:
        if getattr(found, name) is not None:
            add_element(item, name, str(int(getattr(found, name))))
    if found.box_xyxy_px is not None:
        box = add_element(item, "bndbox")
        for n, (side, value) in enumerate(zip(_SIDES, found.box_xyxy_px, strict=True)):
            add_element(box, side, coordinate_text(value, origin if n < 2 else 0))
    if points:
        holder = add_element(item, "landmarks")
        for number, (x, y) in enumerate(points):
            point = add_element(holder, "landmark")
            if names:
                add_element(point, "name", names[number])
            add_element(point, "x", coordinate_text(x, origin))
            add_element(point, "y", coordinate_text(y, origin))
            if visibility:
                add_element(point, "visibility", str(visibility[number]))
    if found.extra:
        holder = add_element(item, "attributes")
        for name, text in found.extra.items():
            attribute = add_element(holder, "attribute")
            add_element(attribute, "name", name)
            add_element(attribute, "value", text)
    for number, part in enumerate(found.parts):
        _add_object(item, part, f"{where}: part {number}", origin, "part")


@dataclass(frozen=True, eq=False)
class VOCAnnotation:
    """The annotation of one image; its arrays have a row for each object, in the file's order.

    Attributes:
        filename: As the annotation says it; empty if it does not. It need not be true.
        width_px: Width of the image; None where it is missing or 0.
        height_px: Height of the image; None where it is missing or 0.
        class_names: Class of each object.
        boxes_xyxy_px: float32, shape (objects, 4): left, top, right, bottom; 0-based, half-open.
        difficult: bool, shape (objects,): objects that VOC's own evaluation does not count.
        truncated: bool, shape (objects,): objects that go on beyond their box.
    """

    filename: str
    width_px: int | None
    height_px: int | None
    class_names: tuple[str, ...]
    boxes_xyxy_px: NDArray[np.float32]
    difficult: NDArray[np.bool_]
    truncated: NDArray[np.bool_]


def parse_voc(xml: str | bytes) -> VOCAnnotation:
    """Return the boxes of an annotation; `annotations.voc.read_voc` returns all that it says.

    Nothing outside of `xml` is read: a DOCTYPE, which entities need, is an error. `difficult` and
    `truncated` may be missing and are then false.

    Args:
        xml: The file, as bytes or as text.

    Raises:
        ValueError: it is no XML, or no annotation; a field is missing or is no number. The message
            names the object.

    Example:
        >>> found = parse_voc(
        ...     "<annotation><size><width>640</width><height>480</height></size><object>"
        ...     "<name>cell</name><bndbox><xmin>1</xmin><ymin>11</ymin><xmax>20</xmax>"
        ...     "<ymax>480</ymax></bndbox></object></annotation>"
        ... )
        >>> found.class_names, found.boxes_xyxy_px
        (('cell',), array([[  0.,  10.,  20., 480.]], dtype=float32))
    """
    root = voc_root(xml)
    image = voc_image(root, Path(), "", 1, "")
    for number, found in enumerate(image.objects):
        if found.box_xyxy_px is None:
            raise ValueError(f"object {number} ({found.class_name}) has no bndbox")
    boxes = [found.box_xyxy_px for found in image.objects]
    return VOCAnnotation(
        (root.findtext("filename") or "").strip(),
        image.width_px,
        image.height_px,
        tuple(found.class_name for found in image.objects),
        np.array(boxes, np.float32).reshape(-1, 4),
        np.array([found.difficult or False for found in image.objects], np.bool_),
        np.array([found.truncated or False for found in image.objects], np.bool_),
    )
