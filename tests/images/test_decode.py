# SPDX-License-Identifier: Apache-2.0
"""One rule for every form of image: what `decode_image` gives, compared with Pillow or OpenCV."""

from __future__ import annotations

import io

import numpy as np
import pytest
from tests.support.processes import python

cv2 = pytest.importorskip("cv2")
Image = pytest.importorskip("PIL.Image")
ImageOps = pytest.importorskip("PIL.ImageOps")

from tests.images.making import (  # noqa: E402
    HEIGHT,
    WIDTH,
    encoded,
    interlaced_png,
    lossless_jpeg,
    many_forms,
    mask,
    oriented,
    picture,
    png_chunk,
    png_file,
    saved,
    segment,
    with_frame,
)
from tests.images.mutate import cut_to_fit  # noqa: E402

from penstock.errors import ConfigError  # noqa: E402
from penstock.images import (  # noqa: E402
    decode_image,
    read_header,
    repair_image,
    without_orientation,
)
from penstock.images.decode import check_image  # noqa: E402
from penstock.images.shrink import shrink_image  # noqa: E402

RGB = picture()
RGBA = np.dstack([RGB, mask()])
GREY = RGB[:, :, 0].copy()
FORMS = many_forms()


def by_pillow(data):
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        image.info.pop("transparency", None)
        return np.asarray(image.convert("RGB"))


def mean_difference(one, other):
    assert one.shape == other.shape
    return float(np.abs(one.astype(int) - other).mean())


@pytest.mark.parametrize("name", sorted(FORMS))
def test_every_form_gives_rgb_in_memory_of_its_own(name):
    pixels = decode_image(memoryview(FORMS[name]))
    assert pixels.dtype == np.uint8
    assert sorted(pixels.shape) == [3, HEIGHT, WIDTH]
    assert pixels.shape[2] == 3
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    pixels[:] = 7
    assert mean_difference(decode_image(FORMS[name]), pixels) > 5


@pytest.mark.parametrize("name", sorted(FORMS))
def test_views_of_signed_bytes_as_arrow_lends_them_are_read_alike(name):
    data = FORMS[name]
    view = memoryview(data).cast("b")
    assert np.array_equal(decode_image(view), decode_image(data))
    assert read_header(view) == read_header(data)
    assert check_image(view) == check_image(data)
    assert without_orientation(view) == without_orientation(data)
    assert repair_image(view[:-60]) == repair_image(data[:-60])
    assert shrink_image(view, 12, None) == shrink_image(data, 12, None)


@pytest.mark.parametrize("name", sorted(set(FORMS) - {"deep.ppm", "deflate.tif", "lossless.jpg"}))
def test_every_form_is_as_pillow_has_it(name):
    stored = decode_image(FORMS[name], orientation="stored")
    assert mean_difference(stored, by_pillow(FORMS[name])) <= (0.5 if "cmyk" in name else 0.01)


@pytest.mark.parametrize(
    "data",
    [
        saved(RGBA, "PNG"),
        saved(RGBA, "TIFF"),
        saved(RGBA, "TIFF", compression="tiff_lzw"),
        saved(RGBA, "WEBP", lossless=True, exact=True),
        saved(RGBA, "BMP"),
        saved(RGBA, "JPEG2000"),
    ],
    ids=["png", "tiff", "lzw", "webp", "bmp", "jp2"],
)
def test_alpha_is_dropped_and_the_colours_of_transparent_pixels_stay(data):
    assert np.array_equal(decode_image(data), RGB)


@pytest.mark.parametrize("form", ["PNG", "GIF"])
def test_a_transparent_colour_of_a_palette_stays(form):
    image = Image.fromarray(RGB).quantize(32)
    data = saved(image, form, transparency=int(np.asarray(image)[3, 4]))
    assert np.array_equal(decode_image(data), np.asarray(image.convert("RGB")))


def test_a_transparent_colour_of_an_rgb_png_stays():
    colour = b"".join(bytes((0, value)) for value in RGB[2, 3].tolist())
    raw = b"".join(b"\0" + row.tobytes() for row in RGB)
    data = png_file(WIDTH, HEIGHT, raw, before=png_chunk(b"tRNS", colour))
    assert np.array_equal(decode_image(data), RGB)


