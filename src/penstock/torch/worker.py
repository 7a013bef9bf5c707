# SPDX-License-Identifier: Apache-2.0
"""What a worker does once it has imported torch (`penstock.engine.plan.Framework`).

A worker that is a thread does nothing of it: torch's number of threads, its generator and its
worker info belong to the whole process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.data import _utils as torch_data

from penstock import worker_info
from penstock.torch import leaves
from penstock.torch.collate import TensorCollator, stack_plainly

if TYPE_CHECKING:
    from penstock.data.dataset import Empty
    from penstock.worker_info import WorkerInfo

__all__ = ["collator", "get_worker_info", "prepare_worker"]


def get_worker_info() -> torch_data.worker.WorkerInfo | None:
    """Return what this worker knows of itself, or None outside a worker.

    As `torch.utils.data.get_worker_info`, which reads a variable of the whole process and so
    returns None in workers that are threads (`backend="thread"`). This one knows them too.

    Returns:
        torch's `WorkerInfo`: `id`, `num_workers`, `seed` and `dataset`.

    Example:
        >>> get_worker_info() is None  # the trainer is no worker
        True
    """
    ours = worker_info.get_worker_info()
    found: torch_data.worker.WorkerInfo | None = torch_data.worker.get_worker_info()
    if found is not None or ours is None:
        return found
    return _as_torch_has_it(ours)


def _as_torch_has_it(info: WorkerInfo) -> torch_data.worker.WorkerInfo:
    return torch_data.worker.WorkerInfo(
        id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=info.dataset
    )


def prepare_worker(info: WorkerInfo) -> None:
    """Set torch up as its own loader does in a worker: one thread, the worker's seed, its info."""
    torch.set_num_threads(1)
    torch.manual_seed(info.seed)
    # The one way there is to make torch.utils.data.get_worker_info() answer in this process.
    torch_data.worker._worker_info = _as_torch_has_it(info)
    registry = torch_data.collate.default_collate_fn_map
    if registry.get(torch.Tensor) is torch_data.collate.collate_tensor_fn:
        registry[torch.Tensor] = stack_plainly
    leaves.register()


def collator(empty: Empty) -> TensorCollator:
    """Return the default collate that makes tensors."""
    return TensorCollator(empty)
