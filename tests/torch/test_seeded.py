# SPDX-License-Identifier: Apache-2.0
"""With `seed=`, a batch depends on (dataset, sampler, seed, epoch, step) and nothing else."""

from __future__ import annotations

import gc
import os
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.utils.data as stock
from tests.process.seeded_datasets import BatchNoise, Noise, NumpyNoise, SortedBatchNoise

import penstock.torch as ours
from penstock import Loader, get_worker_info, sample_rng
from penstock.data import ArrayDataset, ConcatDataset, StackDataset, Subset
from penstock.errors import ConfigError
from penstock.sampling import (
    RandomSampler,
    WeightedRandomSampler,
)

WORKERS = [
    {"num_workers": 1, "prefetch_factor": 1},
    {"num_workers": 2, "multiprocessing_context": "fork"},
    {"num_workers": 2, "multiprocessing_context": "spawn"},
    {"num_workers": 2, "multiprocessing_context": "forkserver", "prefetch_factor": 4},
    {"num_workers": 5, "multiprocessing_context": "fork", "prefetch_factor": 3},
    {"num_workers": 3, "multiprocessing_context": "fork", "persistent_workers": True},
]
named = pytest.mark.parametrize("workers", WORKERS, ids=lambda w: "-".join(map(str, w.values())))


def content(batch):
    """A batch as bytes, whatever it is made of."""
    if isinstance(batch, (list, tuple)):
        return tuple(map(content, batch))
    array = np.asarray(batch)
    return array.dtype.str, array.shape, array.tobytes()


def epochs(loader, count=2):
    return [[content(batch) for batch in loader] for _ in range(count)]


@named
@pytest.mark.parametrize("loader_of", [ours.DataLoader, Loader])
def test_workers_start_methods_and_prefetching_do_not_show(workers, loader_of):
    dataset = Noise() if loader_of is ours.DataLoader else NumpyNoise()
    options = {"batch_size": 4, "shuffle": True, "seed": 7}
    expected = epochs(loader_of(dataset, **options))
    assert expected[0] != expected[1]
    assert epochs(loader_of(dataset, **options, **workers)) == expected


class NamesItsWorker(Noise):
    """Does all that a dataset should not do with what it knows of its worker."""

    def __getitem__(self, index):
        info = get_worker_info()
        random.seed(info.seed if info else os.getpid())  # disturbs, but only its own sample
        np.random.random(17 if info is None else info.id)
        torch.rand(os.getpid() % 13)
        return index, sample_rng().random()


@pytest.mark.parametrize("num_workers", [0, 1, 2, 5])
def test_nothing_of_the_worker_is_left_for_the_next_sample(num_workers):
    """The generators are disturbed by each sample in a way that depends on the worker."""

    class Both(NamesItsWorker):
        def __getitem__(self, index):
            noise = Noise.__getitem__(self, index)
            return noise, super().__getitem__(index)

    options = {"batch_size": 3, "shuffle": True, "seed": 3}
    expected = [content(batch) for batch in ours.DataLoader(Noise(), **options)]
    loader = ours.DataLoader(
        Both(), num_workers=num_workers, multiprocessing_context="fork" if num_workers else None,
        **options,
    )  # fmt: skip
    assert [content(batch[0]) for batch in loader] == expected


def states():
    return random.getstate(), np.random.get_state()[1:], torch.get_rng_state().tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("loader_of", [ours.DataLoader, Loader])
def test_iterating_leaves_the_users_generators_alone(num_workers, loader_of):
    random.gauss(0, 1), np.random.randn(), torch.randn(1)  # with numbers in their caches
    loader = loader_of(Noise(), batch_size=5, shuffle=True, seed=7, num_workers=num_workers)
    before = states()
    for _ in loader:
        np.testing.assert_equal(states(), before)
    np.testing.assert_equal(states(), before)


def test_the_users_generators_do_not_show_in_the_data():
    options = {"batch_size": 5, "shuffle": True, "seed": 7}
    expected = epochs(ours.DataLoader(Noise(), **options), 1)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    assert epochs(ours.DataLoader(Noise(), **options), 1) == expected


