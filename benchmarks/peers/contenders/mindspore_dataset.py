# SPDX-License-Identifier: Apache-2.0
"""MindSpore's dataset module: operators in C++ on threads, and sources in Python."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import works
from contender import Contender, Epoch, Job
from contenders.shared import PathNumbers, path_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

_RECORD: Final = "photos.mindrecord"
_EXTENSIONS: Final = [".jpg", ".jpeg", ".JPG", ".JPEG"]
# The process that ends the workers when this process has ended; it loads nothing.
_WATCHDOG: Final = "GeneratorCleanProcess"


def _dataset_module(job: Job) -> Any:  # noqa: ANN401 - MindSpore is not imported here
    """Return `mindspore.dataset` with the job's settings."""
    from mindspore import dataset

    dataset.config.set_seed(job.seed)
    dataset.config.set_num_parallel_workers(_num_workers(job))
    if job.tolerant:
        dataset.config.set_error_samples_mode(dataset.config.ErrorSamplesMode.SKIP)
    return dataset


def _num_workers(job: Job) -> int:
    """Return as many as the job says, but no more than MindSpore allows."""
    return min(job.num_workers, os.cpu_count() or 1)


def _epochs(dataset: Any, convert: Callable[..., Any]) -> Epoch:  # noqa: ANN401
    """Return epochs of a pipeline that lives on from one to the next."""
    rows = dataset.create_tuple_iterator(num_epochs=-1, output_numpy=True)

    def epoch(_number: int) -> Iterator[Any]:
        for row in rows:
            yield convert(*row)

    return epoch


def _only(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return column


def _images_and_labels(
    images: npt.NDArray[Any], labels: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    return images, labels.reshape(-1)


# ---------------------------------------------------------------- photos


def _photo_epochs(job: Job, samples: Any) -> Epoch:  # noqa: ANN401
    """Return epochs of a dataset of JPEGs in column `image` and labels in column `label`."""
    from mindspore.dataset import vision

    operations = [
        vision.RandomCropDecodeResize(works.CROP_PX, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3)),
        vision.RandomHorizontalFlip(0.5),
        vision.Normalize(
            mean=[255 * mean for mean in works.MEAN],
            std=[255 * std for std in works.STD],
            is_hwc=True,
        ),
        vision.HWC2CHW(),
    ]
    dataset = samples.map(operations, input_columns="image").batch(job.batch_size)
    return _epochs(dataset.project(["image", "label"]), _images_and_labels)


def photos(job: Job) -> Epoch:
    """Read the class folders with MindSpore's own reader."""
    dataset = _dataset_module(job)
    samples = dataset.ImageFolderDataset(str(job.photos), shuffle=True, extensions=_EXTENSIONS)
    return _photo_epochs(job, samples)


def pack(job: Job) -> None:
    """Write one MindRecord file."""
    from mindspore.mindrecord import FileWriter

    writer = FileWriter(str(job.packed / _RECORD), shard_num=1)
    writer.add_schema({"image": {"type": "bytes"}, "label": {"type": "int32"}})
    writer.write_raw_data(
        [
            {"image": Path(file).read_bytes(), "label": label}
            for file, label in works.labelled_files(job.photos)
        ]
    )
    writer.commit()


def packed(job: Job) -> Epoch:
    """Read the MindRecord file; its index shuffles all records."""
    dataset = _dataset_module(job)
    return _photo_epochs(job, dataset.MindDataset(str(job.packed / _RECORD), shuffle=True))


# ---------------------------------------------------------------- sources in Python


class _Files:
    """The files' bytes and labels."""

    def __init__(self, photos: Path) -> None:
        self._files = works.labelled_files(photos)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        path, label = self._files[index]
        return np.fromfile(path, np.uint8), np.array(label, np.int32)


class _PathNumbers:
    """The numbers in paths, which lie in one array of bytes, as MindSpore's guide advises."""

    def __init__(self, num_samples: int) -> None:
        self._numbers = PathNumbers(path_array(num_samples))

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.int64]]:
        return (np.array(self._numbers[index]),)


class _BigBatches:
    """Batches as rows."""

    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.float32]]:
        return (works.big_batch(int(index)),)


def _from_workers(job: Job, source: Any, columns: list[str], *, shuffle: bool) -> Any:  # noqa: ANN401
    return _dataset_module(job).GeneratorDataset(
        source,
        columns,
        shuffle=shuffle,
        num_parallel_workers=_num_workers(job),
        python_multiprocessing=True,
    )


