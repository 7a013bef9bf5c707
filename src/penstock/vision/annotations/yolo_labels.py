# SPDX-License-Identifier: Apache-2.0
"""Label files of YOLO: a line for each object, its numbers as fractions of width and height.

    CLASS CX CY W H                     the box: its centre and its size
    CLASS CX CY W H X1 Y1 X2 Y2 ..      and landmarks, `kpt_shape: [K, 2]`
    CLASS CX CY W H X1 Y1 V1 X2 Y2 V2   and their visibility, `kpt_shape: [K, 3]`
    CLASS X1 Y1 X2 Y2 X3 Y3 ..          a polygon, in data sets for segmentation

Pixels are rounded to a millionth, so that a box of whole pixels comes back whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from penstock.vision.annotations.model import AnnotatedObject
from penstock.vision.annotations.numbers import coordinate, whole_value

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SLACK", "Labels", "label_line", "read_label_line"]

# Of a box's centre and sides, beyond 0 to 1. Boxes cut short after some digits, or of objects at
# the border that a tool moved or turned, are that far out at most; what is farther is no share of
# this image.
SLACK: Final = 0.05

_DIGITS: Final = 6  # of a pixel
_FARTHEST: Final = 2.0  # of width or height: what is farther out was never divided by them
_NAN: Final = (math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class Labels:
    """What the label files of a data set hold.

    Attributes:
        class_names: By their numbers. Empty: any number is a class, and called by it.
        num_landmarks: K of `kpt_shape`.
        num_values: 2 or 3 for each landmark.
        polygons: "box" takes the box around a polygon, "error" refuses it.
        slack: How far beyond 0 to 1 a box's centre and sides may be.
    """

    class_names: Sequence[str] = ()
    num_landmarks: int = 0
    num_values: int = 3
    polygons: Literal["error", "box"] = "error"
    slack: float = SLACK

    @property
    def num_columns(self) -> int:
        """Columns of a line."""
        return 5 + self.num_landmarks * self.num_values


def read_label_line(line: str, labels: Labels, width_px: int, height_px: int) -> AnnotatedObject:
    """Return the object of a line.

    Raises:
        ValueError: it has too many or too few columns; or one that is no number, or none that it
            may be.
    """
    words = line.split()
    if len(words) != labels.num_columns:
        return _polygon(words, labels, width_px, height_px)
    name = _class_name(words[0], labels)
    values = [_share(word, place, labels.slack) for place, word in enumerate(words[1:5], 2)]
    points, visibility = _points(words, labels, width_px, height_px)
    return AnnotatedObject(
        name,
        _box(values, width_px, height_px),
        landmarks_xy_px=points,
        visibility=visibility,
    )


def _box(values: list[float], width_px: int, height_px: int) -> tuple[float, float, float, float]:
    x, y, w, h = (v * side for v, side in zip(values, (width_px, height_px) * 2, strict=True))
    left, top, right, bottom = x - w / 2, y - h / 2, x + w / 2, y + h / 2
    return (
        round(left, _DIGITS),
        round(top, _DIGITS),
        round(right, _DIGITS),
        round(bottom, _DIGITS),
    )


def _class_name(word: str, labels: Labels) -> str:
    number = whole_value(word)
    if number is None or number < 0:
        raise ValueError(f"column 1 is {word[:40]!r}, not the number of a class")
    if not labels.class_names:
        return str(number)
    if number >= len(labels.class_names):
        raise ValueError(
            f"its class is {number}, and the data set has {len(labels.class_names)}, from 0 to "
            f"{len(labels.class_names) - 1}"
        )
    return labels.class_names[number]


_COLUMNS: Final = {2: "centre x", 3: "centre y", 4: "width", 5: "height"}


def _share(word: str, place: int, slack: float) -> float:
    """Return a number of a box; one that is no share of the image's side is an error."""
    value = _fraction(word, place, max(_FARTHEST, 1 + slack))
    if not -slack <= value <= 1 + slack:
        raise ValueError(
            f"column {place}, the box's {_COLUMNS[place]}, is {word[:40]}: it is a share of the "
            f"image's side, from 0 to 1, and more than {slack:g} beyond is no slip of rounding. "
            "Correct the line, or give slack=1 and the like to have bad_boxes decide"
        )
    return value