def test_a_sample_draws_the_same_however_large_its_batch_is():
    noise = [
        np.concatenate([batch[1] for batch in Loader(NumpyNoise(), batch_size=size, seed=5)])
        for size in (1, 7, 53)
    ]
    assert np.array_equal(noise[0], noise[1])
    assert np.array_equal(noise[0], noise[2])
    unbatched = Loader(NumpyNoise(), batch_size=None, seed=5)
    assert np.array_equal(noise[0], np.stack([sample[1] for sample in unbatched]))


def test_seeds_and_epochs_give_other_numbers():
    def numbers(seed, epoch):
        loader = Loader(NumpyNoise(8), batch_size=8, seed=seed)
        loader.set_epoch(epoch)
        (batch,) = loader
        return batch[1]

    found = np.concatenate([numbers(seed, epoch) for seed in range(3) for epoch in range(3)])
    for column in found.T:
        assert len(np.unique(column)) == len(column) == 72


@pytest.mark.parametrize("loader_of", [ours.DataLoader, Loader])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda kind: kind(),
        lambda kind: Subset(kind(), list(range(50, 3, -1))),
        lambda kind: ConcatDataset([kind(20), kind(33)]),
        lambda kind: StackDataset(kind(), kind()),
        lambda kind: stock.Subset(kind(), list(range(50, 3, -1))),
        lambda kind: stock.ConcatDataset([kind(20), kind(33)]),
        lambda kind: stock.StackDataset(kind(), kind()),
        lambda kind: Subset(
            stock.ConcatDataset([kind(20), Subset(kind(33), range(30))]), range(40)
        ),
    ],
    ids=[
        "plain",
        "subset",
        "concat",
        "stack",
        "torch subset",
        "torch concat",
        "torch stack",
        "deep",
    ],
)
@pytest.mark.parametrize("kind", [BatchNoise, SortedBatchNoise])
def test_by_the_batch_samples_draw_what_they_draw_one_by_one(kind, wrapped, num_workers, loader_of):
    class OneByOne(BatchNoise):
        get_batch = None

    options = {"batch_size": 6, "shuffle": True, "seed": 9, "num_workers": num_workers}
    if num_workers:
        options["multiprocessing_context"] = "fork"
    expected = epochs(loader_of(wrapped(OneByOne), **options), 1)
    assert epochs(loader_of(wrapped(kind), **options), 1) == expected


class Together(NumpyNoise):
    """Reads a list of samples at once, and needs to."""

    def __getitem__(self, index):
        raise AssertionError("to be read together")

    def __getitems__(self, indices):
        return [(index, sample_rng(k).random(3)) for k, index in enumerate(indices)]


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda kind: kind(),
        lambda kind: Subset(kind(), list(range(50, 3, -1))),
        lambda kind: ConcatDataset([kind(20), kind(33)]),
        lambda kind: stock.Subset(kind(), list(range(50, 3, -1))),
    ],
    ids=["plain", "subset", "concat", "torch subset"],
)
def test_samples_read_as_a_list_draw_what_they_draw_one_by_one(wrapped):
    class OneByOne(NumpyNoise):
        def __getitem__(self, index):
            return index, sample_rng().random(3)

    options = {"batch_size": 6, "shuffle": True, "seed": 9}
    expected = epochs(Loader(wrapped(OneByOne), **options), 1)
    assert epochs(Loader(wrapped(Together), **options), 1) == expected


def test_in_a_batch_one_has_to_say_which_sample_is_meant():
    class Vague(Together):
        def __getitems__(self, indices):
            return [sample_rng().random() for _ in indices]

    with pytest.raises(RuntimeError, match=r"5 samples .* sample_rng\(k\)"):
        next(iter(Loader(Vague(), batch_size=5)))

    class Beyond(Together):
        def __getitems__(self, indices):
            return [sample_rng(len(indices)).random() for _ in indices]

    with pytest.raises(IndexError, match=r"sample_rng\(5\).*from 0 to 4"):
        next(iter(Loader(Beyond(), batch_size=5)))


