# SPDX-License-Identifier: Apache-2.0
"""Ray Data: a plan of tasks that a local Ray cluster runs, and blocks in its object store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import works
from contender import Contender, Epoch, Job
from contenders import photo_ops
from contenders.shared import numbers_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Of the object store: some fifty batches of 38.5 MB. The default takes 30 % of all memory.
STORE_BYTES = 2 << 30
# Rows of one block of the big batches; a block is a batch then, and is not copied together.
BATCH_ROWS = works.BATCH_SHAPE[0]


class _Epochs:
    """Calls to epochs: the plan is run anew, by processes that live on."""

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401
        batch_size: int,
        take: Callable[[dict[str, Any]], Any],
        shuffle: tuple[int, int] | None = None,
    ) -> None:
        """Keep the plan; `shuffle` is the size of the buffer and the seed."""
        self._dataset = dataset
        self._batch_size = batch_size
        self._take = take
        self._shuffle = shuffle

    def __call__(self, epoch: int) -> Iterator[Any]:
        options: dict[str, Any] = {}
        if self._shuffle is not None:
            options["local_shuffle_buffer_size"] = self._shuffle[0]
            options["local_shuffle_seed"] = self._shuffle[1] + epoch
        return map(self._take, self._dataset.iter_batches(batch_size=self._batch_size, **options))


def _start(job: Job) -> Any:  # noqa: ANN401
    """Start a cluster of its own for this process, and return `ray.data`."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    import ray.data

    if not ray.is_initialized():
        # It is shut down when the interpreter exits, by a hook of its own.
        ray.init(
            address="local",
            num_cpus=job.num_workers,
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            log_to_driver=False,
        )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    if job.tolerant:
        context.max_errored_blocks = -1
    return ray.data


def worker_pids() -> list[int]:
    """Return the cluster's processes that run tasks; without one at work, those that wait.

    They are titled `ray::TASK` and `ray::IDLE`. Others have such titles too: with an agent's end
    the whole node ends, and actors whose names begin with _ only count and plan.
    """
    import psutil

    titles = {
        process.pid: " ".join(process.cmdline()).strip()
        for process in psutil.Process().children(recursive=True)
    }
    workers = {
        pid: title
        for pid, title in titles.items()
        if title.startswith("ray::") and not title.startswith("ray::_")
        if not title.endswith("Agent")
    }
    busy = [pid for pid, title in workers.items() if title != "ray::IDLE"]
    return busy or list(workers)


# ---------------------------------------------------------------- photos


class ToPhotos:
    """Makes images of JPEGs, and labels of class folders where there are none yet."""

    def __init__(self, names: list[str]) -> None:
        """Keep the classes' names."""
        self._labels = {name: label for label, name in enumerate(names)}

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return images and labels."""
        photo_ops.one_thread()
        images = np.empty((len(batch["bytes"]), 3, works.CROP_PX, works.CROP_PX), np.float32)
        for data, image in zip(batch["bytes"], images, strict=True):
            photo_ops.fast_sample(data, out=image)
        return {"image": images, "label": _labels(batch, self._labels)}


class ToLabelled:
    """Puts labels in the place of paths."""

    def __init__(self, names: list[str]) -> None:
        """Keep the classes' names."""
        self._labels = {name: label for label, name in enumerate(names)}

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return bytes and labels."""
        return {"bytes": batch["bytes"], "label": _labels(batch, self._labels)}


def _labels(batch: dict[str, Any], labels: dict[str, int]) -> Any:  # noqa: ANN401
    if "label" in batch:
        return batch["label"]
    return np.array([labels[Path(path).parent.name] for path in batch["path"]])


def _photo_pair(batch: dict[str, Any]) -> tuple[Any, Any]:
    return batch["image"], batch["label"]


def _photo_epochs(files: Any, job: Job) -> Epoch:  # noqa: ANN401
    make = ToPhotos(works.class_names(job.photos))
    return _Epochs(files.map_batches(make, batch_size=job.batch_size), job.batch_size, _photo_pair)


def photos(job: Job) -> Epoch:
    """Read the photos; their files are shuffled, and so are they."""
    data = _start(job)
    shuffle = data.FileShuffleConfig(seed=job.seed)
    files = data.read_binary_files(str(job.photos), include_paths=True, shuffle=shuffle)
    return _photo_epochs(files, job)


def pack(job: Job) -> None:
    """Write the photos into Parquet files."""
    data = _start(job)
    files = data.read_binary_files(str(job.photos), include_paths=True)
    labelled = files.map_batches(ToLabelled(works.class_names(job.photos)))
    labelled.write_parquet(str(job.packed))


def packed(job: Job) -> Epoch:
    """Read the photos from Parquet files; they are shuffled while they are JPEGs."""
    data = _start(job)
    files = data.read_parquet(str(job.packed))
    shuffled = files.random_shuffle(seed=data.RandomSeedConfig(seed=job.seed))
    return _photo_epochs(shuffled, job)


# ---------------------------------------------------------------- the other works


def _data_only(batch: dict[str, Any]) -> Any:  # noqa: ANN401
    return batch["data"]


def tiny(job: Job) -> Epoch:
    """Read rows that lie in the object store."""
    data = _start(job)
    rows = data.from_numpy(works.tiny_rows(job.num_samples))
    return _Epochs(rows, job.batch_size, _data_only, (job.num_samples, job.seed))


def to_big_batch(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the big batch of a number."""
    return {"data": works.big_batch(int(batch["id"][0]))}


def transport(job: Job) -> Epoch:
    """Send big batches."""
    data = _start(job)
    numbers = data.range(job.num_samples, override_num_blocks=job.num_samples)
    return _Epochs(numbers.map_batches(to_big_batch, batch_size=1), BATCH_ROWS, _data_only)


def to_numbers(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers in paths."""
    return {"data": numbers_in(batch["path"])}


def paths(job: Job) -> Epoch:
    """Read the numbers in many paths, an Arrow column."""
    data = _start(job)
    import pyarrow as pa

    names = (works.path_of(index) for index in range(job.num_samples))
    table = pa.table({"path": pa.array(names, pa.string(), size=job.num_samples)})
    shuffled = data.from_arrow(table).random_shuffle(seed=data.RandomSeedConfig(seed=job.seed))
    return _Epochs(shuffled.map_batches(to_numbers), job.batch_size, _data_only)


_DOCS = "https://docs.ray.io/en/latest/data"

CONTENDERS = [
    Contender(
        name="Ray Data",
        environment="ray",
        libraries=("ray", "ray.data", "simplejpeg", "cv2"),
        settings=(
            "ray.init(num_cpus=2, 2 GiB of object store); read_binary_files with file shuffle, "
            f"which here shuffles samples ({_DOCS}/shuffling-data.html), map_batches with "
            "simplejpeg and OpenCV, as read_images decodes whole photos with Pillow, iter_batches "
            f"({_DOCS}/performance-tips.html); packed: Parquet, random_shuffle of the JPEGs; "
            "tiny: from_numpy and a local shuffle buffer of all rows; transport: a block per "
            "batch; paths: an Arrow column, random_shuffle; tolerant: max_errored_blocks=-1"
        ),
        photos=photos,
        pack=pack,
        packed=packed,
        tiny=tiny,
        transport=transport,
        paths=paths,
        worker_pids=worker_pids,
        antialias=False,
        absent={
            "resume": "its checkpoints are for jobs that write their rows, not for an iteration"
        },
    )
]
