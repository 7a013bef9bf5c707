# SPDX-License-Identifier: Apache-2.0
"""Datasets and batches as Ray's object store takes them: a small pickle, and arrays beside it.

Ray lays the arrays of what a task returns into its store (one copy, at the speed of memory) and
gives them out again as views of it, on the same machine without a copy. It gives them out as
read-only, since any number of processes may see an object. A batch has one reader, the main process
that it was made for, so `writable` lets that one write into it, as into every other backend's
batches.

What is defined in the main process's `__main__`, as in a notebook, is pickled by value
(cloudpickle).
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import importlib
import io
import warnings
from collections import ChainMap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.transport.arena import INLINE_LIMIT_BYTES
from penstock.transport.packing import REDUCERS, load_all

if TYPE_CHECKING:
    import pickle
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["Parcel", "WritableMemory", "address_of", "open_parcel", "pack_parcel", "value_of"]

_COPIED_BYTES: Final = 64 * 1024  # copying so little costs less than asking whose memory it is
_MAPS: Final = Path("/proc/self/maps")


class Parcel(NamedTuple):
    """A pickled tree.

    Attributes:
        pickled: The tree, without its large buffers.
        buffers: Those, in the order in which the pickle asks for them; each 1-D, uint8.
    """

    pickled: bytes
    buffers: list[npt.NDArray[np.uint8]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all of it."""
        return len(self.pickled) + sum(buffer.nbytes for buffer in self.buffers)


@functools.cache
def _pickler_class() -> Any:  # noqa: ANN401 - a class of Ray's
    base: Any = importlib.import_module("ray.cloudpickle").CloudPickler
    # Of the class: C reads it when a pickler is made, and not what is assigned to one later.
    return type(
        "ParcelPickler", (base,), {"dispatch_table": ChainMap(REDUCERS, base.dispatch_table)}
    )


def pack_parcel(tree: object) -> Parcel:
    """Return `tree` as a parcel, whose buffers are views of the tree's own memory.

    Raises:
        Exception: whatever pickling raises.
    """
    buffers: list[npt.NDArray[np.uint8]] = []

    def keep_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        data = np.frombuffer(buffer.raw(), np.uint8)
        if data.nbytes < INLINE_LIMIT_BYTES:
            return True
        buffers.append(data)
        return False

    file = io.BytesIO()
    _pickler_class()(file, protocol=5, buffer_callback=keep_in_pickle).dump(tree)
    return Parcel(file.getvalue(), buffers)


def value_of(parcel: Parcel) -> Any:  # noqa: ANN401 - any tree at all
    """Return the tree again; its large arrays alias the buffers, and are as read-only as these."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return load_all(parcel.pickled, [buffer.data for buffer in parcel.buffers])


def open_parcel(parcel: Parcel, memory: WritableMemory) -> Any:  # noqa: ANN401 - any tree at all
    """Return a tree that is the caller's own: its large arrays alias the buffers, to be written."""
    return load_all(parcel.pickled, memory.views(parcel.buffers))


def address_of(array: npt.NDArray[Any]) -> int:
    """Return where its memory begins."""
    address: int = array.__array_interface__["data"][0]
    return address


class WritableMemory:
    """Knows which memory of this process may be written, whatever an array says of itself.

    Concurrency:
        One thread.
    """

    def __init__(self) -> None:
        """Know nothing yet: the system is asked at need."""
        self._starts: list[int] = []
        self._ends: list[int] = []

    def views(self, buffers: Sequence[npt.NDArray[np.uint8]]) -> list[memoryview]:
        """Return the bytes of each, which may be written and keep their buffer alive.

        What lies in memory that the system would not let us write is copied.
        """
        return [self._view(buffer) for buffer in buffers]

    def _view(self, buffer: npt.NDArray[np.uint8]) -> memoryview:
        if buffer.flags.writeable:
            return buffer.data
        address = address_of(buffer)
        if buffer.nbytes < _COPIED_BYTES or not self._is_writable(address, buffer.nbytes):
            return buffer.copy().data
        whole = (ctypes.c_ubyte * buffer.nbytes).from_address(address)
        whole.owner = buffer  # type: ignore[attr-defined]  # an instance of a class made just now
        return memoryview(whole).cast("B")

    def _is_writable(self, address: int, num_bytes: int) -> bool:
        if not self._is_known(address, num_bytes):
            self._ask()
        return self._is_known(address, num_bytes)

    def _is_known(self, address: int, num_bytes: int) -> bool:
        k = bisect.bisect_right(self._starts, address) - 1
        return k >= 0 and address + num_bytes <= self._ends[k]

    def _ask(self) -> None:
        """Read which ranges are mapped shared and writable, as the store's memory is."""
        self._starts, self._ends = [], []
        try:
            lines = _MAPS.read_text().splitlines()
        except OSError:  # not Linux
            return
        for line in lines:
            span, rights = line.split(maxsplit=2)[:2]
            if rights.startswith("rw") and rights.endswith("s"):
                start, end = (int(number, 16) for number in span.split("-"))
                self._starts.append(start)
                self._ends.append(end)
