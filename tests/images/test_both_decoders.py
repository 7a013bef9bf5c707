# SPDX-License-Identifier: Apache-2.0
"""simplejpeg, and OpenCV where it is not installed: the same pixels, and the same files refused."""

from __future__ import annotations

import sys
import threading
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.processes import python

simplejpeg = pytest.importorskip("simplejpeg")
cv2 = pytest.importorskip("cv2")
Image = pytest.importorskip("PIL.Image")

from tests.images.making import encoded, frame, many_forms, picture, saved, segment  # noqa: E402
from tests.images.mutate import part_or_none  # noqa: E402

from penstock.images import decode_image, jpeg, read_header  # noqa: E402
from penstock.images.regions import Region, decode_region  # noqa: E402


@pytest.fixture
def decoder():
    """Each test here has both."""


def by_both(decode, *arguments, **how):
    """Return the pixels from simplejpeg and from OpenCV; None where a file is refused."""
    outcomes = []
    for library in (simplejpeg, None):
        with mock.patch.object(jpeg, "simplejpeg", library):
            outcomes.append(part_or_none(decode, *arguments, **how))
    return outcomes


def noisy(height, width, seed=0):
    noise = np.random.default_rng(seed).integers(-30, 30, (height, width, 3))
    return np.clip(picture(height, width, seed) + noise, 0, 255).astype(np.uint8)


@given(
    height=st.integers(1, 130),
    width=st.integers(1, 70),
    seed=st.integers(0, 99),
    sampling=st.sampled_from([0x111111, 0x211111, 0x221111, 0x121111, 0x411111, "grey"]),
    quality=st.integers(20, 100),
    restarts=st.sampled_from([0, 0, 3]),
    is_progressive=st.booleans(),
    factor=st.sampled_from([1, 2, 4, 8]),
    every_row=st.booleans(),
    place=st.tuples(*[st.floats(0, 1)] * 4),
)
def test_pixels_are_equal_for_any_size_sampling_reduction_and_part(
    height, width, seed, sampling, quality, restarts, is_progressive, factor, every_row, place
):
    if min(height, width) < 8:  # two reductions may have the same size, and simplejpeg has another
        factor = 1
    pixels = noisy(height, width, seed)
    how = [cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_RST_INTERVAL, restarts]
    how += [cv2.IMWRITE_JPEG_PROGRESSIVE, int(is_progressive)]
    if sampling == "grey":
        data = encoded(pixels[:, :, 0], ".jpg", *how)
    else:
        data = encoded(pixels, ".jpg", *how, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling)
    one, other = by_both(decode_image, data)
    assert one.shape == (height, width, 3)
    assert np.array_equal(one, other)
    top, left = int(place[0] * (height - 1)), int(place[1] * (width - 1))
    rows, columns = 1 + int(place[2] * (height - 1 - top)), 1 + int(place[3] * (width - 1 - left))
    region, header = Region(top, left, rows, columns), read_header(data)
    one, other = by_both(decode_region, data, header, region, factor, fast=False, whole=every_row)
    assert np.array_equal(one, other)


def test_pixels_of_photos_are_equal_but_where_colour_may_be_coarse(data_dir):
    paths = sorted((data_dir / "clothing" / "validation").glob("*/*.jpg"))[::5]
    paths += sorted((data_dir / "bccd").rglob("*.jpg"))[::40]
    differences = []
    for path in paths:
        data = path.read_bytes()
        header = read_header(data)
        all_of_it = Region(0, 0, header.height_px, header.width_px)
        assert np.array_equal(*by_both(decode_image, data)), path
        for factor in (2, 4, 8):
            one, other = by_both(decode_region, data, header, all_of_it, factor, fast=False)
            assert np.array_equal(one, other), path
        one, other = by_both(decode_region, data, header, all_of_it)
        differences.append(np.abs(one.astype(int) - other).mean())
    assert 0 < np.mean(differences) < 1  # of 255; docs/decoding.md


