# SPDX-License-Identifier: Apache-2.0
"""Two trees of samples or batches are the same: structure, types, dtypes, shapes and every bit."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence

import numpy as np


def assert_same(expected, got, path="batch", *, compare=None):
    """Fail, naming the place in the tree, unless both are the same.

    Args:
        expected: What ought to be there.
        got: What is there.
        path: Name of the place.
        compare: Compares what is no container, by the same arguments; `assert_same_leaf` if None.
    """
    assert type(got) is type(expected), f"{path}: {type(got)} instead of {type(expected)}"
    if isinstance(expected, Mapping):
        assert list(got) == list(expected), path
        for key in expected:
            assert_same(expected[key], got[key], f"{path}[{key!r}]", compare=compare)
    elif isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
        assert len(got) == len(expected), path
        for position, (one, other) in enumerate(zip(expected, got, strict=True)):
            assert_same(one, other, f"{path}[{position}]", compare=compare)
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            one, other = (getattr(tree, field.name) for tree in (expected, got))
            assert_same(one, other, f"{path}.{field.name}", compare=compare)
    else:
        (compare or assert_same_leaf)(expected, got, path)


def assert_same_leaf(expected, got, path):
    """Fail unless two arrays, tensors or other values of one type are the same."""
    torch = sys.modules.get("torch")  # many tests do without
    if isinstance(expected, np.ndarray):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), path
        if expected.dtype.hasobject:
            assert_same(expected.tolist(), got.tolist(), path)
        else:
            assert got.tobytes() == expected.tobytes(), path
    elif torch is not None and isinstance(expected, torch.Tensor):
        assert (got.dtype, got.stride()) == (expected.dtype, expected.stride()), path
        assert torch.equal(got, expected), path
    elif isinstance(expected, float):
        is_same = np.float64(got).tobytes() == np.float64(expected).tobytes()
        assert is_same or (np.isnan(got) and np.isnan(expected)), path
    else:
        assert got == expected, f"{path}: {got!r} instead of {expected!r}"
