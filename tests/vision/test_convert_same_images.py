# SPDX-License-Identifier: Apache-2.0
"""`convert` takes images for one where they are, and not where a link makes them seem so."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.vision.test_convert import one, picture, voc

from penstock.errors import StoreError
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
from penstock.vision.annotations.voc_folder import read_voc_folder
from penstock.vision.convert import Source, convert
from penstock.vision.convert.reading import Collection, merge

LABEL = "0 .5 .5 .2 .2\n"


def yolo(root, labels, splits=("train", "val")):
    for name, text in labels.items():
        file = root / f"labels/{name}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        (root / f"images/{name}").parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{split}: images/{split}\n" for split in splits]
    (root / "data.yaml").write_text("".join(lines) + "names: [cat]\n")
    return root


def classes_of(folder, split=None):
    images = read_voc_folder(folder, split)
    return {image.key: [found.class_name for found in image.objects] for image in images}


@pytest.fixture
def linked(tmp_path):
    """VOC, whose b.jpg is a link to a.jpg."""
    root = voc(tmp_path / "voc", a=one("cat"), b=one("dog"))
    (root / "JPEGImages/b.jpg").unlink()
    (root / "JPEGImages/b.jpg").symlink_to("a.jpg")
    return root


@pytest.mark.parametrize("split", [None, "a\nb\n", "b\n"], ids=["none", "both", "link"])
def test_a_link_in_a_voc_folder_keeps_its_own_objects(linked, tmp_path, split):
    if split is not None:
        (linked / "ImageSets/Main").mkdir(parents=True)
        (linked / "ImageSets/Main/train.txt").write_text(split)
    report = convert(linked, tmp_path / "one", target_format="voc")
    assert (report.num_images, report.num_objects) == (2, 2)
    assert classes_of(tmp_path / "one") == {"a": ["cat"], "b": ["dog"]}
    if split is not None:
        assert list(classes_of(tmp_path / "one", "train")) == split.split()


def test_a_link_to_an_image_of_another_split_of_yolo_is_an_image(tmp_path):
    root = yolo(tmp_path / "yolo", {"train/a": LABEL, "val/b": LABEL})
    picture(root / "images/train/a.jpg")
    (root / "images/val/b.jpg").symlink_to("../train/a.jpg")
    report = convert(root, tmp_path / "one", target_format="voc")
    assert (report.num_images, report.num_objects, report.losses) == (2, 2, {})
    assert list(classes_of(tmp_path / "one", "train")) == ["a"]
    assert list(classes_of(tmp_path / "one", "val")) == ["b"]


def test_an_image_of_two_splits_of_yolo_has_its_objects_once(tmp_path):
    root = yolo(tmp_path / "yolo", {"train/a": LABEL})
    picture(root / "images/train/a.jpg")
    (root / "data.yaml").write_text("train: images/train\nval: images/train\nnames: [cat]\n")
    report = convert(root, tmp_path / "one", target_format="voc")
    assert (report.num_images, report.num_objects, report.notes) == (1, 1, ())
    for split in ("train", "val"):
        assert classes_of(tmp_path / "one", split) == {"a": ["cat"]}


@pytest.mark.parametrize(
    ("lines", "ages"),
    [
        ("a.jpg 7\nb.jpg 8\n", [{"age": "7"}, {"age": "8"}]),
        ("b.jpg 8\na.jpg 7\n", [{"age": "7"}, {"age": "8"}]),
        ("b.jpg 8\n", [{}, {"age": "8"}]),
    ],
    ids=["in-order", "turned", "link"],
)
def test_another_source_joins_the_image_that_it_names(linked, tmp_path, lines, ages):
    (tmp_path / "ages.txt").write_text(lines)
    options = {"num_landmarks": 0, "classes": ["age"], "root": linked / "JPEGImages"}
    sources = [linked, Source(tmp_path / "ages.txt", "landmarks", options)]
    report = convert(sources, tmp_path / "one", target_format="voc")
    assert (report.num_images, report.num_objects) == (2, 2)
    images = read_voc_folder(tmp_path / "one")
    assert [dict(image.objects[0].extra) for image in images] == ages


def test_two_sizes_of_one_image_in_one_source_are_an_error(tmp_path):
    picture(tmp_path / "a.jpg")
    boxes = "<box left='1' top='2' width='3' height='4'/>"
    images = "".join(
        f"<image file='a.jpg' width='{width}' height='30'>{boxes}</image>" for width in (40, 80)
    )
    (tmp_path / "x.xml").write_text(f"<dataset><images>{images}</images></dataset>")
    with pytest.raises(StoreError, match=r"image 0 gives .*a\.jpg 40 x 30 px .*image 1 80 x 30"):
        convert(tmp_path / "x.xml", tmp_path / "one", target_format="voc")


def test_an_object_of_one_source_is_one_object_of_the_other_at_most(tmp_path):
    root = voc(tmp_path / "voc", a=one() + one(box=(1, 1, 9, 9)))
    (tmp_path / "list.txt").write_text(
        "voc/JPEGImages/a.jpg 4 5 1 2 20 15\nvoc/JPEGImages/a.jpg 6 7 1 2 20 15\n"
    )
    source = Source(tmp_path / "list.txt", "landmarks", {"num_landmarks": 1, "has_box": True})
    report = convert([root, source], tmp_path / "one", target_format="voc")
    assert (report.num_objects, report.num_joined) == (3, 1)
    (image,) = read_voc_folder(tmp_path / "one")
    assert [found.landmarks_xy_px for found in image.objects] == [((4, 5),), (), ((6, 7),)]


def test_repeats_of_an_image_with_two_annotations_add_no_objects():
    """A split that names both of them twice: its objects are those of both, each once."""
    objects = [AnnotatedObject(name, (1.0, 2.0, 8.0, 9.0)) for name in ("cat", "dog")]
    one, other = (
        AnnotatedImage(Path("x/a.jpg"), key, 40, 30, (found,), f"{key}.xml")
        for key, found in zip("ab", objects, strict=True)
    )
    merged, _, _ = merge([Collection((one, other, one, other))], "object")
    assert [image.objects for image in merged.images] == [tuple(objects)]
