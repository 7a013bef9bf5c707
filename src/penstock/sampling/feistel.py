# SPDX-License-Identifier: Apache-2.0
"""A cipher whose blocks are the numbers below n: a shuffle that is computed, not stored.

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
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

__all__ = ["KEYS_PER_ROUND", "LOW_32", "PIECE", "ROUNDS", "Feistel", "Scratch", "encipher"]

# Positions worked on at a time, with 384 KiB for them and the scratch, which a second-level cache
# holds. Each costs 25 ns; in pieces of 8192 it is 30 ns and of 4096 some 40, as numpy's calls show.
PIECE: Final = 1 << 14

ROUNDS: Final = 8  # see above
KEYS_PER_ROUND: Final = 2
LOW_32: Final = 0xFFFF_FFFF
# Scalars of the arrays' own types, so that numpy computes in those. Making one takes 0.2 us.
_MULTIPLIER_1: Final = np.uint32(0x7FEB352D)
_MULTIPLIER_2: Final = np.uint32(0x846CA68B)
_SHIFT_15: Final = np.uint32(15)
_SHIFT_16: Final = np.uint32(16)
_SHIFT_32: Final = np.uint64(32)


class Scratch(NamedTuple):
    """What the rounds work in: made for each call, so that threads share nothing."""

    left: NDArray[np.uint32]
    right: NDArray[np.uint32]
    hashed: NDArray[np.uint32]
    shifted: NDArray[np.uint32]

    @classmethod
    def of_length(cls, length: int) -> Scratch:
        """Return buffers for so many positions."""
        return cls(*np.empty((4, length), np.uint32))

    def start(self, length: int) -> Scratch:
        """Return views of the first part of each."""
        return Scratch(*(buffer[:length] for buffer in self))


class Feistel:
    """Many items: the rounds of the module's docstring."""

    def __init__(self, n: int, randomness: np.random.SeedSequence) -> None:
        """Draw the keys of an order of `n` items, 2 or more."""
        self._n = n
        self._b = math.isqrt(n - 1) + 1
        self._a = -(-n // self._b)
        keys = randomness.generate_state(ROUNDS * KEYS_PER_ROUND, np.uint32)
        self._keys = [(first, second) for first, second in keys.reshape(ROUNDS, KEYS_PER_ROUND)]

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
        scratch = Scratch.of_length(min(len(values), PIECE))
        self._encipher(values, scratch)
        outside = np.flatnonzero(values >= self._n)
        while len(outside):
            walkers = values[outside]
            self._encipher(walkers, scratch)
            values[outside] = walkers
            outside = outside[walkers >= self._n]

    def _encipher(self, values: NDArray[np.int64], scratch: Scratch) -> None:
        a, b = np.uint64(self._a), np.uint64(self._b)
        for first in range(0, len(values), PIECE):
            piece = values[first : first + PIECE].view(np.uint64)
            encipher(piece, a, b, self._keys, scratch.start(len(piece)))


def encipher(
    piece: NDArray[np.uint64],
    a: np.uint64 | NDArray[np.uint64],
    b: np.uint64 | NDArray[np.uint64],
    keys: Iterable[tuple[np.uint32 | NDArray[np.uint32], np.uint32 | NDArray[np.uint32]]],
    scratch: Scratch,
) -> None:
    """Replace numbers below a x b by others, once through all rounds.

    Args:
        piece: The numbers, shape (n,).
        a: Of the cipher; an array of shape (n,) where each number has a cipher of its own.
        b: Likewise.
        keys: Two words for each round; likewise.
        scratch: Of length n.
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
    hashed = hashed * 0x7FEB352D & LOW_32 ^ second
    hashed ^= hashed >> 15
    hashed = hashed * 0x846CA68B & LOW_32
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
