# SPDX-License-Identifier: Apache-2.0
"""The size of an image file, from as little of it as says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.images import read_header
from penstock.stores.folder.reading import open_file

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
        OSError: it cannot be read, or is no regular file: a pipe is not waited for.
        ValueError: it is no image.
    """
    with open_file(path) as file:
        head = file.read(_HEAD_BYTES)
        if head.startswith(b"\xff\xd8\xff") and len(head) == _HEAD_BYTES:
            try:
                return read_header(head)
            except ValueError:  # its header may be longer
                pass
        return read_header(head + file.readall())


def upright_size(path: str | Path) -> tuple[int, int]:
    """Return height and width of an image as a viewer shows it; raises as `header_of` does."""
    header = header_of(path)
    return header.upright_height_px, header.upright_width_px
