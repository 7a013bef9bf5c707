# SPDX-License-Identifier: Apache-2.0
"""Draws of samplers that use the global generators, without the user noticing.

A sampler that we know nothing of may draw from `random`, `numpy.random`, torch, or a
`torch.Generator` that it keeps as `generator`. While it draws, these are in states that a seed
decides; in between, the global ones are the user's.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.randomness.generators import GlobalGenerators, GlobalStates

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["GuardedIterator", "guarded_draws"]


@contextlib.contextmanager
def guarded_draws(sampler: object, sequence: np.random.SeedSequence) -> Iterator[None]:
    """Let `sampler` draw what `sequence` decides, in the block."""
    users = GlobalStates.now()
    try:
        _seed(sampler, sequence)
        yield
    finally:
        users.restore()


def _seed(sampler: object, sequence: np.random.SeedSequence) -> None:
    GlobalGenerators().seed(np.random.Philox(sequence))
    number = int(sequence.generate_state(1, np.uint64)[0])
    for part in (sampler, getattr(sampler, "sampler", None)):
        manual_seed = getattr(getattr(part, "generator", None), "manual_seed", None)
        if callable(manual_seed):
            manual_seed(number)


class GuardedIterator:
    """Iterates a sampler that draws what a sequence decides, step by step, whenever asked."""

    def __init__(self, sampler: Any, sequence: np.random.SeedSequence) -> None:  # noqa: ANN401
        """Begin to iterate `sampler`."""
        with guarded_draws(sampler, sequence):
            self._iterator = iter(sampler)
            self._states = GlobalStates.now()

    @classmethod
    def going_on(cls, iterator: Iterator[Any]) -> GuardedIterator:
        """Return `iterator`, drawing from here on as if the states of now were its own."""
        self = cls.__new__(cls)
        self._iterator, self._states = iterator, GlobalStates.now()
        return self

    def __iter__(self) -> GuardedIterator:
        """Return itself."""
        return self

    def __next__(self) -> Any:  # noqa: ANN401 - whatever the sampler yields
        """Return what the sampler yields next."""
        users = GlobalStates.now()
        self._states.restore()
        try:
            return next(self._iterator)
        finally:
            self._states = GlobalStates.now()
            users.restore()
