# SPDX-License-Identifier: Apache-2.0
"""The size of an image file, from as little of it as says so."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from penstock.images import read_header
from penstock.opening import open_file, read_file

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.images import ImageHeader

__all__ = ["header_of", "upright_size"]

# The headers of nearly all JPEG files, thumbnails and colour profiles included, are shorter. Other
# forms may have the orientation behind the pixels.
_HEAD_BYTES: Final = 131_072


def header_of(path: str | Path) -> ImageHeader:
    """Return what an image file says of itself. Of a JPEG file mostly only the beginning is read.

    Raises:
        OSError: it cannot be read, is no regular file, or too large.
        ValueError: it is no image.
    """
    with open_file(path) as file:
        head = file.read(_HEAD_BYTES)
    if len(head) < _HEAD_BYTES:
        return read_header(head)
    if head.startswith(b"\xff\xd8\xff"):
        with contextlib.suppress(ValueError):  # its header may be longer
            return read_header(head)
    return read_header(read_file(path))


def upright_size(path: str | Path) -> tuple[int, int]:
    """Return height and width of an image as a viewer shows it; raises as `header_of` does."""
    header = header_of(path)
    return header.upright_height_px, header.upright_width_px
