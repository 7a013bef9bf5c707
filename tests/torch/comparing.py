# SPDX-License-Identifier: Apache-2.0
"""Two batches are the same as torch's: every bit, and strides, gradients and flags."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from tests.support import comparing

__all__ = ["assert_same"]


def _assert_same_leaf(expected, got, path):
    if isinstance(expected, torch.Tensor):
        _assert_same_tensor(expected, got, path)
    else:
        if isinstance(expected, np.ndarray):
            assert got.flags.f_contiguous == expected.flags.f_contiguous, path
            assert got.flags.writeable == expected.flags.writeable, path
        comparing.assert_same_leaf(expected, got, path)


assert_same = partial(comparing.assert_same, compare=_assert_same_leaf)


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
