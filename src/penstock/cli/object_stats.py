# SPDX-License-Identifier: Apache-2.0
"""Object stats of a detection data set: boxes per image, box areas, image sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.cli.histogram import histogram

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from penstock.vision.datasets.annotated import AnnotatedImages

__all__ = ["Objects", "count_objects"]

# Sides of squares, in pixels, between which COCO's evaluation calls objects medium.
_SMALL_PX, _LARGE_PX = 32, 96
_KINDS: Final = ("small", "medium", "large")


@dataclass(frozen=True, slots=True)
class Objects:
    """What annotations say of objects and images.

    Attributes:
        sizes_px: Height and width of the images whose size is known, int64 (images, 2).
        boxes_per_image: int64 (images,); objects that have no box do not count.
        areas_px: Area of each box that has one, in square pixels; float64 (boxes,).
        num_without_area: Boxes that are empty, or end before they begin.
        bad_boxes: How many boxes are of each kind that cannot be right, by the names that
            `penstock.vision.datasets.rules` has for them.
    """

    sizes_px: NDArray[np.int64]
    boxes_per_image: NDArray[np.int64]
    areas_px: NDArray[np.float64]
    num_without_area: int
    bad_boxes: Mapping[str, int] = field(default_factory=dict)

    @property
    def longer_sides_px(self) -> NDArray[np.int64]:
        """Longer side of each image, int64."""
        sides: NDArray[np.int64] = self.sizes_px.max(axis=1, initial=0)
        return sides

    @property
    def by_kind(self) -> dict[str, int]:
        """How many boxes are small, medium and large, as COCO's evaluation has it."""
        kinds = np.digitize(self.areas_px, (_SMALL_PX**2, _LARGE_PX**2))
        counts = np.bincount(kinds, minlength=len(_KINDS)).tolist()
        return dict(zip(_KINDS, counts, strict=True))

    def record(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "num_boxes": int(self.boxes_per_image.sum()),
            "num_boxes_without_area": self.num_without_area,
            "bad_boxes": dict(self.bad_boxes),
            "boxes_by_size": self.by_kind,
            "boxes_per_image": histogram(self.boxes_per_image).record(),
            "box_area_px": histogram(self.areas_px).record(),
            "longer_side_px": histogram(self.longer_sides_px).record(),
        }

    def lines(self, *, in_ascii: bool = False) -> list[str]:
        """Return it as text, with bars; of "#" if they have to be in ASCII."""
        found: list[str] = []
        for title, values in (
            ("Longer side of the images, in pixels", self.longer_sides_px),
            ("Boxes per image", self.boxes_per_image),
            ("Area of a box, in square pixels", self.areas_px),
        ):
            if len(values):
                bars = histogram(values).lines(in_ascii=in_ascii)
                found += [title, *(f"  {line}" for line in bars), ""]
        small, medium, large = self.by_kind.values()
        return [*found, self._kinds_text(small, medium, large)]

    def _kinds_text(self, small: int, medium: int, large: int) -> str:
        text = (
            f"Boxes: {small:,} small, {medium:,} medium, {large:,} large (below {_SMALL_PX} x "
            f"{_SMALL_PX} pixels, to {_LARGE_PX} x {_LARGE_PX}, from there on)."
        )
        bad = ", ".join(f"{count:,} {kind}" for kind, count in self.bad_boxes.items() if count)
        return f"{text} Bad boxes: {bad}; `bad_boxes=` says what they become." if bad else text


def count_objects(dataset: AnnotatedImages) -> Objects:
    """Return the counts of a dataset, from its annotations; no image is decoded."""
    table = dataset.store.table
    boxes = np.asarray(table.boxes, np.float64).reshape(-1, 4)
    is_there = ~np.isnan(boxes).any(axis=1)
    per_image = np.bincount(table.images_of_objects[is_there], minlength=len(table))
    sides = boxes[is_there, 2:] - boxes[is_there, :2]
    has_area = (sides > 0).all(axis=1)
    sizes = dataset.sizes_px
    return Objects(
        sizes[(sizes > 0).all(axis=1)],
        per_image.astype(np.int64),
        sides[has_area].prod(axis=1),
        int((~has_area).sum()),
        _bad_boxes(dataset, boxes[is_there], sizes[table.images_of_objects[is_there]]),
    )


def _bad_boxes(
    dataset: AnnotatedImages, boxes: NDArray[np.float64], sizes_px: NDArray[np.int64]
) -> dict[str, int]:
    """Return the counts of bad boxes: of the files' own, and those beyond their image.

    The files' own sizes, of which the data set knows some alone, are not enough for the last kind.
    """
    from penstock.vision.datasets.rules import judged  # stores alone need no OpenCV

    found = dataset.box_counts
    num_outside = int(judged(boxes, sizes_px, "keep").outside.sum())
    return {
        "zero_area": found.zero_area,
        "inverted": found.inverted,
        "outside": max(found.outside, num_outside),  # what the data set has cut is inside by now
    }
