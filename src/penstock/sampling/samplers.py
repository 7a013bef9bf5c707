# SPDX-License-Identifier: Apache-2.0
"""Which samples an epoch takes, in which order.

Every order is a pure function of (seed, epoch): nothing is drawn from a global generator, no state
goes on from one epoch to the next, and the order of epoch 7 can be had without that of epoch 6. An
order is one int64 array; Python integers are made of it a few thousand at a time.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

import numpy as np

from penstock.data.dataset import is_current
from penstock.errors import ConfigError
from penstock.randomness.keys import Purpose, checked_count, seed_sequence

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence, Sized

    from numpy.typing import ArrayLike, NDArray

__all__ = [
    "BatchSampler",
    "DistributedSampler",
    "IndexSampler",
    "RandomSampler",
    "Sampler",
    "SequentialSampler",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
]

T_co = TypeVar("T_co", covariant=True)

# Python integers made at a time: 4096 of them are 150 KB, and numpy's cost per call is gone.
_CHUNK: Final = 4096


class Sampler(Generic[T_co]):
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


class IndexSampler(Sampler[int]):
    """A sampler whose order is one array, decided by (seed, epoch).

    Subclasses define `indices` and `__len__`.

    Attributes:
        seed: As given.
        epoch: 0, until `set_epoch`.
    """

    seed: int
    epoch: int

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
            ConfigError: a negative epoch.
            TypeError: an epoch that is no integer.
        """
        self.epoch = checked_count("epoch", epoch)

    def rng(self) -> np.random.Generator:
        """Return a new generator, always the same for one seed and epoch."""
        return np.random.Generator(
            np.random.Philox(seed_sequence(self.seed, Purpose.ORDER, self.epoch))
        )

    def indices(self) -> NDArray[np.int64]:
        """Return the order of the current epoch, shape (len(self),); a fresh array."""
        raise NotImplementedError(
            f"{type(self).__name__} is an IndexSampler and must define indices()."
        )

    def __iter__(self) -> Iterator[int]:
        """Yield the order of the epoch that is current when the first index is asked for."""
        order = self.indices()
        for start in range(0, len(order), _CHUNK):
            yield from order[start : start + _CHUNK].tolist()


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
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

    def indices(self) -> NDArray[np.int64]:
        """Return 0, 1, 2 … as a fresh array."""
        return np.arange(len(self.data_source), dtype=np.int64)


