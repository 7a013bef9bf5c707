# SPDX-License-Identifier: Apache-2.0
"""`penstock tune`: how many workers a dataset needs, found out by trying."""

from __future__ import annotations

import contextlib
import json
import platform
import textwrap
import warnings
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads the annotations at run time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.arguments import SOURCE_HELP
from penstock.cli.loadable import SIZE_HELP, is_loader, open_loadable
from penstock.cli.outputs import check_output, write_output
from penstock.cli.progress import Bar
from penstock.cli.sigterm import INTERRUPTED, TERMINATED, Termination
from penstock.engine.backends import BACKENDS
from penstock.errors import ConfigError
from penstock.lines import amount, say
from penstock.redact import without_password
from penstock.sampling.balance_text import aligned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.cli.tuning_grid import Setting, SettingResult, TrialWork

__all__ = ["tune"]

_USUAL_BATCH_SIZE: Final = 64
_MAX_NAMED: Final = 20  # samples named on the screen; --json has all of them


class Compared(StrEnum):
    """The other loader that is measured."""

    torch = "torch"


def tune(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help=SOURCE_HELP + " Also module:name of a loader: its class and arguments are kept.",
        ),
    ],
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Samples in a batch.", show_default="64, or a loader's own"),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,…", help="Counts of workers to try.", show_default="up to twice the cores"
        ),
    ] = None,
    prefetch: Annotated[
        str, typer.Option(metavar="N,N,…", help="Batches under way per worker to try.")
    ] = "2,4",
    backend: Annotated[
        str, typer.Option(metavar="NAME,…", help="Backends to try: process, thread.")
    ] = "process",
    batches: Annotated[int, typer.Option(min=1, help="Batches measured in a turn.")] = 60,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each setting.")] = 2,
    trainer_ms: Annotated[
        float, typer.Option(min=0, help="A training step that takes so long is made up.")
    ] = 0,
    trainer_cpu: Annotated[
        bool,
        typer.Option("--trainer-cpu", help="It keeps a core busy; else it waits, as for a GPU."),
    ] = False,
    compare: Annotated[
        Compared | None,
        typer.Option(help="Try the same counts of workers with torch's own loader as well."),
    ] = None,
    collate: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="The collate_fn that makes batches.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Which part of a folder.")] = None,
    size: Annotated[int, typer.Option(min=1, help=SIZE_HELP)] = 224,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures here as well.")
    ] = None,
) -> None:
    """Try counts of workers, and print the line with the best one.

    Of a loader it is its own line, with the workers changed.

    In a folder, list or store, what cannot be read is named, and other samples take its place; an
    error of a dataset of yours ends it.

    All settings take their turn in each round, with workers of their own, which are warm before the
    time is taken. The best one is that with the fewest workers within 3 % of the highest rate. With
    --trainer-ms it is the best for a training whose step takes that long. Ctrl-C shows what is
    known by then.
    """
    from penstock.cli.sources import names_a_dataset
    from penstock.cli.tuning_grid import TrialWork

    check_output("--json", json_file)
    if trainer_cpu and not trainer_ms:
        raise ConfigError("--trainer-cpu needs --trainer-ms: how long a step takes.")
    settings = _settings(workers, prefetch, backend, is_compared=compare is not None)
    options: dict[str, Any] = {
        "compare": compare is not None,
        "num_batches": batches,
        "step_s": trainer_ms / 1000,
        "takes_cpu": trainer_cpu,
    }
    if compare is not None:
        import torch.utils.data  # noqa: F401 - its user gets `penstock.torch.DataLoader`
    with contextlib.ExitStack() as stack:
        dataset, collate_fn = open_loadable(src, split, collate, size, stack)
        if is_loader(dataset):
            if collate is not None:
                raise ConfigError("--collate is for datasets; SRC is a loader, with a collate_fn.")
            work = TrialWork.of_loader(dataset, batch_size, **options)
        else:
            on_error = "raise" if names_a_dataset(src) else "replace"
            size_of_batch = batch_size or _USUAL_BATCH_SIZE
            work = TrialWork.of_dataset(
                dataset, size_of_batch, collate_fn, on_error=on_error, **options
            )
        is_torchs = work.kinds["penstock"].__module__.startswith("torch.")
        if is_torchs and any(setting.backend != "process" for setting in settings):
            raise ConfigError(
                "--backend thread needs penstock.torch.DataLoader; SRC is torch's own."
            )
        results, status = _try_all(work, settings, rounds, src)
    if results:
        _show(results, work, src)
        if json_file is not None:
            record = json.dumps(_record(results, work, src), indent=2)
            write_output("--json", json_file, f"{record}\n")
    if status:
        raise typer.Exit(status)


def _settings(
    workers: str | None, prefetch: str, backend: str, *, is_compared: bool
) -> list[Setting]:
    from penstock.cli.tuning_grid import Setting, usual_workers
    from penstock.insight.budgets import cores_allowed

    counts = usual_workers(cores_allowed())
    if workers is not None:
        counts = _numbers("--workers", workers, least=0)
    factors = _numbers("--prefetch", prefetch, least=1)
    backends = list(dict.fromkeys(name.strip() for name in backend.split(",")))
    if not all(name in BACKENDS and BACKENDS[name].is_local for name in backends):
        raise ConfigError(f"--backend must name process or thread, or both, got {backend!r}.")
    kinds = [(name, "penstock") for name in backends]
    if is_compared:
        kinds.append(("process", "torch"))
    loaders = dict.fromkeys(loader for _, loader in kinds) if 0 in counts else {}
    settings = [Setting(0, None, "process", loader) for loader in loaders]
    grid = [(n, factor) for n in counts if n for factor in factors]
    return settings + [Setting(*pair, *kind) for kind in kinds for pair in grid]


