# SPDX-License-Identifier: Apache-2.0
"""What an epoch without `seed=` was drawn with, so that its order can be drawn once more.

torch's loader draws from generators that go on from epoch to epoch, so an epoch is not a function
of its number. To resume one exactly, its draws are kept in the loader's state:

- a `RandomSampler` without a generator of its own, which is `shuffle=True`, draws one number and
  orders by that: the number is kept;
- other samplers of torch draw from their generator or torch's global one, other classes perhaps
  from `random` and numpy as well: the states that these had when the epoch began are kept, 3 to 10
  KB of text;
- orders without draws need nothing: those of our samplers, which have seeds, of lists,
  of torch's `SequentialSampler` and `DistributedSampler`. A `generator=` of the loader is kept all
  the same, as the base seeds of the epochs to come are drawn from it.

A sampler that draws with every index goes on in states of its own once it is resumed. Its order is
the same as long as nothing else drew from its generator in between.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import itertools
import json
import operator
import random
import zlib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from penstock.errors import StateError
from penstock.indices import (
    Description,
    IndexSource,
    SeededIndices,
    tell_epoch,
    tell_seed,
    with_inner,
)
from penstock.randomness.generators import GlobalStates, GuardedIterator
from penstock.randomness.keys import checked_count
from penstock.sampling import IndexSampler
from penstock.sampling.samplers import Resumable
from penstock.torch.samplers import (
    STOCK_SAMPLERS,
    OrderSeed,
    index_batches,
    seeded_sampler,
    stock_indices,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.engine.plan import Progress
    from penstock.torch.loader import DataLoader

_DRAWLESS: Final = (SequentialSampler, DistributedSampler, BatchSampler, list, tuple, range)
_tolist: Final = operator.methodcaller("tolist")  # of numpy's arrays and scalars
_OURS: Final = IndexSampler.__module__.rpartition(".")[0] + "."


@dataclass(slots=True)
class Draws:
    """What an epoch was drawn with.

    Attributes:
        is_new: Whether an iterator began with it, and drew a base seed.
        asked_twice: Whether the sampler was asked twice for its indices, as with workers.
        base_seed: Of the workers.
        sampler_epoch: The epoch that the sampler was notified of, if it says so.
        order_seed: Of a `RandomSampler` without generator.
        states: Name -> state of each generator that the sampler may draw from, at the beginning.
    """

    is_new: bool
    asked_twice: bool
    base_seed: int
    sampler_epoch: int | None
    order_seed: OrderSeed
    states: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "order_seed": self.order_seed.value,
            "states": {name: _encode(state) for name, state in self.states.items()},
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Draws:
        """Return the draws whose `to_json` is given, or raise StateError."""
        with _state_errors():
            seed = saved["order_seed"]
            order_seed = OrderSeed(None if seed is None else checked_count("order_seed", seed))
            states = {name: _decode(name, text) for name, text in saved["states"].items()}
            draws = cls(**{**saved, "order_seed": order_seed, "states": states})
            checked_count("base_seed", draws.base_seed)
            if (order_seed.value or 0) >= 2**63:
                raise ValueError(f"order_seed should be below 2^63, but got {order_seed.value}.")
            return draws


class _Generator(NamedTuple):
    """A generator that a sampler may draw from; a private one is the loader's or the sampler's."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object]
    is_private: bool


