# SPDX-License-Identifier: Apache-2.0
"""Memory that a device goes on reading: locked while it is mapped, used again only afterwards."""

from __future__ import annotations

import ctypes
import gc
import itertools
import multiprocessing
import os
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.processes import holds_in_child
from tests.support.slots import deliver
from tests.transport.fake_page_lock import FakePageLock, kind_of_memory

from penstock import forks
from penstock.engine.backends import open_backend
from penstock.engine.plan import Epoch, Plan, WorkerSpec
from penstock.engine.scheduler import TaskDone
from penstock.engine.stream import SerialStream
from penstock.engine.task import Task
from penstock.transport.arena import Arena, BufferPool, Leases, SlotPool, SlotWriter, slot_size
from penstock.transport.memory import Mapping, anonymous_mapping, create_segment

GRACE_S = 30.0


class Large:
    """Sample i is 300,000 floats of value i: a batch of two lies in recycled memory everywhere."""

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        return np.full(300_000, index, np.float32)


def segment(size_bytes=100_000, page_lock=None):
    fd = create_segment(size_bytes)
    try:
        return Mapping(fd, size_bytes, page_lock=page_lock)
    finally:
        os.close(fd)


# Mappings


@pytest.mark.parametrize("make", [segment, anonymous_mapping])
def test_memory_is_locked_while_it_is_mapped(make):
    device = FakePageLock()
    mapping = make(100_000, page_lock=device)
    assert device.locked == {mapping.address: 100_000}
    view = mapping.bytes()
    del mapping
    assert device.size_bytes == 100_000  # the view keeps it
    address = view.ctypes.data
    device.begin_to_copy(view)
    del view
    assert (device.locked, device.num_locks, device.num_done) == ({}, 1, 1)
    assert device.mistakes == []
    assert kind_of_memory(address) is None


def test_memory_without_a_lock_stays_private_to_the_process():
    mapping = anonymous_mapping(100_000)
    assert kind_of_memory(mapping.address) == "rw-p"


@pytest.mark.parametrize("make", [segment, anonymous_mapping])
def test_a_forked_child_unmaps_what_it_inherits_and_unlocks_nothing(make):
    device = FakePageLock()
    mapping = make(100_000, page_lock=device)
    address = mapping.address

    def drop():
        nonlocal mapping
        device.begin_to_copy(mapping.bytes())  # an unlock that did anything would make it
        del mapping
        return kind_of_memory(address) is None and device.locked and device.num_done == 0

    assert holds_in_child(drop)
    assert kind_of_memory(address) == "rw-s"
    assert device.locked == {address: 100_000}
    del mapping
    assert (device.locked, device.mistakes) == ({}, [])


def unmap(address, size_bytes):
    assert ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes)) == 0


def test_memory_is_unmapped_when_the_lock_says_so_and_not_before():
    kept = []

    class Slow(FakePageLock):
        def _release(self, address, unmap):
            kept.append(unmap)

    mapping = segment(page_lock=Slow())
    address = mapping.address
    del mapping
    assert kind_of_memory(address) == "rw-s"
    kept.pop()()
    assert kind_of_memory(address) is None


def test_a_ctrl_c_while_memory_is_being_locked_leaks_it_and_no_descriptor():
    class Interrupted(FakePageLock):
        def lock(self, address, size_bytes):
            super().lock(address, size_bytes)
            raise KeyboardInterrupt

    device = Interrupted()
    arena, fd = Arena(device), create_segment(100_000)
    with pytest.raises(KeyboardInterrupt):
        arena.add([(0, 100_000)], [fd])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    del arena
    gc.collect()
    (address,) = device.locked
    assert kind_of_memory(address) == "rw-s"
    unmap(address, 100_000)


# Leases


class Gate:
    """A page lock whose fences a test opens."""

    def __init__(self):
        self.made = []

    def lock(self, address, size_bytes):
        return None

    def fence(self):
        self.made.append(OneGate())
        return self.made[-1]


class OneGate:
    is_open = False

    def is_over(self):
        return self.is_open


