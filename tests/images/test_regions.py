# SPDX-License-Identifier: Apache-2.0
"""`decode_region`: the same pixels as decoding the whole file, and no damage overlooked in them."""

from __future__ import annotations

import io

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from penstock.images import decode_image, read_header
from penstock.images import regions as regions_module
from penstock.images.regions import Region, decode_region, reduced, reduction

HEIGHT, WIDTH = 203, 310


def photo(height=HEIGHT, width=WIDTH):
    """An image with edges, gradients and noise."""
    rng = np.random.default_rng(3)
    rows, columns = np.mgrid[0:height, 0:width]
    image = np.stack([rows * 255 // height, columns * 255 // width, (rows ^ columns) % 256], -1)
    image[height // 3 : height // 2, width // 4 : width // 2] = (250, 20, 90)
    return np.clip(image + rng.integers(-20, 20, image.shape), 0, 255).astype(np.uint8)


def jpeg(subsampling="420", **options):
    file = io.BytesIO()
    number = {"444": 0, "422": 1, "420": 2}[subsampling]
    Image.fromarray(photo()).save(file, "JPEG", subsampling=number, quality=85, **options)
    return file.getvalue()


FILES = {
    "420": lambda: jpeg("420"),
    "422": lambda: jpeg("422"),
    "444": lambda: jpeg("444"),
    "440": lambda: simplejpeg.encode_jpeg(photo(), colorsubsampling="440"),
    "411": lambda: simplejpeg.encode_jpeg(photo(), colorsubsampling="411"),
    "grey": lambda: simplejpeg.encode_jpeg(photo()[:, :, :1].copy(), colorspace="GRAY"),
    "progressive": lambda: jpeg(progressive=True),
    "restarts": lambda: jpeg(restart_marker_rows=1),
    "optimised": lambda: jpeg(optimize=True),
}
PARTS = [
    Region(0, 0, 40, 50),
    Region(17, 33, 70, 101),
    Region(100, 200, 103, 110),
    Region(0, 0, 203, 310),
]


def whole(data, factor, *, fast):
    header = read_header(data)
    least = regions_module._least(header.height_px, header.width_px, factor)
    return simplejpeg.decode_jpeg(data, "RGB", fastupsample=fast, **least)


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("factor", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", list(FILES))
def test_a_part_has_exactly_the_pixels_of_the_whole(kind, factor, part):
    data = FILES[kind]()
    expected = whole(data, factor, fast=True)
    rows = slice(part.top // factor, -(-(part.top + part.height) // factor))
    columns = slice(part.left // factor, -(-(part.left + part.width) // factor))
    got = decode_region(data, read_header(data), part, factor)
    assert np.array_equal(got, expected[rows, columns])


@pytest.mark.parametrize("kind", list(FILES))
def test_with_smooth_colour_a_part_is_that_of_decode_image(kind):
    data = FILES[kind]()
    got = decode_region(data, read_header(data), Region(20, 10, 60, 70), fast=False)
    assert np.array_equal(got, decode_image(data)[20:80, 10:80])


def test_real_photos_decode_alike_in_parts(data_dir):
    for path in sorted((data_dir / "clothing" / "validation").glob("*/*.jpg"))[::8]:
        data = path.read_bytes()
        header = read_header(data)
        half = Region(0, 0, header.height_px // 2, header.width_px)
        got = decode_region(data, header, half)
        assert np.array_equal(got, whole(data, 1, fast=True)[: half.height]), path


def test_rows_below_the_part_are_not_decoded():
    data = jpeg()
    header = read_header(data)
    rows = regions_module._decode_rows(data, header, 48, 1, fast=True)
    assert rows is not None
    assert rows.shape == (48, WIDTH, 3)


def test_damage_within_the_part_is_an_error():
    data = bytearray(jpeg())
    start = read_header(data).jpeg.scan_offset
    data[start + 200 : start + 260] = b"\xff\xd9" * 30
    with pytest.raises(ValueError, match=r"(?i)premature|corrupt"):
        decode_region(bytes(data), read_header(data), Region(0, 0, 100, WIDTH))


@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9, 0.999])
def test_a_truncated_file_is_an_error_wherever_the_part_lies(kept):
    data = jpeg()
    cut = data[: int(len(data) * kept)]
    with pytest.raises(ValueError, match=r"(?i)premature end|truncated|ends"):
        decode_region(cut, read_header(cut), Region(0, 0, 16, 16))


def test_what_ends_early_can_be_decoded_when_asked():
    data = jpeg()
    cut = data[: len(data) // 2] + b"\xff\xd9"
    got = decode_region(cut, read_header(cut), Region(0, 0, 30, WIDTH), strict=False)
    assert np.abs(got.astype(int) - photo()[:30]).mean() < 20


def test_a_turned_image_is_cut_as_it_is_seen():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = jpeg(exif=exif)
    upright = decode_image(data)
    assert upright.shape == (WIDTH, HEIGHT, 3)
    got = decode_region(data, read_header(data), Region(30, 10, 200, 100))
    assert np.array_equal(got, upright[30:230, 10:110])


def test_other_forms_are_reduced_by_averaging():
    file = io.BytesIO()
    Image.fromarray(photo()).save(file, "PNG")
    data = file.getvalue()
    got = decode_region(data, read_header(data), Region(0, 0, 200, 300), 2)
    blocks = photo()[:200, :300].reshape(100, 2, 150, 2, 3).mean((1, 3))
    assert np.abs(got - blocks).max() <= 0.5


@pytest.mark.parametrize(
    ("height", "width", "expected"), [(223, 900, 1), (448, 448, 2), (895, 895, 2), (1792, 1792, 8)]
)
def test_a_part_is_never_reduced_below_what_is_needed(height, width, expected):
    assert reduction(Region(0, 0, height, width), 224, 224) == expected


def test_reducing_by_one_gives_a_view():
    image = photo()
    assert np.shares_memory(reduced(image, Region(1, 2, 3, 4), 1), image)
