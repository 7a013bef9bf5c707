# SPDX-License-Identifier: Apache-2.0
"""A state, loaded, gives exactly the rest: of any epoch, after any batch, with any workers."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import os
import pickle
import random
import time

import numpy as np
import pytest
import torch
import torch.utils.data as stock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.process.seeded_datasets import BatchNoise, Countdown, Noise, NumpyNoise, Resumable

import penstock.torch as ours
from penstock import Loader, sample_rng
from penstock.data import IterableDataset, Subset, shard
from penstock.errors import StateError
from penstock.sampling import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from penstock.torch import draws


def content(batch):
    if isinstance(batch, (list, tuple)):
        return tuple(map(content, batch))
    return np.asarray(batch).tolist()


def through_json(state):
    text = json.dumps(state)
    assert len(text) < 1024
    return json.loads(text)


class Reads(NumpyNoise):
    """Counts what is read of it, in this process."""

    def __init__(self, length):
        super().__init__(length)
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


class Draws:
    """A sampler of the user's: draws lazily from a global generator."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        for _ in range(self.length):
            yield random.randrange(self.length)


class WorkerSeeds(stock.Dataset):
    """Says by which base seed a worker was seeded."""

    def __len__(self):
        return 53

    def __getitem__(self, index):
        return index, torch.initial_seed() if stock.get_worker_info() else 0


class Uneven:
    """A batch sampler of the user's: batches of 1, 2, 3, 1, 2, 3 …"""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        order = np.random.permutation(self.length).tolist()
        size = 0
        while order:
            size = size % 3 + 1
            batch, order = order[:size], order[size:]
            yield batch


@st.composite
def loaders(draw):
    """A function that makes always the same loader, over a dataset of its own."""
    length = draw(st.integers(1, 40))
    kind = draw(
        st.sampled_from(
            [
                "plain",
                "shuffle",
                "random",
                "weighted",
                "subset",
                "ranks",
                "user",
                "uneven",
                "batches",
            ]
        )
    )
    seed = draw(st.integers(0, 1 << 70))
    options = {
        "seed": seed,
        "batch_size": draw(st.integers(1, 9)),
        "drop_last": draw(st.booleans()),
    }
    ranks = draw(st.integers(1, 4))
    rank = draw(st.integers(0, ranks - 1))
    pad = draw(st.sampled_from(["repeat", "drop", "none"]))
    number = draw(st.integers(1, 60))
    loader_of = draw(st.sampled_from([Loader, ours.DataLoader]))

    def make():
        dataset = Reads(length)
        own = dict(options)
        if kind == "shuffle":
            own["shuffle"] = True
        elif kind == "random":
            own["sampler"] = RandomSampler(dataset, number % 2 == 0, number, seed=3)
        elif kind == "weighted":
            own["sampler"] = WeightedRandomSampler(np.arange(1.0, length + 1), number)
        elif kind == "subset":
            own["sampler"] = SubsetRandomSampler(range(0, length, 2))
        elif kind == "ranks":
            own["sampler"] = DistributedSampler(dataset, ranks, rank, pad=pad)
        elif kind == "user":
            own["sampler"] = Draws(length)
        elif kind == "uneven":
            own = {"seed": seed, "batch_sampler": Uneven(length)}
        elif kind == "batches":
            inner = BatchSampler(SequentialSampler(dataset), own["batch_size"], own["drop_last"])
            own = {"seed": seed, "batch_sampler": inner}
        return loader_of(dataset, **own)

    return make


@given(make=loaders(), epoch=st.integers(0, 3), cut=st.integers(0, 50), data=st.data())
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_the_tail_is_the_tail(make, epoch, cut, data):
    loader = make()
    for _ in range(epoch):
        list(loader)
    iterator = iter(loader)
    given_before = [content(batch) for _, batch in zip(range(cut), iterator, strict=False)]
    state = through_json(loader.state_dict())
    loader.dataset.read.clear()
    tail = [content(batch) for batch in iterator]
    if len(given_before) == cut:
        assert (state["epoch"], state["batches"]) == (epoch, cut)
    else:  # the loop has seen the end
        assert (state["epoch"], state["batches"], tail) == (epoch + 1, 0, [])
    following = [content(batch) for batch in loader]

    resumed = make()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    if len(given_before) == cut:
        assert [content(batch) for batch in resumed] == tail
        wanted = [index for batch in tail for index in np.atleast_1d(batch[0]).tolist()]
        assert resumed.dataset.read == wanted  # and nothing else
    assert [content(batch) for batch in resumed] == following


