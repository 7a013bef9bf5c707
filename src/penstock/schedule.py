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
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from penstock.data.dataset import can_resume, is_current
from penstock.engine.epoch import Epoch, Progress, Share
from penstock.engine.plan import Placed, as_given
from penstock.errors import StateError
from penstock.randomness.guarded import GuardedIterator, guarded_draws
from penstock.randomness.keys import Purpose, checked_count, seed_sequence
from penstock.ranks import Rank, current_rank
from penstock.sampling.samplers import BatchSampler, IndexSampler, batches_of, digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.sampling.samplers import Indices

__all__ = [
    "Description",
    "EpochIterator",
    "IndexSource",
    "Schedule",
    "SeededIndices",
    "StreamSource",
    "check_stream",
    "length_of",
    "worker_base_seed",
]

_FORMAT: Final = 1
_SKIPPED_AT_A_TIME: Final = 1024


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

    def sampler_epoch(self) -> int | None:
        """Return the epoch that the sampler was told, if it tells; None if it does not matter."""

    def draws(self) -> Any:  # noqa: ANN401 - the loader's own
        """Return what the draws of the next epoch depend on; None if the seed decides them."""


class SeededIndices:
    """The indices of a seeded loader, each epoch's by itself.

    An `IndexSampler` gives its order by position, so that batch k costs the same wherever one
    begins. Any other sampler is iterated from the start, with the global generators seeded from
    (seed, epoch) while it draws, and put back after.
    """

    def __init__(
        self,
        sampler: Any,  # noqa: ANN401
        batch_sampler: Any,  # noqa: ANN401
        seed: int,
        given: tuple[Any, ...] = (),
    ) -> None:
        """Look at how the samplers can be read.

        Args:
            sampler: Yields indices.
            batch_sampler: Yields batches of indices; None if samples come as they are.
            seed: Of the loader.
            given: The user's samplers, where those above stand for them.
        """
        self._given = _with_inner(*given) or _with_inner(sampler, batch_sampler)
        self._outer = sampler if batch_sampler is None else batch_sampler
        self._is_batched = batch_sampler is not None
        self._parts = _with_inner(sampler, batch_sampler)
        self._seed = seed
        self._order: IndexSampler | None = None
        self._batch_size: int | None = None
        self._drop_last = False
        self._described = self._outer
        inner = sampler
        if isinstance(batch_sampler, BatchSampler) and is_current(
            type(batch_sampler), "index_batches", ("__iter__",)
        ):
            inner = batch_sampler.sampler
            self._batch_size = batch_sampler.batch_size
            self._drop_last = batch_sampler.drop_last
            self._described = inner
        elif batch_sampler is not None:
            return
        if isinstance(inner, IndexSampler) and is_current(type(inner), "indices", ("__iter__",)):
            self._order = inner

    def begin(self, epoch: int, progress: Progress) -> Iterator[object]:
        """Return an epoch's indices as `Placed`, from batch `progress.num_steps` on.

        The order is decided now, not when the first index is asked for: by then the sampler may
        have been told another epoch.
        """
        sequence = seed_sequence(self._seed, Purpose.ORDER, epoch)
        tellable = [p for p in self._parts if callable(getattr(p, "set_epoch", None))]
        if any(not isinstance(part, (IndexSampler, BatchSampler)) for part in tellable):
            with guarded_draws(self._outer, sequence):
                _tell(tellable, epoch)
        else:
            _tell(tellable, epoch)
        if self._order is not None:
            return self._by_position(self._order.indices(), progress.num_steps)
        drawn = GuardedIterator(self._outer, sequence)
        first = drawn.take(1)
        return self._one_by_one(first, drawn, progress.num_steps)

    def _by_position(self, order: Indices, first: int) -> Iterator[object]:
        assert self._order is not None
        rank, world_size = self._order.rank, self._order.world_size
        batches = batches_of(order, self._batch_size or 1, self._drop_last, first)
        for position, batch in batches:
            indices = int(batch[0]) if self._batch_size is None else batch
            yield Placed(indices, position * world_size + rank, world_size)

    def _one_by_one(
        self, first: list[Any], drawn: GuardedIterator, num_skipped: int
    ) -> Iterator[object]:
        rank, world_size = self._rank()
        position = rank
        step = 0
        while first:
            for indices in first:
                if step >= num_skipped:
                    yield Placed(as_given(indices), position, world_size)
                position += (_length(indices) if self._is_batched else 1) * world_size
                step += 1
            # What is skipped is drawn many at a time: to exchange the generators takes 0.2 ms.
            first = drawn.take(min(max(num_skipped - step, 1), _SKIPPED_AT_A_TIME))

    def _rank(self) -> tuple[int, int]:
        """Which share of a global order a sampler yields that we know nothing of."""
        for part in self._parts:
            rank, world_size = getattr(part, "rank", None), getattr(part, "num_replicas", None)
            if isinstance(rank, int) and isinstance(world_size, int):
                return rank, world_size
        if current_rank().world_size > 1:
            warnings.warn(
                f"{type(self._outer).__name__} does not say which rank's share it yields, so all "
                "ranks draw the same random numbers for their samples. If each rank has a share "
                "of its own, give the sampler attributes `rank` and `num_replicas`, or wrap one "
                "that yields all in penstock.sampling.DistributedSampler.",
                stacklevel=2,
            )
        return 0, 1

    def describe(self) -> Description:
        """Return what the order depends on besides the loader's seed."""
        size = self._batch_size
        world_size = self._parts_world_size()
        settings: dict[str, Any] = {"sampler": _kinds(self._described)}
        if not self._is_batched or size is not None:
            settings["global_batch_size"] = (size or 1) * world_size
            settings["drop_last"] = self._drop_last
        return Description(settings, self._samples_in)

    def _parts_world_size(self) -> int:
        return 1 if self._order is None else self._order.world_size

    def _samples_in(self, num_batches: int) -> int | None:
        if self._order is None:
            return None
        all_batches = num_batches * (self._batch_size or 1) * self._order.world_size
        return min(all_batches, self._order.total_size)

    def sampler_epoch(self) -> int | None:
        """Return the epoch that the innermost sampler was told, if it tells."""
        for part in reversed(self._given):
            epoch = getattr(part, "epoch", None)
            if isinstance(epoch, int) and callable(getattr(part, "set_epoch", None)):
                return epoch
        return None

    def draws(self) -> None:
        """Return None: the seed decides."""
        return


