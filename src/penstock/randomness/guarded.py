# SPDX-License-Identifier: Apache-2.0
"""Draws of samplers that use the global generators, without the user noticing.

A sampler that we know nothing of may draw from `random`, `numpy.random`, torch, or a
`torch.Generator` that it keeps as `generator`. While it draws, these are in states that a seed
decides; in between, the global ones are the user's.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.randomness.generators import GlobalGenerators, GlobalStates

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["GuardedIterator", "guarded_draws"]


@contextlib.contextmanager
def guarded_draws(sampler: object, sequence: np.random.SeedSequence) -> Iterator[None]:
    """Let `sampler` draw what `sequence` decides, in the block."""
    users = _States.of(sampler)
    try:
        _seed(sampler, sequence)
        yield
    finally:
        users.restore()


def _generators(sampler: object) -> list[Any]:
    """The generators that a sampler, and the one inside it, keep for themselves."""
    found = []
    for part in (sampler, getattr(sampler, "sampler", None)):
        generator = getattr(part, "generator", None)
        # Of its class: a proxy has attributes of any name.
        if all(
            hasattr(type(generator), name) for name in ("manual_seed", "get_state", "set_state")
        ):
            found.append(generator)
    return found


def _seed(sampler: object, sequence: np.random.SeedSequence) -> None:
    GlobalGenerators().seed(np.random.Philox(sequence))
    for generator in _generators(sampler):
        generator.manual_seed(int(sequence.generate_state(1, np.uint64)[0]))


class _States(NamedTuple):
    """The states of the global generators, and of a sampler's own."""

    globals: GlobalStates
    own: list[tuple[Any, Any]]

    @classmethod
    def of(cls, sampler: object) -> _States:
        own = [(generator, generator.get_state()) for generator in _generators(sampler)]
        return cls(GlobalStates.now(), own)

    def restore(self) -> None:
        self.globals.restore()
        for generator, state in self.own:
            generator.set_state(state)


class GuardedIterator:
    """Iterates a sampler that draws what a sequence decides, step by step, whenever asked."""

    def __init__(self, sampler: Any, sequence: np.random.SeedSequence) -> None:  # noqa: ANN401
        """Begin to iterate `sampler`."""
        self._sampler = sampler
        with guarded_draws(sampler, sequence):
            self._iterator = iter(sampler)
            self._states = _States.of(sampler)

    @classmethod
    def going_on(cls, iterator: Iterator[Any]) -> GuardedIterator:
        """Return `iterator`, drawing from here on as if the states of now were its own."""
        self = cls.__new__(cls)
        self._sampler, self._iterator = None, iterator
        self._states = _States.of(None)
        return self

    def __iter__(self) -> GuardedIterator:
        """Return itself."""
        return self

    def __next__(self) -> Any:  # noqa: ANN401 - whatever the sampler yields
        """Return what the sampler yields next."""
        found = self.take(1)
        if not found:
            raise StopIteration
        return found[0]

    def take(self, count: int) -> list[Any]:
        """Return what the sampler yields next, up to `count` of it."""
        users = _States.of(self._sampler)
        self._states.restore()
        found: list[Any] = []
        try:
            # No islice: it calls iter(), and what is its own iterator may begin again there.
            while len(found) < count:
                found.append(next(self._iterator))
        except StopIteration:
            pass
        finally:
            self._states = _States.of(self._sampler)
            users.restore()
        return found
