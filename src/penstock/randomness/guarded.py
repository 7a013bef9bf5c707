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


@contextlib.contextmanager
def guarded_draws(sampler: object, sequence: np.random.SeedSequence) -> Iterator[None]:
    """Let `sampler` draw what `sequence` decides, in the block."""
    users = _States.of(sampler)
    try:
        GlobalGenerators().seed(np.random.Philox(sequence))
        for generator, _ in users.own:
            generator.manual_seed(int(sequence.generate_state(1, np.uint64)[0]))
        yield
    finally:
        users.restore()


class _States(NamedTuple):
    """The states of the global generators, and of those that a sampler and the one inside keep."""

    globals: GlobalStates
    own: list[tuple[Any, Any]]

    @classmethod
    def of(cls, sampler: object) -> _States:
        parts = (sampler, getattr(sampler, "sampler", None))
        kept: list[Any] = [getattr(part, "generator", None) for part in parts]
        own = list(filter(_is_generator, kept))
        return cls(GlobalStates.now(), [(g, g.get_state()) for g in own])

    def restore(self) -> None:
        self.globals.restore()
        for generator, state in self.own:
            generator.set_state(state)


def _is_generator(value: object) -> bool:
    # By its class: a proxy has attributes of any name.
    return all(hasattr(type(value), name) for name in ("manual_seed", "get_state", "set_state"))


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
