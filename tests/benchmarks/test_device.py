# SPDX-License-Identifier: Apache-2.0
"""The checks for a GPU run on the CPU as well, at tiny size, and can fail."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from tests.support.processes import python

from penstock.torch import DataLoader

FILE = Path(__file__).parents[2] / "benchmarks" / "device" / "gpu.py"


@pytest.fixture(scope="module")
def gpu():
    """The file as a module; it finds its neighbours by the path that it adds."""
    spec = importlib.util.spec_from_file_location("gpu_benchmark", FILE)
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before
    del sys.modules[spec.name]


def run(*arguments):
    return python(FILE, "--device", "cpu", "--smoke", *arguments)


def test_the_programs_run_without_a_gpu_and_their_rows_are_kept(tmp_path):
    """One of each sort: all of them together take a minute. `make bench-smoke` runs the rest."""
    names = [
        *("poison: device", "delivery: penstock, device, uint8", "images: uint8", "normalise"),
        "training, 5 ms: penstock, device",
    ]
    done = run("--only", *names, "page-lock", "--out", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "new" / "gpu.json").read_text())
    assert kept["failures"] == {}
    assert kept["left_out"] == ["page-lock"]
    assert {name.split(":")[0] for name in kept["rows"]} == {name.split(":")[0] for name in names}
    for name, figures in kept["rows"].items():
        assert "note" not in figures
        assert name.partition(": ")[2] in done.stdout
    caveat = "(smoke sizes, on the CPU: the figures mean nothing"
    first, *_, last, not_run = [line for line in done.stdout.splitlines() if line]
    assert first.startswith(caveat)
    assert last.startswith(caveat)
    assert not_run == "  not run: page-lock"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(gpu, capsys):
    with pytest.raises(SystemExit, match="2"):
        gpu.main([])
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "gpu.py: no CUDA device: --device cpu --smoke shows that it runs\n"


def test_every_program_is_listed_and_every_target_is_of_one(gpu, capsys):
    assert gpu.main(["--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert names == list(gpu.PROGRAMS)
    assert len(names) >= 18
    for target in gpu.TARGETS:
        title = target.name.split(":")[0].rstrip("*")
        assert any(name.startswith(title) for name in names)


def test_a_single_wrong_byte_is_counted(gpu):
    class WrongAt(gpu.Marked):
        def get_batch(self, indices, alloc):
            batch = super().get_batch(indices, alloc)
            if indices[0] in (3, 7):
                batch["small"][-1] += 1
            return batch

    setting = gpu.Setting("cpu", smoke=True)
    loader = DataLoader(WrongAt({"tiny": 10, "small": 5000}, 12), batch_size=1)
    assert gpu.count_bad(setting, "pin and to", loader, lambda: None) == (12, 2)
