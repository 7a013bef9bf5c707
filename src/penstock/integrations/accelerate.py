# SPDX-License-Identifier: Apache-2.0
"""Hugging Face Accelerate with Penstock's engine.

`accelerator.prepare(loader)` makes a loader of torch's own of any loader it is given. What is
prepared here before goes through it as it is:

    loader = prepare(accelerator, DataLoader(dataset, batch_size=32, shuffle=True, seed=7))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any, Final, TypeVar

from accelerate.data_loader import (
    DataLoaderStateMixin,
    IterableDatasetShard,
    SeedableRandomSampler,
    get_sampler,
)
from accelerate.state import GradientState
from accelerate.utils import DistributedType, send_to_device, synchronize_rng_states
from torch.utils.data import BatchSampler as TorchBatchSampler
from torch.utils.data import DistributedSampler as TorchDistributedSampler
from torch.utils.data import IterableDataset, RandomSampler

from penstock.data.dataset import follows_epochs, length_of
from penstock.errors import ConfigError, StateError
from penstock.indices import with_inner
from penstock.integrations.ahead_of_loop import AheadOfLoop
from penstock.integrations.dealing import (
    BatchShare,
    deals_itself,
    loader_with,
    order_of_all,
    read_state,
    write_state,
)
from penstock.randomness.keys import checked_count
from penstock.sampling import BatchSampler, DistributedSampler, IndexSampler
from penstock.torch.device.prefetcher import DevicePrefetcher
from penstock.torch.loader import DataLoader
from penstock.torch.stateful import StatefulDataLoader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from accelerate import Accelerator

__all__ = ["prepare", "skip_first_batches"]

T_co = TypeVar("T_co", covariant=True)

_OVER: Final = object()
_FILE: Final = "penstock_loader"
_KNOWN: Final = (TorchBatchSampler, BatchSampler)  # batches of the indices of a sampler inside
# Where a process's batches do not come from Accelerate's samplers, but from wrappers of its own.
_REFUSED: Final = (DistributedType.XLA, DistributedType.MEGATRON_LM)
_HOOKED: Final[weakref.WeakSet[Any]] = weakref.WeakSet()  # accelerators that save our states


def prepare(accelerator: Accelerator, loader: DataLoader[T_co]) -> PreparedLoader[T_co]:
    """Return this process's share of a loader, on Penstock's engine, as Accelerate prepares one.

    Batches are dealt out as the accelerator's `DataLoaderConfiguration` says (`split_batches`,
    `even_batches`), and arrive on its device, the next one copied meanwhile. Without `seed=` they
    are those that Accelerate's own loader gives, bit for bit. With `seed=`, all processes together
    get the batches and the random numbers that one process would get. `save_state` and `load_state`
    of the accelerator keep the place in the epoch, exactly.

    The given loader is left as it is; the prepared one shares its stats and its list of failures.
    A `penstock.sampling.DistributedSampler` in it is taken off, as Accelerate deals instead. A
    batch sampler that deals by itself (`BalancedBatchSampler`, `BucketBatchSampler`) goes on to do
    so.

    Of a stream (`IterableDataset`) every process reads its own share, which is
    `dispatch_batches=False`; a stream of Penstock's deals its shards out by itself.

    Args:
        accelerator: As it is to be used in the loop.
        loader: Of any number of workers, any backend. `device=` is left out, or the accelerator's.

    Returns:
        What `accelerator.prepare` takes and returns as it is. It is registered already.

    Raises:
        ConfigError: the accelerator's configuration or the loader cannot be had on this engine; the
            message says which part, and what to do.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> from penstock.torch import DataLoader, TensorDataset
        >>> accelerator = Accelerator(cpu=True)
        >>> loader = DataLoader(TensorDataset(torch.arange(5.0)), batch_size=2, seed=7)
        >>> prepared = prepare(accelerator, loader)
        >>> accelerator.prepare(prepared) is prepared
        True
        >>> for (x,) in prepared:
        ...     print(x.tolist(), accelerator.gradient_state.end_of_dataloader)
        [0.0, 1.0] False
        [2.0, 3.0] False
        [4.0] True
    """
    if isinstance(loader, PreparedLoader):
        return loader
    given: Any = loader
    if not isinstance(given, DataLoader) or isinstance(given, StatefulDataLoader):
        raise ConfigError(
            f"prepare takes a penstock.torch.DataLoader, not {type(given).__name__}. Call it "
            "before accelerator.prepare, which makes torch's own of any, and give others to that."
        )
    _check(accelerator, loader)
    placed_on = accelerator.device if accelerator.device_placement else None
    device = loader._target_device or placed_on
    shard = _prepared_by_accelerate(accelerator, loader)
    prepared = PreparedLoader(loader, shard, accelerator, device)
    accelerator.prepare_data_loader(prepared)
    _keep_states(accelerator)
    return prepared


def skip_first_batches(loader: PreparedLoader[T_co], num_batches: int = 0) -> PreparedLoader[T_co]:
    """Let the next `iter()` of a prepared loader begin with batch `num_batches` of its epoch.

    In place of Accelerate's function of this name, which makes a loader of torch's own. Nothing of
    the batches before is read, but of a stream. Later epochs are whole. After `load_state`, which
    keeps the place by itself, the number given here counts, from the beginning of the epoch.

    Args:
        loader: As `prepare` returned it.
        num_batches: Of this process, from 0 on.

    Returns:
        The same loader.

    Raises:
        ConfigError: a negative number; or the loader is another's.
    """
    if not isinstance(loader, PreparedLoader):
        raise ConfigError(
            f"skip_first_batches takes what `prepare` returned, not {type(loader).__name__}; "
            "accelerate.skip_first_batches takes other loaders"
        )
    loader._begin_at(checked_count("num_batches", num_batches))
    return loader


class PreparedLoader(DataLoaderStateMixin, AheadOfLoop, DataLoader[T_co]):  # type: ignore[misc]
    """What `prepare` returns: one process's batches on its device; see there.

    Whatever it has not, as `dataset`, `batch_sampler`, `num_workers`, is that of `loader`.

    Attributes:
        loader: The loader of this process's batches.
        device: Where batches arrive; None leaves them in main memory.
        end_of_dataloader: Whether the batch given last is the epoch's last one.
        remainder: Samples in the last round of all processes, those excluded that fill it up; 0 if
            it is full, -1 if not known. `gather_for_metrics` cuts off what is beyond.
        total_batch_size: Samples of all processes in one round; None if not known.
    """

    _is_accelerate_prepared = True

    def __init__(
        self,
        loader: DataLoader[T_co],
        shard: Any,  # noqa: ANN401 - a loader of Accelerate's
        accelerator: Any,  # noqa: ANN401
        device: torch.device | None,
    ) -> None:
        """Keep this process's share of a loader; see `prepare`.

        `shard` says which batches these are, and is not kept.
        """
        loader = _dealt(loader, shard, accelerator)
        # Not torch's __init__: what a loader has is asked of `loader`.
        self.device = device
        self.total_batch_size, self._length = _sizes_of(loader, accelerator)
        self._rng_types = list(getattr(shard, "rng_types", None) or [])
        self._generator = getattr(shard, "synchronized_generator", None)
        if loader._seed is not None and "generator" in self._rng_types:
            self._rng_types.remove("generator")  # nothing is drawn from it
        self._given: dict[str, Any] | None = None  # the state of the loop, while batches are given
        self._num_dropped = 0  # of a stream's next epoch
        self.loader = loader  # from here on `__setattr__` knows what is not ours

    @property
    def gradient_state(self) -> GradientState:
        """Accelerate's, of which a process has one: a copied or unpickled loader tells it too."""
        return GradientState()

    def __setattr__(self, name: str, value: object) -> None:
        """Set what the loader has there: it forbids, as torch does, what would have no effect."""
        own = vars(self)
        if name not in own and name in vars(own.get("loader", self)):
            setattr(self.loader, name, value)
        else:
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Return the loader's."""
        if name == "loader":  # not there yet, while it is unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def begin(self) -> None:
        """Tell Accelerate that an epoch begins."""
        self.reset()
        if self._length is not None and self.total_batch_size:
            self.remainder = self._length % self.total_batch_size
        self.gradient_state._add_dataloader(self)

    def __iter__(self) -> Any:  # noqa: ANN401 - torch's return type is its private one
        """Yield the next epoch's batches, with one ahead: the last one is known as such.

        Begins with the first `next()`. Every iterator begins another epoch, or the one that
        `set_epoch` chose; without `seed=` one that was left early begins anew, as Accelerate's.
        """
        if self._rng_types:
            synchronize_rng_states(self._rng_types, self._generator)
        if self.loader._seed is None:
            self.loader.set_epoch(self.loader.epoch)  # in Accelerate's samplers too
        self.begin()
        try:
            yield from self._batches()
        finally:
            self.end()

    def _batches(self) -> Iterator[T_co]:
        batches = iter(self._on_device())
        num_dropped, self._num_dropped = self._num_dropped, 0
        for _ in range(num_dropped):
            next(batches, None)
        self._given = self._state_now()
        following: Any = next(batches, _OVER)
        if following is _OVER:
            self._given = None
        while following is not _OVER:
            current = following
            # Before the loader has given one more.
            state: dict[str, Any] | None = self._state_now()
            following = next(batches, _OVER)
            if following is _OVER:
                self.end_of_dataloader = True
                state = None  # the loader's own is that of the next epoch
            # Ctrl-C may have hit up to here, and finds the state behind the batch before. No call
            # follows, as `__setattr__` would be: it cannot hit before the loop has this one.
            self.__dict__["_given"] = state
            yield current

    def _on_device(self) -> Any:  # noqa: ANN401
        loader = self.loader
        if self.device is None or self.device.type == "cpu" or loader._target_device is not None:
            return loader
        if type(loader).__iter__ is not DataLoader.__iter__:
            # Of these the prefetcher takes one more than it gives, and the state would count it.
            return (send_to_device(batch, self.device) for batch in loader)
        return DevicePrefetcher(loader, self.device)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop is, as JSON has it; see `penstock.torch.DataLoader.state_dict`.

        With `seed=` it is the same on all processes, and may be loaded where there are more or
        fewer of them, as long as `total_batch_size` is the same.
        """
        return self._state_now() if self._given is None else copy.deepcopy(self._given)

    def _state_now(self) -> dict[str, Any]:
        state, seedable = self.loader.state_dict(), _seedable(self.loader)
        return state if seedable is None else {**state, "data_seed": seedable.initial_seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next `iter()` go on exactly where `state` was saved.

        Raises:
            StateError: see `penstock.torch.DataLoader.load_state_dict`.
        """
        super().load_state_dict(state)
        seedable = _seedable(self.loader)
        if seedable is not None and "data_seed" in state:
            seedable.initial_seed = state["data_seed"]
        self._num_dropped = 0

    def get_sampler(self) -> Any:  # noqa: ANN401
        """Return the sampler of indices, as Accelerate asks for it."""
        return get_sampler(self)

    def _begin_at(self, num_batches: int) -> None:
        self._given = None
        if isinstance(self.dataset, IterableDataset):
            self._num_dropped = num_batches
            return
        state = self._state_now()
        of_the_loop = ("ahead", "failed", "samples", "shares", "turn")
        kept = {k: v for k, v in state.items() if k not in of_the_loop}
        self.load_state_dict({**kept, "batches": min(num_batches, len(self.loader))})


