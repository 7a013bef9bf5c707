# SPDX-License-Identifier: Apache-2.0
"""`penstock report`: the page of a run, from its trace; saved runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal import check_output, writing
from penstock.errors import ConfigError, PenstockError
from penstock.lines import duration, format_bytes, percent, say
from penstock.program.saved import SavedRun, is_saved_run, run_in
from penstock.sampling.balance import aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.insight.plain import JSON


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
    """Write a page that shows why the loop waited, and what to change.

    It is the page of the run that the trace is of. The verdict and the page's path go to stdout.
    Files of `penstock run --save` are put side by side on stdout.
    """
    from penstock.insight.trace import read_json

    paths = [Path(word) for word in src]
    contents = [read_json(path) for path in paths]
    if len(paths) == 1 and not is_saved_run(contents[0]):
        _of_trace(paths[0], contents[0], output or paths[0].with_suffix(".html"))
        return
    runs = [run_in(content, path) for path, content in zip(paths, contents, strict=True)]
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
    programs, engines = [run.program for run in runs], [run.engine for run in runs]
    rows = [["", *names], ["program", *programs], ["engine", *engines]]
    for title in dict.fromkeys(title for figures in columns for title in figures):
        found = [figures.get(title, (None, str)) for figures in columns]
        cells = ["-" if value is None else text(value) for value, text in found]
        first = found[0][0]
        for at, (value, text) in enumerate(found[1:], 1):
            if first and value is not None and text in (duration, format_bytes):
                cells[at] += f" ({value / first:.2f} x)"
        rows.append([title, *cells])
    for line in aligned(rows):
        say(line)
    if len(runs) > 1:
        say(f"(x: the ratio to {names[0]})")


def _figures(run: SavedRun) -> dict[str, tuple[float | None, Callable[[Any], str]]]:
    """Return each figure and what makes a text of it."""
    wait_s = sum(loader.run.wait_s for loader in run.loaders)
    seconds = sum(loader.run.seconds for loader in run.loaders)
    figures: dict[str, tuple[float | None, Callable[[Any], str]]] = {
        "wall time": (run.wall_s, duration),
        "waiting for data": (wait_s, duration),
        "waiting, share": (wait_s / seconds if seconds else None, percent),
        "CPU of all processes": (run.cpu_s, duration),
        "peak memory": (run.peak_memory_bytes, format_bytes),
    }
    for number, loader in enumerate(run.loaders, 1):  # one line may have made several
        name = f"{number}. {loader.made_at}"
        figures |= {
            f"{name}: workers": (loader.num_workers, "{:,}".format),
            f"{name}: samples": (loader.run.samples, "{:,}".format),
            f"{name}: waiting": (loader.run.wait_s, duration),
            f"{name}: first batch": (loader.first_batch_s, duration),
        }
    return figures
