# SPDX-License-Identifier: Apache-2.0
"""Is the drop-in slower than torch's loader anywhere?

Question
    A drop-in that is slower than what it replaces is none, and cheap samples show it first: there
    the loader itself is the time. So: every plain use, both loaders, batch by batch.

Method
    A cell is a kind of samples, map-style or a stream, a batch size (1, 8, 32, 256) and a number of
    workers (0 and 2, forked). In each round both loaders of a cell are measured in turn in this
    process, the first batch (start of workers) not counted, for a fixed time each. The figure of a
    cell is the median of the rounds' ratios: batches per second of Penstock / of torch. In the
    first round what both give is compared, value by value, over the first 16 batches.

Left out
    Samples that cost something: there both loaders are as fast as the samples. Memory.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6

Command
    python benchmarks/dropin/never_slower.py --save

Result
    2026-11-25, ratios of 84 cells each:

                  least   median   greatest   below 0.95
    no workers    1.02    1.25     3.89       0
    2 workers     0.90    4.53     11.32      2

    Before batches were measured on demand, and read by the shortest way, 61 of 64 cells of such a
    matrix without workers were below 1. Texts from workers are what is left.

What it does not show
    Whether a training gets faster: where samples cost more than 1 ms, none of this is seen.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

sys.path.insert(0, str(Path(__file__).parents[1]))

from _runner import check, data_loader, machine_facts, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LENGTH: Final = 200_000
_COMPARED: Final = 16  # batches
_NOISE: Final = 0.95
_ROWS: Final = torch.randn(1000, 32)
_PIXELS: Final = torch.randint(0, 255, (64, 64, 64, 3), dtype=torch.uint8)
_ROW_ARRAYS, _PIXEL_ARRAYS = _ROWS.numpy(), _PIXELS.numpy()


class Point(NamedTuple):
    """A named tuple."""

    x: float
    y: int


KINDS: Final[dict[str, Callable[[int], Any]]] = {
    "int": lambda i: i,
    "float": lambda i: i / 2,
    "text": lambda i: f"text {i}",
    "four ints": lambda i: [i, 1, 2, 3],
    "named tuple": lambda i: Point(0.5, i),
    "nested": lambda i: {"a": (i, [0.5, "b"]), "c": {"d": i}},
    "row": lambda i: _ROWS[i % 1000],
    "row and int": lambda i: (_ROWS[i % 1000], i % 10),
    "dict of row and int": lambda i: {"x": _ROWS[i % 1000], "y": i % 10},
    "row array and int": lambda i: (_ROW_ARRAYS[i % 1000], i % 10),
    "image": lambda i: (_PIXELS[i % 64], i % 10),
    "image array": lambda i: (_PIXEL_ARRAYS[i % 64], i % 10),
    "image array, CHW": lambda i: (_PIXEL_ARRAYS[i % 64].transpose(2, 0, 1), i % 10),
}
STREAMS: Final = ("int", "row and int", "image array", "text")


class Samples(Dataset[Any]):
    """Samples of one kind, by index."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        """Make sample i by `make(i)`."""
        self._make = make

    def __len__(self) -> int:
        """Return more than a cell takes."""
        return _LENGTH

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        """Return a sample."""
        return self._make(index)


class Together(Samples):
    """The same, many at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return samples."""
        return [self._make(index) for index in indices]


class Stream(IterableDataset[Any]):
    """The same, dealt out to the workers."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        """Make sample i by `make(i)`."""
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        """Yield a worker's share."""
        info = torch.utils.data.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (self._make(i) for i in range(start, _LENGTH, step))


def keep(samples: list[Any]) -> list[Any]:
    """Collate to a list, as detection code does."""
    return samples


def pairs(samples: list[Any]) -> Any:  # noqa: ANN401
    """Collate by torch's own function, in a function of the user's."""
    return default_collate(samples)


