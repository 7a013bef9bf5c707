# SPDX-License-Identifier: Apache-2.0
"""Which epoch a loader is in, how much of it the user has been given, and how to go on from there.

The state of a seeded loader is three numbers (seed, epoch, batches given) and a fingerprint of what
they were counted with. Nothing of it grows with the dataset, and nothing needs a worker.
"""

from __future__ import annotations

import copy
import itertools
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from penstock.data.dataset import is_current
from penstock.engine.epoch import Epoch, Progress, Share
from penstock.engine.plan import Placed, as_given
from penstock.errors import StateError
from penstock.randomness.guarded import GuardedIterator
from penstock.randomness.keys import Purpose, checked_count, seed_sequence
from penstock.sampling.samplers import BatchSampler, IndexSampler, batches_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = [
    "Description",
    "EpochIterator",
    "IndexSource",
    "Schedule",
    "SeededIndices",
    "StreamSource",
    "length_of",
    "warn_of_replay",
    "worker_base_seed",
]

_FORMAT: Final = 1


def worker_base_seed(seed: int) -> int:
    """Return the seed that workers of a seeded loader begin with, worker w with this plus w."""
    words = seed_sequence(seed, Purpose.WORKERS).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


class Description(NamedTuple):
    """What an order depends on.

    Attributes:
        settings: As JSON has it.
        samples_in: How many samples a number of batches hold, over all ranks; None if not known.
    """

    settings: dict[str, Any]
    samples_in: Callable[[int], int | None]


class IndexSource(Protocol):
    """Gives the indices of a loader's next epoch."""

    def begin(self, epoch: int, progress: Progress) -> Iterator[object]:
        """Return the indices of an epoch's batches, from batch `progress.num_steps` on."""

    def describe(self) -> Description:
        """Return what the order depends on, besides the loader's seed."""


class SeededIndices:
    """The indices of a seeded loader, each epoch's by itself.

    An `IndexSampler` gives its order by position, so that batch k costs the same wherever one
    begins. Any other sampler is iterated from the start, with the global generators seeded from
    (seed, epoch) while it draws, and put back after.
    """

    def __init__(self, sampler: Any, batch_sampler: Any, seed: int) -> None:  # noqa: ANN401
        """Look at how the samplers can be read.

        Args:
            sampler: Yields indices.
            batch_sampler: Yields batches of indices; None if samples come as they are.
            seed: Of the loader.
        """
        self._sampler = sampler
        self._batch_sampler = batch_sampler
        self._seed = seed
        self._order: IndexSampler | None = None
        self._batch_size: int | None = None
        self._drop_last = False
        inner = sampler
        if isinstance(batch_sampler, BatchSampler) and is_current(
            type(batch_sampler), "index_batches", ("__iter__",)
        ):
            inner = batch_sampler.sampler
            self._batch_size = batch_sampler.batch_size
            self._drop_last = batch_sampler.drop_last
        elif batch_sampler is not None:
            return
        if isinstance(inner, IndexSampler) and is_current(type(inner), "indices", ("__iter__",)):
            self._order = inner

    def begin(self, epoch: int, progress: Progress) -> Iterator[object]:
        """Return an epoch's indices as `Placed`, from batch `progress.num_steps` on."""
        for part in (self._sampler, self._batch_sampler):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        if self._order is not None:
            return self._by_position(progress.num_steps)
        return self._one_by_one(epoch, progress.num_steps)

    def _by_position(self, first: int) -> Iterator[object]:
        assert self._order is not None
        rank, world_size = self._order.rank, self._order.world_size
        batches = batches_of(self._order.indices(), self._batch_size or 1, self._drop_last, first)
        for position, batch in batches:
            indices = int(batch[0]) if self._batch_size is None else batch
            yield Placed(indices, position * world_size + rank, world_size)

    def _one_by_one(self, epoch: int, first: int) -> Iterator[object]:
        outer = self._sampler if self._batch_sampler is None else self._batch_sampler
        drawn = GuardedIterator(outer, seed_sequence(self._seed, Purpose.ORDER, epoch))
        rank, world_size = getattr(outer, "rank", None), getattr(outer, "num_replicas", None)
        if not isinstance(rank, int) or not isinstance(world_size, int):
            rank, world_size = 0, 1
        position = rank
        for step, indices in enumerate(drawn):
            if step >= first:
                yield Placed(as_given(indices), position, world_size)
            count = 1 if self._batch_sampler is None else _length(indices)
            position += count * world_size

    def describe(self) -> Description:
        """Return what the order depends on besides the loader's seed."""
        return Description(self._settings(), self._samples_in)

    def _settings(self) -> dict[str, Any]:
        outer = self._sampler if self._batch_sampler is None else self._batch_sampler
        if self._order is None:
            return {"sampler": {"kind": type(outer).__name__}, "num_batches": _length(outer, None)}
        size = self._batch_size
        return {
            "sampler": self._order.settings(),
            "global_batch_size": None if size is None else size * self._order.world_size,
            "drop_last": self._drop_last,
        }

    def _samples_in(self, num_batches: int) -> int | None:
        if self._order is None:
            return None
        world_size = self._order.world_size
        return min(num_batches * (self._batch_size or 1), len(self._order)) * world_size


