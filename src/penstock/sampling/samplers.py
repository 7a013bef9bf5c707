# SPDX-License-Identifier: Apache-2.0
"""Samplers of indices and of batches: each order is a pure function of (seed, epoch).

A long order is computed where it is asked for; Python integers are made a few thousand at a time.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, Protocol, TypeVar, cast

import numpy as np

from penstock.data.dataset import is_current, length_of
from penstock.errors import ConfigError, StateError
from penstock.randomness.keys import Purpose, checked_count, checked_epoch, seed_sequence
from penstock.sampling.permutation import Permutation
from penstock.summary import Summarized

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized

    from numpy.typing import ArrayLike, NDArray

_FORMAT: Final = 1


@dataclass(slots=True)
class SamplerPosition:
    """Position of one iterator of a sampler."""

    epoch: int | None  # of its order; None if the sampler has none
    given: int = 0  # items of it
    # Of the sampler when it was first asked for them: a digest of many samples takes a while, and
    # some loaders ask for a state with every batch.
    settings: dict[str, Any] | None = None
    is_begun: bool = False  # whether an item was asked for

    def begin(self, epoch: int | None) -> None:
        """Note that the first item is asked for, in an epoch that may be another by now."""
        if epoch != self.epoch:
            self.epoch, self.given = epoch, 0
        self.is_begun = True


class Resumable:
    """What gives the items of an epoch by number, and can begin with any of them.

    Subclasses iterate from `_next_place()` and count there what they give.
    """

    _place: SamplerPosition | None = None  # of the iterator made last, or loaded

    def _num_shares(self) -> int:
        """Items given by all ranks together for one of this rank, as positions count them."""
        return 1

    def settings(self) -> dict[str, Any]:
        """Return what the items depend on, as JSON has it."""
        raise NotImplementedError(f"{type(self).__name__} must define settings().")

    def state_dict(self) -> dict[str, Any]:
        """Return how far the iterator made last has come, as JSON has it; below 1 KB.

        "position" in it counts what was given: indices of all ranks together, or batches. A
        Penstock loader has a state of its own, of what the loop was given.

        Example:
            >>> from penstock.sampling import RandomSampler
            >>> sampler = RandomSampler(range(5), seed=7)
            >>> indices = iter(sampler)
            >>> first = next(indices), next(indices)
            >>> again = RandomSampler(range(5), seed=7)
            >>> again.load_state_dict(sampler.state_dict())
            >>> list(again) == list(indices), len(list(again))
            (True, 5)
        """
        if (counter := self._counter()) is not self:
            return counter.state_dict()
        epoch, place = getattr(self, "epoch", None), self._place
        if place is None or place.epoch != epoch:
            place = SamplerPosition(epoch)
        if place.settings is None:
            place.settings = self.settings()
        return {
            "format": _FORMAT,
            "epoch": epoch,
            "position": place.given * self._num_shares(),
            "fingerprint": copy.deepcopy(place.settings),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next `iter()` begin where `state` was saved, in its epoch; later ones do not.

        The state of any rank will do, and of another number of ranks; but with `pad="none"`, where
        a rank may be at its end before others are, that of each rank by itself. Choosing another
        epoch drops it.

        Raises:
            StateError: the state is of another sampler, or one with other settings; the message
                says what differs.
        """
        if (counter := self._counter()) is not self:
            counter.load_state_dict(state)
            return
        epoch, position, saved = _parsed(state)
        now = self.settings()
        found = differences(unchanged(saved), unchanged(now))
        if isinstance(self, IndexSampler) and not found:
            self.adopt(saved, (epoch or 0) * self.total_size + position)
        if found := found or differences(saved, now):
            raise StateError(
                f"this state was saved by a sampler with another order than this "
                f"{type(self).__name__}: " + "; ".join(found) + ". Make the sampler as it was, or "
                "begin a new epoch without the state"
            )
        given = self._given_of(position)
        if epoch is not None:
            self.set_epoch(epoch)
        self._place = SamplerPosition(epoch, given)

    def forget_state(self) -> None:
        """Let the next `iter()` begin with the first item, whatever state was loaded."""
        self._counter()._place = None

    def _counter(self) -> Resumable:
        """Return what counts the items that are given: this, or the sampler inside."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; subclasses define it."""

    def _num_items(self) -> int:
        """Items of all ranks in an epoch, without those that are given twice to make it even."""
        return len(self)  # type: ignore[arg-type]

    def _given_of(self, position: int) -> int:
        """Return this rank's part of what all have given."""
        if (shares := self._num_shares()) == 1:
            return position
        if position >= self._num_items():
            return len(self)  # type: ignore[arg-type]
        given, rest = divmod(position, shares)
        if rest:
            raise StateError(
                f"this state was saved after {position} indices of all ranks together, which "
                f"{shares} ranks cannot have given alike: {position} is no multiple of {shares}. "
                f"Resume with a number of ranks that divides {position}"
            )
        return given

    def _next_place(self) -> SamplerPosition:
        """Return where a new iterator begins: where one was loaded that is not used yet."""
        last, place = self._place, SamplerPosition(getattr(self, "epoch", None))
        if last is not None and not last.is_begun and last.epoch == place.epoch:
            place.given = last.given
            # Some loaders make an iterator and drop it for another before the first item: the place
            # is handed on until one is used. But of an epoch that is over, a first iterator without
            # items is all there is to come: the next one is of a new epoch.
            length = length_of(self)
            place.is_begun = length is not None and 0 < place.given >= length
        self._place = place
        return place


