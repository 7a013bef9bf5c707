# SPDX-License-Identifier: Apache-2.0
"""A pseudo-terminal to run a program in, and what somebody in front of it then sees."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORTS_FROM = os.pathsep.join([str(ROOT), str(ROOT / "src")])
PIECE = re.compile(r"\x1b\[(?P<number>\d*)(?P<what>[A-Z])|\x1b\[[\d;]*m|(?P<text>.)", re.DOTALL)
WAITS_FOR_CTRL_C = b"\x1b[0;0m"  # says nothing to a terminal

# What a program of these tests begins with: `batch(n)` is the record of batch n, of 32 samples. It
# came 1/4 s after the one before; for half of that the main process waited.
PRELUDE = """
import os, signal, sys
from penstock.engine.timing import TimingRow
from penstock.insight.progress import open_progress

def batch(n):
    asked = 10**9 + n * 250_000_000 + 125_000_000
    return TimingRow(step=n, pid=1, asked_ns=asked, given_ns=asked + 125_000_000,
                     consumer_ns=125_000_000, num_samples=32, num_workers=1, lookahead=2,
                     ended_ns=1)

def wait_for_ctrl_c():
    # It is pressed once the marker is seen, and may come before the read, or to another thread.
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    os.write(2, b"\\x1b[0;0m")
    os.read(read, 1)
"""


@dataclass(frozen=True)
class Run:
    """What a program did in a terminal."""

    written: str
    returncode: int

    @property
    def lines(self) -> list[str]:
        """What stands on the screen at the end, without the blanks that lines were erased with."""
        return [line.rstrip() for line in screen(self.written)]


def without_bar(line: str) -> str:
    """Return a bar's line without what hangs on its width and on the clock."""
    line = re.sub(r" +\d+%\|.*\| ", " ", line)
    return re.sub(r" \[[\d:?<]+(.*)\]$", r"\1", line)


def screen(written: str) -> list[str]:
    """Return what stands on an endless screen once all of it has been written there."""
    rows, row, column = [""], 0, 0
    for piece in PIECE.finditer(written):
        number, what, text = piece["number"], piece["what"], piece["text"]
        if what == "A":
            row = max(row - int(number or 1), 0)
        elif what == "B":
            row += 1
        elif what == "K":
            assert number == "2"
            rows[row] = ""
        elif what is not None:
            raise AssertionError(f"the screen does not know {piece[0]!r}")
        elif text == "\r":
            column = 0
        elif text == "\n":
            row, column = row + 1, 0
            rows += [""] * (row == len(rows))
        elif text is not None:
            assert text != "\x1b", f"unknown: {written[piece.start() :][:10]!r}"
            rows[row] = f"{rows[row]:{column}}"[:column] + text + rows[row][column + 1 :]
            column += 1
    return rows if rows[-1] else rows[:-1]


def run(
    program: str,
    *,
    press_ctrl_c: bool = False,
    stdout=None,
    columns: int = 120,
    **environment: str,
) -> Run:
    """Run a program whose stderr, and stdout if nothing else is said, is a terminal.

    Args:
        program: Python, after `PRELUDE`.
        press_ctrl_c: Do so as soon as the program waits for it.
        stdout: As `subprocess.Popen` has it.
        environment: More variables; an empty one is taken away.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 50, columns, 0, 0))
    settings = {"TERM": "xterm-256color", "PYTHONPATH": IMPORTS_FROM, "CI": ""}
    variables = {k: v for k, v in {**os.environ, **settings, **environment}.items() if v}
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(program)]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs if stdout is None else stdout, stderr=theirs,
        env=variables, start_new_session=True, preexec_fn=_control_the_terminal,
    )  # fmt: skip
    os.close(theirs)
    written = b""
    while piece := _read(ours):
        written += piece
        if press_ctrl_c and WAITS_FOR_CTRL_C in written:
            os.write(ours, b"\x03")
            press_ctrl_c = False
    os.close(ours)
    return Run(written.decode(), process.wait(30))


def _control_the_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal to all of its processes


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux: the other side is closed
        return b""
