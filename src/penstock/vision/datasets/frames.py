# SPDX-License-Identifier: Apache-2.0
"""In which frame an image's pixels and its annotation are: turned upright, or as stored.

A camera stores what its sensor saw, and a tag (Exif) that says how to turn it. Viewers turn; many
annotation tools do not. Boxes of the one frame are nonsense in the other, so the size that an
annotation names decides:

    the annotation's size is ...    the pixels are
    that of the upright image       upright
    that of the stored image        as stored: the tag is taken off
    both (square, mirrored, 180)    in the frame that the other images prove: see `frame_votes`
    neither                         an error
    not there                       upright
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import cv2

from penstock.images import decode_image
from penstock.images.headers import ImageHeader, read_header
from penstock.images.orientation import without_orientation
from penstock.vision.annotations.image_size import header_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ORIENTATIONS", "Frame", "Orientation", "frame_of", "in_frame", "size_of_file"]

Orientation = Literal["auto", "upright", "stored"]
ORIENTATIONS: Final = ("auto", "upright", "stored")
Frame = Literal["upright", "stored"]


def in_frame(
    data: bytes,
    orientation: Orientation,
    annotated_hw_px: tuple[int, int] | None,
    either: Callable[[], Frame] = lambda: "upright",
) -> bytes:
    """Return an image file that decodes to pixels in the annotation's frame.

    Args:
        data: The file.
        orientation: "auto" as at the top of this module; "upright" or "stored" whatever the
            annotation says.
        annotated_hw_px: Height and width of the image that was annotated; None if not known.
        either: Asked for the frame of a turned image whose size is that of both.

    Returns:
        The same bytes, or a copy without the tag; of forms whose tag cannot be taken off (all but
        JPEG, PNG, WebP) the stored pixels as a PNG file.

    Raises:
        ValueError: its header is damaged, or has neither size.
    """
    if orientation == "upright" or (orientation == "auto" and annotated_hw_px is None):
        return data
    header = read_header(data)
    if orientation == "auto" and annotated_hw_px is not None:
        frame = frame_of(header, annotated_hw_px)
        if (either() if frame is None else frame) == "upright":
            return data
    return data if header.orientation == 1 else _without_tag(data)


def frame_of(header: ImageHeader, annotated_hw_px: tuple[int, int]) -> Frame | None:
    """Return the frame of an annotation; None if its size fits both, which are not one.

    Raises:
        ValueError: it fits neither.
    """
    is_upright = annotated_hw_px == (header.upright_height_px, header.upright_width_px)
    is_stored = annotated_hw_px == (header.height_px, header.width_px)
    if not is_upright and not is_stored:
        raise _other_size(header, annotated_hw_px)
    if is_upright and is_stored:
        return "upright" if header.orientation == 1 else None
    return "upright" if is_upright else "stored"


def _without_tag(data: bytes) -> bytes:
    changed = without_orientation(data)
    if read_header(changed).orientation == 1:
        return changed
    pixels = cv2.cvtColor(decode_image(data, orientation="stored"), cv2.COLOR_RGB2BGR)
    is_done, file = cv2.imencode(".png", pixels, [cv2.IMWRITE_PNG_COMPRESSION, 1])
    assert is_done  # of any uint8 image
    return file.tobytes()


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
    try:
        header = header_of(path)
    except (OSError, ValueError):
        return None
    if orientation == "stored":
        return header.height_px, header.width_px
    return header.upright_height_px, header.upright_width_px
