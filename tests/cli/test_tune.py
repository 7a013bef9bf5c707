# SPDX-License-Identifier: Apache-2.0
"""`penstock tune` tries every setting in turn and names the one to use."""

from __future__ import annotations

import json
import re
import signal

import numpy as np
import pytest

from penstock.cli import main
from penstock.cli.tune import Setting, TrialWork, Turn, best_of

SHORT = ["--batch-size", "4", "--batches", "2", "--workers", "0,1"]

DATA = """
import numpy as np

class Numbers:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return np.full(8, index), index

class Broken(Numbers):
    def __getitem__(self, index):
        raise ValueError("no such number")

class Ragged(Numbers):
    def __getitem__(self, index):
        return np.zeros(index % 4)

def pad(samples):
    return np.stack([np.resize(sample, 4) for sample in samples])

def pairs(samples):
    return np.stack([array for array, _ in samples])
"""


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    (tmp_path / "numbers_to_tune.py").write_text(DATA)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tune(tmp_path, capsys):
    """Tune, and return what was printed and what was written."""

    def done(src, *options, status=0):
        written = tmp_path / "figures.json"
        assert main(["tune", src, *SHORT, *options, "--json", str(written)]) == status
        return capsys.readouterr().out, json.loads(written.read_text())

    return done


def test_every_setting_takes_its_turn_in_every_round(tune):
    out, figures = tune("numbers_to_tune:Numbers", "--workers", "0,2,1", "--trainer-ms", "2")
    assert [setting["num_workers"] for setting in figures["settings"]] == [0, 2, 1]
    for setting in figures["settings"]:
        assert [turn["samples"] for turn in setting["rounds"]] == [8, 8]
        assert all(turn["seconds"] > turn["wait_s"] for turn in setting["rounds"])
        assert setting["samples_per_s"] > 0
        assert 0 <= setting["wait_share"] <= 1
    assert figures["best"]["line"] in out
    assert "loader" not in out.splitlines()[2]


def test_torchs_loader_is_measured_beside_penstocks(tune):
    pytest.importorskip("torch")
    out, figures = tune("numbers_to_tune:Numbers", "--compare", "torch", "--workers", "0,1")
    tried = [(s["loader"], s["num_workers"]) for s in figures["settings"]]
    assert tried == [("penstock", 0), ("penstock", 1), ("torch", 0), ("torch", 1)]
    assert figures["best"]["loader"] == "penstock"
    assert re.search(r"gives \d+\.\d\d x the rate of torch's best", " ".join(out.split()))
    assert out.splitlines()[-2] == "from penstock.torch import DataLoader"


def test_a_collate_fn_may_be_named(capsys):
    options = [*SHORT, "--collate", "numbers_to_tune:pad"]
    assert main(["tune", "numbers_to_tune:Ragged", *options]) == 0
    assert "collate_fn=pad, " in capsys.readouterr().out
    assert main(["tune", "numbers_to_tune:Ragged", *SHORT]) == 1  # Penstock's own cannot do it


def test_the_lines_to_paste_make_the_loader_that_was_measured(capsys):
    options = [*SHORT, "--workers", "1", "--collate", "numbers_to_tune:pairs"]
    assert main(["tune", "numbers_to_tune:Numbers", *options]) == 0
    imported, made = capsys.readouterr().out.splitlines()[-2:]
    names = {"dataset": list(range(64)), "pairs": len}
    exec(imported, names)
    loader = eval(made, names)
    assert type(loader).__name__ in ("Loader", "DataLoader")
    ahead = loader.prefetch_factor or 2  # where there is no torch, it is as given
    assert (loader.num_workers, ahead, loader.persistent_workers) == (1, 2, True)
    assert (loader.batch_size, loader.drop_last, loader.collate_fn) == (4, False, len)


def test_the_best_has_the_fewest_workers_within_3_percent():
    def results(*rates):
        return {Setting(*pair): [Turn(rate, 1.0, 0.5, 0.1, None)] for rate, *pair in rates}

    assert best_of(results((100, 1), (195, 2), (200, 4))) == Setting(2)
    assert best_of(results((190, 2), (200, 4))) == Setting(4)


def test_ctrl_c_shows_what_is_known(monkeypatch, capsys):
    pytest.importorskip("torch")
    taken = []
    take_turn = TrialWork.take_turn

    def interrupted(work, setting):
        if taken:
            signal.raise_signal(signal.SIGINT)
        taken.append(setting)
        return take_turn(work, setting)

    monkeypatch.setattr(TrialWork, "take_turn", interrupted)
    assert main(["tune", "numbers_to_tune:Numbers", *SHORT, "--compare", "torch"]) == 130
    said = capsys.readouterr()
    assert "torch's best" not in said.out  # of which nothing is known
    assert "num_workers=0)" in said.out
    assert said.err == "penstock: stopped; this is what was measured by then.\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "65"], "the dataset gives no full batch; lower --batch-size"),
        (["--workers", "1,x"], "--workers must be numbers from 0 on"),
        (["--collate", "numbers_to_tune:nothing"], "numbers_to_tune has no nothing"),
        (["--json", "nowhere/a.json"], "cannot write --json nowhere/a.json"),
    ],
)
def test_what_is_wrong_is_said(options, message, capsys):
    assert main(["tune", "numbers_to_tune:Numbers", *SHORT, *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("workers", ["0", "1"])
def test_an_error_of_the_dataset_is_told_in_a_line(workers, capsys):
    options = [*SHORT, "--workers", workers]
    assert main(["tune", "numbers_to_tune:Broken", *options]) == 1
    said = capsys.readouterr().err
    assert re.search(r"ValueError: no such number \(while reading sample \d+", said)
    # What a worker raised comes without its frames.
    assert workers == "1" or re.search(r"numbers_to_tune\.py, line \d+: ValueError", said)


def write_photos(folder, number, num_cut):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("cv2")
    folder.mkdir(parents=True)
    paths = [folder / f"{position}.jpg" for position in range(number)]
    for path in paths:
        pixels = np.random.default_rng(1).integers(0, 256, (40, 50, 3), np.uint8)
        image.fromarray(pixels).save(path)
    for path in paths[:num_cut]:
        path.write_bytes(path.read_bytes()[:800])
    return paths


@pytest.mark.filterwarnings("ignore:epoch 0. 12 bad samples left out")
def test_broken_photos_are_counted_and_others_take_their_place(tmp_path, tune, capsys):
    paths = write_photos(tmp_path / "photos" / "cat", 12, num_cut=2)
    options = ["--batches", "3", "--size", "16"]
    out, figures = tune("photos", *options)
    assert "2 samples cannot be read; others took" in out
    assert 'on_error="replace")' in out.splitlines()[-1]
    assert figures["num_bad_samples"] == 2
    for path in paths:
        path.write_bytes(b"")
    assert main(["tune", "photos", *SHORT, *options]) == 1
    assert "no sample can be read. One of them: sample 0 (cat/0.jpg): " in capsys.readouterr().err
