# SPDX-License-Identifier: Apache-2.0
"""Image files to pixels, by what they hold and not by what they are called.

JPEG by libjpeg-turbo; PNG and WebP by OpenCV; the others by Pillow. What would cost far more than
the file's size says is refused before.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Any, Final, Literal

import cv2
import numpy as np

from penstock.errors import ConfigError
from penstock.images.headers import (
    JPEG_PROCESSES,
    MAX_PIXELS,
    PNG_MAGIC,
    as_octets,
    as_value_errors,
    jpeg_segments,
    open_by_pillow,
    png_chunks,
    read_header,
    turned_back,
    turned_upright,
)
from penstock.images.jpeg import by_opencv, decode_jpeg, repair_image

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

# Of a PNG file, colours and pixels. Transparency is dropped, and so is animation: what is left
# shows the image that a viewer without either shows. Text and colour profiles may be packed to fill
# any memory.
_ESSENTIAL: Final = frozenset((b"IHDR", b"PLTE", b"IDAT", b"IEND"))
_PNG_HEADER: Final = struct.Struct(">IIBBBBB")  # width, height, depth, colours, three methods
_CHANNELS: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of each type of colours
_MAX_EXPANSION: Final = 1032  # of Deflate: 258 bytes out of 2 bits

_TILE_SIDES: Final = (322, 323)  # TIFF's tags of a tile's width and length
_FREE_TILE_PIXELS: Final = 1 << 24  # 4096 x 4096: programs write one for any smaller image
_MAX_TIMES_IMAGE: Final = 2


def decode_image(
    data: bytes | memoryview,
    *,
    strict: bool = True,
    max_pixels: int | None = MAX_PIXELS,
    orientation: Literal["upright", "stored"] = "upright",
) -> NDArray[np.uint8]:
    """Return an image file's pixels.

    What a file is, is found in its first bytes. Grey, palettes and CMYK become RGB, alpha is
    dropped, 16 bits give the high byte, of several frames the first is given: docs/decoding.md.

    Args:
        data: The whole file.
        strict: Whether a JPEG file whose data end early is an error. Otherwise what is there is
            given, and grey below. Other forms are always strict.
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
    pixels = _decode(data, header, strict=strict)
    if pixels.shape != (header.height_px, header.width_px, 3):
        raise ValueError(f"the header says {_size(header)}, the pixels have shape {pixels.shape}")
    if orientation == "upright":
        pixels = turned_upright(pixels, header.orientation)
    return pixels


def check_image(data: bytes | memoryview) -> int:
    """Decode an image file, strictly, and return the number of its pixels."""
    num_pixels = decode_image(data).size // 3
    with as_value_errors(), open_by_pillow(data) as image:
        if image.format == "WEBP":
            image.load()
    return num_pixels


def _decode(data: bytes | memoryview, header: ImageHeader, *, strict: bool) -> NDArray[np.uint8]:
    """Return the pixels as they are stored."""
    if header.jpeg is not None:
        return _decode_jpeg(data, header, header.jpeg, strict=strict)
    if header.form == "png":
        pixels = by_opencv(_essential_png(data), cv2.IMREAD_COLOR_RGB)
        if pixels is None:
            raise ValueError("the PNG file is damaged: libpng refuses it, its checksums are right")
        return pixels
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
        pixels = by_opencv(data, cv2.IMREAD_COLOR_RGB)
        if pixels is not None:
            return pixels
    return _by_pillow(data, header)


def _essential_png(data: bytes | memoryview) -> bytes | memoryview:
    """Return a PNG file with what its pixels need, whose checksums are right."""
    names = set()
    pieces: list[bytes | memoryview] = [PNG_MAGIC]
    num_idat_bytes = 0
    for name, start, stop in png_chunks(data):
        names.add(name)
        chunk = f"chunk {name.decode('ascii', 'backslashreplace')} at byte {start - 8}"
        if stop + 4 > len(data):
            raise ValueError(
                f"the PNG file is truncated: its {chunk} would end at byte {stop + 4}, and the "
                f"file has {len(data)}"
            )
        if name in _ESSENTIAL:
            if zlib.crc32(data[start - 4 : stop]) != int.from_bytes(data[stop : stop + 4], "big"):
                raise ValueError(f"the PNG file is damaged: wrong checksum of {chunk}")
            pieces.append(data[start - 8 : stop + 4])
            num_idat_bytes += stop - start if name == b"IDAT" else 0
        elif not name[0] & 0x20:  # a capital: not to be understood without
            raise ValueError(f"the PNG file has an unknown critical {chunk}: damaged")
    if b"IEND" not in names:
        raise ValueError(f"the PNG file is truncated: it ends after {len(data)} bytes without IEND")
    width, height, depth, colours, _, _, _ = _PNG_HEADER.unpack_from(data, 16)
    if colours not in _CHANNELS or depth not in (1, 2, 4, 8, 16):
        raise ValueError(f"the PNG file is damaged: {depth} bits of colour type {colours}")
    if width * height * depth * _CHANNELS[colours] // 8 > num_idat_bytes * _MAX_EXPANSION:
        raise ValueError(f"the PNG file's {num_idat_bytes} bytes of pixels cannot be all of them")
    return data if names <= _ESSENTIAL else b"".join(pieces)


