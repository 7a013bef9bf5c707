# SPDX-License-Identifier: Apache-2.0
"""Image files to pixels, by what they hold and not by what they are called. Without torch."""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING, Any, Final

import cv2
import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["check_image", "decode_image", "repair_jpeg", "shrink_image"]

# 300 MB decoded. What is larger is far more likely a decompression bomb than a photo.
_MAX_PIXELS: Final = 100_000_000
_JPEG_MAGIC: Final = b"\xff\xd8\xff"
_JPEG_END: Final = b"\xff\xd9"
_START_OF_SCAN: Final = 0xDA
_PNG_MAGIC: Final = b"\x89PNG\r\n\x1a\n"
_PNG_HEADER: Final = struct.Struct(">16sII")  # magic, the first chunk's size and name; its content
_ORIENTATION: Final = 0x0112  # Exif's tag
_QUALITY: Final = 90
_NUM_BYTES_SHOWN: Final = 24  # enough for "<!DOCTYPE html>" or "version https://git-lfs"


def decode_image(data: bytes | memoryview, *, strict: bool = True) -> NDArray[np.uint8]:
    """Return an image file's pixels.

    Args:
        data: The whole file.
        strict: Whether a JPEG file whose data end early is an error. Otherwise what is there is
            given, and grey below.

    Returns:
        uint8, shape (height, width, 3), RGB; new memory.

    Raises:
        ValueError: the file is damaged, too large, or in no form that the decoders know.
    """
    _check_header(data)
    if _is_common_jpeg(data):
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB", strict=strict)
        return pixels
    image: NDArray[Any] | None
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    if image is None:
        raise ValueError(_reason_of_pillow(data) or "OpenCV cannot decode it")
    return image.astype(np.uint8, copy=False)


