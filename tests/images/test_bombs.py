# SPDX-License-Identifier: Apache-2.0
"""Small files that stand for huge images, or for endless work, are refused before they cost."""

from __future__ import annotations

import struct
import time
import zlib

import numpy as np
import pytest
from tests.support.processes import python

pytest.importorskip("cv2")
pytest.importorskip("PIL.Image")

from tests.images.making import (
    HEIGHT,
    WIDTH,
    frame,
    many_forms,
    png_chunk,
    png_file,
    saved,
    segment,
    with_frame,
)

from penstock.images import decode_image, read_header

FORMS = many_forms()


def jpeg2000_of(height, width, claimed=(24, 36)):
    """A file whose box says one size and whose codestream says another."""
    data = bytearray(FORMS["rgb.jp2"])
    struct.pack_into(">II", data, data.find(b"ihdr") + 4, *claimed)
    struct.pack_into(">II", data, data.find(b"\xff\x4f\xff\x51") + 8, width, height)
    return bytes(data)


def patched(name, place, form, *numbers):
    data = bytearray(FORMS[name])
    struct.pack_into(form, data, place, *numbers)
    return bytes(data)


def gif_of(height, width):
    return patched("flat.gif", 6, "<HH", width, height)


def gif_with_frame(name, top, left, height, width):
    place = FORMS[name].find(struct.pack("<cHHHH", b",", 0, 0, WIDTH, HEIGHT))
    return patched(name, place + 1, "<HHHH", left, top, width, height)


def webp_of(height, width):
    data = bytearray(FORMS["alpha.webp"])
    assert data[12:16] == b"VP8X"
    data[24:30] = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return bytes(data)


def bmp_of(height, width):
    return patched("rgb.bmp", 18, "<II", width, height)


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


def jpeg2000_of_few_bytes(height, width):
    """A codestream that claims to be a single tile, of which hardly a byte is there."""
    data = bytearray(saved(np.zeros((64, 64, 3), np.uint8), "JPEG2000", no_jp2=True))
    struct.pack_into(">IIIIIIII", data, 8, width, height, 0, 0, width, height, 0, 0)
    return bytes(data)


