# SPDX-License-Identifier: Apache-2.0
"""One object for many processes: pickled once, its arrays in one segment that all of them map.

Each reader maps the segment copy-on-write: the arrays of a dataset take memory once, however many
workers there are, and a worker that writes to its dataset changes only its own copy, as after a
fork.
"""

from __future__ import annotations

import copyreg
import io
import mmap
import os
import pickle
import struct
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.transport.memory import Mapping, create_segment
from penstock.transport.packing import NeedsInheritance, dumps, take_large

if TYPE_CHECKING:
    from collections.abc import Callable

_PAGE_BYTES: Final = 4096  # arrays start on a page: a write copies no neighbour's page
_NUMBER: Final = struct.Struct("<Q")


def share(value: object, base: type[pickle.Pickler] = pickle.Pickler) -> int:
    """Return the descriptor of a segment that holds `value`; the caller closes it.

    `base` is what pickles it (`penstock.transport.packing.dumps`).

    Layout: size of the pickle, number of buffers, size of each buffer (uint64 each), the pickle,
    then the buffers, each on a page of its own.

    Raises:
        NeedsInheritance: it holds something that only `multiprocessing` can hand to a child.
        Exception: whatever pickling `value` raises.
    """
    buffers: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
    pickled = dumps(value, take_large(buffers), _of_multiprocessing(), base)
    head = b"".join(map(_NUMBER.pack, [len(pickled), len(buffers), *(b.nbytes for b in buffers)]))
    position = _page_up(len(head) + len(pickled))
    size_bytes = position + sum(_page_up(buffer.nbytes) for buffer in buffers)
    fd = create_segment(size_bytes)
    try:
        whole = Mapping(fd, size_bytes).bytes()
        whole[: len(head) + len(pickled)] = np.frombuffer(head + pickled, np.uint8)
        for buffer in buffers:
            whole[position : position + buffer.nbytes] = buffer
            position += _page_up(buffer.nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _of_multiprocessing() -> dict[type, Callable[[Any], Any]]:
    """Reducers for the types that `multiprocessing` has its own way with.

    What a connection, a socket or shared ctypes hand to a child is a descriptor that only the start
    of that child can pass on. Plain pickle would send its bare number, or refuse.
    """
    reducers: dict[type, Callable[[Any], Any]] = {}
    for kind, reduce in ForkingPickler(io.BytesIO()).dispatch_table.items():
        if kind in copyreg.dispatch_table:
            continue
        is_plain = kind.__module__ in ("builtins", "functools")  # bound methods, partials
        reducers[kind] = reduce if is_plain else _needs_inheritance
    return reducers


def _needs_inheritance(_: object) -> Any:  # noqa: ANN401 - never returns
    raise NeedsInheritance


def load_shared(fd: int) -> Any:  # noqa: ANN401 - whatever was shared
    """Return a copy of the shared value whose large arrays lie in the segment; `fd` is closed."""
    try:
        mapping = Mapping(fd, os.fstat(fd).st_size, flags=mmap.MAP_PRIVATE)
    finally:
        os.close(fd)
    data = mapping.bytes().data
    pickle_bytes, num_buffers = struct.unpack_from("<QQ", data)
    sizes = struct.unpack_from(f"<{num_buffers}Q", data, 2 * _NUMBER.size)
    start = (2 + num_buffers) * _NUMBER.size
    position = _page_up(start + pickle_bytes)
    buffers = []
    for size in sizes:
        buffers.append(data[position : position + size])
        position += _page_up(size)
    return pickle.loads(data[start : start + pickle_bytes], buffers=buffers)


def _page_up(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
