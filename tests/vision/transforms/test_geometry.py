# SPDX-License-Identifier: Apache-2.0
"""Flips, letterboxes, perspectives: pixels, boxes, landmarks and rows move as one."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.vision.rectangles import (
    check_bounds,
    check_middles,
    check_objects,
    is_colour,
    sample_of,
    scene,
    seeded,
)

from penstock import sample_rng
from penstock.errors import ConfigError
from penstock.vision.transforms.adapters import Compose
from penstock.vision.transforms.color import RandomHSV
from penstock.vision.transforms.geometry import (
    HorizontalFlip,
    Letterbox,
    RandomPerspective,
    VerticalFlip,
)

SIZES = st.tuples(st.integers(40, 130), st.integers(60, 140))
SEEDS = st.integers(0, 10_000)


def unchanged(sample):
    return {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in sample.items()}


def equal(one, other):
    return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)


def is_same(one, other):
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return one == other


@pytest.mark.parametrize("flip", [HorizontalFlip, VerticalFlip])
def test_a_flip_moves_everything_exactly_and_twice_is_the_sample(flip):
    sample = scene(3)
    before = unchanged(sample)
    mirrored = flip(1, landmark_order=False)(sample)
    check_objects(mirrored)
    check_bounds(mirrored, tolerance_px=0)
    for row, label in enumerate(mirrored["labels"]):
        for x, y in mirrored["landmarks"][row].astype(int):
            assert is_colour(mirrored["image"][y, x], label)
    assert mirrored["image"].flags.c_contiguous
    assert not equal(mirrored, sample)
    assert equal(flip(1, landmark_order=False)(mirrored), sample)
    assert equal(sample, before)


def test_landmarks_that_change_sides_change_numbers_with_their_visibility():
    sample = scene(3)
    mirrored = HorizontalFlip(1, landmark_order=(1, 0, 2))(sample)
    plain = HorizontalFlip(1, landmark_order=False)(sample)
    assert np.array_equal(mirrored["landmarks"], plain["landmarks"][:, [1, 0, 2]])
    assert mirrored["visibility"][0].tolist() == [1, 0, 2]
    assert mirrored["boxes"].shape == (6, 4)


def test_an_inverted_box_stays_one_for_who_looks_for_them():
    sample = {"image": np.zeros((10, 10, 3), np.uint8), "boxes": np.array([[7, 2, 3, 4.0]])}
    assert HorizontalFlip(1)(sample)["boxes"].tolist() == [[7, 2, 3, 4]]
    assert RandomPerspective(scale=0, translate=0, min_side_px=0)(sample)["boxes"].shape == (0, 4)


@given(
    SIZES,
    SEEDS,
    st.integers(20, 200),
    st.integers(20, 200),
    st.booleans(),
    st.sampled_from([None, 32]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_letterbox_keeps_objects_and_can_be_undone(size, seed, height, width, enlarge, stride):
    sample = scene(seed, size)
    before = unchanged(sample)
    boxed = Letterbox((height, width), enlarge=enlarge, stride=stride)(sample)
    if min(boxed["letterbox"][:2]) > 0.7:  # or small objects melt into the ground
        check_bounds(boxed, tolerance_px=2)
        check_middles(boxed)
    if stride is None:
        assert boxed["image"].shape == (height, width, 3)
    else:
        assert boxed["image"].shape[0] % 32 == boxed["image"].shape[1] % 32 == 0
    back = Letterbox.undo(boxed["boxes"], boxed["letterbox"])
    np.testing.assert_allclose(back, sample["boxes"], atol=1e-3)
    if not enlarge:
        assert max(boxed["letterbox"][:2]) <= 1
    assert equal(sample, before)


def test_a_letterbox_pads_both_sides_with_its_fill():
    boxed = Letterbox(40, fill=7)(np.full((10, 20, 3), 200, np.uint8))
    assert (boxed[:10] == 7).all()
    assert (boxed[10:30] == 200).all()
    assert (boxed[30:] == 7).all()


@given(SIZES, SEEDS, st.sampled_from([None, 64, (80, 50)]), st.floats(0, 0.5), st.floats(0, 0.6))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_a_shift_and_a_scale_keep_boxes_around_their_pixels(size, seed, after, translate, scale):
    sample = scene(seed, size)
    before = unchanged(sample)
    with seeded(seed):
        moved = RandomPerspective(after, translate=translate, scale=scale)(sample)
    is_large = (moved["boxes"][:, 2:] - moved["boxes"][:, :2] > 4).all(axis=1)
    large = {
        k: v[is_large] if isinstance(v, np.ndarray) and k != "image" else v
        for k, v in moved.items()
    }
    check_objects(large)
    check_bounds(large, tolerance_px=2.5)
    assert equal(sample, before)


@given(SEEDS, st.floats(0, 180), st.floats(0, 30), st.sampled_from([0, 0.0005]))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_whole_objects_stay_in_their_boxes_when_turned_and_sheared(
    seed, degrees, shear, perspective
):
    sample = scene(seed)
    move = RandomPerspective(
        200, degrees=degrees, shear=shear, perspective=perspective, translate=0, scale=0.2
    )
    with seeded(seed):
        moved = move(sample)
    check_middles(moved)
    for box, label in zip(moved["boxes"], moved["labels"], strict=True):
        ys, xs = np.nonzero(is_colour(moved["image"], label))
        if len(xs):
            assert xs.min() >= box[0] - 1.6
            assert ys.min() >= box[1] - 1.6
            assert xs.max() + 1 <= box[2] + 1.6
            assert ys.max() + 1 <= box[3] + 1.6


def test_nothing_to_draw_leaves_the_sample_as_it_is():
    sample = scene(1)
    assert equal(RandomPerspective(translate=0, scale=0)(sample), sample)


def test_the_angle_the_shift_and_the_scale_are_in_their_ranges():
    box = {"image": np.zeros((100, 100, 3), np.uint8), "boxes": np.array([[45, 45, 55, 55.0]])}
    centres, sides = [], []
    for position in range(400):
        with seeded(2, position):
            (moved,) = RandomPerspective(translate=0.2, scale=0.5)(box)["boxes"]
        centres.append((moved[:2] + moved[2:]) / 2)
        sides.append((moved[2:] - moved[:2]) / 10)
    for values, low, high in ((np.array(centres), 30, 70), (np.array(sides), 0.5, 1.5)):
        assert low <= values.min() < low + 0.02 * high
        assert high - 0.02 * high < values.max() <= high


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"min_area_ratio": 0.3, "min_side_px": 0}, [0, 2]),
        ({"min_area_ratio": 0, "min_side_px": 5}, [0]),
        ({"min_area_ratio": 0, "min_side_px": 0, "max_aspect": 3}, [0, 1]),
        ({"min_area_ratio": 0, "min_side_px": 0}, [0, 1, 2]),
    ],
)
def test_objects_of_which_too_little_is_left_are_dropped(limits, left):
    boxes = [(60, 60, 80, 80), (32, 50, 52, 54), (60, 90, 80, 94)]  # the image is cut at 50
    sample = sample_of(boxes, [0, 1, 2], (200, 200))
    moved = RandomPerspective(100, translate=0, scale=0, **limits)(sample)
    assert moved["labels"].tolist() == left
    assert moved["weights"].tolist() == left


def test_samples_without_objects_pass():
    for sample in ({"image": scene(1)["image"], "image_id": "a"}, scene(1, num_objects=0)):
        for change in (RandomPerspective(30), Letterbox(30), HorizontalFlip(1, (1, 0, 2))):
            assert change(sample)["image"].ndim == 3
            assert len(change(sample).get("boxes", [])) == 0


def test_hsv_changes_colours_as_its_formula_says_and_leaves_greys_grey():
    image = np.full((4, 4, 3), (200, 100, 50), np.uint8)
    with seeded(3):
        changed = RandomHSV(hue=0, saturation=0, value=0.5)(image)
    with seeded(3):
        factor = 1 + 0.5 * sample_rng().uniform(-1, 1, 3)[2]
    assert np.abs(changed[0, 0] - np.array([200, 100, 50]) * factor).max() < 3
    assert (image[0, 0] == (200, 100, 50)).all()
    sample = scene(1)
    with seeded(1):
        assert equal({**RandomHSV()(sample), "image": sample["image"]}, sample)


def test_hsv_refuses_what_is_no_rgb():
    with pytest.raises(ConfigError, match=r"got float32 \(4, 4, 3\)"):
        RandomHSV()(np.zeros((4, 4, 3), np.float32))


def test_transforms_pickle_and_say_what_they_are():
    chain = Compose(
        Letterbox(64), RandomPerspective(32), RandomHSV(), HorizontalFlip(0.5, (1, 0, 2))
    )
    copied = pickle.loads(pickle.dumps(chain))
    assert repr(copied) == repr(chain)
    with seeded(1):
        one = chain(scene(1))
    with seeded(1):
        assert equal(copied(scene(1)), one)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: HorizontalFlip(1.5),
            "probability is a number of at least 0 and at most 1; got 1.5",
        ),
        (lambda: HorizontalFlip(True), "got True"),
        (lambda: HorizontalFlip(0.5, (0, 2)), r"landmark_order .* got \(0, 2\)"),
        (lambda: HorizontalFlip(1, (1, 0))(scene(1)), "has 2 numbers, but the sample has 3"),
        (lambda: Letterbox(0), "size is an int of at least 1; got 0"),
        (lambda: Letterbox((1, 2, 3)), r"size is an int, or \(height, width\), in pixels; got"),
        (lambda: Letterbox(9, fill=256), "fill is an int of at least 0 and at most 255; got 256"),
        (lambda: Letterbox(9, stride=0), "stride is an int of at least 1; got 0"),
        (lambda: RandomPerspective(translate=2), "translate .* got 2"),
        (lambda: RandomPerspective(scale=1), "scale .* at most 0.999; got 1"),
        (
            lambda: RandomPerspective(max_aspect=0.5),
            "max_aspect is a number of at least 1; got 0.5",
        ),
        (lambda: RandomPerspective(perspective=float("nan")), "perspective .* got nan"),
        (lambda: RandomHSV(hue="much"), "hue is a number .* got 'much'"),
        (lambda: Compose([RandomHSV()]), r"transform 0 of Compose is no function; got \[Rand"),
    ],
)
def test_arguments_out_of_range_are_named_with_their_values(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
