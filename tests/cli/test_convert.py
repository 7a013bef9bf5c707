# SPDX-License-Identifier: Apache-2.0
"""`penstock convert` says what it wrote and what was lost, and gives a line for what is wrong."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from penstock.cli import main

pytest.importorskip("rich")
pytest.importorskip("PIL.Image")

from tests.vision.annotation_files import voc_object, write_voc_image

EXTRA = "<difficult>1</difficult>"


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A VOC folder `voc` with one object, lists `points.txt` and `classes.txt` of its image."""
    monkeypatch.chdir(tmp_path)
    write_voc_image("voc", "1", voc_object(extra=EXTRA), size=None)
    Path("points.txt").write_text("voc/JPEGImages/1.jpg 1 2 3 4 0 0 40 30 f\n")
    Path("classes.txt").write_text("voc/JPEGImages/1.jpg cat\n")
    return tmp_path


def run(*arguments):
    return main(["convert", *arguments])


def test_what_was_lost_and_written_is_told(photos, capsys):
    assert run("voc", "yolo", "--to", "yolo") == 0
    assert capsys.readouterr().out.splitlines() == [
        "difficult: 1 lost; yolo has no place for it",
        "yolo: 1 image, 1 object",
    ]
    assert Path("yolo/labels/train/1.txt").read_text() == "0 0.5 0.5 1.0 1.0\n"


def test_bad_boxes_are_told_and_may_be_left_out(photos, capsys):
    flat = voc_object(box=(1, 1, 1, 30), extra=EXTRA)
    write_voc_image("voc", "1", voc_object(extra=EXTRA), flat, size=None)
    assert run("voc", "kept", "--to", "yolo") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "bad boxes: 1 zero_area; kept as they are (--bad-boxes)"
    assert len(Path("kept/labels/train/1.txt").read_text().splitlines()) == 2
    assert run("voc", "left", "--to", "yolo", "--bad-boxes", "drop") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "bad boxes: 1 zero_area; 1 dropped (--bad-boxes)"
    assert shown[-1] == "left: 1 image, 1 object"
    assert run("voc", "none", "--to", "yolo", "--bad-boxes", "raise") == 1
    assert "1 bad box(es)" in capsys.readouterr().err


def test_strict_writes_nothing_where_something_would_be_lost(photos, capsys):
    assert run("voc", "yolo", "--to", "yolo", "--strict") == 1
    shown = capsys.readouterr()
    assert shown.err == "penstock: yolo has no place for some of it: difficult (1).\n"
    assert shown.out == ""
    assert not Path("yolo").exists()


def test_options_of_lists_are_those_of_the_list_that_is_written(photos, capsys):
    assert run("landmarks:points.txt", "a", "--to", "voc", "--box", "--classes", "sex") == 0
    options = "--box --layout xyxy --box-format xywh --separator , --origin 1"
    assert run("a", "b.txt", "--to", "landmarks", *options.split()) == 0
    assert "columns: LandmarkColumns(num_landmarks=2, layout='xyxy', h" in capsys.readouterr().out
    assert Path("b.txt").read_text() == "a/JPEGImages/1.jpg,2,4,3,5,1,1,40,30\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["voc", "x", "--to", "voc", "--polygons", "box"], "--polygons is of no use to any"),
        (["voc", "x", "--to", "voc", "--landmarks", "5"], "--landmarks is of no use to any"),
        (["points.txt", "x", "--to", "voc"], "name the format, 'landmarks' or 'image-list'"),
        (["nothing", "x", "--to", "voc"], "nothing is not there"),
        (["voc", "points.txt", "--to", "imglab"], "is there already, and is not replaced"),
        (
            ["landmarks:points.txt", "x", "--to", "voc", "--box"],
            "points.txt, line 1: it has 0 numbers at its end, 'f', for landmarks",
        ),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(photos, capsys, arguments, message):
    before = sorted(os.listdir())
    assert run(*arguments) != 0
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.startswith("penstock: ")
    assert shown.err.count("\n") == 1
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_who_stops_it_finds_nothing_half_written(photos, monkeypatch, number, status):
    before = sorted(os.listdir())

    def stopped_while_copying(source, place):
        Path(place).write_bytes(b"half")
        signal.raise_signal(number)

    monkeypatch.setattr(shutil, "copyfile", stopped_while_copying)
    assert run("voc", "new", "--to", "voc") == status
    assert sorted(os.listdir()) == before


def test_the_forms_are_those_of_the_library():
    from penstock.cli.convert import Form
    from penstock.vision.convert.reading import FORMATS

    assert tuple(form.value for form in Form) == FORMATS
