# SPDX-License-Identifier: Apache-2.0
"""Does `num_workers="auto"` find what a search by hand finds, and does `stats()` know why?

Question
    Three made-up trainings: samples that cost CPU, a store that takes 20 ms for a read, and a
    main process that is slower than its data. Does auto, from cold, come within 10 % of the best
    fixed setting within 200 batches? Does it hold back on a single core? Is the verdict of
    `stats()` right, at the start and at the end? Is the stream that of `num_workers=0`, bit for
    bit?

Method
    Batches of 8. "cpu": about 1 ms per sample in a hash function, which releases the GIL, as
    decoders do; the main process sleeps 1 ms, as one that waits for a GPU. "store": a sample sleeps
    20 ms, which is what a blocking read is to everyone else; the main process sleeps 10 ms.
    "trainer": samples cost nothing, and the main process sleeps 20 ms.

    penstock, T, N workers, prefetch P    `penstock.loader.Loader` with a fixed setting. Measured
                                          for 2 s and 12 batches at least, after as many as are
                                          under way at a time and four more.
    penstock, T, auto                     The first 200 batches from cold, then measured for 2 s.
    penstock, T, auto, threads            The same, `backend="thread"`.
    penstock, T, auto, one core           The same as auto after `os.sched_setaffinity` to one core,
                                          which is what `taskset` does.
    torch, T, N workers                   torch's DataLoader with 2, 32 and 1 of them.

    "last change" is after how many batches auto changed anything for the last time, "workers" and
    "most workers" what it ended with and the most it had at any time, "cold s" what its first 200
    batches took. "waits %" is the main process's share of waiting in the measured part, by its own
    clock. "verdict" is 1 if `stats().verdict` at the end of the run names what it must: for fixed
    settings with 1 worker "workers" or "cpu", "storage", and "trainer"; for others "trainer" if the
    main process waited less than 5 % of the measured part, else as before, or for the store
    "bursts". The texts go to stderr. In each run of auto a checksum of the first 200 batches,
    shuffled and with a random number in each sample, must be that of `num_workers=0`; it goes to
    stderr, too.

Left out
    The start of the interpreter and imports. `penstock tune`, which does such a search by itself.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6

Command
    python benchmarks/autotune.py --save

Result
    2026-11-22, 2 rounds, medians; samples/s after batch 200, and auto's ratio to the best fixed
    setting of the grid:

                best fixed setting               auto          threads       one core
    cpu         2 workers, prefetch 4   1,664    1,635  0.98   1,575  0.95     820
    store       16 workers, prefetch 4    748      741  0.99     753  1.01     734
    trainer     1 worker, prefetch 4      382      380  0.99     380  0.99     378

    torch's loader with the best count: 1,430, 669, 355. Auto changed something for the last time
    after batch 79, 14 and 0; threads after 113, 85 and 0. It ended with 2, 19 and 1 workers, on one
    core with 1, 19 and 1: workers that sleep in a read take no core. With one worker the verdicts
    were workers, storage and trainer. One check failed: the store's verdict under auto was
    "trainer", as by stats() the main process waited 4 to 5 %, where by this file's own clock it was
    5.5 %, above the 5 % from which on it is to say storage. All 27 streams had the CRC of
    num_workers=0.

What it does not show
    Trainings whose costs change while they run, uneven samples, and data that weighs something:
    tests/insight has made-up records of such. Storage whose reads get slower the more there are.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import time
import zlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from _meter import Meter
from _runner import Benchmark, Reading, Target, check, data_loader, write

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt

_BATCH_SIZE = 8
_NUM_SAMPLES = _BATCH_SIZE * 20_000
_SEED = 7
_FEWEST = 12
_TRAINER_WAITS = 0.05  # below it there is nothing to do, and the verdict is to say so
_HASHED_BYTES = 1_000_000  # about 1 ms
_READ_S = 0.020
_TRAINER_S = {"cpu": 0.001, "store": 0.010, "trainer": 0.020}
_VERDICTS = {
    "cpu": {"workers", "cpu"},
    "store": {"storage"},
    "trainer": {"trainer"},
}
_ALSO_LATER: dict[str, set[str]] = {
    "cpu": set(),
    "store": {"bursts"},  # of workers that began together
    "trainer": {"workers"},  # without any, where the samples take 5 % of the time
}
_GRID = {
    "cpu": [(0, 0), (1, 2), (1, 4), (2, 2), (2, 4), (4, 2), (4, 4)],
    "store": [(1, 2), (4, 2), (8, 2), (8, 4), (16, 2), (16, 4), (32, 2)],
    "trainer": [(0, 0), (1, 2), (1, 4), (2, 2), (4, 2)],
}
_TORCH_WORKERS = {"cpu": 2, "store": 32, "trainer": 1}


@dataclass(frozen=True, slots=True)
class Size:
    """Batches that auto has to find settings, and the seconds in which a setting is measured."""

    num_cold: int
    seconds: float


@functools.cache
def _hashed() -> bytes:
    return bytes(range(256)) * (_HASHED_BYTES // 256)


class Samples:
    """Sample `i` is (i, a random number), float64, and costs what its training says."""

    def __init__(self, training: str, *, draws: bool = True) -> None:
        """Cost what `training` says: "cpu", "store", or anything else for nothing.

        Args:
            training: Which.
            draws: Whether the number is drawn by Penstock's generator of the sample; else it is 0.
        """
        self._training = training
        self._draws = draws

    def __len__(self) -> int:
        """Return the number of samples."""
        return _NUM_SAMPLES

    def __getitem__(self, index: int) -> npt.NDArray[np.float64]:
        """Return a sample of shape (2,)."""
        if self._training == "cpu":
            hashlib.blake2b(_hashed()).digest()
        elif self._training == "store":
            time.sleep(_READ_S)
        return np.array((index, self._draw()))

    def _draw(self) -> float:
        if not self._draws:
            return 0.0
        from penstock import sample_rng

        return float(sample_rng().random())


def make_loader(dataset: Samples, num_workers: int | str, **options: Any) -> Any:  # noqa: ANN401
    """Return a seeded loader."""
    from penstock.loader import Loader

    return Loader(
        dataset,
        batch_size=_BATCH_SIZE,
        shuffle=True,
        seed=_SEED,
        num_workers=num_workers,
        **options,
    )


@dataclass(frozen=True, slots=True)
class Run:
    """A while of training.

    Attributes:
        meter: What it took.
        num_batches: Given in it.
        wait_share: Of the time the main process waited, as it saw it itself.
    """

    meter: Meter
    num_batches: int
    wait_share: float

    def reading(self, more: dict[str, float], series: dict[str, list[float]]) -> Reading:
        """Return samples per second, and the rest."""
        value = self.num_batches * _BATCH_SIZE / self.meter.wall_s
        return Reading.of(self.meter, value, self.num_batches, more, series)


def measure(batches: Iterator[Any], training: str, size: Size) -> Run:
    """Train for a while."""
    num_batches, wait_s = 0, 0.0
    with Meter() as meter:
        while num_batches < _FEWEST or meter.elapsed_s() < size.seconds:
            asked_s = meter.elapsed_s()
            batch = next(batches)
            wait_s += meter.elapsed_s() - asked_s
            check(len(batch) == _BATCH_SIZE, f"a batch of {len(batch)}")
            time.sleep(_TRAINER_S[training])
            num_batches += 1
    return Run(meter, num_batches, wait_s / meter.wall_s)


def fixed(size: Size, training: str, num_workers: int, prefetch: int) -> Reading:
    """Train with a fixed setting."""
    options = {"prefetch_factor": prefetch} if num_workers else {}
    loader = make_loader(Samples(training), num_workers, **options)
    batches = iter(loader)
    for _ in range(num_workers * prefetch + 4):
        next(batches)
        time.sleep(_TRAINER_S[training])
    run = measure(batches, training, size)
    return run.reading(account(loader, training, run, is_start=num_workers == 1), {})


def auto(
    size: Size, training: str, backend: str = "process", *, is_one_core: bool = False
) -> Reading:
    """Let the loader find its settings, then measure it."""
    if is_one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    loader = make_loader(Samples(training), "auto", backend=backend)
    batches = iter(loader)
    checksum, start_s = 0, time.perf_counter()
    for _ in range(size.num_cold):
        checksum = zlib.crc32(np.ascontiguousarray(next(batches)), checksum)
        time.sleep(_TRAINER_S[training])
    cold_s = time.perf_counter() - start_s
    run = measure(batches, training, size)
    more = {**account(loader, training, run), "cold s": cold_s}
    changes = loader.stats().changes
    series = {
        "changed after batch": [float(change.step) for change in changes],
        "workers then": [float(change.num_workers) for change in changes],
        "prefetch then": [float(change.prefetch_factor) for change in changes],
    }
    for change in changes:
        write(
            f"    batch {change.step}: {change.num_workers} workers, prefetch "
            f"{change.prefetch_factor}: {change.reason}",
            to=sys.stderr,
        )
    check_stream(checksum, size.num_cold)
    return run.reading(more, series)


def account(
    loader: Any,  # noqa: ANN401
    training: str,
    run: Run,
    *,
    is_start: bool = False,
) -> dict[str, float]:
    """Return what the loader tells of its run, and whether that is right."""
    stats = loader.stats()
    verdict = stats.verdict
    write(f"    {verdict.bottleneck}: {verdict}", to=sys.stderr)
    if is_start:
        expected = _VERDICTS[training]
    elif run.wait_share < _TRAINER_WAITS:
        expected = {"trainer"}
    else:
        expected = _VERDICTS[training] | _ALSO_LATER[training]
    counts = [change.num_workers for change in stats.changes]
    return {
        "last change": float(stats.changes[-1].step if stats.changes else 0),
        "workers": float(stats.num_workers),
        "prefetch": float(stats.prefetch_factor if stats.num_workers else 0),
        "most workers": float(max([stats.num_workers, *counts])),
        "waits %": 100 * run.wait_share,
        "verdict": float(verdict.bottleneck in expected),
    }


def check_stream(checksum: int, num_batches: int) -> None:
    """Check that the stream under auto was that of no workers; samples that cost nothing do."""
    batches = iter(make_loader(Samples("free"), 0))
    serial = 0
    for _ in range(num_batches):
        serial = zlib.crc32(np.ascontiguousarray(next(batches)), serial)
    write(
        f"    the stream's CRC-32: auto {checksum:08x}, num_workers=0 {serial:08x}", to=sys.stderr
    )
    check(checksum == serial, "the stream under auto is another than with num_workers=0")


def torch_fixed(size: Size, training: str, num_workers: int) -> Reading:
    """Train with torch's loader."""
    loader = data_loader("torch")(
        Samples(training, draws=False),
        batch_size=_BATCH_SIZE,
        shuffle=True,
        num_workers=num_workers,
    )
    batches = iter(loader)
    for _ in range(num_workers * 2 + 4):
        next(batches)
        time.sleep(_TRAINER_S[training])
    run = measure(batches, training, size)
    return run.reading({"waits %": 100 * run.wait_share}, {})


