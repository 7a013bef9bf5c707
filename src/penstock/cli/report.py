# SPDX-License-Identifier: Apache-2.0
"""`penstock report`: the page of a run, from its trace; saved runs side by side."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.terminal import check_output, writing
from penstock.errors import ConfigError, PenstockError
from penstock.insight.units import duration, percent
from penstock.lines import amount, say
from penstock.program.saved import SavedRun, is_saved_run
from penstock.redact import without_password

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.insight.plain import JSON

    Figures = dict[tuple[str, str], tuple[Any, Callable[[Any], str]]]

_WIDEST: Final = 40  # characters of a command


def report(
    src: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="A trace that `loader.trace` wrote; or files that `penstock run --save` wrote.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="HTML", help="The page.", show_default="the trace's name"
        ),
    ] = None,
) -> None:
    """Write a page that shows who waited for whom, and why.

    It is the page of the run that the trace is of. The verdict and the page's path go to stdout.
    Files of `penstock run --save` are put side by side on stdout.
    """
    from penstock.insight.trace import read_json

    for word in src:
        if not Path(word).is_file():
            raise ConfigError(
                f"{without_password(word)} is no file. `penstock report` takes a trace, or files "
                'of `penstock run --save`. Of a dataset, `loader.report("run.html")` writes the '
                "page, after some batches of a loader."
            )
    paths = [Path(word) for word in src]
    contents = [read_json(path) for path in paths]
    if len(paths) == 1 and not is_saved_run(contents[0]):
        _of_trace(paths[0], contents[0], output or paths[0].with_suffix(".html"))
        return
    runs = []
    for path, content in zip(paths, contents, strict=True):
        if not is_saved_run(content):
            raise ConfigError(
                f"{path} is no file that `penstock run --save` wrote, and these alone are put "
                "side by side."
            )
        try:
            runs.append(SavedRun.from_json(content))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    if output is not None:
        raise ConfigError(f"--output: {paths[0]} is a saved run, and has no page.")
    _say_side_by_side(list(map(str, paths)), runs)


def _of_trace(source: Path, content: JSON, output: Path) -> None:
    from penstock.insight.report import write_report
    from penstock.insight.trace import recording_in

    check_output("--output", output)
    recording = recording_in(content, source)
    try:
        with writing("--output", output):
            write_report(recording, output)
    except PenstockError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"The recording in {source} is damaged: {error}.") from error
    stats = recording.stats
    say(str(stats.verdict))
    bad = f", bad samples: {stats.run.failed:,}" if stats.run.failed else ""
    say(f"{output}: {stats.run.batches:,} batches{bad}")


def _say_side_by_side(names: Sequence[str], runs: Sequence[SavedRun]) -> None:
    """Print the figures of runs side by side, those after the first with their ratio to it."""
    columns = [_figures(run) for run in runs]
    rows, sections = [["", *names]], [""]
    for section, title in dict.fromkeys(itertools.chain.from_iterable(columns)):
        if section != sections[-1]:
            rows.append([])
            sections.append(section)
        found = [figures.get((section, title)) for figures in columns]
        cells = ["-" if each is None or each[0] is None else each[1](each[0]) for each in found]
        first = found[0][0] if found[0] else None
        for at, each in enumerate(found[1:], 1):
            if first and each and each[0] is not None and each[1] in (duration, amount):
                cells[at] += f" ({each[0] / first:.2f} x)"
        rows.append([title, *cells])
    widths = [max(len(row[at]) for row in rows if row) for at in range(len(names) + 1)]
    for row in rows:
        line = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        say("  ".join(line).rstrip())
    if len(runs) > 1:
        say(f"(x: the ratio to {names[0]})")


def _figures(run: SavedRun) -> Figures:
    """Return each figure and what makes a text of it, by section and title."""
    program = " ".join(run.program)
    wait_s = sum(loader.wait_s for loader in run.loaders)
    seconds = sum(loader.seconds for loader in run.loaders)
    first_batch_s = run.loaders[0].first_batch_s if run.loaders else None
    figures: Figures = {
        ("", "program"): (program[:_WIDEST] + "…" * (len(program) > _WIDEST), str),
        ("", "engine"): (run.engine, str),
        ("", "wall time"): (run.wall_s, duration),
        ("", "waiting for data"): (wait_s, duration),
        ("", "waiting, share"): (wait_s / seconds if seconds else None, percent),
        ("", "first batch"): (first_batch_s, duration),
        ("", "CPU of all processes"): (run.cpu_s, duration),
        ("", "peak memory"): (run.peak_memory_bytes, amount),
    }
    made_at: Counter[str] = Counter()
    for loader in run.loaders:
        made_at[loader.made_at] += 1
        section = f"{loader.made_at}, {made_at[loader.made_at]}"  # of loaders of one line
        share = loader.wait_s / loader.seconds if loader.seconds else None
        number = "{:,}".format
        figures |= {
            (section, loader.made_at): (loader.dataset, str),
            (section, "  loaders"): (loader.loaders, number),
            (section, "  workers"): (loader.num_workers, number),
            (section, "  epochs"): (loader.epochs, number),
            (section, "  batches"): (loader.batches, number),
            (section, "  samples"): (loader.samples, number),
            (section, "  bad samples"): (loader.failed, number),
            (section, "  time of the loops"): (loader.seconds, duration),
            (section, "  waiting for data"): (loader.wait_s, duration),
            (section, "  waiting, share"): (share, percent),
            (section, "  first batch"): (loader.first_batch_s, duration),
        }
    return figures
