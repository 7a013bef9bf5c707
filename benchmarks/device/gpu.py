# SPDX-License-Identifier: Apache-2.0
"""Does a batch reach the GPU as fast as the bus allows, without the GPU waiting, and unharmed?

Question
    Of batches that workers have made: how many bytes per second reach the device, against a bare
    copy? How long is the GPU idle, and what does the host pay, where a loop computes 5 or 20 ms per
    step? What do uint8 images save, and what does normalising them cost? Does ever a byte arrive
    that is not the batch's own? What does it cost to page-lock a slot?

Method
    Each row's program runs in a process of its own, one after the other. Batches are 64 x 3 x 224 x
    224 float32, 38.5 MB, or as many bytes of uint8.

    poison      Batches whose every byte says which step they are of, compared on the device. Each
                step, work is queued in front of the copy, or of the comparison, so that the host is
                through with the batch long before the device has begun with it; workers write into
                the slots that come back at once. `.to(non_blocking=True)` in the current stream and
                in a stream of the user's own, and `device=`; worker processes, threads and none;
                batches of small arrays alone and with one of 38.5 MB. `control` overwrites a pinned
                buffer while its copy is queued: damage is wanted there, as it shows that such a
                thing would be seen. The loop is at most 8 steps ahead of the device.
    delivery    Workers write one number per page and the last (`get_batch`), so that nothing but
                delivery takes time; the loop takes batches and drops them. `of bare` is the rate
                divided by that of copies from 16 buffers of `torch.empty(pin_memory=True)`, done in
                the same process before and after; the faster of the two counts.
    training    64 rows of a ready tensor per batch, default collate, 8 workers; matrix products of
                4096 x 4096 bfloat16, as many as take 5 or 20 ms. Events stand around the products
                of each step, which also read a part of the batch. Idle is the time between the
                first and the last event in which no step's products ran, a copy in the same stream
                included. The loop waits for the products of the step before the last, as one does
                that prints its loss. 40 steps of warm-up.
    images      The same loop without products: 64 images a batch, uint8 rows with `NormalizeImages`
                as `device_transform` against rows that are floats already.
    normalise   256 x 224 x 224 x 3 uint8 in the device's memory: `NormalizeImages`, itself under
                `torch.compile`, the same in two steps, and the usual expression. Events around 50
                calls; kernels counted by torch's profiler. GB are the bytes read and written.
    page-lock   `cudaHostRegister` of a fresh slot, of one whose pages are there, and
                `cudaHostUnregister`; `torch.empty(pin_memory=True)` and a copy, for scale. Medians
                of 5.

    CPU is that of the process and its workers. Host memory is what the whole system had less of at
    worst, seen from outside every 50 ms, CUDA's own included, as page-locked memory appears in no
    process's account.

Left out
    Start of workers and of CUDA, compilation. Several GPUs.

Machine
    NVIDIA H100 80GB (PCIe 5, 16 lanes), driver 580.159, 16 cores of an Intel Xeon VM, Linux 6.18,
    Python 3.12, torch 2.11, 2026-11-26.

Command
    python benchmarks/device/gpu.py --out benchmarks/results

Result
    benchmarks/results/gpu.json; a run some minutes earlier gave the second figure.
    Of 34,200 batches none was damaged, in both runs; the control's were, 20 of 20.
    Idle at 5 ms per step: `device=` 0.1 and 0.5 %, pin and to 12 and 13 %; torch's loader 59 and
    65 %, with the prefetcher 63 and 60 %: its workers' copies are the limit (41 to 45 ms of CPU
    time per batch, ours 7 to 9). At 20 ms: `device=` and the prefetcher 0.03 %, the others 3 %.
    Delivery missed its target: 38 to 41 and 38 to 43 GB/s of a bare copy's 55, 0.69 to 0.75 and
    0.68 to 0.87. Locked slots are not the cause: bare copies from them ran at 54.9 GB/s.
    uint8 rows: 137,000 and 66,000 images/s, float rows 36,000 and 40,000.
    NormalizeImages takes one kernel, 0.17 ms for 256 images; compiled 0.06 to 0.11 ms.
    To lock a slot: 34 to 46 us per MB once its pages are there.

What it does not show
    Decoding, where it is the limit. A machine with something else to do: memory is measured for the
    whole of it. `images`: that workers have less to do where the device normalises.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fnmatch
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from _meter import Meter
from _runner import as_table, check, data_loader, machine_facts, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt
    import torch

_MARK: Final = "ROW "
_LOOK_EVERY_S: Final = 0.05
_TIMEOUT_S: Final = 100.0  # of one program
_BUDGET_S: Final = 470.0  # of all: a borrowed machine may be gone after ten minutes
_MARKS: Final = 251  # a prime below 256: slots that come back never hold the same mark again soon
_MOST_AHEAD: Final = 8  # steps that a loop is ahead of the device
_PAGE_BYTES: Final = 4096
_CONTROL: Final = "poison: control (damage wanted)"  # the row, not the program


@dataclass(frozen=True, slots=True)
class Setting:
    """Where, and how large.

    Attributes:
        device: "cuda" or "cpu".
        smoke: Whether only to show that everything works.
    """

    device: str
    smoke: bool

    @property
    def is_cuda(self) -> bool:
        return self.device != "cpu"

    @property
    def num_workers(self) -> int:
        return 1 if self.smoke else max(1, min(8, len(os.sched_getaffinity(0)) // 2))

    @property
    def image_px(self) -> int:
        return 16 if self.smoke else 224

    @property
    def batch_size(self) -> int:
        return 4 if self.smoke else 64

    @property
    def batch_bytes(self) -> int:
        return self.batch_size * 3 * self.image_px**2 * 4

    def steps(self, full: int) -> int:
        return max(3, full // 100) if self.smoke else full


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one way; the names hold their units."""

    name: str
    figures: dict[str, float | str]


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure of a row should reach; `name` is a pattern."""

    name: str
    figure: str
    at_least: float = -math.inf
    at_most: float = math.inf

    def line(self, row: Row) -> str:
        value = float(row.figures[self.figure])
        is_met = self.at_least <= value <= self.at_most
        low = math.isinf(self.at_most)
        bound = f">= {self.at_least:g}" if low else f"<= {self.at_most:g}"
        met = "met" if is_met else "MISSED"
        return f"{row.name}: {self.figure} {value:.3g} (target {bound}: {met})"


TARGETS: Final = (
    Target("poison: p*", "bad batches", at_most=0),
    Target(_CONTROL, "bad batches", at_least=1),
    Target("delivery: penstock*", "of bare", at_least=0.9),
    Target("training*: penstock, device*", "idle %", at_most=2),
)


# Time on the device, and on the CPU as if it were one.


class HostMoment:
    """A moment of a device that does everything at once."""

    def __init__(self) -> None:
        self._s = time.perf_counter()

    def elapsed_time(self, end: HostMoment) -> float:
        """Return the milliseconds until `end`."""
        return (end._s - self._s) * 1e3

    def synchronize(self) -> None:
        """It is past."""


def moment(setting: Setting) -> Any:  # noqa: ANN401 - a torch.cuda.Event, or what looks like one
    """Return the moment at which the current stream gets here."""
    if not setting.is_cuda:
        return HostMoment()
    import torch

    # Blocking: a thread that waits for it sleeps, and is not counted as work.
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record()
    return event


def synchronize(setting: Setting) -> None:
    if setting.is_cuda:
        import torch

        torch.cuda.synchronize()


class Leash:
    """Keeps a loop from running away from its device."""

    def __init__(self, setting: Setting, most_ahead: int) -> None:
        self._setting = setting
        self._most_ahead = most_ahead
        self._ends: collections.deque[Any] = collections.deque()

    def step(self) -> None:
        """Note the end of a step's work; wait for that of an earlier step."""
        self._ends.append(moment(self._setting))
        if len(self._ends) > self._most_ahead:
            self._ends.popleft().synchronize()


