# SPDX-License-Identifier: Apache-2.0
"""Image files to pixels, by what they hold and not by what they are called.

JPEG by libjpeg-turbo, or by OpenCV where its sampling is odd; PNG, WebP and JPEG 2000 by OpenCV;
the others by Pillow. What would cost far more than the file's size says is refused before.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any, Final, Literal

import cv2
import numpy as np
import simplejpeg

from penstock.errors import ConfigError
from penstock.images.headers import (
    JPEG_PROCESSES,
    MAX_PIXELS,
    as_octets,
    as_value_errors,
    check_size,
    jpeg_segments,
    open_by_pillow,
    read_header,
    turned_back,
    turned_upright,
)
from penstock.images.repair import essential_png, repair_jpeg, repair_png

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

    from penstock.images.headers import ImageHeader, JpegHeader

# Each block of 8 x 8 pixels takes a bit at least of the first scan; arithmetic coding may do with
# less. What has less is cut off: known before the memory for its pixels is taken.
_JPEG_PIXELS_PER_BYTE: Final = 8 * 64
# Encoders make some ten scans. Each goes over all blocks, however few bytes it has, so that a small
# file with many keeps a decoder busy for hours.
_MAX_SCANS: Final = 100
_UNKNOWN_SAMPLING: Final = "subsampling"  # TurboJPEG's word where it knows no name for it

# The most pixels per byte of a large image; files that claim more are refused. JPEG 2000 has no
# such bound by itself, as one colour takes almost no bytes: photos have about 10 px per byte, and
# one colour by a lossy encoder up to 15,000. A code of a GIF has 12 bits and stands for 4,096 px at
# most; but its first frame may fill only a part of the screen.
_FREE_PIXELS: Final = 1 << 24  # their decoding takes some 300 MB
_PIXELS_PER_BYTE: Final = {"jpeg2000": 1 << 14, "gif": 1 << 12}

# Width, height and largest value of a binary PNM file, with what may lie between them.
_PNM: Final = re.compile(rb"P([56])" + rb"(?:\s+(?:#[^\n]*\n\s*)*)(\d{1,9})" * 3 + rb"\s", re.ASCII)
# Matching takes 100 bytes of memory for each comment. Files whose header is longer are Pillow's.
_MAX_PNM_HEADER_BYTES: Final = 1 << 16

_TILE_SIDES: Final = (322, 323)  # TIFF's tags of a tile's width and length
# libtiff takes numbers with a sign too; read without, a negative one is too large, as it should be.
_FORMAT_OF_TYPE: Final = {1: "B", 3: "H", 4: "I", 6: "B", 8: "H", 9: "I", 16: "Q", 17: "Q"}
_FREE_TILE_PIXELS: Final = 1 << 24  # 4096 x 4096: programs write one for any smaller image
_MAX_TIMES_IMAGE: Final = 2
_MAX_ENTRIES: Final = 4096  # of one directory, as in libtiff


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


def check_image(data: bytes | memoryview) -> int:
    """Decode an image file, strictly, and return the number of its pixels."""
    num_pixels = decode_image(data).size // 3
    with as_value_errors(), open_by_pillow(data) as image:
        if image.format in ("WEBP", "JPEG2000"):
            check_size(image.height, image.width, MAX_PIXELS)
            image.load()
    return num_pixels


def _decode(
    data: bytes | memoryview, header: ImageHeader, *, strict: bool, max_pixels: int | None
) -> NDArray[np.uint8]:
    """Return the pixels as they are stored."""
    if header.jpeg is not None:
        return _decode_jpeg(data, header, header.jpeg, strict=strict)
    if header.form == "png":
        if not strict:
            data = repair_png(data, max_pixels=max_pixels) or data
        pixels = _by_opencv(essential_png(data))
        if pixels is None:
            raise ValueError("the PNG file is damaged: libpng refuses it, its checksums are right")
        return pixels
    if header.form == "ppm" and (match := _PNM.match(data, 0, _MAX_PNM_HEADER_BYTES)):
        return _binary_pnm(data, match)
    num_pixels = header.height_px * header.width_px
    per_byte = _PIXELS_PER_BYTE.get(header.form)
    if per_byte is not None and num_pixels > max(_FREE_PIXELS, len(data) * per_byte):
        raise ValueError(
            f"a {header.form.upper()} file of {len(data)} bytes for {_size(header)}: more than "
            f"{per_byte:,} pixels per byte are taken for an image that is not there"
        )
    if header.form == "webp":
        size_bytes = 8 + int.from_bytes(data[4:8], "little")
        if len(data) < size_bytes:  # OpenCV would say so on stderr
            raise ValueError(f"the WebP file is truncated: {len(data)} bytes of {size_bytes}")
    if header.form in ("webp", "jpeg2000"):
        pixels = _by_opencv(data)
        if pixels is not None:
            return pixels
    if header.form == "tiff":
        _check_tiles(data, num_pixels)
    return _by_pillow(data, header, max_pixels)


def _size(header: ImageHeader) -> str:
    return f"{header.height_px} x {header.width_px} px (height x width)"


def _decode_jpeg(
    data: bytes | memoryview, header: ImageHeader, jpeg: JpegHeader, *, strict: bool
) -> NDArray[np.uint8]:
    check_jpeg(data, header, jpeg, strict=strict)
    try:
        return _by_turbojpeg(data, jpeg, strict)
    except ValueError as error:
        if _UNKNOWN_SAMPLING in str(error):
            pixels = _by_opencv(data if strict else repair_jpeg(data) or data)
            if pixels is None:
                raise ValueError(
                    "a JPEG file of rare sampling, and damaged: OpenCV cannot decode it"
                ) from None
            return pixels
        tidy = _without_gaps(data, jpeg)
        if len(tidy) == len(data):
            raise
    return _by_turbojpeg(tidy, jpeg, strict)


def check_jpeg(
    data: bytes | memoryview, header: ImageHeader, jpeg: JpegHeader, *, strict: bool
) -> None:
    """Raise ValueError if a file cannot be decoded, or costs far more than its size tells."""
    if jpeg.process not in JPEG_PROCESSES.values():
        raise ValueError(f"a JPEG file of the kind {jpeg.process!r}, which no library here decodes")
    if jpeg.precision_bits != 8:
        raise ValueError(
            f"a JPEG file of {jpeg.precision_bits} bits per sample: the libraries here decode 8. "
            "Convert it, to a PNG file of 16 bits for example"
        )
    if jpeg.num_components not in (1, 3, 4):
        raise ValueError(
            f"a JPEG file of {jpeg.num_components} components; 1, 3 and 4 have a meaning"
        )
    num_bytes = len(data) - jpeg.scan_offset
    num_pixels = header.height_px * header.width_px
    is_bounded = strict and "arithmetic" not in jpeg.process
    if is_bounded and num_pixels > (num_bytes + 1) * _JPEG_PIXELS_PER_BYTE:
        raise ValueError(
            f"Premature end of JPEG file: {num_bytes} bytes cannot be an image of {_size(header)}"
        )
    if jpeg.is_single_scan and jpeg.process in ("baseline", "extended", "lossless"):
        return
    num_scans = bytes(data).count(b"\xff\xda")
    if num_scans > _MAX_SCANS:
        raise ValueError(
            f"a JPEG file of {num_scans} scans, more than {_MAX_SCANS}: made to keep a decoder busy"
        )


def _by_turbojpeg(data: bytes | memoryview, jpeg: JpegHeader, strict: bool) -> NDArray[np.uint8]:
    pixels: NDArray[np.uint8]
    if jpeg.num_components == 4:
        return _from_cmyk(simplejpeg.decode_jpeg(data, "CMYK", strict=strict))
    if jpeg.num_components == 1 and jpeg.process == "lossless":
        # Only as it is: asked for RGB it refuses, and asked for a smaller size it ends the process
        # (simplejpeg 1.9).
        grey = simplejpeg.decode_jpeg(data, "GRAY", strict=strict)
        return np.repeat(grey, 3, axis=2)
    pixels = simplejpeg.decode_jpeg(data, "RGB", strict=strict)
    return pixels


def _from_cmyk(lack: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return RGB for inks without a profile: each colour is its ink's lack times black's."""
    pixels: NDArray[np.uint8] = np.empty((*lack.shape[:2], 3), np.uint8)
    for row, out in zip(lack, pixels, strict=True):  # by rows: twice the bits for one row only
        product = row[:, :3].astype(np.uint16) * row[:, 3:] + 127
        out[:] = product // 255
    return pixels


