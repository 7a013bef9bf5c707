# SPDX-License-Identifier: Apache-2.0
"""What several tests of the commands need."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """A function that writes a module into the current folder; it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    written = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


@pytest.fixture
def drawn_on_a_terminal():
    """A function that runs `penstock` with a terminal as stderr; gives stdout and the drawing."""

    def run(*arguments, cwd):
        ours, theirs = os.openpty()
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
        script = f"import sys; from penstock.cli import main; sys.exit(main({[*arguments]!r}))"
        child = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=theirs, env=env, cwd=cwd
        )
        os.close(theirs)
        drawn = b""
        with child, open(ours, "rb", buffering=0) as terminal:
            while True:
                try:
                    drawn += terminal.read(4096)
                except OSError:  # Linux' way to say that the other end is closed
                    break
            out = child.stdout.read().decode()
        assert child.returncode == 0
        return out, drawn

    return run
