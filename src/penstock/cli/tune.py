# SPDX-License-Identifier: Apache-2.0
"""`penstock tune`: how many workers a dataset needs, found out by trying."""

from __future__ import annotations

import contextlib
import json
import platform
import textwrap
import warnings
from pathlib import Path  # noqa: TC003 - typer reads the annotations at run time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.arguments import SOURCE_HELP
from penstock.cli.loadable import SIZE_HELP, is_loader, open_loadable
from penstock.cli.outputs import check_output, write_output
from penstock.cli.progress import Bar
from penstock.cli.sigterm import INTERRUPTED, TERMINATED, Termination
from penstock.cli.stats_tables import WIDTH
from penstock.engine.backends import BACKENDS
from penstock.errors import ConfigError
from penstock.lines import amount, say
from penstock.redact import without_password
from penstock.sampling.balance_text import aligned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.cli.given_loader import GivenLoader
    from penstock.cli.tuning_grid import Setting, SettingResult, TrialWork

__all__ = ["tune"]

_USUAL_BATCHES: Final = 60
_USUAL_BATCH_SIZE: Final = 64
_MAX_NAMED: Final = 20  # samples named on the screen; --json has all of them


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
    batches: Annotated[
        int | None,
        typer.Option(min=1, help="Batches measured in a turn.", show_default=str(_USUAL_BATCHES)),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds measured in a turn, instead.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each setting.")] = 2,
    trainer_ms: Annotated[
        float, typer.Option(min=0, help="A training step that takes so long is made up.")
    ] = 0,
    trainer_cpu: Annotated[
        bool,
        typer.Option("--trainer-cpu", help="It keeps a core busy; else it waits, as for a GPU."),
    ] = False,
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
    from penstock.cli.tuning_grid import Length, Trainer, TrialWork

    check_output("--json", json_file)
    if batches is not None and seconds is not None:
        raise ConfigError("--batches and --seconds: give one of them.")
    if trainer_cpu and not trainer_ms:
        raise ConfigError("--trainer-cpu needs --trainer-ms: how long a step takes.")
    settings = _settings(workers, prefetch, backend)
    trainer = Trainer(trainer_ms / 1000, takes_cpu=trainer_cpu)
    length = Length(batches or _USUAL_BATCHES, seconds)
    with contextlib.ExitStack() as stack:
        dataset, collate_fn = open_loadable(src, split, collate, size, stack)
        given = _given(dataset, batch_size, collate, settings) if is_loader(dataset) else None
        work = TrialWork(
            dataset if given is None else given.dataset,
            (batch_size or _USUAL_BATCH_SIZE) if given is None else given.batch_size,
            collate_fn,
            trainer,
            length,
            "raise" if names_a_dataset(src) else "replace",
            given,
        )
        work.check()
        results, status = _try_all(work, settings, rounds, src)
    if results:
        _show(results, work, src)
        if json_file is not None:
            record = json.dumps(_record(results, work, src), indent=2)
            write_output("--json", json_file, f"{record}\n")
    if status:
        raise typer.Exit(status)


def _given(
    loader: Any,  # noqa: ANN401
    batch_size: int | None,
    collate: str | None,
    settings: Sequence[Setting],
) -> GivenLoader:
    from penstock.cli.given_loader import GivenLoader

    if collate is not None:
        raise ConfigError("--collate is for datasets, and SRC is a loader, which has a collate_fn.")
    given = GivenLoader.of(loader, batch_size)
    if not given.takes_backend and any(setting.backend != "process" for setting in settings):
        raise ConfigError("--backend thread needs penstock.torch.DataLoader; SRC is torch's own.")
    return given


def _settings(workers: str | None, prefetch: str, backend: str) -> list[Setting]:
    from penstock.cli.tuning_grid import Setting, usual_workers
    from penstock.insight.budgets import cores_allowed

    counts = usual_workers(cores_allowed())
    if workers is not None:
        counts = _numbers("--workers", workers, least=0)
    factors = _numbers("--prefetch", prefetch, least=1)
    backends = [name.strip() for name in backend.split(",")]
    for name in backends:
        if name not in BACKENDS or not BACKENDS[name].is_local:
            cause = (
                " What Ray's workers give depends on the cluster, and this measures one machine."
                if name in BACKENDS
                else ""
            )
            raise ConfigError(
                f"--backend must name process or thread, or both, got {backend!r}.{cause}"
            )
    settings = [Setting(0, None, backends[0])] if 0 in counts else []
    return settings + [
        Setting(n, f, name)
        for name in dict.fromkeys(backends)
        for n in counts
        if n
        for f in factors
    ]


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
    from penstock.cli.tuning_grid import best_of

    best = best_of(results)
    for line in [
        *_table(results, best, work, src), *_bad_samples(work), *work.lines(best.setting),
    ]:  # fmt: skip
        say(line)


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
    step = f", steps of {1000 * work.trainer.seconds:g} ms" if work.trainer.seconds else ""
    rows = [["workers", "prefetch", "backend", "samples/s", "waiting", "CPU s/1k", "memory", ""]]
    for result in results:
        workers, factor, backend = result.setting
        cpu_s, memory = result.cpu_s_per_1000, result.memory_bytes
        rows.append([
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
    num_epochs = max(turn.num_epochs for result in results for turn in result.turns)
    if num_epochs:
        caption += f" The dataset is small: up to {num_epochs} epochs began within a turn."
    title = f"{without_password(src)}, batches of {work.batch_size}{step}"
    return [title, "", *aligned(rows), "", *textwrap.wrap(caption, WIDTH)]


def _record(results: Sequence[SettingResult], work: TrialWork, src: str) -> dict[str, Any]:
    from penstock.cli.tuning_grid import best_of
    from penstock.insight.budgets import cores_allowed

    best = best_of(results)
    return {
        "machine": {"cores": cores_allowed(), "system": platform.platform()},
        "python": platform.python_version(),
        "source": without_password(src),
        "batch_size": work.batch_size,
        "trainer_ms": 1000 * work.trainer.seconds,
        "trainer_takes_cpu": work.trainer.takes_cpu,
        "left_out": [{"name": n, "reason": r} for n, r in sorted(work.bad_samples.items())],
        "best": {**best.setting._asdict(), "line": work.lines(best.setting)[-1]},
        "settings": [
            {
                **result.setting._asdict(),
                "samples_per_s": result.samples_per_s,
                "wait_share": result.wait_share,
                "cpu_s_per_1000_samples": result.cpu_s_per_1000,
                "memory_bytes": result.memory_bytes,
                "rounds": [
                    {
                        "samples": turn.num_samples,
                        "seconds": turn.seconds,
                        "wait_s": turn.wait_s,
                        "cpu_s": turn.cpu_s,
                        "epochs_begun": turn.num_epochs,
                    }
                    for turn in result.turns
                ],
            }
            for result in results
        ],
    }
