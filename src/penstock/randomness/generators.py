# SPDX-License-Identifier: Apache-2.0
"""The global generators of `random`, `numpy.random` and torch: seeding, keeping, putting back."""
# Seeding them before every sample has to be cheap, and has to give every sample a state of its own.
# `random.seed` takes an integer of any size. numpy's and torch's functions take 32 bits, or are
# slow; with 32 bits, two of 100,000 samples would likely draw the same numbers. So their Mersenne
# twisters get all 624 words of their state: numpy's where `BitGenerator.ctypes` says that it lies,
# torch's through `set_state`. Both layouts are checked against the libraries when first used.

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_TWISTER_WORDS: Final = 624  # of 32 bits
# 64-bit words that seeding takes: `random`, then numpy, then torch (its state, and its seed).
_RANDOM: Final = 2
_NUMPY: Final = _RANDOM + _TWISTER_WORDS // 2
_TORCH: Final = _NUMPY + _TWISTER_WORDS // 2 + 1


def seed_worker(base_seed: int, worker_id: int) -> None:
    """Seed `random` and `numpy.random` for a worker."""
    # `random` gets `base_seed + worker_id`. numpy's Mersenne twister gets four words that mix the
    # same two numbers, so that the two generators, which are the same algorithm, do not run in
    # step.
    # As torch.utils.data since torch 1.9 (pytorch#56488): the words are those of numpy's
    # `SeedSequence` over (worker id, low and high half of the base seed, 0).
    random.seed(base_seed + worker_id)
    entropy = [worker_id, base_seed & 0xFFFFFFFF, base_seed >> 32, 0]
    np.random.seed(np.random.SeedSequence(entropy).generate_state(4))


class GlobalStates(NamedTuple):
    """The generators' states at one moment; torch's only if it was loaded."""

    random: tuple[Any, ...]
    numpy: Any
    torch: Any

    @classmethod
    def now(cls) -> GlobalStates:
        """Return the states as they are; copies."""
        torch = _torch_generator()
        return cls(
            random.getstate(),
            np.random.get_state(legacy=False),
            None if torch is None else torch.get_state(),
        )

    def restore(self) -> None:
        """Put the generators back into these states."""
        random.setstate(self.random)
        np.random.set_state(self.numpy)
        if self.torch is not None:
            _torch_generator().set_state(self.torch)


def _torch_generator() -> Any:  # noqa: ANN401 - torch's, which this layer cannot name
    """Return torch's default generator on the CPU; None if torch is not loaded, or only half."""
    return getattr(sys.modules.get("torch"), "default_generator", None)


class GlobalGenerators:
    """Seeds the global generators from one stream of 64-bit words."""

    def __init__(self) -> None:
        """Look up where numpy's generator keeps its state."""
        self._numpy = _NumpyTwister(np.random.get_bit_generator())  # type: ignore[attr-defined]
        self._torch: _TorchTwister | None = None

    def seed(self, source: np.random.Philox) -> None:
        """Seed all three, torch's only if it is loaded, with the next words of `source`.

        What `random` and numpy get does not depend on whether torch is loaded.
        """
        if self._torch is None and (generator := _torch_generator()) is not None:
            self._torch = _TorchTwister(generator)
        words = source.random_raw(_NUMPY if self._torch is None else _TORCH)
        high, low = words[:_RANDOM].tolist()
        random.seed(high << 64 | low)
        self._numpy.seed(words[_RANDOM:_NUMPY])
        if self._torch is not None:
            self._torch.seed(words[_NUMPY:])

    def seed_torch(self, source: np.random.Philox) -> None:
        """Seed torch, just imported, as `seed` with the same source would have."""
        words = source.random_raw(_TORCH)
        self._torch = _TorchTwister(_torch_generator())
        self._torch.seed(words[_NUMPY:])


class _NumpyTwister:
    """numpy's global generator, whatever bit generator is behind it."""

    def __init__(self, bit_generator: Any) -> None:  # noqa: ANN401
        self._bit_generator = bit_generator
        self._words = self._map_state()

    def _map_state(self) -> NDArray[np.uint32] | None:
        """Return a view of the 624 words, or None if they do not lie where they used to."""
        if not isinstance(self._bit_generator, np.random.MT19937):
            return None
        address = self._bit_generator.ctypes.state_address
        words = np.ctypeslib.as_array((ctypes.c_uint32 * _TWISTER_WORDS).from_address(address))
        same = np.array_equal(words, self._bit_generator.state["state"]["key"])
        return words if same else None

    def seed(self, words: NDArray[np.uint64]) -> None:
        key = words.view(np.uint32)
        if self._words is not None:
            np.random.seed(0)  # forgets a cached normal number, and sets the position
            self._words[:] = key
        else:  # the user has put another one there: it gets what it would have been made with
            fresh = type(self._bit_generator)(np.random.SeedSequence(key[:4].tolist()))
            np.random.set_state(fresh.state)


class _TorchTwister:
    """torch's generator on the CPU."""

    # The state as torch gives it, in 64-bit words: seed, flags, position, the 624 words of the
    # twister, and cached normal numbers (none).
    _FIRST: Final = 3
    _PROBE: Final = 0x123456789

    def __init__(self, generator: Any) -> None:  # noqa: ANN401
        self._generator = generator
        self._state = type(generator)().manual_seed(self._PROBE).get_state()
        words = self._state.numpy()
        self._words: NDArray[np.uint64] | None = None
        if len(words) % 8 == 0 and len(words) // 8 >= self._FIRST + _TWISTER_WORDS:
            view = words.view(np.uint64)
            head = [self._PROBE, view[1], 0, self._PROBE & 0xFFFFFFFF]
            self._words = view if view[: self._FIRST + 1].tolist() == head else None

    def seed(self, words: NDArray[np.uint64]) -> None:
        if self._words is None:
            self._generator.manual_seed(int(words[-1]))
            return
        self._words[0] = words[-1]
        self._words[self._FIRST : self._FIRST + _TWISTER_WORDS] = words[:-1].view(np.uint32)
        self._generator.set_state(self._state)


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
        for found in self.take(1):
            return found
        raise StopIteration

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
