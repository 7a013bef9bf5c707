# SPDX-License-Identifier: Apache-2.0
"""`penstock.Loader` in MindSpore's pipelines, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.clients.programs import run_tests

IN_PROGRAMS = ("mindspore",)  # it has threads, so this process had better not import it

HERE = Path(__file__).parent


# In two halves: what takes longer than 120 s here counts as a hang.
@pytest.mark.parametrize(
    "half", ["state or transform or held or epoch", "not (state or transform or held or epoch)"]
)
def test_in_a_process_with_mindspore(half):
    run_tests("mindspore_programs.py", half, GLOG_v="3")
