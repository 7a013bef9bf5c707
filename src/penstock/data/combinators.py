# SPDX-License-Identifier: Apache-2.0
"""Datasets made of datasets, and of arrays.

Names, checks and results are those of `torch.utils.data`, without torch; `ArrayDataset` is the
numpy sibling of its `TensorDataset`. All of them read whole batches at once where their parts can.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from penstock.collate import Collator
from penstock.data.dataset import (
    Dataset,
    IterableDataset,
    batch_reader,
    counted_from_start,
    read_each,
    register_combinator,
    register_drawless,
)
from penstock.errors import CollateError, ConfigError
from penstock.randomness.samples import renumbered_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

    from penstock.data.dataset import Allocator

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ArrayDataset(Dataset[tuple[Any, ...]]):
    """Arrays side by side: sample i is the tuple of their i-th rows.

    Example:
        >>> data = ArrayDataset(np.arange(6).reshape(3, 2), np.array([True, False, True]))
        >>> len(data), data[1]
        (3, (array([2, 3]), np.False_))
        >>> data.get_batch(np.array([0, -1]), np.empty)
        [array([[0, 1],
               [4, 5]]), array([ True,  True])]
    """

    _shows = ("length", "arrays")

    def __init__(self, *arrays: ArrayLike) -> None:
        """Put arrays side by side: at least one, each of shape (length, ...), none copied."""
        self.arrays: tuple[NDArray[Any], ...] = tuple(np.asanyarray(array) for array in arrays)
        shapes = [array.shape for array in self.arrays]
        if not shapes or not all(shapes) or len({shape[0] for shape in shapes}) != 1:
            raise ConfigError(
                f"ArrayDataset takes one or more arrays (length, ...) of one length; got {shapes}."
            )

    def __len__(self) -> int:
        """Return the length of the first dimension."""
        return len(self.arrays[0])

    def __getitem__(self, index: Any) -> tuple[Any, ...]:  # noqa: ANN401 - whatever numpy takes
        """Return the rows at `index`: views of the arrays, or numpy scalars."""
        return tuple(array[index] for array in self.arrays)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, ...]]:
        """Return the samples at `indices`, rows of one fresh array for each of `arrays`."""
        chosen = np.asarray(indices, np.int64)
        return list(zip(*(array[chosen] for array in self.arrays), strict=True))

    @property
    def can_get_batch(self) -> bool:
        """Whether all arrays are plain ones of numbers or bools, in the machine's byte order."""
        return all(
            type(array) in (np.ndarray, np.memmap)
            and array.dtype.kind in "biufc"
            and array.dtype.isnative
            for array in self.arrays
        )

    def get_batch(self, indices: NDArray[np.int64], alloc: Allocator) -> list[NDArray[Any]]:
        """Return the rows of each array, gathered into arrays from `alloc`."""
        chosen = counted_from_start(indices, len(self), f"a dataset of {len(self)} samples")
        return [_gather(array, chosen, alloc) for array in self.arrays]


def _gather(array: NDArray[Any], indices: NDArray[np.int64], alloc: Allocator) -> NDArray[Any]:
    out = alloc((len(indices), *array.shape[1:]), array.dtype)
    if array.flags.c_contiguous:
        # mode="raise" would gather into a buffer first, so that an error leaves `out` alone.
        return np.take(array, indices, axis=0, out=out, mode="clip")
    out[...] = array[indices]  # np.take would first copy all of a strided array
    return out


class StackDataset(Dataset[Any]):
    """Datasets side by side: sample i is a tuple, or a dict, of their samples i.

    Example:
        >>> data = StackDataset(image=range(0, 30, 10), label=["a", "b", "c"])
        >>> data[1]
        {'image': 10, 'label': 'b'}
    """

    _shows = ("length", "datasets")

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - anything with an index
        """Put datasets of one length side by side.

        Args:
            *args: Datasets, for samples that are tuples.
            **kwargs: Or datasets by name, for samples that are dicts.
        """
        if args and kwargs:
            raise ConfigError(
                f"StackDataset takes datasets by position or by name, not both; got {len(args)} by "
                f"position and {sorted(kwargs)} by name."
            )
        self.datasets: tuple[Any, ...] | dict[str, Any] = args or kwargs
        lengths = [len(dataset) for dataset in self._parts()]
        if len(set(lengths)) != 1:
            raise ConfigError(
                f"Size mismatch between datasets: {len(lengths)} of them have {lengths} samples. "
                "Stack one or more of one length; `Subset` shortens one."
            )
        self._length = lengths[0]

    def _parts(self) -> list[Any]:
        return list(self.datasets.values() if isinstance(self.datasets, dict) else self.datasets)

    def __len__(self) -> int:
        """Return the length that the datasets had when they were stacked."""
        return self._length

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - a tuple or a dict
        """Return a tuple, or dict, of the datasets' samples at `index`."""
        return self._named(dataset[index] for dataset in self._parts())

    def _named(self, row: Iterable[Any]) -> Any:  # noqa: ANN401 - a tuple or a dict
        if isinstance(self.datasets, dict):
            return dict(zip(self.datasets, row, strict=True))
        return tuple(row)

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Return the samples at `indices`, by the datasets' own `__getitems__` if any."""
        rows = zip(*(_read_samples(dataset, indices) for dataset in self._parts()), strict=True)
        return list(map(self._named, rows))

    @property
    def can_get_batch(self) -> bool:
        """Whether all datasets can be read by the batch."""
        return all(batch_reader(dataset) is not None for dataset in self._parts())

    def get_batch(self, indices: NDArray[np.int64], alloc: Allocator) -> Any:  # noqa: ANN401 - a list or a dict
        """Return the datasets' batches: a list, or a dict by name."""
        batches = [_reader(dataset)(indices, alloc) for dataset in self._parts()]
        return self._named(batches) if isinstance(self.datasets, dict) else batches


