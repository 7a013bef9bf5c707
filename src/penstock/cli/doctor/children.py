# SPDX-License-Identifier: Apache-2.0
"""Child processes of `penstock doctor`, since a library may crash, hang or exit.

    doctor ── starts ──▶ child: one JSON object a line into a pipe, as far as it gets
                         what libraries print goes into a file

A child that ends early has told what it was at. The end of the process is waited for and not that
of the pipe, which comes when the last one has closed it: a library may leave a process behind.
Nothing here is imported by the doctor but `Child`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, Any, Final, NamedTuple, Self

from penstock.system_limits import signal_name

__all__ = ["Child", "Ended"]

_MODULE: Final = "penstock.cli.doctor.tasks"
_LOOK_S: Final = 0.05  # between two looks whether it has ended
_KILLED_LIMIT_S: Final = 10.0  # one that waits for a network folder cannot even be killed


class Ended(NamedTuple):
    """How a child ended.

    Attributes:
        lines: What it told.
        how: "" if it came to its end, otherwise what happened instead, for a sentence.
        last_words: The last line that it wrote to stdout or stderr.
    """

    lines: list[dict[str, Any]]
    how: str
    last_words: str


class Child:
    """A process that does one of the tasks; as a context manager it is gone at the end."""

    def __init__(self, task: str, *arguments: str, limit_s: float) -> None:
        """Start it.

        Args:
            task: Function of `penstock.cli.doctor.tasks`.
            arguments: For it.
            limit_s: After so many seconds from `result` it is killed.
        """
        self._limit_s = limit_s
        self._told = bytearray()
        self._open = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._refusal = ""
        try:
            self._printed = self._open.enter_context(_open_file())
            self._fd, told_fd = os.pipe()
            self._open.callback(os.close, self._fd)
            with open(told_fd, "wb") as told:  # closed as soon as the child has it
                self._process = self._start(task, arguments, told.fileno())
        except OSError as error:  # a limit, which is just what the doctor is asked about
            self._refusal = f"could not be started: {error}"

    def _start(
        self, task: str, arguments: tuple[str, ...], told_fd: int
    ) -> subprocess.Popen[bytes]:
        # By its path and not by -m: the folder that the user is in may have files of any name.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from {_MODULE} import main; "
            f"main({told_fd}, {task!r}, {arguments!r})"
        )
        return subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
            pass_fds=[told_fd],
            start_new_session=True,  # its workers can be ended with it
        )

    def result(self) -> Ended:
        """Wait for its end and return what it told."""
        if self._process is None:
            return Ended([], self._refusal, "")
        deadline_s = time.monotonic() + self._limit_s
        while (status := self._process.poll()) is None and time.monotonic() < deadline_s:
            if not self._read(_LOOK_S):
                time.sleep(_LOOK_S)  # where it has closed the pipe, and runs still
        if status is None:
            how = f"did not end within {self._limit_s:g} s"
            if not _killed(self._process):
                how += ", nor when it was killed"
        else:
            how = _end_of(status)
        while self._read(0.0):
            pass
        return Ended(_parsed(self._told), how, _last_line(self._printed))

    def _read(self, wait_s: float) -> bool:
        """Take what lies in the pipe, or comes within so many seconds; return whether it did."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        part = os.read(self._fd, 1 << 16) if poll.poll(wait_s * 1000) else b""
        self._told += part
        return bool(part)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            _killed(self._process)
        self._open.close()


def _open_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):  # there may be no folder that can be written to
        return os.fdopen(os.memfd_create("penstock doctor"), "w+b")
    return tempfile.TemporaryFile()


def _last_line(file: IO[bytes]) -> str:
    num_bytes = os.fstat(file.fileno()).st_size
    end = os.pread(file.fileno(), 1 << 16, max(num_bytes - (1 << 16), 0))
    lines = end.decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _killed(process: subprocess.Popen[bytes]) -> bool:
    """Kill it and all that it has started; return whether it ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(_KILLED_LIMIT_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end_of(status: int) -> str:
    if status < 0:
        return f"was killed by {signal_name(-status)}"
    return f"exited with status {status}" if status else ""


def _parsed(told: bytearray) -> list[dict[str, Any]]:
    lines = []
    for line in told.splitlines():
        with contextlib.suppress(ValueError):  # a line that was cut off
            lines.append(json.loads(line))
    return lines
