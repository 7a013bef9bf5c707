# SPDX-License-Identifier: Apache-2.0
"""Shards: which node reads which, in which order, without the files of another node."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import tarfile
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock import Loader, sample_rng
from penstock.data import ArrayDataset, ConcatDataset, Dataset
from penstock.errors import ConfigError, StateError
from penstock.sampling import (
    AbsentShard,
    BatchSampler,
    ShardSampler,
    assign_shards,
    balance_report,
)
from penstock.stores import LMDBDataset, StoreDataset, pack
from penstock.torch import DataLoader

sizes_of_shards = st.lists(st.integers(0, 30), min_size=1, max_size=25).filter(any)
MANY = [50, 40, 60, 50, 50, 30, 50, 70, 50, 50, 20, 50]


def all_ranks(lengths, num_nodes, ranks_per_node=1, epoch=0, **options):
    """Return the samplers of a run, node after node."""
    samplers = []
    for node, local_rank in itertools.product(range(num_nodes), range(ranks_per_node)):
        sampler = ShardSampler(
            lengths,
            num_nodes=num_nodes,
            node=node,
            ranks_per_node=ranks_per_node,
            local_rank=local_rank,
            **options,
        )
        sampler.set_epoch(epoch)
        samplers.append(sampler)
    return samplers


def shard_of(indices, lengths):
    return np.searchsorted(np.cumsum(lengths), np.asarray(indices, np.int64), side="right")


def merged(samplers, num_nodes, ranks_per_node):
    """Return what all ranks give, by turns as their positions say."""
    order = {}
    for sampler in samplers:
        for k, index in enumerate(sampler):
            order[k * sampler.world_size + sampler.rank] = index
    return [order[place] for place in sorted(order)]


# Who has which.


@given(sizes=sizes_of_shards, num_nodes=st.integers(1, 9))
def test_no_node_has_more_than_another_by_more_than_the_largest_shard(sizes, num_nodes):
    nodes = assign_shards(sizes, num_nodes)
    assert sorted(itertools.chain(*nodes)) == list(range(len(sizes)))
    assert nodes == [sorted(own) for own in nodes]
    loads = [sum(sizes[shard] for shard in own) for own in nodes]
    assert len(loads) == num_nodes
    assert max(loads) - min(loads) <= max(sizes)
    assert assign_shards(np.array(sizes), num_nodes) == nodes


@pytest.mark.parametrize("num_nodes", [4, 8, 32])
@pytest.mark.parametrize("is_even", [True, False])
def test_with_one_node_more_few_shards_move(num_nodes, is_even):
    drawn = np.random.default_rng(0).integers(500, 1500, 100 * num_nodes)
    sizes = np.full_like(drawn, 1000) if is_even else drawn
    homes = []
    for count in (num_nodes, num_nodes + 1):
        home = np.empty(len(sizes), int)
        for node, own in enumerate(assign_shards(sizes, count)):
            home[own] = node
        homes.append(home)
    moved = float((homes[0] != homes[1]).mean())
    least = 1 / (num_nodes + 1)
    assert least * 0.8 <= moved <= least + 0.06
    assert all(len(own) > 10 for own in assign_shards(sizes, num_nodes))


def test_an_assignment_is_for_ever():
    # Data were laid on disks by it: another release may not have another.
    assert assign_shards(MANY, 3) == [[1, 6, 8, 11], [2, 3, 7], [0, 4, 5, 9, 10]]
    assert assign_shards([7] * 9, 2) == [[1, 2, 4, 5, 8], [0, 3, 6, 7]]
    assert assign_shards([7] * 9, 3) == [[1, 2, 8], [3, 6, 7], [0, 4, 5]]


# What an epoch is.


@given(
    lengths=sizes_of_shards,
    num_nodes=st.integers(1, 5),
    ranks_per_node=st.integers(1, 4),
    epoch=st.integers(0, 5),
    assignment=st.sampled_from(["fixed", "epoch"]),
    open_shards=st.integers(1, 5),
)
def test_every_sample_comes_once_and_each_shard_on_one_node(
    lengths, num_nodes, ranks_per_node, epoch, assignment, open_shards
):
    samplers = all_ranks(
        lengths,
        num_nodes,
        ranks_per_node,
        epoch,
        assignment=assignment,
        open_shards=open_shards,
        pad="none",
    )
    orders = [list(sampler) for sampler in samplers]
    assert sorted(itertools.chain(*orders)) == list(range(sum(lengths)))
    assert [len(sampler) for sampler in samplers] == [len(order) for order in orders]
    nodes_of = {shard: set() for shard in range(len(lengths))}
    for sampler, order in zip(samplers, orders, strict=True):
        for shard in set(shard_of(order, lengths).tolist()):
            nodes_of[shard].add(sampler.node)
            assert shard in sampler.shards()
    assert all(len(nodes) <= 1 for nodes in nodes_of.values())
    places = [k * s.world_size + s.rank for s in samplers for k in range(len(s))]
    assert len(set(places)) == len(places)


@given(
    lengths=sizes_of_shards,
    num_nodes=st.integers(1, 4),
    epoch=st.integers(0, 3),
    assignment=st.sampled_from(["fixed", "epoch"]),
    open_shards=st.integers(1, 4),
)
def test_a_node_reads_no_more_shards_at_a_time_than_it_was_told(
    lengths, num_nodes, epoch, assignment, open_shards
):
    options = {"assignment": assignment, "open_shards": open_shards, "pad": "none"}
    for sampler in all_ranks(lengths, num_nodes, 1, epoch, **options):
        shards = shard_of(list(sampler), lengths)
        spans = [np.flatnonzero(shards == shard)[[0, -1]] for shard in set(shards.tolist())]
        for place in range(len(shards)):
            assert sum(first <= place <= last for first, last in spans) <= open_shards
        firsts = [shard for shard in sampler.shards().tolist() if lengths[shard]]
        for start in range(
            0, len(shards), 7
        ):  # what is fetched ahead is fetched in the right order
            seen = set(shards[: start + 1].tolist())
            assert seen <= set(firsts[: len(seen) + open_shards - 1])


@given(
    lengths=sizes_of_shards,
    num_nodes=st.integers(1, 4),
    ranks_per_node=st.integers(1, 4),
    epoch=st.integers(0, 3),
    pad=st.sampled_from(["repeat", "drop", "none"]),
    assignment=st.sampled_from(["fixed", "epoch"]),
)
def test_the_order_of_all_is_the_same_for_any_number_of_ranks_on_a_node(
    lengths, num_nodes, ranks_per_node, epoch, pad, assignment
):
    def run(ranks, **options):
        samplers = all_ranks(lengths, num_nodes, ranks, epoch, assignment=assignment, **options)
        return merged(samplers, num_nodes, ranks)

    whole = run(1, pad="none")
    if pad == "none":
        assert run(ranks_per_node, pad="none") == whole
        return
    loads = [sum(lengths[k] for k in own) for own in assign_shards(lengths, num_nodes)]
    if min(loads) == 0:
        with pytest.raises(ConfigError, match="would have no sample"):
            run(ranks_per_node, pad=pad)
        return
    order = run(ranks_per_node, pad=pad)
    even = min(loads) * num_nodes // (num_nodes * ranks_per_node) * num_nodes * ranks_per_node
    assert order[:even] == whole[:even]


@pytest.mark.parametrize("assignment", ["fixed", "epoch"])
@pytest.mark.parametrize("pad", ["repeat", "drop"])
def test_all_ranks_give_as_many_in_every_epoch(pad, assignment):
    counts, missed = set(), []
    for epoch in range(6):
        samplers = all_ranks(MANY, 3, 2, epoch, pad=pad, assignment=assignment)
        counts |= {len(list(sampler)) for sampler in samplers} | {len(s) for s in samplers}
        seen = set(itertools.chain(*samplers))
        missed.append(set(range(sum(MANY))) - seen)
        repeated = sum(map(len, samplers)) - len(seen)
        if pad == "repeat":
            assert not missed[-1]
            assert repeated <= 3 * (max(MANY) + 2)
        else:
            assert not repeated
            assert len(missed[-1]) <= 3 * (max(MANY) + 2)
    assert len(counts) == 1
    if pad == "drop":
        assert not set.intersection(*missed)


def test_orders_depend_on_seed_and_epoch_alone():
    def order(seed, epoch, **options):
        return tuple(all_ranks(MANY, 3, 2, epoch, seed=seed, **options)[3])

    assert len({order(seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)}) == 6
    sampler = all_ranks(MANY, 3, 2)[3]
    for epoch in (5, 0, 2, 5):
        np.random.seed(epoch)
        sampler.set_epoch(epoch)
        assert tuple(sampler) == order(0, epoch)
        assert tuple(pickle.loads(pickle.dumps(sampler))) == order(0, epoch)


def test_shards_stay_where_they_are_or_move_each_epoch():
    def homes(assignment, epoch):
        samplers = all_ranks([10] * 24, 4, 1, epoch, assignment=assignment)
        return [frozenset(sampler.shards().tolist()) for sampler in samplers]

    assert len({tuple(homes("fixed", epoch)) for epoch in range(5)}) == 1
    moving = [homes("epoch", epoch) for epoch in range(5)]
    assert len({tuple(home) for home in moving}) == 5
    assert len({frozenset(home) for home in moving}) == 5  # the sets themselves are others, too
    own = [[0, 1], [5, 2, 3], [4]]
    given_by_hand = all_ranks([9] * 6, 3, assignment=own, pad="none")
    assert [sorted(s.shards().tolist()) for s in given_by_hand] == [sorted(o) for o in own]
    assert sorted(given_by_hand[0].shards(node=2)) == [4]


def test_each_group_of_shards_is_mixed_by_a_draw_of_its_own():
    # 6,000 is more than a permutation stores, 600 is less.
    for length in (600, 6_000):
        drawn = {
            tuple(np.array(list(sampler)).reshape(2, length)[group] % length)
            for epoch in (0, 1)
            for sampler in all_ranks([length] * 4, 2, epoch=epoch, open_shards=1)
            for group in (0, 1)
        }
        assert len(drawn) == 8


def test_samples_of_open_shards_are_mixed_well():
    # 4 shards together: of 40 in a row some 10 are of each; by far not in their order.
    (sampler,) = all_ranks([500] * 8, 1, open_shards=4)
    shards = shard_of(list(sampler), [500] * 8)
    counts = np.bincount(shards[:400], minlength=8)
    assert sorted(counts.tolist())[:4] == [0] * 4
    assert sorted(counts.tolist())[4] > 60
    order = np.array(list(sampler))
    assert abs(np.corrcoef(order[:2000] % 500, np.arange(2000))[0, 1]) < 0.1


def test_an_order_of_ten_billion_samples_takes_memory_for_its_shards_alone():
    lengths = np.full(100_000, 100_000)
    tracemalloc.start()
    try:
        sampler = ShardSampler(
            lengths, num_nodes=125, node=7, ranks_per_node=8, local_rank=3, seed=7
        )
        order = sampler.indices()
        block = order[5_000_000 : 5_000_000 + 1024]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(order) == 10_000_000
    assert len(np.unique(block)) == 1024
    assert set(shard_of(block, lengths).tolist()) <= set(sampler.shards().tolist())
    assert peak < 200 * len(lengths)
    middle = slice(5_000_000 + 100, 5_000_000 + 164)
    assert order[middle].tolist() == block[100:164].tolist()
    assert order[np.array([5_000_163])].tolist() == [block[163]]


# In a loader.


class Drawing(Dataset):
    """Sample and random number of each."""

    def __init__(self, length):
        self._length = length

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        return index, float(sample_rng().random())


def test_random_numbers_of_a_sample_do_not_depend_on_the_ranks_of_a_node():
    def drawn(ranks, batch_size):
        found = {}
        for sampler in all_ranks(MANY, 2, ranks, 3, seed=5, pad="drop"):
            loader = Loader(Drawing(sum(MANY)), batch_size, sampler=sampler, seed=5)
            loader.set_epoch(3)
            for step, (indices, numbers) in enumerate(loader):
                for index, number in zip(indices.tolist(), numbers.tolist(), strict=True):
                    found[index] = (step, number)
        return found

    one, four = drawn(1, 16), drawn(4, 4)
    shared = one.keys() & four.keys()
    assert len(shared) > 0.9 * sum(MANY)
    assert {index: one[index] for index in shared} == {index: four[index] for index in shared}
    assert len({number for _, number in one.values()}) == len(one)


@pytest.mark.parametrize("make", [Loader, DataLoader], ids=["numpy", "torch"])
@pytest.mark.parametrize("pad", ["repeat", "drop", "none"])
@pytest.mark.parametrize("assignment", ["fixed", "epoch"])
def test_a_run_resumes_at_any_step_also_with_other_ranks_per_node(make, pad, assignment):
    data = ArrayDataset(np.arange(sum(MANY)))

    def loader(rank, ranks_per_node=2, batch_size=8):
        samplers = all_ranks(MANY, 2, ranks_per_node, pad=pad, assignment=assignment, seed=3)
        return make(data, batch_size=batch_size, sampler=samplers[rank], seed=5)

    running = loader(1)
    for epoch in range(2):
        running.set_epoch(epoch)
        given, states = [], [running.state_dict()]
        for batch in running:
            given.append(batch[0].tolist())
            states.append(running.state_dict())
        assert len(given) == len(running)
        for step in range(0, len(given), 5):
            resumed = loader(1)
            resumed.load_state_dict(json.loads(json.dumps(states[step])))
            assert [batch[0].tolist() for batch in resumed] == given[step:]
        # Any rank's state is good for any other, and for another number of ranks on each node.
        for rank, ranks, size in ((0, 2, 8), (2, 2, 8), (1, 1, 16), (5, 4, 4)):
            whole, resumed = loader(rank, ranks, size), loader(rank, ranks, size)
            whole.set_epoch(epoch)
            resumed.load_state_dict(states[3])
            expected = [batch[0].tolist() for batch in whole][3:]
            assert [batch[0].tolist() for batch in resumed] == expected


def test_a_sampler_by_itself_resumes():
    for pad in ("repeat", "none"):
        sampler = all_ranks(MANY, 3, 2, 4, pad=pad)[2]
        whole, indices = list(sampler), iter(sampler)
        begun = list(itertools.islice(indices, 20))
        again = all_ranks(MANY, 3, 2, pad=pad)[2]
        again.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
        assert begun + list(again) == whole
        batches = BatchSampler(all_ranks(MANY, 3, 2, 4, pad=pad)[2], 8, drop_last=False)
        assert list(itertools.chain(*batches)) == whole


def test_a_state_is_small_the_same_on_all_ranks_and_refused_by_another_layout():
    lengths = np.full(10_000, 1_000)
    data = range(int(lengths.sum()))

    def loader(rank=0, num_nodes=4, **options):
        sampler = all_ranks(lengths, num_nodes, 2, **options)[rank]
        return Loader(data, batch_size=64, sampler=sampler)

    states = []
    for rank in range(3):
        running = loader(rank)
        next(iter(running))
        states.append(running.state_dict())
    assert states[0] == states[1] == states[2]
    assert len(json.dumps(states[0])) < 1000
    others = [{"num_nodes": 5}, {"open_shards": 9}, {"assignment": "epoch"}]
    for options in (*others, {"pad": "drop"}, {"seed": 1}):
        with pytest.raises(StateError, match=r"sampler\."):
            loader(**options).load_state_dict(states[0])
    lengths[:2] = 999, 1001
    with pytest.raises(StateError, match=r"sampler\.lengths"):
        loader().load_state_dict(states[0])


# Stores that are in shards themselves.


def tar_files(folder, lengths):
    first = 0
    for shard, length in enumerate(lengths):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(first, first + length):
                member = tarfile.TarInfo(f"{number:03}.cls")
                data = str(number).encode()
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        first += length
    return f"tar:{folder}"


def tables(folder, lengths):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    first = 0
    for shard, length in enumerate(lengths):  # two of a file
        schema = pa.schema([("cls", pa.int64())])
        if shard % 2 == 0:
            writer = pq.ParquetWriter(folder / f"{shard}.parquet", schema)
        writer.write_table(pa.table({"cls": range(first, first + length)}))
        if shard % 2 == 1:
            writer.close()
        first += length
    return f"arrow:{folder}"


def batches(folder, lengths):
    pa = pytest.importorskip("pyarrow")
    first = 0
    schema = pa.schema([("cls", pa.int64())])
    with (
        pa.OSFile(str(folder / "0.arrow"), "wb") as file,
        pa.ipc.new_file(file, schema) as writer,
    ):
        for length in lengths:
            writer.write_batch(pa.record_batch({"cls": range(first, first + length)}))
            first += length
    return f"arrow:{folder}"


def objects(folder, lengths):
    address = f"shards:{folder}/store"
    first = 0
    for length in lengths:  # each a shard, as it is appended by itself
        samples = [({"cls": number}, number) for number in range(first, first + length)]
        pack(samples, address, append=first > 0)
        first += length
    return address


@pytest.fixture(params=[tar_files, tables, batches, objects])
def in_shards(request, tmp_path):
    """A dataset of a store in shards of 20 to 30 samples; sample n has the class n."""
    lengths = [20, 30, 25, 20, 30, 25]
    dataset = StoreDataset(request.param(tmp_path, lengths), decode=None)
    assert dataset.labels.tolist() == list(range(sum(lengths)))
    yield lengths, dataset
    dataset.close()


HERE = {"num_nodes": 1, "node": 0, "ranks_per_node": 1, "local_rank": 0, "open_shards": 2}


def test_a_store_in_shards_is_ordered_as_its_lengths_are(in_shards):
    lengths, dataset = in_shards
    expected = ShardSampler(lengths, seed=3, **HERE)
    for source in (dataset, dataset.store, pickle.loads(pickle.dumps(dataset))):
        sampler = ShardSampler(source, seed=3, **HERE)
        assert sampler.lengths.tolist() == lengths
        assert sampler.lengths.dtype == np.int64
        # So all that holds for lengths does: ranks, resuming, states.
        assert sampler.settings() == expected.settings()
        assert list(sampler) == list(expected)


def test_batches_of_a_store_in_shards_do_not_depend_on_workers_and_resume(in_shards):
    lengths, dataset = in_shards
    given = []
    for num_workers in (0, 1, 3):
        options = {"num_workers": num_workers, "seed": 5, "collate_fn": list}
        running = Loader(dataset, 8, sampler=ShardSampler(dataset, **HERE), **options)
        running.set_epoch(2)
        numbers, state = [], None
        for step, batch in enumerate(running):
            numbers.append([classes_in(sample) for sample in batch])
            state = running.state_dict() if step == 7 else state
        given.append(numbers)
        resumed = Loader(dataset, 8, sampler=ShardSampler(dataset, **HERE), **options)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert [[classes_in(sample) for sample in batch] for batch in resumed] == numbers[8:]
    assert given[0] == given[1] == given[2]
    order = list(itertools.chain(*given[0]))
    assert sorted(order) == list(range(sum(lengths)))
    shards = shard_of(order, lengths)
    spans = [np.ptp(np.flatnonzero(shards == shard)) for shard in range(len(lengths))]
    assert max(spans) < 2 * max(lengths)  # each is read within the window of two


def classes_in(sample):
    return (sample[0] if isinstance(sample, tuple) else sample)["cls"]


def test_a_store_that_is_in_no_shards_is_an_error_that_says_so(tmp_path):
    pack([("a", 0), ("b", 1)], f"lmdb:{tmp_path}/a.lmdb")
    dataset = LMDBDataset(tmp_path / "a.lmdb")
    for source in (dataset, dataset.store):
        with pytest.raises(ConfigError, match=r"<LMDBStore lmdb:.*> is in no shards: .*shuffle"):
            ShardSampler(source, **HERE)
    assert ShardSampler([dataset, dataset], **HERE).lengths.tolist() == [2, 2]


@pytest.fixture
def files(tmp_path):
    """Six LMDB files of 20 to 30 samples, and their lengths."""
    lengths, paths = [20, 30, 25, 20, 30, 25], []
    first = 0
    for shard, length in enumerate(lengths):
        path = tmp_path / f"{shard}.lmdb"
        pack([(np.array([n, shard]), n % 3) for n in range(first, first + length)], f"lmdb:{path}")
        paths.append(path)
        first += length
    return lengths, paths


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("pad", ["repeat", "none"])
def test_a_node_trains_without_the_files_of_the_others(files, num_workers, pad):
    lengths, paths = files
    seen, steps = [], set()
    for sampler in all_ranks(lengths, 2, 2, 1, seed=7, open_shards=2, pad=pad):
        mine = set(sampler.shards().tolist())
        hidden = [path for shard, path in enumerate(paths) if shard not in mine]
        for path in hidden:
            path.rename(path.with_suffix(".elsewhere"))
        shards = [
            LMDBDataset(path) if path.exists() else AbsentShard(length)
            for path, length in zip(paths, lengths, strict=True)
        ]
        data = ConcatDataset(shards)
        loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=num_workers, seed=7)
        loader.set_epoch(1)
        count = 0
        for numbers, labels in loader:
            assert isinstance(numbers, torch.Tensor)
            assert set(numbers[:, 1].tolist()) <= mine
            assert labels.tolist() == (numbers[:, 0] % 3).tolist()
            seen += numbers[:, 0].tolist()
            count += 1
        steps.add(count)
        with pytest.raises(LookupError, match="a shard that this node does not have"):
            data[next(sum(lengths[:k]) for k in range(6) if k not in mine)]
        for shard in shards:
            if isinstance(shard, LMDBDataset):
                shard.close()
        for path in hidden:
            path.with_suffix(".elsewhere").rename(path)
    assert set(seen) == set(range(sum(lengths)))
    if pad == "none":
        assert len(seen) == sum(lengths)
    else:
        assert len(steps) == 1


def test_a_sampler_of_another_node_is_told_what_is_wrong(files):
    lengths, paths = files
    one, other = all_ranks(lengths, 2)
    data = ConcatDataset(
        [
            LMDBDataset(path) if shard in one.shards() else AbsentShard(lengths[shard])
            for shard, path in enumerate(paths)
        ]
    )
    assert len(data) == 150
    with pytest.raises(LookupError, match=r"this node's number.*sampler\.shards\(\)"):
        list(DataLoader(data, batch_size=8, sampler=other, seed=0))
    for shard in one.shards().tolist():
        data.datasets[shard].close()


# What it is made from.


def test_lengths_are_those_of_shards_or_given():
    shards = [ArrayDataset(np.arange(n)) for n in (3, 0, 5)]
    place = {"num_nodes": 1, "node": 0}
    for source in (shards, ConcatDataset(shards), [3, 0, 5], np.array([3, 0, 5])):
        assert ShardSampler(source, **place).lengths.tolist() == [3, 0, 5]
        assert sorted(ShardSampler(source, **place)) == list(range(8))
    stock = torch.utils.data.ConcatDataset([range(3), range(5)])
    assert ShardSampler(stock, **place).lengths.tolist() == [3, 5]


def test_torchrun_s_variables_say_which_rank_this_is(monkeypatch):
    assert ShardSampler([4, 4]).num_nodes == 1
    for name, value in (("RANK", 5), ("WORLD_SIZE", 6), ("LOCAL_RANK", 1), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    sampler = ShardSampler(MANY)
    place = (sampler.num_nodes, sampler.node, sampler.ranks_per_node, sampler.local_rank)
    assert place == (3, 2, 2, 1)
    assert sampler.world_size == 6
    Loader(range(sum(MANY)), sampler=sampler)  # says nothing of ranks that get the same
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="6 ranks are no whole number of nodes with 4 each"):
        ShardSampler(MANY)
    monkeypatch.setenv("LOCAL_RANK", "one")
    with pytest.raises(ConfigError, match="LOCAL_RANK='one' and LOCAL_WORLD_SIZE='4'"):
        ShardSampler(MANY)
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ConfigError, match="one of 6 ranks, but which of them share a node"):
        ShardSampler(MANY)
    monkeypatch.setenv("RANK", "first")  # of another launcher: not read where all four are given
    assert ShardSampler([4], num_nodes=1, node=0, ranks_per_node=1, local_rank=0).world_size == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_nodes": 2}, "give both num_nodes and node"),
        ({"num_nodes": 2, "node": 2}, "node should be 0 to 1 and .* got node=2"),
        ({"num_nodes": 0, "node": 0}, "num_nodes should be a positive integer"),
        ({"ranks_per_node": 2}, "and so ranks_per_node and local_rank"),
        ({"num_nodes": 1, "node": 0, "ranks_per_node": 2, "local_rank": -1}, "got .*rank=-1"),
        ({"open_shards": 0}, "open_shards should be a positive integer"),
        ({"pad": "some"}, "pad should be 'repeat', 'drop' or 'none'"),
        ({"assignment": "mine"}, "assignment should be 'fixed', 'epoch' or a list"),
        ({"assignment": [[0.5]]}, "assignment should be 'fixed', 'epoch' or a list"),
        ({"assignment": [[0], [1, 2]]}, "of the shards of each of 1 nodes"),
        ({"assignment": [[0, 1]]}, "with each of the shards 0 to 2 once, but got"),
        ({"assignment": [[0, 1, 2, 2]]}, "with each of the shards 0 to 2 once"),
        ({"num_nodes": 5, "node": 0}, "nodes would have no sample"),
        ({"seed": -1}, "seed should be 0 or more"),
    ],
)
def test_what_cannot_be_is_said(options, message):
    with pytest.raises(ConfigError, match=message):
        ShardSampler([5, 5, 5], **options)


@pytest.mark.parametrize("source", [[], [0, 0], [3, -1], [1.5], np.ones((2, 2), int), 7, "abc"])
def test_what_is_no_list_of_shards_is_said(source):
    with pytest.raises(ConfigError, match="shard"):
        ShardSampler(source)


def test_a_loader_knows_the_dataset_and_the_ranks_it_was_made_for():
    sampler = ShardSampler(MANY, num_nodes=2, node=1)
    with pytest.raises(ConfigError, match="made for a dataset of 570 samples"):
        Loader(range(100), sampler=sampler)
    assert len(repr(sampler)) < 200
    assert "num_nodes=2, node=1" in repr(sampler)


def test_the_balance_of_classes_is_counted_over_all_nodes():
    labels = np.arange(sum(MANY)) % 3
    report = balance_report(ShardSampler(MANY, num_nodes=2, node=1, pad="none"), labels)
    assert report.num_shown == sum(MANY)
    assert report.sampler == "ShardSampler, all 2 ranks"
