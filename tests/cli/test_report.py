# SPDX-License-Identifier: Apache-2.0
"""`penstock report` writes the page of a trace."""

from __future__ import annotations

import json

import pytest
from tests.insight.recordings import Run, recording_of

from penstock.cli import main
from penstock.insight.report import write_report
from penstock.insight.trace import read_trace, write_trace

pytest.importorskip("typer")


@pytest.fixture
def trace(tmp_path):
    return write_trace(recording_of(Run(batches=20)), tmp_path / "epoch.json")


def test_the_page_of_a_trace_lies_beside_it_and_is_the_one_of_its_loader(trace, tmp_path, capsys):
    assert main(["report", str(trace)]) == 0
    page = trace.with_suffix(".html")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [str(read_trace(trace).stats.verdict), f"{page}: 20 batches, bad samples: 1"]
    own = write_report(recording_of(Run(batches=20)), tmp_path / "own.html")
    assert page.read_bytes() == own.read_bytes()


def test_the_page_of_a_trace_goes_where_it_is_told(trace, tmp_path):
    page = tmp_path / "elsewhere.html"
    assert main(["report", str(trace), "-o", str(page)]) == 0
    assert page.stat().st_size > 1e4
    assert not trace.with_suffix(".html").exists()


def drop_a_step(content):
    content["otherData"]["recording"]["batches"]["step"].pop()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(dict.clear, "no trace of a loader"), (drop_a_step, "is damaged")],
)
def test_what_is_wrong_with_a_trace_is_told(spoil, said, trace, capsys):
    content = json.loads(trace.read_text())
    spoil(content)
    trace.write_text(json.dumps(content))
    assert main(["report", str(trace)]) == 1
    assert said in capsys.readouterr().err
    assert not trace.with_suffix(".html").exists()
