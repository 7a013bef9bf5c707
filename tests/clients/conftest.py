# SPDX-License-Identifier: Apache-2.0
"""Tests with the real packages that use a loader, in the environment of `make test-clients`.

A module is skipped where a package that it imports is missing; in that environment it fails.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import warnings
from pathlib import Path

import pytest
from tests.clients.torchvision_operators import declare_missing

IMPORT_TORCHVISION = {"ignite", "lightning", "torchmetrics"}
HERE = Path(__file__).parent


def pytest_pycollect_makemodule(module_path, parent):
    """Skip, or fail, where a package is missing that the module imports."""
    imported = _imported(module_path)
    missing = sorted(name for name in imported if _is_missing(name))
    if not missing:
        if imported & IMPORT_TORCHVISION:
            declare_missing()
        if "ignite" in imported:
            with warnings.catch_warnings():  # what it imports of torch, torch has deprecated
                warnings.simplefilter("ignore", DeprecationWarning)
                importlib.import_module("torch.distributed.optim")
        return None
    reason = f"not installed: {', '.join(missing)} (`make test-clients` has them)"
    if os.environ.get("PENSTOCK_REQUIRE_CLIENTS") == "1":
        pytest.fail(f"{reason}. PENSTOCK_REQUIRE_CLIENTS=1 forbids to skip.")
    # Not skipped here: that would be the end of the folder, with the modules that can be run.
    module = _Skipped.from_parent(parent, path=module_path)
    module.reason = reason
    return module


class _Skipped(pytest.Module):
    def collect(self):
        pytest.skip(self.reason, allow_module_level=True)


def pytest_collection_modifyitems(items):
    """Mark what is here, so that `make test` leaves it out."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.clients)


def _imported(path):
    """Return the packages that the module imports at its top level, or its programs do."""
    names = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "IN_PROGRAMS":
            names |= set(ast.literal_eval(node.value))
    return names - {"tests", "__future__"}


def _is_missing(name):
    return importlib.util.find_spec(name) is None
