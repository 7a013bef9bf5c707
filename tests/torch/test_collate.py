# SPDX-License-Identifier: Apache-2.0
"""The default collate for tensors makes what torch's own does, and refuses what that refuses."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from torch.utils.data import _utils
from torch.utils.data import default_collate as torchs

from penstock.errors import CollateError
from penstock.torch import DataLoader
from penstock.torch.collate import TensorCollator

SHAPES = arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
DTYPES = (
    "?", "u1", "i1", "i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16",
)  # fmt: skip


in_either_memory = pytest.mark.parametrize(
    "stays_here", [False, True], ids=["memory given", "torch's own memory"]
)


def ours(samples, *, stays_here=False):
    """Collate; what is handed out is full of what an earlier batch left there."""

    def used(shape, dtype):
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = 0xA5
        return array

    used.stays_here = stays_here
    return TensorCollator(used).batch(samples)


def assert_equal(batch, expected):
    assert type(batch) is type(expected)
    assert batch.dtype == expected.dtype
    assert batch.shape == expected.shape
    assert batch.numpy().tobytes() == expected.numpy().tobytes()


@st.composite
def same_arrays(draw):
    """Arrays of one shape and dtype, each with strides of its own."""
    shape = draw(SHAPES)
    dtype = draw(st.sampled_from(DTYPES))
    made = []
    for k in range(draw(st.integers(1, 4))):
        axes = draw(st.permutations(range(len(shape))))
        inner = np.arange(np.prod(shape, dtype=int) * 2).reshape(*(shape[a] for a in axes), 2)
        array = (inner + k).astype(dtype)[..., draw(st.integers(0, 1))]
        made.append(array.transpose(np.argsort(axes)))
    assert {array.shape for array in made} == {shape}
    return made


@in_either_memory
@given(same_arrays())
def test_arrays_become_the_tensor_that_torch_makes_of_them(stays_here, arrays):
    assert_equal(ours(arrays, stays_here=stays_here), torchs(arrays))


@in_either_memory
@given(same_arrays())
def test_tensors_become_the_tensor_that_torch_makes_of_them(stays_here, arrays):
    tensors = [torch.from_numpy(array) for array in arrays]
    assert_equal(ours(tensors, stays_here=stays_here), torchs(tensors))


@in_either_memory
def test_a_batch_is_contiguous_whatever_the_strides_of_its_samples(stays_here):
    samples = [torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)] * 2
    batch = ours(samples, stays_here=stays_here)
    assert batch.is_contiguous()
    assert_equal(batch, torchs(samples))


@pytest.mark.parametrize("convert", [np.asarray, torch.as_tensor])
@pytest.mark.parametrize("kinds", [("f4", "f8"), ("f8", "f4"), ("i8", "f4"), ("u1", "i4")])
def test_one_of_another_dtype_is_promoted_as_torch_does(convert, kinds):
    samples = [convert(np.arange(3, dtype=kind)) for kind in kinds]
    assert_equal(ours(samples), torchs(samples))


@pytest.mark.parametrize("convert", [np.asarray, torch.as_tensor])
def test_another_shape_is_refused_and_both_are_named(convert):
    samples = [convert(np.zeros(shape)) for shape in [(2, 3), (2, 3), (3, 2)]]
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        torchs(samples)
    with pytest.raises(
        CollateError, match=r"sample 0 .* \(2, 3\) and sample 2 .* \(3, 2\)\."
    ) as got:
        ours(samples)
    assert got.value.__context__ is None  # or the user reads of two errors


@pytest.mark.parametrize("length", [0, 3])
def test_arrays_go_to_the_device_that_torch_puts_them_on(length):
    samples = [np.ones(length), np.ones(length)]
    before = ours(samples)
    with torch.device("meta"):  # as set_default_device("cuda") does where there is one
        batch, expected = ours(samples), torchs(samples)
    assert (batch.device, batch.dtype, batch.shape) == (
        expected.device, expected.dtype, expected.shape,
    )  # fmt: skip
    assert_equal(ours(samples), before)


@in_either_memory
def test_a_gradient_goes_through_the_batch(stays_here):
    weight = torch.ones(3, requires_grad=True)
    for samples in ([torch.zeros(3), weight * 2], [weight * 2, torch.zeros(3)]):
        weight.grad = None
        ours(samples, stays_here=stays_here).sum().backward()
        assert weight.grad.tolist() == [2.0, 2.0, 2.0]


def test_a_memmap_s_rows_are_copied(tmp_path):
    table = np.memmap(tmp_path / "table", np.float32, "w+", shape=(4, 3))
    table[:] = np.arange(12).reshape(4, 3)
    batch = ours(list(table))
    table[:] = 0
    assert batch.tolist() == np.arange(12.0).reshape(4, 3).tolist()


class Marked(np.ndarray):
    """A subclass of arrays."""


def test_an_array_of_a_subclass_is_what_torch_makes_of_it():
    samples = [np.arange(3.0), np.arange(3.0).view(Marked)]
    assert_equal(ours(samples), torchs(samples))


def test_arrays_that_torch_refuses_or_warns_of_are_copied_all_the_same():
    fixed = np.arange(3)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="strides"):
        torchs([np.arange(3), np.arange(3)[::-1]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ours([np.arange(3)[::-1], fixed]).tolist() == [[2, 1, 0], [0, 1, 2]]


@pytest.mark.parametrize(
    "array", [np.zeros(2, "M8[s]"), np.zeros(2, ">i4"), np.zeros(2, [("a", "i4")])]
)
def test_an_array_that_has_no_tensor_type_is_refused_as_torch_does(array):
    with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever torch raises
        torchs([array])
    with pytest.raises(type(expected.value)) as caught:
        ours([array])
    assert str(caught.value) == str(expected.value)


@pytest.mark.parametrize("kind", [torch.Tensor, np.ndarray])
def test_the_user_s_own_function_in_torch_s_registry_is_asked(monkeypatch, kind):
    def own(samples, *, collate_fn_map=None):
        return "the user's", len(samples)

    monkeypatch.setitem(_utils.collate.default_collate_fn_map, kind, own)
    assert ours([np.zeros(2), np.zeros(2)]) == ("the user's", 2)


class Registered:
    """A collate function that cannot be hashed."""

    __hash__ = None

    def __call__(self, samples, *, collate_fn_map):
        return [*samples]


def test_functions_of_the_users_need_not_be_hashable(monkeypatch):
    kind = type("Kind", (), {})
    monkeypatch.setitem(_utils.collate.default_collate_fn_map, kind, Registered())
    samples = [kind(), kind()]
    assert ours(samples) == samples


def test_sparse_tensors_are_refused_in_torchs_words():
    with pytest.raises(RuntimeError) as expected:
        torchs([torch.eye(2).to_sparse()])
    loader = DataLoader([torch.eye(2).to_sparse()])
    with pytest.raises(RuntimeError) as refused:
        next(iter(loader))
    assert str(refused.value) == str(expected.value)


class Nests:
    """Iterates a loader in a worker."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        (batch,) = DataLoader([torch.ones(3)] * 2, batch_size=2)
        return batch.is_shared()


def test_a_loader_in_a_worker_makes_no_shared_files():
    assert [batch.item() for batch in DataLoader(Nests(), num_workers=1)] == [False, False]
