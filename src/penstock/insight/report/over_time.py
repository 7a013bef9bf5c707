# SPDX-License-Identifier: Apache-2.0
"""Charts over the time of the run: throughput, waiting, batches that lie ready, stages, slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.insight.marks import batches_of_changes
from penstock.insight.report.chart import (
    STAGE_LABELS,
    Chart,
    Table,
    legend_of,
    mark_text,
    numbers,
    waiting_lately,
)
from penstock.insight.report.series import Timescale
from penstock.insight.units import amount, percent, size
from penstock.plural import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.insight.recording import Recording
    from penstock.insight.report.series import Series
    from penstock.insight.segments import Columns

__all__ = ["ready", "slots", "stages", "throughput", "waiting"]

_BANDS: Final = ("read", "compute", "collate", "send", "idle")
_MOST_EPOCH_LINES: Final = 30
_MOST_EPOCH_NAMES: Final = 10


def throughput(recording: Recording, columns: Columns, series: Series) -> Chart:
    """Return samples per second over time, with what "auto" changed."""
    scale = _scale(series)
    rates = series.samples / series.step_s
    x, y = scale(series.centres_s), numbers(rates)
    run = recording.stats.run
    summary = f"{amount(run.samples_per_s)} samples per second over the whole run; between "
    summary += f"{amount(float(rates.min()))} and {amount(float(rates.max()))}"
    traces = _lines(x, y, "accent", "%{y:,.4~g} samples/s")
    changes = _changes(recording, columns, scale, series, rates)
    legend = [("accent", "samples per second")]
    if changes["x"]:
        traces.append(changes)
        legend.append(("wait", 'num_workers="auto" changed something'))
    return Chart(
        key="throughput",
        title="Throughput",
        summary=f"{summary}. Time between epochs is left out.",
        traces=traces,
        layout={
            "xaxis": _time_axis(scale, series),
            "yaxis": {"title": {"text": "samples per second"}, "rangemode": "tozero"},
            **_epoch_lines(columns, scale, series),
        },
        table=_table(scale, series, {"samples per second": y}),
        legend=tuple(legend),
    )


def waiting(recording: Recording, series: Series) -> Chart:
    """Return the share of time that the main process waited."""
    scale = _scale(series)
    shares = numbers(100 * np.clip(series.wait_s / series.step_s, 0.0, 1.0))
    return Chart(
        key="waiting",
        title="Share of waiting",
        summary=f"The main process waited for {percent(recording.stats.run.wait_share)} of the "
        f"run. Of its last batches: {waiting_lately(recording.stats)}.",
        traces=_lines(scale(series.centres_s), shares, "wait", "%{y:.3~g} % waiting"),
        layout={
            "xaxis": _time_axis(scale, series),
            "yaxis": {"title": {"text": "waiting, %"}, "range": [0, 101]},
        },
        table=_table(scale, series, {"waiting, %": shares}),
        legend=(("wait", "share of time"),),
        height_px=240,
    )


def ready(recording: Recording, columns: Columns, series: Series) -> Chart:
    """Return how many batches lay ready when the main process asked."""
    scale = _scale(series)
    asked_s = series.time(columns["asked_ns"])
    lying = _means(asked_s, columns["ready"], series)
    ahead = _means(asked_s, columns["lookahead"], series)
    x = scale(series.centres_s)
    return Chart(
        key="ready",
        title="Batches that lay ready",
        summary=f"{amount(recording.stats.num_ready)} batches lay ready on average when the "
        "main process asked for one, of the last batches. None ready means that it waits.",
        traces=[
            *_lines(x, numbers(lying), "accent", "%{y:.3~g} ready"),
            *(
                {**line, "line": {"color": "@own", "width": 1.5, "dash": "dot"}, "fill": "none"}
                for line in _lines(x, numbers(ahead), "own", "%{y:.3~g} under way at most")
            ),
        ],
        layout={
            "xaxis": _time_axis(scale, series),
            "yaxis": {"title": {"text": "batches"}, "rangemode": "tozero"},
        },
        table=_table(scale, series, {"ready": numbers(lying), "at most": numbers(ahead)}),
        legend=(("accent", "ready"), ("own", "under way at most")),
        height_px=240,
    )


def stages(recording: Recording, series: Series) -> Chart:
    """Return what workers and main process did: seconds per second, stacked."""
    scale = _scale(series)
    x = scale(series.centres_s)
    parts = {name: numbers(series.stages_s[name] / series.step_s) for name in _BANDS}
    parts |= {
        "own": numbers(series.own_s / series.step_s),
        "wait": numbers(series.wait_s / series.step_s),
    }
    traces = [_band(x, y, name) for name, y in parts.items()]
    return Chart(
        key="stages",
        title="What the main process did"
        if recording.stats.backend == "serial"
        else "What workers and main process did",
        summary=_stage_summary(recording),
        traces=traces,
        layout={
            "xaxis": {**_time_axis(scale, series), "anchor": "y2"},
            "yaxis": {
                "title": {"text": "workers"},
                "domain": [0.34, 1.0],
                "rangemode": "tozero",
            },
            "yaxis2": {
                "title": {"text": "trainer"},
                "domain": [0.0, 0.22],
                "range": [0, 1],
                "tickvals": [0, 1],
                "anchor": "x",
            },
        },
        table=_table(scale, series, {STAGE_LABELS[name]: y for name, y in parts.items()}),
        legend=legend_of(parts),
        height_px=400,
    )


def slots(recording: Recording, columns: Columns, series: Series) -> Chart:
    """Return the memory of all workers' slots over time."""
    scale = _scale(series)
    megabytes = _pool_bytes(columns, series) / 1e6
    y = numbers(megabytes)
    return Chart(
        key="slots",
        title="Memory of batches",
        summary=f"All slots, in use and free, took {size(recording.stats.slot_bytes)} at most.",
        traces=_lines(scale(series.centres_s), y, "send", "%{y:,.4~g} MB", shape="hv"),
        layout={
            "xaxis": _time_axis(scale, series),
            "yaxis": {"title": {"text": "slots, MB"}, "rangemode": "tozero"},
        },
        table=_table(scale, series, {"slots, MB": y}),
        height_px=240,
    )


