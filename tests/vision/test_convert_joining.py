# SPDX-License-Identifier: Apache-2.0
"""What `convert` could not join of two sources is counted; an invented class stands in no way."""

from __future__ import annotations

import pytest
from tests.vision.test_convert import one, picture, voc

from penstock.vision.annotations.imglab import read_imglab
from penstock.vision.annotations.voc_folder import read_voc_folder
from penstock.vision.convert import Source, convert

BOX = (2, 3, 20, 15)  # in a list: 1 2 20 15
OTHER = (1, 1, 9, 9)
COLUMNS = {"num_landmarks": 1, "has_box": True, "box_at": "after"}


def listed(folder, text, columns=COLUMNS):
    (folder / "list.txt").write_text(text)
    return Source(folder / "list.txt", "landmarks", columns)


def joined(folder, root, text, columns=COLUMNS, to="voc"):
    return convert([root, listed(folder, text, columns)], folder / "one", target_format=to)


@pytest.mark.parametrize(
    ("line", "columns", "why"),
    [
        ("voc/JPEGImages/a.jpg 4 5 1 2 21 15\n", COLUMNS, "with another box"),
        ("voc/JPEGImages/a.jpg 4 5\n", {"num_landmarks": 1}, "without a box"),
        (
            "voc/JPEGImages/a.jpg 4 5 1 2 20 15 dog\n",
            {**COLUMNS, "classes": ["class"]},
            "of another class",
        ),
        (
            "voc/JPEGImages/a.jpg 4 5 1 2 20 15 2\n",
            {**COLUMNS, "classes": ["age"]},
            "with other values",
        ),
    ],
    ids=["box", "boxless", "class", "values"],
)
@pytest.mark.parametrize("more", [one(box=OTHER), ""], ids=["several", "alone"])
def test_objects_that_are_not_joined_are_counted(tmp_path, line, columns, why, more):
    root = voc(tmp_path / "voc", a=one(inner="<age>1</age>") + more)
    report = joined(tmp_path, root, line, columns)
    if why == "without a box" and not more:  # the only object of both is the same
        assert (report.num_joined, report.notes) == (1, ())
        return
    assert report.num_joined == 0
    assert report.notes[0].startswith("not joined: 1 object of 1 image that two sources have")


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_a_class_that_convert_invented_gives_way_to_a_real_one(tmp_path, is_first):
    root = voc(tmp_path / "voc", a=one("face") + one("face", box=OTHER))
    points = "voc/JPEGImages/a.jpg 4 5 1 2 20 15\nvoc/JPEGImages/a.jpg 7 8 0 0 9 9\n"
    source = listed(tmp_path, points)
    convert(source, tmp_path / "points", target_format="voc", images="link")
    both = [tmp_path / "points", root] if is_first else [root, tmp_path / "points"]
    report = convert(both, tmp_path / "one", target_format="voc")
    assert (report.num_objects, report.num_joined, report.notes) == (2, 2, ())
    (image,) = read_voc_folder(tmp_path / "one")
    assert [found.class_name for found in image.objects] == ["face", "face"]
    assert image.objects[0].landmarks_xy_px == ((4, 5),)


def test_a_class_that_convert_invented_stays_where_there_is_no_other(tmp_path):
    root = voc(tmp_path / "voc", a=one("object"))
    joined(tmp_path, root, "voc/JPEGImages/a.jpg 4 5 1 2 20 15\n", to="imglab")
    (image,) = read_imglab(tmp_path / "one")
    assert [found.class_name for found in image.objects] == ["object"]


def test_sources_without_an_image_in_common_are_pointed_at(tmp_path):
    root = voc(tmp_path / "voc", a=one(), b=one())
    picture(tmp_path / "copies/a.jpg")
    report = joined(tmp_path, root, "copies/a.jpg 4 5 1 2 20 15\n")
    assert report.num_joined == 0
    assert report.notes[0].startswith("the sources have no image in common, so nothing of theirs")


def test_the_same_file_by_another_path_is_no_copy(tmp_path):
    root = voc(tmp_path / "voc", a=one())
    (tmp_path / "links").symlink_to(root / "JPEGImages")
    report = joined(tmp_path, root, "links/a.jpg 4 5 1 2 20 15\n")
    assert (report.num_joined, report.notes) == (1, ())
