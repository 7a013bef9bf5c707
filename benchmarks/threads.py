# SPDX-License-Identifier: Apache-2.0
"""Threads or processes?

Question
    What do worker threads give, against worker processes and against torch's DataLoader, where the
    work releases the interpreter's lock, where it does not, and where there is no work but the
    carrying? Samples per second, CPU seconds per 1,000 samples, memory, seconds to the first batch;
    with 2 workers, and with none.

Method
    photos    A folder of JPEG files, batches of 64: random-resized crop to 224 x 224, flipped half
              of the time, normalised float32 CHW. torch has the same recipe with the fast libraries
              (simplejpeg, OpenCV; see jpeg_pipeline.py), Penstock its `ImageFolder` with
              `ImagePipeline.train`. Both decoders release the lock.
    python    Batches of 64 samples of about 0.3 ms each in plain Python, which holds the lock.
    carry     Batches of 64 x 3 x 224 x 224 float32 (38 MB): rows of one ready tensor, through the
              default collate (transport.py's "rows").

    torch, W, 2 processes        `torch.utils.data.DataLoader`, W one of the three works
    torch, W, 0 workers
    penstock, W, 2 processes     `penstock.torch.DataLoader`
    penstock, W, 2 threads       the same, `backend="thread"`
    penstock, W, 0 workers

    Of one loader with workers that are kept, the first epoch is checked, and those after it are
    timed until a second is over. The consumer reads the first and the last number of each batch.
    "first batch s" is from `iter(loader)` to the first batch of the first epoch, with the machine's
    default start method; for "carry", which costs a worker next to nothing, that is nearly all
    start. The peak of memory is of all processes, shared pages counted once. A line above the table
    says whether the interpreter has its lock.

    Another folder of class folders: PENSTOCK_BENCH_IMAGES=/path. Without any, noise is drawn.

Left out
    Imports. Reading from a disk: the files are in the page cache.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6, simplejpeg 1.9.0, OpenCV 5.0.0

Command
    python benchmarks/threads.py --save

Result
    2026-11-22, 3 rounds, medians, Python 3.11.7 with its lock; samples/s:

                 torch          torch        penstock       penstock     penstock
                 2 processes    0 workers    2 processes    2 threads    0 workers
        photos   1,170          624          2,222          1,693        1,180
        python   4,045          2,436        4,600          2,179        2,427
        carry    3,366          2,619        18,570         14,930       17,000

    Threads give 0.76 of processes on photos, as collating and the transform's Python share the
    lock; 1.45 of torch's processes. Pure Python runs at half the speed of processes, a little below
    no workers at all. Batches that are only carried gain nothing by workers of either kind on two
    cores. The first batch of photos came after 0.14 s by threads, 0.18 s by processes.

What it does not show
    A loop that runs much Python itself: it shares the lock with threads, not with
    processes. More than 2 threads, where the lock is wanted by more. Start methods other than fork:
    spawned processes take far longer to their first batch (first_batch.py), threads do not.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import jpeg_pipeline
import numpy as np
import transport
from _meter import Meter
from _runner import Benchmark, Reading, Target, check, data_loader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_BATCH_SIZE = 64
_NUM_STEPS = 5_000  # of a loop in Python: about 0.3 ms

Library = Literal["torch", "penstock"]
Workers = Literal["2 processes", "2 threads", "0 workers"]


@dataclass(frozen=True, slots=True)
class Size:
    """Batches of an epoch for each work, the side of what is carried, the least seconds timed."""

    num_photo_batches: int
    num_python_batches: int
    num_carried: int
    side_px: int
    seconds: float

    def carried(self) -> transport.Size:
        """Return the batches that are carried."""
        shape = (3, self.side_px, self.side_px)
        return transport.Size(_BATCH_SIZE, shape, self.num_carried)


class PlainPython:
    """Sample `i` takes a while in Python, and is (i, what came out)."""

    def __init__(self, num_samples: int) -> None:
        """Keep the number of samples."""
        self._num_samples = num_samples

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[int, int]:
        """Return two integers."""
        state = index
        for _ in range(_NUM_STEPS):
            state = (state * 1_103_515_245 + 12_345) & 0x7FFF_FFFF
        return index, state


def work(kind: str, library: Library, size: Size) -> tuple[Any, Callable[[Any, int], None]]:
    """Return a data set, and what checks a batch of it."""
    if kind == "photos":
        images = jpeg_pipeline.Size(size.num_photo_batches * _BATCH_SIZE, 1)
        name = "penstock" if library == "penstock" else "torch, simplejpeg"
        return jpeg_pipeline.photos(name, images), check_photos
    if kind == "python":
        return PlainPython(size.num_python_batches * _BATCH_SIZE), check_numbers
    rows = transport.Rows(size.carried())
    right = np.asarray([rows[k].numpy() for k in range(_BATCH_SIZE)])
    return rows, partial(check_rows, right=right)


def check_photos(batch: Any, step: int) -> None:  # noqa: ANN401
    """Check shape and range of a batch of photos."""
    images, labels = batch
    check(tuple(images.shape) == (len(labels), 3, 224, 224), f"shape {tuple(images.shape)}")
    low, high = float(images.min()), float(images.max())
    check(-2.2 < low < 0 < high < 2.7, f"numbers from {low} to {high} in batch {step}")


def check_numbers(batch: Any, step: int) -> None:  # noqa: ANN401
    """Check what came out of Python."""
    indices, states = batch
    first = step * _BATCH_SIZE
    check(indices.tolist() == [*range(first, first + _BATCH_SIZE)], f"indices of batch {step}")
    last = first + _BATCH_SIZE - 1
    check(int(states[-1]) == PlainPython(last + 1)[last][1], f"numbers of batch {step}")


def check_rows(batch: Any, step: int, *, right: Any) -> None:  # noqa: ANN401
    """Check what was carried."""
    check(np.array_equal(batch.numpy(), right), f"batch {step} has other numbers")


def load(size: Size, kind: str, library: Library, workers: Workers) -> Reading:
    """Read epochs after a checked one."""
    dataset, check_batch = work(kind, library, size)
    options: dict[str, Any] = {}
    if workers != "0 workers":
        options = {"num_workers": 2, "persistent_workers": True}
    if workers == "2 threads":
        options["backend"] = "thread"
    loader = data_loader(library)(
        dataset,
        batch_size=_BATCH_SIZE,
        worker_init_fn=jpeg_pipeline.one_thread if kind == "photos" else None,
        **options,
    )
    if kind == "photos":
        jpeg_pipeline.one_thread(0)  # without workers the main process is one
    first_s = checked_epoch(loader, check_batch)
    num_samples = num_batches = num_epochs = 0
    with Meter() as meter:
        while not num_epochs or meter.elapsed_s() < size.seconds:
            num_epochs += 1
            for batch in loader:
                images = batch[0] if isinstance(batch, list | tuple) else batch
                numbers = images.reshape(-1)
                _ = float(numbers[0]) + float(numbers[-1])
                num_samples += len(images)
                num_batches += 1
            del batch, images, numbers  # or their slot is held while the next epoch begins
    check(num_samples == num_epochs * len(dataset), f"{num_samples} samples came")
    more = {"CPU s/1000": meter.cpu_s / num_samples * 1000, "first batch s": first_s}
    return Reading.of(meter, num_samples / meter.wall_s, num_batches, more)


def checked_epoch(loader: Any, check_batch: Callable[[Any, int], None]) -> float:  # noqa: ANN401
    """Check every batch of an epoch; return the seconds to the first one."""
    start_s, first_s = time.perf_counter(), 0.0
    for step, batch in enumerate(loader):
        first_s = first_s or time.perf_counter() - start_s
        check_batch(batch, step)
    return first_s


def has_lock() -> bool:
    """Return whether only one thread at a time runs Python."""
    is_enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return is_enabled()


class Works(Benchmark[Size]):
    """Says with the figures what interpreter they are of."""

    def _remarks(self, readings: Mapping[str, Sequence[Reading]]) -> list[str]:
        lock = "with its lock (not free-threaded)" if has_lock() else "free-threaded"
        return [f"\nPython {sys.version.split()[0]}, {lock}"]


_KINDS = ("photos", "python", "carry")
_WAYS: tuple[tuple[Library, Workers], ...] = (
    ("torch", "2 processes"),
    ("torch", "0 workers"),
    ("penstock", "2 processes"),
    ("penstock", "2 threads"),
    ("penstock", "0 workers"),
)


def _targets(kind: str) -> list[Target]:
    threads, processes = f"penstock, {kind}, 2 threads", f"penstock, {kind}, 2 processes"
    return [
        Target(threads, processes),
        Target(threads, f"torch, {kind}, 2 processes"),
        Target(processes, f"torch, {kind}, 2 processes"),
        Target(threads, f"penstock, {kind}, 0 workers"),
        Target(threads, processes, figure="CPU s/1000"),
        Target(threads, processes, figure="first batch s"),
    ]


BENCHMARK = Works(
    file=__file__,
    unit="samples/s",
    better="higher",
    contenders={
        f"{library}, {kind}, {workers}": partial(load, kind=kind, library=library, workers=workers)
        for kind in _KINDS
        for library, workers in _WAYS
    },
    full=Size(
        num_photo_batches=28, num_python_batches=60, num_carried=60, side_px=224, seconds=1.0
    ),
    smoke=Size(num_photo_batches=2, num_python_batches=3, num_carried=8, side_px=32, seconds=0.01),
    targets=[target for kind in _KINDS for target in _targets(kind)],
    rounds=3,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
