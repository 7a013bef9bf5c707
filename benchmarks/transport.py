# SPDX-License-Identifier: Apache-2.0
"""How many bytes per second reach the training loop, if making them costs next to nothing?

Question
    What does it cost to carry a batch from a worker to the consumer? 38 MB batches (64 x 3 x 224 x
    224 float32), 2 workers, the machine's default start method, in-order, prefetch factor 2 (both
    libraries' defaults).

Method
    Four ways in which a dataset gives its batch; in each, both loaders get the same dataset class:

    touched   The worker asks for memory and writes one number per 4 KiB page: the price of the
              transport alone. Penstock's worker writes into the slot (`get_batch(indices, alloc)`);
              torch's returns a fresh array (`__getitems__`, and `torch.from_numpy` as collate), the
              shortest way torch has for a ready batch.
    filled    The same, but every number is written once: the least work of a real dataset.
    whole     `batch_size=None`, and each index returns the same ready 38 MB array. Each loader
              copies it once.
    rows      64 samples, rows of a ready tensor, through the default collate: what most users
              write.

    `touched` is the one that the target (>= 15 x torch) speaks of: a fresh shared file per tensor,
    mapped, faulted in page by page and thrown away, against a slot that is mapped once, with the
    batch produced in place. `filled`, `whole` and `rows` move every byte through the memory
    controller, so their ratios are bounded by it; they are printed beside it without a target, and
    are what to expect where batches are made by copying. `copy` is one bare copy of 38 MB between
    two resident buffers in one process, for scale: not a loader, and two workers may pass it.

    One warm-up epoch (its batches checked in full), then one timed epoch with the same workers
    (`persistent_workers`). The consumer reads the first and the last number of each batch and drops
    it. GB are 10^9 bytes of batches delivered.

Left out
    Start of the workers; decoding; page faults of a consumer that reads the whole batch (torch has
    one per page and batch, Penstock none after the first round of slots, so this favours torch);
    pinned memory.

    An array and not a tensor is returned in `whole` because torch moves a tensor's own memory into
    a shared file when it is first sent: the same tensor sent again would not be copied at all.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6

Command
    python benchmarks/transport.py --save

Result
    2026-11-21, 5 rounds, medians (least - greatest), GB/s:

                torch                  penstock               ratio
    touched      2.20 (1.94 -  2.24)   128.8 (100.8 - 135.6)   58 x
    filled       2.05 (1.94 -  2.09)    11.7 ( 11.6 -  12.2)   5.7 x
    whole        2.84 (2.35 -  2.94)    14.8 ( 13.7 -  15.1)   5.2 x
    rows         2.45 (2.30 -  2.66)    14.2 ( 12.4 -  14.5)   5.8 x
    copy        13.6  (11.3 -  14.2), one process

    CPU per batch: touched 33.9 ms against 0.57 ms, filled 36.2 against 6.4, rows 30.4 against 5.4.
    The lower three are at the speed of the memory: rotating slots of 38 MB leave the caches, and a
    bare copy runs no faster.

What it does not show
    A gain for a loader whose workers decode images: there, transport is a small part of the time.
    Behaviour with many small leaves (see overhead.py), with several consumers, or with batches that
    the consumer holds on to.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from _meter import Meter
from _runner import Benchmark, Reading, Target, check, data_loader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    import torch

_NUMBERS_PER_PAGE = 1024


@dataclass(frozen=True, slots=True)
class Size:
    """Shape of a batch and number of batches per epoch."""

    batch_size: int
    sample_shape: tuple[int, ...]
    num_batches: int

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Return the whole shape."""
        return (self.batch_size, *self.sample_shape)

    @property
    def batch_bytes(self) -> int:
        """Return the bytes of a batch."""
        return int(np.prod(self.batch_shape)) * 4