def length_of(dataset: Any) -> int | None:  # noqa: ANN401
    """Return a dataset's length, or None if it has none."""
    length: int | None = _length(dataset, None)
    return length


def _length(value: Any, unknown: Any = 1) -> Any:  # noqa: ANN401
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return unknown


class StreamSource:
    """Stands for the indices of an iterable dataset, of which only the numbers count."""

    def __init__(
        self, batch_size: int | None, *, drop_last: bool, num_workers: int, world_size: int
    ) -> None:
        """Note what the shares of the workers depend on."""
        self._batch_size = batch_size
        self._settings = {
            "batch_size": batch_size,
            "drop_last": drop_last,
            "num_workers": max(num_workers, 1),
            "world_size": world_size,
        }

    def begin(self, epoch: int, progress: Progress) -> Iterator[object]:
        """Return as many batches of nothing as anybody asks for."""
        return itertools.repeat(None if self._batch_size is None else [None] * self._batch_size)

    def describe(self) -> Description:
        """Return what the shares of the workers depend on."""
        # The last batch of each worker may be shorter, so nobody knows the number of samples.
        return Description(self._settings, lambda num_batches: None)


def warn_of_replay(dataset: object, state: Mapping[str, Any]) -> None:
    """Say that a stream has to be read again from its start, if so, and how to avoid it."""
    shares = [Share.from_json(fields) for fields in state.get("shares", {}).values()]
    num_batches = sum(share.num_batches for share in shares if share.state is None)
    if num_batches == 0:
        return
    kind = type(dataset).__name__
    warnings.warn(
        f"{kind} has no state_dict() and load_state_dict(state), so the {num_batches} batches that "
        "were given before are read once more and dropped. With these two methods, which return "
        "and take a position as JSON has it, iter() can begin there.",
        stacklevel=3,
    )


class EpochIterator:
    """The user's iterator over one epoch of a stream that lives on.

    It ends when the epoch does, also by the beginning of another.
    """

    def __init__(self, stream: Any) -> None:  # noqa: ANN401 - has `epoch` and `__next__`
        """Iterate the epoch that `stream` has begun last."""
        self._stream = stream
        self.epoch: Epoch = stream.epoch

    def __iter__(self) -> EpochIterator:
        """Return itself."""
        return self

    def __next__(self) -> Any:  # noqa: ANN401 - any batch tree
        """Return the next batch."""
        if self._stream.epoch is not self.epoch:
            raise StopIteration
        return next(self._stream)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return len(self._stream)

    def close(self) -> None:
        """Stop the workers now; the next epoch starts new ones."""
        self._stream.close()


