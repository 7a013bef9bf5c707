# SPDX-License-Identifier: Apache-2.0
"""The drop-in: torch's `DataLoader`, its checks and attributes, on Penstock's engine."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.utils.data
from torch.utils.data import _utils as torch_data
from torch.utils.data import default_collate, default_convert

from penstock.engine.delivery import Stream
from penstock.engine.plan import Framework, Plan, Recipe, as_given
from penstock.loader import check_workers
from penstock.torch.samplers import index_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.context import BaseContext

    from torch.utils.data import Dataset, Sampler

__all__ = ["DataLoader"]

T_co = TypeVar("T_co", covariant=True)

_TORCH: Final = Framework(root="torch", adapter="penstock.torch.worker")


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """Loads a dataset in batches: `torch.utils.data.DataLoader` on a shared-memory arena.

    Under the same `torch.manual_seed` (and `generator`) it gives the same batches as torch's, bit
    for bit, shuffling and random augmentation in workers included. It is an instance of torch's
    class.

    A batch is the caller's until dropped: tensors made by workers alias a slot of shared memory,
    which is used again once the last view of it is garbage. Writing into a batch changes that batch
    alone. Holding batches (`list(loader)`) costs their memory and is always safe.

    Differences that show: all workers get the dataset from one pickle under `spawn` and
    `forkserver`, with its arrays in memory that is shared until a worker writes to it; a sample's
    error carries a note that names it; `get_batch(indices, empty)` of a dataset is used where there
    is one and the collate is the default. DataPipes, deprecated in torch, run on torch's own
    engine.

    Args:
        dataset: Map-style (`__getitem__`, `__len__`) or a `torch.utils.data.IterableDataset`.
        batch_size: Samples per batch, at least 1; None gives samples as they are.
        shuffle: Whether to draw a new order for each epoch.
        sampler: Yields indices, instead of `shuffle`.
        batch_sampler: Yields lists of indices, instead of `batch_size`, `shuffle`, `sampler`,
            `drop_last`.
        num_workers: Worker processes; 0 loads in this process.
        collate_fn: Makes a batch of a list of samples.
        pin_memory: Copy batches to page-locked memory where there is an accelerator.
        drop_last: Leave out the last batch if it is not full.
        timeout: Longest wait for a batch, in seconds; 0 waits for ever.
        worker_init_fn: Called in each worker with its id, after seeding.
        multiprocessing_context: Start method, by name or as a context; None is Python's default.
        generator: Source of the order and of the workers' base seed; None is torch's global one.
        prefetch_factor: Batches under way per worker, at least 1; 2 where there are workers.
        persistent_workers: Keep the workers after an epoch.
        pin_memory_device: Deprecated in torch, without effect.
        in_order: Whether batches come in the order of the sampler, or as they are ready.

    Raises:
        ValueError: an argument is out of its range or contradicts another
            (`penstock.errors.ConfigError`).
        TypeError: an argument is of the wrong type.

    Concurrency:
        One thread iterates at a time. Several iterators of one loader may be alive together, each
        with workers of its own, unless `persistent_workers`.

    Example:
        >>> import torch
        >>> data = torch.utils.data.TensorDataset(torch.arange(5.0))
        >>> [batch.tolist() for (batch,) in DataLoader(data, batch_size=2)]
        [[0.0, 1.0], [2.0, 3.0], [4.0]]
    """

    _iterator: Any  # torch keeps the persistent iterator here

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
    ) -> None:
        """Check the arguments; nothing is started before iteration."""
        check_workers(num_workers, timeout, prefetch_factor, persistent_workers=persistent_workers)
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,  # type: ignore[arg-type]  # torch says it returns None, and ignores it
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )

    def _get_iterator(self) -> Any:  # noqa: ANN401 - torch's hook; its type is torch's private one
        if isinstance(self.dataset, (torch.utils.data.IterDataPipe, torch.utils.data.MapDataPipe)):
            return super()._get_iterator()
        if self.num_workers > 0:
            self.check_worker_number_rationality()
        return _LoaderIterator(self)


class _LoaderIterator:
    """The epochs of a loader; it draws from torch's generators just when torch's own does."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        # Not the loader itself: a persistent iterator and its loader would keep each other, and
        # with them the workers, until a garbage collection.
        self._dataset = loader.dataset
        self._num_workers = loader.num_workers
        self._sampler = loader._index_sampler
        self._pin = _should_pin(loader)
        # torch's iterator asks the sampler for an iterator, draws the base seed, and asks again if
        # there are workers: a sampler whose __iter__ draws from the global generator shows it.
        self._indices = _Indices(loader)
        base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))
        if loader.num_workers > 0:
            self._indices.restart(loader)
        self._num_yielded = 0
        self._len_called = _len_called(loader)
        self._stream = Stream(_make_plan(loader, base_seed, self._indices))

    def _reset(self, loader: DataLoader[Any]) -> None:
        """Begin another epoch with the same workers; torch's `__iter__` calls it."""
        self._indices.restart(loader)
        self._num_yielded = 0
        self._len_called = _len_called(loader)
        self._stream.begin_epoch()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:  # noqa: ANN401 - any batch tree
        with _profiled("enumerate(DataLoader)#penstock.__next__"):
            batch = next(self._stream)
            if self._pin is not None:
                batch = torch_data.pin_memory.pin_memory(batch, self._pin)
            self._num_yielded += 1
            if self._len_called is not None and self._num_yielded > self._len_called:
                self._warn_of_length()
            return batch

    def _warn_of_length(self) -> None:
        advice = ""
        if self._num_workers > 0:
            advice = (
                " For multiprocessing data-loading, this means that each worker iterates its own "
                "copy "
                "of the dataset: give each its share through torch.utils.data.get_worker_info()."
            )
        warnings.warn(
            f"Length of IterableDataset {self._dataset} was reported to be "
            f"{self._len_called} (when "
            f"accessing len(dataloader)), but {self._num_yielded} samples have been "
            f"fetched.{advice}",
            stacklevel=3,
        )

    def __len__(self) -> int:
        return len(self._sampler)

    @property
    def _workers(self) -> list[Any]:
        """The worker processes, by the name that other libraries know."""
        return getattr(self._stream.backend, "processes", [])

    def _shutdown_workers(self) -> None:
        """Stop the workers now; Lightning and others call it by this name."""
        self._stream.close()

    def __getstate__(self) -> None:
        raise TypeError("an iterator over a DataLoader cannot be pickled; pickle the loader")


