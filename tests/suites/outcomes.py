# SPDX-License-Identifier: Apache-2.0
"""A plugin for pytest: writes down what became of each test, also where the run ends early.

One line of JSON in $PENSTOCK_OUTCOMES for each phase of a test that says something of it.
"""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

_FILE = Path(os.environ["PENSTOCK_OUTCOMES"])
_OPERATORS = Path(__file__).parents[1] / "clients" / "torchvision_operators.py"
runpy.run_path(str(_OPERATORS))["declare_missing"]()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    is_expected = hasattr(report, "wasxfail")
    outcome = "expected to fail" if is_expected else report.outcome
    lines = report.longreprtext.strip().splitlines() if report.failed else []
    lines = [line for line in lines if line.startswith("E ")] or lines
    with _FILE.open("a", encoding="utf-8") as file:
        file.write(json.dumps([report.nodeid, outcome, lines[-3:]]) + "\n")
