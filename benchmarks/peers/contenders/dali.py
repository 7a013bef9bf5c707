# SPDX-License-Identifier: Apache-2.0
"""NVIDIA DALI without a GPU: its pipelines on CPU threads, and Python sources that feed them.

Readers give whole batches alone. As DALI's framework iterators do (`LastBatchPolicy.PARTIAL`), the
reader fills the last one with copies of its last sample, and they are cut off here.
"""

from __future__ import annotations

import io
import math
import subprocess
import sysconfig
import tarfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import works
from contender import Contender, Epoch, Job
from contenders.shared import numbers_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

_TAR: Final = "photos.tar"
_INDEX: Final = "photos.idx"


# ---------------------------------------------------------------- its readers and image operations


def _pipeline(job: Job, **options: Any) -> Any:  # noqa: ANN401 - DALI is not imported here
    from nvidia.dali import Pipeline

    return Pipeline(
        batch_size=job.batch_size,
        num_threads=job.num_workers,
        device_id=None,
        seed=job.seed,
        **options,
    )


def _images(jpegs: Any, *, antialias: bool = True) -> Any:  # noqa: ANN401
    """Return the operators from JPEGs to images, as in DALI's ImageNet example."""
    from nvidia.dali import fn, types

    crops = fn.decoders.image_random_crop(
        jpegs,
        device="cpu",
        output_type=types.RGB,
        random_area=[0.08, 1.0],
        random_aspect_ratio=[3 / 4, 4 / 3],
    )
    return fn.crop_mirror_normalize(
        fn.resize(crops, size=works.CROP_PX, antialias=antialias),
        dtype=types.FLOAT,
        output_layout="CHW",
        mean=[255 * mean for mean in works.MEAN],
        std=[255 * std for std in works.STD],
        mirror=fn.random.coin_flip(probability=0.5),
    )


def _array(output: Any) -> npt.NDArray[Any]:  # noqa: ANN401
    """Return a batch as it lies in DALI's memory, which the array keeps."""
    return np.asarray(output.as_tensor())


def _reader_epochs(pipe: Any) -> Epoch:  # noqa: ANN401
    pipe.build()
    num_samples = pipe.epoch_size("Reader")
    num_batches = math.ceil(num_samples / pipe.max_batch_size)

    def epoch(_number: int) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        for step in range(num_batches):
            images, labels = (_array(output) for output in pipe.run())
            num_left = num_samples - step * pipe.max_batch_size
            yield images[:num_left], labels[:num_left].reshape(-1)

    return epoch


def photos(job: Job, *, antialias: bool = True) -> Epoch:
    """Read the class folders with DALI's file reader."""
    from nvidia.dali import fn

    with _pipeline(job) as pipe:
        jpegs, labels = fn.readers.file(
            name="Reader",
            file_root=str(job.photos),
            shuffle_after_epoch=True,
            shuffle_after_epoch_seed=job.seed,
            pad_last_batch=True,
        )
        pipe.set_outputs(_images(jpegs, antialias=antialias), labels)
    return _reader_epochs(pipe)


