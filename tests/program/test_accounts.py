# SPDX-License-Identifier: Apache-2.0
"""The summary of `penstock run`: a paragraph for each loader, and the use of each setting."""

from __future__ import annotations

import itertools
import json
import os
import re

import pytest
import torch  # noqa: F401 - what the programs here import
from tests.program.running import RUN, environment, ran, split, with_first, written

LOADERS = """
import gc, importlib.util, weakref
assert importlib.util.find_spec("torch") is not None
import framework
from torch.utils.data import DataLoader

assert len(list(framework.make_loader())) == 3
alive = weakref.WeakSet()
counts = []
for number in range(300):
    loader = DataLoader(range(2))
    alive.add(loader)
    next(iter(loader))  # broken off
    if number % 100 == 99:
        del loader
        gc.collect()
        assert not alive
        counts.append(len(gc.get_objects()))
assert counts[2] - counts[1] < 100, counts
several = DataLoader(range(6), batch_size=2)
for one, other in zip(several, several):
    assert one.tolist() == other.tolist()
DataLoader(range(8))  # never read
for shuffle in (True, False, True):
    assert len(list(DataLoader(range(9), batch_size=3, shuffle=shuffle))) == 3
"""


@pytest.fixture(scope="module")
def loaders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loaders")
    (folder / "site-packages").mkdir()
    written(
        folder / "site-packages" / "framework.py",
        """
        def make_loader():
            import torch
            return torch.utils.data.DataLoader(range(3))
        """,
    )
    written(folder / "train.py", LOADERS)
    paths = with_first(folder / "site-packages")
    done = ran([*RUN, "--seed", "3", "train.py"], folder, env=environment(PYTHONPATH=paths))
    program, said = split(done.stderr)
    assert (done.returncode, done.stdout, program) == (0, "", "")
    return said


def test_each_line_that_made_loaders_has_one_account(loaders):
    shown = [line for line in loaders if line.startswith("penstock run: train.py")]
    assert [line.split(" Waited ")[0] for line in shown] == [
        "penstock run: train.py:7: a loader of range, 0 workers, 3 batches.",  # the framework's
        "penstock run: train.py:11: 300 loaders of range, 0 workers, 300 batches.",
        "penstock run: train.py:20: a loader of range, 0 workers, 6 batches.",  # two iterators
        "penstock run: train.py:25: 2 loaders of range, 0 workers, 6 batches.",  # of one kind
        "penstock run: train.py:25: a loader of range, 0 workers, 3 batches.",
    ]
    for line in shown:
        assert re.search(r"Waited [\d.]+ \S?s of [\d.]+ \S?s \(\d+ %\) for data\.$", line)


def test_too_little_to_tell_is_said_of_the_loader_that_it_is_about(loaders):
    short = [n for n, line in enumerate(loaders) if "300 loaders" in line]
    assert loaders[short[0] + 1].startswith("  The one that ran longest: Too few batches to tell")


def test_where_a_setting_went_is_said_last(loaders):
    assert loaders[-1] == (
        "penstock run: seed=3 applied in train.py:7, train.py:11, train.py:20, train.py:25\n"
    )


DATASETS = """
import gc, weakref
from torch.utils.data import DataLoader

class Photos:
    def __init__(self):
        self.loader = DataLoader(self)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index

photos = Photos()
assert len(list(photos.loader)) == 3
known = weakref.ref(photos)
del photos
gc.collect()
print(known())
"""


@pytest.mark.parametrize("options", [[], ["--engine", "torch"], ["--trace", "trace.json"]])
def test_a_dataset_that_knows_its_loader_is_let_go_with_it(options, tmp_path):
    written(tmp_path / "train.py", DATASETS)
    done = ran([*RUN, *options, "train.py"], tmp_path)
    assert (done.returncode, done.stdout) == (0, "None\n")
    assert "train.py:7: a loader of Photos, 0 workers, 3 batches." in done.stderr


