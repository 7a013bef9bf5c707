# SPDX-License-Identifier: Apache-2.0
"""How near to the bare JPEG decoder does training on photos come?

Question
    Photos in a folder to normalised float batches: random-resized crop to 224 x 224, a flip half of
    the time, float32 CHW with ImageNet's mean and standard deviation; batches of 64, 2 workers.

Method
    torch, Pillow      torch's DataLoader and the ImageNet recipe as torchvision has it for Pillow's
                       images, written with Pillow and numpy.
    torch, simplejpeg  torch's DataLoader and the same recipe with the fast libraries: simplejpeg
                       (libjpeg-turbo), cv2.resize, cv2.flip, one cv2.LUT per channel.
    penstock           `penstock.torch.DataLoader` over `ImageFolder` with `ImagePipeline.train`.
    penstock, uint8    The same, `output="uint8_hwc"`: normalisation is left to the device.
    penstock, Pillow's resampling    The same as penstock, `resample="antialias"`.
    decode alone       2 processes that decode the files with simplejpeg and do nothing else: no
                       loader, no batches. The limit of whoever decodes whole files.
    decode alone, coarse colour      The same with `fastupsample=True`, which Penstock uses.
    decode_image       The same two processes, with `penstock.images.decode_image`.
    ..., OpenCV decodes    The same as penstock or decode_image, as where simplejpeg is not
                       installed.

    The files are in memory (the page cache); an epoch is 1,792 images, which takes the 445 files
    four times, so that both workers get as many batches. Each contender loads three epochs with the
    same workers, after one warm-up epoch, which is checked: number, shape, type and range. The
    consumer reads the first and the last number of each batch.

    Another folder of class folders: PENSTOCK_BENCH_IMAGES=/path. Without any, noise is drawn.

Left out
    Reading from a disk; start of the workers; what the loop does with the other core.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6, simplejpeg 1.9.0, OpenCV 5.0.0, Pillow 13.0.0

Command
    python benchmarks/jpeg_pipeline.py --save

Result
    2026-11-21, 5 rounds, medians (least - greatest); 445 photos of clothes, 400 to 888 px:

                                     images/s                CPU ms/image   peak MB
    torch, Pillow                     651 ( 627 -  689)      2.96           451
    torch, simplejpeg                1019 ( 960 - 1146)      1.81           449
    penstock                         2102 (2021 - 2223)      0.94           531
    penstock, uint8                  2330 (2150 - 2464)      0.84           355
    penstock, Pillow's resampling    1122 (1087 - 1174)      1.71           535
    decode alone                     2598 (2516 - 2700)      0.74            39
    decode alone, coarse colour      2931 (2895 - 3033)      0.67            39

    3.23 times torch with Pillow (target 2.5: met), 2.06 times torch with the same libraries (target
    2: met), 0.81 of decode alone (target 0.9: missed; as uint8 0.90).

    Where a worker's time goes (perf, without the collector's share): JPEG decoder 57 %, OpenCV 26 %
    (look-up into floats 10, resize 10, split and flip 3), Python 10 % (of which reading the file
    and the header 3), libc and kernel 5 %. The rows that are not decoded save 0.09 ms an image.
    What is left is one pass each of three general functions over the crop; fused into one they
    would take perhaps half, which takes compiled code of our own.

What it does not show
    Large photos, where decoding at a half or a quarter gains much more; files that come from a
    disk; a loop that computes on the same cores. decode_image and the two rows without simplejpeg
    are newer than this result: docs/decoding.md.
"""

from __future__ import annotations

import atexit
import functools
import io
import itertools
import math
import os
import random
import shutil
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from _meter import Meter
from _runner import Benchmark, Reading, Target, check, data_loader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

_MEAN = np.array((0.485, 0.456, 0.406), np.float32)
_STD = np.array((0.229, 0.224, 0.225), np.float32)
_SIZE_PX = 224
_BATCH_SIZE = 64
_NUM_WORKERS = 2


@dataclass(frozen=True, slots=True)
class Size:
    """How much is loaded."""

    num_images: int
    num_epochs: int


def image_folder() -> Path:
    """Return the folder of class folders."""
    given = os.environ.get("PENSTOCK_BENCH_IMAGES")
    tests_data = os.environ.get("PENSTOCK_TEST_DATA", Path(__file__).parents[2] / "shared" / "data")
    folder = Path(given) if given else Path(tests_data) / "clothing" / "train"
    check(not given or folder.is_dir(), f"PENSTOCK_BENCH_IMAGES={folder} is no folder")
    return folder if folder.is_dir() else drawn_folder()


