# SPDX-License-Identifier: Apache-2.0
"""`penstock run`: programs of clients that know nothing of Penstock, with and without it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from tests.distributed.launching import TORCHRUN, environment
from tests.support.processes import ROOT, completed

IN_PROGRAMS = ("accelerate", "lightning", "transformers")
PROGRAMS = Path(__file__).with_name("unedited")
RUN = ("-m", "penstock", "run")
ACCELERATE = (
    "-m", "accelerate.commands.launch", "--cpu", "--num_processes=1", "--num_machines=1",
    "--mixed_precision=no", "--dynamo_backend=no",
)  # fmt: skip
TWO_RANKS = (*TORCHRUN[1:], "--standalone", "--nproc-per-node=2")


def printed(folder, *command):
    """Return the lines of stdout, sorted, as ranks print theirs in any order; and stderr."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    ran = completed([sys.executable, *command], cwd=folder, env=environment(PYTHONPATH=path))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout
    return sorted(ran.stdout.splitlines()), ran.stderr


@pytest.mark.parametrize(
    ("launcher", "client", "num_workers", "num_lines"),
    [
        ((), "lightning", "2", 2),
        ((), "transformers", "2", 1),
        (ACCELERATE, "accelerate", "0", 2),
        (TWO_RANKS, "accelerate", "2", 2),
    ],
    ids=["lightning", "transformers", "accelerate-launch", "torchrun"],
)
def test_a_program_of_a_client_prints_the_same(tmp_path, launcher, client, num_workers, num_lines):
    program = PROGRAMS / f"{client}_program.py", num_workers
    plain, _ = printed(tmp_path, *launcher, *program)
    ours, said = printed(tmp_path, *launcher, *RUN, *program)
    assert ours == plain
    assert any(line.startswith("rank 1: ") for line in ours) == (launcher == TWO_RANKS)
    # Each line that makes loaders; ranks but the first say nothing.
    paragraphs = re.findall(rf"^penstock run: {program[0]}:\d+: .+ for data", said, re.MULTILINE)
    assert len(paragraphs) == num_lines, said
