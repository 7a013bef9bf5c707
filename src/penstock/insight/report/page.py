# SPDX-License-Identifier: Apache-2.0
"""The page: verdict, key figures, charts over time, tables.

It runs no script, and its content security policy lets nothing run and nothing be loaded: names of
files and classes cannot become code.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING, Final

from penstock.insight.report.charts import WORKER_BANDS, legend, over_time
from penstock.insight.report.markup import element, to_html
from penstock.lines import amount, counted, duration, format_bytes, percent
from penstock.whole_file import write_whole

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from penstock.insight.plain import JSON
    from penstock.insight.recording import Recording
    from penstock.insight.report.markup import Element
    from penstock.insight.stats import Stats

_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
_MOST_ROWS: Final = 200
_TITLES: Final = {"cpu": "CPU", "gil": "GIL"}
_TONES: Final = {"trainer": "good", "nothing yet": "open", "unknown": "open"}


def write_report(recording: Recording, path: str | os.PathLike[str]) -> Path:
    """Write a run as one HTML page, which needs no network; returns the path."""
    return write_whole(path, page(recording))


def page(recording: Recording) -> str:
    """Return the page of a run."""
    machine = recording.machine
    started = machine.started.replace("T", " ").replace("+00:00", " UTC")
    style = (resources.files(__package__) / "style.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", "Loader report · Penstock"),
        element("style", style),
    )
    made = f"Written by Penstock {machine.penstock}. This page loads nothing from a network."
    body = element(
        "body",
        element(
            "header",
            element("h1", "Penstock loader report"),
            element("p", f"Run of {started}", class_="summary") if started else None,
        ),
        element("main", *_content(recording)),
        element("footer", element("p", made)),
    )
    return f"<!DOCTYPE html>\n{to_html(element('html', head, body, lang='en'))}\n"


def _content(recording: Recording) -> Iterator[Element | None]:
    kept, given = len(recording.batches["step"]), recording.stats.run.batches
    yield _verdict(recording.stats)
    yield _figures(recording)
    if kept < given:
        yield _note(f"Charts over time show the last {kept:,} of {given:,} batches.")
    yield from over_time(recording) or [_note("No batch was given yet.")]
    yield _epochs(recording)
    yield _slowest(recording)
    yield _failures(recording)
    if recording.stats.changes:
        yield _changes(recording)
    yield _settings(recording)


def _note(text: str) -> Element:
    return element("p", text, class_="summary")


def _verdict(stats: Stats) -> Element:
    """Return the verdict, and where the time of main process and workers went."""
    found, run = stats.verdict, stats.run
    return element(
        "section",
        element("h2", _TITLES.get(found.bottleneck, found.bottleneck.capitalize())),
        element("p", found.text, class_="answer"),
        element("p", found.remedy, class_="remedy") if found.remedy else None,
        element("p", stats.reading) if stats.reading else None,
        _strip("The main process's time over the run", {"own": run.consumer_s, "wait": run.wait_s}),
        _strip(
            "The time of making batches over the run",
            {name: getattr(run, f"{name}_s") for name in WORKER_BANDS},
        ),
        class_=f"card verdict {_TONES.get(found.bottleneck, 'act')}",
        id="verdict",
        data_bottleneck=found.bottleneck,
    )


def _strip(title: str, parts: dict[str, float]) -> Element | None:
    """Return a bar cut into parts, with its legend; None if there is no time to speak of."""
    whole = sum(parts.values())
    if whole <= 0:
        return None
    shares = {name: part / whole for name, part in parts.items() if part > 0}
    pieces = [
        element("span", style=f"flex-grow:{share:.5f};background:var(--{name})", data_part=name)
        for name, share in shares.items()
    ]
    return element(
        "div",
        element("h3", title),
        element("div", *pieces, class_="strip", aria_hidden="true"),
        legend({name: percent(share) for name, share in shares.items()}),
    )


def _figures(recording: Recording) -> Element:
    """Return the figures that one looks for first. `data-value` has each as it is in the stats."""
    stats = recording.stats
    run, window = stats.run, stats.window
    lately = f"last {counted(window.batches, 'batch')}: "
    memory = max(stats.worker_rss_bytes.values(), default=0)
    workers = f"{stats.backend}, {counted(stats.prefetch_factor, 'batch')} each"
    if stats.replaced_workers:
        workers += f", {stats.replaced_workers:,} died and were replaced"
    tiles: list[tuple[str, str, float, str, str]] = [
        ("samples_per_s", "Samples per second", run.samples_per_s, amount(run.samples_per_s),
         lately + amount(window.samples_per_s)),
        ("wait_share", "Share of waiting", run.wait_share, percent(run.wait_share),
         lately + percent(window.wait_share)),
        ("batches", "Batches", run.batches, f"{run.batches:,}",
         f"{counted(run.samples, 'sample')}, {format_bytes(run.bytes)}"),
        ("failed", "Bad samples", run.failed, f"{run.failed:,}", ""),
        ("num_workers", "Workers", stats.num_workers, f"{stats.num_workers:,}",
         workers if stats.num_workers else "in the main process's own thread"),
        ("slot_bytes", "Memory of batches", stats.slot_bytes, format_bytes(stats.slot_bytes),
         f"largest process: {format_bytes(memory)}" if memory else ""),
    ]  # fmt: skip
    cards = [
        element(
            "div",
            element("dt", label),
            element("dd", text, class_="value", data_figure=key, data_value=repr(value)),
            element("dd", below, class_="below") if below else None,
        )
        for key, label, value, text, below in tiles
    ]
    return element("dl", *cards, class_="tiles", id="figures")


def _epochs(recording: Recording) -> Element:
    rows = [
        (
            f"{part.epoch:,}", f"{part.span.batches:,}", f"{part.span.samples:,}",
            f"{part.span.failed:,}", amount(part.span.samples_per_s),
            amount(part.span.bytes_per_s / 1e6), percent(part.span.wait_share),
            f"{part.span.seconds:,.1f}",
        )
        for part in recording.epochs
    ]  # fmt: skip
    header = ("epoch", "batches", "samples", "bad", "samples/s", "MB/s", "waiting", "seconds")
    none = "No epoch has begun yet."
    return _table("epochs", "Epochs", header, rows, none, num_texts=0, newest=True)


def _slowest(recording: Recording) -> Element:
    rows = [
        (_key(s.index), s.name, duration(s.seconds), f"{s.epoch}", f"{s.step}", f"{s.worker_id}")
        for s in recording.stats.slowest
    ]
    header = ("sample", "name", "took", "epoch", "batch", "worker")
    none = "No sample was timed: they are read at once, or are too quick to be timed one by one."
    return _table("slowest", "Slowest samples", header, rows, none, num_texts=2)


def _failures(recording: Recording) -> Element:
    rows = [
        (_key(f.index), f.name, f.error, f"{f.epoch}", f"{f.step}", _key(f.worker_id))
        for f in recording.failures
    ]
    header = ("sample", "name", "error", "epoch", "batch", "worker")
    none = "No sample was bad."
    return _table("failures", "Bad samples", header, rows, none, num_texts=3, newest=True)


def _changes(recording: Recording) -> Element:
    rows = [
        (c.reason, f"{c.num_workers}", f"{c.prefetch_factor}", f"{c.epoch}", f"{c.step}")
        for c in recording.stats.changes
    ]
    header = ("why", "workers", "batches each", "epoch", "after batch")
    return _table("changes", 'What num_workers="auto" did', header, rows, "", newest=True)


def _settings(recording: Recording) -> Element:
    """Return the arguments of the loader, and where it ran."""
    machine = recording.machine
    rows = [(name, _shown(value)) for name, value in recording.settings.items()]
    rows += [
        ("cores that may be used", f"{machine.cores:g}"),
        ("Penstock", machine.penstock),
        ("Python", machine.python),
        ("NumPy", machine.numpy),
        ("PyTorch", machine.torch),
    ]
    return _table("settings", "Settings and machine", ("setting", "value"), rows, "", num_texts=2)


def _shown(value: JSON) -> str:
    if isinstance(value, dict):  # a policy
        return ", ".join(f"{name}: {_shown(item)}" for name, item in value.items())
    if value is None:
        return "not set"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _key(index: object) -> str | None:
    return None if index is None else f"{index}"


def _table(
    key: str,
    title: str,
    header: tuple[str, ...],
    rows: Sequence[tuple[str | None, ...]],
    none: str,
    *,
    num_texts: int = 1,
    newest: bool = False,
) -> Element:
    """Return a table with its heading: of many rows the first, or the last if these are newest.

    The first `num_texts` columns are texts, the others numbers, aligned on the right.
    """
    if not rows:
        return element("section", element("h2", title), _note(none), class_="card", id=key)
    shown = rows[-_MOST_ROWS:] if newest else rows[:_MOST_ROWS]
    kinds = ["text"] * num_texts + ["number"] * (len(header) - num_texts)
    head = [
        element("th", name, scope="col", class_=kind)
        for name, kind in zip(header, kinds, strict=True)
    ]
    lines = [
        element(
            "tr", *(element("td", cell or "", class_=k) for cell, k in zip(row, kinds, strict=True))
        )
        for row in shown
    ]
    whole = element(
        "table", element("thead", element("tr", *head)), element("tbody", *lines), id=f"table-{key}"
    )
    which = f"The {'last' if newest else 'first'} {_MOST_ROWS} of {len(rows):,}."
    return element(
        "section",
        element("h2", title),
        element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=title),
        _note(which) if len(rows) > _MOST_ROWS else None,
        class_="card",
        id=key,
    )
