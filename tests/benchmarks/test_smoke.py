# SPDX-License-Identifier: Apache-2.0
"""The benchmarks say what they measure, and can fail. Running them is `make bench-smoke`."""

from __future__ import annotations

import ast
import contextlib
import json
from pathlib import Path

import pytest
from tests.support.processes import python
from tests.support.sources import imported_at_top

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILES = sorted(path for path in BENCHMARKS.glob("*.py") if path.name[0] != "_")
# reliability.py asks what happens, not how fast: its cells are no contenders with a figure each.
MEASURING = [path for path in FILES if path.stem != "reliability"]
WITH_A_DOCSTRING = [*FILES, BENCHMARKS / "device" / "gpu.py"]
PARTS = ["Question", "Method", "Left out", "Machine", "Command", "Result", "What it does not show"]

# A benchmark of two contenders, of which one delivers wrong data, or leaves a process behind.
TOY = """
import pathlib, subprocess, sys
sys.path.insert(0, {folder!r})
from _meter import Meter
from _runner import Benchmark, Reading, Target, check

def count(size, step):
    with Meter() as meter:
        total = sum(range(0, size, step))
    return Reading.of(meter, step * 2.0, 1)

def wrong(size):
    check(False, "seven is not eight")

def leaves(size):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pathlib.Path(__file__).with_suffix(".pid").write_text(str(child.pid))
    return count(size, 1)

BENCHMARK = Benchmark(
    file=__file__, unit="steps", better="higher", full=1000, smoke=10, rounds=2,
    contenders={{"slow": lambda size: count(size, 1), "fast": lambda size: count(size, 3),
                "wrong": wrong, "leaves": leaves}},
    targets=(Target("fast", "slow", at_least=2.5), Target("fast", "slow", at_least=3.5)),
)
if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A benchmark that needs no loader."""
    path = tmp_path / "toy.py"
    path.write_text(TOY.format(folder=str(BENCHMARKS)), encoding="utf-8")
    return path


@pytest.mark.parametrize("path", WITH_A_DOCSTRING, ids=lambda path: path.stem)
def test_the_docstring_has_all_its_parts_in_order(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    lines = docstring.splitlines()
    assert lines[0].endswith("?")
    assert [line for line in lines if line in PARTS] == PARTS
    assert f"python benchmarks/{path.relative_to(BENCHMARKS)}" in docstring


@pytest.mark.parametrize("path", WITH_A_DOCSTRING, ids=lambda path: path.stem)
def test_no_file_imports_torch_or_penstock_at_its_top(path: Path) -> None:
    # A spawned worker imports the main module again: it would pay for both.
    assert not imported_at_top(path) & {"torch", "penstock"}


@pytest.fixture(scope="module")
def listed() -> dict[str, list[list[str | None]]]:
    """File -> its contenders, and [contender, peer] of each of its targets."""
    code = (
        "import importlib, json, sys\n"
        f"sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        f"names = {[path.stem for path in MEASURING]}\n"
        "found = {n: importlib.import_module(n).BENCHMARK for n in names}\n"
        "print(json.dumps({n: [list(b.contenders), *([t.contender, t.peer] for t in b.targets)]"
        " for n, b in found.items()}))"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", [path.stem for path in MEASURING])
def test_every_file_lists_a_peer_and_penstock_and_its_targets_are_of_them(name, listed) -> None:
    names, *targets = listed[name]
    assert any(contender.startswith("torch") for contender in names)
    assert any(contender.startswith("penstock") for contender in names)
    for contender, peer in targets:
        assert contender in names
        assert peer is None or peer in names


def test_a_table_shows_ratio_target_and_whether_it_is_met(toy: Path) -> None:
    done = python(toy, "--only", "slow", "fast")
    assert done.returncode == 0, done.stderr
    assert "fast / slow: 3.00 x (target >= 2.5: met)" in done.stdout
    assert "fast / slow: 3.00 x (target >= 3.5: MISSED)" in done.stdout


def test_smoke_shows_no_ratio_of_sizes_that_mean_nothing(toy: Path) -> None:
    done = python(toy, "--smoke", "--save", "--only", "slow", "fast")
    assert done.returncode == 0, done.stderr
    assert "target" not in done.stdout
    assert "not saved" in done.stderr


def test_wrong_data_fails_the_run(toy: Path) -> None:
    done = python(toy, "--smoke", "--only", "slow", "wrong")
    assert done.returncode == 1
    assert "seven is not eight" in done.stderr
    assert "contender 'wrong' ended with exit code 1" in done.stderr


def test_a_process_that_a_contender_left_behind_is_ended_before_the_next(toy: Path) -> None:
    import psutil

    done = python(toy, "--smoke", "--only", "leaves")
    assert done.returncode == 0, done.stderr
    with contextlib.suppress(psutil.NoSuchProcess):
        left = psutil.Process(int(toy.with_suffix(".pid").read_text(encoding="utf-8")))
        with contextlib.suppress(psutil.TimeoutExpired):
            left.wait(timeout=5)
        # Ended, and perhaps not yet collected by the system's first process.
        assert left.status() == psutil.STATUS_ZOMBIE
