# SPDX-License-Identifier: Apache-2.0
"""`BucketBatchSampler`: batches of similar samples, so that little of them is padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from penstock.errors import ConfigError
from penstock.sampling.costs import checked_costs, dealt
from penstock.sampling.distributed import DistributedSampler, chosen_rank
from penstock.sampling.samplers import (
    BatchLayout,
    BatchOrder,
    BatchSampler,
    IndexSampler,
    check_bool,
    checked_positive,
    digest,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_GROWTH: Final = 1.1  # from one boundary to the next, where none are given
_WINDOW: Final = 32  # batches of similar shapes that are sorted together
_RATIO_STEPS: Final = 8  # to a doubling of the aspect ratio: a batch differs by some 9 %
_AREA_STEPS: Final = 2  # to a doubling of the area


class BucketBatchSampler(BatchSampler):
    """Batches of similar samples, of a fixed size or up to a number of tokens.

    Samples are similar by a number: the length of a text, the seconds of a recording; or images by
    their aspect ratio. Which samples meet in a batch, and the order of the batches, are another
    draw in each epoch; the number of batches is always the same. There are two ways:

    By `boundaries`, samples go into buckets, and a batch is of one bucket. With `max_tokens` the
    batches of a bucket have as many samples as its longest one allows. The last batch of each
    bucket may be shorter. With ranks, step k is of the same bucket and of the same size on all of
    them; a bucket that does not divide evenly has fewer than `num_replicas` of its samples twice.

    By a `window`, a random order is cut into windows of so many batches, each window is sorted and
    cut into batches, and all batches are put in random order. Batches are of one size, and at most
    one of an epoch is shorter. With ranks, step k is of similar samples on all of them.

    With a `cost` of each sample, such as its boxes or pixels, the samples of a step are dealt out
    so that the sums on all ranks are about equal. Which samples a step has does not depend on it.

    Attributes:
        boundaries: Between the buckets, as given or found, shape (buckets - 1,); None by a window.

    Example:
        >>> lengths = [5, 90, 6, 7, 100, 5, 6]
        >>> batches = BucketBatchSampler(lengths, max_tokens=200, boundaries=[10])
        >>> sorted(sorted(lengths[i] for i in batch) for batch in batches), len(batches)
        ([[5, 5, 6, 6, 7], [90, 100]], 2)
        >>> sizes_px = [(480, 640), (640, 480)] * 4
        >>> batches = BucketBatchSampler(sizes_px, 4, key="aspect_ratio")
        >>> sorted(sorted(batch) for batch in batches)
        [[0, 2, 4, 6], [1, 3, 5, 7]]
    """

    _shows = ("length", "batch_size", "drop_last", "epoch")

    def __init__(
        self,
        keys: Any,  # noqa: ANN401 - numbers, sizes, or a dataset that knows its images' sizes
        batch_size: int | None = None,
        drop_last: bool = False,
        *,
        key: Literal["number", "aspect_ratio"] = "number",
        max_tokens: float | None = None,
        boundaries: ArrayLike | None = None,
        window: int | None = None,
        cost: ArrayLike | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Set what is similar, and the sizes of the batches.

        Args:
            keys: A number per sample, shape (n,), finite; its length, for `max_tokens`. Kept as one
                array. With "aspect_ratio" height and width of each image, int (n, 2), above 0; or a
                dataset that has them as `sizes_px`, as the detection datasets of `penstock.vision`
                do; or a subset of such a dataset.
            batch_size: Most samples in a batch of this rank. None: as many as `max_tokens` allows.
            drop_last: Whether the last, shorter batch (of each bucket) is left out.
            key: What `keys` are. By "aspect_ratio" images of a batch differ by some 9 %, and among
                those by area; there is a `window`, of 32 unless given.
            max_tokens: Most that the samples of a batch of this rank, times its largest key, may
                be; in the unit of the keys. None: no such limit.
            boundaries: Ascending. The first bucket has the keys below `boundaries[0]`, the next
                those from there to below `boundaries[1]`, the last the rest. None: one for every
                10 %, so that less than that of a batch is padding; keys are 0 or more then.
            window: Batches that are sorted together, instead of buckets; at least 1. More make
                batches more alike, and epochs too.
            cost: What a sample takes to compute, 0 or more, shape (n,). None: ranks take turns,
                whatever their samples are. With it, the random numbers of a sample depend on the
                number of ranks.
            shuffle: Whether orders are random. Otherwise by key, smallest first: for validation.
            seed: Decides the orders. The same on all ranks. None: that of the loader.
            num_replicas: Number of ranks that share an epoch; None asks as
                `DistributedSampler` does.
            rank: This one; None asks likewise.

        Raises:
            ConfigError: one of the above does not hold, a sample is longer than `max_tokens`, or
                the size of an image is not known.
        """
        if key not in ("number", "aspect_ratio"):
            raise ConfigError(f"key should be 'number' or 'aspect_ratio', but got key={key!r}.")
        check_bool("drop_last", drop_last)
        check_bool("shuffle", shuffle)
        chosen = chosen_rank(rank, num_replicas)
        numbers = _checked_keys(_shape_keys(keys) if key == "aspect_ratio" else keys)
        costs = None if cost is None else checked_costs(cost, len(numbers))
        if window is None and key == "aspect_ratio":
            window = _WINDOW
        self.boundaries: NDArray[Any] | None = None
        self._order: _BucketOrder | None = None
        if window is not None:
            size = checked_positive("batch_size", batch_size)
            window = checked_positive("window", window)
            if max_tokens is not None or boundaries is not None:
                raise ConfigError(f"with a window leave out {max_tokens=}, {boundaries=}.")
            similar = _WindowOrder(
                numbers, size * chosen.world_size, window, seed, is_shuffled=shuffle
            )
            similar.costs, similar.num_dealt_to = costs, chosen.world_size
            order: IndexSampler = similar
            if chosen.world_size > 1:
                order = DistributedSampler(order, chosen.world_size, chosen.rank)
            super().__init__(order, size, drop_last)
            return
        _check_limits(numbers, batch_size, max_tokens)
        if (low := np.flatnonzero(numbers < 0)).size and (max_tokens or boundaries is None):
            raise ConfigError(
                "with max_tokens, or without boundaries, keys are lengths, 0 or more, but "
                f"keys[{low[0]}] is {numbers[low[0]]}."
            )
        self.boundaries = _boundaries(numbers, boundaries)
        buckets = np.searchsorted(self.boundaries, numbers, side="right")
        buckets = buckets.astype(np.min_scalar_type(len(self.boundaries)))
        sizes = _sizes(numbers, buckets, batch_size, max_tokens)
        self._order = _BucketOrder(numbers, buckets, sizes * chosen.world_size, seed)
        self._order.rank, self._order.num_replicas = chosen
        self._order.is_shuffled, self._order.is_cut = shuffle, drop_last
        self._order.costs = costs
        self.is_even = False
        super().__init__(self._order, int(sizes.max(initial=1)), drop_last)

    def __len__(self) -> int:
        """Return the number of batches, the same in every epoch and on every rank."""
        return super().__len__() if self._order is None else int(self._order.num_batches().sum())

    def layout(self) -> BatchLayout:
        """Return where the batches of the current epoch lie."""
        if (order := self._order) is None:
            return super().layout()
        # A batch has the places of the largest one, so that they are the same for any number of
        # ranks, whatever these take twice.
        per_batch = int(order.sizes.max(initial=1))
        return BatchLayout(order.rank, per_batch, order.world_size, order.offsets())