def _check(accelerator: Any, loader: DataLoader[Any]) -> None:  # noqa: ANN401
    if accelerator.distributed_type in _REFUSED or loader._runs_on_torch:
        raise ConfigError(
            f"a loader of {type(loader.dataset).__name__} on {accelerator.distributed_type} cannot "
            "be had on this engine: give it to accelerator.prepare, which makes torch's own of it"
        )
    if accelerator.num_processes == 1:
        return
    if accelerator.dispatch_batches:
        raise ConfigError(
            "dispatch_batches=True has process 0 read for all others, and here each process reads "
            "its own share. Leave it out of DataLoaderConfiguration."
        )
    if loader.batch_sampler is None and not isinstance(loader.sampler, TorchBatchSampler):
        raise ConfigError(
            "Accelerate deals batches, and a loader with batch_size=None has none. Give it a "
            "batch_size, or sampler=BatchSampler(...)."
        )
    _check_not_dealt(loader, accelerator.num_processes)


def _check_not_dealt(loader: DataLoader[Any], num_processes: int) -> None:
    """Refuse a sampler that gives each process a share already."""
    batches: Any = loader.batch_sampler
    if deals_itself(batches, num_processes):
        return
    for part in with_inner(batches if batches is not None else loader.sampler):
        is_inside = type(batches) in _KNOWN and part is batches.sampler
        if is_inside and isinstance(part, DistributedSampler):
            continue  # it is taken off
        is_ours = isinstance(part, IndexSampler) and part.world_size > 1
        if is_ours or isinstance(part, TorchDistributedSampler):
            raise ConfigError(
                f"{type(part).__module__}.{type(part).__name__} gives each process a share "
                "already, of which Accelerate would deal out a share. Give the loader "
                "shuffle=True, or a sampler of all samples."
            )


