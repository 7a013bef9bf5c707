# SPDX-License-Identifier: Apache-2.0
"""A batch is of one bucket and within its budget, on every rank, and every sample comes once."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import penstock
from penstock import Loader
from penstock.errors import ConfigError, StateError
from penstock.sampling.buckets import BucketBatchSampler
from penstock.sampling.costs import dealt

LENGTHS = np.random.default_rng(4).integers(1, 200, 503)


class Drawing:
    """Gives its index, and a random number of the sample."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return np.array([index, penstock.sample_rng().random()])


@st.composite
def arguments(draw):
    keys = draw(st.lists(st.integers(0, 40), max_size=60))
    sizes = {
        "batch_size": draw(st.none() | st.integers(1, 9)),
        "max_tokens": draw(st.none() | st.integers(40, 200)),
    }
    if sizes == {"batch_size": None, "max_tokens": None}:
        sizes["batch_size"] = 3
    boundaries = draw(st.none() | st.sets(st.integers(0, 40), max_size=5).map(sorted))
    return {
        "keys": keys,
        **sizes,
        "boundaries": boundaries,
        "drop_last": draw(st.booleans()),
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 5)),
    }


def ranks_of(num_replicas, **options):
    return [
        BucketBatchSampler(**options, num_replicas=num_replicas, rank=rank)
        for rank in range(num_replicas)
    ]


@given(arguments(), st.integers(1, 4), st.integers(0, 3))
@settings(deadline=None)
def test_batches_are_of_one_bucket_and_within_the_budget(options, num_replicas, epoch):
    keys = np.array(options["keys"], np.int64)
    samplers = ranks_of(num_replicas, **options)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    shares = [list(sampler) for sampler in samplers]
    assert {len(share) for share in shares} == {len(sampler) for sampler in samplers}
    for batches in zip(*shares, strict=True):
        together = np.concatenate(batches).astype(np.int64)
        buckets = np.searchsorted(samplers[0].boundaries, keys[together], side="right")
        assert len(set(buckets.tolist())) == 1
        assert len({len(batch) for batch in batches}) == 1
        for batch in batches:
            assert len(batch) <= (options["batch_size"] or len(keys))
            if options["max_tokens"] is not None:
                assert len(batch) * keys[batch].max() <= options["max_tokens"]
    counts = np.bincount([i for share in shares for batch in share for i in batch], None, len(keys))
    if options["drop_last"]:
        assert counts.max(initial=0) <= 1
    else:
        assert counts.min(initial=1) == 1
        num_buckets = len(samplers[0].boundaries) + 1
        assert counts.sum() - len(keys) <= (num_replicas - 1) * num_buckets


@given(arguments(), st.sampled_from([1, 2, 3]))
@settings(deadline=None)
def test_ranks_share_the_batches_of_one(options, num_replicas):
    # A budget of all ranks together may be room for more than the ranks' own ones.
    options |= {"max_tokens": None, "batch_size": options["batch_size"] or 2}
    one = {**options, "batch_size": options["batch_size"] * num_replicas}
    whole = [set(batch) for batch in BucketBatchSampler(**one)]
    shares = [list(sampler) for sampler in ranks_of(num_replicas, **options)]
    united = [set().union(*batches) for batches in zip(*shares, strict=True)]
    if options["drop_last"]:
        assert united == whole
    else:  # those taken twice are of the same bucket, and have been there before
        assert all(batch <= more for batch, more in zip(whole, united, strict=True))


def test_an_epoch_is_another_draw_of_batches_and_of_their_order():
    sampler = BucketBatchSampler(LENGTHS, 8, boundaries=[50, 100, 150])
    first = list(sampler)
    assert first == list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert len(second) == len(first) == len(sampler)
    assert not {frozenset(batch) for batch in first} & {frozenset(batch) for batch in second}
    buckets = [[np.searchsorted([50, 100, 150], LENGTHS[b[0]]) for b in e] for e in (first, second)]
    assert buckets[0] != buckets[1]


def test_any_sample_of_a_bucket_may_be_left_out_and_any_may_stand_anywhere():
    sampler = BucketBatchSampler(np.arange(20), 7, drop_last=True, boundaries=[10])
    kept, places = np.zeros(20), np.zeros((2, 7), int)
    for epoch in range(2000):
        sampler.set_epoch(epoch)
        for place, batch in enumerate(sampler):
            kept[batch] += 1
            if 3 in batch:
                places[place, batch.index(3)] += 1
    assert stats.chisquare(kept).pvalue > 1e-6
    assert stats.chisquare(places.ravel()).pvalue > 1e-6


def test_without_shuffling_batches_are_by_key():
    sampler = BucketBatchSampler([9, 1, 8, 2, 3], 2, boundaries=[5], shuffle=False)
    assert list(sampler) == [[1, 3], [4], [2, 0]]


