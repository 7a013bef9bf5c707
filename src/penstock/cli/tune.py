# SPDX-License-Identifier: Apache-2.0
"""`penstock tune`: how many workers a dataset needs, found out by trying."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
import textwrap
import time
import warnings
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads the annotations at run time
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import numpy as np
import typer

from penstock.cli.options import SOURCE_HELP
from penstock.cli.reasons import errors_in_code
from penstock.cli.terminal import INTERRUPTED, Bar, check_output, write_output
from penstock.data.labels.known import is_iterable
from penstock.errors import ConfigError
from penstock.insight.budgets import cores_allowed
from penstock.lines import counted, format_bytes, say
from penstock.loader import Loader
from penstock.redact import without_password
from penstock.sampling.balance import aligned
from penstock.usage import cpu_seconds, memory_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

_WARM_UP: Final = 5  # batches, beyond those under way
_PREFETCHED: Final = 2  # under way per worker: the default of both loaders
_NEAR: Final = 0.97  # of the best rate: not worth more workers

Compared = StrEnum("Compared", ["torch"])


class Setting(NamedTuple):
    """Workers, and "penstock" or "torch"."""

    num_workers: int
    loader: str = "penstock"


class Turn(NamedTuple):
    """What one setting gave and cost in one round."""

    samples: int
    seconds: float
    wait_s: float  # of these the main process waited
    cpu_s: float | None  # of main process and workers; None where the system does not count them
    memory_bytes: int | None  # the most of begin and end; None as above


Results = dict[Setting, list[Turn]]


def tune(
    src: Annotated[str, typer.Argument(metavar="SRC", help=SOURCE_HELP)],
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a batch.")] = 64,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,…", help="Counts of workers to try.", show_default="up to twice the cores"
        ),
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Batches measured in a turn.")] = 60,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each setting.")] = 2,
    trainer_ms: Annotated[
        float, typer.Option(min=0, help="A training step that takes so long is made up.")
    ] = 0,
    compare: Annotated[
        Compared | None,
        typer.Option(help="Try the same counts of workers with torch's own loader as well."),
    ] = None,
    collate: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="The collate_fn that makes batches.")
    ] = None,
    size: Annotated[
        int,
        typer.Option(
            min=1,
            help="Side of the images in pixels, where SRC is a folder, list or store of images: "
            "photos are cropped and resized as for training, annotated ones fitted in.",
        ),
    ] = 224,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures here as well.")
    ] = None,
) -> None:
    """Try counts of workers, and print the line with the best one.

    In a folder, list or store, other samples take the place of those that cannot be read; an error
    of a dataset of yours ends it.

    All settings take their turn in each round, with workers of their own, which are warm before the
    time is taken. The best one is that with the fewest workers within 3 % of the highest rate. With
    --trainer-ms it is the best for a training whose step takes that long. Ctrl-C shows what is
    known by then.
    """
    from penstock.cli.sources import dataset_named, names_code, object_made

    check_output("--json", json_file)
    words = [word.strip() for word in workers.split(",")] if workers is not None else []
    if not all(map(str.isdecimal, words)):
        raise ConfigError(f"--workers must be numbers from 0 on, as 2,4, got {workers!r}.")
    counts = dict.fromkeys(map(int, words)) or usual_workers(cores_allowed())
    if compare is not None:
        import torch.utils.data  # noqa: F401 - its user gets `penstock.torch.DataLoader`
    is_code = names_code(src)
    with ExitStack() as stack:
        if is_code:
            with errors_in_code(src):
                dataset = object_made(src, "__len__")
        else:
            dataset = stack.enter_context(dataset_named(src))
        collate_fn = None if is_code else _made_loadable(dataset, size)
        if collate is not None:
            with errors_in_code(collate):
                collate_fn = object_made(collate, "__call__")
        arguments: dict[str, Any] = {"batch_size": batch_size}
        if not is_iterable(dataset):
            arguments["shuffle"] = True
        if collate_fn is not None:
            arguments["collate_fn"] = collate_fn
        work = TrialWork(
            dataset=dataset,
            kinds=_kinds(compare=compare is not None),
            arguments=arguments,
            # An error of the user's own code ends the trial.
            on_error="raise" if is_code else "replace",
            num_batches=batches,
            step_s=trainer_ms / 1000,
        )
        settings = [Setting(number, loader) for loader in work.kinds for number in counts]
        results, is_stopped = _try_all(work, settings, rounds, src)
    if results:
        best = best_of(results)
        for line in _table(results, best, work, src):
            say(line)
        if work.bad_samples:
            say(
                f"{counted(len(work.bad_samples), 'sample')} cannot be read; others took their "
                "place. `penstock check` lists all that are broken."
            )
        for line in work.lines(best):
            say(line)
        if json_file is not None:
            record = json.dumps(_record(results, best, work, src), indent=2)
            write_output("--json", json_file, f"{record}\n")
    if is_stopped:
        raise typer.Exit(INTERRUPTED)


def _try_all(
    work: TrialWork, settings: list[Setting], rounds: int, src: str
) -> tuple[Results, bool]:
    """Return what is known, and whether a Ctrl-C or SIGTERM came before all was."""
    turns: list[tuple[Setting, Turn]] = []
    is_stopped = False
    with Bar() as bar, warnings.catch_warnings(), errors_in_code(src):
        # They are counted below the table.
        warnings.filterwarnings("ignore", r"epoch \d+: .* bad sample", UserWarning)
        try:
            for _, setting in itertools.product(range(rounds), settings):
                bar.show(len(turns), rounds * len(settings), counted(setting[0], "worker"))
                turns.append((setting, work.take_turn(setting)))
        except KeyboardInterrupt:
            say("penstock: stopped; this is what was measured by then.", err=True)
            is_stopped = True
    tried = [setting for setting, _ in turns[: len(settings)]]
    return {s: [turn for setting, turn in turns if setting == s] for s in tried}, is_stopped


def _figures(turns: list[Turn]) -> dict[str, Any]:
    """Return the figures of a setting over its rounds, as JSON has them."""
    costs = [turn.cpu_s for turn in turns if turn.cpu_s is not None]
    samples = sum(turn.samples for turn in turns)
    memory = max((turn.memory_bytes for turn in turns if turn.memory_bytes), default=None)
    return {
        "samples_per_s": statistics.median(turn.samples / turn.seconds for turn in turns),
        "wait_share": sum(turn.wait_s for turn in turns) / sum(turn.seconds for turn in turns),
        "cpu_s_per_1000_samples": 1000 * sum(costs) / samples if costs else None,
        "memory_bytes": memory,
    }


def best_of(results: Results, loader: str = "penstock") -> Setting:
    """Return the setting with the fewest workers within 3 % of the best, of `loader` if it can."""
    rates = {setting: float(_figures(turns)["samples_per_s"]) for setting, turns in results.items()}
    rates = {setting: rate for setting, rate in rates.items() if setting.loader == loader} or rates
    near = [setting for setting, rate in rates.items() if rate >= _NEAR * max(rates.values())]
    return min(near)


def _table(results: Results, best: Setting, work: TrialWork, src: str) -> list[str]:
    rows = [["loader", "workers", "samples/s", "waiting", "CPU s/1k", "memory", ""]]
    for setting, turns in results.items():
        rate, waiting, cpu_s, memory = _figures(turns).values()
        rows.append([
            setting.loader,
            str(setting.num_workers),
            f"{rate:,.0f}",
            f"{waiting:.0%}",
            "unknown" if cpu_s is None else f"{cpu_s:.2f}",
            "unknown" if memory is None else format_bytes(memory),
            "best" if setting == best else "",
        ])  # fmt: skip
    caption = (
        "waiting: the main process's share of the time. CPU seconds and memory: of main process "
        "and workers."
    )
    if len(work.kinds) == 1:
        rows = [row[1:] for row in rows]
    elif any(setting.loader == "torch" for setting in results):  # Ctrl-C may come before
        of_both = (results[best], results[best_of(results, "torch")])
        ours, theirs = (_figures(turns)["samples_per_s"] for turns in of_both)
        caption += f" Penstock's best gives {ours / theirs:.2f} x the rate of torch's best."
    title = f"{without_password(src)}, batches of {work.arguments['batch_size']}"
    return [title, "", *aligned(rows), "", *textwrap.wrap(caption, 88)]


def _record(results: Results, best: Setting, work: TrialWork, src: str) -> dict[str, Any]:
    return {
        "source": without_password(src),
        "batch_size": work.arguments["batch_size"],
        "trainer_ms": 1000 * work.step_s,
        "num_bad_samples": len(work.bad_samples),
        "best": {**best._asdict(), "line": work.lines(best)[-1]},
        "settings": [
            {**setting._asdict(), **_figures(turns), "rounds": [t._asdict() for t in turns]}
            for setting, turns in results.items()
        ],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialWork:
    """The loading work that every setting is timed on."""

    dataset: Any
    kinds: Mapping[str, Any]  # of loaders, by the name that a setting has for them
    arguments: dict[str, Any]  # of the loader, without those that a setting decides
    on_error: str
    num_batches: int  # that are measured in a turn
    step_s: float = 0.0  # of a training step between two of them
    bad_samples: set[int | None] = field(default_factory=set)  # by number

    def take_turn(self, setting: Setting) -> Turn:
        """Run one setting, with workers of its own, from its warm-up to its end."""
        options, own, wait_s = self._options(setting), os.getpid(), 0.0
        if setting.loader == "penstock":
            options["on_error"] = self.on_error
        # Batches of one size alone, as their samples are counted so.
        loader = self.kinds[setting.loader](self.dataset, drop_last=True, **options)
        try:
            with closing(endless(loader)) as batches:  # and with it the loader's workers go
                for _ in range(_WARM_UP + setting.num_workers * _PREFETCHED):
                    next(batches)
                memory, cpu_before = memory_bytes(own), cpu_seconds(own)
                begun_s = now_s = time.perf_counter()
                for _ in range(self.num_batches):
                    next(batches)
                    wait_s += time.perf_counter() - now_s
                    time.sleep(self.step_s)  # as for a GPU
                    now_s = time.perf_counter()
                cpu_after = cpu_seconds(own)
                return Turn(
                    self.num_batches * self.arguments["batch_size"],
                    now_s - begun_s,
                    wait_s,
                    None if cpu_before is None or cpu_after is None else cpu_after - cpu_before,
                    max(memory or 0, memory_bytes(own) or 0) or None,
                )
        except StopIteration:
            raise ConfigError("the dataset gives no full batch; lower --batch-size.") from None
        finally:
            self.bad_samples.update(f.index for f in getattr(loader, "failures", ()))

    def _options(self, setting: Setting) -> dict[str, Any]:
        options = {**self.arguments, "num_workers": setting.num_workers}
        if setting.num_workers:
            options["persistent_workers"] = True  # a small dataset has many epochs in one turn
        return options

    def lines(self, setting: Setting) -> list[str]:
        """Return the lines to paste: the import, and the loader that was measured."""
        options = self._options(setting)
        if self.bad_samples:
            options["on_error"] = self.on_error
        words = ["dataset", *(f"{name}={_written(v)}" for name, v in options.items())]
        kind = self.kinds[setting.loader]
        package = kind.__module__.rpartition(".")[0]
        return [f"from {package} import {kind.__name__}", f"{kind.__name__}({', '.join(words)})"]


def _kinds(*, compare: bool) -> dict[str, Any]:
    """Return the classes to measure: the one of a user of torch where torch is imported."""
    if "torch" not in sys.modules:
        return {"penstock": Loader}
    import torch.utils.data

    from penstock.torch import DataLoader

    of_torch = {"torch": torch.utils.data.DataLoader} if compare else {}
    return {"penstock": DataLoader, **of_torch}


def _made_loadable(dataset: Any, size: int) -> Callable[[list[Any]], Any] | None:  # noqa: ANN401
    """Give images a transform if they have none; return the collate function that they need."""
    if getattr(dataset, "transform", True) is not None or not len(dataset):
        return None
    loader: Loader[list[Any]] = Loader(dataset, 1, collate_fn=list, on_error="skip")
    (sample,) = next(iter(loader), [None])
    if sample is None:
        raise ConfigError(f"no sample can be read. One of them: {loader.failures[0]}")
    if isinstance(sample, dict) and "image" in sample:
        from penstock.vision import Letterbox, detection_collate

        dataset.transform = Letterbox(size)
        return detection_collate
    if isinstance(sample, tuple) and isinstance(sample[0], np.ndarray) and sample[0].ndim == 3:
        from penstock.vision import ImagePipeline

        dataset.transform = ImagePipeline.train(size)
    return None


def _written(value: Any) -> str:  # noqa: ANN401
    """Return an argument as it is written; a function by its name."""
    if value is None or isinstance(value, (bool, int)):
        return repr(value)
    return f'"{value}"' if isinstance(value, str) else getattr(value, "__name__", "collate_fn")


def endless(loader: Any) -> Generator[object, None, None]:  # noqa: ANN401
    """Yield a loader's batches, epoch by epoch, until one has none."""
    is_empty = False
    while not is_empty:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
            del batch  # or its slot is held while the next one is awaited


def usual_workers(cores: float) -> list[int]:
    """Return counts of workers worth a try: 0, 1, 2, 4, … to twice the cores.

    Workers that wait for storage take no core, so more of them than cores may be right.

    Example:
        >>> usual_workers(2.0), usual_workers(6.0)
        ([0, 1, 2, 4], [0, 1, 2, 4, 6, 8, 12])
    """
    most = max(2 * math.ceil(cores), 1)
    doubling = (1 << power for power in range(most.bit_length()))
    return sorted({0, math.ceil(cores), most, *(n for n in doubling if n <= most)})
