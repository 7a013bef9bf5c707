# SPDX-License-Identifier: Apache-2.0
"""The drop-in: torch's `DataLoader`, its checks and attributes, on Penstock's engine."""

from __future__ import annotations

import functools
import inspect
import weakref
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import torch
import torch.utils.data
from torch.utils.data import default_collate, default_convert

from penstock.data.dataset import adapted, follows_epochs
from penstock.engine.fault_log import FaultLog
from penstock.engine.plan import Framework
from penstock.epochs import EpochIterator, Schedule, told_to_dataset, worker_base_seed
from penstock.errors import ConfigError
from penstock.indices import SeededIndices, check_samplers, inner_of, tell_seed
from penstock.insight.monitor import AutoWorkers, Monitor
from penstock.loader import EpochLoader
from penstock.options import LoaderOptions, plan_of
from penstock.randomness.kept import warn_of_kept_generators
from penstock.sampling import BatchSampler, IndexSampler
from penstock.torch.device.accelerator import current_type, open_accelerator
from penstock.torch.device.copier import DeviceCopier, Pinning
from penstock.torch.device.page_lock import page_lock_for
from penstock.torch.draws import UnseededIndices
from penstock.torch.samplers import seeded_sampler
from penstock.torch.streams import TorchSerialStream
from penstock.torch.worker import answer_in_threads
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing.context import BaseContext

    from torch.utils.data import Dataset, Sampler

    from penstock.data import Dataset as NumpyDataset
    from penstock.engine.plan import Plan
    from penstock.engine.stream import BatchStream, DeliveryHook
    from penstock.faults import FaultPolicy
    from penstock.indices import IndexSource
    from penstock.options import Auto, Ray
    from penstock.torch.streams import AsTorch
    from penstock.transport.page_lock import PageLock

T_co = TypeVar("T_co", covariant=True)

DATAPIPES: Final = (torch.utils.data.IterDataPipe, torch.utils.data.MapDataPipe)
# The arguments of torch's loader.
_TORCHS: Final = frozenset(inspect.signature(torch.utils.data.DataLoader).parameters)
_TORCH: Final = Framework(root="torch", adapter="penstock.torch.worker")
_NO_INDICES: Final = (
    "workers get indices ahead of the loop. Iterate over loader.batch_sampler, or let the dataset "
    "return its index with each sample"
)
_NO_FETCHER: Final = "the dataset is loader.dataset, a stream's place is in loader.state_dict()"
_NO_QUEUE: Final = "batches wait in shared memory, and loader.stats().num_ready is how many"


class Readable:
    """A property that a subclass may hide by assigning an attribute of its name to itself.

    Subclasses of torch's loader have had attributes called `epoch` or `seed` before us.
    """

    def __init__(self, base: Any) -> None:  # noqa: ANN401 - mypy sees what a property returns
        """Take the property of the base class."""
        self._get = base.fget
        self.__doc__ = base.__doc__

    def __get__(self, loader: Any, owner: type) -> Any:  # noqa: ANN401
        """Return what the property says of the loader."""
        return self if loader is None else self._get(loader)


