# SPDX-License-Identifier: Apache-2.0
"""The chart of `penstock stats`: how large the classes are, and how large the images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from penstock.cli.chart_style import BLUE, GREY, MAX_NAME, ORANGE, save, short, tidy
from penstock.cli.object_chart import draw_box_areas, draw_boxes_per_image
from penstock.lines import amount
from penstock.plural import counted

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from penstock.cli.dataset_stats import Classes, Sizes
    from penstock.cli.object_stats import Objects

__all__ = ["draw_chart"]

_MAX_BARS: Final = 30  # more cannot be labelled legibly on one page
_LOG_FROM: Final = 50  # largest to smallest; below that small bars can be seen beside large ones
_NUM_BINS: Final = 40


def draw_chart(
    png: Path,
    address: str,
    classes: Classes | None,
    sizes: Sizes,
    objects: Objects | None = None,
) -> None:
    """Draw class counts and image sizes into a PNG file, and below them what objects are like.

    Of many classes the largest have a bar each; one more stands for the others, with their mean,
    and a line from the smallest to the largest of them.

    Raises:
        ConfigError: the file cannot be written.
    """
    num_bars = 0 if classes is None else min(len(classes.ids), _MAX_BARS + 1)
    num_charts = 1 if classes is None else 2
    height = max(4.0, 1.6 + 0.24 * num_bars)
    heights = [height] if objects is None else [height, 4.0]
    num_columns = num_charts if objects is None else 2
    figure = Figure(figsize=(7 * num_columns, sum(heights)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(heights), num_columns, height_ratios=heights)
    axes = [figure.add_subplot(grid[0, n]) for n in range(num_charts)]
    if objects is not None:
        draw_boxes_per_image(figure.add_subplot(grid[1, 0]), objects)
        draw_box_areas(figure.add_subplot(grid[1, 1]), objects)
    figure.suptitle(short(address, 80), fontsize=11, parse_math=False)
    if classes is not None:
        _draw_classes(axes[0], classes)
    _draw_sizes(axes[-1], sizes)
    save(figure, png)


def _draw_classes(axes: Axes, classes: Classes) -> None:
    num_bars = min(len(classes.ids), _MAX_BARS)
    rows = np.arange(num_bars)
    counts = classes.counts[:num_bars]
    several = classes.num_images is not None
    axes.barh(rows, counts, color=BLUE, label="objects" if several else "records")
    if classes.num_images is not None:
        images = classes.num_images[:num_bars]
        axes.barh(rows, images, height=0.35, color=ORANGE, label="images with such objects")
    names = [short(name, MAX_NAME) for name in classes.names[:num_bars]]
    if len(classes.ids) > num_bars:
        names.append(_draw_others(axes, classes, num_bars))
    axes.set_yticks(range(len(names)))
    axes.set_yticklabels(names, fontsize=8, parse_math=False)
    axes.set_ylim(len(names) - 0.4, -0.6)  # the largest on top
    _scale_counts(axes, classes)
    axes.set_title(_headline(classes), fontsize=10)
    if several or len(classes.ids) > num_bars:
        axes.legend(loc="lower right", fontsize=8)
    tidy(axes, "x")


def _draw_others(axes: Axes, classes: Classes, num_bars: int) -> str:
    """Draw one bar for the classes behind the first, and return its name."""
    others = classes.counts[num_bars:]
    mean, least, most = float(others.mean()), int(others.min()), int(others.max())
    axes.barh(
        num_bars, mean, color=GREY, xerr=[[mean - least], [most - mean]], capsize=3,
        ecolor="black", label="mean of the others, smallest to largest",
    )  # fmt: skip
    return f"{len(others):,} others"


def _scale_counts(axes: Axes, classes: Classes) -> None:
    several = classes.num_images is not None
    label = "objects and images per class" if several else "records per class"
    if (classes.imbalance or 1) > _LOG_FROM:
        # Half of the smallest: every bar has some length, and empty classes have none.
        smallest = classes.counts[classes.counts > 0][-1]
        if classes.num_images is not None:
            smallest = classes.num_images[classes.num_images > 0].min()
        axes.set_xscale("log")
        axes.set_xlim(left=smallest / 2)
        label += ", logarithmic"
    else:
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel(label, fontsize=9)


def _headline(classes: Classes) -> str:
    if classes.imbalance is None:
        return f"{counted(len(classes.ids), 'class')}, all empty"
    return (
        f"{counted(len(classes.ids), 'class')}, largest to smallest {classes.imbalance:,.1f} : 1, "
        f"effective {classes.effective_classes:,.1f}"
    )


def _draw_sizes(axes: Axes, sizes: Sizes) -> None:
    if len(sizes.heights_px):
        both = (("height", sizes.heights_px, BLUE), ("width", sizes.widths_px, ORANGE))
        bins = _bins(axes, np.concatenate([values for _, values, _ in both])).tolist()
        for what, values, colour in both:
            label = f"{what}, median {np.median(values):,.0f} px"
            axes.hist(values, bins, histtype="stepfilled", color=colour, alpha=0.3)
            axes.hist(values, bins, histtype="step", color=colour, linewidth=1.5, label=label)
        axes.set_xlabel("pixels", fontsize=9)
        axes.set_ylabel("images", fontsize=9)
        axes.set_title(f"Sizes of {len(sizes.heights_px):,} images", fontsize=10)
        axes.legend(fontsize=8)
    else:
        axes.hist(sizes.num_bytes, _bins(axes, sizes.num_bytes).tolist(), color=BLUE)
        axes.set_xlabel("bytes", fontsize=9)
        axes.set_ylabel("records", fontsize=9)
        total = f"{amount(sizes.total_bytes)} in all"
        axes.set_title(f"Sizes of {len(sizes.num_bytes):,} records, {total}", fontsize=10)
    axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
    tidy(axes, "y")


def _bins(axes: Axes, values: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return edges of whole numbers; logarithmic ones, with such an axis, for a wide range."""
    least, most = (int(values.min()), int(values.max())) if len(values) else (0, 1)
    if least > 0 and most / least > _LOG_FROM:
        axes.set_xscale("log")
        return np.geomspace(least, most + 1, _NUM_BINS + 1)
    step = max(1, -(-(most - least + 1) // _NUM_BINS))
    num_bins = max(5, -(-(most - least + 1) // step))  # one size only is no wall of colour
    start = least - (num_bins * step - (most - least + 1)) // 2
    edges: NDArray[np.float64] = start - 0.5 + step * np.arange(num_bins + 1, dtype=np.float64)
    return edges
