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
    first = tensors(7)
    part = stock.Subset(first, [6, 0, -1, 3, 3, 5])
    return {
        "tensors": lambda: first,
        "subset": lambda: part,
        "subset of array": lambda: stock.Subset(first, np.array([1, 6, -2])),
        "subset of tensor": lambda: stock.Subset(first, torch.tensor([1, 6, -2])),
        "subset of range": lambda: stock.Subset(first, range(6, 0, -2)),
        "subset of subset": lambda: stock.Subset(part, [5, 1]),
        "bare tensor": lambda: torch.arange(24).view(8, 3),
        "bare row": lambda: torch.arange(8) * 0.5,
    }[kind]()


KINDS = [
    "tensors", "subset", "subset of array", "subset of tensor", "subset of range",
    "subset of subset", "bare tensor", "bare row",
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
    dataset = stock.TensorDataset(values, values[:, 0], values.T.contiguous().T, values[:, :0])
    if dtype is torch.complex128:  # no integer is as large
        assert batch_reader(dataset) is None
    else:
        assert_same(
            batch_reader(dataset)(np.array([7, 0, -1]), np.empty), by_sample(dataset, [7, 0, -1])
        )


def test_batches_lie_in_the_memory_given():
    given_out = []

    def alloc(shape, dtype):
        given_out.append(np.empty(shape, dtype))
        return given_out[-1]

    for kind in ("tensors", "subset"):
        given_out.clear()
        batch = batch_reader(build(kind))(np.array([0, 5, 3]), alloc)
        assert [leaf.data_ptr() for leaf in batch] == [array.ctypes.data for array in given_out]


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
    assert batch_reader(tensor) is None


def test_a_subset_of_the_numpy_core_becomes_tensors():
    dataset = stock.Subset(ArrayDataset(np.arange(6).reshape(3, 2)), [2, 0])
    batch = batch_reader(dataset)(np.array([0, 1]), np.empty)
    assert_same(batch, [torch.tensor([[4, 5], [0, 1]])])


def test_torchs_stacks_and_concatenations_are_read_by_the_sample():
    parts = [tensors(3), tensors(4, 1)]
    for dataset in (stock.ConcatDataset(parts), stock.StackDataset(parts[0], parts[0])):
        assert batch_reader(dataset) is None


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