def _read_samples(dataset: Any, indices: Sequence[Any]) -> list[Any]:  # noqa: ANN401
    many: Callable[[Sequence[Any]], list[Any]] | None = getattr(dataset, "__getitems__", None)
    if not callable(many):
        return [dataset[index] for index in indices]
    samples = many(indices)
    if len(samples) != len(indices):
        raise ValueError(
            f"Nested dataset's output size mismatch: {type(dataset).__name__}.__getitems__ "
            f"returned {len(samples)} samples for {len(indices)} indices."
        )
    return samples


def _reader(dataset: object) -> Callable[[NDArray[np.int64], Allocator], Any]:
    reader = batch_reader(dataset)
    if reader is None:
        raise TypeError(f"{type(dataset).__name__} has no get_batch, or can_get_batch is false.")
    return reader


class ConcatDataset(Dataset[T_co]):
    """Datasets one after the other.

    Example:
        >>> data = ConcatDataset([["a", "b"], ["c"]])
        >>> len(data), data[2], data[-3]
        (3, 'c', 'a')
    """

    _shows = ("length", "datasets")

    def __init__(self, datasets: Iterable[Any]) -> None:
        """Put datasets one after the other: at least one, map-style, with a length."""
        self.datasets: list[Any] = list(datasets)
        streams = [
            type(part).__name__ for part in self.datasets if isinstance(part, IterableDataset)
        ]
        if not self.datasets:
            raise AssertionError("datasets should not be an empty iterable: give one or more.")
        if streams:
            raise AssertionError(
                f"ConcatDataset does not support IterableDataset, got {streams}: use ChainDataset."
            )
        self.cumulative_sizes = list(itertools.accumulate(map(len, self.datasets)))

    def __len__(self) -> int:
        """Return the sum of the lengths that the datasets had at construction."""
        return self.cumulative_sizes[-1]

    def __getitem__(self, index: int) -> T_co:
        """Return the sample at `index`; a negative one counts from the end."""
        part, offset = self._locate(index)
        return self.datasets[part][offset]  # type: ignore[no-any-return]

    def _locate(self, index: int) -> tuple[int, int]:
        """Which dataset, and which index in it."""
        length = len(self)
        if index < -length:
            raise ValueError(
                "absolute value of index should not exceed dataset length: "
                f"{index} is out of range for {length} samples."
            )
        if index >= length:
            raise IndexError(f"index {index} is out of range for a dataset of {length} samples.")
        if index < 0:
            index += length
        part = bisect.bisect_right(self.cumulative_sizes, index)
        return part, index - (self.cumulative_sizes[part - 1] if part else 0)

    def __getitems__(self, indices: Sequence[int]) -> list[T_co]:
        """Return the samples at `indices`, by the datasets' own `__getitems__` if any."""
        located = [self._locate(index) for index in indices]
        samples: list[Any] = [None] * len(located)
        for part in sorted({part for part, _ in located}):
            positions = [position for position, place in enumerate(located) if place[0] == part]
            offsets = [located[position][1] for position in positions]
            with renumbered_samples(np.array(positions)):
                found = _read_samples(self.datasets[part], offsets)
            for position, sample in zip(positions, found, strict=True):
                samples[position] = sample
        return samples

    @property
    def can_get_batch(self) -> bool:
        """Whether all datasets can be read by the batch."""
        return all(batch_reader(dataset) is not None for dataset in self.datasets)

    def get_batch(self, indices: NDArray[np.int64], alloc: Allocator) -> Any:  # noqa: ANN401 - a batch tree
        """Return the samples at `indices` as one batch, each dataset's share read at once.

        Raises:
            CollateError: the datasets' samples do not fit together.
        """
        for index in indices[(indices < -len(self)) | (indices >= len(self))][:1].tolist():
            self._locate(index)  # raises

        def joined(leaves: list[Any], positions: list[NDArray[np.intp]]) -> NDArray[Any]:
            first = leaves[0]
            if any(
                type(leaf) is not np.ndarray
                or leaf.shape[1:] != first.shape[1:]
                or leaf.dtype != first.dtype
                for leaf in leaves
            ):
                raise UnlikeBatchesError
            out = alloc((sum(map(len, positions)), *first.shape[1:]), first.dtype)
            for leaf, rows in zip(leaves, positions, strict=True):
                out[rows] = leaf
            return out

        def read(part: int, offsets: NDArray[np.int64], into: Allocator) -> Any:  # noqa: ANN401
            return _reader(self.datasets[part])(offsets, into)

        with contextlib.suppress(UnlikeBatchesError):
            return read_parts(indices, self.cumulative_sizes, read, joined, alloc)
        # Made of samples: for parts that differ, and the error that names two.
        numbers = indices.tolist()
        try:
            return Collator(alloc).batch(read_each(self, numbers))
        except CollateError as error:
            error.name_samples(numbers)
            raise


