# SPDX-License-Identifier: Apache-2.0
"""Rows hold their documents, each once, on any number of ranks and from any step on."""

from __future__ import annotations

import json
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock import Loader
from penstock.errors import ConfigError, StateError
from penstock.sampling import PackingSampler
from penstock.sampling.row_plan import RowPlan
from penstock.torch import DataLoader

RNG = np.random.default_rng(3)
LENGTHS = np.minimum(RNG.lognormal(3, 1, 700).astype(np.int64), 100)  # some are empty
COSTS = RNG.integers(1, 1000, len(LENGTHS))


class Documents:
    """Gives the number of a document and its length."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return np.array([index, LENGTHS[index]])


def next_fit(lengths, max_tokens):
    """Return rows of a batch as a consumer finds them: a new one where there is no room."""
    rows = []
    for length in lengths:
        if not rows or sum(rows[-1]) + length > max_tokens:
            rows.append([])
        rows[-1].append(length)
    return rows


def best_fit(lengths, max_tokens):
    """Return the free tokens of rows packed one document at a time."""
    free = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in free if room >= length]
        if fitting:
            free.remove(min(fitting))
            free.append(min(fitting) - length)
        else:
            free.append(max_tokens - length)
    return sorted(free)


@st.composite
def arguments(draw):
    max_tokens = draw(st.integers(1, 40))
    length = st.integers(0, max_tokens)
    lengths = draw(st.lists(length, min_size=8, max_size=80).filter(any))
    costs = draw(st.none() | st.lists(st.integers(0, 9), min_size=80, max_size=80))
    return {
        "lengths": lengths,
        "max_tokens": max_tokens,
        "cost": None if costs is None else costs[: len(lengths)],
        "window": draw(st.integers(1, 5)),
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 3)),
    }


def ranks_of(num_replicas, rows, **options):
    """Return the samplers of all ranks; none where there is not a row for each."""
    lengths, max_tokens = options["lengths"], options["max_tokens"]
    if len(best_fit([length for length in lengths if length], max_tokens)) < num_replicas:
        with pytest.raises(ConfigError, match="fewer than the"):
            PackingSampler(**options, num_replicas=num_replicas, rank=0)
        return []
    return [
        PackingSampler(**options, rows=rows, num_replicas=num_replicas, rank=rank)
        for rank in range(num_replicas)
    ]


# The plan.


@given(st.lists(st.integers(1, 60) | st.integers(1, 5000), max_size=120), st.integers(0, 60))
def test_a_plan_is_best_fit_of_the_longest_first(lengths, more):
    max_tokens = max(lengths, default=1) + more
    plan = RowPlan(np.array(lengths, np.int64), max_tokens)
    rows = np.arange(plan.num_rows)
    assert sorted((max_tokens - plan.tokens(rows)).tolist()) == best_fit(lengths, max_tokens)
    for shuffle in (None, plan.group_shuffle(7, 1)):
        documents, counts = plan.documents(rows, shuffle)
        assert sorted(documents.tolist()) == list(range(len(lengths)))
        found = [[lengths[i] for i in row] for row in np.split(documents, np.cumsum(counts)[:-1])]
        assert [sum(row) for row in found if row] == plan.tokens(rows).tolist()
        assert max((len(row) for row in found), default=0) == plan.max_documents


def test_rows_can_be_asked_for_in_any_order_and_more_than_once():
    plan = RowPlan(LENGTHS, 100)
    documents, counts = plan.documents(np.arange(plan.num_rows), None)
    whole = np.split(documents, np.cumsum(counts)[:-1])
    asked = RNG.integers(0, plan.num_rows, 50)
    documents, counts = plan.documents(asked, None)
    some = np.split(documents, np.cumsum(counts)[:-1])
    assert [row.tolist() for row in some] == [whole[row].tolist() for row in asked]


def test_documents_of_one_length_meet_others_in_each_epoch():
    plan = RowPlan(np.full(3000, 5), 10)
    pairs = []
    for epoch in range(3):
        documents, _ = plan.documents(np.arange(1500), plan.group_shuffle(0, epoch))
        assert sorted(documents.tolist()) == list(range(3000))
        pairs.append({frozenset(pair) for pair in documents.reshape(-1, 2).tolist()})
    assert max(len(pairs[0] & pairs[1]), len(pairs[0] & pairs[2])) < 10


def test_the_same_number_of_another_length_is_another_document():
    # 90 + 10 in each row: the k-th of the one must not always come with the k-th of the other.
    plan = RowPlan(np.repeat([90, 10], 500), 100)
    meetings = Counter()
    for epoch in range(20):
        documents, _ = plan.documents(np.arange(500), plan.group_shuffle(0, epoch))
        meetings += Counter(map(tuple, documents.reshape(-1, 2).tolist()))
    assert max(meetings.values()) <= 4


# The batches of an epoch.


@given(arguments(), st.integers(1, 3), st.sampled_from([1, 2, 4, 8]), st.integers(0, 2))
def test_every_document_comes_once_and_rows_are_found_by_next_fit(
    options, rows, num_replicas, epoch
):
    samplers = ranks_of(num_replicas, rows, **options)
    lengths, max_tokens = options["lengths"], options["max_tokens"]
    given_rows = []
    for sampler in samplers:
        sampler.set_epoch(epoch)
        own = list(sampler.rows())
        batches = list(sampler)
        assert len(batches) == len(sampler) == len(samplers[0])
        assert [index for row in own for index in row] == [i for b in batches for i in b]
        place = 0
        for batch in batches:
            found = next_fit([lengths[index] for index in batch], max_tokens)
            expected = own[place : place + len(found)]
            assert found == [[lengths[index] for index in row] for row in expected]
            assert all(sum(row) <= max_tokens for row in found)
            assert len(found) == rows or batch is batches[-1]
            place += len(found)
        given_rows += own
    if not samplers:
        return
    counts = Counter(index for row in given_rows for index in row)
    assert set(counts) == {k for k, length in enumerate(lengths) if length}
    num_rows, step = samplers[0].num_rows, rows * num_replicas
    num_repeated = max(num_replicas - num_rows % step, 0) if num_rows % step else 0
    assert len(given_rows) - num_rows == num_repeated
    repeated = [row for row, times in Counter(map(tuple, given_rows)).items() if times > 1]
    assert len(repeated) == num_repeated
    assert sum(counts.values()) == len(counts) + sum(map(len, repeated))
    used = sum(lengths) / (num_rows * max_tokens)
    assert samplers[0].padding == pytest.approx(1 - used)


@pytest.mark.parametrize("num_rows", range(4, 24))
def test_ranks_differ_by_one_row_at_most_whatever_rows_cost(num_rows):
    costs = np.ones(num_rows)
    costs[:2] = 1e6
    lengths = np.full(num_rows, 10)
    options = {"rows": 3, "cost": costs, "seed": 1, "num_replicas": 4}
    samplers = [PackingSampler(lengths, 10, **options, rank=rank) for rank in range(4)]
    last = [list(sampler)[-1] for sampler in samplers]
    assert max(map(len, last)) - min(map(len, last)) <= 1
    dear = [rank for rank, batch in enumerate(last) for index in batch if index < 2]
    assert len(dear) == len(set(dear))


def test_rows_are_those_of_the_epoch_at_the_time_of_the_call():
    sampler = PackingSampler(LENGTHS, 100, seed=1)
    rows = sampler.rows()
    sampler.set_epoch(1)
    assert list(rows) == list(sampler.rows(0)) != list(sampler.rows())


@given(arguments(), st.integers(0, 2))
def test_a_step_has_the_same_rows_on_any_number_of_ranks(options, epoch):
    steps_of = []
    for num_replicas in (1, 2, 4, 8):
        samplers = ranks_of(num_replicas, 8 // num_replicas, drop_last=True, **options)
        for sampler in samplers:
            sampler.set_epoch(epoch)
        if samplers:
            united = zip(*samplers, strict=True)
            steps_of.append([sorted(i for batch in step for i in batch) for step in united])
            num_steps = samplers[0].num_rows // 8
            assert len(steps_of[-1]) == num_steps
    assert all(steps == steps_of[0] for steps in steps_of)
    counts = Counter(index for step in steps_of[0] for index in step)
    assert set(counts.values()) <= {1}


@given(arguments(), st.integers(1, 3), st.sampled_from([1, 2, 4]))
def test_going_on_at_any_step_equals_going_on(options, rows, num_replicas):
    for sampler in ranks_of(num_replicas, rows, **options):
        sampler.set_epoch(1)
        batches = list(sampler)
        states = []
        running = iter(sampler)
        for _ in batches:
            states.append(sampler.state_dict())
            next(running)
        for number, state in enumerate(states):
            assert len(json.dumps(state)) < 1024
            resumed = PackingSampler(
                **options, rows=rows, num_replicas=num_replicas, rank=sampler.sampler.rank
            )
            resumed.load_state_dict(json.loads(json.dumps(state)))
            assert list(resumed) == batches[number:]


def test_an_epoch_is_a_function_of_seed_and_epoch():
    sampler = PackingSampler(LENGTHS, 100, 4, seed=3)
    first = list(sampler)
    sampler.set_epoch(2)
    third = list(sampler)
    again = PackingSampler(LENGTHS, 100, 4, seed=3)
    assert list(again) == first != third
    assert [i for row in again.rows(2) for i in row] == [i for batch in third for i in batch]
    again.set_epoch(2)
    assert list(pickle.loads(pickle.dumps(again))) == third
    assert list(PackingSampler(LENGTHS, 100, 4, seed=4)) != first
    assert len(third) == len(first)


def test_without_shuffling_rows_come_as_they_were_packed():
    lengths = [3, 8, 5, 4, 2, 4]
    sampler = PackingSampler(lengths, 8, shuffle=False)
    assert list(sampler) == [[1], [2, 0], [3, 5], [4]]
    sampler.set_epoch(1)
    assert list(sampler) == [[1], [2, 0], [3, 5], [4]]


def test_empty_documents_are_left_out_and_long_ones_where_that_is_asked_for():
    lengths = [0, 3, 9, 8, 0, 12]
    sampler = PackingSampler(lengths, 8, too_long="drop")
    assert sampler.dropped.tolist() == [0, 2, 4, 5]
    assert sorted(sampler) == [[1], [3]]
    assert sampler.padding == pytest.approx(5 / 16)
    assert (sampler.num_rows, len(sampler)) == (2, 2)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("power", [1, 2])
def test_ranks_have_about_the_same_to_compute(rows, power):
    lengths = np.minimum(np.random.default_rng(1).lognormal(5.5, 1.2, 60_000), 2048)
    lengths = lengths.astype(np.int64) + 1
    costs = lengths.astype(np.float64) ** power
    cost = None if power == 1 else costs
    loads = np.array(
        [
            [costs[batch].sum() for batch in sampler]
            for sampler in [
                PackingSampler(lengths, 2049, rows, cost=cost, num_replicas=8, rank=k)
                for k in range(8)
            ]
        ]
    )
    ratios = loads.max(axis=0) / loads.mean(axis=0)
    assert ratios.mean() < 1.01
    per_rank = loads.sum(axis=1)  # none has more in every step
    assert per_rank.max() < 1.002 * per_rank.mean()


# In a loader.


@pytest.mark.parametrize("make", [Loader, DataLoader], ids=["numpy", "torch"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_goes_on_in_mid_epoch(make, num_workers):
    def loader(ranks=2, rank=1, workers=num_workers, rows=None):
        rows = rows or 8 // ranks
        batches = PackingSampler(LENGTHS, 100, rows, num_replicas=ranks, rank=rank, cost=COSTS)
        return make(Documents(), batch_sampler=batches, num_workers=workers, seed=5)

    def numbers(batch):
        return np.asarray(batch)[:, 0].tolist()

    running = loader()
    assert len(running) == len(running.batch_sampler)
    running.set_epoch(1)
    batches = iter(running)
    given_so_far = [numbers(next(batches)) for _ in range(7)]
    state = json.loads(json.dumps(running.state_dict()))
    assert len(json.dumps(state)) < 1024
    rest = [numbers(batch) for batch in batches]
    expected = PackingSampler(LENGTHS, 100, 4, num_replicas=2, rank=1, cost=COSTS, seed=5)
    expected.set_epoch(1)
    assert given_so_far + rest == list(expected)
    resumed = loader(workers=0)
    resumed.load_state_dict(state)
    assert [numbers(batch) for batch in resumed] == rest
    # On another number of ranks the steps hold the same documents.
    for ranks in (1, 4, 8):
        steps = []
        for rank in range(ranks):
            other = loader(ranks, rank, 0)
            other.load_state_dict(state)
            steps.append([numbers(batch) for batch in other])
        united = [sorted(i for batch in step for i in batch) for step in zip(*steps, strict=True)]
        alone = PackingSampler(LENGTHS, 100, 8, cost=COSTS, seed=5)
        alone.set_epoch(1)
        assert united[:-1] == [sorted(batch) for batch in alone][7:-1]
    other = loader(rows=6)
    with pytest.raises(StateError, match="global_batch_size is 8 in the state and 12 here"):
        other.load_state_dict(state)


def test_a_loader_without_a_seed_takes_it_and_torchs_own_as_well():
    from torch.utils.data import DataLoader as Stock

    expected = list(PackingSampler(LENGTHS, 100, 4))
    for make in (Loader, DataLoader, Stock):
        loader = make(Documents(), batch_sampler=PackingSampler(LENGTHS, 100, 4))
        assert [np.asarray(batch)[:, 0].tolist() for batch in loader] == expected


def test_samples_draw_other_numbers_in_each_place_of_an_epoch():
    class Drawing(Documents):
        def __getitem__(self, index):
            return np.array([penstock.sample_rng().random()])

    numbers = [
        float(number)
        for rank in range(2)
        for batch in Loader(
            Drawing(),
            batch_sampler=PackingSampler(LENGTHS, 100, 2, num_replicas=2, rank=rank),
            seed=1,
        )
        for number in batch.ravel()
    ]
    num_dropped = np.count_nonzero(LENGTHS == 0)
    assert len(set(numbers)) >= len(LENGTHS) - num_dropped


# What does not fit.


def test_what_cannot_be_packed_is_named():
    with pytest.raises(ConfigError, match=r"document 2 has 9 tokens, more than max_tokens=8 \(2 s"):
        PackingSampler([0, 3, 9, 8, 0, 12], 8)
    with pytest.raises(ConfigError, match=r"lengths\[1\] is -3 \(1 such of 3\)"):
        PackingSampler([4, -3, 2], 8)
    for wrong in ([1.5, 2.0], [], "abc", [[1, 2]], iter([1])):
        with pytest.raises(ConfigError, match="lengths should be the number of tokens of each"):
            PackingSampler(wrong, 8)
    with pytest.raises(
        ConfigError, match=r"4 documents, 2 of them empty .* fill 1 rows .* 2 ranks"
    ):
        PackingSampler([1, 2, 0, 0], 8, num_replicas=2, rank=0)
    with pytest.raises(ConfigError, match=r"2 documents, 2 of them empty .* fill 0 rows"):
        PackingSampler([0, 0], 8)
    with pytest.raises(ConfigError, match=r"cost should be one number for each of 2 samples"):
        PackingSampler([1, 2], 8, cost=[1.0])
    with pytest.raises(ConfigError, match=r"cost\[1\] is nan"):
        PackingSampler([1, 2], 8, cost=[1.0, float("nan")])
    with pytest.raises(ConfigError, match="too_long should be 'error' or 'drop', but got too_long"):
        PackingSampler([1, 2], 8, too_long="split")
    for name in ("max_tokens", "rows", "window"):
        with pytest.raises(ConfigError, match=f"{name} should be a positive integer"):
            PackingSampler([1, 2], **{"max_tokens": 8, name: 0})


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64])
def test_lengths_and_costs_of_any_integers_mean_the_same(dtype):
    expected = PackingSampler(LENGTHS.tolist(), 100, 2, cost=LENGTHS * 2.0, window=9)
    sampler = PackingSampler(
        LENGTHS.astype(dtype), 100, 2, cost=(LENGTHS * 2).astype(dtype), window=9
    )
    assert list(sampler) == list(expected)
    sampler.load_state_dict(expected.state_dict())


def test_a_state_of_other_documents_is_refused():
    state = PackingSampler(LENGTHS, 100).state_dict()
    for other in (
        PackingSampler(LENGTHS + 1, 101),
        PackingSampler(LENGTHS, 101),
        PackingSampler(LENGTHS, 100, seed=1),
        PackingSampler(LENGTHS, 100, window=7),
        PackingSampler(LENGTHS, 100, shuffle=False),
        PackingSampler(LENGTHS, 100, cost=COSTS),
        PackingSampler(LENGTHS, 100, 2),
    ):
        with pytest.raises(StateError, match="another order"):
            other.load_state_dict(state)


def test_a_loader_of_other_documents_names_the_sampler():
    batches = PackingSampler([5, 3, 4], max_tokens=8, seed=7)
    with pytest.raises(ConfigError, match=r"^PackingSampler was made for a dataset of 3 samples"):
        Loader([[1], [2]], batch_sampler=batches, collate_fn=list)
