# SPDX-License-Identifier: Apache-2.0
"""Image files to pixels, by what they hold and not by what they are called."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, Literal

import cv2
import numpy as np

from penstock.errors import ConfigError
from penstock.images.headers import MAX_PIXELS, read_header
from penstock.images.jpeg import decode_jpeg
from penstock.images.orientation import turned_back, turned_upright
from penstock.images.pillow import check_opened, open_by_pillow, told_as_value_errors
from penstock.images.png import essential_png, repair_png
from penstock.images.segments import as_octets
from penstock.images.tiff import check_tiles

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

    from penstock.images.headers import ImageHeader

__all__ = ["decode_image"]

# Width, height and largest value of a binary PNM file, with what may lie between them.
_PNM: Final = re.compile(rb"P([56])" + rb"(?:\s+(?:#[^\n]*\n\s*)*)(\d{1,9})" * 3 + rb"\s", re.ASCII)
# Matching takes 100 bytes of memory for each comment. Files whose header is longer are Pillow's.
_MAX_PNM_HEADER_BYTES: Final = 1 << 16

# The most pixels per byte of a large image; files that claim more are refused. JPEG 2000 has no
# such bound by itself, as one colour takes almost no bytes: photos have about 10 px per byte, and
# one colour by a lossy encoder up to 15,000. A code of a GIF has 12 bits and stands for 4,096 px at
# most; but its first frame may fill only a part of the screen.
_FREE_PIXELS: Final = 1 << 24  # their decoding takes some 300 MB
_MAX_PIXELS_PER_BYTE: Final = {"jpeg2000": 1 << 14, "gif": 1 << 12}


def decode_image(
    data: bytes | memoryview,
    *,
    strict: bool = True,
    max_pixels: int | None = MAX_PIXELS,
    orientation: Literal["upright", "stored"] = "upright",
) -> NDArray[np.uint8]:
    """Return an image file's pixels.

    What a file is, is found in its first bytes. Whatever the form, the rules are the same:

    | file | pixels |
    |---|---|
    | grey, 1 bit, palette | the same colour in three channels; the palette's colour |
    | alpha, transparent colour | dropped; colours as stored, those of transparent pixels too |
    | 16 bits per value | the high byte |
    | 32 bits or float per value | an error: they have no one meaning in 8 bits |
    | CMYK, YCCK | (255 - ink) * (255 - black) / 255, without a colour profile |
    | several frames or pages | the first; of an animated PNG the one outside the animation |
    | JPEG: progressive, arithmetic, lossless | as baseline (lossless: grey and RGB) |
    | JPEG: 12 bits, hierarchical, JPEG-LS | an error that names the kind |
    | turned, by Exif (1 to 8) | turned upright; as stored if asked for |

    Args:
        data: The whole file.
        strict: Whether a JPEG or PNG file whose data end early is an error. Otherwise what is there
            is given, and grey (JPEG) or black (PNG) below. Other forms are always strict.
        max_pixels: More than so many are an error, before memory is taken for them. None allows any
            number.
        orientation: "upright", as Exif says that the image is to be seen, or "stored".

    Returns:
        uint8, shape (height, width, 3), RGB, C-contiguous; new memory.

    Raises:
        ValueError: the file is damaged, too large, empty, or in no form that the decoders know.

    Concurrency:
        May be called by any number of threads; libjpeg-turbo and OpenCV decode in parallel.

    Example:
        >>> data = b"P6 2 1 255 " + bytes([255, 0, 0, 0, 0, 9])
        >>> decode_image(data).tolist()
        [[[255, 0, 0], [0, 0, 9]]]
    """
    if orientation not in ("upright", "stored"):
        raise ConfigError(f"orientation is 'upright' or 'stored', not {orientation!r}.")
    data = as_octets(data)
    header = read_header(data, max_pixels=max_pixels)
    pixels = _decode(data, header, strict=strict, max_pixels=max_pixels)
    if pixels.shape != (header.height_px, header.width_px, 3):
        said = f"{header.height_px} x {header.width_px}"
        raise ValueError(
            f"the header says {said} px (height x width), the pixels are of shape {pixels.shape}"
        )
    if orientation == "upright":
        pixels = turned_upright(pixels, header.orientation)
    return pixels


def _decode(
    data: bytes | memoryview, header: ImageHeader, *, strict: bool, max_pixels: int | None
) -> NDArray[np.uint8]:
    """Return the pixels as they are stored."""
    if header.jpeg is not None:
        return decode_jpeg(data, header, header.jpeg, strict=strict)
    _check_amount(data, header)
    if header.form == "png":
        if not strict:
            data = repair_png(data, max_pixels=max_pixels) or data
        pixels = _by_opencv(essential_png(data))
        if pixels is None:
            raise ValueError("the PNG file is damaged: libpng refuses it, its checksums are right")
        return pixels
    if header.form in ("webp", "jpeg2000"):
        if header.form == "webp":
            _check_riff(data)
        pixels = _by_opencv(data)
        return _by_pillow(data, header, max_pixels) if pixels is None else pixels
    if header.form == "ppm" and (match := _PNM.match(data, 0, _MAX_PNM_HEADER_BYTES)):
        return _binary_pnm(data, match)
    return _by_pillow(data, header, max_pixels)


def _check_riff(data: bytes | memoryview) -> None:
    """Raise if a WebP file is cut off; OpenCV would say so on stderr."""
    size_bytes = 8 + int.from_bytes(data[4:8], "little")
    if len(data) < size_bytes:
        raise ValueError(f"the WebP file is truncated: {len(data)} bytes of {size_bytes}")


def _check_amount(data: bytes | memoryview, header: ImageHeader) -> None:
    """Raise if a file is far too small for a large image, where its form has such a bound."""
    per_byte = _MAX_PIXELS_PER_BYTE.get(header.form)
    if per_byte is None:
        return
    if header.height_px * header.width_px > max(_FREE_PIXELS, len(data) * per_byte):
        form = {"jpeg2000": "JPEG 2000", "gif": "GIF"}[header.form]
        size = f"{header.height_px} x {header.width_px} px (height x width)"
        raise ValueError(
            f"a {form} file of {len(data)} bytes for {size}: more than {per_byte:,} pixels per "
            "byte are taken for an image that is not there"
        )


def _by_opencv(data: bytes | memoryview) -> NDArray[np.uint8] | None:
    """Return the pixels as they are stored; None if OpenCV cannot decode them, it never says why.

    Raises:
        MemoryError: there is not enough.
    """
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    image: NDArray[Any] | None
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error as error:
        if error.code == cv2.Error.StsNoMem:
            raise MemoryError(str(error)) from None
        return None
    return None if image is None else image.astype(np.uint8, copy=False)


def _binary_pnm(data: bytes | memoryview, match: re.Match[bytes]) -> NDArray[np.uint8]:
    """Return the pixels of a PGM or PPM file, whose values reach up to a number of its own."""
    kind, width, height, largest = (int(part) for part in match.groups())
    num_channels = 3 if kind == 6 else 1
    if not 1 <= largest <= 65535:
        raise ValueError(f"the PNM file's largest value is {largest}; from 1 to 65,535 are allowed")
    dtype = np.dtype(">u2" if largest > 255 else "u1")
    count = width * height * num_channels
    if len(data) - match.end() < count * dtype.itemsize:
        raise ValueError(
            f"the PNM file is truncated: {len(data) - match.end()} bytes of "
            f"{count * dtype.itemsize} bytes of pixels"
        )
    values = np.frombuffer(data, dtype, count, match.end()).reshape(height, width, num_channels)
    pixels: NDArray[np.uint8] = np.empty((height, width, 3), np.uint8)
    if largest == 255:
        pixels[:] = values
    elif largest == 65535:
        pixels[:] = values >> 8
    else:
        for row, out in zip(values, pixels, strict=True):  # by rows: wide numbers for one only
            out[:] = np.minimum(row.astype(np.uint32) * 255 // largest, 255)
    return pixels


def _by_pillow(
    data: bytes | memoryview, header: ImageHeader, max_pixels: int | None
) -> NDArray[np.uint8]:
    if header.form == "tiff":
        check_tiles(data, header.height_px * header.width_px)
    with told_as_value_errors(), open_by_pillow(data) as image:
        if image.mode == "F" or (image.mode == "I" and header.form != "ppm"):
            raise ValueError(
                f"an image of {image.mode} pixels (32 bits) has no one meaning in 8 bits"
            )
        check_opened(image, header, max_pixels)
        image.load()
        pixels = _as_rgb(image)
    # Pillow turns a TIFF file upright, and no other.
    return turned_back(pixels, header.orientation) if header.form == "tiff" else pixels


def _as_rgb(image: Image.Image) -> NDArray[np.uint8]:
    if image.mode.startswith("I"):  # 16 bits; "I" that of grey PNM written in digits
        high = np.minimum(np.asarray(image) >> 8, 255).astype(np.uint8)
        return np.repeat(high[:, :, None], 3, axis=2)
    image.info.pop("transparency", None)  # else colours may be taken for it, with a warning
    if image.mode in ("RGBa", "La"):  # TIFF, multiplied by alpha
        image = image.convert(image.mode.upper())
    # An image that is RGB already would be copied.
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))
