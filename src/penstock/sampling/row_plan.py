# SPDX-License-Identifier: Apache-2.0
"""Packing of documents into rows of a fixed number of tokens: best fit, the longest first.

Documents of one length are interchangeable. So lengths are packed, not documents:

    16 x 700 tokens, rows of 2,048     8 rows of 700 700           free: 648 each
    11 x 648                           8 of them get 648           free: 0
                                       1 row of 648 648 648        free: 104

Rows that are packed alike are one `_Run`, and each line above is one step, however many rows it
covers. 10 million documents take some thousands of such steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.sampling.permutation import GroupShuffle

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WORD_BITS: Final = 1024


class _Layer(NamedTuple):
    """Documents of one length in the rows of a run, and the layer put there `before`, if any.

    Row r has the documents `base + r * per_row` to `base + (r + 1) * per_row - 1` of that length.
    """

    before: _Layer | None
    length: int
    per_row: int
    base: int


class _Run(NamedTuple):
    """Rows with consecutive numbers that hold documents of the same lengths."""

    first_row: int
    num_rows: int
    last: _Layer | None


class RowPlan:
    """Which documents make up each row; a pure function of the lengths.

    Rows are numbered in the order in which they were opened, and documents of a row are in
    descending length. So the first document of a row does not fit into any row of a lower number.

    Attributes:
        num_rows: Number of rows.
        max_documents: Most documents in a row.
    """

    def __init__(self, lengths: NDArray[np.integer], max_tokens: int) -> None:
        """Pack documents of length 1 to `max_tokens`; all others are left out."""
        is_packed = (lengths > 0) & (lengths <= max_tokens)
        if is_packed.all():
            packed = None
        else:
            packed = np.flatnonzero(is_packed)
            lengths = lengths[packed]
        lengths = lengths.astype(np.min_scalar_type(max_tokens))
        order = np.argsort(lengths, kind="stable")  # linear time for up to 16 bits
        if packed is not None:
            order = packed[order]
        #: Documents by length, those of one length in ascending order.
        self._by_length = order.astype(np.min_scalar_type(max(len(is_packed) - 1, 0)))
        self._sizes = np.bincount(lengths, minlength=max_tokens + 1)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self.num_rows, runs = _packed(self._sizes, max_tokens)
        self._first_rows = np.array([run.first_row for run in runs], np.int64)
        entries: list[tuple[int, int, int]] = []  # length, base, step from row to row
        bounds = [0]
        for run in runs:
            layers = []
            layer = run.last
            while layer is not None:
                layers.append(layer)
                layer = layer.before
            entries += (
                (layer.length, layer.base + number, layer.per_row)
                for layer in reversed(layers)
                for number in range(layer.per_row)
            )
            bounds.append(len(entries))
        self._entries = np.array(entries, np.int64).reshape(-1, 3).T.copy()
        self._bounds = np.array(bounds, np.int64)
        self._counts = np.diff(self._bounds)
        self._run_tokens = np.diff(np.append(0, np.cumsum(self._entries[0]))[self._bounds])
        self.max_documents = int(self._counts.max(initial=0))

    @property
    def num_documents(self) -> int:
        """Documents in all rows."""
        return len(self._by_length)

    def tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens in each of some rows."""
        return self._run_tokens[self._runs_of(rows)]

    def _runs_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._first_rows, rows, side="right") - 1

    def documents(
        self, rows: NDArray[np.int64], shuffle: GroupShuffle | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the documents of rows, one row after the other, and how many each row has.

        With a `shuffle`, documents of one length change places.
        """
        runs = self._runs_of(rows)
        counts = self._counts[runs]
        ends = np.cumsum(counts)
        places = np.repeat(self._bounds[runs] - ends + counts, counts)
        places += np.arange(len(places))
        lengths, numbers, steps = self._entries[:, places]
        numbers += np.repeat(rows, counts) * steps
        if shuffle is not None:
            numbers = shuffle.replaced(numbers, lengths)
        numbers += self._starts[lengths]
        return self._by_length[numbers].astype(np.int64), counts

    def group_shuffle(self, seed: int, *which: int) -> GroupShuffle:
        """Return a shuffle of the documents of each length."""
        return GroupShuffle(self._sizes, seed, *which)


class _Numbers:
    """A set of numbers, as bits in words; of each word a bit says whether it has any.

    One integer of all bits would be copied at every look: of 2^20, that takes 0.1 ms.
    """

    def __init__(self, largest: int) -> None:
        self._words = [0] * (largest // _WORD_BITS + 1)
        self._has_any = 0

    def flip(self, number: int) -> None:
        """Put a number in, or take it out."""
        which, bit = divmod(number, _WORD_BITS)
        self._words[which] ^= 1 << bit
        if self._words[which] in (0, 1 << bit):  # the last one, or the first
            self._has_any ^= 1 << which

    def least_from(self, number: int) -> int | None:
        """Return the least number that is there and at least `number`; None if there is none."""
        which, bit = divmod(number, _WORD_BITS)
        if higher := self._words[which] >> bit:
            return number + _lowest_bit(higher)
        if not (others := self._has_any >> which + 1):
            return None
        which += 1 + _lowest_bit(others)
        return which * _WORD_BITS + _lowest_bit(self._words[which])


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _packed(sizes: NDArray[np.int64], max_tokens: int) -> tuple[int, list[_Run]]:
    """Pack `sizes[length]` documents of each length; return the number of rows, and all runs."""
    by_free: list[list[_Run]] = [[] for _ in range(max_tokens + 1)]  # runs by tokens left
    free_sizes = _Numbers(max_tokens)  # k: there are rows with k tokens left
    num_rows = 0
    for length in np.flatnonzero(sizes)[::-1].tolist():
        left, taken = int(sizes[length]), 0
        while left:
            if (free := free_sizes.least_from(length)) is not None:  # enough, and the least
                runs = by_free[free]
                first_row, count, before = runs.pop()
                if not runs:
                    free_sizes.flip(free)
                per_row = free // length
            else:
                free, before, first_row = max_tokens, None, num_rows
                per_row = free // length
                count = -(-left // per_row)
                num_rows += count
            # A row is filled before the next one: after each document it has less room than the
            # others.
            whole = min(count, left // per_row)
            rest = left % per_row if whole < count else 0
            for rows, each in (
                (whole, per_row), (int(rest > 0), rest), (count - whole - int(rest > 0), 0),
            ):  # fmt: skip
                if not rows:
                    continue
                last = before
                if each:
                    last = _Layer(before, length, each, taken - first_row * each)
                    taken += rows * each
                    left -= rows * each
                now_free = free - each * length
                if not by_free[now_free]:
                    free_sizes.flip(now_free)
                by_free[now_free].append(_Run(first_row, rows, last))
                first_row += rows
    return num_rows, sorted(run for runs in by_free for run in runs)
