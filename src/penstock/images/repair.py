# SPDX-License-Identifier: Apache-2.0
"""JPEG and PNG files that lack a part: found before they are decoded, and made whole."""

from __future__ import annotations

import contextlib
import re
import struct
import zlib
from typing import Final

from penstock.images.headers import (
    JPEG_MAGIC,
    MAX_PIXELS,
    PNG_MAGIC,
    START_OF_SCAN,
    as_octets,
    jpeg_segments,
    png_chunks,
)

_JPEG_END: Final = b"\xff\xd9"
# Neither occurs within a scan: the end of the image, or the start of a second one behind it.
_END_OR_START: Final = re.compile(_JPEG_END + b"|" + JPEG_MAGIC)

# Colours and pixels. Transparency is dropped, and so is animation: what is left shows the image
# that a viewer without either shows. Text and colour profiles may be packed to fill any memory.
_ESSENTIAL: Final = frozenset((b"IHDR", b"PLTE", b"IDAT", b"IEND"))
_HEADER: Final = struct.Struct(">IIBBBBB")  # width, height, depth, colours, three methods
_CHANNELS: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of each type of colours
_DEPTHS: Final = (1, 2, 4, 8, 16)
_MAX_EXPANSION: Final = 1032  # of Deflate: 258 bytes out of 2 bits
_STEP_BYTES: Final = 64  # damage costs what is left of a step
_ZEROS: Final = bytes(1 << 16)


def repair_image(data: bytes | memoryview, *, max_pixels: int | None = MAX_PIXELS) -> bytes | None:
    """Return a JPEG or PNG file whose missing part is filled, or None if it can stay as it is.

    Args:
        data: The whole file.
        max_pixels: A PNG file with more is not repaired; None repairs any. A JPEG file costs no
            memory here.

    Returns:
        A file for `decode_image` with `strict=False`. None if nothing is missing, or nothing can be
        done, as for all other forms.

    Example:
        >>> repair_image(bytes.fromhex("ffd8 ffe00002 ffda0002 1234")).hex(" ")
        'ff d8 ff e0 00 02 ff da 00 02 12 34 ff d9'
    """
    data = as_octets(data)
    if data[:3] == JPEG_MAGIC:
        return repair_jpeg(data)
    if data[:8] == PNG_MAGIC:
        return repair_png(data, max_pixels=max_pixels)
    return None


def repair_jpeg(data: bytes | memoryview) -> bytes | None:
    """Return a JPEG file with the end marker that it lacks, or None if it lacks none."""
    whole = bytes(data)
    start = None
    with contextlib.suppress(ValueError):  # it ends before its image data
        # Markers are walked over, as an embedded preview has an end marker of its own.
        start = next(stop for marker, _, stop in jpeg_segments(whole) if marker == START_OF_SCAN)
    if start is None:
        return None
    found = _END_OR_START.search(whole, start)
    if found is None:
        return whole + _JPEG_END
    place = found.start()
    return None if found[0] == _JPEG_END else whole[:place] + _JPEG_END + whole[place:]


def essential_png(data: bytes | memoryview) -> bytes | memoryview:
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
    width, height, depth, colours, _, _, _ = _HEADER.unpack_from(data, 16)
    if colours not in _CHANNELS or depth not in _DEPTHS:
        raise ValueError(f"the PNG file is damaged: {depth} bits of colour type {colours}")
    if width * height * depth * _CHANNELS[colours] // 8 > num_idat_bytes * _MAX_EXPANSION:
        raise ValueError(f"the PNG file's {num_idat_bytes} bytes of pixels cannot be all of them")
    return data if names <= _ESSENTIAL else b"".join(pieces)


def repair_png(data: bytes | memoryview, *, max_pixels: int | None = MAX_PIXELS) -> bytes | None:
    """Return a PNG file with the rows that a damaged one still has, black below; None as above."""
    if len(data) < 33 or data[12:16] != b"IHDR":
        return None
    try:
        essential_png(data)
    except ValueError:
        pass
    else:
        return None
    width, height, depth, colours, compression, filters, interlaced = _HEADER.unpack_from(data, 16)
    is_known = colours in _CHANNELS and depth in _DEPTHS and width and height
    if not is_known or compression or filters or interlaced:
        return None
    if max_pixels is not None and width * height > max_pixels:
        return None
    row_bytes = 1 + (width * depth * _CHANNELS[colours] + 7) // 8
    rows = _rows_left(data, row_bytes, height)
    before = [PNG_MAGIC, _chunk(b"IHDR", bytes(data[16:29]))]
    for name, start, stop in png_chunks(data):
        if name == b"IDAT":
            break
        content = bytes(data[start:stop])
        is_whole = data[stop : stop + 4] == _chunk(name, content)[-4:]
        if (name == b"PLTE" and stop <= len(data)) or (is_whole and name[:1].islower()):
            before.append(_chunk(name, content))
    if not rows or (colours == 3 and not any(chunk[4:8] == b"PLTE" for chunk in before[1:])):
        return None
    # A row of zeros has no filter, and is black.
    compress = zlib.compressobj(1)
    pieces = [compress.compress(rows)]
    places = range(len(rows), row_bytes * height, len(_ZEROS))
    pieces += (compress.compress(_ZEROS[: row_bytes * height - place]) for place in places)
    pixels = b"".join((*pieces, compress.flush()))
    return b"".join((*before, _chunk(b"IDAT", pixels), _chunk(b"IEND", b"")))


def _rows_left(data: bytes | memoryview, row_bytes: int, height: int) -> bytearray:
    """Return the whole rows that can still be read, each behind the number of its filter."""
    raw = bytearray()
    decompress = zlib.decompressobj()
    size_bytes = row_bytes * height
    places = (
        (place, min(place + _STEP_BYTES, stop, len(data)))
        for name, start, stop in png_chunks(data)
        if name == b"IDAT"
        for place in range(start, min(stop, len(data)), _STEP_BYTES)
    )
    for start, stop in places:
        try:
            raw += decompress.decompress(bytes(data[start:stop]), size_bytes - len(raw) + 1)
        except zlib.error:
            break
        if len(raw) >= size_bytes or decompress.eof:
            break
    filters = raw[: row_bytes * height : row_bytes]
    # From a row on whose filter does not exist it is noise.
    num_rows = next((row for row, kind in enumerate(filters) if kind > 4), len(raw) // row_bytes)
    return raw[: min(num_rows, height) * row_bytes]


def _chunk(name: bytes, content: bytes) -> bytes:
    check = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)
