# SPDX-License-Identifier: Apache-2.0
"""The core's collate against torch's."""

from __future__ import annotations

import collections
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.collate import default_collate
from penstock.errors import CollateError
from penstock.torch import DataLoader

Point = collections.namedtuple("Point", "x y")


class Tagged(dict):
    tag = "kept"


def as_arrays(tree):
    """torch's batch with arrays in the place of tensors."""
    if isinstance(tree, torch.Tensor):
        return tree.numpy()
    if isinstance(tree, dict):
        return type(tree)({key: as_arrays(value) for key, value in tree.items()})
    if isinstance(tree, types.MappingProxyType):
        return types.MappingProxyType({key: as_arrays(value) for key, value in tree.items()})
    if isinstance(tree, Point):
        return Point(*map(as_arrays, tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(as_arrays, tree))
    return tree


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    elif isinstance(a, collections.abc.Mapping):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b


leaves = st.sampled_from(
    [
        lambda i: i,
        lambda i: i / 2,
        lambda i: i % 2 == 0,
        lambda i: f"s{i}",
        lambda i: b"b" * i,
        lambda i: np.float32(i),
        lambda i: np.int8(i),
        lambda i: np.bool_(i % 2),
        lambda i: np.full((2, 3), i, np.int16),
        lambda i: np.full((), i, np.float64),
        lambda i: np.empty((0, 2), np.uint8),
    ]
)
samplers = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda fs: lambda i: [f(i) for f in fs]),
        st.lists(inner, min_size=1, max_size=3).map(lambda fs: lambda i: tuple(f(i) for f in fs)),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(
            lambda d: lambda i: {k: f(i) for k, f in d.items()}
        ),
        st.tuples(inner, inner).map(lambda p: lambda i: Point(p[0](i), p[1](i))),
        inner.map(lambda f: lambda i: types.MappingProxyType({"key": f(i)})),
        inner.map(lambda f: lambda i: Tagged(key=f(i))),
    ),
    max_leaves=6,
)


@given(make=samplers, size=st.integers(1, 5))
def test_the_batch_is_torchs_with_arrays_for_tensors(make, size):
    samples = [make(i) for i in range(size)]
    assert_same(as_arrays(torch.utils.data.default_collate(samples)), default_collate(samples))


def test_arrays_of_strings_stack_where_no_tensor_is_asked_for():
    assert default_collate([np.array(["a"]), np.array(["b"])]).tolist() == [["a"], ["b"]]


def test_different_shapes_name_both_samples_and_both_shapes():
    with pytest.raises(CollateError) as caught:
        default_collate([np.zeros((3, 4)), np.zeros((3, 4)), np.zeros((3, 5))])
    assert str(caught.value).startswith(
        "stack expects each tensor to be equal size, but sample 0 of the batch has shape (3, 4) "
        "and sample 2 of the batch has shape (3, 5). Crop, resize or pad them in the dataset"
    )


def test_different_lengths_name_both_samples():
    with pytest.raises(CollateError, match="sample 0 of the batch has 1 elements and sample 1"):
        default_collate([[1], [1, 2]])


@pytest.mark.parametrize("leaf", [None, object(), {1, 2}])
def test_a_leaf_that_nothing_takes_is_named(leaf):
    with pytest.raises(TypeError, match=f"found {type(leaf)}"):
        default_collate([leaf])


def test_what_is_no_array_where_the_first_sample_has_one_is_stacked_if_it_fits():
    assert default_collate([np.zeros(2), [1.0, 2.0]]).tolist() == [[0, 0], [1, 2]]
    with pytest.raises(CollateError, match=r"\(2,\) and sample 1 of the batch has shape \(\)"):
        default_collate([np.zeros(2), None])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_for_torch_a_list_beside_an_array_is_what_torch_makes_of_it(num_workers):
    rows = [np.zeros(2), [1.0, 2.0]]
    (batch,) = DataLoader(rows, batch_size=2, num_workers=num_workers)
    (expected,) = torch.utils.data.DataLoader(rows, batch_size=2)
    assert torch.equal(batch, expected)
    assert batch.dtype == expected.dtype
