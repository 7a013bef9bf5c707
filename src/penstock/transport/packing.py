# SPDX-License-Identifier: Apache-2.0
"""A tree of anything, to a small message plus bytes in slots, and back.

The walk is pickle's own (protocol 5): whatever pickles comes through with its exact type, shared
references included, and every library that hands out its memory as a `PickleBuffer` (numpy, pandas,
Arrow, and torch through `REDUCERS`) gets it placed in the slot. Buffers of 4 KiB and more go there,
64-byte aligned; smaller ones stay in the message. What a default collate wrote into the slot is
recognised by its address and not copied again.

The two ends are processes of one program that trust each other; nothing here reads a file or a
network.
"""

from __future__ import annotations

import copyreg
import importlib
import io
import pickle
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.transport.arena import INLINE_LIMIT_BYTES, Extent, SlotWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_MESSAGE_LIMIT_BYTES: Final = 32 * 1024  # a longer pickle goes into the slot: channels stay snappy

REDUCERS: Final[dict[type, Callable[[Any], Any]]] = {}
"""Type -> `__reduce__`-like function, for types whose own pickling does not use protocol-5 buffers.

One table for the process, as `copyreg` has one, since how a type is pickled depends on no loader:
datasets are pickled before there is a worker, and loaders of arrays may be given tensors. The exact
type counts. `penstock.torch.leaves` adds torch's.
"""


class NeedsInheritance(Exception):
    """Raised by a reducer for what only `multiprocessing` can hand to a starting process."""


class Packed(NamedTuple):
    """A packed tree: what travels, while the bytes stay where they are.

    Attributes:
        pickle: The tree without its large buffers, or the place where that lies in a slot.
        buffers: Where the large buffers lie, in the order in which the pickle asks for them.
        slots: Every slot taken by this batch.
    """

    pickle: bytes | Extent
    buffers: tuple[Extent, ...]
    slots: tuple[int, ...]


def dumps(
    tree: object,
    take_buffer: Callable[[pickle.PickleBuffer], bool] | None = None,
    reducers: Mapping[type, Callable[[Any], Any]] | None = None,
    base: type[pickle.Pickler] = pickle.Pickler,
) -> bytes:
    """Return `tree` pickled with `REDUCERS`, without the buffers `take_buffer` is false for."""
    file = io.BytesIO()
    if base is pickle.Pickler:
        pickler = base(file, protocol=5, buffer_callback=take_buffer)
        pickler.dispatch_table = {**copyreg.dispatch_table, **(reducers or {}), **REDUCERS}
    else:  # C reads the table of a subclass when a pickler is made
        table = {**base.dispatch_table, **(reducers or {}), **REDUCERS}
        own = type(base.__name__, (base,), {"dispatch_table": table})
        pickler = own(file, protocol=5, buffer_callback=take_buffer)
    pickler.dump(tree)
    return file.getvalue()


def take_large(
    buffers: list[np.ndarray[Any, np.dtype[np.uint8]]],
) -> Callable[[pickle.PickleBuffer], bool]:
    """Return a `take_buffer` that moves buffers of 4 KiB and more from the pickle to `buffers`."""

    def take_buffer(buffer: pickle.PickleBuffer) -> bool:
        data = np.frombuffer(buffer.raw(), np.uint8)
        is_large = data.nbytes >= INLINE_LIMIT_BYTES
        if is_large:
            buffers.append(data)
        return not is_large

    return take_buffer


def pack(tree: object, writer: SlotWriter) -> Packed:
    """Return `tree` packed through `writer`, whose slots are leased from now on.

    Raises:
        Exception: whatever pickling raises; the writer's slots are given back then.
    """
    buffers: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
    try:
        pickled = dumps(tree, take_large(buffers), _OF_BATCHES)
        placed = tuple(map(writer.place, buffers))
        message: bytes | Extent = pickled
        if len(pickled) > _MESSAGE_LIMIT_BYTES:
            message = writer.place(np.frombuffer(pickled, np.uint8))
    except BaseException:
        writer.abandon()
        raise
    return Packed(message, placed, tuple(writer.finish()))


def _reduce_array(array: np.ndarray[Any, Any]) -> Any:  # noqa: ANN401
    # What is received is the user's own to write to. Pickle would have a read-only array stay so.
    if not array.flags.writeable:
        array = array.copy(order="K")
    return array.__reduce_ex__(5)


_OF_BATCHES: Final[Mapping[type, Callable[[Any], Any]]] = {np.ndarray: _reduce_array}


def unpack(packed: Packed, slots: dict[int, memoryview]) -> Any:  # noqa: ANN401 - any tree at all
    """Return the tree again; its large arrays alias `slots`, which they keep alive."""
    message = packed.pickle
    data = message if isinstance(message, bytes) else _slice(slots, message)
    return pickle.loads(data, buffers=[_slice(slots, extent) for extent in packed.buffers])


def _slice(slots: dict[int, memoryview], extent: Extent) -> memoryview:
    slot, offset, size_bytes = extent  # of a packed tree that has crossed: a plain tuple
    return slots[slot][offset : offset + size_bytes]


class AsTensor:
    """An array that becomes a tensor where it is unpacked.

    A worker that has not imported torch collates in numpy, and the main process, which has, gets
    tensors: of the function `tensor_of` of the module `adapter` (`penstock.engine.plan.Framework`).
    """

    __slots__ = ("adapter", "array")

    def __init__(self, array: np.ndarray[Any, Any], adapter: str) -> None:
        """Mark `array`."""
        self.array = array
        self.adapter = adapter

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Pickle as the call that makes the tensor."""
        return _make_tensor, (self.array, self.adapter)


def _make_tensor(array: np.ndarray[Any, Any], adapter: str) -> object:
    return importlib.import_module(adapter).tensor_of(array)