def differences(saved: Any, here: Any, name: str = "") -> list[str]:  # noqa: ANN401
    """Return a sentence for each value that differs in two trees; of another "kind" that alone."""
    if isinstance(saved, dict) and isinstance(here, dict):
        found: list[str] = []
        of_kind = saved.get("kind") != here.get("kind") and {"kind"} <= saved.keys() & here.keys()
        for key in ["kind"] if of_kind else sorted({*saved, *here}, key=str):
            inner = f"{name}.{key}" if name else key
            found += differences(saved.get(key), here.get(key), inner)
        return found
    return [] if saved == here else [f"{name} is {saved!r} in the state and {here!r} here"]


def unchanged(settings: Any) -> Any:  # noqa: ANN401
    """Return a sampler's settings without its "changes", which may come while a run lasts."""
    if not isinstance(settings, dict):
        return settings
    return {key: unchanged(value) for key, value in settings.items() if key != "changes"}


def _parsed(state: Any) -> tuple[int | None, int, dict[str, Any]]:  # noqa: ANN401
    """Return the epoch, the position and the fingerprint."""
    try:
        if state["format"] != _FORMAT:
            raise ValueError(f"format {state['format']!r} where {_FORMAT} is read")
        epoch = None if state["epoch"] is None else checked_epoch(state["epoch"])
        return epoch, checked_count("position", state["position"]), dict(state["fingerprint"])
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(
            f"this is not a state of a sampler ({type(error).__name__}: {error}): "
            f"{repr(state)[:200]}. Give the dict that the sampler's state_dict() returned; the "
            "state of a loader goes to the loader's load_state_dict()"
        ) from error


T_co = TypeVar("T_co", covariant=True)

# Python integers made at a time: 4096 of them are 150 KB, and numpy's cost per call is gone.
_CHUNK: Final = 4096
# Orders of more indices than this (8 MiB of them) are computed, not stored, where that is possible.
LONGEST_STORED: Final = 1 << 20


class Indices(Protocol):
    """An order: an int64 array, or what is indexed like one without being stored."""

    def __len__(self) -> int:
        """Return the number of indices."""

    def __getitem__(self, which: slice | NDArray[np.int64], /) -> NDArray[np.int64]:
        """Return the indices at some positions, counted from 0."""


class Sampler(Summarized, Generic[T_co]):
    """Yields indices, or other keys, of samples; or lists of them.

    Subclasses define `__iter__`, and `__len__` where the number is known.
    """

    # No default `__len__`: `len()` and `list()` must see that there is none.

    def __iter__(self) -> Iterator[T_co]:
        """Begin an epoch; subclasses define it."""
        raise NotImplementedError(f"{type(self).__name__} is a Sampler and must define __iter__().")