@given(make=loaders(), epoch=st.integers(0, 1), cut=st.integers(0, 12), data=st.data())
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=25)
def test_the_tail_is_the_tail_with_any_workers(make, epoch, cut, data):
    def with_workers():
        loader = make()
        workers = data.draw(st.integers(0, 3))
        if workers:
            fields = {"num_workers": workers, "prefetch_factor": data.draw(st.integers(1, 3))}
            for name, value in fields.items():
                setattr(loader, name, value)
        return loader

    expected = make()
    for _ in range(epoch):
        list(expected)
    batches = [content(batch) for batch in expected]
    following = [content(batch) for batch in expected]
    loader = with_workers()
    loader.set_epoch(epoch)
    iterator = iter(loader)
    given_before = [content(batch) for _, batch in zip(range(cut), iterator, strict=False)]
    state = through_json(loader.state_dict())
    del iterator
    resumed = with_workers()
    resumed.load_state_dict(state)
    if len(given_before) == cut:
        assert given_before + [content(batch) for batch in resumed] == batches
    assert [content(batch) for batch in resumed] == following


@given(
    length=st.integers(1, 60), batch=st.integers(1, 4), epoch=st.integers(0, 3),
    cut=st.integers(0, 8), weighted=st.booleans(), pad=st.sampled_from(["repeat", "drop", "none"]),
)  # fmt: skip
def test_a_run_goes_on_with_another_number_of_ranks_and_the_same_global_batches(
    length, batch, epoch, cut, weighted, pad
):
    def loader(ranks, rank):
        source = NumpyNoise(length)
        if weighted:
            source = WeightedRandomSampler(np.arange(1.0, length + 1), length, seed=2)
        sampler = DistributedSampler(source, ranks, rank, pad=pad)
        return Loader(NumpyNoise(length), batch * 4 // ranks, sampler=sampler, seed=7)

    def global_batches(ranks, state=None):
        shares = []
        for rank in range(ranks):
            own = loader(ranks, rank)
            own.set_epoch(epoch)
            if state is not None:
                own.load_state_dict(state)
            share = [batch for _, batch in zip(range(1000), own, strict=False)]
            shares.append([list(zip(*map(content, batch), strict=True)) for batch in share])
        steps = max(map(len, shares))
        return [
            sorted(sample for share in shares if step < len(share) for sample in share[step])
            for step in range(steps)
        ]

    whole = {ranks: global_batches(ranks) for ranks in (4, 2, 1)}
    full = length // (batch * 4)  # steps that padding does not touch
    assert whole[4][:full] == whole[2][:full] == whole[1][:full]
    if pad == "none":
        assert whole[4] == whole[2] == whole[1]
    cut = min(cut, full)
    first = loader(4, 0)
    first.set_epoch(epoch)
    iterator = iter(first)
    for _ in range(cut):
        next(iterator)
    state = through_json(first.state_dict())
    assert state["samples"] == cut * batch * 4
    for ranks in (4, 2, 1):
        assert global_batches(ranks, state)[: full - cut] == whole[4][cut:full]
    del iterator


WORKERS = [
    {"num_workers": 0},
    {"num_workers": 1},
    {"num_workers": 2, "prefetch_factor": 4},
    {"num_workers": 3, "persistent_workers": True},
]


@pytest.mark.parametrize("after", WORKERS, ids=lambda w: f"to {w['num_workers']}")
@pytest.mark.parametrize("before", WORKERS, ids=lambda w: f"from {w['num_workers']}")
@pytest.mark.parametrize("loader_of", [Loader, ours.DataLoader])
def test_workers_may_change_between_saving_and_going_on(loader_of, before, after):
    options = {"batch_size": 4, "shuffle": True, "seed": 7}
    dataset = NumpyNoise if loader_of is Loader else Noise
    loader = loader_of(dataset(), **options, **before)
    list(loader)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = through_json(loader.state_dict())
    assert (state["epoch"], state["batches"], state["samples"]) == (1, 5, 20)
    tail = [content(batch) for batch in iterator]
    following = [content(batch) for batch in loader]
    resumed = loader_of(dataset(), **options, **after)
    resumed.load_state_dict(state)
    assert [content(batch) for batch in resumed] == tail
    assert [content(batch) for batch in resumed] == following


@pytest.mark.parametrize("num_workers", [0, 2])
def test_out_of_order_what_was_not_given_comes(num_workers):
    options = {"batch_size": 2, "shuffle": True, "seed": 7, "in_order": False}
    everything = sorted(content(batch) for batch in Loader(NumpyNoise(), **options))

    reading, writing = os.pipe()

    class Stuck(NumpyNoise):
        def __getitem__(self, index):
            if index == first:
                os.read(reading, 1)  # until the others are there
            return super().__getitem__(index)

    first = next(iter(Loader(NumpyNoise(), **options)))[0][0]
    loader = Loader(
        Stuck(), num_workers=2, multiprocessing_context="fork", prefetch_factor=3, **options
    )
    iterator = iter(loader)
    got = [content(next(iterator)) for _ in range(9)]
    assert loader.state_dict()["ahead"]  # the first one is not among them
    os.write(writing, b"!")
    os.close(reading), os.close(writing)
    state = through_json(loader.state_dict())
    del iterator
    resumed = Loader(NumpyNoise(), num_workers=num_workers, **options)
    resumed.load_state_dict(state)
    assert sorted(got + [content(batch) for batch in resumed]) == everything


def test_a_batch_that_could_not_be_made_is_made_again():
    class Broken(NumpyNoise):
        def __getitem__(self, index):
            if index == 10 and not healed:
                raise OSError("not now")
            return super().__getitem__(index)

    healed = False
    loader = Loader(Broken(), batch_size=4)
    iterator = iter(loader)
    next(iterator), next(iterator)
    with pytest.raises(OSError, match="not now"):
        next(iterator)
    state = loader.state_dict()
    assert state["batches"] == 2
    after = content(next(iterator))
    assert loader.state_dict()["batches"] == 4
    healed = True
    del iterator
    loader.load_state_dict(state)
    assert [content(batch) for batch in loader][1] == after


class Plain(IterableDataset):
    """A stream without state."""

    def __init__(self, length=40):
        self.length = length

    def __iter__(self):
        for item in shard(range(self.length)):
            yield item, sample_rng().random()


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("cut", [0, 1, 4, 9, 11])
@pytest.mark.parametrize("kind", [Plain, Countdown, Resumable])
def test_streams_go_on_too(kind, cut, num_workers):
    def make():
        return Loader(kind(41), batch_size=4, num_workers=num_workers, seed=7)

    loader = make()
    list(loader)
    iterator = iter(loader)
    for _ in range(cut):
        next(iterator)
    state = through_json(loader.state_dict())
    tail = [content(batch) for batch in iterator]
    following = [content(batch) for batch in loader]
    resumed = make()
    if kind is Resumable or cut == 0:
        resumed.load_state_dict(state)
    else:
        with pytest.warns(UserWarning, match=f"{kind.__name__}.*state_dict"):
            resumed.load_state_dict(state)
    assert [content(batch) for batch in resumed] == tail
    assert [content(batch) for batch in resumed] == following


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize(
    "make",
    [
        lambda **o: ours.DataLoader(BatchNoise(), shuffle=True, **o),
        lambda **o: ours.DataLoader(
            BatchNoise(), shuffle=True, generator=torch.Generator().manual_seed(8), **o
        ),
        lambda **o: ours.DataLoader(BatchNoise(), sampler=Draws(50), **o),
    ],
    ids=["shuffle", "generator", "random"],
)
def test_without_a_seed_the_order_goes_on(make, persistent, num_workers):
    options = {"batch_size": 4, "num_workers": num_workers, "persistent_workers": persistent}
    torch.manual_seed(1)
    random.seed(1)
    loader = make(**options)
    list(loader)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    users = (torch.get_rng_state(), random.getstate())
    tail = [batch[0].tolist() for batch in iterator]
    torch.set_rng_state(users[0]), random.setstate(users[1])  # a lazy sampler has drawn on
    following = [batch[0].tolist() for batch in loader]

    resumed = make(**options)
    torch.set_rng_state(users[0]), random.setstate(users[1])
    resumed.load_state_dict(state)
    assert [batch[0].tolist() for batch in resumed] == tail
    if isinstance(loader.sampler, Draws):
        return  # has left the users' generator elsewhere, as it draws with every index
    assert torch.equal(torch.get_rng_state(), users[0])  # resuming draws nothing
    assert random.getstate() == users[1]
    assert [batch[0].tolist() for batch in resumed] == following


def batches_of(sampler):
    return {"batch_sampler": BatchSampler(sampler, 4, False)}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "make",
    [
        lambda: {"sampler": RandomSampler(range(53), seed=3), "batch_size": 4},
        lambda: {"sampler": RandomSampler(range(53), seed=3), "batch_size": None},
        lambda: batches_of(DistributedSampler(RandomSampler(range(53), seed=3), 2, 1)),
        lambda: {"batch_sampler": stock.BatchSampler(RandomSampler(range(53), seed=3), 4, False)},
        lambda: batches_of(stock.SequentialSampler(range(53))),
        lambda: {"sampler": [5, 3, 8, 1, 2, 7], "batch_size": 2},
    ],
    ids=["sampler", "unbatched", "ranks", "torch's batches", "torch's order", "list"],
)
def test_the_state_is_small_where_no_generator_decides_the_order(make, num_workers):
    loader = ours.DataLoader(WorkerSeeds(), num_workers=num_workers, **make())
    batches = iter(loader)
    next(batches), next(batches)
    state = through_json(loader.state_dict())
    tail = [content(batch) for batch in batches]
    # Version 0.1.0 kept the states of all generators, which it then read them from.
    everybody = {"torch": torch.get_rng_state(), "random": random.getstate()}
    older = copy.deepcopy(state)
    older["draws"]["states"] |= {name: draws._encode(kept) for name, kept in everybody.items()}
    for saved in (state, older):
        resumed = ours.DataLoader(WorkerSeeds(), num_workers=num_workers, **make())
        resumed.load_state_dict(saved)
        assert [content(batch) for batch in resumed] == tail  # the workers' base seed is kept


