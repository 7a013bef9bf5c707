# SPDX-License-Identifier: Apache-2.0
"""The arena: slots of memory that batches are written into, used again and again.

    producer (a worker)                          consumer (the trainer)
    SlotPool.acquire ── SlotWriter.empty ──┐
      free slots  ▲       bytes are written │  slot number, offsets; a new slot's descriptor once
                  │                         └──────────────▶  Arena.add / Arena.lease
                  └──────── numbers of slots whose last view is garbage ◀── Arena.take_freed

Guarantees
    A slot is leased to one batch at a time: `acquire` never returns a slot that has not come back.
    Nobody ever waits for a slot. When none is free a new one is made, so a consumer that holds on
    to its batches makes the arena grow and cannot block a worker or corrupt a batch. How far a
    worker runs ahead is bounded by its tasks (`prefetch_factor`), not by slots.
    A lease ends when the last view of it is garbage, in any order, in any thread.
    Slots converge to the size of the largest batch; smaller ones, and free ones beyond `max_free`,
    are given up when they come back.

Assumptions
    Each worker has a pool of its own, so a worker that dies takes no other's memory with it, and
    the batches it already delivered stay valid: the consumer's mappings hold them.
"""

from __future__ import annotations

import math
import os
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

import numpy as np

from penstock.transport.memory import Mapping, anonymous_mapping, as_bytes, create_segment

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

ItemT = TypeVar("ItemT")

__all__ = [
    "ALIGNMENT_BYTES",
    "INLINE_LIMIT_BYTES",
    "Arena",
    "BufferPool",
    "Extent",
    "NewSlot",
    "SlotPool",
    "SlotWriter",
    "slot_size",
]

ALIGNMENT_BYTES: Final = 64  # a cache line, and the widest vector load (AVX-512)
INLINE_LIMIT_BYTES: Final = 4096  # smaller leaves cost less inside the message than in a slot
_MIN_SLOT_BYTES: Final = 64 * 1024
_MIN_POOLED_BYTES: Final = 1 << 20  # 256 page faults, some 60 us: ten times what a lease costs


class Extent(NamedTuple):
    """Where some bytes lie: slot number, offset and length in bytes."""

    slot: int
    offset: int
    size_bytes: int


class NewSlot(NamedTuple):
    """A slot the other side has not seen yet; the descriptor `fd` is to be sent and then closed."""

    slot: int
    size_bytes: int
    fd: int


