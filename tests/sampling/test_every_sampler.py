# SPDX-License-Identifier: Apache-2.0
"""What holds for every sampler of indices, whatever it draws."""

import json
import pickle

import numpy as np
import pytest
import torch.utils.data as stock
from hypothesis import given
from hypothesis import strategies as st

from penstock import Loader
from penstock.data import ArrayDataset
from penstock.sampling import (
    BatchSampler,
    BucketSampler,
    ClassAwareSampler,
    ClassBalancedSampler,
    DistributedSampler,
    DynamicBalancedSampler,
    MixtureSampler,
    RandomSampler,
    RepeatFactorSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from penstock.torch import DataLoader

NUM_SAMPLES = 90
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(4), [50, 25, 12, 3]))
ROWS = [[label, 0] if label else [0] for label in LABELS.tolist()]

MAKERS = {
    "random": lambda seed: RandomSampler(range(NUM_SAMPLES), seed=seed),
    "random again": lambda seed: RandomSampler(range(NUM_SAMPLES), True, 70, seed=seed),
    "subset": lambda seed: SubsetRandomSampler(np.arange(5, 77), seed=seed),
    "weighted": lambda seed: WeightedRandomSampler(1.0 + LABELS, 100, seed=seed),
    "weighted once": lambda seed: WeightedRandomSampler(1.0 + LABELS, 40, False, seed=seed),
    "balanced": lambda seed: ClassBalancedSampler(LABELS, seed=seed),
    "balanced exactly": lambda seed: ClassBalancedSampler(LABELS, 0.5, 77, exact=True, seed=seed),
    "balanced independently": lambda seed: ClassBalancedSampler(
        LABELS, "effective", replacement=True, seed=seed
    ),
    "balanced by boxes' images": lambda seed: ClassBalancedSampler([*ROWS[:-1], []], seed=seed),
    "undersampled": lambda seed: ClassBalancedSampler(LABELS, replacement=False, seed=seed),
    "oversampled": lambda seed: ClassBalancedSampler(LABELS, 0.5, "oversample", seed=seed),
    "dynamic": lambda seed: DynamicBalancedSampler(LABELS, 3, seed=seed),
    "class-aware": lambda seed: ClassAwareSampler(ROWS, 85, 2, seed=seed),
    "repeat factor": lambda seed: RepeatFactorSampler(ROWS, 0.5, seed=seed),
    "repeat factor of a size": lambda seed: RepeatFactorSampler(
        ROWS, 0.5, seed=seed, root=False, num_samples=55
    ),
    "mixture": lambda seed: MixtureSampler([60, 25, 5], [1.0, 1.0, 2.0], seed=seed),
    "buckets": lambda seed: BucketSampler(LABELS * 10.0, 8, seed=seed),
    "one of two ranks": lambda seed: DistributedSampler(
        ClassBalancedSampler(LABELS, seed=seed), 2, 1
    ),
}
every_sampler = pytest.mark.parametrize("kind", MAKERS)
DATA = ArrayDataset(np.arange(NUM_SAMPLES))


def order_of(kind, seed, epoch):
    sampler = MAKERS[kind](seed)
    sampler.set_epoch(epoch)
    return list(sampler)


@every_sampler
def test_an_order_depends_on_seed_and_epoch_alone(kind):
    orders = {}
    for seed in (0, 1):
        for epoch in (0, 1):
            np.random.seed(seed + epoch)  # the global state must not matter
            orders[seed, epoch] = tuple(order_of(kind, seed, epoch))
    assert len(set(orders.values())) == 4
    np.random.seed(99)
    assert all(tuple(order_of(kind, *key)) == order for key, order in orders.items())


@every_sampler
def test_an_order_does_not_depend_on_the_epochs_before_it(kind):
    sampler = MAKERS[kind](3)
    for epoch in (5, 0, 2, 5):
        sampler.set_epoch(epoch)
        assert list(sampler) == order_of(kind, 3, epoch)


@every_sampler
def test_indices_are_of_the_dataset_as_many_as_the_length_says_and_python_integers(kind):
    sampler = MAKERS[kind](3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        order = sampler.indices()[:]
        assert order.dtype == np.int64
        assert len(order) == len(sampler)
        assert 0 <= order.min() <= order.max() < NUM_SAMPLES
        assert list(sampler) == order.tolist()
        assert {type(index) for index in sampler} == {int}


@every_sampler
def test_an_order_is_the_callers_to_change(kind):
    sampler = MAKERS[kind](3)
    expected = list(sampler)
    sampler.indices()[:][...] = 0
    assert list(sampler) == expected


@every_sampler
def test_parts_of_an_order_are_parts_of_the_whole(kind):
    order = MAKERS[kind](3).indices()
    whole = order[:].tolist()
    assert order[7:31].tolist() == whole[7:31]
    assert order[np.array([11, 3])].tolist() == [whole[11], whole[3]]


@every_sampler
def test_settings_are_json_and_tell_seeds_but_not_epochs_apart(kind):
    sampler = MAKERS[kind](3)
    settings = sampler.settings()
    assert json.loads(json.dumps(settings)) == settings
    sampler.set_epoch(2)
    assert sampler.settings() == settings
    if kind != "one of two ranks":  # its own seed is not what decides
        assert MAKERS[kind](4).settings() != settings


@every_sampler
def test_a_pickled_sampler_goes_on_as_it_was(kind):
    sampler = MAKERS[kind](3)
    sampler.set_epoch(4)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)


