# SPDX-License-Identifier: Apache-2.0
"""A progress bar on stderr, if that is a terminal. Without a thread: workers are forked."""

from __future__ import annotations

import contextlib
import time
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Bar"]

_REDRAW_S: Final = 0.1


class Bar(contextlib.AbstractContextManager["Bar"]):
    """How far something has come: a bar, done and total, a note, the time left."""

    def __init__(self) -> None:
        """Draw nothing yet."""
        console = Console(stderr=True)
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None, note="")
        self._drawn_s = 0.0

    def __enter__(self) -> Bar:
        """Return the bar, which is wiped away at the end of the block."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wipe it away."""
        self._progress.stop()

    def show(self, num_done: int, num_all: int, note: str) -> None:
        """Bring it up to date, unless it was a moment ago."""
        now_s = time.monotonic()
        if now_s - self._drawn_s < _REDRAW_S:
            return
        self._drawn_s = now_s
        self._progress.update(
            self._task, total=num_all, completed=num_done, note=note, refresh=True
        )
