# SPDX-License-Identifier: Apache-2.0
"""Annotated images are one kind of source for `pack`, `stats`, `view` and `convert` alike."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.cli import main

cv2 = pytest.importorskip("cv2")
pytest.importorskip("lmdb")
pytest.importorskip("msgspec")
pytest.importorskip("rich")

from tests.vision.annotation_files import (  # noqa: E402 - it needs the above
    voc_object,
    write_split,
    write_voc_image,
)

from penstock.cli.sources import described_form  # noqa: E402
from penstock.stores import StoreDataset  # noqa: E402

# The second box begins and ends at one number, as BCCD's two bad ones.
BOXES = [(11, 6, 30, 25), (5, 5, 5, 5)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """`voc` with two images; `train` is one of them."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_voc_image("voc", name, *(voc_object("cell", box) for box in BOXES), size=(40, 60))
        Path(f"voc/JPEGImages/{name}.jpg").unlink()
        cv2.imwrite(f"voc/JPEGImages/{name}.png", np.full((40, 60, 3), 99, np.uint8))
    write_split("voc", "train", "a")
    return tmp_path


@pytest.fixture
def yolo(here, capsys):
    """The same as YOLO has it: splits "train" and "rest"."""
    assert main(["convert", "voc", "cells", "--to", "yolo"]) == 0
    capsys.readouterr()
    return "cells"


def samples_of(path):
    dataset = StoreDataset(path)
    samples = [dataset[position] for position in range(len(dataset))]
    dataset.close()
    return samples


