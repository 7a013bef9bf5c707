# SPDX-License-Identifier: Apache-2.0
"""How many tiny samples per second come out of memory, shuffled?

Question
    A table of 1,000,000 rows of 32 float32 lies in memory. How fast does one read it in shuffled
    batches of 1,024, and how near does that come to the gather that the work cannot do without?

Method
    torch     `torch.utils.data.TensorDataset` and `DataLoader(shuffle=True)`, with 0 and with 2
              workers.
    penstock  `penstock.torch.DataLoader`, with 0 and with 2 workers, on that same torch
              `TensorDataset` object ("same dataset") and on `penstock.torch.TensorDataset` ("own
              dataset").
    limit     One `torch.index_select` per batch with a permutation made beforehand: no loader at
              all.

    Each timed epoch is a whole one, the drawing of its order included (torch turns the permutation
    into a list of a million ints at its start; a part of an epoch would not be charged its share).
    torch reads one epoch per round, the faster ones several, so that each timed part takes seconds.
    Warm-up: some batches, checked row by row; with workers they live on (`persistent_workers`)
    after it. The consumer takes the length of each batch. Threads of torch: as it sets them.

    The figure to meet is >= 25 x torch with the same number of workers, on the same dataset object,
    and >= 0.7 of the limit without workers.

Left out
    Making the table; start of the workers; the training step. The limit does not draw its
    permutation.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6

Command
    python benchmarks/tiny_samples.py --save

Result
    2026-11-21, 5 rounds, medians (least - greatest), M samples/s:

    torch, 0 workers                   0.390 (0.376 - 0.391)
    penstock, same dataset, 0 workers  11.2  (11.0  - 12.2)    28.6 x torch, 0.38 x limit
    penstock, own dataset, 0 workers   11.3  (10.8  - 12.2)    29.0 x torch, 0.38 x limit
    torch, 2 workers                   0.308 (0.287 - 0.342)
    penstock, same dataset, 2 workers   3.7  ( 3.4  -  4.0)    12.2 x torch
    penstock, own dataset, 2 workers    3.8  ( 3.6  -  4.3)    12.4 x torch
    limit                              29.5  (29.1  - 29.7)

    Of the 101 us of CPU per batch without workers, 35 are the gather and some 20 the permutation
    of a million, which the limit has ready; the rest is the loader. Workers cost more than they
    bring here: a batch of 128 KB is made faster than two processes can be woken for it.

What it does not show
    Samples that cost something to make. Tables larger than memory. Whether workers are of any use
    for tables in memory: a gather is memory-bound, and the consumer's own process does it without a
    hand-over.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from _meter import Meter
from _runner import Benchmark, Reading, Target, check, data_loader

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader


@dataclass(frozen=True, slots=True)
class Size:
    """Rows and columns of the table, rows per batch, and how much is read."""

    num_samples: int
    num_columns: int
    batch_size: int
    num_warmup_batches: int
    num_epochs: int

    @property
    def num_batches(self) -> int:
        """Return the batches of an epoch, the last of which may be short."""
        return -(-self.num_samples // self.batch_size)


def _table(size: Size) -> torch.Tensor:
    import torch

    # Number i + j in row i, column j: exact in float32 up to 16.7 M, and every row can be checked.
    return torch.arange(size.num_samples).float()[:, None] + torch.arange(size.num_columns).float()


def read(
    size: Size,
    library: Literal["torch", "penstock"],
    dataset: Literal["torch", "penstock"],
    num_workers: int,
) -> Reading:
    """Read whole epochs after a checked warm-up."""
    if dataset == "torch":
        from torch.utils.data import TensorDataset
    else:
        from penstock.torch import TensorDataset

    loader = data_loader(library)(
        TensorDataset(_table(size)),
        batch_size=size.batch_size,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
    _warm_up(loader, size)
    num_epochs = 1 if library == "torch" else size.num_epochs
    num_samples = 0
    with Meter() as meter:
        for _ in range(num_epochs):
            for (rows,) in loader:
                num_samples += len(rows)
    check(num_samples == num_epochs * size.num_samples, f"{num_samples} samples came")
    return Reading.of(meter, num_samples / meter.wall_s / 1e6, num_epochs * size.num_batches)


def _warm_up(loader: DataLoader[tuple[torch.Tensor, ...]], size: Size) -> None:
    import torch

    columns = torch.arange(size.num_columns).float()
    seen = []
    for step, (rows,) in enumerate(loader):
        check(rows.dtype == torch.float32, f"batch {step} has dtype {rows.dtype}")
        check(rows.shape[1:] == columns.shape, f"batch {step} has shape {tuple(rows.shape)}")
        check(torch.equal(rows, rows[:, :1] + columns), f"batch {step} has torn rows")
        seen.append(rows[:, 0].long())
        if step + 1 == size.num_warmup_batches:
            break
    indices = torch.cat(seen)
    check(len(indices.unique()) == len(indices), "a sample came twice")
    check(not torch.equal(indices, torch.arange(len(indices))), "the order is not shuffled")
    whole = size.num_warmup_batches >= size.num_batches
    check(not whole or len(indices) == size.num_samples, f"{len(indices)} samples in an epoch")


def gather(size: Size) -> Reading:
    """Gather each batch with one call, the order ready."""
    import torch

    table = _table(size)
    orders = [torch.randperm(size.num_samples).split(size.batch_size) for _ in range(2)]
    num_samples = 0
    for indices in orders[0][: size.num_warmup_batches]:
        rows = table.index_select(0, indices)
        check(torch.equal(rows[:, 0].long(), indices), "the gather took other rows")
    with Meter() as meter:
        for epoch in range(size.num_epochs):
            for indices in orders[epoch % 2]:
                num_samples += len(table.index_select(0, indices))
    return Reading.of(meter, num_samples / meter.wall_s / 1e6, size.num_epochs * size.num_batches)


BENCHMARK = Benchmark(
    file=__file__,
    unit="M samples/s",
    better="higher",
    contenders={
        "torch, 0 workers": partial(read, library="torch", dataset="torch", num_workers=0),
        "penstock, same dataset, 0 workers": partial(
            read, library="penstock", dataset="torch", num_workers=0
        ),
        "penstock, own dataset, 0 workers": partial(
            read, library="penstock", dataset="penstock", num_workers=0
        ),
        "torch, 2 workers": partial(read, library="torch", dataset="torch", num_workers=2),
        "penstock, same dataset, 2 workers": partial(
            read, library="penstock", dataset="torch", num_workers=2
        ),
        "penstock, own dataset, 2 workers": partial(
            read, library="penstock", dataset="penstock", num_workers=2
        ),
        "limit": gather,
    },
    full=Size(
        num_samples=1_000_000, num_columns=32, batch_size=1024, num_warmup_batches=50, num_epochs=10
    ),
    smoke=Size(
        num_samples=2_000, num_columns=32, batch_size=128, num_warmup_batches=16, num_epochs=2
    ),
    targets=(
        Target("penstock, same dataset, 0 workers", "torch, 0 workers", at_least=25.0),
        Target("penstock, own dataset, 0 workers", "torch, 0 workers", at_least=25.0),
        Target("penstock, same dataset, 2 workers", "torch, 2 workers", at_least=25.0),
        Target("penstock, own dataset, 2 workers", "torch, 2 workers", at_least=25.0),
        Target("penstock, same dataset, 0 workers", "limit", at_least=0.7),
        Target("penstock, own dataset, 0 workers", "limit", at_least=0.7),
    ),
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
