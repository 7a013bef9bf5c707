# SPDX-License-Identifier: Apache-2.0
"""Samplers that were given to a loader, compared with its dataset and with the ranks."""

from __future__ import annotations

import pytest

import penstock
from penstock.errors import ConfigError
from penstock.indices import check_samplers
from penstock.sampling import BalancedBatchSampler, BatchSampler, DistributedSampler, RandomSampler

DATA = range(8)


class Wrapper:
    """Somebody's sampler, which deals out what another one yields."""

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
    told = "DistributedSampler gives this rank its share of 2 already, and Wrapper would deal"
    for given in ((outer, None), (None, BatchSampler(outer, 2, False))):
        with pytest.raises(ConfigError, match=told):
            check_samplers(DATA, *given)
    with pytest.raises(ConfigError, match="use_distributed_sampler=False"):
        penstock.Loader(DATA, sampler=outer)


def test_the_order_of_a_batch_sampler_that_deals_itself_out_is_a_share_too():
    batches = BalancedBatchSampler([0, 0, 1, 1], 2, 1, num_replicas=2, rank=0)
    with pytest.raises(ConfigError, match="would deal that share out once more"):
        check_samplers(range(4), Wrapper(batches.sampler), None)


def test_a_foreign_sampler_may_deal_out_what_is_not_dealt_out_yet():
    whole = RandomSampler(DATA, seed=1)
    for outer in (Wrapper(whole), Wrapper(AsDataset(share(1))), Wrapper(share(), num_replicas=1)):
        check_samplers(DATA, outer, None)


def test_a_sampler_that_the_loader_s_own_dataset_holds_is_its_business():
    data = AsDataset(share())
    check_samplers(data, Wrapper(data), None)
