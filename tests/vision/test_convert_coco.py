# SPDX-License-Identifier: Apache-2.0
"""COCO's JSON from other forms and to them: what both can say comes back."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("pycocotools")

from pycocotools.coco import COCO
from tests.vision.annotation_files import voc_object, write_photo, write_voc_image
from tests.vision.coco_files import write_shapes

from penstock.cli import main
from penstock.errors import ConfigError
from penstock.vision.annotations.voc_folder import read_voc_folder
from penstock.vision.annotations.yolo import read_yolo
from penstock.vision.convert import Source, convert


def test_voc_through_coco_and_back(tmp_path):
    points = "<landmarks><r x='1.5' y='2'/><l x='3' y='2'/></landmarks>"
    other = "<landmarks><l x='5' y='6'/><r x='nan' y='nan'/></landmarks><difficult>1</difficult>"
    dogs = voc_object("dog", (2, 3, 20, 15), points), voc_object("dog", (1.5, 1, 30.25, 9), other)
    write_voc_image(tmp_path / "voc", "a", *dogs)
    write_voc_image(tmp_path / "voc", "b")
    write_voc_image(tmp_path / "voc", "c", voc_object("cat"))
    report = convert(tmp_path / "voc", tmp_path / "all.json", target_format="coco")
    assert (report.num_images, report.num_objects, report.losses) == (3, 3, {"difficult": 1})
    assert COCO(tmp_path / "all.json").loadAnns(2)[0] == {
        "id": 2, "image_id": 1, "category_id": 2, "bbox": [0.5, 0, 29.75, 9], "area": 29.75 * 9,
        "iscrowd": 0, "segmentation": [], "keypoints": [0, 0, 0, 4, 5, 2], "num_keypoints": 1,
    }  # fmt: skip
    convert(tmp_path / "all.json", tmp_path / "again", target_format="voc", strict=True)

    def said_of(folder):
        return [
            (one.key, one.width_px, one.height_px, o.class_name, o.box_xyxy_px,
             repr(sorted(zip(o.landmark_names, o.landmarks_xy_px, strict=True))))
            for one in read_voc_folder(tmp_path / folder)
            for o in one.objects
        ]  # fmt: skip

    assert said_of("again") == said_of("voc")


def test_yolo_through_coco_and_back(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "yolo/labels/train").mkdir(parents=True)
    for name in "abc":
        write_photo(tmp_path / f"yolo/images/train/{name}.jpg")
        box = rng.uniform([0.3, 0.3, 0.1, 0.1], [0.7, 0.7, 0.4, 0.4], (2, 4))
        rows = np.column_stack([(0, 3), box, rng.random((2, 2)), (1, 2), np.zeros((2, 3))])
        np.savetxt(tmp_path / f"yolo/labels/train/{name}.txt", rows, "%.6g")
    said = "train: images/train\nnames: [z, unused, m, a]\nkpt_shape: [2, 3]\n"
    (tmp_path / "yolo/data.yaml").write_text(said)
    report = convert(tmp_path / "yolo", tmp_path / "all.json", target_format="coco")
    assert report.losses == {"split": 1}
    convert(tmp_path / "all.json", tmp_path / "again", target_format="yolo", strict=True)
    (before, names), (after, again) = read_yolo(tmp_path / "yolo"), read_yolo(tmp_path / "again")
    assert again == names == ("z", "unused", "m", "a")
    assert [(i.key, repr(i.objects)) for i in after] == [(i.key, repr(i.objects)) for i in before]


def test_masks_and_crowds_stay_in_coco(tmp_path):
    path = write_shapes(tmp_path)
    source = Source(path, options={"root": tmp_path / "images"})
    convert(source, tmp_path / "copy.json", target_format="coco", strict=True)
    both = COCO(path).dataset["annotations"], COCO(tmp_path / "copy.json").dataset["annotations"]
    for one, other in zip(*both, strict=True):
        assert all(one[key] == other[key] for key in ("bbox", "area", "iscrowd", "segmentation"))


def test_the_command_line_takes_coco(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_shapes(tmp_path)
    for command in ("check", "stats", "view -o sheet.png"):
        assert main([*command.split(), "shapes.json", "--root", "images"]) == 0
    capsys.readouterr()
    assert main(["convert", "shapes.json", "out", "--to", "voc", "--root", "images"]) == 0
    assert capsys.readouterr().out == (
        "mask: 24 lost; voc has no place for it\n"
        "iscrowd: 4 lost; voc has no place for it\n"
        "number of a class: 3 lost; voc has no place for it\n"
        "out: 4 images, 24 objects\n"
    )
    write_shapes(tmp_path, images=[])
    assert main(["check", "shapes.json", "--root", "images"]) == 1
    assert "is of image 139, not a listed one" in capsys.readouterr().out


def test_a_file_that_no_command_would_take_for_coco_is_not_written(tmp_path):
    write_voc_image(tmp_path / "voc", "a", voc_object("dog"))
    with pytest.raises(ConfigError, match=r"ends in \.json, not "):
        convert(tmp_path / "voc", tmp_path / "all", target_format="coco")
