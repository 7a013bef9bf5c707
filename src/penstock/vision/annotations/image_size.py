# SPDX-License-Identifier: Apache-2.0
"""The size of an image file, from as little of it as says so."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from penstock.images import read_header

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.images import ImageHeader

__all__ = ["header_of", "upright_size"]

# The headers of nearly all JPEG files, thumbnails and colour profiles included, are shorter. Other
# forms may have the orientation behind the pixels.
_HEAD_BYTES: Final = 131_072


def header_of(path: Path) -> ImageHeader:
    """Return what an image file says of itself.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no image.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for without end
        raise ValueError("it is no file")
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        if head.startswith(b"\xff\xd8\xff") and len(head) == _HEAD_BYTES:
            try:
                return read_header(head)
            except ValueError:  # its header may be longer
                pass
        return read_header(head + file.read())


def upright_size(path: Path) -> tuple[int, int]:
    """Return height and width of an image as a viewer shows it; raises as `header_of` does."""
    header = header_of(path)
    return header.upright_height_px, header.upright_width_px