def _fraction(word: str, place: int, farthest: float = _FARTHEST) -> float:
    try:
        value = coordinate(word)
    except ValueError as error:
        raise ValueError(f"column {place} {error}") from None
    if abs(value) > farthest:
        raise ValueError(
            f"column {place} is {word[:40]}, and a fraction of width or height is at most 1: these "
            "may be pixels"
        )
    return value


def _points(
    words: list[str], labels: Labels, width_px: int, height_px: int
) -> tuple[tuple[tuple[float, float], ...], tuple[int, ...]]:
    points, visibility = [], []
    for place in range(5, labels.num_columns, labels.num_values):
        x, y = (_fraction(words[place + side], place + side + 1) for side in (0, 1))
        is_marked = bool(x or y)  # without visibility, 0 0 says that a point is not marked
        if labels.num_values == 3:
            visibility.append(_visibility(words[place + 2], place + 3))
            is_marked = visibility[-1] > 0
        point = (round(x * width_px, _DIGITS), round(y * height_px, _DIGITS))
        points.append(point if is_marked else _NAN)
    return tuple(points), tuple(visibility)


def _visibility(word: str, place: int) -> int:
    number = whole_value(word)
    if number not in (0, 1, 2):
        raise ValueError(f"column {place} is {word[:40]!r}, and visibility is 0, 1 or 2")
    return number


def _polygon(words: list[str], labels: Labels, width_px: int, height_px: int) -> AnnotatedObject:
    """Return the box around a polygon, if that is wanted and it is one."""
    needed = f"it has {len(words)} columns, not {labels.num_columns}"
    if labels.num_landmarks:
        k, n = labels.num_landmarks, labels.num_values
        raise ValueError(f"{needed}: class, box, and {k} x {n} of kpt_shape")
    if len(words) == 6:
        raise ValueError(f"{needed}: class and box. A sixth is the score of a prediction")
    if len(words) < 7 or len(words) % 2 == 0:
        raise ValueError(f"{needed}: class and box")
    if labels.polygons == "error":
        raise ValueError(
            f'{needed}: it may be a polygon (polygons="box" takes the box around it), or have '
            "landmarks, whose number the data set's YAML says as kpt_shape"
        )
    name = _class_name(words[0], labels)
    values = [_fraction(word, place) for place, word in enumerate(words[1:], 2)]
    xs = [round(value * width_px, _DIGITS) for value in values[::2]]
    ys = [round(value * height_px, _DIGITS) for value in values[1::2]]
    return AnnotatedObject(name, (min(xs), min(ys), max(xs), max(ys)))


def label_line(
    found: AnnotatedObject, number: int, labels: Labels, width_px: int, height_px: int
) -> str:
    """Return the line of an object of class `number`.

    Raises:
        ValueError: it has no box, or another number of landmarks than `labels`; none at all is
            allowed, and then none is marked.
    """
    if found.box_xyxy_px is None:
        raise ValueError("it has no box, and YOLO's objects have one")
    left, top, right, bottom = found.box_xyxy_px
    words = [
        str(number),
        repr((left + right) / 2 / width_px),
        repr((top + bottom) / 2 / height_px),
        repr((right - left) / width_px),
        repr((bottom - top) / height_px),
    ]
    points = found.landmarks_xy_px or (_NAN,) * labels.num_landmarks
    if len(points) != labels.num_landmarks:
        raise ValueError(f"it has {len(points)} landmarks, and others {labels.num_landmarks}")
    for place, (x, y) in enumerate(points):
        is_marked = not (math.isnan(x) or math.isnan(y))
        seen = found.visibility[place] if found.visibility else 2
        words += [repr(x / width_px), repr(y / height_px)] if is_marked else ["0", "0"]
        if labels.num_values == 3:
            words.append(str(seen if is_marked else 0))
    return " ".join(words)
