# SPDX-License-Identifier: Apache-2.0
"""`Mosaic`: objects of several images on one canvas, partners and centre drawn as published."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from scipy import stats
from tests.vision.rectangles import Scenes, check_objects, scene, seeded

import penstock
from penstock.data.dataset import reads_together
from penstock.errors import ConfigError
from penstock.vision.transforms.adapters import Compose
from penstock.vision.transforms.color import RandomHSV
from penstock.vision.transforms.geometry import HorizontalFlip, Letterbox, RandomPerspective
from penstock.vision.transforms.mixing import MixUp, Mosaic


def flat(value, size=(64, 64)):
    """An image of one value without objects."""
    return {
        "image": np.full((*size, 3), value, np.uint8),
        "boxes": np.zeros((0, 4), np.float32),
        "labels": np.zeros(0, np.int64),
    }


def made(dataset, count, index=0, seed=11):
    samples = []
    for position in range(count):
        with seeded(seed, position):
            samples.append(dataset[index])
    return samples


@pytest.mark.parametrize("size", [64, 101])
def test_objects_of_all_tiles_keep_their_colours_and_rows(size):
    mosaic = Mosaic(Scenes(), size, min_side_px=4)
    counts = []
    for index, sample in enumerate(made(mosaic, 30, index=2)):
        assert sample["image"].shape == (2 * size, 2 * size, 3), index
        assert sample["image_id"] == "scene/2"
        assert sample["visibility"].shape == (len(sample["boxes"]), 3)
        check_objects(sample)
        counts.append(len(sample["boxes"]))
    assert max(counts) > 12  # of more than two images


def test_a_sample_through_the_whole_recipe_keeps_its_objects():
    chain = Compose(RandomPerspective(96, min_side_px=5), HorizontalFlip(0.5, (1, 0, 2)))
    for sample in made(Mosaic(Scenes(), 96, transform=chain), 40):
        assert sample["image"].shape == (96, 96, 3)
        check_objects(sample)


def test_the_centre_is_uniform_and_the_canvas_grey_beyond_the_tiles():
    mosaic = Mosaic([flat(200)], 64)
    centres = []
    for sample in made(mosaic, 400):
        shown = sample["image"][..., 0]
        assert set(np.unique(shown)) <= {114, 200}
        # The tiles reach s to either side of the centre; the canvas cuts one of the two.
        for axis in (0, 1):
            (seen,) = np.nonzero((shown == 200).any(axis=axis))
            first, last = int(seen[0]), int(seen[-1]) + 1
            centres.append(first + 64 if first > 0 else last - 64)
    assert min(centres) >= 32
    assert max(centres) <= 96
    shifted = np.array(centres) + np.random.default_rng(1).random(len(centres))
    assert stats.kstest(shifted, stats.uniform(32, 64).cdf).pvalue > 0.01


def test_partners_are_uniform_over_the_dataset_and_the_sample_is_in_each_quadrant():
    mosaic = Mosaic([flat(value) for value in (10, 20, 30, 40, 50)], 32)
    partners, places = [], []
    for sample in made(mosaic, 500, index=4):
        image = sample["image"][..., 0]
        corners = [image[y, x] for y in (16, 47) for x in (16, 47)]
        values = [int(value) // 10 - 1 for value in corners if value != 114]
        partners += values
        places += [place for place, value in enumerate(corners) if value == 50]
    counts = np.bincount(partners, minlength=5)
    assert stats.chisquare(counts[:4]).pvalue > 0.01
    assert stats.chisquare(np.bincount(places, minlength=4)).pvalue > 0.01


def test_tiles_of_any_shape_and_their_boxes_do_not_overlap():
    boxes = {"boxes": np.array([[-500, -500, 900, 900]], np.float32), "labels": np.array([1])}
    shapes = [{**flat(200, size), **boxes} for size in ((20, 64), (64, 20), (50, 50))]
    for sample in made(Mosaic(shapes, 64, min_side_px=0), 60, index=1):
        areas = np.prod(sample["boxes"][:, 2:] - sample["boxes"][:, :2], axis=1)
        assert areas.sum() == (sample["image"][..., 0] == 200).sum()


def test_landmarks_cut_off_with_their_tile_are_not_marked():
    for sample in made(Mosaic(Scenes(), 64), 30):
        marked = sample["landmarks"][~np.isnan(sample["landmarks"]).any(axis=-1)]
        assert (marked >= -0.5).all()
        assert (marked < 127.5).all()
    assert any(np.isnan(sample["landmarks"]).any() for sample in made(Mosaic(Scenes(), 64), 30))


def test_without_a_mosaic_a_sample_is_letterboxed():
    for sample in made(Mosaic(Scenes(), 80, probability=0, transform=dict), 3):
        assert sample["image"].shape == (80, 80, 3)
        assert len(sample["boxes"]) == 6
        check_objects(sample)


def test_all_samples_of_a_mosaic_have_one_size_and_the_same_entries():
    inner = Scenes(transform=Letterbox(70))  # its note is of one image, and soon stale
    samples = made(Mosaic(inner, 80, probability=0.5), 30)
    assert {sample["image"].shape for sample in samples} == {(160, 160, 3)}
    assert {frozenset(sample) for sample in samples} == {frozenset(scene(1))}
    assert min(len(sample["boxes"]) for sample in samples) == 6
    for sample in samples:
        check_objects(sample)


class KnowsEpochs(Scenes):
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_mosaics_end_before_the_last_epochs_and_the_dataset_within_is_told():
    inner = KnowsEpochs()
    mosaic = MixUp(Mosaic(inner, 32, until_epoch=3, transform=dict), 0)
    sides = []
    for epoch in range(5):
        mosaic.set_epoch(epoch)
        assert inner.epoch == epoch
        sides.append(mosaic[0]["image"].shape[0])
    assert sides == [64, 64, 64, 32, 32]


def test_a_sample_without_a_mosaic_may_have_a_transform_of_its_own():
    photo = {
        **flat(200, (40, 80)),
        "boxes": np.array([[8, 4, 72, 36]], np.float32),
        "labels": np.ones(1, int),
    }
    cut = RandomPerspective((48, 64), translate=0, scale=0)
    mosaic = Mosaic(
        [photo] * 2, 64, until_epoch=1, transform=cut, whole_transform=Letterbox((48, 64))
    )
    assert mosaic[0]["image"].shape == (48, 64, 3)
    assert "letterbox" not in mosaic[0]
    mosaic.set_epoch(1)
    whole = mosaic[0]
    assert whole["image"].shape == (48, 64, 3)
    assert whole["boxes"].tolist() == [pytest.approx([6.4, 11.2, 57.6, 36.8])]
    assert "letterbox" in whole


def nested(transform=None):
    chain = Compose(RandomPerspective(48), RandomHSV(), HorizontalFlip(0.5, (1, 0, 2)))
    mosaic = Mosaic(Scenes(7, transform=transform), 48, probability=0.8, transform=chain)
    return MixUp(mosaic, probability=0.7, transform=HorizontalFlip(landmark_order=False))


def loaded(num_workers, transform=None):
    loader = penstock.Loader(
        nested(transform),
        batch_size=3,
        shuffle=True,
        seed=7,
        num_workers=num_workers,
        collate_fn=list,
    )
    return [sample for _ in range(2) for batch in loader for sample in batch]


def test_mixtures_of_mosaics_are_the_same_for_any_number_of_workers():
    alone, helped = (loaded(number, HorizontalFlip(0.5, (1, 0, 2))) for number in (0, 3))
    assert len(alone) == len(helped) == 14
    for one, other in zip(alone, helped, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            np.testing.assert_array_equal(value, other[key])
    assert not all(
        np.array_equal(one["image"], other["image"])
        for one, other in zip(alone[:7], alone[7:], strict=True)
    )


class Broken(Scenes):
    def __getitem__(self, index):
        if index == 3:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


def test_a_partner_that_fails_is_named_and_the_exception_keeps_its_type():
    loader = penstock.Loader(Mosaic(Broken(), 32), seed=1, collate_fn=list)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        list(loader)
    notes = "\n".join(caught.value.__notes__)
    named = r"in sample 3 \(scene/3.png\), which Mosaic drew as a partner of sample (\d) "
    assert (drawn := re.search(named + r"\(scene/\1.png\)\n", notes))
    assert drawn.end() <= notes.index(f"while reading sample {drawn[1]} ")


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_a_broken_partner_is_the_one_that_failed_and_costs_no_good_sample(on_error):
    policy = penstock.FaultPolicy(on_error, max_failures=None)
    runs = []
    for num_workers in (0, 2):
        loader = penstock.Loader(
            Mosaic(Broken(7), 32),
            batch_size=7,
            seed=1,
            on_error=policy,
            num_workers=num_workers,
            collate_fn=list,
        )
        found = r"1 bad sample .*\n  sample 3 \(scene/3.png\), a partner of sample (\d): OSError"
        with pytest.warns(UserWarning, match=found):
            runs.append([sample["image"] for batch in loader for sample in batch])
        assert len(runs[-1]) == (7 if on_error == "replace" else 6)  # sample 3 itself
        (failure,) = loader.failures
        assert (failure.index, failure.name) == (3, "scene/3.png")
        assert failure.partner_of != 3
        assert failure.replaced_by is None
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_the_dataset_says_of_itself_is_handed_on():
    class Labelled(Scenes):
        labels = np.arange(7)
        fingerprint = "7ca8"

    mosaic = MixUp(Mosaic(Labelled(), 32))
    assert mosaic.class_names == tuple("abcdef")
    assert mosaic.labels is Labelled.labels
    assert mosaic.fingerprint == "7ca8"
    assert mosaic.describe(3) == "scene/3.png"
    assert len(mosaic) == 7
    assert not hasattr(mosaic, "get_batch")


class Chosen:
    """A subset that reads one by one."""

    def __init__(self, dataset, places):
        self.dataset, self.places = dataset, places

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        return self.dataset[self.places[index]]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [penstock.data.Subset, torch.utils.data.Subset])
def test_a_subset_of_mosaics_gives_the_samples_that_it_gives_one_by_one(kind, num_workers):
    def loaded(dataset, num_workers):
        loader = penstock.Loader(
            dataset, batch_size=3, seed=7, num_workers=num_workers, collate_fn=list
        )
        return [sample for _ in range(2) for batch in loader for sample in batch]

    places = [4, 0, 2, 6]
    found = loaded(kind(nested(), places), num_workers)
    expected = loaded(Chosen(nested(), places), 0)
    assert len(found) == len(expected) == 8
    for one, other in zip(found, expected, strict=True):
        for key, value in one.items():
            np.testing.assert_array_equal(value, other[key])


def test_a_loader_still_reads_mosaics_one_by_one_to_name_the_one_that_fails():
    mosaic = Mosaic(Broken(), 32)
    assert not reads_together(mosaic)
    assert not reads_together(penstock.data.Subset(mosaic, [1, 2]))


def test_indices_count_from_the_end_too_and_others_are_refused():
    mosaic = Mosaic(Scenes(), 32, probability=0)
    assert mosaic[-1]["image_id"] == "scene/6"
    for index in (7, -8):
        with pytest.raises(IndexError, match=f"index {index} is out of range for a dataset of 7"):
            mosaic[index]
    with pytest.raises(IndexError):
        Mosaic([], 32)[0]


def test_images_that_do_not_fit_one_canvas_are_named():
    grey = {**flat(1), "image": np.zeros((4, 4), np.uint8)}
    with pytest.raises(ConfigError, match="decode all of them"):
        made(Mosaic([flat(1), grey], 32), 20)
    with pytest.raises(ConfigError, match="got tuple"):
        Mosaic([(scene(1)["image"], 0)], 32)[0]
