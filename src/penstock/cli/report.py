# SPDX-License-Identifier: Apache-2.0
"""`penstock report`: the page of a run, of its trace or made up for it; saved runs side by side."""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.options import SOURCE_HELP, Collate, TrainerMs, workers_of
from penstock.cli.reasons import errors_in_code
from penstock.cli.terminal import INTERRUPTED, Bar, check_output, writing
from penstock.errors import ConfigError, PenstockError
from penstock.insight.units import duration, percent
from penstock.lines import amount, say
from penstock.program.saved import SavedRun, is_saved_run
from penstock.redact import without_password

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.insight.plain import JSON
    from penstock.insight.stats import Stats

    Figures = dict[tuple[str, str], tuple[Any, Callable[[Any], str]]]

__all__ = ["report"]

_TRACE: Final = ".json"
_WIDEST: Final = 40  # characters of a command


def report(
    ctx: typer.Context,
    src: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC",
            help="A trace that `loader.trace` wrote, which ends in .json; or files that "
            f"`penstock run --save` wrote. Or: {SOURCE_HELP}",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="HTML",
            help="The page.",
            show_default="the trace's name, or penstock-report.html",
        ),
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Batches loaded of a dataset.")] = 200,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a batch.")] = 64,
    workers: Annotated[str, typer.Option(metavar="N", help="Workers, or auto.")] = "auto",
    trainer_ms: TrainerMs = 0,
    collate: Collate = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="JSON", help="Write the dataset's trace here as well.")
    ] = None,
) -> None:
    """Write a page that shows who waited for whom, and why.

    Of a trace, the page is that of its run, and --output the only option. A dataset is loaded,
    shuffled, for some batches, by a loop that does nothing with them, or takes --trainer-ms for
    each. The verdict and the page's path go to stdout.

    Files of `penstock run --save` are put side by side on stdout, and take no options.
    """
    others = [w for w in src if not (w.lower().endswith(_TRACE) and Path(w).is_file())]
    if len(src) > 1 and others:
        raise ConfigError(
            f"{without_password(others[0])} is not there, or does not end in {_TRACE}. Files that "
            "`penstock run --save` wrote are put side by side; of datasets, name one."
        )
    if not others:
        given = [n for n in ctx.params if "COMMANDLINE" in str(ctx.get_parameter_source(n))]
        options = ["--" + name.replace("_", "-") for name in given if name not in ("src", "output")]
        if options:
            raise ConfigError(f"{', '.join(options)}: {src[0]} is of a run that is over.")
        _of_files([Path(word) for word in src], output)
        return
    # No page that `loader.report` was called to write.
    output = output or Path("penstock-report.html")
    check_output("--output", output)
    check_output("--trace", trace)
    from penstock.cli.sources import loadable_named
    from penstock.cli.tune import endless

    with loadable_named(src[0], None, collate) as (dataset, collate_fn):
        loader = _loader(src[0], dataset, workers, batch_size, collate_fn)
        is_stopped = False
        with Bar() as bar, warnings.catch_warnings(), errors_in_code(src[0]):
            # The page lists them.
            warnings.filterwarnings("ignore", r"epoch \d+: .* bad sample", UserWarning)
            try:
                with contextlib.closing(endless(loader)) as endless_batches:
                    for done, _ in enumerate(itertools.islice(endless_batches, batches), 1):
                        time.sleep(trainer_ms / 1000)
                        bar.show(done, batches, "")
            except KeyboardInterrupt:
                say("penstock: stopped; this is what was measured by then.", err=True)
                is_stopped = True
        with writing("--output", output):
            loader.report(output)
        if trace is not None:
            with writing("--trace", trace):
                loader.trace(trace)
        _say(loader.stats(), output)
    if is_stopped:
        raise typer.Exit(INTERRUPTED)


def _loader(
    src: str,
    dataset: Any,  # noqa: ANN401
    workers: str,
    batch_size: int,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> Any:  # noqa: ANN401 - of either kind
    from penstock.cli.sources import is_iterable, is_loader, loader_class
    from penstock.faults import FaultPolicy

    if is_loader(dataset):
        raise ConfigError(
            f"{src} is a loader: call its method `report` after some batches, or name its dataset."
        )
    is_sized = hasattr(dataset, "__len__")
    if is_sized and not len(dataset):
        raise ConfigError(f"{without_password(src)} has no samples.")
    is_map_style = not is_iterable(dataset)
    num_workers = workers_of(workers)
    if num_workers == "auto" and not is_map_style:
        num_workers = 1  # what each worker reads of an iterable depends on their number
    # Samples may be tensors, and workers of a torch user's loader keep torch to one thread.
    return loader_class()(
        dataset,
        batch_size,
        shuffle=is_sized and is_map_style,
        num_workers=num_workers,
        collate_fn=collate_fn,
        on_error=FaultPolicy("skip", max_failures=None),  # the page lists them, however many
        monitor="full",
        persistent_workers=num_workers != 0,
    )


def _of_files(paths: list[Path], output: Path | None) -> None:
    from penstock.insight.trace import read_json

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
    _say(recording.stats, output)


def _say(stats: Stats, output: Path) -> None:
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
