# SPDX-License-Identifier: Apache-2.0
"""What docs/guide/report.md and docs/guide/trace.md show runs, and prints what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.cli.commands import make_app

GUIDE = Path(__file__).parents[2] / "docs" / "guide"
pytestmark = pytest.mark.skipif(not GUIDE.exists(), reason="the pages are not there")


@pytest.mark.parametrize("name", ["report", "trace"])
def test_the_python_of_the_page_runs_and_prints_what_it_says(name, capsys):
    page = GUIDE / f"{name}.md"
    names, said = {}, []
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, str(page), "exec"), names)
        said += re.findall(r"^# (.*)$", block, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said
    assert len(said) == 1


def test_the_options_of_the_page_are_those_of_the_command():
    pytest.importorskip("typer")
    (command,) = (c for c in make_app().registered_commands if c.callback.__name__ == "report")
    known = {name.replace("_", "-") for name in command.callback.__annotations__} | {"o"}
    text = (GUIDE / "report.md").read_text()
    named = set(re.findall(r"--([a-z][a-z-]*)", text))
    assert {"output"} <= named <= known