def test_a_voc_folder_is_packed_as_objects_if_that_is_said(here, capsys):
    assert main(["pack", "voc", "files.lmdb"]) == 0
    assert isinstance(samples_of("files.lmdb")[0], tuple)
    assert capsys.readouterr().out.startswith("lmdb:files.lmdb: 2 records")
    assert main(["pack", "voc", "cells.lmdb", "--objects"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "bad boxes: 2 zero_area; 2 dropped (--bad-boxes)"
    first, second = samples_of("cells.lmdb")
    assert first["boxes"].tolist() == [[10, 5, 30, 25]]
    assert (first["image_id"], second["image_id"]) == ("a", "b")
    assert first["image"].shape == (40, 60, 3)
    assert main(["pack", "voc", "all.lmdb", "--objects", "--bad-boxes", "keep"]) == 0
    assert len(samples_of("all.lmdb")[0]["boxes"]) == 2
    assert main(["pack", "voc", "train.lmdb", "--objects", "--split", "train"]) == 0
    assert len(samples_of("train.lmdb")) == 1


@pytest.mark.parametrize("source", ["cells", "cells/data.yaml"])
def test_yolo_is_packed_by_its_folder_or_its_yaml(yolo, capsys, source):
    assert main(["pack", source, "cells.lmdb"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"YOLO {source}, split train: name another part of it with --split"
    (sample,) = samples_of("cells.lmdb")
    assert sample["boxes"][0].tolist() == [10, 5, 30, 25]
    assert main(["pack", source, "rest.lmdb", "--split", "rest"]) == 0
    assert samples_of("rest.lmdb")[0]["image_id"] == "b"


def test_imglab_and_lists_are_packed(here, data_dir):
    faces = data_dir / "faces" / "training_with_face_landmarks.xml"
    assert main(["pack", str(faces), "faces.lmdb"]) == 0
    assert samples_of("faces.lmdb")[0]["landmarks"].shape[1:] == (68, 2)
    Path("points.txt").write_text("voc/JPEGImages/a.png 1 2 3 4 10 10 20 20 f\n")
    columns = ["--layout", "xyxy", "--box", "--classes", "sex"]
    assert main(["pack", "points.txt", "points.lmdb", *columns]) == 0
    (sample,) = samples_of("points.lmdb")
    assert sample["landmarks"].tolist() == [[[1, 2], [3, 4]]]
    assert sample["boxes"].tolist() == [[10, 10, 20, 20]]
    Path("classes.txt").write_text("voc/JPEGImages/a.png cat\nvoc/JPEGImages/b.png dog\n")
    assert main(["pack", "classes.txt", "classes.lmdb"]) == 0
    assert [label for _, label in samples_of("classes.lmdb")] == [0, 1]


def test_a_yolo_folder_is_counted_and_drawn_as_one(yolo, capsys):
    assert main(["stats", yolo, "--split", "rest", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["classes"]] == ["cell"]
    assert found["objects"]["num_boxes"] == 2
    assert main(["view", yolo, "-o", "sheet.png", "--split", "rest", "--tile", "64"]) == 0
    assert capsys.readouterr().out.startswith("sheet.png: 1 image,")


def test_a_voc_folder_of_any_names_is_taken_for_one(here, capsys):
    Path("voc/Annotations").rename("voc/annots")
    Path("voc/JPEGImages").rename("voc/photos")
    assert main(["stats", "voc", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["classes"]] == ["cell"]
    assert main(["view", "voc", "-o", "sheet.png", "--tile", "64"]) == 0
    assert main(["pack", "voc", "cells.lmdb"]) == 1
    assert "is a VOC folder: its objects are packed with --objects" in capsys.readouterr().err
    assert main(["pack", "voc", "cells.lmdb", "--objects"]) == 0
    assert samples_of("cells.lmdb")[0]["image_id"] == "a"
    assert main(["convert", "voc", "again", "--to", "yolo"]) == 0


@pytest.mark.parametrize(
    "command", [["view", "-o", "a.png"], ["stats"], ["pack"], ["convert", "--to", "voc"]]
)
def test_a_list_that_needs_its_columns_named_asks_for_options(here, capsys, command):
    Path("points.txt").write_text("voc/JPEGImages/a.png 1 2 3 4 10 10 20 20 1\n")
    name, *options = command
    source = "landmarks:points.txt" if name == "convert" else "points.txt"
    target = {"pack": ["x.lmdb"], "convert": ["x"]}.get(name, [])
    assert main([name, source, *target, *options]) == 1
    said = capsys.readouterr().err
    assert "Say which columns there are: has_box, classes, num_landmarks, separator" in said
    assert main([name, source, *target, *options, "--box", "--classes", "sex"]) == 0


@pytest.mark.parametrize(
    ("line", "form"),
    [("nice.png 1 2", "landmarks"), ("my 2 photos.png 1 nan 3 4", "landmarks"),
     ("nice.png 1 2 3 4 f", "landmarks"), ("nice 1 2 3 4", "landmarks"),
     ("nice.png,1,2,3,4", "landmarks"), ("n.png cat", "image-list"), ("n.png 3", "image-list"),
     ("my nice cat photo.png cat", "image-list"), ("IMG 2020 01 02 10 30.png cat", "image-list")],
)  # fmt: skip
@pytest.mark.parametrize("before", ["", "# 1 2 3 4 5\n", "  # photos of cats and dogs\n", "\r\r"])
def test_a_list_is_one_of_landmarks_by_the_numbers_after_its_path(here, before, line, form):
    Path("list.txt").write_bytes(f"{before}{line}\n".encode())
    assert described_form("list.txt") == form


def test_suffixes_may_be_in_capitals(yolo, capsys):
    Path("cells/data.yaml").rename("cells/data.YAML")
    Path("points.TXT").write_text("voc/JPEGImages/a.png 1 2 3 4\n")
    Path("faces.XML").write_text(
        "<dataset><images><image file='voc/JPEGImages/a.png'/></images></dataset>"
    )
    for source in ("cells", "cells/data.YAML", "points.TXT", "faces.XML"):
        assert main(["view", source, "-o", "sheet.png", "--tile", "64"]) == 0
        assert main(["stats", source, "--json"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["voc", "--box"], "--box is for text lists, and voc is none"),
        (["nothing.lmdb", "--classes", "a"], "--classes is for text lists, and nothing.lmdb"),
    ],
    ids=["folder", "store"],
)
def test_columns_of_what_is_no_list_are_refused(here, capsys, arguments, message):
    assert main(["stats", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["voc", "--bad-boxes", "keep"], "its objects are packed with --objects"),
        (["voc", "--origin", "0"], "its objects are packed with --objects"),
        (["voc/JPEGImages", "--objects"], "--objects is for objects; voc/JPEG"),
        (
            ["voc", "--objects", "--trust-pickle"],
            "--trust-pickle is for stores, and voc is none",
        ),
    ],
    ids=["policy", "origin", "images", "pickle"],
)
def test_options_that_do_not_fit_the_source_are_refused(here, capsys, arguments, message):
    assert main(["pack", arguments[0], "a.lmdb", *arguments[1:]]) == 1
    assert message in capsys.readouterr().err
    assert not Path("a.lmdb").exists()


DATASETS = """
from penstock.stores import StoreDataset
from penstock.vision import RandomPerspective, VOCDetection

def cells():
    return VOCDetection("voc", transform=RandomPerspective(32))

def photos():
    return StoreDataset("voc/JPEGImages", transform=lambda image: 1 / 0)
"""


@pytest.fixture
def mine(here, write_module):
    return write_module("mine", DATASETS)


def test_a_dataset_with_transforms_is_counted_without_them(mine, capsys):
    assert main(["stats", "mine:cells", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["address"] == "mine:cells"
    assert found["objects"]["num_boxes"] == 2
    assert found["objects"]["bad_boxes"] == {"zero_area": 2, "inverted": 0, "outside": 0}
    assert main(["stats", "mine:photos", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sizes"]["num_images"] == 2
