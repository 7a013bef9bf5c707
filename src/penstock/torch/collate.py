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

from penstock.collate import (
    CONTAINERS,
    CollateMap,
    check_shapes,
    collate,
    have_one_dtype,
    stack_into,
)
from penstock.torch.leaves import is_dense, keep, tensor_of
from penstock.transport.arena import MIN_POOLED_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.data.dataset import Allocator

_stock = torch_data.collate
_STOCK: Final[CollateMap] = dict(_stock.default_collate_fn_map)
_PLAIN_ARRAYS: Final = frozenset({np.ndarray, np.memmap})


def empty_tensor(
    alloc: Allocator, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor | None:
    """Return an uninitialised tensor in a slot, or in recycled memory, given by `alloc`.

    Returns:
        None where there are no bytes, or torch's own memory does as well: that can be resized.
    """
    if 0 in shape:
        return None
    in_numpy = _in_numpy(dtype)
    if in_numpy is not None:
        array = alloc(shape, in_numpy)
    else:
        array = alloc((math.prod(shape) * dtype.itemsize,), np.uint8)
    if not _stays_here(alloc):
        tensor = torch.from_numpy(array)
    elif array.base is None:
        return None
    else:
        tensor = tensor_of(array)
    return tensor if in_numpy is not None else tensor.view(dtype).view(shape)


def _stays_here(alloc: Allocator) -> bool:
    """Whether the consumer gets the very memory that `alloc` gives (`PlainOutput.empty`)."""
    return getattr(alloc, "stays_here", False)


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

    def __init__(self, alloc: Allocator) -> None:
        """Collate into arrays given by `alloc`."""
        self.empty = alloc
        self._stays_here = _stays_here(alloc)
        # What the user adds may be a base class of containers, which are looked up first here.
        self._registry = self._replaced(_STOCK) | CONTAINERS

    def batch(self, samples: Sequence[Any]) -> Any:  # noqa: ANN401
        """Return the samples of a batch as one tree."""
        registered = _stock.default_collate_fn_map
        return collate(
            samples,
            collate_fn_map=self._registry
            if registered in (_STOCK, _IN_WORKERS)
            else self._replaced(registered),
        )

    def _replaced(self, registered: CollateMap) -> CollateMap:
        """Return the entries of torch's registry, the stock ones replaced by ours."""
        # By identity: what the user has registered need not be hashable.
        ours: dict[int, Callable[..., Any]] = {
            id(_stock.collate_tensor_fn): self._stack,
            id(_stock.collate_numpy_array_fn): self._stack_arrays,
            id(_stock.collate_int_fn): _collate_ints,
            id(_stock.collate_float_fn): _collate_floats,
            id(stack_plainly): self._stack,
        }
        return {kind: ours.get(id(function), function) for kind, function in registered.items()}

    def sample(self, sample: Any) -> Any:  # noqa: ANN401
        """Return a sample that is a batch by itself, its arrays as tensors."""
        batch = default_convert(sample)
        if isinstance(sample, np.ndarray) and isinstance(batch, torch.Tensor) and batch.is_cpu:
            keep(batch, sample)  # an array of `get_batch`, in recycled memory
        return batch

    def leaf(self, array: np.ndarray[Any, Any]) -> Any:  # noqa: ANN401
        """Return an array as a tensor over its memory; one of text or objects as it is."""
        if array.dtype.kind in "SUOMmV":
            return array
        if not array.dtype.isnative or min(array.strides, default=0) < 0:
            array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        # A tensor of what may not be written to is undefined behaviour, and torch warns.
        return tensor_of(array if array.flags.writeable else array.copy())

    def _stack(self, tensors: Sequence[Any], *, collate_fn_map: CollateMap) -> Any:  # noqa: ANN401
        first = tensors[0]
        if not _is_plain(first) or first.requires_grad:
            return _stock.collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)
        out = None
        if not self._stays_here or first.nbytes * len(tensors) >= MIN_POOLED_BYTES:
            if not have_one_dtype(tensors):
                return _stock.collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)
            out = empty_tensor(self.empty, (len(tensors), *first.shape), first.dtype)
        try:
            batch = torch.stack(tuple(tensors), 0, out=out)
            if not batch.requires_grad:
                return batch.contiguous()  # torch's own memory has the strides of the samples
        except RuntimeError:  # shapes differ, or one has a gradient, or is not on the CPU, …
            pass
        check_shapes([tensor.shape for tensor in tensors])
        return _stock.collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)

    def _stack_arrays(self, arrays: Sequence[Any], *, collate_fn_map: CollateMap) -> Any:  # noqa: ANN401
        first = arrays[0]
        if np.dtype(first.dtype).kind in "SUO":
            return _stock.collate_numpy_array_fn(arrays, collate_fn_map=collate_fn_map)
        if (
            collate_fn_map.get(torch.Tensor) == self._stack  # not the user's own
            and _PLAIN_ARRAYS.issuperset(map(type, arrays))
            and have_one_dtype(arrays)
            and first.size  # else torch has strides of its own
        ):
            memory = self.empty((len(arrays), *first.shape), first.dtype)
            out = torch.as_tensor(memory)  # refused as torch does; on its device
            if _is_plain(out):
                check_shapes([array.shape for array in arrays])
                # To make a tensor of each takes 1.1 us; to copy a row of 32 numbers 0.07 us.
                stack_into(memory, arrays)
                return keep(out, memory) if self._stays_here else out
        return collate([torch.as_tensor(a) for a in arrays], collate_fn_map=collate_fn_map)


def _of_numbers(
    dtype: type[np.generic],
    stock: Callable[..., Any],
    values: Sequence[Any],
    *,
    collate_fn_map: CollateMap,
) -> Any:  # noqa: ANN401
    """Return what torch's function does, which reads numbers 3 to 6 times as slowly."""
    try:
        array = np.array(values)
        if array.dtype == dtype and array.ndim == 1:
            return torch.as_tensor(array).clone()  # in torch's own memory
    except Exception:  # torch has its own opinion, and error
        pass
    return stock(values, collate_fn_map=collate_fn_map)


_collate_ints: Final = functools.partial(_of_numbers, np.int64, _stock.collate_int_fn)
_collate_floats: Final = functools.partial(_of_numbers, np.float64, _stock.collate_float_fn)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and is_dense(tensor)


def stack_plainly(tensors: Sequence[Any], *, collate_fn_map: CollateMap | None = None) -> Any:  # noqa: ANN401
    """Stack into ordinary memory: torch's own function makes a shared file per tensor in a worker.

    It stands in torch's registry where our workers are, for user collate functions that call
    `default_collate`.
    """
    first = tensors[0]
    if not _is_plain(first) or not have_one_dtype(tensors):
        return _stock.collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)
    return torch.stack(tuple(tensors), 0)


_IN_WORKERS: Final[CollateMap] = {**_STOCK, torch.Tensor: stack_plainly}