class RandomSampler(IndexSampler):
    """Indices in random order, or drawn at random.

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
        _check_positive("num_samples", self.num_samples)

    @property
    def num_samples(self) -> int:
        """Indices in an epoch; follows the data source's length unless it was given."""
        return len(self.data_source) if self._num_samples is None else self._num_samples

    def __len__(self) -> int:
        """Return `num_samples`."""
        return self.num_samples

    def indices(self) -> NDArray[np.int64]:
        """Return the order of the current epoch, shape (num_samples,); a fresh array."""
        rng, length, wanted = self.rng(), len(self.data_source), self.num_samples
        if self.replacement:
            return rng.integers(length, size=wanted, dtype=np.int64)
        if wanted <= length:
            return rng.permutation(length)[:wanted]
        passes = [rng.permutation(length) for _ in range(-(-wanted // length))]
        return np.concatenate(passes)[:wanted]


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


class WeightedRandomSampler(IndexSampler):
    """Indices drawn with given probabilities.

    Weights are summed in float64 and searched, so there may be any number of them (torch stops at
    2^24), and a draw costs O(log n).

    Example:
        >>> sampler = WeightedRandomSampler([0.0, 1.0, 3.0], num_samples=1000)
        >>> counts = np.bincount(sampler.indices(), minlength=3)
        >>> int(counts[0]), bool(700 < counts[2] < 800)
        (0, True)
    """

    def __init__(
        self, weights: ArrayLike, num_samples: int, replacement: bool = True, seed: int = 0
    ) -> None:
        """Set the weights and the seed of the draws.

        Args:
            weights: One per sample, shape (n,), finite and not negative, not all 0. They need not
                sum to 1.
            num_samples: Indices in an epoch, at least 1.
            replacement: Whether an index may be drawn more than once. Without, `num_samples` may
                not exceed the number of weights above 0.
            seed: Decides the draws.

        Raises:
            ConfigError: one of the above does not hold.
        """
        super().__init__(seed)
        _check_positive("num_samples", num_samples)
        if not isinstance(replacement, bool):
            raise ConfigError(
                f"replacement should be a boolean value, but got replacement={replacement!r}."
            )
        self.weights: NDArray[np.float64] = np.array(weights, np.float64)
        self.num_samples = num_samples
        self.replacement = replacement
        _check_weights(self.weights, num_samples, replacement=replacement)

    def __len__(self) -> int:
        """Return `num_samples`."""
        return self.num_samples

    def indices(self) -> NDArray[np.int64]:
        """Return the draws of the current epoch, shape (num_samples,); a fresh array."""
        return self._with_replacement() if self.replacement else self._without_replacement()

    def _with_replacement(self) -> NDArray[np.int64]:
        sums = np.cumsum(self.weights)
        points = self.rng().random(self.num_samples) * sums[-1]
        # side="right" steps over weights of 0. Rounding may put a point on the very end: that is
        # the last index with a weight.
        drawn = np.searchsorted(sums, points, side="right")
        last = np.searchsorted(sums, sums[-1])
        return np.asarray(np.minimum(drawn, last), np.int64)

    def _without_replacement(self) -> NDArray[np.int64]:
        # The first arrivals of independent exponential clocks, one clock per index, at the rate of
        # its weight, are a draw without replacement, and in its order.
        candidates = np.flatnonzero(self.weights)
        with np.errstate(divide="ignore"):  # an arrival at 0 is -inf: first, as it should be
            arrivals = np.log(self.rng().exponential(size=len(candidates)))
        arrivals -= np.log(self.weights[candidates])  # as logarithms, none can overflow
        first = np.argpartition(arrivals, self.num_samples - 1)[: self.num_samples]
        first = first[np.argsort(arrivals[first], kind="stable")]
        return candidates[first].astype(np.int64, copy=False)


def _check_weights(weights: NDArray[np.float64], num_samples: int, *, replacement: bool) -> None:
    if weights.ndim != 1:
        raise ConfigError(
            f"weights should be a 1d sequence but given weights have shape {weights.shape}."
        )
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if wrong.size:
        raise ConfigError(
            f"weights should be finite and 0 or more, but weights[{wrong[0]}] is "
            f"{weights[wrong[0]]} ({wrong.size} such of {len(weights)})."
        )
    with np.errstate(over="ignore"):
        total = weights.sum()
    available = int(np.count_nonzero(weights))
    needed = 1 if replacement else num_samples
    if available < needed or not np.isfinite(total):
        raise ConfigError(
            f"{needed} or more weights should be above 0 with a finite sum, but {available} of "
            f"{len(weights)} are, with sum {total}. Without replacement each sample needs "
            "one."
        )


class DistributedSampler(IndexSampler):
    """One rank's share of an order that all ranks agree on.

    Ranks take turns. For 5 samples on 2 ranks, not shuffled:

        order                   0 1 2 3 4
        drop_last=False, pad    0 1 2 3 4 0     rank 0: 0 2 4   rank 1: 1 3 0
        drop_last=True, cut     0 1 2 3         rank 0: 0 2     rank 1: 1 3

    Example:
        >>> [list(DistributedSampler(range(5), 2, rank, shuffle=False)) for rank in (0, 1)]
        [[0, 2, 4], [1, 3, 0]]
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int,
        rank: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """Set the ranks and the seed of the orders.

        Args:
            dataset: Has a length, the same on all ranks.
            num_replicas: Number of ranks, at least 1.
            rank: This one, 0 <= rank < num_replicas.
            shuffle: Whether the order is random.
            seed: Decides the orders. The same on all ranks.
            drop_last: Whether the samples left over are left out, instead of the first ones taken
                twice.

        Raises:
            ConfigError: `num_replicas` or `rank` is out of range.
        """
        super().__init__(seed)
        _check_positive("num_replicas", num_replicas)
        if not 0 <= rank < num_replicas:
            raise ConfigError(
                f"Invalid rank {rank}, rank should be in the interval [0, {num_replicas - 1}]."
            )
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.drop_last = drop_last

    @property
    def num_samples(self) -> int:
        """Indices of each rank in an epoch."""
        length = len(self.dataset)
        return length // self.num_replicas if self.drop_last else -(-length // self.num_replicas)

    @property
    def total_size(self) -> int:
        """Indices of all ranks in an epoch."""
        return self.num_samples * self.num_replicas

    def __len__(self) -> int:
        """Return `num_samples`."""
        return self.num_samples

    def indices(self) -> NDArray[np.int64]:
        """Return this rank's share of the current epoch, shape (num_samples,); a fresh array."""
        length = len(self.dataset)
        order = (
            self.rng().permutation(length) if self.shuffle else np.arange(length, dtype=np.int64)
        )
        # Position p of the padded order is order[p % length]; with drop_last none is that far.
        turns = np.arange(self.rank, self.total_size, self.num_replicas, dtype=np.int64)
        return order[turns % max(length, 1)]


class BatchSampler(Sampler[list[int]]):
    """Batches of another sampler's indices.

    Example:
        >>> batches = BatchSampler(SequentialSampler(range(5)), batch_size=2, drop_last=False)
        >>> list(batches), len(batches)
        ([[0, 1], [2, 3], [4]], 3)
        >>> list(batches.index_batches())
        [array([0, 1]), array([2, 3]), array([4])]
    """

    def __init__(self, sampler: Iterable[Any], batch_size: int, drop_last: bool) -> None:
        """Set the size of the batches.

        Args:
            sampler: Any iterable of indices; of other keys too, as long as only `__iter__` is used.
            batch_size: Indices in a batch, at least 1.
            drop_last: Whether a last, shorter batch is left out.

        Raises:
            ConfigError: `batch_size` is not a positive integer, or `drop_last` no bool.
        """
        _check_positive("batch_size", batch_size)
        if not isinstance(drop_last, bool):
            raise ConfigError(
                f"drop_last should be a boolean value, but got drop_last={drop_last!r}."
            )
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the sampler, if it takes one."""
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of batches.

        Raises:
            TypeError: the sampler has no length.
        """
        length = len(cast("Sized", self.sampler))
        return length // self.batch_size if self.drop_last else -(-length // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield lists of what the sampler yields, drawn no earlier than asked for."""
        indices = iter(self.sampler)
        while batch := list(itertools.islice(indices, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch
            if len(batch) < self.batch_size:
                return

    def index_batches(self) -> Iterator[NDArray[np.int64] | list[Any]]:
        """Return the batches as int64 arrays if the sampler is an `IndexSampler`, else as lists.

        The arrays have shape (batch,) and are views of the order of the epoch: do not write. The
        same indices as iterating; a subclass with an `__iter__` of its own is simply iterated. The
        order is that of the epoch at the time of the call.
        """
        if not (
            isinstance(self.sampler, IndexSampler)
            and is_current(type(self.sampler), "indices", ("__iter__",))
            and is_current(type(self), "index_batches", ("__iter__",))
        ):
            return iter(self)
        order = self.sampler.indices()
        stop = len(order) - len(order) % self.batch_size if self.drop_last else len(order)
        starts = range(0, stop, self.batch_size)
        return (order[start : start + self.batch_size] for start in starts)
