# SPDX-License-Identifier: Apache-2.0
"""Every example in a docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import penstock

# Their clients are in the environment of `make test-clients`; tests/clients runs these examples.
OF_CLIENTS = {
    f"penstock.integrations.{client}"
    for client in ("accelerate", "jax", "lightning", "mindspore", "mmengine", "transformers")
}
NEED_TORCH = {"penstock.integrations.dealing", "penstock.program.stock"}
ACTS_AT_IMPORT = {"penstock.testing.dropin"}
ALL = {"penstock", *(m.name for m in pkgutil.walk_packages(penstock.__path__, "penstock."))}
MODULES = sorted(ALL - OF_CLIENTS - ACTS_AT_IMPORT)


def check_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples of {name} fail"


# Tests that ran before in this process have imported torch's class.
@pytest.mark.filterwarnings("ignore:.* imported torch's DataLoader before")
@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name):
    if ".torch" in name or name in NEED_TORCH:
        pytest.importorskip("torch")
    check_examples(name)
