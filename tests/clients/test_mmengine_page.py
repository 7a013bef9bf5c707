# SPDX-License-Identifier: Apache-2.0
"""What docs/guide/mmengine.md shows runs, and prints what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import mmengine

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "mmengine.md"
# Where torchvision is of another build than torch, mmengine's list of versions fails.
FIRST = """
from tests.clients.torchvision_operators import declare_missing

declare_missing()
"""


def test_the_python_of_the_page_runs_and_prints_what_it_says(tmp_path):
    # A process of its own: a runner changes the whole process, and registries know a name once.
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    said = [line for block in blocks for line in re.findall(r"^# (.*)$", block, re.MULTILINE)]
    (tmp_path / "page.py").write_text("\n".join([FIRST, *blocks]))
    ran = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(tmp_path),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert ran.returncode == 0, ran.stderr
    printed = [line for line in ran.stdout.splitlines() if "Loads checkpoint by" not in line]
    assert printed == said
    assert len(said) == 4


def test_the_page_names_the_version_that_it_is_true_of():
    assert f"Tested with mmengine {mmengine.__version__}" in PAGE.read_text()
