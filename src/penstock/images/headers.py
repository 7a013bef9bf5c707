# SPDX-License-Identifier: Apache-2.0
"""What an image file says of itself before a pixel is decoded: form, size, orientation.

JPEG and PNG, the forms of training data, are read here, in some microseconds; the others by Pillow.
"""

from __future__ import annotations

import contextlib
import io
import re
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import cv2
import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

JPEG_MAGIC: Final = b"\xff\xd8\xff"
PNG_MAGIC: Final = b"\x89PNG\r\n\x1a\n"
START_OF_SCAN: Final = 0xDA
_END_OF_IMAGE: Final = 0xD9
_WITHOUT_LENGTH: Final = frozenset((0x01, *range(0xD0, 0xD9)))  # TEM, restarts, start of image
_MARKER: Final = re.compile(rb"\xff[^\x00\xff]")  # what comes before it, 0xFF included, is padding
_APP1: Final = 0xE1
# Huffman and arithmetic tables, and a reserved code, lie among the frame headers; JPEG-LS far out.
_FRAMES: Final = frozenset((*range(0xC0, 0xD0), 0xF7)) - {0xC4, 0xC8, 0xCC}
JPEG_PROCESSES: Final = {
    0xC0: "baseline",
    0xC1: "extended",
    0xC2: "progressive",
    0xC3: "lossless",
    0xC9: "arithmetic",
    0xCA: "arithmetic progressive",
}

# 300 MB of pixels, and several times that while they are decoded. What is larger is far more likely
# a decompression bomb than a photo.
MAX_PIXELS: Final = 100_000_000
"""An image with more pixels than this is refused before memory is taken for it."""

# Not among them: what has no mark to know it by (TGA), what starts another program to be drawn
# (EPS), what holds a file of another form and size (ICO), what is decoded by slow Python (QOI).
_PILLOWS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")
_NUM_BYTES_SHOWN: Final = 24  # enough for "<!DOCTYPE html>" or "version https://git-lfs"

ORIENTATION: Final = 0x0112  # Exif's tag
_FORMAT_OF_TYPE: Final = {1: "B", 3: "H", 4: "I"}  # a SHORT by the standard; writers differ
_EXIF_PREFIX: Final = b"Exif\0\0"
_MAX_ENTRIES: Final = 1000  # of one directory; cameras write some twenty
_Place = tuple[int, str, int]  # offset in the file, how `struct` reads it, the value
# OpenCV's codes, after the transposition that 5 and above begin with: 0 turns the columns upside
# down, 1 mirrors the rows, -1 does both.
_FLIP_OF: Final = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}


@dataclass(frozen=True, slots=True)
class JpegHeader:
    """What the markers of a JPEG file say.

    Attributes:
        process: How its data are coded: "baseline", "progressive", ...
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
    """Return what an image file says of itself: an `ImageHeader`, without decoding a pixel.

    Args:
        data: The whole file.
        max_pixels: More than so many are an error. None allows any number.

    Raises:
        ValueError: the file is empty, or text, or no image, or too large, or its header damaged.

    Example:
        >>> header = read_header(b"P6 3 2 255 " + bytes(18))
        >>> header.form, header.height_px, header.width_px
        ('ppm', 2, 3)
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


def as_octets(data: bytes | memoryview) -> bytes | memoryview:
    """Return the same bytes as numbers from 0 to 255, not copied: Arrow lends signed ones."""
    if isinstance(data, memoryview) and data.format != "B":
        return data.cast("B")
    return data


def _read(data: bytes | memoryview) -> ImageHeader:
    start = bytes(data[:8])
    if start.startswith(JPEG_MAGIC):
        return _read_jpeg(data)
    if start.startswith(PNG_MAGIC):
        return _read_png(data)
    return _read_by_pillow(data)


