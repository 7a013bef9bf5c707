# SPDX-License-Identifier: Apache-2.0
"""Datasets of datasets: as torch's, and by the batch as by the sample."""

import numpy as np
import pytest
import torch
import torch.utils.data as stock
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import data as ours
from penstock.collate import default_collate
from penstock.data import (
    ArrayDataset,
    ChainDataset,
    ConcatDataset,
    IterableDataset,
    StackDataset,
    Subset,
    random_split,
)
from penstock.data.dataset import batch_reader
from penstock.errors import CollateError, ConfigError


def arrays(length, seed=0):
    rng = np.random.default_rng(seed)
    return ArrayDataset(
        rng.integers(0, 1 << 40, length),
        rng.random((length, 2, 3), np.float32),
        rng.random(length) < 0.5,
    )


def assert_same(left, right):
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    else:
        assert left == right


def nested(depth_first):
    base = [arrays(7, 1), arrays(0, 2), arrays(5, 3)]
    whole = ConcatDataset(base)
    part = Subset(whole, [11, 0, -1, 3, 3, 8])
    return {
        "array": base[0],
        "strided": ArrayDataset(
            np.asfortranarray(np.arange(24).reshape(8, 3)), np.arange(16)[::-2]
        ),
        "concat": whole,
        "subset": part,
        "stack": StackDataset(part, Subset(whole, range(6))),
        "named stack": StackDataset(left=part, right=Subset(base[0], np.arange(6, dtype=np.int32))),
        "stack of stacks": StackDataset(ConcatDataset([part, part]), StackDataset(x=whole)),
    }[depth_first]


