# SPDX-License-Identifier: Apache-2.0
"""The parts that JPEG, PNG and WebP files consist of, found without a library."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["JPEG_MAGIC", "PNG_MAGIC", "as_octets", "jpeg_segments", "png_chunks", "webp_chunks"]

JPEG_MAGIC: Final = b"\xff\xd8\xff"
PNG_MAGIC: Final = b"\x89PNG\r\n\x1a\n"
START_OF_SCAN: Final = 0xDA
_END_OF_IMAGE: Final = 0xD9
_WITHOUT_LENGTH: Final = frozenset((0x01, *range(0xD0, 0xD9)))  # TEM, restarts, start of image
_MARKER: Final = re.compile(rb"\xff[^\x00\xff]")  # what comes before it, 0xFF included, is padding
_LENGTH: Final = struct.Struct(">H")
_PNG_CHUNK: Final = struct.Struct(">I4s")
_WEBP_CHUNK: Final = struct.Struct("<4sI")


def as_octets(data: bytes | memoryview) -> bytes | memoryview:
    """Return the same bytes, each as a number from 0 to 255; nothing is copied.

    Views that libraries lend may have other elements: Arrow's are signed.
    """
    if isinstance(data, memoryview) and data.format != "B":
        return data.cast("B")
    return data


def jpeg_segments(data: bytes | memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield marker, start and stop of each segment's content; the first scan's is the last.

    What lies between two segments is passed over, as libjpeg does it.

    Raises:
        ValueError: the file ends before its image data.
    """
    size_bytes = len(data)
    place = 2
    while True:
        if place + 4 > size_bytes:
            raise _cut_off(size_bytes)
        marker = data[place + 1]
        if data[place] != 0xFF or marker in (0, 0xFF):
            marker, place = _search_marker(data, place)
        if marker in _WITHOUT_LENGTH:
            place += 2
            continue
        if marker == _END_OF_IMAGE:
            raise ValueError("the JPEG file ends before its image data")
        if place + 4 > size_bytes:
            raise _cut_off(size_bytes)
        stop = place + 2 + _LENGTH.unpack_from(data, place + 2)[0]
        if stop > size_bytes:
            raise _cut_off(size_bytes)
        if stop < place + 4:  # the length counts itself
            raise ValueError(f"the JPEG file is damaged at byte {place}: a segment without a size")
        yield marker, place + 4, stop
        if marker == START_OF_SCAN:
            return
        place = stop


def _cut_off(size_bytes: int) -> ValueError:
    return ValueError(f"the JPEG file ends within its header, after {size_bytes} bytes: truncated")


def _search_marker(data: bytes | memoryview, place: int) -> tuple[int, int]:
    """Return the code of the next marker, and the place of the byte 0xFF before it."""
    found = _MARKER.search(data, place)
    if found is None:
        raise _cut_off(len(data))
    return data[found.start() + 1], found.start()


def png_chunks(data: bytes | memoryview) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, start and stop of each chunk's content, the end's included.

    The last one's `stop` lies behind the end of a file that is cut off, and its name may be short
    of bytes no more than its size: a chunk with less is not yielded.
    """
    place, size_bytes = len(PNG_MAGIC), len(data)
    name = b""
    while name != b"IEND" and place + 8 <= size_bytes:
        length, name = _PNG_CHUNK.unpack_from(data, place)
        yield name, place + 8, place + 8 + length
        place += 12 + length


def webp_chunks(data: bytes | memoryview) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, start and stop of each chunk's content; the last may be cut off."""
    place, size_bytes = 12, len(data)
    while place + 8 <= size_bytes:
        name, length = _WEBP_CHUNK.unpack_from(data, place)
        yield name, place + 8, place + 8 + length
        place += 8 + length + length % 2
