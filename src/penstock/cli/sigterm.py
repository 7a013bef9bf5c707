# SPDX-License-Identifier: Apache-2.0
"""SIGTERM as a Ctrl-C: what Slurm, Kubernetes and `timeout` send before they kill."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["INTERRUPTED", "NO_OUTPUT", "TERMINATED", "Termination"]

# Exit statuses as shells have them: 128 and the number of the signal.
INTERRUPTED: Final = 130
TERMINATED: Final = 143
NO_OUTPUT: Final = 74  # EX_IOERR of sysexits.h: 1 says that something is broken


class Termination(contextlib.AbstractContextManager["Termination"]):
    """A block in which SIGTERM raises KeyboardInterrupt in the main thread, once.

    It goes the way of SIGINT, so that whoever holds a Ctrl-C back holds this back as well. A second
    SIGTERM does nothing: `timeout` sends two, and what is being flushed then must not be cut short.

    Attributes:
        is_noted: Whether SIGTERM came.

    Concurrency:
        Does nothing outside of the main thread. Forked workers set both signals for themselves.
    """

    def __init__(self) -> None:
        """Change nothing yet."""
        self.is_noted = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Termination:
        """Take SIGTERM, and SIGINT where it is ignored, as in a script's background jobs."""
        if threading.current_thread() is threading.main_thread():
            self._take(signal.SIGTERM, self._terminate)
            if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
                self._take(signal.SIGINT, self._interrupt)
        return self

    def _take(self, number: int, handler: Any) -> None:  # noqa: ANN401
        before = signal.signal(number, handler)
        # None: a handler that was not set from Python, and cannot be put back by it.
        self._before[number] = signal.SIG_DFL if before is None else before

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if not self.is_noted:
            self.is_noted = True
            signal.raise_signal(signal.SIGINT)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.is_noted:
            raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        """Put the handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
