# SPDX-License-Identifier: Apache-2.0
"""How long does one wait for the first batch?

Question
    4 spawned workers, and a dataset that needs numpy alone. Seconds from `iter(loader)` to the
    first batch, and to the moment at which a batch of each of the 4 workers has come.

Method
    Both loaders get the same dataset object, whose class lives in a module that imports numpy only
    (_plain_dataset.py); torch is imported inside the functions of this file, because a spawned
    worker imports the main module again. Each contender is a fresh process, so each round is a
    first start. Before the clock starts, torch and the loader are imported and the loader is built:
    what is timed is the start of the workers and one batch. Each sample carries the id of the
    process that made it, which tells when all 4 have answered.

    No warm-up within a round: there is no second first start. The first round warms the system's
    file cache.

Left out
    The import of torch in the main process, which both loaders need. Datasets that use torch: their
    workers have to import it under either loader. `fork`, which starts in milliseconds under
    either.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6

Command
    python benchmarks/first_batch.py --save

Result
    2026-11-21, 5 rounds, medians (least - greatest), seconds:

                first batch              all 4 workers
    torch       2.33 (2.21 - 2.61)       3.14
    penstock    0.343 (0.306 - 0.383)    0.441
    ratio       0.15                     0.14

    CPU: 6.2 s against 0.85 s, nearly all of it the imports of the four workers.

What it does not show
    The speed once started. The first start after boot, with a cold disk. CPU seconds count live
    workers in ticks of 10 ms and end when the last of the 4 has answered, not when all are idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from _meter import Meter
from _plain_dataset import PlainVectors
from _runner import Benchmark, Reading, Target, check, data_loader


@dataclass(frozen=True, slots=True)
class Size:
    """Workers and batches; the epoch must outlast the slowest worker's start."""

    num_workers: int
    batch_size: int
    num_batches: int


def start(size: Size, library: Literal["torch", "penstock"]) -> Reading:
    """Start workers and wait until each has answered."""
    loader = data_loader(library)(
        PlainVectors(size.batch_size * size.num_batches),
        batch_size=size.batch_size,
        num_workers=size.num_workers,
        multiprocessing_context="spawn",
    )
    first_s = 0.0
    pids: set[int] = set()
    batches = []
    with Meter() as meter:
        for vectors, made_by in loader:
            first_s = first_s or meter.elapsed_s()
            pids.update(made_by.tolist())
            batches.append(vectors)
            if len(pids) == size.num_workers:
                break
    check(len(pids) == size.num_workers, f"{len(pids)} of {size.num_workers} workers answered")
    for step, vectors in enumerate(batches):
        indices = range(step * size.batch_size, (step + 1) * size.batch_size)
        check(vectors.shape == (size.batch_size, 64), f"batch {step} has shape {vectors.shape}")
        right = [[float(index)] * 64 for index in indices]
        check(vectors.tolist() == right, f"batch {step} has other numbers")
    return Reading.of(meter, first_s, len(batches), {"all workers s": meter.wall_s})


BENCHMARK = Benchmark(
    file=__file__,
    unit="s",
    better="lower",
    contenders={
        "torch": partial(start, library="torch"),
        "penstock": partial(start, library="penstock"),
    },
    full=Size(num_workers=4, batch_size=8, num_batches=64),
    smoke=Size(num_workers=2, batch_size=8, num_batches=64),
    targets=(
        Target("penstock", "torch", at_most=0.2),
        Target("penstock", "torch", figure="all workers s"),
    ),
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
