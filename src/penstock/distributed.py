# SPDX-License-Identifier: Apache-2.0
"""Which of the processes that train together this one is, without importing torch."""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

from penstock.errors import ConfigError


class Rank(NamedTuple):
    """One of the processes that train together: `rank` is from 0 to `world_size - 1`."""

    rank: int
    world_size: int


def current_rank() -> Rank:
    """Return this process's rank: that of torch's process group, or else torchrun's variables.

    Without either this process is alone: rank 0 of 1. Nothing is remembered, so the result may
    change once a group is there.

    Raises:
        ConfigError: RANK and WORLD_SIZE are no rank and its world size.

    Example:
        >>> current_rank()
        Rank(rank=0, world_size=1)
    """
    return _of_process_group() or rank_in_environment("RANK", "WORLD_SIZE") or Rank(0, 1)


def _of_process_group() -> Rank | None:
    distributed: Any = sys.modules.get("torch.distributed")
    # It has no such function while it is being imported, nor where torch was built without it.
    is_initialized = getattr(distributed, "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return None
    return Rank(distributed.get_rank(), distributed.get_world_size())


def rank_in_environment(rank_name: str, size_name: str) -> Rank | None:
    """Return what two of torchrun's variables say; None if they are not set."""
    rank, world_size = os.environ.get(rank_name), os.environ.get(size_name)
    if rank is None or world_size is None:
        return None
    try:
        found = Rank(int(rank), int(world_size))
    except ValueError:
        found = Rank(-1, 0)  # refused below
    if not 0 <= found.rank < found.world_size:
        raise ConfigError(
            f"the environment has {rank_name}={rank!r} and {size_name}={world_size!r}, but "
            f"{rank_name} should be an integer from 0 to {size_name} - 1. torchrun sets both; "
            "unset them in a process that trains alone."
        )
    return found
