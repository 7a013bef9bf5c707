# SPDX-License-Identifier: Apache-2.0
"""Samples of one class, kept while they may be given: each once before any comes again."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

__all__ = ["Reservoir"]

T = TypeVar("T")


class Reservoir(Generic[T]):
    """Gives the samples that it holds at random: those never given first, then round by round.

    In a round every sample that was given before comes once. A fresh one that comes in is given
    before the round goes on, and takes part from the next. Each call costs the same, however many
    samples there are.

    Example:
        >>> import numpy as np
        >>> reservoir = Reservoir()
        >>> for sample in "abc":
        ...     reservoir.add(sample)
        >>> given = [reservoir.give(np.random.default_rng(0)) for _ in range(6)]
        >>> [sorted(sample for sample, _ in part) for part in (given[:3], given[3:])]
        [['a', 'b', 'c'], ['a', 'b', 'c']]
        >>> [is_repeat for _, is_repeat in given]
        [False, False, False, True, True, True]
    """

    def __init__(self) -> None:
        """Hold nothing."""
        self._fresh: list[T] = []
        self._given: OrderedDict[int, T] = OrderedDict()  # by the number of its first giving
        self._due: list[int] = []  # of `_given`, in this round; some may have left since
        self._num_first_given = 0

    def __len__(self) -> int:
        """Return how many samples are held."""
        return len(self._fresh) + len(self._given)

    def __iter__(self) -> Iterator[T]:
        """Yield what is held."""
        yield from self._fresh
        yield from self._given.values()

    @property
    def fresh(self) -> list[T]:
        """Samples that were never given."""
        return list(self._fresh)

    @property
    def num_fresh(self) -> int:
        """Number of samples that were never given."""
        return len(self._fresh)

    def add(self, sample: T) -> None:
        """Take in a sample."""
        self._fresh.append(sample)

    def give(self, rng: np.random.Generator) -> tuple[T, bool]:
        """Return a sample, which stays held, and whether it was given before.

        Raises:
            IndexError: nothing is held.
        """
        if self._fresh:
            sample = self.take(rng)
            self._given[self._num_first_given] = sample
            self._num_first_given += 1
            return sample, False
        while True:
            if not self._due:
                self._due = list(self._given)
            number = _pop_any(self._due, rng)
            if number in self._given:
                return self._given[number], True

    def take(self, rng: np.random.Generator) -> T:
        """Return a sample that was never given, and let go of it.

        Raises:
            IndexError: all that are held were given before, or nothing is held.
        """
        return _pop_any(self._fresh, rng)

    def crowd_out(self, rng: np.random.Generator) -> T | None:
        """Let go of a sample; return it if it was never given, else None.

        Of those given before the one goes that was first given the longest ago, so that all stay
        equally long. Where none was given, any goes, so that all fresh ones have the same chance.

        Raises:
            IndexError: nothing is held.
        """
        if self._given:
            self._given.popitem(last=False)
            return None
        return _pop_any(self._fresh, rng)


def _pop_any(items: list[T], rng: np.random.Generator) -> T:
    """Take one item out, at random; the last takes its place."""
    if not items:
        raise IndexError("the reservoir holds no such sample")
    chosen = int(rng.random() * len(items))
    items[chosen], items[-1] = items[-1], items[chosen]
    return items.pop()
