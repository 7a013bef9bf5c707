# SPDX-License-Identifier: Apache-2.0
"""imglab's XML, read and written."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.vision.annotations.making import FLAG, TEXT, WORD, same

from penstock.errors import StoreError
from penstock.vision.annotations.imglab import read_imglab, write_imglab
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject

WHOLE = st.integers(-50, 5000).map(float)


@pytest.fixture
def read(tmp_path):
    def of(images):
        file = tmp_path / "faces.xml"
        file.write_text(f"<dataset><images>{images}</images></dataset>")
        return read_imglab(file)

    return of


def test_landmarks_are_the_same_points_of_all_boxes(read):
    box = "<box top='1' left='2' width='3' height='4'>{}</box>"
    (image,) = read(
        "<image file='1.jpg'>"
        + box.format("<part name='b' x='3' y='4'/><part name='a' x='1' y='2'/>")
        + box.format("<part name='b' x='5' y='6'/>")
        + box.format("")
        + "</image>"
    )
    assert image.objects[0].landmarks_xy_px == ((1, 2), (3, 4))
    assert same(image.objects[1].landmarks_xy_px, ((math.nan, math.nan), (5.0, 6.0)))
    assert image.objects[1].landmark_names == ("a", "b")
    assert image.objects[2].landmarks_xy_px == image.objects[2].landmark_names == ()


BOX = "<image file='1.jpg'><box top='1' left='2' width='3' {}</image>"


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("<image/>", "image 0 names no file"),
        ("<image file='1.jpg' width='x'/>", r"image 0 \(1.jpg\): width is 'x'"),
        (BOX.format("/>"), r"image 0 \(1.jpg\): box 0 has no height"),
        (BOX.format("height='b'/>"), "box 0: height is 'b', not a number"),
        (BOX.format("height='1' truncated='x'/>"), "box 0: truncated is 'x', not 0 or 1"),
        (BOX.format("height='1'><part x='1' y='1'/></box>"), "a part has no name"),
        (BOX.format("height='1'><part name='a' x='1'/></box>"), "box 0: part 'a' has no y"),
        (BOX.format("height='1'>" + "<part name='a' x='1' y='1'/>" * 2 + "</box>"), "'a' twice"),
        ("<image file='a&#0;'/>", "not well-formed"),
    ],
)
def test_what_is_wrong_names_file_image_and_box(read, images, message):
    with pytest.raises(StoreError, match=message) as caught:
        read(images)
    assert "faces.xml" in str(caught.value)


@st.composite
def faces(draw):
    names = sorted(draw(st.sets(TEXT, max_size=3)))
    found = []
    for _ in range(draw(st.integers(0, 3))):
        points = tuple(draw(st.tuples(WHOLE, WHOLE)) for _ in names)
        found.append(
            AnnotatedObject(
                draw(st.just("") | TEXT),
                tuple(draw(WHOLE) for _ in range(4)),
                points,
                tuple(names),
                (),
                *(draw(FLAG) for _ in range(3)),
                extra=draw(st.dictionaries(WORD, TEXT, max_size=2)),
            )
        )
    return tuple(found)


@settings(deadline=None, max_examples=100)
@given(st.lists(faces(), max_size=3).map(lambda sets: sets[:1]), st.integers(0, 99))
def test_what_is_written_is_read_again(tmp_path_factory, sets, width):
    file = tmp_path_factory.getbasetemp() / "written.xml"
    written = [
        AnnotatedImage(file.parent / f"{n}.jpg", f"{n}.jpg", width or None, None, found, "")
        for n, found in enumerate(sets)
    ]
    reserved = {"top", "left", "width", "height", "difficult", "truncated", "occluded"}
    if any(reserved & o.extra.keys() for image in written for o in image.objects):
        return
    file.write_bytes(write_imglab(written))
    found = read_imglab(file)
    assert [image.objects for image in found] == [image.objects for image in written]
    assert [image.width_px for image in found] == [image.width_px for image in written]


def test_fractions_are_rounded_and_points_that_are_not_marked_left_out(tmp_path):
    found = AnnotatedObject("", (0.5, 1.4, 2.5, 3.4), ((1.5, 2.4), (math.nan, math.nan)))
    data = write_imglab([AnnotatedImage(tmp_path / "1.jpg", "1", None, None, (found,))])
    (tmp_path / "1.xml").write_bytes(data)
    (again,) = read_imglab(tmp_path / "1.xml")[0].objects
    assert again.box_xyxy_px == (1, 1, 3, 3)
    assert (again.landmark_names, again.landmarks_xy_px) == (("00",), ((2, 2),))


def test_real_faces_are_read_and_written_again(data_dir, tmp_path):
    for name, num_images, num_boxes in (("training", 4, 18), ("testing", 5, 25)):
        faces = read_imglab(data_dir / f"faces/{name}_with_face_landmarks.xml")
        assert len(faces) == num_images
        found = [found for image in faces for found in image.objects]
        assert [len(o.landmarks_xy_px) for o in found] == [68] * num_boxes
        assert all(image.path.exists() for image in faces)
        (tmp_path / "again.xml").write_bytes(write_imglab(faces))
        again = read_imglab(tmp_path / "again.xml")
        assert [image.objects for image in again] == [image.objects for image in faces]
        assert [image.path for image in again] == [image.path for image in faces]