class WithNoise:
    """A collate function that draws."""

    def __call__(self, samples):
        return [sample[0] for sample in samples], random.random(), sample_rng().random()


def test_collate_draws_from_a_key_of_its_own():
    options = {"batch_size": 6, "shuffle": True, "seed": 9, "collate_fn": WithNoise()}
    expected = list(Loader(NumpyNoise(), **options))
    assert list(Loader(NumpyNoise(), num_workers=2, **options)) == expected
    draws = [number for batch in expected for number in batch[1:]]
    assert len(set(draws)) == len(draws)
    samples = {
        number
        for _, noise in Loader(NumpyNoise(), batch_size=None, shuffle=True, seed=9)
        for number in noise.tolist()
    }
    assert samples.isdisjoint(draws)


class Shuffles:
    """A sampler of the user's, which draws from a global generator in its own way."""

    def __init__(self, length, draw):
        self.length = length
        self.draw = draw

    def __len__(self):
        return self.length

    def __iter__(self):
        for _ in range(self.length):
            yield self.draw(self.length)


@pytest.mark.parametrize(
    "draw",
    [
        random.randrange,
        np.random.randint,
        lambda n: int(torch.randint(n, ())),
    ],
    ids=["random", "numpy", "torch"],
)
def test_a_sampler_that_draws_from_global_generators_is_decided_by_the_seed(draw):
    def orders(**options):
        loader = ours.DataLoader(
            ArrayDataset(np.arange(30)), batch_size=4, sampler=Shuffles(30, draw), seed=7, **options
        )
        found = []
        for _ in range(2):
            epoch = []
            for (batch,) in loader:
                epoch += batch.tolist()
                random.random(), np.random.random(), torch.rand(1)  # a training loop draws, too
            found.append(epoch)
        return found

    before = states()
    first = orders()
    np.random.seed(4), random.seed(4), torch.manual_seed(4)
    assert orders(num_workers=2) == first
    assert first[0] != first[1]
    assert before is not None


@pytest.mark.parametrize(
    ("theirs", "core"),
    [
        (lambda n: stock.RandomSampler(range(n)), lambda n: RandomSampler(range(n), seed=7)),
        (
            lambda n: stock.RandomSampler(range(n), replacement=True, num_samples=11),
            lambda n: RandomSampler(range(n), replacement=True, num_samples=11, seed=7),
        ),
        (
            lambda n: stock.WeightedRandomSampler(
                [float(i % 3) for i in range(n)], 20, generator=torch.Generator().manual_seed(5)
            ),
            lambda n: WeightedRandomSampler([float(i % 3) for i in range(n)], 20, seed=7),
        ),
    ],
    ids=["random", "with replacement", "weighted"],
)
def test_torchs_samplers_give_the_cores_orders(theirs, core):
    data = ArrayDataset(np.arange(30))
    loader = ours.DataLoader(data, sampler=theirs(30), batch_size=4, seed=7)
    sampler = core(30)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert [i for (batch,) in loader for i in batch.tolist()] == list(sampler)


def test_torchs_distributed_sampler_keeps_its_order_and_follows_the_epoch():
    data = ArrayDataset(np.arange(30))
    sampler = stock.DistributedSampler(range(30), 3, 1, seed=5)
    loader = ours.DataLoader(data, sampler=sampler, batch_size=4, seed=7)
    theirs = stock.DistributedSampler(range(30), 3, 1, seed=5)
    for epoch in (0, 1, 2):
        theirs.set_epoch(epoch)
        assert [i for (batch,) in loader for i in batch.tolist()] == list(theirs)


class CountsEpochs(NumpyNoise):
    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return self.epoch, sample_rng().random()


