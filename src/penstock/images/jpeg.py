# SPDX-License-Identifier: Apache-2.0
"""JPEG files to pixels by libjpeg-turbo: simplejpeg's, or OpenCV's where that is not installed.

Without `fast` both give the same pixels. simplejpeg raises for what libjpeg-turbo warns of; OpenCV
gives no image if the data end before the last row. So OpenCV gets the data without their end
marker, which stands for endless zeros: once with 8 bytes more, which must be enough, and once with
a byte less, which must not be enough.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any, Final

import cv2
import numpy as np

from penstock.images.headers import (
    JPEG_MAGIC,
    START_OF_SCAN,
    as_octets,
    as_value_errors,
    jpeg_segments,
    open_by_pillow,
)

try:
    import simplejpeg
except ModuleNotFoundError as error:
    if error.name != "simplejpeg":  # it is installed, and broken
        raise
    simplejpeg = None

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.images.headers import ImageHeader, JpegHeader

_JPEG_END: Final = b"\xff\xd9"
# Neither occurs within a scan: the end of the image, or the start of a second one behind it.
_END_OR_START: Final = re.compile(_JPEG_END + b"|" + JPEG_MAGIC)
_END_OF_SCAN: Final = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # any marker but a restart
_LEAST_ROWS_SAVED: Final = 32  # two rows of blocks: less is not worth a copy of the file
# libjpeg-turbo reads up to 64 bits ahead of those that it decodes.
_READ_AHEAD: Final = bytes(8)
# libjpeg keeps the first of its warnings only. So this one says that nothing was wrong before the
# last row, and that the file goes on to its end.
_ALL_ROWS_DECODED: Final = re.compile(r"extraneous bytes before marker 0xd9$")
_REDUCED: Final = {n: getattr(cv2, f"IMREAD_REDUCED_GRAYSCALE_{n}") for n in (2, 4, 8)} | {1: 0}


def decode_jpeg(
    data: bytes | memoryview,
    header: ImageHeader,
    factor: int = 1,
    *,
    fast: bool = False,
    strict: bool = True,
    thorough: bool = True,
) -> NDArray[np.uint8]:
    """Return a file's pixels, reduced by `factor`: RGB, as they are stored.

    Only simplejpeg uses `fast`. Without `thorough`, OpenCV notices data that end early, and not
    data that are left over.
    """
    jpeg = header.jpeg
    assert jpeg is not None
    if simplejpeg is None:
        return jpeg_by_opencv(data, jpeg, factor, strict=strict, thorough=thorough)
    if jpeg.num_components == 4:
        return _from_cmyk(simplejpeg.decode_jpeg(data, "CMYK", strict=strict))
    if jpeg.num_components == 1 and jpeg.process == "lossless":
        # Only as it is: asked for RGB it refuses, and asked for a smaller size it ends the process
        # (simplejpeg 1.9).
        return np.repeat(simplejpeg.decode_jpeg(data, "GRAY", strict=strict), 3, axis=2)
    least = _least(header.height_px, header.width_px, factor)
    pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(
        data, "RGB", fastupsample=fast, strict=strict, **least
    )
    return pixels


def decode_jpeg_rows(
    data: bytes | memoryview, header: ImageHeader, num_rows: int, factor: int, *, fast: bool
) -> NDArray[np.uint8] | None:
    """Return `num_rows` rows of a file or some more.

    None if that would not save much, or anything was other than expected.
    """
    jpeg = header.jpeg
    assert jpeg is not None
    if simplejpeg is None or not fast:
        num_rows += 4 * factor  # smooth enlargement looks at the next row of colour: 2 rows, or 4
    if header.height_px - num_rows < _LEAST_ROWS_SAVED:
        return None
    file = bytearray(data)
    place = jpeg.sof_offset + 1
    file[place : place + 2] = num_rows.to_bytes(2, "big")
    try:
        least = _least(num_rows, header.width_px, factor)
        shape = least["min_height"], least["min_width"], 3
        if simplejpeg is None:
            rows = jpeg_by_opencv(bytes(file), jpeg, factor, thorough=False)
            return rows if rows.shape == shape else None
        rows = np.empty(shape, np.uint8)
        simplejpeg.decode_jpeg(file, "RGB", fastupsample=fast, buffer=rows, **least)
    except ValueError as error:
        return rows if _ALL_ROWS_DECODED.search(str(error)) else None
    return None  # it found no more data than it expected: the rows are not where they should be


def _least(height: int, width: int, factor: int) -> dict[str, int]:
    """Return the arguments that make simplejpeg reduce by `factor`."""
    height, width = -(-height // factor), -(-width // factor)
    return {"min_height": height, "min_width": width, "min_factor": factor}


def jpeg_by_opencv(
    data: bytes | memoryview,
    jpeg: JpegHeader,
    factor: int = 1,
    *,
    strict: bool = True,
    thorough: bool = True,
) -> NDArray[np.uint8]:
    """Return a file's pixels by OpenCV's libjpeg-turbo; see `decode_jpeg`."""
    file = data if strict else repair_image(data) or data
    scan_stop = 0
    if strict:
        in_one = jpeg.is_single_scan and jpeg.process in ("baseline", "extended")
        first = (_END_OF_SCAN if in_one else _END_OR_START).search(data, jpeg.scan_offset)
        end = first and _END_OR_START.search(data, first.start())
        if first is None or end is None or end[0] != _JPEG_END:
            raise ValueError("Premature end of JPEG file")
        if in_one:
            file = bytes(data[: first.start()]).rstrip(b"\xff")  # what pads a marker
            scan_stop = len(file)
            file += _READ_AHEAD
    if jpeg.num_components == 4:  # OpenCV makes RGB of it by another formula
        with as_value_errors(), open_by_pillow(file) as image:
            # Pillow's own walk takes the last of several sizes, and memory for it at once.
            if image.size[::-1] != struct.unpack_from(">HH", data, jpeg.sof_offset + 1):
                raise ValueError("Corrupt JPEG data: a second frame header, of another size")
            pixels: NDArray[np.uint8] | None = _from_cmyk(255 - np.asarray(image))
    elif jpeg.num_components == 1 and jpeg.process == "lossless":
        grey = by_opencv(file, _REDUCED[factor])
        pixels = None if grey is None else np.repeat(grey[:, :, None], 3, axis=2)
    else:
        pixels = by_opencv(file, cv2.IMREAD_COLOR_RGB | _REDUCED[factor])
    if pixels is None:
        raise ValueError(
            "Corrupt JPEG data, or a premature end of them: OpenCV cannot decode the file, and "
            "does not say why (simplejpeg does)"
        )
    if thorough and scan_stop and by_opencv(file[: scan_stop - 1], _REDUCED[8]) is not None:
        raise ValueError("Corrupt JPEG data: bytes are left over behind the last row")
    return pixels


def by_opencv(data: bytes | memoryview, flags: int) -> NDArray[np.uint8] | None:
    """Return the pixels as they are stored; None if OpenCV cannot decode them."""
    flags |= cv2.IMREAD_IGNORE_ORIENTATION
    try:
        image: NDArray[Any] | None = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error as error:
        if error.code == cv2.Error.StsNoMem:
            raise MemoryError(str(error)) from None
        return None
    return None if image is None else image.astype(np.uint8, copy=False)


def _from_cmyk(lack: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return RGB for inks without a profile: each colour is its ink's lack times black's."""
    pixels: NDArray[np.uint8] = np.empty((*lack.shape[:2], 3), np.uint8)
    for row, out in zip(lack, pixels, strict=True):  # by rows: twice the bits for one row only
        product = row[:, :3].astype(np.uint16) * row[:, 3:] + 127
        out[:] = product // 255
    return pixels


def repair_image(data: bytes | memoryview) -> bytes | None:
    """Return a JPEG file with the end marker that it lacks; None if it lacks none, or is no JPEG.

    Args:
        data: The whole file.

    Returns:
        A file for `decode_image` with `strict=False`.

    Example:
        >>> repair_image(bytes.fromhex("ffd8 ffe00002 ffda0002 1234")).hex(" ")
        'ff d8 ff e0 00 02 ff da 00 02 12 34 ff d9'
    """
    whole = bytes(as_octets(data))
    if not whole.startswith(JPEG_MAGIC):
        return None
    try:
        # Markers are walked over, as an embedded preview has an end marker of its own.
        start = next(stop for marker, _, stop in jpeg_segments(whole) if marker == START_OF_SCAN)
    except ValueError:  # it ends before its image data
        return None
    found = _END_OR_START.search(whole, start)
    place = len(whole) if found is None else found.start()
    return None if whole.startswith(_JPEG_END, place) else whole[:place] + _JPEG_END + whole[place:]
