# SPDX-License-Identifier: Apache-2.0
"""What a process and its descendants use, read from Linux' /proc; elsewhere nothing is known."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")


def cpu_seconds(root: int) -> float | None:
    """Return the CPU seconds, user and system, of a process tree; children that ended are included.

    Args:
        root: Process id at the top of the tree.

    Returns:
        Seconds, in steps of a clock tick (10 ms mostly), or None where the system does not tell.
    """
    if not (_PROC / "self" / "stat").exists():
        return None
    ticks = sum(sum(map(int, stat_fields(pid)[11:15])) for pid in _tree(root))
    return ticks / float(os.sysconf("SC_CLK_TCK"))


def memory_bytes(root: int) -> int | None:
    """Return the memory of a process tree: its proportional set size.

    A page that several processes map counts once, shared out between them, so shared batches are in
    the sum exactly once.

    Args:
        root: Process id at the top of the tree.

    Returns:
        Bytes, or None where the system does not tell.
    """
    if not (_PROC / "self" / "smaps_rollup").exists():
        return None
    return sum(_pss_bytes(pid) for pid in _tree(root))


def _tree(root: int) -> list[int]:
    """Return `root` and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir(_PROC):
        if entry.isdigit() and (fields := stat_fields(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    tree = [root]
    for pid in tree:  # grows while it is walked
        tree.extend(children.get(pid, ()))
    return tree


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the third (state) on; none if it has ended."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:  # another user's may be hidden
        return []
    return text.rpartition(")")[2].split()  # the second field is a name, and may hold anything


def _pss_bytes(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
