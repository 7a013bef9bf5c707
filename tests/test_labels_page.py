# SPDX-License-Identifier: Apache-2.0
"""What docs/guide/labels.md shows runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "labels.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")
def test_the_python_of_the_page_runs_and_prints_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names, said = {}, []
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
        said += re.findall(r"^# (.*)$", block, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said
    assert len(said) == 5


@pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")
def test_the_attributes_of_the_page_are_those_that_are_asked():
    from penstock.data.labels.known import _ATTRIBUTES, _PAIRS, _PARTS

    text = PAGE.read_text()
    for name in (*_ATTRIBUTES, *_PAIRS, *_PARTS):
        assert f"`{name}`" in text
