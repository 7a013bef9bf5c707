# SPDX-License-Identifier: Apache-2.0
"""A file with a line of JSON for each step. A kill tears at most the last line.

Guarantee: `sync` before a checkpoint, and the lines of its steps are there after a loss of power.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from pathlib import Path

Line = dict[str, Any]  # with "step", from 1


def add(log: TextIO, line: Line) -> None:
    """Write the line of a step, so that others can read it."""
    log.write(f"{json.dumps(line)}\n")
    log.flush()


def sync(log: TextIO) -> None:
    """Wait until all lines are on the disk."""
    log.flush()
    os.fsync(log.fileno())


def read(path: Path) -> list[Line]:
    """Return all lines up to one that is torn: as of a run that goes on, or ended in mid-write."""
    lines = []
    for text in path.read_text("utf-8", errors="replace").splitlines(keepends=True):
        if not text.endswith("\n"):
            break
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:  # blocks that a loss of power left empty
            break
    return lines


def cut(path: Path, step: int) -> None:
    """Drop the lines of steps after `step`, which were not saved any more and come again."""
    lines = read(path) if path.exists() else []
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as log:
        for line in lines:
            if line["step"] <= step:
                add(log, line)
        sync(log)
    partial.replace(path)
