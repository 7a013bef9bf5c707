# SPDX-License-Identifier: Apache-2.0
"""Charts of bars: the balance of classes, and the memory of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.engine.backends import traits_of
from penstock.insight.report.chart import Chart, Table, mark_text, numbers, shorten
from penstock.insight.units import amount, percent, size

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.insight.recording import ClassBalance

__all__ = ["balance", "worker_memory"]

_MOST_CLASSES: Final = 50
_MOST_NAMED: Final = 20
_KINDS: Final = (("dataset", "in the dataset", "own"), ("shown", "asked for", "accent"))


def balance(classes: ClassBalance) -> Chart:
    """Return the share of each class in the dataset and among the samples that were asked for.

    Those that then failed are among these. The 50 largest classes have bars. The others, which
    together may be larger than any, have a sentence, and rows of the table as all have.
    """
    names, counts = _rows(classes)
    shares = {key: 100 * values / max(values.sum(), 1) for key, values in counts.items()}
    drawn = names[:_MOST_CLASSES]
    places = list(range(len(drawn)))
    traces = [
        _bars(places, drawn, shares[key][: len(drawn)], counts[key], label, colour)
        for key, label, colour in _KINDS
    ]
    rows: list[tuple[str | None, ...]] = [
        (name, f"{one:,}", f"{p:.3g}", f"{other:,}", f"{q:.3g}")
        for name, one, p, other, q in zip(
            names,
            counts["dataset"].tolist(),
            shares["dataset"].tolist(),
            counts["shown"].tolist(),
            shares["shown"].tolist(),
            strict=True,
        )
    ]
    return Chart(
        key="classes",
        title="Balance of classes",
        summary=_summary(names, counts) + _rest(len(names), shares),
        traces=traces,
        layout={
            "barmode": "group",
            "bargap": 0.35,
            "hovermode": "closest",
            "xaxis": {"title": {"text": "share, %"}, "rangemode": "tozero"},
            "yaxis": {
                "tickvals": places,
                "ticktext": [mark_text(shorten(name)) for name in drawn],
                "range": [len(drawn) - 0.4, -0.6],
                "showgrid": False,
            },
        },
        table=Table(("class", "in the dataset", "share, %", "asked for", "share, %"), rows),
        legend=tuple((colour, label) for _, label, colour in _KINDS),
        height_px=90 + max(28 * len(drawn), 80),
    )


def _rows(classes: ClassBalance) -> tuple[list[str], dict[str, NDArray[np.int64]]]:
    """Return names, and both counts, the largest class of the dataset first."""
    counts = {
        "dataset": np.array(classes.dataset, np.int64),
        "shown": np.array(classes.shown, np.int64),
    }
    order = np.argsort(-counts["dataset"], kind="stable")
    names = [classes.names[n] for n in order.tolist()]
    return names, {key: values[order] for key, values in counts.items()}


def _bars(
    places: list[int],
    names: list[str],
    shares: NDArray[np.float64],
    counts: NDArray[np.int64],
    label: str,
    colour: str,
) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": label,
        "y": places,
        "x": numbers(shares),
        "customdata": [
            f"{mark_text(name)}: {count:,} {label}"
            for name, count in zip(names, counts[: len(names)].tolist(), strict=True)
        ],
        "marker": {"color": f"@{colour}"},
        "hovertemplate": "%{customdata}, %{x:.3~g} %<extra></extra>",
    }


def _summary(names: list[str], counts: dict[str, NDArray[np.int64]]) -> str:
    if len(names) == 1:
        return f"1 class, {names[0]}."
    text = f"{len(names):,} classes. The largest is {_ratio(counts['dataset'])} the smallest in "
    text += "the dataset"
    if not counts["shown"].any():
        return f"{text}. No sample was asked for yet."
    text += f", and {_ratio(counts['shown'])} among the samples that were asked for."
    missed = np.flatnonzero((counts["dataset"] > 0) & (counts["shown"] == 0)).tolist()
    if not missed:
        return text
    listed = ", ".join(shorten(names[n]) for n in missed[:_MOST_NAMED])
    more = f", and {len(missed) - _MOST_NAMED:,} more" if len(missed) > _MOST_NAMED else ""
    were = "class was" if len(missed) == 1 else "classes were"
    return f"{text} {len(missed):,} {were} never asked for: {listed}{more}."


def _rest(num_classes: int, shares: dict[str, NDArray[np.float64]]) -> str:
    if num_classes <= _MOST_CLASSES:
        return ""
    rest = {
        key: percent(float(values[_MOST_CLASSES:].sum()) / 100) for key, values in shares.items()
    }
    return (
        f" The {_MOST_CLASSES} largest have bars; the other {num_classes - _MOST_CLASSES:,} are "
        f"{rest['dataset']} of the dataset, and {rest['shown']} of what was asked for."
    )


def _ratio(counts: NDArray[np.int64]) -> str:
    there = counts[counts > 0]
    return f"{amount(float(there.max() / there.min()))} times" if len(there) else "no times"


def worker_memory(rss_bytes: dict[int, int], backend: str) -> Chart:
    """Return the largest resident memory of each worker, or of the main process if it has none."""
    workers = sorted(rss_bytes)
    names = ["trainer" if backend == "serial" else f"worker {worker}" for worker in workers]
    megabytes = np.array([rss_bytes[worker] / 1e6 for worker in workers])
    summary = f"{size(max(rss_bytes.values()))} at most."
    if backend == "serial":
        summary += " There are no workers: it is the memory of the whole training."
    elif not traits_of(backend).shares_interpreter:
        summary += " Pages that workers share count for each of them."
    return Chart(
        key="rss",
        title="Resident memory of " + ("the main process" if backend == "serial" else "workers"),
        summary=summary,
        traces=[
            {
                "type": "bar",
                "orientation": "h",
                "y": list(range(len(names))),
                "x": numbers(megabytes),
                "customdata": names,
                "marker": {"color": "@read"},
                "hovertemplate": "%{customdata}: %{x:,.4~g} MB<extra></extra>",
            }
        ],
        layout={
            "bargap": 0.45,
            "hovermode": "closest",
            "xaxis": {"title": {"text": "largest so far, MB"}, "rangemode": "tozero"},
            "yaxis": {
                "tickvals": list(range(len(names))),
                "ticktext": names,
                "range": [max(len(names), 3) - 0.5, -0.5],
                "showgrid": False,
            },
        },
        table=Table(
            ("process", "MB"),
            [(name, f"{mb:,.1f}") for name, mb in zip(names, megabytes.tolist(), strict=True)],
        ),
        height_px=max(240, 90 + 26 * len(names)),
    )
