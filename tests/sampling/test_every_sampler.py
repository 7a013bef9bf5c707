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
from penstock.errors import ConfigError, StateError
from penstock.sampling import (
    BalancedBatchSampler,
    BatchSampler,
    BucketBatchSampler,
    ClassBalancedSampler,
    DistributedSampler,
    IndexSampler,
    LaneBatchSampler,
    MixtureSampler,
    PackingSampler,
    RandomSampler,
    RepeatFactorSampler,
    SequentialSampler,
    ShardSampler,
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
    "dynamic": lambda seed: ClassBalancedSampler(LABELS, (0, 1), num_epochs=3, seed=seed),
    "class-aware": lambda seed: ClassBalancedSampler(
        ROWS, num_samples=85, samples_per_class=2, seed=seed
    ),
    "repeat factor": lambda seed: RepeatFactorSampler(ROWS, 0.5, seed=seed),
    "repeat factor of a size": lambda seed: RepeatFactorSampler(
        ROWS, 0.5, seed=seed, root=False, num_samples=55
    ),
    "mixture": lambda seed: MixtureSampler([60, 25, 5], [1.0, 1.0, 2.0], seed=seed),
    "scheduled mixture": lambda seed: MixtureSampler(
        [60, 25, 5], [(0, [1, 1, 0]), (40, 130, [0, 1, 2])], seed=seed
    ),
    "mixture of mixtures": lambda seed: MixtureSampler(
        [MixtureSampler([60, 5], [1, 1]), 25], [1.0, 1.0], 90, seed=seed
    ),
    "mixture, once": lambda seed: MixtureSampler([60, 25, 5], [1, 1, 2], "once", seed=seed),
    "buckets": lambda seed: BucketBatchSampler(LABELS * 10.0, 8, window=32, seed=seed).sampler,
    "one of two ranks": lambda seed: DistributedSampler(
        ClassBalancedSampler(LABELS, seed=seed), 2, 1
    ),
}
BATCHES = {
    "classes": lambda seed: BalancedBatchSampler(LABELS, 2, 3, seed=seed),
    "buckets": lambda seed: BucketBatchSampler(LABELS, 8, boundaries=[1, 2], seed=seed),
    "windows": lambda seed: BucketBatchSampler(LABELS, 8, window=2, seed=seed),
    "windows of a rank": lambda seed: BucketBatchSampler(
        LABELS, 8, window=2, seed=seed, num_replicas=2, rank=1
    ),
    "classes of a rank": lambda seed: BalancedBatchSampler(
        LABELS, 2, 3, 12, seed=seed, num_replicas=3, rank=2
    ),
    "buckets of a rank": lambda seed: BucketBatchSampler(
        LABELS, 8, boundaries=[1, 2], seed=seed, num_replicas=2, rank=1
    ),
    "packed": lambda seed: PackingSampler(1 + LABELS, 6, 3, seed=seed),
    "packed for a rank": lambda seed: PackingSampler(
        1 + LABELS, 6, 3, seed=seed, cost=LABELS, window=2, num_replicas=2, rank=1
    ),
    "lanes": lambda seed: LaneBatchSampler([40, 3, 47], 8, window=9, seed=seed),
    "lanes of a rank": lambda seed: LaneBatchSampler(
        [40, 3, 47], 4, lanes=3, window=9, seed=seed, num_replicas=2, rank=1
    ),
    "of a sampler": lambda seed: BatchSampler(RandomSampler(range(90), seed=seed), 8, False),
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


LONG = (1 << 20) + 5


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomSampler(range(LONG), seed=3),
        lambda: RandomSampler(range(2 * LONG), num_samples=LONG, seed=3),
        lambda: SequentialSampler(range(LONG)),
        lambda: MixtureSampler([LONG, 7], [1, 1], num_samples=LONG, seed=3),
        lambda: DistributedSampler(RandomSampler(range(3 * LONG), seed=3), 2, 1),
    ],
    ids=["random", "part", "sequential", "mixture", "share"],
)
def test_an_order_that_is_not_stored_is_indexed_like_one_that_is(make):
    order = make().indices()
    assert not isinstance(order, np.ndarray)
    assert len(order) >= LONG
    whole = order[:]
    assert whole.dtype == np.int64
    assert len(whole) == len(order)
    for part in (slice(7, 31), slice(LONG - 3, None), slice(5, LONG, 100_003)):
        assert order[part].tolist() == whole[part].tolist()
    assert order[np.array([LONG - 1, 0, 17])].tolist() == whole[[LONG - 1, 0, 17]].tolist()


