# SPDX-License-Identifier: Apache-2.0
"""What docs/guide/ray-data.md shows runs, and prints what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "ray-data.md"

pytest.importorskip("ray")
pytest.importorskip("pandas")  # ray[data]


def test_the_python_of_the_page_runs_and_prints_what_it_says(tmp_path):
    # A process of its own: the page connects to a Ray of its own, and ends it.
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    said = [line for block in blocks for line in re.findall(r"^# (.*)$", block, re.MULTILINE)]
    (tmp_path / "page.py").write_text("\n".join(blocks))
    ran = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == said
    assert len(said) == 6
