# SPDX-License-Identifier: Apache-2.0
"""What docs/guide/ray.md shows runs, and prints what it says."""

from __future__ import annotations

import pytest
from tests.support.pages import DOCS, run_here


@pytest.mark.skipif(not DOCS.exists(), reason="the pages are not there")
def test_the_python_of_the_page_runs_and_prints_what_it_says(cluster, capsys):
    printed, promised = run_here("guide/ray.md", capsys)
    # Ray prints what other tests' workers and nodes went through.
    assert [line for line in printed if line in ("True", "False")] == promised
