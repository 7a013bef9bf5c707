# SPDX-License-Identifier: Apache-2.0
"""torch's map-style datasets, read by the whole batch.

Where torch indexes a tensor once per sample and stacks the pieces, one gather writes the rows
straight into the batch's memory. `get_batch` returns what torch's `default_collate` makes of the
samples, and falls back on exactly that wherever one gather is not known to give the same. Importing
this module also registers the readers of torch's own classes and of plain tensors, so a dataset
made elsewhere is read in the same way.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.utils.data as stock
from torch.utils.data import ChainDataset, Dataset, IterableDataset, default_collate
from torch.utils.data import random_split as stock_random_split

from penstock.data.dataset import (
    BatchReader,
    batch_reader,
    read_each,
    reads_together,
    register_batch_reader,
    register_combinator,
    register_drawless,
)
from penstock.randomness.samples import renumbered_samples
from penstock.summary import Summarized
from penstock.torch.collate import empty_tensor
from penstock.torch.leaves import tensor_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.data.dataset import Allocator

__all__ = [
    "ChainDataset",
    "ConcatDataset",
    "Dataset",
    "IterableDataset",
    "StackDataset",
    "Subset",
    "TensorDataset",
    "random_split",
]

_NUMPY_DTYPES: Final[dict[torch.dtype, type[np.generic]]] = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
}
# All others (what numpy lacks, and the unsigned that index_select lacks) as integers of their size.
_CARRIERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorDataset(Summarized, stock.TensorDataset):
    """torch's `TensorDataset`; a batch is one gather per tensor.

    Example:
        >>> data = TensorDataset(torch.arange(6).view(3, 2), torch.tensor([7, 8, 9]))
        >>> data.get_batch(np.array([2, -3]), np.empty)
        [tensor([[4, 5],
                [0, 1]]), tensor([9, 7])]
    """

    _shows = ("length", "tensors")

    @property
    def can_get_batch(self) -> bool:
        """Whether all tensors are plain, dense ones in main memory that need no gradient."""
        return _can_gather_all(self)

    def get_batch(self, indices: NDArray[np.int64], alloc: Allocator) -> Any:  # noqa: ANN401 - a batch tree
        """Return the rows at `indices` of each tensor, a list of tensors in memory from `alloc`.

        Raises:
            IndexError: an index is outside -length <= index < length, or there is none.
        """
        return _read_tensors(self, indices, alloc)


class StackDataset(Summarized, stock.StackDataset[Any]):
    """torch's `StackDataset`; a batch is its datasets' batches.

    Example:
        >>> data = StackDataset(x=TensorDataset(torch.arange(3)), y=TensorDataset(torch.zeros(3)))
        >>> data.get_batch(np.array([2]), np.empty)
        {'x': [tensor([2])], 'y': [tensor([0.])]}
    """

    _shows = ("length", "datasets")

    @property
    def can_get_batch(self) -> bool:
        """Whether all datasets can be read by the batch."""
        return _can_read_stack(self)

    def get_batch(self, indices: NDArray[np.int64], alloc: Allocator) -> Any:  # noqa: ANN401 - a batch tree
        """Return the datasets' batches: a list, or a dict by name."""
        return _read_stack(self, indices, alloc)


class ConcatDataset(Summarized, stock.ConcatDataset[Any]):
    """torch's `ConcatDataset`; a batch is gathered from each of its datasets at once.

    Example:
        >>> tens = TensorDataset(torch.arange(3) * 10)
        >>> data = ConcatDataset([TensorDataset(torch.arange(3)), tens])
        >>> data.get_batch(np.array([5, 0, 3]), np.empty)
        [tensor([20,  0,  0])]
    """

    _shows = ("length", "datasets")

    @property
    def can_get_batch(self) -> bool:
        """Whether all datasets can be read by the batch."""
        return _can_read_concat(self)

    def get_batch(self, indices: NDArray[np.int64], alloc: Allocator) -> Any:  # noqa: ANN401 - a batch tree
        """Return the samples at `indices` as one batch, of each dataset's share in its rows.

        Raises:
            ValueError: an index is smaller than -length.
            IndexError: an index is not smaller than length, or there is none.
        """
        return _read_concat(self, indices, alloc)


class Subset(Summarized, stock.Subset[Any]):
    """torch's `Subset`; a batch is the whole dataset's batch at the chosen indices.

    Example:
        >>> part = Subset(TensorDataset(torch.arange(10) * 10), [7, 3])
        >>> part.get_batch(np.array([1, 0]), np.empty)
        [tensor([30, 70])]
    """

    _shows = ("length", "dataset")

    @property
    def can_get_batch(self) -> bool:
        """Whether the dataset can be read by the batch."""
        return _can_read_subset(self)

    def get_batch(self, indices: NDArray[np.int64], alloc: Allocator) -> Any:  # noqa: ANN401 - a batch tree
        """Return the dataset's batch at `self.indices[indices]`.

        Raises:
            IndexError: an index is outside the subset, or the subset's is outside the dataset.
        """
        return _read_subset(self, indices, alloc)