class LeasesMachine(RuleBasedStateMachine):
    """Leases that begin and end in any order, fences that open in any order."""

    def __init__(self):
        super().__init__()
        self.mapping = anonymous_mapping(4096)
        self.gates = Gate()
        self.leases = Leases(self.gates)
        self.views = {}
        self.ended = []  # not yet noticed, in order
        self.cooling = []  # (fence, items), in order
        self.num_started = 0

    @rule()
    def start(self):
        self.views[self.num_started] = self.leases.start(self.num_started, self.mapping)
        self.num_started += 1

    @precondition(lambda self: self.views)
    @rule(data=st.data(), in_thread=st.booleans())
    def end(self, data, in_thread):
        item = data.draw(st.sampled_from(sorted(self.views)))
        if in_thread:
            thread = threading.Thread(target=self.views.pop, args=(item,))
            thread.start()
            thread.join()
        else:
            del self.views[item]
        self.ended.append(item)

    @precondition(lambda self: self.cooling)
    @rule(data=st.data())
    def open(self, data):
        data.draw(st.sampled_from(self.cooling))[0].is_open = True

    @rule()
    def take(self):
        num_made = len(self.gates.made)
        taken = self.leases.take_ended()
        made = self.gates.made[num_made:]
        assert len(made) == (1 if self.ended else 0), "one fence, if any ended"
        if made:
            self.cooling.append((made[0], self.ended))
        self.ended = []
        expected = []
        while self.cooling and self.cooling[0][0].is_open:
            expected += self.cooling.pop(0)[1]
        assert taken == expected

    def teardown(self):
        for fence, _ in self.cooling:
            fence.is_open = True
        rest = [item for _, items in self.cooling for item in items]
        assert self.leases.take_ended() == rest
        if self.ended:
            self.gates.made[-1].is_open = True
            assert self.leases.take_ended() == self.ended


TestLeases = LeasesMachine.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class ArenaMachine(RuleBasedStateMachine):
    """A worker, a main process, and a device that is behind: it never reads what it was not noted.

    Other threads fork meanwhile; no slot is used again that was leased when a child appeared.
    """

    def __init__(self):
        super().__init__()
        self.device = FakePageLock()
        self.pool = SlotPool(max_free=2)
        self.writer = SlotWriter(self.pool)
        self.arena = Arena(self.device)
        self.held = []  # (slot, its bytes)
        self.num_batches = 0
        self.num_forks = 0  # under way, each in a thread of its own
        self.inherited = set()

    @rule(size=st.integers(4096, 200_000))
    def make_and_deliver(self, size):
        self.num_batches += 1
        array = self.writer.empty((size,), np.uint8)
        array[:] = self.num_batches % 251
        extent = self.writer.place(array)
        leased = deliver(self.pool, self.arena, self.writer.finish())
        self.held.append((extent.slot, np.frombuffer(leased[extent.slot], np.uint8)[:size]))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), is_copied=st.booleans())
    def drop_one(self, data, is_copied):
        _, array = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if is_copied:
            self.device.begin_to_copy(array)

    @rule(until_behind=st.integers(0, 5))
    def the_device_goes_on(self, until_behind):
        self.device.go_on(until_behind)

    @rule()
    def tell_the_worker(self):
        freed, retired = self.arena.take_freed()
        assert self.inherited.isdisjoint(freed)
        self.pool.release(freed)
        self.pool.retire(retired)

    @precondition(lambda self: self.num_forks < 2)
    @rule()
    def begin_a_fork(self):
        self.num_forks += 1
        forks._begun.append(0)

    @precondition(lambda self: self.num_forks)
    @rule()
    def a_child_appears(self):
        self.inherited.update(slot for slot, _ in self.held)

    @precondition(lambda self: self.num_forks)
    @rule()
    def end_a_fork(self):
        self.num_forks -= 1
        forks._over.append(0)

    @invariant()
    def nothing_is_wrong(self):
        assert self.device.mistakes == []
        slots = self.arena._slots.values()
        assert self.device.size_bytes == sum(slot.size_bytes for slot in slots)

    def teardown(self):
        while self.num_forks:
            self.end_a_fork()
        self.held.clear()
        del self.arena
        for new in self.pool.take_new():
            os.close(new.fd)
        assert (self.device.locked, self.device.mistakes) == ({}, [])
        assert self.device.num_done == self.device.num_begun


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def one_slot_batch(pool, arena, writer, size_bytes=100_000):
    extent = writer.reserve(size_bytes)
    leased = deliver(pool, arena, writer.finish())
    return extent.slot, np.frombuffer(leased[extent.slot], np.uint8)[:size_bytes]


def test_a_slot_that_cools_at_a_fork_comes_back_and_a_leased_one_does_not():
    device = FakePageLock()
    pool, arena = SlotPool(), Arena(device)
    writer = SlotWriter(pool)
    cooling, array = one_slot_batch(pool, arena, writer)
    leased, held = one_slot_batch(pool, arena, writer)
    device.begin_to_copy(array)
    del array
    assert arena.take_freed() == ([], [])
    assert holds_in_child(lambda: True)
    device.begin_to_copy(held)
    del held
    assert arena.take_freed() == ([], [])
    device.go_on(until_behind=1)
    assert arena.take_freed() == ([cooling], [])
    device.go_on()
    assert arena.take_freed() == ([], [leased])
    assert device.mistakes == []


