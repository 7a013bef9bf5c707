# SPDX-License-Identifier: Apache-2.0
"""Progress line: position in the epoch, speed, share of the time spent waiting.

    train epoch 3 ━━━━━━━╸─────── 412/800  531 samples/s  7 % waiting  2 bad  0:01:14 left

In a terminal it stays at the bottom, in a notebook it has a place of its own in the output of the
cell. Nothing is drawn anywhere else.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from penstock.distributed import current_rank
from penstock.errors import MissingExtraError
from penstock.insight.terminal import LiveLines, terminal_size
from penstock.lines import printable
from penstock.optional import install_command

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from penstock.engine.timing import TimingRow

__all__ = ["ProgressBar", "Surface", "open_progress"]

_NEVER: Final = 1 << 63  # CLOCK_MONOTONIC in ns gets there after 292 years
_WINDOW_NS: Final = 10_000_000_000  # rates are of the last 10 s
_MAX_BAR_WIDTH: Final = 40
_MIN_BAR_WIDTH: Final = 8


def open_progress(name: str = "") -> ProgressBar | None:
    """Return a progress bar, or None where there is nobody to look at it.

    It is drawn on stderr, so what the program prints can be piped. There is none

    - on ranks above 0,
    - where stderr is no terminal, and this is no notebook,
    - in a terminal that cannot move its cursor (TERM is "dumb", "unknown" or not set),
    - where the environment variable CI is set, but for "0" and "false".

    NO_COLOR and COLUMNS count as rich has it.

    Args:
        name: What the loader is for, as "train"; stands before the number of the epoch.

    Raises:
        MissingExtraError: rich is not installed, and there is somebody to look at it.

    Example:
        >>> open_progress() is None  # as it is in a test
        True
    """
    if current_rank().rank > 0:
        return None
    if _is_notebook():
        return ProgressBar(name, _in_notebook())
    return ProgressBar(name, _in_terminal()) if _is_watched_terminal() else None


class Surface(Protocol):
    """Where bars are drawn.

    Attributes:
        console: Of rich.
        interval_ns: Least time between two drawings of a bar.
    """

    console: Console
    interval_ns: int

    @property
    def width(self) -> int:
        """How many columns there are."""

    def show(self, bar: ProgressBar) -> None:
        """Draw the bar in the place of what it has shown before."""

    def finish(self, bar: ProgressBar) -> None:
        """Draw the bar for the last time."""


class _Moment(NamedTuple):
    given_ns: int
    num_batches: int
    num_samples: int
    wait_ns: int


class ProgressBar:
    """How far a loader is in its epoch.

    Between two drawings, `advance` only counts; it never asks for the time.

    Concurrency:
        One thread at a time; bars of several loaders may be drawn from several threads. In a forked
        process nothing is drawn.
    """

    def __init__(self, name: str, surface: Surface) -> None:
        """Draw nothing yet; `open_progress` knows where to draw."""
        self._name = printable(" ".join(name.split()), "utf-8")
        self._surface = surface
        self._is_on = False
        self._drawn: tuple[object, str] = None, ""
        self._reset(0, None, 0)

    def _reset(self, epoch: int, total_batches: int | None, done: int) -> None:
        self._epoch = epoch
        self._total = total_batches
        self._done = self._first = done
        self._samples = 0
        self._wait_ns = 0
        self._failed = 0
        self._given_ns = 0
        self._draw_at_ns = _NEVER
        self._moments: deque[_Moment] = deque()

    def begin(self, epoch: int, total_batches: int | None, done: int = 0) -> None:
        """Draw the bar of an epoch that begins; the one before is ended if need be.

        Args:
            epoch: Its number.
            total_batches: How many batches it has; None if nobody knows.
            done: How many of them were given before, if the epoch is resumed.
        """
        self.end()
        self._reset(epoch, total_batches, done)
        self._draw_at_ns = 0
        self._is_on = True
        self._surface.show(self)

    def add_failed(self, number: int) -> None:
        """Count bad samples."""
        self._failed += number

    def advance(self, row: TimingRow) -> None:
        """Count a batch, and draw the bar if a tenth of a second has gone by."""
        self._given_ns = given_ns = row.given_ns
        self._done += 1
        self._samples += row.num_samples
        self._wait_ns += given_ns - row.asked_ns
        self._failed += row.num_failed
        if given_ns >= self._draw_at_ns:
            self._draw(row)

    def end(self) -> None:
        """Draw the bar for the last time; nothing happens if that was done."""
        if self._is_on:
            self._is_on = False
            self._draw_at_ns = _NEVER
            self._surface.finish(self)

    def line(self) -> str:
        """Return the bar as a terminal draws it, with the counts of now."""
        console = self._surface.console
        state = self._epoch, self._done, self._is_on, self._surface.width
        if self._drawn[0] != state:
            with console.capture() as capture:
                text = self.text(is_last=not self._is_on)
                console.print(text, end="", no_wrap=True, crop=False)
            self._drawn = state, capture.get()
        return self._drawn[1]

    def _draw(self, row: TimingRow) -> None:
        self._draw_at_ns = self._given_ns + self._surface.interval_ns
        if not self._moments:
            self._moments.append(_Moment(row.asked_ns, self._first, 0, 0))
            self._begun = self._moments[0]
        self._moments.append(self._now())
        # One that is older stays, so that the window is never shorter.
        while len(self._moments) > 2 and self._moments[1].given_ns < self._given_ns - _WINDOW_NS:
            self._moments.popleft()
        self._surface.show(self)

    def _now(self) -> _Moment:
        return _Moment(self._given_ns, self._done, self._samples, self._wait_ns)

    def text(self, *, is_last: bool) -> Text:
        """Return the bar with the counts of now.

        Args:
            is_last: Whether it says how long the epoch took, and not how long it will take.
        """
        from rich.text import Text

        console = self._surface.console
        # A notebook draws the text by a console of its own width.
        head = Text(f"{self._name} epoch {self._epoch} ".lstrip(), no_wrap=True, overflow="ignore")
        tail = Text(self._counts())
        # The first batch waited for workers to start, and tells nothing of those that follow.
        if self._moments and (is_last or self._done - self._first > 1):
            _append_rates(tail, since=self._begun if is_last else self._moments[0], now=self._now())
        if self._failed:
            tail.append("  ").append(f"{self._failed:,} bad", style="red")
        tail.append(self._time(is_last=is_last))
        head.append_text(
            self._bar(console, self._surface.width - 1 - head.cell_len - tail.cell_len)
        )
        line = head.append_text(tail)
        return _cut(line, console.encoding, self._surface.width - 1)

    def _counts(self) -> str:
        return f"{self._done:,}" + ("" if self._total is None else f"/{self._total:,}")

    def _bar(self, console: Console, width: int) -> Text:
        from rich.progress_bar import ProgressBar as Bar
        from rich.text import Text

        bar = Text()
        if self._total and width > _MIN_BAR_WIDTH:
            width = min(width - 1, _MAX_BAR_WIDTH)
            shape = Bar(total=self._total, completed=self._done, width=width)
            for segment in console.render(shape):
                bar.append(segment.text, segment.style)
            bar.append(" ")
        return bar

    def _time(self, *, is_last: bool) -> str:
        if not self._moments:
            return ""
        if is_last:
            return f"  in {_clock(self._given_ns - self._begun.given_ns)}"
        since = self._moments[0]
        num_batches = self._done - since.num_batches
        if self._total is None or self._done - self._first < 2:
            return ""
        left = max(self._total - self._done, 0)
        return f"  {_clock((self._given_ns - since.given_ns) * left // num_batches)} left"


def _cut(line: Text, encoding: str, width: int) -> Text:
    """Return a line that fits, in characters that the terminal has."""
    if encoding.startswith("utf"):
        line.truncate(width, overflow="ellipsis")
        return line
    # Whatever the terminal has not is told by a question mark, and not by four characters.
    line.plain = line.plain.encode(encoding, "replace").decode(encoding)
    if line.cell_len > width:
        line.truncate(max(width - 3, 0), overflow="crop")
        line.append("..."[:width])
    return line


def _append_rates(tail: Text, since: _Moment, now: _Moment) -> None:
    elapsed_ns = now.given_ns - since.given_ns
    if elapsed_ns <= 0:
        return
    per_s = (now.num_samples - since.num_samples) / elapsed_ns * 1e9
    waiting = min((now.wait_ns - since.wait_ns) / elapsed_ns, 1.0)
    rate = f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.1f}"
    tail.append(f"  {rate} samples/s  {waiting * 100:.0f} % waiting")


def _clock(duration_ns: int) -> str:
    minutes, seconds = divmod(round(duration_ns / 1e9), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


class _Terminal:
    """Bars at the bottom of a terminal."""

    interval_ns = 100_000_000

    def __init__(self, console: Console) -> None:
        self.console = console
        self.lines = LiveLines(sys.stderr)

    @property
    def width(self) -> int:
        # COLUMNS may be that of another terminal; a line that wraps cannot be erased.
        return min(self.console.width, terminal_size(sys.stderr)[0] or self.console.width)

    def show(self, bar: ProgressBar) -> None:
        self.lines.show(bar)

    def finish(self, bar: ProgressBar) -> None:
        self.lines.finish(bar)


class _Notebook:
    """Bars in the output of a notebook's cell, each in a place that is drawn anew.

    Rich's own way needs ipywidgets, and takes what others print into its widget.
    """

    interval_ns = 250_000_000  # each is a message to the browser

    def __init__(self, console: Console) -> None:
        self.console = console
        self._pid = os.getpid()
        self._places: dict[ProgressBar, tuple[Any, Text]] = {}  # and what stands there

    @property
    def width(self) -> int:
        return self.console.width

    def show(self, bar: ProgressBar) -> None:
        if os.getpid() != self._pid:
            return
        if bar in self._places:
            self._update(bar, bar.text(is_last=False))
            return
        ipython = importlib.import_module("IPython")
        if not self._places:
            ipython.get_ipython().events.register("post_run_cell", self._cell_ended)
        line = bar.text(is_last=False)
        self._places[bar] = ipython.display.display(line, display_id=True), line

    def finish(self, bar: ProgressBar) -> None:
        if bar not in self._places or os.getpid() != self._pid:
            return
        self._update(bar, bar.text(is_last=True))
        del self._places[bar]
        if not self._places:
            ipython = importlib.import_module("IPython")
            ipython.get_ipython().events.unregister("post_run_cell", self._cell_ended)

    def _cell_ended(self, _: object) -> None:
        # An epoch need not have ended: a notebook keeps errors, and with them iterators.
        for bar in self._places:
            self._update(bar, bar.text(is_last=True))

    def _update(self, bar: ProgressBar, line: Text) -> None:
        place, shown = self._places[bar]
        if line != shown:
            place.update(line)
            self._places[bar] = place, line


_terminal: _Terminal | None = None  # one for all bars of a process, as it is one terminal


def _in_terminal() -> Surface:
    global _terminal
    known = _terminal
    if known is None or not known.lines.is_on(sys.stderr):
        _terminal = known = _Terminal(_console(_Canvas(sys.stderr.encoding)))
    return known


def _in_notebook() -> Surface:
    return _Notebook(_console(_Canvas("utf-8"), width=100))


class _Canvas(io.StringIO):
    """Where rich writes to, which does nothing but turn text into escape sequences here."""

    encoding: str = "utf-8"  # rich draws with ASCII where there is no better

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self.encoding = encoding


def _console(canvas: _Canvas, width: int | None = None) -> Console:
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "progress=True needs rich, which is not installed. Install it with: "
            f"{install_command('progress')}, or leave progress out."
        ) from error
    return Console(
        file=canvas, force_terminal=True, force_jupyter=False, width=width, highlight=False
    )


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")  # loaded, if there is a kernel
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def _is_watched_terminal() -> bool:
    stream = sys.stderr
    if stream is None or stream.closed or not stream.isatty():
        return False
    if os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return False
    return os.environ.get("CI", "").lower() in ("", "0", "false")
