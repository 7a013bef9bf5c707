# SPDX-License-Identifier: Apache-2.0
"""`penstock run --save` writes the figures of a run; a damaged file is an error that says so."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

import pytest
from tests.program.training import run
from tests.support.saved_runs import STOCK

from penstock.errors import ConfigError
from penstock.program.saved import SavedRun, is_saved_run, words_of

pytest.importorskip("torch")
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
    return SavedRun.from_json(json.loads((folder / name).read_text()))


def test_figures_are_of_all_processes_of_the_program(tmp_path):
    words = ["--lr", "0.1", "--hf-token", "abc", "--api-key=abc"]
    done = run(tmp_path, HEAVY, "--save", "run.json", words=words)
    found = saved(tmp_path)
    assert found.engine == "penstock"
    assert found.program == ["train.py", "--lr", "0.1", "--hf-token", "***", "--api-key=***"]
    assert found.wall_s > float(done.stdout)
    assert found.cpu_s >= 4 * 0.2
    assert found.peak_memory_bytes > 50_000_000  # of torch alone
    assert f"penstock run: figures of this run: {tmp_path / 'run.json'}" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["run.json", "train.py"]


def test_another_rank_writes_nothing(tmp_path):
    source = "from torch.utils.data import *\nprint(len(list(DataLoader(range(3)))))"
    done = run(tmp_path, source, "--save", "run.json", RANK="1", WORLD_SIZE="2")
    assert (done.stdout, done.stderr) == ("3\n", "")
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            ["train.py", "--password", "x", "--lr", "1"],
            ["train.py", "--password", "***", "--lr", "1"],
        ),
        (["--token=x", "mongodb://me:x@host/db"], ["--token=***", "mongodb://me:***@host/db"]),
        (["--token", "--lr", "1"], ["--token", "--lr", "1"]),
        (["--secret-key=x", "db.secret_id=x"], ["--secret-key=***", "db.secret_id=***"]),
        (
            ["-m", "package.train", "--max-tokens", "9"],
            ["-m", "package.train", "--max-tokens", "9"],
        ),
    ],
)
def test_a_program_is_named_without_its_secrets(monkeypatch, words, shown):
    from penstock.program.options import Options

    monkeypatch.setattr(sys, "orig_argv", ["python", *words])
    assert words_of(Options()) == shown
    monkeypatch.setattr(sys, "argv", words)
    assert words_of(Options(pid=1)) == shown  # of a child, which was started in another way


def damaged(**changes):
    return {"format": "penstock run", "version": 1, **asdict(STOCK), **changes}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (damaged(version=2), "has version 2, and this Penstock reads 1"),
        (damaged(wall_s="long"), "The saved run is damaged: saved run.wall_s is to be a number"),
        (damaged(peak_memory_bytes=1.5), "peak_memory_bytes is to be an integer, got 1.5"),
        (damaged(colour=1), r"lacks \[\] and has \['colour'\]"),
        (damaged(loaders=[{}]), r"saved run.loaders\[0\] lacks \['made_at'"),
        (damaged(program="train.py"), "program is to be a list"),
    ],
)
def test_what_is_damaged_is_named(data, said):
    with pytest.raises(ConfigError, match=said):
        SavedRun.from_json(data)


def test_only_a_mapping_of_its_format_is_a_saved_run():
    others = ([1], {"format": "penstock recording"})
    assert [is_saved_run(data) for data in (*others, damaged())] == [False, False, True]
