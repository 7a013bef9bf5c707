# SPDX-License-Identifier: Apache-2.0
"""SPDL: a pipeline of stages that run in threads.

Its pages know three compositions: threads in this process ("MT"), the same threads in one process
beside it that sends finished batches through shared memory ("MTP" with an arena), and a loader of
processes that looks like torch's.
"""

from __future__ import annotations

import mmap
import random
import tarfile
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import works
from contender import Contender, Epoch, Job
from contenders import photo_ops
from contenders.shared import (
    BigBatches,
    PathNumbers,
    Rows,
    epochs,
    numbers_in,
    numpy_only,
    numpy_pair,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    import numpy.typing as npt

# Finished batches that wait; the number in SPDL's examples.
BUFFER_SIZE = 3
TAR_NAME = "photos.tar"
# How much one segment holds beside the images: labels, and what is lost to alignment.
_SEGMENT_REST_BYTES = 1 << 16


class Shuffled:
    """A list that is mixed anew for each epoch, where it lies: so does SPDL's LocalDirectory."""

    def __init__(self, items: list[Any], seed: int) -> None:
        """Keep the list."""
        self._items = items
        self._seed = seed

    def shuffle(self, seed: int) -> None:
        """Mix for an epoch."""
        random.Random(self._seed + seed).shuffle(self._items)

    def __iter__(self) -> Iterator[Any]:
        """Return the items in the order drawn."""
        return iter(self._items)


class ShuffledBatches:
    """The numbers of the rows of each batch, mixed anew for each epoch."""

    def __init__(self, num_samples: int, batch_size: int, seed: int) -> None:
        """Begin with the rows as they lie."""
        self._seed = seed
        self._order = np.arange(num_samples)
        self._batch_size = batch_size

    def shuffle(self, seed: int) -> None:
        """Draw the order of an epoch."""
        np.random.default_rng((self._seed, seed)).shuffle(self._order)

    def __iter__(self) -> Iterator[npt.NDArray[np.int64]]:
        """Return batch after batch, the last of which may be smaller."""
        for start in range(0, len(self._order), self._batch_size):
            # A copy: a stage may look at it when the next epoch is drawn already.
            yield self._order[start : start + self._batch_size].copy()


Stage = tuple["Callable[[Any], Any]", int]  # and in how many threads


class _InThreads:
    """Calls to epochs of a pipeline in this process, which runs on between them."""

    def __init__(
        self, source: Iterable[Any], before: Stage | None, batch: int, after: Stage | None
    ) -> None:
        num_threads = max(stage[1] for stage in (before, after) if stage is not None)
        self._pipeline = _builder(source, before, batch, after).build(
            num_threads=num_threads, use_thread_output_queue=True
        )

    def __call__(self, _epoch: int) -> Iterator[Any]:
        yield from self._pipeline


class _InProcess:
    """Calls to epochs of a pipeline in another process."""

    def __init__(
        self,
        source: Iterable[Any],
        before: Stage | None,
        batch: int,
        after: Stage | None,
        *,
        batch_bytes: int = 0,
    ) -> None:
        from spdl.pipeline import SharedMemorySegmentPool, run_pipeline_in_subprocess

        arena = None
        if batch_bytes:
            # Those that wait, the one being written and the one that the main process has; it may
            # still hold it when it asks for the next.
            arena = SharedMemorySegmentPool(batch_bytes + _SEGMENT_REST_BYTES, BUFFER_SIZE + 3)
        self._batches = run_pipeline_in_subprocess(
            _builder(source, before, batch, after).get_config(),
            num_threads=max(stage[1] for stage in (before, after) if stage is not None),
            buffer_size=BUFFER_SIZE,
            arena=arena,
            initializer=photo_ops.one_thread,
        )

    def __call__(self, _epoch: int) -> Iterator[Any]:
        yield from self._batches


def _builder(
    source: Any,  # noqa: ANN401
    before: Stage | None,
    batch: int,
    after: Stage | None,
) -> Any:  # noqa: ANN401
    from spdl.pipeline import PipelineBuilder
    from spdl.source.utils import embed_shuffle

    if hasattr(source, "shuffle"):
        source = embed_shuffle(source)
    builder = PipelineBuilder().add_source(source, continuous=True)
    if before is not None:
        builder.pipe(before[0], concurrency=before[1])
    if batch:
        builder.aggregate(batch)
    if after is not None:
        builder.pipe(after[0], concurrency=after[1])
    return builder.add_sink(BUFFER_SIZE)


# ---------------------------------------------------------------- photos


def fast_photo(item: tuple[Any, int]) -> tuple[npt.NDArray[np.float32], int]:
    """Return an image made with simplejpeg and OpenCV, and its label."""
    data, label = item
    if isinstance(data, str):
        with open(data, "rb") as file:
            data = file.read()
    return photo_ops.fast_sample(data), label


def stacked(
    samples: list[tuple[npt.NDArray[np.float32], int]],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return a batch of images and labels."""
    return np.stack([image for image, _ in samples]), np.array([label for _, label in samples])


def filtered_frames(item: tuple[Any, int]) -> tuple[Any, int]:
    """Return a crop of 224 x 224 pixels that FFmpeg has decoded, cut and scaled, and its label."""
    import spdl.io

    data, label = item
    packets = spdl.io.demux_image(data)
    top, left, height, width = photo_ops.drawn_crop(packets.height, packets.width, random)
    side = works.CROP_PX
    steps = f"crop={width}:{height}:{left}:{top}:exact=1,scale={side}:{side}:flags=bilinear"
    if random.random() < 0.5:
        steps += ",hflip"
    # The crop is cut while colours are still halved, as its page on filters advises.
    filter_desc = spdl.io.get_video_filter_desc(filter_desc=steps, pix_fmt="rgb24")
    return spdl.io.decode_packets(packets, filter_desc=filter_desc), label


def normalised(
    samples: list[tuple[Any, int]],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return a batch of images, laid into one buffer without an array for each, and labels."""
    import spdl.io

    pixels = spdl.io.to_numpy(spdl.io.convert_frames([frames for frames, _ in samples]))
    images = np.empty((len(samples), 3, works.CROP_PX, works.CROP_PX), np.float32)
    for image, target in zip(pixels, images, strict=True):
        photo_ops.normalise(image, target)
    return images, np.array([label for _, label in samples])


def _photo_epochs(
    run: Callable[..., Epoch],
    sample: Callable[[Any], Any],
    collate: Callable[[Any], Any],
    items: list[Any],
    job: Job,
) -> Epoch:
    photo_ops.one_thread()
    return run(Shuffled(items, job.seed), (sample, job.num_workers), job.batch_size, (collate, 1))


def _photos(
    run: Callable[..., Epoch],
    sample: Callable[[Any], Any],
    collate: Callable[[Any], Any],
    job: Job,
) -> Epoch:
    return _photo_epochs(run, sample, collate, works.labelled_files(job.photos), job)


def pack(job: Job) -> None:
    """Write the photos into one tar file: SPDL has no format of its own, and a reader for this."""
    with tarfile.open(job.packed / TAR_NAME, "w") as tar:
        for number, (path, label) in enumerate(works.labelled_files(job.photos)):
            tar.add(path, f"{label}/{number:08d}.jpg")


class TarPhotos:
    """Makes a sample of a photo in a tar file, which is mapped and listed once."""

    def __init__(self, path: Path, make: Callable[[Any], Any]) -> None:
        """Count what the file has."""
        self._path = path
        self._make = make
        self._items: list[tuple[memoryview, int]] = []
        self.num_photos = len(self._listed())

    def _listed(self) -> list[tuple[memoryview, int]]:
        import spdl.io

        with self._path.open("rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return [(data, int(name.partition("/")[0])) for name, data in spdl.io.iter_tarfile(view)]

    def __call__(self, index: int) -> Any:  # noqa: ANN401
        """Return a sample, made of a photo's bytes where they lie, and its label."""
        if not self._items:  # in the process that reads: a view cannot be sent to it
            self._items = self._listed()
        return self._make(self._items[index])


def _packed(
    run: Callable[..., Epoch],
    sample: Callable[[Any], Any],
    collate: Callable[[Any], Any],
    job: Job,
) -> Epoch:
    photos = TarPhotos(job.packed / TAR_NAME, sample)
    return _photo_epochs(run, photos, collate, list(range(photos.num_photos)), job)


# ---------------------------------------------------------------- the other works


def _tiny(run: Callable[..., Epoch], job: Job) -> Epoch:
    source = ShuffledBatches(job.num_samples, job.batch_size, job.seed)
    return run(source, (Rows(works.tiny_rows(job.num_samples)), job.num_workers), 0, None)


def _transport(run: Callable[..., Epoch], job: Job) -> Epoch:
    return run(range(job.num_samples), (works.big_batch, job.num_workers), 0, None)


def _paths(run: Callable[..., Epoch], job: Job) -> Epoch:
    paths = [works.path_of(index) for index in range(job.num_samples)]
    source = Shuffled(paths, job.seed)
    return run(source, None, job.batch_size, (numbers_in, job.num_workers))


# ---------------------------------------------------------------- the loader like torch's


class PhotoArrays:
    """Photos and labels as arrays."""

    def __init__(self, photos: Path) -> None:
        """List the files."""
        self._files = works.labelled_files(photos)

    def __len__(self) -> int:
        """Return the number of photos."""
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.float32], int]:
        """Return a photo, and its label."""
        return fast_photo(self._files[index])


class RowsAtOnce:
    """Rows in memory, which are asked for by the batch."""

    def __init__(self, rows: npt.NDArray[np.float32]) -> None:
        """Keep the rows."""
        self._rows = rows

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def __getitems__(self, numbers: list[int]) -> npt.NDArray[np.float32]:
        """Return the rows of a batch, already one array."""
        return self._rows[numbers]


def as_tensor(array: npt.NDArray[np.float32]) -> Any:  # noqa: ANN401
    """Return a batch as a tensor, which is sent through shared memory."""
    import torch

    return torch.from_numpy(array)


def _loader(dataset: Any, job: Job, **more: Any) -> Any:  # noqa: ANN401
    import torch
    from spdl.dataloader import get_pytorch_dataloader

    options = {
        "batch_size": job.batch_size,
        "shuffle": True,
        "num_workers": job.num_workers,
        "generator": torch.Generator().manual_seed(job.seed),
        **more,
    }
    return get_pytorch_dataloader(dataset, **options)


def _loader_photos(job: Job) -> Epoch:
    photo_ops.one_thread()  # the workers are forked
    return epochs(_loader(PhotoArrays(job.photos), job), numpy_pair)


def _loader_tiny(job: Job) -> Epoch:
    dataset = RowsAtOnce(works.tiny_rows(job.num_samples))
    return epochs(_loader(dataset, job, collate_fn=as_tensor), numpy_only)


def _loader_transport(job: Job) -> Epoch:
    # batch_size=None leaves the batches as they are, made tensors.
    loader = _loader(BigBatches(job.num_samples), job, batch_size=None, shuffle=False)
    return epochs(loader, numpy_only)


def _loader_paths(job: Job) -> Epoch:
    paths = [works.path_of(index) for index in range(job.num_samples)]
    return epochs(_loader(PathNumbers(paths), job), numpy_only)


_DOCS = "https://facebookresearch.github.io/spdl/main"
_NO_PLACE = "saving a position is not supported"
_TOLERANT = "this is its default: a sample that fails is logged and skipped (max_failures=-1)"
_SAME = "as SPDL (threads); it differs only in decoding"
_THREADS = (
    "the threads of a pipeline in this process, built once, its source continuous=True and "
    "use_thread_output_queue=True"
)
_BATCH_BYTES = works.BATCH_SHAPE[0] * 3 * works.CROP_PX**2 * 4
_in_arena = partial(_InProcess, batch_bytes=_BATCH_BYTES)

CONTENDERS = [
    Contender(
        name="SPDL (threads)",
        environment="spdl",
        libraries=("spdl.pipeline", "spdl.source.utils", "spdl.io", "simplejpeg", "cv2"),
        settings=(
            f"{_THREADS} ({_DOCS}/getting_started/execution_models.html, MT); photos decoded one "
            "by one with simplejpeg and OpenCV in 2 threads, "
            "then aggregate(64) and one thread that stacks; packed: a tar file, listed by "
            "spdl.io.iter_tarfile; tiny: the source yields the numbers of a batch's rows"
        ),
        photos=partial(_photos, _InThreads, fast_photo, stacked),
        pack=pack,
        packed=partial(_packed, _InThreads, fast_photo, stacked),
        tiny=partial(_tiny, _InThreads),
        transport=partial(_transport, _InThreads),
        paths=partial(_paths, _InThreads),
        antialias=False,
        absent={"resume": _NO_PLACE, "tolerant": _TOLERANT},
    ),
    Contender(
        name="SPDL (threads, spdl.io)",
        environment="spdl",
        libraries=("spdl.pipeline", "spdl.source.utils", "spdl.io", "cv2"),
        settings=(
            "the same pipeline; FFmpeg decodes, crops and scales before it upsamples the colours, "
            f"and convert_frames writes a batch into one buffer ({_DOCS}/best_practice.html); its "
            "scale filter antialiases; OpenCV normalises"
        ),
        photos=partial(_photos, _InThreads, filtered_frames, normalised),
        antialias=True,
        same_loader_as="SPDL (threads)",
        absent={
            **dict.fromkeys(("pack", "packed", "tiny", "transport", "paths"), _SAME),
            "resume": _NO_PLACE,
            "tolerant": _TOLERANT,
        },
    ),
    Contender(
        name="SPDL (subprocess, arena)",
        environment="spdl",
        libraries=("spdl.pipeline", "spdl.source.utils", "spdl.io", "simplejpeg", "cv2"),
        settings=(
            "the pipeline of SPDL (threads) in one process beside this one, "
            "run_pipeline_in_subprocess, whose batches come through SharedMemorySegmentPool as "
            f"views ({_DOCS}/case_studies/shared_memory_arena.html; MTP is what it advises for "
            "training). tiny and paths without an arena: their batches are small"
        ),
        photos=partial(_photos, _in_arena, fast_photo, stacked),
        pack=pack,
        packed=partial(_packed, _in_arena, fast_photo, stacked),
        tiny=partial(_tiny, _InProcess),
        transport=partial(_transport, _in_arena),
        paths=partial(_paths, _InProcess),
        antialias=False,
        absent={"resume": _NO_PLACE, "tolerant": _TOLERANT},
    ),
    Contender(
        name="SPDL (PyTorch-like)",
        environment="spdl",
        libraries=("torch", "spdl.dataloader", "simplejpeg", "cv2"),
        settings=(
            "spdl.dataloader.get_pytorch_dataloader, 2 forked processes that it starts anew for "
            "each epoch, prefetch_factor=2; tiny: __getitems__"
        ),
        photos=_loader_photos,
        tiny=_loader_tiny,
        transport=_loader_transport,
        paths=_loader_paths,
        antialias=False,
        rounds=1,
        absent={
            **dict.fromkeys(
                ("pack", "packed"), "it takes a torch dataset; SPDL has no packed format"
            ),
            "resume": _NO_PLACE,
            "tolerant": "this is its default: a batch with a sample that fails is skipped",
        },
    ),
]
