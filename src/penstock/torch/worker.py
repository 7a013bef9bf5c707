# SPDX-License-Identifier: Apache-2.0
"""What a worker does once it has imported torch (`penstock.engine.plan.Framework`).

A worker that is a thread does nothing of it: torch's number of threads, its generator and its
worker info belong to the whole process. There torch's `get_worker_info` is taught to ask for the
thread's (`answer_in_threads`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import _utils as torch_data

from penstock import worker_info
from penstock.torch.collate import TensorCollator, stack_plainly
from penstock.torch.leaves import tensor_of

if TYPE_CHECKING:
    from types import CodeType

    from penstock.data.dataset import Allocator
    from penstock.worker_info import WorkerInfo

__all__ = ["answer_in_threads", "collator", "prepare_worker", "tensor_of", "thread_info"]

_get_worker_info: Final = torch_data.worker.get_worker_info
_COLLATE: Final = torch_data.collate.collate_tensor_fn.__code__


def answer_in_threads() -> None:
    """Let `torch.utils.data.get_worker_info` answer in workers that are threads.

    It reads a variable of the whole process. Who uses it has imported it by its name, so another
    function in torch's module would be used nowhere: it stays the same function, with other code.
    Outside of worker threads it returns what it did.
    """
    _get_worker_info.__code__ = _asking_the_thread.__code__


def _asking_the_thread() -> Any:  # noqa: ANN401 - of torch's module, whose variables it reads
    import sys

    from penstock.torch.worker import thread_info

    info = thread_info(sys._getframe(1).f_code)
    return _worker_info if info is None else info  # type: ignore[name-defined]  # noqa: F821


def thread_info(caller: CodeType) -> torch_data.worker.WorkerInfo | None:
    """Return the info of a worker that is this very thread, as torch has it.

    None for torch's collate, which asks whether this is a process that has to share tensors.
    """
    info = None if caller is _COLLATE else worker_info.get_thread_info()
    return None if info is None else _as_torch_has_it(info)


def _as_torch_has_it(info: WorkerInfo) -> torch_data.worker.WorkerInfo:
    return torch_data.worker.WorkerInfo(
        id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=info.dataset
    )


def prepare_worker(info: WorkerInfo | None) -> None:
    """Set torch up as its own loader does in a worker: one thread, the worker's seed, its info.

    None is for one that ends, whose info is to hold the dataset no longer.
    """
    # The one way there is to make torch.utils.data.get_worker_info() answer in this process.
    torch_data.worker._worker_info = None if info is None else _as_torch_has_it(info)
    if info is None:
        return
    torch.set_num_threads(1)
    torch.manual_seed(info.seed)
    # Or torch's collate would make a shared file per tensor.
    registry = torch_data.collate.default_collate_fn_map
    if registry.get(torch.Tensor) is torch_data.collate.collate_tensor_fn:
        registry[torch.Tensor] = stack_plainly


def collator(alloc: Allocator) -> TensorCollator:
    """Return the default collate that makes tensors."""
    return TensorCollator(alloc)