def _without_gaps(data: bytes | memoryview, jpeg: JpegHeader) -> bytes:
    """Return the file without what lies between its segments and belongs to none."""
    pieces: list[bytes | memoryview] = [b"\xff\xd8"]
    for marker, start, stop in jpeg_segments(data):
        pieces += (bytes((0xFF, marker)), data[start - 2 : stop])
    return b"".join((*pieces, data[jpeg.scan_offset :]))


def _by_opencv(data: bytes | memoryview) -> NDArray[np.uint8] | None:
    """Return the pixels as they are stored; None if OpenCV cannot decode them."""
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
    num_bytes = len(data) - match.end()
    if num_bytes < count * dtype.itemsize:
        raise ValueError(
            f"the PNM file is truncated: {num_bytes} of {count * dtype.itemsize} bytes of pixels"
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
    with as_value_errors(), open_by_pillow(data) as image:
        check_size(image.height, image.width, max_pixels)  # of JPEG 2000 it may be the box's
        if image.mode == "F" or (image.mode == "I" and header.form != "ppm"):
            raise ValueError(
                f"an image of {image.mode} pixels (32 bits) has no one meaning in 8 bits"
            )
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


def _check_tiles(data: bytes | memoryview, num_pixels: int) -> None:
    """Raise if a TIFF's tile is far larger than the image: libtiff takes memory for a whole one."""

    def number(place: int, form: str) -> int:
        value: int
        (value,) = struct.unpack_from(order + form, data, min(place, len(data)))
        return value

    order = "<" if data[:2] == b"II" else ">"
    is_big = 43 in data[2:4]
    offset, count, entry_bytes, value_offset = ("Q", "Q", 20, 12) if is_big else ("I", "H", 12, 8)
    sides = dict.fromkeys(_TILE_SIDES, 0)
    try:
        start = number(8 if is_big else 4, offset)
        num_entries = min(number(start, count), _MAX_ENTRIES)
        start += 8 if is_big else 2
        for entry in range(start, start + entry_bytes * num_entries, entry_bytes):
            tag, form = number(entry, "H"), _FORMAT_OF_TYPE.get(number(entry + 2, "H"))
            if tag in sides and form is not None:
                place = entry + value_offset
                if form == "Q" and not is_big:  # too long for its entry, which says where it is
                    place = number(place, "I")
                sides[tag] = max(sides[tag], number(place, form))
    except struct.error:
        pass  # cut off: its reader will say so
    width, length = sides.values()
    if width * length > max(_FREE_TILE_PIXELS, _MAX_TIMES_IMAGE * num_pixels):
        raise ValueError(
            f"a TIFF file with tiles of {length} x {width} px (height x width) for an image of "
            f"{num_pixels:,} pixels in all: damaged, or made to take memory"
        )
