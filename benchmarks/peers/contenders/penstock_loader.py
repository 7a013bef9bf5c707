# SPDX-License-Identifier: Apache-2.0
"""Penstock: worker processes, and worker threads."""

from __future__ import annotations

from functools import partial
from typing import Any

import works
from contender import Contender, Epoch, Job
from contenders.shared import (
    BigBatches,
    PathNumbers,
    Resuming,
    epochs,
    numpy_first,
    numpy_only,
    numpy_pair,
)


def _loader(backend: str, dataset: Any, job: Job, **more: Any) -> Any:  # noqa: ANN401
    from penstock.torch import DataLoader

    options = {
        "batch_size": job.batch_size,
        "shuffle": True,
        "num_workers": job.num_workers,
        "persistent_workers": True,
        "backend": backend,
        **more,
    }
    if options["num_workers"] == 0:
        del options["persistent_workers"], options["backend"]
    return DataLoader(dataset, **options)


def _pipeline_epochs(backend: str, dataset: Any, job: Job) -> Epoch:  # noqa: ANN401
    if backend == "thread":
        import cv2

        cv2.setNumThreads(0)  # as docs/guide/threads.md advises; a worker process does it itself
    on_error = "skip" if job.tolerant else "raise"
    return epochs(_loader(backend, dataset, job, on_error=on_error), numpy_pair)


def _photos(backend: str, job: Job) -> Epoch:
    from penstock.vision import ImageFolder, ImagePipeline

    folder = ImageFolder(job.photos, transform=ImagePipeline.train(works.CROP_PX))
    return _pipeline_epochs(backend, folder, job)


def _pack(job: Job) -> None:
    from penstock.stores import pack

    pack(job.photos, f"lmdb:{job.packed / 'photos.lmdb'}", num_workers=job.num_workers)


def _packed(backend: str, job: Job) -> Epoch:
    from penstock.stores import LMDBDataset
    from penstock.vision import ImagePipeline

    path = job.packed / "photos.lmdb"
    dataset = LMDBDataset(path, transform=ImagePipeline.train(works.CROP_PX))
    return _pipeline_epochs(backend, dataset, job)


def _tiny(job: Job) -> Epoch:
    import torch

    from penstock.torch import TensorDataset

    rows = torch.from_numpy(works.tiny_rows(job.num_samples))
    return epochs(_loader("process", TensorDataset(rows), job, num_workers=0), numpy_first)


def _tiny_row_by_row(job: Job) -> Epoch:
    import torch

    rows = works.RowByRow(torch.from_numpy(works.tiny_rows(job.num_samples)))
    return epochs(_loader("process", rows, job, num_workers=0), numpy_only)


def _transport(backend: str, job: Job) -> Epoch:
    options = {"batch_size": None, "shuffle": False}
    return epochs(_loader(backend, BigBatches(job.num_samples), job, **options), numpy_only)


def _paths(backend: str, job: Job) -> Epoch:
    from penstock.data import PackedList

    paths = PackedList(works.path_of(index) for index in range(job.num_samples))
    return epochs(_loader(backend, PathNumbers(paths), job, seed=job.seed), numpy_only)


def _resume(job: Job) -> Resuming:
    import torch

    from penstock.torch import TensorDataset

    rows = torch.from_numpy(works.tiny_rows(job.num_samples))
    return Resuming(_loader("process", TensorDataset(rows), job, seed=job.seed), numpy_first)


CONTENDERS = [
    Contender(
        name="penstock (processes)",
        environment="penstock",
        libraries=("penstock.torch", "penstock.vision", "penstock.stores"),
        settings=(
            "penstock.torch.DataLoader, 2 workers (forked by default), persistent_workers=True; "
            "ImageFolder or LMDBDataset with ImagePipeline.train; tiny: its TensorDataset without "
            "workers; 5 M paths in a PackedList, seed=; tolerant: on_error='skip'"
        ),
        photos=partial(_photos, "process"),
        pack=_pack,
        packed=partial(_packed, "process"),
        tiny=_tiny,
        transport=partial(_transport, "process"),
        paths=partial(_paths, "process"),
        resume=_resume,
        antialias=False,
    ),
    Contender(
        name="penstock (threads)",
        environment="penstock",
        libraries=("penstock.torch", "penstock.vision", "penstock.stores"),
        settings="the same with backend='thread' and cv2.setNumThreads(0)",
        photos=partial(_photos, "thread"),
        pack=_pack,
        packed=partial(_packed, "thread"),
        transport=partial(_transport, "thread"),
        paths=partial(_paths, "thread"),
        antialias=False,
        absent={
            "pack": "as penstock (processes)",
            "tiny": "as penstock (processes), which has no workers here",
            "resume": "as penstock (processes): the state does not depend on the workers",
        },
    ),
    Contender(
        name="penstock (row by row)",
        environment="penstock",
        libraries=("penstock.torch",),
        settings="tiny: a dataset that gives one row at a time, without workers",
        tiny=_tiny_row_by_row,
        same_loader_as="penstock (processes)",
        absent=dict.fromkeys(
            ("photos", "pack", "packed", "transport", "paths", "resume"),
            "as penstock (processes); it differs only in tiny samples",
        ),
    ),
]
