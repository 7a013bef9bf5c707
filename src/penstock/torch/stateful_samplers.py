# SPDX-License-Identifier: Apache-2.0
"""The samplers of a `StatefulDataLoader`: torch's, with iterators that have a state.

They draw what torchdata's draw, when torchdata's draw it, and their states have the same parts.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, RandomSampler

from penstock.data.dataset import can_resume
from penstock.engine.states import load_state, state_of

T = TypeVar("T")


def steps_of(iterator: Iterator[T]) -> Iterator[T]:
    """Return an iterator that calls `next` alone: `iter` may begin a user's iterator anew."""
    return map(next, itertools.repeat(iterator))


class StatefulRandomSampler(RandomSampler):
    """A shuffle by a generator that goes on from epoch to epoch.

    Without one, it is seeded when the sampler is made, from torch's global one.
    """

    generator: torch.Generator

    def __init__(self, data_source: Any, generator: torch.Generator | None = None) -> None:  # noqa: ANN401
        """Draw the seed, unless there is a generator."""
        if generator is None:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            generator = torch.Generator().manual_seed(seed)
        super().__init__(data_source, generator=generator)

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over the indices, whose order is drawn now."""
        return RandomOrder(self)


class RandomOrder(Iterator[int]):
    """The indices of one epoch, in an order that its generator's state decides."""

    def __init__(self, sampler: StatefulRandomSampler) -> None:
        """Draw the order."""
        self._sampler = sampler
        self._draw(0)

    def _draw(self, num_given: int) -> None:
        generator = self._sampler.generator
        self._begun_at = generator.get_state()
        self._num_given = num_given
        self._order = torch.randperm(len(self._sampler.data_source), generator=generator).numpy()

    def take(self, count: int) -> list[int]:
        """Return the next indices, `count` if there are as many."""
        start, self._num_given = self._num_given, self._num_given + count
        indices: list[int] = self._order[start : self._num_given].tolist()
        self._num_given = start + len(indices)
        return indices

    def __next__(self) -> int:
        """Return the next index."""
        for index in self.take(1):
            return index
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        """Return how many indices were given, and the generator's state before the order's draw."""
        return {"yielded": self._num_given, "generator": self._begun_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Draw the order once more, and go on in it."""
        self._sampler.generator.set_state(state["generator"].cpu())
        self._draw(state["yielded"])


class StatefulBatchSampler(BatchSampler):
    """torch's batch sampler; its iterators hold the state of the sampler inside, or count."""

    def __iter__(self) -> Iterator[list[int]]:
        """Return an iterator over the batches."""
        return StatefulBatchOrder(self)


class StatefulBatchOrder(Iterator[list[int]]):
    """The batches of one epoch."""

    def __init__(self, batch_sampler: StatefulBatchSampler) -> None:
        """Ask the sampler for an iterator."""
        self._batch_sampler = batch_sampler
        self._indices: Iterator[Any] = iter(batch_sampler.sampler)
        self._num_given = 0  # indices

    def __next__(self) -> list[int]:
        """Return the next batch."""
        size, indices = self._batch_sampler.batch_size, self._indices
        if isinstance(indices, RandomOrder):
            batch = indices.take(size)
        else:
            batch = list(itertools.islice(steps_of(indices), size))
        self._num_given += len(batch)
        if not batch or (self._batch_sampler.drop_last and len(batch) < size):
            raise StopIteration
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return how many indices were given, and the states of the sampler and its iterator."""
        owners = {"sampler_state": self._batch_sampler.sampler, "sampler_iter_state": self._indices}
        states = {name: state_of(owner) for name, owner in owners.items() if can_resume(owner)}
        return {"samples_yielded": self._num_given, **states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken; indices of a sampler without one are passed over."""
        sampler = self._batch_sampler.sampler
        self._num_given = state["samples_yielded"]
        load_state(sampler, state.get("sampler_state"))
        self._indices = iter(sampler)
        load_state(self._indices, state.get("sampler_iter_state"))
        if not (can_resume(sampler) or can_resume(self._indices)):
            deque(itertools.islice(steps_of(self._indices), self._num_given), 0)