class Products:
    """Work for a device: matrix products."""

    def __init__(self, setting: Setting) -> None:
        import torch

        size = 4096 if setting.is_cuda else 32
        dtype = torch.bfloat16 if setting.is_cuda else torch.float32
        self._setting = setting
        self._left, self._right = (
            torch.randn(size, size, device=setting.device).to(dtype) for _ in range(2)
        )
        self._result = torch.empty_like(self._left)
        self.run(20)  # loads the library, and wakes the clocks
        synchronize(setting)

    def run(self, count: int) -> None:
        """Queue some."""
        import torch

        for _ in range(count):
            torch.mm(self._left, self._right, out=self._result)

    def count_for(self, milliseconds: float) -> int:
        """Return how many take that long."""
        if self._setting.smoke:
            return 1
        self.run(200)
        start = moment(self._setting)
        self.run(200)
        end = moment(self._setting)
        synchronize(self._setting)
        return max(1, round(milliseconds / (start.elapsed_time(end) / 200)))


# Datasets, which take next to no time.


class Touched:
    """Batches of which one number per page is written, and the last: the step's number."""

    def __init__(self, shape: tuple[int, ...], dtype: str, num_batches: int) -> None:
        self._shape = shape
        self._dtype = np.dtype(dtype)
        self._num_batches = num_batches

    def __len__(self) -> int:
        return self._shape[0] * self._num_batches

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        raise AssertionError("batches are made at once")

    def get_batch(
        self, indices: npt.NDArray[np.int64], alloc: Callable[..., npt.NDArray[Any]]
    ) -> npt.NDArray[Any]:
        batch = alloc(self._shape, self._dtype)
        flat = batch.reshape(-1)
        flat[:: _PAGE_BYTES // self._dtype.itemsize] = 1
        flat[-1] = int(indices[0]) // self._shape[0] % _MARKS
        return batch


class Marked:
    """Batches whose every byte is the step's mark, in arrays of several sizes."""

    def __init__(self, sizes: Mapping[str, int], num_batches: int) -> None:
        self._sizes = dict(sizes)
        self._num_batches = num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        raise AssertionError("batches are made at once")

    def get_batch(
        self, indices: npt.NDArray[np.int64], alloc: Callable[..., npt.NDArray[Any]]
    ) -> dict[str, npt.NDArray[Any]]:
        batch = {name: alloc((size,), np.uint8) for name, size in self._sizes.items()}
        for array in batch.values():
            array.fill(int(indices[0]) % _MARKS)
        return batch


class Rows:
    """Samples that are rows of one ready tensor; the first number of each is its own."""

    def __init__(self, shape: tuple[int, ...], dtype: str, num_samples: int) -> None:
        import torch

        self._rows = torch.ones(shape, dtype=getattr(torch, dtype))
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index % len(self._rows)]


