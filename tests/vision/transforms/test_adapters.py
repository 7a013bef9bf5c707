# SPDX-License-Identifier: Apache-2.0
"""Transforms of Albumentations and torchvision on our samples, under our seeds."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from tests.vision.rectangles import (
    Scenes,
    check_bounds,
    check_objects,
    sample_of,
    scene,
    seeded,
)

import penstock
from penstock.errors import ConfigError
from penstock.vision.transforms.adapters import Albumentations, Torchvision, _knows_marks
from penstock.vision.transforms.mixing import Mosaic

A = pytest.importorskip("albumentations")


def equal(one, other):
    for key, value in one.items():
        np.testing.assert_array_equal(value, other[key])


@pytest.mark.parametrize(
    "transform",
    [
        A.HorizontalFlip(p=1),
        A.Compose([A.VerticalFlip(p=1), A.Transpose(p=1)]),
        A.Compose([A.Resize(150, 110)]),
        A.OneOf([A.HorizontalFlip(p=1), A.VerticalFlip(p=1)], p=1),
    ],
)
def test_boxes_landmarks_and_rows_move_with_the_pixels(transform):
    sample = scene(4)
    changed = Albumentations(transform)(sample)
    check_objects(changed)
    check_bounds(changed)
    assert not np.array_equal(changed["boxes"], sample["boxes"])
    assert changed["landmarks"].shape == (6, 3, 2)
    assert changed["image_id"] == "scene"
    equal(sample, scene(4))


@pytest.mark.parametrize(
    "boxes",
    [
        None,
        A.BboxParams("yolo", label_fields=["labels"], min_visibility=0.6),
        A.BboxParams("coco", label_fields=[], min_visibility=0.6),
        A.BboxParams("pascal_voc", min_visibility=0.6),
    ],
)
def test_what_a_crop_drops_is_dropped_from_every_array(boxes):
    crop = Albumentations(A.Compose([A.RandomCrop(60, 60)], bbox_params=boxes))
    counts = []
    for position in range(30):
        with seeded(2, position):
            cut = crop(scene(4))
        if boxes is not None:
            check_objects(cut)
        assert cut["weights"].tolist() == cut["labels"].tolist()
        assert cut["landmarks"].shape == (len(cut["boxes"]), 3, 2)
        counts.append(len(cut["boxes"]))
    assert min(counts) < max(counts)


def test_landmarks_beyond_a_crop_become_nan_and_those_not_marked_stay_so():
    sample = scene(4)
    sample["landmarks"][:, 0] = np.nan
    crop = Albumentations(A.Compose([A.Crop(0, 0, 60, 60)]))
    cut = crop(sample)
    assert np.isnan(cut["landmarks"][:, 0]).all()
    assert np.isnan(cut["landmarks"][:, 1:]).any()
    seen = cut["landmarks"][~np.isnan(cut["landmarks"])]
    assert (seen < 60).all()


def test_landmarks_beyond_the_image_are_lost_or_kept_as_its_options_say():
    sample = sample_of([(2, 2, 6, 6)], [0], (20, 30))
    outside = [(-9, 5), (29.4, 19.4), (-0.4, 3)]
    sample["landmarks"] = np.array([outside], np.float32)
    mirrored = Albumentations(A.HorizontalFlip(p=1))(sample)
    assert np.isnan(mirrored["landmarks"][0, 0]).all()
    np.testing.assert_allclose(mirrored["landmarks"][0, 2], [29, 3], atol=1e-4)
    keep = A.KeypointParams("xy", remove_invisible=False)
    mirrored = Albumentations(A.Compose([A.HorizontalFlip(p=1)], keypoint_params=keep))(sample)
    np.testing.assert_allclose(mirrored["landmarks"][0, 0], [38, 5], atol=1e-4)


def test_resizing_multiplies_landmarks_plainly_as_the_page_says():
    sample = sample_of([(2, 2, 6, 6)], [0], (20, 30))
    resized = Albumentations(A.Resize(40, 60))(sample)
    np.testing.assert_allclose(resized["landmarks"], sample["landmarks"] * 2, atol=1e-4)


def test_a_transform_of_colours_alone_takes_samples_without_a_warning():
    sample = scene(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changed = Albumentations(A.Compose([A.InvertImg(p=1)]))(sample)
    assert (changed["image"] == 255 - sample["image"]).all()
    equal({**changed, "image": 0}, {**sample, "image": 0})


def random_chain():
    return Albumentations(
        A.Compose(
            [
                A.HorizontalFlip(p=0.5),
                A.OneOf([A.GaussNoise(p=1), A.Blur(p=1)], p=0.7),
                A.RandomBrightnessContrast(p=0.7),
                A.Affine(translate_px=(-5, 5), p=0.7),
            ],
            bbox_params=A.BboxParams("pascal_voc", clip=True),
        )
    )


def test_samples_depend_on_the_seed_and_not_on_the_workers():
    runs = []
    for num_workers in (0, 3):
        loader = penstock.Loader(
            Mosaic(Scenes(6, transform=random_chain()), 48, probability=0.5),
            seed=7,
            batch_size=2,
            shuffle=True,
            num_workers=num_workers,
            collate_fn=list,
        )
        runs.append([sample for _ in range(2) for batch in loader for sample in batch])
    for one, other in zip(*runs, strict=True):
        equal(one, other)


def test_what_is_not_of_albumentations_is_refused():
    with pytest.raises(ConfigError, match="takes a transform of the package albumentations"):
        Albumentations(ImageOps.mirror)


class Mirror:
    """A transform as torchvision's first kind are: a Pillow image in, one out."""

    def __call__(self, image):
        assert isinstance(image, Image.Image)
        return ImageOps.mirror(image)