def pack(job: Job) -> None:
    """Write a tar in the WebDataset format, and its index with DALI's own program."""
    path = job.packed / _TAR
    with tarfile.open(path, "w") as tar:
        for number, (file, label) in enumerate(works.labelled_files(job.photos)):
            parts = {"jpg": Path(file).read_bytes(), "cls": label.to_bytes(4, "little")}
            for extension, data in parts.items():
                member = tarfile.TarInfo(f"{number:08}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    program = Path(sysconfig.get_path("scripts"), "wds2idx")
    subprocess.run(
        [program, path, job.packed / _INDEX], check=True, stdout=subprocess.DEVNULL, timeout=600
    )


def packed(job: Job) -> Epoch:
    """Read the tar; the buffer in which DALI shuffles is as large as the set."""
    from nvidia.dali import fn, types

    num_samples = sum(1 for _ in (job.packed / _INDEX).open()) - 1  # the first line is a header
    with _pipeline(job) as pipe:
        jpegs, labels = fn.readers.webdataset(
            name="Reader",
            paths=str(job.packed / _TAR),
            index_paths=str(job.packed / _INDEX),
            ext=["jpg", "cls"],
            dtypes=[types.UINT8, types.INT32],
            missing_component_behavior="error",
            random_shuffle=True,
            initial_fill=num_samples,
            seed=job.seed,
            pad_last_batch=True,
        )
        pipe.set_outputs(_images(jpegs), labels)
    return _reader_epochs(pipe)


# ---------------------------------------------------------------- sources in Python


class _Source:
    """Gives batch after batch, as DALI wants it: by the batch's number alone.

    Concurrency:
        Each worker process has its own copy.
    """

    def __init__(self, job: Job, num_samples: int) -> None:
        self._num_samples = num_samples
        self._batch_size = job.batch_size
        self._seed = job.seed
        self._epoch: int | None = None
        self._order = np.empty(0, np.int64)

    def __call__(self, info: Any) -> Any:  # noqa: ANN401 - a types.BatchInfo
        """Return a batch, in an order that the seed and the epoch say."""
        start = info.iteration * self._batch_size
        if start >= self._num_samples:
            raise StopIteration
        if self._epoch != info.epoch_idx:
            rng = np.random.default_rng([self._seed, info.epoch_idx])
            self._epoch, self._order = info.epoch_idx, rng.permutation(self._num_samples)
        return self.batch(self._order[start : start + self._batch_size])

    def batch(self, indices: npt.NDArray[np.int64]) -> Any:  # noqa: ANN401
        """Return these samples."""
        raise NotImplementedError


class _Rows(_Source):
    def __init__(self, job: Job) -> None:
        super().__init__(job, job.num_samples)
        self._rows = works.tiny_rows(job.num_samples)

    def batch(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        return self._rows[indices]


class _Paths(_Source):
    def __init__(self, job: Job) -> None:
        super().__init__(job, job.num_samples)
        self._paths = [works.path_of(index) for index in range(job.num_samples)]

    def batch(self, indices: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        numbers = numbers_in([self._paths[index] for index in indices.tolist()])
        return list(numbers[:, None])  # workers give one array per sample


class _Files(_Source):
    def __init__(self, job: Job) -> None:
        self._files = works.labelled_files(job.photos)
        super().__init__(job, len(self._files))

    def batch(
        self, indices: npt.NDArray[np.int64]
    ) -> tuple[list[npt.NDArray[np.uint8]], list[npt.NDArray[np.int64]]]:
        files, labels = zip(*(self._files[index] for index in indices.tolist()), strict=True)
        return [np.fromfile(file, np.uint8) for file in files], list(np.array(labels)[:, None])


class _BigBatches:
    """Gives a batch of the work as one sample."""

    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches

    def __call__(self, info: Any) -> npt.NDArray[np.float32]:  # noqa: ANN401 - a types.SampleInfo
        """Return a batch."""
        if info.idx_in_epoch >= self._num_batches:
            raise StopIteration
        return works.big_batch(info.idx_in_epoch)


def _with_workers(job: Job) -> Any:  # noqa: ANN401
    return _pipeline(job, py_num_workers=job.num_workers, py_start_method="spawn")


def _parallel(job: Job) -> dict[str, Any]:
    # A worker makes whole batches: so that all have one to make, as many have to be asked for.
    return {
        "batch": True,
        "batch_info": True,
        "parallel": True,
        "prefetch_queue_depth": 2 * job.num_workers,
    }


def _source_epochs(pipe: Any, convert: Callable[..., Any]) -> Epoch:  # noqa: ANN401
    """Return epochs of a pipeline that ends where its source does."""
    pipe.build()

    def epoch(_number: int) -> Iterator[Any]:
        while True:
            try:
                outputs = pipe.run()
            except StopIteration:
                pipe.reset()
                return
            yield convert(*outputs)

    return epoch


def tiny(job: Job) -> Epoch:
    """Take each batch from an array, in DALI's calling thread."""
    with _pipeline(job) as pipe:
        pipe.set_outputs(_row_source(_Rows(job)))
    return _source_epochs(pipe, _array)


def _row_source(source: _Rows) -> Any:  # noqa: ANN401
    from nvidia.dali import fn

    return fn.external_source(source=source, batch=True, batch_info=True)


def transport(job: Job) -> Epoch:
    """Let worker processes give big batches through DALI's shared memory."""
    from nvidia.dali import fn

    with _with_workers(job) as pipe:
        batches = fn.external_source(
            source=_BigBatches(job.num_samples),
            batch=False,
            parallel=True,
            prefetch_queue_depth=2 * job.num_workers,
            bytes_per_sample_hint=4 * math.prod(works.BATCH_SHAPE) + (1 << 20),
        )
        pipe.set_outputs(batches)
    return _source_epochs(pipe, lambda batches: np.asarray(batches[0]))


def paths(job: Job) -> Epoch:
    """Let worker processes look into lists of paths; each has its own."""
    from nvidia.dali import fn

    with _with_workers(job) as pipe:
        pipe.set_outputs(fn.external_source(source=_Paths(job), **_parallel(job)))
    return _source_epochs(pipe, lambda numbers: _array(numbers).reshape(-1))


def photos_of_source(job: Job) -> Epoch:
    """Let worker processes read the files, and DALI's threads do the rest."""
    from nvidia.dali import fn

    with _with_workers(job) as pipe:
        jpegs, labels = fn.external_source(source=_Files(job), num_outputs=2, **_parallel(job))
        pipe.set_outputs(_images(jpegs), labels)
    return _source_epochs(pipe, lambda images, labels: (_array(images), _array(labels).reshape(-1)))


class _Resume:
    """Rows that can be left: DALI keeps how many batches came, and asks the source for the next."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._source = _Rows(job)
        self._checkpoint: bytes | None = None
        self._pipe: Any = None

    def batches(self) -> Iterator[npt.NDArray[np.float32]]:
        """Return the batches from the start, or from where `restore` said."""
        with _pipeline(self._job, enable_checkpointing=True, checkpoint=self._checkpoint) as pipe:
            pipe.set_outputs(_row_source(self._source))
        self._pipe = pipe
        return _source_epochs(pipe, _array)(0)

    def state(self) -> bytes:
        """Return DALI's checkpoint."""
        state: bytes = self._pipe.checkpoint()
        return state

    def restore(self, state: bytes) -> None:
        """Keep a checkpoint for the pipeline that is to come."""
        self._checkpoint = state


_NO_TOLERANCE = "it has no setting for samples that cannot be decoded"

CONTENDERS = [
    Contender(
        name="DALI (CPU)",
        environment="dali",
        libraries=("nvidia.dali", "nvidia.dali.fn", "nvidia.dali.types"),
        settings=(
            "Pipelines with 2 CPU threads and the default settings, which its guide (Performance "
            "Tuning) says to keep for typical use. Photos: readers.file with shuffle_after_epoch, "
            "decoders.image_random_crop, resize (antialiased, its default) and "
            "crop_mirror_normalize, the operators of its ImageNet example. Packed: a WebDataset "
            "tar with the index of wds2idx, shuffled in a buffer over the whole set. Rows: "
            "external_source(batch=True) in the process, which was faster than with workers. "
            "Transport and paths: external_source(parallel=True), 2 and 4 workers, "
            "py_start_method='spawn', twice as many batches ahead (Parallel External Source); "
            "the paths in a list, as there. Resume: enable_checkpointing."
        ),
        photos=photos,
        pack=pack,
        packed=packed,
        tiny=tiny,
        transport=transport,
        paths=paths,
        resume=_Resume,
        antialias=True,
        absent={"tolerant": _NO_TOLERANCE},
    ),
    Contender(
        name="DALI (CPU, no antialias)",
        environment="dali",
        libraries=("nvidia.dali", "nvidia.dali.fn", "nvidia.dali.types"),
        settings=(
            "As DALI (CPU), with resize(antialias=False): less work, as OpenCV's resize does "
            "elsewhere on this page."
        ),
        photos=partial(photos, antialias=False),
        antialias=False,
        same_loader_as="DALI (CPU)",
        absent={
            **dict.fromkeys(
                ("pack", "packed", "tiny", "transport", "paths", "resume"), "see DALI (CPU)"
            ),
            "tolerant": _NO_TOLERANCE,
        },
    ),
    Contender(
        name="DALI (CPU, Python workers)",
        environment="dali",
        libraries=("nvidia.dali", "nvidia.dali.fn", "nvidia.dali.types"),
        settings=(
            "As DALI (CPU), but the files are read by Python: external_source(parallel=True), "
            "2 workers, py_start_method='spawn', 4 batches ahead (Parallel External Source)."
        ),
        photos=photos_of_source,
        antialias=True,
        rounds=1,
        absent={
            **dict.fromkeys(
                ("pack", "packed", "tiny", "transport", "paths", "resume"), "see DALI (CPU)"
            ),
            "tolerant": _NO_TOLERANCE,
        },
    ),
]
