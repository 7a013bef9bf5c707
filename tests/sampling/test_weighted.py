# SPDX-License-Identifier: Apache-2.0
"""Weights decide how often an index comes: any number of weights, of any size."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from penstock.errors import ConfigError
from penstock.sampling.samplers import WeightedRandomSampler

seeds = st.integers(0, 1 << 70)
# Zeros, small numbers and huge ones.
odd_weights = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-290, 1e-280), st.floats(0, 1), st.floats(0, 1e306)),
    min_size=1,
    max_size=50,
)


def assert_as_likely_as(weights, draws):
    """Neither further from the weights than chance explains, nor nearer to them."""
    weights = np.asarray(weights, np.float64)
    counts = np.bincount(draws, minlength=len(weights))
    assert not counts[weights == 0].any()
    expected = weights[weights > 0] / weights.sum() * len(draws)
    p = stats.chisquare(counts[weights > 0], expected).pvalue
    assert 1e-6 < p < 1 - 1e-6


def assert_independent(pairs):
    """First and second of the pairs, (n, 2), tell nothing of each other."""
    table = np.zeros(pairs.max(axis=0) + 1)
    np.add.at(table, tuple(pairs.T), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-6


@pytest.mark.parametrize(
    "weights",
    [
        1 / np.arange(1, 200),
        [0, 1, 0, 0, 2, 5, 0],
        [1, 1000],
        [8e307, 4e307, 2e307],  # near the largest
        np.arange(100, dtype=np.uint8),
        [True, False, True],
    ],
    ids=["zipf", "with zeros", "1000 to 1", "huge", "integers", "bools"],
)
def test_an_index_comes_as_often_as_its_weight_says(weights):
    draws = WeightedRandomSampler(weights, 200_000, seed=1).indices()
    assert draws.dtype == np.int64
    assert_as_likely_as(weights, draws)


def test_the_first_place_of_an_order_is_as_likely_as_the_others():
    weights = [0.0, 1.0, 2.0, 5.0]
    places = []
    sampler = WeightedRandomSampler(weights, 3)
    for epoch in range(4000):
        sampler.set_epoch(epoch)
        places.append(sampler.indices())
    for column in np.transpose(places):
        assert_as_likely_as(weights, column)
    assert_independent(np.array(places)[:, :2] - 1)
    assert_independent(np.array(places)[:, 1:] - 1)


def test_epochs_and_neighbours_are_independent():
    weights = [1.0, 2.0, 3.0, 4.0]
    epochs = []
    sampler = WeightedRandomSampler(weights, 50_000, seed=3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epochs.append(sampler.indices())
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert_independent(np.transpose([epochs[one], epochs[other]]))
    assert_independent(np.transpose([epochs[0][:-1], epochs[0][1:]]))
    assert_independent(np.transpose([epochs[0], WeightedRandomSampler(weights, 50_000).indices()]))


def test_more_weights_than_torch_allows_all_keep_their_shares():
    few, many = 1000, 1 << 24
    weights = np.ones(many + few, np.float32)
    weights[many:] = many / few
    draws = WeightedRandomSampler(weights, 400_000, seed=1).indices()
    is_last = draws >= many
    assert_as_likely_as([1, 1], is_last)
    assert_as_likely_as(np.ones(few), draws[is_last] - many)
    assert_as_likely_as(np.ones(1024), draws[~is_last] >> 14)


def test_small_weights_among_large_ones_add_up():
    # A million of 1e-12, between two of 1: in 10 million draws 5 are expected. None has p = 0.007,
    # 25 or more p = 1e-9.
    weights = np.full(1_000_002, 1e-12)
    weights[[0, -1]] = 1
    draws = WeightedRandomSampler(weights, 10_000_000, seed=2).indices()
    small = draws[(draws > 0) & (draws <= 1_000_000)]
    assert 1 <= len(small) < 25


@given(odd_weights, seeds)
def test_no_index_without_a_weight_is_drawn(weights, seed):
    assume(any(weights))
    draws = WeightedRandomSampler(weights, 100, seed=seed).indices()
    assert len(draws) == 100
    assert all(weights[index] > 0 for index in draws)


def test_without_replacement_the_first_draws_are_as_likely_as_their_weights():
    weights = np.array([0.0, 1.0, 2.0, 5.0])
    sampler = WeightedRandomSampler(weights, 3, replacement=False)
    orders = []
    for epoch in range(4000):
        sampler.set_epoch(epoch)
        orders.append(sampler.indices())
    first, second = np.transpose(orders)[:2]
    assert_as_likely_as(weights, first)
    for index in (1, 2, 3):  # then from those that are left
        left = np.where(np.arange(4) == index, 0, weights)
        assert_as_likely_as(left, second[first == index])


@given(odd_weights, st.data())
def test_without_replacement_no_index_comes_twice(weights, data):
    available = int(np.count_nonzero(weights))
    assume(available)
    num_samples = data.draw(st.integers(1, available))
    order = WeightedRandomSampler(weights, num_samples, replacement=False).indices()
    assert len(set(order.tolist())) == num_samples
    assert all(weights[index] > 0 for index in order)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: WeightedRandomSampler([1], 0), "num_samples=0"),
        (lambda: WeightedRandomSampler([1], True), "num_samples=True"),
        (lambda: WeightedRandomSampler([1], 1, 1), "replacement=1"),
        (lambda: WeightedRandomSampler([[1]], 1), r"1d sequence .* \(1, 1\)"),
        (
            lambda: WeightedRandomSampler(["1", "2"], 1),
            r"weights should be numbers, but got \['1', '2'\]",
        ),
        (lambda: WeightedRandomSampler((w for w in [1]), 1), "but got <generator"),
        (lambda: WeightedRandomSampler([1, -1], 1), r"weights\[1\] is -1.0"),
        (lambda: WeightedRandomSampler([np.nan], 1), r"weights\[0\] is nan"),
        (lambda: WeightedRandomSampler([1, np.inf], 1), r"weights\[1\] is inf \(1 such of 2\)"),
        (lambda: WeightedRandomSampler([0, 0], 1), "0 of 2 are"),
        (lambda: WeightedRandomSampler([], 1), "0 of 0 are"),
        (lambda: WeightedRandomSampler([1e308] * 2, 1), "finite sum"),
        (
            lambda: WeightedRandomSampler([1, 0], 2, False),
            "2 or more .* 1 of 2 are",
        ),
    ],
)
def test_wrong_arguments_are_named(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