class DataLoader(EpochLoader, torch.utils.data.DataLoader[T_co]):
    """Loads a dataset in batches: `torch.utils.data.DataLoader` on a shared-memory arena.

    Under the same `torch.manual_seed` (and `generator`) it gives the same batches as torch's, bit
    for bit, shuffling and random augmentation in workers included. It is an instance of torch's
    class.

    A batch is the caller's until dropped: tensors made by workers alias a slot of shared memory,
    which is used again once the last view of it is garbage. Writing into a batch changes that batch
    alone. Holding batches (`list(loader)`) costs their memory and is always safe.

    docs/differences-from-torch.md has the differences that show. DataPipes, deprecated in torch,
    run on torch's own engine.

    Args:
        dataset: Map-style (`__getitem__`, `__len__`), a `torch.utils.data.IterableDataset`, or a
            `ray.data.Dataset` (see docs/guide/ray-data.md).
        batch_size: Samples per batch, at least 1; None gives samples as they are.
        shuffle: Whether to draw a new order for each epoch.
        sampler: Yields indices, instead of `shuffle`.
        batch_sampler: Yields lists of indices, instead of `batch_size`, `shuffle`, `sampler`,
            `drop_last`.
        num_workers: As for `penstock.Loader`: a number, "auto" or a `penstock.Auto`.
        collate_fn: Makes a batch of a list of samples. One with a method `collate_into`
            is given memory in the slot (`penstock.collate.CollateInto`).
        pin_memory: Give batches in page-locked memory where there is an accelerator. With CUDA it
            is the slots that are locked, once each, and large tensors are not copied.
        drop_last: Leave out the last batch if it is not full.
        timeout: Longest wait for a batch, in seconds; 0 waits for ever.
        worker_init_fn: Called in each worker with its id, after seeding.
        multiprocessing_context: Start method, by name or as a context; None is Python's default. A
            context whose `Process` is a thread means `backend="thread"`.
        generator: Source of the order and of the workers' base seed; None is torch's global one.
        prefetch_factor: Batches under way per worker, at least 1; 2 where there are workers.
        persistent_workers: Keep the workers after an epoch. With a seed they begin the next one
            while the last batches of this one are taken, where samplers are Penstock's.
        pin_memory_device: Deprecated in torch, without effect.
        in_order: Whether batches come in the order of the sampler, or as they are ready.
        seed: Decides every epoch's order and all random numbers of its samples, whatever the number
            of workers; see `penstock.sample_rng`. Samplers with a seed of their own keep it. Every
            `iter()` begins the next epoch, or that of `set_epoch`. None: torch's own semantics.
        global_rng: As for `penstock.Loader`, with `seed=` alone.
        on_error: As for `penstock.Loader`.
        backend: As for `penstock.Loader`: "process", "thread", "ray" or a `penstock.Ray`.
        progress: As for `penstock.Loader`.
        monitor: As for `penstock.Loader`.
        device: Where batches arrive: "cuda", a `torch.device`, or "auto" for the accelerator there
            is, if any. The next batch is copied while the loop computes. None: in main memory.
        device_transform: Called with each batch on `device`, in the loop's own stream; what it
            returns is the batch: `lambda batch: (normalize(batch[0]), batch[1])`, say, with a
            `NormalizeImages`.

    Attributes:
        epoch: Number of the epoch that is under way; between two, of the next one.
        failures: As of `penstock.Loader`.

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
    # As given; what a subclass assigns to these names changes nothing of the loader.
    seed: int | None
    global_rng: bool
    on_error: str | FaultPolicy
    backend: str | Ray
    progress: bool | str
    monitor: str
    device: torch.device | None  # with its index; None is main memory
    device_transform: Callable[[Any], Any] | None

    def __init__(
        self,
        dataset: Dataset[T_co] | NumpyDataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | str | Auto = 0,
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
        seed: int | None = None,
        global_rng: bool = True,
        on_error: str | FaultPolicy = "raise",
        backend: str | Ray = "process",
        progress: bool | str = False,
        monitor: str = "auto",
        device: str | int | torch.device | None = None,
        device_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        """Check the arguments; nothing is started before iteration."""
        orders = {"shuffle": shuffle, "sampler": sampler, "batch_sampler": batch_sampler}
        dataset, collate_fn = adapted(dataset, collate_fn, **orders)
        chosen = None if device is None else open_accelerator(device).device
        if device is None and device_transform is not None:
            raise ConfigError("device_transform is called with batches on a device: give device=")
        if seed is not None and generator is not None:
            raise ConfigError(
                f"seed decides all that a generator would: give one of the two, not seed={seed} "
                f"and generator={generator}"
            )
        if isinstance(dataset, DATAPIPES) and (seed is not None or device is not None):
            raise ConfigError(
                f"{type(dataset).__name__} is a DataPipe and runs on torch's own engine, which has "
                f"neither seed nor device: got {seed=} and {device=}. A DevicePrefetcher around "
                "the loader copies its batches to a device"
            )
        options = LoaderOptions(
            is_iterable=isinstance(dataset, torch.utils.data.IterableDataset),
            num_workers=num_workers, timeout=timeout, backend=backend,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor, persistent_workers=persistent_workers,
            seed=seed, global_rng=global_rng, on_error=on_error,
            progress=progress, monitor=monitor,
        )  # fmt: skip
        self._options = options
        self._schedule = Schedule(seed)
        self._seed = seed
        self._target_device = chosen
        self._device_transform = device_transform
        self._faults = FaultLog(options.faults, dataset)
        self._monitor = Monitor(dataset, options)
        # By these attributes others make a loader anew: Lightning looks for the names of
        # `__init__`'s parameters in `vars(loader)`. What a subclass has of these names stays.
        arguments = vars(options) | {"backend": options.given_backend, "device": chosen}
        arguments["device_transform"] = device_transform
        for name in added_arguments():
            if not hasattr(type(self), name):
                vars(self).setdefault(name, arguments[name])
        workers: int = self._monitor.num_workers
        check_samplers(dataset, sampler, batch_sampler, batch_size)
        super().__init__(
            dataset,  # type: ignore[arg-type]  # torch's annotation has its own classes alone
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            workers,
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
        if isinstance(workers, AutoWorkers):
            # Not torch's default of 2: in a loader that is made of this one's attributes, that
            # would be the user's choice, and no longer the tuner's.
            self.prefetch_factor = prefetch_factor
        inner = next(reversed(inner_of(batch_sampler)), None)
        if isinstance(batch_sampler, BatchSampler) or isinstance(inner, IndexSampler):
            # Where torch has a SequentialSampler without a use. Lightning wraps this attribute
            # in a DistributedSampler, and puts that into a new batch sampler.
            vars(self)["sampler"] = inner
        if seed is not None:
            tell_seed(seed, sampler, batch_sampler)
            warn_of_kept_generators(dataset, seed)

    def __init_subclass__(cls, **options: object) -> None:
        """Name our arguments in the signature of an `__init__` that takes `**kwargs`."""
        super().__init_subclass__(**options)
        _name_keywords(cls)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; ConfigError for an argument that is read once.

        A subclass may have something else of the name of one of ours.
        """
        if type(self) is DataLoader and name in vars(self) and name in added_arguments():
            raise ConfigError(
                f"{name} attribute should not be set after DataLoader is initialized: give "
                f"{name}={value!r} to a new one"
            )
        super().__setattr__(name, value)

    def __iter__(self) -> Any:  # noqa: ANN401 - torch's return type is its private one
        """Begin the next epoch: starts the workers, or sets the persistent ones to work again."""
        kept: Any = super().__iter__()
        if kept is not self._iterator or self._runs_on_torch:
            return kept
        # Persistent workers' iterator lives on. The user gets another, so that it shows whether a
        # loop is iterating: with a seed one that ends with the epoch, else, as in torch, the same
        # again while there is one.
        iterator = None if self._seed is not None else kept.handed_out()
        if iterator is None:
            iterator = _TorchIterator(kept._stream, self)
            iterator._base_seed = kept._base_seed
            kept.handed_out = weakref.ref(iterator)
        iterator.epoch, iterator._batches = kept.epoch, None
        self._schedule.forget(kept)
        self._schedule.begin(kept.epoch, iterator)
        return iterator

    # What a subclass assigns to these names is its own.
    epoch = Readable(EpochLoader.epoch)
    failures = Readable(EpochLoader.failures)

    @property
    def _runs_on_torch(self) -> bool:
        return isinstance(self.dataset, DATAPIPES)

    def _iter_on(self, device: torch.device, transform: Callable[[Any], Any] | None) -> Any:  # noqa: ANN401
        """Begin the next epoch as a loader with `device` and `device_transform` would."""
        given = self._target_device, self._device_transform
        self._target_device, self._device_transform = device, transform
        try:
            return iter(self)
        finally:
            self._target_device, self._device_transform = given

    def _settings(self) -> dict[str, Any]:
        device = None if self._target_device is None else str(self._target_device)
        return {**super()._settings(), "device": device}

    def _check_has_state(self) -> None:
        if self._runs_on_torch:
            raise ConfigError(
                f"{type(self.dataset).__name__} is a DataPipe and runs on torch's own engine, "
                "which has no state"
            )

    def _source(self, base_seed: int | None = None) -> IndexSource:
        """Return what the indices come from; `base_seed` is that of workers that live on."""
        self._check_has_state()
        if self._seed is None:
            return UnseededIndices(self, base_seed)
        if self._options.is_iterable:
            return self._stream_source()
        given = self.batch_sampler, self.sampler  # from the outside in
        batch_sampler, sampler = (seeded_sampler(part, self._seed) for part in given)
        return SeededIndices(sampler, batch_sampler, self._seed, given)

    def _get_iterator(self) -> Any:  # noqa: ANN401 - torch's hook; its type is torch's private one
        if self._runs_on_torch:
            return super()._get_iterator()
        if self.num_workers > 0:
            self.check_worker_number_rationality()
        return _LoaderIterator(self, self._source())

    def _plan(self, base_seed: int, page_lock: PageLock | None) -> Plan:
        """Return the plan of an iterator."""
        is_default = self.collate_fn is (
            default_collate if self._auto_collation else default_convert
        )
        collate_fn = None if is_default else self.collate_fn
        return plan_of(
            self, base_seed, collate_fn=collate_fn, framework=_TORCH, page_lock=page_lock
        )

    def _stream_kind(self, num_workers: int) -> Callable[..., AsTorch]:
        """Return the class of an iterator's stream; that of worker streams is imported late."""
        if not num_workers:
            return TorchSerialStream
        from penstock.torch.worker_streams import TorchWorkerStream

        return TorchWorkerStream