@pytest.mark.parametrize("loader_of", [ours.DataLoader, Loader])
@pytest.mark.parametrize("persistent", [False, True])
def test_set_epoch_reaches_persistent_workers_the_sampler_and_the_dataset(loader_of, persistent):
    loader = loader_of(
        CountsEpochs(8), batch_size=8, shuffle=True, num_workers=2, persistent_workers=persistent,
        seed=0,
    )  # fmt: skip
    noise = {}
    for epoch in (0, 5, 6, 5):
        if epoch == 5:
            loader.set_epoch(5)
        assert loader.epoch == epoch
        ((number, draws),) = loader
        assert set(number.tolist()) == {epoch}
        noise.setdefault(epoch, []).append(draws.tolist())
    assert noise[5][0] == noise[5][1]
    assert noise[5][0] != noise[6][0]


def test_without_a_seed_set_epoch_reaches_sampler_and_workers_and_is_never_called_unasked():
    sampler = stock.DistributedSampler(range(8), 2, 0)
    loader = ours.DataLoader(
        CountsEpochs(8), batch_size=4, sampler=sampler, num_workers=1, persistent_workers=True
    )
    ((number, _),) = loader
    assert (set(number.tolist()), sampler.epoch) == ({-1}, 0)
    loader.set_epoch(3)
    ((number, _),) = loader
    assert (set(number.tolist()), sampler.epoch) == ({3}, 3)


@pytest.mark.parametrize("epoch", [-1, 1.5, None])
def test_an_epoch_that_is_none_is_refused(epoch):
    for loader in (Loader([1]), ours.DataLoader([1]), ours.DataLoader([1], seed=1)):
        with pytest.raises((ConfigError, TypeError), match="epoch"):
            loader.set_epoch(epoch)


@pytest.mark.parametrize("seed", [-1, 1.5, "7", True])
def test_a_seed_that_is_none_is_refused(seed):
    for loader_of in (Loader, ours.DataLoader):
        with pytest.raises((ConfigError, TypeError), match="seed"):
            loader_of([1], seed=seed)


def test_a_seed_and_a_generator_contradict_each_other():
    with pytest.raises(ConfigError, match="seed=7"):
        ours.DataLoader([1, 2], seed=7, generator=torch.Generator())


def test_outside_of_seeded_loading_there_is_a_generator_too():
    values = {sample_rng().random(), sample_rng().random(), sample_rng(3).random()}
    assert len(values) == 3
    torch.manual_seed(0)
    first = [batch for _, noise in ours.DataLoader(BatchNoise(8), num_workers=2) for batch in noise]
    torch.manual_seed(0)
    again = [batch for _, noise in ours.DataLoader(BatchNoise(8), num_workers=2) for batch in noise]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({tuple(noise.tolist()) for noise in first}) == 8


class DrawsInSetEpoch(NumpyNoise):
    """Chooses its samples anew for every epoch, with a global generator."""

    order = None

    def set_epoch(self, epoch):
        self.order = np.random.permutation(len(self))

    def __getitem__(self, index):
        return super().__getitem__(int(self.order[index]))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_what_set_epoch_draws_is_the_same_in_all_workers(num_workers):
    np.random.seed(num_workers)
    before = states()
    loader = Loader(DrawsInSetEpoch(12), batch_size=3, num_workers=num_workers, seed=7)
    found = epochs(loader)
    np.testing.assert_equal(states(), before)
    assert found == epochs(Loader(DrawsInSetEpoch(12), batch_size=3, seed=7))
    numbers = [np.frombuffer(batch[0][2], np.int64) for batch in found[0]]
    assert sorted(np.concatenate(numbers).tolist()) == list(range(12))


class OwnShare(stock.DistributedSampler):
    """A subclass: we cannot know what it changed."""

    def __init__(self, rank):
        super().__init__(range(40), 2, rank)

    def __iter__(self):
        return iter(list(super().__iter__()))


class OfMmengine(torch.utils.data.Sampler):
    """A share of a user's own, which calls the number of ranks `world_size`."""

    def __init__(self, rank):
        self.rank, self.world_size = rank, 2

    def __iter__(self):
        return iter(range(self.rank, 40, 2))

    def __len__(self):
        return 20


