# SPDX-License-Identifier: Apache-2.0
"""Runs tests, and the Python of a page of the docs, in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "guide"


def run_page(name, folder, **environment):
    """Return what a page's program prints, and what the page says that it does."""
    blocks = re.findall(r"```python\n(.*?)```", (GUIDE / name).read_text(), re.DOTALL)
    whole = "\n".join(blocks)
    said = re.findall(r"^ *# (.*)$", whole, re.MULTILINE) or re.findall(
        r"print\(.*\)  # (.*)", whole
    )
    program = folder / "page.py"
    program.write_text(whole)
    ran = subprocess.run(
        [sys.executable, program.name],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines(), said


def run_tests(name, chosen, **environment):
    """Run those tests of a file beside this one that `-k` chooses; none may be skipped."""
    here = Path(__file__).parent
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", here / name, "-k", chosen],
        cwd=here.parents[1],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"^\d+ passed, \d+ deselected in", ran.stdout, re.MULTILINE), ran.stdout
