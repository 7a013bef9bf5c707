# SPDX-License-Identifier: Apache-2.0
"""`BucketBatchSampler`: batches of one bucket each, as large as a budget of tokens allows."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from penstock.errors import ConfigError
from penstock.sampling.batches import BatchLayout, BatchOrder, BatchSampler
from penstock.sampling.buckets import check_bool, checked_keys
from penstock.sampling.class_items import grouped
from penstock.sampling.distributed import chosen_rank
from penstock.sampling.samplers import check_positive, digest

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["BucketBatchSampler"]

_BLOCK: Final = 1 << 20  # keys looked up at a time: their buckets are of 8 bytes first
_GROWTH: Final = 1.1  # from one boundary to the next, where none are given


class BucketBatchSampler(BatchSampler):
    """Batches of samples of similar length, of a fixed size or up to a number of tokens.

    Samples go into buckets by a number: the length of a text, the seconds of a recording, the
    aspect ratio of an image. A batch is of one bucket. Which samples meet in it, and the order of
    the batches, are another draw in each epoch; the number of batches is always the same. With
    `max_tokens` the batches of a bucket have as many samples as its longest one allows, so that no
    padded batch is larger. Every sample comes once; the last batch of a bucket may be shorter.

    With ranks, step k is of the same bucket and of the same size on all of them. A bucket that does
    not divide evenly has up to `num_replicas` - 1 of its samples a second time.

    For a loader's `batch_sampler`; a Penstock loader resumes in it at once.

    Attributes:
        boundaries: Between the buckets, as given or found, shape (buckets - 1,).

    Example:
        >>> lengths = [5, 90, 6, 7, 100, 5, 6]
        >>> batches = BucketBatchSampler(lengths, max_tokens=200, boundaries=[10])
        >>> sorted(sorted(lengths[i] for i in batch) for batch in batches), len(batches)
        ([[5, 5, 6, 6, 7], [90, 100]], 2)

    Reference:
        Boundaries are those of `tf.data.Dataset.bucket_by_sequence_length`, `max_tokens` is
        fairseq's.
    """

    _shows = ("length", "batch_size", "drop_last", "epoch")

    is_even: ClassVar[bool] = False

    def __init__(
        self,
        keys: ArrayLike,
        batch_size: int | None = None,
        drop_last: bool = False,
        *,
        max_tokens: float | None = None,
        boundaries: ArrayLike | None = None,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Set the buckets and the sizes of their batches.

        Args:
            keys: A number per sample, shape (n,), finite; its length, for `max_tokens`. Kept as one
                array.
            batch_size: Most samples in a batch of this rank. None: as many as `max_tokens` allows.
            drop_last: Whether the last, shorter batch of each bucket is left out.
            max_tokens: Most that the samples of a batch of this rank, times its largest key, may
                be; in the unit of the keys. None: no such limit.
            boundaries: Ascending. The first bucket has the keys below `boundaries[0]`, the next
                those from there to below `boundaries[1]`, the last the rest. None: one for every
                10 %, so that less than that of a batch is padding; keys are 0 or more then.
            shuffle: Whether orders are random. Otherwise by key, smallest first: for validation.
            seed: Decides the orders. The same on all ranks.
            num_replicas: Number of ranks that share an epoch; None asks as
                `DistributedSampler` does.
            rank: This one; None asks likewise.

        Raises:
            ConfigError: one of the above does not hold, or a sample is longer than `max_tokens`.
        """
        lengths = checked_keys(keys)
        check_bool("drop_last", drop_last)
        check_bool("shuffle", shuffle)
        chosen = chosen_rank(rank, num_replicas)
        _check_limits(lengths, batch_size, max_tokens)
        self.boundaries = _boundaries(lengths, boundaries)
        buckets = _buckets(lengths, self.boundaries)
        sizes = _sizes(lengths, buckets, batch_size, max_tokens)
        order = _BucketOrder(lengths, buckets, sizes * chosen.world_size, seed)
        order.rank, order.num_replicas = chosen
        order.is_shuffled, order.is_cut = shuffle, drop_last
        self._order = order
        super().__init__(order, int(sizes.max(initial=1)), drop_last)

    def __len__(self) -> int:
        """Return the number of batches, the same in every epoch and on every rank."""
        return int(self._order.num_batches().sum())

    def layout(self) -> BatchLayout:
        """Return where the batches of the current epoch lie."""
        # A batch has the places of the largest one, so that they are the same for any number of
        # ranks, whatever these take twice.
        order = self._order
        per_batch = int(order.sizes.max(initial=1))
        return BatchLayout(order.rank, per_batch, order.world_size, order.offsets())