class UnseededIndices(IndexSource):
    """Indices drawn at the moments at which torch's own loader draws them."""

    def __init__(self, loader: DataLoader[Any], base_seed: int | None = None) -> None:
        """Look at what the loader draws with.

        Args:
            loader: Not kept by what `begin` returns: an iterator and its loader would be a cycle.
            base_seed: Of workers that live on: the sampler is then iterated once, and no base seed
                drawn. None: an iterator begins.
        """
        self._loader = loader
        self._is_new = base_seed is None
        self.base_seed = base_seed or 0
        sampler = loader._index_sampler
        is_stock_batch = type(sampler) is BatchSampler
        self._inner = sampler.sampler if is_stock_batch else sampler
        self._is_stock = (is_stock_batch or not loader._auto_collation) and (
            type(self._inner) in STOCK_SAMPLERS
        )
        self._is_drawless = all(map(_draws_nothing, with_inner(self._inner)))
        ordered = [part for part in with_inner(sampler) if isinstance(part, IndexSampler)]
        # Its order is a function of the epoch, of which nothing else notifies it.
        self._ordered = ordered[-1] if ordered else None

    def begin(self, epoch: int, progress: Progress) -> Iterator[object]:
        """Return the indices of the batches that are not given; notes in `progress` the draws."""
        found = progress.draws
        if isinstance(found, dict) and "between" in found:  # saved before the epoch began
            with _state_errors():
                between = {n: _decode(n, text) for n, text in found["between"].items()}
            self._restore(between)
            found = None
        if found is not None:
            progress.draws = found if isinstance(found, Draws) else Draws.from_json(found)
            return self._redraw(progress.draws, progress.given.num_steps)
        if self._ordered is not None:
            # Without a seed of their own they order by 0, whatever loader had them before.
            tell_seed(0, self._loader._index_sampler)
            tell_epoch(epoch, self._loader._index_sampler)
        progress.draws = self._draws_now()
        return self._draw(progress.draws)

    def draws(self) -> dict[str, Any] | None:
        """Return the states of the generators that nothing else will put back, between epochs."""
        states = {g.name: _encode(g.get()) for g in self._generators() if g.is_private}
        return {"between": states} if states else None

    def notified_epoch(self) -> tuple[int, int | None] | None:
        """Return the epoch that an `IndexSampler` was notified of; None for other samplers."""
        order = self._ordered
        return None if order is None else (order.epoch, order.times_notified)

    def _draw(self, draws: Draws) -> Iterator[object]:
        # torch's iterator asks the sampler for an iterator, draws the base seed, and asks again if
        # there are workers: a sampler whose __iter__ draws from the global generator shows it.
        indices = self._iterate(draws)
        if not draws.is_new:
            return indices
        number = torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        self.base_seed = draws.base_seed = int(number)
        return self._iterate(draws) if draws.asked_twice else indices

    def _iterate(self, draws: Draws) -> Iterator[object]:
        sampler = self._loader._index_sampler
        if not self._loader._auto_collation and type(sampler) in STOCK_SAMPLERS:
            return stock_indices(sampler, draws.order_seed)
        # Without collation too: a batch is then one index of a dataset that is read in bulk.
        return index_batches(sampler, draws.order_seed)

    def _draws_now(self) -> Draws:
        teller = self._inner if self._ordered is None else self._ordered
        epoch = getattr(teller, "epoch", None)
        return Draws(
            is_new=self._is_new,
            asked_twice=self._is_new and self._loader.num_workers > 0,
            base_seed=self.base_seed,
            sampler_epoch=epoch if isinstance(epoch, int) else None,
            order_seed=OrderSeed(),
            states={g.name: g.get() for g in self._generators()},
        )

    def _generators(self) -> list[_Generator]:
        # Also of a sampler inside a batch sampler of the user's.
        owners = [getattr(part, "generator", None) for part in with_inner(self._inner)]
        given = (self._loader.generator, *owners)
        private = {id(one): one for one in given if isinstance(one, torch.Generator)}
        found = [
            _Generator(f"torch {number}", one.get_state, one.set_state, True)
            for number, one in enumerate(private.values())
        ]
        if isinstance(self._loader.dataset, IterableDataset) or self._is_drawless:
            return found  # for the base seed alone
        draws_number = self._is_stock and type(self._inner) is RandomSampler
        if not isinstance(owners[0], torch.Generator) and not draws_number:
            default = torch.default_generator
            found.append(_Generator("torch", default.get_state, default.set_state, False))
        if not self._is_stock:
            numpy_state = functools.partial(np.random.get_state, legacy=False)
            found.append(_Generator("random", random.getstate, _set_random, False))
            found.append(_Generator("numpy", numpy_state, _set_numpy, False))
        return found

    def _restore(self, states: dict[str, Any]) -> None:
        for generator in self._generators():
            if generator.name in states:
                with _state_errors():
                    generator.set(states[generator.name])

    def _redraw(self, draws: Draws, num_steps: int) -> Iterator[object]:
        """Draw the epoch again, up to where it was; the global generators are left alone."""
        tell_seed(0, self._loader._index_sampler)
        if draws.sampler_epoch is not None:
            tell_epoch(draws.sampler_epoch, self._loader._index_sampler)
        if isinstance(self._inner, Resumable):  # the loader has counted what was given
            self._inner.forget_state()
        users = GlobalStates.now()
        try:
            self._restore(draws.states)
            base_seed = draws.base_seed
            indices = self._draw(draws)
            self.base_seed = draws.base_seed = base_seed
            for _ in zip(range(num_steps), indices, strict=False):
                pass
            if not (self._is_stock or self._is_drawless):  # it may draw on with every index
                return GuardedIterator.going_on(indices)
            first = list(itertools.islice(indices, 1))  # while the generators are the sampler's
        finally:
            users.restore()
        return itertools.chain(first, indices)

    def describe(self) -> Description:
        """Return what the order depends on besides the draws."""
        loader = self._loader
        if isinstance(loader.dataset, IterableDataset):
            return loader._stream_source().describe()
        settings, samples_in = self._as_seeded().describe()
        # Without a seed the order is that of the epoch that the sampler was notified of.
        return settings, lambda epoch, num_batches: samples_in(None, num_batches)

    def adopt(self, settings: dict[str, Any], epoch: int, num_samples: int | None) -> None:
        """Let an `IndexSampler` change as it had before the state was saved."""
        if not isinstance(self._loader.dataset, IterableDataset):
            self._as_seeded().adopt(settings, epoch, num_samples)

    def _as_seeded(self) -> SeededIndices:
        loader = self._loader
        sampler = seeded_sampler(loader.sampler, 0)
        return SeededIndices(sampler, seeded_sampler(loader.batch_sampler, 0), 0)