def random_split(
    dataset: Dataset[Any],
    lengths: Sequence[int | float],
    generator: torch.Generator | None = torch.default_generator,
) -> list[stock.Subset[Any]]:
    """Split a dataset at random, with the draws of torch's `random_split`.

    Args:
        dataset: Has a length.
        lengths: Samples per part, summing to the length; or fractions summing to 1.
        generator: Of the permutation; one is drawn.

    Returns:
        One `Subset` (of this module) for each length.

    Raises:
        ValueError: the lengths or fractions do not add up, or one is out of range.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> [len(part) for part in random_split(range(10), [0.7, 0.3], generator)]
        [7, 3]
    """
    parts = stock_random_split(dataset, lengths, generator=generator)
    return [Subset(part.dataset, part.indices) for part in parts]


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
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.dim() > 0
        and not (tensor.requires_grad or tensor.is_nested or tensor.is_quantized)
        and not (tensor.is_conj() or tensor.is_neg())
        and (tensor.dtype in _NUMPY_DTYPES or tensor.dtype.itemsize in _CARRIERS)
    )


def _can_gather_all(dataset: stock.TensorDataset) -> bool:
    tensors = dataset.tensors
    return bool(tensors) and all(map(_can_gather, tensors))


def _read_tensors(
    dataset: stock.TensorDataset, indices: NDArray[np.int64], alloc: Allocator
) -> Any:  # noqa: ANN401
    if len(indices) == 0:
        return _collated(dataset, indices)
    chosen = _counted_from_start(indices, len(dataset))
    return [_gather(tensor, chosen, alloc) for tensor in dataset.tensors]


def _read_tensor(tensor: torch.Tensor, indices: NDArray[np.int64], alloc: Allocator) -> Any:  # noqa: ANN401
    if len(indices) == 0:
        return _collated(tensor, indices)
    return _gather(tensor, _counted_from_start(indices, len(tensor)), alloc)


def _counted_from_start(indices: NDArray[np.int64], length: int) -> torch.Tensor:
    smallest, largest = int(indices.min()), int(indices.max())
    if smallest < -length or largest >= length:
        wrong = smallest if smallest < -length else largest
        raise IndexError(
            f"index {wrong} is out of bounds for dimension 0 with size {length} "
            f"({-length} <= index < {length})."
        )
    if smallest < 0:
        indices = np.where(indices < 0, indices + length, indices)
    elif not (indices.flags.writeable and indices.flags.c_contiguous):
        indices = indices.copy()  # torch warns of read-only memory, and knows no negative strides
    return torch.from_numpy(indices)


def _gather(tensor: torch.Tensor, indices: torch.Tensor, alloc: Allocator) -> torch.Tensor:
    rows = tensor.view(_carrier(tensor.dtype))
    out = empty_tensor(alloc, (len(indices), *tensor.shape[1:]), rows.dtype)
    return torch.index_select(rows, 0, indices, out=out).view(tensor.dtype)


