# SPDX-License-Identifier: Apache-2.0
"""`penstock report a.json b.json` puts runs that `penstock run --save` wrote side by side."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.insight.recordings import Run, recording_of
from tests.support.saved_runs import STOCK as RUN
from tests.support.saved_runs import TRAIN

from penstock.cli import main
from penstock.insight.stats import Span
from penstock.insight.trace import write_trace
from penstock.program.saved import write_run

pytest.importorskip("typer")

CHECK = replace(TRAIN, made_at="train.py:40", first_batch_s=0.25)
STOCK = replace(RUN, loaders=[TRAIN, CHECK])
OURS = replace(
    STOCK, engine="penstock", wall_s=10.0, cpu_s=33.0, peak_memory_bytes=10**9,
    loaders=[replace(TRAIN, run=replace(TRAIN.run, seconds=6.0, wait_s=3.0), first_batch_s=1.0)],
)  # fmt: skip


@pytest.fixture
def report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def said(*runs, options=(), status=0):
        names = [f"{letter}.json" for letter in "abc"[: len(runs)]]
        for name, run in zip(names, runs, strict=True):
            write_run(run, name)
        assert main(["report", *names, *options]) == status
        out, err = capsys.readouterr()
        return err if status else out

    return said


def test_two_runs_stand_side_by_side_with_their_ratio(report):
    assert report(RUN, OURS) == "".join(
        f"{line}\n"
        for line in (
            "                               a.json           b.json",
            "------------------------------------------------------",
            "program                      train.py         train.py",
            "engine                          torch         penstock",
            "wall time                        20 s    10 s (0.50 x)",
            "waiting for data                9.0 s   3.0 s (0.33 x)",
            "waiting, share                   75 %             50 %",
            "CPU of all processes             30 s    33 s (1.10 x)",
            "peak memory                    2.0 GB  1.0 GB (0.50 x)",
            "1. train.py:31: workers             2                2",
            "1. train.py:31: samples        10,320           10,320",
            "1. train.py:31: waiting         9.0 s   3.0 s (0.33 x)",
            "1. train.py:31: first batch    500 ms   1.0 s (2.00 x)",
            "(x: the ratio to a.json)",
        )
    )


def test_one_run_alone_has_no_ratio_and_each_of_three_one_to_the_first(report):
    lines = report(OURS).splitlines()
    assert lines[4].split() == ["wall", "time", "10", "s"]
    assert not any(" x" in line for line in lines)
    (wall,) = [line for line in report(STOCK, OURS, STOCK).splitlines() if "wall" in line]
    assert wall.split()[2:] == ["20", "s", "10", "s", "(0.50", "x)", "20", "s", "(1.00", "x)"]


def test_what_is_not_known_or_nothing_has_no_ratio(report):
    still = replace(TRAIN, run=Span())
    unknown = replace(STOCK, cpu_s=None, peak_memory_bytes=None, loaders=[still])
    lines = report(unknown, replace(OURS, loaders=[])).splitlines()
    rows = {line[:27].strip(): line[27:].split() for line in lines}
    assert rows["CPU of all processes"] == ["-", "33", "s"]
    assert rows["waiting, share"] == ["-", "-"]
    assert rows["1. train.py:31: first batch"] == ["500", "ms", "-"]
    assert rows["waiting for data"] == ["0.00", "ms", "0.00", "ms"]


def test_a_saved_run_has_no_page(report, tmp_path):
    assert "--output: a.json is a saved run" in report(OURS, options=["-o", "page.html"], status=1)
    assert not (tmp_path / "page.html").exists()


def test_a_trace_and_a_saved_run_are_not_put_side_by_side(report, capsys):
    write_trace(recording_of(Run(batches=20)), "trace.json")
    said = report(STOCK, options=["trace.json"], status=1)
    assert "trace.json is no file that `penstock run --save` wrote" in said
    assert main(["report", "trace.json", "trace.json"]) == 1
    assert "trace.json is no file that `penstock run --save` wrote" in capsys.readouterr().err


@pytest.mark.parametrize("other", ["gone.json", "photos", "mongodb://me:secret@host/db"])
def test_several_are_files_that_exist(report, other):
    said = report(STOCK, options=[other], status=1)
    assert f"cannot read {other.replace('secret', '***').replace('//', '/')}: " in said


def test_a_damaged_one_of_several_is_named(report, tmp_path):
    write_run(replace(STOCK, wall_s=None), "bad.json")
    said = report(STOCK, options=["bad.json"], status=1)
    assert "The saved run bad.json is damaged: None stands where" in said
    (tmp_path / "bad.json").write_text('{"format": "penstock run",')
    assert "bad.json is not JSON (Expecting" in report(STOCK, options=["bad.json"], status=1)


def test_loaders_of_one_line_are_compared_in_their_order(report):
    other = replace(TRAIN, run=replace(TRAIN.run, samples=10))
    said = report(replace(STOCK, loaders=[TRAIN, other]), replace(OURS, loaders=[TRAIN, other]))
    assert re.findall(r"samples +(\S+) +(\S+)$", said, re.MULTILINE) == [
        ("10,320", "10,320"),
        ("10", "10"),
    ]
