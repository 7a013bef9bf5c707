# SPDX-License-Identifier: Apache-2.0
"""Starts programs as users do, with `penstock run` and without."""

from __future__ import annotations

import fcntl
import os
import pty
import subprocess
import sys
import termios
import textwrap
from pathlib import Path

PYTHON = (sys.executable,)
RUN = (sys.executable, "-m", "penstock", "run")
# A line that Penstock says begins so; one that belongs to it is indented.
OURS = ("penstock run: ", "  ")
TIMEOUT_S = 100


def written(path, text):
    """A program in a file."""
    path.write_text(textwrap.dedent(text))
    return path


def ran(command, folder, **options):
    """Run a command in a folder to its end; what it printed is in the result, as text."""
    settings = {"env": environment(), "capture_output": True, "text": True, "timeout": TIMEOUT_S}
    return subprocess.run(command, cwd=folder, check=False, **{**settings, **options})


def environment(**more):
    """That of the tests, whose Penstock is found from any folder; an empty variable is left out."""
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    found = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths)),
        "OMP_NUM_THREADS": "1",
        **more,
    }
    return {name: value for name, value in found.items() if value}


def with_first(folder):
    """PYTHONPATH with a folder before what is on it."""
    return os.pathsep.join(filter(None, [str(folder), environment().get("PYTHONPATH")]))


def split(stderr):
    """What the program wrote to stderr, and what Penstock said."""
    lines = stderr.splitlines(keepends=True)
    said = [line for line in lines if line.startswith(OURS[0])]
    first = lines.index(said[0]) if said else len(lines)
    return "".join(lines[:first]), lines[first:]


def script():
    """The console script `penstock` beside this Python."""
    return Path(sys.executable).with_name("penstock")


def in_terminal(command, typed=b"", **variables):
    """Run a command in a terminal of its own; return what it showed, and its exit status."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, b"\x21\x00\x4d\x00" + bytes(4))
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(**variables),
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    os.write(ours, typed)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # Linux: the other side is closed
        pass
    os.close(ours)
    return shown, process.wait(30)
