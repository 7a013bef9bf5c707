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
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "bad boxes: 2 zero_area; 2 dropped (--bad-boxes)"
    first, second = samples_of("cells.lmdb")
    assert first["boxes"].tolist() == [[10, 5, 30, 25]]
    assert (first["image_id"], second["image_id"]) == ("a", "b")
    assert first["image"].shape == (40, 60, 3)
    assert main(["pack", "voc", "all.lmdb", "--objects", "--bad-boxes", "keep"]) == 0
    assert len(samples_of("all.lmdb")[0]["boxes"]) == 2
    assert main(["pack", "voc", "train.lmdb", "--objects", "--split", "train"]) == 0
    assert len(samples_of("train.lmdb")) == 1


def test_what_was_packed_as_objects_can_be_made_mosaics_of(here):
    from penstock.vision import Mosaic

    assert main(["pack", "voc", "cells.lmdb", "--objects"]) == 0
    dataset = StoreDataset("cells.lmdb")
    assert Mosaic(dataset, 64)[0]["boxes"].shape[1] == 4
    dataset.close()


@pytest.mark.parametrize("source", ["cells", "cells/data.yaml"])
def test_yolo_is_packed_by_its_folder_or_its_yaml(yolo, capsys, source):
    assert main(["pack", source, "cells.lmdb"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"YOLO {source}, split train: name another part of it with --split"
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


def test_a_yolo_folder_that_cannot_be_read_is_an_error_that_names_the_yaml(yolo, capsys):
    Path("cells/more.yaml").write_text("names: [cell]\ntrain: images/train\n")
    Path("cells/data.yaml").rename("cells/less.yaml")
    for command in (["stats", yolo], ["view", yolo, "-o", "a.png"], ["pack", yolo, "a.lmdb"]):
        assert main(command) == 1
        assert "several YAML files (less.yaml, more.yaml)" in capsys.readouterr().err


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


@pytest.mark.parametrize("command", [["stats"], ["view", "-o", "a.png"], ["pack", "a.lmdb"]])
@pytest.mark.parametrize(
    ("file", "text", "reader"),
    [
        ("all.xml", "<dataset><images/></dataset>", "ImglabDetection('voc/Annotations/all.xml')"),
        ("all.json", "{}", "No class of Penstock reads JSON"),
        ("all.txt", "a.png 1 2 3 4", "LandmarkList('voc/Annotations/all.txt', root='voc/photos')"),
    ],
)
def test_annotations_in_a_subfolder_are_no_class(here, capsys, command, file, text, reader):
    Path("voc/JPEGImages").rename("voc/photos")
    for name in ("a", "b"):
        Path(f"voc/Annotations/{name}.xml").unlink()
    Path("voc/Annotations", file).write_text(text)
    name, *options = command
    assert main([name, "voc", *options]) == 1
    said = capsys.readouterr().err
    assert "its subfolders are no classes" in said
    assert reader in said


def test_class_folders_stay_class_folders_whatever_settings_lie_beside_them(here, capsys):
    for name in ("images", "labels"):
        Path("masks", name).mkdir(parents=True)
        cv2.imwrite(f"masks/{name}/1.png", np.zeros((4, 4, 3), np.uint8))
    Path("masks/settings.yaml").write_text("size: 3\n")
    assert main(["stats", "masks", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["classes"]] == ["images", "labels"]


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
    assert "Say which columns there are: --box, --classes, --landmarks, --separator." in said
    assert main([name, source, *target, *options, "--box", "--classes", "sex"]) == 0


@pytest.mark.parametrize(
    "text",
    [
        "# photos of cats and dogs\nnice.png cat\n",
        "  # photos of cats and dogs\nnice.png cat\n",
        "my nice cat photo.png cat\nnice.png cat\n",
        "IMG 2020 01 02 10 30.png cat\nnice.png cat\n",
        "nice.png 3\n",
        "\n# 1 2 3 4 5\r\rnice.png cat\r",
    ],
    ids=["comment", "indented", "blanks", "numbers", "number", "mac"],
)
def test_a_list_of_images_with_a_class_is_one_whatever_their_names(here, capsys, text):
    for name in ("nice", "my nice cat photo", "IMG 2020 01 02 10 30"):
        cv2.imwrite(f"{name}.png", np.zeros((4, 4, 3), np.uint8))
    Path("list.txt").write_bytes(text.encode())
    assert main(["stats", "list.txt", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "objects" not in found or found["objects"] is None
    assert found["num_classes"] == 1


@pytest.mark.parametrize(
    ("line", "num_landmarks"),
    [("nice.png 1 2", 1), ("my 2 photos.png 1 nan 3 4", 2), ("nice.png 1 2 3 4 f", None),
     ("nice 1 2 3 4", 2), ("nice.png,1,2,3,4", None)],
    ids=["one", "blanks", "class", "no-suffix", "commas"],
)  # fmt: skip
def test_a_list_of_landmarks_is_one_by_the_numbers_after_its_paths(
    here, capsys, line, num_landmarks
):
    for name in ("nice.png", "my 2 photos.png"):
        cv2.imwrite(name, np.zeros((9, 9, 3), np.uint8))
    Path("nice").write_bytes(Path("nice.png").read_bytes())
    Path("list.txt").write_text(f"# a comment\n{line}\n")
    if num_landmarks is None:
        assert main(["pack", "list.txt", "x.lmdb"]) == 1
        assert "Say which columns there are" in capsys.readouterr().err
        return
    assert main(["pack", "list.txt", "x.lmdb"]) == 0
    assert samples_of("x.lmdb")[0]["landmarks"].shape == (1, num_landmarks, 2)


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
        (["voc/JPEGImages", "--objects"], "--objects is for objects marked in images; voc/JPEG"),
        (
            ["voc", "--objects", "--trust-pickle"],
            "--trust-pickle and names of fields are for stores",
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


def test_a_dataset_in_a_module_of_one_plain_word_is_drawn(mine, capsys):
    assert main(["view", "mine:cells", "-o", "sheet.png", "--tile", "64"]) == 0
    assert capsys.readouterr().out.startswith("sheet.png: 2 images, ")
