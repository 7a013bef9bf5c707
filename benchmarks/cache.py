# SPDX-License-Identifier: Apache-2.0
"""What does a cache of decoded images bring, and what does its first epoch cost?

Question
    The photos and the pipeline of jpeg_pipeline.py, each photo once in an epoch: images per second
    without a cache, in the epoch that fills it, and in those after it.

Method
    torch, simplejpeg  As in jpeg_pipeline.py: torch's loader and the fast libraries, no cache.
    no cache           `penstock.torch.DataLoader` over `ImageFolder` with `ImagePipeline.train`.
    first epoch        The same with `cache="ram:4GB"`, which is empty.
    later epochs       The same, when all are kept.
    tf.data, cache     `cache()` after the decoding of whole images; then the same crop, flip and
                       normalisation in TensorFlow's own operations, on two threads of one process.
                       PENSTOCK_BENCH_TENSORFLOW names its interpreter; without, it is left out.
    ..., 8 workers     With 8 workers, for their memory in all: "PSS MB" counts memory that
                       processes share once.

    An epoch is 445 images. "later" and "no cache" are eight epochs with the same workers, after one
    that is not counted. In the first epoch, what the workers have made by the time the first batch
    comes is not counted. Otherwise, the consumer reads the first and the last number of each batch.

    PENSTOCK_BENCH_IMAGES=/path names another folder of class folders. If there is none, the images
    are noise.

Left out
    FFCV with raw images: version 1.0.2 could be built here, and packs the photos; its loader gave
    no batch within three minutes.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6, simplejpeg 1.9.0, OpenCV 5.0.0

Command
    python benchmarks/cache.py --save

Result
    2026-11-27, 2 rounds; where two figures are named, with 2 and with 8 workers:

                                images/s        CPU ms/image    PSS MB
    penstock, no cache       1,594 / 1,824      1.14 / 1.07    358 / 605
    penstock, first epoch    1,054 /   781      1.74 / 2.37    357 / 606
    penstock, later epochs   4,700 / 5,436      0.42 / 0.35    647 / 896
    torch, simplejpeg        1,027              1.70
    tf.data, cache, first      337              4.01           876
    tf.data, cache, later      525              2.83           874

    Later epochs are 4.5 times as fast as the first one (target: 3), 2.9 times as fast as without a
    cache, and 9 times as fast as tf.data's. What 8 workers share is there once: 290 MB of pixels
    beside what they take anyway. TensorFlow resizes in float32; Penstock in integers.

What it does not show
    Images so large that the cache holds few of them.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from _meter import Meter
from _runner import Benchmark, Reading, Target, check, data_loader
from jpeg_pipeline import image_folder, one_thread

if TYPE_CHECKING:
    from collections.abc import Callable

_SIZE_PX = 224
_BATCH_SIZE = 16
_TENSORFLOW: Final = "PENSTOCK_BENCH_TENSORFLOW"  # an interpreter that has it


@dataclass(frozen=True, slots=True)
class Size:
    """How much is loaded."""

    num_epochs: int


def load(epoch: str, num_workers: int, size: Size) -> Reading:
    """Load the photos: the "first" epoch or "later" ones with a cache, or "any" without."""
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


def by_torch(size: Size) -> Reading:
    """Load as many with torch's loader."""
    import jpeg_pipeline

    given = jpeg_pipeline.Size(num_images=445, num_epochs=size.num_epochs)
    return jpeg_pipeline.load("torch, simplejpeg", "torch", given)


def by_tensorflow(epoch: str, size: Size) -> Reading:
    """Load as many with tf.data."""
    script = Path(__file__).with_name("_cache_tensorflow.py")
    command = [os.environ[_TENSORFLOW], str(script), str(image_folder()), str(size.num_epochs)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    wall_s, cpu_s, num_images, num_batches = found[epoch]
    more = {"CPU ms/image": cpu_s / num_images * 1e3, "PSS MB": found["pss_mb"]}
    return Reading(num_images / wall_s, wall_s, cpu_s, num_batches, more, {})


def _pss_mb() -> float:
    import psutil

    this = psutil.Process()
    processes = [this, *this.children(recursive=True)]
    return sum(process.memory_full_info().pss for process in processes) / 1e6


CONTENDERS: dict[str, Callable[[Size], Reading]] = {
    f"{name}{more}": partial(load, epoch, num_workers)
    for more, num_workers in (("", 2), (", 8 workers", 8))
    for name, epoch in (
        ("penstock, no cache", "any"),
        ("penstock, first epoch", "first"),
        ("penstock, later epochs", "later"),
    )
}
CONTENDERS["torch, simplejpeg"] = by_torch
if os.environ.get(_TENSORFLOW):
    for name, epoch in (("first epoch", "first"), ("later epochs", "later")):
        CONTENDERS[f"tf.data, cache, {name}"] = partial(by_tensorflow, epoch)

BENCHMARK = Benchmark(
    file=__file__,
    unit="images/s",
    better="higher",
    contenders=CONTENDERS,
    full=Size(num_epochs=8),
    smoke=Size(num_epochs=1),
    targets=[
        Target("penstock, later epochs", "penstock, first epoch", at_least=3.0),
        Target("penstock, later epochs", "penstock, no cache"),
        Target("penstock, first epoch", "penstock, no cache"),
        Target("penstock, later epochs", "torch, simplejpeg"),
    ],
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
