# SPDX-License-Identifier: Apache-2.0
"""LitData: a folder of files as it is, or samples in chunks of its own format."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import works
from contender import Contender, Epoch, Job
from contenders import photo_ops
from contenders.shared import (
    Resuming,
    beside,
    epochs,
    numpy_only,
    numpy_pair,
    written_whole,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_BLOCK = 1000  # rows or paths that one call makes


def _photos(job: Job) -> Epoch:
    import torch
    from litdata import StreamingRawDataset
    from torch.utils.data import DataLoader

    # Its index of an earlier run would be found again: each run is to make it.
    index = beside(job, f"index-{job.photos.name}")
    shutil.rmtree(index, ignore_errors=True)
    files = StreamingRawDataset(str(job.photos), str(index))
    # It leaves its index in the folder too, where others would take it for a photo.
    (job.photos / "index.json.zstd").unlink(missing_ok=True)
    loader = DataLoader(
        LabelledFiles(files, works.class_names(job.photos)),
        batch_size=job.batch_size,
        shuffle=True,
        num_workers=job.num_workers,
        collate_fn=collated,
        persistent_workers=True,
        worker_init_fn=photo_ops.one_thread,
        generator=torch.Generator().manual_seed(job.seed),
    )
    return epochs(loader, numpy_pair)


class LabelledFiles:
    """The files of a `StreamingRawDataset`, which gives their bytes alone, with their labels."""

    def __init__(self, files: Any, classes: list[str]) -> None:  # noqa: ANN401
        """Take the labels from the names of the folders."""
        labels = {name: label for label, name in enumerate(classes)}
        self._files = files
        self._labels = [labels[Path(file.path).parent.name] for file in files.items]

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._labels)

    def __getitems__(self, indices: list[int]) -> list[tuple[bytes, int]]:
        """Return bytes and labels of a batch, whose files LitData reads at the same time."""
        labels = [self._labels[index] for index in indices]
        return list(zip(self._files.__getitems__(indices), labels, strict=True))


def collated(samples: list[tuple[bytes, int]]) -> Any:  # noqa: ANN401
    """Decode and collate a batch, in the worker."""
    from torch.utils.data import default_collate

    return default_collate([photo(sample) for sample in samples])


def photo(sample: tuple[bytes, int]) -> tuple[Any, int]:
    """Return a photo and its label."""
    data, label = sample
    return photo_ops.fast_sample(data), label


def _pack(job: Job) -> None:
    # In a mixed order, as its FAQ advises: chunks are shuffled, and samples within one.
    files = works.labelled_files(job.photos)
    random.Random(job.seed).shuffle(files)
    _write(job, job.packed, read_photo, files)


def _prepare(job: Job, work: str) -> None:
    folder, make = (
        (_folder(job, "paths"), block_of_paths)
        if work == "paths"
        else (_folder(job, "rows"), block_of_rows)
    )
    if folder.is_dir():
        return
    starts = range(0, job.num_samples, _BLOCK)
    mixed = random.Random(job.seed).sample(starts, len(starts))
    with written_whole(folder) as half:
        _write(job, half, partial(make, job.num_samples), mixed)


def _folder(job: Job, what: str) -> Path:
    return beside(job, f"{what}-{job.num_samples}")


def read_photo(file: tuple[str, int]) -> tuple[bytes, int]:
    """Return a file's bytes and its label."""
    path, label = file
    return Path(path).read_bytes(), label


def block_of_rows(num_samples: int, start: int) -> Iterator[Any]:
    """Return the rows from `start`."""
    yield from works.tiny_rows(num_samples)[start : start + _BLOCK]


def block_of_paths(num_samples: int, start: int) -> Iterator[str]:
    """Return the paths from `start`."""
    yield from map(works.path_of, range(start, min(start + _BLOCK, num_samples)))


def _write(job: Job, folder: Path, make: Callable[[Any], Any], inputs: Sequence[Any]) -> None:
    import litdata

    with tempfile.TemporaryDirectory() as scratch:
        # Otherwise it leaves /tmp/chunks and /tmp/data, which it shares with who packs beside it.
        for name in ("DATA_OPTIMIZER_CACHE_FOLDER", "DATA_OPTIMIZER_DATA_CACHE_FOLDER"):
            os.environ[name] = scratch
        litdata.optimize(
            make,
            inputs,
            str(folder),
            chunk_bytes="64MB",
            num_workers=job.num_workers,
            verbose=False,
        )


def _packed(job: Job) -> Epoch:
    loader = _loader(job, job.packed, transform=photo, worker_init_fn=photo_ops.one_thread)
    return epochs(loader, numpy_pair)


def _tiny(job: Job) -> Epoch:
    return epochs(_loader(job, _folder(job, "rows"), collate_fn=stacked), numpy_only)


def _paths(job: Job) -> Epoch:
    loader = _loader(job, _folder(job, "paths"), transform=works.number_in)
    return epochs(loader, numpy_only)


def _resume(job: Job) -> Resuming:
    return Resuming(_loader(job, _folder(job, "rows"), collate_fn=stacked), numpy_only)


def stacked(rows: list[Any]) -> Any:  # noqa: ANN401
    """Collate a batch."""
    import torch

    return torch.from_numpy(np.stack(rows))


def _loader(job: Job, folder: Path, *, transform: Any = None, **more: Any) -> Any:  # noqa: ANN401
    import litdata

    dataset = litdata.StreamingDataset(
        str(folder), shuffle=True, seed=job.seed, transform=transform
    )
    return litdata.StreamingDataLoader(
        dataset,
        batch_size=job.batch_size,
        num_workers=job.num_workers,
        persistent_workers=True,
        **more,
    )


_README = "https://github.com/Lightning-AI/litData"

CONTENDERS = [
    Contender(
        name="LitData",
        environment="litdata",
        libraries=("litdata", "torch", "simplejpeg", "cv2"),
        settings=(
            "photos: StreamingRawDataset in torch's DataLoader, simplejpeg and OpenCV in "
            "collate_fn, its index of the files made anew in each run (by default it is cached, "
            "and a user's second run starts faster); packed: optimize(chunk_bytes='64MB') of files "
            "in mixed order, StreamingDataset(shuffle=True, transform=...) in StreamingDataLoader; "
            "2 forked workers, persistent_workers=True, all else at its defaults, as its README "
            f"says ({_README}#stream-raw, #faq-chunk-shuffle): chunks are mapped into memory where "
            f"they lie, and samples shuffled in windows of 256; tiny, paths, resume: packed too, "
            f"as it has no form in memory"
        ),
        photos=_photos,
        pack=_pack,
        packed=_packed,
        tiny=_tiny,
        paths=_paths,
        resume=_resume,
        prepare=_prepare,
        antialias=False,
        absent={
            "transport": "batches come through torch's DataLoader",
            "tolerant": "it cannot skip a sample that it cannot read",
        },
    )
]
