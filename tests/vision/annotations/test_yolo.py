# SPDX-License-Identifier: Apache-2.0
"""YOLO's data sets: where images and labels lie, and what the lines say."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.vision.annotations.making import same

from penstock.errors import ConfigError, StoreError
from penstock.vision.annotations.model import AnnotatedObject
from penstock.vision.annotations.yolo import (
    Labels,
    label_line,
    read_label_line,
    read_yolo,
    write_yolo_yaml,
)

Image = pytest.importorskip("PIL.Image")


def put(root, name, labels=None, size=(100, 50), orientation=1):
    place = root / "images" / f"{name}.jpg"
    place.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("L", size).save(place, exif=exif)
    if labels is not None:
        file = root / "labels" / f"{name}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(labels)
    return place


@pytest.fixture
def data(tmp_path):
    put(tmp_path, "train/b", "1 0.5 0.5 0.2 0.4\n\n0 0.1 0.1 0.2 0.2\r\n")
    put(tmp_path, "train/a")
    put(tmp_path, "val/c", "0.0 0.5 0.5 1 1\n")
    return tmp_path


NAMES = "names: [cat, no]\n"


def test_boxes_are_pixels_and_images_without_labels_have_none(data):
    (data / "data.yaml").write_text("train: images/train\n" + NAMES)
    images, names = read_yolo(data)
    assert names == ("cat", "no")  # and not False, as YAML 1.1 would have it
    assert [(image.key, image.width_px, image.height_px) for image in images] == [
        ("a", 100, 50),
        ("b", 100, 50),
    ]
    assert images[0].objects == ()
    assert images[1].objects == (
        AnnotatedObject("no", (40, 15, 60, 35)),
        AnnotatedObject("cat", (0, 0, 20, 10)),
    )


@pytest.mark.parametrize(
    "text",
    [
        "train: images/train\nval: images/val\nnames: {0: cat, 1: 'no'}\nnc: 2",
        "path: .\ntrain: [images/train]\nval: val.txt\nnames: [cat, no]",
        "train: ../images/train\nval: ../images/val\nnames:\n  - cat\n  - no\n",
        "path: images\ntrain: train\nval: [val]\nnames: {1: no, 0: cat}\ntest:\nroboflow: {a: b}",
    ],
)
def test_every_way_to_say_where_images_are(data, text):
    (data / "val.txt").write_text("./images/val/c.jpg\n")
    (data / "some.yaml").write_text(text)
    for source in (data, data / "some.yaml"):
        for split, count in (("train", 2), ("val", 1)):
            images, names = read_yolo(source, split)
            assert (len(images), names) == (count, ("cat", "no"))
    assert images[0].objects == (AnnotatedObject("cat", (0, 0, 100, 50)),)
    with pytest.raises(StoreError, match="has no split 'test'; it has 'train', 'val'"):
        read_yolo(data, "test")


def test_folders_alone_are_a_data_set(data):
    images, names = read_yolo(data)
    assert (len(images), names) == (2, ("0", "1"))
    (data / "classes.txt").write_text("cat\r\nno\r\n")
    assert read_yolo(data, "val")[1] == ("cat", "no")


def test_images_without_any_labels_are_told(tmp_path):
    put(tmp_path, "a")
    with pytest.warns(UserWarning, match=r"no image of split 'train' .*labels/a\.txt is not there"):
        read_yolo(tmp_path)


def test_landmarks_and_their_visibility(tmp_path):
    yaml = "train: images\nnames: [face]\nkpt_shape: [2, {}]"
    put(tmp_path, "a", "0 .5 .5 1 1 .1 .2 2 .3 .4 0\n")
    (tmp_path / "a.yaml").write_text(yaml.format(3))
    (found,) = read_yolo(tmp_path)[0][0].objects
    assert same(found.landmarks_xy_px, ((10.0, 10.0), (math.nan, math.nan)))
    assert found.visibility == (2, 0)
    put(tmp_path, "a", "0 .5 .5 1 1 .1 .2 0 0\n")
    (tmp_path / "a.yaml").write_text(yaml.format(2))
    (found,) = read_yolo(tmp_path)[0][0].objects
    assert same(found.landmarks_xy_px, ((10.0, 10.0), (math.nan, math.nan)))
    assert found.visibility == ()


def test_the_box_of_a_polygon_is_taken_if_it_is_wanted(tmp_path):
    put(tmp_path, "a", "0 .1 .2 .5 .4 .3 .8\n")
    with pytest.raises(StoreError, match=r"a\.txt, line 1: .*of polygons, polygons=.box"):
        read_yolo(tmp_path)
    (image,), _ = read_yolo(tmp_path, polygons="box")
    assert image.objects[0].box_xyxy_px == (10, 10, 50, 40)
    with pytest.raises(ConfigError, match="polygons is 'error' or 'box', not 'mask'"):
        read_yolo(tmp_path, polygons="mask")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0 .5 .5 1", "it has 4 columns, not 5"),
        ("0 .5 .5 1 1 .9", "A sixth is a prediction's score"),
        ("2 .5 .5 1 1", "its class is 2, and the data set has 2, from 0 to 1"),
        ("-1 .5 .5 1 1", "column 1 is '-1', not the number of a class"),
        ("1.5 .5 .5 1 1", "column 1 is '1.5', not the number of a class"),
        ("0 .5 x 1 1", "column 3 is 'x', not a number"),
        ("0 nan .5 1 1", "column 2 is 'nan', not a number"),
        ("0 50 25 10 10", "column 2 is 50, no share .* these may be pixels"),
    ],
)
def test_a_line_that_is_wrong_is_named(data, line, message):
    (data / "data.yaml").write_text("train: images/train\n" + NAMES)
    (data / "labels/train/a.txt").write_text(f"0 .5 .5 1 1\n{line}\n")
    with pytest.raises(StoreError, match=message) as caught:
        read_yolo(data)
    assert "labels/train/a.txt, line 2" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("names: [a, a]\ntrain: images", "two classes are called 'a'"),
        ("names: [a, [b]]", "names is neither a list of names nor"),
        ("names: {0: a, 2: b}", "not each number from 0"),
        ("names: {x: a}", "not each number from 0"),
        ("names: a", "names is neither a list of names nor a mapping"),
        ("names: [a]\nnc: 2", "nc is 2, and names has 1"),
        ("names: ['']", "names is neither a list of names nor"),
        ("kpt_shape: [17, 4]", "kpt_shape is the number of landmarks and 2 or 3"),
        ("kpt_shape: [99999999, 3]", "kpt_shape is"),
        ("train: images/none", "train is 'images/none', and .* is not there"),
        ("train: [a, b", "it is no YAML"),
        ("a: &a [*a]\nx: !!python/object:os.system {}", "it is no YAML|has no split"),
        ("- a", "it is no mapping"),
        ("[" * 20_000, "it is no YAML"),
        ("a: 'b" + "\0", "it is no YAML"),
    ],
)
def test_a_yaml_file_that_is_wrong_is_named(data, text, message):
    (data / "data.yaml").write_text(text)
    with pytest.raises(StoreError, match=message) as caught:
        read_yolo(data)
    assert "data.yaml" in str(caught.value)


def test_yaml_that_grows_when_it_is_read_does_not(data):
    bomb = "a0: &a0 {x: 1}\n" + "".join(
        f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 12)
    )
    (data / "data.yaml").write_text(bomb + "train: images/train\nnames: [a, b]")
    start = time.monotonic()
    assert len(read_yolo(data)[0]) == 2
    assert time.monotonic() - start < 5  # merged it has 10 ** 11 entries


def test_images_that_are_none_or_not_there_are_named(data):
    (data / "images/train/a.jpg").write_bytes(b"<html>")
    with pytest.raises(StoreError, match=r"cannot read the size of .*a\.jpg"):
        read_yolo(data)
    (data / "data.yaml").write_text("train: list.txt\nnames: [a]")
    for line in ("images/train/no.jpg", "/", ".", "/dev/zero"):
        (data / "list.txt").write_text(line)
        with pytest.raises(StoreError, match="cannot read"):
            read_yolo(data)
    with pytest.raises(StoreError, match="neither a YAML file nor a folder 'images'"):
        read_yolo(data / "labels")


@settings(deadline=None, max_examples=200)
@given(
    st.tuples(*[st.integers(0, 4000).map(float)] * 4),
    st.integers(1, 4000),
    st.integers(1, 4000),
    st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 4000)), max_size=3),
)
def test_whole_pixels_come_back_whole(box, width, height, points):
    box = tuple(min(v, side) for v, side in zip(box, (width, height) * 2, strict=True))
    points = tuple((float(min(x, width)), float(min(y, height))) for x, y in points)
    labels = Labels(("a", "b"), len(points), 2)
    found = AnnotatedObject("b", box, points)
    line = label_line(found, 1, labels, width, height)
    assert read_label_line(line, labels, width, height) == found


def test_the_yaml_that_is_written_is_read_again(data):
    names = ("no", "1", "a: b", "ä", "null")
    (data / "data.yaml").write_bytes(write_yolo_yaml(Labels(names), {"train": "images/train"}))
    assert read_yolo(data)[1] == names
