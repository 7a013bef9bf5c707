# SPDX-License-Identifier: Apache-2.0
"""torch's map-style datasets, read by the whole batch.

Where torch indexes a tensor once per sample and stacks the pieces, one gather writes the rows
straight into the batch's memory. `get_batch` returns what torch's `default_collate` makes of the
samples, and falls back on exactly that wherever one gather is not known to give the same. Importing
this module registers the readers of torch's classes and of plain tensors.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.utils.data as stock
from torch.utils.data import default_collate

from penstock.data.combinators import UnlikeBatchesError, read_parts
from penstock.data.dataset import (
    BatchReader,
    batch_reader,
    read_each,
    reads_together,
    register_batch_reader,
    register_combinator,
    register_drawless,
)
from penstock.torch.collate import empty_tensor
from penstock.torch.leaves import is_dense, tensor_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.data.dataset import Allocator

# Rows are copied as integers of their size: index_select lacks some dtypes, and numpy others.
_CARRIERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _collated(dataset: Any, indices: NDArray[np.int64]) -> Any:  # noqa: ANN401
    """The batch as torch makes it: the definition of what the functions below may return."""
    numbers = indices.tolist()
    together = reads_together(dataset)
    return default_collate(
        dataset.__getitems__(numbers) if together else read_each(dataset, numbers)
    )


# Tensors


def _can_gather(tensor: Any) -> bool:  # noqa: ANN401
    """Whether rows of `tensor`, stacked, are nothing but its rows copied."""
    return (
        type(tensor) is torch.Tensor  # a subclass may index in its own way
        and is_dense(tensor)
        and tensor.dim() > 0
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
        and tensor.dtype.itemsize in _CARRIERS
    )


def _can_gather_all(dataset: stock.TensorDataset) -> bool:
    tensors = dataset.tensors
    return bool(tensors) and all(map(_can_gather, tensors))


def _read_tensors(
    dataset: stock.TensorDataset, indices: NDArray[np.int64], alloc: Allocator
) -> Any:  # noqa: ANN401
    if len(indices) == 0:
        return _collated(dataset, indices)
    # Not by `len(dataset)`, which a subclass may have made another: samples are `tensor[index]`.
    chosen = _counted_from_start(indices, dataset.tensors[0])
    return [_gather(tensor, chosen, alloc) for tensor in dataset.tensors]


def _read_tensor(tensor: torch.Tensor, indices: NDArray[np.int64], alloc: Allocator) -> Any:  # noqa: ANN401
    if len(indices) == 0:
        return _collated(tensor, indices)
    return _gather(tensor, _counted_from_start(indices, tensor), alloc)


def _counted_from_start(indices: NDArray[np.int64], tensor: torch.Tensor) -> torch.Tensor:
    length, smallest, largest = len(tensor), int(indices.min()), int(indices.max())
    if smallest < -length or largest >= length:
        _ = tensor[smallest], tensor[largest]  # raises torch's error
    if smallest < 0:
        indices = np.where(indices < 0, indices + length, indices)
    elif not (indices.flags.writeable and indices.flags.c_contiguous):
        indices = indices.copy()  # torch warns of read-only memory, and has no negative strides
    return torch.from_numpy(indices)


def _gather(tensor: torch.Tensor, indices: torch.Tensor, alloc: Allocator) -> torch.Tensor:
    rows = tensor.view(_CARRIERS[tensor.dtype.itemsize])
    out = empty_tensor(alloc, (len(indices), *tensor.shape[1:]), rows.dtype)
    return torch.index_select(rows, 0, indices, out=out).view(tensor.dtype)


# Datasets of datasets


def _parts(dataset: stock.StackDataset[Any] | stock.ConcatDataset[Any]) -> list[Any]:
    datasets = dataset.datasets
    return list(datasets.values() if isinstance(datasets, dict) else datasets)


def _read(dataset: Any, indices: NDArray[np.int64], alloc: Allocator) -> Any:  # noqa: ANN401
    reader = batch_reader(dataset)
    return _collated(dataset, indices) if reader is None else _with_tensors(reader(indices, alloc))


def _read_stack(
    dataset: stock.StackDataset[Any], indices: NDArray[np.int64], alloc: Allocator
) -> Any:  # noqa: ANN401
    batches = [_read(part, indices, alloc) for part in _parts(dataset)]
    if isinstance(dataset.datasets, dict):
        return dict(zip(dataset.datasets, batches, strict=True))
    return batches


def _read_subset(dataset: stock.Subset[Any], indices: NDArray[np.int64], alloc: Allocator) -> Any:  # noqa: ANN401
    inner = _select(dataset.indices, indices)
    if inner.ndim != 1 or inner.dtype.kind not in "iu" or len(inner) == 0:
        return _collated(dataset, indices)
    return _read(dataset.dataset, inner.astype(np.int64, copy=False), alloc)


def _read_concat(
    dataset: stock.ConcatDataset[Any], indices: NDArray[np.int64], alloc: Allocator
) -> Any:  # noqa: ANN401
    length = len(dataset)
    wrong = indices[(indices < -length) | (indices >= length)][:1]
    if len(indices) == 0 or len(wrong):
        return _collated(dataset, wrong)  # raises as torch does

    def joined(leaves: list[Any], positions: list[NDArray[np.intp]]) -> torch.Tensor:
        first = leaves[0]
        if any(
            not _can_gather(leaf) or leaf.shape[1:] != first.shape[1:] or leaf.dtype != first.dtype
            for leaf in leaves
        ):
            raise UnlikeBatchesError
        shape, carrier = (len(indices), *first.shape[1:]), _CARRIERS[first.dtype.itemsize]
        out = empty_tensor(alloc, shape, carrier)
        if out is None:
            out = torch.empty(shape, dtype=carrier, device="cpu")
        for leaf, rows in zip(leaves, positions, strict=True):
            out.index_copy_(0, torch.from_numpy(rows), leaf.view(carrier))
        return out.view(first.dtype)

    def read(part: int, offsets: NDArray[np.int64], into: Allocator) -> Any:  # noqa: ANN401
        return _read(dataset.datasets[part], offsets, into)

    try:
        return read_parts(indices, dataset.cumulative_sizes, read, joined, alloc)
    except UnlikeBatchesError:
        return _collated(dataset, indices)


def _with_tensors(batch: Any) -> Any:  # noqa: ANN401
    """`batch` with tensors that alias its arrays: it may be of a dataset of the numpy core."""
    if type(batch) is dict:
        return {key: _with_tensors(value) for key, value in batch.items()}
    if type(batch) is list:
        return [_with_tensors(value) for value in batch]
    return tensor_of(batch) if type(batch) is np.ndarray else batch


def _select(chosen: Any, indices: NDArray[np.int64]) -> NDArray[Any]:  # noqa: ANN401
    """`chosen[i]` for each index. A list is read anew each time: its owner may change it."""
    if type(chosen) is np.ndarray:
        return chosen[indices]
    if type(chosen) is torch.Tensor and chosen.device.type == "cpu":
        return chosen.numpy()[indices]
    return np.asarray([chosen[index] for index in indices.tolist()])


def _can_read_all(parts_of: Callable[[Any], list[Any]], dataset: Any) -> bool:  # noqa: ANN401
    return all(batch_reader(part) is not None for part in parts_of(dataset))


def _register(
    cls: type,
    can_read: Callable[[Any], bool],
    read: Callable[[Any, NDArray[np.int64], Allocator], Any],
) -> None:
    def make_reader(dataset: object) -> BatchReader | None:
        return functools.partial(read, dataset) if can_read(dataset) else None

    register_batch_reader(cls, make_reader)


_register(torch.Tensor, _can_gather, _read_tensor)
_register(stock.TensorDataset, _can_gather_all, _read_tensors)

for _kind, _parts_of, _reader in (
    (stock.StackDataset, _parts, _read_stack),
    (stock.ConcatDataset, _parts, _read_concat),
    (stock.Subset, lambda subset: [subset.dataset], _read_subset),
):
    _register(_kind, functools.partial(_can_read_all, _parts_of), _reader)
    register_combinator(_kind, _parts_of)
register_drawless(torch.Tensor)
register_drawless(stock.TensorDataset)
