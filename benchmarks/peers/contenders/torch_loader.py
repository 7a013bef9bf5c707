# SPDX-License-Identifier: Apache-2.0
"""torch.utils.data.DataLoader."""

from __future__ import annotations

from typing import Any

import works
from contender import Contender, Epoch, Job
from contenders import photo_ops
from contenders.shared import (
    BigBatches,
    PathNumbers,
    PhotoFiles,
    batch_sampler,
    epochs,
    numpy_first,
    numpy_only,
    numpy_pair,
    path_array,
)


def _loader(dataset: Any, job: Job, **more: Any) -> Any:  # noqa: ANN401
    import torch
    from torch.utils.data import DataLoader

    options = {
        "batch_size": job.batch_size,
        "shuffle": True,
        "num_workers": job.num_workers,
        "persistent_workers": True,
        "generator": torch.Generator().manual_seed(job.seed),
        **more,
    }
    if options["num_workers"] == 0:
        del options["persistent_workers"]
    return DataLoader(dataset, **options)


def _photos(job: Job) -> Epoch:
    dataset = PhotoFiles(job.photos, photo_ops.fast_sample)
    return epochs(_loader(dataset, job, worker_init_fn=photo_ops.one_thread), numpy_pair)


def _pillow_photos(job: Job) -> Epoch:
    return epochs(_loader(PhotoFiles(job.photos, photo_ops.pillow_sample), job), numpy_pair)


def _pipeline_photos(job: Job) -> Epoch:
    from penstock.vision import ImagePipeline

    dataset = PhotoFiles(job.photos, ImagePipeline.train(works.CROP_PX))
    return epochs(_loader(dataset, job, worker_init_fn=photo_ops.one_thread), numpy_pair)


def _torchvision_photos(job: Job) -> Epoch:
    import torch
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    transform = v2.Compose(
        [
            v2.RandomResizedCrop(works.CROP_PX, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(works.MEAN, works.STD),
        ]
    )
    return epochs(_loader(ImageFolder(str(job.photos), transform), job), numpy_pair)


def _tiny(job: Job) -> Epoch:
    import torch
    from torch.utils.data import TensorDataset

    rows = torch.from_numpy(works.tiny_rows(job.num_samples))
    return epochs(_loader(TensorDataset(rows), job, num_workers=0), numpy_first)


def _tiny_row_by_row(job: Job) -> Epoch:
    import torch

    rows = works.RowByRow(torch.from_numpy(works.tiny_rows(job.num_samples)))
    return epochs(_loader(rows, job, num_workers=0), numpy_only)


def _tiny_bulk(job: Job) -> Epoch:
    import torch
    from torch.utils.data import TensorDataset

    dataset = TensorDataset(torch.from_numpy(works.tiny_rows(job.num_samples)))
    sampler = batch_sampler(job.num_samples, job)
    options = {"batch_size": None, "shuffle": None, "sampler": sampler, "num_workers": 0}
    return epochs(_loader(dataset, job, **options), numpy_first)


def _transport(job: Job) -> Epoch:
    loader = _loader(BigBatches(job.num_samples), job, batch_size=None, shuffle=False)
    return epochs(loader, numpy_only)


def _paths(job: Job) -> Epoch:
    return epochs(_loader(PathNumbers(path_array(job.num_samples)), job), numpy_only)


def _path_list(job: Job) -> Epoch:
    paths = [works.path_of(index) for index in range(job.num_samples)]
    return epochs(_loader(PathNumbers(paths), job), numpy_only)


_NO_FORMAT = "neither torch nor torchvision has a packed format"
_NO_PLACE = "saving a position is not supported; torchdata's StatefulDataLoader does it"
_NO_TOLERANCE = "it cannot skip a sample that it cannot read"
_DOCS = "https://docs.pytorch.org/docs/stable/data.html"
_MAIN = "torch (simplejpeg, OpenCV)"
_SAME = f"as {_MAIN}"
_NEVER = {
    **dict.fromkeys(("pack", "packed"), _NO_FORMAT),
    "resume": _NO_PLACE,
    "tolerant": _NO_TOLERANCE,
}
_PHOTOS_ONLY = {
    **dict.fromkeys(("tiny", "transport", "paths"), _SAME),
    **_NEVER,
}
_TINY_ONLY = {**dict.fromkeys(("photos", "transport", "paths"), _SAME), **_NEVER}

CONTENDERS = [
    Contender(
        name=_MAIN,
        environment="torch",
        libraries=("torch", "simplejpeg", "cv2"),
        settings=(
            "2 forked workers, persistent_workers=True; tiny: TensorDataset without workers, which "
            "is faster than with them; 5 M paths in one numpy array, as its documentation advises "
            f"({_DOCS})"
        ),
        photos=_photos,
        tiny=_tiny,
        transport=_transport,
        paths=_paths,
        antialias=False,
        absent=_NEVER,
    ),
    Contender(
        name="torch (Pillow)",
        environment="torch",
        libraries=("torch", "PIL.Image"),
        settings="the same loader; photos by Pillow and numpy",
        photos=_pillow_photos,
        antialias=True,
        same_loader_as=_MAIN,
        absent=_PHOTOS_ONLY,
    ),
    Contender(
        name="torch (torchvision)",
        environment="torch",
        libraries=("torch", "torchvision_on_cpu"),
        settings=(
            "the same loader; ImageFolder and transforms.v2 with Pillow's images until they are "
            "cropped, then uint8 tensors"
        ),
        photos=_torchvision_photos,
        antialias=True,
        same_loader_as=_MAIN,
        absent=_PHOTOS_ONLY,
    ),
    Contender(
        name="torch (Penstock's ImagePipeline)",
        environment="penstock",
        libraries=("torch", "penstock.vision"),
        settings=(
            "the same loader and dataset; ImagePipeline.train(224) makes each photo from its "
            "file's bytes. It separates Penstock's image operations from its loader"
        ),
        photos=_pipeline_photos,
        antialias=False,
        same_loader_as=_MAIN,
        absent=_PHOTOS_ONLY,
    ),
    Contender(
        name="torch (batch sampler)",
        environment="torch",
        libraries=("torch",),
        settings=(
            "tiny: TensorDataset asked for 1,024 rows at a time, by a BatchSampler as sampler and "
            f"batch_size=None, without workers ({_DOCS}#disable-automatic-batching)"
        ),
        tiny=_tiny_bulk,
        same_loader_as=_MAIN,
        absent=_TINY_ONLY,
    ),
    Contender(
        name="torch (row by row)",
        environment="torch",
        libraries=("torch",),
        settings="tiny: a dataset that gives one row at a time, without workers",
        tiny=_tiny_row_by_row,
        same_loader_as=_MAIN,
        absent=_TINY_ONLY,
    ),
    Contender(
        name="torch (list of str)",
        environment="torch",
        libraries=("torch",),
        settings="5 M paths in a Python list, as most datasets hold them",
        paths=_path_list,
        same_loader_as=_MAIN,
        absent={**dict.fromkeys(("photos", "tiny", "transport"), _SAME), **_NEVER},
    ),
]