CASES: Final[dict[str, tuple[Any, dict[str, Any]]]] = {
    **{f"{kind}": (Samples(make), {}) for kind, make in KINDS.items()},
    **{f"{kind}, a stream": (Stream(KINDS[kind]), {}) for kind in STREAMS},
    "row and int, shuffled": (Samples(KINDS["row and int"]), {"shuffle": True}),
    "row and int, together": (Together(KINDS["row and int"]), {}),
    "row and int, a list": (Samples(KINDS["row and int"]), {"collate_fn": keep}),
    "row and int, own function": (Samples(KINDS["row and int"]), {"collate_fn": pairs}),
}


def same(one: Any, other: Any) -> bool:  # noqa: ANN401 - batches
    """Return whether two batches are equal, types included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def batches(library: Any, case: str, batch_size: int, num_workers: int) -> Iterator[Any]:  # noqa: ANN401
    """Begin an epoch of a library's loader."""
    dataset, options = CASES[case]
    if num_workers:
        options = {**options, "num_workers": num_workers, "multiprocessing_context": "fork"}
    torch.manual_seed(0)
    return iter(data_loader(library)(dataset, batch_size=batch_size, **options))


def rate_of(library: Any, seconds: float, *cell: Any) -> float:  # noqa: ANN401
    """Return batches per second."""
    taken, found = 0, batches(library, *cell)
    next(found)
    begun = now = time.perf_counter()
    while now - begun < seconds:
        for _ in range(8):
            if next(found, None) is None:  # the epoch is over
                found = batches(library, *cell)
            taken += 1
        now = time.perf_counter()
    return taken / (now - begun)


def ratio_of(cell: tuple[str, int, int], rounds: int, seconds: float) -> dict[str, Any]:
    """Measure a cell."""
    both = (
        list(itertools.islice(batches(library, *cell), _COMPARED))
        for library in ("torch", "penstock")
    )
    for stock, ours in zip(*both, strict=True):
        check(same(stock, ours), f"{cell}: {ours!r} instead of {stock!r}")
    rates = [
        (rate_of("penstock", seconds, *cell), rate_of("torch", seconds, *cell))
        for _ in range(rounds)
    ]
    ratio, ours, stock = sorted((p / t, p, t) for p, t in rates)[rounds // 2]
    case, batch_size, num_workers = cell
    return {
        "case": case,
        "batch_size": batch_size,
        "num_workers": num_workers,
        "ratio": round(ratio, 3),
        "penstock_us": round(1e6 / ours, 2),
        "torch_us": round(1e6 / stock, 2),
    }


def main() -> int:
    """Measure all cells; the exit status is 0 unless a value was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--workers", default="0,2", help="numbers of workers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.25, help="per loader and round")
    parser.add_argument("--smoke", action="store_true", help="a moment per cell, to see it run")
    parser.add_argument("--save", action="store_true", help="write results/never_slower.json")
    options = parser.parse_args()
    rounds, seconds = (1, 0.002) if options.smoke else (options.rounds, options.seconds)
    sizes = (8,) if options.smoke else (1, 8, 32, 256)
    cases = [case for case in CASES if options.only in case]
    numbers = [int(number) for number in options.workers.split(",")]
    found = []
    for cell in itertools.product(cases, sizes, numbers):
        row = ratio_of(cell, rounds, seconds)
        found.append(row)
        write(
            f"{row['ratio']:6.2f} x  {row['penstock_us']:8.1f} us  torch {row['torch_us']:8.1f} us"
            f"  {row['num_workers']} workers, batches of {row['batch_size']:<3}  {row['case']}"
        )
    summary = {}
    for number in numbers:
        ratios = [row["ratio"] for row in found if row["num_workers"] == number]
        summary[f"{number} workers"] = {
            "cells": len(ratios),
            "median": round(statistics.median(ratios), 2),
            "least": min(ratios),
            f"below {_NOISE}": sum(ratio < _NOISE for ratio in ratios),
        }
        write(f"{number} workers: {summary[f'{number} workers']}")
    if options.save and not options.smoke:
        path = Path(__file__).parents[1] / "results" / "never_slower.json"
        content = {"machine": machine_facts(), "summary": summary, "cells": found}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
