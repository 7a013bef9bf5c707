# SPDX-License-Identifier: Apache-2.0
"""The orientation is taken out of a file without a change to its pixels or anything else."""

from __future__ import annotations

import io

import numpy as np
import pytest

pytest.importorskip("cv2")
Image = pytest.importorskip("PIL.Image")

from tests.images.making import many_forms, oriented, picture, saved, segment  # noqa: E402

from penstock.images import decode_image, read_header, without_orientation  # noqa: E402
from penstock.images.decode import check_image  # noqa: E402

FORMS = many_forms()


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_file_without_its_orientation_shows_the_stored_pixels(form, orientation):
    data = oriented(form, orientation)
    plain = without_orientation(data)
    assert read_header(plain).orientation == 1
    assert np.array_equal(decode_image(plain), decode_image(data, orientation="stored"))
    assert check_image(plain) == check_image(data)
    with Image.open(io.BytesIO(plain)) as image:
        assert image.getexif()[0x0112] == 1


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_only_the_orientation_is_changed(form):
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 8, "a maker of cameras"
    data = saved(picture(), form, exif=exif)
    plain = without_orientation(memoryview(data))
    assert len(plain) == len(data)
    num_changed = sum(one != other for one, other in zip(data, plain, strict=True))
    assert 1 <= num_changed <= (5 if form == "PNG" else 1)  # and PNG's checksum
    with Image.open(io.BytesIO(plain)) as image:
        assert image.getexif()[0x010F] == "a maker of cameras"


def test_every_block_of_exif_of_a_jpeg_loses_it():
    data = oriented("JPEG", 6)
    start = data.find(b"Exif")
    block = segment(0xE1, data[start : start - 2 + int.from_bytes(data[start - 2 : start], "big")])
    plain = without_orientation(data[:2] + block + data[2:])
    assert plain.count(b"Exif\0\0") == 2
    assert read_header(plain).orientation == 1
    assert read_header(data[:2] + plain[2 + len(block) :]).orientation == 1


@pytest.mark.parametrize("name", sorted(set(FORMS) - {"turned.jpg", "turned.png", "turned.webp"}))
def test_a_file_that_has_none_stays_as_it_is(name):
    assert without_orientation(FORMS[name]) == FORMS[name]


def test_a_jpeg_that_is_cut_off_in_its_header_is_an_error():
    with pytest.raises(ValueError, match="ends within its header"):
        without_orientation(oriented("JPEG", 6)[:60])


def test_a_png_that_is_cut_off_in_its_exif_stays_readable_up_to_there():
    data = oriented("PNG", 6)
    cut = data[: data.find(b"eXIf") + 34]
    assert len(without_orientation(cut)) == len(cut)
