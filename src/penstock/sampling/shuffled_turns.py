# SPDX-License-Identifier: Apache-2.0
"""Turn after turn of the same numbers, each in another random order: for draws without repeats."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["drawn_by_turns", "shuffled_rows"]

_BLOCK: Final = 1 << 22  # numbers compared at a time


def drawn_by_turns(
    size: int, entries: NDArray[np.int64], together: int, rng: np.random.Generator
) -> NDArray[np.integer[Any]]:
    """Return numbers below `size` for some classes that have so many items each.

    A class goes through all the numbers, in random order, before one comes again, which it does in
    another order. The `together` numbers of one entry differ, if there are so many.

    Args:
        size: At least 1.
        entries: Wanted of each class, at least 1.
        together: Numbers of an entry, at least 1.
        rng: Decides the orders.

    Returns:
        Shape (entries.sum(), together), those of the first class first; a fresh array.
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
    as many rows behind such an end can be done at once.

    Args:
        rows: Shuffled; changed in place.
        turn: Which row of its class each one is.
        together: At least 1.
        rng: Shuffles.
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
    step = max(_BLOCK // rows.shape[1], 1)
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
