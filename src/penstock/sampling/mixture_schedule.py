# SPDX-License-Identifier: Apache-2.0
"""Schedules of a mixture: the source of each draw, as shares change over a run."""
# Draws are numbered from 0. The schedule is a list of pieces, in each of which the shares are
# constant; a ramp is up to 1,024 pieces. A piece is cut into blocks of 1,024 draws, of which each
# source has a fixed number, in random order:
#
#     bounds     X[s] = the shares of the sources before s, in units of 1 / (1024 * 1024)
#     block j    floor((X[s] + k) / 1024) <= v < floor((X[s + 1] + k) / 1024)  is of source s,
#                v: the draw's place in the block, shuffled;  k = j * 633 mod 1024
#
# With the same k added to all bounds, a block has exactly 1,024 draws, no count is negative, and
# each is its share rounded down or up. Over 1,024 blocks, k takes each value once, and
# sum(floor((X + k) / 1024) for all k) = X (Hermite's identity). So the shares are exact over a
# round of 1,024 blocks, and no remainder is carried along. The step of 633 spreads the blocks in
# which a share is rounded up evenly. The number of draws of a source before a block follows in
# O(1), from the number of whole rounds, and for the rest from a table of how often each remainder
# was rounded up, which is the same for all shares.

from __future__ import annotations

import bisect
import functools
import itertools
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.randomness.keys import Purpose, seed_sequence
from penstock.sampling.class_items import grouped
from penstock.sampling.permutation import LARGEST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

#: Draws in a block, and blocks in a round.
BLOCK: Final = 1024
#: Shares are whole numbers of these parts.
SHARE_PARTS: Final = BLOCK * BLOCK
_STEP: Final = 633  # odd, and near 1024 times the golden ratio
_MOST_STEPS: Final = 1024  # of a ramp


class Knot(NamedTuple):
    """A change of shares to those of `bounds`, in a straight line from draw `start` to `stop`.

    `bounds[s]` is the sum of the shares before source s, and the last one that of all shares, in
    units of 1 / `SHARE_PARTS`. A knot whose stop is its start is a jump.
    """

    start: int
    stop: int
    bounds: tuple[int, ...]


class Piece(NamedTuple):
    """Draws from `start` on, in blocks of `block` draws, with constant shares."""

    start: int
    block: int
    bounds: NDArray[np.int64]


