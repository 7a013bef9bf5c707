# SPDX-License-Identifier: Apache-2.0
"""Which samples an epoch takes, in which order.

Every order is a pure function of (seed, epoch): nothing is drawn from a global generator, no state
goes on from one epoch to the next, and the order of epoch 7 can be had without that of epoch 6. An
order is one int64 array, or is computed where it is asked for; Python integers are made of it a few
thousand at a time.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import numpy as np

from penstock.data.dataset import length_of
from penstock.errors import ConfigError
from penstock.randomness.keys import Purpose, checked_count, checked_epoch, seed_sequence
from penstock.sampling.permutation import Permutation
from penstock.sampling.sampler_state import Resumable, SamplerPosition
from penstock.summary import Summarized

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence, Sized

    from numpy.typing import NDArray

__all__ = [
    "EveryNth",
    "IndexSampler",
    "Indices",
    "RandomSampler",
    "Sampler",
    "SequentialSampler",
    "SubsetRandomSampler",
    "check_positive",
    "digest",
]

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

    Subclasses define `__iter__`, and `__len__` where the number is known. One whose order is an
    array is better an `IndexSampler`.
    """

    # No default `__len__`: `len()` and `list()` must see that there is none.

    def __iter__(self) -> Iterator[T_co]:
        """Begin an epoch.

        Raises:
            NotImplementedError: the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} is a Sampler and must define __iter__().")


class IndexSampler(Resumable, Sampler[int]):
    """A sampler whose order is one array, decided by (seed, epoch).

    Subclasses define `indices` and `__len__`, and `settings` if they have any. `state_dict` and
    `load_state_dict` are for loops of one's own, and for other libraries' loaders.

    Attributes:
        seed: As given.
        epoch: 0, until `set_epoch`.
        rank: Which share of a global order it yields.
        world_size: Number of those shares: index p of this one is p * world_size + rank there.
    """

    _shows = ("length", "seed", "epoch")

    seed: int
    epoch: int
    rank: int = 0
    #: How often `set_epoch` was called: a loader sees by it that somebody else has.
    times_told: int = 0

    @property
    def world_size(self) -> int:
        """Number of shares of the global order that this is one of."""
        return 1

    @property
    def total_size(self) -> int:
        """Indices of all shares together, in an epoch."""
        return len(self)

    @property
    def source_length(self) -> int | None:
        """Samples of the dataset that it was made for, if it knows; loaders compare it."""
        return None

    def __len__(self) -> int:
        """Return the number of indices in an epoch."""
        return len(self.indices())

    def __init__(self, seed: int = 0) -> None:
        """Begin at epoch 0.

        Args:
            seed: Not negative. The same on all ranks that share an order.

        Raises:
            ConfigError: a negative seed.
            TypeError: a seed that is no integer.
        """
        self.seed = checked_count("seed", seed)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next. It does not advance by itself.

        Raises:
            ConfigError: a negative epoch, or one of 2^32 and more.
            TypeError: an epoch that is no integer.
        """
        self.epoch = checked_epoch(epoch)
        self.times_told += 1
        if self._place is not None:
            self._place.is_told = True

    def rng(self) -> np.random.Generator:
        """Return a new generator, always the same for one seed and epoch."""
        return np.random.Generator(
            np.random.Philox(seed_sequence(self.seed, Purpose.ORDER, self.epoch))
        )

    def indices(self) -> Indices:
        """Return the order of the current epoch: a fresh int64 array of shape (len(self),).

        Or an object that is indexed like one, as `Permutation` is.
        """
        raise NotImplementedError(
            f"{type(self).__name__} is an IndexSampler and must define indices()."
        )

    def settings(self) -> dict[str, Any]:
        """Return what the orders depend on, as JSON has it: part of a loader's fingerprint."""
        return {"kind": type(self).__name__, "length": len(self), "seed": self.seed}

    def __iter__(self) -> Iterator[int]:
        """Yield the order of the epoch that is current when the first index is asked for.

        After `load_state_dict`, only the rest of it.

        Warns:
            UserWarning: torch's own loader asks for the order of an epoch that it has had already.
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


def check_positive(name: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is a positive integer, numpy's included."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{name} should be a positive integer value, but got {name}={value!r}.")


class SequentialSampler(IndexSampler):
    """Every index once, ascending, in every epoch.

    Example:
        >>> list(SequentialSampler("abc"))
        [0, 1, 2]
    """

    def __init__(self, data_source: Sized) -> None:
        """Number the samples of a data source.

        Args:
            data_source: Has a length.
        """
        super().__init__()
        self.data_source = data_source

    def __len__(self) -> int:
        """Return the length of the data source."""
        return len(self.data_source)

    def indices(self) -> Indices:
        """Return 0, 1, 2 …: a fresh array, or one that is not stored if it were a long one."""
        ascending = _Ascending(len(self.data_source))
        return ascending if len(ascending) > LONGEST_STORED else ascending[:]

    def settings(self) -> dict[str, Any]:
        """Return what the orders depend on."""
        return {"kind": "SequentialSampler", "length": length_of(self)}

    def _varies(self) -> bool:
        return False


class _Ascending:
    """0, 1, 2 …, not stored."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, which: slice | NDArray[np.int64]) -> NDArray[np.int64]:
        if isinstance(which, slice):
            return np.arange(*which.indices(self._length), dtype=np.int64)
        return which


