# SPDX-License-Identifier: Apache-2.0
"""How fast are small samples made into batches, when the dataset gives one at a time?

Question
    Most datasets have `__getitem__` alone. What does the loader itself take per sample, where the
    sample takes next to nothing: a row of 32 float32 of a table in memory?

Method
    torch     `torch.utils.data.DataLoader(shuffle=True)` without workers.
    penstock  `penstock.torch.DataLoader(shuffle=True)` without workers, on the same dataset object.

    Three datasets: rows that are tensors, rows that are numpy arrays, and pairs of such an array
    and an int. Batches of 1,024, and of 64 for the pairs. Each timed epoch is a whole one, after a
    warm-up of one in which every row is checked.

    The figure to meet is torch's.

Left out
    Making the table; workers; the training step.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6

Command
    python benchmarks/row_by_row.py --save

Result
    2026-11-23, 5 rounds, medians (least - greatest), M samples/s:

                         torch                  penstock
    tensors              0.788 (0.782 - 0.813)  0.705 (0.691 - 0.721)  0.89 x
    arrays               0.493 (0.465 - 0.501)  1.53  (1.48  - 1.54 )  3.10 x
    pairs                0.413 (0.409 - 0.431)  0.983 (0.961 - 1.00 )  2.38 x
    pairs, batches of 64 0.460 (0.439 - 0.466)  0.593 (0.566 - 0.603)  1.29 x

    CPU per batch of 1,024: 1313 us against 1468 us, 2093 against 687, 2497 against 1058. torch
    makes a tensor of each array; Penstock copies the arrays and makes one. Of tensors it looks at
    the dtypes first, as they are stacked into memory of one; and ordering, timing and accounting
    for a batch takes some 35 us.

What it does not show
    Samples that cost something to make, and workers. Whoever has rows in memory reads them faster
    by the batch: see tiny_samples.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from _meter import Meter
from _runner import Benchmark, Reading, Target, check, data_loader

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_NUM_COLUMNS = 32


@dataclass(frozen=True, slots=True)
class Size:
    """Rows of the table, and epochs."""

    num_samples: int
    num_epochs: int


class Rows:
    """Row by row of a table."""

    def __init__(self, table: Any) -> None:  # noqa: ANN401 - an array or a tensor
        """Keep the table."""
        self._table = table

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._table)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        """Return a view of a row."""
        return self._table[index]


class Pairs(Rows):
    """Row by row of a table, each with a number."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Return a view of a row, and its number."""
        return self._table[index], index


def read(
    size: Size,
    library: Literal["torch", "penstock"],
    kind: Literal["tensors", "arrays", "pairs"],
    batch_size: int,
) -> Reading:
    """Read whole epochs after a checked one."""
    import torch

    # Number i + j in row i, column j: exact in float32 up to 16.7 M, and every row can be checked.
    table = np.arange(size.num_samples, dtype=np.float32)[:, None] + np.arange(
        _NUM_COLUMNS, dtype=np.float32
    )
    rows = torch.from_numpy(table) if kind == "tensors" else table
    dataset = Pairs(rows) if kind == "pairs" else Rows(rows)
    loader = data_loader(library)(dataset, batch_size=batch_size, shuffle=True)
    _check(loader, size, kind)
    num_samples = num_batches = 0
    with Meter() as meter:
        for _ in range(size.num_epochs):
            for batch in loader:
                num_samples += len(batch[0] if kind == "pairs" else batch)
                num_batches += 1
    check(num_samples == size.num_epochs * size.num_samples, f"{num_samples} samples came")
    return Reading.of(meter, num_samples / meter.wall_s / 1e6, num_batches)


def _check(loader: DataLoader[Any], size: Size, kind: str) -> None:
    import torch

    columns = torch.arange(_NUM_COLUMNS).float()
    seen = []
    for step, batch in enumerate(loader):
        rows = batch[0] if kind == "pairs" else batch
        check(rows.dtype == torch.float32, f"batch {step} has dtype {rows.dtype}")
        check(torch.equal(rows, rows[:, :1] + columns), f"batch {step} has torn rows")
        seen.append(rows[:, 0].long())
        if kind == "pairs":
            check(torch.equal(batch[1], seen[-1]), f"batch {step} has numbers of other rows")
    indices = torch.cat(seen)
    check(sorted(indices.tolist()) == list(range(size.num_samples)), "not every row came once")
    check(not torch.equal(indices, torch.arange(len(indices))), "the order is not shuffled")


WORKS = {
    "tensors": partial(read, kind="tensors", batch_size=1024),
    "arrays": partial(read, kind="arrays", batch_size=1024),
    "pairs": partial(read, kind="pairs", batch_size=1024),
    "pairs, batch 64": partial(read, kind="pairs", batch_size=64),
}
BENCHMARK = Benchmark(
    file=__file__,
    unit="M samples/s",
    better="higher",
    contenders={
        f"{library}, {name}": partial(work, library=library)
        for name, work in WORKS.items()
        for library in ("torch", "penstock")
    },
    full=Size(num_samples=500_000, num_epochs=3),
    smoke=Size(num_samples=2_000, num_epochs=2),
    targets=tuple(Target(f"penstock, {name}", f"torch, {name}", at_least=1.0) for name in WORKS),
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