def _reason_of_pillow(data: bytes | memoryview) -> str | None:
    """Return what Pillow says is wrong with a file: OpenCV never says why."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
    except Exception as error:  # over damaged data it raises nearly anything
        return " ".join(str(error).split()) or type(error).__name__
    return None


def _check_header(data: bytes | memoryview) -> None:
    """Raise if a file is no image, or has more pixels than a photo; none are decoded for it."""
    if not len(data):
        raise ValueError("the file is empty")
    start = bytes(data[: _PNG_HEADER.size])
    if start[:3] == _JPEG_MAGIC:
        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        except ValueError:
            pass  # of a kind that is left to others
        else:
            _check_size(height, width)
            return
    if len(start) == _PNG_HEADER.size and start.startswith(_PNG_MAGIC):
        _, width, height = _PNG_HEADER.unpack(start)
        _check_size(height, width)
        return
    try:
        with Image.open(io.BytesIO(data)) as image:  # reads no pixels
            _check_size(image.height, image.width)
    except UnidentifiedImageError:
        raise _unidentified(bytes(data[:_NUM_BYTES_SHOWN])) from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"more than {_MAX_PIXELS:,} pixels: {error}") from None


def check_image(data: bytes | memoryview) -> int:
    """Decode an image file, strictly, and return the number of its pixels.

    The header is read first: what is too large costs no memory. simplejpeg takes a decoder's
    warning for an error, and OpenCV finds any damage of a PNG by its checksums. Of other forms
    OpenCV may decode what is damaged and say nothing, so there Pillow has to be content as well.

    Args:
        data: The whole file.

    Raises:
        ValueError: the file is damaged, too large, empty, or in no form that the decoders know.
        Exception: nearly any, from Pillow: damaged data lead it astray.
    """
    if not len(data):
        raise ValueError("the file is empty")
    try:
        with Image.open(io.BytesIO(data)) as image:  # reads no pixels
            _check_size(image.height, image.width)
            return _count_strictly(image, data)
    except UnidentifiedImageError:
        raise _unidentified(bytes(data[:_NUM_BYTES_SHOWN])) from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"more than {_MAX_PIXELS:,} pixels: {error}") from None


def _count_strictly(image: Image.Image, data: bytes | memoryview) -> int:
    is_strict = _is_common_jpeg(data) or image.format == "PNG"
    num_pixels = decode_image(data).size // 3
    if not is_strict:
        image.load()
    return num_pixels


def _check_size(height: int, width: int) -> None:
    if height * width > _MAX_PIXELS:
        size = f"{height} x {width} px (height x width)"
        raise ValueError(f"{size} is more than {_MAX_PIXELS:,} pixels")


def _unidentified(start: bytes) -> ValueError:
    if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in start):
        return ValueError(f"text, not an image: it begins with {start.decode()!r}")
    return ValueError("no known kind of image, or its header is damaged")


def _is_common_jpeg(data: bytes | memoryview) -> bool:
    """Whether the fast decoder takes it; rare kinds (CMYK, odd subsampling) are left to OpenCV."""
    if bytes(data[:3]) != _JPEG_MAGIC:
        return False
    try:
        _, _, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return False
    return colorspace not in ("CMYK", "YCCK")


def repair_jpeg(data: bytes | memoryview) -> bytes | None:
    """Return a JPEG file with the end marker that it lacks, or None if it lacks none.

    A truncated file has none behind its image data, whatever follows those in a whole one: a
    camera's padding, or the film that a phone appends. With one, decoders give the rows that are
    there, and grey below (`decode_image` with `strict=False`). A file that is no JPEG lacks none.

    Example:
        >>> repair_jpeg(bytes.fromhex("ffd8 ffe00002 ffda0002 1234")).hex(" ")
        'ff d8 ff e0 00 02 ff da 00 02 12 34 ff d9'
        >>> repair_jpeg(bytes.fromhex("ffd8 ffe00002 ffda0002 1234 ffd9 0000")) is None
        True
    """
    if bytes(data[:3]) != _JPEG_MAGIC:
        return None
    whole = bytes(data)
    start = _scan_start(whole)
    if start is None or whole.find(_JPEG_END, start) >= 0:  # it never occurs within a scan
        return None
    return whole + _JPEG_END


def _scan_start(data: bytes) -> int | None:
    """Return where the first image data begin; None if the file ends before.

    Markers are walked over, as an embedded preview has an end marker of its own.
    """
    place = 2
    while place + 4 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == 0xFF:  # padding between markers
            place += 1
            continue
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
        if marker == _START_OF_SCAN:
            return place
    return None


def shrink_image(data: bytes | memoryview, size_px: int | None, quality: int | None) -> bytes:
    """Return an image file whose shorter side has at most `size_px` pixels.

    What is smaller already stays as it is, byte for byte, unless a quality is given. A JPEG file is
    returned otherwise, RGB or grey, with the orientation tag of the original; transparency is lost.

    Args:
        data: The whole file.
        size_px: Length of the shorter side; None leaves the size.
        quality: From 1 to 100, as libjpeg has it; None takes 90 for what is shrunk.

    Raises:
        ValueError: the file is damaged, too large, or in no form that the decoder knows.
        OSError: it is truncated.
    """
    _check_header(data)
    try:
        image = Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        raise _unidentified(bytes(data[:_NUM_BYTES_SHOWN])) from None
    with image:
        shorter = min(image.size)
        is_large = size_px is not None and shorter > size_px
        if not is_large and quality is None:
            return bytes(data)
        exif = image.getexif()
        orientation = exif.get(_ORIENTATION)
        size = width, height = image.size
        if is_large and size_px is not None:
            scale = size_px / shorter
            size = max(1, round(width * scale)), max(1, round(height * scale))
        small = _as_8_bits(image, data)
        if small.size != size:
            small = small.resize(size, Image.Resampling.LANCZOS)
        kept = Image.Exif()
        if orientation is not None:
            kept[_ORIENTATION] = orientation
        file = io.BytesIO()
        small.save(file, "JPEG", quality=quality or _QUALITY, exif=kept if orientation else b"")
    return file.getvalue()


def _as_8_bits(image: Image.Image, data: bytes | memoryview) -> Image.Image:
    """Return an image as RGB or grey of 8 bits."""
    if _is_common_jpeg(data):
        # As strict as what reads it otherwise; Pillow overlooks damage. Whole: decoded at a half or
        # a quarter, which would be faster, a lossless grey file ends the process (simplejpeg 1.9).
        pixels = decode_image(data)
        return Image.fromarray(pixels[:, :, 0] if image.mode == "L" else pixels)
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(
            f"an image of {image.mode} pixels (32 bits) has no one meaning in the 8 bits of a JPEG "
            "file: pack it without resize and quality"
        )
    return image.convert("L" if image.mode in ("1", "L") else "RGB")
