# SPDX-License-Identifier: Apache-2.0
"""Boxes, their classes and landmarks, drawn into an image."""

from __future__ import annotations

import colorsys
import math
import zlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import cv2
import numpy as np

from penstock.vision.drawing.displayed import class_of, class_text, sample_of
from penstock.vision.drawing.lettering import fitted, line_height, text_width, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Pens", "class_colour", "draw_objects", "draw_onto"]

# Colours that the colour-blind can tell apart (Okabe and Ito, "Color Universal Design"), RGB.
_COLOURS: Final = (
    (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66),
    (0, 114, 178), (213, 94, 0), (204, 121, 167),
)  # fmt: skip
# Further ones: hues a golden angle apart, in turns of lightness and saturation. Of the first 60
# none is nearer to another than 10 in CIE L*a*b*, of the first 20 than 18.
_GOLDEN: Final = 0.61803398875
_FIRST_HUE: Final = 0.275
_LIGHTNESS: Final = (0.3, 0.5, 0.65, 0.8)
_SATURATION: Final = (1.0, 0.5, 0.75)
_MOST_COLOURS: Final = 60
_NO_CLASS: Final = (160, 160, 160)
_DARK: Final = (20, 20, 20)
_POINT: Final = (255, 255, 255)
_FAR: Final = 1e5  # pixels
_HIDDEN: Final = 1  # visibility of a landmark that is marked, but covered
_SMALL_PX: Final = 24  # boxes below this get no dark edge, which would leave nothing to be seen
_PADDING: Final = 2  # pixels around the text of a tag


class Pens(NamedTuple):
    """How thick lines are, and how large letters, in pixels."""

    line_px: int
    text_px: int

    @classmethod
    def for_image(cls, image: NDArray[Any]) -> Pens:
        """Return pens that show in an image of this size."""
        side = max(image.shape[:2])
        return cls(max(1, round(side / 320)), int(np.clip(side / 32, 10, 64)))


def class_colour(label: int | str | None) -> tuple[int, int, int]:
    """Return the colour of a class, RGB: always the same; 60 classes apart they repeat.

    Args:
        label: Its number; or its name, whose colour does not depend on other names; None, which is
            grey, for what is no class.

    Example:
        >>> class_colour(0), class_colour(8), class_colour(1) == class_colour(61)
        ((230, 159, 0), (191, 64, 146), True)
    """
    if label is None:
        return _NO_CLASS
    number = zlib.crc32(label.encode("utf-8", "replace")) if isinstance(label, str) else label
    number %= _MOST_COLOURS
    if number < len(_COLOURS):
        return _COLOURS[number]
    turn = number - len(_COLOURS)
    rgb = colorsys.hls_to_rgb(
        (_FIRST_HUE + turn * _GOLDEN) % 1,
        _LIGHTNESS[turn % len(_LIGHTNESS)],
        _SATURATION[turn % len(_SATURATION)],
    )
    red, green, blue = (round(255 * part) for part in rgb)
    return red, green, blue


def draw_objects(
    sample: Any,  # noqa: ANN401
    class_names: Sequence[str] = (),
) -> NDArray[np.uint8]:
    """Return the image of a sample with its boxes, their classes and landmarks drawn in.

    A class has always the same colour. Its name stands where it covers no other name, or not at
    all. Points are white; those that are marked as hidden are hollow.

    Args:
        sample: A dict with "image" and, as far as there are any, "boxes" (N, 4), "labels" (N,),
            "landmarks" (N, K, 2) and "visibility" (N, K); or (image, dict of these). Images may be
            uint8 or floats, with the channels last or first. Tensors are taken, too.
        class_names: Name of class 0, 1, 2 …; numbers are shown without.

    Returns:
        uint8 of shape (height, width, 3), RGB; a fresh array.

    Raises:
        ConfigError: the sample has no image.

    Example:
        >>> boxes = np.array([[10, 20, 50, 60]], np.float32)
        >>> sample = {"image": np.zeros((80, 90, 3), np.uint8), "boxes": boxes, "labels": [1]}
        >>> drawn = draw_objects(sample, ["cat", "dog"])
        >>> drawn.shape, tuple(drawn[20, 49].tolist()) == class_colour(1)
        ((80, 90, 3), True)
    """
    found = sample_of(sample)
    image: NDArray[np.uint8] = found["image"]
    draw_onto(image, found, class_names, Pens.for_image(image))
    return image


def draw_onto(
    image: NDArray[np.uint8],
    sample: dict[str, Any],
    class_names: Sequence[str],
    pens: Pens,
    scale: tuple[float, float] = (1.0, 1.0),
    most_named: float = 1.0,
) -> None:
    """Draw what is marked in a sample into an image that is `scale` (x, y) times its own.

    Args:
        image: To be drawn into.
        sample: As `sample_of` returns it.
        class_names: Name of class 0, 1, 2 …
        pens: How thick, and how large.
        scale: Of the image.
        most_named: Share of the image that names may cover. Where they would cover more, those of
            the most frequent classes are left out, which a legend tells by their colour.
    """
    boxes = np.asarray(sample.get("boxes", ()), np.float64).reshape(-1, 4) * np.tile(scale, 2)
    boxes = boxes.clip(-_FAR, _FAR)  # beyond what OpenCV's integers hold
    labels = sample.get("labels")
    names = _names(labels, len(boxes), class_names)
    colours = [class_colour(_class(labels, n, class_names)) for n in range(len(boxes))]
    areas = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    # Small ones last: they would vanish under the lines of large ones.
    order = np.argsort(-areas, kind="stable").tolist()
    for n in order:
        if np.isfinite(boxes[n]).all():
            _draw_box(image, boxes[n], colours[n], pens)
    _draw_landmarks(image, sample, scale, pens)
    names = _fewer(names, pens, most_named * image.shape[0] * image.shape[1])
    taken: list[tuple[int, int, int, int]] = []
    for n in reversed(order):
        if names[n] and np.isfinite(boxes[n]).all():
            _draw_tag(image, boxes[n], names[n], colours[n], pens, taken)


