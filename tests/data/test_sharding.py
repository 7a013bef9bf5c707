# SPDX-License-Identifier: Apache-2.0
"""Streams dealt out to workers and ranks, and the warning where they are not."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.process.seeded_datasets import Countdown

import penstock.torch as ours
from penstock import Loader
from penstock.data import IterableDataset, shard
from penstock.errors import ConfigError
from penstock.worker_info import ShardInfo, current_shard, set_shard


def shares(items, by, workers, ranks, batch_size):
    found = {}
    for rank in range(ranks):
        for worker_id in range(workers):
            outer = set_shard(ShardInfo(worker_id, workers, batch_size, rank, ranks))
            found[rank, worker_id] = list(shard(items, by))
            set_shard(outer)
    return found


@given(
    length=st.integers(0, 60), by=st.sampled_from(["batch", "item"]), workers=st.integers(1, 4),
    ranks=st.integers(1, 3), batch_size=st.none() | st.integers(1, 5),
)  # fmt: skip
def test_every_item_comes_to_one_worker_of_one_rank(length, by, workers, ranks, batch_size):
    found = shares(range(length), by, workers, ranks, batch_size)
    assert sorted(item for share in found.values() for item in share) == list(range(length))
    sizes = [len(share) for share in found.values()]
    assert max(sizes) - min(sizes) <= (batch_size or 1 if by == "batch" else 1)


@given(
    length=st.integers(0, 60), workers=st.integers(1, 4), ranks=st.integers(1, 3),
    batch_size=st.integers(1, 5),
)  # fmt: skip
def test_dealt_by_the_batch_the_workers_in_turn_make_what_one_would(
    length, workers, ranks, batch_size
):
    found = shares(range(length), "batch", workers, ranks, batch_size)
    alone = shares(range(length), "batch", 1, ranks, batch_size)
    for rank in range(ranks):
        batches = [
            [share[start : start + batch_size] for start in range(0, len(share), batch_size)]
            for share in (found[rank, worker_id] for worker_id in range(workers))
        ]
        turns = max(map(len, batches))
        together = [own[turn] for turn in range(turns) for own in batches if turn < len(own)]
        assert [item for batch in together for item in batch] == alone[rank, 0]


def test_nothing_is_read_ahead_of_the_shard():
    seen = []

    def items():
        for item in range(100):
            seen.append(item)
            yield item

    stream = shard(items(), "item")
    assert [next(stream), next(stream)] == [0, 1]
    assert seen == [0, 1]


def test_outside_of_a_loader_everything_is_wanted():
    assert current_shard() == ShardInfo()
    assert list(shard("abc")) == ["a", "b", "c"]
    list(Loader(Countdown(5), batch_size=2))
    assert current_shard() == ShardInfo()


def test_how_to_deal_is_one_of_two():
    with pytest.raises(ConfigError, match="by='batches'"):
        shard([1], "batches")


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("loader_of", [Loader, ours.DataLoader])
def test_the_number_of_workers_does_not_show(loader_of, num_workers, shuffled):
    def batches(num_workers):
        loader = loader_of(
            Countdown(shuffled=shuffled), batch_size=4, num_workers=num_workers, seed=7
        )
        return [[np.asarray(part).tolist() for part in b] for _ in range(2) for b in loader]

    assert batches(num_workers) == batches(0)


def test_dealt_one_by_one_all_come_once():
    loader = Loader(Countdown(by="item"), batch_size=4, num_workers=3)
    items = sorted(item for batch in loader for item in batch[0].tolist())
    assert items == list(range(41))


def test_a_shuffle_of_the_list_is_the_same_in_all_workers():
    loader = Loader(Countdown(shuffled=True), batch_size=4, num_workers=3)
    orders = [[item for batch in loader for item in batch[0].tolist()] for _ in range(2)]
    assert orders[0] != orders[1]
    for order in orders:
        assert sorted(order) == list(range(41))


def test_ranks_are_known_from_the_environment(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    items = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        for loader_of in (Loader, ours.DataLoader):
            loader = loader_of(Countdown(), batch_size=4, num_workers=2)
            items.append([item for batch in loader for item in np.asarray(batch[0]).tolist()])
    assert items[0] == items[1]
    assert sorted(items[0] + items[2]) == list(range(41))


class Naive(IterableDataset):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize("loader_of", [Loader, ours.DataLoader])
def test_a_stream_that_every_worker_reads_whole_is_named(loader_of):
    with pytest.warns(UserWarning, match=r"both began Naive .* 2 times.*penstock\.data\.shard"):
        list(loader_of(Naive(), batch_size=2, num_workers=2, seed=0))


def test_without_a_seed_it_is_logged_once_as_torch_would_not_warn(caplog):
    class Unshared(Naive):
        pass

    for _ in range(2):
        list(ours.DataLoader(Unshared(), num_workers=2, multiprocessing_context="fork"))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("penstock", "WARNING")
    assert "both began Unshared" in record.getMessage()


def test_a_stream_that_is_shared_out_is_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(Loader(Countdown(), batch_size=2, num_workers=2))
        list(Loader(Naive(), batch_size=2, num_workers=1))
        list(Loader(Naive(), batch_size=2))
