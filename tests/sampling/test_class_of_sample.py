# SPDX-License-Identifier: Apache-2.0
"""Equal labels are one class, and what is no class is named."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from penstock.data.labels.values import NotLabelsError
from penstock.sampling.balanced_shuffle import class_of_sample


@pytest.mark.parametrize(
    ("sample", "name"),
    [
        (("pixels", 3), 3),
        (["pixels", "mask", "cat"], "cat"),
        ({"image": 0, "label": 1}, 1),
        ({"targets": 4, "image": 0}, 4),
        (("pixels", torch.tensor(5)), 5),
    ],
)
def test_without_a_function_the_usual_rules_hold(sample, name):
    assert class_of_sample(sample) == name


@pytest.mark.parametrize("three", [np.int64(3), np.array(3), torch.tensor(3), np.uint8(3), 3.0])
def test_equal_numbers_are_one_class_whatever_holds_them(three):
    assert {class_of_sample(three, lambda sample: sample): "three"}[3] == "three"


@pytest.mark.parametrize("name", [b"7", ("cat", "night"), frozenset({1, 2}), False])
def test_a_function_may_return_anything_that_can_be_hashed(name):
    assert class_of_sample("sample", lambda _: name) == name


@pytest.mark.parametrize("sample", [{}, {"image": 0}, (), ("pixels",), 3, "text", np.zeros(2)])
def test_a_sample_without_a_label_has_no_class(sample):
    with pytest.raises(NotLabelsError, match=r"^(is|has) "):
        class_of_sample(sample)


@pytest.mark.parametrize(
    "label", [None, (1, 2), [1, 2], np.array([1]), torch.tensor([1, 2]), math.nan], ids=repr
)
def test_what_is_no_class_is_named(label):
    with pytest.raises(NotLabelsError, match=r"^has as its label .*, which is not one class$"):
        class_of_sample(("pixels", label))
