# SPDX-License-Identifier: Apache-2.0
"""`Targets`: what is marked in each image of a batch, which travels as a few large arrays.

A batch of 64 images with boxes, labels and landmarks has 192 small arrays. Pickled one by one they
cost more than all the rest of a small batch. So a list of targets is pickled by field: the rows of
all images in one array of values, and where each image's begin. What arrives is the list again,
each array of it a view of one of those.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.transport.arena import INLINE_LIMIT_BYTES
from penstock.transport.packing import AsTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

__all__ = ["Targets", "split"]

_WHOLE: Final = None  # stands for the keys where a target is no dict, but an array


class Targets(list[Any]):
    """A list of targets, one per image: dicts with arrays in them, or arrays.

    It is a list in every way, and may be changed as one. It pickles by field, whatever is in it by
    then: arrays or CPU tensors that differ in their number of rows alone become one array; anything
    else is pickled as it is. What is unpickled is equal, and its arrays can be written to.

    Ownership:
        Arrays of an unpickled list are views of one array per field, and keep it alive.

    Example:
        >>> import pickle
        >>> targets = Targets({"boxes": np.zeros((n, 4), np.float32)} for n in (2, 0, 5))
        >>> again = pickle.loads(pickle.dumps(targets))
        >>> [target["boxes"].shape for target in again], again[0]["boxes"].base.shape
        ([(2, 4), (0, 4), (5, 4)], (7, 4))
    """

    def __copy__(self) -> Targets:
        """Return a list of the same targets, not of copies as unpickling would."""
        return Targets(self)

    def __reduce__(self) -> tuple[Callable[..., Targets], tuple[Any, ...]]:
        """Pickle by field."""
        if not self:
            return Targets, ()
        keys = _common_keys(self)
        if keys is _WHOLE:
            return _rebuilt, (_WHOLE, [_column(list(self), {})], len(self))
        if not keys:
            return Targets, (list(self),)
        known: dict[bytes, NDArray[np.int64]] = {}
        columns = [_column([target[key] for target in self], known) for key in keys]
        return _rebuilt, (keys, columns, len(self))


class _RaggedField(NamedTuple):
    """One field of all images: image k has `values[offsets[k] : offsets[k + 1]]`."""

    values: Any
    offsets: NDArray[np.int64]


def split(values: Any, offsets: NDArray[np.int64]) -> list[Any]:  # noqa: ANN401
    """Return the rows of each image, as views of an array, a tensor or an `AsTensor`."""
    spans = itertools.pairwise(offsets.tolist())
    if isinstance(values, AsTensor):
        return [AsTensor(values.array[start:stop], values.adapter) for start, stop in spans]
    return [values[start:stop] for start, stop in spans]


def _common_keys(targets: list[Any]) -> tuple[Any, ...] | None:
    """Return the keys of dicts, all alike; () for what is pickled as it is; None for no dicts."""
    if any(type(target) is not dict for target in targets):
        return () if any(type(target) is dict for target in targets) else _WHOLE
    keys = tuple(targets[0])
    return keys if all(tuple(target) == keys for target in targets) else ()


def _rebuilt(keys: tuple[Any, ...] | None, columns: list[Any], num_targets: int) -> Targets:
    lists = [split(*column) if isinstance(column, _RaggedField) else column for column in columns]
    if keys is _WHOLE:
        return Targets(lists[0])
    return Targets({k: c[n] for k, c in zip(keys, lists, strict=True)} for n in range(num_targets))


def _column(parts: list[Any], known: dict[bytes, NDArray[np.int64]]) -> _RaggedField | list[Any]:
    """Return one field of all images as one array, if that can be.

    Args:
        parts: The field of each image.
        known: Offsets of other fields by their bytes: those that are equal are pickled once.
    """
    values = _joined(parts)
    if values is None:
        return parts
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(_array_of(part)) for part in parts], out=offsets[1:])
    return _RaggedField(values, known.setdefault(offsets.tobytes(), offsets))


def _array_of(part: Any) -> Any:  # noqa: ANN401
    return part.array if type(part) is AsTensor else part


def _joined(parts: list[Any]) -> Any:  # noqa: ANN401
    """Return the rows of all parts; None if they are not all of one kind of array."""
    kind = type(parts[0])
    torch = sys.modules.get("torch")
    if any(type(part) is not kind for part in parts):
        return None
    if kind is AsTensor:
        joined = _joined([part.array for part in parts])
        return None if joined is None else AsTensor(joined, parts[0].adapter)
    if kind is np.ndarray:
        return _joined_arrays(parts) if _fit(parts) and not parts[0].dtype.hasobject else None
    if torch is not None and kind is torch.Tensor and _fit(parts) and all(map(_is_plain, parts)):
        return _joined_tensors(parts, torch)
    return None


def _fit(parts: list[Any]) -> bool:
    dtype, trailing = parts[0].dtype, parts[0].shape[1:]
    return parts[0].ndim > 0 and all(
        part.ndim and part.dtype == dtype and part.shape[1:] == trailing for part in parts
    )


def _is_plain(tensor: Any) -> bool:  # noqa: ANN401
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.requires_grad


def _joined_arrays(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Return the rows of all arrays; large ones not copied, if they lie one after another in one.

    That matters for masks, which may be larger than the image.
    """
    filled = [part for part in parts if part.size]
    if not filled or filled[0].base is None or filled[0].nbytes < INLINE_LIMIT_BYTES:
        return np.concatenate(parts)
    first = filled[0]
    address = first.__array_interface__["data"][0]
    for part in filled:
        is_next = part.base is first.base and part.flags.c_contiguous and part.flags.writeable
        if not is_next or part.__array_interface__["data"][0] != address:
            return np.concatenate(parts)
        address += part.nbytes
    shape = (sum(map(len, filled)), *first.shape[1:])
    return np.lib.stride_tricks.as_strided(first, shape, first.strides)


def _joined_tensors(parts: Sequence[Any], torch: Any) -> Any:  # noqa: ANN401
    filled = [part for part in parts if part.numel()]
    if not filled or filled[0].nbytes < INLINE_LIMIT_BYTES:
        return torch.cat(list(parts))
    first = filled[0]
    storage, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in filled:
        if part.untyped_storage().data_ptr() != storage or part.storage_offset() != offset:
            return torch.cat(list(parts))
        offset += part.numel()
    return first.as_strided((sum(map(len, filled)), *first.shape[1:]), first.stride())
