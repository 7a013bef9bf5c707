# SPDX-License-Identifier: Apache-2.0
"""Each real file that is broken, rare or misnamed has an outcome here: pixels or an error."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import pytest

cv2 = pytest.importorskip("cv2")
Image = pytest.importorskip("PIL.Image")
ImageFile = pytest.importorskip("PIL.ImageFile")

from penstock.images import decode_image, repair_image  # noqa: E402
from penstock.images.decode import check_image  # noqa: E402


@dataclass(frozen=True)
class Pixels:
    """What a file gives: as stored, against another decoder's, no further than `mean` of 255."""

    height: int
    width: int
    by: str = "pillow"
    mean: float = 0.01


@dataclass(frozen=True)
class Error:
    """What a file gives instead, in words; and once repaired, so many rows from the top."""

    says: str
    rows: int | None = None
    of: tuple[int, int] = (0, 0)
    by: str = "pillow"


OUTCOMES = {
    "12bit_monkey.jpg": Error("a JPEG file of 12 bits per sample: the libraries here decode 8"),
    "16bit_gray_i_trns.png": Pixels(64, 64, by="high byte"),
    "16bit_rgb_monkey.png": Pixels(227, 149),
    "16bit_rgba.png": Pixels(32, 32),
    "1x1_gray.jpg": Pixels(1, 1),
    "apng_single_frame.png": Pixels(64, 128),
    "arithmetic.jpg": Pixels(149, 227),
    "bomb_65536-uint32-limit.png": Error("65536 x 65536 px (height x width) is more than"),
    "chan_gray_pytorch.jpg": Pixels(100, 100),
    "chan_gray_pytorch.png": Pixels(100, 100),
    "chan_grayalpha_pytorch.png": Pixels(100, 100),
    "chan_palette_pytorch.png": Pixels(100, 100),
    "chan_rgbalpha_pytorch.png": Pixels(100, 100),
    "cmyk_pillow.jpg": Pixels(100, 100, mean=0.5),
    "cmyk_torchvision.jpg": Pixels(100, 100, mean=0.5),
    "corrupt_pillow_broken.png": Error("the PNG file does not begin with its header"),
    "corrupt_pillow_broken_data_stream.png": Error(
        "wrong checksum of chunk IDAT at byte 33", rows=88, of=(128, 128)
    ),
    "corrupt_pillow_hopper_bad_exif.jpg": Error(
        "1214 extraneous bytes before marker 0xd0", rows=500, of=(500, 500)
    ),
    "corrupt_pillow_multiple_exif.jpg": Pixels(1, 1),
    # Text that would fill memory is not unpacked for pixels that are whole.
    "corrupt_pillow_png_decompression_dos.png": Pixels(1, 1, by="opencv"),
    "corrupt_pillow_unknown_compression_method.png": Pixels(57, 57, by="opencv"),
    "corrupt_tv_corrupt.jpg": Error(
        "Unsupported marker type 0xae", rows=90, of=(90, 120), by="opencv"
    ),
    "empty_zero_bytes.jpg": Error("the file is empty"),
    "exif_2x1_orient8.jpg": Pixels(1, 2),
    "exif_landscape_6.jpg": Pixels(1800, 1200),
    "fuzz_dali_1.jpg": Pixels(188, 250),
    "fuzz_dali_2.jpg": Pixels(125, 94),
    "gif_hopper.gif": Pixels(128, 128),
    "html_404_page.jpg": Error("text, not an image: it begins with '<!DOCTYPE"),
    "lfs_pointer.jpg": Error("the file itself was not fetched (git lfs pull)"),
    "lossless_dali_cat-3449999_640_grayscale_8bit.jpg": Pixels(426, 640, mean=0),
    "misnamed_dali_jpeg.png": Pixels(426, 640),
    "misnamed_dali_png.jpeg": Pixels(426, 640),
    "png_idat_after_end.png": Pixels(128, 128),
    "progressive_cat.jpg": Pixels(240, 320),
    "text_not_image.jpg": Error("text, not an image: it begins with 'hello"),
    # A marker before its pixels is short; they are whole.
    "trunc_pillow_truncated_app14.jpg": Pixels(100, 100),
    "trunc_pillow_truncated_end_chunk.png": Error(
        "truncated: its chunk IDAT at byte 30331", rows=128, of=(128, 128)
    ),
    "trunc_pillow_truncated_image.png": Error(
        "truncated: its chunk IDAT at byte 33 would end at byte 105559", rows=400, of=(480, 640)
    ),
    "trunc_pillow_truncated_jpeg.jpg": Error("Premature end of JPEG file", rows=100, of=(100, 100)),
    "trunc_sharp_truncated.png": Error(
        "truncated: its chunk IDAT at byte 33 would end at byte 32813", rows=24, of=(240, 294)
    ),
    "webp_hopper.webp": Pixels(128, 128),
}
BY_OPENCV = {
    # Of restart markers it does not say that one is not where it should be.
    "corrupt_pillow_hopper_bad_exif.jpg": Pixels(500, 500),
    "corrupt_tv_corrupt.jpg": Error("OpenCV cannot decode the file", rows=90, of=(90, 120)),
}
# What decodes, and is no whole file to other programs all the same.
REFUSED_BY_THE_CHECK = {
    "corrupt_pillow_png_decompression_dos.png": "Decompressed data too large",
    "corrupt_pillow_unknown_compression_method.png": "Unknown compression method",
}