def _class(
    labels: Any,  # noqa: ANN401
    n: int,
    class_names: Sequence[str],
) -> int | str | None:
    if labels is None or n >= len(labels):
        return 0
    return class_of(labels[n], class_names)


def _names(labels: Any, num_boxes: int, class_names: Sequence[str]) -> list[str]:  # noqa: ANN401
    if labels is None:
        return [""] * num_boxes
    return [class_text(labels[n], class_names) if n < len(labels) else "" for n in range(num_boxes)]


def _fewer(names: list[str], pens: Pens, most_px: float) -> list[str]:
    """Return the names, "" for those of the classes that would cover the most."""
    line = line_height(pens.text_px) + 2 * _PADDING
    covered = {
        name: names.count(name) * (text_width(name, pens.text_px) + 2 * _PADDING) * line
        for name in set(names) - {""}
    }
    while len(covered) > 1 and sum(covered.values()) > most_px:
        del covered[max(covered, key=lambda name: (covered[name], name))]
    return [name if name in covered else "" for name in names]


def _draw_box(
    image: NDArray[np.uint8], box: NDArray[np.float64], colour: tuple[int, int, int], pens: Pens
) -> None:
    """Draw along the outermost pixels of a half-open box, between dark lines for any ground."""
    limits = np.tile(image.shape[1::-1], 2)
    left, top, right, bottom = np.clip(np.rint(box), -limits, 2 * limits).astype(int).tolist()
    corners = (left, top), (max(right - 1, left), max(bottom - 1, top))
    if min(right - left, bottom - top) >= _SMALL_PX:
        cv2.rectangle(image, *corners, _DARK, pens.line_px + 2)
    cv2.rectangle(image, *corners, colour, pens.line_px)


def _draw_landmarks(
    image: NDArray[np.uint8], sample: dict[str, Any], scale: tuple[float, float], pens: Pens
) -> None:
    points = np.asarray(sample.get("landmarks", ()), np.float64)
    if points.ndim != 3 or points.shape[-1] != 2:
        return
    points = (points + 0.5) * scale - 0.5
    seen = sample.get("visibility")
    for n, row in enumerate(points):
        space = _space(row)
        for k, (x, y) in enumerate(row):
            if np.isfinite((x, y)).all() and max(abs(x), abs(y)) < _FAR:
                is_hidden = seen is not None and seen[n][k] == _HIDDEN
                _draw_point(image, (round(x), round(y)), space, pens, is_filled=not is_hidden)


def _space(points: NDArray[np.float64]) -> float:
    """Return about how far apart the points of an object are."""
    there = points[np.isfinite(points).all(axis=1)]
    if len(there) < 2:
        return _FAR
    return float(np.max(np.ptp(there, axis=0))) / math.sqrt(len(there))


def _draw_point(
    image: NDArray[np.uint8], centre: tuple[int, int], space: float, pens: Pens, *, is_filled: bool
) -> None:
    """Draw a point so large that it does not cover the others."""
    radius = int(min(space / 5, pens.line_px + 1))
    if radius < 1:
        if space >= 4:
            cv2.circle(image, centre, 1, _DARK, cv2.FILLED)
        cv2.circle(image, centre, 0, _POINT, cv2.FILLED)
        return
    cv2.circle(image, centre, radius + 1, _DARK, cv2.FILLED if is_filled else 3, cv2.LINE_AA)
    cv2.circle(image, centre, radius, _POINT, cv2.FILLED if is_filled else 1, cv2.LINE_AA)


def _draw_tag(
    image: NDArray[np.uint8],
    box: NDArray[np.float64],
    name: str,
    colour: tuple[int, int, int],
    pens: Pens,
    taken: list[tuple[int, int, int, int]],
) -> None:
    """Draw the name at a corner of its box where it covers no other; within the image."""
    height, width = image.shape[:2]
    name = fitted(name, width - 2 * _PADDING, pens.text_px)
    size = text_width(name, pens.text_px) + 2 * _PADDING, line_height(pens.text_px) + 2 * _PADDING
    if not name or size[1] > height:
        return
    for left, top in _corners(box, size, pens):
        left, top = min(max(left, 0), width - size[0]), min(max(top, 0), height - size[1])
        place = left, top, left + size[0], top + size[1]
        if not any(_overlap(place, other) for other in taken):
            taken.append(place)
            image[place[1] : place[3], place[0] : place[2]] = colour
            write(image, name, left + _PADDING, top + _PADDING, pens.text_px, colour)
            return


def _corners(box: NDArray[np.float64], size: tuple[int, int], pens: Pens) -> list[tuple[int, int]]:
    left, top, right, bottom = np.rint(box).astype(int).tolist()
    edge = (pens.line_px + 1) // 2
    above, below = top - size[1] - edge + 1, bottom + edge - 1
    return [
        (left - edge, above), (right - size[0], above), (left - edge, below),
        (right - size[0], below), (left, top), (right - size[0], top),
    ]  # fmt: skip


def _overlap(one: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> bool:
    across = min(one[2], other[2]) > max(one[0], other[0])
    return across and min(one[3], other[3]) > max(one[1], other[1])