class RandomSampler(IndexSampler):
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
        seed: int = 0,
    ) -> None:
        """Set the size and the seed of the orders.

        Args:
            data_source: Has a length.
            replacement: Draw each index from all of them, whatever was drawn before. Otherwise
                every index comes once before any comes again.
            num_samples: Indices in an epoch, at least 1; None means as many as the data source has.
            seed: Decides the orders.

        Raises:
            TypeError: `replacement` is no bool.
            ConfigError: `num_samples` is not a positive integer, or the data source is empty.
        """
        super().__init__(seed)
        self.data_source = data_source
        self.replacement = replacement
        self._num_samples = num_samples
        if not isinstance(replacement, bool):
            raise TypeError(
                f"replacement should be a boolean value, but got replacement={replacement!r}."
            )
        check_positive("num_samples", self.num_samples)

    @property
    def num_samples(self) -> int:
        """Indices in an epoch; follows the data source's length unless it was given."""
        return len(self.data_source) if self._num_samples is None else self._num_samples

    def __len__(self) -> int:
        """Return `num_samples`."""
        return self.num_samples

    def indices(self) -> Indices:
        """Return the order of the current epoch, of length `num_samples`."""
        rng, length, wanted = self.rng(), len(self.data_source), self.num_samples
        if length > LONGEST_STORED and not self.replacement and wanted == length:
            return Permutation(length, (self.seed, self.epoch))
        if length > LONGEST_STORED and not self.replacement and wanted < length:
            return EveryNth(Permutation(length, (self.seed, self.epoch)), 0, 1, wanted)
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


class EveryNth:
    """Every n-th index of an order, which begins again at its end; a certain number of them."""

    def __init__(self, order: Indices, rank: int, num_replicas: int, length: int) -> None:
        """Begin at index `rank`, and go on in steps of `num_replicas`, `length` of them."""
        self._order = order
        self._rank = rank
        self._num_replicas = num_replicas
        self._length = length

    def __len__(self) -> int:
        """Return the number of indices."""
        return self._length

    def __getitem__(self, which: slice | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices at some positions, a fresh array."""
        turns = np.arange(*which.indices(self._length)) if isinstance(which, slice) else which
        positions = turns * self._num_replicas + self._rank
        return self._order[positions % max(len(self._order), 1)]


class SubsetRandomSampler(IndexSampler):
    """The given indices in random order, each once.

    Example:
        >>> sorted(SubsetRandomSampler([3, 5, 9]))
        [3, 5, 9]
    """

    def __init__(self, indices: Sequence[int] | NDArray[np.integer[Any]], seed: int = 0) -> None:
        """Set the indices and the seed of their orders.

        Args:
            indices: Integers. Kept as one int64 array, in the attribute `subset`.
            seed: Decides the orders.

        Raises:
            ConfigError: not a 1-D sequence of integers.
        """
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


def digest(array: NDArray[Any]) -> str:
    """Return what tells an array's values from others: 64 bits as text."""
    return hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=8).hexdigest()
