# SPDX-License-Identifier: Apache-2.0
"""A shuffled order of up to 2^62 items that is never stored.

Up to `TABLE_LIMIT` items are shuffled in a table, every order equally likely. Above it the value at
a position is computed, by a cipher whose blocks are the numbers below n.
"""
# Rejected: `(i * m + c) mod n` is faster, but neighbours keep one constant distance, in every
# epoch; storing a shuffle takes 80 GB for 10^10 items, and time before the first is known.
#
# The blocks are those below a x b, which may be a few more:
#
#     position = left * b + right               b = ceil(sqrt(n)), a = ceil(n / b)
#     8 rounds, by turns:                       left  = (left  + F(right)) mod a
#                                               right = (right + F(left))  mod b
#     value = left * b + right                  and from the start with it while value >= n
#
# Each round can be undone, whatever F is, so the whole is a bijection; walking on from values that
# are too large (fewer than b of the a x b) makes it one of range(n). F is a keyed 32-bit hash: the
# finaliser of MurmurHash3 with better constants (C. Wellons, "lowbias32", 2018) and two key words
# per round. Its result is scaled to the modulus by a multiplication: a remainder would take three
# times as long. (Luby, Rackoff: How to construct pseudorandom permutations, 1988. Black, Rogaway:
# Ciphers with arbitrary finite domains, 2002.)
#
# Why 8 rounds: for pairs of positions that share a half, the differences of their values were
# counted over many keys, chi-square. On 64 x 65 (2,000 keys) 3, 4 and 5 rounds differ from chance
# at p < 1e-16, with truly random functions for F just as with this one, and 6 are not. On 16 x 17
# (60,000 keys), where the same flaw is larger, 6 rounds give p < 1e-200, 7 give p = 4e-6, and 8
# pass (p = 0.16). The flaw shrinks as a and b grow, so 8 leave a margin for any n of some
# thousands. This is statistics, not secrecy: F is too weak a hash to hide anything.

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np

from penstock.errors import ConfigError
from penstock.randomness.keys import Purpose, checked_count, seed_sequence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import DTypeLike, NDArray

#: Most items of an order: the two halves of a position, and their sums, then fit into 32 bits.
LARGEST: Final = 1 << 62
#: Up to this many items are shuffled in a table: 32 KiB, made in some 60 us.
TABLE_LIMIT: Final = 4096

# Python integers made at a time when iterating: the first one comes after 0.4 ms.
_CHUNK: Final = 4096
# Positions worked on at a time: a second-level cache holds them and what is computed of them.
_PIECE: Final = 1 << 14

_ROUNDS: Final = 8
# Scalars of the arrays' own types, so that numpy computes in those.
_MULTIPLIER_1: Final = np.uint32(0x7FEB352D)
_MULTIPLIER_2: Final = np.uint32(0x846CA68B)
_GOLDEN: Final = np.uint32(0x9E3779B1)
_SHIFT_15: Final = np.uint32(15)
_SHIFT_16: Final = np.uint32(16)
_SHIFT_32: Final = np.uint64(32)


