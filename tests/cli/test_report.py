# SPDX-License-Identifier: Apache-2.0
"""`penstock report` writes the page of a trace, or of a dataset that it loads for it."""

from __future__ import annotations

import json
import sys

import pytest
from tests.insight.recordings import Run, recording_of

from penstock.cli import main
from penstock.insight.report import write_report
from penstock.insight.trace import read_trace, write_trace

pytest.importorskip("typer")

DATASET = """
import numpy as np

class Squares:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 13:
            raise ValueError("thirteen")
        return np.full(8, index, np.float32)

squares = Squares()
none = []

def as_they_are(samples):
    return samples
"""
QUICK = ["--workers", "0", "--batch-size", "4", "--batches", "12"]


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    (tmp_path / "squares_data.py").write_text(DATASET)
    monkeypatch.chdir(tmp_path)
    yield "squares_data:squares"
    sys.modules.pop("squares_data", None)


@pytest.fixture
def trace(tmp_path):
    return write_trace(recording_of(Run(batches=20)), tmp_path / "epoch.json")


def test_the_page_of_a_trace_lies_beside_it_and_is_the_one_of_its_loader(trace, tmp_path, capsys):
    assert main(["report", str(trace)]) == 0
    page = trace.with_suffix(".html")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [str(read_trace(trace).stats.verdict), f"{page}: 20 batches, bad samples: 1"]
    own = write_report(recording_of(Run(batches=20)), tmp_path / "own.html")
    assert page.read_bytes() == own.read_bytes()


def test_the_page_of_a_trace_goes_where_it_is_told(trace, tmp_path):
    page = tmp_path / "elsewhere.html"
    assert main(["report", str(trace), "-o", str(page)]) == 0
    assert page.stat().st_size > 1e4
    assert not trace.with_suffix(".html").exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_is_loaded_for_the_page(workers, dataset, tmp_path, capsys):
    trace = tmp_path / "run.json"
    (tmp_path / "run.html").write_text("of its loader")
    options = [*QUICK, "--workers", str(workers), "--trace", str(trace)]
    assert main(["report", dataset, *options]) == 0
    assert (tmp_path / "run.html").read_text() == "of its loader"
    recording = read_trace(trace)
    assert (recording.stats.num_workers, recording.stats.run.batches) == (workers, 12)
    assert len(recording.epochs) == 2
    assert [failed.index for failed in recording.failures][:1] == [13]
    assert (tmp_path / "penstock-report.html").stat().st_size > 1e4
    failed = recording.stats.run.failed
    assert failed >= 1
    assert f"penstock-report.html: 12 batches, bad samples: {failed}" in capsys.readouterr().out


def test_batches_may_be_made_by_a_function_of_ones_own(dataset, tmp_path):
    collate = ["--collate", "squares_data:as_they_are"]
    assert main(["report", dataset, *QUICK, *collate]) == 0
    assert main(["report", dataset, *QUICK, "--collate", "squares_data:none"]) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["squares_data:squares", "-o", "no/run.html"], "cannot write --output no/run.html"),
        (["squares_data:squares", "--trace", "no/run.json"], "cannot write --trace no/run.json"),
        (["squares_data:squares", "--workers", "some"], "--workers must be a number"),
        (["squares_data:none"], "squares_data:none has no samples"),
        (["squares_data:gone"], "squares_data has no gone"),
        (["nothing/here"], "nothing/here does not exist"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(dataset, capsys, arguments, said):
    assert main(["report", *arguments]) == 1
    assert said in capsys.readouterr().err


def test_a_dataset_that_gives_nothing_has_a_page(dataset, tmp_path, capsys):
    (tmp_path / "squares_data.py").write_text(DATASET.replace("index == 13", "True"))
    assert main(["report", dataset, *QUICK]) == 0
    assert "penstock-report.html: 0 batches" in capsys.readouterr().out


def test_an_iterable_is_loaded_as_well(dataset, tmp_path):
    (tmp_path / "squares_data.py").write_text(
        "from penstock.data import IterableDataset\n"
        "class Stream(IterableDataset):\n    def __iter__(self):\n        return iter(range(100))"
    )
    stream = "squares_data:Stream"
    assert main(["report", stream, "--batch-size", "4", "--batches", "5"]) == 0
    assert main(["report", stream, "--workers", "00", "--batches", "5"]) == 0


def drop_a_step(content):
    content["otherData"]["recording"]["batches"]["step"].pop()


@pytest.mark.parametrize(
    ("options", "spoil", "said"),
    [
        (["--workers", "3", "--batch-size", "9"], None, "--workers, --batch-size: "),
        ([], dict.clear, "no trace of a loader"),
        ([], drop_a_step, "is damaged"),
    ],
)
def test_what_is_wrong_with_a_trace_is_told(options, spoil, said, trace, capsys):
    if spoil is not None:
        content = json.loads(trace.read_text())
        spoil(content)
        trace.write_text(json.dumps(content))
    assert main(["report", str(trace), *options]) == 1
    assert said in capsys.readouterr().err
    assert not trace.with_suffix(".html").exists()


def test_samples_may_be_tensors(dataset, tmp_path, capsys):
    pytest.importorskip("torch")
    tensors = DATASET.replace("np.full(8, index, np.float32)", "torch.full((3,), float(index))")
    (tmp_path / "squares_data.py").write_text(f"import torch\n{tensors}")
    assert main(["report", dataset, *QUICK]) == 0
    assert "penstock-report.html" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("folder", "command", "options"),
    [("clothing/train", "report", ()), ("bccd", "tune", ("--size", "64", "--rounds", "1"))],
)
def test_images_of_a_folder_are_brought_to_one_size(
    folder, command, options, data_dir, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    options = ["--workers", "0", "--batch-size", "4", "--batches", "2", *options]
    assert main([command, str(data_dir / folder), *options]) == 0
    expected = "penstock-report.html" if command == "report" else "num_workers=0"
    assert expected in capsys.readouterr().out
