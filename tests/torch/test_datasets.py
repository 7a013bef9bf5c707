# SPDX-License-Identifier: Apache-2.0
"""A batch read at once is what torch's default_collate makes of the samples."""

import numpy as np
import pytest
import torch
import torch.utils.data as stock
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.torch
from penstock.data import ArrayDataset
from penstock.data.dataset import batch_reader

DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.float16, torch.float32, torch.float64, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
]  # fmt: skip


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
    elif isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert (
            left.contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(right.contiguous().view(-1).view(torch.uint8))
        )
    else:
        assert left == right


def by_sample(dataset, indices):
    many = getattr(dataset, "__getitems__", None)
    return stock.default_collate(many(indices) if many else [dataset[i] for i in indices])


def tensors(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return stock.TensorDataset(
        torch.randn(length, 2, 3, generator=generator),
        torch.randint(0, 9, (length,), generator=generator),
        torch.randn(length, 2, generator=generator).to(torch.bfloat16),
    )


def build(kind):
    first, second, none = tensors(7), tensors(5, 1), tensors(0)
    whole = stock.ConcatDataset([first, none, second])
    part = stock.Subset(whole, [11, 0, -1, 3, 3, 8])
    return {
        "tensors": lambda: first,
        "concat": lambda: whole,
        "concat of one": lambda: stock.ConcatDataset([first]),
        "subset": lambda: part,
        "subset of array": lambda: stock.Subset(whole, np.array([1, 9, -2])),
        "subset of tensor": lambda: stock.Subset(first, torch.tensor([1, 6, -2])),
        "subset of range": lambda: stock.Subset(first, range(6, 0, -2)),
        "subset of subset": lambda: stock.Subset(part, [5, 1]),
        "stack": lambda: stock.StackDataset(part, stock.Subset(first, range(6))),
        "named stack": lambda: stock.StackDataset(left=part, right=stock.Subset(second, [0] * 6)),
        "concat of stacks": lambda: stock.ConcatDataset(2 * [stock.StackDataset(a=first)]),
        "bare tensor": lambda: torch.arange(24).view(8, 3),
        "bare row": lambda: torch.arange(8) * 0.5,
        "stack of bare": lambda: stock.StackDataset(torch.arange(4), first.tensors[0][:4]),
    }[kind]()


KINDS = [
    "tensors", "concat", "concat of one", "subset", "subset of array", "subset of tensor",
    "subset of range", "subset of subset", "stack", "named stack", "concat of stacks",
    "bare tensor", "bare row", "stack of bare",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_batch_equals_its_collated_samples(kind, data):
    dataset = build(kind)
    length = len(dataset)
    indices = data.draw(st.lists(st.integers(-length, length - 1), min_size=1, max_size=20))
    batch = batch_reader(dataset)(np.array(indices), np.empty)
    assert_same(batch, by_sample(build(kind), indices))


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_or_missing_index_raises_as_it_does_by_the_sample(kind):
    dataset = build(kind)
    for indices in ([0, len(dataset)], [0, -len(dataset) - 1], []):
        with pytest.raises((IndexError, ValueError)) as expected:
            by_sample(dataset, indices)
        with pytest.raises(expected.type):
            batch_reader(dataset)(np.array(indices, np.int64), np.empty)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_through_bit_for_bit(dtype):
    values = torch.arange(24).view(8, 3).to(dtype)
    for dataset in (
        stock.TensorDataset(values, values[:, 0], values.T.contiguous().T, values[:, :0]),
        stock.ConcatDataset([stock.TensorDataset(values), stock.TensorDataset(values[:3])]),
    ):
        if dtype is torch.complex128:  # no integer is as large
            assert batch_reader(dataset) is None
        else:
            batch = batch_reader(dataset)(np.array([7, 0, -1]), np.empty)
            assert_same(batch, by_sample(dataset, [7, 0, -1]))


def test_batches_lie_in_the_memory_given():
    given_out = []

    def alloc(shape, dtype):
        given_out.append(np.empty(shape, dtype))
        return given_out[-1]

    for kind in ("tensors", "concat", "stack"):
        given_out.clear()
        batch = batch_reader(build(kind))(np.array([0, 5, 3]), alloc)
        leaves = [leaf for part in batch for leaf in (part if isinstance(part, list) else [part])]
        assert [leaf.data_ptr() for leaf in leaves] == [array.ctypes.data for array in given_out]


def test_read_only_and_reversed_index_arrays_are_taken():
    indices = np.arange(4)
    indices.flags.writeable = False
    for chosen in (indices, indices[::-1], indices[::2]):
        batch = batch_reader(tensors(5))(chosen, np.empty)
        assert_same(batch, by_sample(tensors(5), chosen.tolist()))


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, requires_grad=True),
        torch.nn.Parameter(torch.zeros(3), requires_grad=False),
        torch.eye(3).to_sparse(),
        torch.zeros(3, dtype=torch.complex64).conj(),
        torch.zeros(3, device="meta"),
        torch.zeros(3).as_subclass(Tagged),
    ],
    ids=["grad", "parameter", "sparse", "conjugate", "meta", "subclass"],
)
def test_tensors_with_more_to_them_go_by_the_sample(tensor):
    dataset = stock.TensorDataset(torch.zeros(3), tensor)
    assert batch_reader(dataset) is None
    assert batch_reader(stock.Subset(dataset, [0])) is None
    assert batch_reader(stock.ConcatDataset([tensors(2), dataset])) is None
    assert batch_reader(stock.StackDataset(dataset)) is None
    assert batch_reader(tensor) is None


