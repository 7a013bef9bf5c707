# SPDX-License-Identifier: Apache-2.0
"""VOC's XML, read and written: all that an annotation says, in folders of every layout."""

from __future__ import annotations

import dataclasses
import math
import os

import pytest
from hypothesis import given, settings
from tests.vision.annotations.making import images, same

from penstock.errors import ConfigError, StoreError
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
from penstock.vision.annotations.voc import read_voc, write_voc
from penstock.vision.annotations.voc_folder import read_voc_folder

BOX = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>40</xmax><ymax>30</ymax></bndbox>"


def read(inner="", **options):
    xml = inner if isinstance(inner, bytes) else f"<annotation>{inner}</annotation>"
    return read_voc(xml, path="1.jpg", key="1", **options)


def only(inner, **options):
    (found,) = read(f"<object><name>a</name>{inner}</object>", **options).objects
    return found


def test_the_origin_is_taken_from_the_lower_sides_and_from_landmarks():
    points = "<landmarks>1 1 40 30</landmarks>"
    of_voc, of_edges = only(BOX + points), only(BOX + points, origin=0)
    assert of_voc.box_xyxy_px == (0, 0, 40, 30)
    assert of_voc.landmarks_xy_px == ((0, 0), (39, 29))
    assert of_edges.box_xyxy_px == (1, 1, 40, 30)
    assert of_edges.landmarks_xy_px == ((1, 1), (40, 30))
    with pytest.raises(ConfigError, match="origin is 0 or 1, not 2"):
        only(BOX, origin=2)


def test_fractions_are_shifted_as_they_are_written():
    box = only(BOX.replace("<xmin>1<", "<xmin>1.1<")).box_xyxy_px
    assert box == (0.1, 0, 40, 30)


def test_parts_are_objects_within_one():
    part = f"<part><name>head</name>{BOX}</part>"
    found = only(BOX + part + part.replace("head", "foot"))
    assert [inner.class_name for inner in found.parts] == ["head", "foot"]
    assert found.parts[0].box_xyxy_px == (0, 0, 40, 30)


def test_other_elements_and_attributes_are_kept_as_text():
    found = only(
        "<gender>f</gender><actions><run>1</run><sit>0</sit></actions><note/>"
        "<gender>m</gender><attributes><attribute><name>age</name><value>7</value></attribute>"
        "</attributes>"
    )
    assert found.extra == {
        "age": "7", "gender": "f", "actions/run": "1", "actions/sit": "0", "note": "",
        "gender[2]": "m",
    }  # fmt: skip


@pytest.mark.parametrize(
    "inner",
    [
        "<landmarks><landmark><name>l</name><x>8</x><y>10</y><visibility>1</visibility></landmark>"
        "<landmark><name>r</name><x>nan</x><y>nan</y></landmark></landmarks>",
        "<landmarks><landmark name='l' x='8' y='10' visibility='1'/>"
        "<landmark name='r' x='nan' y='NaN'/></landmarks>",
        "<keypoints><l visibility='1'><x>8</x><y>10</y></l><r><x>nan</x><y>nan</y></r></keypoints>",
        "<landmarks><l visible='0' x='8' y='10'/><r x='nan' y='nan'/></landmarks>",
    ],
)
def test_landmarks_with_names_are_read_in_every_form(inner):
    found = only(inner)
    assert same(found.landmarks_xy_px, ((7.0, 9.0), (math.nan, math.nan)))
    assert found.landmark_names == ("l", "r")
    assert found.visibility == (1, 0)


@pytest.mark.parametrize(
    "inner",
    [
        "<landmarks><x1>8</x1><y1>10</y1><x2>4</x2><y2>5.5</y2></landmarks>",
        "<landmarks><y2>5.5</y2><y1>10</y1><x2>4</x2><x1>8</x1></landmarks>",
        "<lm><x1>8</x1><y1>10</y1><x2>4</x2><y2>5.5</y2><visible>0</visible></lm>",
        "<landmarks><x_0>8</x_0><y_0>10</y_0><x_1>4</x_1><y_1>5.5</y_1></landmarks>",
        "<landmarks>8, 10, 4, 5.5</landmarks>",
        "<landmarks><point><x>8</x><y>10</y></point><lm><x>4</x><y>5.5</y></lm></landmarks>",
    ],
)
def test_landmarks_without_names_are_read_in_every_form(inner):
    found = only(inner)
    assert found.landmarks_xy_px == ((7, 9), (3, 4.5))
    assert found.landmark_names == found.visibility == ()


def test_landmarks_that_a_file_says_it_does_not_have_are_none():
    found = only("<has_lm>0</has_lm><lm><x1>-1</x1><y1>-1</y1></lm>")
    assert found.landmarks_xy_px == ()


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ("<landmarks>1 2 3</landmarks>", r"landmarks has 3 numbers"),
        ("<landmarks>1 b</landmarks>", r"landmarks: number 1 is 'b', not a number"),
        ("<landmarks><x1>1</x1></landmarks>", r"landmarks: 1: y is missing"),
        ("<landmarks><x1>1</x1><y1>1</y1><x3>1</x3><y3>1</y3></landmarks>", "points 1 to 3, but"),
        ("<landmarks><x1>1</x1><x1>1</x1></landmarks>", "has <x1> twice"),
        ("<landmarks><nose/></landmarks>", "<nose> 0 is no point"),
        ("<landmarks><point x='1'/></landmarks>", "<point> 0: y is missing"),
        ("<landmarks><point x='1' y='1' visibility='3'/></landmarks>", "visibility is '3', not 0"),
        ("<landmarks><a x='1' y='1'/><point x='1' y='1'/></landmarks>", "landmark 1 has no name"),
        ("<landmarks><a x='1' y='1'/><a x='1' y='1'/></landmarks>", "two landmarks are called 'a'"),
        ("<landmarks>1 2</landmarks><lm>1 2</lm>", "has landmarks twice"),
        ("<bndbox><xmin>1e300</xmin></bndbox>", "xmin is '1e300': no image is that large"),
        ("<bndbox><xmin>1_0</xmin></bndbox>", "xmin is '1_0', not a number"),
        ("<part><name>b</name><bndbox/></part>", r"object 0 \(a\): part 0 \(b\): xmin is missing"),
        ("<occluded>2</occluded>", "occluded is '2', not 0 or 1"),
    ],
)  # fmt: skip
def test_a_field_that_is_wrong_names_its_object(inner, message):
    with pytest.raises(ValueError, match=message) as caught:
        only(inner)
    assert "object 0 (a)" in str(caught.value)


