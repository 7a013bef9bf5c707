# SPDX-License-Identifier: Apache-2.0
"""The page put together: its head, what stands on it, and the scripts that draw its charts.

What may run is named by its hash in the page's own content security policy, and nothing may be
loaded: names of files and classes cannot become code, and the page cannot tell anyone of them.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import MissingExtraError
from penstock.insight.report import bars, over_time, sections
from penstock.insight.report.markup import data_block, element, table, to_html
from penstock.insight.report.series import series_of
from penstock.insight.report.timeline import timeline
from penstock.insight.segments import Columns
from penstock.optional import install_command
from penstock.whole_file import write_whole

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable
    from pathlib import Path

    from penstock.insight.recording import Recording
    from penstock.insight.report.chart import Chart
    from penstock.insight.report.markup import Element

__all__ = ["charts_of", "plotly_script", "write_report"]

_HEAD: Final = "Loader report"
_NAVIGATION: Final = (
    ("verdict", "Verdict"),
    ("over-time", "Over time"),
    ("classes", "Classes"),
    ("slowest", "Slowest"),
    ("failures", "Bad samples"),
    ("memory", "Memory"),
    ("changes", "Auto"),
    ("settings", "Settings"),
)


def write_report(recording: Recording, path: str | os.PathLike[str]) -> Path:
    """Write a run as one HTML page, which needs no network.

    Args:
        recording: The run; `loader.report(path)` makes one.
        path: Where to; an existing file is replaced.

    Returns:
        The path.

    Raises:
        MissingExtraError: Plotly is not installed.
        OSError: the file cannot be written.

    Concurrency:
        Any thread.
    """
    return write_whole(path, page(recording, plotly_script()))


def plotly_script() -> str:
    """Return the script of the library that draws the charts.

    Raises:
        MissingExtraError: Plotly is not installed.
    """
    try:
        offline = importlib.import_module("plotly.offline")
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "the report needs Plotly, which draws its charts and is not installed. Install it "
            f"with: {install_command('report')}"
        ) from error
    script: str = offline.get_plotlyjs()
    return script


def page(recording: Recording, plotly: str) -> str:
    """Return the page.

    Args:
        recording: The run.
        plotly: The script of the library that draws the charts.
    """
    charts = {chart.key: chart for chart in charts_of(recording)}
    drawn: list[dict[str, Any]] = [
        {
            "key": chart.key,
            "traces": chart.traces,
            "layout": {**chart.layout, "height": chart.height_px},
        }
        for chart in charts.values()
    ]
    scripts = [plotly, _file("page.js")] if drawn else [_file("page.js")]
    body = element(
        "body",
        element("a", "Skip to the verdict", href="#verdict", class_="skip"),
        _header(recording),
        element("main", *_content(recording, charts), id="main"),
        _footer(recording),
        data_block("charts", drawn),
        *(element("script", script) for script in scripts),
    )
    root = element("html", _head(scripts), body, lang="en")
    return f"<!DOCTYPE html>\n{to_html(root)}\n"


def charts_of(recording: Recording) -> list[Chart]:
    """Return the charts for which there is anything to draw."""
    columns = Columns(recording)
    stats = recording.stats
    charts: list[Chart] = []
    if len(columns):
        series = series_of(columns)
        if len(series.edges_s) > 1:
            charts = [
                over_time.throughput(recording, columns, series),
                over_time.waiting(recording, series),
                over_time.ready(recording, columns, series),
                over_time.stages(recording, series),
                timeline(columns, stats.backend),
            ]
            if stats.slot_bytes:
                charts.append(over_time.slots(recording, columns, series))
    if recording.classes is not None and recording.classes.names:
        charts.append(bars.balance(recording.classes))
    if any(stats.worker_rss_bytes.values()):
        charts.append(bars.worker_memory(stats.worker_rss_bytes, stats.backend))
    return charts


def _file(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _head(scripts: Iterable[str]) -> Element:
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{_HEAD} · Penstock"),
        element("style", _file("style.css")),
    )


def _sha256(script: str) -> str:
    # The browser hashes what it has parsed: with line feeds alone.
    text = script.replace("\r\n", "\n").replace("\r", "\n")
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _header(recording: Recording) -> Element:
    started = recording.machine.started
    return element(
        "header",
        element(
            "div",
            element("p", "Penstock", class_="brand"),
            element("h1", _HEAD),
            element(
                "p",
                "Run of ",
                element("time", sections.moment(started), datetime=started),
                class_="when",
            )
            if started
            else None,
            element(
                "button",
                "Dark",
                type="button",
                id="theme",
                aria_pressed="false",
                title="Dark colours on or off",
            ),
            class_="bar",
        ),
        element(
            "nav",
            element(
                "ul",
                *(element("li", element("a", name, href=f"#{key}")) for key, name in _NAVIGATION),
            ),
            aria_label="Sections",
        ),
    )


def _content(recording: Recording, charts: dict[str, Chart]) -> Iterable[Element | None]:
    yield sections.verdict(recording)
    yield sections.key_figures(recording)
    yield _kept(recording)
    yield element(
        "section",
        element("h2", "Over time"),
        *_figures(charts, "throughput"),
        _pair(charts, "waiting", "ready"),
        *_figures(charts, "stages", "timeline"),
        None if "throughput" in charts else _none("No batch was given yet."),
        id="over-time",
    )
    yield sections.epochs(recording)
    yield element(
        "section",
        element("h2", "Classes"),
        *_figures(charts, "classes"),
        None if "classes" in charts else _none("The dataset does not tell its classes."),
        id="classes",
    )
    yield sections.slowest(recording)
    yield sections.sources(recording)
    yield sections.failures(recording)
    yield element(
        "section",
        element("h2", "Memory"),
        _pair(charts, "slots", "rss"),
        sections.memory_that_is_not_drawn(recording, charts.keys()),
        id="memory",
    )
    yield sections.changes(recording)
    yield element("div", sections.settings(recording), sections.machine(recording), class_="pair")


def _kept(recording: Recording) -> Element | None:
    kept, given = len(recording.batches["step"]), recording.stats.run.batches
    if kept >= given:
        return None
    return _none(f"Charts over time show the last {kept:,} of {given:,} batches.")


def _none(text: str) -> Element:
    return element("p", text, class_="none")


def _figures(charts: dict[str, Chart], *keys: str) -> list[Element]:
    return [_figure(charts[key]) for key in keys if key in charts]


def _pair(charts: dict[str, Chart], *keys: str) -> Element | None:
    figures = _figures(charts, *keys)
    return element("div", *figures, class_="pair") if figures else None


def _figure(chart: Chart) -> Element:
    items = [element("li", sections.swatch(colour), label) for colour, label in chart.legend]
    return element(
        "figure",
        element(
            "figcaption", element("h3", chart.title), element("p", chart.summary, class_="summary")
        ),
        element("ul", *items, class_="legend") if items else None,
        element(
            "div",
            id=f"plot-{chart.key}",
            class_="plot",
            style=f"height:{chart.height_px}px",
            role="img",
            aria_label=f"{chart.title}. {chart.summary}",
        ),
        element(
            "noscript",
            element(
                "p",
                "The browser must run scripts to draw this chart; its data is in the table.",
                class_="none",
            ),
        ),
        element(
            "details",
            element("summary", "Data as a table"),
            table(chart.table, label=f"{chart.title}, data"),
        ),
        class_="card",
    )


def _footer(recording: Recording) -> Element:
    version = recording.machine.penstock
    made = f"Written by Penstock {version}" if version else "Written by Penstock"
    return element(
        "footer", element("p", f"{made}. Nothing on this page was loaded from a network.")
    )
