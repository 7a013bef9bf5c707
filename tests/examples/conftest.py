# SPDX-License-Identifier: Apache-2.0
"""Tests that run the examples as the programs that they are, at tiny size."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path

import pytest
from tests.clients.conftest import pytest_pycollect_makemodule
from tests.clients.torchvision_operators import declare_missing

__all__ = ["pytest_pycollect_makemodule"]  # skips, or fails, where a package is missing

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Mark what is here: it runs in the environment of `make test-clients`, which has it all."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.clients)


@pytest.fixture
def torchvision():
    """The package, for a test in a module that can do without; skips, or fails, without it."""
    if importlib.util.find_spec("torchvision") is None:
        if os.environ.get("PENSTOCK_REQUIRE_CLIENTS") == "1":
            pytest.fail("torchvision is missing. PENSTOCK_REQUIRE_CLIENTS=1 forbids to skip.")
        pytest.skip("not installed: torchvision (`make test-clients` has it)")
    declare_missing()
    return importlib.import_module("torchvision")
