# SPDX-License-Identifier: Apache-2.0
"""Numbers are collated as by torch, bit for bit, wherever numpy would have made something else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from penstock.torch import DataLoader
from penstock.torch.worker import collator


def ours(values):
    return collator(np.empty).batch(values)


def outcome(collate, values):
    """Return a batch and its dtype, or the type of what is raised."""
    try:
        batch = collate(list(values))
    except Exception as error:
        return type(error)
    return batch.dtype, batch.tolist()


NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.booleans(),
    st.floats(),
    st.builds(np.int32, st.integers(-(2**31), 2**31 - 1)),
    st.builds(np.float32, st.floats(width=32)),
    st.builds(torch.tensor, st.integers(0, 9)),
    st.complex_numbers(max_magnitude=10),
    st.just("text"),
    st.lists(st.integers(0, 9), max_size=2),
)


@given(st.one_of(st.integers(-(2**66), 2**66), st.booleans(), st.floats()), st.lists(NUMBERS))
def test_any_mixture_is_what_torch_makes_of_it(first, others):
    values = [first, *others]
    assert repr(outcome(ours, values)) == repr(outcome(default_collate, values))  # nan as well


@pytest.mark.parametrize("values", [[1, 2, 3], [0.5, 1.5]])
def test_the_memory_is_torchs_own(values):
    batch = ours(values)
    assert batch.resize_(8).shape == (8,)
    assert not batch.requires_grad


def test_the_default_device_is_heeded():
    with torch.device("meta"):
        assert ours([1, 2]).device.type == "meta"
        assert ours([1.0, 2.0]).dtype == torch.float64


class Registered:
    """A collate function that cannot be hashed."""

    __hash__ = None

    def __call__(self, samples, *, collate_fn_map):
        return [*samples]


def test_functions_of_the_users_need_not_be_hashable(monkeypatch):
    kind = type("Kind", (), {})
    monkeypatch.setitem(default_collate_fn_map, kind, Registered())
    samples = [kind(), kind()]
    assert ours(samples) == samples


def test_sparse_tensors_are_refused_in_torchs_words():
    with pytest.raises(RuntimeError) as expected:
        default_collate([torch.eye(2).to_sparse()])
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
