# SPDX-License-Identifier: Apache-2.0
"""Hugging Face datasets: rows of an Arrow table, which torch's DataLoader reads."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import works
from contender import Contender, Epoch, Job
from contenders import photo_ops
from contenders.shared import ResumingTensors, batch_sampler, beside, epochs

if TYPE_CHECKING:
    from collections.abc import Iterator


def _photos(job: Job) -> Epoch:
    # Its table of an earlier run would be found again: each run is to make it.
    cache = beside(job, f"cache-{job.photos.name}")
    shutil.rmtree(cache, ignore_errors=True)
    return _photo_epochs(job, _image_folder(job, str(cache)))


def _pack(job: Job) -> None:
    with tempfile.TemporaryDirectory() as cache:
        _image_folder(job, cache).save_to_disk(str(job.packed))


def _packed(job: Job) -> Epoch:
    import datasets

    return _photo_epochs(job, datasets.load_from_disk(str(job.packed)))


def _tiny(job: Job) -> Epoch:
    return epochs(_batch_loader(_rows(job), job), numpy_row)


def _resume(job: Job) -> ResumingTensors:
    return ResumingTensors(_batch_loader(_rows(job), job, stateful=True), numpy_row)


def _prepare(job: Job, work: str) -> None:
    if work == "paths":
        _path_table(job)


def _paths(job: Job) -> Epoch:
    table = _path_table(job).with_transform(numbers)
    return epochs(_batch_loader(table, job), numpy_number)


def _image_folder(job: Job, cache: str) -> Any:  # noqa: ANN401
    import datasets

    datasets.disable_progress_bars()
    return datasets.load_dataset(
        "imagefolder", data_dir=str(job.photos), split="train", cache_dir=cache
    )


def _photo_epochs(job: Job, table: Any) -> Epoch:  # noqa: ANN401
    import datasets
    import torch
    from torch.utils.data import DataLoader

    encoded = table.cast_column("image", datasets.Image(decode=False))
    loader = DataLoader(
        encoded.with_transform(decoded),
        batch_size=job.batch_size,
        shuffle=True,
        num_workers=job.num_workers,
        persistent_workers=True,
        worker_init_fn=photo_ops.one_thread,
        generator=torch.Generator().manual_seed(job.seed),
    )
    return epochs(loader, numpy_photos)


def decoded(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Decode the photos of a batch: of bytes in the table, or else of files."""
    images = [
        photo_ops.fast_sample(image["bytes"] or Path(image["path"]).read_bytes())
        for image in rows["image"]
    ]
    return {"image": images, "label": rows["label"]}


def _rows(job: Job) -> Any:  # noqa: ANN401
    import datasets

    column = datasets.List(datasets.Value("float32"), length=works.NUM_COLUMNS)
    table = datasets.Dataset.from_dict(
        {"row": works.tiny_rows(job.num_samples)}, datasets.Features({"row": column})
    )
    return table.with_format("torch")


def _path_table(job: Job) -> Any:  # noqa: ANN401
    import datasets

    datasets.disable_progress_bars()
    # Made once; then the file that lies there is mapped into memory.
    return datasets.Dataset.from_generator(
        made_paths, cache_dir=str(beside(job, "cache")), gen_kwargs={"num_samples": job.num_samples}
    )


def made_paths(num_samples: int) -> Iterator[dict[str, str]]:
    """Return the rows of a table of paths."""
    for index in range(num_samples):
        yield {"path": works.path_of(index)}


def numbers(rows: dict[str, list[str]]) -> dict[str, Any]:
    """Return the numbers in the paths of a batch."""
    import torch

    return {"number": torch.tensor([works.number_in(path) for path in rows["path"]])}


def _batch_loader(table: Any, job: Job, *, stateful: bool = False) -> Any:  # noqa: ANN401
    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader
    else:
        from torch.utils.data import DataLoader
    return DataLoader(
        table,
        batch_size=None,
        sampler=batch_sampler(len(table), job),
        num_workers=job.num_workers,
        persistent_workers=True,
    )


def numpy_photos(batch: dict[str, Any]) -> tuple[Any, Any]:
    """Return images and labels as views."""
    return batch["image"].numpy(), batch["label"].numpy()


def numpy_row(batch: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return the rows as a view."""
    return batch["row"].numpy()


def numpy_number(batch: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return the numbers as a view."""
    return batch["number"].numpy()


_DOCS = "https://huggingface.co/docs/datasets/use_with_pytorch"

CONTENDERS = [
    Contender(
        name="Hugging Face datasets",
        environment="huggingface",
        libraries=("datasets", "torch", "torchdata.stateful_dataloader", "simplejpeg", "cv2"),
        settings=(
            "photos: the builder imagefolder, whose table of paths is made anew in each run (by "
            "default it is cached, and a user's second run starts faster); "
            "packed: save_to_disk, load_from_disk; Image(decode=False), with_transform (simplejpeg "
            "and OpenCV for a whole batch) and torch's DataLoader, 2 forked workers, "
            f"persistent_workers=True ({_DOCS}); tiny, paths, resume: a BatchSampler as sampler, "
            "so that the table is asked for whole batches; rows in memory with_format('torch'), "
            "paths in an Arrow file; resume: StatefulDataLoader"
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
