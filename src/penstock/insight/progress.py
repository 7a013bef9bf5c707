# SPDX-License-Identifier: Apache-2.0
"""Progress bar of a loader, drawn by tqdm: position, time left, speed, share of waiting.

train epoch 3:  51%|█████     | 412/800 [00:58<01:14, 531 samples/s, 7 % waiting, 2 bad]
"""

from __future__ import annotations

import atexit
import contextlib
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

__all__ = ["ProgressBar", "open_progress"]

_INTERVAL_NS: Final = 100_000_000
_WINDOW_NS: Final = 10_000_000_000  # rates are of the last 5 to 10 s
_LOCK: Final = threading.RLock()
_USUAL_COLUMNS: Final = 80
_MOST_HELD_BACK: Final = 20  # drawings
_FORMAT: Final = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
# The bar is blank then. It is there as older versions of tqdm cut no line that has none.
_FORMAT_OF_UNKNOWN: Final = "{desc}: {n_fmt} [{elapsed}{postfix}]{bar}"


def open_progress(name: str = "") -> ProgressBar | None:
    """Return a progress bar on stderr, or None where it would not be seen.

    There is none on ranks above 0; where stderr is no terminal, and this is no notebook; in a
    terminal that cannot move its cursor (TERM is "dumb", "unknown" or not set); where the
    environment variable CI is set, but for "0" and "false".

    Args:
        name: What the loader is for, as "train"; stands before the number of the epoch.

    Raises:
        MissingExtraError: tqdm is not installed.

    Example:
        >>> open_progress() is None  # as it is in a test
        True
    """
    shell = _notebook()
    if current_rank().rank > 0 or not (shell is not None or _is_watched_terminal()):
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
    return ProgressBar(name, bar, shell)


class ProgressBar:
    """How far a loader is in its epoch.

    Between two drawings `advance` only counts. In a forked process nothing is drawn.
    """

    def __init__(self, name: str, tqdm: Any, shell: Any = None) -> None:  # noqa: ANN401
        """Draw nothing yet.

        Args:
            name: As `open_progress` has it.
            tqdm: The class.
            shell: IPython's, in a notebook.
        """
        name = " ".join(name.split())
        self._name = printable(name, sys.stderr.encoding or "utf-8") + " " * bool(name)
        self._tqdm = tqdm
        self._shell = shell
        self._pid = os.getpid()
        self._bar: Any = None
        self._screen: _Screen | None = None
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
        self._screen = None if self._shell else _Screen.of(sys.stderr)
        # tqdm draws nothing in a terminal that does not say how wide it is.
        has_size = self._screen is None or _columns(sys.stderr) > 0
        self._bar = self._tqdm(
            desc=f"{self._name}epoch {epoch}",
            total=total_batches,
            initial=done,
            file=self._screen or sys.stderr,
            mininterval=0,
            miniters=1,  # else it waits for as many batches as came between the last drawings
            dynamic_ncols=has_size,
            ncols=None if has_size else _USUAL_COLUMNS,
            leave=True,
            bar_format=_FORMAT if total_batches else _FORMAT_OF_UNKNOWN,
        )
        if self._screen is not None:
            self._screen.add(self._bar)
        atexit.register(self.end)
        if self._shell:
            self._shell.events.register("post_run_cell", self._cell_ended)

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
            if self._screen is None or not self._screen.holds_back():
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
        if self._shell:
            self._shell.events.unregister("post_run_cell", self._cell_ended)
        self._draw(bar, self._marks[0] if self._marks else (0, 0, 0))
        bar.close()
        if self._screen is not None:
            self._screen.remove(bar)

    def _cell_ended(self, _: object) -> None:
        self.end()  # a notebook keeps errors, and with them iterators

    def _draw(self, bar: Any, since: tuple[int, int, int]) -> None:  # noqa: ANN401
        if os.getpid() != self._pid:
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


class _Screen:
    """The terminal that bars are drawn on, while all else that is printed comes above them.

    It stands in for the method `write` of `sys.stdout` and `sys.stderr`. Not for the streams
    themselves, to which handlers of logging have references.
    """

    _now: _Screen | None = None  # one for all bars of a process

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._write = stream.write
        self._pid = os.getpid()
        self._bars: list[Any] = []
        self._is_mid_line = False
        self._num_held_back = 0
        self._taps: list[tuple[dict[str, Any], Any, Any]] = []
        for other in dict.fromkeys((sys.stdout, stream)):
            with contextlib.suppress(TypeError, ValueError):  # no attributes of its own; closed
                if other is not None and other.isatty():
                    self._tap(other, vars(other))

    @classmethod
    def of(cls, stream: TextIO) -> _Screen:
        if cls._now is None or cls._now._stream is not stream or cls._now._pid != os.getpid():
            cls._now = cls(stream)
        return cls._now

    def add(self, bar: Any) -> None:  # noqa: ANN401
        self._bars.append(bar)

    def remove(self, bar: Any) -> None:  # noqa: ANN401
        self._bars.remove(bar)
        if self._bars:
            return
        _Screen._now = None
        for attributes, tap, own in self._taps:
            if attributes.get("write") is not tap:
                continue  # others have built upon it: it stays, and only hands on
            if own is None:
                del attributes["write"]
            else:
                attributes["write"] = own

    def holds_back(self) -> bool:
        """Return whether the bar waits for the end of a line, such as a prompt; 2 s or more."""
        self._num_held_back += 1
        return self._is_mid_line and self._num_held_back <= _MOST_HELD_BACK

    def write(self, text: str) -> None:
        """Draw; a terminal that has gone away ends the bar, and not the training."""
        with contextlib.suppress(OSError, ValueError):
            self._write("\n" + text if self._is_mid_line and text.strip() else text)
            self._is_mid_line = self._is_mid_line and not text.strip()

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._stream, name)

    def _tap(self, stream: TextIO, attributes: dict[str, Any]) -> None:
        write = stream.write

        def write_above(text: str) -> int:
            # In a forked process, and once the bars have gone, it only hands on.
            if not text or not self._bars or os.getpid() != self._pid:
                return write(text)
            with _LOCK:
                if not self._is_mid_line:
                    for bar in self._bars:
                        bar.clear(nolock=True)
                    self.flush()
                num_written = write(text)
                self._is_mid_line, self._num_held_back = not text.endswith("\n"), 0
                if not self._is_mid_line:
                    stream.flush()  # it need not be the stream that bars are drawn on
                    for bar in self._bars:
                        bar.refresh(nolock=True)
            return num_written

        self._taps.append((attributes, write_above, attributes.get("write")))
        attributes["write"] = write_above


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


def _notebook() -> Any:  # noqa: ANN401
    """Return IPython's shell if this is a notebook; None otherwise."""
    ipython = sys.modules.get("IPython")  # loaded, if there is a kernel
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None


def _is_watched_terminal() -> bool:
    stream = sys.stderr
    if stream is None or stream.closed or not stream.isatty():
        return False
    if os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return False
    return os.environ.get("CI", "").lower() in ("", "0", "false")
