# SPDX-License-Identifier: Apache-2.0
"""What an annotation says of an image: the one form that all file formats are read to.

Coordinates are 0-based pixels. A box is half-open, so that the box over the whole of a 640 x 480
image is (0, 0, 640, 480) and covers `image[0:480, 0:640]`. A landmark is a point; (0, 0) is the
centre of the top left pixel, as files that number pixels from 0 have it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class AnnotatedObject:
    """One object of an image.

    Attributes:
        class_name: Its class; as text, also where a file numbers its classes. Empty where the file
            has none.
        box_xyxy_px: Left, top, right, bottom; None where the file gives none. As the file says it:
            it may be empty, inverted, or reach beyond the image.
        landmarks_xy_px: Points in their order; NaN, NaN for one that is missing. Empty: none.
        landmark_names: Names of the points, if the file has them; else empty.
        visibility: For each landmark 0 (not marked), 1 (hidden), 2 (seen); empty where the file
            does not say.
        difficult: Whether VOC's own evaluation leaves it out; None where the file does not say.
        truncated: Whether it goes on beyond its box; None where the file does not say.
        occluded: Whether something is before it; None where the file does not say.
        pose: VOC's word for the side it is seen from; empty where the file does not say.
        extra: What else the file says of it, as text: class columns, imglab's attributes.
        parts: VOC's `part` elements: objects within this one.
        iscrowd: Whether it is COCO's region around many objects; None where the file does not say.
        area_px: COCO's `area`, in square pixels; None where the file does not say.
        segmentation: Its mask, as the JSON text of COCO's `segmentation`, which is polygons or run
            lengths; empty where it has none.
    """

    class_name: str
    box_xyxy_px: tuple[float, float, float, float] | None = None
    landmarks_xy_px: tuple[tuple[float, float], ...] = ()
    landmark_names: tuple[str, ...] = ()
    visibility: tuple[int, ...] = ()
    difficult: bool | None = None
    truncated: bool | None = None
    occluded: bool | None = None
    pose: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[AnnotatedObject, ...] = ()
    iscrowd: bool | None = None
    area_px: float | None = None
    segmentation: str = ""


@dataclass(frozen=True, slots=True)
class AnnotatedImage:
    """One image and its objects.

    Attributes:
        path: The image file; where the annotation's own word for it is wrong, the file that is
            meant. It need not exist.
        key: What it is called in its data set: a name without suffix, or a relative path with "/".
        width_px: Width of the image that was annotated, as the file says it; None where it does
            not say, or says 0.
        height_px: Height, likewise.
        objects: In the file's order.
        source: The annotation file, for errors; and the line, where it has one for each image.
    """

    path: Path
    key: str
    width_px: int | None
    height_px: int | None
    objects: tuple[AnnotatedObject, ...]
    source: str = ""
