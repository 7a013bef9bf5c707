# SPDX-License-Identifier: Apache-2.0
"""docs/guide/imbalance.md has the figures that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "imbalance.md"
RESULT = ROOT / "benchmarks" / "results" / "imbalance.json"


def cell(runs, figure):
    """Mean and each seed's value, as the page has them; shares in percent."""
    values = [run["more"].get(figure, run["value"]) for run in runs]
    if "loss" in figure:
        return f"{np.mean(values):.2f} ({', '.join(f'{value:.2f}' for value in values)})"
    return f"{np.mean(values):.1%} ({', '.join(f'{100 * value:.0f}' for value in values)})"


FIGURES = [
    "recall of the rarest three",
    "recall of the others",
    "accuracy",
    "loss of the last epoch",
    "loss on the training photos",
]


@pytest.mark.skipif(not (PAGE.exists() and RESULT.exists()), reason="the pages are not there")
def test_the_table_of_the_page_is_what_was_measured():
    page = PAGE.read_text(encoding="utf-8")
    readings = json.loads(RESULT.read_text(encoding="utf-8"))["readings"]
    for name, runs in readings.items():
        assert f"| {name} | {' | '.join(cell(runs, figure) for figure in FIGURES)} |" in page
