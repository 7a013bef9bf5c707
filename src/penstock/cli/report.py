# SPDX-License-Identifier: Apache-2.0
"""`penstock report`: the page of a run, of its trace or made up for it; saved runs side by side."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.arguments import SOURCE_HELP, workers_of
from penstock.cli.loadable import SIZE_HELP, is_iterable, is_loader, loader_class, open_loadable
from penstock.cli.outputs import check_output, writing
from penstock.cli.progress import Bar
from penstock.cli.sigterm import INTERRUPTED, TERMINATED, Termination
from penstock.engine.backends import traits_of
from penstock.errors import ConfigError, PenstockError
from penstock.lines import say
from penstock.redact import without_password

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.insight.plain import JSON
    from penstock.insight.stats import Stats

__all__ = ["report"]

_TRACE: Final = ".json"


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
    backend: Annotated[
        str, typer.Option(help="What workers are: process, thread or ray.")
    ] = "process",
    trainer_ms: Annotated[
        float, typer.Option(min=0, help="A training step that takes so long is made up.")
    ] = 0,
    collate: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="The collate_fn that makes batches.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Which part of a folder.")] = None,
    size: Annotated[int, typer.Option(min=1, help=SIZE_HELP)] = 224,
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
    output, trace = (path and path.expanduser() for path in (output, trace))
    others = [w for w in src if not (w.lower().endswith(_TRACE) and Path(w).is_file())]
    if not others:
        _of_files(ctx, [Path(word) for word in src], output)
        return
    if len(src) > 1:
        raise ConfigError(
            f"{without_password(others[0])} is not there, or does not end in {_TRACE}. Files that "
            "`penstock run --save` wrote are put side by side; of datasets, name one."
        )
    (source,) = src
    # No page that `loader.report` was told to write.
    output = output or Path("penstock-report.html")
    for option, path in (("--output", output), ("--trace", trace)):
        check_output(option, path)
    with contextlib.ExitStack() as stack:
        dataset, collate_fn = open_loadable(source, split, collate, size, stack)
        loader = _loader(source, dataset, workers, backend, batch_size, collate_fn)
        status = _load(loader, batches, trainer_ms / 1000, source)
        with writing("--output", output):
            loader.report(output)
        if trace is not None:
            with writing("--trace", trace):
                loader.trace(trace)
        _say(loader.stats(), output)
    if status:
        raise typer.Exit(status)


def _of_files(ctx: typer.Context, paths: list[Path], output: Path | None) -> None:
    from penstock.insight.trace import read_json
    from penstock.program.saved import SavedRun, is_saved_run

    contents = [read_json(path) for path in paths]
    pairs = list(zip(paths, contents, strict=True))
    saved = [(path, content) for path, content in pairs if is_saved_run(content)]
    others = [path for path, content in pairs if not is_saved_run(content)]
    if others and len(paths) > 1:
        raise ConfigError(
            f"{others[0]} is no file that `penstock run --save` wrote, and these alone are put "
            "side by side."
        )
    allowed = ("src", "output") if others else ("src",)
    given = [
        "--" + name.replace("_", "-")
        for name in ctx.params
        if name not in allowed and "COMMANDLINE" in str(ctx.get_parameter_source(name))
    ]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: {' and '.join(map(str, paths))} tell of a run that is over. "
            "Leave these options out, or name a dataset."
        )
    if others:
        _of_trace(paths[0], contents[0], output or paths[0].with_suffix(".html"))
        return
    from penstock.cli.saved_runs import say_side_by_side

    runs = []
    for path, content in saved:
        try:
            runs.append(SavedRun.from_json(content))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    say_side_by_side(list(map(str, paths)), runs)


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


def _loader(
    src: str,
    dataset: Any,  # noqa: ANN401
    workers: str,
    backend: str,
    batch_size: int,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> Any:  # noqa: ANN401 - of either kind
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
    if num_workers == "auto" and not traits_of(backend).is_local:
        raise ConfigError("--backend ray needs --workers N: auto counts the cores of this machine.")
    # Samples may be tensors, and workers of a torch user's loader keep torch to one thread.
    return loader_class()(
        dataset,
        batch_size,
        shuffle=is_sized and is_map_style,
        num_workers=num_workers,
        collate_fn=collate_fn,
        backend=backend,
        on_error=FaultPolicy("skip", max_failures=None),  # the page lists them, however many
        monitor="full",
        persistent_workers=num_workers != 0,
    )


def _load(
    loader: Any,  # noqa: ANN401 - of either kind
    num_batches: int,
    step_s: float,
    src: str,
) -> int:
    """Take so many batches, and return the exit status: not 0 after a Ctrl-C or SIGTERM."""
    from penstock.cli.reasons import errors_in_code
    from penstock.cli.tuning_grid import endless, imitate_step

    with Termination() as termination, Bar() as bar, warnings.catch_warnings():
        # The page lists them.
        warnings.filterwarnings("ignore", r"epoch \d+: .* bad sample", UserWarning)
        try:
            with errors_in_code(src), contextlib.closing(endless(loader)) as batches:
                for done, _ in enumerate(itertools.islice(batches, num_batches), 1):
                    imitate_step(step_s)
                    bar.show(done, num_batches, "")
        except KeyboardInterrupt:
            say("penstock: stopped; this is what was measured by then.", err=True)
            return TERMINATED if termination.is_noted else INTERRUPTED
    return 0


def _say(stats: Stats, output: Path) -> None:
    say(str(stats.verdict))
    bad = f", bad samples: {stats.run.failed:,}" if stats.run.failed else ""
    say(f"{output}: {stats.run.batches:,} batches{bad}")
