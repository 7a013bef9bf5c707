# SPDX-License-Identifier: Apache-2.0
"""`penstock bench`: torch's loader and Penstock's, side by side on a folder of images."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import textwrap
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path  # noqa: TC003 - typer reads the annotations at run time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.outputs import check_output, write_output
from penstock.cli.progress import Bar
from penstock.cli.stats_tables import WIDTH
from penstock.errors import ConfigError, WorkerError
from penstock.lines import say
from penstock.plural import counted
from penstock.sampling.balance_text import aligned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cli.benchmark_process import BenchmarkProcess, BenchmarkWork, EpochResult
    from penstock.cli.decoding import Broken

__all__ = ["bench"]

_MAX_NAMED: Final = 20  # broken files named on the screen; --json has all of them


@dataclass(frozen=True, slots=True)
class _LoaderResult:
    """What one loader did: its checked epochs, and its rounds."""

    name: str
    checks: list[EpochResult]
    rounds: list[list[EpochResult]]

    def rates(self) -> list[float]:
        """Samples per second of each round."""
        return [sum(e.num_samples for e in r) / sum(e.wall_s for e in r) for r in self.rounds]

    def cpu_s_per_1000(self) -> float | None:
        """Median over the rounds."""
        costs = [
            1000 * sum(e.cpu_s or 0.0 for e in r) / sum(e.num_samples for e in r)
            for r in self.rounds
        ]
        return None if self.rounds[0][0].cpu_s is None else statistics.median(costs)

    def peak_bytes(self) -> int | None:
        """Highest over the checked epochs."""
        return max((c.peak_bytes for c in self.checks if c.peak_bytes), default=None)

    def delivered(self) -> list[tuple[int, int]]:
        """Number of samples and checksum of each epoch."""
        epochs = [*self.checks, *(epoch for r in self.rounds for epoch in r)]
        return [(epoch.num_samples, epoch.checksum) for epoch in epochs]


def bench(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Searched for images, subfolders included.")
    ],
    workers: Annotated[int, typer.Option(min=0, help="Worker processes of each loader.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Images in a batch.")] = 64,
    size: Annotated[int, typer.Option(min=1, help="Height and width of a crop, in pixels.")] = 224,
    rounds: Annotated[int, typer.Option(min=1, help="Timed turns of each loader.")] = 5,
    warmup: Annotated[int, typer.Option(min=1, help="Untimed epochs before them.")] = 1,
    epochs_per_round: Annotated[int, typer.Option(min=1, help="Epochs in one turn.")] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures here as well.")
    ] = None,
) -> None:
    """Compare torch's DataLoader with Penstock's on a folder of images.

    Both read the same files with the same plain torch dataset: decode, random-resized crop, flip,
    normalise to float32. Each loader has a process of its own with persistent workers, which are
    started in the untimed warm-up epochs; there all batches are compared bit by bit and memory is
    measured. Then the loaders run in turn, with the same seed in the same round.
    """
    from penstock.cli.benchmark_process import BenchmarkWork
    from penstock.cli.decoding import find_images, sort_out_broken

    check_output("--json", json_file)
    paths, broken = sort_out_broken(find_images(folder), num_threads=os.cpu_count() or 1)
    _report_broken(broken)
    if not paths:
        raise ConfigError(f"none of the {len(broken)} images in {folder} can be decoded.")
    work = BenchmarkWork(paths, size, batch_size, workers)
    results = _compare(work, warmup, rounds, epochs_per_round)
    for line in _table(results, work):
        say(line)
    _check_same(results)
    say(f"Both loaders gave bit-identical batches in {counted(warmup, 'checked epoch')}.")
    if json_file is not None:
        record = json.dumps(_record(results, work, broken), indent=2)
        write_output("--json", json_file, f"{record}\n")


def _report_broken(broken: Sequence[Broken]) -> None:
    for file in broken[:_MAX_NAMED]:
        say(f"left out {file.name}: {file.reason}")
    if len(broken) > _MAX_NAMED:
        say(f"… and {len(broken) - _MAX_NAMED} more")
    if broken:
        say(f"{counted(len(broken), 'file')} cannot be decoded: left out.")


def _compare(
    work: BenchmarkWork, num_warmups: int, num_rounds: int, epochs_per_round: int
) -> list[_LoaderResult]:
    from penstock.cli.benchmark_process import BenchmarkProcess

    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(BenchmarkProcess("torch", work)),
            stack.enter_context(BenchmarkProcess("penstock", work)),
        ]
        results = [_LoaderResult(process.name, [], []) for process in processes]
        bar = stack.enter_context(Bar())
        for turn in range(num_warmups + num_rounds):
            is_check = turn < num_warmups
            for number, (process, result) in enumerate(zip(processes, results, strict=True)):
                what = "warm-up" if is_check else f"round {turn - num_warmups + 1}"
                done = 2 * turn + number
                bar.show(done, 2 * (num_warmups + num_rounds), f"{what}: {process.name}")
                if is_check:
                    result.checks.append(_run(process, turn, is_check=True))
                else:
                    seeds = range(turn * epochs_per_round, (turn + 1) * epochs_per_round)
                    result.rounds.append([_run(process, s, is_check=False) for s in seeds])
    return results


def _run(process: BenchmarkProcess, seed: int, *, is_check: bool) -> EpochResult:
    process.request(seed, is_check=is_check)
    return process.result()


def _check_same(results: Sequence[_LoaderResult]) -> None:
    ours, theirs = (result.delivered() for result in results)
    for epoch, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            raise WorkerError(
                f"the loaders gave different batches in epoch {epoch} under the same seed: "
                f"{results[0].name} {one[0]} samples, checksum {one[1]:08x}; "
                f"{results[1].name} {other[0]} samples, checksum {other[1]:08x}. "
                "This is a defect of Penstock: please report it."
            )


def _table(results: Sequence[_LoaderResult], work: BenchmarkWork) -> list[str]:
    rows = [["loader", "samples/s", "min-max", "CPU s/1,000", "memory", "ratio"]]
    base = statistics.median(results[0].rates())
    for result in results:
        rates, cpu_s, peak = result.rates(), result.cpu_s_per_1000(), result.peak_bytes()
        rows.append([
            f"{result.name} {version(result.name).partition('+')[0]}",
            f"{statistics.median(rates):,.0f}",
            f"{min(rates):,.0f}-{max(rates):,.0f}",
            "unknown" if cpu_s is None else f"{cpu_s:.2f}",
            "unknown" if peak is None else f"{peak / 2**20:,.0f} MiB",
            f"{statistics.median(rates) / base:.2f}x",
        ])  # fmt: skip
    title = (
        f"{counted(len(work.paths), 'image')}, {work.size_px} px, batches of {work.batch_size}, "
        f"{counted(work.num_workers, 'worker')}, {counted(len(results[0].rounds), 'round')}"
    )
    caption = (
        "samples/s: median of the rounds, workers already running. "
        "CPU seconds and peak memory: main process and workers, with all batches that lie ready. "
        "Penstock keeps the memory of its batches for the next ones, whether they are in use or "
        "not; torch makes and frees memory for each batch, so between two it may have less."
    )
    return [title, "", *aligned(rows), "", *textwrap.wrap(caption, WIDTH), ""]


def _record(
    results: Sequence[_LoaderResult], work: BenchmarkWork, broken: Sequence[Broken]
) -> dict[str, Any]:
    base = statistics.median(results[0].rates())
    return {
        "machine": {"cpus": os.cpu_count(), "system": platform.platform()},
        "python": platform.python_version(),
        "num_images": len(work.paths),
        "left_out": [{"path": file.name, "reason": file.reason} for file in broken],
        "size_px": work.size_px,
        "batch_size": work.batch_size,
        "num_workers": work.num_workers,
        "loaders": {
            result.name: {
                "version": version(result.name),
                "samples_per_s": result.rates(),
                "median_samples_per_s": statistics.median(result.rates()),
                "ratio": statistics.median(result.rates()) / base,
                "cpu_s_per_1000_samples": result.cpu_s_per_1000(),
                "peak_bytes": result.peak_bytes(),
                "checks": [asdict(check) for check in result.checks],
                "rounds": [[asdict(epoch) for epoch in r] for r in result.rounds],
            }
            for result in results
        },
    }
