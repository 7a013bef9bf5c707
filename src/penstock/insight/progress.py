# SPDX-License-Identifier: Apache-2.0
"""Progress bar of a loader, drawn by tqdm: position, time left, speed, share of waiting.

train epoch 3:  51%|█████     | 412/800 [00:58<01:14, 531 samples/s, 7 % waiting, 2 bad]
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any, Final, TextIO

from penstock.distributed import current_rank
from penstock.errors import MissingExtraError
from penstock.lines import printable
from penstock.optional import install_command

if TYPE_CHECKING:
    from penstock.engine.timing import TimingRow

_INTERVAL_NS: Final = 100_000_000
_WINDOW_NS: Final = 10_000_000_000  # rates are of the last 5 to 10 s
_LOCK: Final = threading.RLock()
_FORMAT: Final = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
# The bar is blank then. It is there as older versions of tqdm cut no line that has none.
_FORMAT_OF_UNKNOWN: Final = "{desc}: {n_fmt} [{elapsed}{postfix}]{bar}"


def open_progress(name: str = "") -> ProgressBar | None:
    """Return a progress bar on stderr, or None where it would not be seen.

    There is none on ranks above 0; where stderr is no terminal, and this is no notebook; where
    TERM is "dumb".

    Args:
        name: What the loader is for, as "train"; stands before the number of the epoch.

    Raises:
        MissingExtraError: tqdm is not installed.

    Example:
        >>> open_progress() is None  # as it is in a test
        True
    """
    if current_rank().rank > 0 or not (_is_notebook() or _is_watched_terminal()):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without ipywidgets it draws text, and says so
            tqdm = importlib.import_module("tqdm.auto").tqdm
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "progress=True needs tqdm, which is not installed. Install it with: "
            f"{install_command('progress')}, or leave progress out."
        ) from error
    # Without tqdm's thread, as workers are forked, and with a lock of threads: making its own, of
    # processes as well, decides the start method of multiprocessing.
    bar = type("Bar", (tqdm,), {"monitor_interval": 0, "_lock": _LOCK})
    return ProgressBar(name, bar)


class ProgressBar:
    """How far a loader is in its epoch.

    Between two drawings `advance` only counts. In a forked process nothing is drawn.
    """

    def __init__(self, name: str, tqdm: Any) -> None:  # noqa: ANN401
        """Draw nothing yet, with the class `tqdm`; see `open_progress`."""
        name = " ".join(name.split())
        self._name = printable(name, sys.stderr.encoding or "utf-8") + " " * bool(name)
        self._tqdm = tqdm
        self._pid = os.getpid()
        self._bar: Any = None
        self._forget()

    def _forget(self) -> None:
        self._num_new = self._samples = self._wait_ns = self._failed = self._given_ns = 0
        self._draw_at_ns = 0
        self._marks: list[tuple[int, int, int]] = []  # moment, samples, wait: of which rates are

    def begin(self, epoch: int, total_batches: int | None, done: int = 0) -> None:
        """Draw the bar of an epoch that begins; the one before is ended if need be.

        Args:
            epoch: Its number.
            total_batches: How many batches it has; None if that is not known.
            done: How many of them were given before, if the epoch is resumed.
        """
        self.end()
        self._forget()
        if os.getpid() != self._pid:
            return
        self._terminal = _Terminal()
        self._bar = self._tqdm(
            desc=f"{self._name}epoch {epoch}",
            total=total_batches,
            initial=done,
            file=sys.stderr if _is_notebook() else self._terminal,
            mininterval=0,
            miniters=1,  # else it waits for as many batches as came between the last drawings
            dynamic_ncols=True,
            leave=True,
            bar_format=_FORMAT if total_batches else _FORMAT_OF_UNKNOWN,
        )
        self._terminal.bar = self._bar
        atexit.register(self.end)

    def add_failed(self, number: int) -> None:
        """Count bad samples."""
        self._failed += number

    def advance(self, row: TimingRow) -> None:
        """Count a batch, and draw the bar if a tenth of a second has gone by."""
        self._given_ns = given_ns = row.given_ns
        self._num_new += 1
        self._samples += row.num_samples
        self._wait_ns += given_ns - row.asked_ns
        self._failed += row.num_failed
        if given_ns >= self._draw_at_ns and self._bar is not None:
            self._draw_at_ns = given_ns + _INTERVAL_NS
            # The first mark, the one that rates are of, and the one that follows it.
            self._marks = self._marks or [(row.asked_ns, 0, 0)] * 3
            if given_ns - self._marks[2][0] > _WINDOW_NS // 2:
                now = given_ns, self._samples, self._wait_ns
                self._marks = [self._marks[0], self._marks[2], now]
            self._draw(self._bar, self._marks[1])

    def end(self) -> None:
        """Draw the bar for the last time, with the rates of the whole epoch."""
        bar, self._bar = self._bar, None
        if bar is None:
            return
        atexit.unregister(self.end)
        if os.getpid() != self._pid:
            bar.disable = True
            return
        self._terminal.close()
        self._draw(bar, self._marks[0] if self._marks else (0, 0, 0))
        bar.close()

    def _draw(self, bar: Any, since: tuple[int, int, int]) -> None:  # noqa: ANN401
        if os.getpid() != self._pid or self._terminal.is_mid_line:
            return
        elapsed_ns = self._given_ns - since[0]
        texts = []
        if self._marks and elapsed_ns > 0:
            per_s = (self._samples - since[1]) / elapsed_ns * 1e9
            waiting = min((self._wait_ns - since[2]) / elapsed_ns, 1.0)
            rate = f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.1f}"
            texts = [f"{rate} samples/s", f"{waiting * 100:.0f} % waiting"]
        if self._failed:
            texts.append(f"{self._failed:,} bad")
        bar.set_postfix_str(", ".join(texts), refresh=False)
        bar.update(self._num_new)
        self._num_new = 0


class _Terminal:
    """stderr as the file of a bar; what else is written to it, or to stdout, comes above the bar.

    It replaces the method `write` of the streams. Not the streams themselves, to which handlers of
    logging have references. Half a line, such as a prompt, keeps the bar away until the line ends.
    """

    def __init__(self) -> None:
        self.bar: Any = None
        self.is_mid_line = False
        self._stream = sys.stderr
        self._pid = os.getpid()
        self.write = self._stream.write
        while isinstance(self.write, functools.partial):  # of the bars that are there already
            self.write = self.write.args[-1]
        self._streams: list[Any] = []
        for stream in {sys.stdout, sys.stderr}:
            with contextlib.suppress(AttributeError, ValueError):  # None, closed, with slots
                if stream.isatty():
                    above = functools.partial(self._write_above, stream, stream.write)
                    setattr(stream, "write", above)  # noqa: B010 - mypy forbids to assign a method
                    self._streams.append(stream)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._stream, name)

    def _write_above(self, stream: TextIO, write: Any, text: str) -> Any:  # noqa: ANN401
        # Once the bar has gone, and in a forked process, it only hands on.
        if self.bar is None or os.getpid() != self._pid or not text:
            return write(text)
        with _LOCK:
            if not self.is_mid_line:
                self.bar.clear(nolock=True)
                self._stream.flush()
            written = write(text)
            self.is_mid_line = not text.endswith("\n")
            if not self.is_mid_line:
                stream.flush()  # it need not be the stream that the bar is drawn on
                self.bar.refresh(nolock=True)
        return written

    def close(self) -> None:
        """Let the bar be drawn on a line of its own, for the last time."""
        if self.is_mid_line:
            self.write("\n")
        self.bar, self.is_mid_line = None, False
        for stream in self._streams:
            # Else others have built upon it, and it stays.
            if getattr(stream.write, "func", None) == self._write_above:
                stream.write = stream.write.args[-1]


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")  # loaded, if there is a kernel
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _is_watched_terminal() -> bool:
    stream = sys.stderr
    is_terminal = stream is not None and not stream.closed and stream.isatty()
    return is_terminal and os.environ.get("TERM") != "dumb"