class _WindowOrder(IndexSampler):
    """Every index once, in random order, each run of `batch_size` of similar ones.

    With `costs`, the shares of `num_dealt_to` ranks that take turns in a run cost about the same.
    """

    costs: NDArray[np.float64] | None = None
    num_dealt_to: int = 1

    def __init__(
        self,
        keys: NDArray[Any],
        batch_size: int,
        window: int,
        seed: int | None,
        *,
        is_shuffled: bool,
    ) -> None:
        super().__init__(seed)
        self._keys = keys
        self.source_length = len(keys)
        self._batch_size = batch_size
        self._window = window
        self._is_shuffled = is_shuffled

    def __len__(self) -> int:
        return len(self._keys)

    def indices(self) -> NDArray[np.int64]:
        num_groups, num_left = divmod(len(self._keys), self._batch_size)
        if not self._is_shuffled:
            order = np.argsort(self._keys, kind="stable").astype(np.int64, copy=False)
            order, left = np.split(order, [len(order) - num_left])
            groups = self._dealt(order.reshape(num_groups, self._batch_size), None)
            return np.append(groups, left)
        rng = self.rng()
        order = rng.permutation(len(self._keys))
        # Those left over are taken before anything is sorted: otherwise they would be those with
        # the largest keys, and `drop_last` would hardly ever show them.
        grouped = order[: len(order) - num_left]
        size = self._window * self._batch_size
        for start in range(0, len(grouped), size):
            part = grouped[start : start + size]
            part[:] = part[np.argsort(self._keys[part], kind="stable")]
        groups = rng.permutation(grouped.reshape(num_groups, self._batch_size))
        return np.append(self._dealt(groups, rng), order[len(order) - num_left :])

    def _dealt(
        self, groups: NDArray[np.int64], rng: np.random.Generator | None
    ) -> NDArray[np.int64]:
        """Put each group into the order in which ranks that take turns get their shares."""
        if self.costs is None or self.num_dealt_to == 1:
            return groups
        begins = None if rng is None else rng.integers(self.num_dealt_to, size=len(groups))
        shares = dealt(self.costs[groups], self.num_dealt_to, begins)
        turns = shares.transpose(0, 2, 1).reshape(groups.shape)
        return np.take_along_axis(groups, turns, axis=1)

    def settings(self) -> dict[str, Any]:
        return {
            **super().settings(),
            "kind": "BucketSampler",  # that of earlier releases, whose states go on
            "keys": digest(self._keys),
            "batch_size": self._batch_size,
            "shuffle": self._is_shuffled,
            "window": self._window,
            **({} if self.costs is None else {"cost": digest(self.costs)}),
        }


