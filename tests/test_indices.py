# SPDX-License-Identifier: Apache-2.0
"""Samplers that were given to a loader, compared with its dataset and with the ranks."""

from __future__ import annotations

import json
import weakref
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch.utils.data as stock

import penstock
import penstock.torch as ours
from penstock.errors import ConfigError
from penstock.indices import check_samplers, with_inner
from penstock.sampling import (
    BalancedBatchSampler,
    BatchSampler,
    BucketBatchSampler,
    DistributedSampler,
    RandomSampler,
)

DATA = range(8)


class Wrapper:
    """A sampler of the user's, which deals out what another one yields."""

    def __init__(self, sampler, num_replicas=2):
        self.dataset = sampler
        self.num_replicas = num_replicas
        self.rank = 0

    def __iter__(self):
        return iter(list(self.dataset)[:: self.num_replicas])

    def __len__(self):
        return -(-len(self.dataset) // self.num_replicas)


class AsDataset:
    """How wrappers that derive from torch's DistributedSampler hold a sampler."""

    def __init__(self, sampler):
        self._items = sampler

    def __len__(self):
        return len(self._items)

    def __iter__(self):
        return iter(self._items)


def share(num_replicas=2):
    return DistributedSampler(DATA, num_replicas, 0)


@pytest.mark.parametrize("hold", [lambda sampler: sampler, AsDataset], ids=["held", "as dataset"])
def test_a_share_that_a_foreign_sampler_deals_out_once_more_is_refused(hold):
    outer = Wrapper(hold(share()))
    said = "DistributedSampler gives this rank its share of 2 already, and Wrapper would deal"
    for given in ((outer, None), (None, BatchSampler(outer, 2, False))):
        with pytest.raises(ConfigError, match=said):
            check_samplers(DATA, *given, 1)
    with pytest.raises(ConfigError, match="use_distributed_sampler=False"):
        penstock.Loader(DATA, sampler=outer)


def test_a_foreign_sampler_may_deal_out_what_is_not_dealt_out_yet():
    whole = RandomSampler(DATA, seed=1)
    for outer in (Wrapper(whole), Wrapper(AsDataset(share(1))), Wrapper(share(), num_replicas=1)):
        check_samplers(DATA, outer, None, 1)


def test_a_sampler_that_the_loader_s_own_dataset_holds_is_its_business():
    data = AsDataset(share())
    check_samplers(data, Wrapper(data), None, 1)


class Delegating:
    """A wrapper that has what the wrapped sampler has, as people write it."""

    def __init__(self, sampler):
        self._wrapped = sampler

    def __iter__(self):
        return iter(self._wrapped)

    def __getattr__(self, name):
        return getattr(self._wrapped, name)


class Proxy:
    """Notes what it is asked for, and wraps what it hands out."""

    def __init__(self, asked):
        self.asked = asked

    def __getattr__(self, name):
        self.asked.append(name)
        return type(self)(self.asked)


class IterableProxy(Proxy):
    def __iter__(self):
        return iter([2, 0, 1])


class Wrapped:
    def __init__(self, batch_sampler):
        self.batch_sampler = batch_sampler

    def __iter__(self):
        return iter(self.batch_sampler)


class Slotted:
    __slots__ = ("sampler",)

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(self.sampler)


class Endless:
    """Each is made of another one."""

    @property
    def sampler(self):
        return Endless()

    def __iter__(self):
        return iter([2, 0, 1])


class Holder:
    """What a batch sampler may be made of without iterating it."""

    sampler = None

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_a_sampler_leads_to_all_that_it_is_made_of():
    inner = RandomSampler(DATA)
    batches = BatchSampler(inner, 2, False)
    outer = stock.BatchSampler(batches, 2, False)
    assert with_inner(outer) == [outer, batches, inner]
    for wrapper in (Slotted, Wrapped, Delegating, weakref.proxy):
        assert with_inner(wrapper(batches))[-1] is inner
    holder = Holder()
    assert with_inner(Slotted(holder))[1:] == [holder]
    assert with_inner(None, [1, 2]) == [[1, 2]]


@pytest.mark.parametrize("make", [penstock.Loader, ours.DataLoader], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_what_is_no_sampler_is_asked_nothing_when_a_loader_is_made(make, name):
    asked = []
    loaders = [make(DATA, **{name: given}) for given in (Proxy(asked), Mock())]
    assert asked == []
    for loader in loaders:
        loader.state_dict()
        with pytest.raises(TypeError, match="not iterable"):
            next(iter(loader))


@pytest.mark.parametrize("make", [penstock.Loader, ours.DataLoader], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    "sampler", [lambda: IterableProxy([]), Endless, MagicMock], ids=["proxy", "endless", "mock"]
)
def test_a_sampler_that_seems_to_be_made_of_ever_more_has_an_end(make, sampler):
    made = sampler()
    if isinstance(made, MagicMock):
        made.__iter__.side_effect = lambda: iter([2, 0, 1])
    loader = make(DATA, batch_size=2, sampler=made)
    state = json.loads(json.dumps(loader.state_dict()))
    batches = [np.asarray(batch).tolist() for batch in loader]
    assert batches == [[2, 0], [1]]
    again = make(DATA, batch_size=2, sampler=made)
    again.load_state_dict(state)
    assert [np.asarray(batch).tolist() for batch in again] == batches


def loaders():
    keys = np.random.default_rng(0).integers(1, 50, 60)
    labels = keys % 3
    yield penstock.Loader(np.arange(60), 8, shuffle=True, seed=5)
    yield penstock.Loader(np.arange(60), 8, shuffle=True, drop_last=True, num_workers=1)
    yield penstock.Loader(np.arange(60), None, shuffle=True)
    yield penstock.Loader(np.arange(60), 7, sampler=DistributedSampler(range(60), 2, 1))
    yield penstock.Loader(np.arange(60), batch_sampler=BucketBatchSampler(keys, max_tokens=200))
    yield penstock.Loader(np.arange(60), batch_sampler=BalancedBatchSampler(labels, 3, 2))
    yield ours.DataLoader(np.arange(60), 8, shuffle=True, seed=5)


@pytest.mark.parametrize("loader", list(loaders()), ids=lambda loader: type(loader).__name__)
def test_which_samples_a_step_holds_is_known_without_reading_one(loader):
    epochs = [[np.atleast_1d(np.asarray(batch)).tolist() for batch in loader] for _ in range(3)]
    stream = iter(loader)
    first = np.atleast_1d(np.asarray(next(stream))).tolist()
    for epoch in (2, 0, 1):
        found = [loader.indices(epoch, step).tolist() for step in range(len(epochs[epoch]))]
        assert found == epochs[epoch]
        with pytest.raises(IndexError, match=f"epoch {epoch} has no step {len(found)}"):
            loader.indices(epoch, len(found))
    assert first == loader.indices(3, 0).tolist()
    rest = [np.atleast_1d(np.asarray(batch)).tolist() for batch in stream]
    assert rest[-1] == loader.indices(3, len(rest)).tolist()
    assert loader.epoch == 4


@pytest.mark.parametrize(
    "loader",
    [
        ours.DataLoader(np.arange(6), 2, shuffle=True),
        penstock.Loader(np.arange(6), 2, sampler=[3, 1]),
        penstock.Loader(np.arange(6), batch_sampler=[[3, 1]]),
    ],
)
def test_which_samples_a_step_holds_is_not_guessed(loader):
    with pytest.raises(ConfigError, match="step 0 of epoch 1 holds is not known"):
        loader.indices(1, 0)
