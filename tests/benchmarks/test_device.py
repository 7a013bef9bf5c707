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


def test_a_program_that_is_not_there_is_refused_with_the_names_of_those_that_are(gpu, capsys):
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--device", "cpu", "--smoke", "--only", "poison*", "nonexist"])
    said = capsys.readouterr().err
    assert "--only 'nonexist' names none of the programs" in said
    assert [name for name in gpu.PROGRAMS if f"  {name}\n" not in said] == []


def test_every_program_is_listed_and_every_target_is_of_one(gpu, capsys):
    assert gpu.main(["--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert names == list(gpu.PROGRAMS)
    assert len(names) >= 18
    for target in gpu.TARGETS:
        title = target.name.split(":")[0].rstrip("*")
        assert any(name.startswith(title) for name in names)


def test_a_program_that_fails_does_not_keep_the_others_from_their_turn(tmp_path):
    broken = FILE.read_text(encoding="utf-8").replace(
        "array.fill(int(indices[0]) % _MARKS)", "array.fill(0)"
    )
    path = tmp_path / "device" / "gpu.py"
    path.parent.mkdir()
    path.write_text(broken, encoding="utf-8")
    for name in ("_meter.py", "_runner.py"):
        (tmp_path / name).symlink_to(FILE.parents[1] / name)
    programs = ("poison: device", "poison: control")
    done = python(path, "--device", "cpu", "--smoke", "--out", tmp_path, "--only", *programs)
    assert done.returncode == 1
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert list(kept["failures"]) == ["poison: device"]
    assert "held something else" in kept["failures"]["poison: device"]
    assert kept["rows"]["poison: control (damage wanted)"]["bad batches"] > 0
    assert kept["rows"]["poison: penstock, device, thread, small"]["bad batches"] > 0


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