def test_boundaries_that_are_found_waste_less_than_a_tenth():
    lengths = np.random.default_rng(1).geometric(0.01, 20_000)
    for batch in BucketBatchSampler(lengths, max_tokens=4096):
        assert lengths[batch].max() < 1.1 * lengths[batch].min() + 1e-6


def test_samples_without_any_length_make_up_batches_of_their_own():
    batches = list(BucketBatchSampler([0, 5, 0, 0], max_tokens=10))
    assert sorted(sorted(batch) for batch in batches) == [[0, 2, 3], [1]]


def test_a_budget_may_be_in_seconds():
    assert max(map(len, BucketBatchSampler([0.01] * 40, max_tokens=0.35))) == 34  # 35 are above it
    sampler = BucketBatchSampler([0.5] * 10 + [1.5] * 3, max_tokens=1.6, boundaries=[1.0])
    assert sorted(len(batch) for batch in sampler) == [1, 1, 1, 1, 3, 3, 3]


def make_sampler(num_replicas=1, rank=0):
    return BucketBatchSampler(
        LENGTHS, 12 // num_replicas, boundaries=[60, 120], seed=5, num_replicas=num_replicas,
        rank=rank,
    )  # fmt: skip


def test_random_numbers_do_not_depend_on_the_number_of_ranks():
    def drawn(num_replicas):
        loaders = [
            Loader(Drawing(), batch_sampler=make_sampler(num_replicas, rank), seed=1)
            for rank in range(num_replicas)
        ]
        return [
            {tuple(row) for batch in batches for row in batch.tolist()}
            for batches in zip(*loaders, strict=True)
        ]

    one = drawn(1)
    assert len({number for batch in one for _, number in batch}) == len(LENGTHS)
    for num_replicas in (2, 3):
        assert all(few <= all_ for few, all_ in zip(one, drawn(num_replicas), strict=True))


def test_a_state_of_other_keys_boundaries_or_sizes_is_refused():
    state = Loader(Drawing(), batch_sampler=make_sampler()).state_dict()
    for sampler, what in (
        (BucketBatchSampler(LENGTHS[::-1], 12, boundaries=[60, 120], seed=5), "keys"),
        (BucketBatchSampler(LENGTHS, 12, boundaries=[60], seed=5), "buckets"),
        (BucketBatchSampler(LENGTHS, 13, boundaries=[60, 120], seed=5), "global_batch_size"),
    ):
        with pytest.raises(StateError, match=what):
            Loader(Drawing(), batch_sampler=sampler).load_state_dict(state)


def test_a_state_may_be_loaded_with_another_number_of_ranks():
    loader = Loader(Drawing(), batch_sampler=make_sampler())
    batches = iter(loader)
    for _ in range(7):
        next(batches)
    state = loader.state_dict()
    rest = [{index for index, _ in batch.tolist()} for batch in batches]
    again = [Loader(Drawing(), batch_sampler=make_sampler(2, rank)) for rank in (0, 1)]
    for part in again:
        part.load_state_dict(state)
    united = [
        {index for batch in batches for index, _ in batch.tolist()}
        for batches in zip(*again, strict=True)
    ]
    assert len(united) == len(rest)
    assert all(few <= all_ for few, all_ in zip(rest, united, strict=True))


def test_a_dataset_is_refused_and_not_read():
    class Unread(Drawing):
        def __getitem__(self, index):
            raise AssertionError("a sample was read")

    for make in (BucketBatchSampler, functools.partial(BucketBatchSampler, window=2)):
        with pytest.raises(ConfigError, match=r"such as \[len\(text\) .* got a Unread"):
            make(Unread(), 4)


