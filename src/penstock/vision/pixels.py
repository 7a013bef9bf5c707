# SPDX-License-Identifier: Apache-2.0
"""Resizing, and uint8 images to normalised float planes: the pixels' way into a batch."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import cv2
import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from penstock.vision.crops import Cut


def lookup_tables(mean: ArrayLike, std: ArrayLike) -> NDArray[np.float32]:
    """Return what each value of a pixel becomes: float32, shape (channels, 256).

    Args:
        mean: For each channel, in units of the full scale.
        std: Likewise. One of the two may be a single number.

    Example:
        >>> lookup_tables([0.0, 0.5], [1.0, 0.5])[:, [0, 255]].tolist()
        [[0.0, 1.0], [-1.0, 1.0]]
    """
    means, stds = (np.atleast_1d(np.asarray(given, np.float64)) for given in (mean, std))
    values = np.arange(256) / 255
    return ((values - means[:, None]) / stds[:, None]).astype(np.float32)


def write_planes(
    image: NDArray[np.uint8],
    tables: NDArray[np.float32],
    planes: Sequence[NDArray[np.uint8]],
    out: NDArray[Any],
) -> None:
    """Write an image as float planes.

    Taken apart into planes that stay in the cache, then looked up: 0.53 ms for 640 x 640, where a
    multiplication of the transposed image by numpy takes 0.90 ms, and one by OpenCV's own
    `blobFromImage` 3.3 ms, all on one core. Into planes made anew each time, taking apart 224 x 224
    pixels costs 50 us instead of 12.

    Args:
        image: C-contiguous, shape (height, width, channels).
        tables: Of `lookup_tables`; one serves all channels.
        planes: Memory to work in: an array of shape (height, width) for each channel.
        out: float32, shape (channels, height, width); rows without gaps between their pixels.
    """
    cv2.split(image, planes)
    for channel, plane in enumerate(planes):
        cv2.LUT(plane, tables[channel % len(tables)], dst=out[channel])


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
