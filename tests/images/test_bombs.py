# SPDX-License-Identifier: Apache-2.0
"""Small files that stand for huge images, or for endless work, are refused before they cost."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest

pytest.importorskip("simplejpeg")
pytest.importorskip("cv2")
pytest.importorskip("PIL.Image")

from tests.images.making import (
    HEIGHT,
    WIDTH,
    many_forms,
    picture,
    png_chunk,
    png_file,
    saved,
    segment,
    with_frame,
)

from penstock.images import decode_image, repair_image

FORMS = many_forms()


def jpeg2000_of(height, width, claimed=(24, 36)):
    """A file whose box says one size and whose codestream says another."""
    data = bytearray(FORMS["rgb.jp2"])
    struct.pack_into(">II", data, data.find(b"ihdr") + 4, *claimed)
    struct.pack_into(">II", data, data.find(b"\xff\x4f\xff\x51") + 8, width, height)
    return bytes(data)


def gif_of(height, width):
    data = bytearray(FORMS["flat.gif"])
    struct.pack_into("<HH", data, 6, width, height)
    return bytes(data)


def gif_with_frame_of(height, width):
    data = bytearray(FORMS["flat.gif"])
    place = data.find(struct.pack("<cHHHH", b",", 0, 0, WIDTH, HEIGHT))
    struct.pack_into("<HH", data, place + 5, width, height)
    return bytes(data)


def webp_of(height, width):
    data = bytearray(FORMS["alpha.webp"])
    assert data[12:16] == b"VP8X"
    data[24:30] = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return bytes(data)


def bmp_of(height, width):
    data = bytearray(FORMS["rgb.bmp"])
    struct.pack_into("<II", data, 18, width, height)
    return bytes(data)


def tiff_of(height, width):
    data = bytearray(FORMS["raw.tif"])
    for tag, value in ((256, width), (257, height)):
        struct.pack_into("<HHII", data, _entry(data, tag), tag, 4, 1, value)
    return bytes(data)


def _entry(data, tag):
    (place,) = struct.unpack_from("<I", data, 4)
    (num,) = struct.unpack_from("<H", data, place)
    entries = range(place + 2, place + 2 + 12 * num, 12)
    return next(at for at in entries if struct.unpack_from("<H", data, at)[0] == tag)


HUGE = {
    "jpeg": with_frame(FORMS["baseline.jpg"], height=65535, width=65535),
    "progressive": with_frame(FORMS["progressive.jpg"], height=65535, width=65535),
    "png": png_file(200_000, 200_000, b""),
    "largest png": png_file(2**32 - 1, 2**32 - 1, b""),
    "gif": gif_of(65535, 65535),
    "gif by its frame": gif_with_frame_of(65535, 65535),
    "webp": webp_of(16383, 16383),
    "bmp": bmp_of(100_000, 100_000),
    "tiff": tiff_of(100_000, 100_000),
    "ppm": b"P6 100000 100000 255\n",
    "jp2": jpeg2000_of(60_000, 60_000),
}


@pytest.mark.parametrize("name", sorted(HUGE))
def test_a_huge_image_of_any_form_is_refused(name):
    for strict in (True, False):
        with pytest.raises(ValueError, match="is more than 100,000,000 pixels"):
            decode_image(HUGE[name], strict=strict)


TEXT = zlib.compress(bytes(50_000_000), 9)
COSTLY = {
    # Within the limit of pixels, and without the data for them.
    "jpeg without data": with_frame(FORMS["baseline.jpg"], height=9000, width=11000),
    "png without data": png_file(11000, 9000, bytes(1000)),
    "tiff without data": tiff_of(9000, 11000),
    "bmp without data": bmp_of(9000, 11000),
    "ppm without data": b"P6 11000 9000 255\n123",
    # Text and a profile that unpack to 50 MB each, many times.
    "png with text": png_file(1, 1, b"\0abc", before=png_chunk(b"zTXt", b"k\0\0" + TEXT) * 20),
    "png with profile": png_file(1, 1, b"\0abc", before=png_chunk(b"iCCP", b"k\0\0" + TEXT)),
}


@pytest.mark.parametrize("name", sorted(COSTLY))
def test_what_does_not_decode_to_many_pixels_takes_no_memory_for_them(name, tmp_path):
    """In a process of its own: its peak is looked at."""
    path = tmp_path / "file"
    path.write_bytes(COSTLY[name])
    script = (
        "import resource, sys\n"
        "from penstock.images import decode_image\n"
        "from tests.images.making import many_forms\n"
        "for data in many_forms().values(): decode_image(data)\n"
        "data = open(sys.argv[1], 'rb').read()\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "try: decode_image(data)\n"
        "except ValueError: pass\n"
        "print(peak() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, os.fspath(path)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert int(done.stdout) * 1024 < 40_000_000  # 9000 x 11000 px would take 297 MB


def test_a_jpeg_of_too_many_scans_is_refused():
    data = FORMS["progressive.jpg"]
    last = data.rfind(b"\xff\xda")
    repeated = data[:last] + data[last:-2] * 120 + data[-2:]
    with pytest.raises(ValueError, match=r"a JPEG file of 1\d\d scans, more than 100"):
        decode_image(repeated)


def test_an_end_of_png_data_is_not_an_end_of_memory():
    """Only so much is unpacked as the header has pixels."""
    data = png_file(10, 10, bytes(30_000_000))
    assert repair_image(data) is None
    cut = data[:-30]
    whole = repair_image(cut)
    assert len(whole) < 1000
    assert decode_image(whole).shape == (10, 10, 3)


def test_a_png_with_more_pixels_than_allowed_is_not_repaired():
    data = saved(picture(), "PNG")[:-20]
    assert repair_image(data, max_pixels=100) is None
    assert repair_image(data, max_pixels=1000) is not None


def test_a_huge_segment_or_chunk_that_is_not_there_is_passed_over():
    data = FORMS["baseline.jpg"]
    with pytest.raises(ValueError, match="ends within its header"):
        decode_image(data[:2] + b"\xff\xe1\xff\xff" + data[2:4])
    chunk = struct.pack(">I", 2**31 - 1) + b"IDAT"
    with pytest.raises(ValueError, match="truncated: its chunk IDAT"):
        decode_image(FORMS["rgb.png"][:33] + chunk)


def test_thousands_of_empty_segments_cost_little():
    data = FORMS["baseline.jpg"]
    assert decode_image(data[:2] + segment(0xE5, b"") * 20_000 + data[2:]).shape[2] == 3


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "WEBP"])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_large_image_of_one_colour_has_bytes_enough(form, progressive):
    """The least that a whole file can have for its pixels."""
    if progressive and form != "JPEG":
        pytest.skip("only JPEG has it")
    how = {"progressive": progressive, "optimize": True, "quality": 1} if form == "JPEG" else {}
    for height, width in ((1600, 1600), (1601, 1), (1, 1609)):
        data = saved(np.zeros((height, width), np.uint8), form, **how)
        assert decode_image(data).shape == (height, width, 3)


def test_of_many_frames_only_the_first_is_decoded():
    frame = FORMS["flat.gif"]
    place = frame.find(struct.pack("<cHHHH", b",", 0, 0, WIDTH, HEIGHT))
    assert frame[-1:] == b";"
    many = frame[:-1] + frame[place:-1] * 5000 + b"\x2c\xff"  # and the last is damaged
    assert np.array_equal(decode_image(many), decode_image(frame))
