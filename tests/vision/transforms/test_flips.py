# SPDX-License-Identifier: Apache-2.0
"""Flips: every kind of image, and landmarks without known sides."""

from __future__ import annotations

import numpy as np
import pytest
from tests.vision.rectangles import sample_of, scene, seeded

from penstock.errors import ConfigError
from penstock.vision.transforms.geometry import HorizontalFlip, Letterbox, VerticalFlip


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64", "float16", "bool", "int64"])
@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1), (4, 5, 3), (4, 5, 4), (4, 5, 7)], ids=str)
def test_images_of_any_kind_are_mirrored_exactly(shape, dtype):
    image = (np.arange(np.prod(shape)).reshape(shape) % 7).astype(dtype)
    for given in (image, image[::-1, ::-1], np.asfortranarray(image)):
        across, down = HorizontalFlip(1)(given), VerticalFlip(1)(given)
        assert (across.dtype, across.shape) == (given.dtype, given.shape)
        assert np.array_equal(across, given[:, ::-1])
        assert np.array_equal(down, given[::-1])
        assert across.flags.c_contiguous
        assert down.flags.c_contiguous
        assert not np.shares_memory(across, given)


@pytest.mark.parametrize("flip", [HorizontalFlip, VerticalFlip])
@pytest.mark.parametrize("num_objects", [0, 6])
def test_landmarks_are_refused_until_it_is_said_which_change_sides(flip, num_objects):
    message = rf"has 3 landmarks for each object: say .* {flip.__name__}\(landmark_order=…\)"
    with pytest.raises(ConfigError, match=message):
        flip(0)(scene(1, num_objects=num_objects))  # however rarely it mirrors
    flip(1, landmark_order=False)(scene(1, num_objects=num_objects))
    flip(1, landmark_order=(1, 0, 2))(scene(1, num_objects=num_objects))


def test_one_landmark_has_no_other_side():
    sample = sample_of([(1, 1, 5, 6)], [0], (10, 10))
    sample["landmarks"] = np.array([[[2, 3]]], np.float32)
    del sample["visibility"]
    assert HorizontalFlip(1)(sample)["landmarks"].tolist() == [[[7, 3]]]


def test_mirrored_and_other_samples_have_the_same_entries():
    boxed = Letterbox(64)(scene(1))
    flip = HorizontalFlip(0.5, landmark_order=False)
    entries = set()
    for position in range(20):
        with seeded(1, position):
            entries.add(frozenset(flip(boxed)))
    assert entries == {frozenset(scene(1))}
    assert "letterbox" in boxed


def test_names_that_other_libraries_have_are_told_in_ours():
    with pytest.raises(TypeError, match=r"Flip\(\) has no argument p= .*: use probability="):
        HorizontalFlip(p=0.5)
    with pytest.raises(ConfigError, match=r"or is False; got True"):
        HorizontalFlip(1, landmark_order=True)
    with pytest.raises(ConfigError, match="landmark_order has 0 numbers, but the sample has 3"):
        HorizontalFlip(1, landmark_order=())(scene(1))
    assert repr(HorizontalFlip(0.5, landmark_order=False)) == "HorizontalFlip(landmark_order=False)"
