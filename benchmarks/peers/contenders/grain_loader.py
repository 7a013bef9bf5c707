# SPDX-License-Identifier: Apache-2.0
"""Grain: datasets that know each of their elements by number, and what reads them.

That are processes, threads of this process ("read threads"), or the main process's own thread.

An order, also that of a later epoch, is computed from the number alone, and so is a place in it.
"""

from __future__ import annotations

import atexit
import itertools
import json
import random
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import works
from contender import Contender, Epoch, Job, Resumable
from contenders import photo_ops
from contenders.shared import Rows, beside, numbers_in, written_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

RECORDS_NAME = "photos.array_record"
# Before a photo's bytes in its record.
_LABEL = struct.Struct("<H")
# Batches that each process or thread keeps ready; torch's DataLoader keeps as many.
_READY_BATCHES = 2


class _Epochs:
    """Calls to epochs of one endless iterator, whose processes live on."""

    def __init__(self, dataset: Any, num_batches: int) -> None:  # noqa: ANN401
        self._iterator = iter(dataset)
        self._num_batches = num_batches

    def __call__(self, _epoch: int) -> Iterator[Any]:
        return itertools.islice(self._iterator, self._num_batches)


def start_worker(_index: int, _count: int) -> None:
    """Prepare a process that loads."""
    photo_ops.one_thread()


def _here(batches: Any) -> Any:  # noqa: ANN401
    """Return endless batches that are made when they are asked for."""
    import grain

    return batches.repeat().to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    )


def _in_processes(batches: Any, job: Job) -> Any:  # noqa: ANN401
    """Return endless batches that processes make, each in one thread."""
    import grain

    # No read threads within a process: decoding keeps it busy, and the files are in memory.
    options = grain.MultiprocessingOptions(
        num_workers=job.num_workers, per_worker_buffer_size=_READY_BATCHES
    )
    return _here(batches).mp_prefetch(options, worker_init_fn=start_worker)


def _in_threads(batches: Any, job: Job) -> Any:  # noqa: ANN401
    """Return endless batches that read threads of this process make."""
    import grain

    photo_ops.one_thread()
    options = grain.ReadOptions(
        num_threads=job.num_workers, prefetch_buffer_size=job.num_workers * _READY_BATCHES
    )
    return batches.repeat().to_iter_dataset(options)


# ---------------------------------------------------------------- photos


def photo_of_file(
    item: tuple[str, int], rng: np.random.Generator
) -> tuple[npt.NDArray[np.float32], int]:
    """Return an image made of a file, and its label."""
    path, label = item
    with open(path, "rb") as file:
        return _sample(file.read(), rng), label


def photo_of_record(record: bytes, rng: np.random.Generator) -> tuple[npt.NDArray[np.float32], int]:
    """Return an image made of a record, and its label."""
    (label,) = _LABEL.unpack_from(record)
    return _sample(record[_LABEL.size :], rng), label