def photos_of_source(job: Job) -> Epoch:
    """Let worker processes read the files, and threads do the rest."""
    return _photo_epochs(
        job, _from_workers(job, _Files(job.photos), ["image", "label"], shuffle=True)
    )


def worker_pids() -> list[int]:
    """Return the worker processes that read; the pipeline's threads in C++ are none."""
    return [
        child.pid
        for child in multiprocessing.active_children()
        if child.name != _WATCHDOG and child.pid is not None
    ]


def transport(job: Job) -> Epoch:
    """Let worker processes give big batches through shared memory."""
    return _epochs(
        _from_workers(job, _BigBatches(job.num_samples), ["batch"], shuffle=False), _only
    )


def paths(job: Job) -> Epoch:
    """Let worker processes look into one array of paths."""
    samples = _from_workers(job, _PathNumbers(job.num_samples), ["number"], shuffle=True)
    return _epochs(samples.batch(job.batch_size), _only)


def _rows(job: Job) -> Any:  # noqa: ANN401
    dataset = _dataset_module(job)
    # A row costs less in this process than on the way from a worker.
    rows = dataset.NumpySlicesDataset(
        works.tiny_rows(job.num_samples), ["row"], shuffle=True, num_parallel_workers=1
    )
    return rows.batch(job.batch_size)


def tiny(job: Job) -> Epoch:
    """Take row by row from an array."""
    return _epochs(_rows(job), _only)


class _Resume:
    """Rows that can be left: the seed gives the same order, and `set_init_step` the place in it.

    So does MindSpore's `Model.train` when it goes on. `skip` gives the same batches, but makes all
    the ones before first.
    """

    def __init__(self, job: Job) -> None:
        self._dataset = _rows(job)
        self._num_delivered = 0

    def batches(self) -> Iterator[npt.NDArray[np.float32]]:
        """Return the batches from the start, or from where `restore` said."""
        self._dataset.set_init_step(self._num_delivered)
        rows = self._dataset.create_tuple_iterator(num_epochs=1, output_numpy=True)
        for (batch,) in rows:
            self._num_delivered += 1
            yield batch

    def state(self) -> bytes:
        """Return how many batches have come, in JSON of ours: MindSpore keeps no place."""
        return json.dumps({"delivered": self._num_delivered}).encode()

    def restore(self, state: bytes) -> None:
        """Go to a place."""
        self._num_delivered = json.loads(state)["delivered"]


CONTENDERS = [
    Contender(
        name="MindSpore",
        environment="mindspore",
        libraries=("mindspore", "mindspore.dataset", "mindspore.dataset.vision"),
        settings=(
            "As its guide (Optimizing the Data Processing) says: the built-in ImageFolderDataset, "
            "shuffle=True in the dataset, the C++ operators RandomCropDecodeResize, "
            "RandomHorizontalFlip, Normalize and HWC2CHW, num_parallel_workers=2 (no more than "
            "the machine has cores: MindSpore refuses 3 on 2 cores), one pipeline for all epochs. "
            "Packed: MindRecord. Rows: NumpySlicesDataset, in the process. Transport and paths: "
            "GeneratorDataset with python_multiprocessing=True and shared memory; the paths in a "
            "NumPy array, as its guide advises to save memory. Resume: it saves no position; the "
            "state is the benchmark's count of batches, and set_seed and set_init_step go to it, "
            "as its Model.train does. Its resize does not antialias."
        ),
        photos=photos,
        pack=pack,
        packed=packed,
        tiny=tiny,
        transport=transport,
        paths=paths,
        resume=_Resume,
        worker_pids=worker_pids,
        antialias=False,
    ),
    Contender(
        name="MindSpore (Python workers)",
        environment="mindspore",
        libraries=("mindspore", "mindspore.dataset", "mindspore.dataset.vision"),
        settings=(
            "As MindSpore, but the files are read by Python: GeneratorDataset with 2 processes "
            "(python_multiprocessing=True, its default) and shared memory, started by fork, its "
            "default."
        ),
        photos=photos_of_source,
        worker_pids=worker_pids,
        antialias=False,
        rounds=1,
        absent=dict.fromkeys(
            ("pack", "packed", "tiny", "transport", "paths", "resume"), "see MindSpore"
        ),
    ),
]