class InPlace:
    """A dataset whose batch is written where it is to lie; its numbers are the step's number."""

    def __init__(self, size: Size, write: Callable[[npt.NDArray[np.float32], int], None]) -> None:
        """Keep the size and `write(batch, step)`."""
        self._size = size
        self._write = write

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._size.batch_size * self._size.num_batches

    def __getitem__(self, index: int) -> npt.NDArray[np.float32]:
        """Return one sample; the loaders do not come here."""
        return np.full(self._size.sample_shape, index // self._size.batch_size, np.float32)

    def __getitems__(self, indices: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return a batch in fresh memory: torch sends it later, so none can be used again."""
        return self._make(indices[0], np.empty)

    def get_batch(
        self, indices: npt.NDArray[np.int64], alloc: Callable[..., npt.NDArray[np.float32]]
    ) -> npt.NDArray[np.float32]:
        """Return a whole batch in memory of the loader's choice."""
        return self._make(int(indices[0]), alloc)

    def _make(
        self, first_index: int, alloc: Callable[..., npt.NDArray[np.float32]]
    ) -> npt.NDArray[np.float32]:
        batch: npt.NDArray[np.float32] = alloc(self._size.batch_shape, np.float32)
        self._write(batch, first_index // self._size.batch_size)
        return batch


def touch(batch: npt.NDArray[np.float32], step: int) -> None:
    """Write one number per page, and the last."""
    numbers = batch.reshape(-1)
    numbers[::_NUMBERS_PER_PAGE] = step
    numbers[-1] = step


def fill(batch: npt.NDArray[np.float32], step: int) -> None:
    """Write every number once."""
    batch.fill(step)


class Whole:
    """A dataset that returns one ready batch, again and again."""

    def __init__(self, size: Size) -> None:
        """Make the batch."""
        self._num_batches = size.num_batches
        self._batch = _numbers(size)

    def __len__(self) -> int:
        """Return the number of batches."""
        return self._num_batches

    def __getitem__(self, index: int) -> npt.NDArray[np.float32]:
        """Return the same array each time, not a copy."""
        return self._batch


class Rows:
    """A dataset whose samples are rows of one ready tensor."""

    def __init__(self, size: Size) -> None:
        """Make the rows of one batch; all batches are made of them."""
        import torch

        self._num_samples = size.batch_size * size.num_batches
        self._rows = torch.from_numpy(_numbers(size))

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a view of one row."""
        return self._rows[index % len(self._rows)]


def _numbers(size: Size) -> npt.NDArray[np.float32]:
    count = size.batch_bytes // 4
    return np.arange(count, dtype=np.float32).reshape(size.batch_shape)


def carry(
    size: Size,
    library: Literal["torch", "penstock"],
    variant: Literal["touched", "filled", "whole", "rows"],
) -> Reading:
    """Read one epoch after a checked warm-up."""
    loader = data_loader(library)(
        **_arguments(size, library, variant), num_workers=2, persistent_workers=True
    )
    for step, batch in enumerate(loader):
        _check_batch(np.asarray(batch), size, variant, step)
        del batch
    num_batches = 0
    with Meter() as meter:
        for batch in loader:
            flat = batch.reshape(-1)
            ends = flat[0].item(), flat[-1].item()
            check(ends == _ends(size, variant, num_batches), f"batch {num_batches} has {ends}")
            num_batches += 1
    check(num_batches == size.num_batches, f"{num_batches} batches of {size.num_batches}")
    return Reading.of(meter, num_batches * size.batch_bytes / meter.wall_s / 1e9, num_batches)


def _arguments(size: Size, library: str, variant: str) -> dict[str, Any]:
    if variant == "whole":
        return {"dataset": Whole(size), "batch_size": None}
    if variant == "rows":
        return {"dataset": Rows(size), "batch_size": size.batch_size}
    arguments: dict[str, Any] = {
        "dataset": InPlace(size, touch if variant == "touched" else fill),
        "batch_size": size.batch_size,
    }
    if library == "torch":
        import torch

        arguments["collate_fn"] = torch.from_numpy
    return arguments


def _ends(size: Size, variant: str, step: int) -> tuple[float, float]:
    if variant in ("whole", "rows"):
        return 0.0, float(np.float32(size.batch_bytes // 4 - 1))
    return float(step), float(step)


def _check_batch(batch: npt.NDArray[np.float32], size: Size, variant: str, step: int) -> None:
    check(batch.shape == size.batch_shape, f"batch {step} has shape {batch.shape}")
    check(batch.dtype == np.float32, f"batch {step} has dtype {batch.dtype}")
    if variant == "touched":
        is_right = (batch.reshape(-1)[::_NUMBERS_PER_PAGE] == step).all()
    elif variant == "filled":
        is_right = (batch == step).all()
    else:
        is_right = np.array_equal(batch, _numbers(size))
    check(is_right, f"batch {step} has other numbers")


def copy(size: Size) -> Reading:
    """Copy a batch between two buffers that are resident."""
    source = _numbers(size)
    target = np.zeros_like(source)
    with Meter() as meter:
        for _ in range(size.num_batches):
            np.copyto(target, source)
    check(np.array_equal(source, target), "the copy differs")
    return Reading.of(
        meter, size.num_batches * size.batch_bytes / meter.wall_s / 1e9, size.num_batches
    )


_VARIANTS: tuple[Literal["touched", "filled", "whole", "rows"], ...] = (
    "touched",
    "filled",
    "whole",
    "rows",
)
_LIBRARIES: tuple[Literal["torch", "penstock"], ...] = ("torch", "penstock")

BENCHMARK = Benchmark(
    file=__file__,
    unit="GB/s",
    better="higher",
    contenders={
        **{
            f"{library}, {variant}": partial(carry, library=library, variant=variant)
            for variant in _VARIANTS
            for library in _LIBRARIES
        },
        "copy": copy,
    },
    full=Size(batch_size=64, sample_shape=(3, 224, 224), num_batches=200),
    smoke=Size(batch_size=4, sample_shape=(3, 32, 32), num_batches=8),
    targets=tuple(
        Target(f"penstock, {variant}", f"torch, {variant}", 15.0 if variant == "touched" else None)
        for variant in _VARIANTS
    ),
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
