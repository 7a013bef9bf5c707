# SPDX-License-Identifier: Apache-2.0
"""Arguments of transforms are checked as they are made, and the message says what helps."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.vision import (
    ColorJitter,
    Compose,
    ImagePipeline,
    Mosaic,
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


def test_a_transform_of_albumentations_by_itself_is_refused_with_the_remedy():
    albumentations = pytest.importorskip("albumentations")
    for raw in (albumentations.Compose([]), albumentations.HorizontalFlip()):
        for make in (
            lambda: Compose(RandomHSV(), raw),  # noqa: B023 - called in the loop
            lambda: Mosaic([1], 9, transform=raw),  # noqa: B023
            lambda: ImagePipeline(Resize(9), steps=[raw]),  # noqa: B023
        ):
            with pytest.raises(
                ConfigError, match=r"wrap it, penstock\.vision\.Albumentations\(…\)"
            ):
                make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (123.7, 116.3, 103.5)}, r"mean is in units .* mean=\(0.4851, 0.4561, 0.4059\)"),
        ({"std": (58.4, 57.1, 57.4)}, r"std is in units of the full scale, of values in 0..1"),
        ({"color": 0.4}, r"color is a ColorJitter, .*; got 0.4"),
        ({"color": RandomHSV()}, r"color is a ColorJitter, .* as RandomHSV\(\), go into steps"),
        ({"color": ColorJitter}, r"color is a ColorJitter"),
        ({"steps": 3}, "steps is a list of functions of an image; got 3"),
        ({"steps": [3]}, "step 0 of an ImagePipeline is a function of a sample; got 3"),
    ],
    ids=["mean", "std", "number", "hsv", "class", "steps", "step"],
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
