# SPDX-License-Identifier: Apache-2.0
"""What a worker that has a process to itself does once, before its first task."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING

from penstock.engine.worker_comparison import changed_states
from penstock.optional import when_imported
from penstock.randomness.generators import GlobalStates, seed_worker
from penstock.randomness.keys import Purpose, seed_sequence
from penstock.randomness.samples import forget_streams, seed_fallback
from penstock.worker_info import WorkerInfo, set_worker_info

if TYPE_CHECKING:
    from penstock.engine.plan import Framework, WorkerSpec
    from penstock.engine.task import WorkerIdentity

__all__ = ["set_up_worker"]


def set_up_worker(spec: WorkerSpec, identity: WorkerIdentity) -> dict[str, bytes]:
    """Seed this process's generators, let it know itself, and call `worker_init_fn`.

    Returns:
        Digests of the generators that it seeded anew, where batches draw from them as they are.

    Raises:
        Exception: what `worker_init_fn` raises.
    """
    forget_streams()
    seed_worker(identity.base_seed, identity.worker_id)
    seed_fallback(seed_sequence(identity.base_seed, Purpose.WORKERS, identity.worker_id))
    info = WorkerInfo(
        id=identity.worker_id,
        num_workers=identity.num_workers,
        seed=identity.base_seed + identity.worker_id,
        dataset=spec.dataset,
    )
    set_worker_info(info)
    framework = spec.framework
    if framework is not None:
        when_imported(framework.root, functools.partial(_prepare_framework, framework, info))
    when_imported("cv2", _keep_opencv_to_one_thread)
    when_imported("torch", _keep_torch_to_one_thread)
    if spec.worker_init_fn is None:
        return {}
    before = GlobalStates.now()
    spec.worker_init_fn(identity.worker_id)
    return changed_states(before) if spec.seed is None else {}


def _prepare_framework(framework: Framework, info: WorkerInfo) -> None:
    """Tell a tensor library who the worker is."""
    importlib.import_module(framework.adapter).prepare_worker(info)


def _keep_opencv_to_one_thread() -> None:
    """Leave each worker one core, as torch's loader does with torch.

    Not `setNumThreads(1)`: in a forked worker that waits for threads that do not exist there.
    """
    set_num_threads = getattr(sys.modules.get("cv2"), "setNumThreads", None)
    if set_num_threads is not None:  # cv2 is imported twice, the first time without its functions
        set_num_threads(0)


def _keep_torch_to_one_thread() -> None:
    """Do the same with torch, also where no framework was named and the dataset imports it."""
    set_num_threads = getattr(sys.modules.get("torch"), "set_num_threads", None)
    if set_num_threads is not None:
        set_num_threads(1)
