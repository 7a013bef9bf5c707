# SPDX-License-Identifier: Apache-2.0
"""Writes docs/benchmarks.md and its charts from results/peers, the contenders and remarks.md.

    python benchmarks/peers/page.py            # writes page and charts
    python benchmarks/peers/page.py --check    # exit status 1 if one of them is not up to date

All figures, ratios and the list of loaders ahead of Penstock are computed from the results. The
reasons cannot be computed: remarks.md has them, under the name of each work.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

sys.path.insert(0, str(Path(__file__).parents[1]))

from chart import Bar, Panel, draw
from contender import MOST_SAID, SHARED_WORKS, Contender, contenders
from works import BATCH_SHAPE, size_of

__all__ = ["load_results", "main", "render"]

HERE: Final = Path(__file__).parent
PAGE: Final = HERE.parents[1] / "docs" / "benchmarks.md"
CHARTS: Final = PAGE.parent / "assets" / "benchmarks"
RESULTS: Final = HERE.parent / "results" / "peers"
_REMARKS: Final = HERE / "remarks.md"
_NO_WORKER: Final = "it has no worker process"
_OWN: Final = "penstock"
_TORCH: Final = ("torch (simplejpeg, OpenCV)",)
_TORCH_ROWS: Final = (*_TORCH, "torch (batch sampler)")
_SAME_DECODER: Final = "torch (Penstock's ImagePipeline)"
# Until it is measured; then the results say it.
_PHOTOS: Final = {"num_photos": 1778, "photos_mb": 45.0}
_BATCH_GB: Final = 4 * BATCH_SHAPE[0] * BATCH_SHAPE[1] * BATCH_SHAPE[2] * BATCH_SHAPE[3] / 1e9

Entry = Mapping[str, Any]  # what compare.py has saved of one contender
Results = Mapping[str, Mapping[str, Entry]]  # work -> contender -> entry


# ---------------------------------------------------------------- figures


@dataclass(frozen=True, slots=True)
class Figure:
    """A column of a table.

    Attributes:
        title: Its heading.
        values: Entry -> one number per round; empty where there is none.
        lower: Whether less is better; None if it is no matter of better.
        digits: Significant digits.
    """

    title: str
    values: Callable[[Entry], list[float]]
    lower: bool | None = None
    digits: int = 3

    def median(self, entry: Entry) -> float | None:
        """Return the median, or None."""
        values = self.values(entry)
        return statistics.median(values) if values else None

    def cell(self, entry: Entry, *, span: bool = False) -> str:
        """Return the median, and with `span` the least and the greatest."""
        values = self.values(entry)
        if not values:
            return ""
        text = number(statistics.median(values), self.digits)
        if not span:
            return text
        if len(values) == 1:
            return f"{text} (n=1)"
        return f"{text} ({number(min(values), self.digits)} - {number(max(values), self.digits)})"


@dataclass(frozen=True, slots=True)
class Section:
    """A work on the page.

    Attributes:
        work: Its name.
        title: Its heading.
        question: What is done; in braces what the size of the work says.
        not_shown: What it does not show.
        figures: Columns; the table is sorted by the first.
        baseline: Work and contenders; the first figure is divided by that of the best of them.
        has_resizing: Whether images are resized, with antialiasing or without.
    """

    work: str
    title: str
    question: str
    not_shown: str
    figures: tuple[Figure, ...] = ()
    baseline: tuple[str, tuple[str, ...]] | None = None
    has_resizing: bool = False


def number(value: float, digits: int = 3) -> str:
    """Return a number with so many significant digits, thousands separated, never as 1e+05.

    With `digits=0` it is a whole number, all of whose digits count.
    """
    if value == 0 or digits == 0:
        return f"{value:,.0f}"
    places = digits - 1 - _exponent(value)
    return f"{round(value, places):,.{max(places, 0)}f}"


def _exponent(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])


def _of(run: str, take: Callable[[Entry], float | None]) -> Callable[[Entry], list[float]]:
    def values(entry: Entry) -> list[float]:
        taken = [take(reading) for reading in entry["runs"].get(run, ())]
        return [value for value in taken if value is not None]

    return values


def _value(run: str, scale: float = 1.0) -> Callable[[Entry], list[float]]:
    return _of(run, lambda reading: reading["value"] * scale)


def _more(run: str, name: str, scale: float = 1.0) -> Callable[[Entry], list[float]]:
    def take(reading: Entry) -> float | None:
        value = reading["more"].get(name)
        return None if value is None else value * scale

    return _of(run, take)


def _peak(entry: Entry) -> list[float]:
    return [] if entry["peak_mb"] is None else [entry["peak_mb"]]


_PEAK: Final = Figure("peak MB", _peak, lower=True)
_WORKS: Final = (
    Section(
        "photos",
        "JPEG files to batches",
        "{num_photos:,} JPEG files of {photo_kb:.0f} kB on average (clothes and blood cells, 400 "
        "to 900 px; each photo under two names). Each file has its own class folder, so that its "
        "label identifies it. The work: random resized crop to 224 x 224, horizontal flip with "
        "probability 0.5, ImageNet's mean and standard deviation; float32, channels first, "
        "shuffled batches of 64. The last, smaller batch is kept.",
        "Decoding on a GPU, which is what DALI is made for. Equal pixels: each loader resizes in "
        "its own way, with antialiasing or without. Long epochs: an epoch has only {num_batches} "
        "batches, and a loader that starts anew for each epoch pays for it more often.",
        (
            Figure("images/s", _value("photos")),
            Figure("CPU ms/image", _more("photos", "CPU ms/sample"), lower=True),
            _PEAK,
        ),
        ("photos", _TORCH),
        has_resizing=True,
    ),
    Section(
        "packed",
        "The same photos from packed files",
        "The same photos, unchanged, and their labels, packed by each loader's own tool into its "
        "own format. The output is the same as above.",
        "Cold disks, networks and millions of files, for which these formats are made: here, all "
        "files lie in the page cache. Formats that store decoded or shrunk images. Equal memory "
        "figures: a packed file counts if it is mapped (LMDB, Arrow), not if it is read.",
        (
            Figure("images/s", _value("packed")),
            Figure("CPU ms/image", _more("packed", "CPU ms/sample"), lower=True),
            _PEAK,
        ),
        ("photos", _TORCH),
        has_resizing=True,
    ),
    Section(
        "pack",
        "Packing",
        "The time to pack the photos once, and the size of the result. The files have "
        "{photos_mb:.0f} MB.",
        "Data that does not fit in memory; shards; parallel packing on more than two cores.",
        (
            Figure("s", _value("pack"), lower=True),
            Figure("CPU s", _of("pack", lambda reading: reading["cpu_s"]), lower=True),
            Figure("MB on disk", _more("pack", "MB"), lower=True),
        ),
    ),
    Section(
        "tiny",
        "Tiny samples in memory",
        "{num_samples:,} rows of 32 float32 numbers in memory, in shuffled batches of "
        "{batch_size:,}; every row once per epoch.",
        "Samples that take time to make. These figures are the overhead per sample, which "
        "loaders that read whole batches do not have.",
        (
            Figure("M rows/s", _value("tiny", 1e-6)),
            Figure("CPU µs/row", _more("tiny", "CPU ms/sample", 1e3), lower=True),
        ),
        ("tiny", _TORCH_ROWS),
    ),
    Section(
        "transport",
        "Large batches, transport only",
        "{num_samples:,} ready batches of 38.5 MB, float32 (64, 3, 224, 224): how many GB reach "
        "the loop per second? Nothing is computed. Threads pass a reference; processes have to "
        "move the data.",
        "The gain where workers decode: there, transport is a small part of the time.",
        (
            Figure("GB/s", _value("transport", _BATCH_GB)),
            Figure("CPU ms/batch", _more("transport", "CPU ms/sample"), lower=True),
        ),
        ("transport", _TORCH),
    ),
    Section(
        "first",
        "The first batch",
        "Seconds from the call that makes the loader to its first batch of photos, in a fresh "
        "process. Imports come before; they have their own column. A loader that keeps an index of "
        "the files makes it here. A loader that reads only its packed format starts from packed "
        "files.",
        "The first start after boot, with a cold disk. Start methods other than each loader's "
        "default.",
        (
            Figure("s", _value("first"), lower=True),
            Figure("import s", _of("first", lambda reading: reading["import_s"]), lower=True),
            Figure("CPU s", _of("first", lambda reading: reading["cpu_s"]), lower=True),
        ),
        ("first", _TORCH),
    ),
    Section(
        "paths",
        "Memory with millions of paths",
        "A dataset holds {num_samples:,} paths of 58 characters, in the form that each loader's "
        "documentation recommends. {num_workers} workers read {num_reads:,} of them, shuffled. The "
        "figure is the peak memory of all processes together, less the memory before the dataset "
        "was made.",
        "Time. Memory for decoding. A longer epoch: in forked workers, a list of str grows "
        "until each worker has its own copy (`benchmarks/memory.py`).",
        (
            Figure("peak MB", _value("paths"), lower=True),
            Figure("MB up to the first batch", _more("paths", "to first batch MB"), lower=True),
            Figure("MB while reading", _more("paths", "while reading MB"), lower=True),
        ),
        ("paths", _TORCH),
    ),
    Section(
        "resume",
        "Resuming in the middle of an epoch",
        "{num_samples:,} rows in shuffled batches of {batch_size}. A run stops after {num_reads:,} "
        "batches and saves its position. A fresh process makes the loader, restores the position, "
        "and takes the next batch; the figure is the time from restoring to that batch. It has to "
        "be the batch that an uninterrupted run gives next; a loader that gives another one comes "
        "last in the table. Some loaders save no position. If the settings below say that the "
        "benchmark counts and skips batches for them, the state is that counter.",
        "Datasets that are slow to read, where replaying batches costs more than here.",
        (
            Figure("s", _value("resume-restore"), lower=True),
            Figure("start without resuming, s", _more("resume-save", "first batch s"), lower=True),
            Figure("CPU s", _of("resume-restore", lambda reading: reading["cpu_s"]), lower=True),
            Figure("state bytes", _value("resume-save"), lower=True, digits=0),
            Figure("µs per batch before the stop", _more("resume-save", "us/batch"), lower=True),
        ),
        ("resume", ("torchdata StatefulDataLoader", "torchdata nodes (threads)")),
    ),
    Section(
        "killed",
        "A worker is killed",
        "After the third batch, the worker process that has loaded most gets SIGKILL, the signal "
        "of the out-of-memory killer. A run that gives nothing for 30 s counts as hung. In the "
        "second column, the loader's own setting to survive faults is on, where it has one.",
        "How often each outcome occurs: it depends on the moment, and each case was run once.",
    ),
    Section(
        "corrupt",
        "A corrupt photo",
        "One file among the photos begins as a JPEG file and continues with noise. In the second "
        "column, the loader's own setting to survive bad samples is on, where it has one.",
        "Truncated files, which some decoders fill with grey and others refuse. Many bad samples.",
    ),
)
_BY_NAME: Final = {section.work: section for section in _WORKS}
_WORST: Final = 8  # uses in which the drop-in gains least
_NOISE: Final = 0.95  # two equal loaders, measured
_OUTCOMES: Final = ("killed", "corrupt")
# The panels of the overview: what most readers come for.
_OVERVIEW: Final = {
    "photos": "Photos to batches",
    "transport": "Large batches from worker processes",
    "tiny": "Tiny samples",
    "paths": "Memory of 5 million paths",
}
_MOST_BARS: Final = 6
_WITH_PHOTOS: Final = ("photos", "pack", "packed", "first", *_OUTCOMES)


# ---------------------------------------------------------------- the page


def render(
    results: Results,
    known: Mapping[str, Contender],
    not_installed: Mapping[str, Mapping[str, Any]],
    remarks: Mapping[str, str],
) -> str:
    """Return the page.

    Args:
        results: What compare.py has saved.
        known: All contenders.
        not_installed: Environment -> date and reason.
        remarks: Work -> what is to be said with the figures.
    """
    results = {  # without those of a contender that there is no longer
        work: {name: entry for name, entry in entries.items() if name in known}
        for work, entries in results.items()
    }
    parts = [_head(results)]
    parts += [_summary(results)] if results else []
    parts += [_section(section, results, known, remarks) for section in _WORKS]
    parts += [_settings(results, known), _left_out(known, not_installed)]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _head(results: Results) -> str:
    measured = (
        _machines(results)
        if results
        else "**Nothing has been measured yet**: `make peers-environments peers` does it."
    )
    least_s = size_of("photos", smoke=False).least_s
    return f"""\