@pytest.mark.parametrize("share", [OwnShare, OfMmengine])
def test_ranks_of_a_sampler_of_the_users_draw_apart(share, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    noise = []
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        loader = ours.DataLoader(NumpyNoise(40), batch_size=4, sampler=share(rank), seed=7)
        noise.append({number for _, draws in loader for number in draws.flatten().tolist()})
    assert noise[0].isdisjoint(noise[1])


def test_a_sampler_that_does_not_know_its_rank_is_named(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    sampler = Shuffles(30, random.randrange)
    loader = ours.DataLoader(NumpyNoise(30), batch_size=4, sampler=sampler, seed=7)
    with pytest.warns(UserWarning, match="does not say which rank's share"):
        list(loader)


def test_a_generator_of_the_samplers_own_is_the_epochs_and_put_back():
    class OwnGenerator(Shuffles):
        def __init__(self):
            self.generator = torch.Generator().manual_seed(3)
            super().__init__(20, lambda n: int(torch.randint(n, (), generator=self.generator)))

    sampler = OwnGenerator()
    loader = ours.DataLoader(ArrayDataset(np.arange(20)), batch_size=4, sampler=sampler, seed=7)
    before = sampler.generator.get_state()
    first = []
    for (batch,) in loader:
        first += batch.tolist()
        torch.rand(3, generator=sampler.generator)  # other code draws from it, too
        sampler.generator.set_state(before)
    assert torch.equal(sampler.generator.get_state(), before)
    again = ours.DataLoader(ArrayDataset(np.arange(20)), batch_size=4, sampler=sampler, seed=7)
    assert [i for (batch,) in again for i in batch.tolist()] == first


def test_in_a_thread_of_its_own_a_sample_is_not_known():
    class Threads(BatchNoise):
        def get_batch(self, indices, alloc):
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(lambda: sample_rng(0).random(len(indices))).result()

    with pytest.raises(RuntimeError, match="another thread"):
        next(iter(Loader(Threads(), batch_size=4)))

    class HandsOver(BatchNoise):
        def get_batch(self, indices, alloc):
            generators = [sample_rng(k) for k in range(len(indices))]
            with ThreadPoolExecutor(3) as pool:
                return np.array(list(pool.map(lambda rng: rng.random(), generators)))

    found = [epochs(Loader(HandsOver(), batch_size=4), 1) for _ in range(2)]
    assert found[0] == found[1]


def test_datapipes_know_no_seed():
    from torch.utils.data.datapipes.iter import IterableWrapper

    with pytest.raises(ConfigError, match="seed=7"):
        ours.DataLoader(IterableWrapper(range(4)), seed=7)
    with pytest.raises(ConfigError, match="no state"):
        ours.DataLoader(IterableWrapper(range(4))).state_dict()


def test_a_loader_with_persistent_workers_is_pickled_without_them():
    loader = Loader(NumpyNoise(8), batch_size=4, num_workers=1, persistent_workers=True)
    list(loader)
    copy = pickle.loads(pickle.dumps(loader))
    assert len(list(copy)) == 2
    assert copy.epoch == 2
    del loader, copy
    gc.collect()


class Restarts:
    """A sampler that is its own iterator, as Lightning's of predictions is: iter() begins again."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        self.left = iter(range(self.length))
        return self

    def __next__(self):
        return next(self.left)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_that_is_its_own_iterator_is_asked_for_it_once(seed, num_workers):
    options = {"num_workers": num_workers, "seed": seed}
    batches = stock.BatchSampler(range(6), 2, drop_last=False)
    alone = ours.DataLoader(range(6), batch_size=None, sampler=Restarts(6), **options)
    assert list(alone) == list(range(6))

    class RestartsBatches(Restarts):
        def __iter__(self):
            self.left = iter(batches)
            return self

    found = ours.DataLoader(range(6), batch_sampler=RestartsBatches(3), **options)
    assert [batch.tolist() for batch in found] == [[0, 1], [2, 3], [4, 5]]