def _with_inner(*samplers: Any) -> list[Any]:  # noqa: ANN401
    """Samplers, and what they are made of, each once, from the outside in."""
    found: list[Any] = []
    waiting = [sampler for sampler in samplers if sampler is not None]
    while waiting:
        part = waiting.pop(0)
        if any(part is known for known in found):
            continue
        found.append(part)
        inner = (getattr(part, name, None) for name in ("batch_sampler", "sampler"))
        waiting += [sampler for sampler in inner if sampler is not None]
    return found


def _tell(samplers: list[Any], epoch: int) -> None:
    for sampler in samplers:
        sampler.set_epoch(epoch)


def _kinds(sampler: Any) -> dict[str, Any]:  # noqa: ANN401
    """What can be said of a sampler that has no `settings`, and of what it is made of."""
    if isinstance(sampler, IndexSampler):
        return sampler.settings()
    settings: dict[str, Any] = {"kind": type(sampler).__name__, "length": _length(sampler, None)}
    if isinstance(sampler, (list, tuple, range, np.ndarray)):
        settings["indices"] = _digest_of(sampler)
    for name in ("batch_size", "drop_last"):
        if isinstance(value := getattr(sampler, name, None), int):
            settings[name] = value
    inner = getattr(sampler, "sampler", getattr(sampler, "batch_sampler", None))
    return settings if inner is None else {**settings, "of": _kinds(inner)}


