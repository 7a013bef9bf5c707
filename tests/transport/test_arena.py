# SPDX-License-Identifier: Apache-2.0
"""Slots, leases, and the memory behind them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.support.slots import deliver

from penstock.errors import TransportError
from penstock.transport import memory
from penstock.transport.arena import Arena, BufferPool, SlotPool, SlotWriter, slot_size
from penstock.transport.memory import Mapping, create_segment


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:penstock" in line for line in maps)


@given(st.integers(0, 1 << 40))
def test_a_slot_is_large_enough_and_wastes_no_more_than_an_eighth(size_bytes):
    size = slot_size(size_bytes)
    assert size >= size_bytes
    assert size % 4096 == 0
    assert size <= max(size_bytes * 9 / 8, size_bytes + 4096, 64 * 1024)


class LeaseMachine(RuleBasedStateMachine):
    """A worker and a main process that do anything in any order; every batch keeps its bytes."""

    def __init__(self):
        super().__init__()
        self.pool = SlotPool(max_free=2)
        self.writer = SlotWriter(self.pool)
        self.arena = Arena()
        self.held = []  # (array that aliases a slot, the value it was filled with)
        self.in_use = {}  # slot -> number of the batch that leases it
        self.num_batches = 0

    @rule(sizes=st.lists(st.integers(4096, 300_000), min_size=1, max_size=4))
    def make_and_deliver(self, sizes):
        self.num_batches += 1
        arrays = [self.writer.empty((size,), np.uint8) for size in sizes]
        for array in arrays:
            array[:] = self.num_batches % 251
        extents = [self.writer.place(array) for array in arrays]
        for extent in extents:
            assert extent.offset % 64 == 0
        slots = self.writer.finish()
        for slot in slots:
            assert slot not in self.in_use, "a slot was given out while it was leased"
            self.in_use[slot] = self.num_batches
        leased = deliver(self.pool, self.arena, slots)
        views = [
            np.frombuffer(leased[e.slot], np.uint8)[e.offset : e.offset + e.size_bytes]
            for e in extents
        ]
        self.held.append((views, self.num_batches % 251))

    @rule(sizes=st.lists(st.integers(4096, 100_000), min_size=1, max_size=3))
    def fail_to_make(self, sizes):
        for size in sizes:
            self.writer.empty((size,), np.uint8)[:] = 255
        self.writer.abandon()

    @rule(data=st.data())
    def drop_one(self, data):
        if self.held:
            del self.held[data.draw(st.integers(0, len(self.held) - 1))]

    @rule()
    def tell_the_worker(self):
        freed, _ = self.arena.take_freed()
        for slot in freed:
            del self.in_use[slot]
        self.pool.release(freed)

    def teardown(self):
        for new in self.pool.take_new():
            os.close(new.fd)

    @invariant()
    def held_batches_keep_their_bytes(self):
        for views, value in self.held:
            for view in views:
                assert (view[::997] == value).all()
                assert view[-1] == value


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_slot_comes_back_when_the_last_view_is_garbage_and_not_before():
    pool, arena = SlotPool(), Arena()
    writer = SlotWriter(pool)
    extent = writer.reserve(10_000)
    leased = deliver(pool, arena, writer.finish())
    array = np.frombuffer(leased[extent.slot], np.float32)
    row = array.reshape(-1, 4)[3]
    del leased, array
    gc.collect()
    assert arena.take_freed() == ([], [])
    del row
    assert arena.take_freed() == ([extent.slot], [])


def test_views_may_die_in_any_thread():
    pool, arena = SlotPool(), Arena()
    writer = SlotWriter(pool)
    boxes = []
    for _ in range(50):
        extent = writer.reserve(5000)
        boxes.append([deliver(pool, arena, writer.finish())[extent.slot]])
    threads = [threading.Thread(target=box.clear) for box in boxes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(arena.take_freed()[0]) == list(range(50))


def test_batches_outlive_the_arena():
    pool, arena = SlotPool(), Arena()
    writer = SlotWriter(pool)
    writer.empty((5000,), np.uint8)[:] = 7
    slots = writer.finish()
    array = np.frombuffer(deliver(pool, arena, slots)[slots[0]], np.uint8)
    del arena, pool, writer
    gc.collect()
    assert (array[:5000] == 7).all()


def test_slots_converge_to_the_largest_batch():
    pool, arena = SlotPool(), Arena()
    writer = SlotWriter(pool)
    for size in (100_000, 200_000, 3_000_000, 150_000, 3_000_000, 150_000):
        writer.reserve(size)
        deliver(pool, arena, writer.finish())
        pool.release(arena.take_freed()[0])
    arena.remove(pool.take_retired())
    assert len(pool._slots) == 1
    assert pool.size_bytes == slot_size(3_000_000)
    assert len(arena._slots) == 1


def test_descriptors_and_mappings_do_not_grow_with_held_batches_nor_stay_after_them():
    fds, mappings = num_fds(), num_mappings()
    pool, arena = SlotPool(), Arena()
    writer = SlotWriter(pool)
    held = []
    for _ in range(100):
        writer.reserve(100_000)
        held.append(deliver(pool, arena, writer.finish()))
    assert num_fds() == fds
    held.clear()
    pool.release(arena.take_freed()[0])
    arena.remove(pool.take_retired())
    assert num_mappings() <= mappings + 2 * 4  # max_free slots, mapped on both sides
    del pool, arena, writer
    gc.collect()
    assert num_mappings() == mappings


def test_empty_arrays_below_the_limit_and_of_objects_are_ordinary_memory():
    pool = SlotPool()
    writer = SlotWriter(pool)
    writer.empty((10,), np.float32)
    writer.empty((10_000,), object)
    assert writer.finish() == []
    assert pool.size_bytes == 0


def test_memory_that_cannot_be_had_is_an_error_that_says_how_much():
    fd = create_segment(4096)
    try:
        with pytest.raises(TransportError, match="cannot map 1,125,899,906,842,624 bytes"):
            Mapping(fd, 1 << 50)
    finally:
        os.close(fd)


READS_IN_FINALIZERS = """
import gc
from penstock.transport.memory import anonymous_mapping

