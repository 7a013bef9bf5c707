# SPDX-License-Identifier: Apache-2.0
"""`DataLoader(device=...)` from the workers' slots to a device that lags behind: a fake one."""

from __future__ import annotations

import random

import pytest
import torch
from tests.device.fake import CONSUMER, COPIES, FakeAccelerator
from tests.transport.fake_page_lock import FakePageLock

from penstock.torch import DataLoader, DevicePrefetcher
from penstock.torch import loader as loader_module

WORKERS = [(0, "process"), (1, "process"), (3, "process"), (2, "thread")]
SIZE = 2000  # float32: beyond what travels inside a message
MOST_STEPS_BEHIND = 8


class Rows(torch.utils.data.Dataset):
    """Sample k is full of k."""

    def __init__(self, length=200):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((SIZE,), float(index)), index


@pytest.fixture
def device(monkeypatch):
    accelerator = FakeAccelerator()
    monkeypatch.setattr(loader_module, "open_accelerator", lambda _: accelerator)
    return accelerator


@pytest.fixture
def page_lock(monkeypatch):
    lock = FakePageLock()
    monkeypatch.setattr(loader_module, "page_lock_for", lambda _: lock)
    return lock


def loader_of(workers, length=200, **options):
    num_workers, backend = workers
    return DataLoader(
        Rows(length),
        batch_size=2,
        num_workers=num_workers,
        backend=backend,
        device="auto",
        **options,
    )


def firsts(read):
    """Return the first number of every row that the main process's queue read."""
    return [row[0] for batch in read for row in batch]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("pace", ["at once", "late", "by chance"])
def test_the_device_reads_every_batch_right_however_late_it_comes_to_it(
    device, page_lock, workers, pace
):
    chance = random.Random(3)
    for images, _ in loader_of(workers):
        device.use(images)
        if pace == "at once":
            device.drain()
        elif pace == "by chance":
            for _ in range(chance.randrange(12)):
                device.advance(chance.choice([COPIES, CONSUMER]))
    device.drain()
    assert firsts(device.read) == [float(k) for k in range(200)]
    assert all(set(row) == {row[0]} for batch in device.read for row in batch)
    assert page_lock.mistakes == []


@pytest.mark.parametrize("workers", WORKERS[1:3])
def test_a_device_that_lags_does_not_make_memory_grow(device, page_lock, workers):
    sizes = []
    loader = loader_of(workers, length=600, prefetch_factor=2)
    for images, _ in loader:
        device.use(images)
        sizes.append(page_lock.size_bytes)
        while sum(what is not None for _, what in device.queues[CONSUMER]) > 40:
            device.advance(CONSUMER)
    device.drain()
    assert len(device.read) == 300
    slots = MOST_STEPS_BEHIND + 2 + workers[0] * 2 + 4  # copied, begun, under way, free
    assert max(sizes) <= 64 * 1024 * 2 * slots * workers[0]


@pytest.mark.parametrize("workers", WORKERS)
def test_the_loop_may_be_left_at_any_moment(device, page_lock, workers):
    batches = iter(loader_of(workers))
    for _ in range(3):
        images, _ = next(batches)
        device.use(images)
    batches.close()
    del batches, images
    device.drain()
    assert firsts(device.read) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert page_lock.mistakes == []


@pytest.mark.parametrize("workers", WORKERS)
def test_a_copy_that_fails_names_step_and_device_and_the_next_batch_comes(
    device, page_lock, workers
):
    batches = iter(loader_of(workers, length=12))
    seen, notes = [], []
    for number in range(6):
        try:
            _, labels = next(batches)
        except torch.OutOfMemoryError as error:
            notes = error.__notes__
            failed = number
        else:
            device.drain()
            seen.append(int(labels[0]))
        if number == 0:
            device.trouble = torch.OutOfMemoryError("no room")
    batches.close()
    assert "cuda:0" in "".join(notes)
    assert f"epoch 0, step {failed}" in "".join(notes)
    assert seen == [k for k in range(0, 12, 2) if k != 2 * failed]
    assert page_lock.mistakes == []


@pytest.mark.parametrize("workers", WORKERS[1:])
def test_the_next_copy_is_begun_before_this_batch_is_given(device, page_lock, workers):
    loader = loader_of(workers, length=24, prefetch_factor=8)
    batches = iter(loader)
    stream = batches._stream
    for step in range(11):
        while not {step, step + 1} <= stream._scheduler.done.keys():
            for event in stream.backend.events(None):
                stream._handle(event)
        next(batches)
        num_copied = device.asked(COPIES).count("copy")
        assert num_copied == 2 * (step + 2), "images and labels of this batch and the next"
    batches.close()


@pytest.mark.parametrize("workers", WORKERS)
def test_slots_are_unlocked_once_each_when_workers_go(device, page_lock, workers):
    for images, _ in loader_of(workers):
        device.use(images)
    device.drain()
    del images
    assert page_lock.mistakes == []
    assert page_lock.locked == {}
    if workers[0] and workers[1] == "process":
        assert 0 < page_lock.num_locks <= 40


def test_a_prefetcher_of_our_loader_goes_the_same_way(device, page_lock):
    num_workers = 2
    loader = DataLoader(Rows(), batch_size=2, num_workers=num_workers)
    prefetcher = DevicePrefetcher(loader, "cpu")
    for images, _ in prefetcher:
        device.use(images)
    device.drain()
    assert firsts(device.read) == [float(k) for k in range(200)]
    assert page_lock.num_locks > 0
    assert loader.stats().run.batches == 100
