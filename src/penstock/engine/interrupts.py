# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C: held back while something must not be left half done, and never waited out."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any, Final

# What `signal` wraps, without making an enumeration of every answer: 0.7 us a block instead of 8.
from _signal import getsignal, signal as set_handler  # type: ignore[import-not-found]  # isort: skip

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["LONGEST_WAIT_S", "HeldInterrupts"]

# Of one system call. A signal that comes just before it, or that the kernel gives to another
# thread, does not end it; Python acts upon the signal when the call is over.
LONGEST_WAIT_S: Final = 1.0

_SIGINT: Final = int(signal.SIGINT)


class HeldInterrupts:
    """A context in which SIGINT is noted, and acted upon at its end.

    A descriptor that has just been received, or a process that has just been started, would be
    lost between two bytecodes; and what is raised in a hook of `os.fork` Python ignores. Not
    `pthread_sigmask`, which makes the kernel give the signal to another thread, and Python raises
    in the main thread all the same.

    Concurrency:
        Does nothing outside of the main thread, where no KeyboardInterrupt is ever raised. May be
        used again, not nested.
    """

    __slots__ = ("_handler", "_is_noted")

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._handler: Any = None
        self._is_noted = False

    def __enter__(self) -> None:
        """Begin to hold."""
        self._handler = None
        if threading.get_ident() == threading.main_thread().ident:
            handler = getsignal(_SIGINT)
            if callable(handler):
                self._is_noted = False
                set_handler(_SIGINT, self._note)
                self._handler = handler

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_noted = True

    def __exit__(self, *_: object) -> None:
        """Put the handler back, and let it have what was held."""
        if self._handler is not None:
            set_handler(_SIGINT, self._handler)
            self._handler = None
            if self._is_noted:
                signal.raise_signal(signal.SIGINT)
