# SPDX-License-Identifier: Apache-2.0
"""Tests that run the examples as the programs that they are, at tiny size."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.clients.conftest import pytest_pycollect_makemodule

__all__ = ["pytest_pycollect_makemodule"]  # skips, or fails, where a package is missing

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Mark what is here: it runs in the environment of `make test-clients`, which has it all."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.clients)