def _fixed_name(training: str, num_workers: int, prefetch: int) -> str:
    if not num_workers:
        return f"penstock, {training}, 0 workers"
    return f"penstock, {training}, {_workers(num_workers)}, prefetch {prefetch}"


def _torch_name(training: str) -> str:
    return f"torch, {training}, {_workers(_TORCH_WORKERS[training])}"


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


def _contenders(training: str) -> dict[str, Callable[[Size], Reading]]:
    return {
        _torch_name(training): partial(
            torch_fixed, training=training, num_workers=_TORCH_WORKERS[training]
        ),
        **{
            _fixed_name(training, *setting): partial(
                fixed, training=training, num_workers=setting[0], prefetch=setting[1]
            )
            for setting in _GRID[training]
        },
        f"penstock, {training}, auto": partial(auto, training=training),
        f"penstock, {training}, auto, threads": partial(auto, training=training, backend="thread"),
        f"penstock, {training}, auto, one core": partial(auto, training=training, is_one_core=True),
    }


def best_fixed(training: str, readings: Mapping[str, Sequence[Reading]]) -> str | None:
    """Return the fixed setting with the highest median; None if none was run."""
    names = [_fixed_name(training, *setting) for setting in _GRID[training]]
    ran = [name for name in names if name in readings]
    return max(ran, key=lambda name: Target(name).reached(readings) or 0.0, default=None)