def test_a_state_is_refused_while_an_iterator_is_running_and_taken_when_it_is_gone():
    for loader in (
        Loader(NumpyNoise(), batch_size=4),
        Loader(NumpyNoise(), batch_size=4, num_workers=1, persistent_workers=True),
        ours.DataLoader(NumpyNoise(), batch_size=4),
        ours.DataLoader(NumpyNoise(), batch_size=4, seed=7),
        ours.DataLoader(NumpyNoise(), batch_size=4, num_workers=1, persistent_workers=True),
        ours.DataLoader(NumpyNoise(), batch_size=4, seed=7, num_workers=1, persistent_workers=True),
    ):
        state = loader.state_dict()
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(StateError, match="running"):
            loader.load_state_dict(state)
        rest = len(list(iterator))
        assert rest == 13
        loader.load_state_dict(state)
        iterator = iter(loader)
        next(iterator)
        workers = getattr(loader, "_iterator", None)  # who looks at the workers runs no loop
        del iterator
        gc.collect()
        loader.load_state_dict(state)
        assert len(list(loader)) == 14
        del loader, workers
        gc.collect()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dataset": NumpyNoise(52)}, "length is 53 in the state and 52 here"),
        ({"batch_size": 5}, "global_batch_size is 4 in the state and 5 here"),
        ({"drop_last": True}, "drop_last is False in the state and True here"),
        ({"seed": 8}, "seed is 7 in the state and 8 here"),
        ({"shuffle": False}, "kind is 'RandomSampler' in the state and 'SequentialSampler' here"),
        (
            {"shuffle": False, "sampler": WeightedRandomSampler([1.0] * 53, 53)},
            "kind is 'RandomSampler' in the state and 'WeightedRandomSampler' here",
        ),
    ],
)
@pytest.mark.parametrize("loader_of", [Loader, ours.DataLoader])
def test_what_does_not_fit_is_named(loader_of, changed, message):
    options = {"dataset": NumpyNoise(), "batch_size": 4, "shuffle": True, "seed": 7}
    state = loader_of(**options).state_dict()
    other = loader_of(**{**options, **changed})
    with pytest.raises(StateError, match=message):
        other.load_state_dict(state)
    assert other.state_dict()["batches"] == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batches": 5, "samples": 16}, "counts 5 batches of epoch 0, with 16 samples in 5"),
        ({"batches": 0, "samples": 16}, "16 samples in 0"),
        ({"batches": 10**30, "samples": 53}, "contradicts itself"),
        ({"batches": 15, "samples": 53}, "contradicts itself"),
        ({"samples": "20"}, "samples should be an integer"),
        ({"ahead": [[3, 4]]}, r"batches \[\(3, 4\)\] beyond the first 5"),
        ({"ahead": [[7, 10**30]]}, "contradicts itself"),
        ({"ahead": [[7, 8.5]]}, "ahead should be an integer"),
        ({"epoch": 10**30}, "epoch should be below 2"),
        ({"format": 99}, "format"),
        ({"fingerprint": {}}, "length is None in the state"),
    ],
)
@pytest.mark.parametrize("seed", [None, 7])
def test_a_state_that_contradicts_itself_is_refused_and_changes_nothing(changed, message, seed):
    loader = ours.DataLoader(NumpyNoise(), batch_size=4, shuffle=True, seed=seed)
    batches = iter(loader)
    state = [next(batches) for _ in range(5)] and loader.state_dict()
    del batches
    loader = ours.DataLoader(NumpyNoise(), batch_size=4, shuffle=True, seed=seed)
    with pytest.raises(StateError, match=message):
        loader.load_state_dict({**state, **changed})
    assert len(list(loader)) == 14
    loader.load_state_dict(state)
    assert len(list(loader)) == 9