# What is done with a batch until it is on the device.


def moved(setting: Setting, batch: Any) -> Any:  # noqa: ANN401
    """Return a tensor, or a dict of them, on the device, as a loop does it by hand."""
    if isinstance(batch, dict):
        return {name: moved(setting, tensor) for name, tensor in batch.items()}
    return batch.to(setting.device, non_blocking=True)


def loader_and_move(
    way: str,
    setting: Setting,
    dataset: object,
    **arguments: Any,  # noqa: ANN401
) -> tuple[Any, Callable[[Any], Any]]:
    """Return what is iterated, and what the loop does with each batch."""
    by_hand = partial(moved, setting)
    if way == "penstock, device":
        return data_loader("penstock")(dataset, device=setting.device, **arguments), _as_it_is
    pinned = {"pin_memory": setting.is_cuda, **arguments}
    if way == "penstock, pin and to":
        return data_loader("penstock")(dataset, **pinned), by_hand
    loader = data_loader("torch")(dataset, **pinned)
    if way == "torch, pin and to":
        return loader, by_hand
    from penstock.torch import DevicePrefetcher

    assert way == "torch, prefetcher"
    return DevicePrefetcher(loader, setting.device), _as_it_is


def _as_it_is(batch: Any) -> Any:  # noqa: ANN401
    return batch


# The programs.


def control(setting: Setting) -> Iterator[Row]:
    """Overwrite a page-locked buffer whose copy is queued; return how many copies show it."""
    import torch

    products = Products(setting)
    count = products.count_for(5.0)
    size = setting.batch_bytes
    source = torch.empty(size, dtype=torch.uint8, pin_memory=setting.is_cuda)
    num_bad, num_steps = 0, setting.steps(20)
    for _ in range(num_steps):
        source.fill_(1)
        products.run(count)
        arrived = source.to(setting.device, non_blocking=True)
        source.fill_(2)  # on the CPU it is the same memory, which has to show as well
        num_bad += int((arrived != 1).any())
    yield Row(_CONTROL, {"batches": num_steps, "bad batches": num_bad})