class Schedule:
    """Epochs of one loader: which comes next, and what was given of the last one begun.

    Concurrency:
        One thread.
    """

    def __init__(self, seed: int | None) -> None:
        """Begin before epoch 0.

        Args:
            seed: Of the loader; None if it has none.

        Raises:
            ConfigError: a negative seed.
            TypeError: a seed that is no integer.
        """
        self._seed = None if seed is None else checked_count("seed", seed)
        self._next_epoch = 0
        self._resumed: Progress | None = None  # how much of `_next_epoch` was given already
        self._is_announced = seed is not None
        self._current: Epoch | None = None
        self._described: Description | None = None  # of the current epoch, once it was asked for
        self._iterator: weakref.ref[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return all but what runs: a loader is pickled as a recipe, not as a running stream."""
        return {**self.__dict__, "_current": None, "_described": None, "_iterator": None}

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that the next iterator begins."""
        return self._next_epoch

    def next(self, source: IndexSource) -> Epoch:
        """Return the next epoch, or the rest of the one whose state was loaded."""
        progress = self._resumed or Progress()
        number = self._next_epoch
        return Epoch(number, source.begin(number, progress), progress, self._is_announced)

    def begin(self, epoch: Epoch, iterator: object) -> None:
        """Note that workers have begun an epoch, and by which iterator the user gets it."""
        if epoch is not self._current:
            self._current = epoch
            self._next_epoch = epoch.number + 1
            self._resumed = self._described = None
        self._iterator = weakref.ref(iterator)

    @property
    def _is_running(self) -> bool:
        return (
            self._current is not None
            and not self._current.progress.is_over
            and not self._current.progress.is_closed
            and self._iterator is not None
            and self._iterator() is not None
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the next epoch. The rest of an epoch to be resumed is kept if it is that one."""
        epoch = checked_count("epoch", epoch)
        if self._resumed is not None and epoch != self._next_epoch:
            warnings.warn(
                f"set_epoch({epoch}) drops the state that was loaded: it was in epoch "
                f"{self._next_epoch}, with {self._resumed.num_steps} batches given. Begin the loop "
                "over epochs there: `for epoch in range(loader.epoch, num_epochs)`.",
                stacklevel=3,
            )
        if epoch != self._next_epoch:
            self._resumed = None
        self._next_epoch = epoch
        self._is_announced = True
        if not self._is_running:
            self._current = None

    @property
    def epoch(self) -> int:
        """The epoch that is under way; between two, the next one."""
        return self._standing()[0]

    def _standing(self) -> tuple[int, Progress]:
        if self._current is not None and not self._current.progress.is_over:
            return self._current.number, self._current.progress
        return self._next_epoch, self._resumed or Progress()

    def state_dict(self, source: Callable[[], IndexSource], length: int | None) -> dict[str, Any]:
        """Return where the user is, as JSON has it.

        Args:
            source: Gives the source of the indices; asked once per epoch.
            length: Of the dataset; None if it has none.
        """
        epoch, progress = self._standing()
        if self._described is None or self._current is None or self._current.progress.is_over:
            self._described = source().describe()
        settings, samples_in = self._described
        state: dict[str, Any] = {
            "format": _FORMAT,
            "seed": self._seed,
            "epoch": epoch,
            "batches": progress.num_steps,
            "samples": samples_in(progress.num_steps),
        }
        if progress.draws is not None:
            state["draws"] = dict(progress.draws)
        if progress.ahead:
            state["ahead"] = _as_ranges(progress.ahead)
        if progress.shares:
            state["turn"] = progress.turn
            state["shares"] = {str(id_): share.to_json() for id_, share in progress.shares.items()}
        state["fingerprint"] = {"length": length, **copy.deepcopy(settings)}
        return state

    def load_state_dict(
        self, state: Mapping[str, Any], source: IndexSource, length: int | None
    ) -> None:
        """Let the next iterator go on where `state` was saved.

        Raises:
            StateError: an iterator is running, or the state is not of such a loader.
        """
        if self._is_running:
            raise StateError(
                "a state was loaded while an iterator of this loader is running (epoch "
                f"{self.epoch}): it would go on as before. Load the state before iter(loader), or "
                "once the epoch is over, or the iterator is deleted or closed"
            )
        number, progress, saved = _parsed(state)
        here = {"seed": self._seed, "length": length, **source.describe().settings}
        differences = _differences(saved, here)
        if differences:
            raise StateError(
                "this state was saved by a loader that orders its samples otherwise: "
                + "; ".join(differences)
                + ". Make the loader as it was, or begin a new epoch without the state"
            )
        self._next_epoch = number
        self._resumed = progress
        self._current = None


def _parsed(state: Mapping[str, Any]) -> tuple[int, Progress, dict[str, Any]]:
    """Return the epoch, what was given of it, and the fingerprint with the seed."""
    try:
        if state["format"] != _FORMAT:
            raise StateError(
                f"this state has format {state['format']!r}; this version of Penstock reads "
                f"format {_FORMAT}"
            )
        progress = Progress(
            checked_count("batches", state["batches"]),
            {s for start, stop in state.get("ahead", ()) for s in range(start, stop)},
            {int(id_): Share.from_json(s) for id_, s in state.get("shares", {}).items()},
            checked_count("turn", state.get("turn", 0)),
            draws=dict(state["draws"]) if "draws" in state else None,
        )
        fingerprint = {"seed": state["seed"], **state["fingerprint"]}
        return checked_count("epoch", state["epoch"]), progress, fingerprint
    except StateError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(
            f"this is not a state of a Penstock loader: {type(error).__name__}: {error}"
        ) from error


def _as_ranges(steps: set[int]) -> list[list[int]]:
    ranges: list[list[int]] = []
    for step in sorted(steps):
        if ranges and ranges[-1][1] == step:
            ranges[-1][1] = step + 1
        else:
            ranges.append([step, step + 1])
    return ranges


def _differences(saved: Any, here: Any, name: str = "") -> list[str]:  # noqa: ANN401
    if isinstance(saved, dict) and isinstance(here, dict):
        found = []
        for key in sorted({*saved, *here}):
            inner = f"{name}.{key}" if name else key
            found += _differences(saved.get(key), here.get(key), inner)
        return found
    return [] if saved == here else [f"{name} is {saved!r} in the state and {here!r} here"]
