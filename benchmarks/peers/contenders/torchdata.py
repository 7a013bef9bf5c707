# SPDX-License-Identifier: Apache-2.0
"""torchdata: StatefulDataLoader, and nodes with threads and with processes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import works
from contender import Contender, Epoch, Job
from contenders import photo_ops
from contenders.shared import (
    BigBatches,
    PathNumbers,
    PhotoFiles,
    ResumingTensors,
    Rows,
    batch_sampler,
    epochs,
    numpy_first,
    numpy_only,
    numpy_pair,
    path_array,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def _stateful(dataset: Any, job: Job, **more: Any) -> Any:  # noqa: ANN401
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    options = {
        "batch_size": job.batch_size,
        "shuffle": True,
        "num_workers": job.num_workers,
        "generator": torch.Generator().manual_seed(job.seed),
        **more,
    }
    if options["num_workers"] > 0:
        options["persistent_workers"] = True
    return StatefulDataLoader(dataset, **options)


def _stateful_photos(job: Job) -> Epoch:
    dataset = PhotoFiles(job.photos, photo_ops.fast_sample)
    return epochs(_stateful(dataset, job, worker_init_fn=photo_ops.one_thread), numpy_pair)


def _stateful_tiny(job: Job) -> Epoch:
    return epochs(_stateful_rows(job, num_workers=0), numpy_first)


def _stateful_rows(job: Job, **more: Any) -> Any:  # noqa: ANN401
    import torch
    from torch.utils.data import TensorDataset

    dataset = TensorDataset(torch.from_numpy(works.tiny_rows(job.num_samples)))
    sampler = batch_sampler(job.num_samples, job)
    return _stateful(dataset, job, batch_size=None, shuffle=None, sampler=sampler, **more)


def _stateful_resume(job: Job) -> ResumingTensors:
    return ResumingTensors(_stateful_rows(job), numpy_first)


def _stateful_transport(job: Job) -> Epoch:
    loader = _stateful(BigBatches(job.num_samples), job, batch_size=None, shuffle=False)
    return epochs(loader, numpy_only)


def _stateful_paths(job: Job) -> Epoch:
    return epochs(_stateful(PathNumbers(path_array(job.num_samples)), job), numpy_only)


class Sampled:
    """Makes a batch of a list of indices, in the worker."""

    def __init__(self, dataset: Any) -> None:  # noqa: ANN401
        """Keep the dataset."""
        self._dataset = dataset

    def __call__(self, indices: Sequence[int]) -> Any:  # noqa: ANN401
        """Return the collated batch."""
        from torch.utils.data import default_collate

        return default_collate([self._dataset[index] for index in indices])


def one_big_batch(number: int) -> Any:  # noqa: ANN401
    """Return a ready batch as a tensor."""
    import torch

    return torch.from_numpy(works.big_batch(number))


def _nodes(
    method: str,
    make: Callable[[Any], Any],
    num_samples: int,
    job: Job,
    *,
    one_by_one: bool = False,
) -> Any:  # noqa: ANN401
    from torchdata.nodes import Loader, ParallelMapper, Prefetcher, SamplerWrapper

    order = range(num_samples) if one_by_one else batch_sampler(num_samples, job)
    node = ParallelMapper(
        SamplerWrapper(order), make, num_workers=job.num_workers, method=method, in_order=True
    )
    return Loader(Prefetcher(node, prefetch_factor=2 * job.num_workers))


def _node_photos(method: str, job: Job) -> Epoch:
    photo_ops.one_thread()  # of this process and, by fork, of the workers
    dataset = PhotoFiles(job.photos, photo_ops.fast_sample)
    return epochs(_nodes(method, Sampled(dataset), len(dataset), job), numpy_pair)


def _node_tiny(method: str, job: Job) -> Epoch:
    return epochs(_node_rows(method, job), numpy_only)


def _node_rows(method: str, job: Job) -> Any:  # noqa: ANN401
    import torch

    rows = Rows(torch.from_numpy(works.tiny_rows(job.num_samples)))
    return _nodes(method, rows, job.num_samples, job)


def _node_resume(method: str, job: Job) -> ResumingTensors:
    return ResumingTensors(_node_rows(method, job), numpy_only)


def _node_transport(method: str, job: Job) -> Epoch:
    loader = _nodes(method, one_big_batch, job.num_samples, job, one_by_one=True)
    return epochs(loader, numpy_only)


def _node_paths(method: str, job: Job) -> Epoch:
    dataset = PathNumbers(path_array(job.num_samples))
    return epochs(_nodes(method, Sampled(dataset), len(dataset), job), numpy_only)


_ABSENT = {
    **dict.fromkeys(("pack", "packed"), "there is no packed format"),
    "tolerant": "it cannot skip a sample that it cannot read",
}
_STATEFUL = "https://pytorch.org/data/0.11/stateful_dataloader_tutorial.html"
_NODES = "https://docs.pytorch.org/data/beta/migrate_to_nodes_from_utils.html"

CONTENDERS = [
    Contender(
        name="torchdata StatefulDataLoader",
        environment="torchdata",
        libraries=("torch", "torchdata.stateful_dataloader", "simplejpeg", "cv2"),
        settings=(
            "a drop-in for torch's, as in its documentation: 2 forked workers, "
            "persistent_workers=True, simplejpeg and OpenCV; tiny, resume: TensorDataset asked for "
            "whole batches by torch's BatchSampler as sampler and batch_size=None, which is "
            "faster than its own samplers and which a resume goes through again up to its position "
            f"({_STATEFUL}); tiny without workers, resume with 2; 5 M paths in one numpy array"
        ),
        photos=_stateful_photos,
        tiny=_stateful_tiny,
        transport=_stateful_transport,
        paths=_stateful_paths,
        resume=_stateful_resume,
        antialias=False,
        absent=_ABSENT,
    ),
    *(
        Contender(
            name=f"torchdata nodes ({name})",
            environment="torchdata",
            libraries=("torch", "torchdata.nodes", "simplejpeg", "cv2"),
            settings=(
                f"SamplerWrapper, ParallelMapper(method='{method}') with 2 workers that make whole "
                f"batches, Prefetcher, as its migration guide has it ({_NODES}); tiny, resume: a "
                "batch of rows by one index; simplejpeg and OpenCV; 5 M paths in one numpy array"
            ),
            photos=partial(_node_photos, method),
            tiny=partial(_node_tiny, method),
            transport=partial(_node_transport, method),
            paths=partial(_node_paths, method),
            resume=partial(_node_resume, method),
            antialias=False,
            rounds=rounds,
            absent=_ABSENT,
        )
        for name, method, rounds in (("threads", "thread", None), ("processes", "process", 1))
    ),
]