POISON_WAYS: Final = ("pin and to", "pin and to, own stream", "device")
_BACKENDS: Final = (("process", 4), ("thread", 4), ("process", 0))


def poison(setting: Setting, way: str) -> Iterator[Row]:
    """Compare all bytes of many batches on the device."""
    small = {"tiny": 100, "small": 6000, "medium": 60_000}
    large = {**small, "large": setting.batch_bytes}
    products = Products(setting)
    stall = products.count_for(1.0)
    total_bad = 0
    for backend, num_workers in _BACKENDS:
        for kind, sizes, full in (("small", small, 3000), ("large", large, 800)):
            num_steps = setting.steps(full)
            loader = data_loader("penstock")(
                Marked(sizes, num_steps),
                batch_size=1,
                num_workers=num_workers,
                backend=backend,
                **(
                    {"device": setting.device}
                    if way == "device"
                    else {"pin_memory": setting.is_cuda}
                ),
            )
            begun_s = time.perf_counter()
            num_seen, num_bad = count_bad(setting, way, loader, partial(products.run, stall))
            check(num_seen == num_steps, f"{num_seen} batches of {num_steps}")
            total_bad += num_bad
            who = backend if num_workers else "no workers"
            yield Row(
                f"poison: penstock, {way}, {who}, {kind}",
                {
                    "batches": num_seen,
                    "bad batches": num_bad,
                    "batches/s": num_seen / (time.perf_counter() - begun_s),
                },
            )
    check(total_bad == 0, f"{total_bad} batches held something else, see the rows")


def count_bad(
    setting: Setting,
    way: str,
    loader: Any,  # noqa: ANN401
    stall: Callable[[], None],
) -> tuple[int, int]:
    """Return how many batches there were, and how many held a byte that is not their step's."""
    import torch

    bad = torch.zeros((), dtype=torch.int64, device=setting.device)
    leash = Leash(setting, _MOST_AHEAD)
    side = torch.cuda.Stream() if setting.is_cuda and "own stream" in way else None
    ballast = Ballast(setting) if way == "device" else None
    num_seen = 0
    for step, batch in enumerate(loader):
        if ballast is not None:
            ballast.copy()
            stall()
            arrived = batch
        elif side is not None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                stall()
                arrived = moved(setting, batch)
            torch.cuda.current_stream().wait_stream(side)
            for tensor in arrived.values():
                tensor.record_stream(torch.cuda.current_stream())
        else:
            stall()
            arrived = moved(setting, batch)
        del batch  # its slot is the workers' again, as far as the host can tell
        wrong = [(tensor != step % _MARKS).any() for tensor in arrived.values()]
        bad += torch.stack(wrong).any()
        del arrived
        leash.step()
        num_seen += 1
    return num_seen, int(bad)


class Ballast:
    """Copies that keep the bus busy, so that those of batches have to wait for it."""

    def __init__(self, setting: Setting) -> None:
        import torch

        self._stream = torch.cuda.Stream() if setting.is_cuda else None
        size = setting.batch_bytes
        self._source = torch.zeros(size, dtype=torch.uint8, pin_memory=setting.is_cuda)
        self._target = torch.zeros(size, dtype=torch.uint8, device=setting.device)

    def copy(self) -> None:
        """Queue one."""
        import torch

        context = torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()
        with context:
            self._target.copy_(self._source, non_blocking=True)


