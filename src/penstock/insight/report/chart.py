# SPDX-License-Identifier: Apache-2.0
"""What a chart of the report is: marks, a sentence that says the same, and its data as a table."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.insight.means import Means
from penstock.insight.units import amount, duration, percent

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from penstock.insight.stats import Stats

__all__ = [
    "STAGE_LABELS",
    "Chart",
    "Table",
    "lasting",
    "legend_of",
    "mark_text",
    "numbers",
    "shorten",
    "waiting_lately",
]

STAGE_LABELS: Final = {
    "read": "reading",
    "compute": "computing",
    "collate": "collating",
    "send": "sending",
    "idle": "idle",
    "own": "main process's own code",
    "wait": "main process waits",
}


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        header: Names of the columns.
        rows: Texts; None is an empty cell.
        num_texts: So many columns on the left are text, the others numbers, aligned on the right.
    """

    header: tuple[str, ...]
    rows: list[tuple[str | None, ...]]
    num_texts: int = 1


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart.

    Attributes:
        key: What it is called in the page, a word.
        title: Its heading.
        summary: What it shows, in a sentence or two.
        traces: Plotly's. Colours are names of the palette in style.css after an `@`, as "@read",
            with an opacity where wanted, as "@read/0.2".
        layout: Plotly's; the page adds what all charts share.
        table: The data.
        legend: Colour and name of each kind of mark.
        height_px: How high it is.
    """

    key: str
    title: str
    summary: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    table: Table
    legend: tuple[tuple[str, str], ...] = ()
    height_px: int = 280


def numbers(values: NDArray[np.float64], digits: int = 4) -> list[float | None]:
    """Return values with so many digits that mean something; what is not finite is None.

    Example:
        >>> numbers(np.array([1234.5678, 0.00012345, np.nan]))
        [1235.0, 0.0001234, None]
    """
    return [
        float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()
    ]


def mark_text(text: str) -> str:
    """Return a text that Plotly shows as it is; it reads some HTML, and `%{}` in templates.

    Example:
        >>> mark_text("<b>cats & dogs</b>")
        '&lt;b&gt;cats &amp; dogs&lt;/b&gt;'
    """
    return html.escape(" ".join(text.split()), quote=False).replace("%{", "%&#123;")


def shorten(text: str, length: int = 24) -> str:
    """Return a text of so many characters at most; its middle is left out.

    Example:
        >>> shorten("train/n02094433/n02094433_10126.JPEG")
        'train/n0209…_10126.JPEG'
    """
    if len(text) <= length:
        return text
    half = (length - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def legend_of(stages: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return the legend of some stages."""
    return tuple((stage, STAGE_LABELS[stage]) for stage in stages)


def lasting(seconds: float) -> str:
    """Return how long a run, or a part of it, took.

    Example:
        >>> lasting(36_000.0), lasting(900.0), lasting(2.5)
        ('10 h', '15 min', '2.5 s')
    """
    for unit, whole in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 3 * whole:
            return f"{amount(seconds / whole)} {unit}"
    return duration(seconds)


def waiting_lately(stats: Stats) -> str:
    """Return the share of waiting of the last batches, as verdicts have it as well.

    Verdicts are about batches that followed another, so without the first ones of iterators.
    """
    window = stats.window
    text = percent(window.wait_share)
    means = Means.of(window, stats.num_workers, stats.cores)
    if means is None or not window.starts or percent(means.wait_share) == text:
        return text
    return f"{text}, and {percent(means.wait_share)} without the first one of each epoch"
