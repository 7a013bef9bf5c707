# SPDX-License-Identifier: Apache-2.0
"""What docs/guide/lightning.md shows runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import ignite  # noqa: F401 - where they are missing, conftest.py skips the module
import lightning  # noqa: F401
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "lightning.md"


@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*")
def test_the_python_of_the_page_runs_and_prints_what_it_says(capsys):
    names, said = {"__name__": "page"}, []
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
        said += re.findall(r"^# (.*)$", block, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said
    assert len(said) == 3
