# SPDX-License-Identifier: Apache-2.0
"""The header of a file: form, size, orientation, and what the markers of a JPEG say."""

from __future__ import annotations

import io
import struct

import pytest

pytest.importorskip("cv2")
Image = pytest.importorskip("PIL.Image")

from tests.images.making import (  # noqa: E402
    HEIGHT,
    WIDTH,
    many_forms,
    oriented,
    picture,
    png_file,
    saved,
    segment,
    with_frame,
)

from penstock.images import decode_image, read_header  # noqa: E402
from penstock.images.headers import ImageHeader  # noqa: E402

FORMS = many_forms()
FORM_OF = {"jpg": "jpeg", "tif": "tiff", "jp2": "jpeg2000"}


@pytest.mark.parametrize("name", sorted(FORMS))
def test_form_and_size_are_those_of_the_pixels(name):
    header = read_header(memoryview(FORMS[name]))
    suffix = name.partition(".")[2]
    assert header.form == FORM_OF.get(suffix, suffix)
    assert (header.height_px, header.width_px) == (HEIGHT, WIDTH)
    shape = decode_image(FORMS[name]).shape
    assert shape == (header.upright_height_px, header.upright_width_px, 3)
    assert (header.jpeg is not None) == (header.form == "jpeg")


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_is_read_and_the_size_is_that_of_the_stored_pixels(form, orientation):
    header = read_header(oriented(form, orientation))
    assert header.orientation == orientation
    assert (header.height_px, header.width_px) == (HEIGHT, WIDTH)
    is_turned = orientation >= 5
    assert header.upright_height_px == (WIDTH if is_turned else HEIGHT)


@pytest.mark.parametrize(
    ("name", "process", "components", "is_single"),
    [
        ("baseline.jpg", "baseline", 3, True),
        ("progressive.jpg", "progressive", 3, True),  # of its first scan, which is not all
        ("grey.jpg", "baseline", 1, True),
        ("cmyk.jpg", "baseline", 4, True),
        ("lossless.jpg", "lossless", 3, True),
    ],
)
def test_the_markers_of_a_jpeg_are_read(name, process, components, is_single):
    data = FORMS[name]
    jpeg = read_header(data).jpeg
    assert (jpeg.process, jpeg.precision_bits) == (process, 8)
    assert (jpeg.num_components, jpeg.is_single_scan) == (components, is_single)
    assert struct.unpack_from(">HH", data, jpeg.sof_offset + 1) == (HEIGHT, WIDTH)
    scan = data.find(b"\xff\xda")
    assert jpeg.scan_offset == scan + 2 + int.from_bytes(data[scan + 2 : scan + 4], "big")


def test_a_jpeg_with_a_scan_for_each_component_is_not_of_a_single_one():
    data = FORMS["444.jpg"]
    place = data.find(b"\xff\xda")
    first = segment(0xDA, bytes((1, 1, 0, 0, 63, 0)))
    assert read_header(data[:place] + first + data[place + 14 :]).jpeg.is_single_scan is False


def exif(orientation, order=">", kind=3, num=1):
    mark = {"<": b"II*\0", ">": b"MM\0*"}[order]
    value = {1: "BBBB", 3: "HH", 4: "I"}[kind]
    values = (orientation, *[0] * (len(value) - 1))
    entry = struct.pack(order + "HHI" + value, 0x0112, kind, num, *values)
    return b"Exif\0\0" + mark + struct.pack(order + "IH", 8, 1) + entry + b"\0\0\0\0"


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", [1, 3, 4])
def test_the_orientation_is_read_in_both_orders_of_bytes_and_any_width(order, kind):
    data = FORMS["baseline.jpg"]
    block = segment(0xE1, exif(6, order, kind))
    assert read_header(data[:2] + block + data[2:]).orientation == 6


