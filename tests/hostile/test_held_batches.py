# SPDX-License-Identifier: Apache-2.0
"""A batch is the user's until the last view of it is garbage, whatever that view is."""

from __future__ import annotations

import gc
import os
import queue
import threading
from collections import deque
from pathlib import Path

import pytest
import torch
from tests.hostile.aliases import BACKENDS, Rows, lost
from tests.transport.fake_page_lock import FakePageLock

from penstock.torch import DataLoader
from penstock.torch import loader as loader_module


@pytest.fixture(autouse=True)
def one_thread_of_torch():
    """Threads that wait for each other cost more than the copies of these tests."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def check(backend, **options):
    wrong = lost(backend, **options)
    assert not wrong, (
        f"{wrong} do not show their batch any more; alone: "
        f"python -m tests.hostile.aliases {backend} {wrong[0]!r}"
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_alias_of_any_kind_keeps_its_batch(backend):
    check(backend)


@pytest.mark.parametrize(
    "backend", [b if b == "process" else pytest.param(b, marks=pytest.mark.slow) for b in BACKENDS]
)
def test_an_alias_of_any_kind_keeps_its_page_locked_batch(backend, monkeypatch):
    page_lock = FakePageLock()
    monkeypatch.setattr(loader_module, "page_lock_for", lambda _: page_lock)
    check(backend, device="cpu")
    assert page_lock.mistakes == []


class InCycle:
    """Holds a batch, and itself."""

    def __init__(self, batch):
        self.batch, self.itself = batch, self


def dropped(stream):
    yield from stream


def last_eight(stream):
    ring = deque(maxlen=8)
    for batch in stream:
        ring.append(batch)
        yield batch


def views_of_last_eight(stream):
    ring = deque(maxlen=8)
    for batch in stream:
        ring.append(batch[0].numpy()[1:, ::2])
        yield batch


def in_cycles(stream):
    """Only the garbage collector finds them."""
    for step, batch in enumerate(stream):
        InCycle(batch)
        if step % 20 == 0:
            gc.collect(1)
        yield batch


def in_another_thread(stream):
    batches = queue.Queue(maxsize=4)
    thread = threading.Thread(target=lambda: all(iter(batches.get, None)))
    thread.start()
    for batch in stream:
        batches.put(batch)
        yield batch
    batches.put(None)
    thread.join()


HOLDINGS = [dropped, last_eight, views_of_last_eight, in_cycles, in_another_thread]


def in_use():
    """Return bytes of memory that is resident, mappings and descriptors of this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return resident, len(maps), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("hold", HOLDINGS)
@pytest.mark.parametrize(
    ("backend", "num_batches"),
    [("process", 200), *(pytest.param(b, 2400, marks=pytest.mark.slow) for b in BACKENDS)],
)
def test_batches_that_are_held_in_any_way_grow_nothing(backend, hold, num_batches):
    num_workers, kind = BACKENDS[backend]
    loader = DataLoader(Rows(4 * num_batches), 4, num_workers=num_workers, backend=kind)
    before = None
    for step, _ in enumerate(hold(iter(loader))):
        if step == 120:
            gc.collect(1)
            before = in_use()
    gc.collect()
    # Slack: batches of 1 MiB that the ring and the workers may have at one moment and not another.
    for now, then, slack in zip(in_use(), before, (24 << 20, 40, 4), strict=True):
        assert now <= then + slack, f"{in_use()} after {before}"
