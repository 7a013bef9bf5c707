# SPDX-License-Identifier: Apache-2.0
"""`ColorJitter`: what each change does, against Pillow's."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageEnhance
from tests.vision.rectangles import seeded

from penstock.errors import ConfigError
from penstock.vision import ColorJitter
from penstock.vision.transforms.color import _CHANGES

ENHANCE = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "saturation": ImageEnhance.Color,
}


@pytest.fixture
def image():
    return np.random.default_rng(1).integers(0, 256, (40, 50, 3), np.uint8)


@pytest.mark.parametrize("factor", [0.0, 0.6, 1.0, 1.4])
@pytest.mark.parametrize("name", list(ENHANCE))
def test_a_change_is_that_of_pillow(image, name, factor):
    expected = np.asarray(ENHANCE[name](Image.fromarray(image)).enhance(factor)).astype(int)
    got = _CHANGES[name](image, factor)
    assert got.dtype == np.uint8
    assert np.abs(got - expected).max() <= 1


def test_hue_is_turned_by_a_third_from_red_to_green():
    red = np.full((2, 2, 3), (200, 0, 0), np.uint8)
    assert _CHANGES["hue"](red, 1 / 3)[0, 0].tolist() == [0, 200, 0]


def test_grey_stays_grey(image):
    grey = np.repeat(image[:, :, :1], 3, axis=2)
    assert np.array_equal(ColorJitter(saturation=0.9, hue=0.5)(grey), grey)


def test_factors_are_uniform_and_the_image_is_left_alone(image):
    before = image.copy()
    flat = np.full((1, 1, 3), 100, np.uint8)
    rng = np.random.default_rng(0)
    values = [int(ColorJitter(brightness=0.4).apply(flat, rng)[0, 0, 0]) for _ in range(4000)]
    assert 59 <= min(values) <= 61
    assert 139 <= max(values) <= 141
    assert abs(np.mean(values) - 100) < 1.5
    ColorJitter(0.4, 0.4, 0.4, 0.1).apply(image, rng)
    assert np.array_equal(image, before)


def test_a_sample_keeps_all_but_its_image(image):
    jitter = ColorJitter(0.4, 0.4, 0.4, 0.1)
    sample = {"image": image, "boxes": np.zeros((1, 4), np.float32), "image_id": "a"}
    with seeded(1):
        changed = jitter(sample)
    with seeded(1):
        assert np.array_equal(changed["image"], jitter(image))
    assert changed["boxes"] is sample["boxes"]
    assert sample["image"] is image
    with pytest.raises(ConfigError, match=r"ColorJitter takes uint8 .* got float32 \(4, 4, 3\)"):
        jitter({"image": np.zeros((4, 4, 3), np.float32)})


@pytest.mark.parametrize(
    "options", [{"brightness": -1}, {"hue": 0.6}, {"contrast": float("nan")}], ids=str
)
def test_amounts_out_of_range_are_refused(options):
    with pytest.raises(ConfigError):
        ColorJitter(**options)
