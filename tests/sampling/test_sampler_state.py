# SPDX-License-Identifier: Apache-2.0
"""A sampler by itself goes on where its state was saved, in any loader."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch.utils.data as stock
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Loader
from penstock.errors import StateError
from penstock.sampling import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from penstock.sampling.balanced_batches import BalancedBatchSampler
from penstock.sampling.buckets import BucketBatchSampler
from penstock.sampling.packing import PackingSampler
from penstock.torch import DataLoader

LENGTHS = np.random.default_rng(3).integers(1, 60, 41)


class Numbers:
    def __len__(self):
        return 41

    def __getitem__(self, index):
        return index


class Halves:
    """A sampler of another library, that has its epoch but no state."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 41

    def __iter__(self):
        return iter(np.random.default_rng(self.epoch).permutation(41).tolist())


MAKERS = {
    "sequential": lambda: SequentialSampler(Numbers()),
    "random": lambda: RandomSampler(Numbers(), seed=3),
    "subset": lambda: SubsetRandomSampler(range(100, 141), seed=3),
    "weighted": lambda: WeightedRandomSampler(np.arange(41), 41, seed=3),
    "distributed": lambda: DistributedSampler(Numbers(), 2, 1, seed=3),
    "distributed other": lambda: DistributedSampler(Halves(), 2, 1),
    "bucket": lambda: BucketBatchSampler(LENGTHS, 4, window=32, seed=3).sampler,
    "batches": lambda: BatchSampler(RandomSampler(Numbers(), seed=3), 4, False),
    "full batches": lambda: BatchSampler(RandomSampler(Numbers(), seed=3), 4, True),
    "other batches": lambda: BatchSampler(Halves(), 4, False),
    "list batches": lambda: BatchSampler(list(range(41)), 4, True),
    "aspect ratio": lambda: BucketBatchSampler(
        np.stack([LENGTHS, LENGTHS[::-1]], 1), 4, key="aspect_ratio"
    ),
    "bucket batches": lambda: BucketBatchSampler(LENGTHS, max_tokens=200, seed=3),
    "bucket share": lambda: BucketBatchSampler(LENGTHS, 4, num_replicas=2, rank=1),
    "balanced": lambda: BalancedBatchSampler(LENGTHS % 4, 2, 3, 9, num_replicas=2, rank=1),
    "packed": lambda: PackingSampler(LENGTHS, 100, 2, num_replicas=2, rank=1),
}


def saved(sampler):
    state = json.loads(json.dumps(sampler.state_dict()))
    assert len(json.dumps(state)) < 1000
    return state


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("epoch", [0, 2])
def test_the_next_iterator_goes_on_and_later_ones_begin_anew(kind, epoch):
    sampler = MAKERS[kind]()
    if kind == "list batches":
        epoch = 0
    sampler.set_epoch(epoch)
    whole = list(sampler)
    assert len(whole) == len(sampler)
    for step in range(len(whole) + 1):
        items = iter(sampler)
        assert list(itertools.islice(items, step)) == whole[:step]
        again = MAKERS[kind]()
        again.load_state_dict(saved(sampler))
        assert saved(again) == saved(sampler)
        assert list(again) == whole[step:] == list(items)
        assert list(again) == whole


def test_a_state_counts_for_the_iterator_made_last():
    sampler = RandomSampler(Numbers(), seed=3)
    assert sampler.state_dict()["position"] == 0
    first = iter(sampler)
    next(first)
    second = iter(sampler)
    assert sampler.state_dict()["position"] == 0
    next(first)
    assert sampler.state_dict()["position"] == 0
    list(itertools.islice(second, 5))
    assert sampler.state_dict()["position"] == 5
    sampler.set_epoch(4)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (4, 0)


def test_another_epoch_drops_the_state():
    sampler = RandomSampler(Numbers(), seed=3)
    next(iter(sampler))
    state = saved(sampler)
    again = RandomSampler(Numbers(), seed=3)
    again.load_state_dict(state)
    again.set_epoch(1)
    assert len(list(again)) == 41
    again.set_epoch(0)
    assert len(list(again)) == 41


def test_an_iterator_that_nobody_asks_takes_nothing_away():
    # torch's loader with workers makes two, and uses the second.
    sampler = RandomSampler(Numbers(), seed=3)
    list(itertools.islice(iter(sampler), 5))
    sampler.load_state_dict(saved(sampler))
    iter(sampler)
    loader = stock.DataLoader(Numbers(), sampler=sampler, batch_size=None, num_workers=1)
    whole = list(RandomSampler(Numbers(), seed=3))
    assert list(loader) == whole[5:]
    assert list(loader) == whole


def test_torchs_batches_of_a_sampler_go_on():
    sampler = RandomSampler(Numbers(), seed=3)
    batches = iter(stock.BatchSampler(sampler, 4, drop_last=False))
    first = [next(batches), next(batches)]
    again = RandomSampler(Numbers(), seed=3)
    again.load_state_dict(saved(sampler))
    rest = list(stock.BatchSampler(again, 4, drop_last=False))
    assert list(itertools.chain(*first, *rest)) == list(RandomSampler(Numbers(), seed=3))


