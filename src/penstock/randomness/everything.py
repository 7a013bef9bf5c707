# SPDX-License-Identifier: Apache-2.0
"""One call that seeds every global generator; and the same for a block, undone at its end."""
#     rank 0      random, torch: the seed itself        numpy: the seed itself (words from 2^32 on)
#     rank r > 0  random, torch: 64 bits of W           numpy: 128 bits of W
#                 W = SeedSequence(seed, purpose "ranks", r)
#
# Torch is never imported. If it is not loaded yet, it is seeded right after its first import.

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.distributed import current_rank
from penstock.errors import ConfigError
from penstock.optional import when_imported
from penstock.randomness.generators import GlobalStates
from penstock.randomness.keys import Purpose, checked_count, seed_sequence
from penstock.randomness.samples import fallback_state, restore_fallback, seed_fallback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger("penstock")

_SEEDS: Final = 1 << 64  # torch.manual_seed takes no more
_NUMPY_SEEDS: Final = 1 << 32  # nor np.random.seed, nor PYTHONHASHSEED
_HASH_SEED: Final = "PYTHONHASHSEED"
_CUBLAS: Final = "CUBLAS_WORKSPACE_CONFIG"

_waiting: Callable[[], None] | None = None  # seeds torch once it is imported


def seed_everything(seed: int, deterministic: bool = False) -> int:
    """Seed `random`, `numpy.random`, torch on all devices, and `penstock.sample_rng()`.

    Alone, and on rank 0, the global generators draw what they draw after `random.seed(seed)`,
    `np.random.seed(seed)` and `torch.manual_seed(seed)`. Any other rank draws numbers of its own,
    from a mix of seed and rank. Ranks are known from torch's process group, or from torchrun's RANK
    and WORLD_SIZE: call this once one of the two is there.

    Torch is seeded if it is loaded, else right after its first import. PYTHONHASHSEED is set for
    processes that are started from here on. The logger "penstock" has what was seeded, at INFO.

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

    Concurrency:
        Seeds the whole process. One thread at a time, while no other draws.

    Example:
        >>> with seeded(0):  # undoes it all
        ...     _ = seed_everything(7)
        ...     random.random() == random.Random(7).random()
        True
    """
    seed = checked_count("seed", seed)
    if seed >= _SEEDS:
        raise ConfigError(f"seed should be below 2**64, but got seed={seed}.")
    rank, world_size = current_rank()
    words = seed_sequence(seed, Purpose.RANKS, rank)
    number = seed if rank == 0 else int(words.generate_state(1, np.uint64)[0])
    # The same on all ranks: so is the order of a set of strings in their children.
    hash_seed = seed
    if seed >= _NUMPY_SEEDS:
        hash_seed = int(seed_sequence(seed, Purpose.RANKS).generate_state(1)[0])
    os.environ[_HASH_SEED] = str(hash_seed)
    if deterministic:
        os.environ.setdefault(_CUBLAS, ":4096:8")
    # First: it may import much, which may draw.
    _call_with_torch(functools.partial(_seed_torch, number, deterministic=deterministic))
    random.seed(number)
    for_numpy = seed if rank == 0 and seed < _NUMPY_SEEDS else words.generate_state(4)
    np.random.seed(for_numpy)
    seed_fallback(seed_sequence(seed, Purpose.RANKS, rank, 1))
    later = "" if "torch" in sys.modules else " (once it is imported)"
    _log.info(
        f"seed {seed} on rank {rank} of {world_size}: random and torch{later} got {number}, numpy "
        f"got {for_numpy}, children get PYTHONHASHSEED={hash_seed}"
    )
    return seed


@contextlib.contextmanager
def seeded(seed: int, deterministic: bool = False) -> Iterator[int]:
    """Seed everything as `seed_everything` does, and put all back when the block ends.

    Put back, also after an exception: the states of `random`, `numpy.random` and torch's CPU
    generator, with their cached normal numbers; those of the CUDA generators; torch's flags for
    deterministic algorithms; the two environment variables; `sample_rng()`. Blocks may be nested.

    CUDA that was not initialised has no state yet. Afterwards its generators begin at
    `torch.initial_seed()`, as they would have after a `torch.manual_seed`. If torch is first
    imported in the block, it stays seeded, by an earlier `seed_everything` if there was one.

    Yields:
        The seed as given.

    Example:
        >>> with seeded(7) as seed:
        ...     first = np.random.random()
        >>> with seeded(7):
        ...     np.random.random() == first
        True
    """
    global _waiting
    waiting, states, fallback = _waiting, GlobalStates.now(), fallback_state()
    environment = {name: os.environ.get(name) for name in (_HASH_SEED, _CUBLAS)}
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        flags = _flags_of(torch)
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield seed_everything(seed, deterministic)
    finally:
        if torch is not None:
            _set_flags(torch, flags)  # first: it may import much, which may draw
        states.restore()
        restore_fallback(fallback)
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if torch is None:
            _waiting = waiting
            if (imported := sys.modules.get("torch")) is not None:
                _set_flags(imported, (False, False, False, False))  # as its import leaves them
            if waiting is not None:
                _call_with_torch(waiting)
        elif cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        else:  # takes the place of our seed, whether that has reached a device yet or waits
            torch.cuda.manual_seed_all(torch.initial_seed())


def _call_with_torch(function: Callable[[], None]) -> None:
    """Call a function now, or once torch is imported; of several that wait, the last."""
    global _waiting
    if "torch" in sys.modules:
        function()
        return
    _waiting = function
    when_imported("torch", _torch_is_imported)


def _torch_is_imported() -> None:
    if _waiting is not None:
        _waiting()


def _seed_torch(number: int, *, deterministic: bool) -> None:
    torch: Any = sys.modules["torch"]
    if deterministic:
        _set_flags(torch, (True, False, True, False))
    torch.manual_seed(number)  # all devices; those not initialised yet get it then


_Flags = tuple[bool, bool, bool, bool]
"""cuDNN's deterministic and benchmark; whether algorithms are deterministic, and warn only."""


def _flags_of(torch: Any) -> _Flags:  # noqa: ANN401
    return (
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_flags(torch: Any, flags: _Flags) -> None:  # noqa: ANN401
    # Only what differs: to set the mode imports torch's compiler, a second or two.
    now = _flags_of(torch)
    if now[:2] != flags[:2]:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = flags[:2]
    if now[2:] != flags[2:]:
        torch.use_deterministic_algorithms(flags[2], warn_only=flags[3])