def _read_jpeg(data: bytes | memoryview) -> ImageHeader:
    """Walk over the markers up to the first scan."""
    frame: tuple[int, int] | None = None
    place: _Place | None = None
    for marker, start, stop in jpeg_segments(data):
        if marker == _APP1:
            if place is None and data[start : start + 6] == _EXIF_PREFIX:
                place = _orientation_place(data, start, stop)
        elif frame is None and marker in _FRAMES:
            frame = marker, start
        elif marker == START_OF_SCAN:
            break
    if frame is None:
        raise ValueError("the JPEG file has image data, but nothing before them gives their size")
    marker, sof_offset = frame
    precision_bits, height, width, num_components = struct.unpack_from(">BHHB", data, sof_offset)
    is_single_scan = start < stop and data[start] == num_components
    process = JPEG_PROCESSES.get(marker, "hierarchical, arithmetic lossless, or JPEG-LS")
    jpeg = JpegHeader(process, precision_bits, num_components, sof_offset, is_single_scan, stop)
    return ImageHeader("jpeg", height, width, place[2] if place is not None else 1, jpeg)


def _read_png(data: bytes | memoryview) -> ImageHeader:
    size_bytes, name, width, height = struct.unpack_from(">I4sII", data, 8)
    if name != b"IHDR" or size_bytes != 13:
        raise ValueError("the PNG file does not begin with its header: damaged")
    places = (_orientation_place(data, start, stop) for start, stop in _exif_blocks(data))
    orientation = next((place[2] for place in places if place is not None), 1)
    return ImageHeader("png", height, width, orientation)


def _read_by_pillow(data: bytes | memoryview) -> ImageHeader:
    orientation: object = 1
    with open_by_pillow(data) as image:
        form, height, width = str(image.format).lower(), image.height, image.width
        with contextlib.suppress(Exception):  # over damaged data it raises nearly anything
            orientation = image.getexif().get(ORIENTATION, 1)
    if not (isinstance(orientation, int) and 1 <= orientation <= 8):
        orientation = 1
    if form == "tiff" and orientation >= 5:  # Pillow gives the size of what it will have turned
        height, width = width, height
    return ImageHeader(form, height, width, orientation)


@contextlib.contextmanager
def as_value_errors() -> Iterator[None]:
    """Turn what Pillow raises over damaged data, nearly anything, into ValueErrors."""
    try:
        yield
    except (MemoryError, ValueError):
        raise
    except Exception as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


def open_by_pillow(data: bytes | memoryview) -> Image.Image:
    """Return Pillow's image of a file, of which it has read no pixels."""
    Image.init()
    file = io.BytesIO(data)
    prefix = file.read(16)
    for form in _PILLOWS:
        if form not in Image.OPEN:  # Pillow was built without it
            continue
        make, accept = Image.OPEN[form]
        if accept is not None and accept(prefix) is not True:
            continue
        file.seek(0)
        with as_value_errors():
            return make(file, "")
    start = bytes(data[:_NUM_BYTES_SHOWN])
    if not all(32 <= byte < 127 or byte in b"\t\r\n" for byte in start):
        raise ValueError("no known kind of image, or its header is damaged")
    is_pointer = start.startswith(b"version https://git-lfs")
    why = ": the file itself was not fetched (git lfs pull)" if is_pointer else ""
    raise ValueError(f"text, not an image: it begins with {start.decode()!r}{why}")


