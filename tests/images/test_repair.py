# SPDX-License-Identifier: Apache-2.0
"""Files cut off at every place: an error, or repaired with the rows that are there."""

from __future__ import annotations

import struct

import numpy as np
import pytest

cv2 = pytest.importorskip("cv2")
pytest.importorskip("PIL.Image")

from tests.images.making import many_forms, oriented, picture, saved, with_gain_map  # noqa: E402

from penstock.images import (  # noqa: E402
    decode_image,
    read_header,
    repair_image,
    without_orientation,
)
from penstock.images.decode import check_image  # noqa: E402

HEIGHT, WIDTH = 60, 80
NOISE = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
FORMS = many_forms()
CUTS = [percent / 100 for percent in range(5, 100, 5)]


@pytest.mark.parametrize("name", sorted(FORMS))
def test_no_form_cut_off_at_any_place_passes_for_whole(name):
    data = FORMS[name]
    for keep in CUTS:
        cut = data[: int(len(data) * keep)]
        try:
            pixels = decode_image(cut)
        except ValueError:
            continue
        # What lies behind its pixels may be missing: the second frame, or the list of contents.
        assert np.array_equal(pixels, decode_image(data)), f"{name} cut to {keep:.0%}"


@pytest.mark.parametrize("keep", CUTS)
def test_a_photo_cut_off_at_any_place_is_an_error_or_has_the_rows_that_are_there(keep):
    data = saved(NOISE, "JPEG")
    whole = decode_image(data)
    cut = data[: int(len(data) * keep)]
    with pytest.raises(ValueError, match=r"[Pp]remature|truncated"):
        decode_image(cut)
    with pytest.raises(ValueError, match=r"[Pp]remature|truncated"):
        check_image(cut)
    if len(cut) < read_header(data).jpeg.scan_offset:
        return  # nothing is there
    for pixels in (decode_image(cut, strict=False), decode_image(repair_image(cut), strict=False)):
        assert pixels.shape == whole.shape
        num_same = int((pixels == whole).all((1, 2)).argmin())
        assert abs(num_same - HEIGHT * keep) <= 26
        assert (pixels[num_same + 33 :] == 128).all()  # two rows of blocks further down


@pytest.mark.parametrize("name", sorted(FORMS))
def test_what_is_whole_needs_no_repair(name):
    assert repair_image(FORMS[name]) is None


@pytest.mark.parametrize(
    "data",
    [b"", saved(NOISE, "PNG")[:-50], saved(NOISE, "WEBP")[:-50], saved(NOISE, "JPEG")[:300]],
    ids=["nothing", "png", "webp", "jpeg without a scan"],
)
def test_what_cannot_be_repaired_is_left_alone(data):
    assert repair_image(data) is None


GAIN_MAP = saved(picture(30, 40), "JPEG")


@pytest.mark.parametrize("between", [b"", bytes(7), b"\xff\xff"], ids=["next", "zeros", "padding"])
@pytest.mark.parametrize(
    "primary",
    [
        saved(NOISE, "JPEG"),
        saved(NOISE, "JPEG", progressive=True),
        saved(NOISE, "JPEG", restart_marker_rows=1),
        oriented("JPEG", 6, NOISE),
    ],
    ids=["baseline", "progressive", "restarts", "turned"],
)
def test_a_whole_image_with_a_second_one_behind_it_stays_as_it_is(primary, between):
    """Ultra HDR: the gain map may be whole, or cut off at any place."""
    data = with_gain_map(primary, GAIN_MAP, between)
    expected = decode_image(primary)
    check_image(data)
    stored = decode_image(primary, orientation="stored")
    assert np.array_equal(decode_image(without_orientation(data)), stored)
    for cut in (data, data[:-2], data[: -len(GAIN_MAP) // 2], data[: -len(GAIN_MAP) + 3]):
        assert repair_image(cut) is None
        for strict in (True, False):
            assert np.array_equal(decode_image(cut, strict=strict), expected)


def test_the_end_of_a_second_image_is_not_taken_for_that_of_the_first():
    data = with_gain_map(saved(NOISE, "JPEG"), GAIN_MAP)
    first_bytes = len(data) - len(GAIN_MAP)
    cut = data[: first_bytes - 600]
    repaired = repair_image(cut + GAIN_MAP)
    assert repaired == cut + b"\xff\xd9" + GAIN_MAP
    assert np.array_equal(
        decode_image(repaired, strict=False), decode_image(repair_image(cut), strict=False)
    )


def test_a_jpeg_with_an_end_within_its_preview_is_repaired_all_the_same():
    preview = saved(picture(8, 8), "JPEG")
    data = saved(NOISE, "JPEG")
    block = b"\xff\xe1" + struct.pack(">H", len(preview) + 2) + preview
    cut = (data[:2] + block + data[2:])[:-500]
    assert repair_image(cut) == cut + b"\xff\xd9"
