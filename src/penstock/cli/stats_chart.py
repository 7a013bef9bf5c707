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

__all__ = ["Panel", "draw"]

# Colours that the colour-blind can tell apart (Okabe and Ito, "Color Universal Design").
_COLOURS: Final = ("#0072B2", "#E69F00")
_GREY: Final = "#999999"
_FIRST_ROWS, _LAST_ROWS = 15, 10  # of more classes than these, one row stands for the middle
_LOG_FROM: Final = 50  # largest to smallest; below that small bars can be seen beside large ones
_NUM_BINS: Final = 40
_MAX_NAME: Final = 24  # characters beside a bar
_NUMBERS: Final = StrMethodFormatter("{x:,.6g}")


class Panel(NamedTuple):
    """Bars for each class, the largest on top; or histograms.

    Attributes:
        title: Above it.
        label: Of the axis of values.
        values: One or two arrays, by their name: a value for each class, or what is counted.
        names: Of the classes, the largest first; None for a histogram.
        counted: What a histogram counts.
        are_shares: Whether the values are parts of 1.
    """

    title: str
    label: str
    values: Mapping[str, NDArray[Any]]
    names: Sequence[str] | None = None
    counted: str = ""
    are_shares: bool = False


def draw(png: Path, title: str, panels: Sequence[Panel]) -> None:
    """Draw panels into a PNG file, two in a row.

    Args:
        png: Is written, or written over.
        title: May have line breaks; other characters that cannot be drawn are replaced.
        panels: What is drawn.

    Raises:
        ConfigError: the file cannot be written.
    """
    num_bars = min(max(len(panel.names or ()) for panel in panels), _FIRST_ROWS + _LAST_ROWS + 1)
    heights = [max(4.0, 1.8 + 0.3 * num_bars), *[4.0] * ((len(panels) - 1) // 2)]
    num_columns = min(2, len(panels))
    figure = Figure(figsize=(7.5 * num_columns, sum(heights)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(heights), num_columns, height_ratios=heights)
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(grid[divmod(number, num_columns)])
        if panel.names is None:
            _draw_histogram(axes, panel)
        else:
            _draw_bars(axes, panel, list(panel.names))
        axes.set_title(panel.title, fontsize=10)
        axes.grid(axis="y" if panel.names is None else "x", linewidth=0.5, alpha=0.5)
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


def _draw_bars(axes: Axes, panel: Panel, names: list[str]) -> None:
    num_hidden = len(names) - _FIRST_ROWS - _LAST_ROWS
    hidden = slice(_FIRST_ROWS, _FIRST_ROWS + num_hidden)
    if num_hidden > 1:
        names[hidden] = [f"mean of {num_hidden:,} more"]
    rows, bar = np.arange(len(names)), 0.76 / len(panel.values)
    for number, (name, values) in enumerate(panel.values.items()):
        shown, colours = values.tolist(), [_COLOURS[number]] * len(names)
        if num_hidden > 1:
            shown[hidden], colours[_FIRST_ROWS] = [float(values[hidden].mean())], _GREY
        place = rows + (number - (len(panel.values) - 1) / 2) * bar
        axes.barh(place, shown, bar, color=colours, label=name)
    axes.set_yticks(rows, [_short(name, _MAX_NAME) for name in names])
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.set_ylim(len(names) - 0.4, -0.6)
    values = np.concatenate(list(panel.values.values()))
    _scale(axes, panel, _is_wide(values[values > 0]))


def _draw_histogram(axes: Axes, panel: Panel) -> None:
    values = np.concatenate(list(panel.values.values()))
    least, most = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    is_wide = _is_wide(values)
    if is_wide:
        bins = np.geomspace(least * 0.999, most * 1.001, _NUM_BINS + 1)
    else:
        step = max(1, -(-(most - least + 1) // _NUM_BINS))  # whole numbers lie within a bin
        bins = np.arange(least - 0.5, most + step + 0.5, step)
    for colour, (name, of_name) in zip(_COLOURS, panel.values.items(), strict=False):
        axes.hist(of_name, bins.tolist(), color=colour, alpha=0.3)
        axes.hist(of_name, bins.tolist(), histtype="step", color=colour, linewidth=1.5, label=name)
    axes.set_ylabel(panel.counted, fontsize=9)
    axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
    _scale(axes, panel, is_wide)


def _is_wide(values: NDArray[Any]) -> bool:
    """Return whether small values could not be seen beside large ones."""
    return len(values) > 0 and bool(values.min() > 0 and values.max() / values.min() > _LOG_FROM)


def _scale(axes: Axes, panel: Panel, is_wide: bool) -> None:
    """Make the axis of values logarithmic, and say so, where small ones could not be seen."""
    if is_wide:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    formatter = FuncFormatter(lambda part, _: f"{100 * part:.4g} %")
    axes.xaxis.set_major_formatter(formatter if panel.are_shares else _NUMBERS)
    axes.set_xlabel(panel.label + (", logarithmic" if is_wide else ""), fontsize=9)
