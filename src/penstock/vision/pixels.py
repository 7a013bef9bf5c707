# SPDX-License-Identifier: Apache-2.0
"""A part of an image at another size, then as normalised float planes: the way into a batch."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import cv2
import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from penstock.vision.crops import Cut

Resample = Literal["bilinear", "antialias"]

_MOST_BESIDE: Final = 8  # times what is kept: a photo resized as a whole has 1 to 3


class Workplace(threading.local):
    """Memory in which a thread makes one image after another: new memory costs page faults."""

    def __init__(self, size: tuple[int, int]) -> None:
        """Take it for images of one size."""
        self.image = np.empty((*size, 3), np.uint8)
        self.planes = [np.empty(size, np.uint8) for _ in range(3)]


def lookup_tables(mean: ArrayLike, std: ArrayLike) -> NDArray[np.float32]:
    """Return what each value of a pixel becomes: float32, shape (channels, 256)."""
    means, stds = (np.atleast_1d(np.asarray(given, np.float64)) for given in (mean, std))
    values = np.arange(256) / 255
    return ((values - means[:, None]) / stds[:, None]).astype(np.float32)


def write_planes(
    image: NDArray[np.uint8],
    tables: NDArray[np.float32],
    planes: Sequence[NDArray[np.uint8]],
    out: NDArray[Any],
) -> None:
    """Write an image as float planes."""
    cv2.split(image, planes)
    for channel, plane in enumerate(planes):
        cv2.LUT(plane, tables[channel % len(tables)], dst=out[channel])


def kept_of_resized(
    pixels: NDArray[np.uint8], cut: Cut, size: tuple[int, int], resample: Resample
) -> NDArray[np.uint8]:
    """Return what `cut` keeps, `size` (height, width), of the part `pixels` once it is resized."""
    height, width = size
    # How many rows and columns of the part, which may be reduced already, make one of the resized.
    down, across = pixels.shape[0] / cut.resized_height, pixels.shape[1] / cut.resized_width
    top, left = cut.row_offset * down, cut.column_offset * across
    # Pillow makes the window alone: of a panorama the rest may be thousands of times as much.
    most = _MOST_BESIDE * height * width
    if resample == "antialias" or cut.resized_height * cut.resized_width > most:
        box = (left, top, left + width * across, top + height * down)
        image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR, box)
        return np.asarray(image)
    resized = cast("NDArray[np.uint8]", cv2.resize(pixels, (cut.resized_width, cut.resized_height)))
    bottom, right = cut.row_offset + height, cut.column_offset + width
    return resized[cut.row_offset : bottom, cut.column_offset : right]
