# SPDX-License-Identifier: Apache-2.0
"""Counts of a detection data set: boxes per image, their areas, and the images' sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.cli.histogram import histogram

if TYPE_CHECKING:
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
    """

    sizes_px: NDArray[np.int64]
    boxes_per_image: NDArray[np.int64]
    areas_px: NDArray[np.float64]
    num_without_area: int

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
        if self.num_without_area:
            text += f" Without area: {self.num_without_area:,}; `bad_boxes=` says what they become."
        return text


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
    )