<!-- benchmarks/peers/page.py writes this page; remarks.md beside it has what it cannot compute -->

# Side by side with other loaders

Every loader does the same work, in its own virtual environment, with the settings that its
documentation recommends.

{measured}

How it is measured:

- **The same work.** Files, output and consumer are the same. The consumer reads one number of every
  4 KiB of a batch and drops the batch. There are 2 workers (processes or threads), unless the
  text says otherwise. Loaders with their own image operations use these. The others decode with
  simplejpeg (libjpeg-turbo) and resize with OpenCV, all in the same function. In tables without
  decoding, the row "torch" is the loader "torch (simplejpeg, OpenCV)".
- **Checks.** The first two epochs are not timed. They check shape, dtype, memory layout, value
  range and shuffling; that every photo, row or numbered batch comes exactly once; that the colours
  of an image are those of its photo and change from epoch to epoch. Timed epochs check only that
  every photo, row or batch comes exactly once.
- **Time.** At least two whole epochs are timed, for at least {least_s:.0f} s. The untimed epoch
  before them is read at the same speed, so that queues are as full as usual when timing starts.
  Loaders run in turn (A B C, A B C), each in a fresh process, so that a slow minute affects all.
  Tables give the median, with minimum and maximum in brackets. "n=1" marks a single run.
  {_rounds(results)} A loader that fails is not run again.
