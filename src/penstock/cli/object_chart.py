# SPDX-License-Identifier: Apache-2.0
"""The charts of objects in that of `penstock stats`: boxes per image, and their areas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter

from penstock.cli.chart_style import BLUE, GREY, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from penstock.cli.object_stats import Objects

__all__ = ["draw_box_areas", "draw_boxes_per_image"]

_NUM_BINS: Final = 40
_COCO_PX: Final = ((32**2, "32²"), (96**2, "96²"))


def draw_boxes_per_image(axes: Axes, objects: Objects) -> None:
    """Draw how many images have how many boxes."""
    counts = objects.boxes_per_image
    most = int(counts.max(initial=0))
    step = max(1, -(-(most + 1) // _NUM_BINS))
    edges = np.arange(-0.5, most + step + 0.5, step)
    axes.hist(counts, edges.tolist(), color=BLUE, rwidth=0.9)
    mean = float(counts.mean()) if len(counts) else 0.0
    axes.set_title(
        f"{int(counts.sum()):,} boxes in {len(counts):,} images, mean {mean:,.1f}", fontsize=10
    )
    axes.set_xlabel("boxes per image", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    _finish(axes, "images")


def draw_box_areas(axes: Axes, objects: Objects) -> None:
    """Draw the areas of the boxes, with the borders of COCO's sizes."""
    areas = objects.areas_px
    if len(areas):
        edges = np.geomspace(areas.min() * 0.999, areas.max() * 1.001, _NUM_BINS + 1)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.hist(areas, edges.tolist(), color=BLUE)
        for area, name in _COCO_PX:
            if edges[0] < area < edges[-1]:
                axes.axvline(area, color=GREY, linewidth=1, linestyle="--")
                axes.annotate(
                    name, (area, 1), (3, -3), xycoords=("data", "axes fraction"),
                    textcoords="offset points", va="top", fontsize=8, color="black",
                )  # fmt: skip
    small, medium, large = objects.by_kind.values()
    axes.set_title(f"{small:,} small, {medium:,} medium, {large:,} large boxes", fontsize=10)
    axes.set_xlabel("area of a box in square pixels, logarithmic", fontsize=9)
    _finish(axes, "boxes")


def _finish(axes: Axes, counted: str) -> None:
    axes.set_ylabel(counted, fontsize=9)
    axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    tidy(axes, "y")
