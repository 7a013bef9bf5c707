# SPDX-License-Identifier: Apache-2.0
"""Crops: the recipe's distributions, and geometry that always fits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from penstock.errors import ConfigError
from penstock.vision import CenterCropResize, RandomResizedCrop, Resize

SIDES = st.integers(1, 3000)


@given(height=SIDES, width=SIDES, seed=st.integers(0, 1000))
def test_a_random_crop_lies_within_the_image(height, width, seed):
    cut = RandomResizedCrop(224).cut(height, width, np.random.default_rng(seed))
    assert 0 <= cut.top <= cut.top + cut.height <= height
    assert 0 <= cut.left <= cut.left + cut.width <= width
    assert min(cut.height, cut.width) >= 1
    assert (cut.resized_height, cut.resized_width) == (224, 224)


@given(height=SIDES, width=SIDES, size=st.integers(1, 300))
def test_a_middle_crop_lies_within_the_resized_image(height, width, size):
    cut = CenterCropResize(size, resize=size + 20).cut(height, width)
    assert 0 <= cut.row_offset <= cut.resized_height - size
    assert 0 <= cut.column_offset <= cut.resized_width - size


def recipe(height, width, rng):
    """torchvision's published algorithm, written down once more."""
    for _ in range(10):
        area = height * width * rng.uniform(0.08, 1.0)
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return rng.integers(0, height - h + 1), rng.integers(0, width - w + 1), h, w
    in_ratio = width / height
    if in_ratio < 3 / 4:
        h, w = round(width / (3 / 4)), width
    elif in_ratio > 4 / 3:
        h, w = height, round(height * (4 / 3))
    else:
        h, w = height, width
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize("size", [(375, 500), (400, 225), (100, 1000)], ids=str)
def test_10000_crops_are_distributed_as_the_recipes(size):
    """Areas above what fits are drawn again: so against the recipe, and not a formula alone."""
    crop, rng = RandomResizedCrop(224), np.random.default_rng(5)
    ours = np.array([crop.cut(*size, rng)[:4] for _ in range(10_000)], float)
    theirs = np.array([recipe(*size, rng) for _ in range(10_000)], float)
    for values in (ours, theirs):
        values[:, 0] += values[:, 2] / 2
        values[:, 1] += values[:, 3] / 2
    for column in range(4):
        assert stats.ks_2samp(ours[:, column], theirs[:, column]).pvalue > 0.001, column


def test_what_fits_no_ratio_is_cut_from_the_middle():
    crop = RandomResizedCrop(224, scale=(1.0, 1.0))
    cut = crop.cut(100, 1000, np.random.default_rng(0))
    assert cut[:4] == (0, (1000 - 133) // 2, 100, 133)


def test_the_middle_is_where_torchvision_has_it():
    cut = CenterCropResize(224, resize=256).cut(500, 375)
    assert cut == (0, 0, 500, 375, 341, 256, 58, 16)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomResizedCrop(0),
        lambda: RandomResizedCrop((1, 2, 3)),
        lambda: RandomResizedCrop(224, scale=(0.0, 1.0)),
        lambda: RandomResizedCrop(224, scale=(0.5, 0.1)),
        lambda: RandomResizedCrop(224, scale=(0.5, 1.1)),
        lambda: RandomResizedCrop(224, ratio=(2.0, 1.0)),
        lambda: CenterCropResize(224, resize=200),
        lambda: Resize(2.5),
    ],
)
def test_what_makes_no_sense_is_refused(make):
    with pytest.raises(ConfigError):
        make()
