# SPDX-License-Identifier: Apache-2.0
"""PNG files before they are decoded: is all there, what is needed, what can be saved."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final

from penstock.images.headers import MAX_PIXELS
from penstock.images.segments import PNG_MAGIC, as_octets, png_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["essential_png", "repair_png"]

# Colours and pixels. Transparency is dropped, and so is animation: what is left shows the image
# that a viewer without either shows. Text and colour profiles may be packed to fill any memory.
_ESSENTIAL: Final = frozenset((b"IHDR", b"PLTE", b"IDAT", b"IEND"))
_HEADER: Final = struct.Struct(">IIBBBBB")  # width, height, depth, colours, three methods
_CHANNELS: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of each type of colours
_MAX_EXPANSION: Final = 1032  # of Deflate: 258 bytes out of 2 bits
_STEP_BYTES: Final = 4096
_ZEROS: Final = bytes(1 << 16)


def essential_png(data: bytes | memoryview) -> bytes | memoryview:
    """Return a PNG file with what its pixels need, whose checksums are right.

    Raises:
        ValueError: it is cut off, or a part that pixels need is damaged.
    """
    names = set()
    pieces: list[bytes | memoryview] = [PNG_MAGIC]
    num_idat_bytes = 0
    for name, start, stop in png_chunks(data):
        names.add(name)
        if stop + 4 > len(data):
            raise _cut_off(name, start, stop, len(data))
        if name in _ESSENTIAL:
            _check_sum(data, name, start, stop)
            pieces.append(data[start - 8 : stop + 4])
            num_idat_bytes += stop - start if name == b"IDAT" else 0
        elif not name[0] & 0x20:  # a capital: not to be understood without
            raise ValueError(f"the PNG file has an unknown critical chunk {_shown(name)}: damaged")
    if b"IEND" not in names:
        raise ValueError(f"the PNG file is truncated: it ends after {len(data)} bytes without IEND")
    if _num_raw_bytes(data) > num_idat_bytes * _MAX_EXPANSION:
        raise ValueError(f"the PNG file's {num_idat_bytes} bytes of pixels cannot be all of them")
    return data if names <= _ESSENTIAL else b"".join(pieces)


def _cut_off(name: bytes, start: int, stop: int, size_bytes: int) -> ValueError:
    return ValueError(
        f"the PNG file is truncated: its chunk {_shown(name)} at byte {start - 8} would end at "
        f"byte {stop + 4}, and the file has {size_bytes}"
    )


def _check_sum(data: bytes | memoryview, name: bytes, start: int, stop: int) -> None:
    (written,) = struct.unpack_from(">I", data, stop)
    if zlib.crc32(data[start - 4 : stop]) != written:
        raise ValueError(
            f"the PNG file is damaged: wrong checksum of chunk {_shown(name)} at byte {start - 8}"
        )


def _shown(name: bytes) -> str:
    return name.decode("ascii", "backslashreplace")


def _num_raw_bytes(data: bytes | memoryview) -> int:
    """Return the least number of bytes that the pixels have before compression, filters aside.

    Raises:
        ValueError: the header is of no PNG file.
    """
    width, height, depth, colours, _, _, _ = _HEADER.unpack_from(data, 16)
    if colours not in _CHANNELS or depth not in (1, 2, 4, 8, 16):
        raise ValueError(f"the PNG file is damaged: {depth} bits of colour type {colours}")
    return int(width * height * depth * _CHANNELS[colours] // 8)


def repair_png(data: bytes | memoryview, *, max_pixels: int | None = MAX_PIXELS) -> bytes | None:
    """Return a PNG file with the rows that a truncated or damaged one still has, and black below.

    Args:
        data: The whole file.
        max_pixels: One with more is not repaired. None repairs any.

    Returns:
        A whole file. None if nothing is wrong with this one, or nothing can be done: no row can be
        read, it is interlaced (any row is spread over it all), or no PNG.

    Example:
        >>> repair_png(b"GIF89a") is None
        True
    """
    data = as_octets(data)
    if data[:8] != PNG_MAGIC or len(data) < 33 or data[12:16] != b"IHDR":
        return None
    try:
        essential_png(data)
    except ValueError:
        pass
    else:
        return None
    width, height, depth, colours, compression, filters, interlaced = _HEADER.unpack_from(data, 16)
    is_known = colours in _CHANNELS and depth in (1, 2, 4, 8, 16) and width and height
    if not is_known or compression or filters or interlaced:
        return None
    if max_pixels is not None and width * height > max_pixels:
        return None
    row_bytes = 1 + (width * depth * _CHANNELS[colours] + 7) // 8
    rows = _rows_left(data, row_bytes, height)
    if not rows or (colours == 3 and not _has_palette(data)):
        return None
    return _assembled(data, _compressed(rows, row_bytes * height))


def _rows_left(data: bytes | memoryview, row_bytes: int, height: int) -> bytearray:
    """Return the whole rows that can still be read, each behind the number of its filter."""
    raw = bytearray()
    decompress = zlib.decompressobj()
    size_bytes = row_bytes * height
    for piece in _pieces(data):
        before = decompress.copy()
        try:
            raw += decompress.decompress(piece, size_bytes - len(raw) + 1)
        except zlib.error:
            raw += _bytewise(before, piece, size_bytes - len(raw) + 1)
            break
        if len(raw) >= size_bytes or decompress.eof:
            break
    num_rows = min(len(raw) // row_bytes, height)
    for row in range(num_rows):
        if raw[row * row_bytes] > 4:  # no filter: from here on it is noise
            num_rows = row
            break
    del raw[num_rows * row_bytes :]
    return raw


def _pieces(data: bytes | memoryview) -> Iterator[bytes]:
    """Yield the compressed pixels in small pieces."""
    for name, start, stop in png_chunks(data):
        if name == b"IDAT":
            stop = min(stop, len(data))
            for place in range(start, stop, _STEP_BYTES):
                yield bytes(data[place : min(place + _STEP_BYTES, stop)])


def _bytewise(decompress: zlib._Decompress, piece: bytes, max_bytes: int) -> bytes:
    """Return what comes out before the damage: an error gives nothing of what it was handed."""
    raw = bytearray()
    for place in range(len(piece)):
        try:
            raw += decompress.decompress(piece[place : place + 1], max_bytes)
        except zlib.error:
            break
    return bytes(raw[:max_bytes])


def _compressed(rows: bytearray, size_bytes: int) -> bytes:
    """Return rows with zeros behind them: a row of zeros has no filter, and is black."""
    compress = zlib.compressobj(1)
    first = compress.compress(rows)
    places = range(len(rows), size_bytes, len(_ZEROS))
    fill = [compress.compress(_ZEROS[: size_bytes - place]) for place in places]
    return b"".join((first, *fill, compress.flush()))


def _has_palette(data: bytes | memoryview) -> bool:
    return any(name == b"PLTE" and stop <= len(data) for name, _, stop in png_chunks(data))


def _assembled(data: bytes | memoryview, compressed: bytes) -> bytes:
    """Return a file with the chunks that lay before the pixels, as far as they are whole."""
    pieces = [PNG_MAGIC, _chunk(b"IHDR", bytes(data[16:29]))]
    for name, start, stop in png_chunks(data):
        if name == b"IDAT":
            break
        content = bytes(data[start:stop])
        is_whole = data[stop : stop + 4] == _chunk(name, content)[-4:]
        if name == b"PLTE" or (is_whole and name[:1].islower()):
            pieces.append(_chunk(name, content))
    return b"".join((*pieces, _chunk(b"IDAT", compressed), _chunk(b"IEND", b"")))


def _chunk(name: bytes, content: bytes) -> bytes:
    check = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)
