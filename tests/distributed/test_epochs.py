# SPDX-License-Identifier: Apache-2.0
"""What ranks of a real process group are given, and that together it is what one process gets."""

from __future__ import annotations

import collections
import itertools
import json

import numpy as np
import pytest
from tests.distributed.conftest import GOING_ON, MAP_STYLE, PLAN
from tests.distributed.loaders import (
    K_SAMPLES,
    LABELS,
    LENGTH,
    LENGTHS,
    NUM_BALANCED,
    P_CLASSES,
    WEIGHTS,
    loader_of,
    taken,
)
from tests.process.test_distributed import together

from penstock.errors import StateError
from penstock.sampling import ClassBalancedSampler, DistributedSampler, WeightedRandomSampler

BY_SAMPLES = [  # each rank takes its turn for every sample, and all samples come
    name for name in GOING_ON if not PLAN[name].get("drop_last") and name != "buckets"
]
STREAMS = [name for name, run in PLAN.items() if run["kind"].startswith("stream")]
WORLDS = pytest.mark.parametrize("world", ["four", "two"])


@pytest.fixture
def ranks(world, request):
    """What each rank of four, or of two, had."""
    return request.getfixturevalue(world)


def shares_of(ranks, name, epoch):
    return [rank["epochs"][name]["epochs"][epoch] for rank in ranks]


def alone(name, pad="none"):
    """The loader of one process that has all ranks' batches."""
    run = {"kind": PLAN[name]["kind"], "drop_last": PLAN[name].get("drop_last", False)}
    return loader_of(world_size=1, rank=0, pad=PLAN[name].get("pad", pad), **run)


def flat(batches):
    return list(itertools.chain(*batches))


def indices_of(batches):
    return [index for index, _ in flat(batches)]


def counts_of(shares):
    return collections.Counter(index for share in shares for index in indices_of(share))


def test_torchrun_tells_the_rank_before_there_is_a_group_and_the_group_after(four):
    for rank, result in enumerate(four):
        assert result["said"] == {
            "before": [rank, 4],
            "variables": [str(rank), "4"],
            "after": [rank, 4],
            "early sampler": [rank, rank + 4],
            "warnings": [],
        }


def test_without_torchrun_the_group_alone_knows_the_rank(two):
    for rank, result in enumerate(two):
        assert result["said"] == {
            "before": [0, 1],
            "after": [rank, 2],
            "early sampler": list(range(8)),  # it took itself for the only one
            "warnings": [f"this is rank {rank} of 2"],
        }


def test_a_sampler_that_was_told_to_give_all_to_every_rank_does_not_warn(monkeypatch):
    given, asked = DistributedSampler(range(8), 1, 0), DistributedSampler(range(8))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert sorted(given) == list(range(8))
    with pytest.warns(UserWarning, match=r"^this is rank 1 of 2, which was not known when this "):
        assert sorted(asked) == list(range(8))


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize(
    ("name", "lengths", "doubled", "lost"),
    [
        ("dataset", [25, 25, 25, 25], 3, 0),
        ("torch's", [25, 25, 25, 25], 3, 0),
        ("drop", [24, 24, 24, 24], 0, 1),
        ("none", [25, 24, 24, 24], 0, 0),
        ("drop_last", [24, 24, 24, 24], 0, 1),
        ("torch's, drop_last", [24, 24, 24, 24], 0, 1),
        ("two workers", [25, 25, 25, 25], 3, 0),
        ("persistent workers", [25, 24, 24, 24], 0, 0),
    ],
)
def test_every_sample_comes_once_but_for_what_makes_shares_even(
    four, name, lengths, doubled, lost, epoch
):
    shares = shares_of(four, name, epoch)
    assert [len(indices_of(share)) for share in shares] == lengths
    counts = counts_of(shares)
    assert len(counts) == LENGTH - lost
    assert sorted(counts.values()) == [1] * (len(counts) - doubled) + [2] * doubled


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("name", BY_SAMPLES)
def test_four_ranks_have_the_order_and_the_random_numbers_of_one_process(four, name, epoch):
    loader = alone(name)
    loader.set_epoch(epoch)
    expected = flat(taken(loader))
    found = flat(together(*shares_of(four, name, epoch)))
    num_left_out = 1 if PLAN[name].get("pad") == "drop" else 0
    assert found[: len(expected)] == expected[: len(expected) - num_left_out]
    # What is beyond makes the shares even: the first samples once more.
    padding = [index for index, _ in found[len(expected) :]]
    assert padding == [index for index, _ in expected[: len(padding)]]
    assert len(padding) == (3 if PLAN[name].get("pad", "repeat") == "repeat" else 0)


@pytest.mark.parametrize("name", [*MAP_STYLE, "none", "threads"])
def test_epochs_differ(four, name):
    first, second = (together(*shares_of(four, name, epoch)) for epoch in (0, 1))
    assert first != second


def test_ranks_share_what_a_sampler_draws_with_its_weights(four):
    weighted = WeightedRandomSampler(WEIGHTS, LENGTH, seed=3)
    balanced = ClassBalancedSampler(LABELS, seed=3, exact=True)
    for name, sampler in [("weighted", weighted), ("class balanced", balanced)]:
        sampler.set_epoch(1)
        found = [index for index, _ in flat(together(*shares_of(four, name, 1)))]
        assert found[:LENGTH] == list(sampler)
    of_classes = np.bincount(np.array(LABELS)[found[:LENGTH]])
    assert np.abs(of_classes - LENGTH / 3).max() < 1