def test_a_stream_whose_workers_made_fewer_batches_than_were_given_is_refused():
    loader = Loader(Plain(), batch_size=2)
    state = next(iter(loader)) is not None and loader.state_dict()
    with pytest.raises(StateError, match="counts 2 batches, of which the workers made 1"):
        Loader(Plain(), batch_size=2).load_state_dict({**state, "batches": 2})


class Endless:
    """Has the length of its data, and no end: training that counts iterations."""

    def __len__(self):
        return 6

    def __iter__(self):
        return itertools.cycle(range(6))


@pytest.mark.parametrize("is_batched", [False, True])
def test_a_sampler_that_gives_more_than_its_length_goes_on(is_batched):
    def loader():
        order = Endless()
        if is_batched:
            return Loader(range(6), batch_sampler=stock.BatchSampler(order, 2, False))
        return Loader(range(6), batch_size=2, sampler=order)

    first = loader()
    assert len(list(itertools.islice(first, 9))) == 9
    state = json.loads(json.dumps(first.state_dict()))
    assert state["batches"] == 9
    again = loader()
    again.load_state_dict(state)
    assert [batch.tolist() for batch in itertools.islice(again, 2)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("draws", "message"),
    [
        ({}, "KeyError: 'order_seed'"),
        ({"between": {"torch 0": "!"}}, "cannot be drawn again"),
        ({"order_seed": "3"}, "order_seed should be an integer"),
        ({"order_seed": 2**64}, "order_seed should be below 2\\^63"),
        ({"states": {"torch 0": 1}}, "cannot be drawn again"),
        ({"more": 1}, "TypeError"),
    ],
)
def test_draws_that_cannot_have_been_saved_are_refused(draws, message):
    loader = ours.DataLoader(NumpyNoise(), batch_size=4, shuffle=True)
    batches = iter(loader)
    state = [next(batches) for _ in range(5)] and loader.state_dict()
    del batches
    is_whole = not draws or "between" in draws
    state["draws"] = draws if is_whole else {**state["draws"], **draws}
    loader = ours.DataLoader(NumpyNoise(), batch_size=4, shuffle=True)
    loader.load_state_dict(state)
    with pytest.raises(StateError, match=message):
        iter(loader)


