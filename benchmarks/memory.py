# SPDX-License-Identifier: Apache-2.0
"""Does the memory of the workers grow while they read a large list?

Question
    5,000,000 paths of 58 characters in the dataset, 4 workers, one epoch of 200,000 random reads.
    How much memory do the workers have for themselves, and does it grow over the epoch?

Method
    list          The paths are a Python list. A forked worker shares its pages at first; reading a
                  string writes to its reference count, so that the system copies the page for that
                  worker.
    PackedList    `penstock.data.PackedList`: two arrays, without a reference count per path. Forked
                  and spawned.

    The dataset class is the same. At 10 points, after each tenth of the epoch, the private memory
    (USS: what would be free at once if they ended) of the 4 workers is summed, from the consumer's
    process, while they work. Every sample carries the number read from its path, which is checked,
    and the id of the process that made it, which tells who the workers are. The figure is the sum
    at the last point; `growth` is the last point divided by the first. Flat means a growth of at
    most 1.05. The epoch is read by `RandomSampler(replacement=True)`.

    No warm-up, as the growth from the start on is the question. 1 round is enough for the shape;
    the command takes 3.

Left out
    Time: the points are read while the workers work, and disturb them. A spawned worker with a
    plain list, which under torch gets a full copy of 5 M strings each and is at its worst before
    the first read.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6

Command
    python benchmarks/memory.py --save

Result
    2026-11-21, 3 rounds, private memory of the 4 workers in MB after each tenth of the epoch:

    torch, list, fork           129 207 283 355 425 492 557 619 680 738    grown 5.7-fold
    penstock, list, fork        129 206 281 353 423 490 554 616 676 734    grown 5.7-fold
    penstock, PackedList, fork   41.3 at all ten points                    flat
    penstock, PackedList, spawn 102  78  77.5 from the third point on      flat

    A list of strings grows under Penstock as it does under torch: no loader can help it.

What it does not show
    Memory of decoding, which is the same for all. The private memory of a spawned worker holds an
    interpreter and numpy of its own (of torch too, where a loader imports it), which a forked one
    shares with its parent: compare growths across start methods, not sums.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from _meter import Meter, private_memory_bytes
from _plain_dataset import PathNumbers
from _runner import Benchmark, Reading, Target, check, data_loader

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.utils.data import DataLoader

_NUM_WORKERS = 4
_NUM_POINTS = 10


@dataclass(frozen=True, slots=True)
class Size:
    """Paths in the dataset, reads in the epoch, reads per batch."""

    num_paths: int
    num_reads: int
    batch_size: int


def read(
    size: Size,
    library: Literal["torch", "penstock"],
    paths: Literal["list", "packed"],
    start_method: Literal["fork", "spawn"],
) -> Reading:
    """Read one epoch, weighing the workers on the way."""
    loader = _loader(size, library, paths, start_method)
    num_batches = size.num_reads // size.batch_size
    pids: set[int] = set()
    points_mb: list[float] = []
    with Meter() as meter:
        for step, (indices, numbers, made_by) in enumerate(loader, start=1):
            check(len(indices) == size.batch_size, f"batch {step} has {len(indices)} samples")
            check((indices == numbers).all(), f"batch {step} has another sample's path")
            pids.update(made_by.tolist())
            if step % (num_batches // _NUM_POINTS) == 0:
                points_mb.append(private_memory_bytes(pids) / 1e6)
            if len(points_mb) == _NUM_POINTS:
                break
    check(len(points_mb) == _NUM_POINTS, f"the epoch ended after {len(points_mb)} points")
    check(len(pids) == _NUM_WORKERS, f"{len(pids)} of {_NUM_WORKERS} workers answered")
    growth = points_mb[-1] / points_mb[0]
    return Reading.of(
        meter, points_mb[-1], num_batches, {"growth": growth}, {"private MB": points_mb}
    )


def _loader(
    size: Size, library: Literal["torch", "penstock"], paths: str, start_method: str
) -> DataLoader[tuple[torch.Tensor, ...]]:
    from torch.utils.data import RandomSampler

    container: Sequence[str] = [PathNumbers.path(index) for index in range(size.num_paths)]
    if paths == "packed":
        from penstock.data import PackedList

        container = PackedList(container)
    gc.collect()
    dataset = PathNumbers(container)
    # A little longer than what is read, so that no worker has ended by the last point.
    num_samples = size.num_reads + 4 * _NUM_WORKERS * size.batch_size
    return data_loader(library)(
        dataset,
        batch_size=size.batch_size,
        sampler=RandomSampler(dataset, replacement=True, num_samples=num_samples),
        num_workers=_NUM_WORKERS,
        multiprocessing_context=start_method,
    )


BENCHMARK = Benchmark(
    file=__file__,
    unit="MB",
    better="lower",
    contenders={
        "torch, list, fork": partial(read, library="torch", paths="list", start_method="fork"),
        "penstock, list, fork": partial(
            read, library="penstock", paths="list", start_method="fork"
        ),
        "penstock, PackedList, fork": partial(
            read, library="penstock", paths="packed", start_method="fork"
        ),
        "penstock, PackedList, spawn": partial(
            read, library="penstock", paths="packed", start_method="spawn"
        ),
    },
    full=Size(num_paths=5_000_000, num_reads=200_000, batch_size=100),
    smoke=Size(num_paths=50_000, num_reads=2_000, batch_size=10),
    targets=(
        Target("penstock, PackedList, fork", figure="growth", at_most=1.05),
        Target("penstock, PackedList, spawn", figure="growth", at_most=1.05),
        Target("penstock, PackedList, fork", "torch, list, fork"),
    ),
    rounds=3,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
