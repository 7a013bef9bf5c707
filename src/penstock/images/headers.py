# SPDX-License-Identifier: Apache-2.0
"""What an image file says of itself before a pixel is decoded: form, size, orientation.

JPEG, PNG, WebP, GIF and JPEG 2000 are read here, in some microseconds; what is left, by Pillow.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from penstock.images.orientation import exif_blocks, orientation_in
from penstock.images.pillow import open_by_pillow
from penstock.images.segments import JPEG_MAGIC, PNG_MAGIC, START_OF_SCAN, as_octets, jpeg_segments

__all__ = ["MAX_PIXELS", "ImageHeader", "JpegHeader", "check_size", "read_header"]

# 300 MB of pixels, and several times that while they are decoded. What is larger is far more likely
# a decompression bomb than a photo.
MAX_PIXELS: Final = 100_000_000
"""An image with more pixels than this is refused before memory is taken for it."""

_PROCESS_OF_SOF: Final = {
    0xC0: "baseline",
    0xC1: "extended",
    0xC2: "progressive",
    0xC3: "lossless",
    0xC5: "hierarchical",
    0xC6: "hierarchical progressive",
    0xC7: "hierarchical lossless",
    0xC9: "arithmetic",
    0xCA: "arithmetic progressive",
    0xCB: "arithmetic lossless",
    0xCD: "arithmetic hierarchical",
    0xCE: "arithmetic hierarchical progressive",
    0xCF: "arithmetic hierarchical lossless",
    0xF7: "JPEG-LS",
}
_APP1: Final = 0xE1
_FRAME: Final = struct.Struct(">BHHB")  # precision, height, width, number of components
_IHDR: Final = struct.Struct(">I4sII")
_MAX_GIF_BLOCKS: Final = 1_000_000  # Pillow takes 83 bytes for each; 1 MB of XMP is some 11,000
_JPEG2000_SIZE: Final = b"\xff\x4f\xff\x51"  # start of the codestream, and of its SIZ segment


@dataclass(frozen=True, slots=True)
class JpegHeader:
    """What the markers of a JPEG file say.

    Attributes:
        process: How its data are coded: "baseline", "extended", "progressive", "lossless",
            "arithmetic" and some rarer ones.
        precision_bits: Of a sample of one component; 8 in nearly all files.
        num_components: 1 is grey, 3 colour, 4 CMYK or YCCK.
        sof_offset: Where the content of the frame header begins, with the precision. The height
            lies one byte behind it: 2 bytes, big endian.
        is_single_scan: Whether the first scan names all components.
        scan_offset: Where the entropy-coded data of the first scan begin.
    """

    process: str
    precision_bits: int
    num_components: int
    sof_offset: int
    is_single_scan: bool
    scan_offset: int


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What a file says of its (first) image.

    Attributes:
        form: "jpeg", "png", "webp", "gif", "bmp", "tiff", ...: by content, not by name.
        height_px: Rows as they are stored, before any turn.
        width_px: Columns as they are stored.
        orientation: Exif's, from 1 to 8; 1 where there is none, or it is damaged.
        jpeg: More of a JPEG file; None for other forms.
    """

    form: str
    height_px: int
    width_px: int
    orientation: int = 1
    jpeg: JpegHeader | None = None

    @property
    def upright_height_px(self) -> int:
        """Rows of the image as it is to be seen."""
        return self.width_px if self.orientation >= 5 else self.height_px

    @property
    def upright_width_px(self) -> int:
        """Columns of the image as it is to be seen."""
        return self.height_px if self.orientation >= 5 else self.width_px


def read_header(data: bytes | memoryview, *, max_pixels: int | None = MAX_PIXELS) -> ImageHeader:
    """Return what an image file says of itself; no pixel is decoded, and no file is copied.

    Args:
        data: The whole file.
        max_pixels: More than so many are an error. None allows any number.

    Raises:
        ValueError: the file is empty, or text, or no image, or too large, or its header damaged.

    Example:
        >>> gif = b"GIF89a" + bytes.fromhex("0300 0200 000000 2c 0000 0000 0300 0200 00")
        >>> header = read_header(gif)
        >>> header.form, header.height_px, header.width_px
        ('gif', 2, 3)
    """
    data = as_octets(data)
    if not len(data):
        raise ValueError("the file is empty")
    try:
        header = _read(data)
    except struct.error:
        raise ValueError(f"the file ends within its header, after {len(data)} bytes") from None
    check_size(header.height_px, header.width_px, max_pixels)
    return header


def check_size(height_px: int, width_px: int, max_pixels: int | None) -> None:
    """Raise ValueError if an image has no pixels, or more than are allowed."""
    size = f"{height_px} x {width_px} px (height x width)"
    if height_px < 1 or width_px < 1:
        raise ValueError(f"the header gives {size}: no pixels")
    if max_pixels is not None and height_px * width_px > max_pixels:
        raise ValueError(f"{size} is more than {max_pixels:,} pixels")


