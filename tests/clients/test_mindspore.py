# SPDX-License-Identifier: Apache-2.0
"""`penstock.Loader` in MindSpore's pipelines, on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

IN_PROGRAMS = ("mindspore",)  # it has threads, so this process had better not import it

HERE = Path(__file__).parent


# In two halves: what takes longer than 120 s here counts as a hang.
@pytest.mark.parametrize(
    "half", ["state or transform or held or epoch", "not (state or transform or held or epoch)"]
)
def test_in_a_process_with_mindspore(half):
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *(str(HERE / "mindspore_programs.py"), "-k", half),
        ],
        cwd=HERE.parents[1],
        env={**os.environ, "GLOG_v": "3"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"^\d+ passed, \d+ deselected in", ran.stdout, re.MULTILINE), ran.stdout