class IndexSampler(Resumable, Sampler[int]):
    """A sampler whose order is one array, decided by (seed, epoch).

    Subclasses define `indices` and `__len__`, and `settings` if they have any.

    Attributes:
        seed: As given; else that of the seeded loader that it is used in, and 0 without one.
        epoch: 0, until `set_epoch`.
        rank: Which share of a global order it yields.
        num_replicas: Number of those shares, `world_size` as well: index p of this one is
            p * num_replicas + rank there.
    """

    _shows: ClassVar[tuple[str, ...]] = ("length", "seed", "epoch")

    rank: int = 0
    num_replicas: int = 1
    #: How often `set_epoch` was called: a loader sees by it that the user's loop has.
    times_notified: int = 0
    #: Samples of the dataset that it was made for, or None; loaders compare it.
    source_length: int | None = None
    _own_seed: int | None = None
    _taken_seed: int = 0  # set by itself, so that a `seed` that a subclass or a user sets shows

    @property
    def world_size(self) -> int:
        """Number of shares of the global order that this is one of."""
        return self.num_replicas

    @property
    def total_size(self) -> int:
        """Indices of all shares together, in an epoch, those included that come twice."""
        return len(self) * self.num_replicas

    def __len__(self) -> int:
        """Return the number of indices in an epoch."""
        return len(self.indices())

    def __init__(self, seed: int | None = None) -> None:
        """Begin at epoch 0.

        The seed is the same on all ranks that share an order. None: that of the loader.
        """
        self._own_seed = None if seed is None else checked_count("seed", seed)
        self.seed = self._own_seed or 0
        self.epoch = 0

    def take_seed(self, seed: int) -> None:
        """Order by the seed of a loader, unless the sampler was given one of its own."""
        if self._own_seed is None and getattr(self, "seed", 0) in (0, self._taken_seed):
            self.seed = self._taken_seed = seed

    def adopt(self, settings: Mapping[str, Any], num_drawn: int) -> None:
        """Change what may change while a run lasts to what it was when a state was saved.

        Args:
            settings: As `settings` returned them then.
            num_drawn: Indices that were drawn before, of all ranks and epochs.
        """

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next. It does not advance by itself."""
        self.epoch = checked_epoch(epoch)
        self.times_notified += 1

    def rng(self, *which: int) -> np.random.Generator:
        """Return a new generator, always the same for one seed and epoch, and for `which` of it."""
        sequence = seed_sequence(self.seed, Purpose.ORDER, self.epoch, *which)
        return np.random.Generator(np.random.Philox(sequence))

    def indices(self) -> Indices:
        """Return the current epoch's order: a fresh int64 array, or what is indexed like one."""
        raise NotImplementedError(f"{type(self).__name__} must define indices().")

    def settings(self) -> dict[str, Any]:
        """Return what the orders depend on, as JSON has it: part of a loader's fingerprint."""
        return {"kind": type(self).__name__, "length": len(self), "seed": self.seed}

    def __iter__(self) -> Iterator[int]:
        """Yield the order of the epoch that is current when the first index is asked for.

        After `load_state_dict`, only the rest of it.
        """
        return self._from(self._next_place())

    def _from(self, place: SamplerPosition) -> Iterator[int]:
        place.begin(self.epoch)
        order = self.indices()
        for start in range(place.given, len(order), _CHUNK):
            for index in order[start : start + _CHUNK].tolist():
                place.given += 1
                yield index

    def _num_shares(self) -> int:
        return self.world_size

    def _num_items(self) -> int:
        return self.total_size


def has_order(sampler: object) -> bool:
    """Return whether a sampler's order can be had without iterating."""
    return isinstance(sampler, IndexSampler) and is_current(type(sampler), "indices", ("__iter__",))


class CountedSampler(IndexSampler):
    """A sampler whose epoch has `num_samples` indices."""

    # Not in `IndexSampler`: a user's subclass may mean another number by that attribute.

    def __len__(self) -> int:
        """Return `num_samples`."""
        return self.num_samples  # type: ignore[attr-defined, no-any-return]


def check_bool(name: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} should be a boolean value, but got {name}={value!r}.")