def delivery(setting: Setting, way: str, dtype: str) -> Iterator[Row]:
    """Take batches, drop them."""
    import torch

    warm_up, num_steps = setting.steps(200), setting.steps(1000)
    item_bytes = np.dtype(dtype).itemsize
    shape = (setting.batch_size, setting.batch_bytes // setting.batch_size // item_bytes)
    bare = bare_rate(setting)
    loader, move = loader_and_move(
        way,
        setting,
        Touched(shape, dtype, warm_up + num_steps),
        batch_size=setting.batch_size,
        num_workers=setting.num_workers,
    )
    total = torch.zeros((), dtype=torch.float64, device=setting.device)
    leash = Leash(setting, _MOST_AHEAD)
    batches = iter(loader)
    for batch in itertools.islice(batches, warm_up):
        total += move(batch).view(-1)[-1]
        leash.step()
    del batch
    synchronize(setting)
    num_batches = 0
    with Meter() as meter:
        for batch in batches:
            total += move(batch).view(-1)[-1]
            del batch
            leash.step()
            num_batches += 1
        synchronize(setting)
    check(num_batches == num_steps, f"{num_batches} batches of {num_steps}")
    expected = sum(step % _MARKS for step in range(warm_up + num_steps))
    check(int(total) == expected, f"the last numbers sum to {int(total)}, not {expected}")
    del batches, loader
    bare = max(bare, bare_rate(setting))
    rate = num_steps * setting.batch_bytes / meter.wall_s / 1e9
    yield Row(
        f"delivery: {way}, {dtype}",
        {
            "GB/s": rate,
            "bare GB/s": bare,
            "of bare": rate / bare,
            "CPU ms/batch": meter.cpu_s / num_steps * 1e3,
        },
    )


def bare_rate(setting: Setting) -> float:
    """Return the GB/s of copies from torch's own page-locked memory."""
    import torch

    size, num_steps = setting.batch_bytes, setting.steps(500)
    sources = [torch.zeros(size, dtype=torch.uint8, pin_memory=setting.is_cuda) for _ in range(16)]
    targets = [torch.zeros(size, dtype=torch.uint8, device=setting.device) for _ in range(2)]
    begun_s = 0.0
    for step in range(-16, num_steps):
        if step == 0:
            synchronize(setting)
            begun_s = time.perf_counter()
        targets[step % 2].copy_(sources[step % 16], non_blocking=True)
    synchronize(setting)
    return num_steps * size / (time.perf_counter() - begun_s) / 1e9


TRAINING_WAYS: Final = (
    "penstock, device",
    "penstock, pin and to",
    "torch, pin and to",
    "torch, prefetcher",
)


def training(setting: Setting, way: str, step_ms: float) -> Iterator[Row]:
    """Compute for some milliseconds per step; tell how long the device did not."""
    import torch

    warm_up, num_steps = setting.steps(40), setting.steps(300 if step_ms < 10 else 150)
    products = Products(setting)
    count = products.count_for(step_ms)
    num_samples = (warm_up + num_steps) * setting.batch_size
    shape = (setting.batch_size, 3, setting.image_px, setting.image_px)
    loader, move = loader_and_move(
        way,
        setting,
        Rows(shape, "float32", num_samples),
        batch_size=setting.batch_size,
        num_workers=setting.num_workers,
    )
    total = torch.zeros((), dtype=torch.float64, device=setting.device)
    stretches: list[tuple[Any, Any]] = []
    leash = Leash(setting, 2)
    batches = iter(loader)

    def step(batch: Any) -> None:  # noqa: ANN401
        images = move(batch)
        start = moment(setting)
        total.add_(images.view(-1)[::997].sum())
        products.run(count)
        stretches.append((start, moment(setting)))
        leash.step()

    for batch in itertools.islice(batches, warm_up):
        step(batch)
    del batch
    synchronize(setting)
    stretches.clear()
    with Meter() as meter:
        for batch in batches:
            step(batch)
            del batch
        synchronize(setting)
    check(len(stretches) == num_steps, f"{len(stretches)} steps of {num_steps}")
    expected = (warm_up + num_steps) * -(-setting.batch_bytes // 4 // 997)
    check(int(total) == expected, f"the batches sum to {int(total)}, not {expected}")
    busy_ms = sum(start.elapsed_time(end) for start, end in stretches)
    span_ms = stretches[0][0].elapsed_time(stretches[-1][1])
    yield Row(
        f"training, {step_ms:g} ms: {way}",
        {
            "steps/s": num_steps / meter.wall_s,
            "products ms": busy_ms / num_steps,
            "idle %": 100 * (1 - busy_ms / span_ms),
            "CPU ms/batch": meter.cpu_s / num_steps * 1e3,
        },
    )


def images(setting: Setting, kind: str) -> Iterator[Row]:
    """Deliver images to be computed with, as uint8 or as floats."""
    import torch

    from penstock.torch import NormalizeImages

    warm_up, num_steps = setting.steps(40), setting.steps(400)
    side = setting.image_px
    shape = (side, side, 3) if kind == "uint8" else (3, side, side)
    transform = NormalizeImages().to(setting.device) if kind == "uint8" else None
    loader = data_loader("penstock")(
        Rows((setting.batch_size, *shape), kind, (warm_up + num_steps) * setting.batch_size),
        batch_size=setting.batch_size,
        num_workers=setting.num_workers,
        device=setting.device,
        device_transform=transform,
    )
    leash = Leash(setting, 2)
    batches = iter(loader)
    for _ in itertools.islice(batches, warm_up):
        leash.step()
    synchronize(setting)
    num_batches = 0
    with Meter() as meter:
        for batch in batches:
            check(batch.dtype == torch.float32, f"images are {batch.dtype}")
            check(batch.shape[1:] == (3, side, side), f"images are of shape {batch.shape}")
            del batch
            leash.step()
            num_batches += 1
        synchronize(setting)
    check(num_batches == num_steps, f"{num_batches} batches of {num_steps}")
    yield Row(
        f"images: penstock, {kind} rows",
        {
            "images/s": num_steps * setting.batch_size / meter.wall_s,
            "MB/batch": math.prod(shape) * setting.batch_size * np.dtype(kind).itemsize / 1e6,
            "CPU ms/batch": meter.cpu_s / num_steps * 1e3,
        },
    )


def normalise(setting: Setting) -> Iterator[Row]:
    """Normalise images that are on the device, in several ways and precisions."""
    import torch

    from penstock.torch import NormalizeImages

    side = setting.image_px
    batch = torch.randint(
        0, 256, (4 * setting.batch_size, side, side, 3), dtype=torch.uint8, device=setting.device
    )
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        module = NormalizeImages(dtype=dtype).to(setting.device)
        full = NormalizeImages().to(setting.device)
        mean = torch.tensor([0.485, 0.456, 0.406], device=setting.device)
        std = torch.tensor([0.229, 0.224, 0.225], device=setting.device)
        ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "NormalizeImages": module,
            "compiled": torch.compile(module, backend="eager" if setting.smoke else "inductor"),
            "two steps": lambda given, full=full, dtype=dtype: full(given).to(dtype),  # type: ignore[misc]
            "((x / 255) - mean) / std": lambda given, mean=mean, std=std, dtype=dtype: (  # type: ignore[misc]
                (((given / 255) - mean) / std).to(dtype).movedim(-1, -3)
            ),
        }
        for name, way in ways.items():
            figures = _normalising(setting, way, batch, module(batch))
            yield Row(f"normalise: {name}, {str(dtype).removeprefix('torch.')}", figures)


def _normalising(
    setting: Setting,
    way: Callable[[torch.Tensor], torch.Tensor],
    batch: torch.Tensor,
    expected: torch.Tensor,
) -> dict[str, float | str]:
    import torch

    try:
        got = way(batch)
    except Exception as error:
        # The compiler needs more of a machine than torch does.
        return {"note": f"{type(error).__name__}: {error}".splitlines()[0][:80]}
    spread = (got.float() - expected.float()).abs().max().item()
    largest = torch.finfo(got.dtype).eps * 16
    check(spread <= largest, f"{spread} off what NormalizeImages gives, more than {largest}")
    num_calls = setting.steps(50)
    for _ in range(5):
        way(batch)
    start = moment(setting)
    for _ in range(num_calls):
        way(batch)
    end = moment(setting)
    synchronize(setting)
    call_ms = start.elapsed_time(end) / num_calls
    moved_bytes = batch.nbytes + got.nbytes
    figures: dict[str, float | str] = {"ms": call_ms, "GB/s": moved_bytes / call_ms / 1e6}
    if setting.is_cuda:
        figures["kernels"] = _num_kernels(partial(way, batch))
    return figures


def _num_kernels(call: Callable[[], object]) -> float:
    import torch

    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(
        activities=[activity.CPU, activity.CUDA], acc_events=True
    ) as profile:
        call()
        torch.cuda.synchronize()
    return sum(
        1
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Memset"))
        and not getattr(event, "is_user_annotation", False)
    )


def page_lock(setting: Setting) -> Iterator[Row]:
    """Lock slots, and see what it costs."""
    import torch

    from penstock.transport.memory import Mapping, create_segment

    torch.cuda.init()
    torch.zeros(1, device=setting.device)
    runtime = torch.cuda.cudart()
    for size_mb in (1, 38, 256):
        size_bytes = size_mb << 20
        seconds: dict[str, list[float]] = collections.defaultdict(list)
        held = []
        for _ in range(5):
            for title, is_touched in (("lock fresh", False), ("lock", True)):
                fd = create_segment(size_bytes)
                mapping = Mapping(fd, size_bytes)
                os.close(fd)
                if is_touched:
                    with timed(seconds["touch"]):
                        mapping.bytes()[::_PAGE_BYTES] = 1
                with timed(seconds[title]):
                    status = runtime.cudaHostRegister(mapping.address, size_bytes, 0)
                check(int(status) == 0, f"cudaHostRegister says {status}")
                with timed(seconds["unlock"]):
                    status = runtime.cudaHostUnregister(mapping.address)
                check(int(status) == 0, f"cudaHostUnregister says {status}")
            plain = torch.ones(size_bytes, dtype=torch.uint8)
            with timed(seconds["torch: allocate"]):
                pinned = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
            with timed(seconds["torch: copy"]):
                pinned.copy_(plain)
            held.append(pinned)  # else the next is this one again
        yield Row(
            f"page-lock: {size_mb} MiB",
            {
                f"{title}, us/MB": statistics.median(times) * 1e6 / (size_bytes / 1e6)
                for title, times in seconds.items()
            },
        )


@contextlib.contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    """Append how long the block took."""
    begun_s = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - begun_s)