def _scale(series: Series) -> Timescale:
    return Timescale.of(float(series.edges_s[-1]))


def _time_axis(scale: Timescale, series: Series) -> dict[str, Any]:
    middles = series.centres_s
    ends = scale(middles[[0, -1]] if len(middles) > 1 else series.edges_s)
    return {"title": {"text": f"time of training, {scale.unit}"}, "range": ends}


def _lines(
    x: list[float], y: list[float | None], colour: str, hover: str, *, shape: str = "linear"
) -> list[dict[str, Any]]:
    """Return a line with the area below it."""
    line = {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "markers",  # a single point makes no line
        "x": x,
        "y": y,
        "line": {"color": f"@{colour}", "width": 2, "shape": shape},
        "marker": {"color": f"@{colour}"},
        "hovertemplate": f"{hover}<extra></extra>",
        "fill": "tozeroy",
        "fillcolor": f"@{colour}/0.13",
    }
    return [line]


def _band(x: list[float], y: list[float | None], name: str) -> dict[str, Any]:
    is_trainer = name in ("own", "wait")
    return {
        "type": "scatter",
        "mode": "lines",
        "name": STAGE_LABELS[name],
        "x": x,
        "y": y,
        "stackgroup": "trainer" if is_trainer else "workers",
        "yaxis": "y2" if is_trainer else "y",
        "line": {"width": 1.5, "color": "@surface"},
        "fillcolor": f"@{name}",
        "hovertemplate": f"{STAGE_LABELS[name]} %{{y:.3~f}} s per s<extra></extra>",
    }


