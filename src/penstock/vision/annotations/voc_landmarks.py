# SPDX-License-Identifier: Apache-2.0
"""Landmarks in VOC's XML.

VOC has none itself, and tools add them in several ways. These are read:

    <landmarks><landmark><name>nose</name><x>7</x><y>9</y><visibility>2</visibility></landmark> …
    <landmarks><landmark name="nose" x="7" y="9" visibility="2"/> …     also <point>, <keypoint>
    <landmarks><nose><x>7</x><y>9</y></nose> …                          the element is the name
    <landmarks><x1>7</x1><y1>9</y1><x2>8</x2> …                         numbers, from any first one
    <landmarks><nose_x>7</nose_x><nose_y>9</nose_y> …                   names
    <landmarks>7 9 8 9 …</landmarks>                                    x1 y1 x2 y2 …
    <lm><x1>7</x1><y1>9</y1> …</lm>                                     as in WIDER FACE's copies

There `<has_lm>0</has_lm>` says that the numbers mean nothing, and the object has no landmarks.
`keypoints` may stand for `landmarks`. The first form is the one written. `visibility` is COCO's: 0
not marked, 1 hidden, 2 seen; `visible` is 0 for hidden, 1 for seen. "nan" says that a point is not
marked. Coordinates count from where those of the boxes do.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.vision.annotations.limits import MAX_LANDMARK_NAMES, MAX_LANDMARKS
from penstock.vision.annotations.numbers import coordinate, coordinate_text
from penstock.vision.annotations.repeated import first_repeated
from penstock.vision.annotations.xml_text import xml_escaped

if TYPE_CHECKING:
    from collections.abc import Sequence
    from xml.etree.ElementTree import Element

    from penstock.vision.annotations.model import AnnotatedObject

__all__ = ["LANDMARK_TAGS", "landmark_lines", "read_landmarks"]

LANDMARK_TAGS: Final = ("landmarks", "keypoints", "lm")
_POINT_TAGS: Final = frozenset(("landmark", "point", "keypoint", "lm"))
_NUMBERED: Final = re.compile(r"(?P<side>[xy])_?(?P<point>[0-9]{1,6})")
_NAMED: Final = re.compile(r"(?P<point>.+)_(?P<side>[xy])")
# Beside the points, and no points themselves.
_ASIDE: Final = frozenset(("visible", "visibility", "blur"))
_VISIBILITIES: Final = {"visibility": ("0", "1", "2"), "visible": (None, "0", "1")}


class _Point(NamedTuple):
    x: float
    y: float
    name: str = ""
    visibility: int | None = None


Landmarks = tuple[tuple[tuple[float, float], ...], tuple[str, ...], tuple[int, ...]]


def read_landmarks(item: Element, where: str, origin: int) -> Landmarks:
    """Return points, their names and their visibility; the last two empty if no point has any.

    Raises:
        ValueError: a coordinate is missing or is none, or the form is unknown.
    """
    holders = [child for child in item if child.tag in LANDMARK_TAGS]
    if not holders or (item.findtext("has_lm") or "").strip() == "0":
        return (), (), ()
    if len(holders) > 1:
        raise ValueError(f"{where} has landmarks twice: <{holders[0].tag}>, <{holders[1].tag}>")
    points = _points(holders[0], f"{where}: {holders[0].tag}", origin)
    names = tuple(point.name for point in points)
    most = MAX_LANDMARK_NAMES if any(names) else MAX_LANDMARKS
    if len(points) > most:
        raise ValueError(f"{where} has {len(points):,} landmarks; {most:,} is the most")
    if any(names) and not all(names):
        raise ValueError(f"{where}: landmark {names.index('')} has no name, and others have one")
    twice = first_repeated(names)
    if any(names) and twice is not None:
        raise ValueError(f"{where}: two landmarks are called {twice!r}")
    visibility = tuple(_visibility(point) for point in points)
    is_said = any(point.visibility is not None for point in points)
    return (
        tuple((point.x, point.y) for point in points),
        names if any(names) else (),
        visibility if is_said else (),
    )


def _points(holder: Element, where: str, origin: int) -> Sequence[_Point]:
    children = [child for child in holder if child.tag not in _ASIDE]
    if not len(holder):
        return _from_text((holder.text or "").replace(",", " ").split(), where, origin)
    if children and all(_NUMBERED.fullmatch(child.tag) for child in children):
        sides = _sides(children, _NUMBERED, where)
        numbers = sorted(map(int, sides))
        if numbers != list(range(numbers[0], numbers[0] + len(sides))):
            raise ValueError(f"{where} has points {numbers[0]} to {numbers[-1]}, but not all")
        ordered = sorted(sides, key=int)
        return [_pair(sides[point], f"{where}: {point}", origin) for point in ordered]
    if all(_NAMED.fullmatch(child.tag) and not len(child) for child in children):
        sides = _sides(children, _NAMED, where)
        named = sides.items()
        return [_pair(of_one, f"{where}: {n}", origin)._replace(name=n) for n, of_one in named]
    return [_from_element(c, f"{where}: <{c.tag}> {n}", origin) for n, c in enumerate(children)]


def _from_text(words: list[str], where: str, origin: int) -> list[_Point]:
    if len(words) % 2:
        raise ValueError(f"{where} has {len(words)} numbers; x and y of each point are even")
    values = [_value(word, f"{where}: number {n}", origin) for n, word in enumerate(words)]
    return [_Point(*pair) for pair in zip(values[::2], values[1::2], strict=True)]


def _sides(
    children: list[Element], pattern: re.Pattern[str], where: str
) -> dict[str, dict[str, str]]:
    """Return the texts of x and y for each point, in the order that points come."""
    sides: dict[str, dict[str, str]] = {}
    for child in children:
        found = pattern.fullmatch(child.tag)
        assert found is not None  # the caller looked
        of_point = sides.setdefault(found["point"], {})
        if found["side"] in of_point:
            raise ValueError(f"{where} has <{child.tag}> twice")
        of_point[found["side"]] = child.text or ""
    return sides


def _pair(sides: dict[str, str], where: str, origin: int) -> _Point:
    x, y = (_value(sides.get(side), f"{where}: {side}", origin) for side in "xy")
    return _Point(x, y)


def _from_element(child: Element, where: str, origin: int) -> _Point:
    texts = {name: _field(child, name) for name in ("name", "x", "y", *_VISIBILITIES)}
    if texts["x"] is None and texts["y"] is None:
        raise ValueError(f"{where} is no point: it has no x and y")
    name = (texts["name"] or "").strip()
    if not name and child.tag not in _POINT_TAGS:
        name = child.tag
    x, y = (_value(texts[side], f"{where}: {side}", origin) for side in "xy")
    return _Point(x, y, name, _visibility_in(texts, where))


def _field(child: Element, name: str) -> str | None:
    text = child.get(name)
    return child.findtext(name) if text is None else text


def _visibility_in(texts: dict[str, str | None], where: str) -> int | None:
    for name, known in _VISIBILITIES.items():
        text = (texts[name] or "").strip()
        if text and text not in known:
            raise ValueError(
                f"{where}: {name} is {text[:40]!r}, not {' or '.join(filter(None, known))}"
            )
        if text:
            return known.index(text)
    return None


def _visibility(point: _Point) -> int:
    if point.visibility is not None:
        return point.visibility
    return 0 if math.isnan(point.x) else 2


def _value(text: str | None, where: str, origin: int) -> float:
    if text is None:
        raise ValueError(f"{where} is missing")
    if text.strip().lower() == "nan":
        return math.nan
    try:
        return coordinate(text, origin)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from None


def landmark_lines(found: AnnotatedObject, where: str, origin: int) -> list[str]:
    """Return the lines of `<landmarks>`; none for an object without.

    Raises:
        ValueError: there are more or fewer names, or visibilities, than points.
    """
    points = found.landmarks_xy_px
    if not points:
        return []
    for what, values in (("names", found.landmark_names), ("visibilities", found.visibility)):
        if values and len(values) != len(points):
            raise ValueError(f"{where} has {len(points)} landmarks and {len(values)} {what}")
    lines = ["\t<landmarks>"]
    for number, (x, y) in enumerate(points):
        name = found.landmark_names[number] if found.landmark_names else ""
        seen = f"<visibility>{found.visibility[number]}</visibility>" if found.visibility else ""
        lines.append(
            f"\t\t<landmark>{f'<name>{xml_escaped(name)}</name>' if name else ''}"
            f"<x>{coordinate_text(x, origin)}</x><y>{coordinate_text(y, origin)}</y>{seen}"
            "</landmark>"
        )
    return [*lines, "\t</landmarks>"]
