# SPDX-License-Identifier: Apache-2.0
"""A mixture has exact shares, goes through each source in rounds, and stores nothing."""

import json
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
import torch.utils.data
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from penstock.data import ArrayDataset, ConcatDataset, StackDataset
from penstock.errors import ConfigError
from penstock.sampling.mixture import MixtureSampler

seeds = st.integers(0, 1 << 70)
epochs = st.integers(0, (1 << 32) - 1)
# A length from 0, and a weight or none; the weights of empty sources are made 0.
sources = st.lists(
    st.tuples(st.integers(0, 40), st.one_of(st.just(0.0), st.floats(0.01, 3))),
    min_size=1,
    max_size=6,
)


def mixture(sources, num_samples, seed=0):
    """A sampler of drawn sources; of none that has both samples and a weight, nothing."""
    lengths = [length for length, _ in sources]
    weights = [weight if length else 0.0 for length, weight in sources]
    assume(any(weights))
    try:
        return MixtureSampler(lengths, weights, num_samples, seed)
    except ConfigError as error:
        assume("would never be drawn" not in str(error))
        raise


def counts_of(sampler, epoch=0):
    """How often each sample comes in an epoch, as an array for each source."""
    sampler.set_epoch(epoch)
    counts = np.bincount(sampler.indices(), minlength=sampler.lengths.sum())
    return np.split(counts, np.cumsum(sampler.lengths)[:-1])


def spread(counts):
    return np.ptp(counts) if len(counts) else 0


@given(sources, st.integers(1, 300), seeds, epochs)
def test_every_epoch_has_exactly_the_quotas(sources, num_samples, seed, epoch):
    sampler = mixture(sources, num_samples, seed)
    assert len(sampler) == sampler.quotas.sum() == num_samples
    assert [counts.sum() for counts in counts_of(sampler, epoch)] == sampler.quotas.tolist()


@given(sources, st.integers(1, 300))
def test_quotas_are_the_shares_to_less_than_one_and_the_largest_remainders_go_up(sources, wanted):
    sampler = mixture(sources, wanted)
    weights = [Fraction(weight) if length else 0 for length, weight in sources]
    exact = [wanted * weight / sum(weights) for weight in weights]
    np.testing.assert_allclose(sampler.shares, [float(part / wanted) for part in exact])
    above = {
        part - int(part) for part, quota in zip(exact, sampler.quotas, strict=True) if quota > part
    }
    below = {
        part - quota for part, quota in zip(exact, sampler.quotas, strict=True) if quota < part
    }
    assert all(abs(quota - part) < 1 for part, quota in zip(exact, sampler.quotas, strict=True))
    assert not above or not below or min(above) >= max(below)


