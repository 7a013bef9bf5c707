# SPDX-License-Identifier: Apache-2.0
"""Images made smaller keep what they show: their turn, their colours, their grey."""

from __future__ import annotations

import io

import numpy as np
import pytest

cv2 = pytest.importorskip("cv2")
Image = pytest.importorskip("PIL.Image")

from tests.images.making import (  # noqa: E402
    encoded,
    lossless_jpeg,
    many_forms,
    oriented,
    picture,
    saved,
)

from penstock.images import decode_image, read_header  # noqa: E402
from penstock.images.shrink import shrink_image  # noqa: E402

LARGE = picture(60, 90)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_smaller_image_shows_what_the_large_one_shows(form, orientation):
    data = oriented(form, orientation, LARGE)
    small = shrink_image(data, 30, 95)
    assert read_header(small).orientation == orientation
    assert (read_header(small).height_px, read_header(small).width_px) == (30, 45)
    shown, expected = decode_image(small), decode_image(data)
    expected = cv2.resize(expected, shown.shape[1::-1], interpolation=cv2.INTER_AREA)
    assert np.abs(shown.astype(int) - expected).mean() < 5


@pytest.mark.parametrize("name", sorted(many_forms()))
def test_every_form_can_be_made_smaller_and_stays_if_it_is_small(name):
    data = many_forms()[name]
    assert read_header(shrink_image(data, 12, None)).form == "jpeg"
    assert shrink_image(data, 24, None) == data


@pytest.mark.parametrize(
    "data",
    [
        saved(LARGE[:, :, 0].copy(), "JPEG"),
        saved(LARGE[:, :, 0].copy(), "PNG"),
        encoded(LARGE[:, :, 0].astype(np.uint16) * 257, ".png"),
        lossless_jpeg(LARGE[:, :, :1]),
    ],
    ids=["jpeg", "png", "16 bits", "lossless"],
)
def test_grey_stays_grey(data):
    small = shrink_image(data, 30, None)
    assert read_header(small).jpeg.num_components == 1
    with Image.open(io.BytesIO(small)) as image:
        grey = cv2.resize(LARGE[:, :, 0], image.size, interpolation=cv2.INTER_AREA)
        assert np.abs(np.asarray(image).astype(int) - grey).mean() < 3


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_colour_without_a_colour_keeps_three_channels(form):
    small = shrink_image(saved(np.repeat(LARGE[:, :, :1], 3, 2), form), 30, None)
    assert read_header(small).jpeg.num_components == 3


def test_what_is_too_long_for_a_jpeg_is_an_error():
    data = saved(np.zeros((20, 70_000), np.uint8), "PNG")
    with pytest.raises(ValueError, match="20 x 70000 px is more than a JPEG file can have"):
        shrink_image(data, None, 80)
