# SPDX-License-Identifier: Apache-2.0
"""What does a batch cost that weighs nothing?

Question
    8-byte samples, batches of 1 and of 16, 2 workers: batches per second, and CPU microseconds per
    batch over all processes. What is left when there is no data to move: index drawing, task
    messages, collate, hand-over.

Method
    Both loaders get the same dataset, which returns one int64 scalar per index, and their default
    collate. In-order, prefetch factor 2, the machine's default start method. One warm-up epoch in
    which every number is checked, then one timed epoch with the same workers (`persistent_workers`)
    in which the consumer takes the length of each batch. The target is >= 2 x torch's batches/s at
    both batch sizes.

Left out
    Start of the workers. Shuffling.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6

Command
    python benchmarks/overhead.py --save

Result
    2026-11-21, 5 rounds, medians (least - greatest), batches/s:

                torch                  penstock                  ratio
    batch 1     1206 (882 - 1514)      11,770 (10,720 - 15,630)   9.8 x
    batch 16     951 (841 - 1160)      10,440 ( 9,610 - 13,280)  11.0 x

    CPU per batch: 1086 us against 135 us, 1258 us against 152 us.

What it does not show
    Anything about data that weighs something: see transport.py and tiny_samples.py. With 2 workers
    and a consumer on 2 cores the three compete for the processor, so batches/s and CPU per batch
    are two views of the same cost; on more cores the rate rises and the CPU per batch stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from _meter import Meter
from _plain_dataset import EightByteSamples
from _runner import Benchmark, Reading, Target, check, data_loader


@dataclass(frozen=True, slots=True)
class Size:
    """Batches per epoch."""

    num_batches: int


def read(size: Size, library: Literal["torch", "penstock"], batch_size: int) -> Reading:
    """Read one epoch after a checked warm-up."""
    loader = data_loader(library)(
        EightByteSamples(size.num_batches * batch_size),
        batch_size=batch_size,
        num_workers=2,
        persistent_workers=True,
    )
    for step, batch in enumerate(loader):
        right = list(range(step * batch_size, (step + 1) * batch_size))
        check(batch.tolist() == right, f"batch {step} is {batch.tolist()}, not {right}")
    num_samples = 0
    with Meter() as meter:
        for batch in loader:
            num_samples += len(batch)
    check(num_samples == size.num_batches * batch_size, f"{num_samples} samples came")
    return Reading.of(meter, size.num_batches / meter.wall_s, size.num_batches)


_BATCH_SIZES = (1, 16)
_LIBRARIES: tuple[Literal["torch", "penstock"], ...] = ("torch", "penstock")

BENCHMARK = Benchmark(
    file=__file__,
    unit="batches/s",
    better="higher",
    contenders={
        f"{library}, batch {batch_size}": partial(read, library=library, batch_size=batch_size)
        for batch_size in _BATCH_SIZES
        for library in _LIBRARIES
    },
    full=Size(num_batches=20_000),
    smoke=Size(num_batches=50),
    targets=tuple(
        Target(f"penstock, batch {batch_size}", f"torch, batch {batch_size}", at_least=2.0)
        for batch_size in _BATCH_SIZES
    ),
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
