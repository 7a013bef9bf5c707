# SPDX-License-Identifier: Apache-2.0
"""`penstock tune`: how many workers a dataset needs, found out by trying."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import platform
import statistics
import textwrap
import time
import warnings
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads the annotations at run time
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from penstock.cli.options import SOURCE_HELP, Collate, ImageSize, Split, TrainerMs
from penstock.cli.reasons import errors_in_code, reason_of
from penstock.cli.terminal import INTERRUPTED, Bar, check_output, write_output
from penstock.errors import ConfigError
from penstock.insight.budgets import cores_allowed
from penstock.lines import amount, say
from penstock.plural import counted
from penstock.redact import without_password
from penstock.sampling.balance_text import aligned
from penstock.usage import cpu_seconds, memory_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

__all__ = ["Setting", "TrialWork", "Turn", "best_of", "endless", "tune"]

_USUAL_BATCH_SIZE: Final = 64
_MAX_NAMED: Final = 20  # samples named on the screen; --json has all of them
_WARM_UP: Final = 5  # batches, beyond those under way
_USUAL_PREFETCH: Final = 2
_NEAR: Final = 0.97  # of the best rate: not worth more workers

# Arguments that a setting decides, and those that `_batching` derives.
_NOT_KEPT: Final = (
    "dataset", "num_workers", "prefetch_factor", "persistent_workers", "batch_size", "drop_last",
    "shuffle", "sampler", "batch_sampler",
)  # fmt: skip

Compared = StrEnum("Compared", ["torch"])


class Setting(NamedTuple):
    """One point of the grid: workers, batches under way per worker, "penstock" or "torch"."""

    num_workers: int
    prefetch_factor: int | None
    loader: str = "penstock"


class Turn(NamedTuple):
    """What one setting gave and cost in one round.

    Attributes:
        samples: Samples given.
        seconds: That took.
        wait_s: Of these the main process waited.
        cpu_s: CPU seconds of main process and workers; None where the system does not count them.
        memory_bytes: Of main process and workers, the most of begin and end; None as above.
    """

    samples: int
    seconds: float
    wait_s: float
    cpu_s: float | None
    memory_bytes: int | None


Results = dict[Setting, list[Turn]]


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
        str | None,
        typer.Option(metavar="N,N,…", help="Batches under way per worker to try, besides."),
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Batches measured in a turn.")] = 60,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each setting.")] = 2,
    trainer_ms: TrainerMs = 0,
    compare: Annotated[
        Compared | None,
        typer.Option(help="Try the same counts of workers with torch's own loader as well."),
    ] = None,
    collate: Collate = None,
    split: Split = None,
    size: ImageSize = 224,
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
    from penstock.cli.sources import is_loader, loadable_named, names_code

    check_output("--json", json_file)
    counts = _numbers("--workers", workers, least=0) or usual_workers(cores_allowed())
    factors = _numbers("--prefetch", prefetch, least=1) or [_USUAL_PREFETCH]
    if compare is not None:
        import torch.utils.data  # noqa: F401 - its user gets `penstock.torch.DataLoader`
    with loadable_named(src, split, collate, size) as (dataset, collate_fn):
        is_made = is_loader(dataset)
        if is_made and collate is not None:
            raise ConfigError("--collate is for datasets; SRC is a loader, with a collate_fn.")
        kind, arguments = (
            _of_loader(dataset, batch_size)
            if is_made
            else _of_dataset(dataset, batch_size or _USUAL_BATCH_SIZE, collate_fn)
        )
        sampler = arguments.get("batch_sampler")
        work = TrialWork(
            dataset=dataset.dataset if is_made else dataset,
            kinds=_kinds(kind, compare=compare is not None),
            arguments=arguments,
            batch_size=arguments.get("batch_size") or getattr(sampler, "batch_size", None) or 1,
            # Of what the user has written, its own arguments or "raise" hold.
            on_error="" if is_made else "raise" if names_code(src) else "replace",
            num_batches=batches,
            step_s=trainer_ms / 1000,
        )
        grid = dict.fromkeys((n, factor if n else None) for n in counts for factor in factors)
        settings = [Setting(*pair, loader) for loader in work.kinds for pair in grid]
        results, is_stopped = _try_all(work, settings, rounds, src)
    if results:
        best = best_of(results)
        for line in [
            *_table(results, best, work, src), *_bad_samples(work), *work.lines(best),
        ]:  # fmt: skip
            say(line)
        if json_file is not None:
            record = json.dumps(_record(results, best, work, src), indent=2)
            write_output("--json", json_file, f"{record}\n")
    if is_stopped:
        raise typer.Exit(INTERRUPTED)


def _numbers(option: str, text: str | None, *, least: int) -> list[int]:
    words = [word.strip() for word in text.split(",")] if text is not None else []
    if not all(word.isdecimal() and int(word) >= least for word in words):
        raise ConfigError(f"{option} must be numbers of at least {least}, as 2,4, got {text!r}.")
    return list(map(int, words))


def _try_all(
    work: TrialWork, settings: list[Setting], rounds: int, src: str
) -> tuple[Results, bool]:
    """Return what is known, and whether a Ctrl-C or SIGTERM came before all was."""
    turns: list[tuple[Setting, Turn]] = []
    is_stopped = False
    with Bar() as bar, warnings.catch_warnings(), errors_in_code(src):
        # They are named below the table.
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
    """Return the setting with the fewest workers, and the least prefetched, within 3 % of the best.

    Args:
        results: At least one turn of each setting.
        loader: Whose settings; of all if there are none of it.
    """
    rates = {setting: float(_figures(turns)["samples_per_s"]) for setting, turns in results.items()}
    rates = {setting: rate for setting, rate in rates.items() if setting.loader == loader} or rates
    near = [setting for setting, rate in rates.items() if rate >= _NEAR * max(rates.values())]
    return min(near, key=lambda s: (s.num_workers, s.prefetch_factor or 0))


def _bad_samples(work: TrialWork) -> Iterator[str]:
    """Yield a line for each sample that could not be read, up to some, and one for all."""
    for name, reason in sorted(work.bad_samples.items())[:_MAX_NAMED]:
        yield without_password(f"left out {name}: {reason}")
    if work.bad_samples:
        yield (
            f"{len(work.bad_samples):,} samples cannot be read; others took their place. "
            "`penstock check` lists all that are broken."
        )


def _table(results: Results, best: Setting, work: TrialWork, src: str) -> list[str]:
    rows = [["loader", "workers", "prefetch", "samples/s", "waiting", "CPU s/1k", "memory", ""]]
    for setting, turns in results.items():
        rate, waiting, cpu_s, memory = _figures(turns).values()
        rows.append([
            setting.loader,
            str(setting.num_workers),
            "-" if setting.prefetch_factor is None else str(setting.prefetch_factor),
            f"{rate:,.0f}",
            f"{waiting:.0%}",
            "unknown" if cpu_s is None else f"{cpu_s:.2f}",
            "unknown" if memory is None else amount(memory),
            "best" if setting == best else "",
        ])  # fmt: skip
    caption = (
        "waiting: the main process's share of the time. CPU seconds and memory: of main process "
        "and workers."
    )
    if len(work.kinds) == 1:
        rows = [row[1:] for row in rows]
    else:
        of_both = (results[best], results[best_of(results, "torch")])
        ours, theirs = (_figures(turns)["samples_per_s"] for turns in of_both)
        caption += f" Penstock's best gives {ours / theirs:.2f} x the rate of torch's best."
    title = f"{without_password(src)}, batches of {work.batch_size}"
    return [title, "", *aligned(rows), "", *textwrap.wrap(caption, 88)]


def _record(results: Results, best: Setting, work: TrialWork, src: str) -> dict[str, Any]:
    return {
        "machine": {"cores": cores_allowed(), "system": platform.platform()},
        "python": platform.python_version(),
        "source": without_password(src),
        "batch_size": work.batch_size,
        "trainer_ms": 1000 * work.step_s,
        "left_out": [{"name": n, "reason": r} for n, r in sorted(work.bad_samples.items())],
        "best": {**best._asdict(), "line": work.lines(best)[-1]},
        "settings": [
            {
                **setting._asdict(),
                **_figures(turns),
                "rounds": [turn._asdict() for turn in turns],
            }
            for setting, turns in results.items()
        ],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialWork:
    """The loading work that every setting is timed on.

    Attributes:
        dataset: Of any kind.
        kinds: The loader's class, by the name that a setting has for it.
        arguments: Of the loader, without those that a setting decides.
        batch_size: Samples in a batch.
        on_error: What becomes of samples that cannot be made; "" leaves it to the arguments.
        num_batches: How many are measured in a turn.
        step_s: What a training step takes between two of them.
        bad_samples: Those that could not be made, by name, with the reason; it grows with the
            turns.
    """

    dataset: Any
    kinds: Mapping[str, Any]
    arguments: dict[str, Any]
    batch_size: int
    on_error: str = ""
    num_batches: int
    step_s: float = 0.0
    bad_samples: dict[str, str] = field(default_factory=dict)

    def take_turn(self, setting: Setting) -> Turn:
        """Run one setting, with workers of its own, from its warm-up to its end."""
        loader, own, wait_s = self._loader(setting), os.getpid(), 0.0
        try:
            with closing(endless(loader)) as batches:  # and with it the loader's workers go
                for _ in range(_WARM_UP + setting.num_workers * (setting.prefetch_factor or 0)):
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
                    self.num_batches * self.batch_size,
                    now_s - begun_s,
                    wait_s,
                    None if cpu_before is None or cpu_after is None else cpu_after - cpu_before,
                    None if memory is None else max(memory, memory_bytes(own) or 0),
                )
        except StopIteration:
            raise ConfigError("the dataset gives no full batch; lower --batch-size.") from None
        finally:
            for failure in getattr(loader, "failures", ()):
                name = failure.name or f"sample {failure.index}"
                self.bad_samples[name] = reason_of(failure.error)

    def _loader(self, setting: Setting) -> Any:  # noqa: ANN401 - one of several classes
        kind, options = self.kinds[setting.loader], self._options(setting)
        options.pop("progress", None)  # bars of its own would cover this command's
        if self.on_error:
            options["on_error"] = self.on_error
        known = inspect.signature(kind).parameters
        return kind(self.dataset, **{name: v for name, v in options.items() if name in known})

    def _options(self, setting: Setting) -> dict[str, Any]:
        options = {**self.arguments, "num_workers": setting.num_workers}
        if setting.num_workers:
            options["prefetch_factor"] = setting.prefetch_factor
            options["persistent_workers"] = True  # a small dataset has many epochs in one turn
        return options

    def lines(self, setting: Setting) -> list[str]:
        """Return the lines to paste: the import, and the loader that was measured."""
        options = self._options(setting)
        if self.bad_samples and self.on_error:
            options["on_error"] = self.on_error
        words = ["dataset", *(f"{name}={_written(name, v)}" for name, v in options.items())]
        kind = self.kinds[setting.loader]
        package = kind.__module__.rpartition(".")[0]
        return [f"from {package} import {kind.__name__}", f"{kind.__name__}({', '.join(words)})"]


def _of_dataset(
    dataset: Any,  # noqa: ANN401
    batch_size: int,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> tuple[Any, dict[str, Any]]:
    """Return the class and arguments of a loader that shuffles a dataset, as its owner's would."""
    from penstock.cli.sources import is_iterable, loader_class

    arguments: dict[str, Any] = {"batch_size": batch_size}
    if not is_iterable(dataset):
        if len(dataset) < batch_size:
            raise ConfigError(
                f"the dataset has {len(dataset)} samples, fewer than --batch-size {batch_size}; "
                "lower it."
            )
        arguments["shuffle"] = True
    arguments["drop_last"] = True  # all of one size
    if collate_fn is not None:
        arguments["collate_fn"] = collate_fn
    return loader_class(), arguments


