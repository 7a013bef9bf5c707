# SPDX-License-Identifier: Apache-2.0
"""Shares of classes as asked, in the mean or exactly, and each class's samples in turn."""

import collections
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from penstock.data import Subset
from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError
from penstock.sampling.class_balanced import (
    ClassBalancedSampler,
    class_shares,
)

LEAST_P = 1e-6  # of a test that is right, one in a million seeds would fail
COUNTS = np.array([600, 240, 100, 50, 10])
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(5), COUNTS))
label_lists = st.lists(st.integers(0, 5), min_size=1, max_size=60)
alphas = st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.5, "effective"])


def orders(sampler, num_epochs):
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        yield sampler.indices()


def expected_shares(alpha):
    powers = COUNTS ** (1.0 - alpha)
    return powers / powers.sum()


@pytest.mark.parametrize("replacement", ["auto", True])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_drawn_classes_have_their_shares_in_the_mean(alpha, replacement):
    sampler = ClassBalancedSampler(LABELS, alpha, replacement=replacement, seed=3)
    drawn = np.concatenate(list(orders(sampler, 100)))
    counts = np.bincount(LABELS[drawn], minlength=5)
    assert stats.chisquare(counts, expected_shares(alpha) * len(drawn)).pvalue > LEAST_P


def test_counts_vary_as_independent_draws_do_unless_they_are_exact():
    loose = ClassBalancedSampler(LABELS, seed=3)
    counts = np.array([np.bincount(LABELS[drawn], minlength=5) for drawn in orders(loose, 300)])
    expected = 1000 * 0.2 * 0.8
    ratio = counts[:, 0].var(ddof=1) / expected * 299
    assert LEAST_P < stats.chi2(299).cdf(ratio) < 1 - LEAST_P


@pytest.mark.parametrize("replacement", ["auto", True])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_items_of_a_class_are_as_likely_as_each_other(alpha, replacement):
    sampler = ClassBalancedSampler(LABELS, alpha, replacement=replacement, seed=4)
    drawn = np.concatenate(list(orders(sampler, 200)))
    counts = np.bincount(drawn, minlength=len(LABELS))
    for label in range(5):
        of_class = counts[label == LABELS]
        # In turn they differ by less than chance would have it: the upper tail alone is a flaw.
        assert stats.chisquare(of_class).pvalue > LEAST_P


@given(label_lists, alphas, st.integers(1, 300), st.integers(0, 99))
def test_exact_counts_are_the_shares_rounded_up_or_down(labels, alpha, num_samples, epoch):
    sampler = ClassBalancedSampler(labels, alpha, num_samples, exact=True, seed=1)
    sampler.set_epoch(epoch)
    drawn = np.asarray(labels)[sampler.indices()]
    assert len(drawn) == num_samples
    for value, share in zip(sampler.classes, sampler.shares, strict=True):
        quota = share * num_samples
        assert math.floor(quota - 1e-6) <= (drawn == value).sum() <= math.ceil(quota + 1e-6)


def test_exact_counts_that_are_no_whole_numbers_are_right_in_the_mean():
    # 7 draws for 5 equal classes: 1.4 of each.
    sampler = ClassBalancedSampler(LABELS, 1.0, 7, exact=True, seed=2)
    counts = np.array([np.bincount(LABELS[d], minlength=5) for d in orders(sampler, 2000)])
    assert set(counts.ravel().tolist()) == {1, 2}
    num_up = (counts == 2).sum(axis=0)
    assert num_up.sum() == 2000 * 2
    assert stats.chisquare(num_up).pvalue > LEAST_P


def test_neighbouring_classes_are_rounded_up_together_as_often_as_others():
    # Of 5 quotas of 1.4 two are rounded up; in a fixed order the same neighbours never would be.
    sampler = ClassBalancedSampler(LABELS, 1.0, 7, exact=True, seed=6)
    pairs = collections.Counter()
    for drawn in orders(sampler, 2000):
        counts = np.bincount(LABELS[drawn], minlength=5)
        pairs[tuple(np.flatnonzero(counts == 2).tolist())] += 1
    assert len(pairs) == 10
    assert stats.chisquare(list(pairs.values())).pvalue > LEAST_P


