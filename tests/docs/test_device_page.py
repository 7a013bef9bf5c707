# SPDX-License-Identifier: Apache-2.0
"""What docs/guide/device.md shows runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "guide" / "device.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")


# Where there is a GPU, it is in use when workers are forked.
@pytest.mark.filterwarnings("ignore:Workers are about to be forked:RuntimeWarning")
def test_the_python_of_the_page_runs_and_prints_what_it_says(capsys):
    names, said = {}, []
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
        said += re.findall(r"^# (.*)$", block, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said
    assert len(said) == 9


def test_every_module_of_the_device_is_in_the_design():
    design = (DOCS / "design" / "device.md").read_text()
    folder = DOCS.parent / "src" / "penstock" / "torch" / "device"
    for path in folder.glob("[a-z]*.py"):
        assert path.name in design, path.name
