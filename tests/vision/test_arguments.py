# SPDX-License-Identifier: Apache-2.0
"""Arguments of transforms are checked as they are made, and the message says what helps."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.vision import (
    Compose,
    ImagePipeline,
    ObjectCrop,
    RandomHSV,
    RandomResizedCrop,
    Resize,
)
from penstock.vision.arguments import checked_number


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), np.inf])
def test_numbers_are_finite(value):
    with pytest.raises(ConfigError, match=r"gain is a .*number of at least 0; got"):
        checked_number("gain", value, 0)
    assert checked_number("gain", np.float32(2), 0) == 2
    assert checked_number("gain", np.array(2), 0) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (123.7, 116.3, 103.5)}, r"mean is in units .* mean=\(0.4851, 0.4561, 0.4059\)"),
        ({"std": (58.4, 57.1, 57.4)}, r"std is in units of the full scale, of values in 0..1"),
        ({"steps": [3]}, "transform 0 of steps is no function; got 3"),
    ],
    ids=["mean", "std", "steps"],
)
def test_a_pipeline_checks_its_parts_as_it_is_made(options, message):
    with pytest.raises(ConfigError, match=message):
        ImagePipeline(Resize(9), **options)


def test_a_subclass_that_keeps_its_arguments_otherwise_is_shown_without_them():
    class Half(Resize):
        def __init__(self, height, *others):
            super().__init__(height // 2)

    assert repr(Half(8)) == "Half()"


@pytest.mark.parametrize(
    "crop",
    [224, None, Compose(RandomHSV()), RandomResizedCrop, "center"],
    ids=["int", "none", "compose", "class", "text"],
)
def test_what_is_no_crop_is_refused_with_those_that_there_are(crop):
    for make in (ImagePipeline, ObjectCrop):
        with pytest.raises(ConfigError, match=r"crop decides .* RandomResizedCrop\(224\)"):
            make(crop)
