# SPDX-License-Identifier: Apache-2.0
"""Guides whose Python runs in this process, and prints what it says; and their tables."""

from __future__ import annotations

import importlib
import re
import shlex
import sys

import pytest
from tests.docs.pages import ROOT
from tests.support.pages import DOCS, run_here

from penstock.cli import main

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the pages are not there")

# Page -> how many lines its python promises.
PAGES = {
    "design/scale.md": 5,
    "guide/device.md": 9,
    "guide/metrics.md": 4,
    "guide/progress.md": 0,
    "guide/threads.md": 4,
    "guide/tune.md": 2,
}


# Where there is a GPU, it is in use when workers are forked.
@pytest.mark.filterwarnings("ignore:Workers are about to be forked:RuntimeWarning")
@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs_and_prints_what_it_says(page, tmp_path, monkeypatch, capsys):
    if page == "guide/metrics.md":
        for module in ("torch.utils.tensorboard", "prometheus_client", "opentelemetry.sdk"):
            pytest.importorskip(module)
    if page == "guide/device.md":
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    printed, promised = run_here(page, capsys)
    assert printed == promised
    assert len(promised) == PAGES[page]


def test_every_module_of_the_device_is_in_the_design():
    design = (DOCS / "design/device.md").read_text()
    for path in (ROOT / "src/penstock/torch/device").glob("[a-z]*.py"):
        assert path.name in design, path.name


def test_the_table_of_metrics_is_whole():
    pytest.importorskip("prometheus_client")
    from penstock import Loader
    from penstock.integrations.measures import MEASURES
    from penstock.integrations.prometheus import StatsCollector

    families = StatsCollector(Loader([1])).describe()
    named = [
        (family.name + "_total" * (family.type == "counter"), f"penstock.{measure.name}")
        for family, measure in zip(families, MEASURES, strict=True)
    ]
    text = (DOCS / "guide/metrics.md").read_text()
    assert re.findall(r"^\| `(penstock_\w+)` \| `(penstock\.\w+)` \|", text, re.MULTILINE) == named


# docs/guide/tune.md


def test_the_command_of_the_page_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_data.py").write_text("def train():\n    return list(range(64))\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "my_data", None)  # whatever is imported is forgotten again
    del sys.modules["my_data"]
    text = (DOCS / "guide/tune.md").read_text()
    (command,) = re.findall(r"^\$ penstock (.*)$", text, re.MULTILINE)
    shortened = ["--batches", "1", "--rounds", "1"]
    assert main([*shlex.split(command), *shortened]) == 0
    assert "(dataset, batch_size=32, shuffle=True, " in capsys.readouterr().out


# docs/design/scale.md


@pytest.fixture
def benchmark(monkeypatch):
    """`benchmarks/scale_sim.py` as a module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module("scale_sim")
    for name in ("scale_sim", "_runner", "_meter"):
        sys.modules.pop(name, None)


def test_the_numbers_of_the_page_are_those_that_are_simulated(benchmark):
    text = (DOCS / "design/scale.md").read_text(encoding="utf-8")
    local = next(iter(benchmark.scenes(benchmark.calibrated()[0]).values()))
    assert local.batch_bytes == 256 * 224 * 224 * 3
    bound = local.trainers_per_node * (local.under_way + 1) * local.batch_bytes
    assert f"8 x 347 MB = {bound / 1e9:.1f} GB" in text
    assert f"= {8 * local.batch_bytes / local.step_s / 1e9:.1f} GB/s, of M = 20" in text
    rows = re.findall(r"^\| .* \| \d.* \|$", text, re.MULTILINE)
    assert len(rows) >= len(benchmark.scenes(benchmark.calibrated()[0]))
