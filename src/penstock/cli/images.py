# SPDX-License-Identifier: Apache-2.0
"""A folder of images as a plain torch dataset: the work that `penstock bench` gives out."""

from __future__ import annotations

import math
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import cv2
import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch.utils.data import Dataset

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["BrokenFile", "ImageFiles", "find_images", "read_image", "sort_out_broken"]

_SUFFIXES: Final = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})
# 300 MB decoded. What is larger is far more likely a decompression bomb than a photo.
_MAX_PIXELS: Final = 100_000_000
_JPEG_MAGIC: Final = b"\xff\xd8\xff"
# ImageNet's mean and standard deviation (RGB, of values in 0..1): the usual normalisation.
_MEAN: Final = np.array([0.485, 0.456, 0.406], np.float32).reshape(3, 1, 1)
_STD: Final = np.array([0.229, 0.224, 0.225], np.float32).reshape(3, 1, 1)
_SCALE: Final = 1 / (255 * _STD)
_BIAS: Final = -_MEAN / _STD


@dataclass(frozen=True, slots=True)
class BrokenFile:
    """A file that cannot be decoded.

    Attributes:
        path: Where it lies.
        reason: What the decoder says of it.
    """

    path: Path
    reason: str


def find_images(folder: Path) -> list[Path]:
    """Return the image files below a folder, known by their extension, in order of their paths.

    Raises:
        ConfigError: there is no such folder, or no image in it.
    """
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {what}. Name a folder with images in it.")
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
    if not paths:
        known = ", ".join(sorted(_SUFFIXES))
        raise ConfigError(f"no image in {folder} or below it. Looked for files ending in {known}.")
    return paths


def sort_out_broken(paths: Sequence[Path], num_threads: int) -> tuple[list[Path], list[BrokenFile]]:
    """Decode every file once; return those that can be decoded, and the others with the reasons.

    Besides, it brings the files into the page cache, so that no loader pays for being the first.
    """
    with ThreadPoolExecutor(num_threads) as pool:
        reasons = list(pool.map(_reason_not_to_read, paths))
    pairs = list(zip(paths, reasons, strict=True))
    good = [path for path, reason in pairs if reason is None]
    return good, [BrokenFile(path, reason) for path, reason in pairs if reason is not None]


def _reason_not_to_read(path: Path) -> str | None:
    try:
        with Image.open(path) as header:  # reads no pixels
            width, height = header.size
        if width * height > _MAX_PIXELS:
            return f"{height} x {width} px (height x width) is more than {_MAX_PIXELS:,} pixels"
        read_image(path)
    except (OSError, ValueError, cv2.error, Image.DecompressionBombError) as error:
        return f"{type(error).__name__}: {str(error).strip() or 'no details'}"
    return None


def read_image(path: Path | str) -> npt.NDArray[np.uint8]:
    """Return an image file's pixels, shape (height, width, 3), RGB.

    Raises:
        ValueError: the file is damaged, or in no form that the decoders know.
        OSError: it cannot be read.
    """
    data = Path(path).read_bytes()
    if not data:
        raise ValueError("the file is empty")
    if data.startswith(_JPEG_MAGIC) and _is_common_jpeg(data):
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB")
        return pixels
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    if image is None:
        raise ValueError("OpenCV cannot decode it")
    return image.astype(np.uint8, copy=False)


def _is_common_jpeg(data: bytes) -> bool:
    """Whether the fast decoder takes it; rare kinds (CMYK, odd subsampling) are left to OpenCV."""
    try:
        _, _, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return False
    return colorspace not in ("CMYK", "YCCK")


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
