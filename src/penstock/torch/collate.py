# SPDX-License-Identifier: Apache-2.0
"""torch's default collate, its tensors stacked straight into the slot.

What torch's registry `default_collate_fn_map` holds is used as it is, entries that the user put
there included; only the stock functions for tensors and numpy arrays are replaced, by ones with the
same result.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import _utils as torch_data
from torch.utils.data import default_convert

from penstock.collate import CollateMap, check_shapes, collate, have_one_dtype, stack_into

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.data.dataset import Empty

__all__ = ["TensorCollator", "empty_tensor", "stack_plainly"]

_stock = torch_data.collate
_PLAIN_ARRAYS: Final = frozenset({np.ndarray, np.memmap})


def empty_tensor(empty: Empty, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor in memory given by `empty`, which it keeps alive."""
    size = math.prod(shape)
    if size == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    in_numpy = _in_numpy(dtype)
    if in_numpy is not None:
        return torch.from_numpy(empty(shape, in_numpy))
    return torch.from_numpy(empty((size * dtype.itemsize,), np.uint8)).view(dtype).view(shape)


@functools.cache
def _in_numpy(dtype: torch.dtype) -> np.dtype[Any] | None:
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except (TypeError, RuntimeError):  # bfloat16 and the float8s, say
        return None


class TensorCollator:
    """The default collate of a worker that has imported torch, and other collates' `BatchMemory`.

    Attributes:
        empty: Gives memory for an array of the batch.

    Concurrency:
        One thread.
    """

    def __init__(self, empty: Empty) -> None:
        """Collate into arrays given by `empty`."""
        self.empty = empty

    def batch(self, samples: Sequence[Any]) -> Any:  # noqa: ANN401
        """Return the samples of a batch as one tree."""
        registry: CollateMap = dict(_stock.default_collate_fn_map)
        if registry.get(torch.Tensor) in (_stock.collate_tensor_fn, stack_plainly):
            registry[torch.Tensor] = self._stack
        if registry.get(np.ndarray) is _stock.collate_numpy_array_fn:
            registry[np.ndarray] = self._stack_arrays
        return collate(samples, collate_fn_map=registry)

    def sample(self, sample: Any) -> Any:  # noqa: ANN401
        """Return a sample that is a batch by itself, its arrays as tensors."""
        return default_convert(sample)

    def leaf(self, array: np.ndarray[Any, Any]) -> Any:  # noqa: ANN401
        """Return an array as a tensor over its memory; one of text or objects as it is."""
        if array.dtype.kind in "SUO":
            return array
        # A tensor of what may not be written to is undefined behaviour, and torch warns.
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    def _stack(self, tensors: Sequence[Any], *, collate_fn_map: CollateMap) -> Any:  # noqa: ANN401
        first = tensors[0]
        if not _is_plain(first) or first.requires_grad or not have_one_dtype(tensors):
            return _stock.collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)
        out = empty_tensor(self.empty, (len(tensors), *first.shape), first.dtype)
        try:
            return torch.stack(tuple(tensors), 0, out=out)
        except RuntimeError:  # shapes differ, or one has a gradient, or is not on the CPU, …
            pass
        check_shapes([tensor.shape for tensor in tensors])
        return _stock.collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)

    def _stack_arrays(self, arrays: Sequence[Any], *, collate_fn_map: CollateMap) -> Any:  # noqa: ANN401
        first = arrays[0]
        if np.dtype(first.dtype).kind in "SUO":
            return _stock.collate_numpy_array_fn(arrays, collate_fn_map=collate_fn_map)
        like = torch.as_tensor(np.empty(0, first.dtype))  # refused as torch does; on its device
        if (
            not _is_plain(like)
            or collate_fn_map.get(torch.Tensor) != self._stack  # the user's own
            or not _PLAIN_ARRAYS.issuperset(map(type, arrays))
            or not have_one_dtype(arrays)
        ):
            return collate([torch.as_tensor(a) for a in arrays], collate_fn_map=collate_fn_map)
        check_shapes([array.shape for array in arrays])
        # To make a tensor of each takes 1.1 us; to copy a row of 32 numbers 0.07 us.
        out = empty_tensor(self.empty, (len(arrays), *first.shape), like.dtype)
        stack_into(out.numpy(), arrays)
        return out


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_nested
        and not tensor.is_quantized
    )


def stack_plainly(tensors: Sequence[Any], *, collate_fn_map: CollateMap | None = None) -> Any:  # noqa: ANN401
    """Stack into ordinary memory: torch's own function makes a shared file per tensor in a worker.

    It stands in torch's registry in our workers, for user collate functions that call
    `default_collate`.
    """
    first = tensors[0]
    if not _is_plain(first) or any(t.dtype != first.dtype for t in tensors):
        return _stock.collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)
    return torch.stack(tuple(tensors), 0)
