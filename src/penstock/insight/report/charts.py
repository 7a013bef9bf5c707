# SPDX-License-Identifier: Apache-2.0
"""Charts over the time of the run, drawn as SVG: throughput, workers, main process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.insight.report.markup import element
from penstock.insight.segments import columns_of, stages_of
from penstock.lines import amount, duration, percent

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.insight.recording import Recording
    from penstock.insight.report.markup import Element
    from penstock.insight.segments import Columns

_LABELS: Final = {
    "read": "reading",
    "compute": "computing",
    "collate": "collating",
    "send": "sending",
    "idle": "idle",
    "own": "main process's own code",
    "wait": "main process waits",
    "accent": "samples per second",
}
WORKER_BANDS: Final = ("read", "compute", "collate", "send", "idle")
_MOST_POINTS: Final = 240
_BATCHES_PER_POINT: Final = 4  # fewer, and a line shows every batch's luck
_WIDTH: Final = 1000
_HEIGHT: Final = 220


class Series(NamedTuple):
    """Samples and seconds of each stage in some equal spans of training time, between `edges_s`.

    Time of training leaves out what lies between epochs, a night perhaps. Seconds are those of all
    workers added up.
    """

    edges_s: NDArray[np.float64]
    samples: NDArray[np.float64]
    stages_s: dict[str, NDArray[np.float64]]


def series_of(columns: Columns) -> Series | None:
    """Return a recording's batches over time, at 240 points at most; None if nothing lasted."""
    if not len(columns["step"]):
        return None
    stages = stages_of(columns)
    moments = np.stack((stages["own"].starts, stages["wait"].stops), axis=1).reshape(-1)
    lasted = np.diff(moments, prepend=moments[0])
    lasted[::2] = 0  # from the end of a batch's wait to the code after it: between epochs
    at_s = np.cumsum(lasted) / 1e9
    if not at_s[-1] > 0:
        return None
    num = len(columns["step"])
    points = min(_MOST_POINTS, max(min(num, 12), num // _BATCHES_PER_POINT))
    edges_s = np.linspace(0.0, at_s[-1], points + 1)
    spans = {
        name: (np.interp(stage.starts, moments, at_s), np.interp(stage.stops, moments, at_s))
        for name, stage in stages.items()
    }
    seconds = {name: spread(*span, span[1] - span[0], edges_s) for name, span in spans.items()}
    samples = spread(spans["own"][0], spans["wait"][1], columns["samples"], edges_s)
    return Series(edges_s, samples, seconds)


def spread(
    starts: NDArray[np.float64],
    stops: NDArray[np.float64],
    amounts: NDArray[np.float64] | NDArray[np.int64],
    edges: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return how much of some amounts falls between edges, each flowing evenly while it lasts.

    Example:
        >>> one = np.array([1.0]), np.array([3.0]), np.array([8.0])
        >>> spread(*one, np.array([0.0, 2.0, 4.0, 6.0])).tolist()
        [4.0, 4.0, 0.0]
    """
    lasts = np.maximum(stops - starts, 1e-12)
    so_far: NDArray[np.float64] = np.clip((edges[:, None] - starts) / lasts, 0.0, 1.0) @ amounts
    return np.maximum(np.diff(so_far), 0.0)  # but for rounding


def over_time(recording: Recording) -> list[Element]:
    """Return the charts; none before a batch was given."""
    series = series_of(columns_of(recording))
    if series is None:
        return []
    run, is_serial = recording.stats.run, recording.stats.backend == "serial"
    step_s = float(series.edges_s[1])
    parts = {name: seconds / step_s for name, seconds in series.stages_s.items()}
    parts["accent"] = series.samples / step_s
    samples = f"{amount(run.samples_per_s)} samples per second, without time between epochs."
    seconds = "Seconds per second of all workers: two that are busy have 2."
    waits = f"It waited for {percent(run.wait_share)} of the run."
    charts: tuple[tuple[str, str, str, tuple[str, ...], str], ...] = (
        ("throughput", "Throughput", samples, ("accent",), "samples/s"),
        ("workers", "Making batches" if is_serial else "Workers", seconds, WORKER_BANDS, "s per s"),
        ("trainer", "Main process", waits, ("own", "wait"), "s per s"),
    )
    return [
        _chart(key, title, text, series, {name: parts[name] for name in bands}, unit)
        for key, title, text, bands, unit in charts
    ]


def _chart(
    key: str,
    title: str,
    summary: str,
    series: Series,
    bands: dict[str, NDArray[np.float64]],
    unit: str,
) -> Element:
    """Return bands stacked over time, with a text for each span that the pointer is on."""
    end_s = float(series.edges_s[-1])
    tops = np.cumsum(list(bands.values()), axis=0)
    highest = max(float(tops[-1].max()), 1e-9) * 1.05
    x = series.edges_s / end_s * _WIDTH
    drawn, below = [], np.zeros(len(x) - 1)
    for name, top in zip(bands, tops, strict=True):
        drawn.append(_area(name, x, *(_HEIGHT * (1 - y / highest) for y in (top, below))))
        below = top
    for number, values in enumerate(zip(*(band.tolist() for band in bands.values()), strict=True)):
        texts = [f"{_LABELS[n]} {_figure(v)}" for n, v in zip(bands, values, strict=True)]
        text = f"{duration(float(series.edges_s[number]))}: {', '.join(texts)}"
        drawn.append(
            element(
                "rect",
                element("title", text),
                x=f"{x[number]:.1f}",
                width=f"{x[1]:.1f}",
                height=_HEIGHT,
            )
        )
    picture = element(
        "svg",
        *drawn,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{title}. {summary}",
    )
    return element(
        "figure",
        element("figcaption", element("h3", title), element("p", summary, class_="summary")),
        legend(bands),
        element("p", f"{_figure(highest / 1.05)} {unit}", class_="axis"),
        picture,
        element("p", f"time of training: {duration(end_s)}", class_="axis end"),
        class_="card",
        id=f"chart-{key}",
    )


def legend(bands: dict[str, NDArray[np.float64]] | dict[str, str]) -> Element:
    """Return the colours of some stages; a text that comes with one stands after its label."""
    items = [
        element(
            "li",
            element("i", style=f"background:var(--{name})", aria_hidden="true"),
            f"{_LABELS[name]} ",
            element("b", value) if isinstance(value, str) else None,
        )
        for name, value in bands.items()
    ]
    return element("ul", *items, class_="legend")


def _area(
    name: str, x: NDArray[np.float64], top: NDArray[np.float64], below: NDArray[np.float64]
) -> Element:
    """Return a band as steps: along its top to the right, and back along its bottom."""
    across = np.repeat(x, 2)[1:-1]
    corners = [*zip(across, np.repeat(top, 2), strict=True)]
    corners += [*zip(across[::-1], np.repeat(below, 2)[::-1], strict=True)]
    points = " ".join(f"{left:.1f},{height:.1f}" for left, height in corners)
    return element("polygon", points=points, style=f"fill:var(--{name})", data_band=name)


def _figure(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
