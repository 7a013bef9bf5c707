# SPDX-License-Identifier: Apache-2.0
"""`ClassItems`: the samples of each class, and draws from them in turn."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError
from penstock.sampling.class_codes import ClassCodes
from penstock.sampling.samplers import digest
from penstock.sampling.shuffled_turns import drawn_by_turns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["ClassItems", "grouped"]

# Codes grouped, or numbers shuffled, at a time: those of all would take 16 bytes each.
_BLOCK: Final = 1 << 20
_LOW_BITS: Final = 16  # numpy sorts integers of so many bits by counting them, in O(n)


class ClassItems:
    """The samples of a dataset by their classes.

    A sample with several labels is an item of each of its classes, once. Samples without any make
    up a group of their own behind the classes. Draws are given as positions: of a class in
    `classes`, or `len(classes)` for those without.

    Attributes:
        classes: The labels' own values, ascending, shape (classes,): integers or strings.
        counts: Samples that have each class, int64 of shape (classes,), all above 0.
        num_samples: Samples of the dataset.

    Concurrency:
        Any number of threads may use one; nothing changes. Do not write to its arrays.

    Example:
        >>> items = ClassItems.of(np.array([7, 3, 7, 7]))
        >>> items.classes, items.counts, items.items_of(1)
        (array([3, 7]), array([1, 3]), array([0, 2, 3], dtype=uint32))
    """

    def __init__(
        self,
        classes: NDArray[Any],
        counts: NDArray[np.int64],
        items: NDArray[np.unsignedinteger[Any]],
        num_samples: int,
    ) -> None:
        """Keep the arrays.

        Args:
            classes: As the attribute.
            counts: As the attribute.
            items: Indices of samples, those of the first class first, and behind those of the last
                one the samples without a class.
            num_samples: As the attribute.
        """
        self.classes = classes
        self.counts = counts
        self.num_samples = num_samples
        self._items = items
        #: Samples of each class, and last of those without one.
        self.sizes: NDArray[np.int64] = np.append(counts, len(items) - int(counts.sum()))
        self._starts: NDArray[np.int64] = np.cumsum(self.sizes) - self.sizes

    @classmethod
    def of(cls, labels: NDArray[Any] | RaggedArray) -> ClassItems:
        """Group samples by their labels.

        Args:
            labels: One per sample, integers, bools or strings of shape (samples,); or the labels of
                each sample.

        Raises:
            ConfigError: there is no label at all.
        """
        values = labels.values if isinstance(labels, RaggedArray) else labels
        if not len(values):
            raise ConfigError(
                f"there is nothing to balance: {len(labels)} samples with no label at all."
            )
        found = ClassCodes(values)
        classes, codes = found.classes, found.of(values)
        del found  # its table may take as much as all that follows
        if isinstance(labels, RaggedArray):
            return cls._of_ragged(labels, classes, codes)
        counts = _counts(codes, len(classes))
        items = np.empty(len(labels), _index_dtype(len(labels)))
        for start, order, places in _blocks(codes, np.cumsum(counts) - counts):
            items[places] = start + order
        return cls(classes, counts, items, len(labels))

    @classmethod
    def _of_ragged(
        cls,
        labels: RaggedArray,
        classes: NDArray[Any],
        codes: NDArray[Any],
    ) -> ClassItems:
        order = grouped(codes, len(classes))
        num_labels = np.diff(labels.offsets)
        samples = np.repeat(np.arange(len(labels), dtype=np.int64), num_labels)[order]
        codes = codes[order]
        # Within a class the samples ascend, so that a class which one has twice stands together.
        is_first = np.ones(len(samples), bool)
        is_first[1:] = (samples[1:] != samples[:-1]) | (codes[1:] != codes[:-1])
        counts = _counts(codes[is_first], len(classes))
        without = np.flatnonzero(num_labels == 0)
        items = np.concatenate((samples[is_first], without))
        return cls(classes, counts, items.astype(_index_dtype(len(labels))), len(labels))

    def items_of(self, position: int) -> NDArray[np.unsignedinteger[Any]]:
        """Return the samples of one class, ascending: a view."""
        start = int(self._starts[position])
        return self._items[start : start + int(self.sizes[position])]

    def at(
        self, positions: NDArray[np.int64], numbers: NDArray[np.integer[Any]]
    ) -> NDArray[np.unsignedinteger[Any]]:
        """Return items of classes by their numbers in each, from 0; the two are broadcast."""
        chosen: NDArray[np.unsignedinteger[Any]] = self._items[self._starts[positions] + numbers]
        return chosen

    @property
    def unlabelled(self) -> NDArray[np.unsignedinteger[Any]]:
        """Samples without any class, ascending: a view."""
        return self.items_of(len(self.classes))

    @property
    def code_dtype(self) -> np.dtype[Any]:
        """The smallest type of integers that holds every position of a class."""
        return np.min_scalar_type(len(self.classes))

    @functools.cached_property
    def digest(self) -> str:
        """What tells these samples and classes from others: part of a loader's fingerprint."""
        return digest(self._items) + digest(self.counts)

    def independent(
        self, sequence: NDArray[np.integer[Any]], rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """Return an item for each entry of `sequence`, whatever was drawn before; a fresh array."""
        drawn = rng.integers(self.sizes[sequence])
        drawn += self._starts[sequence]
        chosen: NDArray[np.int64] = self._items[drawn].astype(np.int64)
        return chosen

    def cycled(
        self, sequence: NDArray[np.integer[Any]], rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """Return an item for each entry of `sequence`, by turns; a fresh array.

        A class goes through all of its items, in random order, before one comes again, which it
        does in another order.

        Args:
            sequence: Positions of classes, shape (draws,); best of type `code_dtype`.
            rng: Decides the orders.
        """
        return self.cycled_together(sequence, 1, rng).reshape(-1)

    def cycled_together(
        self, sequence: NDArray[np.integer[Any]], together: int, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """Return `together` items for each entry of `sequence`, by turns, as `cycled` does.

        The items of one entry differ, as long as the class has so many.

        Args:
            sequence: As for `cycled`.
            together: At least 1.
            rng: Decides the orders.

        Returns:
            Indices of samples, shape (draws, together); a fresh array.
        """
        entries = _counts(sequence, len(self.sizes))
        by_size = np.flatnonzero(entries)
        by_size = by_size[np.argsort(self.sizes[by_size], kind="stable")]
        starts = np.zeros_like(entries)
        starts[by_size] = np.cumsum(entries[by_size]) - entries[by_size]
        by_class = np.empty((len(sequence), together), self._items.dtype)
        num_drawn = 0
        for alike in self._alike(by_size, entries * together):
            numbers = drawn_by_turns(int(self.sizes[alike[0]]), entries[alike], together, rng)
            classes = np.repeat(alike, entries[alike])
            by_class[num_drawn : num_drawn + len(numbers)] = self.at(classes[:, None], numbers)
            num_drawn += len(numbers)
        drawn = np.empty(by_class.shape, np.int64)
        for start, order, places in _blocks(sequence, starts):
            drawn[start : start + len(order)][order] = by_class[places]
        return drawn

    def _alike(
        self, by_size: NDArray[np.int64], wanted: NDArray[np.int64]
    ) -> Iterator[NDArray[np.int64]]:
        """Cut classes into parts that are shuffled together: of one size, and not too many items.

        There are at most sqrt(2 n) sizes.
        """
        sizes = self.sizes[by_size]
        num_shuffled = np.cumsum(-(-wanted[by_size] // sizes) * sizes)
        is_cut = (np.diff(sizes) > 0) | (np.diff(num_shuffled // _BLOCK) > 0)
        return (part for part in np.split(by_size, np.flatnonzero(is_cut) + 1) if len(part))


def _counts(codes: NDArray[np.integer[Any]], num_codes: int) -> NDArray[np.int64]:
    """How often each code occurs; in blocks, as `np.bincount` takes a copy of 8 bytes each."""
    counts = np.zeros(num_codes, np.int64)
    for start in range(0, len(codes), _BLOCK):
        counts += np.bincount(codes[start : start + _BLOCK], minlength=num_codes)
    return counts


def _blocks(
    codes: NDArray[np.integer[Any]], starts: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """Group codes a block at a time: a sort of them all takes 16 bytes each, and misses the cache.

    Args:
        codes: Below `len(starts)`.
        starts: Where the places of each code begin, which are in a row.

    Yields:
        Of each block: where it begins; its indices, counted from there, grouped by code; and for
        each of these its place.
    """
    following = starts.copy()
    for start in range(0, len(codes), _BLOCK):
        block = codes[start : start + _BLOCK]
        here = np.bincount(block, minlength=len(starts))
        places = np.repeat(following - (np.cumsum(here) - here), here)
        places += np.arange(len(block))
        yield start, grouped(block, len(starts)), places
        following += here


def grouped(codes: NDArray[np.integer[Any]], num_codes: int) -> NDArray[np.int64]:
    """Return the indices that sort `codes`, equal ones in the order they had: a fresh array.

    Args:
        codes: Integers from 0 to `num_codes` - 1.
        num_codes: Decides how they are sorted: numpy takes O(n) for 16 bits, and O(n log n) above.
    """
    if num_codes <= 1 << _LOW_BITS:
        return np.argsort(codes.astype(np.uint16, copy=False), kind="stable")
    first = np.argsort((codes & 0xFFFF).astype(np.uint16), kind="stable")
    high = (codes >> _LOW_BITS)[first]
    return first[grouped(high, -(-num_codes >> _LOW_BITS) + 1)]


def _index_dtype(length: int) -> np.dtype[Any]:
    """What holds indices below `length`: in 4 bytes each, where that is enough."""
    return np.dtype(np.uint32 if length <= np.iinfo(np.uint32).max else np.uint64)