def reference(data, by):
    """Return the pixels that another decoder gives, as they are stored."""
    if by == "opencv":
        return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    with Image.open(io.BytesIO(data)) as image:
        if by == "high byte":
            return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
        image.load()
        image.info.pop("transparency", None)
        return np.asarray(image.convert("RGB"))


@pytest.fixture
def outcomes(decoder):
    return OUTCOMES | (BY_OPENCV if decoder == "OpenCV" else {})


@pytest.mark.parametrize("name", [n for n, o in OUTCOMES.items() if isinstance(o, Pixels)])
def test_a_file_with_whole_pixels_gives_them(name, data_dir):
    data, outcome = (data_dir / "broken" / name).read_bytes(), OUTCOMES[name]
    for strict in (True, False):
        pixels = decode_image(data, strict=strict, orientation="stored")
        assert pixels.shape == (outcome.height, outcome.width, 3)
        difference = np.abs(pixels.astype(int) - reference(data, outcome.by)).mean()
        assert difference <= outcome.mean
    assert repair_image(data) is None


@pytest.mark.parametrize("name", [n for n, o in OUTCOMES.items() if isinstance(o, Error)])
def test_a_file_that_is_none_or_not_whole_is_an_error_that_says_why(name, data_dir, outcomes):
    data, outcome = (data_dir / "broken" / name).read_bytes(), outcomes[name]
    if isinstance(outcome, Pixels):
        assert decode_image(data).shape == (outcome.height, outcome.width, 3)
        return
    for strict in (True, False) if outcome.rows is None else (True,):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - its words are the outcome's
            decode_image(data, strict=strict)
        assert outcome.says in str(caught.value)
    if outcome.rows is None:  # beyond repair
        assert repair_image(data) is None


@pytest.mark.parametrize(
    "name",
    [n for n, o in OUTCOMES.items() if isinstance(o, Error) and o.rows is not None and ".jp" in n],
)
def test_what_a_damaged_file_still_has_is_given_when_asked_for(name, data_dir, monkeypatch):
    data, outcome = (data_dir / "broken" / name).read_bytes(), OUTCOMES[name]
    pixels = decode_image(data, strict=False)
    assert pixels.shape == (*outcome.of, 3)
    repaired = repair_image(data)
    if repaired is not None:
        assert np.array_equal(decode_image(repaired, strict=False), pixels)
    if name.endswith(".png"):
        assert not pixels[outcome.rows :].any()
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    if name != "corrupt_pillow_broken_data_stream.png":  # Pillow gives up on it altogether
        expected = reference(data, outcome.by)[: outcome.rows]
        assert np.abs(pixels[: outcome.rows].astype(int) - expected).mean() < 0.01


@pytest.mark.parametrize("name", sorted(OUTCOMES))
def test_the_check_refuses_what_is_not_decoded_and_little_more(name, data_dir, outcomes):
    data, outcome = (data_dir / "broken" / name).read_bytes(), outcomes[name]
    says = outcome.says if isinstance(outcome, Error) else REFUSED_BY_THE_CHECK.get(name)
    if says is None:
        assert check_image(data) == outcome.height * outcome.width
        return
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its words are the outcome's
        check_image(data)
    assert says in str(caught.value)


def test_no_file_is_without_an_outcome(data_dir):
    assert {p.name for p in (data_dir / "broken").iterdir()} - {"MANIFEST.tsv"} == set(OUTCOMES)
