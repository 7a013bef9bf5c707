# SPDX-License-Identifier: Apache-2.0
"""The chart with one row per worker: what each did while the last batches were made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.insight.report.chart import STAGE_LABELS, Chart, Table, lasting, legend_of
from penstock.insight.report.series import TrainingTime
from penstock.insight.segments import (
    TRAINER_STAGES,
    Stage,
    trainer_stages,
    worked_on,
    worker_stages,
)
from penstock.insight.units import duration

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.insight.segments import Columns

__all__ = ["timeline"]

_FEWEST: Final = 40  # batches
_PER_WORKER: Final = 12
_MOST: Final = 200
_ROW_PX: Final = 30
_MOST_PX: Final = 1_100
_MOST_ROWS: Final = 64  # workers; more have no room for their names


def timeline(columns: Columns, backend: str) -> Chart:
    """Return the timeline of the last batches: main process on top, below a row for each worker."""
    since_ns, num_batches = _since(columns)
    own_and_wait, of_workers = trainer_stages(columns), worker_stages(columns)
    time = _time(own_and_wait, since_ns)
    seats = sorted(set(columns.seats[of_workers[-1].stops > since_ns].tolist()))
    shown = seats[:_MOST_ROWS]
    row_of = {seat: row for row, seat in enumerate(shown, start=1)}
    rows = np.array([row_of.get(seat, -1) for seat in columns.seats.tolist()], np.int64)
    traces = [_bars(stage, columns, 0 * rows, since_ns, time) for stage in own_and_wait]
    traces += [_bars(stage, columns, rows, since_ns, time) for stage in of_workers]
    named = ["loading"] if backend == "serial" else columns.seat_names
    names = ["trainer", *(named[seat] for seat in shown)]
    last_ns = np.array([since_ns, columns.end_ns])
    of_all = "" if len(shown) == len(seats) else f" {len(shown)} of {len(seats)} workers."
    return Chart(
        key="timeline",
        title="Batch by batch" if backend == "serial" else "Worker by worker",
        summary=f"The last {num_batches:,} batches, {lasting(time.whole_s)} of training.{of_all} "
        "Reading and computing are drawn one after the other, though samples are read and computed "
        "in turn. Long pauses between epochs are cut short.",
        traces=[trace for trace in traces if trace["x"]],
        layout={
            "barmode": "overlay",
            "bargap": 0.3,
            "hovermode": "closest",
            "xaxis": {"title": {"text": "time, s"}, "range": time(last_ns).tolist()},
            "yaxis": {
                "tickvals": list(range(len(names))),
                "ticktext": names,
                "range": [len(names) - 0.5, -0.5],
                "fixedrange": True,
                "showgrid": False,
            },
        },
        table=_table(columns, [*own_and_wait, *of_workers], num_batches),
        legend=legend_of((*TRAINER_STAGES, *(stage.name for stage in of_workers))),
        height_px=110 + min(_ROW_PX, _MOST_PX // len(names)) * len(names),
    )


def _since(columns: Columns) -> tuple[int, int]:
    """Return from when on things are drawn, and how many batches were asked for since."""
    num_workers = len(columns.seat_names)
    wanted = min(_MOST, max(_FEWEST, _PER_WORKER * num_workers))
    num_batches = min(len(columns), wanted)
    since = 0 if num_batches == len(columns) else int(columns["asked_ns"][-num_batches])
    return since, num_batches


def _time(own_and_wait: list[Stage], since_ns: int) -> TrainingTime:
    """Return the axis: seconds since, in which a pause takes a tenth of the training at most."""
    cut = [
        Stage(stage.name, np.maximum(stage.starts, since_ns), np.maximum(stage.stops, since_ns))
        for stage in own_and_wait
    ]
    whole_s = TrainingTime(cut[0], cut[1]).whole_s
    return TrainingTime(cut[0], cut[1], whole_s / 10)


def _bars(
    stage: Stage,
    columns: Columns,
    rows: NDArray[np.int64],
    since_ns: int,
    time: TrainingTime,
) -> dict[str, Any]:
    """Return a bar for each batch of which some lies in the time that is drawn."""
    starts = np.maximum(stage.starts, since_ns)
    at = np.flatnonzero((stage.stops > starts) & (rows >= 0))
    took = [duration(ns / 1e9) for ns in (stage.stops - stage.starts)[at].tolist()]
    batches = zip(*(column[at].tolist() for column in worked_on(stage, columns)), took, strict=True)
    bases = np.round(time(starts[at]), 7)
    return {
        "type": "bar",
        "orientation": "h",
        "name": STAGE_LABELS[stage.name],
        "y": rows[at].tolist(),
        "base": bases.tolist(),
        "x": np.round(np.round(time(stage.stops[at]), 7) - bases, 7).tolist(),
        "customdata": [
            f"epoch {epoch}, batch {step}: {STAGE_LABELS[stage.name]} {length}"
            for epoch, step, length in batches
        ],
        "marker": {"color": f"@{stage.name}", "line": {"width": 0.75, "color": "@surface"}},
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _table(columns: Columns, stages: list[Stage], num_batches: int) -> Table:
    last = slice(len(columns) - num_batches, None)
    names = [columns[name][last].tolist() for name in ("epoch", "step", "worker")]
    begun = [f"{moment / 1e9:,.3f}" for moment in columns["begun_ns"][last].tolist()]
    took = [[f"{s * 1e3:,.2f}" for s in stage.seconds[last].tolist()] for stage in stages]
    whole = [[str(value) for value in column] for column in names]
    rows: list[tuple[str | None, ...]] = list(zip(*whole, begun, *took, strict=True))
    header = ("epoch", "batch", "worker", "begun, s")
    return Table(
        (*header, *(f"{STAGE_LABELS[stage.name]}, ms" for stage in stages)), rows, num_texts=0
    )