def pieces_of(knots: Sequence[Knot], last: NDArray[np.int64] | None = None) -> list[Piece]:
    """Return the pieces of knots, in ascending order; `last` are the bounds before the first."""
    pieces: list[Piece] = []
    for knot, following in itertools.zip_longest(knots, knots[1:]):
        bounds = np.array(knot.bounds)
        length = knot.stop - knot.start
        size = -(-length // (BLOCK * _MOST_STEPS)) * BLOCK
        number = -(-length // size) if size else 0
        for step in range(number):
            assert last is not None
            mean = last + (bounds - last) * (2 * step + 1) // (2 * number)
            pieces.append(Piece(knot.start + step * size, BLOCK, mean))
        if following is None or following.start > knot.stop:
            pieces.append(Piece(knot.stop, BLOCK, bounds))
        last = bounds
    return pieces


def pieces_until_used_up(pieces: Sequence[Piece], items: NDArray[np.int64]) -> list[Piece]:
    """Return the pieces of an epoch that ends when the sources are used up; the last is empty.

    `items` are the numbers of samples, int64 (sources,). When a source is used up, the others share
    its draws. A piece whose sources are all used up is left out.
    """
    found: list[Piece] = []
    left, place, number = items.copy(), 0, 0
    while number < len(pieces):
        parts = np.diff(pieces[number].bounds) * (left > 0)
        stop = pieces[number + 1].start if number + 1 < len(pieces) else LARGEST
        if not parts.any() or place >= stop:
            number += 1
            continue
        bounds = bounds_of(parts.tolist())
        one = MixtureSchedule([Piece(0, BLOCK, bounds)])
        whole = _num_blocks(one, left, min(int(left.sum()), stop - place) // BLOCK)
        if whole:
            found.append(Piece(place, BLOCK, bounds))
            left -= one.counts_before_block(whole * BLOCK)
            place += whole * BLOCK
        drawn = parts > 0
        if place < stop and left[drawn].all():  # a block at whose end one is used up, or the piece
            few = np.minimum(left, BLOCK)[drawn]  # no more are in it; 2^20 times these fit
            until = -int((-few * bounds[-1] // np.diff(bounds)[drawn]).max())
            wanted = largest_remainder(min(BLOCK, stop - place, until), parts.tolist())
            counts = np.minimum(wanted, left)
            found.append(Piece(place, int(counts.sum()), np.append(0, np.cumsum(counts)) * BLOCK))
            left -= counts
            place += int(counts.sum())
    return [*found, Piece(place, BLOCK, pieces[-1].bounds)]


def _num_blocks(schedule: MixtureSchedule, left: NDArray[np.int64], most: int) -> int:
    """Return how many blocks the samples that are `left` suffice for, at most `most`."""

    def is_too_many(number: int) -> bool:
        return bool((schedule.counts_before_block(number * BLOCK) > left).any())

    return bisect.bisect(range(most + 1), False, key=is_too_many) - 1


def bounds_of(parts: Sequence[int]) -> NDArray[np.int64]:
    """Return the bounds of shares; a share of less than 1 / `SHARE_PARTS` may become 0."""
    return np.append(0, np.cumsum(largest_remainder(SHARE_PARTS, parts), dtype=np.int64))


def largest_remainder(number: int, parts: Sequence[int]) -> list[int]:
    """Return integers in proportion to `parts`, summing to `number`, by largest remainder.

    Of equal remainders, the first is rounded up first.
    """
    total = sum(parts)
    quotas = [number * part // total for part in parts]
    remainders = [number * part % total for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda which: -remainders[which])
    for which in by_remainder[: number - sum(quotas)]:
        quotas[which] += 1
    return quotas


class MixtureSchedule:
    """A schedule: the source of each draw, and its number among the draws of that source.

    Attributes:
        pieces: In ascending order; the last one has no end. Do not write.
        num_drawn: The draws before this one have been computed, and must not change. Orders that
            compute draws raise it.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        """Take the pieces."""
        self.num_drawn = 0
        self._set_pieces(pieces)

    def change(self, start: int, stop: int, bounds: NDArray[np.int64]) -> None:
        """Replace the schedule from draw `start` on by the change of a `Knot`.

        `start` is rounded up to the end of a block. Orders that exist use the new schedule.
        """
        start = self.whole_blocks(start)
        kept = [piece for piece in self.pieces if piece.start < start]
        last = (kept or self.pieces[:1])[-1].bounds
        knot = Knot(start, max(start, stop), tuple(bounds.tolist()))
        self._set_pieces([*kept, *pieces_of([knot], last)])

    def _set_pieces(self, pieces: Sequence[Piece]) -> None:
        """Take the pieces, and count the draws of each source before each piece."""
        self.pieces = pieces
        self._starts = np.array([piece.start for piece in pieces])
        self._stops = np.append(self._starts[1:], LARGEST)
        self._sizes = np.array([piece.block for piece in pieces])
        self._bounds = np.array([piece.bounds for piece in pieces])
        # All but the last one end.
        number = np.arange(len(pieces) - 1)
        blocks, rest = np.divmod(np.diff(self._starts), self._sizes[:-1])
        had = self._at_block(number, blocks) + self._within(number, blocks, rest)
        #: Bounds of what the sources have had before each piece.
        self._before = np.append(np.zeros_like(self._bounds[:1]), np.cumsum(had, axis=0), axis=0)

    def draws(
        self, places: NDArray[np.int64], key: tuple[int, ...]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each draw, and its number among the draws of that source.

        Args:
            places: Numbers of draws, int64.
            key: Decides the order within blocks: a seed, and numbers below 2^32.
        """
        # One generator, with another counter for each block: a new one takes ten times as long.
        philox = np.random.Philox(seed_sequence(key[0], Purpose.ORDER, *key[1:]))
        rng, state = np.random.Generator(philox), philox.state
        piece = np.searchsorted(self._starts, places, side="right") - 1
        begins = places - (places - self._starts[piece]) % self._sizes[piece]
        blocks, which = np.unique(begins, return_inverse=True)
        by_block = np.argsort(which, kind="stable")
        number, index, sizes = self._block_at(blocks)
        bounds = self._within(number, index, sizes)
        had = np.diff(self._before[number] + self._at_block(number, index), axis=1)
        sources, numbers = np.empty_like(places), np.empty_like(places)
        held = np.bincount(which, minlength=len(blocks))
        stops = np.cumsum(held)
        for block, begin in enumerate(blocks.tolist()):
            here = by_block[stops[block] - held[block] : stops[block]]
            counts = np.diff(bounds[block])
            state["state"]["counter"][3] = begin
            philox.state = state
            order = rng.permutation(sizes[block])
            of_block = np.repeat(np.arange(len(counts)), counts)[order]
            inside = places[here] - begin
            sources[here] = of_block[inside]
            # A source's numbers ascend with the place, so an epoch that ends in a block skips none.
            turns = np.empty_like(order)
            turns[grouped(of_block, len(counts))] = np.arange(len(order))
            numbers[here] = (turns - bounds[block][of_block] + had[block][of_block])[inside]
        return sources, numbers

    def counts(self, place: int, key: tuple[int, ...]) -> NDArray[np.int64]:
        """Return the number of draws of each source before draw `place`, int64 (sources,)."""
        had = self.counts_before_block(place)
        sources, _ = self.draws(np.arange(self.block_of(place)[0], place), key)
        had += np.bincount(sources, minlength=len(had))
        return had

    def counts_before_block(self, place: int) -> NDArray[np.int64]:
        """Return the number of draws of each source before the block of draw `place`, int64."""
        number, index, _ = self._block_at(np.array([place]))
        had = np.diff(self._before[number] + self._at_block(number, index), axis=1)
        return np.asarray(had[0], np.int64)

    def whole_blocks(self, place: int) -> int:
        """Return `place` rounded up to the first draw of a block."""
        begin, end = self.block_of(place)
        return end if begin < place else place

    def block_of(self, place: int) -> tuple[int, int]:
        """Return the first draw of the block that draw `place` is in, and that of the next."""
        number, index, sizes = self._block_at(np.array([place]))
        begin = int(self._starts[number[0]] + index[0] * self._sizes[number[0]])
        return begin, begin + int(sizes[0])

    def _block_at(
        self, places: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the piece of each place, the number of its block in that, and the block's size."""
        piece = np.searchsorted(self._starts, places, side="right") - 1
        index = (places - self._starts[piece]) // self._sizes[piece]
        left = self._stops[piece] - self._starts[piece] - index * self._sizes[piece]
        return piece, index, np.minimum(left, self._sizes[piece])

    def _within(
        self, piece: NDArray[np.int64], index: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the bounds of blocks; the last block of a piece may be shorter."""
        parts = self._bounds[piece] * sizes[:, None] // self._sizes[piece][:, None]
        bounds: NDArray[np.int64] = (parts + (index * _STEP % BLOCK)[:, None]) // BLOCK
        return bounds

    def _at_block(self, piece: NDArray[np.int64], index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sums of the draws of a piece before a block of it, as bounds."""
        rounds, rest = np.divmod(index, BLOCK)
        whole, parts = np.divmod(self._bounds[piece], BLOCK)
        had: NDArray[np.int64] = whole * index[:, None] + parts * rounds[:, None]
        return had + _num_rounded_up()[rest[:, None], parts]


@functools.cache
def _num_rounded_up() -> NDArray[np.int16]:
    """In how many of the first n blocks of a round r / 1024 is rounded up: [n, r], 2 MB."""
    offsets = np.arange(BLOCK) * _STEP % BLOCK
    is_up = offsets[:, None] + np.arange(BLOCK) >= BLOCK
    none = np.zeros((1, BLOCK), bool)
    return np.cumsum(np.append(none, is_up, axis=0), axis=0, dtype=np.int16)