def test_cmyk_is_equal():
    inks = np.dstack([noisy(40, 50), noisy(40, 50, 1)[:, :, 0]])
    data = saved(Image.frombytes("CMYK", (50, 40), inks.tobytes()), "JPEG")
    assert np.array_equal(*by_both(decode_image, data))
    assert by_both(decode_image, data[: len(data) // 2] + b"\xff\xd9") == [None, None]
    one, other = by_both(decode_image, data[: len(data) // 2], strict=False)
    assert np.array_equal(one, other)


def test_of_changed_bits_both_notice_the_same():
    """In files of one scan without restarts, as nearly all are."""
    data = saved(noisy(203, 310), "JPEG")
    start = read_header(data).jpeg.scan_offset
    rng = np.random.default_rng(17)
    num_refused = 0
    for place in rng.integers(start, len(data) - 2, 500):
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(rng.integers(8))
        one, other = by_both(decode_image, bytes(damaged))
        assert (one is None) == (other is None), place
        assert one is None or np.array_equal(one, other)
        num_refused += one is None
    assert 50 < num_refused < 300


LARGER = frame(300, 200, 3)
PIECES = [
    LARGER, saved(picture(300, 200), "JPEG"), segment(0xDC, b"\1\x2c"), b"\xff\xe3\0\7", b"\xff",
    *(segment(marker, LARGER) for marker in (0xC8, 0xDC, 0xE1, 0xF0, 0xFE)),
    *(bytes((0xFF, marker)) for marker in (0, 1, 0xC0, 0xD0, 0xD8, 0xE0)),
]  # fmt: skip


@pytest.mark.parametrize("name", ["baseline.jpg", "progressive.jpg", "cmyk.jpg", "lossless.jpg"])
def test_both_find_the_size_in_a_jpeg_that_is_held_against_the_limit(name):
    data, num_found = many_forms()[name], 0
    at = [2, *(stop for _, _, stop in jpeg.jpeg_segments(data))]
    files = [data[:p] + one + other + data[p:] for p in at for one in PIECES for other in PIECES]
    for file in files[::7]:
        header = part_or_none(read_header, file)
        sizes = part_or_none(simplejpeg.decode_jpeg_header, file), np.shape(jpeg.by_opencv(file, 1))
        for size in filter(None, sizes if header else ()):
            assert size[:2] == (header.height_px, header.width_px), file
            num_found += 1
    assert num_found > 50


def lets_others_run(call):
    """Whether `call` releases the GIL: with so long a switch interval, nothing else lets others."""
    may_run, has_run = threading.Lock(), threading.Event()
    may_run.acquire()
    other = threading.Thread(target=lambda: may_run.acquire() and has_run.set())
    other.start()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        may_run.release()
        for _ in range(500):
            call()
            if has_run.is_set():
                return True
        return False
    finally:
        sys.setswitchinterval(interval_s)
        other.join()


def test_other_threads_run_while_opencv_decodes(monkeypatch):
    monkeypatch.setattr(jpeg, "simplejpeg", None)
    data = saved(noisy(300, 400), "JPEG")
    assert not lets_others_run(lambda: sum(range(1000)))
    assert lets_others_run(lambda: decode_image(data))


def test_without_simplejpeg_all_imports_and_a_pipeline_makes_images():
    done = python(
        "-c",
        "import sys; sys.modules['simplejpeg'] = None\n"
        "import numpy as np\n"
        "from penstock.vision import ImagePipeline\n"
        "from tests.images.making import picture, saved\n"
        "data = saved(picture(300, 400), 'JPEG')\n"
        "pipeline = ImagePipeline.eval(64)\n"
        "print(pipeline(data).shape)\n",
    )
    assert (done.stdout, done.stderr) == ("(3, 64, 64)\n", "")


def test_a_simplejpeg_that_is_installed_and_broken_is_not_passed_over(tmp_path):
    (tmp_path / "simplejpeg.py").write_text("import not_there")
    done = python(
        "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport penstock.images"
    )
    assert "No module named 'not_there'" in done.stderr
    assert done.returncode == 1


def test_without_opencv_the_error_names_the_extra():
    done = python("-c", "import sys; sys.modules['cv2'] = None; import penstock.images")
    assert "needs cv2, which is not installed. Install it with: pip install" in done.stderr
