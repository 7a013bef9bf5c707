# SPDX-License-Identifier: Apache-2.0
"""A part of an image at another size, and memory in which to make one after another."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Final, Literal, cast

import cv2
import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.vision.crops import Cut

__all__ = ["Resample", "Workplace", "kept_of_resized"]

Resample = Literal["bilinear", "antialias"]

_MOST_BESIDE: Final = 8  # times what is kept: a photo resized as a whole has 1 to 3
_MARGIN_PX: Final = 2  # of what bilinear interpolation looks at, and one more


class Workplace(threading.local):
    """Memory in which a thread makes one image after another: new memory costs page faults.

    Concurrency:
        Each thread has its own.
    """

    _image: NDArray[np.uint8] | None = None
    _planes: list[NDArray[np.uint8]] | None = None

    def image(self, size: tuple[int, int]) -> NDArray[np.uint8]:
        """Return an array for an image; always of the size that was asked for first."""
        if self._image is None:
            self._image = np.empty((*size, 3), np.uint8)
        return self._image

    def planes(self, size: tuple[int, int]) -> list[NDArray[np.uint8]]:
        """Return an array for each colour; of the size that was asked for first."""
        if self._planes is None:
            self._planes = [np.empty(size, np.uint8) for _ in range(3)]
        return self._planes


def kept_of_resized(
    pixels: NDArray[np.uint8], cut: Cut, size: tuple[int, int], resample: Resample
) -> NDArray[np.uint8]:
    """Return what is kept of the part of an image that was cut out, once that is resized.

    Args:
        pixels: The part, perhaps reduced.
        cut: Its size as resized, and where what is kept begins in it.
        size: Height and width of what is kept.
        resample: As for `ImagePipeline`.

    Returns:
        uint8, shape (height, width, 3).
    """
    height, width = size
    if resample == "antialias":
        return _window_antialiased(pixels, cut, size)
    # Of a panorama the rest may be thousands of times as much.
    if cut.resized_height * cut.resized_width > _MOST_BESIDE * height * width:
        return _window(pixels, cut, size)
    resized = cast("NDArray[np.uint8]", cv2.resize(pixels, (cut.resized_width, cut.resized_height)))
    bottom, right = cut.row_offset + height, cut.column_offset + width
    return resized[cut.row_offset : bottom, cut.column_offset : right]


def _scales(pixels: NDArray[np.uint8], cut: Cut) -> tuple[float, float]:
    """Return how many rows and columns of the part make one of the resized."""
    return pixels.shape[0] / cut.resized_height, pixels.shape[1] / cut.resized_width


def _window_antialiased(
    pixels: NDArray[np.uint8], cut: Cut, size: tuple[int, int]
) -> NDArray[np.uint8]:
    """Return the kept window by Pillow, which makes no more than that."""
    height, width = size
    down, across = _scales(pixels, cut)
    top, left = cut.row_offset * down, cut.column_offset * across
    box = (left, top, left + width * across, top + height * down)
    image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR, box)
    return np.asarray(image)


def _window(pixels: NDArray[np.uint8], cut: Cut, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Return the kept window by OpenCV, as its `resize` would make it within the whole."""
    height, width = size
    down, across = _scales(pixels, cut)
    top, left = cut.row_offset * down, cut.column_offset * across
    # warpAffine of OpenCV 4 takes no image of 2^15 pixels a side: it gets what it looks at.
    first_row, first_column = max(0, int(top) - _MARGIN_PX), max(0, int(left) - _MARGIN_PX)
    last_row = math.ceil(top + height * down) + _MARGIN_PX
    last_column = math.ceil(left + width * across) + _MARGIN_PX
    part = pixels[first_row:last_row, first_column:last_column]
    # Pixel x of the output lies at (x + 0.5) across - 0.5 from `left`.
    x = left + 0.5 * across - 0.5 - first_column
    y = top + 0.5 * down - 0.5 - first_row
    back = np.array([[across, 0, x], [0, down, y]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    window = cv2.warpAffine(
        part, back, (width, height), flags=flags, borderMode=cv2.BORDER_REPLICATE
    )
    return cast("NDArray[np.uint8]", window)