OPTIONS = """
import threading
from torch.utils.data import DataLoader

class Photos:
    def __len__(self):
        return 12

    def __getitem__(self, index):
        assert threading.current_thread() is not threading.main_thread() or self.is_own
        if index == 5 and not self.is_own:
            raise OSError("broken")
        return index

    is_own = False

class Own(Photos):
    is_own = True

for _ in range(2):
    taken = DataLoader(Photos(), batch_size=3, shuffle=True)
    print([batch.tolist() for batch in taken])
own = DataLoader(Own(), num_workers=0, seed=None, on_error="raise", backend="process")
print(len(list(own)))
"""
GIVEN = ["--workers", "2", "--backend", "thread", "--seed", "7", "--on-error", "skip"]


@pytest.fixture(scope="module")
def with_options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("options")
    written(folder / "train.py", OPTIONS)
    (folder / "run-1.html").write_text("of another day")
    os.utime(folder / "run-1.html", (0, 0))
    files = ["--report", "run-1.html", "--trace", "trace.json"]
    return folder, ran([*RUN, *GIVEN, *files, "train.py"], folder)


def test_settings_are_of_loaders_that_say_nothing_else(with_options):
    _, done = with_options
    first, second, own = done.stdout.splitlines()
    assert first == second
    assert sorted(itertools.chain(*json.loads(first))) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert own == "12"
    lines = [line.rstrip() for line in split(done.stderr)[1]]
    bad = "  2 bad samples, left out or replaced. The first: sample 5: OSError: broken"
    assert bad in lines
    for setting in ("num_workers=2", "backend=thread", "seed=7", "on_error=skip"):
        shown = (
            f"penstock run: {setting} applied in train.py:21; "
            "the program's own value kept in train.py:23"
        )
        assert shown in lines


def test_each_loader_has_a_page_and_a_trace(with_options):
    folder, done = with_options
    made = sorted(path.name for path in folder.iterdir())
    assert made == ["run-1-2.html", "run-1.html", "trace-2.json", "trace.json", "train.py"]
    for name in ("run-1.html", "run-1-2.html"):
        assert "<html" in (folder / name).read_text()
    for name in ("trace.json", "trace-2.json"):
        assert json.loads((folder / name).read_text())["traceEvents"]
    said = done.stderr.splitlines()
    for name, line in {"run-1": 21, "run-1-2": 23}.items():
        assert f"penstock run: report of train.py:{line}: {folder}/{name}.html" in said
    for name, line in {"trace": 21, "trace-2": 23}.items():
        assert f"penstock run: trace of train.py:{line}: {folder}/{name}.json" in said


def test_quiet_says_nothing_and_writes_what_was_asked_for(tmp_path):
    written(tmp_path / "train.py", "from torch.utils.data import *\nlist(DataLoader(range(3)))")
    done = ran(
        [*RUN, "--quiet", "--trace", "trace.json", "--workers", "auto", "train.py"], tmp_path
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_file_that_is_not_written_is_named(tmp_path):
    written(tmp_path / "train.py", "import torch")
    done = ran([*RUN, "--report", "r.html", "--save", "s.json", "train.py"], tmp_path)
    files = f"{tmp_path / 'r.html'}, {tmp_path / 's.json'}"
    said = f"penstock run: no DataLoader gave a batch, so not written: {files}\n"
    assert (done.returncode, done.stderr) == (0, said)


def test_a_file_that_cannot_be_written_keeps_no_other_from_it(tmp_path):
    (tmp_path / "gone").mkdir()
    program = "import os; os.rmdir('gone')\nfrom torch.utils.data import *\nlist(DataLoader([1]))"
    written(tmp_path / "train.py", program)
    done = ran([*RUN, "--save", "gone/s.json", "--report", "r.html", "train.py"], tmp_path)
    assert "penstock run: [Errno 2] No such file or directory: " in done.stderr
    assert (tmp_path / "r.html").exists()