def _numbers(option: str, text: str, *, least: int) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) >= least for word in words):
        raise ConfigError(
            f"{option} must be whole numbers of at least {least}, with commas between them, got "
            f"{text!r}."
        )
    return list(dict.fromkeys(map(int, words)))


def _try_all(
    work: TrialWork, settings: Sequence[Setting], rounds: int, src: str
) -> tuple[list[SettingResult], int]:
    """Return what is known, and the exit status: not 0 after a Ctrl-C or SIGTERM."""
    from penstock.cli.reasons import errors_in_code
    from penstock.cli.tuning_grid import SettingResult

    results = [SettingResult(setting, []) for setting in settings]
    status = 0
    with Termination() as termination, Bar() as bar, warnings.catch_warnings():
        # They are named below the table.
        warnings.filterwarnings("ignore", r"epoch \d+: .* bad sample", UserWarning)
        try:
            for turn in range(rounds):
                for position, result in enumerate(results):
                    done = turn * len(results) + position
                    bar.show(done, rounds * len(results), str(result.setting))
                    with errors_in_code(src):
                        result.turns.append(work.take_turn(result.setting))
        except KeyboardInterrupt:
            say("penstock: stopped; this is what was measured by then.", err=True)
            status = TERMINATED if termination.is_noted else INTERRUPTED
    return [result for result in results if result.turns], status


def _show(results: Sequence[SettingResult], work: TrialWork, src: str) -> None:
    best = _best(results)
    for line in [
        *_table(results, best, work, src), *_bad_samples(work), *work.lines(best.setting),
    ]:  # fmt: skip
        say(line)


def _best(results: Sequence[SettingResult], loader: str = "penstock") -> SettingResult:
    from penstock.cli.tuning_grid import best_of

    return best_of([r for r in results if r.setting.loader == loader] or results)


def _bad_samples(work: TrialWork) -> Iterator[str]:
    """Yield a line for each sample that could not be read, up to some, and one for all."""
    named = sorted(work.bad_samples.items())
    for name, reason in named[:_MAX_NAMED]:
        yield without_password(f"left out {name}: {reason}")
    if len(named) > _MAX_NAMED:
        yield f"… and {len(named) - _MAX_NAMED:,} more"
    if named:
        yield (
            f"{len(named):,} of the samples that were asked for cannot be read; others took their "
            "place. `penstock check` lists all that are broken."
        )


def _table(
    results: Sequence[SettingResult], best: SettingResult, work: TrialWork, src: str
) -> list[str]:
    step = f", steps of {1000 * work.step_s:g} ms" if work.step_s else ""
    rows = [["loader", "workers", "prefetch", "backend", "samples/s", "waiting", "CPU s/1k"]]
    rows[0] += ["memory", ""]
    for result in results:
        workers, factor, backend, loader = result.setting
        cpu_s, memory = result.cpu_s_per_1000, result.memory_bytes
        rows.append([
            loader,
            str(workers),
            "-" if factor is None else str(factor),
            backend if workers else "-",
            f"{result.samples_per_s:,.0f}",
            f"{result.wait_share:.0%}",
            "unknown" if cpu_s is None else f"{cpu_s:.2f}",
            "unknown" if memory is None else amount(memory),
            "best" if result is best else "",
        ])  # fmt: skip
    caption = (
        "waiting: the main process's share of the time. CPU seconds and memory: of main process "
        "and workers."
    )
    of_torch = [result for result in results if result.setting.loader == "torch"]
    if of_torch and best not in of_torch:
        ratio = best.samples_per_s / _best(of_torch, "torch").samples_per_s
        caption += f" The best of Penstock gives {ratio:.2f} x the samples of the best of torch."
    if not of_torch:
        rows = [row[1:] for row in rows]
    title = f"{without_password(src)}, batches of {work.batch_size}{step}"
    return [title, "", *aligned(rows), "", *textwrap.wrap(caption, 88)]


def _record(results: Sequence[SettingResult], work: TrialWork, src: str) -> dict[str, Any]:
    from penstock.insight.budgets import cores_allowed

    best = _best(results)
    return {
        "machine": {"cores": cores_allowed(), "system": platform.platform()},
        "python": platform.python_version(),
        "source": without_password(src),
        "batch_size": work.batch_size,
        "trainer_ms": 1000 * work.step_s,
        "trainer_takes_cpu": work.takes_cpu,
        "left_out": [{"name": n, "reason": r} for n, r in sorted(work.bad_samples.items())],
        "best": {**best.setting._asdict(), "line": work.lines(best.setting)[-1]},
        "settings": [
            {
                **result.setting._asdict(),
                "samples_per_s": result.samples_per_s,
                "wait_share": result.wait_share,
                "cpu_s_per_1000_samples": result.cpu_s_per_1000,
                "memory_bytes": result.memory_bytes,
                "rounds": [turn._asdict() for turn in result.turns],
            }
            for result in results
        ],
    }