def test_a_transform_of_pillow_images_takes_and_gives_arrays():
    image = scene(1)["image"]
    changed = Torchvision(Mirror())(image)
    assert (changed == image[:, ::-1]).all()
    assert changed.flags.writeable
    assert Torchvision(Mirror())({"image": image, "image_id": "a"})["image_id"] == "a"


def test_one_that_knows_no_boxes_gets_samples_with_boxes_only_for_their_colours():
    with pytest.raises(ConfigError, match="Mirror gets no more than the image, and the sample"):
        Torchvision(Mirror())(scene(1))
    inverted = Torchvision(ImageOps.invert, colour_only=True)(scene(1))
    assert (inverted["image"] == 255 - scene(1)["image"]).all()
    equal({**inverted, "image": 0}, {**scene(1), "image": 0})


class Of2:
    """As a transform of v2 that torchvision has."""


Of2.__module__ = "torchvision.transforms.v2._geometry"


class UsersOwn(Of2, torch.nn.Module):
    """A user's subclass of it."""


class OldCompose:
    """As torchvision's first Compose, which hands on whatever it is given."""

    def __init__(self, *transforms):
        self.transforms = transforms


OldCompose.__module__, OldCompose.__qualname__ = "torchvision.transforms.transforms", "Compose"


@pytest.mark.parametrize(
    ("transform", "knows"),
    [
        (Of2(), True),
        (UsersOwn(), True),
        (torch.nn.Sequential(UsersOwn(), torch.nn.Sequential(UsersOwn())), True),
        (torch.nn.Sequential(UsersOwn(), torch.nn.Identity()), False),
        (OldCompose(Of2(), UsersOwn()), True),
        (OldCompose(Of2(), Mirror()), False),
        (Mirror(), False),
    ],
    ids=["v2", "subclass", "sequential", "sequential-mixed", "compose", "compose-mixed", "old"],
)
def test_what_is_made_of_v2_alone_is_known_to_move_boxes(transform, knows):
    assert _knows_marks(transform) is knows


def test_called_by_names_it_hands_over_and_returns_what_albumentations_does():
    compose = A.Compose(
        [A.RandomCrop(40, 50), A.HorizontalFlip()],
        bbox_params=A.BboxParams("coco", label_fields=["names"]),
    )
    before = compose.random_generator.bit_generator.state
    change = Albumentations(compose)
    image = scene(1)["image"]
    targets = {"image": image, "mask": image[..., 0], "bboxes": [[10, 10, 60, 60]]}
    made = []
    for _ in range(2):
        with seeded(5, 3):
            made.append(change(**targets, names=["cell"]))
    assert made[0].keys() == {*targets, "names"}
    equal(made[0], made[1])
    assert np.array_equal(made[0]["mask"], made[0]["image"][..., 0])
    assert made[0]["names"] == ["cell"]
    with seeded(5, 4):
        other = change(**targets, names=["cell"])
    assert not np.array_equal(other["image"], made[0]["image"])
    assert compose.random_generator.bit_generator.state == before
    with seeded(5, 3):  # a sample draws the same
        assert np.array_equal(change(image), made[0]["image"])


def test_a_sample_and_names_are_too_much():
    change = Albumentations(A.HorizontalFlip(p=1))
    with pytest.raises(KeyError, match="named arguments"):
        change(scene(1), image=0, mask=0)
    with pytest.raises(ConfigError, match="got NoneType"):
        change()
