# SPDX-License-Identifier: Apache-2.0
"""Albumentations in workers: its own generators, and what makes them follow the loader's seed."""

from __future__ import annotations

import random

import albumentations as A
import numpy as np
import pytest
import torch
import torch.utils.data
from tests.vision.rectangles import COLOURS, scene

import penstock
from penstock.torch import DataLoader
from penstock.vision import Albumentations

# What Penstock says of a chain that is not wrapped is tests/randomness/test_kept.py's.
pytestmark = pytest.mark.filterwarnings("ignore:seed=. does not reach what the dataset keeps")


def noted(tree):
    """A batch to the last bit."""
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tuple(tree.shape), tree.numpy().tobytes()
    if isinstance(tree, np.ndarray):
        return tree.dtype, tree.shape, tree.tobytes()
    if isinstance(tree, dict):
        return {key: noted(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [noted(value) for value in tree]
    return tree


def batches(loader):
    return [noted(batch) for batch in loader]


def as_list(samples):
    return samples


IMAGE = np.random.default_rng(0).integers(0, 256, (24, 24, 3), np.uint8)


class Crops:
    """One image, cut at random by a Compose that is called as its own documentation has it."""

    def __init__(self, prepare=None, seed=None):
        self.change = A.Compose([A.RandomCrop(16, 16), A.GaussNoise(p=0.5)], seed=seed)
        self.prepare = prepare

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if self.prepare is not None:
            self.prepare(self.change)
        return self.change(image=IMAGE)["image"]


@pytest.mark.parametrize("make", [torch.utils.data.DataLoader, DataLoader])
def test_a_compose_of_its_own_repeats_itself_in_every_worker_and_epoch(make):
    """What docs/augmentation.md warns of; a release that mends it will make this fail."""
    loader = make(Crops(), batch_size=3, num_workers=2)
    first, second = batches(loader), batches(loader)
    assert first == second  # another epoch, the same crops
    assert first[0] == first[1]  # of the one worker, and of the other
    assert first[2] == first[3]
    assert first[0] != first[2]


def by_state(change):
    rng = penstock.sample_rng()
    change.set_random_state(rng, random.Random(int(rng.integers(2**63))))


def by_seed(change):
    change.set_random_seed(int(penstock.sample_rng().integers(2**63)))


@pytest.mark.parametrize("prepare", [by_state, by_seed])
def test_one_that_is_seeded_for_each_sample_follows_the_loaders_seed(prepare):
    def epoch(num_workers, seed=7, number=0):
        loader = DataLoader(Crops(prepare), 3, num_workers=num_workers, seed=seed)
        loader.set_epoch(number)
        return batches(loader)

    first = epoch(0)
    assert epoch(1) == epoch(2) == first
    assert len({made[2] for made in first}) == 4  # no two batches are alike
    assert epoch(1, number=1) != first
    assert epoch(1, seed=8) != first


class Marked:
    """Image, mask, boxes in YOLO's form and key points, handed over by their names."""

    def __init__(self):
        compose = A.Compose(
            [
                A.RandomSizedBBoxSafeCrop(64, 64),
                A.HorizontalFlip(),
                A.RandomRotate90(),
                A.RandomBrightnessContrast(),
            ],
            bbox_params=A.BboxParams("yolo", label_fields=["labels"]),
            keypoint_params=A.KeypointParams("xy", remove_invisible=False),
        )
        self.change = Albumentations(compose)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        sample = scene(index)
        height, width = sample["image"].shape[:2]
        boxes = sample["boxes"]
        centres, sizes = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
        return self.change(
            image=sample["image"],
            mask=(sample["image"] == COLOURS[sample["labels"][0]]).all(axis=-1).astype(np.uint8),
            bboxes=np.concatenate((centres, sizes), axis=1) / [width, height, width, height],
            labels=sample["labels"],
            keypoints=sample["landmarks"][:, 2],
        )


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_called_by_names_it_follows_the_loaders_seed(backend):
    def epoch(num_workers, number=0):
        loader = DataLoader(
            Marked(), 4, num_workers=num_workers, collate_fn=as_list, seed=3, backend=backend
        )
        loader.set_epoch(number)
        return batches(loader)

    first = epoch(0)
    assert epoch(1) == epoch(2) == first
    assert epoch(1, number=1) != first
