# SPDX-License-Identifier: Apache-2.0
"""Lines that stay at the bottom of the terminal while everything else is printed above them.

Guarantees:
    What others print through `sys.stdout` and `sys.stderr` comes out unchanged, above the lines,
    also from a logging handler that took hold of the stream long before.
    The cursor is never hidden and the terminal's mode never changed, so there is nothing to put
    right after Ctrl-C, a debugger, or SIGKILL.
    While a debugger has stopped the program, nothing is drawn: its prompt has a line of its own.
    A forked process draws nothing, and never waits for a lock of the process that it came from.
    A terminal that goes away ends the lines, and not the training.

Assumptions:
    What is written past Python's streams (by C code, by other processes) is not seen. It follows on
    the last of the lines, which are then drawn anew below it.

No thread: lines are drawn when `show` is called, and after what others print.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import TYPE_CHECKING, Final, Protocol, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["LineOwner", "LiveLines", "terminal_size"]

_ERASE_LINE: Final = "\r\x1b[2K"
_ERASE_LINE_ABOVE: Final = "\x1b[1A\x1b[2K"
# Somebody wrote half a line, a prompt perhaps, or dots one after the other. Lines are held back for
# that many calls of `show`, 2 s or more, and then go below it.
_MAX_HELD_BACK: Final = 20


class LineOwner(Protocol):
    """Whose line it is."""

    def line(self) -> str:
        """Return the line as of now: narrower than the terminal, with escape sequences of colour.

        It is asked for whenever lines are drawn, also because something else was printed.
        """

    def end(self) -> None:
        """Finish the line, as the process is about to end."""


class LiveLines:
    """One line for each owner, in the order in which they came.

    Rich's `Live` was not taken: it interprets what others print as markup and wraps it, allows one
    display at a time in older versions, and hides the cursor.

    Concurrency:
        Any thread.
    """

    def __init__(self, stream: TextIO) -> None:
        """Draw nothing yet.

        Args:
            stream: Of a terminal.
        """
        self._stream = stream
        self._write_to_stream = stream.write
        self._pid = os.getpid()
        self._lock = threading.RLock()  # reentrant: a signal handler, or a finaliser, may print
        self._owners: dict[LineOwner, None] = {}
        self._num_drawn = 0
        self._is_mid_line = False
        self._num_held_back = 0
        self._taps: list[_Tap] = []

    def is_on(self, stream: TextIO) -> bool:
        """Whether the lines are this process's, and drawn on that stream."""
        return self.is_here and stream is self._stream

    @property
    def is_here(self) -> bool:
        """Whether this is the process that the lines belong to."""
        return os.getpid() == self._pid

    def show(self, owner: LineOwner) -> None:
        """Draw the owner's line, in the place of what it has shown before."""
        if not self.is_here:
            return
        with self._lock:
            if not self._owners:
                self._tap()
            self._owners[owner] = None
            if self._is_mid_line and self._num_held_back < _MAX_HELD_BACK:
                self._num_held_back += 1
            elif not _is_in_debugger():
                self._put(self._start_of_line() + self._drawing())

    def finish(self, owner: LineOwner) -> None:
        """Print the owner's line for good, in the place of what it has shown."""
        if not self.is_here:
            return
        with self._lock:
            if owner in self._owners:
                del self._owners[owner]
                self._put(f"{self._start_of_line()}{owner.line()}\n{self._drawing()}")
            if not self._owners:
                self._untap()

    def close(self) -> None:
        """End every line."""
        if self.is_here:
            for owner in list(self._owners):
                owner.end()

    def write_above(self, tap: _Tap, text: str) -> int:
        """Print what somebody else has to say."""
        # Rich writes nothing, at times; a forked process; a tap that others have built upon.
        if not text or not self.is_here or not self._owners:
            return tap.write(text)
        with self._lock:
            if self._num_drawn:
                self._put(self._erasure())
            num_written = tap.write(text)
            self._is_mid_line = not text.endswith("\n")
            self._num_held_back = 0
            if not self._is_mid_line:
                tap.stream.flush()  # it need not be the stream that the lines are drawn on
                if not _is_in_debugger():
                    self._put(self._drawing())
            return num_written

    def _start_of_line(self) -> str:
        if not self._is_mid_line:
            return self._erasure()
        self._is_mid_line = False
        return "\n"

    def _erasure(self) -> str:
        num_drawn, self._num_drawn = self._num_drawn, 0
        return _ERASE_LINE + _ERASE_LINE_ABOVE * (num_drawn - 1)

    def _drawing(self) -> str:
        # What has scrolled away cannot be erased. The newest lines are the innermost loaders'.
        owners = list(self._owners)[-self._most_lines() :]
        self._num_drawn = len(owners)
        return "\n".join(owner.line() for owner in owners)

    def _most_lines(self) -> int:
        rows = terminal_size(self._stream)[1]
        return max(rows - 1, 1) if rows else len(self._owners) or 1

    def _put(self, text: str) -> None:
        try:
            self._write_to_stream(text)
            self._stream.flush()
        except (OSError, ValueError):  # hung up, or closed
            self._owners.clear()
            self._untap()

    def _tap(self) -> None:
        atexit.register(self.close)
        self._write_to_stream = self._stream.write
        streams = [self._stream]
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and stream not in streams and _is_terminal(stream):
                streams.append(stream)
        self._taps = [_Tap(stream, self.write_above) for stream in streams]

    def _untap(self) -> None:
        for tap in self._taps:
            tap.remove()
        self._taps = []
        atexit.unregister(self.close)
        self._is_mid_line = False


class _Tap:
    """Stands in for the method `write` of a stream.

    Not for the stream itself: handlers of logging have a reference to that, and whoever restores
    `sys.stdout` at the end of a block would bring a stream back that has had its time.
    """

    def __init__(self, stream: TextIO, write_above: Callable[[_Tap, str], int]) -> None:
        self.stream = stream
        self.write: Callable[[str], int] = stream.write
        self._write_above = write_above
        try:
            self._was_own = "write" in vars(stream)
            vars(stream)["write"] = self
        except TypeError:  # it has no attributes of its own
            pass

    def __call__(self, text: str) -> int:
        return self._write_above(self, text)

    def remove(self) -> None:
        attributes = getattr(self.stream, "__dict__", {})
        if attributes.get("write") is not self:
            return  # others have built upon it since: it stays, and only hands on
        if self._was_own:
            attributes["write"] = self.write
        else:
            del attributes["write"]


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """Return columns and rows of a terminal; 0 where it does not say."""
    try:
        size = os.get_terminal_size(stream.fileno())
        return size.columns, size.lines
    except (OSError, ValueError):
        return 0, 0


def _is_in_debugger() -> bool:
    """Return whether a debugger made of `bdb` (pdb, ipdb, pudb) has stopped this thread."""
    bdb = sys.modules.get("bdb")
    if bdb is None:
        return False
    # Not `bdb.Bdb.run`, which is there all the time under `python -m pdb`.
    stops = bdb.Bdb.trace_dispatch.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not stops:
        frame = frame.f_back
    return frame is not None


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False
