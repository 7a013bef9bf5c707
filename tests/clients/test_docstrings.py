# SPDX-License-Identifier: Apache-2.0
"""The examples in the docstrings of what imports a client, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.test_docstrings import ALL, OF_CLIENTS

IN_PROGRAMS = ("accelerate", "jax", "lightning", "mindspore", "mmengine", "transformers")
ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from tests.clients.torchvision_operators import declare_missing
from tests.docs.test_docstrings import check_examples
declare_missing()  # Lightning imports torchvision
check_examples(sys.argv[1])
"""


@pytest.mark.parametrize("name", sorted(ALL & OF_CLIENTS))
def test_the_examples_of_a_module_run(name):
    command = [sys.executable, "-c", PROGRAM, name]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
