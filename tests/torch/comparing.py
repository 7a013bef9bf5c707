# SPDX-License-Identifier: Apache-2.0
"""Two batches are the same: structure, types, dtypes, shapes, strides and every bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch

__all__ = ["assert_same"]


def assert_same(expected, got, path="batch"):
    """Fail, naming the place in the tree, unless both are the same down to the last bit."""
    assert type(got) is type(expected), f"{path}: {type(got)} instead of {type(expected)}"
    if isinstance(expected, torch.Tensor):
        _assert_same_tensor(expected, got, path)
    elif isinstance(expected, np.ndarray):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), path
        assert got.flags.f_contiguous == expected.flags.f_contiguous, path
        assert got.flags.writeable == expected.flags.writeable, path
        if expected.dtype.hasobject:
            assert_same(expected.tolist(), got.tolist(), path)
        else:
            assert got.tobytes() == expected.tobytes(), path
    elif isinstance(expected, Mapping):
        assert list(got) == list(expected), path
        for key in expected:
            assert_same(expected[key], got[key], f"{path}[{key!r}]")
    elif isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
        assert len(got) == len(expected), path
        for position, (one, other) in enumerate(zip(expected, got, strict=True)):
            assert_same(one, other, f"{path}[{position}]")
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(
                getattr(expected, field.name), getattr(got, field.name), f"{path}.{field.name}"
            )
    elif isinstance(expected, float) and np.isnan(expected):
        assert np.isnan(got), path
    else:
        assert got == expected, f"{path}: {got!r} instead of {expected!r}"


def _assert_same_tensor(expected, got, path):
    assert got.layout is expected.layout, path
    assert got.dtype is expected.dtype, path
    assert got.requires_grad == expected.requires_grad, path
    assert got.is_leaf == expected.is_leaf, path
    assert got.is_nested == expected.is_nested, path
    if expected.is_nested:  # has neither a shape nor strides to ask for
        for position, (one, other) in enumerate(zip(expected.unbind(), got.unbind(), strict=True)):
            assert_same(one, other, f"{path}[{position}]")
        return
    assert got.shape == expected.shape, path
    assert vars(got) == vars(expected), path
    if expected.layout is torch.strided:
        if _has_no_gaps(
            expected
        ):  # of a view with gaps we send what it shows, torch all it lies in
            assert got.stride() == expected.stride(), path
        assert _bits(got) == _bits(expected), path
    else:
        if expected.layout is torch.sparse_coo:
            assert got.is_coalesced() == expected.is_coalesced(), path
        _assert_same_tensor(expected.to_dense(), got.to_dense(), path)


def _has_no_gaps(tensor):
    steps = [(s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1 and s > 0]
    expected_step = 1
    for step, length in sorted(steps):
        if step != expected_step:
            return False
        expected_step *= length
    return True


def _bits(tensor):
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
