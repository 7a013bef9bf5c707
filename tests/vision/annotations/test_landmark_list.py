# SPDX-License-Identifier: Apache-2.0
"""Landmark lists: every order of columns, and text files of every system."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.vision.annotations.making import BOX, POINT, WORD, same

from penstock.errors import ConfigError, StoreError
from penstock.vision.annotations.lists import (
    LandmarkColumns,
    landmark_lines,
    samples_of_lines,
    write_landmark_list,
)
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject

NAN = (math.nan, math.nan)


@pytest.fixture
def read(tmp_path):
    def of(text, **options):
        file = tmp_path / "list.txt"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return list(landmark_lines(file, **options))

    return of


def test_a_line_of_a_known_face_list(read, tmp_path):
    points = "107.25 147.75 126.25 105.75 144.75 108.25 107.75 121 140 141"
    text = f" lfw_5590\\Aaron_0001.jpg {points} 1 2 2 3\r\n \r\n"
    classes = ("gender", "smile", "glasses", "pose")
    (image,) = read(text, num_landmarks=5, classes=classes)
    assert image.path == tmp_path / "lfw_5590/Aaron_0001.jpg"
    assert image.key == "lfw_5590/Aaron_0001.jpg"
    assert image.source == f"{tmp_path / 'list.txt'}, line 1"
    (found,) = image.objects
    assert found.landmarks_xy_px[0] == (107.25, 108.25)
    assert found.landmarks_xy_px[4] == (144.75, 141)
    assert found.extra == {"gender": "1", "smile": "2", "glasses": "2", "pose": "3"}
    assert (found.class_name, found.box_xyxy_px) == ("", None)
    assert read(text, classes=classes)[0] == image


def test_columns_in_other_orders(read):
    points = {"layout": "xyxy", "num_landmarks": 2}
    (image,) = read("1.jpg 1 2 3 4", **points)
    assert image.objects[0].landmarks_xy_px == ((1, 2), (3, 4))
    (image,) = read("1.jpg 1 2 3 4 5 6 7 8 cat", **points, has_box=True, classes=("class",))
    assert image.objects == (AnnotatedObject("cat", (5, 6, 7, 8), ((1, 2), (3, 4))),)
    (image,) = read(
        "1.jpg 1 2 3 4 5 6 7 8", **points, has_box=True, box_at="before", box_format="xywh"
    )
    assert image.objects == (AnnotatedObject("", (1, 2, 4, 6), ((5, 6), (7, 8))),)


def test_an_origin_of_1_is_taken_from_points_and_lower_sides(read):
    (image,) = read("1.jpg 1 1.1 1 2 30 40", has_box=True, origin=1, num_landmarks=1)
    assert image.objects == (AnnotatedObject("", (0, 1, 30, 40), ((0, 0.1),)),)


def test_points_that_are_not_marked(read):
    (image,) = read("1.jpg 1 -1 nan -1 -1 5", missing=-1)
    assert same(image.objects[0].landmarks_xy_px, ((1.0, -1.0), NAN, NAN))
    (image,) = read("1.jpg -1 -1")
    assert image.objects[0].landmarks_xy_px == ((-1, -1),)


def test_empty_lines_comments_marks_tabs_and_line_ends_are_no_matter(read):
    text = b"\xef\xbb\xbf# path x y\r\n\r\n\t1.jpg\t1\t 2\t\r2.jpg 3 4\n  # 5\n3.jpg 5 6"
    found = read(text)
    assert [image.key for image in found] == ["1.jpg", "2.jpg", "3.jpg"]
    assert [image.source[-6:] for image in found] == ["line 3", "line 4", "line 6"]
    assert found[2].objects[0].landmarks_xy_px == ((5, 6),)


def test_paths_with_blanks_and_other_separators(read, tmp_path):
    assert read("my photo 1.jpg 1 2")[0].key == "my photo 1.jpg"
    assert read("my photo.jpg , 1,2, a b", separator=",", classes=("who",))[0].objects[0].extra == {
        "who": "a b"
    }
    assert read("C:\\faces\\1.jpg 1 2", root="/data")[0].path == Path("/data/C:/faces/1.jpg")
    assert read("/faces/1.jpg 1 2")[0].path == Path("/faces/1.jpg")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("1.jpg 1 2\n2.jpg 1 2 3", {}, r"line 2: it has 4 columns, not 3: a path, 2 x 1 for"),
        ("1.jpg 1 2\n2.jpg 1", {}, r"line 2: it has 2 columns, not 3"),
        ("1.jpg 1 2 3", {}, r"line 1: it has 3 numbers at its end, '3', for landmarks"),
        ("1.jpg", {}, r"line 1: it has 0 numbers"),
        (
            "a b.jpg 1 2 man 0 up",
            {},
            "line 1: it has 0 numbers at its end, 'up', .* Say which columns there are: has_box",
        ),
        ("1.jpg 1 2", {"has_box": True}, r"line 1: it has 0 numbers"),
        ("1.jpg 1 x", {"num_landmarks": 1}, r"line 1: column 3 is 'x', not a number"),
        ("1.jpg 1 inf", {}, r"line 1: column 3 is 'inf', not a number"),
        ("1.jpg 1 1e300", {}, r"line 1: column 3 is '1e300': no image"),
        (b"1.jpg 1 2\n\xff.jpg 1 2", {}, r"line 2: .*convert it to UTF-8"),
        ("1.jpg 1 2".encode("utf-16"), {}, "line 1: .*convert it to UTF-8"),
        ("a\0.jpg 1 2", {}, r"line 1: .*a null character"),
        ("\n# x\n", {}, "has no lines"),
    ],
)
def test_what_is_wrong_names_file_and_line(read, text, options, message):
    with pytest.raises(StoreError, match=message) as caught:
        read(text, **options)
    assert "list.txt" in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "yx"}, {"box_format": "cxcywh"}, {"box_at": "first"}, {"origin": 2},
        {"num_landmarks": -1}, {"classes": ("a", "a")},
    ],
)  # fmt: skip
def test_columns_that_cannot_be_are_an_error_of_the_caller(read, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        read("1.jpg 1 2", **options)


@st.composite
def lists(draw):
    columns = LandmarkColumns(
        num_landmarks=draw(st.integers(0, 4)),
        layout=draw(st.sampled_from(["xxyy", "xyxy"])),
        has_box=draw(st.booleans()),
        box_at=draw(st.sampled_from(["before", "after"])),
        classes=tuple(draw(st.lists(WORD | st.just("class"), unique=True, max_size=3))),
        missing=draw(st.none() | st.just(-1000)),
        origin=draw(st.integers(0, 1)),
        separator=draw(st.sampled_from([None, ",", ";"])),
    )
    found = []
    for number in range(draw(st.integers(1, 3))):
        points = tuple(draw(POINT) for _ in range(columns.num_landmarks))
        extra = {name: draw(WORD) for name in columns.classes}
        name = extra.pop("class", "")
        box = draw(BOX | st.none()) if columns.has_box else None
        objects = (AnnotatedObject(name, box, points, extra=extra),)
        found.append(AnnotatedImage(Path(f"{number}.jpg"), f"{number}.jpg", None, None, objects))
    return found, columns


@settings(deadline=None, max_examples=100)
@given(lists())
def test_what_is_written_is_read_again(tmp_path_factory, made):
    images, columns = made
    file = tmp_path_factory.getbasetemp() / "written.txt"
    file.write_bytes(write_landmark_list(images, columns))
    options = {f.name: getattr(columns, f.name) for f in dataclasses.fields(columns)}
    found = list(landmark_lines(file, **options))
    assert same([image.objects for image in found], [image.objects for image in images])


@pytest.mark.parametrize(
    ("path", "found", "message"),
    [
        ("a\\b.jpg", AnnotatedObject(""), "cannot have the path"),
        ("a\n.jpg", AnnotatedObject(""), "cannot have the path"),
        ("#.jpg", AnnotatedObject(""), "cannot have the path"),
        ("1 2", AnnotatedObject(""), "cannot have the path"),
        ("1", AnnotatedObject("", extra={"who": "a b"}), "'a b' does not stay in a column"),
        ("1", AnnotatedObject(""), "1, object 0: it has no 'who'"),
        ("1", AnnotatedObject("", None, (NAN, NAN)), "it has 2 landmarks, and others 1"),
    ],
)
def test_what_a_line_cannot_hold_is_not_written(path, found, message):
    image = AnnotatedImage(Path(path), "1", None, None, (found,))
    columns = LandmarkColumns(num_landmarks=1, classes=("who",))
    with pytest.raises(ValueError, match=message):
        write_landmark_list([image], columns)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=30))
def test_an_image_is_as_many_samples_as_its_most_frequent_line(pairs):
    lines = [
        AnnotatedImage(Path(name), name, None, None, (AnnotatedObject(str(number), None, (NAN,)),))
        for name, number in pairs
    ]
    samples = samples_of_lines(lines)
    for name in "abc":
        numbers = [str(number) for of, number in pairs if of == name]
        same_image = [[o.class_name for o in s.objects] for s in samples if s.key == name]
        objects = list(dict.fromkeys(numbers))
        assert same_image == [objects] * max(map(numbers.count, objects), default=0)
    if all(number == 0 for _, number in pairs):  # a line for each sample
        assert [s.key for s in samples] == [name for name, _ in pairs]