@pytest.mark.parametrize(
    ("share", "message"),
    [
        ([1, "x", 0, None], "has_ended should be true or false, but got 'x'"),
        ([1, 1e30, 0, None], "has_ended should be true or false"),
        ([[1], False, 0, None], "num_batches should be an integer"),
        ([float("nan"), False, 0, None], "num_batches should be an integer"),
        ([1, False, -1, None], "state_at should be 0 or more"),
    ],
)
def test_a_shard_of_a_stream_that_cannot_have_been_saved_is_refused(share, message):
    loader = Loader(Countdown(), batch_size=4)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    del iterator
    with pytest.raises(StateError, match=message):
        Loader(Countdown(), batch_size=4).load_state_dict({**state, "shares": {"0": share}})


def test_set_epoch_to_the_epoch_of_the_state_keeps_its_place_and_another_drops_it_aloud():
    loader = Loader(NumpyNoise(), batch_size=4)
    loader.set_epoch(3)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()
    resumed = Loader(NumpyNoise(), batch_size=4)
    resumed.load_state_dict(state)
    assert resumed.epoch == 3
    resumed.set_epoch(3)
    assert len(list(resumed)) == 9
    resumed.load_state_dict(state)
    with pytest.warns(UserWarning, match="epoch 0 was chosen.* epoch 3, with 5 batches"):
        resumed.set_epoch(0)
    assert len(list(resumed)) == 14


