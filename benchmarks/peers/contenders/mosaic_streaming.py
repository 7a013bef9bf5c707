# SPDX-License-Identifier: Apache-2.0
"""MosaicML Streaming: samples in shards of its own format, MDS.

A folder of photos is none of its forms.
"""

from __future__ import annotations

import atexit
import random
import tempfile
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
    numbers_in,
    numpy_only,
    numpy_pair,
    written_whole,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def _pack(job: Job) -> None:
    files = works.labelled_files(job.photos)
    random.Random(job.seed).shuffle(files)
    samples = ({"jpeg": Path(path).read_bytes(), "label": label} for path, label in files)
    _write(job.packed, {"jpeg": "bytes", "label": "int"}, samples)


def _prepare(job: Job, work: str) -> None:
    if work == "paths":
        columns = {"path": "str"}
        samples = ({"path": works.path_of(index)} for index in range(job.num_samples))
    else:
        columns = {"row": f"ndarray:float32:{works.NUM_COLUMNS}"}
        samples = ({"row": row} for row in works.tiny_rows(job.num_samples))
    folder = _folder(job, next(iter(columns)))
    if folder.is_dir():
        return
    with written_whole(folder) as half:
        _write(half, columns, samples)


def _folder(job: Job, what: str) -> Path:
    return beside(job, f"{what}s-{job.num_samples}")


def _write(folder: Path, columns: dict[str, str], samples: Iterable[dict[str, Any]]) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns=columns, exist_ok=True) as writer:
        for sample in samples:
            writer.write(sample)


def _packed(job: Job) -> Epoch:
    loader = _loader(job, job.packed, photos, worker_init_fn=photo_ops.one_thread)
    return epochs(loader, numpy_pair)


def _tiny(job: Job) -> Epoch:
    return epochs(_loader(job, _folder(job, "row"), rows), numpy_only)


def _paths(job: Job) -> Epoch:
    return epochs(_loader(job, _folder(job, "path"), numbers), numpy_only)


def _resume(job: Job) -> Resuming:
    # The default, 8 batches, is little where they are small: looking ahead takes locks.
    return Resuming(_loader(job, _folder(job, "row"), rows, ahead=128 * job.batch_size), numpy_only)


def photos(samples: list[dict[str, Any]]) -> Any:  # noqa: ANN401
    """Decode and collate a batch, in the worker."""
    from torch.utils.data import default_collate

    made = [(photo_ops.fast_sample(sample["jpeg"]), sample["label"]) for sample in samples]
    return default_collate(made)


def rows(samples: list[dict[str, Any]]) -> Any:  # noqa: ANN401
    """Collate a batch."""
    import torch

    return torch.from_numpy(np.stack([sample["row"] for sample in samples]))


def numbers(samples: list[dict[str, Any]]) -> Any:  # noqa: ANN401
    """Return the numbers in the paths of a batch."""
    import torch

    return torch.from_numpy(numbers_in([sample["path"] for sample in samples]))


def _loader(
    job: Job,
    folder: Path,
    collate: Callable[[list[Any]], Any],
    *,
    ahead: int | None = None,
    **more: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(
        local=str(folder),
        batch_size=job.batch_size,
        shuffle=True,
        shuffle_seed=job.seed,
        predownload=ahead,
    )
    atexit.register(_remove_locks, dataset._shm_prefix_int)
    return StreamingDataLoader(
        dataset,
        batch_size=job.batch_size,
        num_workers=job.num_workers,
        collate_fn=collate,
        persistent_workers=True,
        **more,
    )


def _remove_locks(number: int) -> None:
    # Streaming leaves them; the next dataset would take the next number.
    for name in ("barrier", "cache"):
        file = Path(tempfile.gettempdir(), f"{number:06}_{name}_filelock")
        file.unlink(missing_ok=True)


_DOCS = "https://docs.mosaicml.com/projects/streaming"

CONTENDERS = [
    Contender(
        name="MosaicML Streaming",
        environment="streaming",
        libraries=("torch", "torchvision_on_cpu", "streaming", "simplejpeg", "cv2"),
        settings=(
            "StreamingDataset(local=..., shuffle=True, batch_size=64) on shards of MDS, "
            "StreamingDataLoader with 2 forked workers, persistent_workers=True, all else at its "
            "defaults, which its guide to performance calls fast "
            f"({_DOCS}/en/latest/distributed_training/performance_tuning.html); photos as a column "
            "of bytes, simplejpeg and OpenCV in collate_fn; tiny, paths, resume: packed too, as it "
            "has no form in memory (ndarray:float32:32, str); resume: predownload=8192"
        ),
        pack=_pack,
        packed=_packed,
        tiny=_tiny,
        paths=_paths,
        resume=_resume,
        prepare=_prepare,
        antialias=False,
        absent={
            "photos": "it reads only its own shards",
            "transport": "batches come through torch's DataLoader",
            "tolerant": "it cannot skip a sample that it cannot read",
        },
    )
]
