# SPDX-License-Identifier: Apache-2.0
"""What docs/augmentation.md shows runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("albumentations")
PAGE = Path(__file__).parents[2] / "docs" / "augmentation.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")
def test_the_python_of_the_page_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    said = re.findall(r"print\(.*\)  # (.*)", "".join(blocks))
    assert len(said) == 7
    assert capsys.readouterr().out.splitlines() == said
    few = names["without_some"](names["Cells"]()[0])
    assert len(few["boxes"]) == len(few["labels"])
