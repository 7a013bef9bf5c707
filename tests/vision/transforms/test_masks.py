# SPDX-License-Identifier: Apache-2.0
"""Masks under every transform: they stay with their boxes and with the pixels of their objects."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from tests.vision.rectangles import Scenes, ious, scene, seeded

from penstock import vision
from penstock.errors import ConfigError
from penstock.vision.samples import kept

A = pytest.importorskip("albumentations")


crop = vision.RandomResizedCrop(80, scale=(0.3, 0.9))
plain = vision.CenterCropResize(80, 90)  # of 90 rows: cut, not scaled
# For each transform the cases, and the least IoU of a mask and its object: 1 is every pixel.
CASES = {
    "HorizontalFlip": [(vision.HorizontalFlip(1, landmark_order=False), 1)],
    "VerticalFlip": [(vision.VerticalFlip(1, landmark_order=False), 1)],
    "Letterbox": [
        (vision.Letterbox(120), 1),
        (vision.Letterbox((200, 240)), 1),
        (vision.Letterbox(64, stride=32), 1),
    ],
    "RandomPerspective": [
        (vision.RandomPerspective(80, translate=0, scale=0), 1),
        (vision.RandomPerspective(100, degrees=30, shear=5), 1),
        (vision.RandomPerspective(degrees=10, perspective=0.001), 1),
    ],
    "ObjectCrop": [
        (vision.ObjectCrop(plain, min_visibility=0), 1),
        (vision.ObjectCrop(crop), 0.99),
        (vision.ObjectCrop(crop, class_weights=[1, 0, 0, 5, 1, 1]), 0.99),
    ],
    "Compose": [(vision.Compose(vision.Letterbox(120), vision.HorizontalFlip(1, False)), 1)],
    "Albumentations": [
        (vision.Albumentations(A.Compose([A.RandomCrop(60, 70), A.HorizontalFlip(p=1)])), 1),
        (vision.Albumentations(A.Affine(scale=1.3, rotate=15, p=1)), 0.98),
        (vision.Albumentations(A.GaussNoise(std_range=(0.01, 0.02), p=1)), 1),
    ],
    "Mosaic": [
        (lambda sample: vision.Mosaic([sample], 100)[0], 1),
        (lambda sample: vision.Mosaic([sample], 100, probability=0)[0], 1),
        (lambda sample: vision.Mosaic(Scenes(), 100, transform=vision.RandomPerspective(100))[1],
         0.85),
    ],
    # Below, and for torchvision in tests/clients: they mix or change colours, or refuse masks.
    "MixUp": [], "CutMix": [], "RandomHSV": [], "ColorJitter": [], "Torchvision": [],
}  # fmt: skip


def test_no_transform_is_forgotten():
    names = {
        name
        for name in vision.__all__
        if inspect.isclass(found := getattr(vision, name))
        and found.__module__.startswith("penstock.vision.transforms")
    }
    assert names == CASES.keys()


@pytest.mark.parametrize(
    ("transform", "least"), [case for cases in CASES.values() for case in cases]
)
def test_masks_and_boxes_stay_with_the_pixels(transform, least):
    for position in range(6):
        with seeded(3, position):
            changed = transform(scene(position))
        assert changed["masks"].shape == (len(changed["boxes"]), *changed["image"].shape[:2])
        assert len(ious(changed)) > 0
        assert ious(changed).min() >= least, ious(changed)


def test_mixup_has_the_masks_of_both():
    dataset = Scenes(size=(90, 120))
    with seeded(1):
        mixed = vision.MixUp(dataset)[2]
    masks = [dataset[n]["masks"] for n in range(7)]
    assert any(np.array_equal(mixed["masks"], [*masks[2], *other]) for other in masks)
    with pytest.raises(ConfigError, match="detection samples"):
        vision.CutMix(dataset)[0]


@pytest.mark.parametrize("transform", [vision.RandomHSV(), vision.ColorJitter(0.4, 0.4, 0.4, 0.1)])
def test_colours_change_and_masks_do_not(transform):
    changed = transform(scene(1))
    assert not np.array_equal(changed["image"], scene(1)["image"])
    np.testing.assert_array_equal(changed["masks"], scene(1)["masks"])


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n]])
def test_masks_keep_their_type_also_without_objects(name):
    sample = scene(0)
    sample["masks"] = sample["masks"].astype(bool)
    for count in (6, 0):
        with seeded(3):
            changed = CASES[name][0][0](kept(sample, np.arange(count)))
        assert changed["masks"].shape == (len(changed["boxes"]), *changed["image"].shape[:2])
        assert changed["masks"].dtype == bool
        assert (len(changed["boxes"]) > 0) == (count > 0)
