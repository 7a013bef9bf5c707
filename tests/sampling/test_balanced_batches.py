# SPDX-License-Identifier: Apache-2.0
"""Every batch has P classes with K samples each, by turns, whatever the ranks and the resume."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import penstock
from penstock import Loader
from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError, StateError
from penstock.sampling.balanced_batches import BalancedBatchSampler

COUNTS = [1, 2, 3, 4, 5, 7, 30]
LABELS = np.random.default_rng(2).permutation(np.repeat(np.arange(7) * 10 - 20, COUNTS))


class Drawing:
    """Gives its index, and a random number of the sample."""

    labels = LABELS

    def __len__(self):
        return len(LABELS)

    def __getitem__(self, index):
        return np.array([index, penstock.sample_rng().random()])


def cut(batches, p_classes, k_samples):
    """Indices of shape (batches, P, K)."""
    return np.array([list(batch) for batch in batches]).reshape(-1, p_classes, k_samples)


counts = st.lists(st.integers(1, 12), min_size=1, max_size=8)


@given(counts, st.data(), st.integers(1, 7), st.integers(1, 40), st.integers(0, 99))
@settings(deadline=None)
def test_each_batch_has_p_classes_with_k_samples_each(counts, data, k_samples, num_batches, seed):
    p_classes = data.draw(st.integers(1, len(counts)))
    labels = np.repeat(np.arange(len(counts)), counts)
    sampler = BalancedBatchSampler(labels, p_classes, k_samples, num_batches, seed)
    batches = cut(sampler, p_classes, k_samples)
    assert len(batches) == len(sampler) == num_batches
    classes = labels[batches]
    assert (classes == classes[:, :, :1]).all()
    for batch in batches:
        assert len({labels[items[0]] for items in batch}) == p_classes
        for items in batch:
            few = np.unique(items, return_counts=True)[1]
            size = counts[labels[items[0]]]
            assert len(few) == min(k_samples, size)
            assert few.max() - few.min() <= 1


@given(counts, st.data(), st.integers(1, 7), st.integers(0, 99))
@settings(deadline=None)
def test_classes_and_the_samples_of_each_take_turns(counts, data, k_samples, seed):
    p_classes = data.draw(st.integers(1, len(counts)))
    labels = np.repeat(np.arange(len(counts)), counts)
    batches = cut(
        BalancedBatchSampler(labels, p_classes, k_samples, 30, seed), p_classes, k_samples
    )
    per_turn = len(counts) // p_classes
    for start in range(0, 30, per_turn):
        classes = labels[batches[start : start + per_turn, :, 0]].ravel()
        assert len(set(classes.tolist())) == len(classes)
    for number, size in enumerate(counts):
        drawn = batches[labels[batches] == number]
        for start in range(0, len(drawn), size):
            one_turn = drawn[start : start + size]
            assert len(set(one_turn.tolist())) == len(one_turn)


def test_pairs_of_samples_meet_evenly_though_none_is_twice_in_a_batch():
    # 5 samples, 3 at a time: every second batch begins in one turn and ends in the next.
    sampler = BalancedBatchSampler(np.zeros(5, int), 1, 3, num_batches=10)
    met = np.zeros((10, 5, 5))
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for step, batch in enumerate(sampler):
            met[step][np.ix_(batch, batch)] += 1
    for step in met:
        assert stats.chisquare(step[np.triu_indices(5, 1)]).pvalue > 1e-6


def test_every_place_of_a_turn_is_as_likely_for_every_sample():
    sampler = BalancedBatchSampler(np.zeros(5, int), 1, 3, num_batches=10)
    found = np.zeros((30, 5))
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        found[np.arange(30), sampler.sampler.indices()] += 1
    for place in found:
        assert stats.chisquare(place).pvalue > 1e-6


def test_an_epoch_has_as_many_batches_as_the_samples_make_up_and_at_least_one():
    assert len(BalancedBatchSampler(LABELS, 3, 4)) == 52 // 12
    assert len(BalancedBatchSampler(LABELS, 7, 40)) == 1


def test_it_knows_the_names_of_the_classes_and_says_what_it_is():
    class Pets(Drawing):
        labels = np.tile([0, 1], 26)
        class_names = ("cat", "dog")

    sampler = BalancedBatchSampler(Pets(), 2, 3, num_batches=9)
    assert sampler.class_names == ("cat", "dog")
    assert BalancedBatchSampler(LABELS, 2, 3).class_names is None
    assert repr(sampler) == "BalancedBatchSampler(p_classes=2, k_samples=3, num_batches=9)"


def test_a_sample_with_several_labels_belongs_to_each_class_and_one_without_to_none():
    labels = RaggedArray.of([[0, 1], [0, 0], [], [1], [2], [2], [0, 2]])
    items = {0: {0, 1, 6}, 1: {0, 3}, 2: {4, 5, 6}}
    sampler = BalancedBatchSampler(labels, p_classes=3, k_samples=2, num_batches=20)
    for batch in cut(sampler, 3, 2):
        matched = [{number for number in items if set(pair) <= items[number]} for pair in batch]
        assert all(matched)
        assert set().union(*matched) == {0, 1, 2}
        assert all(first != second for first, second in batch)


@given(st.integers(1, 5), st.integers(1, 13), st.integers(0, 9))
@settings(deadline=None)
def test_ranks_take_turns_with_the_batches_of_one(num_replicas, num_batches, seed):
    one = list(BalancedBatchSampler(LABELS, 2, 3, num_batches, seed))
    samplers = [
        BalancedBatchSampler(LABELS, 2, 3, num_batches, seed, num_replicas=num_replicas, rank=rank)
        for rank in range(num_replicas)
    ]
    shares = [list(sampler) for sampler in samplers]
    dealt = [batch for batches in zip(*shares, strict=True) for batch in batches]
    assert dealt[:num_batches] == one
    assert dealt[num_batches:] == [one[k % num_batches] for k in range(len(dealt) - num_batches)]
    assert {len(share) for share in shares} == {len(sampler) for sampler in samplers}
    assert len(dealt) - num_batches < num_replicas


def loaded(num_replicas, rank):
    sampler = BalancedBatchSampler(LABELS, 2, 3, 12, 5, num_replicas=num_replicas, rank=rank)
    return [b.tolist() for b in Loader(Drawing(), batch_sampler=sampler, seed=1)]


def test_random_numbers_do_not_depend_on_the_number_of_ranks():
    one = loaded(1, 0)
    assert len({number for batch in one for _, number in batch}) == 72
    for ranks in (2, 3):
        shares = [loaded(ranks, rank) for rank in range(ranks)]
        assert [batch for step in zip(*shares, strict=True) for batch in step] == one


def test_a_state_of_other_labels_or_sizes_is_refused():
    state = Loader(Drawing(), batch_sampler=BalancedBatchSampler(LABELS, 2, 3)).state_dict()
    for sampler, what in (
        (BalancedBatchSampler(LABELS[::-1], 2, 3), "sampler.items"),
        (BalancedBatchSampler(LABELS, 3, 2), "sampler.k_samples is 3 in the state and 2 here"),
        (BalancedBatchSampler(LABELS, 2, 3, 7), "sampler.num_batches is 8 in the state and 7"),
        (BalancedBatchSampler(LABELS, 2, 3, seed=1), "sampler.seed"),
    ):
        with pytest.raises(StateError, match=what):
            Loader(Drawing(), batch_sampler=sampler).load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LABELS, 8, 2), r"p_classes=8 different classes, but the labels of 52 samples have 7\."),
        ((LABELS, 0, 2), "p_classes should be a positive integer"),
        ((LABELS, 2, -1), "k_samples should be a positive integer"),
        ((LABELS, 2, 2, 0), "num_batches should be a positive integer"),
        (([], 2, 2), "the labels of 0 samples have 0"),
        ((object(), 2, 2), "BalancedBatchSampler cannot see the labels"),
    ],
    ids=["classes", "p", "k", "batches", "empty", "unknown"],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        BalancedBatchSampler(*arguments)
