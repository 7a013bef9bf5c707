# SPDX-License-Identifier: Apache-2.0
"""`MixUp` and `CutMix`: images, labels and objects are mixed by one share, drawn as published."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.vision.rectangles import Scenes, seeded

from penstock.data import Subset
from penstock.errors import ConfigError
from penstock.vision.transforms.geometry import Letterbox
from penstock.vision.transforms.mixing import CutMix, MixUp


def pairs(values, size=(20, 30)):
    return [(np.full((*size, 3), value, np.uint8), k) for k, value in enumerate(values)]


def made(dataset, count, index=0, seed=3):
    samples = []
    for position in range(count):
        with seeded(seed, position):
            samples.append(dataset[index])
    return samples


def test_the_share_of_a_mixture_is_that_of_the_beta_distribution():
    shares = []
    for image, label in made(MixUp(pairs([0, 200]), num_classes=2), 800):
        if label[0] < 1:  # its partner is another sample
            shares.append(float(label[0]))
            assert abs(image[0, 0, 0] - 200 * label[1]) <= 0.5 + 1e-4
            assert (image == image[0, 0, 0]).all()
    assert len(shares) > 300
    assert stats.kstest(shares, stats.beta(32, 32).cdf).pvalue > 0.01
    assert abs(np.mean(shares) - 0.5) < 0.012
    assert abs(np.std(shares) - stats.beta(32, 32).std()) < 0.01


def test_labels_are_shares_of_one_in_float32_also_without_a_mixture():
    for probability in (0, 0.5, 1):
        for _, label in made(MixUp(pairs([0, 9, 18]), probability, num_classes=5), 30, index=2):
            assert (label.dtype, label.shape) == (np.float32, (5,))
            assert label.sum() == pytest.approx(1, abs=1e-6)
            assert label[2] > 0


def test_the_number_of_classes_comes_from_the_dataset_through_a_subset():
    class Named(list):
        class_names = ("a", "b", "c")

    _, label = MixUp(Subset(Named(pairs([1, 2])), [1]), 0)[0]
    assert label.tolist() == [0, 1, 0]
    with pytest.raises(ConfigError, match="give num_classes"):
        MixUp(pairs([1, 2]))[0]
    with pytest.raises(ConfigError, match="has the class 1, but classes go from 0 to 0"):
        MixUp(pairs([1, 2]), 0, num_classes=1)[1]


def test_objects_of_both_images_are_kept_as_they_are():
    scenes = Scenes(5, size=(60, 90))
    for sample in made(MixUp(scenes, alpha=8), 10, index=1):
        own = scenes[1]
        assert len(sample["boxes"]) == 12
        assert sample["boxes"][:6].tolist() == own["boxes"].tolist()
        assert sample["weights"].tolist() == sample["labels"].tolist()
        partners = [k for k in range(5) if np.array_equal(scenes[k]["boxes"], sample["boxes"][6:])]
        (partner,) = partners
        one, other = own["image"].astype(float), scenes[partner]["image"].astype(float)
        differs = one != other
        shares = ((sample["image"] - other) / np.where(differs, one - other, 1))[differs]
        share = float(np.median(shares)) if len(shares) else 1.0
        assert np.abs(share * one + (1 - share) * other - sample["image"]).max() < 1.5
        assert sample["image"].dtype == np.uint8
        assert sample["image_id"] == "scene/1"


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 1000), st.floats(0.1, 5))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_labels_of_a_cut_mixture_are_the_shares_of_the_pixels(height, width, seed, alpha):
    mixture = CutMix(pairs([0, 1], (height, width)), alpha=alpha, num_classes=2)
    with seeded(seed):
        image, label = mixture[0]
    assert label[1] == pytest.approx(image.mean(), abs=1e-6)
    pasted = image[..., 0] == 1
    if pasted.any():
        rows, columns = pasted.any(axis=1), pasted.any(axis=0)
        assert pasted.sum() == rows.sum() * columns.sum()  # a rectangle


def test_a_rectangle_within_the_image_has_its_shape_and_lies_anywhere():
    centres = []
    for image, _ in made(CutMix(pairs([0, 1], (100, 200)), num_classes=2), 900):
        rows, columns = (np.nonzero(image[..., 0].any(axis=axis))[0] for axis in (1, 0))
        if len(rows) and rows[0] > 0 and rows[-1] < 99 and columns[0] > 0 and columns[-1] < 199:
            assert abs(2 * len(rows) - len(columns)) <= 3  # the aspect ratio of the image
            centres.append((rows[0] + rows[-1] + 1) / 200)
    assert len(centres) > 60
    assert 0.4 < np.mean(centres) < 0.6


def test_images_of_two_sizes_are_refused_with_both_sizes():
    mixed = [*pairs([0], (20, 30)), *pairs([1], (8, 9))]
    message = r"uint8 \(20, 30, 3\), its partner, sample 1, uint8 \(8, 9, 3\).* Letterbox"
    for kind in (MixUp, CutMix):
        with pytest.raises(ConfigError, match=message):
            made(kind(mixed, num_classes=2), 20)


def test_samples_mixed_or_not_have_the_same_entries():
    scenes = Scenes(5, size=(60, 90), transform=Letterbox(64))
    entries = {frozenset(sample) for sample in made(MixUp(scenes, 0.5), 20)}
    assert entries == {frozenset(Scenes()[0])}


def test_cutmix_refuses_boxes():
    with pytest.raises(ConfigError, match="Use Mosaic or MixUp"):
        CutMix(Scenes())[0]
    with pytest.raises(ConfigError, match="Use Mosaic or MixUp"):
        CutMix(Scenes(), 0)[0]


def test_samples_that_are_neither_pairs_nor_dicts_are_refused():
    with pytest.raises(ConfigError, match=r"MixUp takes pairs \(image, class\); got a str"):
        MixUp(["cat"])[0]
    with pytest.raises(ConfigError, match="got list"):
        MixUp([([1], 1)], num_classes=2)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0}, "alpha is a number of at least 1e-06; got 0"),
        ({"alpha": float("inf")}, "alpha is a finite number of at least 1e-06; got inf"),
        ({"probability": 1.2}, "probability .* got 1.2"),
        ({"num_classes": 0}, "num_classes is an int of at least 1; got 0"),
        ({"until_epoch": -1}, "until_epoch is an int of at least 0; got -1"),
    ],
)
def test_arguments_out_of_range_are_named_with_their_values(options, message):
    for kind in (MixUp, CutMix):
        with pytest.raises(ConfigError, match=message):
            kind(pairs([1]), **options)
