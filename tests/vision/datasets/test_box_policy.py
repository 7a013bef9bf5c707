# SPDX-License-Identifier: Apache-2.0
"""Boxes that cannot be right: found, put right, left out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StoreError
from penstock.vision.datasets.rules import BoxCounts, judged

HEIGHT, WIDTH = 30, 40
NAN_FREE = st.floats(-60, 60, allow_nan=False)
BOXES = st.lists(st.tuples(*[NAN_FREE | st.integers(-60, 60)] * 4), max_size=6).map(
    lambda rows: np.array(rows, np.float64).reshape(-1, 4)
)


def judge(boxes, policy="fix", size=(HEIGHT, WIDTH), **more):
    boxes = np.array(boxes, np.float64).reshape(-1, 4)
    return judged(boxes, np.tile(np.array(size), (len(boxes), 1)), policy, **more)


@pytest.mark.parametrize(
    ("box", "kinds", "fixed"),
    [
        ((2, 3, 9, 8), "", (2, 3, 9, 8)),
        ((0, 0, WIDTH, HEIGHT), "", (0, 0, WIDTH, HEIGHT)),
        ((2, 3, 2, 8), "zero_area", None),
        ((2, 3, 9, 3), "zero_area", None),
        ((9, 3, 2, 8), "inverted", (2, 3, 9, 8)),
        ((9, 8, 2, 3), "inverted", (2, 3, 9, 8)),
        ((-3, 3, 9, 8), "outside", (0, 3, 9, 8)),
        ((2, 3, 45.5, 31), "outside", (2, 3, WIDTH, HEIGHT)),
        ((50, 3, 60, 8), "outside", None),
        ((WIDTH, 3, WIDTH + 1, 8), "outside", None),
        ((45, 3, 30, 8), "inverted and outside", (30, 3, WIDTH, 8)),
    ],
)
def test_each_kind_of_box_is_found_and_fixed(box, kinds, fixed):
    found = judge(box)
    if kinds:
        with pytest.raises(StoreError, match=rf"1 bad box.*, of it, is {kinds}\."):
            found.check(lambda _: "it")
    assert found.is_bad[0] == bool(kinds)
    assert bool(found.is_kept[0]) is (fixed is not None)
    if fixed is not None:
        assert tuple(found.boxes[0]) == fixed


def test_where_a_file_includes_both_ends_one_column_counts_as_none():
    # xmin = 503, xmax = 504 in ours is xmin = xmax = 504 in VOC's
    one_column, two_columns = (503, 4, 504, 9), (503, 4, 505, 9)
    found = judge([one_column, two_columns], size=(600, 600), added_px=1)
    assert found.zero_area.tolist() == [True, False]
    assert judge(one_column, size=(600, 600)).zero_area.tolist() == [False]


def test_ends_are_swapped_in_the_numbers_of_the_file():
    # xmin = 9, xmax = 5 in VOC's numbers is 5 to 9, which is (4, 9) in ours; ymin = 1, ymax = 3
    found = judge((8, 0, 5, 3), added_px=1)
    assert found.inverted.tolist() == [True]
    assert found.boxes[0].tolist() == [4, 0, 9, 3]


def test_drop_leaves_out_every_bad_box_and_keep_none():
    boxes = [(2, 3, 9, 8), (2, 3, 2, 8), (9, 3, 2, 8), (-3, 3, 9, 8)]
    assert judge(boxes, "drop").is_kept.tolist() == [True, False, False, False]
    for policy in ("keep", "raise"):
        found = judge(boxes, policy)
        assert found.is_kept.all()
        assert found.boxes.tolist() == [list(map(float, box)) for box in boxes]
        assert found.is_bad.tolist() == [False, True, True, True]


def test_what_misses_the_border_by_the_last_digit_is_cut_and_no_fault():
    found = judge((-0.0002, 3, WIDTH + 0.0003, 8))
    assert not found.is_bad.any()
    assert found.boxes[0].tolist() == [0, 3, WIDTH, 8]
    assert judge((2, 3, WIDTH + 0.01, 8)).outside.all()


def test_of_an_image_of_unknown_size_only_the_lower_ends_are_checked():
    found = judge([(2, 3, 9000, 8), (-4, 3, 9, 8)], size=(0, 0))
    assert found.outside.tolist() == [False, True]
    assert found.boxes.tolist() == [[2, 3, 9000, 8], [0, 3, 9, 8]]


@given(BOXES, st.sampled_from([0, 1]))
def test_what_is_kept_lies_inside_and_has_an_area(boxes, added_px):
    for policy in ("fix", "drop"):
        found = judge(boxes, policy, added_px=added_px)
        kept = found.boxes[found.is_kept]
        assert (kept[:, 2:] > kept[:, :2]).all()
        assert (kept[:, :2] >= 0).all()
        assert (kept[:, 2:] <= (WIDTH, HEIGHT)).all()


@given(BOXES)
def test_fixing_twice_is_fixing_once(boxes):
    once = judge(boxes)
    once_boxes = once.boxes[once.is_kept]
    twice = judge(once_boxes)
    assert twice.is_kept.all()
    assert not twice.is_bad.any()
    np.testing.assert_array_equal(twice.boxes, once_boxes)


@given(BOXES)
def test_the_boxes_given_are_not_changed(boxes):
    before = boxes.copy()
    judge(boxes, "fix")
    np.testing.assert_array_equal(boxes, before)


def test_counts_print_what_there_was_some_of():
    assert str(BoxCounts(total=3, kept=3)) == "3 objects, 3 kept"
    counts = BoxCounts(total=1200, kept=1199, inverted=1, dropped=1, difficult=4)
    assert str(counts) == "1,200 objects, 1,199 kept (1 inverted, 1 dropped, 4 difficult)"


def test_a_side_that_float32_cannot_tell_from_nothing_is_none():
    thin = np.array([[1.0, 1.0, 1.0 + 2.2e-311, 5.0], [0.0, 0.0, 1e300, 5.0]])
    found = judged(thin, np.full((2, 2), 10), "fix")
    assert found.is_kept.tolist() == [False, True]
    assert found.zero_area.tolist() == [True, False]
    assert found.boxes[1].tolist() == [0, 0, 10, 5]


def test_a_box_that_only_just_misses_the_image_is_outside():
    sliver = (-4.4e-10, 0, 0, 1)
    for policy in ("fix", "drop"):
        found = judge(sliver, policy)
        assert (found.outside.tolist(), found.is_kept.tolist()) == ([True], [False])
    assert judge(sliver, "raise").is_bad.all()
