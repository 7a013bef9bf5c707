# SPDX-License-Identifier: Apache-2.0
"""What do workers on Ray cost, against worker processes?

Question
    On one machine, where Ray is not needed: how much of the speed of worker processes is left when
    workers are Ray actors, with 1 and with 2 of them, where batches are made of photos and where
    they are only carried? How long does a batch of 38 MB take through Ray's object store? Are plain
    tasks better than actors? What does Ray Data's `iter_torch_batches` do with the same work?

Method
    photos    A folder of JPEG files, batches of 64: random-resized crop to 224 x 224, flipped half
              of the time, normalised float32 CHW: `ImageFolder` with `ImagePipeline.train`
              (jpeg_pipeline.py).
    carry     Batches of 64 x 3 x 224 x 224 float32 (38 MB): rows of one ready tensor, through the
              default collate (transport.py's "rows").
    tiny      The same of 64 x 8 numbers: what dispatching a batch takes.

    torch            `torch.utils.data.DataLoader`, 2 worker processes; photos by the same fast
                     libraries (simplejpeg, OpenCV)
    processes, N     `penstock.torch.DataLoader`, N worker processes
    actors, N        the same with `backend="ray"`, N actors of one CPU
    ray tasks, N     plain Ray: N tasks of one CPU under way with one more waiting for each, which
                     make the batches by the same code (`BatchMaker`), and `ray.wait`
    ray data, N      `ray.data.range(...).map_batches(...)` with N actors that make whole batches
                     by the same code, and `iter_torch_batches`

    A Ray of its own is started for each contender, with an object store of 1 GiB, and counts with
    its CPU time and memory. Of a loader, whose workers are kept, one epoch is checked, and those
    after it are timed until a second or more is over. Ray Data runs once, and is timed from its
    first batch on. The consumer reads the first and the last number of each batch. "trainer ms" is
    the CPU time of the trainer's process alone, per batch.

Left out
    The start of Ray (2 to 3 s) and of its actors (0.4 s each).

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6, Ray 2.60.0

Command
    python benchmarks/ray_workers.py --save

Result
    2026-11-22, one round ("tiny" of a run before), samples/s:

                 torch    processes        actors           ray tasks  ray data
                 2        1       2        1       2        2          2
        photos   1,268    1,142   2,406    1,115   1,662    1,456      907
        carry    3,849    12,840  23,670   5,096   6,154    1,728      1,598
        tiny     68,500   272,000 247,000  32,500  38,300

    A batch of 38 MB takes 12.6 ms by one actor (19.4 of CPU in all, 2.4 of the trainer) and 5.0 by
    one process (5.2, 0.3). Dispatching one of 2 KB takes 2.0 ms, 1.2 of the trainer's CPU. On two
    cores two actors make 0.69 of the photos of two processes, at 1.40 times the CPU, 1.14 times
    those of plain tasks and 1.83 times those of Ray Data.

What it does not show
    A network: a batch from another machine takes its time on the link besides (scale_sim.py).
    More cores: here Ray's own processes and the trainer share two with the workers.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import jpeg_pipeline
import numpy as np
import threads
import transport
from _meter import Meter, Reading
from _runner import Benchmark, Target, check, data_loader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BATCH_SIZE = 64
_STORE_BYTES = 1 << 30

Way = Literal["torch", "processes", "actors", "ray tasks", "ray data"]


@dataclass(frozen=True, slots=True)
class Size:
    """Batches of an epoch of each work, the side of what is carried, the least seconds timed."""

    num_photo_batches: int
    num_carried: int
    num_tiny: int
    side_px: int
    seconds: float


def work(kind: str, way: Way, size: Size) -> tuple[Any, Callable[[Any, int], None], int]:
    """Return a data set, what checks a batch of it, and its batches."""
    if kind == "photos":
        images = jpeg_pipeline.Size(size.num_photo_batches * _BATCH_SIZE, 1)
        photos = jpeg_pipeline.photos("torch, simplejpeg" if way == "torch" else "penstock", images)
        return photos, threads.check_photos, size.num_photo_batches
    num = size.num_carried if kind == "carry" else size.num_tiny
    shape = (3, size.side_px, size.side_px) if kind == "carry" else (8,)
    rows = transport.Rows(transport.Size(_BATCH_SIZE, shape, num))
    right = np.asarray([rows[k].numpy() for k in range(_BATCH_SIZE)])
    return rows, partial(threads.check_rows, right=right), num


def start_ray(num_cpus: int) -> Any:  # noqa: ANN401 - the module
    """Return Ray, started for this process alone."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    import ray

    ray.init(
        address="local",
        num_cpus=num_cpus,
        object_store_memory=_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    return ray


def load(size: Size, kind: str, way: Way, num_workers: int) -> Reading:
    """Take batches made in one way."""
    dataset, check_batch, num_batches = work(kind, way, size)
    if way == "torch":
        return by_loader("torch", dataset, check_batch, size, num_workers, {})
    if way == "processes":
        return by_loader("penstock", dataset, check_batch, size, num_workers, {})
    ray = start_ray(num_workers + (way == "ray data"))  # whose reading takes one of its own
    try:
        if way == "actors":
            options = {"backend": "ray"}
            return by_loader("penstock", dataset, check_batch, size, num_workers, options)
        if way == "ray tasks":
            return timed_once(by_tasks(ray, dataset, num_workers, num_batches), check_batch)
        return timed_once(by_ray_data(ray, dataset, num_workers, num_batches), check_batch)
    finally:
        ray.shutdown()


def by_loader(
    library: Literal["torch", "penstock"],
    dataset: Any,  # noqa: ANN401
    check_batch: Callable[[Any, int], None],
    size: Size,
    num_workers: int,
    options: dict[str, Any],
) -> Reading:
    """Read epochs after a checked one."""
    loader = data_loader(library)(
        dataset,
        batch_size=_BATCH_SIZE,
        num_workers=num_workers,
        persistent_workers=True,
        worker_init_fn=jpeg_pipeline.one_thread if library == "torch" else None,
        **options,
    )
    for step, batch in enumerate(loader):
        check_batch(batch, step)
    del batch
    num_batches = num_samples = num_epochs = 0
    begun_s = time.process_time()
    with Meter() as meter:
        while not num_epochs or meter.elapsed_s() < size.seconds:
            num_epochs += 1
            for batch in loader:
                num_samples += touch(batch)
                num_batches += 1
            del batch
    check(num_samples == num_epochs * len(dataset), f"{num_samples} samples came")
    return reading(meter, num_samples, num_batches, time.process_time() - begun_s)


def touch(batch: Any) -> int:  # noqa: ANN401
    """Read a little of a batch; return its samples."""
    images = batch[0] if isinstance(batch, list | tuple) else batch
    numbers = images.reshape(-1)
    _ = float(numbers[0]) + float(numbers[-1])
    return len(images)


def reading(meter: Meter, num_samples: int, num_batches: int, trainer_s: float) -> Reading:
    """Return what was measured."""
    more = {
        "ms/batch": meter.wall_s / num_batches * 1e3,
        "CPU ms/batch": meter.cpu_s / num_batches * 1e3,
        "trainer ms": trainer_s / num_batches * 1e3,
    }
    return Reading.of(meter, num_samples / meter.wall_s, num_batches, more)


def timed_once(batches: Iterator[Any], check_batch: Callable[[Any, int], None]) -> Reading:
    """Take batches, and time them from the first on, which alone is checked."""
    check_batch(next(batches), 0)
    num_samples = num_batches = 0
    begun_s = time.process_time()
    with Meter() as meter:
        for batch in batches:
            num_samples += touch(batch)
            num_batches += 1
    return reading(meter, num_samples, num_batches, time.process_time() - begun_s)


class MakesBatches:
    """Makes the batch of a step in a process of Ray's, by Penstock's own code."""

    def __init__(self, dataset: Any) -> None:  # noqa: ANN401
        """Begin an epoch of `dataset`."""
        import penstock.torch  # noqa: F401 - the collate of tensors
        from penstock.engine.assembly import PlainOutput
        from penstock.engine.plan import Framework, WorkerSpec
        from penstock.engine.status_page import StatusWriter
        from penstock.engine.task import BeginEpoch
        from penstock.engine.task_runner import TaskRunner

        framework = Framework(root="torch", adapter="penstock.torch.worker")
        spec = WorkerSpec(dataset, is_iterable=False, is_batched=True, framework=framework)
        runner = TaskRunner(PlainOutput(), StatusWriter())
        runner.set_up(lambda: spec)
        runner.begin_epoch(BeginEpoch(0, 0))
        self._maker: Any = runner.maker

    def of_step(self, step: int) -> list[Any]:
        """Return the arrays of a batch."""
        first = step * _BATCH_SIZE
        batch = self._maker.make(np.arange(first, first + _BATCH_SIZE))
        parts = batch if isinstance(batch, list | tuple) else [batch]
        return [part.numpy() for part in parts]

    def __call__(self, steps: dict[str, Any]) -> dict[str, Any]:
        """Return the samples of one step, as Ray Data wants them."""
        parts = self.of_step(int(steps["id"][0]))
        return {str(number): part for number, part in enumerate(parts)}


_makers: dict[int, MakesBatches] = {}


def make_by_task(dataset: Any, step: int) -> list[Any]:  # noqa: ANN401
    """Return a batch; the process keeps what it needs for the next one."""
    if 0 not in _makers:
        _makers[0] = MakesBatches(dataset)
    return _makers[0].of_step(step)


def by_tasks(ray: Any, dataset: Any, num_workers: int, num_batches: int) -> Iterator[Any]:  # noqa: ANN401
    """Yield batches in order that plain tasks make."""
    import torch

    shared = ray.put(dataset)
    task = ray.remote(num_cpus=1)(make_by_task)
    waiting = [task.remote(shared, step) for step in range(2 * num_workers)]
    for step in range(2 * num_workers, num_batches + 2 * num_workers):
        parts = [torch.from_numpy(part) for part in ray.get(waiting.pop(0))]
        if step < num_batches:
            waiting.append(task.remote(shared, step))
        yield parts if len(parts) > 1 else parts[0]


def by_ray_data(ray: Any, dataset: Any, num_workers: int, num_batches: int) -> Iterator[Any]:  # noqa: ANN401
    """Yield batches as Ray Data gives them."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    steps = ray.data.range(num_batches, override_num_blocks=num_batches)
    made = steps.map_batches(
        MakesBatches,
        fn_constructor_args=(dataset,),
        batch_size=1,
        concurrency=num_workers,
        num_cpus=1,
    )
    for batch in made.iter_torch_batches(batch_size=_BATCH_SIZE):
        parts = list(batch.values())
        yield parts if len(parts) > 1 else parts[0]


_KINDS = ("photos", "carry", "tiny")
_LOADERS: tuple[tuple[Way, int], ...] = (
    ("torch", 2),
    ("processes", 1),
    ("processes", 2),
    ("actors", 1),
    ("actors", 2),
)
_PLAIN_RAY: tuple[tuple[Way, int], ...] = (("ray tasks", 2), ("ray data", 2))


def _ways(kind: str) -> tuple[tuple[Way, int], ...]:
    return _LOADERS if kind == "tiny" else _LOADERS + _PLAIN_RAY


def _name(kind: str, way: Way, num: int) -> str:
    if way == "torch":
        return f"torch, {kind}, processes, {num}"
    return f"{way}, {kind}, {num}" if way.startswith("ray") else f"penstock, {kind}, {way}, {num}"


def _targets(kind: str) -> list[Target]:
    actors = _name(kind, "actors", 2)
    peers = [way for way, num in _ways(kind) if way != "actors" and num == 2]
    return [
        Target(_name(kind, "actors", 1), _name(kind, "processes", 1)),
        *[Target(actors, _name(kind, way, 2)) for way in peers],
        Target(actors, _name(kind, "processes", 2), figure="CPU ms/batch"),
    ]


BENCHMARK = Benchmark(
    file=__file__,
    unit="samples/s",
    better="higher",
    contenders={
        _name(kind, way, num): partial(load, kind=kind, way=way, num_workers=num)
        for kind in _KINDS
        for way, num in _ways(kind)
    },
    full=Size(num_photo_batches=28, num_carried=100, num_tiny=1_000, side_px=224, seconds=2.0),
    smoke=Size(num_photo_batches=2, num_carried=6, num_tiny=6, side_px=32, seconds=0.01),
    targets=[target for kind in _KINDS for target in _targets(kind)],
    rounds=3,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