def _digest_of(indices: Any) -> str | None:  # noqa: ANN401 - a sequence
    try:
        return digest(np.asarray(indices, np.int64))
    except (TypeError, ValueError, OverflowError):  # keys, or batches of different lengths
        return digest(np.frombuffer(repr(indices).encode(), np.uint8))


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
        self, batch_size: int | None, *, drop_last: bool, num_workers: int, rank: Rank
    ) -> None:
        """Note what the shares of the workers depend on."""
        self._batch_size = batch_size
        self._settings = {
            "batch_size": batch_size,
            "drop_last": drop_last,
            "num_workers": max(num_workers, 1),
            "rank": rank.rank,
            "world_size": rank.world_size,
        }

    def begin(self, epoch: int, progress: Progress) -> Iterator[object]:
        """Return as many batches of nothing as anybody asks for."""
        return itertools.repeat(None if self._batch_size is None else [None] * self._batch_size)

    def describe(self) -> Description:
        """Return what the shares of the workers depend on."""
        # The last batch of each worker may be shorter, so nobody knows the number of samples.
        return Description(self._settings, lambda num_batches: None)

    def sampler_epoch(self) -> None:
        """Return None: there is no sampler."""
        return

    def draws(self) -> None:
        """Return None: the seed decides."""
        return