def _read(data: bytes | memoryview) -> ImageHeader:
    start = bytes(data[:12])
    if start.startswith(JPEG_MAGIC):
        return _read_jpeg(data)
    if start.startswith(PNG_MAGIC):
        return _read_png(data)
    if start[:4] == b"RIFF" and start[8:] == b"WEBP":
        return _read_webp(data)
    if start[:6] in (b"GIF87a", b"GIF89a"):
        return _read_gif(data)
    if start == b"\0\0\0\x0cjP  \r\n\x87\n" or start.startswith(_JPEG2000_SIZE):
        return _read_jpeg2000(data)
    return _read_by_pillow(data)


def _read_jpeg(data: bytes | memoryview) -> ImageHeader:
    """Walk over the markers up to the first scan."""
    frame: tuple[int, int] | None = None
    orientation: int | None = None
    for marker, start, stop in jpeg_segments(data):
        if marker == _APP1:
            if orientation is None and data[start : start + 6] == b"Exif\0\0":
                orientation = orientation_in(data, start, stop)
        elif frame is None and marker in _PROCESS_OF_SOF:
            frame = marker, start
        elif marker == START_OF_SCAN:
            break
    if frame is None:
        raise ValueError("the JPEG file has image data, but nothing before them gives their size")
    marker, sof_offset = frame
    precision_bits, height, width, num_components = _FRAME.unpack_from(data, sof_offset)
    is_single_scan = start < stop and data[start] == num_components
    jpeg = JpegHeader(
        _PROCESS_OF_SOF[marker], precision_bits, num_components, sof_offset, is_single_scan, stop
    )
    return ImageHeader("jpeg", height, width, orientation or 1, jpeg)


def _read_png(data: bytes | memoryview) -> ImageHeader:
    size_bytes, name, width, height = _IHDR.unpack_from(data, 8)
    if name != b"IHDR" or size_bytes != 13:
        raise ValueError("the PNG file does not begin with its header: damaged")
    return ImageHeader("png", height, width, _orientation(data))


def _orientation(data: bytes | memoryview) -> int:
    for start, stop in exif_blocks(data):
        orientation = orientation_in(data, start, stop)
        if orientation is not None:
            return orientation
    return 1


def _read_webp(data: bytes | memoryview) -> ImageHeader:
    name = bytes(data[12:16])
    if name == b"VP8X":
        _, low_width, high_width, low_height, high_height = struct.unpack_from("<IHBHB", data, 20)
        width, height = high_width << 16 | low_width, high_height << 16 | low_height
        return ImageHeader("webp", height + 1, width + 1, _orientation(data))
    if name == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return ImageHeader("webp", (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1)
    if name == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return ImageHeader("webp", height & 0x3FFF, width & 0x3FFF)  # above lies a scale
    raise ValueError(f"a WebP file whose first part is called {name!r}: damaged")


def _read_gif(data: bytes | memoryview) -> ImageHeader:
    """Return the size of the screen, or of the first frame where that reaches beyond it."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    place = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)  # behind the palette
    num_blocks = 0
    while data[place : place + 1] == b"!":
        place += 2
        while place < len(data) and data[place] and num_blocks < _MAX_GIF_BLOCKS:
            place += 1 + data[place]
            num_blocks += 1
        place += 1
        num_blocks += 1
        if num_blocks >= _MAX_GIF_BLOCKS:
            raise ValueError(
                f"a GIF file of {_MAX_GIF_BLOCKS:,} blocks of text or more before its first image"
            )
    if data[place : place + 1] == b",":
        left, top, frame_width, frame_height = struct.unpack_from("<HHHH", data, place + 1)
        width, height = max(width, left + frame_width), max(height, top + frame_height)
    return ImageHeader("gif", height, width)


def _read_jpeg2000(data: bytes | memoryview) -> ImageHeader:
    """Return the size of the codestream: the box before it may say another, and is not heeded."""
    place = _codestream_of(data)
    if data[place : place + 4] != _JPEG2000_SIZE:
        raise ValueError("the JPEG 2000 file has no image data: damaged")
    right, bottom, left, top = struct.unpack_from(">IIII", data, place + 8)
    (num_components,) = struct.unpack_from(">H", data, place + 40)
    if num_components > 4:  # each takes memory, and 16,384 are allowed
        raise ValueError(f"a JPEG 2000 file of {num_components} components is none of colours")
    return ImageHeader("jpeg2000", bottom - top, right - left)


def _codestream_of(data: bytes | memoryview) -> int:
    if data[:4] == _JPEG2000_SIZE:
        return 0
    place = 0
    while True:
        size_bytes, name = struct.unpack_from(">I4s", data, place)
        head = 8
        if size_bytes == 1:
            (size_bytes,) = struct.unpack_from(">Q", data, place + 8)
            head = 16
        if name == b"jp2c":
            return place + head
        if size_bytes < head:  # 0: it is the last
            raise ValueError("the JPEG 2000 file has no image data: damaged")
        place += size_bytes


def _read_by_pillow(data: bytes | memoryview) -> ImageHeader:
    with open_by_pillow(data) as image:
        form, height, width = str(image.format).lower(), image.height, image.width
        try:
            orientation = image.getexif().get(0x0112, 1)
        except Exception:  # over damaged data it raises nearly anything
            orientation = 1
    if not (isinstance(orientation, int) and 1 <= orientation <= 8):
        orientation = 1
    if form == "tiff" and orientation >= 5:  # Pillow gives the size of what it will have turned
        height, width = width, height
    return ImageHeader(form, height, width, orientation)