@WORLDS
def test_each_rank_has_whole_balanced_batches_of_its_own(ranks):
    loader = loader_of("balanced batches", 1, rank=0)
    for epoch in (0, 1):
        expected = taken(loader)
        assert len(expected) == NUM_BALANCED
        shares = shares_of(ranks, "balanced batches", epoch)
        turns = list(itertools.chain(*zip(*shares, strict=True)))
        assert turns[:NUM_BALANCED] == expected
        more = [[index for index, _ in batch] for batch in turns[NUM_BALANCED:]]
        assert more == [[index for index, _ in batch] for batch in expected[: len(more)]]
        assert len(more) == -NUM_BALANCED % len(ranks)
        for batch in flat(shares):
            of_classes = collections.Counter(LABELS[index] for index, _ in batch)
            assert list(of_classes.values()) == [K_SAMPLES] * P_CLASSES


def test_a_step_is_of_one_bucket_and_one_size_on_all_ranks(four):
    for epoch in (0, 1):
        shares = shares_of(four, "buckets", epoch)
        for batches in zip(*shares, strict=True):
            assert len(set(map(len, batches))) == 1
            buckets = np.digitize([LENGTHS[index] for index, _ in flat(batches)], [20, 40])
            assert len(set(buckets)) == 1
        counts = counts_of(shares)
        assert sorted(counts) == list(range(LENGTH))
        assert max(counts.values()) <= 2
        assert counts.total() - LENGTH <= 3 * 3  # of each bucket fewer than there are ranks


@WORLDS
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("name", STREAMS)
def test_every_item_of_a_stream_goes_to_one_rank(ranks, name, epoch):
    shares = shares_of(ranks, name, epoch)
    assert sorted(counts_of(shares).items()) == [(index, 1) for index in range(LENGTH)]
    sizes = [len(indices_of(share)) for share in shares]
    assert max(sizes) - min(sizes) <= 2  # one for each worker


@WORLDS
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize(
    "name", [name for name in STREAMS if PLAN[name]["kind"] == "stream by batch"]
)
def test_a_stream_dealt_by_batches_is_that_of_one_process(ranks, name, epoch):
    loader = alone(name)
    loader.set_epoch(epoch)
    assert together(*shares_of(ranks, name, epoch)) == taken(loader)


@pytest.mark.parametrize("name", GOING_ON)
def test_all_ranks_save_the_same_state(four, name):
    states = {rank["epochs"][name]["state"] for rank in four}
    assert len(states) == 1
    state = json.loads(states.pop())
    assert (state["epoch"], state["batches"]) == (2, 2)


@pytest.mark.parametrize("name", GOING_ON)
def test_two_ranks_go_on_where_four_were(four, two, name):
    loader = alone(name)
    loader.set_epoch(2)
    expected = taken(loader), taken(loader)
    before, after = shares_of(four, name, 2), shares_of(two, name, 0)
    if name != "buckets":  # two ranks need less to make a bucket even
        assert together(*before) == expected[0][:2]
        assert_equal_but_for_the_end(together(*after), expected[0][2:])
    counts = counts_of([*before, *after])
    if PLAN[name]["kind"] == "dataset" and "drop" not in name:
        assert sorted(counts) == list(range(LENGTH))
        num_doubled = 1 if PLAN[name].get("pad", "repeat") == "repeat" else 0
        assert counts.total() == LENGTH + num_doubled
    # The next epoch.
    if name != "buckets":
        assert together(*shares_of(two, name, 1)) == expected[1][:1]


def assert_equal_but_for_the_end(batches, expected):
    """Two ranks may have one sample more at the end of an epoch, or one less, to be even."""
    found, right = flat(batches), flat(expected)
    shorter = min(len(found), len(right))
    assert found[:shorter] == right[:shorter]
    assert abs(len(found) - len(right)) <= 1


def test_whole_batches_of_four_ranks_are_no_state_for_two(four):
    loader = loader_of("balanced batches", 2, rank=0)
    state = json.loads(four[0]["epochs"]["balanced batches"]["state"])
    with pytest.raises(StateError, match="global_batch_size is 16 in the state and 8 here"):
        loader.load_state_dict(state)


def test_a_stream_of_four_ranks_is_no_state_for_two_nor_that_of_one_rank_for_another(four):
    state = json.loads(four[1]["epochs"]["stream by batch"]["state"])
    loader = loader_of("stream by batch", world_size=4)
    with pytest.raises(StateError, match="rank is 1 in the state and 0 here"):
        loader.load_state_dict(state)


def test_the_state_of_rank_0_ends_the_epoch_of_a_rank_with_fewer_batches():
    longest, other = (loader_of("dataset", 4, rank=rank, pad="none") for rank in (0, 1))
    batches = iter(longest)
    assert len(taken(batches, 7)) == 7
    state = longest.state_dict()
    assert (state["epoch"], state["batches"]) == (0, 7)
    del batches
    other.load_state_dict(state)
    assert taken(other) == []
    fresh = loader_of("dataset", 4, rank=1, pad="none")
    fresh.set_epoch(1)
    assert taken(other) == taken(fresh)
