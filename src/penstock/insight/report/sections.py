# SPDX-License-Identifier: Apache-2.0
"""The parts of the page that are no charts: verdict, key figures, tables."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from penstock.engine.backends import traits_of
from penstock.insight.report.chart import STAGE_LABELS, Table, lasting, waiting_lately
from penstock.insight.report.markup import element, table
from penstock.insight.units import amount, duration, percent, size
from penstock.plural import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from penstock.insight.plain import JSON
    from penstock.insight.recording import Recording
    from penstock.insight.report.markup import Element
    from penstock.insight.stats import Span, Stats

__all__ = [
    "changes",
    "epochs",
    "failures",
    "key_figures",
    "machine",
    "memory_that_is_not_drawn",
    "moment",
    "settings",
    "slowest",
    "sources",
    "verdict",
]

_MOST_ROWS: Final = 200
_UNKNOWN: Final = "\N{EN DASH}"
_KINDS: Final = {
    "nothing yet": "Too early to tell",
    "trainer": "The main process is the limit",
    "workers": "Too few workers",
    "cpu": "Every core is taken",
    "storage": "Storage is the limit",
    "slow source": "A slow source",
    "collate": "Collating is the limit",
    "transport": "Sending is the limit",
    "bursts": "Bursts",
    "contention": "Workers take CPU from the main process",
    "start": "The start of epochs",
    "gil": "The interpreter's lock",
    "unknown": "The cause is not known",
}
# Arguments that say nothing of a loader without workers.
_OF_WORKERS: Final = ("backend", "prefetch_factor", "persistent_workers", "in_order")
_TONES: Final = {"trainer": "good", "nothing yet": "open", "unknown": "open"}


def verdict(recording: Recording) -> Element:
    """Return the verdict, and where the time of main process and workers went."""
    found = recording.stats.verdict
    run, window = recording.stats.run, recording.stats.window
    gain = found.expected_gain
    return element(
        "section",
        element("h2", _KINDS.get(found.bottleneck, found.bottleneck), class_="kind"),
        element("p", found.text, class_="answer", data_figure="verdict"),
        element("p", found.remedy, class_="remedy") if found.remedy else None,
        element(
            "p",
            "Expected gain ",
            element("strong", f"{gain:.2f}\N{MULTIPLICATION SIGN}"),
            class_="gain",
        )
        if gain is not None and gain >= 1.005
        else None,
        element("p", f"Judged by {_judged_by(recording.stats)}.", class_="basis")
        if window.batches
        else None,
        _strip("The main process's time", {"own": run.consumer_s, "wait": run.wait_s}),
        _strip(
            "The time of making batches"
            if recording.stats.backend == "serial"
            else "The workers' time",
            {
                name: getattr(run, f"{name}_s")
                for name in ("read", "compute", "collate", "send", "idle")
            },
        ),
        class_=f"verdict {_TONES.get(found.bottleneck, 'act')}",
        id="verdict",
        data_bottleneck=found.bottleneck,
    )


def _judged_by(stats: Stats) -> str:
    if stats.verdict.bottleneck == "start":
        return f"the {counted(stats.run.starts, 'first batch')} of epochs"
    without = ", without the first one of each epoch" if stats.window.starts else ""
    return f"the last {counted(stats.window.batches, 'batch')}{without}"


def _strip(title: str, parts: dict[str, float]) -> Element | None:
    """Return a bar cut into parts, with its legend; None if there is no time to speak of."""
    whole = sum(parts.values())
    if whole <= 0:
        return None
    there = {name: part / whole for name, part in parts.items() if part > 0}
    pieces = [
        element("span", style=f"flex-grow:{share:.5f};background:var(--{name})", data_part=name)
        for name, share in there.items()
    ]
    items = [
        element("li", swatch(name), f"{STAGE_LABELS[name]} ", element("b", percent(share)))
        for name, share in there.items()
    ]
    return element(
        "div",
        element("h3", f"{title} over the run"),
        element("div", *pieces, class_="strip", aria_hidden="true"),
        element("ul", *items, class_="legend"),
    )


def swatch(colour: str) -> Element:
    """Return a small square of a colour of the palette."""
    return element("i", style=f"background:var(--{colour})", aria_hidden="true")


def key_figures(recording: Recording) -> Element:
    """Return the figures that one looks for first. `data-value` has each as it is in the stats."""
    stats = recording.stats
    run, window = stats.run, stats.window
    given = f"{counted(run.samples, 'sample')} given" if run.samples else ""
    last = f"last {counted(window.batches, 'batch')}: " if window.batches else ""
    rss = max(stats.worker_rss_bytes.values(), default=0)
    tiles = (
        (
            "samples_per_s",
            "Samples per second",
            run.samples_per_s,
            amount(run.samples_per_s) if run.batches else _UNKNOWN,
            f"{last}{amount(window.samples_per_s)}" if last else "",
        ),
        (
            "wait_share",
            "Share of waiting",
            run.wait_share,
            percent(run.wait_share) if run.batches else _UNKNOWN,
            f"{last}{waiting_lately(stats)}" if last else "",
        ),
        (
            "epochs",
            "Epochs",
            len(recording.epochs),
            _num_epochs(recording),
            f"{lasting(run.seconds)} of training" if run.seconds else "",
        ),
        (
            "batches",
            "Batches",
            run.batches,
            f"{run.batches:,}",
            _given(run),
        ),
        ("failed", "Bad samples", run.failed, f"{run.failed:,}", given),
        (
            "num_workers",
            "Workers",
            stats.num_workers,
            f"{stats.num_workers:,}",
            f"{stats.backend}, {counted(stats.prefetch_factor, 'batch')} each{_replaced(stats)}"
            if stats.num_workers
            else "in the main process's own thread",
        ),
        (
            "slot_bytes",
            "Memory of batches",
            stats.slot_bytes,
            size(stats.slot_bytes) if stats.slot_bytes else _UNKNOWN,
            f"{'trainer' if stats.backend == 'serial' else 'largest worker'}: {size(rss)}"
            if rss
            else "",
        ),
    )
    return element("dl", *(_tile(*tile) for tile in tiles), class_="tiles", id="figures")


def _given(run: Span) -> str:
    text = counted(run.samples, "sample") if run.samples else ""
    return f"{text}, {size(run.bytes)}" if run.bytes else text


def _replaced(stats: Stats) -> str:
    number = stats.replaced_workers
    return f", {number:,} died and were replaced" if number else ""


def _num_epochs(recording: Recording) -> str:
    """Return how many epochs there were; the oldest of many are not kept."""
    kept = recording.epochs
    are_all = sum(part.span.batches for part in kept) >= recording.stats.run.batches
    return f"{len(kept):,}" if are_all else f"more than {len(kept):,}"


def _tile(key: str, label: str, value: float, text: str, below: str) -> Element:
    return element(
        "div",
        element("dt", label),
        element("dd", text, class_="value", data_figure=key, data_value=repr(value)),
        element("dd", below, class_="below") if below else None,
    )


def epochs(recording: Recording) -> Element:
    """Return the sums of each epoch."""
    rows = [(f"{part.epoch:,}", *_span_cells(part.span)) for part in recording.epochs]
    header = ("epoch", "batches", "samples", "bad", "samples/s", "MB/s", "waiting", "seconds")
    return _listed(
        "epochs", "Epochs", header, rows, "No epoch has begun yet.", num_texts=0, newest=True
    )


def _span_cells(span: Span) -> tuple[str, ...]:
    return (
        f"{span.batches:,}",
        f"{span.samples:,}",
        f"{span.failed:,}",
        amount(span.samples_per_s),
        amount(span.bytes_per_s / 1e6),
        percent(span.wait_share),
        f"{span.seconds:,.1f}",
    )


def slowest(recording: Recording) -> Element:
    """Return the samples that took longest."""
    has_workers = recording.stats.backend != "serial"
    rows = [
        (
            _key(s.index),
            s.name,
            duration(s.seconds),
            f"{s.epoch}",
            f"{s.step}",
            f"{s.worker_id}" if has_workers else None,
        )
        for s in recording.stats.slowest
    ]
    header = ("sample", "name", "took", "epoch", "batch", "worker")
    none = "No sample was timed: they are read at once, or are too quick to be timed one by one."
    return _listed("slowest", "Slowest samples", header, rows, none, num_texts=2)


def sources(recording: Recording) -> Element | None:
    """Return what samples of each part of the dataset cost; None if it has no parts."""
    if not recording.stats.sources:
        return None
    rows = [(s.name, f"{s.samples:,}", duration(s.mean_s)) for s in recording.stats.sources]
    header = ("part", "samples", "each took")
    return _listed("sources", "Parts of the dataset", header, rows, "")


def failures(recording: Recording) -> Element:
    """Return the bad samples."""
    rows = [
        (
            _key(f.index),
            _with_partner(f.name, f.partner_of),
            f.error,
            f"{f.epoch}",
            f"{f.step}",
            None if f.worker_id is None else f"{f.worker_id}",
        )
        for f in recording.failures
    ]
    header = ("sample", "name", "error", "epoch", "batch", "worker")
    return _listed(
        "failures", "Bad samples", header, rows, "No sample was bad.", num_texts=3, newest=True
    )


def _with_partner(name: str | None, partner_of: int | str | None) -> str | None:
    if partner_of is None:
        return name
    return f"{name or ''} (a partner of sample {partner_of})".lstrip()


def changes(recording: Recording) -> Element:
    """Return what "auto" did."""
    rows = [
        (c.reason, f"{c.num_workers}", f"{c.prefetch_factor}", f"{c.epoch}", f"{c.step}")
        for c in recording.stats.changes
    ]
    header = ("why", "workers", "batches each", "epoch", "after batch")
    is_auto = recording.settings.get("num_workers") == "auto"
    found = "has found nothing to improve" if is_auto else "was not asked for"
    none = f'Nothing was changed: num_workers="auto" {found}.'
    return _listed("changes", 'What num_workers="auto" did', header, rows, none, newest=True)


def memory_that_is_not_drawn(recording: Recording, drawn: Collection[str]) -> Element | None:
    """Return a sentence where there is no chart of processes' memory; None where there is."""
    if "rss" in drawn:
        return None
    text = "Nothing is known of the memory of workers yet."
    if traits_of(recording.stats.backend).shares_interpreter:
        text = "Workers are threads, so their memory is that of the main process."
    elif recording.stats.backend == "serial":
        text = "There are no workers: batches are made in the main process's own thread."
    return element("p", text, class_="none")


