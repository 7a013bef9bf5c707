# SPDX-License-Identifier: Apache-2.0
"""Boxes and landmarks under maps of pixels: what is lost on the way is marked as lost."""

from __future__ import annotations

import numpy as np
import pytest
from tests.vision.rectangles import sample_of, scene, seeded

from penstock.vision.crops import CenterCropResize
from penstock.vision.transforms.geometry import (
    Letterbox,
    ObjectCrop,
    RandomPerspective,
    clipped,
    warped,
)
from penstock.vision.transforms.mixing import Mosaic

# x' = x / (1 - x / 8): what lies at x > 8 is behind the eye.
BEHIND = np.array([[1, 0, 0], [0, 1, 0], [-1 / 8, 0, 1.0]])


def test_what_is_behind_the_eye_is_nowhere():
    sample = {
        "boxes": np.array([[1, 1, 2, 2], [9, 1, 10, 2], [6, 1, 10, 2], [8, 1, 9, 2]], np.float32),
        "landmarks": np.array([[[1.5, 0.5]], [[9.5, 0.5]], [[3.5, 1]], [[7.5, 1]]], np.float32),
        "visibility": np.full((4, 1), 2, np.int8),
    }
    seen = warped(sample, BEHIND)
    np.testing.assert_allclose(seen["boxes"][0], [8 / 7, 8 / 7, 8 / 3, 8 / 3], rtol=1e-6)
    assert np.isnan(seen["boxes"][1:]).all(axis=1).tolist() == [True, True, True]
    np.testing.assert_allclose(seen["landmarks"][0, 0] + 0.5, [8 / 3, 4 / 3], rtol=1e-6)
    assert np.isnan(seen["landmarks"]).all(axis=(1, 2)).tolist() == [False, True, False, True]
    assert seen["visibility"].ravel().tolist() == [2, 0, 2, 0]
    assert seen["visibility"].dtype == np.int8
    assert sample["visibility"].tolist() == [[2]] * 4


def test_a_landmark_that_is_cut_off_is_not_visible_any_more():
    sample = scene(3)
    sample["visibility"] = np.full((6, 3), 2, np.int8)
    cutting = [
        RandomPerspective(50, degrees=30),
        ObjectCrop(CenterCropResize(50, 90), min_visibility=0),
        lambda sample: Mosaic([sample], 60)[0],
    ]
    for cut in cutting:
        num_lost = 0
        for position in range(10):
            with seeded(2, position):
                result = cut(sample)
            is_lost = np.isnan(result["landmarks"]).any(axis=-1)
            assert np.array_equal(result["visibility"] == 0, is_lost)
            assert result["visibility"].dtype == np.int8
            num_lost += int(is_lost.sum())
        assert num_lost


def test_an_array_of_another_shape_called_visibility_is_the_users_own():
    sample = sample_of([(1, 1, 9, 9)], [0], (10, 10))
    sample["visibility"] = np.array([0.7])
    cut = clipped(sample, (2, 2, 8, 8))
    assert np.isnan(cut["landmarks"][0, 0]).all()
    assert cut["visibility"].tolist() == [0.7]


@pytest.mark.parametrize("num_channels", [1, 2, 4])
@pytest.mark.parametrize("size", [20, 30, 45])
def test_images_keep_their_axis_of_channels_at_any_size(num_channels, size):
    image = np.full((30, 30, num_channels), 200, np.uint8)
    for change in (
        Letterbox(size),
        RandomPerspective(size),
        RandomPerspective(size, perspective=0.0005),
        ObjectCrop(CenterCropResize(size, size)),
    ):
        assert change(image).shape == (size, size, num_channels)
        assert change(image[..., 0]).shape == (size, size)
