# SPDX-License-Identifier: Apache-2.0
"""A shuffled order of up to 2^62 items that is never stored.

Up to `TABLE_LIMIT` items are shuffled in a table, every order equally likely. Above it the value at
a position is computed, by a cipher whose blocks are the numbers below n.

Rejected: `(i * m + c) mod n` is faster, but neighbours keep one constant distance, in every epoch;
storing a shuffle takes 80 GB for 10^10 items, and time before the first is known.

The blocks are those below a x b, which may be a few more:

    position = left * b + right               b = ceil(sqrt(n)), a = ceil(n / b)
    8 rounds, by turns:                       left  = (left  + F(right)) mod a
                                              right = (right + F(left))  mod b
    value = left * b + right                  and from the start with it while value >= n

Each round can be undone, whatever F is, so the whole is a bijection; walking on from values that
are too large (fewer than b of the a x b) makes it one of range(n). F is a keyed 32-bit hash: the
finaliser of MurmurHash3 with better constants and two key words per round. Its result is scaled to
the modulus by a multiplication: a remainder would take three times as long.

Why 8 rounds: for pairs of positions that share a half, the differences of their values were counted
over many keys, chi-square. On 64 x 65 (2,000 keys) 3, 4 and 5 rounds are told from chance at
p < 1e-16, with truly random functions for F just as with this one, and 6 are not. On 16 x 17
(60,000 keys), where the same flaw is larger, 6 rounds give p < 1e-200, 7 give p = 4e-6, and 8 pass
(p = 0.16). The flaw shrinks as a and b grow, so 8 leave a margin for any n of some thousands. This
is statistics, not secrecy: F is too weak a hash to hide anything.

Reference:
    Luby, Rackoff: How to construct pseudorandom permutations from pseudorandom functions. SIAM J.
    Computing 17, 1988. Black, Rogaway: Ciphers with arbitrary finite domains. CT-RSA 2002 (the
    rounds over a x b, and the walk). The hash's shifts and multipliers are those that C. Wellons
    found for 32 bits ("lowbias32", 2018).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, overload

import numpy as np

from penstock.errors import ConfigError
from penstock.randomness.keys import Purpose, checked_count, seed_sequence

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import DTypeLike, NDArray

__all__ = ["LARGEST", "TABLE_LIMIT", "Permutation", "Permutations"]

#: Most items of an order: the two halves of a position, and their sums, then fit into 32 bits.
LARGEST: Final = 1 << 62
#: Up to this many items are shuffled in a table: 32 KiB, made in some 60 us.
TABLE_LIMIT: Final = 4096

# Python integers made at a time when iterating: the first one comes after 0.4 ms.
_CHUNK: Final = 4096
_NO_TABLE: Final = -1
# Positions worked on at a time, with 384 KiB for them and the scratch, which a second-level cache
# holds. Each costs 25 ns; in pieces of 8192 it is 30 ns and of 4096 some 40, as numpy's calls show.
_PIECE: Final = 1 << 14

_ROUNDS: Final = 8  # see above
_KEYS_PER_ROUND: Final = 2
_LOW_32: Final = 0xFFFF_FFFF
# Scalars of the arrays' own types, so that numpy computes in those. Making one takes 0.2 us.
_MULTIPLIER_1: Final = np.uint32(0x7FEB352D)
_MULTIPLIER_2: Final = np.uint32(0x846CA68B)
_SHIFT_15: Final = np.uint32(15)
_SHIFT_16: Final = np.uint32(16)
_SHIFT_32: Final = np.uint64(32)


class Permutation:
    """A shuffled order of range(n) in which any part can be had without the rest.

    Every index of range(n) is at exactly one position. An order is a pure function of (n, seed),
    the same on every machine; orders of different seeds are unrelated. (Up to `TABLE_LIMIT` items
    the order is that of `numpy.random.Generator.permutation`.) It takes less than 1 MB and 60 us
    to make, whatever n, and some 25 ns per index when taken in blocks of 2^16 (5 us one by one).

    Above `TABLE_LIMIT` items not every one of the n! orders is possible, but no statistics that
    would matter to a training run can tell.

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
        self.n: Final = _checked_length(n)
        self.seed: Final = _checked_seed(seed)
        first, *rest = self.seed if isinstance(self.seed, tuple) else (self.seed,)
        randomness = seed_sequence(first, Purpose.ORDER, *rest)
        self._order = (_ShuffledTable if n <= TABLE_LIMIT else _Feistel)(self.n, randomness)

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

        Raises:
            IndexError: a position outside -n to n - 1, or an array of anything but integers.
            TypeError: none of the above.
        """
        if isinstance(which, slice):
            return self._slice(range(self.n)[which])
        if isinstance(which, np.ndarray):
            return self._array(which)
        try:
            position = operator.index(which)
        except TypeError:
            raise TypeError(
                "a Permutation takes an integer, a slice or an array of integers, but got "
                f"{type(which).__name__}."
            ) from None
        if not -self.n <= position < self.n:
            raise self._out_of_range(position)
        return self._order.value_at(position % self.n)

    def __iter__(self) -> Iterator[int]:
        """Yield the indices in order, as Python ints, computed some thousands at a time."""
        for start in range(0, self.n, _CHUNK):
            yield from self[start : start + _CHUNK].tolist()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the whole order: a fresh array of 8 bytes per item, int64 unless asked otherwise.

        Raises:
            ValueError: `copy=False`: there is nothing to be a view of.
        """
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

    def _slice(self, positions: range) -> NDArray[np.int64]:
        # The step of one position or none is never taken, and may be too large for numpy.
        start, step = positions.start, positions.step if len(positions) > 1 else 1
        values = np.empty(len(positions), np.int64)
        for first in range(0, len(values), _PIECE):
            piece = values[first : first + _PIECE]
            piece[:] = np.arange(first, first + len(piece))
            piece *= step
            piece += start
        self._order.replace(values)
        return values

    def _array(self, which: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        if which.dtype.kind not in "iu":
            raise IndexError(f"positions should be integers, but got an array of {which.dtype}.")
        # Looked at before they become int64, which would make a negative of the largest uint64.
        if which.size and not -self.n <= int(which.min()) <= int(which.max()) < self.n:
            outside = (which < -self.n) | (which >= self.n)
            raise self._out_of_range(int(which[outside][0]))
        values = which.astype(np.int64, order="C", subok=False)
        np.add(values, self.n, out=values, where=values < 0)
        self._order.replace(values.reshape(-1))
        return values

    def _out_of_range(self, position: int) -> IndexError:
        if self.n == 0:
            return IndexError(f"position {position} of a Permutation of no items.")
        return IndexError(
            f"position {position} is outside a Permutation of {self.n} items: {-self.n} to "
            f"{self.n - 1}."
        )


def _checked_length(n: object) -> int:
    length = checked_count("n", n)
    if length > LARGEST:
        raise ConfigError(f"n should be at most 2**62 = {LARGEST}, but got n={length}.")
    return length


def _checked_seed(seed: object) -> int | tuple[int, ...]:
    if not isinstance(seed, Sequence):
        return checked_count("seed", seed)
    if not seed:
        raise ConfigError(f"seed should be an integer or some of them, but got seed={seed!r}.")
    parts = tuple(checked_count(f"seed[{i}]", part) for i, part in enumerate(seed))
    for i, part in enumerate(parts[1:], 1):
        # Two words of key could be mistaken for two parts.
        if part > _LOW_32:
            raise ConfigError(f"seed[{i}] should be below 2**32, but got seed[{i}]={part}.")
    return parts if len(parts) > 1 else parts[0]


class _ShuffledTable:
    """Few items, really shuffled."""

    def __init__(self, n: int, randomness: np.random.SeedSequence) -> None:
        self._table = np.random.Generator(np.random.Philox(randomness)).permutation(n)

    def value_at(self, position: int) -> int:
        return int(self._table[position])

    def replace(self, values: NDArray[np.int64]) -> None:
        for first in range(0, len(values), _PIECE):
            piece = values[first : first + _PIECE]
            piece[:] = self._table[piece]


class _Scratch(NamedTuple):
    """What the rounds work in: made for each call, so that threads share nothing."""

    left: NDArray[np.uint32]
    right: NDArray[np.uint32]
    hashed: NDArray[np.uint32]
    shifted: NDArray[np.uint32]

    @classmethod
    def of_length(cls, length: int) -> _Scratch:
        """Return buffers for so many positions."""
        return cls(*np.empty((4, length), np.uint32))

    def start(self, length: int) -> _Scratch:
        """Return views of the first part of each."""
        return _Scratch(*(buffer[:length] for buffer in self))


class _Feistel:
    """Many items: the rounds of the module's docstring."""

    def __init__(self, n: int, randomness: np.random.SeedSequence) -> None:
        """Draw the keys of an order of `n` items, 2 or more."""
        self._n = n
        self._b = math.isqrt(n - 1) + 1
        self._a = -(-n // self._b)
        keys = randomness.generate_state(_ROUNDS * _KEYS_PER_ROUND, np.uint32)
        self._keys = [(first, second) for first, second in keys.reshape(_ROUNDS, _KEYS_PER_ROUND)]

    def value_at(self, position: int) -> int:
        """Return one value: `replace` in Python's integers, ten times as fast for a single one."""
        value = self._n
        while value >= self._n:
            left, right = divmod(position, self._b)
            for number, (first, second) in enumerate(self._keys):
                if number % 2 == 0:
                    left = (left + _hash(right, int(first), int(second), self._a)) % self._a
                else:
                    right = (right + _hash(left, int(first), int(second), self._b)) % self._b
            position = value = left * self._b + right
        return value

    def replace(self, values: NDArray[np.int64]) -> None:
        """Replace positions, a 1-D array, by the values at them."""
        scratch = _Scratch.of_length(min(len(values), _PIECE))
        self._encipher(values, scratch)
        outside = np.flatnonzero(values >= self._n)
        while len(outside):
            walkers = values[outside]
            self._encipher(walkers, scratch)
            values[outside] = walkers
            outside = outside[walkers >= self._n]

    def _encipher(self, values: NDArray[np.int64], scratch: _Scratch) -> None:
        a, b = np.uint64(self._a), np.uint64(self._b)
        for first in range(0, len(values), _PIECE):
            piece = values[first : first + _PIECE].view(np.uint64)
            _encipher(piece, a, b, self._keys, scratch.start(len(piece)))


def _encipher(
    piece: NDArray[np.uint64],
    a: np.uint64 | NDArray[np.uint64],
    b: np.uint64 | NDArray[np.uint64],
    keys: Iterable[tuple[np.uint32 | NDArray[np.uint32], np.uint32 | NDArray[np.uint32]]],
    scratch: _Scratch,
) -> None:
    """Replace numbers below a x b by others, once through all rounds.

    `a`, `b` and the keys are arrays where each number has a cipher of its own.
    """
    left, right, hashed, shifted = scratch
    a_32, b_32 = a.astype(np.uint32), b.astype(np.uint32)
    np.copyto(right, piece, casting="unsafe")  # the low 32 bits
    np.floor_divide(piece, b, out=piece)
    np.copyto(left, piece, casting="unsafe")
    # The remainder is below 2^32, so 32 bits of the product and of the difference are enough.
    np.multiply(left, b_32, out=hashed)
    np.subtract(right, hashed, out=right)
    # Both halves are stored now, and `piece` is free to hold what takes 64 bits.
    for number, (first, second) in enumerate(keys):
        if number % 2 == 0:
            _hash_into(hashed, right, first, second, shifted)
            _scale(hashed, a, piece)
            _add(left, hashed, a_32, shifted)
        else:
            _hash_into(hashed, left, first, second, shifted)
            _scale(hashed, b, piece)
            _add(right, hashed, b_32, shifted)
    np.copyto(piece, left)
    np.multiply(piece, b, out=piece)
    np.add(piece, right, out=piece)


def _hash(half: int, first: int, second: int, modulus: int) -> int:
    """Return F of one half: a number below `modulus`, decided by two words of key."""
    hashed = half ^ first
    hashed ^= hashed >> 16
    hashed = hashed * 0x7FEB352D & _LOW_32 ^ second
    hashed ^= hashed >> 15
    hashed = hashed * 0x846CA68B & _LOW_32
    hashed ^= hashed >> 16
    return hashed * modulus >> 32


# The same in arrays: F is `_hash_into`, then `_scale`. In place: fresh arrays would cost more than
# the arithmetic.


def _hash_into(
    hashed: NDArray[np.uint32],
    half: NDArray[np.uint32],
    first: np.uint32 | NDArray[np.uint32],
    second: np.uint32 | NDArray[np.uint32],
    shifted: NDArray[np.uint32],
) -> None:
    np.bitwise_xor(half, first, out=hashed)
    np.right_shift(hashed, _SHIFT_16, out=shifted)
    np.bitwise_xor(hashed, shifted, out=hashed)
    np.multiply(hashed, _MULTIPLIER_1, out=hashed)
    np.bitwise_xor(hashed, second, out=hashed)
    np.right_shift(hashed, _SHIFT_15, out=shifted)
    np.bitwise_xor(hashed, shifted, out=hashed)
    np.multiply(hashed, _MULTIPLIER_2, out=hashed)
    np.right_shift(hashed, _SHIFT_16, out=shifted)
    np.bitwise_xor(hashed, shifted, out=hashed)


def _scale(
    hashed: NDArray[np.uint32], modulus: np.uint64 | NDArray[np.uint64], wide: NDArray[np.uint64]
) -> None:
    """Bring 32 random bits below `modulus`."""
    np.copyto(wide, hashed)
    np.multiply(wide, modulus, out=wide)
    np.right_shift(wide, _SHIFT_32, out=wide)
    np.copyto(hashed, wide, casting="unsafe")


def _add(
    half: NDArray[np.uint32],
    summand: NDArray[np.uint32],
    modulus: np.uint32 | NDArray[np.uint32],
    reduced: NDArray[np.uint32],
) -> None:
    """Add modulo `modulus`, which is at most 2^31: the sum is below 2^32."""
    np.add(half, summand, out=half)
    # What would be negative wraps round to more than it was: the remainder is the smaller one.
    np.subtract(half, modulus, out=reduced)
    np.minimum(half, reduced, out=half)


class Permutations:
    """Orders 0, 1, 2 …: number k is `Permutation(lengths[k], seeds[k])`, value for value.

    One call of `Permutation` costs some 100 us however few positions are asked for. Here the rounds
    of the cipher run over the positions of all orders together, each with the keys of its own.
    Takes some 50 us per order to make, 100 bytes for each long one and 2 per item for those up to
    `TABLE_LIMIT`; then some 60 ns per value.
    """

    def __init__(self, lengths: Sequence[int], seeds: Sequence[tuple[int, ...]]) -> None:
        """Make orders of so many items each, by seeds as `Permutation` takes them."""
        count = len(lengths)
        self._lengths = np.array(lengths, np.int64)
        self._a = np.ones(count, np.uint64)
        self._b = np.ones(count, np.uint64)
        self._keys = np.zeros((_ROUNDS, _KEYS_PER_ROUND, count), np.uint32)
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
        keys = sequence.generate_state(_ROUNDS * _KEYS_PER_ROUND, np.uint32)
        self._keys[:, :, number] = keys.reshape(_ROUNDS, _KEYS_PER_ROUND)

    def at(self, which: NDArray[np.integer], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what is at some positions of some orders: a fresh int64 array, shape (n,)."""
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
        self._encipher(which, values)
        outside = np.flatnonzero(values >= self._lengths[which])
        while len(outside):
            walkers, theirs = values[outside], which[outside]
            self._encipher(theirs, walkers)
            values[outside] = walkers
            outside = outside[walkers >= self._lengths[theirs]]

    def _encipher(self, which: NDArray[np.integer], values: NDArray[np.int64]) -> None:
        scratch = _Scratch.of_length(min(len(values), _PIECE))
        for first in range(0, len(values), _PIECE):
            piece = values[first : first + _PIECE].view(np.uint64)
            theirs = which[first : first + _PIECE]
            keys = ((one[theirs], other[theirs]) for one, other in self._keys)
            _encipher(piece, self._a[theirs], self._b[theirs], keys, scratch.start(len(piece)))