def _carrier(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in _NUMPY_DTYPES else _CARRIERS[dtype.itemsize]


# Datasets of datasets


def _can_read_stack(dataset: stock.StackDataset[Any]) -> bool:
    return all(batch_reader(part) is not None for part in _parts(dataset))


def _parts(dataset: stock.StackDataset[Any]) -> list[Any]:
    datasets = dataset.datasets
    return list(datasets.values() if isinstance(datasets, dict) else datasets)


def _read_stack(
    dataset: stock.StackDataset[Any], indices: NDArray[np.int64], alloc: Allocator
) -> Any:  # noqa: ANN401
    batches = [_read(part, indices, alloc) for part in _parts(dataset)]
    if isinstance(dataset.datasets, dict):
        return dict(zip(dataset.datasets, batches, strict=True))
    return batches


def _read(dataset: Any, indices: NDArray[np.int64], alloc: Allocator) -> Any:  # noqa: ANN401
    reader = batch_reader(dataset)
    if reader is None:
        return _collated(dataset, indices)
    return _with_tensors(reader(indices, alloc))


def _with_tensors(batch: Any) -> Any:  # noqa: ANN401
    """`batch` with tensors that alias its arrays: datasets of the numpy core may be parts, too."""
    if type(batch) is dict:
        return {key: _with_tensors(value) for key, value in batch.items()}
    if type(batch) is list:
        return [_with_tensors(value) for value in batch]
    return tensor_of(batch) if type(batch) is np.ndarray else batch


def _can_read_subset(dataset: stock.Subset[Any]) -> bool:
    return batch_reader(dataset.dataset) is not None


def _read_subset(dataset: stock.Subset[Any], indices: NDArray[np.int64], alloc: Allocator) -> Any:  # noqa: ANN401
    inner = _select(dataset.indices, indices)
    if inner.ndim != 1 or inner.dtype.kind not in "iu" or len(inner) == 0:
        return _collated(dataset, indices)
    return _read(dataset.dataset, inner.astype(np.int64, copy=False), alloc)


def _select(chosen: Any, indices: NDArray[np.int64]) -> NDArray[Any]:  # noqa: ANN401
    """`chosen[i]` for each index. A list is read anew each time: its owner may change it."""
    if type(chosen) is np.ndarray:
        return chosen[indices]
    if type(chosen) is torch.Tensor and chosen.device.type == "cpu":
        return chosen.numpy()[indices]
    return np.asarray([chosen[index] for index in indices.tolist()])


def _can_read_concat(dataset: stock.ConcatDataset[Any]) -> bool:
    return all(batch_reader(part) is not None for part in dataset.datasets)


def _read_concat(
    dataset: stock.ConcatDataset[Any], indices: NDArray[np.int64], alloc: Allocator
) -> Any:  # noqa: ANN401
    length = len(dataset)
    wrong = indices[(indices < -length) | (indices >= length)][:1]
    if len(indices) == 0 or len(wrong):
        return _collated(dataset, indices if len(wrong) == 0 else wrong)  # raises as torch does
    chosen = np.where(indices < 0, indices + length, indices)
    sizes = np.asarray(dataset.cumulative_sizes)
    numbers = np.searchsorted(sizes, chosen, side="right")
    inner = chosen - np.concatenate(([0], sizes))[numbers]
    asked = np.unique(numbers).tolist()
    if len(asked) == 1:  # nothing to bring into order
        return _read(dataset.datasets[asked[0]], inner, alloc)
    positions = [np.flatnonzero(numbers == number) for number in asked]
    shares = []
    for number, rows in zip(asked, positions, strict=True):
        with renumbered_samples(rows):
            shares.append(_read(dataset.datasets[number], inner[rows], np.empty))
    try:
        return _merge(shares, [torch.from_numpy(rows) for rows in positions], alloc)
    except _UnlikeError:
        return _collated(dataset, indices)


class _UnlikeError(Exception):
    """Batches of two datasets differ in structure, shape or dtype, or hold more than tensors."""


def _merge(batches: list[Any], positions: list[torch.Tensor], alloc: Allocator) -> Any:  # noqa: ANN401
    """One batch of several that are alike, rows of batches[i] at positions[i]."""
    first = batches[0]
    if any(type(batch) is not type(first) for batch in batches):
        raise _UnlikeError
    if type(first) is dict:
        if any(list(batch) != list(first) for batch in batches):
            raise _UnlikeError
        return {key: _merge([batch[key] for batch in batches], positions, alloc) for key in first}
    if type(first) is list:
        if any(len(batch) != len(first) for batch in batches):
            raise _UnlikeError
        return [_merge(list(column), positions, alloc) for column in zip(*batches, strict=True)]
    if any(
        not _can_gather(batch) or batch.shape[1:] != first.shape[1:] or batch.dtype != first.dtype
        for batch in batches
    ):
        raise _UnlikeError
    return _scatter(batches, positions, alloc)


def _scatter(
    batches: list[torch.Tensor], positions: list[torch.Tensor], alloc: Allocator
) -> torch.Tensor:
    shape = (sum(map(len, positions)), *batches[0].shape[1:])
    dtype = batches[0].dtype
    carrier = _carrier(dtype)
    out = empty_tensor(alloc, shape, carrier)
    if out is None:
        out = torch.empty(shape, dtype=carrier, device="cpu")
    for batch, rows in zip(batches, positions, strict=True):
        out.index_copy_(0, rows, batch.view(carrier))
    return out.view(dtype)


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
_register(stock.StackDataset, _can_read_stack, _read_stack)
_register(stock.ConcatDataset, _can_read_concat, _read_concat)
_register(stock.Subset, _can_read_subset, _read_subset)

register_combinator(stock.StackDataset, _parts)
register_combinator(StackDataset, _parts)
register_combinator(stock.ConcatDataset, lambda concat: concat.datasets)
register_combinator(ConcatDataset, lambda concat: concat.datasets)
register_combinator(stock.Subset, lambda subset: [subset.dataset])
register_combinator(Subset, lambda subset: [subset.dataset])
register_drawless(torch.Tensor)
register_drawless(stock.TensorDataset)
register_drawless(TensorDataset)
