# SPDX-License-Identifier: Apache-2.0
"""Where all random numbers come from: one seed, split by purpose and epoch.

`numpy.random.SeedSequence` mixes, so related seeds (7 and 8, or epoch 3 of one run and epoch 4 of
another) give unrelated numbers. Seeds are never added up or hashed by `hash()`.
"""

from __future__ import annotations

import enum
from typing import Final

import numpy as np

from penstock.errors import ConfigError

_MOST_EPOCHS: Final = 1 << 32  # one word of a spawn key; the C code of samplers takes no more


class Purpose(enum.IntEnum):
    """What random numbers are for; a value, once given, never changes its meaning."""

    ORDER = 0
    SAMPLES = 1
    WORKERS = 2
    RANKS = 3
    REPLACEMENTS = 4


def seed_sequence(seed: int, purpose: Purpose, *which: int) -> np.random.SeedSequence:
    """Return the source of one purpose's random numbers; `which`, each below 2^32, of several."""
    return np.random.SeedSequence(seed, spawn_key=(int(purpose), *which))


def checked_count(name: str, value: object) -> int:
    """Return an integer, 0 or more, as an int."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"{name} should be an integer, but got {name}={value!r}.")
    if value < 0:
        raise ConfigError(f"{name} should be 0 or more, but got {name}={value}.")
    return int(value)


def checked_flag(name: str, value: object) -> bool:
    """Return a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} should be true or false, but got {value!r}.")
    return value


def checked_epoch(epoch: object) -> int:
    """Return the number of an epoch, below 2^32, as an int."""
    number = checked_count("epoch", epoch)
    if number >= _MOST_EPOCHS:
        raise ConfigError(f"epoch should be below 2^32, but got epoch={number}.")
    return number
