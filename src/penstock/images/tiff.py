# SPDX-License-Identifier: Apache-2.0
"""What a TIFF file says of its tiles, before libtiff takes memory for one."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["check_tiles"]

_TILE_WIDTH: Final = 322
_TILE_LENGTH: Final = 323
# libtiff takes numbers with a sign too; read without, a negative one is too large, as it should be.
_FORMAT_OF_TYPE: Final = {1: "B", 3: "H", 4: "I", 6: "B", 8: "H", 9: "I", 16: "Q", 17: "Q"}
_FREE_PIXELS: Final = 1 << 24  # a tile of 4096 x 4096: programs write one for any smaller image
_MAX_TIMES_IMAGE: Final = 2
_MAX_ENTRIES: Final = 4096  # of one directory, as in libtiff


def check_tiles(data: bytes | memoryview, num_pixels: int) -> None:
    """Raise ValueError if a tile is far larger than the image: memory is taken for a whole one.

    Strips need no such check, as libtiff ends the last one with the image. A tag that occurs
    several times counts with its largest value: readers differ in which of them they take.

    Args:
        data: The whole file.
        num_pixels: Of the image.
    """
    largest = {_TILE_WIDTH: 0, _TILE_LENGTH: 0}
    try:
        for tag, value in _entries(data):
            largest[tag] = max(largest[tag], value)
    except struct.error:
        pass  # cut off: whoever reads it will say so
    width, length = largest[_TILE_WIDTH], largest[_TILE_LENGTH]
    if width * length > max(_FREE_PIXELS, _MAX_TIMES_IMAGE * num_pixels):
        raise ValueError(
            f"a TIFF file with tiles of {length} x {width} px (height x width) for an image of "
            f"{num_pixels:,} pixels in all: damaged, or made to take memory"
        )


def _entries(data: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """Yield tag and value of those entries of the first directory that give a tile's sides.

    Reference:
        TIFF 6.0, section 2; BigTIFF, whose offsets and counts have 8 bytes.
    """
    order = "<" if data[:2] == b"II" else ">"
    is_big = 43 in data[2:4]
    place = _number(data, 8 if is_big else 4, order + ("Q" if is_big else "I"))
    num = _number(data, place, order + ("Q" if is_big else "H"))
    place += 8 if is_big else 2
    entry_bytes, value_offset = (20, 12) if is_big else (12, 8)
    for entry in range(place, place + entry_bytes * min(num, _MAX_ENTRIES), entry_bytes):
        tag, kind = struct.unpack_from(order + "HH", data, entry)
        if tag in (_TILE_WIDTH, _TILE_LENGTH) and (form := _FORMAT_OF_TYPE.get(kind)):
            value_place = entry + value_offset
            if form == "Q" and not is_big:  # too long for its entry, which says where it is
                value_place = _number(data, value_place, order + "I")
            yield tag, _number(data, value_place, order + form)


def _number(data: bytes | memoryview, place: int, form: str) -> int:
    number: int
    (number,) = struct.unpack_from(form, data, min(place, len(data)))
    return number