@contextlib.contextmanager
def _state_errors() -> Iterator[None]:
    """Raise what a state's draws raise as a StateError: they may say anything."""
    try:
        yield
    except Exception as error:
        raise StateError(
            "an epoch cannot be drawn again by this state, which was changed since it was saved. "
            f"Load another, or begin the epoch anew by set_epoch(). {type(error).__name__}: {error}"
        ) from error


def _draws_nothing(part: object) -> bool:
    """Return whether a sampler itself, apart from those inside it, draws from no generator.

    A subclass may draw.
    """
    kind = type(part)
    return kind in _DRAWLESS or kind.__module__.startswith(_OURS)


def _set_random(state: Any) -> None:  # noqa: ANN401 - a tuple, or JSON's list of it
    version, words, gauss = state
    random.setstate((version, tuple(words), gauss))


def _set_numpy(state: dict[str, Any]) -> None:
    inner = {k: np.array(v) if isinstance(v, list) else v for k, v in state["state"].items()}
    np.random.set_state({**state, "state": inner})


def _encode(state: Any) -> str:  # noqa: ANN401 - a tensor of bytes, or what JSON takes
    is_tensor = isinstance(state, torch.Tensor)
    data = state.numpy().tobytes() if is_tensor else json.dumps(state, default=_tolist).encode()
    return base64.b85encode(zlib.compress(data)).decode("ascii")


def _decode(name: str, text: str) -> Any:  # noqa: ANN401
    data = zlib.decompress(base64.b85decode(text))
    if name.startswith("torch"):
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return json.loads(data)
