# SPDX-License-Identifier: Apache-2.0
"""The chart of `penstock stats`: panels of bars, one or two for each class, and of histograms."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, StrMethodFormatter

from penstock.cli.outputs import write_output

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

__all__ = ["Bars", "Histogram", "draw"]

# Colours that the colour-blind can tell apart (Okabe and Ito, "Color Universal Design").
_COLOURS: Final = ("#0072B2", "#E69F00")
_GREY: Final = "#999999"
_FIRST_ROWS, _LAST_ROWS = 15, 10  # of more classes than these, one row stands for the middle
_LOG_FROM: Final = 50  # largest to smallest; below that small bars can be seen beside large ones
_NUM_BINS: Final = 40
_MAX_NAME: Final = 24  # characters beside a bar


class Bars(NamedTuple):
    """A panel with bars for each class, the largest on top.

    Attributes:
        title: Above it.
        label: Of the axis.
        names: Of the classes, the largest first.
        values: One or two for each class, by their name.
        are_shares: Whether the values are parts of 1.
    """

    title: str
    label: str
    names: Sequence[str]
    values: Mapping[str, NDArray[Any]]
    are_shares: bool = False


class Histogram(NamedTuple):
    """A panel with one or two histograms.

    Attributes:
        title: Above it.
        label: Of the axis of values.
        counted: What has the values.
        values: By their name.
    """

    title: str
    label: str
    counted: str
    values: Mapping[str, NDArray[Any]]


def draw(png: Path, title: str, panels: Sequence[Bars | Histogram]) -> None:
    """Draw panels into a PNG file, two in a row.

    Args:
        png: Is written, or written over.
        title: May have line breaks; other characters that cannot be drawn are replaced.
        panels: What is drawn.

    Raises:
        ConfigError: the file cannot be written.
    """
    num_bars = max((len(panel.names) for panel in panels if isinstance(panel, Bars)), default=0)
    height = max(4.0, 1.8 + 0.3 * min(num_bars, _FIRST_ROWS + _LAST_ROWS + 1))
    heights = [height, *[4.0] * ((len(panels) - 1) // 2)]
    num_columns = min(2, len(panels))
    figure = Figure(figsize=(7.5 * num_columns, sum(heights)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(heights), num_columns, height_ratios=heights)
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(grid[divmod(number, num_columns)])
        if isinstance(panel, Bars):
            _draw_bars(axes, panel)
        else:
            _draw_histogram(axes, panel)
        axes.set_title(panel.title, fontsize=10)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        if len(panel.values) > 1:
            axes.legend(fontsize=8)
    lines = [_short(line, 80) for line in title.split("\n")]
    figure.suptitle("\n".join(lines), fontsize=11, parse_math=False)
    drawn = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # shown as a box
        figure.savefig(drawn, format="png")
    write_output("--png", png, drawn.getvalue())


def _short(text: str, length: int) -> str:
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= length else text[: length - 1] + "…"


def _draw_bars(axes: Axes, panel: Bars) -> None:
    names, all_values = list(panel.names), dict(panel.values)
    num_hidden = len(names) - _FIRST_ROWS - _LAST_ROWS
    is_cut = num_hidden > 1
    if is_cut:
        hidden = slice(_FIRST_ROWS, _FIRST_ROWS + num_hidden)
        names[hidden] = [f"mean of {num_hidden:,} more"]
        for name, values in all_values.items():
            shown = values.astype(np.float64).tolist()
            shown[hidden] = [float(values[hidden].mean())]
            all_values[name] = np.array(shown)
    rows = np.arange(len(names))
    bar = 0.76 / len(all_values)
    for number, (name, values) in enumerate(all_values.items()):
        place = rows + (number - (len(all_values) - 1) / 2) * bar
        colours = [_COLOURS[number]] * len(names)
        if is_cut:
            colours[_FIRST_ROWS] = _GREY
        axes.barh(place, values, bar, color=colours, label=name)
    axes.set_yticks(rows, [_short(name, _MAX_NAME) for name in names])
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.set_ylim(len(names) - 0.4, -0.6)
    _scale(axes, np.concatenate([*all_values.values(), [0]]), panel.label)
    if panel.are_shares:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda part, _: f"{100 * part:.4g} %"))
    axes.grid(axis="x", linewidth=0.5, alpha=0.5)


def _draw_histogram(axes: Axes, panel: Histogram) -> None:
    values = np.concatenate(list(panel.values.values()))
    least, most = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if _scale(axes, values if least > 0 else values[:0], panel.label):
        bins = np.geomspace(least * 0.999, most * 1.001, _NUM_BINS + 1)
    else:
        step = max(1, -(-(most - least + 1) // _NUM_BINS))  # whole numbers lie within a bin
        bins = np.arange(least - 0.5, most + step + 0.5, step)
    for colour, (name, of_name) in zip(_COLOURS, panel.values.items(), strict=False):
        axes.hist(of_name, bins.tolist(), color=colour, alpha=0.3)
        axes.hist(of_name, bins.tolist(), histtype="step", color=colour, linewidth=1.5, label=name)
    axes.set_ylabel(panel.counted, fontsize=9)
    axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.grid(axis="y", linewidth=0.5, alpha=0.5)


def _scale(axes: Axes, values: NDArray[Any], label: str) -> bool:
    """Make the axis of values logarithmic, and say so, where small ones could not be seen."""
    there = values[values > 0]
    is_logarithmic = len(there) > 0 and bool(there.max() / there.min() > _LOG_FROM)
    if is_logarithmic:
        axes.set_xscale("log")
        axes.set_xlim(left=there.min() / 2)
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
    axes.set_xlabel(label + (", logarithmic" if is_logarithmic else ""), fontsize=9)
    return is_logarithmic