def _of_loader(loader: Any, batch_size: int | None) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401
    """Return the class and arguments of a loader that the user has made.

    Of a subclass it is the class of torch or Penstock below it, whose arguments are known.
    """
    kind = next((k for k in type(loader).__mro__ if _is_known(k)), None)
    if kind is None:
        raise ConfigError(
            f"the arguments of a {type(loader).__qualname__} are not known. Name its dataset."
        )
    arguments = _batching(loader)
    if batch_size is not None:
        if arguments.get("batch_size") is None:
            raise ConfigError("--batch-size: the loader has a batch sampler, or batch_size=None.")
        arguments["batch_size"] = batch_size
    for name, parameter in inspect.signature(kind).parameters.items():
        value = getattr(loader, name, parameter.default)
        is_default = value is parameter.default or value == parameter.default
        if name == "collate_fn":  # a partial or an object has no name
            written = getattr(value, "__name__", "")
            is_default = is_default or written in ("default_collate", "default_convert")
        if name not in _NOT_KEPT and not is_default:
            arguments[name] = value
    return kind, arguments


def _kinds(own: Any, *, compare: bool) -> dict[str, Any]:  # noqa: ANN401 - one of several classes
    """Return the classes to measure: a loader's own, or for a comparison Penstock's and torch's."""
    if not compare:
        return {"penstock": own}
    import torch.utils.data

    from penstock.torch import DataLoader

    ours = DataLoader if own.__module__.startswith("torch.") else own
    return {"penstock": ours, "torch": torch.utils.data.DataLoader}


def _is_known(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "penstock") and hasattr(kind, "__iter__")


def _batching(loader: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the arguments that decide which samples make a batch."""
    from penstock.cli.sources import is_iterable

    if loader.batch_size is None and loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    arguments: dict[str, Any] = {"batch_size": loader.batch_size}
    sampler = loader.sampler
    name = type(sampler).__name__
    is_shuffle = name == "RandomSampler" and not getattr(sampler, "replacement", False)
    if is_shuffle and getattr(sampler, "num_samples", None) == len(loader.dataset):
        arguments["shuffle"] = True
    elif name != "SequentialSampler" and not is_iterable(loader.dataset):
        arguments["sampler"] = sampler
    if loader.drop_last:
        arguments["drop_last"] = True
    return arguments


def _written(name: str, value: Any) -> str:  # noqa: ANN401
    """Return an argument as it is written; an object by the name it has, or its argument's."""
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, str) or type(value).__name__ == "device":  # torch's
        return f'"{value}"'
    return getattr(value, "__name__", None) or name


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