class _BucketOrder(BatchOrder):
    """The batches of one rank in a row; `sizes` are of all ranks, for each bucket."""

    is_shuffled: bool = True
    is_cut: bool = False
    costs: NDArray[np.float64] | None = None

    def __init__(
        self,
        keys: NDArray[Any],
        buckets: NDArray[np.integer[Any]],
        sizes: NDArray[np.int64],
        seed: int | None,
    ) -> None:
        super().__init__(seed)
        self._keys = keys
        self.source_length = len(keys)
        self._buckets = buckets
        self._counts = np.bincount(buckets, minlength=len(sizes))
        self.sizes = sizes

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
        return np.append(0, np.cumsum(self._lengths()[self._turns(self.rng())]))

    def _turns(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """The order of the batches: drawn first, so that it can be had without the samples."""
        total = int(self.num_batches().sum())
        return rng.permutation(total) if self.is_shuffled else np.arange(total)

    def indices(self) -> NDArray[np.int64]:
        rng, ranks = self.rng(), self.num_replicas
        turns = self._turns(rng)
        samples = self._samples(rng)
        lengths = self._lengths()[turns]
        num_batches = self.num_batches()
        bucket = np.repeat(np.arange(len(self.sizes)), num_batches)  # of each batch
        number = np.arange(len(bucket)) - (np.cumsum(num_batches) - num_batches)[bucket]
        starts = np.cumsum(self._counts) - self._counts
        first = (starts[bucket] + number * self.sizes[bucket])[turns]
        if self.costs is not None and ranks > 1:
            return self._by_cost(samples, first, lengths, bucket[turns], rng)
        # Index j of this rank in a batch is index j * ranks + rank of the batch of all ranks.
        first += self.rank
        places = np.repeat(first - (np.cumsum(lengths) - lengths) * ranks, lengths)
        places += np.arange(0, len(places) * ranks, ranks)
        if ranks > 1:
            places = self._wrapped(places, np.repeat(bucket[turns], lengths))
        return samples[places]  # type: ignore[no-any-return]

    def _wrapped(
        self, places: NDArray[np.int64], buckets: NDArray[np.integer[Any]]
    ) -> NDArray[np.int64]:
        """Return places in all samples: behind a bucket's end, its first ones come once more."""
        starts = (np.cumsum(self._counts) - self._counts)[buckets]
        wrapped: NDArray[np.int64] = starts + (places - starts) % self._counts[buckets]
        return wrapped

    def _by_cost(
        self,
        samples: NDArray[np.int64],
        first: NDArray[Any],
        lengths: NDArray[np.int64],
        buckets: NDArray[np.integer[Any]],
        rng: np.random.Generator,
    ) -> NDArray[np.int64]:
        """Return the order, given where in `samples` each step begins, and its batches' length."""
        assert self.costs is not None
        order = np.empty(int(lengths.sum()), np.int64)
        offsets = np.cumsum(lengths) - lengths
        for length in np.unique(lengths).tolist():
            steps = np.flatnonzero(lengths == length)
            places = first[steps, None] + np.arange(length * self.num_replicas)
            groups = samples[self._wrapped(places, buckets[steps, None])]
            begins = rng.integers(self.num_replicas, size=len(steps)) if self.is_shuffled else None
            shares = dealt(self.costs[groups], self.num_replicas, begins)
            batches = np.take_along_axis(groups, shares[:, self.rank], axis=1)
            order[offsets[steps, None] + np.arange(length)] = batches
        return order

    def _samples(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """All samples, those of the first bucket first."""
        if not self.is_shuffled:
            return np.argsort(self._keys, kind="stable").astype(np.int64, copy=False)
        order = rng.permutation(len(self._keys))
        return order[np.argsort(self._buckets[order], kind="stable")]

    def settings(self) -> dict[str, Any]:
        return {
            "kind": "BucketBatchSampler",
            "seed": self.seed,
            "keys": digest(self._keys),
            "buckets": digest(self._buckets),
            "global_batch_sizes": digest(self.sizes),
            "shuffle": self.is_shuffled,
            "drop_last": self.is_cut,
            **({} if self.costs is None else {"cost": digest(self.costs)}),
        }


def _checked_keys(keys: ArrayLike) -> NDArray[Any]:
    """Return a copy of one finite number per sample, shape (n,)."""
    # Of a dataset, numpy would read every sample.
    is_given = isinstance(keys, Sequence) or hasattr(keys, "__array__")
    array = np.array(keys if is_given else None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iuf"):
        raise ConfigError(
            "keys should be one number per sample, such as [len(text) for text in texts], but got "
            f"a {type(keys).__name__} (shape {array.shape}, dtype {array.dtype})."
        )
    if (wrong := np.flatnonzero(~np.isfinite(array))).size:
        raise ConfigError(f"keys should be finite, but keys[{wrong[0]}] is {array[wrong[0]]}.")
    return array


def _check_limits(keys: NDArray[Any], batch_size: int | None, max_tokens: float | None) -> None:
    if batch_size is not None:
        checked_positive("batch_size", batch_size)
    elif max_tokens is None:
        raise ConfigError("batches need a batch_size, or max_tokens, or both; got neither.")
    if max_tokens is not None and (long := np.flatnonzero(~(keys <= max_tokens))).size:
        raise ConfigError(
            f"sample {long[0]} has length {keys[long[0]]}, which is more than "
            f"max_tokens={max_tokens} by itself ({long.size} such of {len(keys)}). Raise "
            "max_tokens, or leave such samples out with a penstock.data.Subset."
        )


def _boundaries(keys: NDArray[Any], given: ArrayLike | None) -> NDArray[Any]:
    if given is not None:
        found = np.array(given)
        is_numbers = found.ndim == 1 and found.dtype.kind in "iuf"
        if not is_numbers or not (found[1:] > found[:-1]).all():
            raise ConfigError(f"boundaries should be numbers that ascend, but got {given!r:.80}.")
        return found
    if not (keys > 0).any():
        return np.empty(0)
    lowest, highest = float(keys[keys > 0].min()), float(keys.max())
    # In logarithms: the quotient of the two may be beyond all numbers.
    first, last, step = np.log(lowest), np.log(highest), np.log(_GROWTH)
    boundaries: NDArray[np.float64]
    boundaries = np.exp(first + step * np.arange(int((last - first) / step) + 1))
    boundaries[0] = lowest  # what is below it has no length at all
    return boundaries


def _sizes(
    keys: NDArray[Any],
    buckets: NDArray[np.integer[Any]],
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
    fitting = np.floor(max_tokens / longest[has_length])
    fitting -= fitting * longest[has_length] > max_tokens  # it may have been rounded up
    sizes[has_length] = np.minimum(fitting, most).astype(np.int64)
    return np.maximum(sizes, 1)


def _known_sizes(source: Any) -> Any:  # noqa: ANN401
    """Sizes as given, or as the dataset has them; None if it has none. No sample is read."""
    if (sizes := getattr(source, "sizes_px", None)) is not None:
        return sizes
    inner, indices = getattr(source, "dataset", None), getattr(source, "indices", None)
    if inner is not None and indices is not None:
        sizes = _known_sizes(inner)
        return None if sizes is None else np.asarray(sizes)[np.asarray(indices, np.int64)]
    return source if isinstance(source, (list, tuple)) or hasattr(source, "__array__") else None


def _shape_keys(source: Any) -> NDArray[np.int64]:  # noqa: ANN401
    """Return numbers by which images sort by aspect ratio first, and then by area, in steps.

    In steps, so that many are equal, and chance puts these together anew in each epoch.
    """
    sizes = np.asarray(_known_sizes(source))
    if sizes.ndim != 2 or sizes.shape[1] != 2 or sizes.dtype.kind not in "iu":
        raise ConfigError(
            "by aspect ratio BucketBatchSampler takes height and width of each image, integers of "
            "shape (images, 2), or a dataset with such sizes_px, or a subset of one; got a "
            f"{type(source).__name__} (shape {sizes.shape}, dtype {sizes.dtype}). "
            "`penstock.images.headers.read_header` finds the size of a file without decoding it."
        )
    unknown = np.flatnonzero((sizes <= 0).any(axis=1))
    if unknown.size:
        raise ConfigError(
            f"heights and widths should be above 0, but those of image {unknown[0]} are "
            f"{tuple(sizes[unknown[0]].tolist())} ({unknown.size} such of {len(sizes)}). "
            "`penstock check` finds images that cannot be read."
        )
    heights, widths = np.log2(sizes.astype(np.float64)).T
    ratios = np.rint((heights - widths) * _RATIO_STEPS).astype(np.int64)
    areas = np.rint((heights + widths) * _AREA_STEPS).astype(np.int64)
    # Every other ratio counts down, so that a batch over the border of two is of one area.
    areas = np.where(ratios % 2, -areas, areas)
    keys: NDArray[np.int64] = ratios * 1024 + areas
    return keys
