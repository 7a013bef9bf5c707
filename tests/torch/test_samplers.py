# SPDX-License-Identifier: Apache-2.0
"""Every index, and every generator at every step, as with torch's samplers."""

import numpy as np
import pytest
import torch
import torch.utils.data as stock

from penstock.torch.samplers import index_batches, stock_indices

WEIGHTS = [0.1, 0.0, 3.0, 1.0, 0.5, 2.0, 0.7]
# Arguments of each sampler, and how much of a generator it takes.
CASES = {
    "sequential": ("SequentialSampler", (range(7),), {}),
    "sequential empty": ("SequentialSampler", ([],), {}),
    "random": ("RandomSampler", (range(7),), {}),
    "random one": ("RandomSampler", (range(1),), {}),
    "random fewer": ("RandomSampler", (range(7),), {"num_samples": 3}),
    "random twice": ("RandomSampler", (range(7),), {"num_samples": 14}),
    "random more": ("RandomSampler", (range(7),), {"num_samples": 17}),
    "random large": ("RandomSampler", (range(4200),), {}),
    "replacement": ("RandomSampler", (range(7),), {"replacement": True}),
    "replacement 32": ("RandomSampler", (range(7),), {"replacement": True, "num_samples": 32}),
    "replacement 70": ("RandomSampler", (range(7),), {"replacement": True, "num_samples": 70}),
    "subset": ("SubsetRandomSampler", ([5, 0, 9, 9],), {}),
    "subset range": ("SubsetRandomSampler", (range(3, 20, 3),), {}),
    "subset empty": ("SubsetRandomSampler", ([],), {}),
    "subset keys": ("SubsetRandomSampler", (["a", "b", "c"],), {}),
    "subset bool": ("SubsetRandomSampler", ([True, False, 3],), {}),
    "subset huge": ("SubsetRandomSampler", ([1 << 80, 2],), {}),
    "subset array": ("SubsetRandomSampler", (np.arange(5, dtype=np.int32),), {}),
    "weighted": ("WeightedRandomSampler", (WEIGHTS, 9), {}),
    "weighted once": ("WeightedRandomSampler", (WEIGHTS, 6, False), {}),
    "distributed": ("DistributedSampler", (range(10), 3, 1), {"seed": 5}),
    "distributed plain": ("DistributedSampler", (range(10), 3, 2), {"shuffle": False}),
    "distributed drop": ("DistributedSampler", (range(10), 3, 2), {"drop_last": True}),
    "distributed tiny": ("DistributedSampler", (range(2), 7, 5), {}),
    "distributed empty": ("DistributedSampler", ([], 2, 0), {}),
}


def make(case, *, own_generator):
    name, args, kwargs = CASES[case]
    if not own_generator or name in ("SequentialSampler", "DistributedSampler"):
        return getattr(stock, name)(*args, **kwargs), None
    generator = torch.Generator().manual_seed(3)
    return getattr(stock, name)(*args, **kwargs, generator=generator), generator


def trace(iterable, generator):
    """Each item, with the state of both generators after it; then the states at the end."""

    def state():
        own = None if generator is None else generator.get_state().numpy().tobytes()
        return torch.get_rng_state().numpy().tobytes(), own

    torch.manual_seed(11)
    seen = []
    for _ in range(2):  # epochs
        iterator = iter(iterable())
        seen.append((None, state()))
        for item in iterator:
            plain = item.tolist() if type(item) is np.ndarray else item
            seen.append((plain, state()))
        seen.append(("end", state()))
    return seen


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_indices_are_yielded_and_drawn_as_the_sampler_does(case, own_generator):
    theirs, their_generator = make(case, own_generator=own_generator)
    mine, my_generator = make(case, own_generator=own_generator)
    expected = trace(lambda: theirs, their_generator)
    assert trace(lambda: stock_indices(mine), my_generator) == expected


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_index_batches_yield_and_draw_as_torchs_batch_sampler(case, drop_last, own_generator):
    for batch_size in (1, 3, 7, 100):
        theirs, their_generator = make(case, own_generator=own_generator)
        mine, my_generator = make(case, own_generator=own_generator)
        reference = stock.BatchSampler(theirs, batch_size, drop_last)
        sampler = stock.BatchSampler(mine, batch_size, drop_last)
        expected = trace(lambda reference=reference: reference, their_generator)
        found = trace(lambda sampler=sampler: index_batches(sampler), my_generator)
        assert found == expected


@pytest.mark.parametrize(
    "case", [case for case in CASES if CASES[case][0] != "SubsetRandomSampler"]
)
def test_known_orders_come_as_int64_arrays(case):
    sampler, _ = make(case, own_generator=False)
    batches = list(index_batches(stock.BatchSampler(sampler, 4, drop_last=False)))
    assert all(type(batch) is np.ndarray and batch.dtype == np.int64 for batch in batches)


def test_a_subset_of_integers_comes_as_arrays_and_of_others_as_they_are():
    def batch(indices):
        sampler = stock.SubsetRandomSampler(indices)
        return next(iter(index_batches(stock.BatchSampler(sampler, 9, drop_last=False))))

    assert type(batch([4, 5])) is type(batch(range(3))) is np.ndarray
    assert sorted(map(type, batch([True, 5])), key=str) == [bool, int]
    assert {type(index) for index in batch(np.arange(3))} == {np.int64}
    assert {type(index) for index in batch(torch.arange(3))} == {torch.Tensor}


class Backwards(stock.SequentialSampler):
    def __iter__(self):
        return iter(range(len(self.data_source) - 1, -1, -1))


class Pairs(stock.BatchSampler):
    def __iter__(self):
        yield [0, 0]


@pytest.mark.parametrize(
    ("batch_sampler", "expected"),
    [
        (stock.BatchSampler(Backwards(range(3)), 2, False), [[2, 1], [0]]),
        (stock.BatchSampler("abc", 2, False), [["a", "b"], ["c"]]),
        (Pairs(stock.SequentialSampler(range(3)), 2, False), [[0, 0]]),
        ([[1, 2], [0]], [[1, 2], [0]]),
    ],
)
def test_other_samplers_are_simply_iterated(batch_sampler, expected):
    assert list(index_batches(batch_sampler)) == expected


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("change", [-3, 5])
def test_a_dataset_that_changed_its_length_is_refused_where_torch_does(drop_last, change):
    def outcome(indices_of):
        data = list(range(10))
        sampler = stock.DistributedSampler(data, 2, 0, shuffle=False, drop_last=drop_last)
        data[:] = range(10 + change)
        try:
            return list(indices_of(sampler))
        except AssertionError:
            return "refused"

    assert outcome(stock_indices) == outcome(iter)


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0]])
def test_weights_that_cannot_be_drawn_raise_at_the_first_index_as_in_torch(weights):
    sampler = stock.WeightedRandomSampler(weights, 1)
    batches = index_batches(stock.BatchSampler(sampler, 1, drop_last=False))
    for iterator in (iter(sampler), stock_indices(sampler), batches):
        with pytest.raises(RuntimeError):
            next(iterator)