def test_beta_counts_in_the_shares_and_the_draws():
    sampler = ClassBalancedSampler(LABELS, "effective", 20_000, beta=0.9, seed=1)
    assert sampler.shares == pytest.approx(class_shares(COUNTS, "effective", 0.9))
    drawn = np.bincount(LABELS[sampler.indices()], minlength=5)
    assert stats.chisquare(drawn, sampler.shares * 20_000).pvalue > LEAST_P
    assert abs(sampler.shares - class_shares(COUNTS, "effective")).max() > 0.05


def test_a_class_of_a_tiny_share_is_not_starved_by_rounding():
    labels = [0] * 9999 + [1]
    sampler = ClassBalancedSampler(labels, 0.0, 1000, exact=True, seed=2)
    num_shown = sum(9999 in order for order in orders(sampler, 200))
    assert 5 <= num_shown <= 45  # 20 in the mean


@given(label_lists, st.integers(0, 20))
def test_exact_natural_shares_are_a_plain_shuffle(labels, epoch):
    sampler = ClassBalancedSampler(labels, 0.0, exact=True, seed=1)
    sampler.set_epoch(epoch)
    assert sorted(sampler.indices().tolist()) == list(range(len(labels)))


@given(label_lists, alphas, st.integers(1, 200), st.booleans())
def test_a_class_goes_through_its_items_before_one_repeats(labels, alpha, num_samples, exact):
    sampler = ClassBalancedSampler(labels, alpha, num_samples, exact=exact)
    drawn, labels = sampler.indices(), np.asarray(labels)
    for value, size in zip(sampler.classes, sampler.counts, strict=True):
        of_class = drawn[labels[drawn] == value]
        for start in range(0, len(of_class), size):
            cycle = of_class[start : start + size]
            assert len(np.unique(cycle)) == len(cycle)


@given(label_lists, alphas)
def test_undersampling_gives_no_sample_twice_and_is_the_longest_that_can(labels, alpha):
    sampler = ClassBalancedSampler(labels, alpha, replacement=False, seed=5)
    assert len(sampler) == len(ClassBalancedSampler(labels, alpha, "undersample"))
    drawn = sampler.indices()
    assert len(np.unique(drawn)) == len(drawn)
    if min(sampler.counts / sampler.shares) >= 1:  # else one draw of any class
        with pytest.raises(ConfigError, match=r"at most \d+ samples are possible"):
            ClassBalancedSampler(labels, alpha, len(sampler) + 1, replacement=False)


@given(label_lists, st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.5]))
def test_oversampling_gives_every_sample_of_every_class(labels, alpha):
    sampler = ClassBalancedSampler(labels, alpha, "oversample", exact=True, seed=5)
    assert set(sampler.indices().tolist()) == set(range(len(labels)))
    # In one draw less, some class would not have all of its samples by its share.
    assert ((len(sampler) - 1) * sampler.shares < sampler.counts - 1e-6).any()


@given(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=20).filter(any))
def test_undersampling_is_no_longer_than_the_data_whatever_their_labels(rows):
    sampler = ClassBalancedSampler(RaggedArray.of(rows), num_samples="undersample")
    assert 1 <= len(sampler) <= len(rows)
    sizes = [*sampler.counts.tolist(), sum(not row for row in rows)]
    quotas = [*(sampler.shares * len(sampler)), len(sampler) * sizes[-1] / len(rows)]
    if len(sampler) > 1:
        assert all(quota <= size + 1e-6 for quota, size in zip(quotas, sizes, strict=True))


def test_over_and_undersampling_are_exact_in_every_epoch():
    under = ClassBalancedSampler(LABELS, num_samples="undersample")
    over = ClassBalancedSampler(LABELS, num_samples="oversample")
    assert under.exact
    assert over.exact
    for drawn in orders(under, 50):
        assert len(np.unique(drawn)) == len(drawn)
    for drawn in orders(over, 50):
        assert len(np.unique(drawn)) == len(LABELS)


def test_one_label_in_rows_of_one_can_be_drawn_without_replacement():
    rows = RaggedArray.of([[label] for label in LABELS.tolist()])
    assert list(ClassBalancedSampler(rows, replacement=False, seed=3)) == list(
        ClassBalancedSampler(LABELS, replacement=False, seed=3)
    )