def _absent(name: str, instead: str) -> property:
    """Return a property for a private name of torch's iterators that has no counterpart here."""

    def refuse(iterator: object) -> NoReturn:
        raise AttributeError(
            f"an iterator of penstock.torch.DataLoader has no {name}: {instead}. "
            "docs/differences-from-torch.md lists torch's private names"
        )

    return property(refuse)


class _TorchIterator(EpochIterator):
    """An epoch's iterator by the names that other libraries know of torch's, as far as they fit."""

    _base_seed: int

    def __init__(self, stream: BatchStream, loader: DataLoader[Any]) -> None:
        super().__init__(stream)
        self._index_sampler = loader._index_sampler
        self._collate_fn = loader.collate_fn
        self._dataset = loader.dataset

    def __len__(self) -> int:
        return len(self._index_sampler)

    @property
    def _num_yielded(self) -> int:
        """Batches of this epoch."""
        return self._stream.num_yielded

    @property
    def _workers(self) -> list[Any]:
        return getattr(self._stream.backend, "processes", [])

    _next_data = EpochIterator.__next__
    _shutdown_workers = EpochIterator.close

    _next_index = _absent("_next_index", _NO_INDICES)
    _sampler_iter = _absent("_sampler_iter", _NO_INDICES)
    _dataset_fetcher = _absent("_dataset_fetcher", _NO_FETCHER)
    _data_queue = _absent("_data_queue", _NO_QUEUE)
    _worker_result_queue = _absent("_worker_result_queue", _NO_QUEUE)


