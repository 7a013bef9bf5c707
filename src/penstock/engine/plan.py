# SPDX-License-Identifier: Apache-2.0
"""What is to be done, decided once: nothing below ever sees a loader's twenty arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.engine.backends import BackendTraits, traits_of
from penstock.faults import RAISES, FaultPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from multiprocessing.context import BaseContext

    from penstock.transport.page_lock import PageLock

__all__ = [
    "BatchIndices",
    "Framework",
    "Plan",
    "RetryHints",
    "UserArray",
    "WorkerSpec",
    "dataset_keys",
    "mark_user_array",
    "sample_key",
    "unwrap_indices",
]


class UserArray(NamedTuple):
    """An array that the user's own sampler yielded: the dataset gets it as it is.

    Arrays of our samplers are int64, cross to workers as bare bytes, and become Python integers.
    """

    indices: Any


def mark_user_array(indices: object) -> object:
    """Return what a sampler that is not ours yielded, marked if it is an array."""
    return UserArray(indices) if isinstance(indices, np.ndarray) else indices


class BatchIndices(NamedTuple):
    """Indices of a seeded epoch, and where they stand in its global order.

    Attributes:
        indices: As they are drawn otherwise.
        position: Place of the first, counted over all ranks.
        stride: From each to the next.
    """

    indices: object
    position: int
    stride: int


class RetryHints(NamedTuple):
    """How a task is to be done after workers have died over it, or over one of its samples.

    Attributes:
        alone: Whether each sample is first to be read, collated and packed by itself.
        quarantined: Keys of samples that end workers, each with how it did, and what else is known.
    """

    alone: bool = False
    quarantined: tuple[tuple[Hashable, str, str], ...] = ()


def unwrap_indices(indices: Any) -> Any:  # noqa: ANN401 - the sampler decides
    """Return what the sampler drew, without our marks."""
    if isinstance(indices, BatchIndices):
        indices = indices.indices
    return indices.indices if isinstance(indices, UserArray) else indices


def dataset_keys(indices: Any) -> Any:  # noqa: ANN401 - the sampler decides
    """Return indices as datasets get them: arrays of our samplers as Python integers."""
    if isinstance(indices, BatchIndices):
        indices = indices.indices
    return indices.tolist() if isinstance(indices, np.ndarray) else unwrap_indices(indices)


def sample_key(index: Any) -> Hashable:  # noqa: ANN401 - the sampler decides
    """Return what a sample is known by: its index, or a text for one that cannot be hashed."""
    if isinstance(index, np.integer):
        return int(index)
    try:
        hash(index)
    except TypeError:
        return repr(index)
    key: Hashable = index
    return key


@dataclass(frozen=True, slots=True)
class Framework:
    """A tensor library, by name, so that a worker whose data does not use it never imports it.

    Attributes:
        root: Its top-level module. Once a worker has imported that, `adapter` is imported too.
        adapter: Our module that knows it; it has `prepare_worker(info)`, called once in each
            worker, `collator(empty)`, which gives the default collate (see
            `penstock.collate.Collator`), and `tensor_of(array)`.
    """

    root: str
    adapter: str


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How a task becomes a batch: all that a worker has to know.

    Attributes:
        dataset: Map-style or iterable.
        is_iterable: Which of the two.
        is_batched: Whether a task makes a batch of samples, or one sample by itself.
        collate_fn: Samples -> batch (or sample -> sample where not `is_batched`); None is the
            default one.
        drop_last: Whether an iterable's last, shorter batch is left out.
        worker_init_fn: Called with the worker's id before its first task.
        framework: Whose tensors the default collate makes; None makes numpy arrays.
        seed: Every sample's random numbers are decided by it, the epoch, and the sample's place;
            None leaves the generators as the worker was seeded.
        global_rng: Whether the seed also decides what the global generators give.
        batch_size: Samples per batch of an iterable; None where not `is_batched`.
        rank: Which of the ranks that share an iterable this one is.
        world_size: Number of those ranks.
        faults: What becomes of samples that cannot be made, and of workers that die.
        covers_dataset: Whether the sampler goes over the whole dataset, so that any sample of it
            may take the place of a bad one.
    """

    dataset: Any
    is_iterable: bool
    is_batched: bool
    collate_fn: Callable[[Any], Any] | None = None
    drop_last: bool = False
    worker_init_fn: Callable[[int], object] | None = None
    framework: Framework | None = None
    seed: int | None = None
    global_rng: bool = True
    batch_size: int | None = None
    rank: int = 0
    world_size: int = 1
    faults: FaultPolicy = RAISES
    covers_dataset: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """One iterator's work, epoch after epoch.

    Attributes:
        spec: How a task becomes a batch.
        base_seed: Worker w seeds its global generators with `base_seed + w`.
        num_workers: 0 works in the caller's process.
        backend: Who the workers are: a name in `BACKENDS`.
        max_workers: How many there may come to be while the epoch runs; 0: as many as there are.
        prefetch_factor: Batches under way per worker.
        in_order: Whether batches leave in the order of their steps.
        timeout_s: Longest wait for a batch, in seconds; 0 waits for ever.
        keep_workers: Whether workers live on after an epoch.
        context: Start method of the workers; None is Python's default.
        page_lock: How the memory of batches is locked for a device, in the main process, but
            not that of worker threads; None locks nothing. Like all of the plan but the spec, it
            is sent to no worker.
        backend_options: Of the backend alone, in a class of its own; None if it has none.
    """

    spec: WorkerSpec
    base_seed: int
    num_workers: int = 0
    backend: str = "process"
    max_workers: int = 0
    prefetch_factor: int = 2
    in_order: bool = True
    timeout_s: float = 0.0
    keep_workers: bool = False
    context: BaseContext | None = None
    page_lock: PageLock | None = None
    backend_options: Any = None

    @property
    def traits(self) -> BackendTraits:
        """Of the backend."""
        return traits_of(self.backend)

    @property
    def lookahead(self) -> int:
        """Steps under way at a time, over all workers."""
        return self.num_workers * self.prefetch_factor

    @property
    def is_worker_free(self) -> bool:
        """Whether it shows nowhere which worker makes a batch."""
        return self.spec.seed is not None and not self.spec.is_iterable
