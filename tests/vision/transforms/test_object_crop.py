# SPDX-License-Identifier: Apache-2.0
"""`ObjectCrop`: what is seen of the objects in a part of their image."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.vision.rectangles import COLOURS, check_bounds, check_objects, sample_of, scene, seeded

from penstock.errors import ConfigError
from penstock.vision.crops import CenterCropResize, Cut, RandomResizedCrop
from penstock.vision.transforms.geometry import ObjectCrop


@given(st.integers(0, 10_000), st.integers(90, 160), st.integers(90, 160))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_objects_in_a_random_part_keep_their_pixels_and_rows(seed, height, width):
    crop = ObjectCrop(RandomResizedCrop((height, width), scale=(0.2, 1)), min_side_px=5)
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
    crop = ObjectCrop(CenterCropResize(100, 200), min_visibility=least, min_side_px=0.5)
    cut = crop(sample)
    assert cut["labels"].tolist() == cut["weights"].tolist() == left
    assert cut["boxes"][0].tolist() == [10, 10, 30, 30]


class Part:
    """A part of one size at a random place, not resized."""

    is_drawless = False

    def __init__(self, height, width):
        self.size = height, width

    def cut(self, height, width, rng):
        top = int(rng.integers(height - self.size[0] + 1))
        left = int(rng.integers(width - self.size[1] + 1))
        return Cut(top, left, *self.size, *self.size)


SIDES = st.integers(1, 120)


@given(st.integers(0, 9), st.tuples(SIDES, SIDES), st.tuples(SIDES, SIDES), st.tuples(SIDES, SIDES))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_a_part_that_is_moved_to_an_object_holds_all_of_it_or_is_within_it(seed, at, object_, part):
    width, height = object_
    box = (at[0], at[1], min(at[0] + width, 150), min(at[1] + height, 140))
    sample = sample_of([(0, 0, 5, 5), box], [0, 1], (140, 150))
    aimed = ObjectCrop(Part(*part), class_weights=[0, 3], min_visibility=0, min_side_px=0)
    with seeded(seed):
        cut = aimed(sample)
    (seen,) = cut["boxes"][cut["labels"] == 1]
    assert seen[3] - seen[1] == min(box[3] - box[1], part[0])
    assert seen[2] - seen[0] == min(box[2] - box[0], part[1])
    x1, y1, x2, y2 = seen.astype(int)
    assert (cut["image"][y1:y2, x1:x2] == COLOURS[1]).all()


def test_rare_classes_are_in_as_many_crops_as_their_weights_say():
    sample = sample_of(
        [(10, 10, 30, 30), (160, 10, 180, 30), (10, 160, 30, 180)], [0, 0, 1], (200, 200)
    )
    crop = RandomResizedCrop(60, scale=(0.05, 0.05))
    shown = np.zeros(2)
    with seeded(3):
        for _ in range(400):
            labels = ObjectCrop(crop, class_weights=[1, 2])(sample)["labels"]
            shown += np.bincount(labels, minlength=2)
    assert 0.8 < shown[1] / shown[0] < 1.25


@pytest.mark.parametrize("labels", [[0, 0], []], ids=["others alone", "none"])
def test_an_image_without_the_classes_is_cut_as_if_they_were_not_asked_for(labels):
    boxes = np.array([(10, 10, 30, 30), (90, 90, 99, 99)][: len(labels)]).reshape(-1, 4)
    sample = sample_of(boxes, labels, (100, 100))
    crop = RandomResizedCrop(60)
    images = []
    for weights in (None, [0, 1]):
        with seeded(5):
            images.append(ObjectCrop(crop, class_weights=weights)(sample)["image"])
    assert (images[0] == images[1]).all()


@pytest.mark.parametrize(
    ("crop", "weights", "found"),
    [
        (CenterCropResize(4, 10), [1, 2], "is always the same part"),
        (RandomResizedCrop(4), [1, -2], "class_weights are numbers from 0 on"),
        (RandomResizedCrop(4), [], "class_weights are numbers from 0 on"),
        (RandomResizedCrop(4), [0, 0], "class_weights are numbers from 0 on"),
    ],
)
def test_weights_that_cannot_be_are_refused(crop, weights, found):
    with pytest.raises(ConfigError, match=found):
        ObjectCrop(crop, class_weights=weights)
