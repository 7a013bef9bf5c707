# SPDX-License-Identifier: Apache-2.0
"""Orders are pure functions of (seed, epoch), and as complete as torch's."""

import collections

import numpy as np
import pytest
import torch.utils.data as stock
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.sampling import (
    BatchSampler,
    DistributedSampler,
    IndexSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)

lengths = st.integers(1, 50)
seeds = st.integers(0, 1 << 70)


@given(lengths, seeds, st.integers(1, 200))
def test_random_takes_every_index_before_any_again(length, seed, num_samples):
    order = list(RandomSampler(range(length), num_samples=num_samples, seed=seed))
    assert len(order) == num_samples
    for start in range(0, num_samples, length):
        one_pass = order[start : start + length]
        assert len(set(one_pass)) == len(one_pass)
        assert set(one_pass) <= set(range(length))


@given(lengths, seeds, st.integers(1, 200))
def test_replacement_draws_valid_indices(length, seed, num_samples):
    order = RandomSampler(range(length), True, num_samples, seed).indices()
    assert order.shape == (num_samples,)
    assert 0 <= order.min() <= order.max() < length


@given(
    length=st.integers(0, 40),
    ranks=st.integers(1, 7),
    pad=st.sampled_from(["repeat", "drop"]),
    shuffle=st.booleans(),
    seed=seeds,
)
def test_ranks_share_the_samples_as_torch_does(length, ranks, pad, shuffle, seed):
    samplers = [
        DistributedSampler(range(length), ranks, rank, shuffle, seed, pad) for rank in range(ranks)
    ]
    torchs = stock.DistributedSampler(range(length), ranks, 0, drop_last=pad == "drop")
    shares = [list(sampler) for sampler in samplers]
    assert [len(share) for share in shares] == [torchs.num_samples] * ranks
    assert (samplers[0].num_samples, samplers[0].total_size) == (
        torchs.num_samples,
        torchs.total_size,
    )
    counts = collections.Counter(index for share in shares for index in share)
    if pad == "drop":
        assert set(counts.values()) <= {1}
    else:
        assert set(counts) == set(range(length))
        assert not counts or max(counts.values()) - min(counts.values()) <= 1


@given(
    length=st.integers(0, 40),
    ranks=st.integers(1, 7),
    pad=st.sampled_from(["repeat", "drop"]),
    data=st.data(),
)
def test_an_unshuffled_share_is_exactly_torchs(length, ranks, pad, data):
    rank = data.draw(st.integers(0, ranks - 1))
    theirs = stock.DistributedSampler(
        range(length), ranks, rank, shuffle=False, drop_last=pad == "drop"
    )
    ours = DistributedSampler(range(length), ranks, rank, shuffle=False, pad=pad)
    assert list(ours) == list(theirs)


@pytest.mark.parametrize("module", [BatchSampler, stock.BatchSampler])
@pytest.mark.parametrize(
    ("size", "drop_last", "expected"),
    [
        (2, False, [[0, 1], [2, 3], [4]]),
        (2, True, [[0, 1], [2, 3]]),
        (5, True, [[0, 1, 2, 3, 4]]),
        (6, True, []),
    ],
)
def test_batches_are_torchs(module, size, drop_last, expected):
    for sampler in (range(5), SequentialSampler(range(5))):
        batches = module(sampler, size, drop_last)
        assert list(batches) == expected
        assert len(batches) == len(expected)


@given(st.integers(0, 30), st.integers(1, 9), st.booleans(), seeds)
def test_index_batches_are_the_batches(length, size, drop_last, seed):
    for sampler in (SubsetRandomSampler(range(length), seed), list(range(length))):
        batches = BatchSampler(sampler, size, drop_last)
        assert [list(batch) for batch in batches.index_batches()] == list(batches)
    assert {np.asarray(batch).dtype for batch in batches.index_batches()} <= {np.dtype(np.int64)}


def test_a_subclass_with_an_order_of_its_own_is_not_bypassed():
    class Backwards(SequentialSampler):
        def __iter__(self):
            return iter(range(len(self) - 1, -1, -1))

    class Pairs(BatchSampler):
        def __iter__(self):
            yield [0, 0]

    assert list(BatchSampler(Backwards("abc"), 2, False).index_batches()) == [[2, 1], [0]]
    assert list(Pairs(SequentialSampler("abc"), 2, False).index_batches()) == [[0, 0]]


def test_no_index_is_drawn_before_it_is_needed():
    drawn = []

    def draw():
        for index in range(5):
            drawn.append(index)
            yield index

    batches = iter(BatchSampler(draw(), 2, drop_last=False))
    assert drawn == []
    assert (next(batches), drawn) == ([0, 1], [0, 1])


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: RandomSampler(range(3), replacement=1), TypeError, "replacement=1"),
        (lambda: RandomSampler(range(3), num_samples=0), ConfigError, "num_samples=0"),
        (lambda: RandomSampler(range(3), num_samples=1.5), ConfigError, "num_samples=1.5"),
        (lambda: RandomSampler([]), ConfigError, "num_samples=0"),
        (lambda: RandomSampler(range(3), seed=-1), ConfigError, "seed=-1"),
        (lambda: RandomSampler(range(3), seed="7"), TypeError, "seed='7'"),
        (lambda: RandomSampler(range(3)).set_epoch(-1), ConfigError, "epoch=-1"),
        (lambda: SubsetRandomSampler([0.5]), ConfigError, "dtype float64"),
        (lambda: SubsetRandomSampler([[1]]), ConfigError, r"shape \(1, 1\)"),
        (lambda: DistributedSampler(range(3), 2, 2), ConfigError, r"rank 2, .* \[0, 1\]"),
        (lambda: DistributedSampler(range(3), 2, -1), ConfigError, "rank -1"),
        (lambda: DistributedSampler(range(3), 0, 0), ConfigError, "num_replicas=0"),
        (lambda: BatchSampler(range(3), 0, False), ConfigError, "batch_size=0"),
        (lambda: BatchSampler(range(3), True, False), ConfigError, "batch_size=True"),
        (lambda: BatchSampler(range(3), 1, 0), ConfigError, "drop_last=0"),
        (lambda: iter(Sampler()), NotImplementedError, "must define __iter__"),
        (lambda: list(IndexSampler()), NotImplementedError, "must define indices"),
    ],
)
def test_wrong_arguments_are_named(make, error, words):
    with pytest.raises(error, match=words):
        make()
