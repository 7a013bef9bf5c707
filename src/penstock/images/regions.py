# SPDX-License-Identifier: Apache-2.0
"""A part of an image file, decoding no more of it than the part needs.

A JPEG file is decoded at a half, a quarter or an eighth where the part is that much larger than the
result; the rows below the part are not decoded; colour may be enlarged by repeating it. What a
damaged file may still give is in docs/design/vision.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, cast

import cv2

from penstock.images.decode import check_jpeg, decode_image
from penstock.images.headers import as_octets, check_size, turned_upright
from penstock.images.jpeg import decode_jpeg, decode_jpeg_rows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.images.headers import ImageHeader

_REDUCTIONS: Final = (8, 4, 2)
# What Exif's orientations do to the image as it is seen, once 5 and above have been transposed.
_MIRRORS_ROWS: Final = (3, 4, 7, 8)  # the first becomes the last
_MIRRORS_COLUMNS: Final = (2, 3, 6, 7)


class Region(NamedTuple):
    """A part of an image that is seen upright, in pixels."""

    top: int
    left: int
    height: int
    width: int


def reduction(region: Region, height: int, width: int) -> int:
    """Return by how much a part may be reduced, 1 to 8, to keep at least `height` x `width`."""
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
    whole: bool = False,
    max_pixels: int | None = None,
) -> NDArray[np.uint8]:
    """Return a part of an image file, perhaps reduced.

    The part is widened to whole pixels of the reduced image, which is that of the stored pixels: an
    image is turned last. `fast` allows that colour is enlarged by repeating it. With `whole` every
    row is decoded, to notice all that `decode_image` notices; otherwise damage below the part is
    not looked for.

    Returns:
        uint8, shape (rows, columns, 3), RGB; a view of new memory.

    Raises:
        ValueError: as `decode_image`, for files that it refuses; not for all of them, unless
            `whole`.
    """
    data = as_octets(data)
    check_size(header.height_px, header.width_px, max_pixels)
    stored = _as_stored(region, header)
    part = None
    jpeg = header.jpeg
    # Of the kind that nearly all are, and that is known to decode in parts.
    if strict and jpeg is not None and jpeg.process in ("baseline", "progressive"):
        check_jpeg(data, header, jpeg, strict=True)
        if jpeg.num_components in (1, 3):
            part = _decode_part(data, header, stored, factor, fast=fast, whole=whole)
    if part is None:
        image = decode_image(data, strict=strict, max_pixels=max_pixels, orientation="stored")
        part = reduced(image, stored, factor)
    return turned_upright(part, header.orientation)


def _as_stored(region: Region, header: ImageHeader) -> Region:
    """Return which part of the stored pixels is seen as a part of the upright image."""
    top, left, height, width = region
    if header.orientation in _MIRRORS_ROWS:
        top = header.upright_height_px - top - height
    if header.orientation in _MIRRORS_COLUMNS:
        left = header.upright_width_px - left - width
    if header.orientation >= 5:
        return Region(left, top, width, height)
    return Region(top, left, height, width)


def reduced(image: NDArray[np.uint8], region: Region, factor: int) -> NDArray[np.uint8]:
    """Return a part of an image, each `factor` x `factor` pixels averaged; a view for 1."""
    top, left = region.top // factor * factor, region.left // factor * factor
    part = image[top : region.top + region.height, left : region.left + region.width]
    if factor == 1:
        return part
    size = -(-part.shape[1] // factor), -(-part.shape[0] // factor)
    small = cv2.resize(part, size, interpolation=cv2.INTER_AREA)
    return cast("NDArray[np.uint8]", small)


def _cut(pixels: NDArray[np.uint8], region: Region, factor: int) -> NDArray[np.uint8]:
    bottom = -(-(region.top + region.height) // factor)
    right = -(-(region.left + region.width) // factor)
    return pixels[region.top // factor : bottom, region.left // factor : right]


def _decode_part(
    data: bytes | memoryview,
    header: ImageHeader,
    region: Region,
    factor: int,
    *,
    fast: bool,
    whole: bool,
) -> NDArray[np.uint8] | None:
    """Return a part of a file, reduced; None if it is not to be had from libjpeg-turbo directly."""
    jpeg = header.jpeg
    assert jpeg is not None
    if not whole and jpeg.process == "baseline" and jpeg.is_single_scan:
        rows = decode_jpeg_rows(data, header, region.top + region.height, factor, fast=fast)
        if rows is not None:
            return _cut(rows, region, factor)
    height, width = header.height_px, header.width_px
    try:
        rows = decode_jpeg(data, header, factor, fast=fast, thorough=whole)
    except ValueError:
        return None
    is_as_said = rows.shape == (-(-height // factor), -(-width // factor), 3)
    return _cut(rows, region, factor) if is_as_said else None
