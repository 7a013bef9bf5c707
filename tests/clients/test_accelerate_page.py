# SPDX-License-Identifier: Apache-2.0
"""What docs/guide/accelerate.md shows runs, and prints what it says."""

from __future__ import annotations

import accelerate
from tests.clients.programs import GUIDE, run_page


def test_the_python_of_the_page_runs_and_prints_what_it_says(tmp_path):
    printed, said = run_page("accelerate.md", tmp_path, OMP_NUM_THREADS="1", TMPDIR=str(tmp_path))
    assert printed == said
    assert len(said) == 2


def test_the_page_names_the_version_that_it_is_true_of():
    assert (
        f"Tested with accelerate {accelerate.__version__}" in (GUIDE / "accelerate.md").read_text()
    )