KINDS = ["array", "strided", "concat", "subset", "stack", "named stack", "stack of stacks"]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(draw=st.data())
def test_a_batch_equals_its_collated_samples(kind, draw):
    dataset = nested(kind)
    length = len(dataset)
    indices = draw.draw(st.lists(st.integers(-length, length - 1), min_size=1, max_size=20))
    batch = batch_reader(dataset)(np.array(indices), np.empty)
    assert_same(batch, default_collate([dataset[index] for index in indices]))
    assert_same(batch, default_collate(dataset.__getitems__(indices)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beyond", [-1, 1])
def test_an_index_out_of_range_raises_the_same_either_way(kind, beyond):
    dataset = nested(kind)
    index = len(dataset) if beyond > 0 else -len(dataset) - 1
    with pytest.raises((IndexError, ValueError)) as by_sample:
        dataset[index]
    with pytest.raises(by_sample.type, match=r"out of (range|bounds)"):
        dataset.get_batch(np.array([0, index]), np.empty)


def test_arrays_land_in_the_memory_given():
    given_out = []

    def alloc(shape, dtype):
        given_out.append(np.full(shape, 99, dtype))
        return given_out[-1]

    batch = nested("concat").get_batch(np.array([11, 0, -3]), alloc)
    assert all(a is b for a, b in zip(batch, given_out, strict=True))


@pytest.mark.parametrize("bad", [[], [np.zeros(2), np.zeros(3)], [np.float64(1)]])
def test_array_dataset_refuses_what_has_no_common_length(bad):
    with pytest.raises(ConfigError, match="ArrayDataset takes one or more arrays"):
        ArrayDataset(*bad)


@pytest.mark.parametrize("dtype", ["U3", "S3", object, ">f4", "M8[s]"])
def test_arrays_that_are_no_plain_numbers_go_by_the_sample(dtype):
    assert batch_reader(ArrayDataset(np.zeros(3, dtype))) is None


def test_parts_of_unlike_dtypes_are_collated_as_samples():
    dataset = ConcatDataset([ArrayDataset(np.zeros(2, np.float32)), ArrayDataset(np.ones(2))])
    (batch,) = dataset.get_batch(np.array([0, 3]), np.empty)
    assert batch.dtype == np.float64
    assert batch.tolist() == [0, 1]


def test_parts_of_unlike_shapes_raise_and_name_both_samples():
    dataset = ConcatDataset([ArrayDataset(np.zeros((2, 3))), ArrayDataset(np.zeros((2, 4)))])
    with pytest.raises(CollateError, match=r"sample 1 .*\(3,\).*sample 2 .*\(4,\)"):
        dataset.get_batch(np.array([1, 2]), np.empty)


MODULES = [pytest.param(ours, id="penstock"), pytest.param(stock, id="torch")]


class Numbers:
    def __init__(self, length, *, short=False):
        self.length, self.short = length, short

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index

    def __getitems__(self, indices):
        return indices[1:] if self.short else list(indices)


# The same test on torch's module shows that the expectation is torch's.
@pytest.mark.parametrize("module", MODULES)
class TestAsInTorch:
    def test_stack_refuses_both_forms_none_and_unlike_lengths(self, module):
        for args, kwargs in [((), {}), (([1],), {"a": [1]}), (([1], [1, 2]), {})]:
            with pytest.raises(ValueError):  # noqa: PT011 - torch's words differ
                module.StackDataset(*args, **kwargs)

    def test_stack_gives_tuples_or_dicts(self, module):
        assert module.StackDataset([1, 2], "ab")[1] == (2, "b")
        assert module.StackDataset(x=[1, 2], y="ab")[1] == {"x": 2, "y": "b"}
        assert module.StackDataset([1, 2], "ab").__getitems__([1, 0]) == [(2, "b"), (1, "a")]
        assert module.StackDataset(x=[1, 2]).__getitems__([1]) == [{"x": 2}]
        assert len(module.StackDataset([1, 2])) == 2

    def test_stack_refuses_a_part_that_returns_too_few(self, module):
        with pytest.raises(ValueError, match="output size mismatch"):
            module.StackDataset(Numbers(3, short=True)).__getitems__([0, 1])

    def test_concat_refuses_nothing_and_streams(self, module):
        with pytest.raises(AssertionError):
            module.ConcatDataset([])
        with pytest.raises(AssertionError, match="does not support IterableDataset"):
            module.ConcatDataset([[1], module.ChainDataset([])])

    def test_concat_counts_from_both_ends(self, module):
        dataset = module.ConcatDataset([[1, 2], [], [3]])
        assert [dataset[i] for i in (0, 2, -1, -3)] == [1, 3, 3, 1]
        assert (len(dataset), dataset.cumulative_sizes) == (3, [2, 2, 3])
        with pytest.raises(IndexError):
            dataset[3]
        with pytest.raises(ValueError, match="should not exceed dataset length"):
            dataset[-4]

    def test_chain_refuses_maps_when_their_turn_comes(self, module):
        class Stream(module.IterableDataset):
            def __iter__(self):
                return iter("ab")

            def __len__(self):
                return 2

        assert list(module.ChainDataset([Stream(), Stream()])) == list("abab")
        assert len(module.ChainDataset([Stream(), Stream()])) == 4
        stream = iter(module.ChainDataset([Stream(), [1]]))
        assert [next(stream), next(stream)] == ["a", "b"]
        with pytest.raises(AssertionError, match="only supports IterableDataset"):
            next(stream)

    def test_subset_takes_any_keys(self, module):
        part = module.Subset({"a": 1, "b": 2}, ["b", "a"])
        assert (part[0], part.__getitems__([1, 0]), len(part)) == (2, [1, 2], 2)

    def test_subset_hands_on_python_integers_and_lists(self, module):
        part = module.Subset(Numbers(9), [4, 7, 8])
        assert (part[-1], part[[0, 1]], part.__getitems__([2, 0])) == (8, [4, 7], [8, 4])
        assert type(part[0]) is int
        with pytest.raises(IndexError):
            part[3]

    def test_subset_refuses_a_subclass_that_changes_half(self, module):
        if module is stock and torch.__version__ < (2, 13):
            pytest.skip("torch 2.6 to 2.8 take it")

        class Half(module.Subset):
            def __getitem__(self, index):
                return 0

        class Whole(Half):
            def __getitems__(self, indices):
                return [0 for _ in indices]

        with pytest.raises(NotImplementedError, match="overrides __getitem__ but not __getitems__"):
            Half([1], [0])
        assert Whole([1], [0])[0] == 0

    @pytest.mark.parametrize(
        ("lengths", "expected"),
        [
            ([3, 7], [3, 7]),
            ([0.3, 0.7], [3, 7]),
            ([0.25, 0.25, 0.5], [3, 2, 5]),
            ([0.33, 0.33, 0.34], [4, 3, 3]),
            ([10], [10]),
            ([1], [10]),
        ],
    )
    def test_random_split_has_these_sizes(self, module, lengths, expected):
        parts = module.random_split(range(10), lengths)
        assert [len(part) for part in parts] == expected
        assert sorted(i for part in parts for i in part.indices) == list(range(10))

    @pytest.mark.parametrize("lengths", [[3, 8], [0.5, 0.4], [-1, 11, 1], [1.5, -0.5], [2, 2]])
    def test_random_split_refuses_lengths_that_do_not_add_up(self, module, lengths):
        with pytest.raises(ValueError):  # noqa: PT011 - torch's words differ
            module.random_split(range(10), lengths)


def test_random_split_depends_on_its_seed_alone():
    splits = [random_split(range(50), [20, 30], seed) for seed in (1, 1, 2)]
    first = [part.indices.tolist() for part in splits[0]]
    assert first == [part.indices.tolist() for part in splits[1]]
    assert first != [part.indices.tolist() for part in splits[2]]


@pytest.mark.parametrize(
    "indices", [[1, 2], (1, 2), range(1, 3), np.array([1, 2], np.int8), [np.int64(1), 2]]
)
def test_a_subset_keeps_integers_as_one_array_of_its_own(indices):
    part = Subset("abc", indices)
    assert part.indices.dtype == np.int64
    assert part.indices is not indices
    assert [part[0], part[1]] == ["b", "c"]


@pytest.mark.parametrize("indices", [["a"], [True, False], [(0, 1)], [1.0], [[1]], [1 << 80]])
def test_a_subset_keeps_other_indices_as_they_are(indices):
    assert Subset({}, indices).indices is indices


def test_a_stream_may_be_chained_without_length():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([1])

    with pytest.raises(TypeError):
        len(ChainDataset([Stream()]))
