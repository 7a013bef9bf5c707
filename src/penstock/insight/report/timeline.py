# SPDX-License-Identifier: Apache-2.0
"""The chart with one row per worker: what each did while the last batches were made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.insight.figures import duration
from penstock.insight.report.chart import STAGE_LABELS, Chart, Table, legend_of
from penstock.insight.segments import TRAINER_STAGES, trainer_stages, worker_stages

if TYPE_CHECKING:
    from penstock.insight.segments import Columns, Stage

__all__ = ["timeline"]

_FEWEST: Final = 40  # batches
_PER_WORKER: Final = 12
_MOST: Final = 200
_ROW_PX: Final = 30


def timeline(columns: Columns, backend: str) -> Chart:
    """Return the timeline of the last batches: the trainer on top, a row for each worker below."""
    since_ns, num_batches = _since(columns)
    own_and_wait, of_workers = trainer_stages(columns), worker_stages(columns)
    workers = sorted(set(columns["worker"][of_workers[-1].stops > since_ns].tolist()))
    rows = {worker: row for row, worker in enumerate(workers, start=1)}
    of_batch = [rows.get(worker, 0) for worker in columns["worker"].tolist()]
    traces = [_bars(stage, columns, [0] * len(columns), since_ns) for stage in own_and_wait]
    traces += [_bars(stage, columns, of_batch, since_ns) for stage in of_workers]
    names = ["trainer", *(_name(worker, backend) for worker in workers)]
    lasted = duration((columns.end_ns - since_ns) / 1e9)
    return Chart(
        key="timeline",
        title="Worker by worker",
        summary=f"The last {num_batches:,} batches, {lasted}. Reading and computing are drawn one "
        "after the other, though samples are read and computed in turn.",
        traces=[trace for trace in traces if trace["x"]],
        layout={
            "barmode": "overlay",
            "bargap": 0.3,
            "hovermode": "closest",
            "xaxis": {
                "title": {"text": "time, s"},
                "range": [since_ns / 1e9, columns.end_ns / 1e9],
            },
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
        height_px=110 + _ROW_PX * len(names),
    )


def _since(columns: Columns) -> tuple[int, int]:
    """Return from when on things are drawn, and how many batches were asked for since."""
    num_workers = len(np.unique(columns["worker"]))
    wanted = min(_MOST, max(_FEWEST, _PER_WORKER * num_workers))
    num_batches = min(len(columns), wanted)
    since = 0 if num_batches == len(columns) else int(columns["asked_ns"][-num_batches])
    return since, num_batches


def _name(worker: int, backend: str) -> str:
    return "loading" if backend == "serial" else f"worker {worker}"


def _bars(stage: Stage, columns: Columns, rows: list[int], since_ns: int) -> dict[str, Any]:
    """Return a bar for each batch of which some lies in the time that is drawn."""
    starts = np.maximum(stage.starts, since_ns)
    at = np.flatnonzero(stage.stops > starts)
    steps = zip(columns["epoch"][at].tolist(), columns["step"][at].tolist(), strict=True)
    return {
        "type": "bar",
        "orientation": "h",
        "name": STAGE_LABELS[stage.name],
        "y": [rows[n] for n in at.tolist()],
        "base": np.round(starts[at] / 1e9, 7).tolist(),
        "x": np.round((stage.stops - starts)[at] / 1e9, 7).tolist(),
        "customdata": [f"epoch {epoch}, batch {step}" for epoch, step in steps],
        "marker": {"color": f"@{stage.name}", "line": {"width": 0.5, "color": "@surface"}},
        "hovertemplate": f"%{{customdata}}: {STAGE_LABELS[stage.name]} %{{x:.3~s}}s<extra></extra>",
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