@functools.cache
def drawn_folder() -> Path:
    """Return a folder of drawn photos that lasts as long as this process: to see that all works."""
    from PIL import Image

    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    (folder / "noise").mkdir()
    for number in range(70):
        noise = np.random.default_rng(number).integers(0, 256, (40, 40, 3), np.uint8)
        Image.fromarray(noise).resize((400, 320)).save(folder / "noise" / f"{number:02}.jpg")
    return folder


def image_files(size: Size) -> list[str]:
    """Return files in an order of chance; over again, where there are fewer than are wanted."""
    files = sorted(map(str, image_folder().glob("*/*.jp*g")))
    random.Random(0).shuffle(files)
    check(files, f"no JPEG files in the folders of {image_folder()}")
    return list(itertools.islice(itertools.cycle(files), size.num_images))


def drawn_crop(height: int, width: int) -> tuple[int, int, int, int]:
    """Return top, left, height and width of torchvision's random-resized crop."""
    for _ in range(10):
        area = height * width * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = random.randint(0, height - crop_height)
            return top, random.randint(0, width - crop_width), crop_height, crop_width
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def by_pillow(data: bytes) -> npt.NDArray[np.float32]:
    """Return one sample, made with Pillow and numpy as torchvision's transforms make it."""
    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB")
    top, left, height, width = drawn_crop(image.height, image.width)
    image = image.crop((left, top, left + width, top + height))
    image = image.resize((_SIZE_PX, _SIZE_PX), Image.Resampling.BILINEAR)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)).astype(np.float32) / 255
    pixels -= _MEAN[:, None, None]
    pixels /= _STD[:, None, None]
    return pixels


def by_simplejpeg(data: bytes) -> npt.NDArray[np.float32]:
    """Return one sample, made with the fast libraries."""
    import cv2
    import simplejpeg

    image = simplejpeg.decode_jpeg(data, "RGB")
    top, left, height, width = drawn_crop(*image.shape[:2])
    part = image[top : top + height, left : left + width]
    small = cv2.resize(part, (_SIZE_PX, _SIZE_PX), interpolation=cv2.INTER_LINEAR)
    if random.random() < 0.5:
        small = cv2.flip(small, 1)
    out = np.empty((3, _SIZE_PX, _SIZE_PX), np.float32)
    for channel, plane in enumerate(cv2.split(small)):
        cv2.LUT(plane, _table(channel), dst=out[channel])
    return out


_tables: dict[int, npt.NDArray[np.float32]] = {}


def _table(channel: int) -> npt.NDArray[np.float32]:
    if channel not in _tables:
        levels = np.arange(256, dtype=np.float32) / 255
        _tables[channel] = (levels - _MEAN[channel]) / _STD[channel]
    return _tables[channel]


