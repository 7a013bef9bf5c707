# SPDX-License-Identifier: Apache-2.0
"""What all commands have in common: version, help, passwords that are not shown."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import sys

import pytest

import penstock
from penstock.cli import main

pytest.importorskip("rich")
pytest.importorskip("cv2")


def test_the_version_is_shown(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"penstock {penstock.__version__}\n"


def test_the_package_can_be_run_as_a_module():
    command = [sys.executable, "-m", "penstock", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"penstock {penstock.__version__}\n")


COMMANDS = [
    "pack", "convert", "split", "check", "stats", "view", "run", "tune", "report",
    "doctor", "explain", "state",
]  # fmt: skip


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_h_is_short_for_help(command, capsys):
    assert main([command, "-h"] if command else ["-h"]) == 0
    short = capsys.readouterr().out
    assert main([command, "--help"] if command else ["--help"]) == 0
    assert short == capsys.readouterr().out
    assert "-h, --help" in short


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_wrapped_once_and_calls_a_flag_by_its_name(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "<bool>" not in out
    assert not re.search(r"list\[|^  [A-Z]+\S* <", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 80
    # Ragged text has a line of a few words in the middle of a sentence.
    text = re.split("Arguments:|Options:", out.partition("\n\n")[2])[0]
    lines = [line.strip() for line in text.splitlines()]
    short = [one for one, after in itertools.pairwise(lines) if one and after and len(one) < 50]
    assert short == []


def test_the_commands_are_grouped_and_each_is_told_in_a_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    after = capsys.readouterr().out.partition("\nPrepare data:\n")[2].splitlines()
    commands = [line for line in after if line.startswith("  ")]
    titles = [line for line in after if line and not line.startswith(" ")]
    assert titles == ["Look at data:", "Look at speed:", "Find out what is wrong:"]
    names = [line.split()[0] for line in commands]
    assert names == COMMANDS
    assert all(line.endswith(".") and not line.endswith("...") for line in commands)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_the_command_has_begun_has_its_status(number, status, monkeypatch, capsys):
    monkeypatch.setattr("penstock.cli.commands.make_app", lambda _: signal.raise_signal(number))
    assert main(["check", "photos"]) == status
    assert capsys.readouterr() == ("", "")