# In the order of what is to be known first.
PROGRAMS: Final[dict[str, Callable[[Setting], Iterator[Row]]]] = {
    "poison: control": control,
    **{f"poison: {way}": partial(poison, way=way) for way in POISON_WAYS},
    **{
        f"delivery: {way}, {dtype}": partial(delivery, way=way, dtype=dtype)
        for way in ("penstock, device", "penstock, pin and to")
        for dtype in ("uint8", "float32")
    },
    **{
        f"training, {step_ms:g} ms: {way}": partial(training, way=way, step_ms=step_ms)
        for step_ms in (5.0, 20.0)
        for way in TRAINING_WAYS
    },
    **{f"images: {kind}": partial(images, kind=kind) for kind in ("uint8", "float32")},
    "normalise": normalise,
    "page-lock": page_lock,
}
NEEDS_CUDA: Final = ("page-lock",)


# The parent, which runs them one after the other.


@dataclass(slots=True)
class Session:
    """What has come out so far."""

    rows: list[Row] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; return 1 if a program failed, or delivered wrong data, else 0."""
    parser = _parser()
    options = parser.parse_args(arguments)
    setting = Setting(options.device, options.smoke)
    if options.program:
        for row in PROGRAMS[options.program](setting):
            write(_MARK + json.dumps([row.name, row.figures]))
        return 0
    patterns: list[str] = options.only or ["*"]
    for pattern in patterns:
        if not fnmatch.filter(PROGRAMS, pattern):
            known = "\n  ".join(PROGRAMS)
            parser.error(f"--only {pattern!r} names none of the programs, which are\n  {known}")
    names = [name for name in PROGRAMS if any(fnmatch.fnmatch(name, one) for one in patterns)]
    if options.list:
        write("\n".join(names))
        return 0
    if setting.is_cuda and not _has_cuda():
        parser.exit(2, "gpu.py: no CUDA device: --device cpu --smoke shows that it runs\n")
    return _run_all(names, setting, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu.py",
        description=(__doc__ or "").partition("\n")[0],
        epilog="Exits with 1 if a program failed or delivered wrong data, with 2 if nothing can be "
        "run. What is measured, and how, is at the top of the file.",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: the same programs without a GPU, to see that they run and that data are right; "
        "their times say nothing of a GPU (%(default)s)",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it work?")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="these programs: names, as --list gives them, or globs, such as 'poison*'",
    )
    parser.add_argument("--list", action="store_true", help="name the programs and stop")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write DIR/gpu.json")
    parser.add_argument(
        "--budget-s", type=float, default=_BUDGET_S, help="begin none after that (%(default)s)"
    )
    parser.add_argument("--program", choices=list(PROGRAMS), help=argparse.SUPPRESS)
    return parser


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _run_all(names: Sequence[str], setting: Setting, options: argparse.Namespace) -> int:
    session = Session()
    facts = {**machine_facts(), **_device_facts(setting)}
    begun_s = time.monotonic()
    for name in names:
        spent_s = time.monotonic() - begun_s
        if (name in NEEDS_CUDA and not setting.is_cuda) or spent_s > options.budget_s:
            session.left_out.append(name)
        else:
            write(f"[{spent_s:4.0f} s] {name}", to=sys.stderr)
            _run(name, setting, session)
        if options.out is not None:  # after each: what is known stays, whatever comes
            _save(options.out, setting, session, facts)
    _report(session, setting)
    return 1 if session.failures else 0


def _run(name: str, setting: Setting, session: Session) -> None:
    command = [sys.executable, __file__, "--program", name, "--device", setting.device]
    free_bytes = _available_bytes()
    least_bytes = free_bytes
    deadline_s = time.monotonic() + _TIMEOUT_S
    with (
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [*command, *(["--smoke"] if setting.smoke else [])],
            stdout=output,
            stderr=errors,
            start_new_session=True,  # a group of its own: its workers can be ended with it
        ) as process,
    ):
        try:
            while process.poll() is None and time.monotonic() < deadline_s:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_EVERY_S)
                least_bytes = min(least_bytes, _available_bytes())
            status = process.poll()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        errors.seek(0)
        lines = [line.removeprefix(_MARK) for line in output if line.startswith(_MARK)]
        complaints = errors.read()
    rows = [Row(*json.loads(line)) for line in lines]
    if len(rows) == 1:
        rows[0].figures["host MB"] = (free_bytes - least_bytes) / 1e6
    session.rows.extend(rows)
    if status != 0:
        how = f"was still running after {_TIMEOUT_S:g} s" if status is None else f"ended {status}"
        session.failures[name] = f"{how}\n{complaints[-3000:]}"
        write(f"FAILED: {name} {session.failures[name]}", to=sys.stderr)


def _available_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _device_facts(setting: Setting) -> dict[str, Any]:
    if not setting.is_cuda:
        return {"device": "CPU, as a stand-in"}
    query = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return {"device": f"unknown: {error}"}
    return {"device": done.stdout.strip()}


def _save(folder: Path, setting: Setting, session: Session, facts: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "benchmark": "device/gpu",
        "smoke": setting.smoke,
        "machine": facts,
        "rows": {row.name: row.figures for row in session.rows},
        "failures": session.failures,
        "left_out": session.left_out,
    }
    (folder / "gpu.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _report(session: Session, setting: Setting) -> None:
    caveat = _caveat(setting)
    if caveat:
        write(caveat)
    sections = itertools.groupby(session.rows, lambda row: row.name.split(":")[0])
    for title, group in sections:
        rows = list(group)
        heads = list(dict.fromkeys(head for row in rows for head in row.figures))
        cells = [[row.name.partition(": ")[2], *map(_cell(row), heads)] for row in rows]
        write("\n" + as_table([[title, *heads], *cells]))
    if caveat and session.rows:
        write("\n" + caveat)  # again: the first one may have scrolled away
    for target in TARGETS if not setting.smoke else ():
        for row in session.rows:
            if fnmatch.fnmatch(row.name, target.name) and target.figure in row.figures:
                write("  " + target.line(row))
    for name in session.left_out:
        write(f"  not run: {name}")
    for name, how in session.failures.items():
        write(f"  FAILED: {name}: {how.splitlines()[0]}")


def _caveat(setting: Setting) -> str:
    """Return what the figures do not mean, or nothing."""
    reasons = ["smoke sizes"] * setting.smoke + ["on the CPU"] * (not setting.is_cuda)
    if not reasons:
        return ""
    return f"({', '.join(reasons)}: the figures mean nothing)"


def _cell(row: Row) -> Callable[[str], str]:
    def text(head: str) -> str:
        value = row.figures.get(head, "-")
        return value if isinstance(value, str) else f"{value:.4g}"

    return text


if __name__ == "__main__":
    raise SystemExit(main())
