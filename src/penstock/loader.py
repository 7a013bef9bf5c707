# SPDX-License-Identifier: Apache-2.0
"""The framework-neutral loader: any dataset, numpy batches. It validates and wires, no more."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from penstock.data.dataset import IterableDataset, adapted
from penstock.engine.fault_log import FaultLog
from penstock.engine.plan import unwrap_indices
from penstock.epochs import EpochIterator, Schedule, told_to_dataset, worker_base_seed
from penstock.errors import ConfigError
from penstock.indices import SeededIndices, StreamSource, check_samplers, tell_epoch, tell_seed
from penstock.insight.monitor import Monitor, Observed
from penstock.options import LoaderOptions, plan_of, rank_of_shard
from penstock.randomness.kept import warn_of_kept_generators
from penstock.randomness.keys import checked_count, checked_epoch
from penstock.sampling import BatchSampler, RandomSampler, SequentialSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from multiprocessing.context import BaseContext

    from numpy.typing import NDArray

    from penstock.engine.plan import Plan
    from penstock.engine.stream import BatchStream
    from penstock.faults import Failure, FaultPolicy
    from penstock.indices import IndexSource
    from penstock.options import Auto, Ray

SampleT = TypeVar("SampleT")


class EpochLoader(Observed):
    """Epochs, state and bad samples of both loaders."""

    _schedule: Schedule
    _seed: int | None
    drop_last: bool
    num_workers: int

    def _source(self) -> IndexSource:
        """Return what the indices of an epoch come from."""
        raise NotImplementedError

    def _stream_source(self) -> StreamSource:
        return StreamSource(
            self.dataset,
            self.batch_size,
            drop_last=self.drop_last,
            num_workers=self.num_workers,
            rank=rank_of_shard(self._seed),
        )

    @property
    def epoch(self) -> int:
        """Number of the epoch that is under way; between two, of the next one."""
        return self._schedule.epoch

    @property
    def failures(self) -> list[Failure]:
        """Bad samples, left out or replaced, in the order in which they were missed.

        Each once an epoch, with its index, file or key, error, worker, epoch and step. The last
        10,000 are kept.
        """
        return self._faults.failures

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` begins; otherwise it advances by itself.

        It decides the order and every sample's random numbers, and reaches the samplers, and the
        dataset in every worker, persistent ones too, if they have a method `set_epoch`;
        `sampler.set_epoch(e)`, as loops for torch have it, does the same.

        Raises:
            ConfigError: a negative epoch, or one of 2^32 and more.
            TypeError: an epoch that is no integer.
        """
        self._schedule.set_epoch(epoch)
        if self._seed is None:  # a seeded epoch notifies them when it begins
            tell_epoch(epoch, self.sampler, self.batch_sampler)

    def indices(self, epoch: int, step: int) -> NDArray[np.int64]:
        """Return the indices of the samples that a batch holds, on this rank; none is read.

        Batch `step` of an epoch, from 0 on, whatever the loader is doing: what did the step hold
        at which the loss was no number? Samples that are left out or replaced by `on_error` are
        among them; see `failures`.

        Returns:
            int64 (samples,), a fresh array.

        Raises:
            ConfigError: the order is not known without iterating: of an iterable dataset, of a
                sampler that is not Penstock's, of a loader of torch's without `seed=`.
            IndexError: the epoch has fewer batches.

        Example:
            >>> loader = Loader([1.0, 2.0, 3.0], batch_size=2)
            >>> loader.indices(epoch=5, step=1)
            array([2])
        """
        source = self._source()
        batches = (
            source.known(checked_epoch(epoch), checked_count("step", step))
            if isinstance(source, SeededIndices)
            else None
        )
        if batches is None:
            raise ConfigError(
                f"which samples step {step} of epoch {epoch} holds is not known without iterating: "
                "only a loader with seed= knows it, of a map-style dataset, where the samplers are "
                "Penstock's."
            )
        if (batch := next(batches, None)) is None:
            raise IndexError(f"epoch {epoch} has no step {step}: it has {len(self)} batches.")  # type: ignore[arg-type]
        return np.atleast_1d(unwrap_indices(batch)).astype(np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Return where the training loop is: the epoch, and the batches it has been given.

        Batches that workers have made ahead do not count. "epoch" and "batches" in it say where the
        loop is. The state is JSON-able, below 1 KB for any dataset, and the same on all ranks. An
        iterable dataset's own state comes on top, for each worker, and is its rank's own.

        Of a `penstock.torch.DataLoader` without `seed=` it also holds what the epoch's order was
        drawn with: one number for `shuffle=True`, nothing for samplers with a seed of their own, or
        4 to 18 KB for generators.

        Example:
            >>> loader = Loader([1.0, 2.0, 3.0, 4.0], batch_size=2)
            >>> batches = iter(loader)
            >>> first = next(batches)
            >>> state = loader.state_dict()
            >>> again = Loader([1.0, 2.0, 3.0, 4.0], batch_size=2)
            >>> again.load_state_dict(state)
            >>> [batch.tolist() for batch in again]
            [[3.0, 4.0]]
        """
        return self._schedule.state_dict(self._source, self.dataset)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next `iter()` go on exactly where `state` was saved.

        No sample that was given before is read again. Workers, backends and the number of ranks may
        have changed since; what decides the order may not. Without a seed the order goes on, and
        random numbers drawn in workers do not.

        Raises:
            StateError: an iterator is running, or the state was saved with other data, batch
                size, sampler or seed; the message says what differs.
        """
        self._schedule.load_state_dict(state, self._source(), self.dataset)


class Loader(EpochLoader, Generic[SampleT]):
    """Loads a dataset in batches of numpy arrays, for JAX, MindSpore, or numpy itself.

    An epoch is a function of (seed, epoch): its order, and every sample's random numbers
    (`penstock.sample_rng`, and the global generators while the sample is made). The number of
    workers does not show in it. Every `iter()` begins the next epoch, 0, 1, 2 …

    A batch is the caller's until dropped. Arrays made by workers alias a slot of shared memory that
    is used again once the last view of it is garbage; holding batches costs their memory and is
    always safe. A process forked meanwhile shares such arrays: copy what it is to write to.

    Args:
        dataset: Map-style (`__getitem__`, `__len__`), a `penstock.data.IterableDataset`, or a
            `ray.data.Dataset` (see docs/guide/ray-data.md).
        batch_size: Samples per batch, at least 1; None gives samples as they are.
        shuffle: Whether to draw a new order for each epoch.
        sampler: Yields indices, instead of `shuffle`.
        batch_sampler: Yields lists or arrays of indices, instead of `batch_size`, `shuffle`,
            `sampler` and `drop_last`.
        num_workers: Worker processes, threads or actors; 0 loads in this thread. "auto" measures
            what samples cost and how fast the loop takes them, and adds and retires workers while
            it runs; the stream of batches is not disturbed. `stats()` says what it did.
            `penstock.Auto(cpu=..., memory=...)` is "auto" with limits.
        collate_fn: Makes a batch of a list of samples; None stacks arrays and numbers
            (`penstock.collate.default_collate`). One with a method `collate_into`
            is given memory in the slot (`penstock.collate.CollateInto`).
        drop_last: Leave out the last batch if it is not full.
        timeout: Longest wait for a batch, in seconds; 0 waits for ever.
        worker_init_fn: Called in each worker with its id, after seeding.
        multiprocessing_context: Start method, by name or as a context; None is Python's default. A
            context whose `Process` is a thread means `backend="thread"`.
        prefetch_factor: Batches under way per worker, at least 1; default 2.
        persistent_workers: Keep the workers after an epoch. With a seed they begin the next one
            while the last batches of this one are taken, where samplers are Penstock's.
        in_order: Whether batches come in the order of the sampler, or as they are ready.
        seed: Decides the order of every epoch and all random numbers of its samples. Not negative.
        global_rng: With `seed=`: whether `random`, numpy's and torch's global generators are seeded
            for each sample too, 10 to 30 us. False seeds `penstock.sample_rng()` alone, for
            transforms that draw from nothing else; one that does is named once in a warning, but
            not with Ray.
        on_error: What becomes of a sample that cannot be made, and of a worker that dies. "raise"
            raises the sample's exception, and `WorkerDied` at the first death. "skip" leaves the
            sample out, "replace" puts another in its place; both start a new worker for one that
            died, up to three times per epoch. A `penstock.FaultPolicy` says it in detail.
        backend: What workers are: "process", "thread" for datasets that release the GIL (see
            docs/guide/threads.md), or "ray" for Ray actors on any machine of a cluster (see
            docs/guide/ray.md). `penstock.Ray(...)` is "ray" with an address and what each asks for.
        progress: Whether to show a progress bar, with samples per second, the share of waiting and
            the count of failed samples; a text is its name, as "train". Quiet on ranks above 0,
            and where there is no terminal.
        monitor: What is measured of each batch. "light": when it was asked for and given, 2 us.
            "full": also where the time of worker and loop goes, up to 50 us. "auto" measures in
            full once batches come less often than every 5 ms, and from the first call of `stats`,
            `report` or `trace` on. A progress bar, `subscribe` and `num_workers="auto"` have it
            measured in full whatever this says; so does Ray, unless this is "light".

    Raises:
        ConfigError: an argument is out of its range, or contradicts another.
        TypeError: an argument is of the wrong type.

    Concurrency:
        One thread iterates at a time.

    Example:
        >>> loader = Loader([1.0, 2.0, 3.0], batch_size=2)
        >>> [batch.tolist() for batch in loader]
        [[1.0, 2.0], [3.0]]
    """

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401 - anything with __getitem__ or __iter__
        batch_size: int | None = 1,
        *,
        shuffle: bool = False,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int | str | Auto = 0,
        collate_fn: Callable[[list[SampleT]], Any] | None = None,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        in_order: bool = True,
        seed: int = 0,
        global_rng: bool = True,
        on_error: str | FaultPolicy = "raise",
        backend: str | Ray = "process",
        progress: bool | str = False,
        monitor: str = "auto",
    ) -> None:
        """Check the arguments; nothing is started before iteration."""
        orders = {"shuffle": shuffle, "sampler": sampler, "batch_sampler": batch_sampler}
        dataset, collate_fn = adapted(dataset, collate_fn, **orders)
        self._is_iterable = isinstance(dataset, IterableDataset)
        # torch's inherits a __getitem__ without a use.
        is_foreign = any(cls.__name__ == "IterableDataset" for cls in type(dataset).__mro__)
        if not self._is_iterable and (is_foreign or not hasattr(dataset, "__getitem__")):
            raise TypeError(
                "a dataset has __getitem__ and __len__, or is a penstock.data.IterableDataset; got "
                f"{type(dataset).__name__}. Streams of torch are for penstock.torch.DataLoader"
            )
        self._seed: int = checked_count("seed", seed)
        options = LoaderOptions(
            is_iterable=self._is_iterable, num_workers=num_workers,
            timeout=timeout, multiprocessing_context=multiprocessing_context, backend=backend,
            prefetch_factor=prefetch_factor, persistent_workers=persistent_workers,
            seed=self._seed, global_rng=global_rng, on_error=on_error,
            progress=progress, monitor=monitor,
        )  # fmt: skip
        self._options = options
        self._monitor = Monitor(dataset, options)
        self.dataset = dataset
        self.batch_size = None if batch_sampler is not None else batch_size
        self.num_workers: int = self._monitor.num_workers
        self.backend = options.given_backend
        self.progress = progress
        self.monitor = monitor
        self.collate_fn = collate_fn
        self.drop_last = drop_last
        self.timeout = timeout
        self.worker_init_fn = worker_init_fn
        self.multiprocessing_context = options.context
        self.prefetch_factor = prefetch_factor
        self.persistent_workers = persistent_workers
        self.in_order = in_order
        self._schedule = Schedule(seed)
        self.global_rng = global_rng
        self.on_error = on_error
        self._faults = FaultLog(options.faults, dataset)
        _check_orders(orders, batch_size, is_iterable=self._is_iterable, drop_last=drop_last)
        check_samplers(dataset, sampler, batch_sampler, batch_size)
        tell_seed(self._seed, sampler, batch_sampler)
        if sampler is None and batch_sampler is None:
            if self._is_iterable:
                sampler = itertools.repeat(None)
            elif shuffle:
                sampler = RandomSampler(dataset, seed=self._seed)
            else:
                sampler = SequentialSampler(dataset)
        if batch_sampler is None and batch_size is not None:
            batch_sampler = BatchSampler(sampler, batch_size, drop_last)  # type: ignore[arg-type]
        self.sampler = sampler
        self.batch_sampler = batch_sampler
        self._stream: BatchStream | None = None
        warn_of_kept_generators(dataset, seed)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch: starts the workers, or sets the persistent ones to work again."""
        source = self._source()
        epoch = told_to_dataset(self._schedule.next(source), source, self)
        self._monitor.epoch_begun(epoch, self)
        if self._stream is None:
            plan = self._plan()
            kind: Callable[..., BatchStream]
            if plan.num_workers:
                from penstock.engine.worker_stream import WorkerStream as kind
            else:
                from penstock.engine.stream import SerialStream as kind
            stream: BatchStream = kind(plan, epoch, self._faults, self._monitor)
        else:
            stream = self._stream
            stream.begin_epoch(epoch)
        if self.persistent_workers:
            self._stream = stream
        iterator = EpochIterator(stream)
        self._schedule.begin(epoch, iterator, source)
        return iterator

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the persistent workers."""
        return {**self.__dict__, "_stream": None}

    @property
    def seed(self) -> int:
        """As given."""
        return self._seed

    def _plan(self) -> Plan:
        return plan_of(self, worker_base_seed(self._seed), collate_fn=self.collate_fn)

    def _source(self) -> IndexSource:
        if self._is_iterable:
            return self._stream_source()
        return SeededIndices(self.sampler, self.batch_sampler, self._seed)

    def __len__(self) -> int:
        """Batches of an epoch.

        Raises:
            TypeError: the dataset or sampler has no length.
        """
        if not self._is_iterable:
            sampler: Any = self.sampler if self.batch_sampler is None else self.batch_sampler
            return len(sampler)
        full, rest = divmod(len(self.dataset), self.batch_size or 1)
        return full + (rest > 0 and not self.drop_last)


def _check_orders(
    orders: dict[str, Any], batch_size: int | None, *, is_iterable: bool, drop_last: bool
) -> None:
    shuffle, sampler, batch_sampler = orders.values()
    if is_iterable and (shuffle or sampler or batch_sampler):
        raise ConfigError(
            f"an IterableDataset decides its own order, got {shuffle=}, {sampler=}, "
            f"{batch_sampler=}"
        )
    if sampler is not None and shuffle:
        raise ConfigError(f"sampler option is mutually exclusive with shuffle, got {sampler=}")
    if batch_sampler is not None and (
        batch_size != 1 or shuffle or sampler is not None or drop_last
    ):
        raise ConfigError(
            "batch_sampler option is mutually exclusive with batch_size, shuffle, sampler and "
            f"drop_last, got {batch_size=}, {shuffle=}, {sampler=}, {drop_last=}"
        )
    if batch_size is None and drop_last:
        raise ConfigError(
            "batch_size=None gives single samples and is mutually exclusive with drop_last=True"
        )