@given(
    st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3, 4, 6]), st.integers(0, 10),
    st.integers(0, 30),
)  # fmt: skip
@settings(deadline=None)
def test_the_number_of_ranks_may_change(before, after, step, length):
    def share(ranks, rank):
        return DistributedSampler(range(length), ranks, rank, seed=1)

    sampler = share(before, 0)
    given = len(list(itertools.islice(sampler, step))) * before
    state = saved(sampler)
    if given % after and given < length:
        with pytest.raises(StateError, match=f"{given} is no multiple of {after}"):
            share(after, 0).load_state_dict(state)
        return
    samplers = [share(after, rank) for rank in range(after)]
    for one in samplers:
        one.load_state_dict(state)
    rest = [index for turn in zip(*samplers, strict=True) for index in turn]
    assert rest[: max(length - given, 0)] == list(share(1, 0))[given:]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (RandomSampler(Numbers(), seed=4), "seed is 3 in the state and 4 here"),
        (RandomSampler(range(40), seed=3), "length is 41 in the state and 40 here"),
        (SequentialSampler(Numbers()), "kind is 'RandomSampler' in the state and 'Sequential"),
        (BatchSampler(Halves(), 2, False), "global_batch_size is None in the state and 2 here"),
    ],
    ids=["seed", "length", "kind", "batches"],
)
def test_a_state_of_another_sampler_is_refused(other, message):
    state = saved(RandomSampler(Numbers(), seed=3))
    with pytest.raises(StateError, match=message):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, r"not a state of a sampler \(KeyError: 'format'\)"),
        (None, "not a state of a sampler"),
        ({"format": 9}, "format 9 where 1 is read"),
        (Loader(Numbers()).state_dict(), "the state of a loader goes to the loader's"),
        ({"format": 1, "epoch": 0, "position": -1, "fingerprint": {}}, "position=-1"),
        ({"format": 1, "epoch": "0", "position": 1, "fingerprint": {}}, "epoch='0'"),
    ],
    ids=["empty", "none", "format", "loader", "position", "epoch"],
)
def test_what_is_no_state_is_refused(state, message):
    with pytest.raises(StateError, match=message):
        RandomSampler(Numbers()).load_state_dict(state)


@pytest.mark.parametrize("kind", [Loader, DataLoader])
def test_a_seeded_loader_does_not_begin_where_a_sampler_stands(kind):
    sampler = RandomSampler(Numbers(), seed=3)
    list(itertools.islice(sampler, 8))
    sampler.load_state_dict(saved(sampler))
    assert len(list(kind(Numbers(), batch_size=4, sampler=sampler, seed=1))) == 11


@pytest.mark.parametrize("kind", ["sampler", "batches", "buckets", "balanced"])
@pytest.mark.parametrize("seed", [None, 1])
def test_states_of_a_loader_and_its_sampler_do_not_add_up(kind, seed):
    def make():
        options = STATEFUL[kind]()
        return options.get("sampler", options.get("batch_sampler")), DataLoader(
            Numbers(), **options, seed=seed
        )

    sampler, loader = make()
    sampler.set_epoch(2)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    states = sampler.state_dict(), loader.state_dict()
    rest = as_lists(batches)
    assert rest
    again, loader = make()
    again.load_state_dict(states[0])
    loader.load_state_dict(states[1])
    assert as_lists(loader) == rest


OF_TORCHDATA = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def stateful(dataset, **options):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, **options)


STATEFUL = {
    "sampler": lambda: {"sampler": RandomSampler(Numbers(), seed=3), "batch_size": 4},
    "singly": lambda: {"sampler": RandomSampler(Numbers(), seed=3), "batch_size": None},
    "share": lambda: {"sampler": DistributedSampler(Numbers(), 2, 1, seed=3), "batch_size": 4},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(Numbers(), seed=3), 4, False)},
    "others": lambda: {"batch_sampler": BatchSampler(Halves(), 4, False)},
    "buckets": lambda: {"batch_sampler": BucketBatchSampler(LENGTHS, max_tokens=200)},
    "balanced": lambda: {"batch_sampler": BalancedBatchSampler(LENGTHS % 4, 2, 3, 9)},
    "packed": lambda: {"batch_sampler": PackingSampler(LENGTHS, 100, 2)},
}


def as_lists(batches):
    return [np.asarray(batch).tolist() for batch in batches]


@OF_TORCHDATA
@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stateful_loader_of_torchdata_resumes(kind, num_workers):
    pytest.importorskip("torchdata.stateful_dataloader")

    def make():
        return stateful(Numbers(), num_workers=num_workers, **STATEFUL[kind]())

    whole = as_lists(make())
    assert len(whole) > 4
    for step in (0, 1, 3, len(whole)):
        loader = make()
        batches = iter(loader)
        assert as_lists(itertools.islice(batches, step)) == whole[:step]
        state = loader.state_dict()
        rest = as_lists(batches)
        again = make()
        again.load_state_dict(state)
        assert as_lists(again) == rest == whole[step:]
        assert as_lists(again) == whole
