# SPDX-License-Identifier: Apache-2.0
"""`penstock run`: an unedited program on Penstock's loader."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads the annotations at run time
from typing import Annotated, Any

import typer

from penstock.cli.terminal import check_output
from penstock.errors import ConfigError
from penstock.program.options import Options

Engine = StrEnum("Engine", ["penstock", "torch"])
WorkerKind = StrEnum("WorkerKind", ["process", "thread", "ray"])
BadSamples = StrEnum("BadSamples", {"error": "raise", "skip": "skip", "replace": "replace"})


def run(
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="PROGRAM",
            help="A Python file, or with -m a module, followed by its own arguments.",
        ),
    ],
    is_module: Annotated[
        bool, typer.Option("-m", help="PROGRAM is a module, as in `python -m`.")
    ] = False,
    workers: Annotated[
        str | None,
        typer.Option(metavar="N", help="Number of workers, or auto.", show_default=False),
    ] = None,
    backend: Annotated[WorkerKind | None, typer.Option(help="Kind of worker.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the order and of random numbers.")
    ] = None,
    on_error: Annotated[
        BadSamples | None, typer.Option(help="Policy for bad samples and dead workers.")
    ] = None,
    progress: Annotated[
        bool, typer.Option("--progress", help="Show a progress bar for each loader.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="HTML", help="Write a report on each loader.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="JSON", help="Write a trace of each loader.")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="JSON", help="Write the figures that `penstock report A.json B.json` compares."
        ),
    ] = None,
    engine: Annotated[
        Engine, typer.Option(help="torch: torch's own loader, measured the same way.")
    ] = Engine.penstock,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print no summary at the end.")
    ] = False,
) -> None:
    """Run a training script on Penstock's loader, unedited.

    The script runs as under `python PROGRAM ARGS`; processes that it starts are included. At its
    end, a summary on stderr says for each loader how long the script waited for data, why, and
    what to change.

    Options stand before PROGRAM. --workers, --backend, --seed, --on-error and --progress apply to
    loaders that the script makes without these arguments.
    """
    if workers not in (None, "auto") and not str(workers).isdecimal():
        raise ConfigError(f'--workers must be a number from 0 on, or "auto", got {workers!r}.')
    files: dict[str, Any] = {}
    for name, path in (("report", report), ("trace", trace), ("save", save)):
        if path is not None:
            path = path.expanduser().absolute()  # the program may change its folder
            check_output(f"--{name}", path)
            files[name] = str(path)
    given = {
        "num_workers": workers if workers in (None, "auto") else int(str(workers)),
        "backend": backend and backend.value,
        "seed": seed,
        "on_error": on_error and on_error.value,
        "progress": progress or None,
    }
    settings: dict[str, Any] = {n: value for n, value in given.items() if value is not None}
    options = Options(
        program=program[0], engine=engine.value, settings=settings, quiet=quiet, **files
    )
    if engine is Engine.torch and settings:
        names = ", --".join(settings).replace("num_workers", "workers").replace("_", "-")
        raise ConfigError(
            "--engine torch runs torch's own loader with the program's own arguments: leave out "
            f"--{names}."
        )
    if settings:
        from penstock.loader import Loader

        Loader([0], **settings)  # raises what the program's loaders would
    options.start(["-m", *program] if is_module else program)