def test_ranks_may_change_where_the_global_sizes_are_the_same():
    def make(num_replicas, **sizes):
        sampler = BucketBatchSampler(
            LENGTHS, boundaries=[60], **sizes, num_replicas=num_replicas, rank=0
        )
        return Loader(Drawing(), batch_sampler=sampler)

    state = make(1, batch_size=12).state_dict()
    make(2, batch_size=6).load_state_dict(state)
    with pytest.raises(StateError, match="global_batch_size"):
        make(2, batch_size=12).load_state_dict(state)
    state = make(1, max_tokens=1200).state_dict()
    with pytest.raises(StateError, match="global_batch_sizes"):
        make(2, max_tokens=1200).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "a batch_size, or max_tokens, or both; got neither"),
        ({"batch_size": 0}, "batch_size should be a positive integer"),
        ({"max_tokens": 8}, r"sample 2 has length 9, .* max_tokens=8 by itself \(2 such of 4\)"),
        ({"batch_size": 2, "boundaries": [3, 3]}, r"numbers that ascend, but got \[3, 3\]"),
        ({"batch_size": 2, "boundaries": [[1]]}, r"numbers that ascend, but got \[\[1\]\]"),
        ({"batch_size": 2, "boundaries": [1, np.nan, 2]}, r"ascend, but got \[1, nan, 2\]"),
        ({"batch_size": 2, "keys": [1, -2]}, r"0 or more, but keys\[1\] is -2"),
        ({"max_tokens": 2, "keys": [1, -2], "boundaries": [0]}, r"0 or more, but keys\[1\] is -2"),
        ({"batch_size": 2, "keys": [1, np.inf]}, r"keys\[1\] is inf"),
        ({"batch_size": 2, "num_replicas": 2, "rank": 2}, "Invalid rank 2"),
        ({"batch_size": 2, "drop_last": 1}, "drop_last should be a boolean"),
        ({"batch_size": 2, "shuffle": "no"}, "shuffle should be a boolean .* shuffle='no'"),
        ({"batch_size": 2, "keys": (key for key in [1])}, "got a generator"),
    ],
    ids=["none", "size", "long", "equal", "matrix", "nan", "negative", "debt", "inf", "rank",
         "drop", "shuffle", "generator"],
)  # fmt: skip
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        BucketBatchSampler(**{"keys": [1, 2, 9, 9], **options})


# By cost.

COSTS = np.random.default_rng(6).lognormal(2, 0.7, len(LENGTHS))
BY_COST = {
    "buckets": {"batch_size": 8, "boundaries": [50, 100, 150]},
    "tokens": {"max_tokens": 2000},
    "window": {"batch_size": 8, "window": 4},
}


def loads_of(samplers):
    """Return the costs of each rank in the steps in which all have several samples."""
    steps = [step for step in zip(*samplers, strict=True) if min(map(len, step)) > 3]
    return np.array([[COSTS[batch].sum() for batch in step] for step in steps])


@pytest.mark.parametrize("kind", BY_COST)
@pytest.mark.parametrize("shuffle", [False, True])
def test_samples_of_a_step_are_dealt_by_cost_and_are_the_same_ones(kind, shuffle):
    options = {"keys": LENGTHS, "shuffle": shuffle, **BY_COST[kind]}
    by_turns, by_cost = ranks_of(4, **options), ranks_of(4, cost=COSTS, **options)
    together = [
        [sorted(i for batch in step for i in batch) for step in zip(*samplers, strict=True)]
        for samplers in (by_turns, by_cost)
    ]
    if kind == "window":  # the first samples of the order come once more at its end
        together = [steps[:-1] for steps in together]
    assert together[0] == together[1]
    for step in zip(*by_cost, strict=True):
        assert len({len(batch) for batch in step}) == 1
    ratios = [
        (loads.max(axis=1) / loads.mean(axis=1)).mean() - 1
        for loads in map(loads_of, (by_turns, by_cost))
    ]
    assert ratios[1] < ratios[0] / 3
    if shuffle:
        heaviest = np.bincount(loads_of(by_cost).argmax(axis=1), minlength=4)
        assert heaviest.max() < 2 * heaviest.mean()


@pytest.mark.parametrize("kind", BY_COST)
def test_the_cost_is_a_setting_where_there_is_one(kind):
    def state_of(**options):
        return BucketBatchSampler(LENGTHS, **BY_COST[kind], **options).state_dict()["fingerprint"]

    plain = state_of()
    assert "cost" not in str(plain)
    assert state_of(cost=COSTS) != plain
    assert state_of(cost=COSTS) != state_of(cost=COSTS + 1)


def test_costs_that_are_none_are_named():
    for costs in ([1.0], ["a"] * len(LENGTHS), -COSTS):
        with pytest.raises(ConfigError, match="cost"):
            BucketBatchSampler(LENGTHS, 8, cost=costs)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.integers(0, 9))
def test_every_rank_gets_as_many_and_each_item_once(steps, ranks, turns, seed):
    rng = np.random.default_rng(seed)
    costs = rng.integers(0, 5, (steps, ranks * turns))
    for begins in (None, rng.integers(ranks, size=steps)):
        shares = dealt(costs, ranks, begins)
        assert shares.shape == (steps, ranks, turns)
        assert (np.sort(shares.reshape(steps, -1), axis=1) == np.arange(ranks * turns)).all()
        loads = np.take_along_axis(costs[:, None], shares, axis=2).sum(axis=2)
        at_random = costs.reshape(shares.shape).sum(axis=2)
        assert (loads.max(axis=1) <= at_random.max(axis=1) + costs.max(axis=1) / 3).all()
        if turns == 1:
            first = np.zeros(steps, int) if begins is None else begins
            assert (loads[np.arange(steps), first] == costs.max(axis=1)).all()
