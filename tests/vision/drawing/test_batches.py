# SPDX-License-Identifier: Apache-2.0
"""Batches of every form that the library knows, taken apart to be drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError
from penstock.vision import IMAGENET_MEAN, IMAGENET_STD
from penstock.vision.drawing.batches import samples_of_batch
from penstock.vision.drawing.contact_sheet import contact_sheet

PHOTOS = np.random.default_rng(0).integers(0, 256, (3, 24, 32, 3), dtype=np.uint8)
CHW = np.ascontiguousarray(PHOTOS.transpose(0, 3, 1, 2))
BOXES = np.array([[2, 3, 12, 13]], np.float32)
TARGETS = [{"boxes": BOXES, "labels": np.array([n]), "image_id": f"{n}"} for n in range(3)]


def in_bytes(image):
    image = np.asarray(image)
    image = image if image.shape[2] <= 4 else image.transpose(1, 2, 0)
    return image if image.dtype == np.uint8 else np.rint(255 * image).astype(int)


@pytest.mark.parametrize(
    "images",
    [
        PHOTOS,
        CHW,
        torch.from_numpy(CHW),
        CHW.astype(np.float32) / 255,
        torch.from_numpy(CHW).float(),
        list(PHOTOS),
        torch.from_numpy(CHW).to(memory_format=torch.channels_last),
    ],
    ids=["hwc", "chw", "tensor", "floats", "to-255", "list", "channels-last"],
)
def test_images_of_any_form_are_shown_as_they_are(images):
    for batch in (images, (images,), [images, np.arange(3)], {"label": [1, 2, 3], "image": images}):
        samples = samples_of_batch(batch)
        assert [
            np.abs(in_bytes(one["image"]) - photo).max()
            for one, photo in zip(samples, PHOTOS, strict=True)
        ] == [0, 0, 0]
        assert contact_sheet(samples, tile_px=64).ndim == 3


@pytest.mark.parametrize(
    ("mean", "std", "known"),
    [
        (IMAGENET_MEAN, IMAGENET_STD, ()),
        ((0.5,) * 3, (0.5,) * 3, ()),
        ((0.2, 0.3, 0.4), (0.1, 0.2, 0.3), [([0.2, 0.3, 0.4], torch.tensor([0.1, 0.2, 0.3]))]),
    ],
    ids=["imagenet", "halves", "known"],
)
@pytest.mark.parametrize("is_chw", [True, False])
def test_a_normalisation_is_undone(mean, std, known, is_chw):
    images = ((PHOTOS / 255 - mean) / std).astype(np.float32)
    images = images.transpose(0, 3, 1, 2) if is_chw else images
    for one, photo in zip(samples_of_batch(images, known), PHOTOS, strict=True):
        assert np.abs(in_bytes(one["image"]) - photo).max() <= 1


def test_what_no_usual_normalisation_made_is_left_to_be_stretched():
    images = 1000 * np.random.default_rng(0).standard_normal((2, 3, 8, 8))
    assert np.array_equal(samples_of_batch(images)[1]["image"], images[1])


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (np.array([4, 5, 6]), {"label": 6}),
        (torch.tensor([4, 5, 6]), {"label": 6}),
        ([[1, 0], [0, 1], [0.5, 0.5]], {"label": [0.5, 0.5]}),
        (TARGETS, TARGETS[2]),
        ([np.c_[BOXES, [[n]]] for n in range(3)], {"boxes": BOXES, "labels": np.array([2])}),
        (
            {"boxes": np.stack([BOXES] * 3), "labels": np.array([[7], [8], [9]]), "note": "of all"},
            {"boxes": BOXES, "labels": np.array([9])},
        ),
        ({"labels": np.array([4, 5, 6])}, {"label": 6}),
        (np.arange(5), {}),  # of something else
        (None, {}),
    ],
    ids=["classes", "tensor", "mixtures", "targets", "arrays", "fields", "labels", "other", "none"],
)
def test_what_a_batch_says_of_an_image_goes_with_it(others, expected):
    *_, last = samples_of_batch((CHW, others))
    assert last.keys() - {"image"} == expected.keys()
    for key, value in expected.items():
        assert np.array_equal(np.asarray(last[key]), np.asarray(value))
    assert contact_sheet([last], ["a"] * 10, tile_px=64).ndim == 3


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        (np.zeros((4, 10), np.float32), r"batch has shape \(4, 10\) and dtype float32"),
        (
            (torch.zeros(2, 8, 8, 8), [1, 2]),
            r"batch\[0\] has shape \(2, 8, 8, 8\) and dtype torch.float32",
        ),
        (
            {"points": np.zeros((2, 3)), "of": "all"},
            r"batch\['points'\] has .*, batch\['of'\] is of type str",
        ),
        ({"image": [np.zeros((8, 8))]}, r"batch\['image'\]\[0\] has shape \(8, 8\)"),
    ],
)
def test_a_batch_without_images_names_its_leaves(batch, told):
    with pytest.raises(ConfigError, match=told):
        samples_of_batch(batch)
