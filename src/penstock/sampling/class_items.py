# SPDX-License-Identifier: Apache-2.0
"""`ClassItems`: the samples of each class, and draws from them in turn."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError
from penstock.sampling.samplers import digest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["ClassItems", "class_codes", "grouped", "shuffled_rows"]

# Codes counted, or numbers shuffled, at a time: those of all would take 16 bytes each.
_BLOCK: Final = 1 << 20
_COMPARED: Final = 1 << 22  # numbers compared at a time
_LOW_BITS: Final = 16  # numpy sorts integers of so many bits by counting them, in O(n)
# Integers that span no more than so many, or than there are labels, are looked up in a table.
_LEAST_TABLE: Final = 1 << 16


def class_codes(labels: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.unsignedinteger[Any]]]:
    """Return the classes that occur, ascending, and the position among them of each label.

    Classes are uint64 if the labels are, int64 for other integers, else as the labels are. The
    positions are of the smallest type that holds all of them, and one more.
    """
    if labels.dtype.kind == "b":
        classes, codes = class_codes(labels.view(np.uint8))
        return classes.astype(np.bool_), codes
    if labels.dtype.kind in "iu" and len(labels):
        least, most = int(labels.min()), int(labels.max())
        if most - least < max(_LEAST_TABLE, len(labels)):
            return _codes_by_table(labels, least, most)
    classes = np.unique(labels)
    codes = np.empty(len(labels), np.min_scalar_type(len(classes)))
    for start in range(0, len(labels), _BLOCK):
        codes[start : start + _BLOCK] = np.searchsorted(classes, labels[start : start + _BLOCK])
    return (classes.astype(_wide(labels.dtype)) if labels.dtype.kind in "iu" else classes), codes


def _codes_by_table(
    labels: NDArray[Any], least: int, most: int
) -> tuple[NDArray[Any], NDArray[np.unsignedinteger[Any]]]:
    wide = _wide(labels.dtype)

    def blocks() -> Iterator[tuple[slice, NDArray[np.int64]]]:
        for start in range(0, len(labels), _BLOCK):
            part = slice(start, start + _BLOCK)
            yield part, _above(labels[part], wide.type(least))

    occurs = np.zeros(most - least + 1, np.bool_)
    for _, above_least in blocks():
        occurs[above_least] = True
    found = np.flatnonzero(occurs)
    table = np.cumsum(occurs, dtype=np.min_scalar_type(len(found)))
    table -= 1  # the least one occurs, so all were 1 or more
    codes = np.empty(len(labels), table.dtype)
    for part, above_least in blocks():
        codes[part] = table[above_least]
    return found.astype(wide) + wide.type(least), codes


def _above(labels: NDArray[Any], least: np.integer[Any]) -> NDArray[np.int64]:
    """How far labels are above the least one, which may be beyond what their type holds."""
    above: NDArray[np.int64] = labels.astype(least.dtype, copy=False) - least
    return above.astype(np.int64, copy=False)


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type of 8 bytes that holds all integers of a type."""
    return np.dtype(np.uint64 if dtype.kind == "u" and dtype.itemsize == 8 else np.int64)