def check_stream(dataset: object, state: Mapping[str, Any]) -> None:
    """Say whether a stream can begin where it was, before its state is loaded.

    Raises:
        StateError: the state holds the dataset's, and the dataset has no `load_state_dict`.
    """
    shares = [Share.from_json(fields) for fields in state.get("shares", {}).values()]
    kind = type(dataset).__name__
    if any(share.state is not None for share in shares) and not can_resume(dataset):
        raise StateError(
            f"the state holds the place of a dataset that has load_state_dict(state), but {kind} "
            "has not: the classes differ"
        )
    num_batches = sum(share.num_batches for share in shares if share.state is None)
    if num_batches:
        warnings.warn(
            f"{kind} has no state_dict() and load_state_dict(state), so the {num_batches} batches "
            "that were given before are read once more and dropped. With these two methods, which "
            "return and take a position as JSON has it, iter() can begin there.",
            stacklevel=4,
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
        self._is_chosen = False  # whether the user has said so
        self._sampler_epoch: int | None = 0  # what the sampler was told last
        self._resumed: Progress | None = None  # how much of `_next_epoch` was given already
        self._current: tuple[int, Progress] | None = None  # the epoch begun last
        self._description: Description | None = None  # of it; made when it is asked for
        self._running: list[tuple[weakref.ref[Any], Progress]] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return all but what runs: a loader is pickled as a recipe, not as a running stream."""
        return {**self.__dict__, "_current": None, "_description": None, "_running": []}

    def next(self, source: IndexSource) -> Epoch:
        """Return the next epoch, or the rest of the one whose state was loaded."""
        told = source.sampler_epoch()
        if told is not None and told != self._sampler_epoch and not self._is_chosen:
            self.set_epoch(told)  # as loops do that were written for torch: sampler.set_epoch(e)
        progress = self._resumed or Progress()
        number = self._next_epoch
        indices = source.begin(number, progress)
        is_announced = self._seed is not None or self._is_chosen
        return Epoch(number, indices, progress, is_announced)

    def begin(self, epoch: Epoch, iterator: object, source: IndexSource | None = None) -> None:
        """Note that workers have begun an epoch, and by which iterator the user gets it."""
        self._running = [(ref, progress) for ref, progress in self._running if ref() is not None]
        self._running.append((weakref.ref(iterator), epoch.progress))
        if source is not None:
            self._current = epoch.number, epoch.progress
            self._next_epoch = epoch.number + 1
            self._sampler_epoch = source.sampler_epoch()
            self._is_chosen = False
            self._resumed = self._description = None

    def forget(self, iterator: object) -> None:
        """Take `iterator` for ended: nobody can ask it for more."""
        self._running = [(ref, given) for ref, given in self._running if ref() is not iterator]

    @property
    def _is_running(self) -> bool:
        return any(
            ref() is not None and not progress.is_over and not progress.is_closed
            for ref, progress in self._running
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the next epoch. The rest of an epoch to be resumed is kept if it is that one."""
        epoch = checked_count("epoch", epoch)
        if self._resumed is not None and epoch != self._next_epoch:
            warnings.warn(
                f"epoch {epoch} was chosen, which drops the state that was loaded: it was in epoch "
                f"{self._next_epoch}, with {self._resumed.num_steps} batches given. Begin the loop "
                "over epochs there: `for epoch in range(loader.epoch, num_epochs)`.",
                stacklevel=3,
            )
            self._resumed = None
        self._next_epoch = epoch
        self._is_chosen = True
        if not self._is_running:
            self._current = None

    @property
    def epoch(self) -> int:
        """The epoch that is under way; between two, the next one."""
        return self._standing()[0]

    def _standing(self) -> tuple[int, Progress]:
        if self._current is not None and not self._current[1].is_over:
            return self._current
        return self._next_epoch, self._resumed or Progress()

    def state_dict(self, source: Callable[[], IndexSource], length: int | None) -> dict[str, Any]:
        """Return where the user is, as JSON has it.

        Args:
            source: Gives the source of the indices; what it says is kept until another epoch
                begins.
            length: Of the dataset; None if it has none.
        """
        epoch, progress = self._standing()
        if self._description is None:
            self._description = source().describe()
        settings, samples_in = self._description
        state: dict[str, Any] = {
            "format": _FORMAT,
            "seed": self._seed,
            "epoch": epoch,
            "batches": progress.num_steps,
            "samples": samples_in(progress.num_steps),
        }
        draws = progress.draws
        if draws is None and self._seed is None:
            draws = source().draws()
        if draws is not None:
            state["draws"] = draws if isinstance(draws, dict) else draws.to_json()
        if progress.ahead:
            state["ahead"] = _as_ranges(progress.ahead)
        if progress.shares:
            state["turn"] = progress.turn
            state["shares"] = {str(id_): share.to_json() for id_, share in progress.shares.items()}
        state["fingerprint"] = {"length": length, **copy.deepcopy(settings)}
        return state

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        source: IndexSource,
        length: int | None,
        check: Callable[[Mapping[str, Any]], object],
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
        number, progress, seed, saved = _parsed(state)
        differences = [] if seed == self._seed else _differences(seed, self._seed, "seed")
        if not differences:
            differences = _differences(saved, {"length": length, **source.describe().settings})
        if differences:
            raise StateError(
                "this state was saved by a loader that orders its samples otherwise: "
                + "; ".join(differences)
                + ". Make the loader as it was, or begin a new epoch without the state"
            )
        check(state)
        self._next_epoch = number
        self._is_chosen = False
        self._resumed = progress
        self._current = self._description = None


def _parsed(state: Any) -> tuple[int, Progress, int | None, dict[str, Any]]:  # noqa: ANN401
    """Return the epoch, what was given of it, the seed and the fingerprint."""
    if not isinstance(state, Mapping) or "format" not in state:
        raise StateError(
            f"this is not a state of a Penstock loader: {repr(state)[:200]}. Give the dict that "
            "state_dict() returned (json.loads makes it of JSON)"
        )
    if state["format"] != _FORMAT:
        raise StateError(
            f"this state has format {state['format']!r}; this version of Penstock reads format "
            f"{_FORMAT}"
        )
    try:
        progress = Progress(
            checked_count("batches", state["batches"]),
            {s for start, stop in state.get("ahead", ()) for s in range(start, stop)},
            {int(id_): Share.from_json(s) for id_, s in state.get("shares", {}).items()},
            checked_count("turn", state.get("turn", 0)),
            draws=dict(state["draws"]) if "draws" in state else None,
        )
        epoch = checked_count("epoch", state["epoch"])
        return epoch, progress, state["seed"], dict(state["fingerprint"])
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