- **CPU** is the CPU time of the whole process tree, with a loader's daemons. **Memory** is the peak
  of the process tree, in a separate run without checks. Each shared page counts once (PSS). A file
  counts if it is mapped into memory, not if it is read.
- A column "x NAME" divides the median of the first column by that of the loader NAME. Figures from
  another machine or of another size are not compared.

Not measured: more than two cores, training at the same time, photos of many megapixels, a cold
disk, a network (all files lie in the page cache), uint8 images that a GPU normalises, long epochs.
Delivery to a GPU is measured apart: [batches on the device](guide/device.md#measured-on-an-h100).

`backend="process"` is Penstock's default and takes any dataset. Threads are for work that releases
the GIL, such as decoding, and for large batches: [How many workers?](guide/choosing-workers.md)

`benchmarks/peers/README.md` says how to run these benchmarks and how to add a loader."""


def _rounds(results: Results) -> str:
    """Return how many rounds there were, where there were more than one."""
    counts = {
        len(readings)
        for entries in results.values()
        for entry in entries.values()
        for readings in entry["runs"].values()
    } - {1}
    if not counts:
        return ""
    least, most = min(counts), max(counts)
    return f"The others have {least if least == most else f'{least} to {most}'} runs."


def _machines(results: Results) -> str:
    facts = [entry["machine"] for entries in results.values() for entry in entries.values()]
    dates = sorted({fact["date"] for fact in facts})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    machines = sorted(
        {
            f"{fact['cores']} cores of an {fact['processor']}, {fact['memory_gib']} GiB, "
            f"{fact['system']}"
            for fact in facts
        }
    )
    commits = sorted({fact["commit"] for fact in facts})
    of = ", ".join(
        f"{commit.removesuffix('-dirty')} **with uncommitted changes**"
        if commit.endswith("-dirty")
        else commit
        for commit in commits
    )
    return f"Measured {when} on {'; '.join(machines)}. Penstock's commits: {of}."


def _are_alike(one: Entry, other: Entry) -> bool:
    """Return whether two entries come of one machine and one size, and can be compared."""
    machines = [
        {name: fact for name, fact in entry["machine"].items() if name not in ("date", "commit")}
        for entry in (one, other)
    ]
    return machines[0] == machines[1] and one["size"] == other["size"]


def _is_right(entry: Entry) -> bool:
    """Return whether a contender went on with the right batch; True where it was not to go on."""
    return all(reading["right"] for reading in entry["runs"].get("resume-restore", ()))


def _summary(results: Results) -> str:
    rows = [
        row
        for section in _WORKS
        for figure in section.figures
        if (row := _ahead(section, figure, results.get(section.work, {})))
    ]
    if not rows:
        return ""
    table = _markdown([["", "measure", "Penstock's best", "ahead of it"], *rows])
    return (
        "## Where others are ahead\n\nThis table compares the medians of the tables below. A star "
        "marks a figure whose range overlaps Penstock's. In every other measure Penstock is "
        f"first.\n\n{table}"
    )


def _is_own(name: str) -> bool:
    return name.split(" ")[0] == _OWN


def _ahead(section: Section, figure: Figure, entries: Mapping[str, Entry]) -> list[str]:
    """Return the row of the summary, or nothing if Penstock is first or has no such figure."""
    order = _ranked(figure, entries)
    best = next((name for name in order if _is_own(name)), None)
    if best is None:
        return []
    own = figure.values(entries[best])
    names = []
    for name in order[: order.index(best)]:
        if not _are_alike(entries[name], entries[best]):
            continue
        values = figure.values(entries[name])
        overlap = min(values) <= max(own) and min(own) <= max(values)
        shown = f"{_plain(name, section.work)} {figure.cell(entries[name])}"
        names.append(f"{shown}{'*' if overlap else ''}")
    if not names:
        return []
    return [
        section.title,
        figure.title,
        f"{figure.cell(entries[best])}, {best}",
        ", ".join(names),
    ]


def _ranked(figure: Figure, entries: Mapping[str, Entry]) -> list[str]:
    """Return those that have the figure and went on rightly, the best first."""
    sign = 1 if figure.lower else -1
    found = sorted(
        (sign * median, not _is_own(name), name)  # who is as good is not ahead
        for name, entry in entries.items()
        if (median := figure.median(entry)) is not None and _is_right(entry)
    )
    return [name for _, _, name in found]


# ---------------------------------------------------------------- charts


def charts(results: Results) -> dict[str, str]:
    """Return name of the file -> SVG: one for each work with figures, and `overview.svg`."""
    drawn = {}
    for section in _WORKS:
        if section.figures and (bars := _bars(section, results.get(section.work, {}))):
            panel = Panel(section.title, _unit(section), tuple(bars))
            drawn[f"{section.work}.svg"] = draw([panel], _label(panel))
    panels = [
        Panel(title, _unit(_BY_NAME[work]), tuple(bars))
        for work, title in _OVERVIEW.items()
        if (bars := _best_of_each(_bars(_BY_NAME[work], results.get(work, {})), work))
    ]
    if panels:
        label = "Penstock, torch and the best of the others. " + " ".join(map(_label, panels))
        drawn["overview.svg"] = draw(panels, label, num_columns=2)
    return drawn


def _bars(section: Section, entries: Mapping[str, Entry]) -> list[Bar]:
    """Return the bars of a work's first figure, of one machine and one size."""
    figure = section.figures[0]
    order = _ranked(figure, entries)
    own = next((name for name in order if _is_own(name)), None)
    return [
        Bar(_plain(name, section.work), median, number(median), _kind(name))
        for name in order
        if own and _are_alike(entries[name], entries[own])
        if (median := figure.median(entries[name])) is not None
    ]


def _best_of_each(bars: Sequence[Bar], work: str) -> list[Bar]:
    """Return the best bar of the first few loaders, torch among them, without their settings."""
    own_settings = {_plain(name, work) for name in (_BY_NAME[work].baseline or ("", ()))[1]}
    best: dict[str, Bar] = {}
    for bar in bars:
        family, _, setting = bar.name.partition(" (")
        if work == "transport" and setting.startswith("threads"):
            continue  # they carry nothing
        if bar.kind != "torch" or bar.name in own_settings:
            best.setdefault(family, replace(bar, name=family))
    shown = list(best)[:_MOST_BARS]
    if "torch" in best and "torch" not in shown:
        shown[-1] = "torch"
    return [best[family] for family in shown]


def _kind(name: str) -> str:
    family = name.split(" ")[0]
    return {_OWN: "own", "torch": "torch"}.get(family, "peer")


def _unit(section: Section) -> str:
    figure = section.figures[0]
    return f"{figure.title}; {'less' if figure.lower else 'more'} is better"


def _label(panel: Panel) -> str:
    figures = ", ".join(f"{bar.name} {bar.text}" for bar in panel.bars)
    return f"{panel.title} ({panel.unit}): {figures}."


def _section(
    section: Section, results: Results, known: Mapping[str, Contender], remarks: Mapping[str, str]
) -> str:
    entries = results.get(section.work, {})
    facts = _facts(section, entries)
    parts = [f"## {section.title}", section.question.format(**facts)]
    if not entries:
        parts.append("Not measured yet.")
    elif section.work in _OUTCOMES:
        parts.append(_outcome_table(section.work, entries, known))
    else:
        if _bars(section, entries):
            label = f"Bars: {_unit(section)}; the table below has the figures"
            parts.append(f"![{label}](assets/benchmarks/{section.work}.svg)")
        parts.append(_folded("All figures", _table(section, entries, results, known)))
        parts.append(_right(section, entries))
    if section.work == "photos":
        parts.append(_loader_or_decoder(entries))
    parts.append(remarks.get(section.work, ""))
    parts.append(f"**What this does not show.** {section.not_shown.format(**facts)}")
    parts.append(_without_part(section.work, known))
    return "\n\n".join(part for part in parts if part)


def _facts(section: Section, entries: Mapping[str, Entry]) -> dict[str, Any]:
    """Return the size of a work as it was measured, of Penstock first."""
    run = "resume-save" if section.work == "resume" else section.work
    facts = {**_PHOTOS, **asdict(size_of(run, smoke=False))}
    for name in sorted(entries, key=_is_own):
        facts |= entries[name]["size"]
    facts["photo_kb"] = facts["photos_mb"] / facts["num_photos"] * 1e3
    facts["num_batches"] = math.ceil(facts["num_photos"] / facts["batch_size"])
    return facts


def _loader_or_decoder(entries: Mapping[str, Entry]) -> str:
    """Return how much of the lead over torch is the decoder's: torch has it in one contender."""
    own, torch = "penstock (processes)", _TORCH[0]
    names = (own, _SAME_DECODER, torch)
    rate, cpu = _BY_NAME["photos"].figures[:2]
    if not all(name in entries and rate.median(entries[name]) for name in names):
        return ""
    if not all(_are_alike(entries[own], entries[name]) for name in names):
        return ""
    rows = [["", rate.title, cpu.title]]
    rows += [[name, rate.cell(entries[name]), cpu.cell(entries[name])] for name in names]
    return (
        "**Loader or decoder?** The first two rows have the same decoder and differ in the loader. "
        "The last two have the same loader and differ in the decoder.\n\n"
        f"{_markdown(rows, numbers=True)}"
    )


def _table(
    section: Section,
    entries: Mapping[str, Entry],
    results: Results,
    known: Mapping[str, Contender],
) -> str:
    main = section.figures[0]
    base_name, base, base_median = _baseline(section, results)

    def key(name: str) -> tuple[bool, float]:
        median = main.median(entries[name])
        if median is None:
            return True, math.inf
        return not _is_right(entries[name]), median if main.lower else -median

    titles = ["", main.title]
    titles += [f"x {_plain(base_name, section.work)}"] if base else []
    titles += [figure.title for figure in section.figures[1:]]
    rows = [[*titles, *(["antialias"] if section.has_resizing else [])]]
    for name in sorted(entries, key=key):
        entry = entries[name]
        row = [_shown(name, section.work), main.cell(entry, span=True) or "failed"]
        if base:
            median = main.median(entry)
            fits = median is not None and _is_right(entry) and _are_alike(entry, base)
            row.append(f"{median / base_median:.2f}" if fits else "")
        row += [figure.cell(entry) for figure in section.figures[1:]]
        if section.has_resizing:
            row.append({True: "yes", False: "no", None: ""}[known[name].antialias])
        rows.append(row)
    return "\n".join([_markdown(rows, numbers=True), *_failures(entries)])


def _baseline(section: Section, results: Results) -> tuple[str, Entry | None, float]:
    """Return name, entry and median of the best of those that a section is compared with."""
    work, names = section.baseline or (section.work, ())
    figure = _BY_NAME[work].figures[0]
    sign = 1 if figure.lower else -1
    found = [
        (sign * median, name, entry)
        for name in names
        if (entry := results.get(work, {}).get(name)) and (median := figure.median(entry))
    ]
    if not found:
        return "", None, math.nan
    signed, name, entry = min(found)
    return name, entry, sign * signed


def _failures(entries: Mapping[str, Entry]) -> list[str]:
    lines = [
        f"- {name}, {_code(error)}" for name, entry in entries.items() for error in entry["errors"]
    ]
    said = ["", "Failed runs, with their last line of output:", "", *lines] if lines else []
    remarks = [
        f"- {name}, {remark}{f' ({count} times)' if count > 1 else ''}"
        for name, entry in entries.items()
        for remark, count in Counter(entry["remarks"]).items()
    ]
    return said + (
        ["", "Runs with figures that did not end cleanly:", "", *remarks] if remarks else []
    )


def _right(section: Section, entries: Mapping[str, Entry]) -> str:
    if section.work != "resume":
        return ""
    wrong = [name for name, entry in entries.items() if not _is_right(entry)]
    if not wrong:
        return "All loaders with a figure resumed with the right batch."
    return f"**A wrong batch** came from: {', '.join(wrong)}."


def _outcome_table(work: str, entries: Mapping[str, Entry], known: Mapping[str, Contender]) -> str:
    rows = [["", "by default", "with the setting to survive it"]]
    for name in sorted(entries, key=lambda name: (not _is_own(name), name)):
        entry = entries[name]
        cells = []
        for run in (work, f"{work} --tolerant"):
            readings = entry["runs"].get(run, ())
            cells.append(_outcome(work, readings[0]["outcome"]) if readings else "")
        if not cells[1] and work == "corrupt":
            cells[1] = known[name].absent.get("tolerant", "")
        elif not cells[1]:  # what it does with bad samples is no answer to a worker that is gone
            cells[1] = cells[0] if cells[0] == _NO_WORKER else "it has no setting for that"
        rows.append([_shown(name, work), cells[0] or "failed", cells[1]])
    return "\n".join([_markdown(rows), *_failures(entries)])


def _outcome(work: str, outcome: Mapping[str, Any]) -> str:
    """Return what happened, in words."""
    seconds = f"{outcome['seconds']:.1f} s"
    came = f"{outcome['came']:,} of {outcome['expected']:,} samples"
    line = outcome["line"]
    said = f": {_code(line if len(line) < MOST_SAID else line + ' …')}" if line else ""
    match outcome["kind"]:
        case "no worker process":
            return _NO_WORKER
        case "goes on" if outcome["lost"] == 0:
            extra = outcome["too many"]
            more = f", and {extra} more" if extra else ""
            lost = "only the broken photo is left out" if work == "corrupt" else "nothing lost"
            return f"continues, {lost}{more}"
        case "goes on":
            extra = outcome["too many"]
            more = f" and with {extra} too many" if extra else ""
            return f"**continues without {outcome['lost']:,} samples**{more}, with no error"
        case "hangs":
            return f"**hangs**, after {came}"
        case "error":
            return f"error after {seconds}, {came}{said}"
        case _:
            status = outcome["exit status"]
            return (
                f"**the main process itself ends** (status {status}) after {seconds}, {came}{said}"
            )


def _without_part(work: str, known: Mapping[str, Contender]) -> str:
    reasons: dict[str, list[str]] = {}
    for name, contender in known.items():
        reason = _reason(work, contender)
        if reason:
            reasons.setdefault(reason, []).append(name)
    lines = [f"- {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return "\n".join(["Not in this section:", "", *lines]) if lines else ""


def _reason(work: str, contender: Contender) -> str:
    run = "resume-save" if work == "resume" else work
    if work in SHARED_WORKS and contender.same_loader_as:
        return f"the same loader as {contender.same_loader_as}"
    if contender.has_part_in(run) and work not in contender.absent:
        return ""
    keys = (work, "photos") if work in SHARED_WORKS else (work,)
    return next(contender.absent[key] for key in keys if key in contender.absent)


def _settings(results: Results, known: Mapping[str, Contender]) -> str:
    versions: dict[str, str] = {}
    for entries in results.values():
        for name, entry in entries.items():
            pins = (f"{package} {version}" for package, version in entry["packages"].items())
            versions[name] = ", ".join(pins)
    rows = [["", "settings", "versions"]]
    rows += [
        [_shown(name, "photos"), _cell(contender.settings), versions.get(name, "not measured yet")]
        for name, contender in known.items()
    ]
    return (
        "## The loaders and their settings\n\nThe settings name the sections above in short: "
        'photos, packed, tiny (or rows), transport, paths, resume. "tolerant" is the second '
        f"column of the tables about a killed worker and a corrupt photo.\n\n{_markdown(rows)}"
    )


def _left_out(
    known: Mapping[str, Contender], not_installed: Mapping[str, Mapping[str, Any]]
) -> str:
    lines = []
    for environment, fact in not_installed.items():
        names = [name for name in known if known[name].environment == environment]
        said = "; ".join(_code(line) for line in fact["reason"])
        lines.append(
            f"- {', '.join(names)} (`requirements/{environment}.txt`, {fact['date']}): {said}"
        )
    return "\n".join(["## Could not be installed", "", *lines]) if lines else ""


# ---------------------------------------------------------------- the drop-in's least ratios


def cheap_samples(measured: Mapping[str, Any]) -> str:
    """Return what never_slower.py has found: the drop-in beside torch, use by use."""
    machine, cells = measured["machine"], measured["cells"]
    rows = [["workers", "cases", "minimum", "median", "maximum", "below 0.95"]]
    for number in sorted({cell["num_workers"] for cell in cells}):
        ratios = sorted(cell["ratio"] for cell in cells if cell["num_workers"] == number)
        figures = (ratios[0], statistics.median(ratios), ratios[-1])
        slower = sum(ratio < _NOISE for ratio in ratios)
        rows.append([str(number), str(len(ratios)), *(f"{r:.2f}" for r in figures), str(slower)])
    worst = [["workers", "batch size", "samples", "Penstock, µs/batch", "torch, µs/batch", "ratio"]]
    for cell in sorted(cells, key=lambda cell: cell["ratio"])[:_WORST]:
        times = (f"{cell['penstock_us']:.1f}", f"{cell['torch_us']:.1f}", f"{cell['ratio']:.2f}")
        worst.append([str(cell["num_workers"]), str(cell["batch_size"]), cell["case"], *times])
    return (
        "## Cheap samples: is the drop-in ever slower?\n\n"
        "With samples that cost almost nothing, the time of a batch is the loader's own. This "
        "compares `penstock.torch.DataLoader` with torch's. Both run in turn in one process, for "
        "each kind of sample and batch size in `benchmarks/dropin/never_slower.py`. Their batches "
        "are first checked to be equal. The ratio is Penstock's batches per second divided by "
        f"torch's: above 1, Penstock is faster. Measured {machine['date']}, commit "
        f"{machine['commit']}, torch {machine['torch']}.\n\n"
        f'{_markdown(rows, numbers=True)}\n\nThe lowest ratios ("a stream" is an iterable '
        'dataset, "a list" a `collate_fn` that returns the list of samples):\n\n'
        f"{_markdown(worst, numbers=True)}"
    )


# ---------------------------------------------------------------- markdown


def _markdown(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    aligned = ["---", *["---:" if numbers else "---"] * (len(rows[0]) - 1)]
    lines = [rows[0], aligned, *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _folded(title: str, text: str) -> str:
    return f"<details markdown><summary>{title}</summary>\n\n{text}\n\n</details>"


def _shown(name: str, work: str) -> str:
    return f"**{name}**" if _is_own(name) else _plain(name, work)


def _plain(name: str, work: str) -> str:
    """Return the name, without what decodes where there is nothing to decode."""
    return name if work in _WITH_PHOTOS else name.replace(" (simplejpeg, OpenCV)", "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _code(text: str) -> str:
    return f"`{_cell(text).replace('`', chr(39))}`"


# ---------------------------------------------------------------- files


def load_results(folder: Path = RESULTS) -> dict[str, dict[str, Entry]]:
    """Return what compare.py has saved, by work and contender."""
    found = {}
    for section in _WORKS:
        path = folder / f"{section.work}.json"
        if path.exists():
            found[section.work] = json.loads(path.read_text("utf-8"))["contenders"]
    return found


def load_remarks(path: Path = _REMARKS) -> dict[str, str]:
    """Return the texts under the names of works, `## photos` and so on."""
    works: dict[str, str] = {}
    for part in ("\n" + path.read_text("utf-8")).split("\n## ")[1:]:
        name, _, text = part.partition("\n")
        if name.strip() not in {section.work for section in _WORKS}:
            raise ValueError(f"{path.name}: {name.strip()!r} is no work")
        works[name.strip()] = text.strip()
    return works


def current() -> str:
    """Return the page as it has to be."""
    path = RESULTS / "not-installed.json"
    not_installed = json.loads(path.read_text("utf-8")) if path.exists() else {}
    page = render(load_results(), contenders(), not_installed, load_remarks())
    measured = json.loads((RESULTS.parent / "never_slower.json").read_text("utf-8"))
    return f"{page}\n{cheap_samples(measured)}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write page and charts, or say which of them is out of date."""
    parser = argparse.ArgumentParser(prog="page.py")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if out of date")
    options = parser.parse_args(arguments)
    files = {PAGE: current()}
    files |= {CHARTS / name: svg for name, svg in charts(load_results()).items()}
    if not options.check:
        CHARTS.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
        return 0
    old = [
        str(path.relative_to(PAGE.parents[1]))
        for path, text in files.items()
        if not path.exists() or path.read_text("utf-8") != text
    ]
    if old:
        print(f"out of date: {', '.join(old)}: python benchmarks/peers/page.py", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    raise SystemExit(main())
