# SPDX-License-Identifier: Apache-2.0
"""Which files below a folder are images, and which of those can be decoded. Without torch."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import cv2
import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

__all__ = [
    "BrokenFile",
    "count_pixels",
    "find_images",
    "iter_image_paths",
    "read_image",
    "reason_of",
    "sort_out_broken",
]

# Those of torchvision's ImageFolder: what trains through it is what has to be found.
_SUFFIXES: Final = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
# 300 MB decoded. What is larger is far more likely a decompression bomb than a photo.
_MAX_PIXELS: Final = 100_000_000
_JPEG_MAGIC: Final = b"\xff\xd8\xff"
_NUM_BYTES_SHOWN: Final = 24  # enough for "<!DOCTYPE html>" or "version https://git-lfs"


class _UndecodableError(ValueError):
    """OpenCV gave no image, and it never says why."""


@dataclass(frozen=True, slots=True)
class BrokenFile:
    """A file that cannot be decoded.

    Attributes:
        path: Where it lies.
        reason: What the decoder says of it.
    """

    path: Path
    reason: str


def iter_image_paths(folder: Path) -> Iterator[str]:
    """Yield the files below a folder that have an image's extension, in no order worth a name.

    Links to folders are followed, as ImageFolder does it; no folder is entered twice. A link that
    leads nowhere, or a pipe, counts as a file: it has an image's name, and no image.

    Raises:
        ConfigError: there is no such folder, or one in it cannot be listed.
    """
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {what}. Name a folder with images in it.")
    entered = set()
    for place, subfolders, names in os.walk(folder, onerror=_cannot_list, followlinks=True):
        status = os.stat(place)
        if (identity := (status.st_dev, status.st_ino)) in entered:
            subfolders.clear()
            continue
        entered.add(identity)
        subfolders.sort()  # which of two links to one folder gives the paths is always the same
        yield from (os.path.join(place, n) for n in names if n.lower().endswith(_SUFFIXES))


def _cannot_list(error: OSError) -> NoReturn:
    raise ConfigError(
        f"cannot list {error.filename}: {error.strerror}. Its images would be passed over; allow "
        "it to be read, or name another folder."
    ) from error


def find_images(folder: Path) -> list[Path]:
    """Return the image files below a folder, known by their extension, in order of their paths.

    Raises:
        ConfigError: there is no such folder, one in it cannot be listed, or no image is in it.
    """
    paths = sorted(map(Path, iter_image_paths(folder)))
    if not paths:
        raise no_image_in(folder)
    return paths


def no_image_in(folder: Path) -> ConfigError:
    """Return the error that says so, for the caller to raise."""
    known = ", ".join(_SUFFIXES)
    return ConfigError(f"no image in {folder} or below it. Looked for files ending in {known}.")


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
        count_pixels(path)
    except Exception as error:  # over damaged data Pillow raises nearly anything
        return reason_of(error)
    return None


def reason_of(error: BaseException) -> str:
    """Return in one line what an error of `count_pixels` says, without the file's name.

    Example:
        >>> reason_of(FileNotFoundError(2, "No such file or directory", "a.jpg"))
        'No such file or directory'
        >>> reason_of(KeyError("tag"))
        "KeyError: 'tag'"
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    speaks = text and isinstance(error, (ValueError, OSError, cv2.error))
    return text if speaks else f"{type(error).__name__}: {text or 'no details'}"


def count_pixels(path: Path | str) -> int:
    """Decode a file, strictly, and return the number of its pixels.

    The header is read first: what is too large costs no memory. simplejpeg takes a decoder's
    warning for an error, and OpenCV finds any damage of a PNG by its checksums. Of other forms
    OpenCV may decode what is damaged and say nothing, so there Pillow has to be content as well.

    Raises:
        ValueError: the file is damaged, too large, empty, or in no form that the decoders know.
        OSError: it cannot be read, or is damaged.
        Exception: nearly any, from Pillow: damaged data lead it astray.
    """
    _check_is_file(path)
    try:
        with Image.open(path) as image:  # reads no pixels
            _check_size(image.height, image.width)
            return _count_strictly(image, Path(path).read_bytes())
    except UnidentifiedImageError:
        raise _unidentified(path) from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"more than {_MAX_PIXELS:,} pixels: {error}") from None


def _count_strictly(image: Image.Image, data: bytes) -> int:
    is_strict = _is_common_jpeg(data) or image.format == "PNG"
    try:
        num_pixels = _decode(data).size // 3
    except _UndecodableError:
        image.load()  # Pillow says what is wrong with it
        raise
    if not is_strict:
        image.load()
    return num_pixels


def _check_is_file(path: Path | str) -> None:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):  # a named pipe would be waited for without end
        raise ValueError("not a regular file")
    if not status.st_size:
        raise ValueError("the file is empty")


def _check_size(height: int, width: int) -> None:
    if height * width > _MAX_PIXELS:
        size = f"{height} x {width} px (height x width)"
        raise ValueError(f"{size} is more than {_MAX_PIXELS:,} pixels")


def _unidentified(path: Path | str) -> ValueError:
    with open(path, "rb") as file:
        start = file.read(_NUM_BYTES_SHOWN)
    if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in start):
        return ValueError(f"text, not an image: it begins with {start.decode()!r}")
    return ValueError("no known kind of image, or its header is damaged")


def read_image(path: Path | str) -> npt.NDArray[np.uint8]:
    """Return an image file's pixels, shape (height, width, 3), RGB.

    Raises:
        ValueError: the file is damaged, or in no form that the decoders know.
        OSError: it cannot be read.
    """
    return _decode(Path(path).read_bytes())


def _decode(data: bytes) -> npt.NDArray[np.uint8]:
    if not data:
        raise ValueError("the file is empty")
    if _is_common_jpeg(data):
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB")
        return pixels
    image: npt.NDArray[Any] | None
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    if image is None:
        raise _UndecodableError("OpenCV cannot decode it")
    return image.astype(np.uint8, copy=False)


def _is_common_jpeg(data: bytes) -> bool:
    """Whether the fast decoder takes it; rare kinds (CMYK, odd subsampling) are left to OpenCV."""
    if not data.startswith(_JPEG_MAGIC):
        return False
    try:
        _, _, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return False
    return colorspace not in ("CMYK", "YCCK")
