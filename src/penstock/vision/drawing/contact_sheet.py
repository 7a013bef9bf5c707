# SPDX-License-Identifier: Apache-2.0
"""`contact_sheet`: many samples in one image, with what is marked in them."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import cv2
import numpy as np

from penstock.errors import ConfigError
from penstock.vision.drawing.objects import (
    Pens,
    Unshown,
    class_colour,
    class_of,
    class_text,
    draw_onto,
    fitted,
    line_height,
    sample_of,
    text_width,
    wrapped,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["contact_sheet"]

_PAPER: Final = (245, 245, 245)
_ERROR_PAPER: Final = (253, 224, 221)  # behind what stands for an image that cannot be shown
_GAP_PX: Final = 8
_TEXT_PX: Final = 12
_CHIP_PX: Final = 12  # side of a colour in the legend
_MOST_CLASSES: Final = 60  # of the legend
_MOST_NAMED: Final = 0.1  # of an image; the rest is left to the legend
_MOST_PX: Final = 200_000_000  # of a sheet: 600 MB; few programs open more
_COARSE: Final = 3.0  # enlarged more than this, pixels stay pixels


def contact_sheet(
    samples: Sequence[Any],
    class_names: Sequence[str] = (),
    *,
    columns: int | None = None,
    tile_px: int = 360,
) -> NDArray[np.uint8]:
    """Return one image of many samples, scaled to tiles, with what is marked in them.

    Below an image stand its class, or what it is called; below all, the colours of the classes.
    Lines and letters are drawn after scaling, so they can be read in images of any size.

    Args:
        samples: At least one, each as `draw_objects` takes it, or (image, class); an `Unshown`
            has its reason in the place of the image.
        class_names: Name of class 0, 1, 2 …
        columns: Tiles in a row; as many as make about a square if not given.
        tile_px: Width of a tile, and the most height of its image.

    Returns:
        uint8 of shape (height, width, 3), RGB; a fresh array.

    Raises:
        ConfigError: there is no sample, or one without an image; a number is out of range; the
            sheet would have more than 200 million pixels.

    Example:
        >>> cell = {"image": np.zeros((48, 64, 3), np.uint8), "image_id": "a"}
        >>> contact_sheet([cell] * 6, columns=3, tile_px=100).shape
        (208, 332, 3)
    """
    if not samples:
        raise ConfigError("a contact sheet needs at least one sample")
    if tile_px < 32 or (columns is not None and columns < 1):
        raise ConfigError(
            f"tile_px is 32 or more and columns 1 or more, but got tile_px={tile_px}, "
            f"columns={columns}"
        )
    made = [one if isinstance(one, Unshown) else sample_of(one) for one in samples]
    found = [sample for sample in made if not isinstance(sample, Unshown)]
    # Classes without numbers are numbered here. Otherwise two might have the same colour.
    labels = [label for sample in found for label in sample.get("labels", ())]
    texts = {str(label) for label in labels if isinstance(label, str)}
    class_names = [*class_names, *sorted(texts.difference(class_names))]
    columns = min(len(made), columns or math.ceil(math.sqrt(len(made))))
    _check_size(made, columns, tile_px)
    tiles = [
        _tile_without(sample, tile_px)
        if isinstance(sample, Unshown)
        else _tile(sample, class_names, tile_px)
        for sample in made
    ]
    rows = [tiles[start : start + columns] for start in range(0, len(tiles), columns)]
    width = columns * (tile_px + _GAP_PX) + _GAP_PX
    legend = _legend(found, class_names, width)
    return np.concatenate([_gap(width), *(_row(row, width, tile_px) for row in rows), *legend])


def _check_size(samples: list[dict[str, Any] | Unshown], columns: int, tile_px: int) -> None:
    """Raise before anything is drawn, rather than fill the memory."""
    heights = [
        tile_px if isinstance(sample, Unshown) else _size_in_tile(sample["image"], tile_px)[1]
        for sample in samples
    ]
    rows = [max(heights[start : start + columns]) for start in range(0, len(heights), columns)]
    width = columns * (tile_px + _GAP_PX) + _GAP_PX
    height = sum(rows) + len(rows) * (line_height(_TEXT_PX) + 4 + _GAP_PX) + _GAP_PX
    if width * height > _MOST_PX:
        raise ConfigError(
            f"a sheet of {len(samples):,} images, {columns:,} in a row and each {tile_px:,} pixels "
            f"wide, would be {width:,} x {height:,} pixels, {width * height / 1e6:,.0f} million; "
            f"the most is {_MOST_PX / 1e6:,.0f} million. Show fewer images, or smaller ones "
            "(tile_px, --tile)."
        )


def _size_in_tile(image: NDArray[Any], tile_px: int) -> tuple[int, int]:
    """Return width and height of an image, scaled to a tile."""
    height, width = image.shape[:2]
    scale = tile_px / max(height, width)
    return max(1, round(width * scale)), max(1, round(height * scale))


def _gap(width: int, height: int = _GAP_PX) -> NDArray[np.uint8]:
    return np.full((height, width, 3), _PAPER, np.uint8)


def _row(tiles: list[NDArray[np.uint8]], width: int, tile_px: int) -> NDArray[np.uint8]:
    row = _gap(width, max(len(tile) for tile in tiles) + _GAP_PX)
    for number, tile in enumerate(tiles):
        left = _GAP_PX + number * (tile_px + _GAP_PX)
        row[: len(tile), left : left + tile_px] = tile
    return row


def _tile(sample: dict[str, Any], class_names: Sequence[str], tile_px: int) -> NDArray[np.uint8]:
    """Return an image, scaled and drawn into, with its caption."""
    image = sample["image"]
    height, width = image.shape[:2]
    scale = tile_px / max(height, width)
    size = _size_in_tile(image, tile_px)
    scaled = np.ascontiguousarray(cv2.resize(image, size, interpolation=_interpolation(scale)))
    pens = Pens(2 if tile_px >= 200 else 1, _TEXT_PX)
    by = size[0] / width, size[1] / height
    draw_onto(scaled, sample, class_names, pens, by, most_named=_MOST_NAMED)
    return _captioned(scaled, _caption(sample, class_names), tile_px)


def _tile_without(sample: Unshown, tile_px: int) -> NDArray[np.uint8]:
    """Return what stands for an image that cannot be shown: the reason, and its caption."""
    step = line_height(_TEXT_PX)
    page = np.full((max(step + 2 * _GAP_PX, tile_px * 2 // 3), tile_px, 3), _ERROR_PAPER, np.uint8)
    most = (len(page) - 2 * _GAP_PX) // step
    for row, line in enumerate(wrapped(sample.reason, tile_px - 2 * _GAP_PX, _TEXT_PX, most)):
        write(page, line, _GAP_PX, _GAP_PX + row * step, _TEXT_PX, _ERROR_PAPER)
    return _captioned(page, sample.name, tile_px)


def _captioned(picture: NDArray[np.uint8], caption: str, tile_px: int) -> NDArray[np.uint8]:
    """Return a picture in the middle of a tile, with a line below it."""
    height, width = picture.shape[:2]
    tile = _gap(tile_px, height + line_height(_TEXT_PX) + 4)
    left = (tile_px - width) // 2
    tile[:height, left : left + width] = picture
    caption = fitted(caption, tile_px, _TEXT_PX)
    place = max(0, (tile_px - text_width(caption, _TEXT_PX)) // 2)
    write(tile, caption, place, height + 3, _TEXT_PX, _PAPER)
    return tile


def _interpolation(scale: float) -> int:
    if scale < 1:
        return cv2.INTER_AREA
    return cv2.INTER_NEAREST if scale > _COARSE else cv2.INTER_LINEAR


def _caption(sample: dict[str, Any], class_names: Sequence[str]) -> str:
    parts = [str(sample["image_id"])] if "image_id" in sample else []
    if "label" in sample:
        parts.append(class_text(sample["label"], class_names))
    return "  ".join(part for part in parts if part)


def _legend(
    samples: list[dict[str, Any]], class_names: Sequence[str], width: int
) -> list[NDArray[np.uint8]]:
    """Return lines with the colour, the name and the number of the objects of each class."""
    counts = _counted(samples, class_names)
    lines: list[NDArray[np.uint8]] = []
    left = width
    for label in sorted(counts, key=lambda it: (isinstance(it, str), it))[:_MOST_CLASSES]:
        count = counts[label]
        text = fitted(f"{class_text(label, class_names)} ({count})", width // 2, _TEXT_PX)
        needed = _CHIP_PX + 4 + text_width(text, _TEXT_PX) + 3 * _GAP_PX
        if left + needed > width:
            lines.append(_gap(width, line_height(_TEXT_PX) + _GAP_PX))
            left = _GAP_PX
        line = lines[-1]
        line[2 : 2 + _CHIP_PX, left : left + _CHIP_PX] = class_colour(label)
        write(line, text, left + _CHIP_PX + 4, 1, _TEXT_PX, _PAPER)
        left += needed
    return lines


def _counted(samples: list[dict[str, Any]], class_names: Sequence[str]) -> Counter[int | str]:
    """Return how many objects there are of each class that is a number or a name."""
    counts: Counter[int | str] = Counter()
    for sample in samples:
        labels = sample.get("labels", ())
        one_each = [label for label in labels if isinstance(label, str) or not np.ndim(label)]
        found = [class_of(label, class_names) for label in one_each]
        counts.update(label for label in found if label is not None)
    return counts
