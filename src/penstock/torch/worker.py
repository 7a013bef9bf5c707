# SPDX-License-Identifier: Apache-2.0
"""What a worker does once it has imported torch (`penstock.engine.plan.Framework`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.data import _utils as torch_data

from penstock.torch import leaves
from penstock.torch.collate import TensorCollator, stack_plainly

if TYPE_CHECKING:
    from penstock.data.dataset import Empty
    from penstock.worker_info import WorkerInfo

__all__ = ["collator", "prepare_worker"]


def prepare_worker(info: WorkerInfo) -> None:
    """Set torch up as its own loader does in a worker: one thread, the worker's seed, its info."""
    torch.set_num_threads(1)
    torch.manual_seed(info.seed)
    # The one way there is to make torch.utils.data.get_worker_info() answer in this process.
    torch_data.worker._worker_info = torch_data.worker.WorkerInfo(
        id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=info.dataset
    )
    registry = torch_data.collate.default_collate_fn_map
    if registry.get(torch.Tensor) is torch_data.collate.collate_tensor_fn:
        registry[torch.Tensor] = stack_plainly
    leaves.register()


def collator(empty: Empty) -> TensorCollator:
    """Return the default collate that makes tensors."""
    return TensorCollator(empty)
