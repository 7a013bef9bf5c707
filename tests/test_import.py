# SPDX-License-Identifier: Apache-2.0
"""What `import penstock` costs: numpy and the standard library."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import penstock

EXTRAS = {
    "torch", "cv2", "PIL", "simplejpeg", "typer", "click", "rich", "lmdb", "pymongo", "bson", "ray",
}  # fmt: skip


def modules_after(statement):
    """Return the top-level packages that a fresh interpreter has loaded after `statement`."""
    script = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return {name.partition(".")[0] for name in json.loads(run.stdout)}


@pytest.mark.parametrize(
    "statement",
    ["import penstock", "from penstock import *", "import penstock.data, penstock.sampling"],
)
def test_the_core_loads_neither_torch_nor_any_extra(statement):
    loaded = modules_after(statement)
    assert "penstock" in loaded
    assert not loaded & EXTRAS


def test_the_core_loads_only_numpy_and_the_standard_library():
    before = modules_after("import numpy, numpy.random")
    third_party = modules_after("import penstock") - before - sys.stdlib_module_names
    assert third_party - {"__mp_main__"} == {"penstock"}  # multiprocessing's name for __main__


def test_the_drop_in_loads_torch_but_no_other_extra():
    pytest.importorskip("torch")
    new = modules_after("import penstock.torch") - modules_after("import torch")
    assert not new & EXTRAS


def test_the_command_line_loads_nothing_heavy_before_it_is_used():
    assert not modules_after("import penstock.cli") & EXTRAS


def test_a_submodule_is_there_when_it_is_asked_for():
    code = (
        "import sys, penstock; "
        "print(penstock.errors.StateError.__name__, 'penstock.stores' in sys.modules, "
        "hasattr(penstock, 'nothing'), hasattr(penstock, '__nothing__'))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "StateError False False False\n"


@pytest.mark.parametrize(
    ("statement", "not_yet"),
    [
        ("import penstock", "loader"),
        ("import penstock.sampling; penstock.sampling.Permutation", "sampling.balance"),
        ("import penstock.data; penstock.data.PackedList", "data.combinators"),
        ("import penstock.torch; penstock.torch.DataLoader([0])", "engine.worker_stream"),
        ("import penstock.torch; penstock.torch.DataLoader([0])", "insight.verdict"),
        ("import penstock.torch; penstock.torch.DataLoader([0])", "insight.tuner"),
        ("import penstock.torch; penstock.torch.DataLoader([0])", "sampling.balance"),
    ],
)
def test_what_the_first_loader_does_not_need_is_not_loaded(statement, not_yet):
    if "torch" in statement:
        pytest.importorskip("torch")
    code = f"import sys; {statement}; print('penstock.{not_yet}' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


@pytest.mark.parametrize("package", ["penstock", "penstock.data", "penstock.sampling"])
def test_every_promised_name_is_listed_and_found(package):
    code = (
        f"import {package} as it; names = it.__all__; "
        "print({*names} <= {*dir(it)}, all(hasattr(it, name) for name in names)); it.nothing"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "True True\n"
    assert f"AttributeError: module '{package}' has no attribute 'nothing'" in ran.stderr


@pytest.mark.parametrize("package", [penstock.data, penstock.sampling])
def test_no_name_is_that_of_a_module(package):
    # Importing the module would put it in the place of what it holds.
    (folder,) = package.__path__
    assert not {*package.__all__} & {name.partition(".")[0] for name in os.listdir(folder)}