class Reader:
    def __del__(self):
        print(self.view[0])

early = Reader()
mapping = anonymous_mapping(1 << 20)
late = Reader()
early.other, late.other = late, early
early.view = late.view = memoryview(mapping.view()).cast("B")
del early, mapping, late
gc.collect()
"""


def test_memory_can_be_read_by_all_finalizers_of_a_cycle_that_holds_it():
    found = subprocess.run(
        [sys.executable, "-c", READS_IN_FINALIZERS], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout) == (0, "0\n0\n"), found.stderr


def test_the_buffer_pool_gives_the_same_memory_again_only_after_the_last_view():
    pool = BufferPool()
    first = pool.empty((300, 1000), np.float32)
    address = first.ctypes.data
    second = pool.empty((300, 1000), np.float32)
    assert second.ctypes.data != address
    row = first[5]
    del first
    assert pool.empty((300, 1000), np.float32).ctypes.data != address
    del row
    assert pool.empty((300, 1000), np.float32).ctypes.data == address


def test_the_buffer_pool_keeps_no_more_than_it_may():
    pool = BufferPool(max_free_bytes=0)
    array = pool.empty((2_000_000,), np.uint8)
    del array
    pool.empty((10_000_000,), np.uint8)
    assert pool._free_bytes == 0


def test_the_buffer_pool_makes_room_for_sizes_that_are_in_use():
    pool = BufferPool(max_free_bytes=20 << 20)
    held = [pool.empty((2 << 20,), np.uint8) for _ in range(9)]
    held.clear()
    addresses = set()
    for _ in range(10):
        addresses.add(pool.empty((3 << 20,), np.uint8).ctypes.data)
    assert len(addresses) == 1
    assert pool._free_bytes <= 20 << 20


def test_the_fallback_without_memfd_shares_memory_and_leaves_no_name(monkeypatch):
    monkeypatch.setattr(memory, "_nameless_fd", memory._unlinked_shm_fd)
    before = set(os.listdir("/dev/shm"))
    fd = create_segment(100_000)
    assert set(os.listdir("/dev/shm")) == before
    assert not os.get_inheritable(fd)
    one, two = Mapping(fd, 100_000), Mapping(fd, 100_000)
    os.close(fd)
    np.frombuffer(one.view(), np.uint8)[:] = 9
    assert (np.frombuffer(two.view(), np.uint8) == 9).all()