def test_parts_from_the_numpy_core_become_tensors():
    dataset = stock.StackDataset(x=ArrayDataset(np.arange(6).reshape(3, 2)), y=torch.arange(3))
    batch = batch_reader(dataset)(np.array([2, 0]), np.empty)
    assert_same(batch, {"x": [torch.tensor([[4, 5], [0, 1]])], "y": torch.tensor([2, 0])})


def test_parts_that_do_not_fit_are_collated_as_samples():
    mixed = stock.ConcatDataset([torch.zeros(2), torch.ones(2, dtype=torch.float64)])
    assert_same(batch_reader(mixed)(np.array([0, 3]), np.empty), by_sample(mixed, [0, 3]))
    uneven = stock.ConcatDataset([torch.zeros(2, 3), torch.zeros(2, 4)])
    with pytest.raises(RuntimeError, match="equal size"):
        batch_reader(uneven)(np.array([0, 3]), np.empty)
    unlike = stock.ConcatDataset([stock.StackDataset(a=torch.zeros(2)), torch.zeros(2)])
    with pytest.raises((TypeError, IndexError, RuntimeError, KeyError)) as expected:
        by_sample(unlike, [0, 3])
    with pytest.raises(expected.type):
        batch_reader(unlike)(np.array([0, 3]), np.empty)


def test_a_subclass_that_changes_samples_is_not_bypassed():
    class Doubled(stock.TensorDataset):
        def __getitem__(self, index):
            return tuple(2 * value for value in super().__getitem__(index))

    dataset = Doubled(torch.arange(3))
    assert batch_reader(dataset) is None
    assert batch_reader(stock.Subset(dataset, [1])) is None


def test_a_subclass_may_say_how_a_batch_is_read_or_that_it_is_not():
    class Own(stock.TensorDataset):
        def get_batch(self, indices, alloc):
            return ["own", indices.tolist()]

    class Single(stock.TensorDataset):
        get_batch = None

    assert batch_reader(Own(torch.arange(3)))(np.array([2]), np.empty) == ["own", [2]]
    assert batch_reader(Single(torch.arange(3))) is None


def test_a_subclass_with_a_length_of_its_own_has_the_samples_that_it_had():
    class Half(stock.TensorDataset):
        def __len__(self):
            return 2

    dataset = Half(torch.arange(4))
    assert_same(batch_reader(dataset)(np.array([-1, 3]), np.empty), by_sample(dataset, [-1, 3]))


def test_a_list_of_indices_may_change_between_batches():
    part = stock.Subset(tensors(5), [0, 1])
    reader = batch_reader(part)
    part.indices[0] = 4
    assert_same(reader(np.array([0]), np.empty), by_sample(part, [0]))


@pytest.mark.parametrize("name", penstock.torch.__all__)
def test_datasets_and_samplers_are_torchs_own(name):
    if name.endswith(("Dataset", "Subset", "Sampler", "random_split")):
        assert getattr(penstock.torch, name) is getattr(stock, name)