def test_a_loader_is_pickled_with_the_place_of_its_state():
    loader = Loader(NumpyNoise(), batch_size=4, seed=7)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    fresh = Loader(NumpyNoise(), batch_size=4, seed=7)
    fresh.load_state_dict(state)
    assert len(list(pickle.loads(pickle.dumps(fresh)))) == 13


class Heavy(Resumable):
    """A stream whose state takes long to take; counts how often it was asked."""

    asked = 0

    def state_dict(self):
        self.asked += 1
        deadline = time.perf_counter() + 0.02
        while time.perf_counter() < deadline:
            pass
        return super().state_dict()


def test_a_state_that_takes_long_is_taken_seldom_and_the_batches_since_are_replayed():
    loader = Loader(Heavy(400), batch_size=4, seed=7)
    iterator = iter(loader)
    for _ in range(50):
        next(iterator)
    state = through_json(loader.state_dict())
    tail = [content(batch) for batch in iterator]
    assert loader.dataset.asked < 25  # of 100
    resumed = Loader(Heavy(400), batch_size=4, seed=7)
    resumed.load_state_dict(state)
    assert [content(batch) for batch in resumed] == tail


class Broken(IterableDataset):
    """A stream of which one sample cannot be read; it goes on after it."""

    def __iter__(self):
        return _BrokenIterator(iter(shard(range(24))))


class _BrokenIterator:
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return self

    def __next__(self):
        item = next(self.items)
        if item == 9:
            raise OSError("item 9")
        return item


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore:Broken has no state_dict")
def test_a_failed_batch_of_a_stream_counts_once_a_later_one_was_given(num_workers):
    def take(iterator, count):
        found = []
        while len(found) < count:
            try:
                found.append(content(next(iterator)))
            except OSError:
                found.append("failed")
            except StopIteration:
                break
        return found

    def make():
        return Loader(Broken(), batch_size=4, num_workers=num_workers)

    loader = make()
    iterator = iter(loader)
    assert take(iterator, 4)[2] == "failed"
    state = through_json(loader.state_dict())
    tail = take(iterator, 100)
    resumed = make()
    resumed.load_state_dict(state)
    assert take(iter(resumed), 100) == tail


@pytest.mark.parametrize("kind", [stock.DistributedSampler, DistributedSampler])
def test_the_epoch_that_a_sampler_is_given_is_the_loaders(kind):
    def orders(epochs, **options):
        sampler = kind(range(20), num_replicas=2, rank=0)
        loader = ours.DataLoader(NumpyNoise(20), batch_size=5, sampler=sampler, seed=7)
        found = []
        for epoch in epochs:
            sampler.set_epoch(epoch)
            assert options or loader.epoch in (epoch, 0)
            found.append([content(batch) for batch in loader])
        return found

    whole = orders(range(4))
    assert len({str(epoch) for epoch in whole}) == 4
    assert orders(range(2, 4)) == whole[2:]
    assert orders([3, 1], any_epoch=True) == [whole[3], whole[1]]


class MyBatches(stock.BatchSampler):
    """A batch sampler of the user's around another sampler."""

    def __iter__(self):
        return super().__iter__()


def test_a_batch_sampler_of_the_users_hands_the_epoch_on():
    def make():
        inner = stock.DistributedSampler(range(12), 2, 1)
        return ours.DataLoader(NumpyNoise(12), batch_sampler=MyBatches(inner, 2, False), seed=7)

    loader = make()
    epochs = [[content(batch) for batch in loader] for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3
    loader.set_epoch(1)
    iterator = iter(loader)
    next(iterator)
    state = through_json(loader.state_dict())
    resumed = make()
    resumed.load_state_dict(state)
    assert [content(batch) for batch in resumed] == epochs[1][1:]
    del iterator


class NoLength:
    """A sampler of the user's that does not say how long it is."""

    def __iter__(self):
        return iter(range(40))


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        (
            {"sampler": NoLength(), "batch_size": 4},
            {"sampler": NoLength(), "batch_size": 8},
            "global_batch_size is 4 in the state and 8 here",
        ),
        ({"sampler": [3, 1, 2]}, {"sampler": [1, 2, 3]}, "indices"),
        ({"batch_sampler": [[3, 1], [2]]}, {"batch_sampler": [[3], [1, 2]]}, "indices"),
        ({"sampler": NoLength()}, {"sampler": Draws(40)}, "kind is 'NoLength'"),
        (
            {"batch_sampler": MyBatches(range(40), 10, False)},
            {"batch_sampler": MyBatches(range(40), 11, False)},
            "batch_size is 10 in the state and 11 here",
        ),
    ],
)
@pytest.mark.parametrize("seed", [None, 7])
def test_samplers_that_are_not_ours_are_distinguished_as_well_as_can_be(
    saved, loaded, message, seed
):
    data = NumpyNoise(40)
    state = ours.DataLoader(data, seed=seed, **saved).state_dict()
    ours.DataLoader(data, seed=seed, **saved).load_state_dict(state)
    with pytest.raises(StateError, match=message):
        ours.DataLoader(data, seed=seed, **loaded).load_state_dict(state)


