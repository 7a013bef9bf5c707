# SPDX-License-Identifier: Apache-2.0
"""One file that holds a run: written all at once, read without trusting it."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from pathlib import Path


def save(state: dict[str, Any], path: Path) -> None:
    """Write `state` to `path`. After a kill the file there is the old or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load(path: Path) -> dict[str, Any]:
    """Return what `save` wrote, on the CPU. A file from elsewhere can run no code here."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # over other files torch raises nearly anything
        raise ValueError(
            f"{path} is damaged, or holds other things than torch's tensors"
        ) from error
    return state


def random_states() -> dict[str, Any]:
    """Return where the global generators are. Penstock's own need none: they follow the seed."""
    name, key, *rest = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": (name, key.tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Put the global generators back to where they were."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
