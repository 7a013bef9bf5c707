# SPDX-License-Identifier: Apache-2.0
"""What docs/guide/mindspore.md shows runs, and prints what it says."""

from __future__ import annotations

import pytest
from tests.clients.pages import run_page

pytest.importorskip("mindspore")


def test_the_python_of_the_page_runs_and_prints_what_it_says(tmp_path):
    printed, said = run_page("mindspore.md", tmp_path, GLOG_v="3")
    assert printed == said
    assert len(said) == 3