@pytest.mark.parametrize("form", ["PNG", "TIFF", "GIF", "BMP", "PPM", "JPEG2000"])
def test_grey_has_three_equal_channels(form):
    assert np.array_equal(decode_image(saved(GREY, form)), np.dstack([GREY] * 3))


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_grey_with_alpha_is_grey(form):
    both = Image.merge("LA", (Image.fromarray(GREY), Image.fromarray(mask())))
    assert np.array_equal(decode_image(saved(both, form)), np.dstack([GREY] * 3))


@pytest.mark.parametrize("form", ["PNG", "TIFF", "BMP", "PPM"])
def test_one_bit_is_black_or_white(form):
    image = Image.fromarray(GREY).convert("1")
    assert np.array_equal(decode_image(saved(image, form)), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("suffix", [".png", ".tiff"])
@pytest.mark.parametrize("channels", ["grey", "rgb", "rgba"])
def test_16_bits_give_their_high_byte_in_every_form(suffix, channels):
    low = np.random.default_rng(1).integers(0, 256, RGBA.shape)
    deep = (RGBA.astype(np.uint16) << 8) | low.astype(np.uint16)
    deep = {"grey": deep[:, :, 0], "rgb": deep[:, :, :3], "rgba": deep}[channels]
    data = encoded(np.ascontiguousarray(deep), suffix)
    expected = np.dstack([GREY] * 3) if channels == "grey" else RGB
    assert np.array_equal(decode_image(data), expected)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"P2 2 1 65535 65535 256", [255, 1]),
        (b"P2 2 1 15 15 3", [255, 51]),
        (b"P5 2 1 15 \x0f\x03", [255, 51]),
        (b"P5 # a remark\n2 1\n# another\n65535\n\xff\xff\x01\x00", [255, 1]),
        (b"P5 2 1 1023 \x03\xff\x02\x00", [255, 128]),
        (b"P1 2 1 1 0", [0, 255]),
    ],
)
def test_pnm_is_scaled_by_its_largest_value(data, expected):
    assert decode_image(data)[0, :, 1].tolist() == expected


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_32_bits_are_refused(dtype):
    with pytest.raises(ValueError, match=r"of [FI] pixels \(32 bits\) has no meaning"):
        decode_image(saved(GREY.astype(dtype), "TIFF"))


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg_is_as_pillow_decodes_it(subsampling, progressive):
    data = saved(RGB, "JPEG", subsampling=subsampling, progressive=progressive, quality=95)
    assert mean_difference(decode_image(data), by_pillow(data)) < 0.5
    assert mean_difference(decode_image(data), RGB) < 4


def test_inverted_cmyk_of_adobe_is_as_pillow_decodes_it():
    data = saved(Image.fromarray(RGB).convert("CMYK"), "JPEG", quality=95)
    assert b"Adobe" in data
    assert mean_difference(decode_image(data), by_pillow(data)) < 0.6
    assert mean_difference(decode_image(data), RGB) < 4


def test_cmyk_tiff_is_as_pillow_decodes_it():
    data = saved(Image.fromarray(RGB).convert("CMYK"), "TIFF")
    assert np.array_equal(decode_image(data), RGB)


@pytest.mark.parametrize("sampling", [(0x22, 0x12, 0x11), (0x31, 0x11, 0x11)])
def test_jpeg_of_rare_sampling_is_decoded(sampling):
    data = saved(np.full((64, 64, 3), 90, np.uint8), "JPEG", subsampling=0)
    data = with_frame(data, height=8, width=8, sampling=sampling)  # enough blocks for any of these
    data = cut_to_fit(data)
    assert mean_difference(decode_image(data), by_pillow(data)) < 0.5


def test_lossless_jpeg_is_exact():
    assert np.array_equal(decode_image(lossless_jpeg(RGB)), RGB)
    assert np.array_equal(decode_image(lossless_jpeg(RGB[:, :, :1])), np.dstack([GREY] * 3))


def test_lossless_jpeg_in_luminance_and_colour_is_an_error():
    with pytest.raises(ValueError, match=r"Unsupported color conversion|OpenCV cannot decode the"):
        decode_image(lossless_jpeg(RGB, adobe=1))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": 12}, "of 12 bits per sample: the libraries here decode 8"),
        ({"marker": 0xC5}, "of the kind .*hierarchical.*JPEG-LS"),
        ({"marker": 0xF7}, "of the kind .*hierarchical.*JPEG-LS"),
        ({"marker": 0xCB}, "of the kind .*hierarchical.*JPEG-LS"),
    ],
)
def test_a_jpeg_that_nothing_decodes_is_named(changes, said):
    with pytest.raises(ValueError, match=said):
        decode_image(with_frame(FORMS["baseline.jpg"], **changes))


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "TIFF", "AVIF"])
def test_of_several_frames_the_first_is_given(form):
    how = {"lossless": True} if form == "WEBP" else {}
    data = saved(RGB, form, save_all=True, append_images=[Image.fromarray(255 - RGB)], **how)
    allowed = {"GIF": 12, "AVIF": 4}.get(form, 0)
    assert mean_difference(decode_image(data), RGB) <= allowed


