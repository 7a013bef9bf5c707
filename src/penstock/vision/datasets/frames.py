# SPDX-License-Identifier: Apache-2.0
"""In which frame an image's pixels and its annotation are: turned upright, or as stored.

A camera stores what its sensor saw, and a tag (Exif) that says how to turn it. Viewers turn; many
annotation tools do not. Boxes of the one frame are nonsense in the other, so the size that an
annotation names decides:

    the annotation's size is ...    the pixels are
    that of the upright image       upright, also where both are equal (square, mirrored, 180)
    that of the stored image        as stored: the tag is taken off
    neither                         an error
    not there                       upright
"""

from __future__ import annotations

import warnings
from typing import Final, Literal

import cv2

from penstock.images import decode_image, read_header, without_orientation
from penstock.vision.annotations.reading import header_of
from penstock.warn import users_level

Orientation = Literal["auto", "upright", "stored"]
_AMBIGUOUS: Final = (
    "some photos are turned by Exif, and their annotation's size fits both the stored and the "
    "turned pixels: they are taken as turned. If the annotation tool does not turn photos, give "
    "AnnotationRules(orientation='stored'); else 'upright'."
)


def in_frame(
    data: bytes, orientation: Orientation, annotated_hw_px: tuple[int, int] | None
) -> bytes:
    """Return an image file that decodes to pixels in the annotation's frame."""
    if orientation == "upright" or (orientation == "auto" and annotated_hw_px is None):
        return data
    header = read_header(data)
    upright = header.upright_height_px, header.upright_width_px
    stored = header.height_px, header.width_px
    if orientation == "auto":
        if annotated_hw_px == upright:
            if upright == stored and header.orientation != 1:
                warnings.warn(_AMBIGUOUS, UserWarning, stacklevel=users_level())
            return data
        if annotated_hw_px != stored:
            height, width = annotated_hw_px or (0, 0)
            turned = f", or {upright[0]} x {upright[1]} px when turned as its Exif says"
            raise ValueError(
                f"the annotation is of an image of {height} x {width} px (height x width), and the "
                f"file has {stored[0]} x {stored[1]} px{turned if upright != stored else ''}. It "
                "was replaced or resized since, or the annotation's size is wrong: correct one of "
                "them, or, if the boxes fit all the same, choose "
                "AnnotationRules(orientation='upright') or 'stored'"
            )
    changed = without_orientation(data)
    if read_header(changed).orientation == 1:
        return changed
    pixels = cv2.cvtColor(decode_image(data, orientation="stored"), cv2.COLOR_RGB2BGR)
    is_done, file = cv2.imencode(".png", pixels, [cv2.IMWRITE_PNG_COMPRESSION, 1])
    assert is_done  # of any uint8 image
    return file.tobytes()


def size_of_file(path: str, orientation: Orientation) -> tuple[int, int] | None:
    """Return height and width of an image file's pixels; None if it cannot be read."""
    try:
        header = header_of(path)
    except (OSError, ValueError):
        return None
    if orientation == "stored":
        return header.height_px, header.width_px
    return header.upright_height_px, header.upright_width_px
