# SPDX-License-Identifier: Apache-2.0
"""How far a scan for labels has come, on stderr, in plain text: the core has no library for it."""

from __future__ import annotations

import sys
import time
from typing import Final

from penstock.lines import say

__all__ = ["ProgressLine"]

_REDRAW_S: Final = 0.1


class ProgressLine:
    """How far it has come, in one line of a terminal that is written over and wiped at the end."""

    def __init__(self, num_all: int, wanted: bool | None) -> None:
        """Write nothing yet.

        Args:
            num_all: Samples in all.
            wanted: Whether to write at all; None if stderr is a terminal.
        """
        self._num_all = num_all
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._is_shown = is_terminal if wanted is None else wanted
        self._start_s = self._drawn_s = time.monotonic()
        self._width = 0

    def __enter__(self) -> ProgressLine:
        """Return itself; the line is wiped away at the end of the block."""
        return self

    def show(self, num_done: int) -> None:
        """Write it anew, unless that was a moment ago."""
        now_s = time.monotonic()
        if not self._is_shown or (now_s - self._drawn_s < _REDRAW_S and num_done < self._num_all):
            return
        self._drawn_s = now_s
        rate = num_done / max(now_s - self._start_s, 1e-9)
        left_s = (self._num_all - num_done) / rate
        text = f"labels: {num_done} of {self._num_all} samples, {rate:.0f}/s, {left_s:.0f} s left"
        self._write(text.ljust(self._width))
        self._width = len(text)

    def tell(self, text: str) -> None:
        """Write a line of its own."""
        if self._is_shown:
            say(f"labels: {text}", err=True)

    def __exit__(self, *_: object) -> None:
        """Wipe it away."""
        if self._width:
            self._write(" " * self._width)
            self._write("")

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r{text}")
        sys.stderr.flush()
