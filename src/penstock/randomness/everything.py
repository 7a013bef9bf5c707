# SPDX-License-Identifier: Apache-2.0
"""One call that seeds every global generator; and the same for a block, undone at its end.

    rank 0      random, torch: the seed itself        numpy: the seed itself (words from 2^32 on)
    rank r > 0  random, torch: 64 bits of W           numpy: 128 bits of W
                W = SeedSequence(seed, purpose "ranks", r)

Torch is never imported. If it is not loaded yet, it is seeded right after its first import: the
plan for it waits in `_waiting`, where a later call replaces it.

Concurrency:
    The generators, the environment and torch's flags belong to the whole process. Seed from one
    thread, while no other draws.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.distributed import current_rank
from penstock.errors import ConfigError
from penstock.optional import when_imported
from penstock.randomness.generators import GlobalStates
from penstock.randomness.keys import Purpose, checked_count, seed_sequence
from penstock.randomness.samples import fallback_state, restore_fallback, seed_fallback

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["seed_everything", "seeded"]

_log = logging.getLogger("penstock")

_SEEDS: Final = 1 << 64  # torch.manual_seed takes no more
_NUMPY_SEEDS: Final = 1 << 32  # nor np.random.seed, nor PYTHONHASHSEED
_HASH_SEED: Final = "PYTHONHASHSEED"
_CUBLAS: Final = "CUBLAS_WORKSPACE_CONFIG"
# Devices that torch initialises at their first use, and seeds then.
_LAZY_DEVICES: Final = ("cuda", "xpu")


def seed_everything(seed: int, deterministic: bool = False) -> int:
    """Seed `random`, `numpy.random`, torch on all devices, and `penstock.sample_rng()`.

    In a process that trains alone, and on rank 0, the global generators draw what they draw after
    `random.seed(seed)`, `np.random.seed(seed)` and `torch.manual_seed(seed)`. Any other rank draws
    numbers of its own, from a mix of seed and rank. Ranks are known from torch's process group, or
    from torchrun's RANK and WORLD_SIZE: call this once one of the two is there.

    Torch is seeded if it is loaded, else right after its first import. PYTHONHASHSEED is set for
    processes that are started from here on; this one's hashes stay as they are. What was seeded is
    logged to the logger "penstock" at level INFO.

    Args:
        seed: 0 <= seed < 2^64. numpy takes 32 bits only, so from 2^32 on it gets 128 bits mixed
            from the seed.
        deterministic: Whether torch is to use deterministic algorithms, and to fail where it has
            none: `torch.use_deterministic_algorithms(True)`, `torch.backends.cudnn.deterministic`,
            not `benchmark`, and CUBLAS_WORKSPACE_CONFIG=":4096:8" unless that is set. If false,
            these stay as they are.

    Returns:
        The seed as given, the same on all ranks, as a loader's `seed=` wants it.

    Raises:
        ConfigError: a seed out of range, or RANK and WORLD_SIZE that contradict each other.
            Nothing has been seeded then.
        TypeError: a seed that is no integer.

    Concurrency:
        Seeds the whole process. One thread at a time, while no other draws.

    Example:
        >>> with seeded(0):  # undoes it all
        ...     _ = seed_everything(7)
        ...     random.random() == random.Random(7).random()
        True
    """
    plan = _Plan.of(seed, deterministic)
    plan.carry_out()
    return plan.seed


@contextlib.contextmanager
def seeded(seed: int, deterministic: bool = False) -> Iterator[int]:
    """Seed everything as `seed_everything` does, and put all back when the block ends.

    Put back, also after an exception: the states of `random`, `numpy.random` and torch's CPU
    generator, with their cached normal numbers; those of the CUDA, XPU and MPS generators; torch's
    flags for deterministic algorithms; the two environment variables; `sample_rng()`. Blocks may
    be nested.

    A device that was not initialised has no state yet. Afterwards its generators begin at
    `torch.initial_seed()`, as they would have after a `torch.manual_seed`. If torch is first
    imported in the block, it is afterwards as its import, and an earlier `seed_everything`, would
    have left it.

    Args:
        seed: As for `seed_everything`.
        deterministic: As for `seed_everything`.

    Yields:
        The seed as given.

    Raises:
        ConfigError: as for `seed_everything`.
        TypeError: a seed that is no integer.

    Concurrency:
        As for `seed_everything`, for as long as the block lasts.

    Example:
        >>> with seeded(7) as seed:
        ...     first = np.random.random()
        >>> with seeded(7):
        ...     np.random.random() == first
        True
    """
    plan = _Plan.of(seed, deterministic)
    found = _SavedState.now()
    _open.append(found)
    try:
        plan.carry_out()
        yield plan.seed
    finally:
        _open.remove(found)
        found.restore()


@dataclass(frozen=True)
class _Plan:
    """What one process seeds with."""

    seed: int
    rank: int
    world_size: int
    number: int  # for `random` and torch, 64 bits
    numpy: Any  # for np.random.seed: an integer, or words of 32 bits
    hash_seed: int  # the same on all ranks: so is the order of a set of strings in their children
    deterministic: bool

    @classmethod
    def of(cls, seed: int, deterministic: bool) -> _Plan:
        seed = checked_count("seed", seed)
        if seed >= _SEEDS:
            raise ConfigError(f"seed should be below 2**64, but got seed={seed}.")
        rank, world_size = current_rank()
        words = seed_sequence(seed, Purpose.RANKS, rank)
        is_small = seed < _NUMPY_SEEDS
        return cls(
            seed=seed,
            rank=rank,
            world_size=world_size,
            number=seed if rank == 0 else int(words.generate_state(1, np.uint64)[0]),
            numpy=seed if rank == 0 and is_small else words.generate_state(4),
            hash_seed=seed
            if is_small
            else int(seed_sequence(seed, Purpose.RANKS).generate_state(1)[0]),
            deterministic=deterministic,
        )

    def carry_out(self) -> None:
        os.environ[_HASH_SEED] = str(self.hash_seed)
        if self.deterministic:
            os.environ.setdefault(_CUBLAS, ":4096:8")
        _seed_torch_now_or_later(self)  # first: it may import much, which may draw
        random.seed(self.number)
        np.random.seed(self.numpy)
        seed_fallback(seed_sequence(self.seed, Purpose.RANKS, self.rank, 1))
        later = "" if "torch" in sys.modules else " (once it is imported)"
        _log.info(
            f"seed {self.seed} on rank {self.rank} of {self.world_size}: random and torch{later} "
            f"got {self.number}, numpy got {self.numpy}, children get "
            f"PYTHONHASHSEED={self.hash_seed}"
        )

    def seed_torch(self) -> None:
        torch: Any = sys.modules["torch"]
        if self.deterministic:
            _set_flags((True, False, True, False))
        torch.manual_seed(self.number)  # all devices; those not initialised yet get it then


_waiting: _Plan | None = None  # for torch's import
_is_watching = False  # whether something is to be called after that import; once is enough
_open: list[_SavedState] = []  # of the blocks we are in, outermost first


def _seed_torch_now_or_later(plan: _Plan) -> None:
    global _waiting, _is_watching
    if "torch" in sys.modules:
        plan.seed_torch()
        return
    _waiting = plan
    if not _is_watching:
        _is_watching = True
        when_imported("torch", _after_import_of_torch)


def _after_import_of_torch() -> None:
    """Seed torch, and let each open block know what it would have found.

    A block that found a waiting plan would have found torch seeded by it.
    """
    global _waiting
    for found in _open:
        if found.waiting is not None:
            found.waiting.seed_torch()
        found.torch = _TorchFound.now()
        found.states = found.states._replace(torch=GlobalStates.now().torch)
    if _waiting is not None:
        _waiting.seed_torch()
        _waiting = None


_Flags = tuple[bool, bool, bool, bool]
"""cuDNN's deterministic and benchmark; whether algorithms are deterministic, and warn only."""


