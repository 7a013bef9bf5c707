# SPDX-License-Identifier: Apache-2.0
"""Samples with objects: rows of all arrays stay together, and what breaks the rule is named."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tests.vision.rectangles import scene

from penstock.errors import ConfigError
from penstock.vision.samples import image_of, joined, kept, num_objects


def test_objects_are_kept_in_every_array_and_the_image_is_left_alone():
    sample = scene(1)
    few = kept(sample, sample["labels"] > 2)
    assert sorted(few["labels"].tolist()) == [3, 4, 5]
    assert few["weights"].tolist() == few["labels"].tolist()
    assert few["landmarks"].shape == (3, 3, 2)
    assert few["image"] is sample["image"]
    assert few["image_id"] == "scene"
    assert num_objects(sample) == 6


def test_objects_are_put_in_the_order_of_numbers():
    sample = scene(1)
    assert kept(sample, np.array([4, 0]))["boxes"].tolist() == sample["boxes"][[4, 0]].tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"boxes": np.zeros(0)}, '"boxes" of a sample has the shape (0,), not (N, 4)'),
        ({"boxes": np.zeros((6, 5))}, '"boxes" of a sample has the shape (6, 5), not (N, 4)'),
        ({"boxes": np.zeros((2, 4))}, '"labels" of a sample has the shape (6,), but "boxes" has 2'),
        ({"size": np.array(3)}, '"size" of a sample has the shape (), but "boxes" has 6 rows'),
    ],
)
def test_an_array_that_is_not_by_object_is_named(change, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        num_objects({**scene(1), **change})


def test_a_sample_without_arrays_has_no_objects():
    assert num_objects({"image": np.zeros((2, 2, 3)), "image_id": "a"}) == 0


def test_samples_that_lack_an_array_are_not_joined():
    one, two = scene(1), scene(2)
    del two["weights"]
    with pytest.raises(ConfigError, match=r'"weights" has, for each object, \(\) and no array'):
        joined([one, two], one["image"])


def test_an_image_without_objects_joins_any_other():
    empty = {"image": np.zeros((2, 2, 3), np.uint8), "boxes": np.zeros((0, 4), np.float32)}
    both = joined([empty, scene(1)], empty["image"])
    assert num_objects(both) == 6
    assert both["landmarks"].shape == (6, 3, 2)


def test_what_is_no_image_is_named():
    with pytest.raises(ConfigError, match="got list"):
        image_of([1, 2])
    with pytest.raises(ConfigError, match=r"got shape \(0, 2, 3\)"):
        image_of({"image": np.zeros((0, 2, 3))})
