# SPDX-License-Identifier: Apache-2.0
"""How tensors cross from a worker: as bytes in the slot plus dtype, shape and strides.

A CPU tensor of exact type `torch.Tensor` goes this way: a view with gaps without them, an expanded
one as the part that is really there, a sparse one as its parts. Everything else (nested, quantised,
subclasses such as `Parameter` or torchvision's `Image`) is taken apart by torch's own pickling,
whose inner tensors and storages come back here.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, Final

import torch

from penstock.errors import TransportError
from penstock.transport.packing import REDUCERS, NeedsInheritance

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

_Reduced = tuple["Callable[..., object]", tuple[object, ...]]

_DTYPES: Final[dict[str, torch.dtype]] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def keep(tensor: torch.Tensor, memory: object) -> torch.Tensor:
    """Return `tensor`, over `memory`, which now lives until the last alias of it is garbage.

    torch moves a storage to a shared file in place (`share_memory_()`, a queue of
    `torch.multiprocessing`). That ends what the storage held, while numpy, DLPack and others still
    look at the old bytes. Each of them holds the storage, and torch keeps the storage's Python
    object, attributes included, for as long as the storage.
    """
    tensor.untyped_storage().penstock_memory = memory  # type: ignore[attr-defined]
    return tensor


def tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor over a writable array, as long as any alias of it lives."""
    return keep(torch.from_numpy(array), array)


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a contiguous CPU tensor, shape (nbytes,), a view."""
    # Not reshape: that leaves a lone element of an expanded tensor with a stride of 0.
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    array: np.ndarray[Any, np.dtype[np.uint8]] = flat.numpy()
    return array


def reduce_tensor(tensor: torch.Tensor) -> Any:  # noqa: ANN401 - what __reduce_ex__ may return
    """Return how to pickle `tensor`, its memory as a protocol-5 buffer."""
    if tensor.is_cuda:
        raise _not_in_memory(tensor.device)
    if "sparse" in str(tensor.layout):
        return _reduce_sparse(tensor)
    if not is_dense(tensor) or tensor.__dict__:  # attributes that the user hung on it
        return tensor.__reduce_ex__(5)
    if tensor.is_shared() and not in_worker():
        raise NeedsInheritance  # a copy would break what it was put there for
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "a tensor that requires_grad and is not a leaf cannot leave its process: autograd does "
            "not cross processes. Call detach() on it in the dataset or the collate_fn."
        )
    needs_grad = tensor.requires_grad
    tensor = tensor.detach().resolve_conj().resolve_neg()
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    if tensor.is_contiguous():
        return _rebuild, (_buffer(tensor), dtype, shape, None, needs_grad)
    return _rebuild, (*_dense(tensor, dtype, shape), needs_grad)


def _not_in_memory(device: torch.device) -> Exception:
    if not in_worker():
        return NeedsInheritance()
    return TransportError(
        f"a worker made a tensor on {device}, and batches cross in main memory. Return CPU tensors "
        "from the dataset and the collate_fn, and move the batch in the training loop."
    )


def in_worker() -> bool:
    """Return whether this process is a worker, of ours or torch's; a thread is none."""
    # Not get_worker_info(): a worker that is a thread has its batches where they are wanted.
    return torch.utils.data._utils.worker._worker_info is not None


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one piece of main memory, and each element a number there."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_nested or tensor.is_quantized)
    )


def _buffer(tensor: torch.Tensor) -> pickle.PickleBuffer:
    return pickle.PickleBuffer(bytes_of(tensor))  # type: ignore[arg-type]  # it has a buffer


def _dense(tensor: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> tuple[object, ...]:
    """A tensor with other strides: its memory in the order in which it lies, each element once."""
    strides = tensor.stride()
    once = tensor[tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)]
    by_stride = sorted(range(once.ndim), key=lambda dim: (-strides[dim], dim))
    dense = once.permute(by_stride).contiguous()
    new_strides = [0] * once.ndim
    for position, dim in enumerate(by_stride):
        new_strides[dim] = 0 if strides[dim] == 0 else dense.stride(position)
    return _buffer(dense), dtype, shape, tuple(new_strides)


def _rebuild(
    buffer: Any,  # noqa: ANN401 - anything with the buffer protocol
    dtype: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    needs_grad: bool,
) -> torch.Tensor:
    """Return the tensor over `buffer`, which it keeps alive."""
    if len(buffer) == 0:
        tensor = torch.empty(shape, dtype=_DTYPES[dtype])
    else:
        tensor = keep(torch.frombuffer(buffer, dtype=_DTYPES[dtype]), buffer)
        if strides is not None:
            tensor = tensor.as_strided(shape, strides)
        elif len(shape) != 1:
            tensor = tensor.view(shape)
    return tensor.requires_grad_() if needs_grad else tensor


def _reduce_sparse(tensor: torch.Tensor) -> _Reduced:
    _, (layout, parts) = tensor.detach().__reduce_ex__(5)
    return _rebuild_sparse, (layout, parts, tensor.requires_grad)


def _rebuild_sparse(layout: torch.layout, parts: Any, needs_grad: bool) -> torch.Tensor:  # noqa: ANN401
    # Not torch's own function, which lists the tensor to be validated by `torch.load`: after a
    # plain unpickling it would live on.
    if layout is torch.sparse_coo:
        *parts, is_coalesced = parts
        tensor = torch.sparse_coo_tensor(*parts, is_coalesced=is_coalesced, check_invariants=False)
    else:
        tensor = torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=False)
    return tensor.requires_grad_() if needs_grad else tensor


def _reduce_untyped_storage(storage: torch.UntypedStorage) -> _Reduced:
    if storage.device.type != "cpu":
        raise _not_in_memory(storage.device)
    if storage.is_shared() and not in_worker():
        raise NeedsInheritance
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    return _rebuild_untyped_storage, (_buffer(flat),)


def _rebuild_untyped_storage(buffer: Any) -> torch.UntypedStorage:  # noqa: ANN401
    if len(buffer) == 0:
        return torch.UntypedStorage(0)
    return keep(torch.frombuffer(buffer, dtype=torch.uint8), buffer).untyped_storage()


def _reduce_typed_storage(storage: torch.TypedStorage) -> _Reduced:
    dtype = str(storage.dtype).removeprefix("torch.")
    return _rebuild_typed_storage, (storage._untyped_storage, dtype)  # untyped() warns


def _rebuild_typed_storage(storage: torch.UntypedStorage, dtype: str) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=_DTYPES[dtype], _internal=True)


REDUCERS[torch.Tensor] = reduce_tensor
REDUCERS[torch.storage.UntypedStorage] = _reduce_untyped_storage
REDUCERS[torch.storage.TypedStorage] = _reduce_typed_storage
