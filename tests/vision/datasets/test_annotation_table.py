# SPDX-License-Identifier: Apache-2.0
"""The table of all annotations: what goes in comes out, in little memory."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.vision.annotation_files import one_image, thing

from penstock.errors import ConfigError, StoreError
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
from penstock.vision.datasets.table import TableBuilder, numbered_names

NAN = math.nan
COORDINATE = st.floats(-100, 1000, width=32)
POINTS = ("left eye", "nose", "mouth")


def table_of(*images, attributes=(), **how):
    builder = TableBuilder(attributes)
    builder.add(images)
    return builder.table(**how)


@st.composite
def objects(draw):
    points = draw(
        st.lists(st.tuples(COORDINATE, COORDINATE) | st.just((NAN, NAN)), min_size=3, max_size=3)
    )
    return AnnotatedObject(
        class_name=draw(st.sampled_from(["cat", "dog", "räuber", "0"])),
        box_xyxy_px=draw(st.none() | st.tuples(*[COORDINATE] * 4)),
        landmarks_xy_px=tuple(points),
        landmark_names=POINTS,
        visibility=tuple(0 if math.isnan(x) else draw(st.sampled_from([1, 2])) for x, _ in points),
        difficult=draw(st.booleans()),
        truncated=draw(st.booleans()),
        occluded=draw(st.booleans()),
        extra={"hat": draw(st.sampled_from(["yes", "no", ""]))},
    )


@st.composite
def lists_of_images(draw):
    several = draw(st.lists(st.lists(objects(), max_size=4), max_size=5))
    return [
        AnnotatedImage(
            Path(f"folder/{number}.jpg"),
            f"{number}",
            draw(st.none() | st.integers(1, 9999)),
            draw(st.integers(1, 9999)),
            tuple(of_image),
            f"list.txt, line {number}",
        )
        for number, of_image in enumerate(several)
    ]


def same(one, other):
    """Whether two objects are equal, NaN being like NaN."""
    points = np.array(one.landmarks_xy_px), np.array(other.landmarks_xy_px)
    return np.array_equal(*points, equal_nan=True) and replace(one, landmarks_xy_px=()) == replace(
        other, landmarks_xy_px=()
    )


@given(lists_of_images())
def test_what_goes_in_comes_out(images):
    table = table_of(*images, attributes=["hat"])
    assert len(table) == len(images)
    for position, image in enumerate(images):
        found = table.image(position)
        assert replace(found, objects=()) == replace(image, objects=())
        assert all(map(same, found.objects, image.objects))
        assert len(found.objects) == len(image.objects)


@given(lists_of_images(), st.data())
def test_leaving_objects_out_of_the_table_is_leaving_them_out_of_the_images(images, data):
    table = table_of(*images, attributes=["hat"])
    bits = st.lists(st.booleans(), min_size=table.num_objects, max_size=table.num_objects)
    is_kept = data.draw(bits)
    found = table.with_objects(np.array(is_kept, np.bool_))
    wanted = iter(is_kept)
    for position, image in enumerate(images):
        kept = [item for item in image.objects if next(wanted)]
        assert all(map(same, found.image(position).objects, kept))
        assert len(found.image(position).objects) == len(kept)
    full = found.without_empty()
    with_some = [image.key for image in map(found.image, range(len(found))) if image.objects]
    assert list(full.keys) == with_some
    assert [full.image(i).key for i in range(len(full))] == with_some


def test_a_million_boxes_take_some_tens_of_megabytes():
    num_images = 20_000
    some = tuple(thing((1.5, 2.5, 30.5, 40.5), f"class {n % 7}") for n in range(5))
    builder = TableBuilder()
    names = (f"{number:08}" for number in range(num_images))
    builder.add(one_image(f"images/{name}.jpg", *some, key=name) for name in names)
    table = builder.table()
    table = replace(table, boxes=table.boxes.astype(np.float32))
    num_bytes = len(pickle.dumps(table))
    assert num_bytes / table.num_objects < 45  # bytes: 45 MB for a million boxes


def test_what_no_file_says_has_no_column_and_what_one_says_has_one_for_all():
    table = table_of(one_image("1.jpg", thing(), thing(truncated=True), thing(difficult=False)))
    assert set(table.columns) == {"truncated", "difficult"}
    assert table.columns["truncated"].tolist() == [False, True, False]
    assert table.columns["difficult"].tolist() == [False, False, False]


def named(**points):
    return thing(landmarks_xy_px=tuple(points.values()), landmark_names=tuple(points))


def test_landmarks_of_the_same_name_are_the_same_point_in_any_order():
    table = table_of(
        one_image("1.jpg", named(nose=(5, 6)), named(mouth=(1, 2), nose=(3, 4)), thing())
    )
    assert table.landmark_names == ("mouth", "nose")
    expected = [[[NAN, NAN], [5, 6]], [[1, 2], [3, 4]], [[NAN, NAN], [NAN, NAN]]]
    np.testing.assert_array_equal(table.columns["landmarks"], expected)
    assert table.columns["landmarks"].dtype == np.float32


def test_points_that_no_object_has_all_of_are_sorted_numbers_as_numbers():
    images = [one_image("1.jpg", named(**{"10": (1, 1), "9": (2, 2)}), named(**{"2": (3, 3)}))]
    assert table_of(*images).landmark_names == ("2", "9", "10")
    wanted = table_of(*images, landmark_names=["9", "7"])
    np.testing.assert_array_equal(
        wanted.columns["landmarks"], [[[2, 2], [NAN, NAN]], [[NAN, NAN], [NAN, NAN]]]
    )


def test_half_a_point_is_no_point():
    table = table_of(one_image("1.jpg", thing(landmarks_xy_px=((NAN, 2.0), (1.0, 2.0)))))
    np.testing.assert_array_equal(table.columns["landmarks"], [[[NAN, NAN], [1, 2]]])


def test_visibility_is_derived_where_only_others_say_it():
    table = table_of(
        one_image(
            "1.jpg",
            thing(landmarks_xy_px=((1, 2), (3, 4)), visibility=(1, 2)),
            thing(landmarks_xy_px=((1, 2), (NAN, NAN))),
            thing(),
        )
    )
    assert table.columns["visibility"].tolist() == [[1, 2], [2, 0], [0, 0]]
    assert table.columns["visibility"].dtype == np.int8


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            thing(landmarks_xy_px=((1, 2),)),
            r"object 1 \(cat\) of 1.jpg has 1 landmarks, and .* 2",
        ),
        (named(nose=(1, 2), eye=(1, 2)), "has 2 landmarks, and .* has 2, .*: which"),
        (thing((0, 0, NAN, 1)), r"object 1 \(cat\) of 1.jpg: its box is .*nan.*, which no pixel"),
        (thing(landmarks_xy_px=((1, 2),), visibility=(1, 2)), "1 landmarks, but 2 visibility"),
        (
            thing(landmarks_xy_px=((1, 2), (3, 4)), landmark_names=("a", "a")),
            "two of its landmarks have one name",
        ),
    ],
)
def test_what_does_not_fit_together_is_an_error_that_names_it(second, message):
    first = thing(landmarks_xy_px=((1, 2), (3, 4)))
    with pytest.raises(StoreError, match=message):
        table_of(one_image("1.jpg", first, second))


def test_numbers_of_classes_stay_what_they_are():
    assert numbered_names(["2", "0"]) == ["0", "1", "2"]
    assert numbered_names(["2", ""]) == ["0", "1", "2", ""]
    assert numbered_names(["2", "01"]) == ["01", "2"]
    assert numbered_names(["20240101", "3"]) == ["3", "20240101"]
    assert numbered_names([]) == []


def test_classes_are_sorted_or_as_given():
    images = [one_image("1.jpg", thing(name="dog"), thing(name="cat"), thing(name=""))]
    assert table_of(*images).class_names == ("cat", "dog", "object")
    given = table_of(*images, class_names=["dog", "bird"])
    assert given.labels.tolist() == [0, -1, -2]
    with pytest.raises(ConfigError, match="class_names is a list of names, not the text 'dog'"):
        table_of(*images, class_names="dog")
    with pytest.raises(ConfigError, match="a name is there twice"):
        table_of(*images, class_names=["dog", "dog"])


def test_attributes_become_numbers_of_their_texts():
    images = [one_image("1.jpg", thing(extra={"hat": "yes"}), thing(), thing(extra={"hat": "no"}))]
    table = table_of(*images, attributes=None)
    assert table.attribute_names == {"hat": ("", "no", "yes")}
    assert table.columns["hat"].tolist() == [2, 0, 1]
    given = table_of(*images, attributes={"hat": ["yes", "no", ""]})
    assert given.columns["hat"].tolist() == [0, 2, 1]
    with pytest.raises(StoreError, match="the attribute 'hat' is '' somewhere"):
        table_of(*images, attributes={"hat": ["yes", "no"]})
    with pytest.raises(ConfigError, match="an attribute is called 'boxes'"):
        TableBuilder(["boxes"])


def test_the_fingerprint_changes_with_the_contents_and_not_with_the_place():
    image = one_image("a/1.jpg", thing(), source="a/1.xml")
    moved = replace(image, path=Path("b/1.jpg"), source="b/1.xml")
    changed = [
        replace(image, key="2"),
        replace(image, width_px=99),
        replace(image, objects=(thing((0, 0, 8, 6.5)),)),
        replace(image, objects=(thing(name="dog"),)),
        replace(image, objects=(thing(difficult=False),)),
        replace(image, objects=()),
    ]
    assert table_of(image).fingerprint() == table_of(moved).fingerprint()
    assert len({table_of(one).fingerprint() for one in [image, *changed]}) == 7
