# SPDX-License-Identifier: Apache-2.0
"""What docs/guide/why-does-my-gpu-wait.md shows runs.

Neither it nor the design page leaves a verdict out.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.insight.verdict import BOTTLENECKS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "guide" / "why-does-my-gpu-wait.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")


def test_the_python_of_the_page_runs_and_prints_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names, said = {}, []
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
        said += re.findall(r"^# (.*)$", block, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said
    assert len(said) == 6


def test_every_verdict_has_its_remedy_on_the_page():
    remedies = PAGE.read_text().split("## The verdicts and their remedies")[1]
    listed = re.findall(r"^\| `([a-z ]+)` \|", remedies, re.MULTILINE)
    assert sorted(listed) == sorted(BOTTLENECKS)


def test_the_table_of_the_design_page_has_every_verdict_and_no_other():
    text = (DOCS / "design" / "insight.md").read_text()
    table = text.split("| question | yes, if | verdict |\n")[1].split("\n\n")[0]
    verdicts = [row.split("|")[-2] for row in table.splitlines()]
    assert set(re.findall(r"`([a-z ]+)`", "".join(verdicts))) == set(BOTTLENECKS)


@pytest.mark.parametrize("page", ["guide/why-does-my-gpu-wait.md", "design/insight.md"])
def test_links_lead_to_pages(page):
    path = DOCS / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target