def test_an_interlaced_png_is_decoded():
    assert np.array_equal(decode_image(interlaced_png(RGB)), RGB)


def test_a_premultiplied_tiff_gives_the_colours_before():
    alpha = np.full((HEIGHT, WIDTH), 200, np.uint8)
    product = (RGB.astype(np.uint16) * 200 + 127) // 255
    data = saved(np.dstack([product.astype(np.uint8), alpha]), "TIFF")
    other_alpha = bytes.fromhex("5201 0300 01000000 0200")  # the tag ExtraSamples, little endian
    assert data.count(other_alpha) == 1
    data = data.replace(other_alpha, bytes.fromhex("5201 0300 01000000 0100"))
    assert mean_difference(decode_image(data), RGB) < 1


TURNS = {
    2: lambda p: p[:, ::-1],
    3: lambda p: p[::-1, ::-1],
    4: lambda p: p[::-1],
    5: lambda p: p.transpose(1, 0, 2),
    6: lambda p: p.transpose(1, 0, 2)[:, ::-1],
    7: lambda p: p.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda p: p.transpose(1, 0, 2)[::-1],
}


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_form_is_turned_upright_unless_the_stored_pixels_are_asked_for(form, orientation):
    how = {"WEBP": {"lossless": True}, "AVIF": {"quality": 100}, "JPEG": {"quality": 95}}.get(
        form, {}
    )
    data = oriented(form, orientation, **how)
    stored = decode_image(data, orientation="stored")
    assert mean_difference(stored, RGB) < 4
    upright = decode_image(data)
    assert np.array_equal(upright, TURNS.get(orientation, lambda p: p)(stored))
    assert upright.flags.c_contiguous
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    assert mean_difference(upright, expected) < 0.5


def test_another_orientation_than_the_two_is_refused():
    with pytest.raises(ConfigError, match="'upright' or 'stored', not 'raw'"):
        decode_image(FORMS["rgb.png"], orientation="raw")


def test_what_lies_between_the_segments_of_a_jpeg_is_passed_over_strictly():
    data = FORMS["baseline.jpg"]
    place = data.find(b"\xff\xdb")
    loose = data[:place] + b"\0lost" + data[place:]
    assert np.array_equal(decode_image(loose), decode_image(data))
    assert np.array_equal(decode_image(loose, strict=False), decode_image(data))
    with pytest.raises(ValueError, match="Premature end"):
        decode_image(loose[:-200])


def test_a_preview_within_a_jpeg_is_not_taken_for_it():
    preview = saved(picture(8, 8, seed=3), "JPEG")
    data = FORMS["baseline.jpg"]
    exif = segment(0xE1, b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0" + preview)
    assert np.array_equal(decode_image(data[:2] + exif + data[2:]), decode_image(data))


def test_an_unknown_critical_chunk_of_a_png_is_an_error():
    raw = b"".join(b"\0" + row.tobytes() for row in RGB)
    data = png_file(WIDTH, HEIGHT, raw, before=png_chunk(b"CgBI", b"1234"))
    with pytest.raises(ValueError, match="unknown critical chunk CgBI"):
        decode_image(data)


def test_a_wrong_checksum_is_an_error_that_says_where():
    data = bytearray(FORMS["rgb.png"])
    data[60] ^= 1
    with pytest.raises(ValueError, match="wrong checksum of chunk IDAT at byte 33"):
        decode_image(bytes(data))


def test_nothing_is_written_to_stderr_for_files_that_are_whole_or_cut_off(preamble):
    script = preamble + (
        "from penstock.images import decode_image\n"
        "from tests.images.making import many_forms\n"
        "for name, data in many_forms().items():\n"
        "    decode_image(data)\n"
        "    if name.endswith(('.jpg', '.png', '.webp', '.bmp', '.ppm')):\n"
        "        try:\n"
        "            decode_image(data[: len(data) * 2 // 3])\n"
        "        except ValueError:\n"
        "            continue\n"
        "        raise AssertionError(name)\n"
    )
    done = python("-c", script)
    assert (done.returncode, done.stderr) == (0, "")