def _len_called(loader: DataLoader[Any]) -> int | None:
    """Return what an iterable dataset said of its length, if `len(loader)` asked it."""
    return loader._IterableDataset_len_called


class _Indices:
    """The iterator over the sampler that the coming epoch takes its indices from."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.restart(loader)

    def restart(self, loader: DataLoader[Any]) -> None:
        """Ask the loader's sampler, as it is now, for an iterator."""
        sampler = loader._index_sampler
        self._iterator: Iterator[object] = (
            index_batches(sampler) if loader._auto_collation else map(as_given, iter(sampler))
        )

    def __call__(self) -> Iterator[object]:
        return self._iterator


def _make_plan(
    loader: DataLoader[Any], base_seed: int, draw: Callable[[], Iterator[object]]
) -> Plan:
    is_default = loader.collate_fn is (
        default_collate if loader._auto_collation else default_convert
    )
    recipe = Recipe(
        dataset=loader.dataset,
        is_iterable=isinstance(loader.dataset, torch.utils.data.IterableDataset),
        is_batched=loader._auto_collation,
        collate_fn=None if is_default else loader.collate_fn,
        drop_last=loader.drop_last,
        worker_init_fn=loader.worker_init_fn,
        framework=_TORCH,
    )
    return Plan(
        recipe=recipe,
        draw=draw,
        base_seed=base_seed,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor or 2,
        in_order=loader.in_order,
        timeout_s=loader.timeout,
        keep_workers=loader.persistent_workers,
        context=loader.multiprocessing_context,
    )


def _should_pin(loader: DataLoader[Any]) -> str | None:
    """Return the device type to page-lock for, or None; warns as torch does."""
    if not loader.pin_memory:
        return None
    if loader.pin_memory_device:
        warnings.warn(
            "pin_memory_device is deprecated, the current accelerator will be used as the device, "
            f"ignore pin_memory_device={loader.pin_memory_device!r}.",
            stacklevel=4,
        )
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    if accelerator is None:
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, then device pinned "
            "memory "
            "won't be used.",
            stacklevel=4,
        )
        return None
    if accelerator.type == "mps":
        warnings.warn(
            "'pin_memory' argument is set as true but not supported on MPS now, device pinned "
            "memory won't "
            "be used.",
            stacklevel=4,
        )
        return None
    return accelerator.type


def _profiled(name: str) -> contextlib.AbstractContextManager[object]:
    # record_function costs as much as a small batch, so only where a profiler looks.
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.autograd.profiler.record_function(name)
    return contextlib.nullcontext()
