# SPDX-License-Identifier: Apache-2.0
"""What a form of annotations has no place for, counted before anything is written."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Final

from penstock.vision.annotations.imglab import can_be_attribute, whole_px
from penstock.vision.annotations.lists import CLASS_COLUMN
from penstock.vision.convert.splits import one_split_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.vision.annotations.lists import LandmarkColumns
    from penstock.vision.annotations.model import AnnotatedObject
    from penstock.vision.convert.sources import Collection

__all__ = ["count_losses"]

_FLAGS: Final = ("difficult", "truncated", "occluded")
_NO_POSE: Final = ("", "Unspecified")
# What each form says of an object, besides what `_of_object` looks at closer.
_SAYS: Final = {
    "voc": frozenset(("flags", "pose", "extra", "parts", "names", "visibility", "boxless")),
    "imglab": frozenset(("flags", "names")),
    "yolo": frozenset(("visibility",)),
    "landmarks": frozenset(("boxless",)),
    "image-list": frozenset(("boxless",)),
}


def count_losses(
    collection: Collection, form: str, columns: LandmarkColumns | None = None
) -> dict[str, int]:
    """Return what is lost, and how many objects (or splits, or classes) lose it.

    A flag that is false is not counted: without it, it means the same.
    """
    losses: Counter[str] = Counter()
    for image in collection.images:
        for found in image.objects:
            losses.update(_of_object(found, form, columns))
        if form == "image-list":
            losses["image without a class, or with several"] += (
                len({o.class_name for o in image.objects if o.class_name}) != 1
            )
        elif form == "landmarks":
            losses["image without objects"] += not image.objects
    if form not in ("voc", "yolo"):
        losses["split"] = len(collection.splits)
    if form == "yolo":
        losses["split that shares images with another"] = len(one_split_each(collection)[1])
    else:
        losses.update(_of_classes(collection))
    return {name: count for name, count in losses.items() if count}


def _of_classes(collection: Collection) -> Iterator[str]:
    """Yield a loss for each class whose number is not that of the sorted names of all objects."""
    used = sorted({o.class_name for image in collection.images for o in image.objects} - {""})
    for number, name in enumerate(collection.class_names):
        if name not in used:
            yield "class without objects"
        elif used.index(name) != number:
            yield "number of a class"


def _of_object(found: AnnotatedObject, form: str, columns: LandmarkColumns | None) -> Iterator[str]:
    says = _SAYS[form]
    if "flags" not in says:
        yield from (name for name in _FLAGS if getattr(found, name))
    if "pose" not in says and found.pose not in _NO_POSE:
        yield "pose"
    if "parts" not in says and found.parts:
        yield "parts"
    if "names" not in says and found.landmark_names:
        yield "names of landmarks"
    if "visibility" not in says and found.visibility:
        yield "visibility of landmarks"
    if "boxless" not in says and found.box_xyxy_px is None:
        yield "object without a box"
    if form == "image-list":
        yield from _beside_the_class(found)
    elif form == "landmarks":
        yield from _beside_the_columns(found, columns)
    elif form == "imglab":
        yield from _of_imglab(found)
    elif form == "yolo":
        yield from (f"attribute {name!r}" for name in found.extra)


def _beside_the_class(found: AnnotatedObject) -> Iterator[str]:
    if found.box_xyxy_px is not None:
        yield "box"
    if found.landmarks_xy_px:
        yield "landmarks"
    yield from (f"attribute {name!r}" for name in found.extra)


def _beside_the_columns(found: AnnotatedObject, columns: LandmarkColumns | None) -> Iterator[str]:
    if columns is None:
        return
    if found.box_xyxy_px is not None and not columns.has_box:
        yield "box"
    if found.class_name and CLASS_COLUMN not in columns.classes:
        yield "class"
    yield from (f"attribute {name!r}" for name in found.extra if name not in columns.classes)


def _of_imglab(found: AnnotatedObject) -> Iterator[str]:
    points = [value for point in found.landmarks_xy_px for value in point]
    values = [value for value in (*points, *(found.box_xyxy_px or ())) if not math.isnan(value)]
    if any(whole_px(value) != value for value in values):
        yield "fraction of a pixel"
    if list(found.landmark_names) != sorted(found.landmark_names):
        yield "order of landmarks"
    if points and all(map(math.isnan, points)):
        yield "landmarks of which none is marked"
    yield from (f"attribute {name!r}" for name in found.extra if not can_be_attribute(name))
