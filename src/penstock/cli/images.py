# SPDX-License-Identifier: Apache-2.0
"""A folder of images as a plain torch dataset: the work that `penstock bench` gives out."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any, Final

import cv2
import numpy as np
import torch
from torch.utils.data import Dataset

from penstock.cli.decoding import read_image

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

__all__ = ["ImageFiles"]

# ImageNet's mean and standard deviation (RGB, of values in 0..1): the usual normalisation.
_MEAN: Final = np.array([0.485, 0.456, 0.406], np.float32).reshape(3, 1, 1)
_STD: Final = np.array([0.229, 0.224, 0.225], np.float32).reshape(3, 1, 1)
_SCALE: Final = 1 / (255 * _STD)
_BIAS: Final = -_MEAN / _STD


class ImageFiles(Dataset[tuple[torch.Tensor, int]]):
    """Images cut out at random, resized, flipped and normalised; the label is the index.

    It does what training code mostly does, and nothing that favours a loader: no batch path, no
    cache. Randomness is that of the `random` module, which both loaders seed in workers.
    """

    def __init__(self, paths: Sequence[Path], size_px: int) -> None:
        """Read `paths`.

        Args:
            paths: Image files that can be decoded.
            size_px: Height and width of what comes out.
        """
        self._paths = [str(path) for path in paths]
        self._size_px = size_px

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return the sample: float32 of shape (3, size_px, size_px), and `index`."""
        pixels = _random_crop(read_image(self._paths[index]))
        size = (self._size_px, self._size_px)
        pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_LINEAR)
        if random.random() < 0.5:
            pixels = pixels[:, ::-1]
        image = np.multiply(pixels.transpose(2, 0, 1), _SCALE, dtype=np.float32, order="C")
        image += _BIAS
        return torch.from_numpy(image), index


def _random_crop(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return 8 to 100 % of the area, at an aspect ratio between 3:4 and 4:3, as a view."""
    height, width = pixels.shape[:2]
    area = height * width * random.uniform(0.08, 1.0)
    ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
    crop_width = min(width, max(1, round(math.sqrt(area * ratio))))
    crop_height = min(height, max(1, round(math.sqrt(area / ratio))))
    top = random.randint(0, height - crop_height)
    left = random.randint(0, width - crop_width)
    return pixels[top : top + crop_height, left : left + crop_width]