def test_a_byte_order_mark_and_a_namespace_are_no_hindrance():
    data = '\ufeff<annotation xmlns="http://x"><object><name>a</name></object></annotation>'
    assert read(data.encode()).objects == (AnnotatedObject("a"),)


@settings(deadline=None, max_examples=60)
@given(images())
def test_what_is_written_is_read_again(image):
    for origin in (0, 1):
        data = write_voc(image, origin=origin)
        assert same(read_voc(data, path="1.jpg", key="1", origin=origin), image)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (AnnotatedObject(""), "object 0 has no class"),
        (AnnotatedObject("a\0"), "which XML cannot hold"),
    ],
)
def test_what_xml_cannot_say_is_not_written(found, message):
    with pytest.raises(ValueError, match=message):
        write_voc(dataclasses.replace(read(), objects=(found,)))


@pytest.fixture
def folder(tmp_path):
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("b", "a"):
        (tmp_path / f"Annotations/{name}.xml").write_text("<annotation/>")
        (tmp_path / f"JPEGImages/{name}.JPG").touch()
    (tmp_path / "ImageSets/Main/train.txt").write_text("\ufeffb\r\n\na\n")
    return tmp_path


def test_a_folder_is_read_by_names_or_by_its_split(folder):
    found = read_voc_folder(folder)
    assert [image.key for image in found] == ["a", "b"]
    assert found[0].path == folder / "JPEGImages/a.JPG"
    assert found[0].source == str(folder / "Annotations/a.xml")
    assert [image.key for image in read_voc_folder(folder, "train")] == ["b", "a"]


def test_a_list_of_a_class_names_images_and_names_may_have_blanks(folder):
    (folder / "Annotations/my cat.xml").write_text("<annotation/>")
    (folder / "ImageSets/Main/cat_train.txt").write_text("a -1\nmy cat\nb  1\n")
    found = read_voc_folder(folder, "cat_train")
    assert [image.key for image in found] == ["a", "my cat", "b"]


def test_an_image_goes_with_the_annotation_of_its_name_and_else_with_the_one_it_names(folder):
    (folder / "Annotations/a.xml").write_text("<annotation><filename>b.JPG</filename></annotation>")
    (folder / "Annotations/c.xml").write_text("<annotation><filename>b.JPG</filename></annotation>")
    (folder / "Annotations/d.xml").write_text(
        "<annotation><filename>../x.jpg</filename></annotation>"
    )
    paths = [
        image.path.relative_to(folder / "JPEGImages").name for image in read_voc_folder(folder)
    ]
    assert paths == ["a.JPG", "b.JPG", "b.JPG", "d.jpg"]


def test_annotations_beside_images_are_a_folder_too(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("1.xml", "1.png", "sub/2.xml", "sub/2.jpg"):
        (tmp_path / name).write_text("<annotation/>" if name.endswith("xml") else "")
    (tmp_path / "._1.xml").write_bytes(b"\0\5\26\7")  # as macOS leaves them
    found = read_voc_folder(tmp_path)
    assert [(image.key, image.path) for image in found] == [
        ("1", tmp_path / "1.png"),
        ("sub/2", tmp_path / "sub/2.jpg"),
    ]


def test_images_without_annotation_are_told(folder):
    (folder / "JPEGImages/z.jpg").touch()
    with pytest.warns(UserWarning, match=r"1 image\(s\) in .*JPEGImages have no file") as warned:
        assert len(read_voc_folder(folder)) == 2
    assert warned[0].filename == __file__


@pytest.mark.parametrize(
    ("change", "split", "message"),
    [
        (lambda f: (f / "Annotations/a.xml").write_text("<a>"), None, r"a\.xml: not well-formed"),
        (lambda f: (f / "JPEGImages/a.png").touch(), None, r"which of them is meant by 'a'"),
        (lambda f: None, "val", r"has no split 'val' in ImageSets/Main; it has 'train'"),
        (lambda f: (f / "Annotations/a.xml").unlink(), "train", r"a\.xml is not there"),
    ],
    ids=["damaged", "two images", "no split", "no annotation"],
)
def test_a_folder_that_is_wrong_says_where(folder, change, split, message):
    change(folder)
    with pytest.raises(StoreError, match=message):
        read_voc_folder(folder, split)


def test_real_annotations_are_all_read_and_written_again(data_dir):
    found = read_voc_folder(data_dir / "bccd")
    assert (len(found), sum(len(image.objects) for image in found)) == (364, 4888)
    assert all(os.path.exists(image.path) for image in found)
    for image in found:
        again = read_voc(write_voc(image), path=image.path, key=image.key, source=image.source)
        assert isinstance(again, AnnotatedImage)
        assert again == image
    assert len(read_voc_folder(data_dir / "bccd", "train")) == 205
