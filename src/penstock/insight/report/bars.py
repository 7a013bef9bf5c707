# SPDX-License-Identifier: Apache-2.0
"""Charts of bars: the balance of classes, and the memory of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.insight.figures import amount, percent, size
from penstock.insight.report.chart import Chart, Table, mark_text, numbers, shorten

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.insight.recording import ClassBalance

__all__ = ["balance", "worker_memory"]

_MOST_CLASSES: Final = 50
_KINDS: Final = (("dataset", "in the dataset", "own"), ("shown", "shown", "accent"))


def balance(classes: ClassBalance) -> Chart:
    """Return the share of each class in the dataset and among what was shown.

    The 50 largest classes have bars. The others, which together may be larger than any, have a
    sentence and a row of the table.
    """
    names, counts = _rows(classes)
    shares = {key: 100 * values / max(values.sum(), 1) for key, values in counts.items()}
    shown = names[:_MOST_CLASSES]
    places = list(range(len(shown)))
    traces = [
        _bars(places, shown, shares[key][: len(shown)], counts[key], label, colour)
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
        summary=_summary(classes) + _rest(names, shares),
        traces=traces,
        layout={
            "barmode": "group",
            "bargap": 0.35,
            "hovermode": "closest",
            "xaxis": {"title": {"text": "share, %"}, "rangemode": "tozero"},
            "yaxis": {
                "tickvals": places,
                "ticktext": [mark_text(shorten(name)) for name in shown],
                "range": [len(shown) - 0.4, -0.6],
                "showgrid": False,
            },
        },
        table=Table(("class", "in the dataset", "share, %", "shown", "share, %"), rows),
        legend=tuple((colour, label) for _, label, colour in _KINDS),
        height_px=90 + max(28 * len(shown), 80),
    )


def _rows(classes: ClassBalance) -> tuple[list[str], dict[str, NDArray[np.int64]]]:
    """Return names, and both counts, the largest class of the dataset first."""
    counts = {
        "dataset": np.array(classes.dataset, np.int64),
        "shown": np.array(classes.shown, np.int64),
    }
    order = np.argsort(-counts["dataset"], kind="stable")
    names = [classes.names[n] for n in order.tolist()]
    counts = {key: values[order] for key, values in counts.items()}
    if len(names) <= _MOST_CLASSES:
        return names, counts
    cut = _MOST_CLASSES
    together = f"{len(names) - cut:,} more"
    counts = {
        key: np.concatenate((values[:cut], [values[cut:].sum()])) for key, values in counts.items()
    }
    return [*names[:cut], together], counts


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


def _summary(classes: ClassBalance) -> str:
    dataset, shown = (_ratio(counts) for counts in (classes.dataset, classes.shown))
    missed = sum(
        one > 0 and not other for one, other in zip(classes.dataset, classes.shown, strict=True)
    )
    text = f"{len(classes.names):,} classes. The largest is {dataset} the smallest in the dataset"
    text += f", and {shown} among what was shown."
    return f"{text} {missed:,} classes were never shown." if missed else text


def _rest(names: list[str], shares: dict[str, NDArray[np.float64]]) -> str:
    if len(names) <= _MOST_CLASSES:
        return ""
    dataset, shown = (percent(float(shares[key][-1]) / 100) for key, _, _ in _KINDS)
    return (
        f" The {_MOST_CLASSES} largest have bars; {names[-1]} are {dataset} of the dataset, and "
        f"{shown} of what was shown."
    )


def _ratio(counts: list[int]) -> str:
    there = [count for count in counts if count]
    return f"{amount(max(there) / min(there))} times" if there else "no times"


def worker_memory(rss_bytes: dict[int, int], backend: str) -> Chart:
    """Return the largest resident memory that each worker has had."""
    workers = sorted(rss_bytes)
    names = ["this process" if backend == "serial" else f"worker {worker}" for worker in workers]
    megabytes = np.array([rss_bytes[worker] / 1e6 for worker in workers])
    summary = f"{size(max(rss_bytes.values()))} at most."
    if backend == "thread":
        summary += " Workers are threads: they all have the memory of the one process."
    elif backend == "process":
        summary += " Pages that workers share count for each of them."
    return Chart(
        key="rss",
        title="Resident memory of workers",
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
            ("worker", "MB"),
            [(name, f"{mb:,.1f}") for name, mb in zip(names, megabytes.tolist(), strict=True)],
        ),
        height_px=max(240, 90 + 26 * len(names)),
    )
