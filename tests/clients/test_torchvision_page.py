# SPDX-License-Identifier: Apache-2.0
"""What docs/guide/torchvision.md shows runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

from tests.clients.torchvision_operators import declare_missing

declare_missing()  # before the first import of torchvision

import torchvision  # noqa: E402, F401

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "torchvision.md"


def test_the_python_of_the_page_runs_and_prints_what_it_says(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names = {"__name__": __name__}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    said = re.findall(r"print\(.*\)  # (.*)", "".join(blocks))
    assert len(said) == 3
    assert capsys.readouterr().out.splitlines() == said