def jpeg_segments(data: bytes | memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield marker, start and stop of each segment's content; the first scan's is the last."""
    place, marker = 2, 0
    while marker != START_OF_SCAN:
        found = _MARKER.search(data, place)
        place = len(data) if found is None else found.start()
        length = int.from_bytes(data[place + 2 : place + 4], "big")
        marker = data[place + 1] if place + 4 <= len(data) else 0
        if marker in _WITHOUT_LENGTH:
            place += 2
            continue
        if marker == _END_OF_IMAGE:
            raise ValueError("the JPEG file ends before its image data")
        if not marker or place + 2 + length > len(data):
            raise ValueError(
                f"the JPEG file ends within its header, after {len(data)} bytes: truncated"
            )
        if length < 2:  # it counts itself
            raise ValueError(f"the JPEG file is damaged at byte {place}: a segment without a size")
        yield marker, place + 4, place + 2 + length
        place += 2 + length


def png_chunks(data: bytes | memoryview) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, start and stop of each chunk's content; the last may be cut off."""
    place, size_bytes = len(PNG_MAGIC), len(data)
    name = b""
    while name != b"IEND" and place + 8 <= size_bytes:
        length, name = struct.unpack_from(">I4s", data, place)
        yield name, place + 8, place + 8 + length
        place += 12 + length


def _exif_blocks(data: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each block of Exif data in a JPEG or PNG file."""
    if data[:3] == JPEG_MAGIC:
        for marker, start, stop in jpeg_segments(data):
            if marker == _APP1 and data[start : start + 6] == _EXIF_PREFIX:
                yield start, stop
    elif data[:8] == PNG_MAGIC:
        yield from ((start, stop) for name, start, stop in png_chunks(data) if name == b"eXIf")


def _orientation_place(data: bytes | memoryview, start: int, stop: int) -> _Place | None:
    """Return where a block of Exif data has an orientation from 1 to 8; None if it is damaged."""
    stop = min(stop, len(data))
    if data[start : start + 6] == _EXIF_PREFIX:  # in JPEG files always, in others by mistake
        start += 6
    mark = bytes(data[start : start + 4])
    if mark not in (b"II*\0", b"MM\0*") or start + 8 > stop:
        return None
    order = "<" if mark[:1] == b"I" else ">"
    place = start + struct.unpack_from(order + "I", data, start + 4)[0] + 2
    if place > stop:
        return None
    (num_entries,) = struct.unpack_from(order + "H", data, place - 2)
    num_entries = min(num_entries, (stop - place) // 12, _MAX_ENTRIES)
    tag = struct.pack(order + "H", ORIENTATION)
    for entry in range(place, place + 12 * num_entries, 12):
        if data[entry : entry + 2] == tag:
            kind, count = struct.unpack_from(order + "HI", data, entry + 2)
            if kind not in _FORMAT_OF_TYPE or count < 1:
                return None
            form = order + _FORMAT_OF_TYPE[kind]
            (value,) = struct.unpack_from(form, data, entry + 8)
            return (entry + 8, form, value) if 1 <= value <= 8 else None
    return None


def without_orientation(data: bytes | memoryview) -> bytes:
    r"""Return the same JPEG or PNG file with its Exif orientation set to 1; others unchanged.

    A few bytes are changed; pixels and all other metadata stay. For files whose annotation is in
    the frame of the stored pixels: every reader sees them in that frame then.

    Raises:
        ValueError: a JPEG file ends before its image data.

    Example:
        >>> exif = bytes.fromhex("4d4d002a 00000008 0001 0112 0003 00000001 0006 0000")
        >>> data = bytes.fromhex("ffd8 ffe1001e") + b"Exif\0\0" + exif + bytes.fromhex("ffda0002")
        >>> without_orientation(data)[22:34].hex(" ", 2)
        '0112 0003 0000 0001 0001 0000'
    """
    data = as_octets(data)
    changed = bytearray(data)
    for start, stop in _exif_blocks(data):
        place = _orientation_place(data, start, stop)
        if place is None:
            continue
        struct.pack_into(place[1], changed, place[0], 1)
        if changed[:8] == PNG_MAGIC and stop + 4 <= len(changed):
            struct.pack_into(">I", changed, stop, zlib.crc32(changed[start - 4 : stop]))
    return bytes(changed)


def turned_upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Return stored pixels as Exif's orientation (2.32, 4.6.4 A) says that they are to be seen."""
    place = None
    if orientation >= 5:
        pixels = place = cv2.transpose(pixels).astype(np.uint8, copy=False)
    if orientation not in _FLIP_OF:
        return pixels
    return cv2.flip(pixels, _FLIP_OF[orientation], dst=place).astype(np.uint8, copy=False)


def turned_back(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Return upright pixels as they are stored: the inverse of `turned_upright`."""
    return turned_upright(pixels, {6: 8, 8: 6}.get(orientation, orientation))
