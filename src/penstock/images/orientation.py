# SPDX-License-Identifier: Apache-2.0
"""How Exif says that an image has to be turned: read, done, and taken out of a file."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final

import cv2
import numpy as np

from penstock.images.segments import (
    JPEG_MAGIC,
    PNG_MAGIC,
    as_octets,
    jpeg_segments,
    png_chunks,
    webp_chunks,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["exif_blocks", "orientation_in", "turned_upright", "without_orientation"]

_TAG: Final = 0x0112
_APP1: Final = 0xE1
_FORMAT_OF_TYPE: Final = {1: "B", 3: "H", 4: "I"}  # a SHORT by the standard; writers differ
_EXIF_PREFIX: Final = b"Exif\0\0"
_MAX_ENTRIES: Final = 1000  # of one directory; cameras write some twenty
_Place = tuple[int, str, int]  # offset in the file, how `struct` reads it, the value


def orientation_in(data: bytes | memoryview, start: int, stop: int) -> int | None:
    """Return the orientation that a block of Exif data gives, from 1 to 8; None if it gives none.

    Damaged data, or a value that the standard does not know, give none.
    """
    place = _orientation_place(data, start, stop)
    return None if place is None else place[2]


def _orientation_place(data: bytes | memoryview, start: int, stop: int) -> _Place | None:
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
    tag = struct.pack(order + "H", _TAG)
    for entry in range(place, place + 12 * num_entries, 12):
        if data[entry : entry + 2] == tag:
            return _value_of(data, entry, order)
    return None


def _value_of(data: bytes | memoryview, entry: int, order: str) -> _Place | None:
    kind, count = struct.unpack_from(order + "HI", data, entry + 2)
    if kind not in _FORMAT_OF_TYPE or count < 1:
        return None
    form = order + _FORMAT_OF_TYPE[kind]
    (value,) = struct.unpack_from(form, data, entry + 8)
    return (entry + 8, form, value) if 1 <= value <= 8 else None


def exif_blocks(data: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each block of Exif data in a JPEG, PNG or WebP file.

    Raises:
        ValueError: a JPEG file ends before its image data.
    """
    if data[:3] == JPEG_MAGIC:
        for marker, start, stop in jpeg_segments(data):
            if marker == _APP1 and data[start : start + 6] == _EXIF_PREFIX:
                yield start, stop
    elif data[:8] == PNG_MAGIC:
        yield from ((start, stop) for name, start, stop in png_chunks(data) if name == b"eXIf")
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        yield from ((start, stop) for name, start, stop in webp_chunks(data) if name == b"EXIF")


def turned_upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Return pixels as they are to be seen; themselves if they are so already.

    Args:
        pixels: uint8, shape (height, width, 3), as they are stored.
        orientation: Exif's, from 1 to 8.

    Reference:
        Exif 2.32, 4.6.4 A: the tag names the sides at which row 0 and column 0 are to be seen.
    """
    place = None
    if orientation >= 5:
        pixels = place = cv2.transpose(pixels).astype(np.uint8, copy=False)
    if orientation not in _FLIP_OF:
        return pixels
    return cv2.flip(pixels, _FLIP_OF[orientation], dst=place).astype(np.uint8, copy=False)


# OpenCV's codes, after the transposition that 5 and above begin with: 0 turns the columns upside
# down, 1 mirrors the rows, -1 does both.
_FLIP_OF: Final = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}


def turned_back(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Return upright pixels as they are stored: the inverse of `turned_upright`."""
    return turned_upright(pixels, {6: 8, 8: 6}.get(orientation, orientation))


def without_orientation(data: bytes | memoryview) -> bytes:
    r"""Return the same JPEG, PNG or WebP file with its Exif orientation set to 1.

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
    for start, stop in exif_blocks(data):
        place = _orientation_place(data, start, stop)
        if place is None:
            continue
        struct.pack_into(place[1], changed, place[0], 1)
        if changed[:8] == PNG_MAGIC and stop + 4 <= len(changed):
            struct.pack_into(">I", changed, stop, zlib.crc32(changed[start - 4 : stop]))
    return bytes(changed)