def slot_size(size_bytes: int) -> int:
    """Return the size of the slot made for a batch of `size_bytes`.

    Eight sizes to the octave: at most an eighth is wasted, and batches that differ a little share
    slots.

    Example:
        >>> slot_size(1_000_000)
        1048576
    """
    size_bytes = max(size_bytes, _MIN_SLOT_BYTES)
    step = 1 << max(size_bytes.bit_length() - 4, 12)
    return -(-size_bytes // step) * step


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class SlotPool:
    """The slots that one producer writes into.

    Concurrency:
        One thread of the producer.
    """

    def __init__(self, max_free: int = 4) -> None:
        """Start with no slot at all.

        Args:
            max_free: Free slots kept for reuse; more are given up as they come back. Enough is one
                per batch that may be under way at a time.
        """
        self._max_free = max_free
        self._slots: dict[int, Mapping] = {}
        self._free: list[int] = []  # last in, first out: the slot used last is warm in the caches
        self._wanted_bytes = 0
        self._next_slot = 0
        self._unsent: list[NewSlot] = []
        self._retired: list[int] = []

    def mapping(self, slot: int) -> Mapping:
        """Return the memory of a slot of this pool."""
        return self._slots[slot]

    def acquire(self, size_bytes: int, new_bytes: int = 0) -> int:
        """Return the number of a slot of at least `size_bytes` that nobody else uses.

        Where none is free, the new one gets at least `new_bytes`, and room for the largest batch so
        far.
        """
        for position in range(len(self._free) - 1, -1, -1):
            if self._slots[self._free[position]].size_bytes >= size_bytes:
                return self._free.pop(position)
        return self._create(max(slot_size(size_bytes), slot_size(new_bytes), self._wanted_bytes))

    def _create(self, size_bytes: int) -> int:
        fd = create_segment(size_bytes)
        try:
            mapping = Mapping(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise
        slot = self._next_slot
        self._next_slot += 1
        self._slots[slot] = mapping
        self._unsent.append(NewSlot(slot, size_bytes, fd))
        return slot

    def note_batch(self, size_bytes: int) -> None:
        """Remember how much a whole batch took, so that the next one finds it in one slot."""
        if size_bytes > self._wanted_bytes:
            self._wanted_bytes = slot_size(size_bytes)
            free, self._free = self._free, []
            self.release(free)

    def release(self, slots: Sequence[int]) -> None:
        """Take back slots whose leases ended; too small and superfluous ones are given up."""
        for slot in slots:
            too_small = self._slots[slot].size_bytes < self._wanted_bytes
            if too_small or len(self._free) >= self._max_free:
                self._retire(slot)
            else:
                self._free.append(slot)

    def _retire(self, slot: int) -> None:
        del self._slots[slot]
        self._retired.append(slot)

    def take_new(self) -> list[NewSlot]:
        """Return the slots not yet told to the consumer; their descriptors are the caller's."""
        new, self._unsent = self._unsent, []
        return new

    def take_retired(self) -> list[int]:
        """Return the slots that the consumer may unmap."""
        retired, self._retired = self._retired, []
        return retired

    def close(self) -> None:
        """Give up all slots, and close the descriptors that nobody took."""
        for new in self.take_new():
            os.close(new.fd)
        self._slots.clear()
        self._free.clear()

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots of this pool, leased and free."""
        return sum(mapping.size_bytes for mapping in self._slots.values())


class SlotWriter:
    """Places the arrays of one batch into slots, one after the other.

    Usually a batch takes one slot. The first batches, and one larger than all before it, take
    several.
    """

    def __init__(self, pool: SlotPool) -> None:
        """Write into slots of `pool`."""
        self._pool = pool
        self._starts: list[tuple[int, int, int]] = []  # (slot, address, size in bytes), latest last
        self._offset = 0
        self._used_bytes = 0

    def reserve(self, size_bytes: int) -> Extent:
        """Set aside `size_bytes`, aligned to 64 bytes."""
        if not self._starts or self._offset + size_bytes > self._starts[-1][2]:
            # At least as much as all before it: a batch of any size takes few slots, hence
            # descriptors.
            slot = self._pool.acquire(size_bytes, self._used_bytes)
            mapping = self._pool.mapping(slot)
            self._starts.append((slot, mapping.address, mapping.size_bytes))
            self._offset = 0
        extent = Extent(self._starts[-1][0], self._offset, size_bytes)
        self._offset += _aligned(size_bytes)
        self._used_bytes += _aligned(size_bytes)
        return extent

    def bytes_at(self, extent: Extent) -> npt.NDArray[np.uint8]:
        """Return the bytes of `extent` as a view, shape (size_bytes,), uint8."""
        whole = self._pool.mapping(extent.slot).bytes()
        return whole[extent.offset : extent.offset + extent.size_bytes]

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Return an uninitialised C-contiguous array; from 4 KiB on it lies in the slot.

        The array is valid until the batch has been sent. Copy it to keep it.
        """
        dtype = np.dtype(dtype)
        size_bytes = dtype.itemsize * (shape if isinstance(shape, int) else math.prod(shape))
        if size_bytes < INLINE_LIMIT_BYTES or dtype.hasobject:
            return np.empty(shape, dtype)
        return self.bytes_at(self.reserve(size_bytes)).view(dtype).reshape(shape)

    def place(self, data: npt.NDArray[np.uint8]) -> Extent:
        """Return where `data` (1-D, uint8) lies in a slot; copied unless it is there already."""
        address: int = data.__array_interface__["data"][0]
        for slot, start, size_bytes in self._starts:
            if start <= address and address + data.nbytes <= start + size_bytes:
                return Extent(slot, address - start, data.nbytes)
        extent = self.reserve(data.nbytes)
        self.bytes_at(extent)[:] = data
        return extent

    def finish(self) -> list[int]:
        """Return the slots this batch was written into and forget them: they are now leased."""
        slots = [slot for slot, _, _ in self._starts]
        if slots:
            self._pool.note_batch(self._used_bytes)
        self._forget()
        return slots

    def abandon(self) -> None:
        """Give the slots back: there is no batch after all."""
        self._pool.release([slot for slot, _, _ in self._starts])
        self._forget()

    def _forget(self) -> None:
        self._starts = []
        self._offset = self._used_bytes = 0


class Leases(Generic[ItemT]):
    """Knows which pieces of memory are in use, by asking the garbage collector.

    Concurrency:
        Views may die in any thread, at any moment, a collection inside this very code included.
    """

    def __init__(self) -> None:
        """Start with no lease."""
        self._ended: deque[ItemT] = deque()  # append and popleft are atomic: no lock to deadlock on
        # A weak reference calls back only while it exists itself, so they are kept here.
        self._running: dict[weakref.ref[object], ItemT] = {}

    def start(self, item: ItemT, mapping: Mapping) -> memoryview:
        """Return all bytes of `mapping`; `item` comes back when every view is garbage."""
        view = mapping.view()
        # A partial of the containers, not a bound method: no cycle may keep their owner alive.
        self._running[weakref.ref(view, partial(_end_lease, self._running, self._ended))] = item
        return as_bytes(view).data

    def take_ended(self) -> list[ItemT]:
        """Return the items whose leases have ended since the last call."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def __len__(self) -> int:
        """Leases that are running."""
        return len(self._running)


def _end_lease(
    running: dict[weakref.ref[object], ItemT],
    ended: deque[ItemT],
    reference: weakref.ref[object],
) -> None:
    ended.append(running.pop(reference))


class Arena:
    """The consumer's side of one producer's slots.

    Concurrency:
        One thread adds and leases; views may die in any thread.
    """

    def __init__(self) -> None:
        """Start with no slot."""
        self._slots: dict[int, Mapping] = {}
        self._leases: Leases[int] = Leases()

    def add(self, slot: int, size_bytes: int, fd: int) -> None:
        """Map a new slot; `fd` is closed."""
        try:
            self._slots[slot] = Mapping(fd, size_bytes)
        finally:
            os.close(fd)

    def lease(self, slots: Sequence[int]) -> dict[int, memoryview]:
        """Return all bytes of each slot; a slot comes back when every view of them is garbage."""
        return {slot: self._leases.start(slot, self._slots[slot]) for slot in slots}

    def remove(self, slots: Sequence[int]) -> None:
        """Forget slots that the producer gave up."""
        for slot in slots:
            del self._slots[slot]

    def take_freed(self) -> list[int]:
        """Return the slots whose leases have ended since the last call."""
        return self._leases.take_ended()

    @property
    def num_leases(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots mapped here, leased and free."""
        return sum(mapping.size_bytes for mapping in self._slots.values())


class BufferPool:
    """Recycled private memory for batches that are made in the consumer's own process.

    The arena's promise without another process: an array from `empty` is the user's until its last
    view is garbage; then its memory, whose pages are there already, serves a later batch.
    """

    def __init__(self, max_free_bytes: int = 256 << 20) -> None:
        """Start with no memory.

        Args:
            max_free_bytes: Free memory kept for reuse; what comes back beyond it goes to the
                system.
        """
        self._max_free_bytes = max_free_bytes
        self._free: dict[int, list[Mapping]] = {}
        self._free_bytes = 0
        self._leases: Leases[Mapping] = Leases()

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Return an uninitialised array, the caller's until its last view is garbage."""
        dtype = np.dtype(dtype)
        size_bytes = dtype.itemsize * (shape if isinstance(shape, int) else math.prod(shape))
        if size_bytes < _MIN_POOLED_BYTES or dtype.hasobject:
            return np.empty(shape, dtype)  # the C library recycles such blocks well enough
        data = self._leases.start(mapping := self._take(slot_size(size_bytes)), mapping)
        return np.frombuffer(data[:size_bytes], dtype).reshape(shape)

    def _take(self, size_bytes: int) -> Mapping:
        for mapping in self._leases.take_ended():
            if self._free_bytes + mapping.size_bytes <= self._max_free_bytes:
                self._free.setdefault(mapping.size_bytes, []).append(mapping)
                self._free_bytes += mapping.size_bytes
        free = self._free.get(size_bytes)
        if not free:
            return anonymous_mapping(size_bytes)
        self._free_bytes -= size_bytes
        return free.pop()
