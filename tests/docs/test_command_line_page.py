# SPDX-License-Identifier: Apache-2.0
"""docs/guide/command-line.md names every command, and shows what the doctor says."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest

typer = pytest.importorskip("typer")

from penstock.cli.doctor import look_at_cores, look_at_open_files  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs/guide/command-line.md"


def test_every_command_has_a_row():
    from penstock.cli.commands import make_app

    rows = re.findall(r"^\| `penstock ([a-z]+)", PAGE.read_text(), flags=re.MULTILINE)
    assert rows == list(typer.main.get_command(make_app()).commands)


def test_the_lines_that_are_shown_are_those_that_the_doctor_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    # The doctor has three open.
    monkeypatch.setattr("penstock.cli.doctor.num_open_files", lambda: 3)
    monkeypatch.setattr("penstock.cli.doctor.cores_allowed", lambda *_: 1.5)
    shown = " ".join(PAGE.read_text().split())
    for finding in (look_at_cores(tmp_path), look_at_open_files()):
        mark = finding.status.upper()
        assert f"{mark} {finding.name} {finding.found} → {finding.remedy}" in shown