def _changes(
    recording: Recording,
    columns: Columns,
    scale: Timescale,
    series: Series,
    rates: NDArray[np.float64],
) -> dict[str, Any]:
    """Return a mark on the line for each change whose batch is kept."""
    changes = recording.stats.changes
    found = zip(changes, batches_of_changes(columns, changes), strict=True)
    marked = {position: change for change, position in found if position is not None}
    kept = list(marked.values())
    at_s = series.time(columns["given_ns"][list(marked)])
    at_s = np.clip(at_s, *series.centres_s[[0, -1]])
    heights = np.interp(at_s, series.centres_s, rates)
    return {
        "type": "scatter",
        "mode": "markers",
        "x": scale(at_s),
        "y": numbers(heights),
        "text": [
            mark_text(
                f"{counted(c.num_workers, 'worker')}, {counted(c.prefetch_factor, 'batch')} each: "
                f"{c.reason}"
            )
            for c in kept
        ],
        "marker": {
            "color": "@wait",
            "symbol": "diamond",
            "size": 11,
            "line": {"color": "@surface", "width": 2},
        },
        "hovertemplate": "%{text}<extra></extra>",
    }


def _epoch_lines(columns: Columns, scale: Timescale, series: Series) -> dict[str, Any]:
    """Return a line where each epoch begins, but for the first."""
    epochs = columns["epoch"]
    firsts = np.flatnonzero(np.diff(epochs)) + 1
    if not 0 < len(firsts) <= _MOST_EPOCH_LINES:
        return {}
    at = scale(series.time(columns["asked_ns"][firsts]))
    line = {"color": "@own/0.7", "width": 1, "dash": "dot"}
    drawn: dict[str, Any] = {
        "shapes": [
            {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line}
            for x in at
        ]
    }
    if len(firsts) <= _MOST_EPOCH_NAMES:
        drawn["annotations"] = [
            {
                "x": x,
                "yref": "paper",
                "y": 1.0,
                "yanchor": "bottom",
                "text": f"epoch {epoch}",
                "showarrow": False,
                "font": {"size": 11, "color": "@muted"},
            }
            for x, epoch in zip(at, epochs[firsts].tolist(), strict=True)
        ]
    return drawn


def _means(
    at_s: NDArray[np.float64], values: NDArray[np.int64], series: Series
) -> NDArray[np.float64]:
    """Return the mean of values in each span; where there is none, that of the span before."""
    counts, _ = np.histogram(at_s, series.edges_s)
    sums, _ = np.histogram(at_s, series.edges_s, weights=values)
    last_known = np.maximum.accumulate(np.where(counts > 0, np.arange(len(counts)), 0))
    means: NDArray[np.float64] = (sums / np.maximum(counts, 1))[last_known]
    means[np.isnan(series.samples / series.step_s)] = np.nan
    return means


def _pool_bytes(columns: Columns, series: Series) -> NDArray[np.float64]:
    """Return the bytes of all workers' slots at the end of each span, as each told last."""
    ends_s = series.edges_s[1:]
    total = np.zeros(len(ends_s))
    ended_s, seats = series.time(columns["ended_ns"]), columns.seats
    for seat in range(len(columns.seat_names)):
        mine = np.flatnonzero(seats == seat)
        mine = mine[np.argsort(columns["ended_ns"][mine], kind="stable")]
        told = np.concatenate(([0], columns["pool_bytes"][mine]))
        total += told[np.searchsorted(ended_s[mine], ends_s, side="right")]
    return total


def _stage_summary(recording: Recording) -> str:
    run = recording.stats.run
    whole = run.busy_s + run.idle_s
    if not whole:
        return "Seconds of all workers, and of the main process, per second."
    parts = {name: getattr(run, f"{name}_s") / whole for name in _BANDS}
    most = sorted(parts.items(), key=lambda part: -part[1])[:3]
    listed = ", ".join(f"{STAGE_LABELS[name]} {percent(share)}" for name, share in most if share)
    if recording.stats.backend == "serial":
        return f"Of the time of making batches over the run: {listed}."
    return (
        f"Of the workers' time over the run: {listed}. Two busy workers have 2 s per second. What "
        "they did between epochs is left out."
    )


def _table(scale: Timescale, series: Series, columns: dict[str, list[float | None]]) -> Table:
    times = [f"{time:,.4g}" for time in scale(series.centres_s)]
    texts = [[None if v is None else f"{v:,.4g}" for v in column] for column in columns.values()]
    rows: list[tuple[str | None, ...]] = list(zip(times, *texts, strict=True))
    return Table((f"time of training, {scale.unit}", *columns), rows, num_texts=0)