class ClassItems:
    """The samples of a dataset by their classes.

    A sample with several labels is an item of each of its classes, once. Samples without any make
    up a group of their own behind the classes. Draws are given as positions: of a class in
    `classes`, or `len(classes)` for those without. `counts` are the samples that have each class,
    all above 0.
    """

    def __init__(
        self,
        classes: NDArray[Any],
        counts: NDArray[np.int64],
        items: NDArray[np.unsignedinteger[Any]],
        num_samples: int,
    ) -> None:
        """Keep the arrays.

        `items` are those of the first class first, and last the samples without a class.
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
        """Group samples by their labels, as `penstock.labels_of` has them."""
        values = labels.values if isinstance(labels, RaggedArray) else labels
        classes, codes = class_codes(values)
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

    def sums(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the sum over the samples of each class, given a number for each sample."""
        labelled = self._items[: len(self._items) - int(self.sizes[-1])]
        if not len(labelled):
            return np.zeros(len(self.classes), values.dtype)
        return np.asarray(np.add.reduceat(values[labelled], self._starts[:-1]))

    def check_any(self) -> None:
        """Raise `ConfigError` where no sample has a class."""
        if not len(self.classes):
            raise ConfigError(
                f"there is nothing to balance: {self.num_samples} samples with no label at all."
            )

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
        does in another order. The sequence is best of type `code_dtype`.
        """
        return self.cycled_together(sequence, 1, rng).reshape(-1)

    def cycled_together(
        self, sequence: NDArray[np.integer[Any]], together: int, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """Return `together` items for each entry of `sequence`, by turns, as `cycled` does.

        The items of one entry differ, as long as the class has so many; shape (draws, together).
        """
        entries = _counts(sequence, len(self.sizes))
        by_size = np.flatnonzero(entries)
        by_size = by_size[np.argsort(self.sizes[by_size], kind="stable")]
        starts = np.zeros_like(entries)
        starts[by_size] = np.cumsum(entries[by_size]) - entries[by_size]
        by_class = np.empty((len(sequence), together), self._items.dtype)
        num_drawn = 0
        for alike in self._alike(by_size, entries * together):
            numbers = _drawn_by_turns(int(self.sizes[alike[0]]), entries[alike], together, rng)
            places = self._starts[np.repeat(alike, entries[alike])][:, None] + numbers
            by_class[num_drawn : num_drawn + len(numbers)] = self._items[places]
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

    The places of each code are in a row from `starts` on. Yields, for each block, where it begins;
    its indices, counted from there, grouped by code; and for each of these its place.
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
    """Return the indices that sort codes below `num_codes`, equal ones in the order they had."""
    if num_codes <= 1 << _LOW_BITS:
        return np.argsort(codes.astype(np.uint16, copy=False), kind="stable")
    first = np.argsort((codes & 0xFFFF).astype(np.uint16), kind="stable")
    high = (codes >> _LOW_BITS)[first]
    return first[grouped(high, -(-num_codes >> _LOW_BITS) + 1)]


def _index_dtype(length: int) -> np.dtype[Any]:
    """What holds indices below `length`: in 4 bytes each, where that is enough."""
    return np.dtype(np.uint32 if length <= np.iinfo(np.uint32).max else np.uint64)


# Turn after turn of the same numbers, each in another random order: for draws without repeats.


def _drawn_by_turns(
    size: int, entries: NDArray[np.int64], together: int, rng: np.random.Generator
) -> NDArray[np.integer[Any]]:
    """Return numbers below `size` for some classes that have so many items each.

    `entries` says how many entries of `together` numbers each class has; the numbers of one entry
    differ, if there are so many. Shape (entries.sum(), together), the first class first.
    """
    wanted = entries * together
    if len(wanted) == 1 and wanted[0] <= size:
        # Of a large class perhaps few are wanted: no need to shuffle all of them.
        return rng.choice(size, int(wanted[0]), replace=False).reshape(-1, together)
    turns = -(-wanted // size)
    rows = shuffled_rows(int(turns.sum()), size, rng)
    if min(together, size) > 1:
        _keep_apart(rows, _ranges(np.zeros_like(turns), turns), together, rng)
    numbers = rows.reshape(-1)
    if len(numbers) != int(wanted.sum()):
        starts = (np.cumsum(turns) - turns) * size
        numbers = numbers[_ranges(starts, wanted)]
    return numbers.reshape(-1, together)


def shuffled_rows(
    num_rows: int, size: int, rng: np.random.Generator
) -> NDArray[np.unsignedinteger[Any]]:
    """Return 0 to `size` - 1 in random order, many times: shape (num_rows, size)."""
    rows = np.tile(np.arange(size, dtype=np.min_scalar_type(size)), (num_rows, 1))
    if size > 1:
        rng.permuted(rows, axis=1, out=rows)
    return rows


def _keep_apart(
    rows: NDArray[Any], turn: NDArray[np.int64], together: int, rng: np.random.Generator
) -> None:
    """Let no group of `together` numbers have one more often than it must.

    A group may begin at the end of one row, and end at the beginning of another. There, the numbers
    that the first row had in it give way to the next ones of their row; the rest is shuffled again.
    So a row depends on one before it. But every so many rows a group ends with a row: all that are
    as many rows behind such an end can be done at once. `turn` says which row of its class each is.
    """
    size = rows.shape[1]
    period = together // math.gcd(size, together)
    for behind in range(1, min(period, int(turn.max(initial=0)) + 1)):
        num_before = behind * size % together
        num_here, num_first = together - num_before, num_before % size
        if num_first and num_here < size:  # else the row, or the first, is in the group as a whole
            which = np.flatnonzero(turn % period == behind)
            first = rows[which - 1 - num_before // size, size - num_first :]
            _give_way(rows, which, first, num_here, rng)


def _give_way(
    rows: NDArray[Any],
    which: NDArray[np.int64],
    first: NDArray[Any],
    num_here: int,
    rng: np.random.Generator,
) -> None:
    """Let some rows begin with `num_here` numbers that are not in `first`, if they have so many."""
    is_shared = _are_in(rows[which, :num_here], first).any(axis=1)
    which, first = which[is_shared], first[is_shared]
    num_new = min(num_here, rows.shape[1] - first.shape[1])
    step = max(_COMPARED // rows.shape[1], 1)
    for start in range(0, len(which), step):
        part = which[start : start + step]
        is_old = _are_in(rows[part], first[start : start + step])
        by_age = np.argsort(is_old, axis=1, kind="stable")
        moved = np.take_along_axis(rows[part], by_age, axis=1)
        # Behind the first ones all old numbers are at the end now, where chance would not have put
        # them.
        moved[:, num_new:] = rng.permuted(moved[:, num_new:], axis=1)
        rows[part] = moved


def _are_in(rows: NDArray[Any], others: NDArray[Any]) -> NDArray[np.bool_]:
    """Which numbers of each row are in the same row of others."""
    found = np.zeros(rows.shape, bool)
    for column in others.T:
        found |= rows == column[:, None]
    return found


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """`starts[i]`, `starts[i]` + 1, …, `lengths[i]` numbers of each, in a row."""
    first = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    first += np.arange(len(first))
    return first