def _flags_now() -> _Flags:
    torch: Any = sys.modules["torch"]
    return (
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_flags(flags: _Flags) -> None:
    # Only what differs: to set the mode imports torch's compiler, a second or two.
    torch: Any = sys.modules["torch"]
    now = _flags_now()
    if now[:2] != flags[:2]:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = flags[:2]
    if now[2:] != flags[2:]:
        torch.use_deterministic_algorithms(flags[2], warn_only=flags[3])


@dataclass(frozen=True)
class _TorchFound:
    """What a block found of torch, but for its generator on the CPU."""

    flags: _Flags
    devices: dict[str, list[Any]]  # states by kind of device; only those that are initialised
    mps: Any  # a state, or None

    @classmethod
    def now(cls) -> _TorchFound:
        torch: Any = sys.modules["torch"]
        return cls(
            flags=_flags_now(),
            devices={
                name: getattr(torch, name).get_rng_state_all()
                for name in _LAZY_DEVICES
                if getattr(torch, name).is_initialized()
            },
            mps=torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
        )

    def restore_devices(self) -> None:
        torch: Any = sys.modules["torch"]
        for name in _LAZY_DEVICES:
            if name in self.devices:
                getattr(torch, name).set_rng_state_all(self.devices[name])
            else:  # takes the place of our seed, whether that has reached a device yet or waits
                getattr(torch, name).manual_seed_all(torch.initial_seed())
        if self.mps is not None:
            torch.mps.set_rng_state(self.mps)


@dataclass(eq=False)
class _SavedState:
    """All that a block puts back."""

    states: GlobalStates
    fallback: object
    environment: dict[str, str | None]
    waiting: _Plan | None
    torch: _TorchFound | None

    @classmethod
    def now(cls) -> _SavedState:
        return cls(
            states=GlobalStates.now(),
            fallback=fallback_state(),
            environment={name: os.environ.get(name) for name in (_HASH_SEED, _CUBLAS)},
            waiting=_waiting,
            torch=_TorchFound.now() if "torch" in sys.modules else None,
        )

    def restore(self) -> None:
        global _waiting
        if self.torch is not None:
            _set_flags(self.torch.flags)  # first: it may import much, which may draw
        self.states.restore()
        restore_fallback(self.fallback)
        for name, value in self.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self.torch is not None:
            self.torch.restore_devices()
        else:
            _waiting = self.waiting
