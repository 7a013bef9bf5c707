# SPDX-License-Identifier: Apache-2.0
"""In which frame an image's pixels and its annotation are: turned upright, or as stored.

A camera stores what its sensor saw, and a tag (Exif) that says how to turn it. Viewers turn; many
annotation tools do not. Boxes of the one frame are nonsense in the other, so the size that an
annotation names decides:

    the annotation's size is ...    the pixels are
    that of the upright image       upright
    that of the stored image        as stored: the tag is taken off
    both (square, mirrored, 180)    in the frame that the other images prove
    neither                         an error
    not there                       upright

If all the images whose size decides say "stored", and there is one, the ambiguous ones are stored
too; otherwise they are upright. For that the headers of at most 1,000 images, evenly spread over
the data set, are read when the first ambiguous image is; so every process comes to the same result.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import cv2
import numpy as np

from penstock.images import decode_image, read_header, without_orientation
from penstock.vision.annotations.reading import header_of
from penstock.warn import users_level

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.images.headers import ImageHeader
    from penstock.vision.datasets.table import AnnotationTable

Orientation = Literal["auto", "upright", "stored"]
Frame = Literal["upright", "stored"]

# 30 ms for 920 files of 28 kB, in memory (measured); on a network file system seconds, once in each
# process.
_MAX_HEADERS: Final = 1_000


def in_frame(
    data: bytes,
    orientation: Orientation,
    annotated_hw_px: tuple[int, int] | None,
    ambiguous: Callable[[], Frame] = lambda: "upright",
) -> bytes:
    """Return an image file that decodes to pixels in the annotation's frame."""
    if orientation == "upright" or (orientation == "auto" and annotated_hw_px is None):
        return data
    header = read_header(data)
    if orientation == "auto" and annotated_hw_px is not None:
        frame = frame_of(header, annotated_hw_px)
        if (ambiguous() if frame is None else frame) == "upright":
            return data
    if header.orientation == 1:
        return data
    changed = without_orientation(data)
    if read_header(changed).orientation == 1:
        return changed
    pixels = cv2.cvtColor(decode_image(data, orientation="stored"), cv2.COLOR_RGB2BGR)
    is_done, file = cv2.imencode(".png", pixels, [cv2.IMWRITE_PNG_COMPRESSION, 1])
    assert is_done  # of any uint8 image
    return file.tobytes()


def frame_of(header: ImageHeader, annotated_hw_px: tuple[int, int]) -> Frame | None:
    """Return the frame of an annotation; None if its size fits both, which are not one."""
    is_upright = annotated_hw_px == (header.upright_height_px, header.upright_width_px)
    is_stored = annotated_hw_px == (header.height_px, header.width_px)
    if is_upright and is_stored:
        return "upright" if header.orientation == 1 else None
    if is_upright or is_stored:
        return "upright" if is_upright else "stored"
    height, width = annotated_hw_px
    stored = f"{header.height_px} x {header.width_px} px"
    turned = f"{header.upright_height_px} x {header.upright_width_px} px"
    sizes = stored if stored == turned else f"{stored}, or {turned} when turned as its Exif says"
    raise ValueError(
        f"the annotation is of an image of {height} x {width} px (height x width), and the file "
        f"has {sizes}. It was replaced or resized since, or the annotation's size is wrong: "
        "correct one of them, or, if the boxes fit all the same, choose "
        "AnnotationRules(orientation='upright') or 'stored'"
    )


def size_of_file(path: str, orientation: Orientation) -> tuple[int, int] | None:
    """Return height and width of an image file's pixels; None if it cannot be read."""
    try:
        header = header_of(path)
    except (OSError, ValueError):
        return None
    if orientation == "stored":
        return header.height_px, header.width_px
    return header.upright_height_px, header.upright_width_px


@dataclass(frozen=True, slots=True)
class FrameCounts:
    """What the sizes in annotations say of the frame that these are in.

    Attributes:
        num_images: Images whose annotation says a size.
        num_read: Of which the header was read.
        upright: Of these, turned by a quarter and annotated as seen.
        stored: Turned by a quarter and annotated as stored.
        ambiguous: Mirrored, upside down, or square and turned: their size says nothing.

    Example:
        >>> counts = FrameCounts(num_images=300, num_read=300, stored=4, ambiguous=2)
        >>> counts.frame, str(counts)
        ('stored', '4 stored, 2 ambiguous taken as stored, of 300 images')
    """

    num_images: int = 0
    num_read: int = 0
    upright: int = 0
    stored: int = 0
    ambiguous: int = 0

    @property
    def frame(self) -> Frame:
        """The frame of the ambiguous ones."""
        return "stored" if self.stored and not self.upright else "upright"

    def __str__(self) -> str:
        parts = [f"{n:,} {k}" for k, n in (("upright", self.upright), ("stored", self.stored)) if n]
        if self.ambiguous:
            parts.append(f"{self.ambiguous:,} ambiguous taken as {self.frame}")
        read = "" if self.num_read == self.num_images else f"{self.num_read:,} looked at of "
        return f"{', '.join(parts) or 'none turned'}, of {read}{self.num_images:,} images"


def count_frames(table: AnnotationTable) -> FrameCounts:
    """Return what the sizes of a table say of its frame; reads headers, and warns of both."""
    is_said = np.zeros(len(table), np.bool_) if table.is_size_said is None else table.is_size_said
    said = chosen = np.flatnonzero(is_said)
    if len(said) > _MAX_HEADERS:
        chosen = said[np.linspace(0, len(said) - 1, _MAX_HEADERS).astype(np.int64)]
    kinds = [_kind(table, position) for position in chosen.tolist()]
    counts = FrameCounts(
        len(said), len(chosen), *map(kinds.count, ("upright", "stored", "ambiguous"))
    )
    if counts.upright and counts.stored and counts.ambiguous:
        warnings.warn(
            f"some annotations are in the frame of the stored pixels and some in the upright one "
            f"({counts}). For images that are mirrored, upside down or square it cannot be told; "
            "if you know, choose AnnotationRules(orientation='stored') or 'upright'.",
            UserWarning,
            stacklevel=users_level(),
        )
    return counts


def _kind(table: AnnotationTable, position: int) -> str:
    """Return what one image says; "" for nothing, as those that are not turned."""
    height, width = table.sizes_px[position].tolist()
    try:
        header = header_of(table.paths[position])
        frame = frame_of(header, (height, width))
    except (OSError, ValueError):
        return ""  # reading it as a sample says why
    if header.orientation == 1:
        return ""
    return "ambiguous" if frame is None else frame