class Permutation:
    """A shuffled order of range(n) in which any part can be had without the rest.

    An order is a pure function of (n, seed), the same on every machine; orders of different seeds
    are unrelated. It takes less than 1 MB and 60 us to make, whatever n, and some 25 ns per index
    when taken in blocks of 2^16.

    Above `TABLE_LIMIT` items not every one of the n! orders is possible, but no statistic that
    would matter to a training run shows it.

    Attributes:
        n: Number of items.
        seed: A non-negative int, or a tuple of them. Do not write to either.

    Concurrency:
        Any number of threads may use one. Pickles as (n, seed).

    Example:
        >>> order = Permutation(10**10, seed=(7, 3))  # seed 7, epoch 3
        >>> order[0], order[-1]
        (9112033596, 9955012082)
        >>> order[:3]
        array([9112033596, 4594684732, 3309466208])
        >>> sorted(Permutation(5))
        [0, 1, 2, 3, 4]
    """

    def __init__(self, n: int, seed: int | Sequence[int] = 0) -> None:
        """Choose the order.

        Args:
            n: Number of items, 0 to 2^62.
            seed: Not negative. Or a sequence, such as (seed, epoch), of which the first may have
                any size and the others must be below 2^32; of one, `(7,)`, it means the same as 7.

        Raises:
            ConfigError: a number outside its range, or an empty sequence.
            TypeError: no integers.
        """
        self.n: Final = checked_count("n", n)
        if self.n > LARGEST:
            raise ConfigError(f"n should be at most 2**62 = {LARGEST}, but got n={n}.")
        parts = seed if isinstance(seed, Sequence) else (seed,)
        first, *rest = (checked_count(f"seed[{i}]", part) for i, part in enumerate(parts or (-1,)))
        if any(part >> 32 for part in rest):  # its two words could be mistaken for two parts
            raise ConfigError(f"seed has parts of 2**32 or more behind the first: {seed!r}.")
        self.seed: Final = (first, *rest) if rest else first
        randomness = seed_sequence(first, Purpose.ORDER, *rest)
        self._table: NDArray[np.int64] | None = None
        if self.n <= TABLE_LIMIT:
            self._table = np.random.Generator(np.random.Philox(randomness)).permutation(self.n)
            return
        self._b = np.uint64(math.isqrt(self.n - 1) + 1)
        self._a = np.uint64(-(-self.n // int(self._b)))
        self._keys = randomness.generate_state(2 * _ROUNDS, np.uint32).reshape(_ROUNDS, 2)

    def __len__(self) -> int:
        """Return n."""
        return self.n

    @overload
    def __getitem__(self, which: int | np.integer[Any]) -> int: ...

    @overload
    def __getitem__(self, which: slice | NDArray[np.integer[Any]]) -> NDArray[np.int64]: ...

    def __getitem__(
        self, which: int | np.integer[Any] | slice | NDArray[np.integer[Any]]
    ) -> int | NDArray[np.int64]:
        """Return what is at one position, or at several.

        Args:
            which: A position, a slice, or an array of positions of any shape and integer dtype.
                Negative positions count from the end.

        Returns:
            A Python int for an integer; otherwise a fresh int64 array, of the shape that was given.
        """
        if isinstance(which, slice):
            chosen = range(self.n)[which]
            # numpy's own arange with a step counts in floats.
            positions = np.arange(len(chosen))
            positions *= chosen.step if len(chosen) > 1 else 1
            positions += chosen.start
            return self._values(positions)
        if not isinstance(which, np.ndarray):
            return int(self[np.array([operator.index(which)])][0])
        if which.dtype.kind not in "iu":
            raise IndexError(f"positions should be integers, but got an array of {which.dtype}.")
        # Looked at before they become int64, which would make a negative of the largest uint64.
        if which.size and not -self.n <= int(which.min()) <= int(which.max()) < self.n:
            wrong = which[(which < -self.n) | (which >= self.n)][0]
            raise IndexError(f"position {wrong} is outside a Permutation of {self.n} items.")
        places = which.astype(np.int64, order="C", subok=False)
        places[places < 0] += self.n
        return self._values(places.reshape(-1)).reshape(which.shape)

    def __iter__(self) -> Iterator[int]:
        """Yield the indices in order, as Python ints, computed some thousands at a time."""
        for start in range(0, self.n, _CHUNK):
            yield from self[start : start + _CHUNK].tolist()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the whole order, int64 unless asked otherwise."""
        if copy is False:
            raise ValueError("a Permutation stores no array, so one cannot be had without a copy.")
        return self[:] if dtype is None else self[:].astype(dtype, copy=False)

    def __reduce__(self) -> tuple[type[Permutation], tuple[int, int | tuple[int, ...]]]:
        return type(self), (self.n, self.seed)

    def __contains__(self, value: object) -> bool:
        """Return whether `value` is an integer of range(n), which takes no search."""
        return isinstance(value, (int, np.integer)) and 0 <= int(value) < self.n

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.n}, seed={self.seed})"

    def _values(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the values at positions from 0, shape (m,); may write to them."""
        if self._table is not None:
            return self._table[positions]
        for first in range(0, len(positions), _PIECE):
            _encipher(positions[first : first + _PIECE], self._a, self._b, self._keys)
        _walk(positions, self.n, self._a, self._b, self._keys)
        return positions


def replace_in_turn(
    orders: Sequence[Permutation], counts: NDArray[np.int64], positions: NDArray[np.int64]
) -> None:
    """Replace positions by the values at them: `counts[0]` of the first order, and so on."""
    is_computed = np.array([order._table is None for order in orders], bool)
    starts = np.cumsum(counts) - counts
    for number in np.flatnonzero(~is_computed & (counts > 0)).tolist():
        part = positions[starts[number] : starts[number] + counts[number]]
        part[:] = orders[number]._table[part]  # type: ignore[index]
    computed = [order for order in orders if order._table is None]
    if computed:  # all at once: a call of numpy costs as much as a thousand numbers
        is_theirs = slice(None) if is_computed.all() else np.repeat(is_computed, counts)
        each = counts[is_computed]
        values = positions[is_theirs]
        n, a, b = (
            np.repeat([getattr(order, name) for order in computed], each)
            for name in ("n", "_a", "_b")
        )
        keys = np.concatenate(
            [
                np.broadcast_to(order._keys[..., None], (_ROUNDS, 2, count))
                for order, count in zip(computed, each.tolist(), strict=True)
            ],
            axis=-1,
        )
        _encipher(values, a, b, keys)
        _walk(values, n, a, b, keys)
        positions[is_theirs] = values


# n, a, b and keys are those of one order, or of each of the values.


def _walk(values: NDArray[np.int64], n: Any, a: Any, b: Any, keys: Any) -> None:  # noqa: ANN401
    """Replace what is not below n, until all is; at most one in 64 is not."""
    outside = np.flatnonzero(values >= n)
    if len(outside):
        walkers = values[outside]
        if keys.ndim == 3:
            n, a, b, keys = n[outside], a[outside], b[outside], keys[..., outside]
        _encipher(walkers, a, b, keys)
        _walk(walkers, n, a, b, keys)
        values[outside] = walkers


def _encipher(values: NDArray[np.int64], a: Any, b: Any, keys: Any) -> None:  # noqa: ANN401
    """Replace numbers below a x b by others, once through all rounds."""
    wide = values.view(np.uint64)
    moduli = [(a, a.astype(np.uint32)), (b, b.astype(np.uint32))]
    left = (wide // b).astype(np.uint32)
    # The remainder is below 2^32, so 32 bits of the product and of the difference are enough.
    right = wide.astype(np.uint32)
    right -= left * moduli[1][1]
    half, other, hashed, shifted = left, right, np.empty_like(left), np.empty_like(left)
    for number, (first, second) in enumerate(keys):
        modulus, modulus_32 = moduli[number % 2]
        np.bitwise_xor(other, first, out=hashed)
        hashed ^= np.right_shift(hashed, _SHIFT_16, out=shifted)
        hashed *= _MULTIPLIER_1
        hashed ^= second
        hashed ^= np.right_shift(hashed, _SHIFT_15, out=shifted)
        hashed *= _MULTIPLIER_2
        hashed ^= np.right_shift(hashed, _SHIFT_16, out=shifted)
        # Modulo `modulus`, which is at most 2^31: the sum is below 2^32, and what would be
        # negative wraps round to more than it was, so that the remainder is the smaller one.
        np.multiply(hashed, modulus, out=wide, dtype=np.uint64)  # numpy 1: else of 32 bits
        np.right_shift(wide, _SHIFT_32, out=wide)
        half += wide.astype(np.uint32)
        np.minimum(half, np.subtract(half, modulus_32, out=shifted), out=half)
        half, other = other, half
    np.multiply(left, b, out=wide, dtype=np.uint64)
    wide += right


class GroupShuffle:
    """An order of each of many groups, of any sizes, none of which is stored.

    Any order of a small group is possible, but some are likelier than others: of 5 items by a third
    more or less.
    """

    def __init__(self, sizes: NDArray[np.int64], seed: int, *which: int) -> None:
        """Choose the orders, a pure function of the arguments; fewer than 2^31 items a group."""
        self._n = sizes
        roots = np.ceil(np.sqrt(np.maximum(sizes, 1)))
        self._b = roots.astype(np.uint64)
        self._a = np.ceil(sizes / roots).astype(np.uint64)
        words = seed_sequence(seed, Purpose.ORDER, *which).generate_state(2 * _ROUNDS, np.uint32)
        self._keys = words.reshape(_ROUNDS, 2, 1)

    def replaced(
        self, positions: NDArray[np.int64], groups: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return what is at positions of groups: in each group other positions, each once."""
        values = positions.copy()
        for start in range(0, len(values), _PIECE):
            piece, which = values[start : start + _PIECE], groups[start : start + _PIECE]
            keys = np.repeat(self._keys, len(piece), axis=2)
            keys[:, 0] ^= which.astype(np.uint32) * _GOLDEN  # wraps
            n, a, b = self._n[which], self._a[which], self._b[which]
            _encipher(piece, a, b, keys)
            _walk(piece, n, a, b, keys)
        return values