def tiled_tiff(height, width, *tiles, big=False):
    """A TIFF file of one Deflate tile; `tiles` are pairs of length and width, all of them written.

    The tile has the bytes for the first pair if that is small.
    """
    length, across = tiles[0]
    raw = b"".join(bytes((row % 256, 7, 9)) * across for row in range(min(length, 4096)))
    content = zlib.compress(raw[: 1 << 20] if length > 4096 else raw)
    start, offset, number = (16, "Q", 16) if big else (8, "I", 4)
    sides = [
        (tag, number, side) for pair in tiles for tag, side in zip((323, 322), pair, strict=True)
    ]
    tags = [
        (256, 4, width), (257, 4, height), (258, 3, 8), (259, 3, 8), (262, 3, 2), (277, 3, 3),
        *sorted(sides), (324, 4, start), (325, 4, len(content)),
    ]  # fmt: skip
    head = struct.pack("<2sHHHQ", b"II", 43, 8, 0, 0) if big else b"II*\0" + bytes(4)
    data = bytearray(head + content + bytes(len(content) % 2))
    struct.pack_into("<" + offset, data, start // 2, len(data))
    data += struct.pack("<" + ("Q" if big else "H"), len(tags))
    for tag, kind, value in tags:
        data += struct.pack(f"<HH{offset}{offset}", tag, kind, 1, value)
    return bytes(data) + bytes(8)


HUGE = {
    "jpeg": with_frame(FORMS["baseline.jpg"], height=65535, width=65535),
    "progressive": with_frame(FORMS["progressive.jpg"], height=65535, width=65535),
    "png": png_file(200_000, 200_000, b""),
    "largest png": png_file(2**32 - 1, 2**32 - 1, b""),
    "gif": gif_of(65535, 65535),
    "gif by its frame": gif_with_frame("flat.gif", 0, 0, 65535, 65535),
    "webp": webp_of(16383, 16383),
    "bmp": bmp_of(100_000, 100_000),
    "tiff": tiff_of(100_000, 100_000),
    "ppm": b"P6 100000 100000 255\n",
}


@pytest.mark.parametrize("name", sorted(HUGE))
def test_a_huge_image_of_any_form_is_refused(name):
    for strict in (True, False):
        # The last is what Pillow 11 and 12 say of WebP.
        with pytest.raises(ValueError, match=r"100,000,000 pixels|exceeds limit|create decoder"):
            decode_image(HUGE[name], strict=strict)


TEXT = zlib.compress(bytes(50_000_000), 9)
COSTLY = {
    # Within the limit of pixels, and without the data for them.
    "jpeg without data": with_frame(FORMS["baseline.jpg"], height=9000, width=11000),
    # libjpeg-turbo refuses a second size; Pillow, which walks over the markers first, takes it.
    "two sizes": b"\xff\xd8" + frame(8, 8, 4) + frame(65500, 65500, 4) + b"\xff\xda\0\2\xff\xd9",
    "png without data": png_file(11000, 9000, bytes(1000)),
    "tiff without data": tiff_of(9000, 11000),
    "bmp without data": bmp_of(9000, 11000),
    "ppm without data": b"P6 11000 9000 255\n123",
    "jp2 of few bytes": jpeg2000_of_few_bytes(9000, 11000),
    "jp2 of few bytes, other box": jpeg2000_of(24, 36, claimed=(9000, 11000)),
    "jp2 of another size within": jpeg2000_of(60_000, 60_000),
    "tiff of a huge tile": tiled_tiff(1, 1, (26_000, 26_000)),
    "tiff of a huge tile, said twice": tiled_tiff(1, 1, (26_000, 26_000), (16, 16)),
    "big tiff of a huge tile": tiled_tiff(1, 1, (26_000, 26_000), big=True),
    "gif of a small picture on a huge screen": gif_of(9000, 11000),
    "gif of a picture far out": gif_with_frame("transparent.gif", 8970, 10960, HEIGHT, WIDTH),
    # Text and a profile that unpack to 50 MB each, many times.
    "png with text": png_file(1, 1, b"\0abc", before=png_chunk(b"zTXt", b"k\0\0" + TEXT) * 20),
    "png with profile": png_file(1, 1, b"\0abc", before=png_chunk(b"iCCP", b"k\0\0" + TEXT)),
}


@pytest.mark.parametrize("name", sorted(COSTLY))
def test_what_does_not_decode_to_many_pixels_takes_no_memory_for_them(name, tmp_path, preamble):
    """In a process of its own: its peak is looked at."""
    path = tmp_path / "file"
    path.write_bytes(COSTLY[name])
    script = preamble + (
        "import sys\n"
        "from penstock.images.decode import check_image, decode_image\n"
        "from tests.images.making import many_forms\n"
        "from tests.images.mutate import peak_bytes\n"
        "for data in many_forms().values(): decode_image(data)\n"
        "data = open(sys.argv[1], 'rb').read()\n"
        "before = peak_bytes()\n"
        "for decode in (decode_image, check_image):\n"
        "    try: decode(data)\n"
        "    except ValueError: pass\n"
        "print(peak_bytes() - before)"
    )
    assert int(python("-c", script, path).stdout) < 40_000_000  # 9000 x 11000 px would take 297 MB


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("tiles", [[(26_000, 26_000)], [(8192, 2064)], [(1 << 31, 16)]])
def test_a_tile_far_larger_than_its_image_is_refused(tiles, big):
    with pytest.raises(ValueError, match=r"a TIFF file with tiles of \d+ x \d+ px .* 6 pixels"):
        decode_image(tiled_tiff(2, 3, *tiles, big=big))


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("tile", [(16, 16), (256, 512), (4096, 4096)])
def test_a_small_image_in_a_usual_tile_decodes(tile, big):
    image = decode_image(tiled_tiff(2, 3, tile, big=big))
    assert image.tolist() == [[[0, 7, 9]] * 3, [[1, 7, 9]] * 3]


def test_a_large_jpeg_2000_of_hardly_a_byte_is_refused_and_a_small_one_of_one_colour_is_not():
    with pytest.raises(ValueError, match=r"a JPEG2000 file of \d+ bytes for 9999 x 9999 px"):
        decode_image(jpeg2000_of_few_bytes(9999, 9999))
    data = saved(np.full((1600, 1600), 128, np.uint8), "JPEG2000")
    assert decode_image(data).shape == (1600, 1600, 3)


def test_a_large_gif_of_hardly_a_byte_is_refused_and_one_of_one_colour_is_not():
    with pytest.raises(ValueError, match=r"a GIF file of \d+ bytes for 9999 x 9999 px"):
        decode_image(gif_of(9999, 9999))
    assert decode_image(gif_of(4096, 4096)).shape == (4096, 4096, 3)
    data = saved(np.full((4200, 4200), 128, np.uint8), "GIF")
    assert decode_image(data).shape == (4200, 4200, 3)


def test_junk_before_a_jpegs_first_segment_costs_no_more_than_its_size():
    """8 MB took 4 s where each two bytes were searched in a copy of 4096."""
    data = FORMS["baseline.jpg"]
    junk = data[:2] + b"\xff\0" * 4_000_000 + data[2:]
    before = time.process_time()
    assert read_header(junk).width_px == WIDTH
    assert time.process_time() - before < 1.5


def test_a_jpeg_of_too_many_scans_is_refused():
    data = FORMS["progressive.jpg"]
    last = data.rfind(b"\xff\xda")
    repeated = data[:last] + data[last:-2] * 120 + data[-2:]
    with pytest.raises(ValueError, match=r"a JPEG file of 1\d\d scans; at most 100"):
        decode_image(repeated)


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
