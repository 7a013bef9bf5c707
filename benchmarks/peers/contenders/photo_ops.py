# SPDX-License-Identifier: Apache-2.0
"""JPEG bytes to a training sample, for peers without image operations of their own.

Both recipes give float32 (3, 224, 224): torchvision's random-resized crop, a flip half of the time,
ImageNet's mean and standard deviation. With the same recipe, loaders differ and not decoders.

    fast_sample      simplejpeg (libjpeg-turbo) and OpenCV. As Penstock does, it decodes at 1/2, 1/4
                     or 1/8 where the crop is still large enough, and takes the fast way to double
                     the colour planes. Its resize does not antialias.
    pillow_sample    Pillow and numpy, as torchvision's transforms treat Pillow's images: its
                     resize antialiases.
"""

from __future__ import annotations

import functools
import io
import math
import random
from typing import TYPE_CHECKING

import numpy as np
from works import CROP_PX, MEAN, STD

if TYPE_CHECKING:
    from types import ModuleType

    import numpy.typing as npt

    Draw = random.Random | ModuleType  # the module `random` has the same functions

__all__ = ["drawn_crop", "fast_sample", "normalise", "one_thread", "pillow_sample"]

_SCALE = (0.08, 1.0)
_LOG_RATIO = (math.log(3 / 4), math.log(4 / 3))


def one_thread(_worker_id: int = 0) -> None:
    """Keep OpenCV to the calling thread: the loader's workers are the parallel part."""
    import cv2

    cv2.setNumThreads(0)


def drawn_crop(height: int, width: int, draw: Draw) -> tuple[int, int, int, int]:
    """Return top, left, height and width of torchvision's random-resized crop."""
    for _ in range(10):
        area = height * width * draw.uniform(*_SCALE)
        ratio = math.exp(draw.uniform(*_LOG_RATIO))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = draw.randint(0, height - crop_height)
            return top, draw.randint(0, width - crop_width), crop_height, crop_width
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def fast_sample(
    data: bytes, rng: random.Random | None = None, out: npt.NDArray[np.float32] | None = None
) -> npt.NDArray[np.float32]:
    """Return one sample, made with simplejpeg and OpenCV.

    Args:
        data: The JPEG.
        rng: Where crop and flip are drawn; None takes the generator of the module `random`.
        out: Where to write, float32 (3, 224, 224), in C order; None makes it.
    """
    import cv2
    import simplejpeg

    draw = rng or random
    full_height, full_width, _, _ = simplejpeg.decode_jpeg_header(data)
    top, left, height, width = drawn_crop(full_height, full_width, draw)
    shrink = min(1.0, CROP_PX / min(height, width))
    image = simplejpeg.decode_jpeg(
        data,
        "RGB",
        fastupsample=True,
        min_factor=2,  # the factors between are slower than none
        min_height=math.ceil(full_height * shrink),
        min_width=math.ceil(full_width * shrink),
    )
    scale_y, scale_x = image.shape[0] / full_height, image.shape[1] / full_width
    rows = slice(int(top * scale_y), max(int((top + height) * scale_y), 1))
    columns = slice(int(left * scale_x), max(int((left + width) * scale_x), 1))
    small = cv2.resize(image[rows, columns], (CROP_PX, CROP_PX), interpolation=cv2.INTER_LINEAR)
    if draw.random() < 0.5:
        small = cv2.flip(small, 1)
    if out is None:
        out = np.empty((3, CROP_PX, CROP_PX), np.float32)
    normalise(small, out)
    return out


def normalise(pixels: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    """Write pixels, uint8 (height, width, 3), normalised into float32 (3, height, width)."""
    import cv2

    for channel, plane in enumerate(cv2.split(pixels)):
        cv2.LUT(plane, _tables()[channel], dst=out[channel])


def pillow_sample(data: bytes, rng: random.Random | None = None) -> npt.NDArray[np.float32]:
    """Return one sample, made with Pillow and numpy."""
    from PIL import Image

    draw = rng or random
    image = Image.open(io.BytesIO(data)).convert("RGB")
    top, left, height, width = drawn_crop(image.height, image.width, draw)
    box = (left, top, left + width, top + height)
    image = image.resize((CROP_PX, CROP_PX), Image.Resampling.BILINEAR, box=box)
    if draw.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)).astype(np.float32) / 255
    pixels -= np.array(MEAN, np.float32)[:, None, None]
    pixels /= np.array(STD, np.float32)[:, None, None]
    return pixels


@functools.cache
def _tables() -> npt.NDArray[np.float32]:
    levels = np.arange(256, dtype=np.float32) / 255
    return np.stack([(levels - mean) / std for mean, std in zip(MEAN, STD, strict=True)])
