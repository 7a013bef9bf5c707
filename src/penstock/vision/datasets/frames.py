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

from penstock.images import decode_image
from penstock.images.headers import ImageHeader, read_header, without_orientation
from penstock.vision.annotations.reading import header_of
from penstock.warn import users_level

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.data.packed_list import PackedList
    from penstock.vision.datasets.table import AnnotationTable

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


# 30 ms for 920 files of 28 kB, in memory (measured); on a network file system seconds, once in each
# process.
_MAX_HEADERS: Final = 1_000


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
        """Return one line that leaves out what there was none of."""
        parts = [f"{n:,} {k}" for k, n in (("upright", self.upright), ("stored", self.stored)) if n]
        if self.ambiguous:
            parts.append(f"{self.ambiguous:,} ambiguous taken as {self.frame}")
        read = "" if self.num_read == self.num_images else f"{self.num_read:,} looked at of "
        return f"{', '.join(parts) or 'none turned'}, of {read}{self.num_images:,} images"


class FrameVotes:
    """Decides, once, for all ambiguous images of a data set.

    Concurrency:
        Any thread or process; two that ask at the same time find the same.
    """

    def __init__(self, table: AnnotationTable) -> None:
        """Keep what may be asked; nothing is read."""
        self._paths: PackedList[str] = table.paths
        self._sizes_px = table.sizes_px
        said = table.is_size_said
        self._said = np.empty(0, np.int64) if said is None else np.flatnonzero(said)
        self._counts: FrameCounts | None = None

    @property
    def known(self) -> FrameCounts | None:
        """What was found, if it was asked for."""
        return self._counts

    def counts(self) -> FrameCounts:
        """Return what was found; the first call reads headers."""
        if self._counts is None:
            self._counts = self._counted()
            self._warn(self._counts)
        return self._counts

    def frame(self) -> Frame:
        """Return the frame of ambiguous images."""
        return self.counts().frame

    def _counted(self) -> FrameCounts:
        said = self._said
        if len(said) > _MAX_HEADERS:
            said = said[np.linspace(0, len(said) - 1, _MAX_HEADERS).astype(np.int64)]
        kinds = [self._kind(position) for position in said.tolist()]
        return FrameCounts(
            num_images=len(self._said),
            num_read=len(said),
            **{kind: kinds.count(kind) for kind in ("upright", "stored", "ambiguous")},
        )

    def _kind(self, position: int) -> str:
        """Return what one image says; "" for nothing, as those that are not turned."""
        height, width = self._sizes_px[position].tolist()
        try:
            header = header_of(self._paths[position])
            frame = frame_of(header, (height, width))
        except (OSError, ValueError):
            return ""  # reading it as a sample says why
        if header.orientation == 1:
            return ""
        return "ambiguous" if frame is None else frame

    def _warn(self, counts: FrameCounts) -> None:
        if not (counts.upright and counts.stored and counts.ambiguous):
            return
        warnings.warn(
            f"some annotations are in the frame of the stored pixels and some in the upright one "
            f"({counts}). Of images that are mirrored, upside down or square nobody can say which; "
            "if you know, choose orientation='stored' or 'upright'.",
            UserWarning,
            stacklevel=users_level(),
        )
