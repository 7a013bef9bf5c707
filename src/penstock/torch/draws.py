# SPDX-License-Identifier: Apache-2.0
"""What an epoch without `seed=` was drawn with, so that its order can be drawn once more.

torch's loader draws from generators that go on from epoch to epoch, so an epoch is not a function
of its number. To resume one exactly, its draws are kept in the loader's state:

- a `RandomSampler` without a generator of its own, which is `shuffle=True`, draws one number and
  orders by that: the number is kept;
- other samplers of torch draw from their generator or torch's global one, anybody else's perhaps
  from `random` and numpy as well: the states that these had when the epoch began are kept, 3 to 10
  KB of text;
- orders without draws need nothing.

A sampler that draws with every index goes on in states of its own once it is resumed. Its order is
the same as long as nothing else drew from its generator in between.
"""

from __future__ import annotations

import base64
import functools
import itertools
import random
import zlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler
from torch.utils.data import DistributedSampler as TorchDistributedSampler
from torch.utils.data import RandomSampler as TorchRandomSampler

from penstock.engine.plan import as_given
from penstock.randomness.generators import GlobalStates
from penstock.randomness.guarded import GuardedIterator
from penstock.schedule import Description
from penstock.torch.samplers import (
    STOCK_SAMPLERS,
    DistributedSampler,
    OrderSeed,
    RandomSampler,
    index_batches,
    stock_indices,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.engine.epoch import Progress
    from penstock.torch.loader import DataLoader

__all__ = ["UnseededIndices"]

_DRAWLESS: Final = (SequentialSampler, DistributedSampler, TorchDistributedSampler)


class UnseededIndices:
    """Indices drawn at the moments at which torch's own loader draws them.

    Attributes:
        base_seed: Of the workers, once `begin` was called.
    """

    def __init__(self, loader: DataLoader[Any], base_seed: int | None = None) -> None:
        """Look at what the loader draws with.

        Args:
            loader: Used while `begin` runs, and not kept by what it returns: a persistent iterator
                and its loader would keep each other.
            base_seed: Of workers that live on: then the sampler is asked once, and no base seed is
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

    def begin(self, epoch: int, progress: Progress) -> Iterator[object]:
        """Return the indices from batch `progress.num_steps` on; notes in `progress` the draws."""
        if progress.draws is None:
            progress.draws = self._kept()
            return self._draw(progress.draws)
        return self._redraw(progress.draws, progress.num_steps)

    def _draw(self, draws: dict[str, Any]) -> Iterator[object]:
        # torch's iterator asks the sampler for an iterator, draws the base seed, and asks again if
        # there are workers: a sampler whose __iter__ draws from the global generator shows it.
        indices = self._iterate(draws)
        if not self._is_new:
            return indices
        number = torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        self.base_seed = draws["base_seed"] = int(number)
        return self._iterate(draws) if draws["asked_twice"] else indices

    def _iterate(self, draws: dict[str, Any]) -> Iterator[object]:
        sampler = self._loader._index_sampler
        seed = OrderSeed(draws)
        if self._loader._auto_collation:
            return index_batches(sampler, seed)
        if self._is_stock:
            return stock_indices(sampler, seed)
        return map(as_given, iter(sampler))

    def _kept(self) -> dict[str, Any]:
        """Keep what the draws of this epoch will depend on."""
        draws: dict[str, Any] = {
            "is_new": self._is_new,
            "base_seed": self.base_seed,
            "asked_twice": self._is_new and self._loader.num_workers > 0,
        }
        if isinstance(epoch := getattr(self._inner, "epoch", None), int):
            draws["sampler_epoch"] = epoch
        states = {name: _encode(get()) for name, get, _ in self._generators()}
        return {**draws, "states": states} if states else draws

    def _generators(self) -> list[tuple[str, Any, Any]]:
        """(name, get its state, set it) of each generator that the sampler may draw from."""
        generator = self._loader.generator
        found: dict[int, Any] = {id(generator): generator} if generator is not None else {}
        if not (self._is_stock and type(self._inner) in _DRAWLESS):
            own = getattr(self._inner, "generator", None)
            if isinstance(own, torch.Generator):
                found[id(own)] = own
            elif not (self._is_stock and type(self._inner) in (RandomSampler, TorchRandomSampler)):
                found[0] = torch.default_generator
        states = [
            (f"torch {number}", gen.get_state, gen.set_state)
            for number, gen in enumerate(found.values())
        ]
        if not self._is_stock:
            states.append(("random", _random_state, _set_random_state))
            states.append(("numpy", _numpy_state, _set_numpy_state))
        return states

    def _redraw(self, draws: dict[str, Any], num_steps: int) -> Iterator[object]:
        """Draw the epoch again, up to where it was; the global generators are left alone."""
        if "sampler_epoch" in draws and callable(getattr(self._inner, "set_epoch", None)):
            self._inner.set_epoch(draws["sampler_epoch"])
        users = GlobalStates.now()
        try:
            for name, _, set_state in self._generators():
                if name in draws.get("states", {}):
                    set_state(_decode(name, draws["states"][name]))
            self._is_new = draws["is_new"]
            base_seed = draws["base_seed"]
            indices = self._draw(draws)
            self.base_seed = draws["base_seed"] = base_seed
            for _ in range(num_steps):
                next(indices, None)
            if not self._is_stock:  # it may draw on with every index
                return GuardedIterator.going_on(indices)
            first = list(itertools.islice(indices, 1))  # while the generators are the sampler's
        finally:
            users.restore()
        return itertools.chain(first, indices)

    def describe(self) -> Description:
        """Return what the order depends on besides the draws."""
        sampler, loader = self._loader._index_sampler, self._loader
        settings: dict[str, Any] = {"sampler": {"kind": type(self._inner).__name__}}
        if type(sampler) is BatchSampler:
            settings["batch_size"] = sampler.batch_size
            settings["drop_last"] = sampler.drop_last
        if isinstance(replicas := getattr(self._inner, "num_replicas", None), int):
            settings["sampler"]["num_replicas"] = replicas
        if isinstance(loader.dataset, IterableDataset):
            settings["num_workers"] = max(loader.num_workers, 1)
        # Not a method: what is kept for an epoch must not keep the loader.
        return Description(settings, functools.partial(_samples_in, loader.batch_size))


def _samples_in(batch_size: int | None, num_batches: int) -> int | None:
    """How many samples this rank has been given."""
    return None if batch_size is None else num_batches * batch_size


def _random_state() -> bytes:
    version, words, gauss = random.getstate()
    return np.array([version, *words], np.int64).tobytes() + repr(gauss).encode()


def _set_random_state(state: bytes) -> None:
    words = np.frombuffer(state[: 626 * 8], np.int64).tolist()
    gauss = state[626 * 8 :].decode()
    random.setstate((words[0], tuple(words[1:]), None if gauss == "None" else float(gauss)))


def _numpy_state() -> bytes:
    _, key, position, has_gauss, gauss = np.random.get_state()
    return np.array([*key, position, has_gauss, gauss], np.float64).tobytes()


def _set_numpy_state(state: bytes) -> None:
    values = np.frombuffer(state, np.float64)
    key = values[:624].astype(np.uint32)
    np.random.set_state(("MT19937", key, int(values[624]), int(values[625]), float(values[626])))


def _encode(state: Any) -> str:  # noqa: ANN401 - a tensor of bytes, or bytes
    data = state if isinstance(state, bytes) else state.numpy().tobytes()
    return base64.b85encode(zlib.compress(data)).decode("ascii")


def _decode(name: str, text: str) -> Any:  # noqa: ANN401
    data = zlib.decompress(base64.b85decode(text))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if "torch" in name else data
