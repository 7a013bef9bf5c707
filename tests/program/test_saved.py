# SPDX-License-Identifier: Apache-2.0
"""`penstock run --save` writes the figures of a run; a damaged file is an error that says so."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import pytest
import torch  # noqa: F401 - what the programs here import
from tests.program.training import run
from tests.support.saved_runs import STOCK

from penstock.errors import ConfigError
from penstock.program.saved import is_saved_run, run_in

pytest.importorskip("typer")

HEAVY = """
import os, subprocess, sys, time
import numpy
import torch
from torch.utils.data import DataLoader

class Busy(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        self.held = numpy.ones(50_000_000, numpy.uint8)
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        return index

begun = time.monotonic()
for batch in DataLoader(Busy(), 1, num_workers=2):
    pass
subprocess.run([sys.executable, "-S", "-c", "sum(range(10**7))"], check=True)
print(time.monotonic() - begun)
"""


def saved(folder, name="run.json"):
    return run_in(json.loads((folder / name).read_text()), name)


def test_figures_are_of_all_processes_of_the_program(tmp_path):
    done = run(tmp_path, HEAVY, "--save", "run.json", words=["--hf-token", "abc"])
    found = saved(tmp_path)
    assert found.engine == "penstock"
    assert found.program == "train.py"  # without its arguments, which may be secrets
    assert found.wall_s > float(done.stdout)
    assert found.cpu_s >= 4 * 0.2
    assert found.peak_memory_bytes > 50_000_000  # of torch alone
    assert f"penstock run: figures of this run: {tmp_path / 'run.json'}" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["run.json", "train.py"]


@pytest.mark.parametrize("is_late", [False, True])
def test_another_rank_writes_nothing(is_late, tmp_path):
    source = "import os\nfrom torch.utils.data import *\nprint(len(list(DataLoader(range(3)))))"
    rank = {"RANK": "1", "WORLD_SIZE": "2"}
    if is_late:  # as a group that is begun after the first loader
        source, rank = f"{source}\nos.environ.update({rank})", {}
    done = run(tmp_path, source, "--save", "run.json", **rank)
    assert (done.stdout, done.stderr) == ("3\n", "")
    assert not (tmp_path / "run.json").exists()


def damaged(**changes):
    return {"format": "penstock run", "version": 2, **asdict(STOCK), **changes}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (damaged(version=1), "has version 1, and this Penstock reads 2"),
        (damaged(wall_s="long"), r"The saved run a\.json is damaged: .*'long' stands where"),
        (damaged(colour=1), "unexpected keyword argument 'colour'"),
        (damaged(loaders=[{}]), "missing 6 required .*'made_at'"),
        (damaged(loaders="train.py"), "damaged"),
        ([1], "a.json is no file that `penstock run --save` wrote"),
    ],
)
def test_what_is_damaged_is_named(data, said):
    with pytest.raises(ConfigError, match=said):
        run_in(data, "a.json")


def test_only_a_mapping_of_its_format_is_a_saved_run():
    others = ([1], {"format": "penstock recording"})
    assert [is_saved_run(data) for data in (*others, damaged())] == [False, False, True]
