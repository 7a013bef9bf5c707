# SPDX-License-Identifier: Apache-2.0
"""States of loaders beside a checkpoint: one small JSON file for each process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.opening import MAX_TREE_BYTES, read_file
from penstock.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["file_of", "read_state", "write_state"]


def file_of(folder: str | Path, name: str, rank: int) -> Path:
    """Return where the state of a process's loader is."""
    return Path(folder, f"{name}_rank{rank}.json")


def write_state(folder: str | Path, name: str, rank: int, state: Mapping[str, Any]) -> None:
    """Write a state, as a whole or not at all."""
    write_whole(file_of(folder, name, rank), json.dumps(state))


def read_state(folder: str | Path, name: str, rank: int) -> dict[str, Any] | None:
    """Return the state of `rank`, or else that of rank 0; None if there is none.

    Those of seeded loaders are the same on all ranks, so a run may go on with more of them; a state
    that is another rank's own is refused by the loader.
    """
    for path in (file_of(folder, name, rank), file_of(folder, name, 0)):
        if path.exists():
            state: dict[str, Any] = json.loads(
                read_file(path, MAX_TREE_BYTES, remedy="it is no state of a loader")
            )
            return state
    return None