class Photos:
    """The files as a data set for torch's loader."""

    def __init__(self, files: Sequence[str], make: Callable[[bytes], Any]) -> None:
        """Read `files` by `make`."""
        self._files = files
        self._make = make

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Return an image and a number in the place of its class."""
        with open(self._files[index], "rb") as file:
            return self._make(file.read()), index


def photos(kind: str, size: Size) -> Any:  # noqa: ANN401 - any data set
    """Return the data set of a contender."""
    files = image_files(size)
    if kind == "torch, Pillow":
        return Photos(files, by_pillow)
    if kind == "torch, simplejpeg":
        return Photos(files, by_simplejpeg)
    from penstock.data import Subset
    from penstock.vision import ImageFolder, ImagePipeline

    options: dict[str, Any] = {
        "penstock": {},
        "penstock, uint8": {"output": "uint8_hwc"},
        "penstock, Pillow's resampling": {"resample": "antialias"},
    }[kind]
    folder = ImageFolder(image_folder(), transform=ImagePipeline.train(_SIZE_PX, **options))
    place = {folder.describe(index): index for index in range(len(folder))}
    return Subset(folder, [place[file] for file in files])


def one_thread(_worker_id: int) -> None:
    """Keep OpenCV to one thread, as Penstock does in its workers."""
    import cv2

    cv2.setNumThreads(0)


def load(kind: str, library: Literal["torch", "penstock"], size: Size) -> Reading:
    """Load the photos with a loader."""
    dataset = photos(kind, size)
    loader = data_loader(library)(
        dataset,
        batch_size=_BATCH_SIZE,
        shuffle=True,
        num_workers=_NUM_WORKERS,
        persistent_workers=True,
        worker_init_fn=one_thread,
    )
    _check_epoch(loader, len(dataset), is_float="uint8" not in kind)
    num_images = num_batches = 0
    with Meter() as meter:
        for _ in range(size.num_epochs):
            for images, labels in loader:
                _ = float(images.view(-1)[0]) + float(images.view(-1)[-1])
                num_images += len(labels)
                num_batches += 1
    check(num_images == size.num_epochs * len(dataset), f"{num_images} images")
    value = num_images / meter.wall_s
    more = {"CPU ms/image": meter.cpu_s / num_images * 1e3}
    return Reading.of(meter, value, num_batches, more)


def _check_epoch(loader: Any, num_images: int, *, is_float: bool) -> None:  # noqa: ANN401
    seen = 0
    for images, labels in loader:
        seen += len(labels)
        shape = (3, _SIZE_PX, _SIZE_PX) if is_float else (_SIZE_PX, _SIZE_PX, 3)
        check(tuple(images.shape[1:]) == shape, f"shape {tuple(images.shape)}")
        low, high = float(images.min()), float(images.max())
        fits = -2.2 < low < 0 < high < 2.7 if is_float else 0 <= low < high <= 255
        check(fits, f"numbers from {low} to {high}")
    check(seen == num_images, f"{seen} images of {num_images}")


def without_simplejpeg(run: Callable[[Size], Reading], size: Size) -> Reading:
    """Run a contender as where simplejpeg is not installed."""
    import sys

    sys.modules["simplejpeg"] = None  # type: ignore[assignment]  # its import raises
    return run(size)


def decode_alone(size: Size, how: Literal["whole", "coarse", "decode_image"] = "whole") -> Reading:
    """Decode the files in two processes, and do nothing else."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    files = image_files(size)
    gates = [context.Pipe() for _ in range(_NUM_WORKERS)]
    processes = [
        context.Process(target=_decode, args=(end, files[k::_NUM_WORKERS], size, how))
        for k, (_, end) in enumerate(gates)
    ]
    for process in processes:
        process.start()
    for gate, _ in gates:
        gate.recv()  # warmed up
    with Meter() as meter:
        for gate, _ in gates:
            gate.send(None)
        num_images = sum(gate.recv() for gate, _ in gates)
    for gate, _ in gates:
        gate.send(None)
    for process in processes:
        process.join()
    more = {"CPU ms/image": meter.cpu_s / num_images * 1e3}
    return Reading.of(meter, num_images / meter.wall_s, num_images // _BATCH_SIZE, more)


def _decode(gate: Any, files: list[str], size: Size, how: str) -> None:  # noqa: ANN401
    if how == "decode_image":
        from penstock.images import decode_image as decode
    else:
        from simplejpeg import decode_jpeg

        decode = partial(decode_jpeg, colorspace="RGB", fastupsample=how == "coarse")

    def epoch() -> int:
        for path in files:
            with open(path, "rb") as file:
                decode(file.read())
        return len(files)

    epoch()
    gate.send(None)
    gate.recv()
    gate.send(sum(epoch() for _ in range(size.num_epochs)))
    gate.recv()  # live until the CPU seconds have been read


CONTENDERS: dict[str, Callable[[Size], Reading]] = {
    "torch, Pillow": partial(load, "torch, Pillow", "torch"),
    "torch, simplejpeg": partial(load, "torch, simplejpeg", "torch"),
    "penstock": partial(load, "penstock", "penstock"),
    "penstock, uint8": partial(load, "penstock, uint8", "penstock"),
    "penstock, Pillow's resampling": partial(load, "penstock, Pillow's resampling", "penstock"),
    "decode alone": decode_alone,
    "decode alone, coarse colour": partial(decode_alone, how="coarse"),
    "decode_image": partial(decode_alone, how="decode_image"),
    "decode_image, OpenCV decodes": partial(
        without_simplejpeg, partial(decode_alone, how="decode_image")
    ),
    "penstock, OpenCV decodes": partial(without_simplejpeg, partial(load, "penstock", "penstock")),
}

BENCHMARK = Benchmark(
    file=__file__,
    unit="images/s",
    better="higher",
    contenders=CONTENDERS,
    full=Size(num_images=1792, num_epochs=3),
    smoke=Size(num_images=70, num_epochs=1),
    targets=[
        Target("penstock", "torch, Pillow", at_least=2.5),
        Target("penstock", "torch, simplejpeg", at_least=2.0),
        Target("penstock", "decode alone", at_least=0.9),
        Target("penstock", "decode alone, coarse colour"),
        Target("penstock, uint8", "decode alone"),
        Target("penstock, Pillow's resampling", "torch, Pillow"),
        Target("penstock, OpenCV decodes", "penstock"),
        Target("decode_image, OpenCV decodes", "decode_image"),
    ],
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
