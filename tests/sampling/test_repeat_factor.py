# SPDX-License-Identifier: Apache-2.0
"""Repeat factors are the paper's, and epochs hold each image as often as they say."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError
from penstock.sampling.repeat_factor import RepeatFactorSampler

IMPOSSIBLE = 1e-7  # p of a chi-square test that fails
ROWS = [[0, 0], [0], [0, 1], [0], [], [0], [0], [2, 0, 2], [0], [0]]

rows = st.lists(st.lists(st.integers(-3, 4), max_size=4), min_size=1, max_size=30)
thresholds = st.floats(1e-6, 1)


def factors_by_hand(images, threshold, power):
    """The formula of the paper, written out for lists."""
    holders = collections.Counter(name for names in images for name in set(names))
    of_class = {
        name: max(1.0, (threshold / (number / len(images))) ** power)
        for name, number in holders.items()
    }
    return [max((of_class[name] for name in names), default=1.0) for names in images], of_class


def counted(sampler, num_epochs):
    """How often each image came, a row for an epoch."""
    found = np.zeros((num_epochs, len(sampler.repeat_factors)), np.int64)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        np.add.at(found[epoch], sampler.indices(), 1)
    return found


@given(rows, thresholds, st.booleans())
def test_factors_are_the_formula(images, threshold, root):
    sampler = RepeatFactorSampler(RaggedArray.of(images), threshold, root=root)
    expected, of_class = factors_by_hand(images, threshold, 0.5 if root else 1.0)
    np.testing.assert_allclose(sampler.repeat_factors, expected, rtol=1e-12)
    assert sampler.classes.tolist() == sorted(of_class)
    np.testing.assert_allclose(
        sampler.class_repeat_factors, [of_class[c] for c in sorted(of_class)], rtol=1e-12
    )


def test_labels_of_one_class_each_count_as_images_with_that_class():
    names = np.array(["cat"] * 8 + ["dog"] * 2)
    sampler = RepeatFactorSampler(names, 0.8)
    assert sampler.classes.tolist() == ["cat", "dog"]
    assert sampler.class_frequencies.tolist() == [0.8, 0.2]
    assert sampler.repeat_factors.tolist() == [1.0] * 8 + [2.0] * 2
    assert sorted(sampler) == [*range(8), 8, 8, 9, 9]


@given(rows, thresholds, st.integers(0, 99))
def test_every_epoch_is_as_long_as_the_others_and_rounds_each_factor(images, threshold, seed):
    sampler = RepeatFactorSampler(RaggedArray.of(images), threshold, seed)
    low = np.floor(sampler.repeat_factors)
    for times in counted(sampler, 3):
        assert times.sum() == len(sampler) == round(sampler.repeat_factors.sum())
        assert np.all((times == low) | (times == np.ceil(sampler.repeat_factors)))


def test_an_image_comes_as_often_as_its_factor_says_and_the_epoch_as_long_as_their_sum():
    rng = np.random.default_rng(5)
    images = [rng.choice(12, rng.integers(0, 3), p=np.arange(1, 13) / 78) for _ in range(200)]
    sampler = RepeatFactorSampler(RaggedArray.of(images), 0.2, seed=11)
    num_epochs = 3000
    total = counted(sampler, num_epochs).sum(0)
    factors = sampler.repeat_factors
    assert abs(total.sum() / num_epochs - factors.sum()) <= 0.5
    # All of them together are off by the rounding of the length at most, and by chance.
    fractions = factors % 1
    error = np.sqrt(fractions * (1 - fractions) / num_epochs)
    moved = np.abs(total / num_epochs - factors)
    assert np.all(moved <= 6 * error + 0.5 / np.count_nonzero(fractions))
    drawn = (total - num_epochs * np.floor(factors))[fractions > 0]
    expected = fractions[fractions > 0] * drawn.sum() / fractions.sum()
    # Draws without replacement vary less than the test supposes, so only its upper end counts.
    assert stats.chisquare(drawn, expected).pvalue > IMPOSSIBLE


@pytest.mark.parametrize(
    ("labels", "threshold", "length"),
    [
        ([0] * 9 + [1], 0.1 * 1.4**2, 10),  # one fraction of 0.4: none comes once more
        ([0] * 9 + [1], 0.1 * 1.9**2, 11),  # one of 0.9: it always does
        ([0] * 18 + [1, 2], 0.05 * 1.8**2, 22),  # 1.6: scaled up it would be more than 2
    ],
)
def test_a_length_that_rounds_far_from_the_sum_still_rounds_each_factor(labels, threshold, length):
    sampler = RepeatFactorSampler(np.array(labels), threshold)
    times = counted(sampler, 20)
    assert set(times.sum(1)) == {length} == {len(sampler)}
    assert times.max() <= math.ceil(sampler.repeat_factors.max())
    assert times.min() == 1


@pytest.mark.parametrize("num_samples", [1, 7, 12, 13, 30])
def test_another_length_keeps_the_ratios(num_samples):
    sampler = RepeatFactorSampler(RaggedArray.of(ROWS), 0.4, seed=3, num_samples=num_samples)
    assert len(sampler) == num_samples
    num_epochs = 3000
    total = counted(sampler, num_epochs).sum(0)
    # Factors are 1 and 2 here, so that nothing is drawn but the part of an epoch.
    factors = sampler.repeat_factors
    assert sorted(set(factors)) == [1.0, 2.0]
    expected = num_epochs * num_samples * factors / factors.sum()
    assert stats.chisquare(total, expected).pvalue > IMPOSSIBLE


def test_thresholds_and_roots():
    labels = np.array([0] * 99 + [1])
    rare = [
        RepeatFactorSampler(labels, threshold, root=root).repeat_factors[-1]
        for threshold in (0.1, 0.2)
        for root in (True, False)
    ]
    np.testing.assert_allclose(rare, [10**0.5, 10, 20**0.5, 20])
    assert RepeatFactorSampler(labels, 0.01).repeat_factors.tolist() == [1.0] * 100


@pytest.mark.parametrize("threshold", [-0.1, 1.5, 50, float("nan")])
def test_a_threshold_that_is_no_share_is_refused(threshold):
    said = r"threshold should be a share of the images, 0 to 1 \(0.5 for 50 %\)"
    with pytest.raises(ConfigError, match=said):
        RepeatFactorSampler(np.array([0, 1]), threshold)


def test_the_datasets_names_are_kept():
    class Cells(list):
        class_names = ("red", "white")
        labels = ((0,), (0, 1))

    assert RepeatFactorSampler(Cells("ab"), 0.5).class_names == ("red", "white")
    assert RepeatFactorSampler(np.array([0, 1]), 0.5).class_names is None


def test_an_epoch_of_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"num_samples should be a positive integer value"):
        RepeatFactorSampler(np.array([0, 1]), 0.1, num_samples=0)
    with pytest.raises(ConfigError):
        RepeatFactorSampler(np.array([], np.int64), 0.1)


def test_images_without_any_class_come_once():
    sampler = RepeatFactorSampler(RaggedArray.of([[], []]), 0.5)
    assert sampler.repeat_factors.tolist() == [1.0, 1.0]
    assert sorted(sampler) == [0, 1]
    assert sampler.classes.tolist() == []