class _LoaderIterator(_TorchIterator):
    """The epochs of a loader; without `seed=` it draws just when torch's own iterator does."""

    _stream: AsTorch

    def __init__(self, loader: DataLoader[Any], source: IndexSource) -> None:
        # Not the loader itself: a persistent iterator and its loader would keep each other, and
        # with them the workers, until a garbage collection.
        self._goes_to = loader._target_device, loader._device_transform
        hook, page_lock = _delivery_of(loader)
        epoch = loader._schedule.next(source, is_followed=follows_epochs(loader.dataset))
        epoch = told_to_dataset(epoch, source, loader)
        if loader._seed is not None:
            self._base_seed = worker_base_seed(loader._seed)
        else:
            self._base_seed = source.base_seed
        loader._monitor.epoch_begun(epoch, loader)
        plan = loader._plan(self._base_seed, page_lock)
        if plan.traits.shares_interpreter:
            answer_in_threads()
        kind = loader._stream_kind(plan.num_workers)
        stream = kind(plan, epoch, loader._faults, loader._monitor, hook)
        stream.len_called = loader._IterableDataset_len_called
        super().__init__(stream, loader)
        self.handed_out: Callable[[], _TorchIterator | None] = lambda: None
        loader._schedule.begin(epoch, self, source)

    def _reset(self, loader: DataLoader[Any]) -> None:
        """Begin another epoch with the same workers; torch's `__iter__` calls it."""
        source = loader._source(self._base_seed)
        epoch = loader._schedule.next(source, is_followed=follows_epochs(loader.dataset))
        epoch = told_to_dataset(epoch, source, loader)
        loader._monitor.epoch_begun(epoch, loader)
        goes_to = loader._target_device, loader._device_transform
        if goes_to != self._goes_to:  # `_iter_on` changes it
            # Slots of the workers that there are stay as they are locked, or not locked.
            self._stream.set_hook(_delivery_of(loader)[0])
            self._goes_to = goes_to
        self._stream.len_called = loader._IterableDataset_len_called
        self._stream.begin_epoch(epoch)
        self.epoch, self._batches = epoch, None
        loader._schedule.begin(epoch, self, source)


