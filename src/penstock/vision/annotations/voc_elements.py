# SPDX-License-Identifier: Apache-2.0
"""An `<object>` of Pascal VOC's XML. VOC's way to count pixels is known here, and nowhere else.

VOC counts pixels from 1 and includes both ends: a box over the whole of a 640 x 480 image is
xmin=1, ymin=1, xmax=640, ymax=480. Here boxes are 0-based and half-open, so that the same box is
(0, 0, 640, 480), its width 640 - 0, and its pixels `image[0:480, 0:640]`:

    x1, y1, x2, y2 = xmin - origin, ymin - origin, xmax, ymax        origin = 1

Tools that count from 0 write the box's edges, (0, 0, 640, 480) for the same one: then origin is 0,
and the numbers are taken as they are. A landmark is a point, and becomes x - origin, y - origin.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from penstock.vision.annotations.model import AnnotatedObject
from penstock.vision.annotations.numbers import coordinate, coordinate_text
from penstock.vision.annotations.voc_landmarks import LANDMARK_TAGS, landmark_lines, read_landmarks
from penstock.vision.annotations.xml_text import element_line, xml_escaped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from xml.etree.ElementTree import Element

__all__ = ["read_box", "read_class_name", "read_flag", "read_length", "read_object", "write_object"]

_SIDES: Final = ("xmin", "ymin", "xmax", "ymax")
# "Unspecified" is what old tools write into fields that nobody filled in.
_FLAGS: Final = {
    "": None,
    "unspecified": None,
    "0": False,
    "false": False,
    "1": True,
    "true": True,
}
_FLAG_NAMES: Final = ("truncated", "occluded", "difficult")
_ATTRIBUTES: Final = "attributes"
_KNOWN: Final = {"name", "bndbox", "pose", "part", _ATTRIBUTES, *_FLAG_NAMES, *LANDMARK_TAGS}


def read_object(item: Element, where: str, origin: int) -> AnnotatedObject:
    """Return what an `<object>` or a `<part>` says.

    Args:
        item: The element.
        where: What errors call it, without its class: "object 3".
        origin: Number of the first pixel, see above.

    Raises:
        ValueError: a field is missing or is none of its kind.
    """
    name = read_class_name(item, where)
    where = f"{where} ({name})"
    points, point_names, visibility = read_landmarks(item, where, origin)
    flags = {flag: read_flag(item, flag, where) for flag in _FLAG_NAMES}
    parts = enumerate(item.findall("part"))
    return AnnotatedObject(
        class_name=name,
        box_xyxy_px=None if item.find("bndbox") is None else read_box(item, where, origin),
        landmarks_xy_px=points,
        landmark_names=point_names,
        visibility=visibility,
        pose=(item.findtext("pose") or "").strip(),
        extra=_extra(item),
        parts=tuple(read_object(part, f"{where}: part {n}", origin) for n, part in parts),
        **flags,
    )


def read_class_name(item: Element, where: str) -> str:
    """Return the text of `<name>`; without one, ValueError."""
    name = (item.findtext("name") or "").strip()
    if not name:
        raise ValueError(f"{where} has no name")
    return name


def read_box(item: Element, where: str, origin: int = 1) -> tuple[float, float, float, float]:
    """Return `<bndbox>` as left, top, right, bottom: 0-based, half-open."""
    box = item.find("bndbox")
    if box is None:
        raise ValueError(f"{where} has no bndbox")
    minus = (origin, origin, 0, 0)
    left, top, right, bottom = (
        _number(box.findtext(side), f"{where}: {side}", less)
        for side, less in zip(_SIDES, minus, strict=True)
    )
    return left, top, right, bottom


def _number(text: str | None, where: str, minus: int = 0) -> float:
    """Return the number of an element that has to be there."""
    if text is None:
        raise ValueError(f"{where} is missing")
    try:
        return coordinate(text, minus)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from None


def read_flag(item: Element, name: str, where: str) -> bool | None:
    """Return a flag; None where the element is missing, or nobody filled it in."""
    text = (item.findtext(name) or "").strip()
    if text.lower() not in _FLAGS:
        raise ValueError(f"{where}: {name} is {text[:40]!r}, not 0 or 1")
    return _FLAGS[text.lower()]


def read_length(root: Element, name: str) -> int | None:
    """Return width or height, in pixels, from an annotation's `<size>`; None if missing or 0."""
    text = root.findtext(f"size/{name}")
    if text is None or not text.strip():
        return None
    number = _number(text, f"size: {name}")
    if number < 0 or number != int(number):
        raise ValueError(f"size: {name} is {text.strip()[:40]!r}, not a number of pixels")
    return int(number) or None


def _extra(item: Element) -> dict[str, str]:
    """Return what else is in an object: attributes by name, other elements by their path.

    A name that comes again is numbered as XPath does: x, x[2], x[3].
    """
    found: dict[str, str] = {}
    times: Counter[str] = Counter()
    for name, value in (*_attributes(item), *_leaves(item)):
        times[name] += 1
        unique = name if times[name] == 1 else f"{name}[{times[name]}]"
        if name and unique not in found:
            found[unique] = (value or "").strip()
    return found


def _attributes(item: Element) -> Iterator[tuple[str, str | None]]:
    for attribute in item.findall(f"{_ATTRIBUTES}/attribute"):
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


def write_object(found: AnnotatedObject, where: str, origin: int, tag: str = "object") -> list[str]:
    """Return the lines of an `<object>`, each indented by a tab.

    Raises:
        ValueError: it has no class, or something that XML or VOC cannot say.
    """
    if not found.class_name.strip():
        raise ValueError(f"{where} has no class, and VOC has no object without a <name>")
    where = f"{where} ({found.class_name})"
    lines = [element_line("name", found.class_name)]
    if found.pose:
        lines.append(element_line("pose", found.pose))
    for name in _FLAG_NAMES:
        flag = getattr(found, name)
        if flag is not None:
            lines.append(element_line(name, str(int(flag))))
    lines += _box_lines(found, origin)
    lines += landmark_lines(found, where, origin)
    lines += _attribute_lines(found)
    for number, part in enumerate(found.parts):
        lines += write_object(part, f"{where}: part {number}", origin, "part")
    return [f"\t<{tag}>", *(f"\t{line}" for line in lines), f"\t</{tag}>"]


def _box_lines(found: AnnotatedObject, origin: int) -> list[str]:
    if found.box_xyxy_px is None:
        return []
    plus = (origin, origin, 0, 0)
    sides = zip(_SIDES, found.box_xyxy_px, plus, strict=True)
    inner = [element_line(side, coordinate_text(value, more)) for side, value, more in sides]
    return ["\t<bndbox>", *(f"\t{line}" for line in inner), "\t</bndbox>"]


def _attribute_lines(found: AnnotatedObject) -> list[str]:
    if not found.extra:
        return []
    inner = [
        f"\t\t<attribute><name>{xml_escaped(name)}</name>"
        f"<value>{xml_escaped(value)}</value></attribute>"
        for name, value in found.extra.items()
    ]
    return [f"\t<{_ATTRIBUTES}>", *inner, f"\t</{_ATTRIBUTES}>"]
