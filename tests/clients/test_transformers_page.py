# SPDX-License-Identifier: Apache-2.0
"""What docs/guide/transformers.md shows runs, and prints what it says."""

from __future__ import annotations

from pathlib import Path

import transformers
from tests.clients.programs import GUIDE, run_page

ROOT = Path(__file__).parents[2]


def test_the_python_of_the_page_runs_and_prints_what_it_says(tmp_path):
    # Python imports it first: transformers asks for torchvision where that is installed.
    (tmp_path / "sitecustomize.py").write_text(
        "from tests.clients.torchvision_operators import declare_missing\ndeclare_missing()\n"
    )
    printed, said = run_page(
        "transformers.md",
        tmp_path,
        OMP_NUM_THREADS="1",
        PYTHONPATH=f"{tmp_path}:{ROOT}",
    )
    # Trainer itself prints a summary of each training, which differs from run to run.
    assert [line for line in printed if not line.startswith("{'train_runtime'")] == said
    assert len(said) == 2


def test_the_page_names_the_version_that_it_is_true_of():
    page = (GUIDE / "transformers.md").read_text()
    assert f"Tested with transformers {transformers.__version__}" in page