@dataclass(frozen=True, slots=True)
class NearBest(Target):
    """The figure is divided by that of the best fixed setting, whichever it is.

    Attributes:
        training: Whose settings.
    """

    training: str = ""

    def reached(self, readings: Mapping[str, Sequence[Reading]]) -> float | None:
        """Return the ratio; None where one of the two was not run."""
        best = best_fixed(self.training, readings)
        return None if best is None else Target(self.contender, best).reached(readings)

    def line(self, reached: float) -> str:
        """Return the comparison in words."""
        return Target(self.contender, "the best fixed", at_least=self.at_least).line(reached)


class Trainings(Benchmark[Size]):
    """Says with the figures which fixed settings were best."""

    def _remarks(self, readings: Mapping[str, Sequence[Reading]]) -> list[str]:
        best = [best_fixed(training, readings) for training in _GRID]
        return [f"the best fixed setting: {name}" for name in best if name is not None]

    def _parser(self) -> argparse.ArgumentParser:
        parser = super()._parser()
        parser.epilog = "What stats() says in words, and what auto did, goes to stderr."
        return parser


def _targets(training: str) -> list[Target]:
    name = f"penstock, {training}, auto"
    targets: list[Target] = [
        NearBest(name, at_least=0.9, training=training),
        NearBest(f"{name}, threads", training=training),
        Target(name, _torch_name(training)),
        Target(name, at_most=200, figure="last change"),
        Target(_fixed_name(training, 1, 2), at_least=1, figure="verdict"),
        Target(name, at_least=1, figure="verdict"),
    ]
    if training != "store":  # where more workers than cores are right
        targets.append(Target(f"{name}, one core", at_most=3, figure="most workers"))
    return targets


BENCHMARK = Trainings(
    file=__file__,
    unit="samples/s",
    better="higher",
    contenders={
        name: contender for training in _GRID for name, contender in _contenders(training).items()
    },
    full=Size(num_cold=200, seconds=2.0),
    smoke=Size(num_cold=40, seconds=0.1),
    targets=[target for training in _GRID for target in _targets(training)],
    rounds=2,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
