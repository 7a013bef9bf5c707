# SPDX-License-Identifier: Apache-2.0
"""The drop-in for torchdata's `StatefulDataLoader`, on Penstock's engine.

Its state is laid out as torchdata's, with what else the engine has to know under `_penstock`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import torch
from torch.utils.data import IterableDataset

from penstock.data.dataset import can_resume
from penstock.engine.plan import Given, Progress, ShardPosition, mark_user_array
from penstock.engine.states import load_state, packed_pair, pair_of, state_of
from penstock.epochs import warn_of_replay
from penstock.errors import ConfigError, StateError
from penstock.indices import IndexSource
from penstock.randomness.keys import checked_count
from penstock.torch.loader import DataLoader, _LoaderIterator
from penstock.torch.stateful_samplers import StatefulBatchSampler, StatefulRandomSampler, steps_of
from penstock.torch.streams import StatefulSerialStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from multiprocessing.context import BaseContext

    from torch.utils.data import Dataset, Sampler

    from penstock.engine.plan import Plan
    from penstock.torch.streams import AsTorch
    from penstock.torch.worker_streams import StatefulWorkerStream
    from penstock.transport.page_lock import PageLock

T_co = TypeVar("T_co", covariant=True)

_MARK: Final = "_penstock"
_FORMAT: Final = 1
_OF_SAMPLER: Final = ("_index_sampler_state", "_sampler_iter_state", "_sampler_iter_yielded")


class _WorkersDifferError(StateError, AssertionError):
    """torchdata raises an AssertionError."""


class _Saved(NamedTuple):
    """What a state says.

    Attributes:
        given: What was given, with the states of workers.
        num_since: Batches given after that.
        sampler: States of the sampler and its iterator, and how many batches were drawn.
        base_seed: Of the workers; None without workers.
        is_over: Whether the epoch has ended.
    """

    given: Given
    num_since: int
    sampler: dict[str, Any]
    base_seed: int | None
    is_over: bool


class StatefulDataLoader(DataLoader[T_co]):
    """Loads a dataset in batches, with its own state: torchdata's class on Penstock's engine.

    The state holds what `state_dict()` of the dataset, of its iterator (what `iter(dataset)`
    returns), of the sampler and of the batch sampler returned, in worker processes as in this one,
    map-style datasets' too. Whichever of them has `state_dict` and `load_state_dict` goes on there.
    Under the same `torch.manual_seed` and `generator` batches come in the order of torchdata's,
    which is another than that of torch's `DataLoader`.

    A state that was taken at the end of an epoch begins the next one. It can be loaded at any time,
    and holds for the next `iter()`. The number of workers stays the same, unless the dataset is
    map-style and has no state.

    Of an iterable dataset without a state, what was given is read once more and dropped.

    Args:
        dataset: As for `DataLoader`.
        batch_size: As for `DataLoader`.
        shuffle: As for `DataLoader`; the generator goes on from epoch to epoch.
        sampler: As for `DataLoader`.
        batch_sampler: As for `DataLoader`.
        num_workers: A number of worker processes.
        collate_fn: As for `DataLoader`.
        pin_memory: As for `DataLoader`.
        drop_last: As for `DataLoader`.
        timeout: As for `DataLoader`.
        worker_init_fn: As for `DataLoader`.
        multiprocessing_context: As for `DataLoader`.
        generator: As for `DataLoader`.
        prefetch_factor: As for `DataLoader`.
        persistent_workers: As for `DataLoader`.
        pin_memory_device: As for `DataLoader`.
        in_order: As for `DataLoader`. Out of order, states are taken with every batch.
        snapshot_every_n_steps: How often workers are asked for their states. Batches since then are
            made once more after loading, and dropped. 0 asks when an epoch begins.
        **options: Other arguments of `DataLoader`; not `seed` and `global_rng`, under which its own
            state does the same.

    Raises:
        ValueError: an argument is out of its range or contradicts another
            (`penstock.errors.ConfigError`).

    Example:
        >>> loader = StatefulDataLoader(range(6), batch_size=2, num_workers=2)
        >>> for batch in loader:
        ...     break
        >>> state = loader.state_dict()
        >>> loader = StatefulDataLoader(range(6), batch_size=2, num_workers=2)
        >>> loader.load_state_dict(state)
        >>> [batch.tolist() for batch in loader]
        [[2, 3], [4, 5]]
    """

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
        snapshot_every_n_steps: int | None = 1,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Check the arguments; nothing is started before iteration."""
        wrong = options.get("seed") is not None and f"seed={options['seed']}"
        if wrong or not hasattr(num_workers, "__index__"):
            raise ConfigError(
                f"StatefulDataLoader takes no {wrong or f'{num_workers=}'}: its order is by "
                "torch's generators, and its workers are counted, as torchdata's. Use "
                "penstock.torch.DataLoader, which has a state too"
            )
        checked_count("snapshot_every_n_steps", snapshot_every_n_steps or 0)
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self._saved: Mapping[str, Any] | None = None
        self._is_begun = False  # for `state_dict`, and not for a loop yet
        makes_batches = batch_sampler is None and not isinstance(dataset, IterableDataset)
        if makes_batches and sampler is None and shuffle:
            shuffle, sampler = None, StatefulRandomSampler(dataset, generator)
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn,
            pin_memory, drop_last, timeout, worker_init_fn, multiprocessing_context, generator,
            prefetch_factor=prefetch_factor, persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device, in_order=in_order, **options,
        )  # fmt: skip
        if self._options.backend == "ray":
            raise ConfigError('StatefulDataLoader keeps no states of Ray actors: got backend="ray"')
        if makes_batches and self.batch_sampler is not None:
            of_sampler = StatefulBatchSampler(self.sampler, batch_size, drop_last)  # type: ignore[arg-type]
            vars(self)["batch_sampler"] = of_sampler

    def __iter__(self) -> Any:  # noqa: ANN401 - as in the base class
        """Begin the next epoch, or go on where the state that was loaded last was taken."""
        if not self._is_begun:
            self._begin_next()
        self._is_begun = False
        if not self._runs_on_torch and self._iterator.epoch.progress.is_over:  # as the state says
            self._begin_next()
        return self._iterator

    def _begin_next(self) -> None:
        if self._iterator is not None and self.persistent_workers:
            self._iterator._reset(self)
        else:
            self._iterator = None  # its workers end before others start
            self._iterator = self._get_iterator()

    def _get_iterator(self) -> Any:  # noqa: ANN401
        if self._runs_on_torch:
            return super()._get_iterator()
        saved = None if self._saved is None else self._read(self._saved)
        if saved is not None and saved.is_over and self.num_workers and not self.persistent_workers:
            # Its workers would end at once: only samplers and generators go to their end.
            indices = StatefulIndices(self, None, saved).begin(0, Progress())
            if not self._options.is_iterable:
                deque(indices, 0)
            saved = None
        if self.num_workers > 0:
            self.check_worker_number_rationality()
        iterator = _StatefulIterator(self, StatefulIndices(self, None, saved))
        if saved is not None:
            warn_of_replay(self.dataset, saved.given)
            for _ in range(saved.num_since):
                next(iterator)
            iterator.epoch.progress.is_over = saved.is_over
        self._saved = None
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop is, with the states of dataset, iterator and samplers.

        Before the first `iter()` it begins the epoch, which the next `iter()` goes on with.
        """
        self._check_has_state()
        if self._iterator is None:
            self._begin_next()
            self._is_begun = True
        return self._iterator.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next `iter()` go on where `state` was taken; an iterator before is left.

        Raises:
            StateError: the state is none of this class; `iter()` raises it for another number of
                workers.
        """
        if state and _MARK not in state:
            raise StateError(_what_else(state))
        if state and state[_MARK].get("format") != _FORMAT:
            raise StateError(
                f"this state is of format {state[_MARK].get('format')!r}, and this release of "
                f"Penstock reads {_FORMAT}. Load it with the release that wrote it"
            )
        self._iterator = None
        self._is_begun = False
        if state:  # as torchdata's, for which {} is no state: one loaded before still counts
            self._saved = state

    def _read(self, state: Mapping[str, Any]) -> _Saved:
        """Return what a state of this class says, for this number of workers."""
        snapshot, turn, num_since = state.get("_snapshot"), 0, 0
        num_workers, sampler, parts = 0, state, [state]
        if snapshot is not None:
            sampler, num_since = snapshot["_main_snapshot"], state["_steps_since_snapshot"]
            num_workers, turn = sampler["_num_workers"], snapshot["_last_yielded_worker_id"] + 1
            parts = [snapshot["_worker_snapshots"][f"worker_{k}"] for k in range(num_workers)]
        shards: dict[int, ShardPosition] = {}
        for part, (num_batches, state_at) in zip(parts, state[_MARK]["batches"], strict=True):
            fetcher = part["fetcher_state"] or {"fetcher_ended": False, "dataset_iter_state": None}
            pickled = packed_pair(part["dataset_state"], fetcher["dataset_iter_state"])
            shards[len(shards)] = ShardPosition(
                num_batches, fetcher["fetcher_ended"], state_at, pickled
            )
        is_bound = self._options.is_iterable or any(one.state for one in shards.values())
        if num_workers != self.num_workers and is_bound:
            raise _WorkersDifferError(
                f"this state holds the dataset's states in {num_workers} workers, but the loader "
                f"has num_workers={self.num_workers}. Make it with {num_workers}, or begin a new "
                "epoch without the state"
            )
        ahead = tuple((start, stop) for start, stop in state[_MARK]["ahead"])
        num_steps = sampler["_sampler_iter_yielded"]
        given = Given(num_steps, ahead, shards if is_bound else {}, turn)
        of_sampler = {name: sampler[name] for name in _OF_SAMPLER}
        base_seed, is_over = sampler.get("_base_seed"), state["_iterator_finished"]
        return _Saved(given, num_since, of_sampler, base_seed, is_over)

    def _source(self, base_seed: int | None = None) -> IndexSource:
        return StatefulIndices(self, base_seed)

    def _plan(self, base_seed: int, page_lock: PageLock | None) -> Plan:
        plan = super()._plan(base_seed, page_lock)
        return dataclasses.replace(plan, steps_per_state=self._steps_per_state)

    @property
    def _steps_per_state(self) -> int:
        return (self.snapshot_every_n_steps or 0) if self.in_order else 1

    def _stream_kind(self, num_workers: int) -> Callable[..., AsTorch]:
        if not num_workers:
            return StatefulSerialStream
        from penstock.torch.worker_streams import StatefulWorkerStream

        return StatefulWorkerStream


