# SPDX-License-Identifier: Apache-2.0
"""`ObjectCrop`: what is seen of the objects in a part of their image."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.vision.rectangles import check_bounds, check_objects, sample_of, scene, seeded

from penstock.errors import ConfigError
from penstock.vision.crops import RandomResizedCrop, ResizedCenterCrop
from penstock.vision.transforms.object_crop import ObjectCrop


@given(st.integers(0, 10_000), st.integers(90, 160), st.integers(90, 160))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_objects_in_a_random_part_keep_their_pixels_and_rows(seed, height, width):
    crop = ObjectCrop(RandomResizedCrop((height, width), area=(0.2, 1)), min_side_px=5)
    with seeded(seed):
        cut = crop(scene(seed))
    assert cut["image"].shape == (height, width, 3)
    check_objects(cut)
    shown = {k: v for k, v in cut.items() if k != "landmarks"}
    check_bounds(shown, tolerance_px=3)


@pytest.mark.parametrize(("least", "left"), [(0, [0, 1, 2]), (0.4, [0, 1]), (0.6, [0])])
def test_objects_are_dropped_of_which_too_little_is_seen(least, left):
    sample = sample_of(
        [(60, 60, 80, 80), (40, 60, 60, 80), (47, 90, 51, 110)], [0, 1, 2], (200, 200)
    )
    crop = ObjectCrop(ResizedCenterCrop(100, 200), min_visibility=least, min_side_px=0.5)
    cut = crop(sample)
    assert cut["labels"].tolist() == cut["weights"].tolist() == left
    assert cut["boxes"][0].tolist() == [10, 10, 30, 30]


def test_a_bare_image_is_cut_as_well():
    image = np.arange(100, dtype=np.uint8).reshape(10, 10)[..., None].repeat(3, axis=2)
    assert (ObjectCrop(ResizedCenterCrop(4, 10))(image) == image[3:7, 3:7]).all()


def test_arguments_out_of_range_are_named_with_their_values():
    with pytest.raises(ConfigError, match=r"min_visibility is .*; got 2"):
        ObjectCrop(ResizedCenterCrop(4, 10), min_visibility=2)
