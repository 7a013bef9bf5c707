# SPDX-License-Identifier: Apache-2.0
"""The arena: slots of memory that batches are written into, used again and again.

    producer (a worker)                          consumer (the main process)
    SlotPool.acquire ── SlotWriter.empty ──┐
      free slots  ▲       bytes are written │  slot number, offsets; a new slot's descriptor once
                  │                         └──────────────▶  Arena.add / Arena.lease
                  └──────── numbers of slots whose last view is garbage ◀── Arena.take_freed
                            (and which no device reads any more)

Guarantees
    A slot is leased to one batch at a time: `acquire` never returns a slot that has not come back.
    No wait for a slot: when none is free a new one is made, so a consumer that holds on to its
    batches makes the arena grow and cannot block a worker or corrupt a batch. How far a worker runs
    ahead is bounded by its tasks (`prefetch_factor`), not by slots.
    A lease ends when the last view of it is garbage, in any order, in any thread.
    Where the consumer's memory is page-locked, what is no longer leased may still be read by a
    copy to a device. It cools until that is over, and only then comes back. See `page_lock`.
    Slots converge to the size of the largest batch; smaller ones, and free ones beyond `max_free`,
    are given up when they come back.

Assumptions
    Each worker has a pool of its own, so a worker that dies takes no other's memory with it, and
    the batches it already delivered stay valid: the consumer's mappings hold them.
"""

from __future__ import annotations

import math
import os
import sys
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from penstock import forks
from penstock.transport.memory import Mapping, anonymous_mapping, as_bytes, create_segment

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from penstock.transport.page_lock import Fence, PageLock

ItemT = TypeVar("ItemT")
_Lane = Literal["small", "large"]

