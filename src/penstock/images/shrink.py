# SPDX-License-Identifier: Apache-2.0
"""Image files made smaller, for packing."""

from __future__ import annotations

import io
from typing import Final

from PIL import Image

from penstock.images.decode import decode_image
from penstock.images.headers import ORIENTATION, ImageHeader, open_by_pillow, read_header

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
    image = Image.fromarray(decode_image(data, orientation="stored"))
    if _is_grey(data, header):
        image = image.getchannel(0)
    if is_large and size_px is not None:
        scale = size_px / shorter
        width, height = (max(1, round(side * scale)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    if max(image.size) > _LONGEST_PX:
        raise ValueError(f"{image.height} x {image.width} px is more than a JPEG file can have")
    exif = Image.Exif()
    if header.orientation != 1:
        exif[ORIENTATION] = header.orientation
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality or _QUALITY, exif=exif if exif else b"")
    return file.getvalue()


def _is_grey(data: bytes | memoryview, header: ImageHeader) -> bool:
    """Return whether the file itself has one channel; a colour file keeps three, grey or not."""
    if header.jpeg is not None:
        return header.jpeg.num_components == 1
    try:
        with open_by_pillow(data) as image:
            return image.mode in ("1", "L") or image.mode.startswith("I;16")
    except ValueError:  # Pillow refuses some metadata that is not looked at otherwise
        return False
