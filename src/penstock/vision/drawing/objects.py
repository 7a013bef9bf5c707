# SPDX-License-Identifier: Apache-2.0
"""Boxes, their classes and landmarks, drawn into an image."""

from __future__ import annotations

import colorsys
import contextlib
import functools
import math
import unicodedata
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from penstock.errors import ConfigError
from penstock.vision.batches import as_array, is_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_MOST_CHANNELS: Final = 4
_NUM_SHOWN: Final = 2  # classes of a mixture


class Unshown(NamedTuple):
    """A sample that cannot be made, in a contact sheet: what it is called, and why."""

    name: str
    reason: str


def sample_of(sample: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return a sample as a dict with an "image", uint8 (height, width, 3), and arrays.

    Args:
        sample: A dict with an "image"; (image, dict); (image, class); or an image by itself.

    Raises:
        ConfigError: there is no image in it.
    """
    if isinstance(sample, Mapping):
        found = dict(sample)
    elif isinstance(sample, (tuple, list)) and len(sample) > 1 and isinstance(sample[1], Mapping):
        found = {**sample[1], "image": sample[0]}
    elif isinstance(sample, (tuple, list)) and sample:
        found = (
            {"image": sample[0]} if len(sample) == 1 else {"image": sample[0], "label": sample[1]}
        )
    else:
        found = {"image": sample}
    if "image" not in found:
        raise ConfigError(f'a sample has no "image", but {", ".join(map(repr, found))}')
    found = {key: as_array(value) if is_tensor(value) else value for key, value in found.items()}
    found["image"] = shown_image(found["image"])
    return found


def shown_image(image: Any) -> NDArray[np.uint8]:  # noqa: ANN401
    """Return an image as uint8 (height, width, 3), a copy.

    Args:
        image: An array or tensor with the channels last or first, or without; or Pillow's. Floats
            within 0..1 are taken as such; others, normalised ones, are stretched from their least
            to their largest value.

    Raises:
        ConfigError: it is no image.
    """
    if hasattr(image, "convert"):
        image = image.convert("RGB")
    pixels = as_array(image)
    if pixels.dtype.kind not in "buif" or pixels.ndim not in (2, 3) or not pixels.size:
        raise ConfigError(
            f"an image should be an array of 2 or 3 axes, but got {type(image).__name__} of shape "
            f"{pixels.shape}, dtype {pixels.dtype}"
        )
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    elif pixels.shape[2] > _MOST_CHANNELS >= pixels.shape[0]:
        pixels = pixels.transpose(1, 2, 0)
    pixels = pixels[..., : 3 if pixels.shape[2] >= 3 else 1]  # neither alpha, nor grey's
    return np.array(np.broadcast_to(_in_bytes(pixels), (*pixels.shape[:2], 3)), order="C")


def _in_bytes(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    if pixels.dtype == np.uint8:
        return pixels
    values = np.nan_to_num(pixels.astype(np.float64))
    least, most = values.min(), values.max()
    if pixels.dtype.kind == "f" and least >= 0 and most <= 1:
        least, most = 0.0, 1.0
    elif pixels.dtype.kind != "f" and least >= 0 and most <= 255:
        least, most = 0.0, 255.0
    scaled = (values - least) * (255 / max(most - least, 1e-12))
    in_bytes: NDArray[np.uint8] = np.rint(scaled).astype(np.uint8)
    return in_bytes


def class_of(label: Any, class_names: Sequence[str]) -> int | str | None:  # noqa: ANN401
    """Return the number of a class, of a mixture that of its largest part.

    A text that is none of `class_names` stays a text; None is returned for what is no class, as
    NaN and infinity.

    Example:
        >>> names = ["cat", "dog"]
        >>> [class_of(label, names) for label in (1, [0.2, 0.8], "dog", "cow", float("nan"))]
        [1, 1, 1, 'cow', None]
    """
    if isinstance(label, str):
        return class_names.index(label) if label in class_names else str(label)
    weights = np.asarray(label)
    if weights.dtype.kind not in "biuf" or not weights.size or not np.isfinite(weights).all():
        return None
    return int(weights.argmax()) if weights.ndim else int(weights)


def class_text(label: Any, class_names: Sequence[str]) -> str:  # noqa: ANN401
    """Return what a class is called; of a mixture, its largest parts.

    Example:
        >>> class_text(1, ["cat", "dog"]), class_text([0.7, 0.3], ["cat", "dog"])
        ('dog', '0.70 cat + 0.30 dog')
    """
    if isinstance(label, str):
        return label.splitlines()[0] if label else ""  # a packed VOC folder has whole files here
    weights = np.asarray(label)
    if weights.dtype.kind not in "biuf":
        return ""
    if weights.ndim:
        largest = [
            n
            for n in np.argsort(-weights.ravel(), kind="stable")[:_NUM_SHOWN]
            if weights.ravel()[n] > 0
        ]
        if len(largest) == 1 and weights.ravel()[largest[0]] == 1:
            return class_text(largest[0], class_names)
        return " + ".join(f"{weights.ravel()[n]:.2f} {class_text(n, class_names)}" for n in largest)
    number = weights.item()
    if isinstance(number, int) and 0 <= number < len(class_names):
        return class_names[number]
    return f"{number:g}"


_WHITE, _BLACK = (255, 255, 255), (0, 0, 0)
_BRIGHT: Final = 140.0  # of 255; on brighter grounds black can be read better than white


_MANY_SCRIPTS: Final = (
    "NotoSansCJK-Regular.ttc",
    "wqy-microhei.ttc",
    "wqy-zenhei.ttc",
    "msyh.ttc",
    "PingFang.ttc",
    "Arial Unicode.ttf",
    "DejaVuSans.ttf",
)

_PROBE_PX: Final = 24  # large enough for letters to differ from the box of those that lack
_NO_LETTER: Final = "\U0010ffff"  # is no character, and never will be

_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@functools.cache
def _font(size_px: int) -> _Font:
    return ImageFont.load_default(size_px)


@functools.cache
def _wide_font(name: str, size_px: int) -> ImageFont.FreeTypeFont | None:
    with contextlib.suppress(OSError):
        return ImageFont.truetype(name, size_px)
    return None


@functools.lru_cache(65536)
def _has_glyph(name: str, letter: str) -> bool:
    """Return whether a font draws a letter as something else than what it has no glyph for."""
    font = _wide_font(name, _PROBE_PX)
    if font is None:
        return False
    drawn, lacking = (font.getmask(text) for text in (letter, _NO_LETTER))
    return drawn.size != lacking.size or bytes(drawn) != bytes(lacking)


def _in_font(text: str, size_px: int) -> tuple[str, _Font]:
    """Return a text as it can be written, and the font."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    if text.isascii():
        return text, _font(size_px)
    letters = [c for c in set(text) if not c.isascii()]
    number_of = {name: sum(_has_glyph(name, c) for c in letters) for name in _MANY_SCRIPTS}
    best = max(number_of, key=lambda name: number_of[name])
    wide = _wide_font(best, size_px) if number_of[best] else None
    if wide is None:
        return "".join(map(_bare, text)), _font(size_px)
    return "".join(c if c.isascii() or _has_glyph(best, c) else _bare(c) for c in text), wide


def _bare(letter: str) -> str:
    """Return a letter without accents; "?" for one that is not of ASCII then."""
    parts = unicodedata.normalize("NFKD", letter)
    left = "".join(c for c in parts if not unicodedata.combining(c))
    return left.encode("ascii", "replace").decode()


@functools.lru_cache(4096)
def _mask(text: str, size_px: int) -> NDArray[np.floating[Any]]:
    """Return how much of each pixel the text covers, 0 to 1; float32 (height, width)."""
    text, font = _in_font(text, size_px)
    # A tall and a deep letter make all lines alike, but those of scripts that need more.
    _, top, _, bottom = font.getbbox("Hgj|" + text)
    height = max(int(np.ceil(bottom - top)), line_height(size_px) if text else 1)
    width = max(1, int(np.ceil(font.getlength(text))))
    page = Image.new("L", (width, height))
    ImageDraw.Draw(page).text((0, -top), text, fill=255, font=font)
    return np.asarray(page, np.float32)[: line_height(size_px) if text else None] / np.float32(255)


def text_width(text: str, size_px: int) -> int:
    """Return how many pixels a text takes from left to right."""
    return len(_mask(text, size_px).T)


def line_height(size_px: int) -> int:
    """Return how many pixels any text takes from top to bottom."""
    return len(_mask("", size_px))


def fitted(text: str, width_px: int, size_px: int) -> str:
    """Return a text, or as much of it as fits into a width, with an ellipsis."""
    if len(text) <= width_px and text_width(text, size_px) <= width_px:
        return text
    text = text[: max(width_px, 0)]  # no letter is narrower than a pixel
    while text and text_width(text + "…", size_px) > width_px:
        text = text[:-1]
    return text + "…" if text else ""


def wrapped(text: str, width_px: int, size_px: int, most_lines: int) -> list[str]:
    """Return a text in lines that fit into a width; the last one ends in an ellipsis if need be.

    Lines end between words; words that are longer than a line, as paths are, anywhere.

    Example:
        >>> wrapped("a cat and a dog", 60, 12, 5)
        ['a cat', 'and a dog']
    """
    lines: list[str] = []
    while text and len(lines) < most_lines - 1 and text_width(text, size_px) > width_px:
        stop = max(1, len(fitted(text, width_px, size_px)) - 1)  # without its ellipsis
        blank = text.rfind(" ", 1, stop + 1)
        stop = blank if blank > 0 else stop
        lines.append(text[:stop].rstrip())
        text = text[stop:].lstrip()
    return [*lines, fitted(text, width_px, size_px)] if text and most_lines > 0 else lines


def write(
    image: NDArray[np.uint8],
    text: str,
    left: int,
    top: int,
    size_px: int,
    ground: tuple[int, int, int],
) -> None:
    """Write a text into an image, black or white as can be read on `ground`; cut at its borders."""
    light = 0.299 * ground[0] + 0.587 * ground[1] + 0.114 * ground[2]
    colour = np.array(_BLACK if light > _BRIGHT else _WHITE, np.float32)
    mask = _mask(text, size_px)
    under = image[max(top, 0) : top + mask.shape[0], max(left, 0) : left + mask.shape[1]]
    cover = mask[max(-top, 0) :, max(-left, 0) :][: under.shape[0], : under.shape[1], None]
    under[:] = np.rint(under * (1 - cover) + colour * cover).astype(np.uint8)


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