class UnlikeBatchesError(Exception):
    """Batches of two datasets differ in structure, shape or dtype, or hold more than arrays."""


def read_parts(
    indices: NDArray[np.int64],
    ends: Sequence[int],
    read: Callable[[int, NDArray[np.int64], Allocator], Any],
    joined: Callable[[list[Any], list[NDArray[np.intp]]], Any],
    alloc: Allocator,
) -> Any:  # noqa: ANN401 - a batch tree
    """Return a batch of datasets that lie one after the other, each one's share read at once.

    `joined` makes one array of those of all shares, whose rows have these positions. Raises
    `UnlikeBatchesError` where the shares do not fit together.
    """
    chosen = np.where(indices < 0, indices + ends[-1], indices)
    sizes = np.asarray(ends)
    parts = np.searchsorted(sizes, chosen, side="right")
    offsets = chosen - np.concatenate(([0], sizes))[parts]
    asked = np.unique(parts).tolist()
    if len(asked) == 1:  # nothing to bring into order
        return read(asked[0], offsets, alloc)
    positions = [np.flatnonzero(parts == part) for part in asked]
    batches = []
    for part, rows in zip(asked, positions, strict=True):
        with renumbered_samples(rows):
            batches.append(read(part, offsets[rows], np.empty))
    return _merged(batches, lambda leaves: joined(leaves, positions))


def _merged(batches: list[Any], joined: Callable[[list[Any]], Any]) -> Any:  # noqa: ANN401
    first = batches[0]
    shapes = [
        list(batch) if type(batch) is dict else len(batch) if type(batch) is list else type(batch)
        for batch in batches
    ]
    if any(shape != shapes[0] for shape in shapes):
        raise UnlikeBatchesError
    if type(first) is dict:
        return {key: _merged([batch[key] for batch in batches], joined) for key in first}
    if type(first) is list:
        return [_merged(list(column), joined) for column in zip(*batches, strict=True)]
    return joined(batches)


class ChainDataset(IterableDataset[T_co]):
    """Streams one after the other.

    Example:
        >>> class Letters(IterableDataset[str]):
        ...     def __iter__(self) -> Iterator[str]:
        ...         return iter("ab")
        >>> list(ChainDataset([Letters(), Letters()]))
        ['a', 'b', 'a', 'b']
    """

    _shows = ("length", "datasets")

    def __init__(self, datasets: Iterable[Any]) -> None:
        """Put streams one after the other; they are looked at when they are iterated."""
        self.datasets = datasets

    def __iter__(self) -> Iterator[T_co]:
        """Yield all samples of the first dataset, then of the next."""
        for dataset in self.datasets:
            if not isinstance(dataset, IterableDataset):
                raise AssertionError(
                    "ChainDataset only supports IterableDataset, but got "
                    f"{type(dataset).__name__}. Use ConcatDataset for map-style datasets."
                )
            yield from dataset

    def __len__(self) -> int:
        """Return the sum of the datasets' lengths."""
        return sum(map(len, self.datasets))


