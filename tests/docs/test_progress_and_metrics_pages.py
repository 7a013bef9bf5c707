# SPDX-License-Identifier: Apache-2.0
"""What docs/guide/progress.md and docs/guide/metrics.md show runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guide"


@pytest.mark.parametrize("name", ["progress", "metrics"])
def test_the_python_of_the_page_runs_and_prints_what_it_says(name, tmp_path, monkeypatch, capsys):
    for module in ("torch.utils.tensorboard", "prometheus_client", "opentelemetry.sdk"):
        pytest.importorskip(module)
    page = GUIDE / f"{name}.md"
    monkeypatch.chdir(tmp_path)
    names, said = {}, []
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
        said += re.findall(r"^# (.*)$", block, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said


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
    text = (GUIDE / "metrics.md").read_text()
    assert re.findall(r"^\| `(penstock_\w+)` \| `(penstock\.\w+)` \|", text, re.MULTILINE) == named