def settings(recording: Recording) -> Element:
    """Return the arguments of the loader, but for those that change nothing of it."""
    given, stats = recording.settings, recording.stats
    num_workers = given.get("num_workers")
    idle = () if num_workers else _OF_WORKERS
    now = {"prefetch_factor": stats.prefetch_factor, "num_workers": stats.num_workers}
    rows = [
        (
            name,
            _shown(value)
            + (f", {now[name]} now" if value in (None, "auto") and name in now else ""),
        )
        for name, value in given.items()
        if name not in idle
    ]
    return _listed(
        "settings", "Settings", ("setting", "value"), rows, "No settings are known.", num_texts=2
    )


def machine(recording: Recording) -> Element:
    """Return where it ran."""
    where = recording.machine
    told = (
        ("cores that may be used", f"{where.cores:g}" if where.cores else None),
        ("started", moment(where.started)),
        ("Penstock", where.penstock),
        ("Python", where.python),
        ("NumPy", where.numpy),
        ("PyTorch", where.torch),
    )
    rows = [(name, text) for name, text in told if text]
    return _listed(
        "machine",
        "Machine",
        ("fact", "value"),
        rows,
        "Nothing is known of the machine.",
        num_texts=2,
    )


def moment(iso: str) -> str:
    """Return a moment as people write it.

    Example:
        >>> moment("2026-03-01T09:30:00+00:00")
        '2026-03-01 09:30:00 UTC'
    """
    return iso.replace("T", " ").replace("+00:00", " UTC")


def _shown(value: JSON) -> str:
    if value is None:
        return "not set"
    if isinstance(value, dict):  # a policy
        return ", ".join(f"{name}: {_shown(item)}" for name, item in value.items())
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _key(index: object) -> str | None:
    return None if index is None else f"{index}"


def _listed(
    key: str,
    title: str,
    header: tuple[str, ...],
    rows: Sequence[tuple[str | None, ...]],
    none: str,
    *,
    num_texts: int = 1,
    newest: bool = False,
) -> Element:
    """Return a table with its heading: of many rows the first, or the last if these are newest."""
    content: Iterable[Element]
    if rows:
        shown_rows = rows[-_MOST_ROWS:] if newest else rows[:_MOST_ROWS]
        shown = Table(header, list(shown_rows), num_texts)
        content = [table(shown, label=title, id=f"table-{key}", data_rows=len(rows))]
        if len(rows) > _MOST_ROWS:
            which = "last" if newest else "first"
            text = f"The {which} {_MOST_ROWS} of {len(rows):,}."
            content.append(element("p", text, class_="none"))
    else:
        content = [element("p", none, class_="none")]
    return element("section", element("h2", title), *content, class_="card", id=key)
