# SPDX-License-Identifier: Apache-2.0
"""Truncated files made whole, as far as they go."""

from __future__ import annotations

import re
from typing import Final

from penstock.images.headers import MAX_PIXELS
from penstock.images.png import repair_png
from penstock.images.segments import JPEG_MAGIC, PNG_MAGIC, START_OF_SCAN, as_octets, jpeg_segments

__all__ = ["repair_image", "repair_jpeg", "repair_png"]

_JPEG_END: Final = b"\xff\xd9"
# Neither occurs within a scan: the end of the image, or the start of a second one behind it.
_END_OR_START: Final = re.compile(_JPEG_END + b"|" + JPEG_MAGIC)


def repair_image(data: bytes | memoryview, *, max_pixels: int | None = MAX_PIXELS) -> bytes | None:
    """Return a JPEG or PNG file whose missing part is filled, or None if it can stay as it is.

    Args:
        data: The whole file.
        max_pixels: A PNG file with more is not repaired; None repairs any. A JPEG file costs no
            memory here.

    Returns:
        A file for `decode_image` with `strict=False`. None if nothing is missing, or nothing can be
        done, as for all other forms.
    """
    data = as_octets(data)
    if data[:3] == JPEG_MAGIC:
        return repair_jpeg(data)
    if data[:8] == PNG_MAGIC:
        return repair_png(data, max_pixels=max_pixels)
    return None


def repair_jpeg(data: bytes | memoryview) -> bytes | None:
    """Return a JPEG file with the end marker that it lacks, or None if it lacks none.

    A truncated file has none behind its image data, whatever follows those in a whole one: a
    camera's padding, the film that a phone appends, or a second image (Ultra HDR). With one,
    decoders give the rows that are there, and grey below (`decode_image` with `strict=False`). A
    file that is no JPEG lacks none.

    Example:
        >>> repair_jpeg(bytes.fromhex("ffd8 ffe00002 ffda0002 1234")).hex(" ")
        'ff d8 ff e0 00 02 ff da 00 02 12 34 ff d9'
        >>> repair_jpeg(bytes.fromhex("ffd8 ffe00002 ffda0002 1234 ffd9 0000")) is None
        True
    """
    if bytes(data[:3]) != JPEG_MAGIC:
        return None
    whole = bytes(data)
    start = _scan_start(whole)
    if start is None:
        return None
    found = _END_OR_START.search(whole, start)
    if found is None:
        return whole + _JPEG_END
    place = found.start()
    return None if found[0] == _JPEG_END else whole[:place] + _JPEG_END + whole[place:]


def _scan_start(data: bytes) -> int | None:
    """Return where the first image data begin; None if the file ends before.

    Markers are walked over, as an embedded preview has an end marker of its own.
    """
    try:
        for marker, _, stop in jpeg_segments(data):
            if marker == START_OF_SCAN:
                return stop
    except ValueError:
        pass
    return None
