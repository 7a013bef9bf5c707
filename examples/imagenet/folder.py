# SPDX-License-Identifier: Apache-2.0
"""Class folders of image files, and the two transforms that everybody trains ImageNet with.

Plain Pillow and torch, without a word of Penstock: as it lies in many projects.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SUFFIXES = {".jpg", ".jpeg", ".png"}
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


class ImageFolder(Dataset[tuple[torch.Tensor, int]]):
    """CLASS/*.jpg below a folder; a sample is (float32 (3, size, size), number of the class)."""

    def __init__(self, root: Path, transform: Callable[[Image.Image], torch.Tensor]) -> None:
        self.transform = transform
        self.classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
        self.samples = [
            (str(path), label)
            for label, name in enumerate(self.classes)
            for path in sorted((root / name).rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.samples:
            raise FileNotFoundError(f"no images in {root}/CLASS/, of {sorted(SUFFIXES)}")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        with Image.open(path) as image:
            return self.transform(image.convert("RGB")), label


class TrainTransform:
    """A random part of the image, of 8 to 100 % of its area, resized; half of them mirrored."""

    def __init__(self, size_px: int) -> None:
        self.size_px = size_px

    def __call__(self, image: Image.Image) -> torch.Tensor:
        part = image.resize((self.size_px,) * 2, Image.Resampling.BILINEAR, _random_box(image))
        tensor = _to_tensor(part)
        return tensor.flip(2) if torch.rand(()) < 0.5 else tensor


class EvalTransform:
    """The middle of the image: 7/8 of its shorter side, resized."""

    def __init__(self, size_px: int) -> None:
        self.size_px = size_px

    def __call__(self, image: Image.Image) -> torch.Tensor:
        half = min(image.size) * 7 / 16
        x, y = image.width / 2, image.height / 2
        box = (x - half, y - half, x + half, y + half)
        return _to_tensor(image.resize((self.size_px,) * 2, Image.Resampling.BILINEAR, box))


def _random_box(image: Image.Image) -> tuple[float, float, float, float]:
    """Left, top, right, bottom; the whole image if ten parts that were drawn do not fit in it."""
    for _ in range(10):
        share, aspect, x, y = torch.rand(4).tolist()
        area = image.width * image.height * (0.08 + 0.92 * share)
        ratio = math.exp((2 * aspect - 1) * math.log(4 / 3))
        width, height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if width <= image.width and height <= image.height:
            left, top = x * (image.width - width), y * (image.height - height)
            return left, top, left + width, top + height
    return 0, 0, image.width, image.height


def _to_tensor(image: Image.Image) -> torch.Tensor:
    pixels = torch.from_numpy(np.array(image)).float() / 255
    return ((pixels - MEAN) / STD).permute(2, 0, 1).contiguous()
