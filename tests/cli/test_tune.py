# SPDX-License-Identifier: Apache-2.0
"""`penstock tune` tries every setting in turn and names the one to use."""

from __future__ import annotations

import json
import signal

import pytest

from penstock.cli import main
from penstock.cli.tuning_grid import Setting, Standing, Turn, Work, best_of

SHORT = ["--batch-size", "4", "--batches", "2", "--workers", "0,1", "--prefetch", "2"]

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

def pairs(samples):
    return np.stack([array for array, _ in samples])
"""


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    (tmp_path / "numbers_to_tune.py").write_text(DATA)
    monkeypatch.chdir(tmp_path)


def standing(rate, workers, factor=2, backend="process"):
    return Standing(Setting(workers, factor, backend), [Turn(rate, 1.0, 0.5, 0.1, None)])


def test_every_setting_takes_its_turn_in_every_round(tmp_path, capsys):
    written = tmp_path / "figures.json"
    options = [*SHORT, "--prefetch", "1,2", "--json", str(written)]
    assert main(["tune", "numbers_to_tune:Numbers", *options]) == 0
    figures = json.loads(written.read_text())
    tried = [(s["num_workers"], s["prefetch_factor"]) for s in figures["settings"]]
    assert tried == [(0, None), (1, 1), (1, 2)]
    for setting in figures["settings"]:
        assert [turn["samples"] for turn in setting["rounds"]] == [8, 8]
        assert setting["samples_per_s"] > 0
        assert 0 <= setting["wait_share"] <= 1
    assert figures["best"]["line"] in capsys.readouterr().out


def test_threads_are_tried_if_they_are_asked_for(tmp_path, capsys):
    written = tmp_path / "figures.json"
    options = [*SHORT, "--workers", "1", "--backend", "thread", "--json", str(written)]
    assert main(["tune", "numbers_to_tune:Numbers", *options]) == 0
    assert json.loads(written.read_text())["settings"][0]["backend"] == "thread"
    assert 'prefetch_factor=2, backend="thread")' in capsys.readouterr().out


def test_a_trainer_of_some_length_takes_the_batches(tmp_path):
    written = tmp_path / "figures.json"
    options = [*SHORT, "--trainer-ms", "2", "--trainer-cpu", "--json", str(written)]
    assert main(["tune", "numbers_to_tune:Numbers", *options]) == 0
    figures = json.loads(written.read_text())
    assert figures["trainer_takes_cpu"] is True
    for setting in figures["settings"]:  # two steps of 2 ms
        assert all(turn["seconds"] - turn["wait_s"] >= 0.004 for turn in setting["rounds"])


def test_seconds_are_an_end_as_well(tmp_path):
    written = tmp_path / "figures.json"
    options = ["--batch-size", "4", "--workers", "0", "--seconds", "0.01", "--rounds", "1"]
    assert main(["tune", "numbers_to_tune:Numbers", *options, "--json", str(written)]) == 0
    (turn,) = json.loads(written.read_text())["settings"][0]["rounds"]
    assert turn["seconds"] >= 0.01


def test_a_collate_fn_may_be_named(capsys):
    options = [*SHORT, "--collate", "numbers_to_tune:pairs"]
    assert main(["tune", "numbers_to_tune:Numbers", *options]) == 0
    assert "best" in capsys.readouterr().out


def test_the_best_has_the_fewest_workers_within_3_percent():
    standings = [standing(100, 1), standing(195, 2, 4), standing(196, 2), standing(200, 4)]
    assert best_of(standings).setting == Setting(2, 2, "process")
    assert best_of([standing(190, 2), standing(200, 4)]).setting.num_workers == 4


def test_ctrl_c_shows_what_is_known(monkeypatch, capsys):
    taken = []
    take_turn = Work.take_turn

    def interrupted(work, setting):
        if taken:
            signal.raise_signal(signal.SIGINT)
        taken.append(setting)
        return take_turn(work, setting)

    monkeypatch.setattr(Work, "take_turn", interrupted)
    assert main(["tune", "numbers_to_tune:Numbers", *SHORT]) == 130
    said = capsys.readouterr()
    assert "batch_size=4, num_workers=0)" in said.out
    assert said.err == "penstock: stopped; this is what was measured by then.\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "65"], "the dataset has 64 samples, fewer than --batch-size 65"),
        (["--workers", "1,x"], "--workers must be whole numbers of at least 0"),
        (["--prefetch", "0"], "--prefetch must be whole numbers of at least 1"),
        (["--backend", "ray"], "--backend must name process or thread, or both, got 'ray'"),
        (["--seconds", "1"], "--batches and --seconds: give one of them."),
        (["--trainer-cpu"], "--trainer-cpu needs --trainer-ms"),
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
    assert "no such number" in capsys.readouterr().err