def _what_else(state: Mapping[str, Any]) -> str:
    """Return what to do with a state that is of another class."""
    if "_snapshot" in state or "_num_yielded" in state:
        return (
            "this state was taken by torchdata's StatefulDataLoader, and its dataset's states by "
            "torchdata's workers. Go on with torchdata to the end of the epoch, and begin the next "
            "one here without a state"
        )
    if "fingerprint" in state:
        return "this is a state of penstock.torch.DataLoader: load it into one"
    return (
        f"this is not a state of a StatefulDataLoader: {repr(state)[:200]}. Give what "
        "state_dict() returned"
    )


class _StatefulIterator(_LoaderIterator):
    """The epochs of a loader, with their states."""

    _stream: StatefulSerialStream | StatefulWorkerStream

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader."""
        progress, num_workers = self.epoch.progress, self._stream._plan.num_workers
        given, num_since = self._stream.snapshot()
        indices: StatefulIndices = progress.draws
        num_given = given.num_steps + sum(stop - start for start, stop in given.ahead)
        main = {
            **indices.states_at(given.num_steps),
            "_IterableDataset_len_called": self._stream.len_called,
            "_shared_seed": None,
        }
        is_iterable = self._stream._plan.spec.is_iterable
        parts, batches = [], []
        for _, (num_batches, has_ended, state_at, pickled) in sorted(given.shards.items()):
            of_dataset, of_iterator = pair_of(pickled)
            fetcher = {"dataset_iter_state": of_iterator, "fetcher_ended": has_ended}
            of_fetcher = fetcher if is_iterable else None
            parts.append({"fetcher_state": of_fetcher, "dataset_state": of_dataset})
            batches.append([num_batches, state_at])
        last = {
            "_iterator_finished": progress.is_over,
            _MARK: {
                "format": _FORMAT,
                "batches": batches,
                "ahead": [list(steps) for steps in given.ahead],
            },
        }
        if not num_workers:
            return {**main, "_num_yielded": num_given, **parts[0], **last}
        turn = given.turn if is_iterable else given.num_steps
        snapshot = {
            "_snapshot_step": num_given,
            "_last_yielded_worker_id": (turn - 1) % num_workers,
            "_main_snapshot": {
                **main, "_num_workers": num_workers, "_base_seed": self._base_seed,
            },
            "_worker_snapshots": {
                f"worker_{k}": {"worker_id": k, **part} for k, part in enumerate(parts)
            },
        }  # fmt: skip
        return {"_snapshot": snapshot, "_steps_since_snapshot": num_since, **last}


class StatefulIndices(IndexSource):
    """Indices asked for when torchdata's loader asks for them, with the states of the samplers."""

    def __init__(
        self,
        loader: StatefulDataLoader[Any],
        base_seed: int | None = None,
        saved: _Saved | None = None,
    ) -> None:
        """Look at what the loader draws with.

        Args:
            loader: Not kept: its iterator keeps this.
            base_seed: Of workers that live on: no base seed is drawn. None: an iterator begins.
            saved: Where to go on.
        """
        self._sampler: Any = loader._index_sampler
        self._generator = loader.generator
        self._num_workers = loader.num_workers
        self._stream = loader._stream_source() if loader._options.is_iterable else None
        self._every = loader._steps_per_state
        self._is_new = base_seed is None
        self.base_seed = base_seed or 0
        self._saved = saved
        self._num_drawn = 0  # batches
        # By the number of batches drawn, as of the last state that may be asked for.
        self._states: deque[tuple[int, dict[str, Any]]] = deque()

    def begin(self, epoch: int, progress: Progress) -> Iterator[object]:
        """Return the indices of the batches that are not given; `progress` gets what was."""
        progress.draws, saved, sampler = self, self._saved, self._sampler
        self._progress = progress
        if saved is not None:
            progress.counted = progress.handed_out = saved.given
        indices = iter(sampler) if self._stream is None else self._stream.begin(epoch, progress)
        if self._is_new:  # torchdata draws the seed here, and with workers asks once more
            number = torch.empty((), dtype=torch.int64).random_(generator=self._generator)
            self.base_seed = int(number)
            if self._num_workers and self._stream is None:
                indices = iter(sampler)
        if saved is not None:
            self._num_drawn = saved.given.num_steps
            if saved.base_seed is not None:
                self.base_seed = saved.base_seed
            if self._stream is None:
                indices = self._resumed(indices, saved.sampler)
        self._indices = indices
        if self._num_workers:
            # Not those of now, after a resume: a generator has not gone to its place yet.
            self._states.append((self._num_drawn, saved.sampler if saved else self._now()))
        return map(self._note, steps_of(indices))

    def _resumed(self, indices: Any, states: dict[str, Any]) -> Iterator[Any]:  # noqa: ANN401
        sampler = self._sampler
        if not (can_resume(sampler) or can_resume(indices)):
            return itertools.islice(sampler, self._num_drawn, None)
        load_state(sampler, states["_index_sampler_state"])
        indices = iter(sampler)
        load_state(indices, states["_sampler_iter_state"])
        return indices  # type: ignore[no-any-return]

    def _note(self, indices: object) -> object:
        """Keep the states after a draw, if the loader's may be taken there."""
        self._num_drawn += 1
        if self._num_workers and self._every and self._num_drawn % self._every == 0:
            self._states.append((self._num_drawn, self._now()))
            num_given = self._progress.given.num_steps
            while len(self._states) > 1 and self._states[1][0] <= num_given:
                self._states.popleft()
        return mark_user_array(indices)

    def _now(self) -> dict[str, Any]:
        is_drawn = self._stream is None
        return {
            "_index_sampler_state": state_of(self._sampler) if is_drawn else None,
            "_sampler_iter_state": state_of(self._indices) if is_drawn else None,
            "_sampler_iter_yielded": self._num_drawn,
        }

    def states_at(self, num_steps: int) -> dict[str, Any]:
        """Return the states of the sampler and its iterator after a number of steps."""
        if self._stream is not None:
            return {**self._now(), "_sampler_iter_yielded": num_steps}
        if not self._num_workers:
            return self._now()
        return [states for number, states in self._states if number <= num_steps][-1]
