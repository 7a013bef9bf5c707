# SPDX-License-Identifier: Apache-2.0
"""Orders in which similar samples stand together, so that batches of them waste little padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import ConfigError
from penstock.sampling.batches import BatchSampler
from penstock.sampling.distributed import DistributedSampler, chosen_rank
from penstock.sampling.samplers import IndexSampler, check_positive, digest

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["AspectRatioBatchSampler", "BucketSampler"]

_WINDOW: Final = 32  # groups that are sorted together
_RATIO_STEPS: Final = 8  # to a doubling of the aspect ratio: a batch differs by some 9 %
_AREA_STEPS: Final = 2  # to a doubling of the area
_DEEPEST: Final = 8  # subsets of subsets


class BucketSampler(IndexSampler):
    """Every index once, in random order, each run of `batch_size` of similar ones.

    A random order is cut into windows of many groups. Each window is sorted by `keys` and cut into
    groups, and then all groups are put in random order. So a batch holds similar samples, which
    ones is another draw in each epoch, and the order of the batches says nothing. Where the indices
    do not divide evenly, the last, shorter group is of samples as chance has it.

    Batches are `batch_size` indices in a row: `BatchSampler(sampler, batch_size, drop_last)`.

    Example:
        >>> lengths = [7, 1, 8, 2, 9, 3]
        >>> order = list(BucketSampler(lengths, batch_size=3))
        >>> sorted(sorted(lengths[i] for i in order[k : k + 3]) for k in (0, 3))
        [[1, 2, 3], [7, 8, 9]]
    """

    def __init__(
        self,
        keys: ArrayLike,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        window: int = _WINDOW,
    ) -> None:
        """Set what is similar, and the seed of the orders.

        Args:
            keys: A number per sample, shape (n,), finite: samples with close ones are similar. Kept
                as one array. Where many are equal, chance decides which of these come together.
            batch_size: Indices in a group, at least 1; the batch size, or that of all ranks
                together.
            shuffle: Whether orders are random. Otherwise the order is by `keys`, smallest first.
            seed: Decides the orders.
            window: Groups that are sorted together, at least 1. More make groups more alike, and
                epochs too.

        Raises:
            ConfigError: one of the above does not hold.
        """
        super().__init__(seed)
        check_positive("batch_size", batch_size)
        check_positive("window", window)
        check_bool("shuffle", shuffle)
        self.keys = checked_keys(keys)
        self.batch_size = int(batch_size)  # of numpy's integers there would be no JSON
        self.shuffle = shuffle
        self.window = int(window)

    @property
    def source_length(self) -> int:
        """Samples of the dataset that it was made for."""
        return len(self.keys)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.keys)

    def indices(self) -> NDArray[np.int64]:
        """Return the order of the current epoch, shape (samples,); a fresh array."""
        if not self.shuffle:
            return np.argsort(self.keys, kind="stable").astype(np.int64, copy=False)
        rng = self.rng()
        order = rng.permutation(len(self.keys))
        num_groups, num_left = divmod(len(order), self.batch_size)
        # Those left over are taken before anything is sorted: otherwise they would be those with
        # the largest keys, and `drop_last` would hardly ever show them.
        grouped = order[: len(order) - num_left]
        size = self.window * self.batch_size
        for start in range(0, len(grouped), size):
            part = grouped[start : start + size]
            part[:] = part[np.argsort(self.keys[part], kind="stable")]
        groups = rng.permutation(grouped.reshape(num_groups, self.batch_size))
        return np.concatenate((groups.ravel(), order[len(order) - num_left :]))

    def _varies(self) -> bool:
        return self.shuffle

    def settings(self) -> dict[str, Any]:
        """Return what the orders depend on; the keys by their digest."""
        return {
            **super().settings(),
            "keys": digest(self.keys),
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "window": self.window,
        }


def check_bool(name: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} should be a boolean value, but got {name}={value!r}.")


def checked_keys(keys: ArrayLike) -> NDArray[Any]:
    """Return a copy of one finite number per sample, shape (n,).

    Raises:
        ConfigError: they are not.
    """
    # Of a dataset, numpy would read every sample.
    if not isinstance(keys, Sequence) and not hasattr(keys, "__array__"):
        raise ConfigError(
            f"keys should be one number per sample, such as its length, but got a "
            f"{type(keys).__name__}. For a dataset give the lengths of its samples: an array, or a "
            "list such as [len(text) for text in texts]."
        )
    try:
        array = np.array(keys)
    except ValueError as error:  # lists of different lengths
        raise ConfigError(f"keys should be one number per sample, but {error}") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iuf"):
        raise ConfigError(
            "keys should be one number per sample, but got an array of shape "
            f"{array.shape}, dtype {array.dtype}."
        )
    if not np.isfinite(array).all():
        first = int(np.flatnonzero(~np.isfinite(array))[0])
        raise ConfigError(f"keys should be finite, but keys[{first}] is {array[first]}.")
    return array


class AspectRatioBatchSampler(BatchSampler):
    """Batches of images of similar shape, which are padded to one size at little cost.

    Images are alike in their aspect ratio, to 9 %, and among those in their area. For a loader's
    `batch_sampler`; it is a `BatchSampler` over a `BucketSampler`, so that a loader resumes in it
    at once. Every image comes once in an epoch.

    Example:
        >>> sizes_px = [(480, 640), (640, 480)] * 4
        >>> batches = AspectRatioBatchSampler(sizes_px, batch_size=4)
        >>> sorted(sorted(batch) for batch in batches), len(batches)
        ([[0, 2, 4, 6], [1, 3, 5, 7]], 2)
    """

    _shows = ("length", "batch_size", "drop_last", "epoch")

    def __init__(
        self,
        source: Any,  # noqa: ANN401 - sizes, or a dataset that knows them
        batch_size: int,
        drop_last: bool = False,
        *,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Set the sizes of the images and of the batches.

        Args:
            source: Height and width of each image, int (n, 2), above 0; or a dataset that has them
                as `sizes_px`, as the detection datasets of `penstock.vision` do; or a subset of
                such a dataset.
            batch_size: Images in a batch of this rank, at least 1.
            drop_last: Whether a last, shorter batch is left out.
            shuffle: Whether orders are random. Otherwise by shape: for validation.
            seed: Decides the orders. The same on all ranks.
            num_replicas: Number of ranks that share an epoch, step k of which is similar images on
                all of them; None asks as `DistributedSampler` does.
            rank: This one; None asks likewise.

        Raises:
            ConfigError: one of the above does not hold, or a size is not known.
        """
        check_positive("batch_size", batch_size)
        chosen = chosen_rank(rank, num_replicas)
        keys = _shape_keys(_sizes_of(source))
        order: IndexSampler = BucketSampler(
            keys, batch_size * chosen.world_size, shuffle=shuffle, seed=seed
        )
        if chosen.world_size > 1:
            order = DistributedSampler(order, chosen.world_size, chosen.rank)
        super().__init__(order, batch_size, drop_last)


