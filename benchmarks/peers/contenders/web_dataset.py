# SPDX-License-Identifier: Apache-2.0
"""WebDataset: samples in tar files that are read from front to back.

It knows no single sample, only shards: a folder of photos is none of its forms, its order comes
from a buffer, and it cannot say where in the order it is.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import works
from contender import Contender, Epoch, Job
from contenders import photo_ops
from contenders.shared import beside, epochs, numpy_only, numpy_pair, written_whole

if TYPE_CHECKING:
    from collections.abc import Iterable

# A multiple of the workers, which divide the shards and not the samples among themselves.
NUM_SHARDS = 16


def _pack(job: Job) -> None:
    # In a mixed order: a worker never sees the shards of another.
    files = works.labelled_files(job.photos)
    random.Random(job.seed).shuffle(files)
    samples = ({"jpg": Path(path).read_bytes(), "cls": label} for path, label in files)
    _write(job.packed, samples, len(files))


def _prepare(job: Job, _work: str) -> None:
    folder = _row_folder(job)
    if folder.is_dir():
        return
    rows = works.tiny_rows(job.num_samples)
    with written_whole(folder) as half:
        half.mkdir()
        _write(half, ({"bin": row.tobytes()} for row in rows), len(rows))


def _row_folder(job: Job) -> Path:
    return beside(job, f"rows-{job.num_samples}")


def _write(folder: Path, samples: Iterable[dict[str, Any]], num_samples: int) -> None:
    import webdataset as wds

    per_shard = -(-num_samples // NUM_SHARDS)
    with wds.ShardWriter(str(folder / "%06d.tar"), maxcount=per_shard, verbose=0) as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": f"{number:08d}", **sample})


def _packed(job: Job) -> Epoch:
    import webdataset as wds
    from torch.utils.data import default_collate

    handler = wds.warn_and_continue if job.tolerant else wds.reraise_exception
    num_samples = len(works.labelled_files(job.photos))
    dataset = (
        _shards(job, job.packed, handler)
        .shuffle(num_samples, initial=num_samples)
        .map(photo, handler=handler)
        .batched(job.batch_size, collation_fn=default_collate)
    )
    return epochs(_loader(job, dataset), numpy_pair)


def _tiny(job: Job) -> Epoch:
    import webdataset as wds

    dataset = (
        _shards(job, _row_folder(job), wds.reraise_exception)
        .map(row)
        .shuffle(job.num_samples, initial=job.num_samples)
        .batched(job.batch_size, collation_fn=np.stack)
    )
    return epochs(_loader(job, dataset), numpy_only)


def _shards(job: Job, folder: Path, handler: Any) -> Any:  # noqa: ANN401
    import webdataset as wds

    urls = sorted(str(path) for path in folder.glob("*.tar"))
    return wds.WebDataset(
        urls, shardshuffle=len(urls), detshuffle=True, seed=job.seed, handler=handler
    )


def photo(sample: dict[str, Any]) -> tuple[Any, int]:
    """Return a photo and its label."""
    return photo_ops.fast_sample(sample["jpg"]), int(sample["cls"])


def row(sample: dict[str, Any]) -> Any:  # noqa: ANN401 - a numpy array
    """Return a row, a view of the bytes that were read."""
    return np.frombuffer(sample["bin"], np.float32)


def _loader(job: Job, dataset: Any) -> Any:  # noqa: ANN401
    import webdataset as wds

    return wds.WebLoader(
        dataset,
        batch_size=None,
        num_workers=job.num_workers,
        persistent_workers=True,
        worker_init_fn=photo_ops.one_thread,
    )


_README = "https://github.com/webdataset/webdataset"

CONTENDERS = [
    Contender(
        name="WebDataset",
        environment="webdataset",
        libraries=("webdataset", "torch", "simplejpeg", "cv2"),
        settings=(
            f"{NUM_SHARDS} shards, packed in mixed order; WebDataset(shardshuffle={NUM_SHARDS}, "
            "detshuffle=True), a shuffle buffer over all samples before they are decoded, batches "
            "made in the 2 workers, WebLoader(batch_size=None, persistent_workers=True), as README "
            f"and FAQ advise ({_README}); each worker keeps its own smaller last batch; simplejpeg "
            "and OpenCV in .map(); tiny: rows packed as files of 128 bytes, as it has no form in "
            "memory; tolerant: handler=warn_and_continue"
        ),
        pack=_pack,
        packed=_packed,
        tiny=_tiny,
        prepare=_prepare,
        antialias=False,
        absent={
            "photos": "it reads only tar files",
            "transport": "batches come through torch's DataLoader",
            "paths": "it holds no list of samples, only one of its shards",
            "resume": "saving a position is not supported",
        },
    )
]