def test_an_arena_that_ends_while_slots_cool_unlocks_them_and_then_unmaps_them():
    device = FakePageLock()
    pool, arena = SlotPool(), Arena(device)
    writer = SlotWriter(pool)
    _, array = one_slot_batch(pool, arena, writer)
    _, held = one_slot_batch(pool, arena, writer)
    address = array.ctypes.data
    device.begin_to_copy(array)
    del array
    assert arena.take_freed() == ([], [])
    del arena
    assert device.num_done == 1
    assert kind_of_memory(address) is None
    assert list(device.locked) == [held.ctypes.data]  # batches outlive the arena, locked
    device.begin_to_copy(held)
    del held
    assert (device.locked, device.num_done, device.mistakes) == ({}, 2, [])


@pytest.mark.parametrize("num_behind", [0, 1, 7, 20])
def test_a_device_that_is_so_many_batches_behind_takes_so_many_slots(num_behind):
    device = FakePageLock()
    pool, arena = SlotPool(), Arena(device)
    writer = SlotWriter(pool)
    sizes = []
    for _ in range(10 * (num_behind + 1)):
        _, array = one_slot_batch(pool, arena, writer)
        device.begin_to_copy(array)
        del array
        device.go_on(until_behind=num_behind)
        pool.release(arena.take_freed()[0])
        sizes.append(pool.size_bytes)
    assert max(sizes) == sizes[num_behind] == (num_behind + 1) * slot_size(100_000)
    assert device.num_locks == num_behind + 1
    assert device.mistakes == []


# The pool of one process


def test_the_pool_gives_memory_again_only_after_the_device_has_read_it():
    device = FakePageLock()
    pool = BufferPool(page_lock=device)
    address = (array := pool.empty((2_000_000,), np.uint8)).ctypes.data
    device.begin_to_copy(array)
    del array
    other = pool.empty((2_000_000,), np.uint8)
    assert other.ctypes.data != address
    device.go_on()
    assert pool.empty((2_000_000,), np.uint8).ctypes.data == address
    assert device.num_locks == 2
    assert pool.size_bytes == device.size_bytes
    del pool, other
    assert (device.locked, device.mistakes) == ({}, [])


def test_what_the_pool_gives_back_to_the_system_has_cooled():
    device = FakePageLock()
    pool = BufferPool(max_free_bytes=0, page_lock=device)
    device.begin_to_copy(pool.empty((2_000_000,), np.uint8))
    first = pool.empty((2_000_000,), np.uint8)
    assert (device.num_done, len(device.locked)) == (0, 2)
    device.go_on()
    second = pool.empty((2_000_000,), np.uint8)
    assert len(device.locked) == 2
    assert pool.size_bytes == device.size_bytes
    del first, second
    assert device.mistakes == []


def filled(pool, value):
    array = pool.empty((2_000_000,), np.uint8)
    array[:] = value
    return array


def test_the_pool_uses_nothing_again_that_a_forked_child_may_see():
    device = FakePageLock()
    pool = BufferPool(page_lock=device)
    held = [filled(pool, 1) for _ in range(4)]
    del held[2:]
    held.append(filled(pool, 1))  # one of two that came back; the other is free
    held.pop()  # and this one has come back by the fork, though no one has noticed
    go_read, go_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(go_read, 1)  # until the parent has used its memory
        own = [filled(pool, 4) for _ in range(4)]
        is_kept = all((array == 1).all() for array in held)
        os._exit(0 if is_kept and all((array == 4).all() for array in own) else 1)
    held.clear()
    again = [filled(pool, 3) for _ in range(4)]
    os.write(go_write, b"x")
    assert os.waitpid(pid, 0)[1] == 0
    os.close(go_read)
    os.close(go_write)
    assert all((array == 3).all() for array in again)
    assert pool.size_bytes == device.size_bytes == 4 * slot_size(2_000_000)
    again.clear()
    filled(pool, 5)
    assert device.num_locks == 8  # what came to be after the fork is used again
    del pool
    assert (device.locked, device.mistakes) == ({}, [])


def test_memory_that_is_private_is_used_again_after_a_fork():
    pool = BufferPool()
    address = pool.empty((2_000_000,), np.uint8).ctypes.data
    assert holds_in_child(lambda: pool.empty((2_000_000,), np.uint8).ctypes.data == address)
    assert pool.empty((2_000_000,), np.uint8).ctypes.data == address


