# SPDX-License-Identifier: Apache-2.0
"""In which frame an image's pixels and its annotation are: turned upright, or as stored.

A camera stores what its sensor saw, and a tag (Exif) that says how to turn it. Viewers turn; many
annotation tools do not. Boxes of the one frame are nonsense in the other, so the size that an
annotation names decides:

    the annotation's size is ...    the pixels are
    that of the upright image       upright
    that of the stored image        as stored: the tag is taken off
    both (square, mirrored, 180)    upright
    neither                         an error
    not there                       upright
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final, Literal

from penstock.images.headers import ImageHeader, read_header
from penstock.images.orientation import without_orientation
from penstock.stores.folder.store import read_file

__all__ = ["ORIENTATIONS", "Orientation", "in_frame", "size_of_file"]

Orientation = Literal["auto", "upright", "stored"]
ORIENTATIONS: Final = ("auto", "upright", "stored")

_START_BYTES: Final = 128 << 10  # mostly all that lies before a JPEG's pixels: Exif has 64 KiB
_JPEG_MAGIC: Final = b"\xff\xd8\xff"


def in_frame(
    data: bytes, orientation: Orientation, annotated_hw_px: tuple[int, int] | None
) -> bytes:
    """Return an image file that decodes to pixels in the annotation's frame.

    Args:
        data: The file.
        orientation: "auto" as at the top of this module; "upright" or "stored" whatever the
            annotation says.
        annotated_hw_px: Height and width of the image that was annotated; None if not known.

    Returns:
        The same bytes, or a copy without the tag.

    Raises:
        ValueError: its header is damaged, or has neither size.
    """
    if orientation == "upright" or (orientation == "auto" and annotated_hw_px is None):
        return data
    header = read_header(data)
    if orientation == "auto" and annotated_hw_px is not None:
        upright = header.upright_height_px, header.upright_width_px
        if annotated_hw_px == upright:
            return data
        if annotated_hw_px != (header.height_px, header.width_px):
            raise _other_size(header, annotated_hw_px)
    return data if header.orientation == 1 else _without_tag(data, header)


def _without_tag(data: bytes, header: ImageHeader) -> bytes:
    changed = without_orientation(data)
    if read_header(changed).orientation != 1:
        raise ValueError(
            f"the annotation is in the frame of the stored pixels, and the Exif orientation of a "
            f"{header.form} file cannot be taken off: convert it to JPEG or PNG"
        )
    return changed


def _other_size(header: ImageHeader, annotated_hw_px: tuple[int, int]) -> ValueError:
    height, width = annotated_hw_px
    stored = f"{header.height_px} x {header.width_px} px"
    turned = f"{header.upright_height_px} x {header.upright_width_px} px"
    sizes = stored if stored == turned else f"{stored}, or {turned} when turned as its Exif says"
    return ValueError(
        f"the annotation is of an image of {height} x {width} px (height x width), and the file "
        f"has {sizes}. It was replaced or resized since, or the annotation's size is wrong: "
        "correct one of them, or, if the boxes fit all the same, choose orientation='upright' or "
        "'stored'"
    )


def size_of_file(path: str, orientation: Orientation) -> tuple[int, int] | None:
    """Return height and width of an image file's pixels; None if it cannot be read.

    Args:
        path: The file. Of a JPEG file mostly only the beginning is read.
        orientation: "stored", or else upright.
    """
    header = _header_of_file(path)
    if header is None:
        return None
    if orientation == "stored":
        return header.height_px, header.width_px
    return header.upright_height_px, header.upright_width_px


def _header_of_file(path: str) -> ImageHeader | None:
    try:
        start, is_whole = _start_of(path)
        if start.startswith(_JPEG_MAGIC) and not is_whole:
            try:
                return read_header(start)
            except ValueError:
                pass  # more lies before the pixels than was read
        return read_header(start if is_whole else read_file(path))
    except (OSError, ValueError):
        return None


def _start_of(path: str) -> tuple[bytes, bool]:
    """Return the beginning of a file, and whether that is all of it; a pipe is not waited for."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        data = os.read(fd, _START_BYTES)
        return data, len(data) < _START_BYTES
    finally:
        os.close(fd)
