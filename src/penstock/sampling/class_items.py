# SPDX-License-Identifier: Apache-2.0
"""`ClassItems`: the samples of each class, and draws from them in turn."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.ragged import RaggedArray
from penstock.sampling.samplers import digest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_BLOCK: Final = 1 << 20  # numbers shuffled at a time
# Integers that span no more than so many, or than there are labels, are looked up in a table.
_LEAST_TABLE: Final = 1 << 16


def class_codes(labels: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.unsignedinteger[Any]]]:
    """Return the classes that occur, ascending, and the position among them of each label."""
    # Classes are uint64 if the labels are, int64 for other integers, else as the labels are. The
    # positions are of the smallest type that holds all of them, and one more: numpy sorts integers
    # of 8 or 16 bits by counting them, in O(n).
    if labels.dtype.kind in "iu" and len(labels):
        is_huge = labels.dtype.kind == "u" and labels.dtype.itemsize == 8
        labels = labels.astype(np.uint64 if is_huge else np.int64, copy=False)
        least = labels.min()
        span = int(labels.max()) - int(least) + 1
        if span <= max(_LEAST_TABLE, len(labels)):  # a tenth of the time of a sort
            above = labels - least
            occurs = np.zeros(span, np.bool_)
            occurs[above] = True
            classes = np.flatnonzero(occurs).astype(labels.dtype) + least
            table = (np.cumsum(occurs) - 1).astype(np.min_scalar_type(len(classes)))
            return classes, table[above]
    classes, codes = np.unique(labels, return_inverse=True)
    return classes, codes.astype(np.min_scalar_type(len(classes)))


class ClassItems:
    """The samples of a dataset by their classes.

    A sample with several labels is an item of each of its classes, once. Samples without any make
    up a group of their own behind the classes. Draws are given as positions: of a class in
    `classes`, or `len(classes)` for those without. `counts` are the samples that have each class,
    all above 0.
    """

    def __init__(self, labels: NDArray[Any] | RaggedArray) -> None:
        """Group samples by their labels, as `penstock.labels_of` has them."""
        values = labels.values if isinstance(labels, RaggedArray) else labels
        self.classes, codes = class_codes(values)
        # 4 bytes each, where that is enough.
        dtype = np.uint32 if len(labels) <= np.iinfo(np.uint32).max else np.uint64
        without = np.empty(0, dtype)
        if isinstance(labels, RaggedArray):
            items = grouped(codes, len(self.classes))
            num_labels = np.diff(labels.offsets)
            samples = np.repeat(np.arange(len(labels)), num_labels)[items]
            codes = codes[items]
            # Within a class the samples ascend, so that a class which one has twice stands
            # together.
            is_first = np.ones(len(samples), bool)
            is_first[1:] = (samples[1:] != samples[:-1]) | (codes[1:] != codes[:-1])
            items, codes = samples[is_first], codes[is_first]
            without = np.flatnonzero(num_labels == 0)
        self.num_samples = len(labels)
        self.counts: NDArray[np.int64] = _counts(codes, len(self.classes))
        #: Samples of each class, and last of those without one.
        self.sizes: NDArray[np.int64] = np.append(self.counts, len(without))
        self._starts: NDArray[np.int64] = np.cumsum(self.sizes) - self.sizes
        # Those of the first class first.
        self._items: NDArray[np.unsignedinteger[Any]] = np.empty(int(self.sizes.sum()), dtype)
        if isinstance(labels, RaggedArray):
            self._items[:] = np.concatenate((items, without))
        else:
            for start, order, places in _blocks(codes, self._starts):
                self._items[places] = start + order

    def items_of(self, position: int) -> NDArray[np.unsignedinteger[Any]]:
        """Return the samples of one class, ascending: a view."""
        start = int(self._starts[position])
        return self._items[start : start + int(self.sizes[position])]

    def sums(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the sum over the samples of each class, given a number for each sample."""
        labelled = self._items[: self._starts[-1]]
        if not len(labelled):
            return np.zeros(len(self.classes), values.dtype)
        return np.asarray(np.add.reduceat(values[labelled], self._starts[:-1]))

    @property
    def unlabelled(self) -> NDArray[np.unsignedinteger[Any]]:
        """Samples without any class, ascending: a view."""
        return self.items_of(len(self.classes))

    @functools.cached_property
    def digest(self) -> str:
        """A digest of these samples and classes: part of a loader's fingerprint."""
        return digest(self._items) + digest(self.counts)

    def independent(
        self, sequence: NDArray[np.integer[Any]], rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """Return an item for each entry of `sequence`, whatever was drawn before; a fresh array."""
        drawn = rng.integers(self.sizes[sequence])
        drawn += self._starts[sequence]
        return self._items[drawn].astype(np.int64)  # type: ignore[no-any-return]

    def cycled(
        self, sequence: NDArray[np.integer[Any]], rng: np.random.Generator, together: int = 1
    ) -> NDArray[np.int64]:
        """Return `together` items for each entry of `sequence`, by turns; shape (draws, together).

        A class goes through all of its items, in random order, before one comes again, which it
        does in another order. The items of one entry differ, as long as the class has so many.
        """
        entries = _counts(sequence, len(self.sizes))
        starts = np.cumsum(entries) - entries
        by_size = np.flatnonzero(entries)
        by_size = by_size[np.argsort(self.sizes[by_size], kind="stable")]
        by_class = np.empty((len(sequence), together), self._items.dtype)
        for alike in self._alike(by_size, entries * together):
            numbers = _drawn_by_turns(int(self.sizes[alike[0]]), entries[alike], together, rng)
            places = self._starts[np.repeat(alike, entries[alike])][:, None] + numbers
            by_class[_ranges(starts[alike], entries[alike])] = self._items[places]
        drawn = np.empty(by_class.shape, np.int64)
        for start, order, places in _blocks(sequence, starts):
            drawn[start : start + _BLOCK][order] = by_class[places]
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
    """Group codes, some at a time: all of them would take 16 bytes each, and miss the cache.

    Yields where a block begins, its indices from there, grouped by code, and the place of each,
    where those of a code follow one another from `starts[code]` on.
    """
    following = starts.copy()
    for start in range(0, len(codes), _BLOCK):
        block = codes[start : start + _BLOCK]
        here = np.bincount(block, minlength=len(starts))
        yield start, grouped(block, len(starts)), _ranges(following, here)
        following += here


def grouped(codes: NDArray[np.integer[Any]], num_codes: int) -> NDArray[np.int64]:
    """Return the indices that sort codes below `num_codes`, equal ones in the order they had."""
    if num_codes <= 1 << 16:  # numpy sorts integers of 16 bits by counting them, in O(n)
        return np.argsort(codes.astype(np.uint16, copy=False), kind="stable")
    return np.argsort(codes, kind="stable")


# Turn after turn of the same numbers, each in another random order: for draws without repeats.


def _drawn_by_turns(
    size: int, entries: NDArray[np.int64], together: int, rng: np.random.Generator
) -> NDArray[np.integer[Any]]:
    """Return numbers below `size` for some classes that have so many items each."""
    # `entries` says how many entries of `together` numbers each class has; the numbers of one entry
    # differ, if there are so many. Shape (entries.sum(), together), the first class first.
    wanted = entries * together
    if len(wanted) == 1 and wanted[0] <= size:
        # Of a large class perhaps few are wanted: no need to shuffle all of them.
        return rng.choice(size, int(wanted[0]), replace=False).reshape(-1, together)
    turns = -(-wanted // size)
    rows = shuffled_rows(int(turns.sum()), size, rng)
    if min(together, size) > 1:
        _keep_apart(rows, _ranges(np.zeros_like(turns), turns), together, rng)
    numbers = rows.reshape(-1)[_ranges((np.cumsum(turns) - turns) * size, wanted)]
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
    """Let no group of `together` numbers have one more often than it must."""
    # A group may begin at the end of one row, and end at the beginning of another. There, the
    # numbers that the first row had in it give way to the next ones of their row; the rest is
    # shuffled again. So a row depends on one before it. But every so many rows a group ends with a
    # row: all that are as many rows behind such an end can be done at once. `turn` says which row
    # of its class each is.
    size = rows.shape[1]
    period = together // math.gcd(size, together)
    for behind in range(1, min(period, int(turn.max(initial=0)) + 1)):
        num_before = behind * size % together
        num_here, num_first = together - num_before, num_before % size
        if not num_first or num_here >= size:
            continue  # the row, or the first, is in the group as a whole
        which = np.flatnonzero(turn % period == behind)
        first = rows[which - 1 - num_before // size, size - num_first :]
        is_shared = _are_in(rows[which, :num_here], first).any(axis=1)
        which, first = which[is_shared], first[is_shared]
        by_age = np.argsort(_are_in(rows[which], first), axis=1, kind="stable")
        moved = np.take_along_axis(rows[which], by_age, axis=1)
        # Behind the new ones all old numbers are at the end now, where chance would not have put
        # them.
        num_new = min(num_here, size - num_first)
        moved[:, num_new:] = rng.permuted(moved[:, num_new:], axis=1)
        rows[which] = moved


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
