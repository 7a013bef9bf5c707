# SPDX-License-Identifier: Apache-2.0
"""What docs/guide/ray.md shows runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "ray.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")
def test_the_python_of_the_page_runs_and_prints_what_it_says(cluster, capsys):
    names = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
        said = re.findall(r"^# (.*)$", block, re.MULTILINE)
        # Ray prints what other tests' workers and nodes went through.
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if line in ("True", "False")] == said