@every_sampler
def test_settings_are_json_and_tell_seeds_but_not_epochs_apart(kind):
    sampler = MAKERS[kind](3)
    settings = sampler.settings()
    assert json.loads(json.dumps(settings)) == settings
    sampler.set_epoch(2)
    assert sampler.settings() == settings
    if kind != "one of two ranks":  # its own seed is not what decides
        assert MAKERS[kind](4).settings() != settings


RAMP = {"alpha": (0, 1), "num_epochs": 3}
SETTINGS = {
    "alpha": (ClassBalancedSampler, {"alpha": 0.5}, {"alpha": 1.0}),
    "beta": (ClassBalancedSampler, {"beta": 0.9}, {"beta": 0.99}),
    "exact": (ClassBalancedSampler, {"exact": True}, {"exact": False}),
    "replacement": (ClassBalancedSampler, {"replacement": True}, {"replacement": "auto"}),
    "num_samples": (ClassBalancedSampler, {"num_samples": 50}, {"num_samples": 51}),
    "start": (ClassBalancedSampler, {**RAMP, "alpha": (0.1, 1)}, RAMP),
    "end": (ClassBalancedSampler, {**RAMP, "alpha": (0, 0.9)}, RAMP),
    "epochs": (ClassBalancedSampler, RAMP, {**RAMP, "num_epochs": 4}),
    "in a row": (ClassBalancedSampler, {"samples_per_class": 2}, {"samples_per_class": 3}),
    "threshold": (RepeatFactorSampler, {"threshold": 0.4}, {"threshold": 0.5}),
    "root": (RepeatFactorSampler, {"threshold": 0.4}, {"threshold": 0.4, "root": False}),
    "length": (RepeatFactorSampler, {"threshold": 0.4}, {"threshold": 0.4, "num_samples": 9}),
    "weighted": (
        WeightedRandomSampler,
        {"num_samples": 50, "replacement": True},
        {"num_samples": 50, "replacement": False},
    ),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_tell_everything_apart_that_decides_the_order(what):
    kind, one, other = SETTINGS[what]
    labels = LABELS + 1  # weights, too
    assert kind(labels, **one).settings() == kind(labels, **one).settings()
    assert kind(labels, **one).settings() != kind(labels, **other).settings()


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


@pytest.mark.parametrize("kind", [*MAKERS, *BATCHES])
@pytest.mark.parametrize("make", [Loader, DataLoader], ids=["numpy", "torch"])
def test_a_run_resumes_at_any_step(kind, make):
    def loader():
        if kind in BATCHES:
            return make(DATA, batch_sampler=BATCHES[kind](3), seed=5)
        return make(DATA, batch_size=8, sampler=MAKERS[kind](3), seed=5)

    running = loader()
    for epoch in range(2):
        running.set_epoch(epoch)
        given, states = [], [running.state_dict()]
        for batch in running:
            given.append(batch[0].tolist())
            states.append(running.state_dict())
        if ranks := {"classes of a rank": 3, "buckets of a rank": 2}.get(kind):
            num_given = np.cumsum([0, *map(len, given)]) * ranks
            assert [state["samples"] for state in states[:-1]] == num_given[:-1].tolist()
        for num_given, state in enumerate(states[:-1]):
            resumed = loader()
            resumed.load_state_dict(json.loads(json.dumps(state)))
            assert [batch[0].tolist() for batch in resumed] == given[num_given:]


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
    sampler, ours = loader()
    next(iter(ours))  # one rank has a look at a batch, the others have not
    for epoch in (0, 0, 1):
        sampler.set_epoch(epoch)
        assert epoch_of(ours) == order_of(kind, 3, epoch)


@pytest.mark.parametrize("seed", [None, 5])
def test_what_a_sampler_was_told_before_a_state_was_loaded_does_not_undo_it(seed):
    sampler = ClassBalancedSampler(LABELS, seed=3)
    loader = DataLoader(DATA, batch_size=8, sampler=sampler, seed=seed)
    loader.set_epoch(4)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = [batch[0].tolist() for batch in batches]
    sampler = ClassBalancedSampler(LABELS, seed=3)
    next(iter(DataLoader(DATA, batch_size=8, sampler=sampler, seed=seed)))  # a look at a batch
    again = DataLoader(DATA, batch_size=8, sampler=sampler, seed=seed)
    again.load_state_dict(state)
    assert [batch[0].tolist() for batch in again] == rest


def test_a_sampler_for_another_dataset_is_named():
    sampler = ClassBalancedSampler(LABELS)
    for make in (Loader, DataLoader):
        with pytest.raises(ConfigError, match=r"made for a dataset of 90 samples, .* has 89"):
            make(ArrayDataset(np.arange(89)), sampler=sampler)
        with pytest.raises(ConfigError, match="made for a dataset of 90"):
            make(
                ArrayDataset(np.arange(89)),
                batch_sampler=BatchSampler(DistributedSampler(sampler, 2, 0), 4, False),
            )
        with pytest.warns(UserWarning, match="this one has 91: the rest never comes") as caught:
            make(ArrayDataset(np.arange(91)), sampler=sampler)
        assert caught[0].filename == __file__


def test_batches_in_the_place_of_indices_are_named():
    batches = BatchSampler(RandomSampler(range(NUM_SAMPLES)), 4, drop_last=False)
    for make in (Loader, DataLoader):
        with pytest.raises(ConfigError, match="give it as batch_sampler=BatchSampler"):
            make(DATA, sampler=batches)
    with pytest.raises(TypeError, match="What gives batches"):
        DistributedSampler(batches, 2, 0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_without_collation_is_one_index_of_a_dataset_that_reads_in_bulk(num_workers):
    class Bulk:
        def __getitem__(self, index):
            assert type(index) is list
            return np.array(index)

        def __len__(self):
            return 7

    batches = BatchSampler(SequentialSampler(range(7)), 3, drop_last=False)
    for make in (Loader, DataLoader):
        loader = make(Bulk(), batch_size=None, sampler=batches, num_workers=num_workers)
        assert len(loader) == 3
        assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("make", [Loader, DataLoader], ids=["numpy", "torch"])
def test_a_sampler_that_gives_all_ranks_the_same_is_named(make, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    sampler = ClassBalancedSampler(LABELS)
    with pytest.warns(UserWarning, match="rank 1 of 2, and ClassBalancedSampler gives the same"):
        make(DATA, sampler=sampler)
    for shared in (DistributedSampler(sampler), DistributedSampler(sampler, 1, 0)):
        make(DATA, sampler=shared)
    batches = BalancedBatchSampler(LABELS, 2, 3)
    assert (batches.sampler.rank, batches.sampler.num_replicas) == (1, 2)
    make(DATA, batch_sampler=batches)


def test_torch_s_distributed_sampler_refuses_a_sampler():
    dealt = stock.DistributedSampler(ClassBalancedSampler(LABELS), 2, 0)
    for make in (Loader, DataLoader):
        with pytest.raises(ConfigError, match=r"penstock\.sampling\.DistributedSampler deals out"):
            make(DATA, sampler=dealt)


@every_sampler
def test_a_repr_is_short_and_names_the_kind(kind):
    sampler = MAKERS[kind](3)
    assert repr(sampler).startswith(type(sampler).__name__ + "(")
    assert "seed=3" in repr(sampler)
    assert len(repr(sampler)) < 250


ORDERS = {
    **MAKERS,
    "shards": lambda seed: ShardSampler([30, 30, 30], seed=seed),
    "a data set's": lambda seed: DistributedSampler(range(NUM_SAMPLES), 2, 0, seed=seed),
}


def dealt(kind):
    """Return the same in a DistributedSampler, if it is not dealt out already."""
    make = ORDERS[kind]
    if make(0).world_size > 1:
        return make
    return lambda seed: DistributedSampler(make(seed), 2, 1)


@pytest.mark.parametrize("make", [Loader, DataLoader], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", [*ORDERS, *(f"{kind} of a rank" for kind in ORDERS), *BATCHES])
def test_a_sampler_without_a_seed_takes_that_of_the_loader(name, make):
    if name in BATCHES:
        sampler_of, place = BATCHES[name], "batch_sampler"
    else:
        kind = name.removesuffix(" of a rank")
        sampler_of, place = ORDERS[kind] if name == kind else dealt(kind), "sampler"

    def loader(own_seed, seed):
        options = {place: sampler_of(own_seed)}
        return make(DATA, seed=seed, **options)

    def epochs(loader, num=2):
        return [[np.asarray(b[0]).tolist() for b in loader] for _ in range(num)]

    one, other = epochs(loader(None, 1)), epochs(loader(None, 2))
    assert one != other
    assert epochs(loader(2, 1)) == epochs(loader(2, 3)) == other  # its own seed wins
    shared = sampler_of(None)
    both = [make(DATA, seed=seed, **{place: shared}) for seed in (1, 2)]
    assert [epochs(each, 1) for each in both] == [one[:1], other[:1]]
    assert list(sampler_of(None)) == list(sampler_of(0))
    # A state goes on in a loader of its seed, and in no other.
    running = loader(None, 1)
    batches = iter(running)
    next(batches)
    state = json.loads(json.dumps(running.state_dict()))
    resumed = loader(None, 1)
    resumed.load_state_dict(state)
    assert epochs(resumed, 1)[0] == one[0][1:]
    with pytest.raises(StateError, match="seed"):
        loader(None, 2).load_state_dict(state)


@pytest.mark.parametrize("make", [Loader, DataLoader], ids=["numpy", "torch"])
def test_a_state_of_a_sampler_with_another_seed_is_refused(make):
    state = make(DATA, sampler=ClassBalancedSampler(LABELS, seed=4), seed=1).state_dict()
    with pytest.raises(StateError, match=r"sampler\.seed is 4 in the state and 1 here"):
        make(DATA, sampler=ClassBalancedSampler(LABELS), seed=1).load_state_dict(state)


class Reversed(IndexSampler):
    """A user's, whose constructor sets the seed itself."""

    def __init__(self, seed):
        super().__init__()
        self.seed = seed

    def __len__(self):
        return NUM_SAMPLES

    def indices(self):
        return self.rng().permutation(NUM_SAMPLES)[::-1]


def test_a_subclass_may_mean_another_number_by_num_samples():
    class Half(IndexSampler):
        num_samples = NUM_SAMPLES  # of the dataset

        def indices(self):
            return np.arange(0, NUM_SAMPLES, 2)

    half = Half()
    assert len(half) == half.total_size == len(list(half)) == -(-NUM_SAMPLES // 2)
    half.num_replicas = 2
    assert half.total_size == 2 * len(half)


def epoch_of(sampler, **options):
    batches = DataLoader(DATA, batch_size=8, sampler=sampler, **options)
    return [index for batch in batches for index in batch[0].tolist()]


@pytest.mark.parametrize("make", [Reversed, ORDERS["balanced"]], ids=["subclass", "attribute"])
def test_a_seed_that_is_set_later_is_the_sampler_s_own(make):
    sampler = make(0)
    sampler = make(None) if type(sampler) is not Reversed else sampler
    sampler.seed = 3
    assert epoch_of(sampler, seed=5) == list(sampler) == list(make(3))


@pytest.mark.parametrize("make", [Loader, DataLoader], ids=["numpy", "torch"])
def test_a_library_that_takes_the_sampler_out_of_a_loader_has_the_order_of_its_seed(make):
    loader = make(DATA, sampler=DistributedSampler(ClassBalancedSampler(LABELS), 2, 1), seed=5)
    own = DistributedSampler(ClassBalancedSampler(LABELS, seed=5), 2, 1)
    assert list(loader.sampler) == list(own)


def test_a_loader_without_a_seed_orders_by_0_whatever_loader_had_the_sampler_before():
    sampler = RandomSampler(range(NUM_SAMPLES))
    fresh = list(sampler)
    assert epoch_of(sampler, seed=5) == list(RandomSampler(range(NUM_SAMPLES), seed=5))
    sampler.set_epoch(0)
    assert epoch_of(sampler) == fresh
    epoch_of(sampler, seed=5)
    loader = DataLoader(DATA, batch_size=8, sampler=sampler)
    loader.set_epoch(0)
    batches = iter(loader)
    given = [next(batches)[0].tolist()]
    state = loader.state_dict()
    again = DataLoader(DATA, batch_size=8, sampler=RandomSampler(range(NUM_SAMPLES)))
    again.load_state_dict(state)
    rest = [batch[0].tolist() for batch in batches]
    assert [batch[0].tolist() for batch in again] == rest
    assert [index for batch in given + rest for index in batch] == fresh


def test_the_seed_of_a_loader_is_no_setting_of_shares_that_it_does_not_decide():
    def state_of(seed):
        shares = DistributedSampler(ClassBalancedSampler(LABELS, seed=3), 2, 0)
        return Loader(DATA, sampler=shares, seed=seed).state_dict()["fingerprint"]

    assert state_of(5) == state_of(0)  # of releases whose samplers took no seed
