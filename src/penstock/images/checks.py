# SPDX-License-Identifier: Apache-2.0
"""Whether an image file is whole."""

from __future__ import annotations

from penstock.images.decode import decode_image
from penstock.images.headers import MAX_PIXELS, read_header
from penstock.images.pillow import check_opened, open_by_pillow, told_as_value_errors

__all__ = ["check_image"]


def check_image(data: bytes | memoryview) -> int:
    """Decode an image file, strictly, and return the number of its pixels.

    The header is read first: what is too large costs no memory. For JPEG a decoder's warning is
    taken for an error, and for PNG the checksums are compared. A file whose header Pillow refuses
    is not whole either, as other programs will read it by that; and of forms that OpenCV decodes
    (WebP, JPEG 2000) it may overlook damage, so there Pillow has to be content with the pixels.

    Args:
        data: The whole file.

    Raises:
        ValueError: the file is damaged, too large, empty, or in no form that the decoders know.
    """
    header = read_header(data)
    num_pixels = decode_image(data).size // 3
    with told_as_value_errors(), open_by_pillow(data) as image:
        if header.form in ("webp", "jpeg2000"):
            check_opened(image, header, MAX_PIXELS)
            image.load()
    return num_pixels
