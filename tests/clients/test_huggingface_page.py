# SPDX-License-Identifier: Apache-2.0
"""What docs/guide/huggingface-datasets.md shows runs, and prints what it says."""

from __future__ import annotations

import pytest
from tests.clients.programs import run_page

pytest.importorskip("datasets")


def test_the_python_of_the_page_runs_and_prints_what_it_says(tmp_path):
    printed, said = run_page("huggingface-datasets.md", tmp_path)
    assert printed == said
    assert len(said) == 4
