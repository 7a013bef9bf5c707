# SPDX-License-Identifier: Apache-2.0
"""A part of an image file, decoding no more of it than the part needs.

Three ways save time, all of them libjpeg-turbo's, and none changes which pixels come out of a
given file:

- A JPEG file is decoded at a half, a quarter or an eighth of its size where the part is that much
  larger than what it will be resized to.
- The rows below the part are not decoded. The decoder is told, in a copy of the file's header, that
  the image ends there; that it then finds more data than it expects is what says that all went
  well. Anything else, a file that ends early included, and the file is decoded as a whole.
- Colour, which most files store at half the resolution, is enlarged by repeating it. It differs
  from smooth enlargement by 0.4 of 255 in the mean of a photo.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import cv2
import numpy as np
import simplejpeg

from penstock.images.decode import decode_image
from penstock.images.segments import as_octets

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.images.headers import ImageHeader, JpegHeader

__all__ = ["Region", "decode_region", "reduced", "reduction"]

_REDUCTIONS: Final = (8, 4, 2)
_LEAST_ROWS_SAVED: Final = 32  # two rows of blocks: less is not worth a copy of the file
# libjpeg keeps the first of its warnings only. So this one says that nothing was wrong before the
# last row, and that the file goes on to its end.
_ALL_ROWS_DECODED: Final = re.compile(r"extraneous bytes before marker 0xd9$")


class Region(NamedTuple):
    """A part of an image that is seen upright, in pixels."""

    top: int
    left: int
    height: int
    width: int


def reduction(region: Region, height: int, width: int) -> int:
    """Return by how much a part may be reduced, 1, 2, 4 or 8, to keep at least `height` x `width`.

    Example:
        >>> reduction(Region(0, 0, 450, 900), 224, 224), reduction(Region(0, 0, 447, 900), 224, 224)
        (2, 1)
    """
    for factor in _REDUCTIONS:
        if region.height >= factor * height and region.width >= factor * width:
            return factor
    return 1


def decode_region(
    data: bytes | memoryview,
    header: ImageHeader,
    region: Region,
    factor: int = 1,
    *,
    fast: bool = True,
    strict: bool = True,
    max_pixels: int | None = None,
) -> NDArray[np.uint8]:
    """Return a part of an image file, perhaps reduced.

    Args:
        data: The whole file.
        header: What `read_header` says of it.
        region: Which part, as the image is seen upright; within it.
        factor: By how much it is reduced: 1, 2, 4 or 8. The part is widened to whole pixels of the
            reduced image.
        fast: Whether colour may be enlarged by repeating it.
        strict: As for `decode_image`. Damage below the part is not looked for.
        max_pixels: As for `decode_image`.

    Returns:
        uint8, shape (rows, columns, 3), RGB; a view of new memory.

    Raises:
        ValueError: as `decode_image`.
    """
    data = as_octets(data)
    if strict and header.orientation == 1 and _is_usual(header.jpeg):
        bottom = region.top + region.height
        return _cut(_decode_jpeg(data, header, bottom, factor, fast=fast), region, factor)
    image = decode_image(data, strict=strict, max_pixels=max_pixels)
    return reduced(image, region, factor)


def reduced(image: NDArray[np.uint8], region: Region, factor: int) -> NDArray[np.uint8]:
    """Return a part of an image, each `factor` x `factor` pixels averaged; a view if there is none.

    Example:
        >>> reduced(np.arange(48, dtype=np.uint8).reshape(4, 4, 3), Region(0, 0, 2, 4), 2)[..., 0]
        array([[ 8, 14]], dtype=uint8)
    """
    top, left = region.top // factor * factor, region.left // factor * factor
    part = image[top : region.top + region.height, left : region.left + region.width]
    if factor == 1:
        return part
    size = -(-part.shape[1] // factor), -(-part.shape[0] // factor)
    small = cv2.resize(part, size, interpolation=cv2.INTER_AREA)
    return cast("NDArray[np.uint8]", small)


def _is_usual(jpeg: JpegHeader | None) -> bool:
    """Whether a file is of the kind that nearly all are, and that is known to decode in parts."""
    return (
        jpeg is not None
        and jpeg.process in ("baseline", "progressive")
        and jpeg.precision_bits == 8
        and jpeg.num_components in (1, 3)
    )


def _cut(pixels: NDArray[np.uint8], region: Region, factor: int) -> NDArray[np.uint8]:
    bottom = -(-(region.top + region.height) // factor)
    right = -(-(region.left + region.width) // factor)
    return pixels[region.top // factor : bottom, region.left // factor : right]


def _decode_jpeg(
    data: bytes | memoryview, header: ImageHeader, num_rows: int, factor: int, *, fast: bool
) -> NDArray[np.uint8]:
    """Return the rows of a file from the first to `num_rows`, or more, reduced."""
    jpeg = header.jpeg
    assert jpeg is not None
    # Smooth enlargement looks at the next row of colour: 2 rows of pixels, or 4.
    needed = num_rows if fast else num_rows + 4 * factor
    if (
        jpeg.process == "baseline"
        and jpeg.is_single_scan
        and header.height_px - needed >= _LEAST_ROWS_SAVED
    ):
        rows = _decode_rows(data, header, needed, factor, fast=fast)
        if rows is not None:
            return rows
    whole: NDArray[np.uint8] = simplejpeg.decode_jpeg(
        data, "RGB", fastupsample=fast, **_least(header.height_px, header.width_px, factor)
    )
    return whole


def _decode_rows(
    data: bytes | memoryview, header: ImageHeader, num_rows: int, factor: int, *, fast: bool
) -> NDArray[np.uint8] | None:
    """Return the first rows of a file; None if anything was other than expected."""
    assert header.jpeg is not None
    file = bytearray(data)
    place = header.jpeg.sof_offset + 1
    file[place : place + 2] = num_rows.to_bytes(2, "big")
    height, width = -(-num_rows // factor), -(-header.width_px // factor)
    rows = np.empty((height, width, 3), np.uint8)
    try:
        simplejpeg.decode_jpeg(
            file, "RGB", fastupsample=fast, buffer=rows, **_least(num_rows, header.width_px, factor)
        )
    except ValueError as error:
        return rows if _ALL_ROWS_DECODED.search(str(error)) else None
    return None  # it found no more data than it expected: the rows are not where they should be


def _least(height: int, width: int, factor: int) -> dict[str, int]:
    """Return the arguments that make the decoder reduce by `factor`."""
    if factor == 1:
        return {}
    return {
        "min_height": -(-height // factor),
        "min_width": -(-width // factor),
        "min_factor": factor,
    }