class _BucketOrder(BatchOrder):
    """The batches of one rank in a row.

    Attributes:
        sizes: Samples of all ranks in a batch of each bucket.
    """

    is_shuffled: bool = True
    is_cut: bool = False

    def __init__(
        self,
        keys: NDArray[Any],
        buckets: NDArray[np.integer[Any]],
        sizes: NDArray[np.int64],
        seed: int,
    ) -> None:
        super().__init__(seed)
        self._keys = keys
        self._buckets = buckets
        self._counts = np.bincount(buckets, minlength=len(sizes))
        self.sizes = sizes

    def _public_name(self) -> str:
        return "BucketBatchSampler"

    @property
    def source_length(self) -> int:
        return len(self._keys)

    def __len__(self) -> int:
        return int(self._lengths().sum())

    def num_batches(self) -> NDArray[np.int64]:
        """Of each bucket."""
        return self._counts // self.sizes if self.is_cut else -(-self._counts // self.sizes)

    def _lengths(self) -> NDArray[np.int64]:
        """Indices of this rank in each batch, bucket by bucket."""
        num_batches = self.num_batches()
        lengths = np.repeat(self.sizes // self.num_replicas, num_batches)
        if not self.is_cut:
            last = (np.cumsum(num_batches) - 1)[num_batches > 0]
            left = (self._counts - (num_batches - 1) * self.sizes)[num_batches > 0]
            lengths[last] = -(-left // self.num_replicas)
        return lengths

    def offsets(self) -> NDArray[np.int64]:
        """Where each batch of the epoch begins in `indices()`."""
        return self._offsets(self._lengths()[self._turns(self.rng())])

    @staticmethod
    def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return offsets

    def _turns(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """The order of the batches: drawn first, so that it can be had without the samples."""
        total = int(self.num_batches().sum())
        return rng.permutation(total) if self.is_shuffled else np.arange(total)

    def indices(self) -> NDArray[np.int64]:
        rng, ranks = self.rng(), self.num_replicas
        turns = self._turns(rng)
        samples = self._samples(rng)
        lengths = self._lengths()[turns]
        # Index j of this rank in a batch is index j * ranks + rank of the batch of all ranks.
        first = self._starts()[turns] + self.rank - self._offsets(lengths)[:-1] * ranks
        places = np.repeat(first, lengths)
        places += np.arange(0, len(places) * ranks, ranks)
        if ranks > 1:
            self._bring_back(places, np.repeat(self._bucket_of_each()[turns], lengths))
        return samples[places]

    def _bucket_of_each(self) -> NDArray[np.int64]:
        """The bucket of each batch, bucket by bucket."""
        return np.repeat(np.arange(len(self.sizes)), self.num_batches())

    def _starts(self) -> NDArray[np.int64]:
        """Where each batch begins in `_samples`, bucket by bucket."""
        bucket, num_batches = self._bucket_of_each(), self.num_batches()
        turn = np.arange(len(bucket)) - (np.cumsum(num_batches) - num_batches)[bucket]
        first = np.cumsum(self._counts) - self._counts
        return np.asarray(first[bucket] + turn * self.sizes[bucket], np.int64)

    def _bring_back(self, places: NDArray[np.int64], buckets: NDArray[np.int64]) -> None:
        """Let what lies behind a bucket be its first samples once more."""
        stops = np.cumsum(self._counts)
        behind = np.flatnonzero(places >= stops[buckets])
        buckets = buckets[behind]
        first = stops[buckets] - self._counts[buckets]
        places[behind] = first + (places[behind] - first) % self._counts[buckets]

    def _samples(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """All samples, those of the first bucket first."""
        if not self.is_shuffled:
            return np.argsort(self._keys, kind="stable").astype(np.int64, copy=False)
        order = rng.permutation(len(self._keys))
        return order[grouped(self._buckets[order], len(self.sizes))]

    def _varies(self) -> bool:
        return self.is_shuffled

    def settings(self) -> dict[str, Any]:
        """Return what the batches depend on: not the number of ranks."""
        return {
            "kind": "BucketBatchSampler",
            "seed": self.seed,
            "keys": digest(self._keys),
            "buckets": digest(self._buckets),
            "global_batch_sizes": digest(self.sizes),
            "shuffle": self.is_shuffled,
            "drop_last": self.is_cut,
        }


def _check_limits(keys: NDArray[Any], batch_size: int | None, max_tokens: float | None) -> None:
    if batch_size is not None:
        check_positive("batch_size", batch_size)
    if max_tokens is None:
        if batch_size is None:
            raise ConfigError("batches need a batch_size, or max_tokens, or both; got neither.")
        return
    _check_number("max_tokens", max_tokens)
    if (low := np.flatnonzero(keys < 0)).size:
        raise ConfigError(
            f"with max_tokens keys are lengths, 0 or more, but keys[{low[0]}] is {keys[low[0]]}."
        )
    if (long := np.flatnonzero(~(keys <= max_tokens))).size:
        raise ConfigError(
            f"sample {long[0]} has length {keys[long[0]]}, which is more than "
            f"max_tokens={max_tokens} by itself ({long.size} such of {len(keys)}). Raise "
            "max_tokens, or leave such samples out with a penstock.data.Subset."
        )


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name} should be a number, but got {name}={value!r}.")


def _boundaries(keys: NDArray[Any], given: ArrayLike | None) -> NDArray[Any]:
    if given is not None:
        return _checked_boundaries(given)
    if (low := np.flatnonzero(keys < 0)).size:
        raise ConfigError(
            "without boundaries buckets are of lengths, 0 or more, in steps of 10 %, but "
            f"keys[{low[0]}] is {keys[low[0]]}. Give the boundaries between the buckets."
        )
    if not (keys > 0).any():
        return np.empty(0)
    highest = keys.max()
    lowest, highest = float(keys.min(initial=highest, where=keys > 0)), float(highest)
    # In logarithms: the quotient of the two may be beyond all numbers.
    first, last, step = np.log(lowest), np.log(highest), np.log(_GROWTH)
    boundaries: NDArray[np.float64]
    boundaries = np.exp(first + step * np.arange(int((last - first) / step) + 1))
    boundaries[0] = lowest  # what is below it has no length at all
    return boundaries


def _checked_boundaries(given: ArrayLike) -> NDArray[Any]:
    try:
        boundaries = np.array(given)
    except ValueError:  # lists of different lengths
        boundaries = np.empty(0, object)
    is_numbers = boundaries.ndim == 1 and boundaries.dtype.kind in "iuf"
    if not is_numbers or not _ascend(boundaries):
        raise ConfigError(f"boundaries should be numbers that ascend, but got {given!r:.80}.")
    return boundaries


def _ascend(numbers: NDArray[Any]) -> bool:
    return bool((numbers[1:] > numbers[:-1]).all()) and not np.isnan(numbers).any()


def _buckets(keys: NDArray[Any], boundaries: NDArray[Any]) -> NDArray[np.unsignedinteger[Any]]:
    """Return the bucket of each sample, of the smallest type."""
    buckets = np.empty(len(keys), np.min_scalar_type(len(boundaries)))
    for start in range(0, len(keys), _BLOCK):
        part = slice(start, start + _BLOCK)
        buckets[part] = np.searchsorted(boundaries, keys[part], side="right")
    return buckets


def _sizes(
    keys: NDArray[Any],
    buckets: NDArray[np.unsignedinteger[Any]],
    batch_size: int | None,
    max_tokens: float | None,
) -> NDArray[np.int64]:
    """Return the samples of a rank in a batch of each bucket, at least 1."""
    num_buckets = int(buckets.max(initial=0)) + 1
    most = max(len(keys), 1) if batch_size is None else batch_size
    sizes = np.full(num_buckets, most, np.int64)
    if max_tokens is None:
        return sizes
    longest = np.zeros(num_buckets)
    np.maximum.at(longest, buckets, keys)
    has_length = longest > 0
    with np.errstate(over="ignore"):  # as many as one likes
        fitting = np.floor(max_tokens / longest[has_length])
        fitting -= fitting * longest[has_length] > max_tokens  # it may have been rounded up
    sizes[has_length] = np.minimum(fitting, most).astype(np.int64)
    return np.maximum(sizes, 1)
