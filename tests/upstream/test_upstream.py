# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests of its loader pass on Penstock's, where a copy of them is at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

VARIABLE = "PENSTOCK_TORCH_TEST_DATALOADER"
LIMIT_S = 1800


@pytest.mark.slow
def test_pytorchs_own_tests_of_public_behaviour_pass(capfd: pytest.CaptureFixture[str]) -> None:
    path = os.environ.get(VARIABLE)
    if not path:
        pytest.skip(
            f"set {VARIABLE} to PyTorch's test/test_dataloader.py (tests/upstream/README.md)"
        )
    if find_spec("expecttest") is None:
        pytest.skip("PyTorch's test helpers need the package expecttest")
    runner = Path(__file__).with_name("run.py")
    with capfd.disabled():
        done = subprocess.run([sys.executable, str(runner), path], timeout=LIMIT_S, check=False)
    assert done.returncode == 0, "the list of what failed is printed above"
