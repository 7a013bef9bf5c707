# SPDX-License-Identifier: Apache-2.0
"""`penstock report`: the page of a run, from its trace, or from a run made up for it."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from penstock.cli.arguments import SOURCE_HELP
from penstock.cli.lines import printable, without_password
from penstock.cli.loadable import SIZE_HELP, is_iterable, loader_class, open_loadable
from penstock.cli.progress import Bar
from penstock.cli.stopping import INTERRUPTED, TERMINATED, Termination
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock.insight.stats import Stats

__all__ = ["report"]

_TRACE: Final = ".json"
_DEFAULT_NAME: Final = "penstock-report.html"  # no page that `loader.report` was told to write


def report(
    ctx: typer.Context,
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help=f"A trace that `loader.trace` wrote, which ends in .json. Or: {SOURCE_HELP}",
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
    shuffled, for some batches, by a trainer that does nothing with them, or takes --trainer-ms for
    each. The verdict and the page's path go to stdout.
    """
    output, trace = (path and path.expanduser() for path in (output, trace))
    if src.lower().endswith(_TRACE) and Path(src).is_file():
        _refuse_options(ctx)
        _of_trace(Path(src), output or Path(src).with_suffix(".html"))
        return
    output = output or Path(_DEFAULT_NAME)
    for option, path in (("--output", output), ("--trace", trace)):
        _check_writable(option, path)
    _import_plotly()
    with contextlib.ExitStack() as stack:
        loader = _loader(src, split, collate, stack, batch_size, workers, backend, size)
        status = _load(loader, batches, trainer_ms / 1000, src)
        _write(loader.report, "--output", output)
        if trace is not None:
            _write(loader.trace, "--trace", trace)
        _say(loader.stats(), output)
    if status:
        raise typer.Exit(status)


def _of_trace(source: Path, output: Path) -> None:
    from penstock.insight.report import write_report
    from penstock.insight.trace import read_trace

    _check_writable("--output", output)
    recording = read_trace(source)
    try:
        _write(lambda path: write_report(recording, path), "--output", output)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, PenstockError):
            raise
        raise ConfigError(f"The recording in {source} is damaged: {error}.") from error
    _say(recording.stats, output)


def _refuse_options(ctx: typer.Context) -> None:
    given = []
    for name in ctx.params:
        source = ctx.get_parameter_source(name)
        if name not in ("src", "output") and source is not None and source.name == "COMMANDLINE":
            given.append("--" + name.replace("_", "-"))
    if given:
        raise ConfigError(
            f"{', '.join(given)}: a trace is of a run that is over, so there is nothing to set. "
            "Leave it out, or name a dataset."
        )


def _check_writable(option: str, path: Path | None) -> None:
    """Rather now than after minutes of work."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(f"cannot write {option} {path}: name a file in a folder that exists.")


def _import_plotly() -> None:
    """Rather miss it now than after minutes of work."""
    from penstock.insight.report.page import plotly_script

    plotly_script()


def _loader(
    src: str,
    split: str | None,
    collate: str | None,
    stack: contextlib.ExitStack,
    batch_size: int,
    workers: str,
    backend: str,
    size: int,
) -> Any:  # noqa: ANN401 - of either kind
    from penstock.faults import FaultPolicy

    dataset, collate_fn = open_loadable(src, split, collate, size, stack)
    is_sized = hasattr(dataset, "__len__")
    if is_sized and not len(dataset):
        raise ConfigError(f"{without_password(src)} has no samples.")
    is_map_style = not is_iterable(dataset)
    num_workers = _workers(workers)
    if num_workers == "auto" and not is_map_style:
        num_workers = 1  # what each worker reads of an iterable depends on their number
    if num_workers == "auto" and backend == "ray":
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
        persistent_workers=num_workers != 0,
    )


def _workers(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise ConfigError(f'--workers must be a number from 0 on, or "auto", got {text!r}.')
    return int(text)


def _load(
    loader: Any,  # noqa: ANN401 - of either kind
    num_batches: int,
    step_s: float,
    src: str,
) -> int:
    """Take so many batches, and return the exit status: not 0 after a Ctrl-C or SIGTERM."""
    from penstock.cli.reasons import errors_in_code
    from penstock.cli.tuning_grid import Trainer

    trainer = Trainer(step_s)
    done = 0
    with Termination() as termination, Bar() as bar, warnings.catch_warnings():
        # The page lists them.
        warnings.filterwarnings("ignore", r"epoch \d+: .* bad sample", UserWarning)
        try:
            with errors_in_code(src):
                while done < num_batches:
                    before = done
                    for _ in loader:
                        trainer.step()
                        done += 1
                        bar.show(done, num_batches, "")
                        if done == num_batches:
                            break
                    if done == before:  # an epoch without a batch: there will be none
                        break
        except KeyboardInterrupt:
            sys.stderr.write("penstock: stopped; this is what was measured by then.\n")
            return TERMINATED if termination.is_noted else INTERRUPTED
    return 0


def _write(write: Any, option: str, path: Path) -> None:  # noqa: ANN401
    try:
        write(path)
    except OSError as error:
        raise ConfigError(f"cannot write {option} {path}: {error.strerror}.") from error


def _say(stats: Stats, output: Path) -> None:
    typer.echo(printable(str(stats.verdict)))
    failed = f", failed samples: {stats.run.failed:,}" if stats.run.failed else ""
    typer.echo(printable(f"{output}: {stats.run.batches:,} batches{failed}"))