def _size(header: ImageHeader) -> str:
    return f"{header.height_px} x {header.width_px} px (height x width)"


def _decode_jpeg(
    data: bytes | memoryview, header: ImageHeader, jpeg: JpegHeader, *, strict: bool
) -> NDArray[np.uint8]:
    check_jpeg(data, header, jpeg, strict=strict)
    try:
        return decode_jpeg(data, header, strict=strict)
    except ValueError as error:
        if _UNKNOWN_SAMPLING in str(error):
            whole = data if strict else repair_image(data) or data
            pixels = by_opencv(whole, cv2.IMREAD_COLOR_RGB)
            if pixels is None:
                raise ValueError("a JPEG file of rare sampling that OpenCV cannot decode") from None
            return pixels
        tidy = _without_gaps(data, jpeg)
        if len(tidy) == len(data):
            raise
    return decode_jpeg(tidy, read_header(tidy, max_pixels=None), strict=strict)


def check_jpeg(
    data: bytes | memoryview, header: ImageHeader, jpeg: JpegHeader, *, strict: bool
) -> None:
    """Raise ValueError if a file cannot be decoded, or costs far more than its size says."""
    if jpeg.process not in JPEG_PROCESSES.values():
        raise ValueError(f"a JPEG file of the kind {jpeg.process!r}, which no library here decodes")
    if jpeg.precision_bits != 8:
        raise ValueError(
            f"a JPEG file of {jpeg.precision_bits} bits per sample: the libraries here decode 8. "
            "Convert it, to a PNG file of 16 bits for example"
        )
    if jpeg.num_components not in (1, 3, 4):
        raise ValueError(f"a JPEG file of {jpeg.num_components} components; 1, 3 or 4 are read")
    num_bytes = len(data) - jpeg.scan_offset
    num_pixels = header.height_px * header.width_px
    is_bounded = strict and "arithmetic" not in jpeg.process
    if is_bounded and num_pixels > (num_bytes + 1) * _JPEG_PIXELS_PER_BYTE:
        raise ValueError(f"Premature end of JPEG file: {num_bytes} bytes for {_size(header)}")
    if jpeg.is_single_scan and jpeg.process in ("baseline", "extended", "lossless"):
        return
    num_scans = bytes(data).count(b"\xff\xda")
    if num_scans > _MAX_SCANS:
        raise ValueError(f"a JPEG file of {num_scans} scans; at most {_MAX_SCANS} are decoded")


def _without_gaps(data: bytes | memoryview, jpeg: JpegHeader) -> bytes:
    """Return the file without what lies between its segments and belongs to none."""
    pieces: list[bytes | memoryview] = [b"\xff\xd8"]
    for marker, start, stop in jpeg_segments(data):
        pieces += (bytes((0xFF, marker)), data[start - 2 : stop])
    return b"".join((*pieces, data[jpeg.scan_offset :]))


def _by_pillow(data: bytes | memoryview, header: ImageHeader) -> NDArray[np.uint8]:
    with as_value_errors(), open_by_pillow(data) as image:
        if header.form == "tiff":  # libtiff takes memory for a whole tile
            tags: Any = image.tag_v2  # type: ignore[attr-defined]
            width, length = (int(np.max(tags.get(side, 0))) for side in _TILE_SIDES)
            num_pixels = header.height_px * header.width_px
            if width * length > max(_FREE_TILE_PIXELS, _MAX_TIMES_IMAGE * num_pixels):
                raise ValueError(
                    f"a TIFF file with tiles of {length} x {width} px (height x width) for an "
                    f"image of {num_pixels:,} pixels in all: damaged, or made to take memory"
                )
        if image.mode == "F" or (image.mode == "I" and header.form != "ppm"):
            raise ValueError(f"an image of {image.mode} pixels (32 bits) has no meaning in 8 bits")
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