# Backends

KINDS = [
    pytest.param(0, "process", None, id="serial"),
    pytest.param(2, "process", "fork", id="process-fork"),
    pytest.param(2, "process", "spawn", id="process-spawn"),
]


def opened(device, num_workers, backend, method):
    context = None if method is None else multiprocessing.get_context(method)
    # A lock cannot be pickled, so that a plan that travelled to a spawned worker would be seen.
    spec = WorkerSpec(Large(), is_iterable=False, is_batched=True)
    plan = Plan(spec, 0, num_workers, backend, context=context, page_lock=device)
    if num_workers == 0:
        pairs = ([2 * step, 2 * step + 1] for step in itertools.count())
        return SerialStream(plan, Epoch(0, pairs))
    opened = open_backend(plan)
    opened.start()
    opened.begin_epoch(Epoch(0, iter(())))
    return opened


def batches_of(backend, num_workers, count):
    """Yield batches, with two tasks under way per worker, as the order has it."""
    if num_workers == 0:
        batches = backend.batches(backend.epoch)
        for step in range(count):
            batch = next(batches)
            assert batch[:, -1].tolist() == [2 * step, 2 * step + 1]
            yield batch
            del batch
        return
    lookahead = 2 * num_workers
    for step in range(min(lookahead, count)):
        backend.submit(step % num_workers, Task(1, step, [2 * step, 2 * step + 1]))
    num_submitted, num_done, events = lookahead, 0, []
    while num_done < count:
        events = events or list(backend.events(GRACE_S))
        event = events.pop(0)
        assert isinstance(event, TaskDone)
        batch = event.outcome.batch()
        assert batch[:, -1].tolist() == [2 * event.step, 2 * event.step + 1]
        del event
        num_done += 1
        yield batch
        del batch
        if num_submitted < count:
            worker_id = num_submitted % num_workers  # in turn, however quick the other is
            backend.submit(
                worker_id, Task(1, num_submitted, [2 * num_submitted, 2 * num_submitted + 1])
            )
            num_submitted += 1


@pytest.mark.parametrize(("num_workers", "kind", "method"), KINDS)
def test_no_batch_is_written_where_the_device_still_reads(num_workers, kind, method):
    device = FakePageLock()
    backend = opened(device, num_workers, kind, method)
    for batch in batches_of(backend, num_workers, 24):
        device.begin_to_copy(batch)
        del batch
        device.go_on(until_behind=5)
    assert device.num_locks < 24  # they are used again
    backend.close()
    del backend
    gc.collect()
    device.go_on()
    assert (device.locked, device.mistakes) == ({}, [])
    assert device.num_done == 24


def test_worker_threads_lock_nothing():
    # Fences would be made in their threads, and the main process's may be capturing a graph.
    device = FakePageLock()
    backend = opened(device, 2, "thread", None)
    assert sum(1 for _ in batches_of(backend, 2, 8)) == 8
    backend.close()
    assert device.num_locks == 0


@pytest.mark.parametrize(("num_workers", "kind", "method"), KINDS[:2])
def test_memory_that_is_not_lockable_is_handed_out_as_it_is(num_workers, kind, method):
    device = FakePageLock(refuses=True)
    backend = opened(device, num_workers, kind, method)
    assert sum(1 for _ in batches_of(backend, num_workers, 8)) == 8
    backend.close()
    assert device.num_locks == 0


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_consumer_that_waits_for_its_device_now_and_then_has_no_slots_made_anew(num_workers):
    device = FakePageLock()
    backend = opened(device, num_workers, "process", "fork")
    num_locks = []
    for step, batch in enumerate(batches_of(backend, num_workers, 100)):
        device.begin_to_copy(batch)
        del batch
        if step % 10 == 9:
            device.go_on()
            num_locks.append(device.num_locks)
    assert num_locks[-1] <= 10 + 4 * num_workers
    backend.close()
    del backend
    gc.collect()
    assert (device.locked, device.mistakes) == ({}, [])


@pytest.mark.parametrize("kind", ["serial", "process"])
def test_batches_that_outlive_their_workers_stay_locked_as_long_as_they_are(kind):
    num_workers = 0 if kind == "serial" else 1
    device = FakePageLock()
    backend = opened(device, num_workers, kind, None)
    held = list(batches_of(backend, num_workers, 3))
    backend.close()
    del backend
    gc.collect()
    assert {array.ctypes.data for array in held} <= set(device.locked)
    device.begin_to_copy(held[1])
    held.clear()
    gc.collect()
    assert (device.locked, device.num_done, device.mistakes) == ({}, 1, [])