ALIGNMENT_BYTES: Final = 64  # a cache line, and the widest vector load (AVX-512)
INLINE_LIMIT_BYTES: Final = 4096  # smaller leaves cost less inside the message than in a slot
_SMALL_BYTES: Final = 64 * 1024
_MIN_SLOT_BYTES: Final = 64 * 1024
MIN_POOLED_BYTES: Final = 1 << 20  # 256 page faults, some 60 us: ten times what a lease costs


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

    Small arrays and large ones have slots apart: who keeps the labels of a batch does not thereby
    keep its images.

    Attributes:
        size_bytes: Bytes of all slots of this pool, leased and free.

    Concurrency:
        One thread of the producer.
    """

    def __init__(self, max_free: int = 4) -> None:
        """Start with no slot at all."""
        self.size_bytes = 0
        self._max_free = max_free
        self._slots: dict[int, Mapping] = {}
        self._lanes: dict[int, _Lane] = {}
        # Last in, first out: the slot used last is warm in the caches.
        self._free: dict[_Lane, list[int]] = {"small": [], "large": []}
        self._wanted_bytes: dict[_Lane, int] = {"small": 0, "large": 0}
        self._next_slot = 0
        self._unsent: list[NewSlot] = []
        self._retired: list[int] = []
        self._making_ns = 0

    def mapping(self, slot: int) -> Mapping:
        """Return the memory of a slot of this pool."""
        return self._slots[slot]

    def acquire(self, lane: _Lane, size_bytes: int, new_bytes: int = 0) -> int:
        """Return the number of a slot of at least `size_bytes` that is not in use.

        Where none is free, the new one gets at least `new_bytes`, and room for the largest batch
        so far.
        """
        free = self._free[lane]
        for position in range(len(free) - 1, -1, -1):
            if self._slots[free[position]].size_bytes >= size_bytes:
                return free.pop(position)
        new_bytes = max(size_bytes, new_bytes)
        return self._create(lane, max(slot_size(new_bytes), self._wanted_bytes[lane]))

    def _create(self, lane: _Lane, size_bytes: int) -> int:
        begun_ns = time.monotonic_ns()
        fd = create_segment(size_bytes)
        try:
            mapping = Mapping(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise
        slot = self._next_slot
        self._next_slot += 1
        self._slots[slot] = mapping
        self._lanes[slot] = lane
        self._unsent.append(NewSlot(slot, size_bytes, fd))
        self.size_bytes += size_bytes
        self._making_ns += time.monotonic_ns() - begun_ns
        return slot

    def note_batch(self, lane: _Lane, size_bytes: int) -> None:
        """Remember how much a whole batch took, so that the next one finds it in one slot."""
        if size_bytes > self._wanted_bytes[lane]:
            self._wanted_bytes[lane] = slot_size(size_bytes)
            free, self._free[lane] = self._free[lane], []
            self.release(free)

    def release(self, slots: Sequence[int]) -> None:
        """Take back slots whose leases ended; too small and superfluous ones are given up."""
        for slot in slots:
            lane = self._lanes[slot]
            too_small = self._slots[slot].size_bytes < self._wanted_bytes[lane]
            if too_small or len(self._free[lane]) >= self._max_free:
                self.retire([slot])
            else:
                self._free[lane].append(slot)

    def retire(self, slots: Sequence[int]) -> None:
        """Give up slots whose leases ended."""
        for slot in slots:
            self.size_bytes -= self._slots[slot].size_bytes
            del self._slots[slot], self._lanes[slot]
        self._retired.extend(slots)

    def take_new(self) -> list[NewSlot]:
        """Return the slots that the consumer lacks; the caller owns their descriptors."""
        new, self._unsent = self._unsent, []
        return new

    def take_making_ns(self) -> int:
        """Return how long making slots has taken since the last call, in nanoseconds."""
        making_ns, self._making_ns = self._making_ns, 0
        return making_ns

    def take_retired(self) -> list[int]:
        """Return the slots that the consumer may unmap."""
        retired, self._retired = self._retired, []
        return retired


@dataclass(slots=True)
class _Head:
    """Where the next array of a lane goes: a slot, and how much of it is taken."""

    slot: int = -1
    mapping: Mapping | None = None
    offset: int = 0
    used_bytes: int = 0  # of this batch, over all its slots

    def has_room(self, size_bytes: int) -> bool:
        return self.mapping is not None and self.offset + size_bytes <= self.mapping.size_bytes


class SlotWriter:
    """Places the arrays of one batch into slots, one after the other.

    Usually a batch takes one slot, and another if it has small arrays as well. The first batches,
    and one larger than all before it, take several.
    """

    def __init__(self, pool: SlotPool) -> None:
        """Write into slots of `pool`."""
        self._pool = pool
        self._forget()

    def reserve(self, size_bytes: int) -> Extent:
        """Set aside `size_bytes`, aligned to 64 bytes."""
        lane: _Lane = "small" if size_bytes <= _SMALL_BYTES else "large"
        head = self._heads[lane]
        if not head.has_room(size_bytes):
            # At least as much as all before it: a batch of any size takes few slots, hence
            # descriptors.
            head.slot = self._pool.acquire(lane, size_bytes, head.used_bytes)
            head.mapping = self._pool.mapping(head.slot)
            head.offset = 0
            self._starts.append((head.slot, head.mapping.address, head.mapping.size_bytes))
        extent = Extent(head.slot, head.offset, size_bytes)
        head.offset += _aligned(size_bytes)
        head.used_bytes += _aligned(size_bytes)
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
        for lane, head in self._heads.items():
            self._pool.note_batch(lane, head.used_bytes)
        self._forget()
        return slots

    def abandon(self) -> None:
        """Give the slots back: there is no batch after all."""
        self._pool.release([slot for slot, _, _ in self._starts])
        self._forget()

    def _forget(self) -> None:
        self._starts: list[tuple[int, int, int]] = []  # (slot, address, size in bytes)
        self._heads: dict[_Lane, _Head] = {"small": _Head(), "large": _Head()}


class Leases(Generic[ItemT]):
    """Which pieces of memory are in use, by the garbage collector, and by the device.

    Attributes:
        inherited: Items whose leases have ended and that a forked child may go on seeing; the
            caller takes out what it has dealt with.

    With a page lock an item whose lease has ended cools: it comes back when the work that was
    queued on the devices at that moment is done. No call waits for that.

    Memory that cools is bounded by how far the consumer runs ahead of its device: by the batches
    that it has dropped since the step at which the device is. A training that looks at its loss
    now and then is a few steps ahead; otherwise the device's own queue is the bound, as it is for
    torch's pinned memory, which cools in the same way.

    Concurrency:
        One thread starts leases and takes ended ones. Views may die in any thread, at any moment, a
        collection inside this very code included.
    """

    def __init__(self, page_lock: PageLock | None = None) -> None:
        """Start with no lease."""
        # A weak reference calls back only while it exists itself, so they are kept here.
        self._items: dict[weakref.ref[object], tuple[ItemT, int]] = {}  # int: forks that were over
        self._ended: deque[weakref.ref[object]] = deque()
        self._page_lock = page_lock
        self._cooling: deque[tuple[Fence, list[ItemT]]] = deque()  # oldest first
        self.inherited: set[ItemT] = set()

    def start(self, item: ItemT, mapping: Mapping) -> memoryview:
        """Return all bytes of `mapping`; `item` comes back when every view is garbage."""
        num_forks = forks.num_over()  # read first: from here on a child may inherit the view
        view = mapping.view()
        # The callback is the deque's own append: it takes no lock, makes no cycle, and, running no
        # Python code, cannot be where a Ctrl-C is raised and lost (callbacks drop exceptions).
        self._items[weakref.ref(view, self._ended.append)] = item, num_forks
        return as_bytes(view).data

    def take_ended(self) -> list[ItemT]:
        """Return the items that may be used again, and have not been returned yet.

        Their leases have ended, and what devices had to do with them is over. Never waits.
        """
        ended = []
        while self._ended:
            item, num_forks = self._items.pop(self._ended.popleft())
            ended.append(item)
            if num_forks != forks.num_begun():
                self.inherited.add(item)
        return ended if self._page_lock is None else self._cooled(ended, self._page_lock)

    def _cooled(self, ended: list[ItemT], page_lock: PageLock) -> list[ItemT]:
        if ended:
            # Made only now: it says nothing of leases that end after it.
            self._cooling.append((page_lock.fence(), ended))
        cooled = []
        while self._cooling and self._cooling[0][0].is_over():
            cooled += self._cooling.popleft()[1]
        return cooled


class Arena:
    """The consumer's side of one producer's slots.

    Attributes:
        leases: Leases of the slots.

    Concurrency:
        One thread adds and leases; views may die in any thread.
    """

    def __init__(self, page_lock: PageLock | None = None) -> None:
        """Start with no slot."""
        self._page_lock = page_lock
        self.leases: Leases[int] = Leases(page_lock)
        self._slots: dict[int, Mapping] = {}

    def add(self, slots: Sequence[tuple[int, int]], fds: Sequence[int]) -> None:
        """Map new slots (number, bytes); all `fds` are closed, also if one cannot be mapped."""
        try:
            for (slot, size_bytes), fd in zip(slots, fds, strict=True):
                self._slots[slot] = Mapping(fd, size_bytes, page_lock=self._page_lock)
        finally:
            for fd in fds:
                os.close(fd)

    def lease(self, slots: Sequence[int]) -> dict[int, memoryview]:
        """Return all bytes of each slot; a slot comes back when every view of them is garbage."""
        return {slot: self.leases.start(slot, self._slots[slot]) for slot in slots}

    def remove(self, slots: Sequence[int]) -> None:
        """Forget slots that the producer gave up."""
        for slot in slots:
            del self._slots[slot]

    def take_freed(self) -> tuple[list[int], list[int]]:
        """Return slots that may be used again, and others that may not: a child may see them.

        A child that was forked while a slot was leased goes on seeing its bytes. Slots that cooled
        at the fork may be used again: no view of them was left that the child could inherit, and
        the device that reads them is this process's.
        """
        ended, inherited = self.leases.take_ended(), self.leases.inherited
        if not inherited:
            return ended, []
        retired = [slot for slot in ended if slot in inherited]
        inherited.difference_update(retired)
        return [slot for slot in ended if slot not in retired], retired


class BufferPool:
    """Recycled memory for batches that are made in the consumer's own process.

    The arena's promise without another process: an array from `empty` is the user's until its last
    view is garbage, and no device reads it any more; then its memory, whose pages are there
    already, serves a later batch.

    The memory is private to the process, unless it is page-locked: then forked children share it
    (see `anonymous_mapping`). So after a fork a pool begins anew, in the parent and in the child.

    Attributes:
        size_bytes: Bytes of all its memory: leased, cooling and free.

    Concurrency:
        One thread asks for arrays; they may be dropped in any, and any may fork.
    """

    def __init__(self, max_free_bytes: int = 256 << 20, page_lock: PageLock | None = None) -> None:
        """Start with no memory."""
        self._max_free_bytes = max_free_bytes
        self._page_lock = page_lock
        self._begin()

    def _begin(self) -> None:
        num_forks = forks.num_over()  # read first: from here on a child may inherit what there is
        self._free: list[Mapping] = []  # what came back last is last
        self._free_bytes = 0
        self.size_bytes = 0
        self._leases: Leases[Mapping] = Leases(self._page_lock)
        self._num_forks = num_forks

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Return an uninitialised array, the caller's until its last view is garbage."""
        dtype = np.dtype(dtype)
        size_bytes = dtype.itemsize * (shape if isinstance(shape, int) else math.prod(shape))
        if size_bytes < MIN_POOLED_BYTES or dtype.hasobject or sys.platform == "win32":
            return np.empty(shape, dtype)  # the C library recycles small blocks well enough
        mapping = self._take(slot_size(size_bytes))
        data = self._leases.start(mapping, mapping)
        return np.frombuffer(data[:size_bytes], dtype).reshape(shape)

    def _take(self, size_bytes: int) -> Mapping:
        for mapping in self._leases.take_ended():
            self._free.append(mapping)
            self._free_bytes += mapping.size_bytes
        while self._free_bytes > self._max_free_bytes:
            oldest = self._free.pop(0)
            self._free_bytes -= oldest.size_bytes
            self.size_bytes -= oldest.size_bytes
        self._leases.inherited.clear()  # of private memory a child has its own copy
        # Looked at last: none of what has come back by now is used if a child may see it.
        if self._page_lock is not None and self._num_forks != forks.num_begun():
            self._begin()
        for position in range(len(self._free) - 1, -1, -1):
            if self._free[position].size_bytes == size_bytes:
                self._free_bytes -= size_bytes
                return self._free.pop(position)
        self.size_bytes += size_bytes
        return anonymous_mapping(size_bytes, self._page_lock)
