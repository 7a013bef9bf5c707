# SPDX-License-Identifier: Apache-2.0
"""The chart of `penstock stats --sampler`: shares of classes before and after."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Final

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from penstock.cli.chart_style import BLUE, GREY, MAX_NAME, ORANGE, save, short, tidy

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from penstock.sampling.balance import BalanceReport, ClassCounts

__all__ = ["draw_balance"]

_FIRST_ROWS, _LAST_ROWS = 15, 10  # of more classes than these, one row stands for the middle
_LOG_FROM: Final = 50  # largest to smallest; below that small bars can be seen beside large ones
_BAR: Final = 0.38  # of the height of a row


def draw_balance(png: Path, address: str, report: BalanceReport, sampler: str) -> None:
    """Draw the share of each class, before and after; for detection of images and of objects.

    Args:
        png: Is written, or written over.
        address: Of the data set, for the title.
        report: What is drawn.
        sampler: In a few words, for the title.

    Raises:
        ConfigError: the file cannot be written.
    """
    levels = [report.images] if report.objects is None else [report.images, report.objects]
    rows = _ClassRows(levels[-1].before)
    figure = Figure(
        figsize=(7.5 * len(levels), max(3.2, 1.8 + 0.3 * len(rows))), dpi=120, layout="constrained"
    )
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, len(levels), squeeze=False, sharey=True)[0]
    figure.suptitle(f"{short(address, 70)}\nsampler: {sampler}", fontsize=11, parse_math=False)
    if report.objects is None:
        _draw_level(all_axes[0], rows, report.images, None, "samples")
    else:
        frequencies = report.frequencies_before, report.frequencies_after
        _draw_level(all_axes[0], rows, report.images, frequencies, "images")
        what = "objects" if report.has_boxes else "labels"
        _draw_level(all_axes[1], rows, report.objects, None, what)
    all_axes[0].set_yticks(range(len(rows)), rows.names(report.class_names))
    for label in all_axes[0].get_yticklabels():
        label.set(fontsize=8, parse_math=False)
    all_axes[0].set_ylim(len(rows) - 0.4, -0.6)  # the largest on top
    handles, labels = all_axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # shown as a box
        save(figure, png)


class _ClassRows:
    """Which classes have bars: all, or the largest, the smallest, and one for those between."""

    def __init__(self, counts: NDArray[np.int64]) -> None:
        self._order = np.argsort(-counts, kind="stable")
        is_cut = len(counts) > _FIRST_ROWS + _LAST_ROWS + 1
        self._num_first = _FIRST_ROWS if is_cut else len(counts)
        self._num_hidden = len(counts) - _FIRST_ROWS - _LAST_ROWS if is_cut else 0

    def __len__(self) -> int:
        return len(self._order) - self._num_hidden + bool(self._num_hidden)

    @property
    def middle(self) -> int | None:
        """The row that stands for several classes."""
        return self._num_first if self._num_hidden else None

    def values(self, of_classes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return a value for each row, the mean where it stands for several."""
        ordered = of_classes[self._order]
        if not self._num_hidden:
            return ordered
        stop = self._num_first + self._num_hidden
        mean = ordered[self._num_first : stop].mean()
        return np.concatenate((ordered[: self._num_first], [mean], ordered[stop:]))

    def names(self, of_classes: tuple[str, ...]) -> list[str]:
        """Return a name for each row."""
        names = [short(of_classes[n], MAX_NAME) for n in self._order.tolist()]
        if self._num_hidden:
            stop = self._num_first + self._num_hidden
            names[self._num_first : stop] = [f"mean of {self._num_hidden:,} more"]
        return names


def _draw_level(
    axes: Axes,
    rows: _ClassRows,
    counts: ClassCounts,
    frequencies: tuple[NDArray[np.float64], NDArray[np.float64]] | None,
    what: str,
) -> None:
    """Draw two bars for each class: its share, or in how many images it is."""
    shares = frequencies or (counts.shares_before, counts.shares_after)
    places = np.arange(len(rows))
    for name, side, colour, values in zip(
        ("before", "after"), (-1, 1), (BLUE, ORANGE), shares, strict=True
    ):
        axes.barh(places + side * _BAR / 2, rows.values(values), _BAR, color=colour, label=name)
    if frequencies is None and len(counts.before):
        equal = 1 / len(counts.before)
        axes.axvline(equal, color="black", linewidth=1, linestyle="--", label="equal shares")
    if rows.middle is not None:
        axes.axhspan(rows.middle - 0.5, rows.middle + 0.5, color=GREY, alpha=0.25, zorder=0)
    is_logarithmic = _scale(axes, [rows.values(part) for part in shares])
    label = f"share of {what} that have the class" if frequencies else f"share of all {what}"
    axes.set_xlabel(label + (", logarithmic" if is_logarithmic else ""), fontsize=9)
    axes.set_title(
        f"{what.capitalize()}: largest to smallest {_ratio(counts.ratio_before)} before, "
        f"{_ratio(counts.ratio_after)} after",
        fontsize=10,
    )
    tidy(axes, "x")


def _scale(axes: Axes, shares: list[NDArray[np.float64]]) -> bool:
    """Count in per cent; logarithmically, and say so, where small bars could not be seen."""
    values = np.concatenate(shares)
    values = values[values > 0]
    is_logarithmic = len(values) > 0 and bool(values.max() / values.min() > _LOG_FROM)
    if is_logarithmic:
        axes.set_xscale("log")
        axes.set_xlim(left=values.min() / 2)
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda part, _: f"{100 * part:.4g} %"))
    return is_logarithmic


def _ratio(ratio: float) -> str:
    return f"{ratio:,.1f} : 1" if np.isfinite(ratio) else "(one has none)"
