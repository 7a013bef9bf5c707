# SPDX-License-Identifier: Apache-2.0
"""The order by lanes has each record once, on any number of ranks and from any step on."""

from __future__ import annotations

import json
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Loader
from penstock.errors import ConfigError, StateError
from penstock.sampling import LaneBatchSampler
from penstock.torch import DataLoader

COUNTS = np.random.default_rng(0).integers(0, 90, 7)  # 7 files
NUM_SAMPLES = int(COUNTS.sum())
FILE_OF = np.repeat(np.arange(7), COUNTS)
FIRST_OF = np.repeat(np.cumsum(COUNTS) - COUNTS, COUNTS)


@st.composite
def arguments(draw):
    return {
        "source": draw(st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any)),
        "lanes": draw(st.none() | st.integers(1, 40)),
        "run": draw(st.none() | st.integers(1, 40)),
        "window": draw(st.integers(1, 40)),
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 3)),
    }


def ranks_of(num_replicas, batch_size, epoch=0, **options):
    samplers = [
        LaneBatchSampler(batch_size=batch_size, num_replicas=num_replicas, rank=rank, **options)
        for rank in range(num_replicas)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return samplers


def steps_of(samplers):
    """Return the records of each step, the ranks' one after the other."""
    united = zip(*samplers, strict=True)  # ranks end together
    return [[index for batch in step for index in batch] for step in united]


# The order.


@given(arguments(), st.integers(1, 5), st.sampled_from([1, 2, 3, 4, 8]), st.integers(0, 2))
def test_every_record_comes_once_and_ranks_end_together(options, batch_size, num_replicas, epoch):
    samplers = ranks_of(num_replicas, batch_size, epoch, **options)
    num_samples, size = sum(options["source"]), batch_size * num_replicas
    steps = steps_of(samplers)
    for sampler in samplers:
        batches = list(sampler)
        assert len(batches) == len(sampler) == -(-num_samples // size)
        assert all(len(batch) == batch_size for batch in batches[:-1])
        assert len(sampler.sampler) == sum(map(len, batches))
    parts = [len(list(sampler)[-1]) for sampler in samplers]
    assert max(parts) - min(parts) <= 1
    assert min(parts) >= 1
    given_ones = Counter(index for step in steps for index in step)
    assert set(given_ones) == set(range(num_samples))
    left = num_samples % size
    num_twice = max(num_replicas - left, 0) if left else 0
    assert sum(given_ones.values()) - num_samples == num_twice
    assert samplers[0].sampler.total_size == num_samples + num_twice


@given(arguments(), st.integers(0, 2), st.booleans())
def test_a_step_has_the_same_records_on_any_number_of_ranks(options, epoch, drop_last):
    num_samples = sum(options["source"])
    alone = steps_of(ranks_of(1, 24, epoch, drop_last=drop_last, **options))
    assert len(alone) == (num_samples // 24 if drop_last else -(-num_samples // 24))
    for num_replicas in (2, 3, 4, 8):
        samplers = ranks_of(num_replicas, 24 // num_replicas, epoch, drop_last=drop_last, **options)
        steps = steps_of(samplers)
        assert [step[: len(a)] for step, a in zip(steps, alone, strict=True)] == alone


@given(arguments(), st.integers(1, 4), st.sampled_from([1, 2, 3]))
def test_going_on_at_any_step_equals_going_on(options, batch_size, num_replicas):
    for rank, sampler in enumerate(ranks_of(num_replicas, batch_size, 1, **options)):
        batches = list(sampler)
        running = iter(sampler)
        states = [sampler.state_dict()]
        states += [sampler.state_dict() for _ in running]
        for number, state in enumerate(states):
            assert len(json.dumps(state)) < 1024
            other = (rank + 1) % num_replicas  # the state of any rank will do
            for resumed_rank, expected in ((rank, batches), (other, None)):
                resumed = LaneBatchSampler(
                    batch_size=batch_size, num_replicas=num_replicas, rank=resumed_rank, **options
                )
                resumed.load_state_dict(json.loads(json.dumps(state)))
                rest = list(resumed)
                assert len(rest) == len(batches) - number
                assert expected is None or rest == expected[number:]


@given(arguments(), st.lists(st.integers(0, 239), max_size=30))
def test_any_place_is_found_without_those_before_it(options, places):
    order = LaneBatchSampler(batch_size=3, **options).sampler.indices()
    whole = order[:]
    places = np.array(places, np.int64) % len(order)
    assert order[places].tolist() == whole[places].tolist()


@given(arguments())
def test_a_run_is_of_one_lane_and_a_lane_goes_through_the_windows_of_its_files(options):
    options |= {"lanes": options["lanes"] or 4, "run": options["run"] or 3}
    counts, lanes, run = options["source"], options["lanes"], options["run"]
    num_samples, window = sum(counts), options["window"]
    order = [index for batch in LaneBatchSampler(batch_size=5, **options) for index in batch]
    # Lanes take turns with `run` records each, until they are at their end.
    sizes = [num_samples // lanes + (lane < num_samples % lanes) for lane in range(lanes)]
    of_lane = [[] for _ in range(lanes)]
    place = 0
    while place < num_samples:
        for own, size in zip(of_lane, sizes, strict=True):
            take = min(run, size - len(own))
            own += order[place : place + take]
            place += take
    assert [len(own) for own in of_lane] == sizes
    # One after the other they are whole files, window by window.
    file_of = np.repeat(np.arange(len(counts)), counts)
    first_of = np.repeat(np.cumsum(counts) - counts, counts)
    visits = [
        (int(file_of[index]), int(index - first_of[index]) // window)
        for own in of_lane
        for index in own
    ]
    seen = list(dict.fromkeys(visits))
    files = list(dict.fromkeys(file for file, _ in seen))
    assert seen == [(file, w) for file in files for w in range(-(-counts[file] // window))]
    if not options["shuffle"]:
        assert [index for own in of_lane for index in own] == list(range(num_samples))


def test_records_of_a_window_and_files_come_in_another_order_each_epoch():
    sampler = LaneBatchSampler([1000] * 4, 10, lanes=1, window=100, seed=3)
    orders = []
    for epoch in (0, 1, 2):
        sampler.set_epoch(epoch)
        orders.append(np.concatenate(list(sampler)))
    assert len({tuple(order[::1000] // 1000) for order in orders}) > 1
    in_windows = [{tuple(part % 100) for part in order.reshape(-1, 100)} for order in orders]
    assert all(len(shuffles) == 40 for shuffles in in_windows)
    assert not in_windows[0] & in_windows[1]
    # A record goes to all places of its window.
    moves = np.concatenate([(o.reshape(-1, 100) % 100) - np.arange(100) for o in orders])
    assert 25 < np.abs(moves).mean() < 42  # 33 of a random order


def test_windows_larger_than_a_table_of_a_permutation_are_shuffled_too():
    sampler = LaneBatchSampler([9000, 5000, 20], 100, lanes=2, window=6000, seed=3)
    assert sorted(i for batch in sampler for i in batch) == list(range(14_020))


def test_an_epoch_is_a_function_of_seed_and_epoch():
    sampler = LaneBatchSampler(COUNTS, 4, window=8, seed=3)
    first = list(sampler)
    sampler.set_epoch(2)
    third = list(sampler)
    again = LaneBatchSampler(COUNTS, 4, window=8, seed=3)
    assert list(again) == first != third
    again.set_epoch(2)
    assert list(pickle.loads(pickle.dumps(again))) == third
    assert list(LaneBatchSampler(COUNTS, 4, window=8, seed=4)) != first


def test_long_epochs_begin_at_any_step_and_places_above_32_bits_are_right():
    sampler = LaneBatchSampler([5 << 32, 3 << 32], 32, window=1000, lanes=4, seed=1)
    state = sampler.state_dict()
    for position in (1 << 29, (1 << 30) - 1):
        sampler.load_state_dict({**state, "position": position})
        (batch,) = list(sampler) if position == (1 << 30) - 1 else [next(iter(sampler))]
        assert len(set(batch)) == 32
        assert 0 <= min(batch) <= max(batch) < 8 << 32


@pytest.mark.parametrize("num_files", [1, 7, 8, 31, 32, 1000])
def test_by_default_four_steps_go_round_all_lanes(num_files):
    sampler = LaneBatchSampler([64] * num_files, 8, window=8, num_replicas=2, rank=1)
    assert sampler.lanes * sampler.run == 4 * 16
    assert sampler.lanes <= max(num_files, 4)


@pytest.mark.parametrize(("num_workers", "num_ranks"), [(4, 3), (2, 1), (1, 4), (4, 1)])
def test_seven_files_are_read_by_all_workers_of_all_ranks_and_each_place_by_one(
    num_workers, num_ranks
):
    counts = np.array([3000, 100, 5000, 1, 2500, 900, 3100])
    lanes = 4 * num_ranks
    samplers = ranks_of(num_ranks, 8, source=counts, lanes=lanes, window=50, seed=1)
    readers_of = {}
    loads = Counter()
    lane_of = {}
    order = np.concatenate([sampler.sampler.indices()[:] for sampler in samplers])
    assert sorted(order.tolist()) == list(range(counts.sum()))
    for rank, sampler in enumerate(samplers):
        for step, batch in enumerate(sampler):
            reader = rank, step % num_workers
            loads[reader] += len(batch)
            if step < len(sampler) - 5:  # in their last round, lanes give what they have left
                lane_of |= dict.fromkeys(batch, reader)
    # No worker is idle, and they have the same to do.
    assert len(loads) == num_workers * num_ranks
    assert max(loads.values()) - min(loads.values()) <= 8
    firsts = np.cumsum(counts) - counts
    for index, reader in lane_of.items():
        file = int(np.searchsorted(firsts, index, side="right")) - 1
        readers_of.setdefault((file, (index - int(firsts[file])) // 50), set()).add(reader)
    # Only where a lane ends in mid-window, another worker reads the window as well.
    shared = [window for window, readers in readers_of.items() if len(readers) > 1]
    assert len(shared) < lanes
    assert max(map(len, readers_of.values())) <= 2


# In a loader.


class Records:
    """Gives the number of a record."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return np.array([index])


@pytest.mark.parametrize("make", [Loader, DataLoader], ids=["numpy", "torch"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_goes_on_in_mid_epoch_on_other_ranks(make, num_workers):
    def loader(ranks=2, rank=1, workers=num_workers, size=None):
        batches = LaneBatchSampler(
            COUNTS, size or 8 // ranks, lanes=4, window=16, num_replicas=ranks, rank=rank
        )
        return make(Records(), batch_sampler=batches, num_workers=workers, seed=5)

    def numbers(batch):
        return np.asarray(batch).ravel().tolist()

    running = loader()
    running.set_epoch(1)
    batches = iter(running)
    given_so_far = [numbers(next(batches)) for _ in range(7)]
    state = json.loads(json.dumps(running.state_dict()))
    assert len(json.dumps(state)) < 1024
    rest = [numbers(batch) for batch in batches]
    expected = LaneBatchSampler(COUNTS, 4, lanes=4, window=16, seed=5, num_replicas=2, rank=1)
    expected.set_epoch(1)
    assert given_so_far + rest == list(expected)
    assert running.indices(1, 7).tolist() == rest[0]
    alone = LaneBatchSampler(COUNTS, 8, lanes=4, window=16, seed=5)
    alone.set_epoch(1)
    for ranks in (1, 2, 4, 8):
        steps = []
        for rank in range(ranks):
            other = loader(ranks, rank, 0)
            other.load_state_dict(state)
            steps.append([numbers(batch) for batch in other])
        united = [[i for batch in step for i in batch] for step in zip(*steps, strict=True)]
        assert united[:-1] == list(alone)[7:-1]
    with pytest.raises(StateError, match="global_batch_size is 8 in the state and 12 here"):
        loader(size=6).load_state_dict(state)


# What does not fit.


def test_what_is_no_source_is_named():
    for wrong in ([1.5], [[1]], "abc", 7, [-1]):
        with pytest.raises(ConfigError, match="takes a FileStream, or the number of records of"):
            LaneBatchSampler(wrong, 2, window=2)
    for empty in ([], [0, 0]):
        with pytest.raises(ConfigError, match=f"{len(empty)} files have 0 records"):
            LaneBatchSampler(np.array(empty, np.int64), 2, window=2)
    with pytest.raises(ConfigError, match="window= is missing"):
        LaneBatchSampler([3], 2)
    for name in ("batch_size", "lanes", "run", "window"):
        with pytest.raises(ConfigError, match=f"{name} should be a positive integer"):
            LaneBatchSampler([3], **{"batch_size": 2, "window": 2, name: 0})
    with pytest.raises(ConfigError, match="Invalid rank 2"):
        LaneBatchSampler([3], 2, window=2, num_replicas=2, rank=2)


def test_a_state_of_another_order_is_refused():
    options = {"source": COUNTS, "batch_size": 4, "window": 8, "lanes": 4, "run": 2}
    state = LaneBatchSampler(**options).state_dict()
    for name, value in {
        "source": COUNTS + 1, "batch_size": 5, "window": 9, "lanes": 5, "run": 3, "shuffle": False,
        "seed": 1, "drop_last": True,
    }.items():  # fmt: skip
        with pytest.raises(StateError, match="another order"):
            LaneBatchSampler(**{**options, name: value}).load_state_dict(state)
