# SPDX-License-Identifier: Apache-2.0
"""Pixels and boxes are in one frame, whatever Exif says."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from tests.vision.annotation_files import is_red, one_image, painted, thing, write_photo

from penstock.images import decode_image
from penstock.vision.datasets.annotated import AnnotatedImages
from penstock.vision.datasets.rules import AnnotationRules, in_frame, size_of_file

UPRIGHT_HW = (64, 96)
BOX = (16, 8, 56, 24)  # left, top, right, bottom in the upright image
# How a file with this tag is turned to be seen: Exif 2.32, 4.6.4 A.
TURNS = {
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].transpose(1, 0, 2),
    8: lambda pixels: np.rot90(pixels, 1),
}
INVERSE = {6: 8, 8: 6}  # the others undo themselves


def stored(orientation, upright):
    return np.ascontiguousarray(TURNS[INVERSE.get(orientation, orientation)](upright))


def rectangle(pixels):
    """Give the box around what is red."""
    rows, columns = np.nonzero(is_red(pixels))
    return columns.min(), rows.min(), columns.max() + 1, rows.max() + 1


def read(photo, box, hw, orientation="auto"):
    rules = AnnotationRules(orientation=orientation)
    dataset = AnnotatedImages([one_image(photo, thing(box), size=hw)], rules=rules)
    return dataset[0]


@pytest.mark.filterwarnings("ignore:some photos are turned:UserWarning")
@pytest.mark.parametrize("suffix", [".png", ".jpg"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_rectangle_is_in_its_box_in_whichever_frame_it_was_annotated(
    tmp_path, orientation, suffix
):
    upright = painted(*UPRIGHT_HW, BOX)
    as_stored = stored(orientation, upright)
    np.testing.assert_array_equal(TURNS[orientation](as_stored), upright)
    photo = write_photo(tmp_path / f"1{suffix}", as_stored, orientation)
    is_turned = orientation >= 5
    for hw, pixels in ((UPRIGHT_HW, upright), (as_stored.shape[:2], as_stored)):
        if not is_turned and pixels is not upright:
            continue  # both frames have one size: it is the upright one, tested below
        sample = read(photo, rectangle(pixels), hw)
        assert sample["image"].shape == pixels.shape
        assert tuple(sample["boxes"][0]) == rectangle(sample["image"]) == rectangle(pixels)
        assert np.abs(sample["image"].astype(int) - pixels).max() < (30 if suffix == ".jpg" else 1)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_frame_that_is_asked_for_is_the_one_given(tmp_path, orientation):
    upright = painted(*UPRIGHT_HW, BOX)
    as_stored = stored(orientation, upright)
    photo = write_photo(tmp_path / "1.png", as_stored, orientation)
    for asked, pixels in (("upright", upright), ("stored", as_stored)):
        for hw in (None, UPRIGHT_HW, (999, 999)):  # the annotation's size is not looked at
            sample = read(photo, rectangle(pixels), hw, asked)
            np.testing.assert_array_equal(sample["image"], pixels)
            assert tuple(sample["boxes"][0]) == rectangle(pixels)
        assert size_of_file(str(photo), asked) == pixels.shape[:2]


def test_an_annotation_without_a_size_is_upright(tmp_path):
    upright = painted(*UPRIGHT_HW, BOX)
    photo = write_photo(tmp_path / "1.png", stored(6, upright), 6)
    sample = read(photo, BOX, None)
    np.testing.assert_array_equal(sample["image"], upright)


def test_a_square_image_is_upright(tmp_path):
    upright = painted(64, 64, BOX)
    photo = write_photo(tmp_path / "1.png", stored(6, upright), 6)
    with pytest.warns(UserWarning, match="size fits both the stored and the turned pixels"):
        sample = read(photo, BOX, (64, 64))
    np.testing.assert_array_equal(sample["image"], upright)


def test_boxes_are_cut_to_the_frame_that_they_are_in(tmp_path):
    photo = write_photo(tmp_path / "1.png", stored(6, painted(*UPRIGHT_HW)), 6)
    wide, high = (0, 0, 200, 10), (0, 0, 10, 200)
    assert read(photo, wide, None)["boxes"].tolist() == [[0, 0, 96, 10]]
    assert read(photo, wide, None, "stored")["boxes"].tolist() == [[0, 0, 64, 10]]
    assert read(photo, high, (96, 64))["boxes"].tolist() == [[0, 0, 10, 96]]


def test_a_size_that_is_neither_is_an_error_with_both(tmp_path):
    photo = write_photo(tmp_path / "1.jpg", stored(6, painted(*UPRIGHT_HW)), 6)
    dataset = AnnotatedImages([one_image(photo, thing(BOX), size=(48, 64), source="1.xml")])
    with pytest.raises(ValueError, match="48 x 64 px") as caught:
        dataset[0]
    assert str(caught.value) == (
        "the annotation is of an image of 48 x 64 px (height x width), and the file has 96 x 64 "
        "px, or 64 x 96 px when turned as its Exif says. It was replaced or resized since, or the "
        "annotation's size is wrong: correct one of them, or, if the boxes fit all the same, "
        "choose AnnotationRules(orientation='upright') or 'stored'"
    )
    assert f"while reading {photo}, annotated in 1.xml" in caught.value.__notes__


@pytest.mark.parametrize("form", ["TIFF", "AVIF"])
def test_a_form_whose_tag_cannot_be_taken_off_is_given_as_its_stored_pixels(tmp_path, form):
    as_stored = stored(6, painted(*UPRIGHT_HW, BOX))
    exif = Image.Exif()
    exif[0x0112] = 6
    photo = tmp_path / "1.any"
    Image.fromarray(as_stored).save(photo, form, exif=exif)
    sample = read(photo, rectangle(as_stored), as_stored.shape[:2])
    np.testing.assert_array_equal(
        sample["image"], decode_image(photo.read_bytes(), orientation="stored")
    )
    np.testing.assert_allclose(rectangle(sample["image"]), rectangle(as_stored), atol=1)
    assert in_frame(photo.read_bytes(), "upright", None) == photo.read_bytes()


UPSIDE_DOWN = (2, 3, 4)


def test_a_size_is_found_in_the_beginning_of_a_file(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (300, 400, 3), np.uint8)
    large = write_photo(tmp_path / "1.jpg", noise)
    assert large.stat().st_size > 128 << 10
    data = large.read_bytes()
    assert size_of_file(str(large), "upright") == (300, 400)
    segment = b"\xff\xe2" + (65_000).to_bytes(2, "big") + bytes(64_998)
    far = tmp_path / "2.jpg"  # three segments, 190 KiB, before the size
    far.write_bytes(data[:2] + 3 * segment + data[2:])
    assert size_of_file(str(far), "upright") == (300, 400)


@pytest.mark.parametrize("name", ["absent.jpg", "text.jpg", "empty.jpg", "folder"])
def test_a_file_that_cannot_be_read_has_no_size(tmp_path, name):
    (tmp_path / "text.jpg").write_text("not found")
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "folder").mkdir()
    assert size_of_file(str(tmp_path / name), "upright") is None