def test_without_a_seed_other_weights_are_seen():
    def make(weights):
        return ours.DataLoader(NumpyNoise(3), sampler=stock.WeightedRandomSampler(weights, 3))

    with pytest.raises(StateError, match="weights"):
        make([1.0, 1.0, 2.0]).load_state_dict(make([1.0, 2.0, 1.0]).state_dict())


def test_a_streams_state_is_its_ranks_own(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    loader = Loader(Countdown(), batch_size=4)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(StateError, match="rank is 0 in the state and 1 here"):
        Loader(Countdown(), batch_size=4).load_state_dict(state)
    del iterator


def test_a_dataset_that_cannot_take_its_state_is_named():
    loader = Loader(Resumable(), batch_size=4)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    with pytest.raises(StateError, match="Plain has not"):
        Loader(Plain(), batch_size=4).load_state_dict(state)
    del iterator


def test_a_state_that_cannot_be_taken_loses_no_batch():
    class Unpicklable(Plain):
        def state_dict(self):
            return (item for item in ())

        def load_state_dict(self, state):
            raise AssertionError

    loader = ours.DataLoader(Unpicklable(8), batch_size=4)
    with pytest.warns(UserWarning, match=r"Unpicklable\.state_dict\(\) failed with TypeError"):
        assert len(list(loader)) == 2


def private(owner, seed):
    generator = torch.Generator().manual_seed(seed)
    if owner == "loader":
        return ours.DataLoader(range(8), 2, shuffle=True, generator=generator)
    sampler = stock.RandomSampler(range(8), generator=generator)
    if owner == "sampler":
        return ours.DataLoader(range(8), 2, sampler=sampler)
    return ours.DataLoader(range(8), batch_sampler=MyBatches(sampler, 2, False))


@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize("owner", ["loader", "sampler", "a batch sampler's"])
def test_a_private_generator_is_kept_between_epochs_and_in_them(owner, cut):
    loader = private(owner, 0)
    list(loader)
    batches = iter(loader) if cut else loader
    if cut:
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    following = [content(batch) for batch in batches]
    resumed = private(owner, 0 if owner == "loader" else 1)
    resumed.load_state_dict(state)
    assert [content(batch) for batch in resumed] == following


@pytest.mark.parametrize("loader_of", [Loader, ours.DataLoader])
def test_an_iterator_that_another_has_followed_gives_nothing_however_it_is_asked(loader_of):
    loader = loader_of(
        np.arange(8), batch_size=4, seed=7, num_workers=1, persistent_workers=True, backend="thread"
    )
    older = iter(loader)
    next_of_older = older.__next__
    next_of_older()
    newer = iter(loader)
    assert hasattr(older, "__next__")
    for ask in (next_of_older, older.__next__, lambda: next(older)):
        with pytest.raises(StopIteration):
            ask()
    assert len(list(newer)) == 2


def test_a_start_that_fails_costs_no_epoch():
    class Fails(IterableDataset):
        is_ready = False

        def __iter__(self):
            if not self.is_ready:
                raise FileNotFoundError("no such shard")
            return iter(range(4))

    for loader_of in (Loader, ours.DataLoader):
        loader = loader_of(Fails(), batch_size=4)
        with pytest.raises(FileNotFoundError, match="no such shard"):
            list(loader)
        assert loader.state_dict()["epoch"] == loader.epoch == 0
        loader.dataset.is_ready = True
        assert len(list(loader)) == 1


class Marked(list):
    """A dataset whose contents have a fingerprint, as a store's have."""

    fingerprint = "a1"


def test_other_contents_are_warned_of_and_the_order_goes_on():
    loader = Loader(Marked(range(40)), batch_size=4, shuffle=True, seed=5)
    iterator = iter(loader)
    first = [next(iterator).tolist() for _ in range(3)]
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [batch.tolist() for batch in iterator]
    assert state["contents"] == "a1"
    again = Loader(Marked(range(40)), batch_size=4, shuffle=True, seed=5)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == rest
    changed = Subset(Marked(range(40)), range(40))
    changed.dataset.fingerprint = "b2"
    other = Loader(changed, batch_size=4, shuffle=True, seed=5)
    with pytest.warns(UserWarning, match=r"fingerprint was a1, now it is b2.*exactly") as found:
        other.load_state_dict(state)
    assert found[0].filename == __file__
    assert [batch.tolist() for batch in other] == rest
    assert sorted(i for batch in first + rest for i in batch) == list(range(40))
    plain = Loader(list(range(40)), batch_size=4, shuffle=True, seed=5)
    plain.load_state_dict(state)  # nothing is known of its contents
    assert len(list(plain)) == 7


class Lengthless:
    """A map-style dataset of keys without a length."""

    def __getitem__(self, index):
        return index


LENGTHLESS = {
    "default": lambda: {},
    "batched": lambda: {"batch_size": 2, "drop_last": True},
    "some of torch's": lambda: {"sampler": stock.RandomSampler(Lengthless(), num_samples=3)},
    "list": lambda: {"sampler": [3, 1, 2]},
    "batches": lambda: {"batch_sampler": [[3], [1, 2]]},
    "bulk": lambda: {"sampler": stock.BatchSampler([3, 1, 2], 2, False), "batch_size": None},
    "user's": lambda: {"sampler": Uneven(6), "batch_size": None},
}


@pytest.mark.parametrize("options", LENGTHLESS.values(), ids=LENGTHLESS)
@pytest.mark.parametrize("loader_of", [Loader, ours.DataLoader])
@pytest.mark.parametrize("seed", [None, 7])
def test_a_loader_that_never_ran_has_a_state_where_the_dataset_has_no_length(
    options, loader_of, seed
):
    def make(dataset):
        seeded = {"seed": seed} if seed is not None else {}
        return loader_of(dataset, **options(), **seeded)

    state = json.loads(json.dumps(make(Lengthless()).state_dict()))
    assert (state["batches"], state["fingerprint"]["length"]) == (0, None)
    resumed = make(Lengthless())
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    with pytest.raises(StateError, match="length is None in the state and 9 here"):
        make(range(9)).load_state_dict(state)
    counted = json.loads(json.dumps(make(range(9)).state_dict()))
    with pytest.raises(StateError, match="length is 9 in the state and None here"):
        make(Lengthless()).load_state_dict(counted)


def test_bad_samples_before_a_resume_are_not_warned_of_again(recwarn):
    class Bad:
        def __len__(self):
            return 12

        def __getitem__(self, index):
            if index == 1:
                raise ValueError("bad")
            return index

    loader = Loader(Bad(), 4, on_error="skip")
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    again = Loader(Bad(), 4, on_error="skip")
    again.load_state_dict(state)
    assert [len(batch) for batch in again] == [4, 4]
    assert not [w for w in recwarn if "bad sample" in str(w.message)]


def test_out_of_order_a_failed_step_does_not_hold_the_count_up():
    class Fails(NumpyNoise):
        def __getitem__(self, index):
            if index == 0:
                raise OSError("index 0")
            return super().__getitem__(index)

    options = {"batch_size": 1, "num_workers": 1, "in_order": False}
    loader = Loader(Fails(3000), multiprocessing_context="fork", **options)
    iterator = iter(loader)
    with pytest.raises(OSError, match="index 0"):
        next(iterator)
    assert loader.state_dict()["batches"] == 0
    for _ in range(1500):
        next(iterator)
    state = through_json(loader.state_dict())
    assert (state["batches"], "ahead" in state) == (1501, False)
    del iterator


def test_thousands_of_steps_given_ahead_are_passed_over():
    loader = Loader(NumpyNoise(3000), batch_size=1, num_workers=1)
    state = loader.state_dict()
    state["ahead"] = [[1, 2900]]
    loader.load_state_dict(state)
    assert len(list(loader)) == 101


def test_weights_that_were_changed_count_from_the_next_epoch_on():
    sampler = WeightedRandomSampler([1.0, 0.0, 0.0], 4)
    loader = ours.DataLoader([5, 6, 7], batch_size=4, sampler=sampler, seed=7)
    assert next(iter(loader)).tolist() == [5] * 4
    before = loader.state_dict()
    sampler.weights[:] = [0.0, 0.0, 1.0]
    assert next(iter(loader)).tolist() == [7] * 4
    assert loader.state_dict()["fingerprint"] != before["fingerprint"]