def test_samples_with_several_labels_are_drawn_by_class_and_those_without_naturally():
    rows = [[0]] * 60 + [[0, 0, 1]] * 20 + [[2]] * 5 + [[]] * 15
    sampler = ClassBalancedSampler(rows, seed=9)
    assert sampler.counts.tolist() == [80, 20, 5]
    assert sampler.shares == pytest.approx([0.85 / 3] * 3)
    drawn = np.concatenate(list(orders(sampler, 200)))
    groups = np.bincount(np.repeat(np.arange(4), [60, 20, 5, 15])[drawn])
    # A third of the labelled draws is for class 0, a quarter of these are of the second kind.
    expected = np.array([0.25, 0.25 + 0.75 / 2, 0, 0])
    expected = 0.85 / 3 * np.array([60 / 80, 1 + 20 / 80, 1, 0]) + np.array([0, 0, 0, 0.15])
    assert stats.chisquare(groups, expected * len(drawn)).pvalue > LEAST_P


def test_labels_come_in_many_forms():
    expected = list(ClassBalancedSampler([0, 1, 1, 2], seed=3))
    names = np.array(["a", "b", "b", "c"])
    hot = np.eye(3, dtype=np.int64)[[0, 1, 1, 2]]

    class Digits(list):
        targets = torch.tensor([0, 1, 1, 2])

    for labels in (
        torch.tensor([0, 1, 1, 2]),
        (5, 6, 6, 7),
        names,
        hot,
        RaggedArray.of([[0], [1], [1], [2]]),
        Digits("wxyz"),
    ):
        assert list(ClassBalancedSampler(labels, seed=3)) == expected
    part = Subset(Digits("wxyz"), [0, 3])
    assert ClassBalancedSampler(part).classes.tolist() == [0, 2]


def test_a_new_epoch_draws_anew_and_the_labels_are_part_of_the_settings():
    sampler = ClassBalancedSampler(LABELS)
    first, second = orders(sampler, 2)
    assert not np.array_equal(first, second)
    other = ClassBalancedSampler(LABELS[::-1].copy())
    assert other.settings() != sampler.settings()
    assert ClassBalancedSampler(LABELS.tolist()).settings() == sampler.settings()


def test_balance_moves_from_natural_to_equal_over_the_epochs():
    sampler = ClassBalancedSampler(LABELS, (0, 1), num_epochs=5, exact=True, seed=1)
    settings, found = sampler.settings(), []
    for epoch, drawn in enumerate(orders(sampler, 7)):
        found.append(np.bincount(LABELS[drawn], minlength=5))
        alpha = min(epoch / 4, 1.0)
        assert np.abs(found[-1] - 1000 * expected_shares(alpha)).max() < 1
        assert len(drawn) == 1000
        assert sampler.settings() == settings
    assert found[0].tolist() == COUNTS.tolist()
    assert found[4].tolist() == found[6].tolist() == [200] * 5


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([], {}, "have no label"),
        ([[], []], {}, "have no label"),
        ([0, 1], {"num_samples": 0}, "num_samples"),
        ([0, 1], {"num_samples": "over"}, "num_samples='over'"),
        ([0, 1], {"replacement": "yes"}, "not 'yes'"),
        ([0, 1], {"exact": 1}, "exact=1"),
        ([[0], [1, 0]], {"replacement": False}, "one label per sample, but sample 1 has 2"),
        ([0, 1], {"num_samples": "oversample", "replacement": False}, "which replacement=False"),
        (list("aaab"), {"num_samples": 4, "replacement": False}, "at most 2 .*=4: class b has 1"),
        ([0, 1], {"alpha": (0, 1), "num_epochs": 0}, "num_epochs"),
        ([0, 1], {"alpha": (0, 1)}, "num_epochs"),
        ([0, 1], {"num_epochs": 3}, "num_epochs is for a pair as alpha"),
        ([0, 1], {"alpha": ("effective", 1), "num_epochs": 2}, "of two numbers"),
        ([0, 1], {"alpha": (0, 1), "replacement": False, "num_epochs": 2}, "replacement=False"),
        ([0, 1], {"alpha": (0, 1), "num_samples": "oversample", "num_epochs": 2}, "of one size"),
    ],
)
def test_what_makes_no_sense_is_an_error(labels, options, message):
    with pytest.raises(ConfigError, match=message):
        ClassBalancedSampler(labels, **options)
