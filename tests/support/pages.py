# SPDX-License-Identifier: Apache-2.0
"""Runs the Python of a page of docs/ in this process, as one program."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def run_here(page, capsys):
    """Run the blocks of a page in their order, names shared.

    Args:
        page: Its path below docs/.
        capsys: Pytest's fixture.

    Returns:
        The lines that the blocks printed, and those that they say they print: comments at the
        margin.
    """
    path = DOCS / page
    blocks = re.findall(r"```python\n(.*?)```", path.read_text("utf-8"), re.DOTALL)
    assert blocks
    names = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(path), "exec"), names)
    promised = [line for block in blocks for line in re.findall(r"^# (.*)$", block, re.MULTILINE)]
    return capsys.readouterr().out.splitlines(), promised