class Subset(Dataset[T_co]):
    """The samples of a dataset at some indices.

    Example:
        >>> part = Subset("abcdef", [5, 0, -2])
        >>> len(part), part[0], part.indices
        (3, 'f', array([ 5,  0, -2]))
    """

    _shows = ("length", "dataset")

    def __init__(self, dataset: Any, indices: Sequence[Any] | NDArray[Any]) -> None:  # noqa: ANN401
        """Choose samples.

        Args:
            dataset: The whole.
            indices: Indices, or keys, into it. Integers are kept as one int64 array, so a subset of
                millions is one array for all workers.

        Raises:
            NotImplementedError: a subclass overrides `__getitem__` but not `__getitems__`, which
                would then give other samples.
        """
        cls = type(self)
        if cls.__getitem__ is not Subset.__getitem__ and cls.__getitems__ is Subset.__getitems__:
            raise NotImplementedError(
                f"{cls.__name__} overrides __getitem__ but not __getitems__, which reads batches. "
                "Override that too, for example: return [self[index] for index in indices]."
            )
        numbers = _as_int64(indices)
        self.dataset = dataset
        self.indices: Any = indices if numbers is None else numbers

    def __len__(self) -> int:
        """Return the number of indices."""
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401
        """Return the sample at `indices[index]`; for a list, what the dataset gives for a list."""
        if isinstance(index, list):
            return self.dataset[self._inner(index)]
        return self.dataset[self._inner([index])[0]]

    def __getitems__(self, indices: Sequence[int]) -> list[T_co]:
        """Return the samples at `indices`, by the dataset's own `__getitems__` if it has one."""
        inner = self._inner(indices)
        return _read_samples(self.dataset, inner)

    def _inner(self, indices: Sequence[int]) -> list[Any]:
        """Indices of the whole, as Python's own integers: a dataset may well be a dict of them."""
        if isinstance(self.indices, np.ndarray):
            chosen: list[Any] = self.indices[np.asarray(indices, np.int64)].tolist()
            return chosen
        return [self.indices[index] for index in indices]

    @property
    def order_follower(self) -> Any:  # noqa: ANN401
        """That of the dataset, for its own indices."""
        has_one = hasattr(type(self.dataset), "order_follower")
        follow = self.dataset.order_follower if has_one else None
        return follow and (lambda *orders: follow(*map(self._inner_array, orders)))

    def _inner_array(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        if isinstance(self.indices, np.ndarray):
            return self.indices[indices]
        return np.array([self.indices[index] for index in indices.tolist()])

    @property
    def can_get_batch(self) -> bool:
        """Whether the indices are integers and the dataset can be read by the batch."""
        is_numbered = isinstance(self.indices, np.ndarray) and self.indices.dtype == np.int64
        return is_numbered and batch_reader(self.dataset) is not None

    def get_batch(self, indices: NDArray[np.int64], alloc: Allocator) -> Any:  # noqa: ANN401 - a batch tree
        """Return the dataset's batch at `self.indices[indices]`."""
        return _reader(self.dataset)(self.indices[indices], alloc)


register_drawless(ArrayDataset)
register_combinator(StackDataset, StackDataset._parts)
register_combinator(ConcatDataset, lambda concat: concat.datasets)
register_combinator(Subset, lambda subset: [subset.dataset])


def _as_int64(indices: Any) -> NDArray[np.int64] | None:  # noqa: ANN401 - any sequence
    """A 1-D sequence of integers as an array of its own, or None if it is anything else."""
    if not hasattr(indices, "dtype") and not isinstance(indices, range):
        # Do not turn a million strings into an array to see.
        kinds = set(map(type, indices))
        if not all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds):
            return None
    array = np.asarray(indices)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        return None
    return array.astype(np.int64)


def random_split(dataset: Any, lengths: Sequence[int | float], seed: int = 0) -> list[Subset[Any]]:  # noqa: ANN401
    """Split a dataset at random into parts that do not overlap.

    Args:
        dataset: Has a length.
        lengths: Samples per part, summing to the length; or fractions summing to 1, whose parts are
            rounded down and the samples left over dealt out in turn from the first part on.
        seed: Decides the split, with `lengths`. Not negative.

    Returns:
        One `Subset` for each length.

    Example:
        >>> [len(part) for part in random_split(range(10), [0.5, 0.25, 0.25])]
        [6, 2, 2]
    """
    total = sum(lengths)
    sizes = [int(length) for length in lengths]
    if math.isclose(total, 1) and total <= 1:
        sizes = [math.floor(len(dataset) * fraction) for fraction in lengths]
        for extra in range(len(dataset) - sum(sizes)):
            sizes[extra % len(sizes)] += 1
    elif sizes != list(lengths):
        sizes = []
    if sum(sizes) != len(dataset) or min(sizes, default=0) < 0:
        raise ConfigError(
            "Sum of input lengths does not equal the length of the input dataset! Lengths "
            f"{list(lengths)} sum to {total}, the dataset has {len(dataset)} samples. Give whole "
            "numbers that sum to it, or fractions that sum to 1."
        )
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
    order = rng.permutation(len(dataset))
    return [
        Subset(dataset, order[stop - size : stop])
        for size, stop in zip(sizes, itertools.accumulate(sizes), strict=True)
    ]
