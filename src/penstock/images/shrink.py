# SPDX-License-Identifier: Apache-2.0
"""Image files made smaller, for packing."""

from __future__ import annotations

import io
from typing import Final

from PIL import Image

from penstock.images.decode import decode_image
from penstock.images.headers import read_header

_ORIENTATION: Final = 0x0112  # Exif's tag
_QUALITY: Final = 90
_LONGEST_PX: Final = 65_500  # libjpeg's limit, a little less than the form's


def shrink_image(data: bytes | memoryview, size_px: int | None, quality: int | None) -> bytes:
    """Return an image file whose shorter side has at most `size_px` pixels."""
    header = read_header(data)
    shorter = min(header.height_px, header.width_px)
    is_large = size_px is not None and shorter > size_px
    if not is_large and quality is None:
        return bytes(data)
    # Whole: decoded at a half or a quarter, which would be faster, a lossless grey file ends the
    # process (simplejpeg 1.9).
    pixels = decode_image(data, orientation="stored")
    is_grey = bool((pixels == pixels[:, :, :1]).all())
    image = Image.fromarray(pixels[:, :, 0] if is_grey else pixels)
    if is_large and size_px is not None:
        scale = size_px / shorter
        width, height = (max(1, round(side * scale)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    if max(image.size) > _LONGEST_PX:
        raise ValueError(f"{image.height} x {image.width} px is more than a JPEG file can have")
    return _as_jpeg(image, header.orientation, quality or _QUALITY)


def _as_jpeg(image: Image.Image, orientation: int, quality: int) -> bytes:
    exif = Image.Exif()
    if orientation != 1:
        exif[_ORIENTATION] = orientation
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, exif=exif if orientation != 1 else b"")
    return file.getvalue()