@pytest.mark.parametrize(
    "block",
    [exif(0), exif(9), exif(6, num=0), exif(6)[:20], exif(6)[:8], b"Exif\0\0", b"Exif\0\0MM\0*"],
    ids=["0", "9", "none of it", "a part of the tag", "a part of the mark", "nothing", "the mark"],
)
def test_a_damaged_orientation_is_none(block):
    data = FORMS["baseline.jpg"]
    assert read_header(data[:2] + segment(0xE1, block) + data[2:]).orientation == 1


def test_of_two_blocks_of_exif_the_first_that_has_an_orientation_counts():
    data = FORMS["baseline.jpg"]
    blocks = [segment(0xE1, block) for block in (b"http://ns.adobe.com/", exif(1), exif(6))]
    assert read_header(data[:2] + b"".join(blocks) + data[2:]).orientation == 1
    assert read_header(data[:2] + b"".join(blocks[::2]) + data[2:]).orientation == 6


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "the file is empty"),
        (b"\xff\xd8\xff", "ends within its header, after 3 bytes: truncated"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF", "ends within its header"),
        (b"\xff\xd8\xff\xd9\0\0\0\0", "ends before its image data"),
        (b"\xff\xd8\xff\xe0\0\0\0\0\0", "damaged at byte 2: a segment without a size"),
        (b"\xff\xd8" + segment(0xDA, b"\1\1\0\0\x3f\0") + b"12", "nothing before them gives"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0", "ends within its header"),
        (b"\x89PNG\r\n\x1a\n" + bytes(30), "does not begin with its header"),
        (png_file(0, 5, b""), "5 x 0 px (height x width): no pixels"),
        (b"RIFF\0\0\0\0WEBPJUNK\0\0\0\0", "no known kind of image"),
        (b"GIF89a\1", "buffer"),
        (b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(8), "Invalid header length"),
        (b"<!DOCTYPE html><html>404", "text, not an image: it begins with '<!DOCTYPE"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (bytes(range(200, 255)) * 3, "no known kind of image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "text, not an image"),
    ],
)
def test_what_is_no_image_is_an_error_that_says_what_it_is(data, said):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its words follow
        read_header(data)
    assert said in str(caught.value)


def test_a_header_needs_no_more_than_itself():
    for name in ("baseline.jpg", "rgb.png", "flat.gif", "rgb.bmp", "rgb.jp2"):
        data = FORMS[name]
        stop = read_header(data).jpeg.scan_offset if name.endswith("jpg") else 900
        assert read_header(data[:stop]).width_px == WIDTH


def test_the_limit_is_on_the_product_and_can_be_moved():
    data = FORMS["rgb.png"]
    assert read_header(data, max_pixels=HEIGHT * WIDTH) == ImageHeader("png", HEIGHT, WIDTH)
    with pytest.raises(ValueError, match=r"24 x 36 px \(height x width\) is more than 863 pixels"):
        read_header(data, max_pixels=HEIGHT * WIDTH - 1)
    huge = with_frame(FORMS["baseline.jpg"], height=65535, width=65535)
    assert read_header(huge, max_pixels=None).width_px == 65535


def test_pillows_own_limit_is_in_the_way_of_tiff_only(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for name in ("rgb.bmp", "flat.gif", "rgb.ppm", "rgb.avif"):
        assert decode_image(FORMS[name]).shape == (HEIGHT, WIDTH, 3)
    with pytest.raises(ValueError, match="exceeds limit of 200 pixels"):
        decode_image(FORMS["raw.tif"])


def test_a_frame_larger_than_the_screen_of_a_gif_counts():
    data = bytearray(saved(picture(), "GIF"))
    struct.pack_into("<HH", data, 6, 3, 2)
    assert (read_header(data).height_px, read_header(data).width_px) == (HEIGHT, WIDTH)
    with Image.open(io.BytesIO(data)) as image:
        assert image.size == (WIDTH, HEIGHT)
    assert decode_image(data).shape == (HEIGHT, WIDTH, 3)