def _sizes_of(source: Any) -> NDArray[np.int64]:  # noqa: ANN401
    known = _known_sizes(source)
    try:
        sizes = np.asarray(known)
    except ValueError:  # a list of things that have no common shape
        sizes = np.empty(0, object)
    if known is None or sizes.ndim != 2 or sizes.shape[1] != 2 or sizes.dtype.kind not in "iu":
        raise ConfigError(
            "AspectRatioBatchSampler takes the height and width of each image, integers of shape "
            "(images, 2), or a dataset with such sizes_px, or a subset of one; got "
            f"{_described(source, known, sizes)}."
        )
    unknown = np.flatnonzero((sizes <= 0).any(axis=1))
    if unknown.size:
        raise ConfigError(
            f"heights and widths should be above 0, but those of image {unknown[0]} are "
            f"{tuple(sizes[unknown[0]].tolist())} ({unknown.size} such of {len(sizes)}): its size "
            "is not known. `penstock check` finds images that cannot be read."
        )
    return sizes.astype(np.int64)


def _known_sizes(source: Any) -> Any:  # noqa: ANN401
    """Sizes as given, or as the dataset has them; None if it has none. No sample is read."""
    wanted: list[Any] = []  # indices of subsets of subsets, the outermost first
    for _ in range(_DEEPEST):
        if (sizes := getattr(source, "sizes_px", None)) is not None:
            sizes = np.asarray(sizes)
            for indices in reversed(wanted):
                sizes = sizes[np.asarray(indices, np.int64)]
            return sizes
        inner, indices = getattr(source, "dataset", None), getattr(source, "indices", None)
        if inner is None or indices is None:
            break
        wanted.append(indices)
        source = inner
    is_given = isinstance(source, (list, tuple)) or hasattr(source, "__array__")
    return source if is_given and not wanted else None


def _described(source: Any, known: Any, sizes: NDArray[Any]) -> str:  # noqa: ANN401
    kind = type(source).__name__
    if known is not None:
        return f"{kind} of shape {sizes.shape}, dtype {sizes.dtype}"
    return (
        f"a {kind}, which does not say them. `penstock.images.headers.read_header` finds those of "
        "a file without decoding it"
    )


def _shape_keys(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return numbers by which images sort by aspect ratio first, and then by area, in steps.

    In steps, so that many are equal, and chance puts these together anew in each epoch.
    """
    heights, widths = np.log2(sizes.astype(np.float64)).T
    ratios = np.rint((heights - widths) * _RATIO_STEPS).astype(np.int64)
    areas = np.rint((heights + widths) * _AREA_STEPS).astype(np.int64)
    # Every other ratio counts down, so that a batch over the border of two is of one area.
    areas = np.where(ratios % 2, -areas, areas)
    keys: NDArray[np.int64] = ratios * 1024 + areas
    return keys