@every_sampler
@given(world_size=st.integers(1, 7), epoch=st.integers(0, 3))
def test_the_ranks_shares_make_up_the_stream_of_one(kind, world_size, epoch):
    if kind == "one of two ranks":
        pytest.skip("it is a share already")
    whole = order_of(kind, 3, epoch)
    shares = []
    for rank in range(world_size):
        sampler = DistributedSampler(MAKERS[kind](3), world_size, rank, pad="none")
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
    assert [len(share) for share in shares] == [
        len(whole[rank::world_size]) for rank in range(world_size)
    ]
    assert [shares[k % world_size][k // world_size] for k in range(len(whole))] == whole


@every_sampler
def test_torch_s_own_loader_takes_it(kind):
    sampler = MAKERS[kind](3)
    loader = stock.DataLoader(range(NUM_SAMPLES), batch_size=16, sampler=sampler)
    assert len(loader) == -(-len(sampler) // 16)
    assert [index for batch in loader for index in batch.tolist()] == list(sampler)


@every_sampler
@pytest.mark.parametrize("make", [Loader, DataLoader], ids=["numpy", "torch"])
def test_a_run_resumes_at_any_step(kind, make):
    def loader():
        return make(DATA, batch_size=8, sampler=MAKERS[kind](3), seed=5)

    running = loader()
    for epoch in range(2):
        running.set_epoch(epoch)
        given, states = [], [running.state_dict()]
        for batch in running:
            given.append(batch[0].tolist())
            states.append(running.state_dict())
        for num_given, state in enumerate(states[:-1]):
            resumed = loader()
            resumed.load_state_dict(json.loads(json.dumps(state)))
            assert [batch[0].tolist() for batch in resumed] == given[num_given:]


@every_sampler
def test_torch_s_own_loader_is_warned_of_when_nobody_tells_the_epoch(kind):
    sampler = MAKERS[kind](3)
    loader = stock.DataLoader(range(NUM_SAMPLES), batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        list(loader)
    with pytest.warns(UserWarning, match="gives the order of epoch 2 once more") as caught:
        list(loader)
    assert caught[0].filename == __file__
    list(loader)  # says it once


def test_an_order_that_is_always_the_same_is_no_reason_to_warn():
    for sampler in (
        SequentialSampler(range(9)),
        BucketSampler([3, 1, 2], 2, shuffle=False),
        DistributedSampler(range(9), 2, 0, shuffle=False),
    ):
        loader = stock.DataLoader(range(9), batch_size=2, sampler=sampler)
        assert [b.tolist() for b in loader] == [b.tolist() for b in loader]


def test_batches_too_are_warned_of():
    batches = BatchSampler(ClassBalancedSampler(LABELS), 8, drop_last=True)
    loader = stock.DataLoader(range(NUM_SAMPLES), batch_sampler=batches)
    list(loader)
    with pytest.warns(UserWarning, match="order of epoch 0 once more"):
        list(loader)


@every_sampler
@pytest.mark.parametrize("as_batches", [False, True])
@pytest.mark.parametrize("seed", [None, 5])
def test_our_loaders_tell_the_epoch_and_hear_what_the_loop_tells(kind, as_batches, seed):
    def loader():
        sampler = MAKERS[kind](3)
        if as_batches:
            batches = BatchSampler(sampler, 8, drop_last=False)
            return sampler, DataLoader(DATA, batch_sampler=batches, seed=seed)
        return sampler, DataLoader(DATA, batch_size=8, sampler=sampler, seed=seed)

    def epoch_of(loader):
        return [index for batch in loader for index in batch[0].tolist()]

    sampler, ours = loader()
    assert [epoch_of(ours) for _ in range(3)] == [order_of(kind, 3, epoch) for epoch in range(3)]
    sampler, ours = loader()
    for epoch in (4, 2, 7):
        sampler.set_epoch(epoch)
        assert epoch_of(ours) == order_of(kind, 3, epoch)
    state = ours.state_dict()
    sampler, ours = loader()
    ours.load_state_dict(state)
    assert epoch_of(ours) == order_of(kind, 3, 8)
