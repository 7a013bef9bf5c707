# SPDX-License-Identifier: Apache-2.0
"""What does a shuffled order cost that is computed instead of stored?

Question
    Nanoseconds per index when an epoch's order is taken in blocks of 65,536; microseconds until its
    first index; memory. At 10 million items against a stored shuffle, and at 10^10 items, where a
    shuffle would take 80 GB.

Method
    torch randperm     `torch.randperm(n)`, cut into views.
    numpy permutation  `Generator.permutation(n)` of a Philox generator, cut into views.
    penstock           `Permutation(n, (seed, epoch))`, its blocks taken as slices.

    Four epochs of 10 million indices each (of 10^10 items: the first 10 million). Making the order
    is timed with the rest, since a new one is due in every epoch. Each block is summed, which reads
    it once, and the sums must be those of range(n); at 10^10 items they must be near, and no index
    may come twice in a block. "first us" is from nothing to the Python int of position 0, imports
    and a small warm-up excluded, the median of five. "order MB" is the peak of what Python and
    numpy allocate to make an order and to take one block of it (tracemalloc; for torch, the size
    of its tensor). The targets are, for both sizes of penstock's, < 100 ns per index, a first index
    in < 1 ms and < 1 MB.

Left out
    What reading samples in a random order costs.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6

Command
    python benchmarks/permutation.py --rounds 2

Result
    2026-11-21, 2 rounds, medians (the two rounds differ by up to 10 %):

                            ns/index   first index   order     whole process
    torch randperm, 10M         31.7    348,000 us   80 MB     390 MB
    numpy permutation, 10M      45.3    439,000 us   80 MB     194 MB
    penstock, 10M               25.0         29 us    0.86 MB   37 MB
    penstock, 10^10             21.8         29 us    0.86 MB   37 MB

    0.52 of the 0.86 MB are the block that is handed over. Computing an order costs less than
    storing one: 10 million numbers do not fit into a cache, and shuffling goes all over them. 10
    million items take longer than 10^10 because 1 in 7,000 values is too large and is computed
    again, and 10^10 is a square.

What it does not show
    Single indices: `Permutation(n)[i]` takes some 5 us, a stored one 0.1 us. That the order is
    random: tests/sampling/test_permutation.py does.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from _meter import Meter
from _runner import Benchmark, Reading, Target, check

if TYPE_CHECKING:
    from collections.abc import Callable

_BLOCK = 1 << 16
_SEED = 7


@dataclass(frozen=True, slots=True)
class Size:
    """How much is taken, and of how many items; `num_many` stands for those of 10^10."""

    num_items: int
    num_many: int
    num_epochs: int


def torch_order(n: int, epoch: int) -> Any:  # noqa: ANN401 - a tensor
    import torch

    return torch.randperm(n, generator=torch.Generator().manual_seed(_SEED + epoch))


def numpy_order(n: int, epoch: int) -> Any:  # noqa: ANN401
    import numpy as np

    return np.random.Generator(np.random.Philox([_SEED, epoch])).permutation(n)


def penstock_order(n: int, epoch: int) -> Any:  # noqa: ANN401
    from penstock.sampling.permutation import Permutation

    return Permutation(n, (_SEED, epoch))


def take(size: Size, make: Callable[[int, int], Any], *, many: bool = False) -> Reading:
    """Take the first `num_items` of some epochs, in blocks."""
    n = size.num_many if many else size.num_items
    int(make(10_000, 0)[0])
    more = {"first us": first_us(make, n), "order MB": order_bytes(make, n) / 1e6}
    totals = []
    with Meter() as meter:
        for epoch in range(size.num_epochs):
            order, total = make(n, epoch), 0
            for start in range(0, size.num_items, _BLOCK):
                total += int(order[start : min(start + _BLOCK, size.num_items)].sum())
            totals.append(total)
    for total in totals:
        right = size.num_items * (n - 1) / 2
        # Six standard deviations of a sum of so many random numbers; of all of them, none.
        slack = 6 * n * (size.num_items / 12) ** 0.5 if many else 0
        check(abs(total - right) <= slack, f"an epoch sums up to {total}, not {right}")
    check(len(set(make(n, 0)[:_BLOCK].tolist())) == min(n, _BLOCK), "an index came twice")
    num_taken = size.num_items * size.num_epochs
    num_blocks = -(-size.num_items // _BLOCK) * size.num_epochs
    return Reading.of(meter, meter.wall_s / num_taken * 1e9, num_blocks, more)


def first_us(make: Callable[[int, int], Any], n: int) -> float:
    times_us = []
    for epoch in range(5):
        start_s = time.perf_counter()
        int(make(n, epoch)[0])
        times_us.append((time.perf_counter() - start_s) * 1e6)
    return statistics.median(times_us)


def order_bytes(make: Callable[[int, int], Any], n: int) -> int:
    tracemalloc.start()
    order = make(n, 0)
    block = order[:_BLOCK]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del block
    return max(peak_bytes, getattr(order, "nbytes", 0))


_PENSTOCK = ("penstock, 10M", "penstock, 10^10")

BENCHMARK = Benchmark(
    file=__file__,
    unit="ns/index",
    better="lower",
    contenders={
        "torch randperm, 10M": partial(take, make=torch_order),
        "numpy permutation, 10M": partial(take, make=numpy_order),
        "penstock, 10M": partial(take, make=penstock_order),
        "penstock, 10^10": partial(take, make=penstock_order, many=True),
    },
    full=Size(num_items=10_000_000, num_many=10**10, num_epochs=4),
    smoke=Size(num_items=100_000, num_many=10**10, num_epochs=1),
    targets=(
        *(Target(name, at_most=100) for name in _PENSTOCK),
        *(Target(name, at_most=1000, figure="first us") for name in _PENSTOCK),
        *(Target(name, at_most=1, figure="order MB") for name in _PENSTOCK),
        Target("penstock, 10M", "torch randperm, 10M"),
        Target("penstock, 10M", "numpy permutation, 10M"),
    ),
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
