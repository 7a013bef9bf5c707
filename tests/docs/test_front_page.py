# SPDX-License-Identifier: Apache-2.0
"""The start page: its program prints what it says, and its picture is of today."""

from __future__ import annotations

import re
import runpy
import sys

import pytest
from tests.docs.pages import ROOT, blocks_of, run

PAGE = ROOT / "docs/index.md"


def test_the_python_of_the_page_prints_what_it_says(tmp_path, until):
    pytest.importorskip("torch")
    (program,) = (b for b in blocks_of(PAGE.read_text("utf-8")) if b.language == "python")
    (tmp_path / "squares.py").write_text(program.body)
    done = run([sys.executable, "squares.py"], until=until, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {re.search(r"\)  # (.*)$", program.body, re.M)[1]}


def test_the_picture_of_the_report_shows_the_page_of_today():
    Image = pytest.importorskip("PIL.Image")
    drawn = runpy.run_path(str(ROOT / "docs/report_picture.py"))
    with Image.open(drawn["PICTURE"]) as picture:
        assert picture.text[drawn["NOTE"]] == drawn["digest"](), "run docs/report_picture.py"
