# SPDX-License-Identifier: Apache-2.0
"""What docs/design/scale.md shows runs, and prints what it says; its arithmetic is right."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design" / "scale.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")


def test_the_python_of_the_page_runs_and_prints_what_it_says(capsys):
    names, said = {}, []
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
        said += re.findall(r"^# (.*)$", block, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said
    assert len(said) == 4


@pytest.fixture
def benchmark(monkeypatch):
    """`benchmarks/scale_sim.py` as a module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module("scale_sim")
    for name in ("scale_sim", "_runner", "_meter"):
        sys.modules.pop(name, None)


def test_the_simulation_keeps_to_closed_formulas(benchmark):
    benchmark.check_simulation(600)


def test_the_numbers_of_the_page_are_those_that_are_simulated(benchmark):
    text = PAGE.read_text(encoding="utf-8")
    local = next(iter(benchmark.scenes(benchmark.calibrated()[0]).values()))
    assert local.batch_bytes == 256 * 224 * 224 * 3
    bound = local.trainers_per_node * (local.under_way + 1) * local.batch_bytes
    assert f"8 x 347 MB = {bound / 1e9:.1f} GB" in text
    assert f"= {8 * local.batch_bytes / local.step_s / 1e9:.1f} GB/s, of M = 20" in text
    rows = re.findall(r"^\| .* \| \d.* \|$", text, re.MULTILINE)
    assert len(rows) >= len(benchmark.scenes(benchmark.calibrated()[0]))


def test_a_simulation_that_is_wrong_is_found_out(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark._Cores, "_rate", lambda self: 1.0)  # cores without end
    with pytest.raises(ValueError, match="8 workers on 4 cores"):
        benchmark.check_simulation(600)
