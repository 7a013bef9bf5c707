# SPDX-License-Identifier: Apache-2.0
"""What `penstock doctor` lets processes of its own do, since a library may crash, hang or exit.

    doctor ── starts ──▶ child: one JSON object a line on stdout, as far as it gets
                         what libraries print goes to stderr

A child that ends early has told what it was at. Nothing here is imported by the doctor but `Child`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any, Final, NamedTuple, Self

__all__ = ["Child", "Ended"]

_MODULE: Final = "penstock.cli.doctor.tasks"


class Ended(NamedTuple):
    """How a child ended.

    Attributes:
        lines: What it told.
        how: "" if it came to its end, otherwise what happened instead, for a sentence.
        last_words: The last line that it wrote to stderr.
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
        # By its path and not by -m: the folder that the user is in may have files of any name.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from {_MODULE} import main; "
            f"main({task!r}, {arguments!r})"
        )
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._refusal = ""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # its workers can be ended with it
            )
        except OSError as error:  # a limit, which is just what the doctor is asked about
            self._refusal = f"could not be started: {error}"

    def result(self) -> Ended:
        """Wait for its end and return what it told."""
        if self._process is None:
            return Ended([], self._refusal, "")
        how = ""
        try:
            out, err = self._process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            how = f"did not end within {self._limit_s:g} s"
            _kill(self._process)
            out, err = self._process.communicate()
        errors = err.decode(errors="replace").split("\n")
        last_words = next((line.strip() for line in reversed(errors) if line.strip()), "")
        return Ended(_parsed(out), how or _end_of(self._process), last_words)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            _kill(self._process)
        with self._process:  # closes its pipes and waits
            pass


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _end_of(process: subprocess.Popen[bytes]) -> str:
    status = process.returncode
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}" if status else ""


def _parsed(out: bytes) -> list[dict[str, Any]]:
    lines = []
    for line in out.splitlines():
        with contextlib.suppress(ValueError):  # a line that was cut off
            lines.append(json.loads(line))
    return lines