def _delivery_of(loader: DataLoader[Any]) -> tuple[DeliveryHook | None, PageLock | None]:
    """Return what is done with the loader's batches before the user gets them."""
    device = loader._target_device
    if device is not None:  # what is copied from is pinned anyway
        copier = DeviceCopier(open_accelerator(device), loader._device_transform)
        return copier, page_lock_for(device)
    pin_for = _pin_for() if loader.pin_memory else None
    return (None, None) if pin_for is None else (Pinning(pin_for.type), page_lock_for(pin_for))


def _pin_for() -> torch.device | None:
    """Return the device to page-lock for, or None; warns as torch does."""
    accelerator = current_type()
    if accelerator is not None and accelerator.type != "mps":
        return accelerator
    why = "no accelerator is found, then" if accelerator is None else "not supported on MPS now,"
    warn_user(
        f"'pin_memory' argument is set as true but {why} device pinned memory won't be used.",
    )
    return None


# For classes that derive from the loader, as they derive from torch's.


class _NamedOnceBound(inspect.Signature):
    """The signature of an `__init__(..., **kwargs)` that names more once `self` is given.

    Lightning asks a loader's `__init__` what it may be given; and the function itself, before
    `self` is given, what its arguments and their defaults are called in the record of a call.
    """

    __slots__ = ("bound",)
    bound: inspect.Signature  # still with `self`

    def replace(self, **changes: Any) -> inspect.Signature:  # type: ignore[override]  # noqa: ANN401
        """Return another signature: `inspect.signature` takes `self` away by this."""
        own = list(self.parameters.values())
        if list(changes.get("parameters", ())) == own[1:]:
            return self.bound.replace(parameters=list(self.bound.parameters.values())[1:])
        return inspect.Signature(own, return_annotation=self.return_annotation).replace(**changes)


@functools.cache  # asked for at every assignment
def added_arguments() -> dict[str, inspect.Parameter]:
    """Return the loader's arguments, by name, that torch's loader does not have."""
    parameters = inspect.signature(DataLoader).parameters
    return {name: parameters[name] for name in parameters if name not in _TORCHS}


def _name_keywords(subclass: type) -> None:
    """Let the signature of a subclass's `__init__(..., **kwargs)` name what it passes on.

    Lightning makes a loader anew with those of its attributes that are arguments of its `__init__`.
    For `**kwargs` it takes the names of torch's own arguments, so ours would be left out in
    silence. A class between the two that takes no `**kwargs` passes on only what it names.
    """
    init = vars(subclass).get("__init__")
    if not isinstance(init, FunctionType):
        return
    added = added_arguments()
    mro = subclass.__mro__
    for cls in mro[: mro.index(DataLoader)]:
        if isinstance(between := vars(cls).get("__init__"), FunctionType):
            found = inspect.signature(between).parameters
            if not any(p.kind is p.VAR_KEYWORD for p in found.values()):
                added = {name: p for name, p in added.items() if name in found}
    signature = inspect.signature(init)
    *parameters, last = signature.parameters.values()
    if last.kind is last.VAR_KEYWORD:
        more = [p for name, p in added.items() if name not in signature.parameters]
        named = _NamedOnceBound([*parameters, last], return_annotation=signature.return_annotation)
        named.bound = signature.replace(parameters=[*parameters, *more, last])
        init.__signature__ = named  # type: ignore[attr-defined]  # which inspect looks for
