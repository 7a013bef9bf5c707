# SPDX-License-Identifier: Apache-2.0
"""`decode_region`: the same pixels as decoding the whole file, and which damage it notices."""

from __future__ import annotations

import numpy as np
import pytest

cv2 = pytest.importorskip("cv2")
Image = pytest.importorskip("PIL.Image")

from tests.images.making import encoded, oriented, saved, with_frame  # noqa: E402
from tests.images.mutate import cut_to_fit, part_or_none  # noqa: E402

from penstock.images import decode_image, read_header  # noqa: E402
from penstock.images.jpeg import decode_jpeg, decode_jpeg_rows  # noqa: E402
from penstock.images.regions import Region, decode_region, reduced, reduction  # noqa: E402

HEIGHT, WIDTH = 203, 310


def photo(height=HEIGHT, width=WIDTH):
    """An image with edges, gradients and noise."""
    rng = np.random.default_rng(3)
    rows, columns = np.mgrid[0:height, 0:width]
    image = np.stack([rows * 255 // height, columns * 255 // width, (rows ^ columns) % 256], -1)
    image[height // 3 : height // 2, width // 4 : width // 2] = (250, 20, 90)
    return np.clip(image + rng.integers(-20, 20, image.shape), 0, 255).astype(np.uint8)


def jpeg(subsampling="420", **options):
    number = {"444": 0, "422": 1, "420": 2}[subsampling]
    return saved(photo(), "JPEG", subsampling=number, quality=85, **options)


def sampled(factor):
    return encoded(photo(), ".jpg", cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factor)


FILES = {
    "420": lambda: jpeg("420"),
    "422": lambda: jpeg("422"),
    "444": lambda: jpeg("444"),
    "440": lambda: sampled(cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440),
    "411": lambda: sampled(cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411),
    "grey": lambda: encoded(photo()[:, :, 0], ".jpg"),
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
    return decode_jpeg(data, read_header(data), factor, fast=fast)


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


def test_rows_below_the_part_are_not_decoded(decoder):
    data = jpeg()
    rows = decode_jpeg_rows(data, read_header(data), 48, 1, fast=True)
    assert rows is not None
    # OpenCV's colour is always smooth, which takes the next rows.
    assert rows.shape == (52 if decoder == "OpenCV" else 48, WIDTH, 3)


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


def upright(array, orientation):
    """Exif's turns by numpy alone."""
    if orientation >= 5:
        array = array.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        array = array[::-1]
    return array[:, ::-1] if orientation in (2, 3, 6, 7) else array


def turned_jpeg(orientation, subsampling="420"):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return jpeg(subsampling, exif=exif)


UPRIGHT_PARTS = [
    Region(0, 0, 41, 50),
    Region(17, 33, 71, 102),
    Region(150, 3, 53, 117),
    Region(0, 0, 203, 203),
    Region(100, 100, 1, 1),
]


@pytest.mark.parametrize("part", UPRIGHT_PARTS, ids=str)
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "smooth"])
@pytest.mark.parametrize("factor", [1, 2, 4])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_image_is_cut_as_it_is_seen(orientation, factor, fast, part):
    data = turned_jpeg(orientation)
    # Where the pixels of the part are stored, by the numbers of all pixels, turned.
    numbers = upright(np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH), orientation)
    seen = numbers[part.top : part.top + part.height, part.left : part.left + part.width]
    rows, columns = seen // WIDTH // factor, seen % WIDTH // factor
    stored = whole(data, factor, fast=fast)[
        rows.min() : rows.max() + 1, columns.min() : columns.max() + 1
    ]
    got = decode_region(data, read_header(data), part, factor, fast=fast)
    assert np.array_equal(got, upright(stored, orientation))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_file_of_any_form_is_cut_out_of_the_upright_image(orientation, form):
    data = oriented(form, orientation, photo(51, 70))
    got = decode_region(data, read_header(data), Region(7, 5, 30, 41), fast=False)
    assert np.array_equal(got, decode_image(data)[7:37, 5:46])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_of_a_turned_image_too_the_rows_behind_the_part_are_not_decoded(orientation):
    """Damage there is not noticed."""
    data = bytearray(turned_jpeg(orientation))
    data[-3000:-2998] = b"\xff\xd9"
    header = read_header(bytes(data))
    part = {
        1: Region(0, 0, 60, WIDTH), 2: Region(0, 0, 60, WIDTH),
        3: Region(HEIGHT - 60, 0, 60, WIDTH), 4: Region(HEIGHT - 60, 0, 60, WIDTH),
        5: Region(0, 0, WIDTH, 60), 6: Region(0, HEIGHT - 60, WIDTH, 60),
        7: Region(0, HEIGHT - 60, WIDTH, 60), 8: Region(0, 0, WIDTH, 60),
    }[orientation]  # fmt: skip
    undamaged = decode_region(turned_jpeg(orientation), header, part)
    assert np.array_equal(decode_region(bytes(data), header, part), undamaged)
    with pytest.raises(ValueError, match=r"(?i)corrupt|premature"):
        decode_region(bytes(data), header, part, whole=True)


def test_a_small_file_of_endless_scans_is_refused():
    data = jpeg(progressive=True)
    last = data.rfind(b"\xff\xda")
    bomb = data[:last] + data[last:-2] * 120 + data[-2:]
    with pytest.raises(ValueError, match=r"a JPEG file of 1\d\d scans; at most 100"):
        decode_region(bomb, read_header(bomb), Region(0, 0, 50, 50))


@pytest.mark.parametrize("progressive", [False, True])
def test_a_file_without_the_bytes_for_its_pixels_is_refused_unseen(progressive):
    data = with_frame(jpeg(progressive=progressive), height=9000, width=11000)
    with pytest.raises(ValueError, match="bytes for 9000 x 11000 px"):
        decode_region(data, read_header(data), Region(0, 0, 50, 50))


def test_a_part_of_an_image_of_too_many_pixels_is_refused():
    data = jpeg()
    with pytest.raises(ValueError, match=r"203 x 310 px .* is more than 62,929 pixels"):
        decode_region(data, read_header(data), Region(0, 0, 9, 9), max_pixels=HEIGHT * WIDTH - 1)


RARE = (0x22, 0x12, 0x11)  # sampling that libjpeg-turbo has no name for
ONLY_AS_A_WHOLE = {
    "rare sampling": cut_to_fit(with_frame(jpeg("444"), height=8, width=8, sampling=RARE)),
    "gaps": (lambda data: data[:20] + b"gaps" + data[20:])(jpeg()),
    "gaps in a progressive file": (lambda data: data[:20] + b"gap" + data[20:])(
        jpeg(progressive=True)
    ),
}


@pytest.mark.parametrize("every_row", [False, True])
@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("kind", sorted(ONLY_AS_A_WHOLE))
def test_what_decodes_as_a_whole_decodes_in_parts(kind, factor, every_row, decoder):
    data = ONLY_AS_A_WHOLE[kind]
    part = Region(2, 0, 6, 8)
    expected = reduced(decode_image(data), part, factor)
    if decoder == "OpenCV":  # which takes them as any other
        expected = whole(data, factor, fast=False)[2 // factor : 8 // factor, : 8 // factor]
    got = decode_region(data, read_header(data), part, factor, whole=every_row)
    assert np.array_equal(got, expected)


def test_no_file_without_its_end_marker_passes_wherever_it_was_cut():
    data = jpeg()
    header = read_header(data)
    for size in range(header.jpeg.scan_offset, len(data) - 1, 61):
        with pytest.raises(ValueError, match=r"(?i)premature end"):
            decode_region(data[:size], header, Region(0, 0, 16, 16))


def test_a_file_cut_off_and_given_an_end_passes_if_the_part_lies_above_the_cut():
    data = jpeg()
    header = read_header(data)
    cut = data[: len(data) * 2 // 3] + b"\xff\xd9"
    above, across = Region(0, 0, 60, WIDTH), Region(0, 0, 190, WIDTH)
    assert np.array_equal(decode_region(cut, header, above), decode_region(data, header, above))
    for part, every_row in ((across, False), (above, True)):
        with pytest.raises(ValueError, match=r"(?i)premature end"):
            decode_region(cut, header, part, whole=every_row)


def test_of_changed_bits_all_rows_show_as_much_as_the_whole_file_and_fewer_rows_less():
    """JPEG has no checksums: most changes give other pixels, without a sign."""
    data = jpeg()
    header = read_header(data)
    part = Region(20, 0, 100, WIDTH)
    rng = np.random.default_rng(11)
    noticed_by_all = noticed_by_part = 0
    for place in rng.integers(header.jpeg.scan_offset, len(data) - 2, 400):
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(rng.integers(8))
        image = part_or_none(decode_image, bytes(damaged))
        got = part_or_none(decode_region, bytes(damaged), header, part, fast=False)
        for factor in (1, 4):
            every = part_or_none(decode_region, bytes(damaged), header, part, factor, whole=True)
            assert (every is None) == (image is None)
        noticed_by_all += image is None
        noticed_by_part += got is None
        if image is not None:
            assert np.array_equal(got, image[20:120])
    assert 0 < noticed_by_part < noticed_by_all < 200


def test_other_forms_are_reduced_by_averaging():
    data = saved(photo(), "PNG")
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
