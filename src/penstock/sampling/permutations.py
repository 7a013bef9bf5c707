# SPDX-License-Identifier: Apache-2.0
"""Many shuffled orders side by side, of which any mixture of positions is computed at once.

One call of `Permutation` costs some 100 us however few positions are asked for, so a block of
16,384 positions that belong to 1,000 orders would take 0.1 s. Here the rounds of the cipher run
over all positions together, each with the numbers of its own order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.randomness.keys import Purpose, seed_sequence
from penstock.sampling.feistel import KEYS_PER_ROUND, PIECE, ROUNDS, Scratch, encipher
from penstock.sampling.permutation import TABLE_LIMIT, Permutation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Permutations"]

_NO_TABLE: Final = -1


class Permutations:
    """Orders 0, 1, 2 …: number k is `Permutation(lengths[k], seeds[k])`, value for value.

    Takes some 50 us per order to make, 100 bytes for each long one and 2 per item for those up to
    `TABLE_LIMIT`; then some 60 ns per value, however the positions are spread over the orders.

    Concurrency:
        Any number of threads may use one.

    Example:
        >>> both = Permutations([5, 10**10], [(7, 0), (7, 1)])
        >>> both.at(np.array([0, 1, 0]), np.array([4, 3, 0]))
        array([        3, 338145934,         1])
        >>> Permutation(10**10, (7, 1))[3]
        338145934
    """

    def __init__(self, lengths: Sequence[int], seeds: Sequence[tuple[int, ...]]) -> None:
        """Make the orders.

        Args:
            lengths: Items of each, 0 to 2^62.
            seeds: One for each, as `Permutation` takes them.
        """
        count = len(lengths)
        self._lengths = np.array(lengths, np.int64)
        self._a = np.ones(count, np.uint64)
        self._b = np.ones(count, np.uint64)
        self._keys = np.zeros((ROUNDS, KEYS_PER_ROUND, count), np.uint32)
        self._table_starts = np.full(count, _NO_TABLE, np.int64)
        tables = [np.empty(0, np.uint16)]
        num_stored = 0
        for number, (length, seed) in enumerate(zip(lengths, seeds, strict=True)):
            if length > TABLE_LIMIT:
                self._set_keys(number, length, seed)
                continue
            self._table_starts[number] = num_stored
            tables.append(Permutation(length, seed)[:].astype(np.uint16))
            num_stored += length
        self._tables = np.concatenate(tables)

    def _set_keys(self, number: int, length: int, seed: tuple[int, ...]) -> None:
        side = math.isqrt(length - 1) + 1
        self._a[number], self._b[number] = -(-length // side), side
        first, *rest = seed
        sequence = seed_sequence(first, Purpose.ORDER, *rest)
        keys = sequence.generate_state(ROUNDS * KEYS_PER_ROUND, np.uint32)
        self._keys[:, :, number] = keys.reshape(ROUNDS, KEYS_PER_ROUND)

    def at(self, which: NDArray[np.integer], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what is at some positions of some orders.

        Args:
            which: Numbers of orders, shape (n,).
            positions: For each a position in it, 0 or more and below its length; int64, shape (n,).

        Returns:
            Fresh int64 array, shape (n,).
        """
        starts = self._table_starts[which]
        if not len(self._tables):
            values = positions.copy()
            self._replace(which, values)
            return values
        is_stored = starts != _NO_TABLE
        values = self._tables[np.where(is_stored, starts + positions, 0)].astype(np.int64)
        computed = np.flatnonzero(~is_stored)
        if len(computed):
            replaced = positions[computed]
            self._replace(which[computed], replaced)
            values[computed] = replaced
        return values

    def _replace(self, which: NDArray[np.integer], values: NDArray[np.int64]) -> None:
        """Replace positions by the values at them, walking on from those that are too large."""
        scratch = Scratch.of_length(min(len(values), PIECE))
        self._encipher(which, values, scratch)
        outside = np.flatnonzero(values >= self._lengths[which])
        while len(outside):
            walkers, theirs = values[outside], which[outside]
            self._encipher(theirs, walkers, scratch)
            values[outside] = walkers
            outside = outside[walkers >= self._lengths[theirs]]

    def _encipher(
        self, which: NDArray[np.integer], values: NDArray[np.int64], scratch: Scratch
    ) -> None:
        for first in range(0, len(values), PIECE):
            piece = values[first : first + PIECE].view(np.uint64)
            theirs = which[first : first + PIECE]
            keys = ((one[theirs], other[theirs]) for one, other in self._keys)
            encipher(piece, self._a[theirs], self._b[theirs], keys, scratch.start(len(piece)))
