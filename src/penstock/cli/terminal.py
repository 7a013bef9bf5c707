# SPDX-License-Identifier: Apache-2.0
"""What commands share: exit statuses, signals, silence, the progress bar, files they write."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import ConfigError
from penstock.lines import printable, say
from penstock.whole_file import is_stream, refuse_special, write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Exit statuses as shells have them: 128 and the number of the signal.
INTERRUPTED: Final = 130
TERMINATED: Final = 143
NO_OUTPUT: Final = 74  # EX_IOERR of sysexits.h: 1 says that something is broken
_REDRAW_S: Final = 0.1

_sigterm_came = threading.Event()


def was_terminated() -> bool:
    """Return whether SIGTERM has come since the command began."""
    return _sigterm_came.is_set()


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt in the main thread, once.

    Slurm, Kubernetes and `timeout` send it before they kill. A second one does nothing: `timeout`
    sends two, and what is being flushed then must not be cut short. Forked workers set their own
    handlers. Outside of the main thread it does nothing.
    """
    _sigterm_came.clear()
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: object) -> None:
        if not _sigterm_came.is_set():
            _sigterm_came.set()
            signal.raise_signal(signal.SIGINT)  # code that defers a Ctrl-C defers this as well

    def interrupt(*_: object) -> None:
        if _sigterm_came.is_set():
            raise KeyboardInterrupt

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, terminate)}
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a script's background jobs
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: a handler that was not set from Python, which cannot set it again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def escaped_messages() -> Iterator[None]:
    """Escape control characters in warnings and logs, which repeat names of files."""
    form, last = warnings.formatwarning, logging.lastResort

    def formatted(*args: Any, **kwargs: Any) -> str:  # noqa: ANN401
        return "\n".join(map(printable, form(*args, **kwargs).split("\n")))

    warnings.formatwarning = formatted
    logging.lastResort = _EscapedLog(logging.WARNING)
    try:
        yield
    finally:
        warnings.formatwarning, logging.lastResort = form, last


class _EscapedLog(logging.StreamHandler[Any]):
    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).split("\n"):
            say(line, err=True)


def silence_libraries(worker_id: int = 0) -> None:
    """Let this process, a worker, write nothing to stderr: its errors take another way."""
    warnings.filterwarnings("ignore", module=r"PIL\.")
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)


class Bar(contextlib.AbstractContextManager["Bar"]):
    """A progress bar on stderr, if that is a terminal. Without a thread: workers are forked."""

    def __init__(self) -> None:
        """Draw nothing yet."""
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True)
        self._progress = progress.Progress(
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[note]}"),
            progress.TimeRemainingColumn(),
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
        if not self._progress.disable:  # before rich 14.3, one that was never drawn ends a line
            self._progress.stop()

    def show(self, num_done: int, num_all: int, note: str) -> None:
        """Update the bar, unless it was a moment ago."""
        now_s = time.monotonic()
        if now_s - self._drawn_s >= _REDRAW_S:
            self._drawn_s = now_s
            self._progress.update(
                self._task, total=num_all, completed=num_done, note=note, refresh=True
            )


def check_output(option: str, path: Path | None) -> None:
    """Raise ConfigError before the work if the file that an option names cannot be written."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"cannot write {option} {path}: name a file in a folder that exists.")
    if not is_stream(path):
        with writing(option, path):
            refuse_special(path)


def write_output(option: str, path: Path, content: str | bytes) -> None:
    """Write a file as a whole, or not at all; ConfigError if it cannot be written."""
    with writing(option, path):
        write_whole(path, content)


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Raise ConfigError where the system cannot write the file that an option names."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {option} {path}: {error.strerror}.") from error