def _sample(data: bytes, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    return photo_ops.fast_sample(data, random.Random(int(rng.integers(1 << 62))))


def stacked(
    samples: Sequence[tuple[npt.NDArray[np.float32], int]],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return a batch of images and labels."""
    return np.stack([image for image, _ in samples]), np.array([label for _, label in samples])


def stacked_to_send(
    samples: Sequence[tuple[npt.NDArray[np.float32], int]],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return a batch; the images lie in shared memory at once, and are not copied there later."""
    from grain.multiprocessing import SharedMemoryArray

    images = SharedMemoryArray((len(samples), *samples[0][0].shape), np.float32)
    np.stack([image for image, _ in samples], out=images)
    return images, np.array([label for _, label in samples])


def _photos(source: Any, make: Any, job: Job) -> Any:  # noqa: ANN401
    import grain

    return grain.MapDataset.source(source).seed(job.seed).shuffle().random_map(make)


def photos(job: Job) -> Epoch:
    """Read the photos from their files, in processes."""
    samples = _photos(works.labelled_files(job.photos), photo_of_file, job)
    batches = samples.batch(job.batch_size, batch_fn=stacked_to_send)
    return _Epochs(_in_processes(batches, job), len(batches))


def photos_in_threads(job: Job) -> Epoch:
    """Read the photos from their files, in read threads."""
    samples = _photos(works.labelled_files(job.photos), photo_of_file, job)
    batches = samples.batch(job.batch_size, batch_fn=stacked)
    return _Epochs(_in_threads(batches, job), len(batches))


def pack(job: Job) -> None:
    """Write the photos into an ArrayRecord file, each a group, as its pages advise."""
    from array_record.python.array_record_module import ArrayRecordWriter

    # A photo is compressed already.
    writer = ArrayRecordWriter(str(job.packed / RECORDS_NAME), "group_size:1,uncompressed")
    for path, label in works.labelled_files(job.photos):
        with open(path, "rb") as file:
            writer.write(_LABEL.pack(label) + file.read())
    writer.close()


def packed(job: Job) -> Epoch:
    """Read the photos from their records."""
    import grain

    source = grain.sources.ArrayRecordDataSource(str(job.packed / RECORDS_NAME))
    samples = _photos(source, photo_of_record, job)
    batches = samples.batch(job.batch_size, batch_fn=stacked_to_send)
    return _Epochs(_in_processes(batches, job), len(batches))


# ---------------------------------------------------------------- the other works


class _MappedRows:
    """Rows in a file, mapped where they are first read.

    Workers are spawned, and get what they read with pickle: an array would be sent to each.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: Rows | None = None

    def __call__(self, numbers: Any) -> Any:  # noqa: ANN401
        if self._rows is None:
            self._rows = Rows(np.load(self._path, mmap_mode="r"))
        return np.asarray(self._rows(numbers))

    def __reduce__(self) -> tuple[type[_MappedRows], tuple[Path]]:
        return _MappedRows, (self._path,)


def _rows_file(job: Job) -> Path:
    return beside(job, f"rows-{job.num_samples}.npy")


def prepare(job: Job, work: str) -> None:
    """Write the rows that workers map."""
    if work == "paths" or _rows_file(job).exists():
        return
    with written_whole(_rows_file(job)) as half, half.open("wb") as file:
        np.save(file, works.tiny_rows(job.num_samples))


def _row_batches(job: Job, rows: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    import grain

    numbers = grain.MapDataset.range(job.num_samples).seed(job.seed).shuffle()
    return numbers.batch(job.batch_size, batch_fn=np.asarray).map(rows)


def tiny(job: Job) -> Epoch:
    """Read rows in processes."""
    batches = _row_batches(job, _MappedRows(_rows_file(job)))
    return _Epochs(_in_processes(batches, job), len(batches))


def tiny_here(job: Job) -> Epoch:
    """Read rows in this process."""
    batches = _row_batches(job, Rows(works.tiny_rows(job.num_samples)))
    return _Epochs(_here(batches), len(batches))


def transport(job: Job) -> Epoch:
    """Send big batches."""
    import grain

    batches = grain.MapDataset.range(job.num_samples).map(works.big_batch)
    return _Epochs(_in_processes(batches, job), len(batches))


def paths(job: Job) -> Epoch:
    """Read the numbers in many paths."""
    import grain

    # A list would be pickled to each of the workers.
    names = grain.sources.SharedMemoryDataSource(
        [works.path_of(index) for index in range(job.num_samples)]
    )
    atexit.register(names.unlink)
    shuffled = grain.MapDataset.source(names).seed(job.seed).shuffle()
    batches = shuffled.batch(job.batch_size, batch_fn=numbers_in)
    return _Epochs(_in_processes(batches, job), len(batches))


class _Resumable:
    """An iterator whose state is saved as JSON."""

    def __init__(self, dataset: Any) -> None:  # noqa: ANN401
        self._iterator = iter(dataset)

    def batches(self) -> Iterator[Any]:
        return self._iterator  # type: ignore[no-any-return]

    def state(self) -> bytes:
        return json.dumps(self._iterator.get_state()).encode()

    def restore(self, state: bytes) -> None:
        self._iterator.set_state(json.loads(state))


def resume(job: Job) -> Resumable:
    """Read rows in processes."""
    return _Resumable(_in_processes(_row_batches(job, _MappedRows(_rows_file(job))), job))


def resume_here(job: Job) -> Resumable:
    """Read rows in this process."""
    return _Resumable(_here(_row_batches(job, Rows(works.tiny_rows(job.num_samples)))))


_DOCS = "https://google-grain.readthedocs.io/en/latest"
_NO_TOLERANCE = "it cannot skip a sample that it cannot read"
_SAME = "as Grain; it differs only in tiny samples and resuming"

CONTENDERS = [
    Contender(
        name="Grain",
        environment="grain",
        libraries=("grain", "array_record.python.array_record_module", "simplejpeg", "cv2"),
        settings=(
            "MapDataset.seed().shuffle().random_map().batch().repeat(), then mp_prefetch in 2 "
            f"processes ({_DOCS}/tutorials/dataset_basic_tutorial.html); images are stacked into "
            f"SharedMemoryArray ({_DOCS}/behind_the_scenes.html); ReadOptions(num_threads=0), as "
            "it advises for what is in memory; packed: ArrayRecord, group_size:1, uncompressed; "
            "tiny, resume: the numbers are shuffled and batched (batch_fn=np.asarray), and a map "
            "takes the rows from a file that each worker maps; paths: SharedMemoryDataSource"
        ),
        photos=photos,
        pack=pack,
        packed=packed,
        tiny=tiny,
        transport=transport,
        paths=paths,
        resume=resume,
        prepare=prepare,
        antialias=False,
        absent={"tolerant": _NO_TOLERANCE},
    ),
    Contender(
        name="Grain (threads)",
        environment="grain",
        libraries=("grain", "simplejpeg", "cv2"),
        settings=(
            "the same without mp_prefetch; ReadOptions(num_threads=2, prefetch_buffer_size=4) of "
            "to_iter_dataset: 2 read threads of this process each make whole batches, 4 of which "
            "may be ready (the defaults, 16 and 500, are for elements of 1 to 10 KiB)"
        ),
        photos=photos_in_threads,
        antialias=False,
        absent={
            **dict.fromkeys(
                ("pack", "packed", "tiny", "transport", "paths", "resume"),
                "as Grain, or Grain (no workers); measured only with JPEG files",
            ),
            "tolerant": _NO_TOLERANCE,
        },
    ),
    Contender(
        name="Grain (no workers)",
        environment="grain",
        libraries=("grain",),
        settings=(
            "the same without mp_prefetch: a batch is made when it is requested; the rows are an "
            "array in memory"
        ),
        tiny=tiny_here,
        resume=resume_here,
        absent={
            **dict.fromkeys(("photos", "pack", "packed", "transport", "paths"), _SAME),
            "tolerant": _NO_TOLERANCE,
        },
    ),
]