def _prepared_by_accelerate(accelerator: Any, loader: DataLoader[Any]) -> Any:  # noqa: ANN401
    """Return what Accelerate makes of a loader, which says who gets which batches."""
    given = loader_with(loader)
    if type(loader.batch_sampler) in _KNOWN:
        # Accelerate exchanges the sampler inside, which would be the caller's.
        batches: Any = copy.copy(loader.batch_sampler)
        if isinstance(batches.sampler, DistributedSampler):
            batches.sampler = batches.sampler.sampler  # Accelerate deals
        given = loader_with(loader, batch_sampler=batches)
    is_stream = isinstance(loader.dataset, IterableDataset)
    if is_stream and (accelerator.num_processes == 1 or follows_epochs(loader.dataset)):
        return given  # it deals itself
    # Without placement Accelerate does not dispatch a stream from process 0. One process may be
    # asked to dispatch, which is nothing there but needs a device.
    placed = not is_stream and bool(accelerator.dispatch_batches)
    shard = accelerator.prepare_data_loader(given, device_placement=placed)
    accelerator._dataloaders.remove(shard)  # not the one to be used
    return shard


def _dealt(loader: DataLoader[T_co], shard: Any, accelerator: Any) -> DataLoader[T_co]:  # noqa: ANN401
    """Return a loader of this process's batches, with an epoch counter of its own."""
    if isinstance(loader.dataset, IterableDataset):
        size = loader.batch_size
        if accelerator.split_batches and size is not None and accelerator.num_processes > 1:
            size //= accelerator.num_processes
        return loader_with(loader, dataset=shard.dataset, batch_size=size)
    if loader.batch_sampler is None:  # batches of a sampler, or samples as they are
        return loader_with(loader, sampler=shard.sampler)
    if deals_itself(loader.batch_sampler, accelerator.num_processes):
        return loader_with(loader)
    if loader._seed is None:
        return loader_with(loader, batch_sampler=shard.batch_sampler)
    return loader_with(loader, batch_sampler=_seeded_share(loader, shard, accelerator))


