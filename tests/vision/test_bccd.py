# SPDX-License-Identifier: Apache-2.0
"""Real blood cells all the way: VOC XML, mosaic, mixup, perspective, batches, workers."""

from __future__ import annotations

import numpy as np
import pytest

from penstock import Loader
from penstock.data import Subset
from penstock.vision import (
    Compose,
    DetectionCollate,
    HorizontalFlip,
    MixUp,
    Mosaic,
    RandomHSV,
    RandomPerspective,
    VOCDetection,
    detection_collate,
)

SIZE = 160


@pytest.fixture(scope="module")
def cells(data_dir):
    return VOCDetection(data_dir / "bccd", split="train")


def recipe(dataset):
    mosaic = Mosaic(dataset, SIZE, transform=RandomPerspective(SIZE, degrees=5, shear=2))
    return MixUp(mosaic, probability=0.5, transform=Compose(RandomHSV(), HorizontalFlip()))


def batches(dataset, num_workers, collate=detection_collate):
    return list(
        Loader(
            dataset,
            batch_size=8,
            shuffle=True,
            seed=3,
            num_workers=num_workers,
            collate_fn=collate,
        )
    )


def test_batches_are_the_same_for_0_and_3_workers_and_boxes_lie_inside(cells):
    part = Subset(cells, range(32))
    alone, helped = batches(recipe(part), 0), batches(recipe(part), 3)
    assert len(alone) == len(helped) == 4
    num_objects = 0
    for (images, targets), (others, other_targets) in zip(alone, helped, strict=True):
        assert images.shape == (8, 3, SIZE, SIZE)
        assert images.dtype == np.float32
        assert np.array_equal(images, others)
        for one, other in zip(targets, other_targets, strict=True):
            assert one.keys() == other.keys()
            assert np.array_equal(one["boxes"], other["boxes"])
            assert np.array_equal(one["labels"], other["labels"])
            boxes = one["boxes"]
            num_objects += len(boxes)
            assert len(boxes) == len(one["labels"])
            assert (boxes[:, :2] >= 0).all()
            assert (boxes[:, 2:] <= SIZE).all()
            assert (boxes[:, 2:] > boxes[:, :2]).all()
    assert num_objects > 200


def test_white_cells_are_dark_blue_whatever_was_done_to_them(cells):
    """Labels keep their boxes: a WBC's middle is its stained nucleus, an RBC's is not."""
    mosaics = Mosaic(Subset(cells, range(48)), 320, transform=RandomPerspective(320, degrees=10))
    collate = DetectionCollate(output="uint8_hwc")
    differences = {name: [] for name in cells.class_names}
    for images, targets in batches(mosaics, 2, collate):
        for image, target in zip(images, targets, strict=True):
            for (x1, y1, x2, y2), label in zip(target["boxes"], target["labels"], strict=True):
                x, y, w, h = (x1 + x2) / 2, (y1 + y2) / 2, (x2 - x1) / 6, (y2 - y1) / 6
                middle = image[int(y - h) : int(y + h) + 1, int(x - w) : int(x + w) + 1]
                red, _, blue = middle.reshape(-1, 3).mean(axis=0)
                differences[cells.class_names[label]].append(blue - red)
    assert len(differences["WBC"]) > 20
    assert np.median(differences["WBC"]) > np.median(differences["RBC"]) + 30
