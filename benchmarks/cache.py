# SPDX-License-Identifier: Apache-2.0
"""What does a cache of decoded images bring, and what does its first epoch cost?

Question
    The photos and the pipeline of jpeg_pipeline.py, each photo once in an epoch: images per second
    without a cache, in the epoch that fills it, and in those after it.

Method
    no cache           `penstock.torch.DataLoader` over `ImageFolder` with `ImagePipeline.train`.
    first epoch        The same with `cache="ram:4GB"`, which is empty.
    later epochs       The same, when all are kept.
    ..., 8 workers     With 8 workers, for what they take together: "PSS MB" counts what processes
                       share once.

    An epoch is 445 images; "later" and "no cache" are eight, after one that is not counted, with
    the same workers. Of the first epoch what the workers make before its second batch comes is not
    counted either. The consumer reads the first and the last number of each batch.

    Another folder of class folders: PENSTOCK_BENCH_IMAGES=/path. Without any, noise is drawn.

Left out
    FFCV with raw images and tf.data's cache: neither installs beside this torch.

Command
    python benchmarks/cache.py --save
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from _meter import Meter
from _runner import Benchmark, Reading, Target, check, data_loader
from jpeg_pipeline import image_folder, one_thread

if TYPE_CHECKING:
    from collections.abc import Callable

_SIZE_PX = 224
_BATCH_SIZE = 16


@dataclass(frozen=True, slots=True)
class Size:
    """How much is loaded."""

    num_epochs: int


def load(epoch: str, num_workers: int, size: Size) -> Reading:
    """Load the photos, in the epoch "first", in "later" ones, or in any, without a "cache"."""
    from penstock.vision import ImageFolder, ImagePipeline

    cache = None if epoch == "any" else "ram:4GB"
    dataset = ImageFolder(image_folder(), ImagePipeline.train(_SIZE_PX), cache=cache)
    loader = data_loader("penstock")(
        dataset,
        batch_size=_BATCH_SIZE,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=True,
        worker_init_fn=one_thread,
    )
    stream = iter(loader)
    if epoch == "first":
        next(stream)  # the workers are there; what they made ahead is not counted
        num_before = dataset.cache.num_kept
    else:
        for _ in stream:
            pass
        num_before = 0
    num_images = num_batches = 0
    with Meter() as meter:
        if epoch == "first":
            num_batches = sum(1 for _ in stream)
            num_images = len(dataset) - num_before
        else:
            for _ in range(size.num_epochs):
                for images, labels in loader:
                    _ = float(images.view(-1)[0]) + float(images.view(-1)[-1])
                    num_images += len(labels)
                    num_batches += 1
    check(cache is None or dataset.cache.num_kept == len(dataset), "not all are kept")
    more = {"CPU ms/image": meter.cpu_s / num_images * 1e3, "PSS MB": _pss_mb()}
    return Reading.of(meter, num_images / meter.wall_s, num_batches, more)


def _pss_mb() -> float:
    import psutil

    this = psutil.Process()
    processes = [this, *this.children(recursive=True)]
    return sum(process.memory_full_info().pss for process in processes) / 1e6


CONTENDERS: dict[str, Callable[[Size], Reading]] = {
    f"{name}{more}": partial(load, epoch, num_workers)
    for more, num_workers in (("", 2), (", 8 workers", 8))
    for name, epoch in (("no cache", "any"), ("first epoch", "first"), ("later epochs", "later"))
}

BENCHMARK = Benchmark(
    file=__file__,
    unit="images/s",
    better="higher",
    contenders=CONTENDERS,
    full=Size(num_epochs=8),
    smoke=Size(num_epochs=1),
    targets=[
        Target("later epochs", "first epoch", at_least=3.0),
        Target("later epochs", "no cache"),
        Target("first epoch", "no cache"),
    ],
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