def _seeded_share(loader: DataLoader[Any], shard: Any, accelerator: Any) -> Any:  # noqa: ANN401
    given: Any = loader.batch_sampler
    num_processes, order = accelerator.num_processes, None
    if type(given) in _KNOWN:
        sampler = given.sampler
        if isinstance(sampler, SeedableRandomSampler):  # Accelerate's, for shuffle=True
            sampler = RandomSampler(sampler.data_source, sampler.replacement, sampler._num_samples)
        order = order_of_all(sampler, loader._seed or 0)
    if order is None:
        return shard.batch_sampler
    size = given.batch_size
    return BatchShare(
        given,
        order,
        size // num_processes if accelerator.split_batches else size,
        num_processes=num_processes,
        process_index=accelerator.process_index,
        even_batches=accelerator.even_batches,
    )


def _sizes_of(loader: Any, accelerator: Any) -> tuple[int | None, int | None]:  # noqa: ANN401
    """Return the samples of a round of all processes, and those of an epoch without padding."""
    batches, num = loader.batch_sampler, accelerator.num_processes
    if isinstance(loader.dataset, IterableDataset):
        inner: Any = loader.dataset
        length = length_of(inner) if num == 1 else None
        if isinstance(inner, IterableDatasetShard):
            length = length_of(inner.dataset)
        total = None if loader.batch_size is None else loader.batch_size * num
        return total, None if loader.drop_last else length
    if isinstance(batches, BatchShare):
        length = None if batches.drop_last else len(batches.sampler.sampler)  # type: ignore[attr-defined]
        return batches.total_batch_size, length
    size = getattr(batches, "batch_size", None)
    if size is None or deals_itself(batches, num):
        return None, None
    is_split = getattr(batches, "split_batches", False)
    total = size if is_split else size * getattr(batches, "num_processes", 1)
    sampler = getattr(getattr(batches, "batch_sampler", batches), "sampler", None)
    return total, None if getattr(batches, "drop_last", False) else length_of(sampler)


def _seedable(loader: DataLoader[Any]) -> Any:  # noqa: ANN401
    """Return Accelerate's sampler that orders by a seed of its own, if it is in use."""
    batches: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    inner = getattr(getattr(batches, "batch_sampler", batches), "sampler", None)
    is_used = loader._seed is None and isinstance(inner, SeedableRandomSampler)
    return inner if is_used else None


def _keep_states(accelerator: Any) -> None:  # noqa: ANN401
    """Have `save_state` and `load_state` of an accelerator keep the states of our loaders."""
    if accelerator in _HOOKED:
        return
    _HOOKED.add(accelerator)

    def save(models: object, weights: object, folder: str) -> None:
        for number, loader in enumerate(_ours_of(accelerator)):
            name, rank = f"{_FILE}_{number}", accelerator.process_index
            write_state(folder, name, rank, loader.state_dict())

    def load(models: object, folder: str) -> None:
        for number, loader in enumerate(_ours_of(accelerator)):
            state = read_state(folder, f"{_FILE}_{number}", accelerator.process_index)
            if state is None:
                raise StateError(
                    f"{folder} has no state of prepared loader {number}: prepare as many as when "
                    "it was saved, or load it before the loaders are prepared"
                )
            loader.load_state_dict(state)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def _ours_of(accelerator: Any) -> list[PreparedLoader[Any]]:  # noqa: ANN401
    return [loader for loader in accelerator._dataloaders if isinstance(loader, PreparedLoader)]