@given(sources, st.integers(1, 120), seeds, st.integers(0, 1 << 20))
def test_no_sample_comes_twice_in_a_round_of_epochs(sources, num_samples, seed, generation):
    sampler = mixture(sources, num_samples, seed)
    lengths, quotas = sampler.lengths.tolist(), sampler.quotas.tolist()
    for source, (length, quota) in enumerate(zip(lengths, quotas, strict=True)):
        num_epochs = max(length // quota, 1) if quota else 1
        first = generation * num_epochs
        counts = [counts_of(sampler, first + epoch)[source] for epoch in range(num_epochs)]
        total = np.sum(counts, axis=0)
        assert spread(total) <= 1
        assert total.sum() == quota * num_epochs
        assert not length or total.max() <= max(-(-quota // length), 1)


def test_epochs_of_other_rounds_are_of_other_samples():
    # 1001 and 100 share no factor; ten epochs are a round. Two draws of 100 share 10 on average,
    # with a variance of 8.1: the mean of 200 is off by 1.2 with p = 2e-9.
    sampler = MixtureSampler([1001], num_samples=100, seed=4)
    drawn = []
    for epoch in range(210):
        sampler.set_epoch(epoch)
        drawn.append(set(sampler))
    shared = [len(one & other) for one, other in zip(drawn, drawn[10:], strict=False)]
    assert abs(np.mean(shared) - 100 * 100 / 1001) < 1.2
    assert all(not one & other for one, other in zip(drawn[::10], drawn[9::10], strict=True))


def test_an_epoch_far_on_is_in_the_round_that_has_come_by_then():
    sampler = MixtureSampler([100, 7], [1, 1], num_samples=10)  # 20 epochs are a round of the first
    last = (1 << 32) - 1
    in_round = [counts_of(sampler, epoch)[0] for epoch in range(last - last % 20, last + 1)]
    assert len(in_round) == 16
    assert np.sum(in_round, axis=0).max() == 1


@given(sources, seeds, st.integers(0, 100))
def test_oversampling_shows_every_sample_in_every_epoch_and_takes_no_longer(sources, seed, epoch):
    sampler = mixture(sources, "oversample", seed)
    for counts, share in zip(counts_of(sampler, epoch), sampler.shares, strict=True):
        assert not share or not len(counts) or counts.min() >= 1
    shorter = (len(sampler) - 1) * sampler.shares
    assert (shorter < sampler.lengths + 1e-9)[sampler.shares > 0].any()


@given(sources, seeds, st.integers(0, 100))
def test_undersampling_shows_no_sample_twice_in_an_epoch_and_is_no_shorter(sources, seed, epoch):
    sampler = mixture(sources, "undersample", seed)
    assert all(counts.max(initial=0) <= 1 for counts in counts_of(sampler, epoch))
    longer = (len(sampler) + 1) * sampler.shares
    assert (longer > sampler.lengths - 1e-9)[sampler.shares > 0].any()


@pytest.mark.parametrize(
    ("lengths", "weights", "over", "under"),
    [
        ([10, 100], [1, 1], 200, 20),
        ([10, 100], [9, 1], 1000, 11),  # one more would be 10.8 of 10 samples
        ([10, 100], [1, 10], 110, 110),
        ([7, 7, 0], [1, 2, 0], 21, 10),
        ([5, 5], None, 10, 10),
        ([30, 10], [0.3, 0.1], 40, 40),  # decimals that are no binary fractions
        ([90, 10], [0.9, 0.1], 100, 100),
        ([7, 70, 700], [0.01, 0.1, 1], 777, 777),
        ([10**15, 1], [1, 1], 2 * 10**15, 2),
    ],
)
def test_lengths_of_epochs_that_show_all_or_nothing_twice(lengths, weights, over, under):
    assert len(MixtureSampler(lengths, weights, "oversample")) == over
    assert len(MixtureSampler(lengths, weights, "undersample")) == under


def test_an_order_of_huge_sources_takes_no_memory():
    sampler = MixtureSampler([10**9, 1 << 61, 3], [2, 1, 1], num_samples=1 << 61, seed=1)
    tracemalloc.start()
    sampler.set_epoch((1 << 32) - 1)  # an epoch times a quota is far beyond 64 bits
    order = sampler.indices()
    block = order[(1 << 61) - 16384 :]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4e6
    stops = np.cumsum(sampler.lengths)
    found = np.bincount(np.searchsorted(stops, block, side="right"), minlength=3)
    assert 0 <= block.min() <= block.max() < stops[-1]
    assert stats.chisquare(found, sampler.shares * len(block)).pvalue > 1e-6


def test_sources_stand_in_random_order_and_items_are_equally_likely():
    sampler = MixtureSampler([20, 30, 50], [1, 1, 2], num_samples=40, seed=2)
    firsts, table = np.zeros(100), np.zeros((3, 3))
    for epoch in range(6000):
        sampler.set_epoch(epoch)
        order = sampler.indices()
        firsts[order[0]] += 1
        one, other = np.searchsorted([20, 50], order[[7, 30]], side="right")
        table[one, other] += 1
    each = np.repeat([1 / 4 / 20, 1 / 4 / 30, 1 / 2 / 50], [20, 30, 50])
    assert stats.chisquare(firsts, each * 6000).pvalue > 1e-6
    # 40 places without replacement: the second is a little less likely to be as the first.
    quotas = sampler.quotas
    pairs = (np.outer(quotas, quotas) - np.diag(quotas)) / (40 * 39) * 6000
    assert stats.chisquare(table.ravel(), pairs.ravel()).pvalue > 1e-6


@pytest.mark.parametrize("module", [ConcatDataset, torch.utils.data.ConcatDataset])
def test_indices_are_those_of_the_concatenated_datasets(module):
    parts = {"a": ["a"] * 3, "b": ["b"] * 40, "c": ["c"] * 8}
    joined = module(list(parts.values()))
    sampler = MixtureSampler(joined, [1, 2, 1], num_samples=40)
    drawn = [joined[index] for index in sampler]
    assert {name: drawn.count(name) for name in parts} == {"a": 10, "b": 20, "c": 10}
    by_name = MixtureSampler(parts, {"c": 1, "a": 1, "b": 2}, num_samples=40)
    by_length = MixtureSampler(np.array([3, 40, 8]), [0.1, 0.2, 0.1], num_samples=40)
    assert list(sampler) == list(by_name) == list(by_length)
    assert by_name.names == ("a", "b", "c")
    assert sampler.names == ("0", "1", "2")


def test_names_may_be_any_keys_and_weights_go_by_them():
    sampler = MixtureSampler({1: 10, "1": 30, ("web", "de"): 0}, {"1": 3, 1: 1, ("web", "de"): 0})
    assert sampler.names == (1, "1", ("web", "de"))
    assert sampler.quotas.tolist() == [10, 30, 0]
    with pytest.raises(
        ConfigError, match=r"source \('web', 'de'\) would never be drawn: it has 0 samples"
    ):
        MixtureSampler({("web", "de"): 0, 1: 3}, [1, 1])


def test_settings_tell_what_the_order_depends_on_and_nothing_else():
    def settings(*args, epoch=0, **kwargs):
        sampler = MixtureSampler(*args, **kwargs)
        sampler.set_epoch(epoch)
        return json.dumps(sampler.settings())

    first = settings([10, 20], [1, 3], 40)
    assert first == settings({"a": range(10), "b": range(20)}, [2, 6], 40, epoch=9)
    assert first == settings(np.array([10, 20]), [1, 3], np.int64(40))
    others = [
        settings([10, 21], [1, 3], 40),
        settings([10, 20], [1, 4], 40),
        settings([10, 20], [1, 3], 41),
        settings([10, 20], [1, 3], 40, seed=1),
    ]
    assert first not in others
    many = [settings([2] * 200, seed=seed) for seed in (0, 0, 1)]
    assert many[0] == many[1] != many[2]
    assert len(many[0]) < 300


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MixtureSampler([]), "sources have 0 samples, not from 1"),
        (lambda: MixtureSampler([0, 0]), "sources have 0 samples"),
        (lambda: MixtureSampler([1 << 62, 1]), r"not from 1 to 2\*\*62"),
        (lambda: MixtureSampler(ArrayDataset(np.arange(5))), "got ArrayDataset"),
        (lambda: MixtureSampler(StackDataset("ab", "cd")), "got StackDataset"),
        (lambda: MixtureSampler(100), "got int"),
        (lambda: MixtureSampler([5, -1]), "source 1 .* got -1"),
        (lambda: MixtureSampler({"web": None}), "source 'web' .* got None"),
        (lambda: MixtureSampler([5, 1.5]), "source 1 .* got 1.5"),
        (lambda: MixtureSampler([5, 5], [1]), "for each of the 2 sources"),
        (lambda: MixtureSampler([5, 5], ["1", "2"]), r"should be numbers, but got \['1', '2'\]"),
        (lambda: MixtureSampler([5, 5], (w for w in "ab")), "but got <generator"),
        (lambda: MixtureSampler([5, 5], {0: 1, 1: 1}), r"for \[0, 1\], .* are \['0', '1'\]"),
        (lambda: MixtureSampler([5, 5], [1, -1]), "0 or more, for each .* got .*-1"),
        (lambda: MixtureSampler([5, 5], [np.inf, 1]), "finite number, .* got .*inf"),
        (lambda: MixtureSampler([5, 5], [0, 0]), "not all 0"),
        (lambda: MixtureSampler([5, 0], [1, 1]), "'1' would never be drawn: it has 0 samples"),
        (lambda: MixtureSampler({"a": 5}, {"b": 1}), r"are for \['b'\], .* are \['a'\]"),
        (lambda: MixtureSampler([5, 5], num_samples=0), "num_samples=0"),
        (lambda: MixtureSampler([5, 5], num_samples=2.5), "num_samples=2.5"),
        (lambda: MixtureSampler([5, 5], num_samples="all"), "num_samples='all'"),
        (lambda: MixtureSampler([5, 5], [1, 1e-30], "oversample"), r"at most 2\*\*62"),
        (
            lambda: MixtureSampler({"web": 90, "books": 10}, [999, 1]),
            "source 'books' .* of num_samples=100 is 0.1. num_samples=1000 is enough",
        ),
        (lambda: MixtureSampler([5], seed=-1), "seed=-1"),
    ],
)
def test_wrong_arguments_are_named(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_alpha_makes_shares_of_the_lengths():
    sampler = MixtureSampler([100, 25, 0], alpha=0.5)
    assert sampler.shares == pytest.approx([2 / 3, 1 / 3, 0])
    assert MixtureSampler([100, 25], alpha=1).shares.tolist() == [0.5, 0.5]
    with pytest.raises(ConfigError, match="weights or alpha, not both"):
        MixtureSampler([1, 2], [1, 1], alpha=0)
