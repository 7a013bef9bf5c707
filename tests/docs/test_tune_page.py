# SPDX-License-Identifier: Apache-2.0
"""What docs/guide/tune.md shows runs, and prints what it says."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from penstock.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "tune.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")


def test_the_python_of_the_page_runs_and_prints_what_it_says(capsys):
    names, said = {}, []
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
        said += re.findall(r"^# (.*)$", block, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said
    assert len(said) == 2


def test_the_command_of_the_page_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_data.py").write_text("def train():\n    return list(range(64))\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "my_data", None)  # whatever is imported is forgotten again
    del sys.modules["my_data"]
    (command,) = re.findall(r"^\$ penstock (.*)$", PAGE.read_text(), re.MULTILINE)
    shortened = ["--batches", "1", "--rounds", "1", "--prefetch", "2"]
    assert main([*shlex.split(command), *shortened]) == 0
    assert "(dataset, batch_size=32, shuffle=True, " in capsys.readouterr().out


def test_the_options_of_the_page_are_those_of_the_command(capsys):
    assert main(["tune", "--help"]) == 0
    offered = capsys.readouterr().out
    for option in re.findall(r"--[a-z]+(?:-[a-z]+)*", PAGE.read_text()):
        assert option in offered
