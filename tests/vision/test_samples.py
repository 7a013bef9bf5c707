# SPDX-License-Identifier: Apache-2.0
"""Samples with objects: rows of all arrays stay together, and what breaks the rule is named."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from tests.vision.rectangles import scene

from penstock.errors import ConfigError
from penstock.vision.samples import image_of, joined, kept, num_objects
from penstock.vision.transforms.geometry import RandomPerspective
from penstock.vision.transforms.mixing import Mosaic


def test_objects_are_kept_in_every_array_and_the_image_is_left_alone():
    sample = scene(1)
    few = kept(sample, sample["labels"] > 2)
    assert sorted(few["labels"].tolist()) == [3, 4, 5]
    assert few["weights"].tolist() == few["labels"].tolist()
    assert few["landmarks"].shape == (3, 3, 2)
    assert few["image"] is sample["image"]
    assert few["image_id"] == "scene"
    assert num_objects(sample) == 6


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


def test_an_array_without_rows_says_nothing_wherever_it_stands():
    image = np.zeros((2, 2, 3), np.uint8)
    bare = {"image": image, "boxes": np.zeros((0, 4), np.float32)}
    with_none = {**bare, "landmarks": np.zeros((0, 5, 2), np.float32)}
    for order in ([bare, with_none], [with_none, bare]):
        assert joined(order, image)["landmarks"].shape == (0, 5, 2)
    plain = {**bare, "boxes": np.ones((2, 4), np.float32)}
    for order in ([with_none, plain], [plain, with_none]):
        both = joined(order, image)
        assert sorted(both) == ["boxes", "image"]
        assert num_objects(both) == 2


@pytest.mark.parametrize("key", ["boxes", "labels", "landmarks"])
@pytest.mark.parametrize("make", [np.ndarray.tolist, torch.from_numpy], ids=["list", "tensor"])
def test_what_goes_by_object_but_is_no_array_is_refused_with_the_remedy(key, make):
    sample = scene(1)
    sample[key] = make(sample[key])
    kind, remedy = ("list", "asarray") if make is np.ndarray.tolist else ("Tensor", r"\.numpy\(\)")
    message = rf'"{key}" of a sample is of type {kind}, but what goes by object is a .*{remedy}'
    for use in (
        num_objects,
        lambda sample: kept(sample, np.arange(2)),
        lambda sample: joined([sample, scene(2)], sample["image"]),
        RandomPerspective(60),
        lambda sample: Mosaic([sample], 60)[0],
    ):
        with pytest.raises(ConfigError, match=message):
            use(sample)


def test_a_tensor_of_the_users_own_is_refused_and_one_for_an_image_is_not():
    with pytest.raises(ConfigError, match='"score" of a sample is of type Tensor'):
        num_objects({**scene(1), "score": torch.zeros(6)})
    assert num_objects({**scene(1), "image": torch.zeros(3, 4, 4)}) == 6


def test_what_is_no_image_is_named():
    with pytest.raises(ConfigError, match="got list"):
        image_of([1, 2])
    with pytest.raises(ConfigError, match=r"got shape \(0, 2, 3\)"):
        image_of({"image": np.zeros((0, 2, 3))})