def checked_positive(name: str, value: object) -> int:
    """Return a positive integer, numpy's too, as Python's; raise `ConfigError` for all else."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{name} should be a positive integer value, but got {name}={value!r}.")
    return int(value)  # of numpy's integers there would be no JSON


class SequentialSampler(IndexSampler):
    """Every index once, ascending, in every epoch.

    Example:
        >>> list(SequentialSampler("abc"))
        [0, 1, 2]
    """

    def __init__(self, data_source: Sized) -> None:
        """Number the samples of a data source, which has a length."""
        super().__init__()
        self.data_source = data_source

    def __len__(self) -> int:
        """Return the length of the data source."""
        return len(self.data_source)

    def indices(self) -> Indices:
        """Return 0, 1, 2 …: a fresh array, or one that is not stored if it were a long one."""
        return ComputedOrder(len(self.data_source)).stored()

    def settings(self) -> dict[str, Any]:
        """Return what the orders depend on."""
        return {"kind": "SequentialSampler", "length": length_of(self)}


class ComputedOrder:
    """0, 1, 2 …, not stored; subclasses define `at`."""

    def __init__(self, length: int) -> None:
        """Set the number of indices."""
        self._length = length

    def __len__(self) -> int:
        """Return the number of indices."""
        return self._length

    def __getitem__(self, which: slice | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices at some positions, a fresh array."""
        if isinstance(which, slice):
            which = np.arange(*which.indices(self._length), dtype=np.int64)
        return self.at(which)

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices at positions from 0 on."""
        return positions

    def stored(self) -> Indices:
        """Return an array of it, or the order itself if it is a long one."""
        return self if len(self) > LONGEST_STORED else self[:]


class RandomSampler(CountedSampler):
    """Indices in random order, or drawn at random.

    Up to 2^20 samples are shuffled in an array. The order of more is a `Permutation`, which takes
    no memory and is as good a shuffle to any statistics, though not every order is possible.

    Example:
        >>> sampler = RandomSampler(range(5), seed=7)
        >>> first = list(sampler)
        >>> sampler.set_epoch(1)
        >>> sorted(first), list(sampler) == first
        ([0, 1, 2, 3, 4], False)
    """

    def __init__(
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        seed: int | None = None,
    ) -> None:
        """Set the size and the seed of the orders.

        Args:
            data_source: Has a length.
            replacement: Draw each index from all of them, whatever was drawn before. Otherwise
                every index comes once before any comes again.
            num_samples: Indices in an epoch, at least 1; None means as many as the data source has.
            seed: Decides the orders; None: that of the loader.

        Raises:
            ConfigError: `num_samples` is not a positive integer, or the data source is empty.
        """
        super().__init__(seed)
        self.data_source = data_source
        self.replacement = replacement
        self._num_samples = num_samples
        if not isinstance(replacement, bool):
            raise TypeError(f"replacement should be a boolean value, but got {replacement=}.")
        checked_positive("num_samples", self.num_samples)

    @property
    def num_samples(self) -> int:
        """Indices in an epoch; follows the data source's length unless it was given."""
        return len(self.data_source) if self._num_samples is None else self._num_samples

    def indices(self) -> Indices:
        """Return the order of the current epoch, of length `num_samples`."""
        rng, length, wanted = self.rng(), len(self.data_source), self.num_samples
        if length > LONGEST_STORED and not self.replacement and wanted <= length:
            order = Permutation(length, (self.seed, self.epoch))
            return order if wanted == length else EveryNth(order, 0, 1, wanted)
        if self.replacement:
            return rng.integers(length, size=wanted, dtype=np.int64)
        if wanted <= length:
            return rng.permutation(length)[:wanted]
        passes = [rng.permutation(length) for _ in range(-(-wanted // length))]
        return np.concatenate(passes)[:wanted]

    def settings(self) -> dict[str, Any]:
        """Return what the orders depend on."""
        source = length_of(self.data_source)
        return {**super().settings(), "source": source, "replacement": self.replacement}


class EveryNth(ComputedOrder):
    """Every n-th index of an order, which begins again at its end; a certain number of them."""

    def __init__(self, order: Indices, rank: int, num_replicas: int, length: int) -> None:
        """Begin at index `rank`, and go on in steps of `num_replicas`, `length` of them."""
        super().__init__(length)
        self._order = order
        self._rank = rank
        self._num_replicas = num_replicas

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices at positions from 0 on."""
        positions = positions * self._num_replicas + self._rank
        return self._order[positions % max(len(self._order), 1)]


class SubsetRandomSampler(IndexSampler):
    """The given indices in random order, each once.

    Example:
        >>> sorted(SubsetRandomSampler([3, 5, 9]))
        [3, 5, 9]
    """

    def __init__(
        self, indices: Sequence[int] | NDArray[np.integer[Any]], seed: int | None = None
    ) -> None:
        """Set the indices, integers, and the seed of their orders; None: that of the loader."""
        super().__init__(seed)
        subset = np.asarray(indices)
        if subset.ndim != 1 or (subset.size and subset.dtype.kind not in "iu"):
            raise ConfigError(
                "indices should be a 1-D sequence of integers, but got an array of shape "
                f"{subset.shape}, dtype {subset.dtype}."
            )
        self.subset: NDArray[np.int64] = subset.astype(np.int64)

    def __len__(self) -> int:
        """Return the number of indices."""
        return len(self.subset)

    def indices(self) -> NDArray[np.int64]:
        """Return the order of the current epoch, a fresh array."""
        return self.rng().permutation(self.subset)

    def settings(self) -> dict[str, Any]:
        """Return what the orders depend on; the subset by its digest."""
        return {**super().settings(), "subset": digest(self.subset)}


class WeightedRandomSampler(CountedSampler):
    """Indices drawn with given probabilities.

    There may be any number of weights (torch stops at 2^24). They are summed in float64: a weight
    of 1e-12 beside one of 1 is drawn as often as it should be, to 0.03 %; one of less than 1e-16 of
    the sum may never be. A weight of 0 never is.

    10 million draws from 10 million weights take some 1 s; without replacement some 2 s.

    Example:
        >>> sampler = WeightedRandomSampler([0.0, 1.0, 3.0], num_samples=1000)
        >>> counts = np.bincount(sampler.indices(), minlength=3)
        >>> int(counts[0]), bool(700 < counts[2] < 800)
        (0, True)
    """

    def __init__(
        self,
        weights: ArrayLike,
        num_samples: int,
        replacement: bool = True,
        seed: int | None = None,
    ) -> None:
        """Set the weights and the seed of the draws.

        Args:
            weights: One per sample, shape (n,), finite and not negative, not all 0. They need not
                sum to 1.
            num_samples: Indices in an epoch, at least 1.
            replacement: Whether an index may be drawn more than once. Without, `num_samples` may
                not exceed the number of weights above 0.
            seed: Decides the draws; None: that of the loader.

        Raises:
            ConfigError: one of the above does not hold.
        """
        super().__init__(seed)
        self.num_samples = checked_positive("num_samples", num_samples)
        check_bool("replacement", replacement)
        self.weights: NDArray[np.float64] = as_weights(weights)
        self.replacement = replacement
        _check_weights(self.weights, num_samples, replacement=replacement)
        self.source_length = len(self.weights)

    def indices(self) -> NDArray[np.int64]:
        """Return the draws of the current epoch, shape (num_samples,); a fresh array."""
        return self._with_replacement() if self.replacement else self._without_replacement()

    def settings(self) -> dict[str, Any]:
        """Return what the draws depend on; the weights by their digest."""
        weights = digest(self.weights)
        return {**super().settings(), "weights": weights, "replacement": self.replacement}

    def _with_replacement(self) -> NDArray[np.int64]:
        # Points in random order would be searched for all over the sums: 9 s for 10 million of
        # each. Ascending ones are found side by side, and shuffling what was found takes 0.4 s.
        # Rejected: an alias table draws in 0.35 s, but takes 1 s and 500 MB to make, and 120 MB to
        # keep; a table that guides the search (Chen, Asai 1974) is no faster than this.
        rng = self.rng()
        sums = np.cumsum(self.weights)
        # Running sums of exponential gaps are what sorting uniform numbers would give (Bentley,
        # Saxe: Generating sorted lists of random numbers, 1980).
        points = rng.standard_exponential(self.num_samples + 1)
        np.cumsum(points, out=points)
        points /= points[-1]
        drawn = points[:-1].view(np.int64)
        for start in range(0, len(drawn), _BLOCK):  # in place, and what is worked on in the cache
            block = points[start : start + _BLOCK][: len(drawn) - start] * sums[-1]
            drawn[start : start + _BLOCK] = np.searchsorted(sums, block, side="right")
        # Rounding may put a point on the very end: that is the last index with a weight.
        np.minimum(drawn, np.searchsorted(sums, sums[-1]), out=drawn)
        rng.shuffle(drawn)
        return drawn

    def _without_replacement(self) -> NDArray[np.int64]:
        # The first arrivals of independent exponential clocks, one clock per index, at the rate of
        # its weight, are a draw without replacement, and in its order.
        candidates = np.flatnonzero(self.weights)
        arrivals = self.rng().standard_exponential(len(candidates))
        with np.errstate(divide="ignore"):  # an arrival at 0 is -inf: first, as it should be
            np.log(arrivals, out=arrivals)
        arrivals -= np.log(self.weights[candidates])  # as logarithms, none can overflow
        first = np.argpartition(arrivals, self.num_samples - 1)[: self.num_samples]
        first = first[np.argsort(arrivals[first], kind="stable")]
        return candidates[first].astype(np.int64, copy=False)


def as_weights(weights: ArrayLike) -> NDArray[np.float64]:
    """Return a copy of some numbers, of any shape."""
    try:
        given = np.asarray(weights)
    except ValueError as error:  # rows of different lengths
        raise ConfigError(f"weights should be numbers, but got {weights!r:.80}.") from error
    if given.dtype.kind not in "biuf":  # of strings, numpy would read the numbers
        raise ConfigError(f"weights should be numbers, but got {weights!r:.80} ({given.dtype}).")
    return given.astype(np.float64)


def _check_weights(weights: NDArray[np.float64], num_samples: int, *, replacement: bool) -> None:
    if weights.ndim != 1:
        raise ConfigError(f"weights should be a 1d sequence but are of shape {weights.shape}.")
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if wrong.size:
        raise ConfigError(
            f"weights should be finite and 0 or more, but weights[{wrong[0]}] is "
            f"{weights[wrong[0]]} ({wrong.size} such of {len(weights)})."
        )
    needed, available = 1 if replacement else num_samples, int(np.count_nonzero(weights))
    with np.errstate(over="ignore"):
        total = weights.sum()
    if available < needed or not np.isfinite(total):
        raise ConfigError(
            f"{needed} or more weights should be above 0 with a finite sum, but {available} of "
            f"{len(weights)} are, with sum {total}."
        )


def digest(array: NDArray[Any]) -> str:
    """Return a digest of an array's values: 64 bits as text."""
    return hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=8).hexdigest()


def stated(numbers: NDArray[np.int64], most: int) -> list[int] | str:
    """Return numbers for a state, which stays below 1 KB: a digest of more than `most`."""
    return numbers.tolist() if len(numbers) <= most else digest(numbers)


# Indices computed at a time where an order is not stored: 128 KiB, and numpy's cost per call is
# gone.
_BLOCK: Final = 1 << 14


class BatchLayout(NamedTuple):
    """How an epoch's batches lie in the order of one rank, and in that of all ranks together.

    The second decides the random numbers of each sample: index j of batch k has place
    `first + k * per_batch + j * stride`, whichever rank it is on.

    Attributes:
        first: Place of the first index of this rank's first batch.
        per_batch: Places from the first index of a batch to that of the next.
        stride: Places from an index of a batch to the next one.
        offsets: Batch k of this rank is `order[offsets[k] : offsets[k + 1]]`, int64 of shape
            (batches + 1,). None: batches are of `batch_size` indices.
    """

    first: int
    per_batch: int
    stride: int
    offsets: NDArray[np.int64] | None = None


class BatchOrder(IndexSampler):
    """The order of a batch sampler that deals batches out itself: those of one rank in a row."""


class BatchSampler(Resumable, Sampler[list[int]]):
    """Batches of another sampler's indices.

    Example:
        >>> from penstock.sampling import SequentialSampler
        >>> batches = BatchSampler(SequentialSampler(range(5)), batch_size=2, drop_last=False)
        >>> list(batches), len(batches)
        ([[0, 1], [2, 3], [4]], 3)
        >>> list(batches.index_batches())
        [array([0, 1]), array([2, 3]), array([4])]
    """

    _shows: ClassVar[tuple[str, ...]] = ("length", "batch_size", "drop_last", "sampler")

    #: Whether every batch, but perhaps the last, is of `batch_size` indices.
    is_even: bool = True

    def __init__(self, sampler: Iterable[Any], batch_size: int, drop_last: bool) -> None:
        """Set the size of the batches.

        Args:
            sampler: Any iterable of indices; of other keys too, as long as only `__iter__` is used.
            batch_size: Indices in a batch, at least 1.
            drop_last: Whether a last, shorter batch is left out.
        """
        checked_positive("batch_size", batch_size)
        check_bool("drop_last", drop_last)
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last

    @property
    def epoch(self) -> int:
        """The sampler's epoch."""
        return self.sampler.epoch  # type: ignore[attr-defined, no-any-return]

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the sampler, if it takes one."""
        if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of batches."""
        length = len(cast("Sized", self.sampler))
        return length // self.batch_size if self.drop_last else -(-length // self.batch_size)

    def layout(self) -> BatchLayout:
        """Return where the batches of the current epoch lie. The sampler is an `IndexSampler`."""
        order = cast("IndexSampler", self.sampler)
        return BatchLayout(order.rank, self.batch_size * order.world_size, order.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield lists of what the sampler yields, drawn no earlier than asked for.

        After `load_state_dict`, here or of an `IndexSampler` inside, only the rest of them.
        """
        counter = self._counter()
        place = counter._next_place()
        return self._from(place) if counter is self else self._cut(place)

    def _counter(self) -> Resumable:
        # The sampler counts its indices. Any other is asked for its indices once more, and those of
        # the batches given before are passed over.
        if self.is_even and has_order(self.sampler):
            return cast("IndexSampler", self.sampler)
        return self

    def _cut(self, place: SamplerPosition) -> Iterator[list[int]]:
        order = cast("IndexSampler", self.sampler)
        place.begin(order.epoch)
        for batch in batches_of(order.indices(), self.batch_size, self.drop_last, place.given):
            indices = batch.tolist()
            place.given += len(indices)  # no call follows at which Ctrl-C could hit
            yield indices

    def _from(self, place: SamplerPosition) -> Iterator[list[int]]:
        place.begin(getattr(self, "epoch", None))
        for batch in self._drawn(place.given):
            place.given += 1
            yield batch

    def _drawn(self, start: int) -> Iterator[list[int]]:
        if has_order(self.sampler):
            yield from (batch.tolist() for batch in self._ordered(self.layout(), start))
            return
        # A generator, since islice calls iter(), where what is its own iterator may begin again.
        indices = (index for index in self.sampler)
        for _ in range(start):
            if not list(itertools.islice(indices, self.batch_size)):
                return
        while batch := list(itertools.islice(indices, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch
            if len(batch) < self.batch_size:
                return

    def _ordered(self, layout: BatchLayout, start: int = 0) -> Iterator[NDArray[np.int64]]:
        """The batches from number `start` on, in the epoch at the time of the call."""
        order = cast("IndexSampler", self.sampler).indices()
        if layout.offsets is not None:
            return pieces_of(order, layout.offsets[start:])
        return batches_of(order, self.batch_size, self.drop_last, start * self.batch_size)

    def index_batches(self) -> Iterator[NDArray[np.int64] | list[Any]]:
        """Return the batches as int64 arrays if the sampler is an `IndexSampler`, else as lists.

        The arrays are views of the order of the epoch at the time of the call: do not write.
        """
        if has_order(self.sampler) and is_current(type(self), "index_batches", ("__iter__",)):
            return self._ordered(self.layout())
        return iter(self)

    def settings(self) -> dict[str, Any]:
        """Return what the batches depend on, as JSON has it."""
        inner: Any = self.sampler
        if isinstance(inner, IndexSampler):
            ranks, settings = inner.world_size, inner.settings()
        else:
            ranks, settings = 1, {"kind": type(inner).__name__, "length": length_of(inner)}
        return {
            "sampler": settings,
            "global_batch_size": self.batch_size * ranks,
            "drop_last": self.drop_last,
        }


def batches_of(
    order: Indices, batch_size: int, drop_last: bool, start: int = 0
) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of each batch of an order, from position `start` on.

    An array is cut into views. Any other order is computed in blocks.
    """
    stop = len(order) - (len(order) - start) % batch_size if drop_last else len(order)
    is_stored = isinstance(order, np.ndarray)
    block = max(stop, 1) if is_stored else max(_BLOCK // batch_size, 1) * batch_size
    for begin in range(start, stop, block):
        part = np.asarray(order[begin : min(begin + block, stop)], np.int64)
        for offset in range(0, len(part), batch_size):
            yield part[offset : offset + batch_size]


def pieces_of(order: Indices, offsets: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield `order[offsets[k] : offsets[k + 1]]` for each k."""
    for start, stop in itertools.pairwise(offsets.tolist()):
        yield np.asarray(order[start:stop], np.int64)
