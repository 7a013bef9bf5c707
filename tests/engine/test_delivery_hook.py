# SPDX-License-Identifier: Apache-2.0
"""What is done with a batch before the loop gets it: when, in which order, and when it fails."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref

import numpy as np
import pytest
from tests.engine.streams import open_stream

from penstock.engine.backends.process import ProcessBackend
from penstock.engine.fault_log import FaultLog
from penstock.engine.plan import Epoch, Plan, WorkerSpec
from penstock.engine.scheduler import WorkerReady
from penstock.epochs import EpochIterator
from penstock.errors import WorkerDied
from penstock.faults import policy_of

NUM_STEPS = 12
WORKERS = [(0, "process"), (2, "process"), (2, "thread")]


class Batch(np.ndarray):
    """An array that can be referred to weakly."""


class Rows:
    """Sample k is k; -1 raises, -2 ends its worker."""

    def __len__(self):
        return NUM_STEPS

    def __getitem__(self, index):
        if index == -1:
            raise ValueError("a bad sample")
        if index == -2:
            os._exit(5)
        return np.array(index)


class Recorded:
    """A hook that notes its calls; a batch is handed over as (batch, where)."""

    def __init__(self, *, begins_ahead=True, refused=()):
        self.begins_ahead = begins_ahead
        self.refused = refused
        self.calls = []
        self.num_closed = 0

    def without_autograd(self):
        return contextlib.nullcontext()

    def begin(self, batch, where):
        number = int(np.asarray(batch).ravel()[0])
        self.calls.append(("begin", number))
        if number in self.refused:
            raise MemoryError(f"no room for {where()}")
        return batch, where()

    def finish(self, begun):
        self.calls.append(("finish", int(np.asarray(begun[0]).ravel()[0])))
        return begun

    def close(self):
        self.num_closed += 1


def epoch_of(indices, number=0):
    return Epoch(number, iter([[index] for index in indices]))


def batches_of(hook, workers=(2, "process"), indices=range(NUM_STEPS), policy="raise", **options):
    num_workers, backend = workers
    spec = WorkerSpec(Rows(), is_iterable=False, is_batched=True, faults=policy_of(policy))
    plan = Plan(spec, 0, num_workers=num_workers, backend=backend, **options)
    faults = FaultLog(spec.faults, spec.dataset)
    return EpochIterator(open_stream(plan, epoch_of(indices), faults, None, hook))


def look_until(stream, *steps):
    """Let the stream decode what has arrived, until these steps have."""
    while not {*steps} <= stream._scheduler.done.keys():
        for event in stream.backend.events(None):
            stream._handle(event)


def when_ready(batches):
    """Take a batch, when the one after it has arrived as well."""
    stream = batches._stream
    if stream.backend is None:  # nothing is made before it is asked for
        return next(batches)
    step = stream.epoch.progress.given.num_steps
    scheduler = stream._scheduler
    while len(scheduler._tasks) > 1 and not {step, step + 1} <= scheduler.done.keys():
        for event in stream.backend.events(None):
            stream._handle(event)
    return next(batches)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("begins_ahead", [True, False])
def test_each_batch_is_begun_and_finished_once_in_order_and_named(workers, begins_ahead):
    hook = Recorded(begins_ahead=begins_ahead)
    given = list(batches_of(hook, workers))
    assert [int(batch[0]) for batch, _ in given] == list(range(NUM_STEPS))
    assert [where for _, where in given] == [f"epoch 0, step {k}" for k in range(NUM_STEPS)]
    for kind in ("begin", "finish"):
        assert [k for what, k in hook.calls if what == kind] == list(range(NUM_STEPS))
    assert hook.num_closed >= 1


@pytest.mark.parametrize("workers", WORKERS[1:])
def test_the_next_batch_is_begun_before_this_one_is_given_if_it_is_there(workers):
    hook = Recorded()
    batches = batches_of(hook, workers, prefetch_factor=8)
    for step in range(NUM_STEPS - 1):
        look_until(batches._stream, step, step + 1)
        next(batches)
        assert hook.calls[-2:] == [("begin", step + 1), ("finish", step)]
    next(batches)
    assert hook.calls[-1] == ("finish", NUM_STEPS - 1)
    batches.close()


@pytest.mark.parametrize("workers", WORKERS)
def test_what_fails_on_the_way_is_raised_in_its_own_turn_and_the_others_come(workers):
    hook = Recorded(refused=(3, 4))
    batches = batches_of(hook, workers)
    seen = []
    while True:
        try:
            seen.append(int(next(batches)[0][0]))
        except MemoryError as error:
            seen.append(str(error))
        except StopIteration:
            break
    named = ["no room for epoch 0, step 3", "no room for epoch 0, step 4"]
    assert seen == [0, 1, 2, *named, *range(5, NUM_STEPS)]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_batch_of_which_nothing_is_left_is_not_handed_over(workers):
    hook = Recorded()
    with pytest.warns(UserWarning, match="left out"):
        given = list(batches_of(hook, workers, indices=[0, -1, 2], policy="skip"))
    assert [int(batch[0]) for batch, _ in given] == [0, 2]
    assert ("begin", -1) not in hook.calls


@pytest.mark.parametrize("workers", WORKERS)
def test_what_was_begun_ahead_does_not_count_as_given(workers):
    batches = batches_of(Recorded(), workers, prefetch_factor=4)
    for step in range(5):
        when_ready(batches)
        assert batches.epoch.progress.given.num_steps == step + 1
    batches.close()


def test_a_worker_that_dies_takes_no_batch_that_is_there_with_it():
    hook = Recorded()
    batches = batches_of(hook, (1, "process"), indices=[0, 1, -2], prefetch_factor=3)
    assert [int(next(batches)[0][0]) for _ in range(2)] == [0, 1]
    with pytest.raises(WorkerDied):
        next(batches)
    assert hook.num_closed == 1


def break_when_nobody_waits(monkeypatch, backend):
    events = backend.events

    def broken(timeout_s):
        if timeout_s == 0.0:
            raise OSError("the channel broke")
        return events(timeout_s)

    monkeypatch.setattr(backend, "events", broken)


def test_what_fails_while_looking_ahead_is_raised_after_the_batch(monkeypatch):
    batches = batches_of(Recorded(), (1, "process"), prefetch_factor=1)
    break_when_nobody_waits(monkeypatch, batches._stream.backend)
    assert int(next(batches)[0][0]) == 0
    with pytest.raises(OSError, match="the channel broke"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("workers", WORKERS[1:])
def test_kept_workers_go_on_in_the_next_epoch_and_what_was_begun_is_dropped(workers):
    hook = Recorded()
    batches = batches_of(hook, workers, keep_workers=True)
    when_ready(batches)
    batches._stream.begin_epoch(epoch_of([7, 8, 9], number=1))
    given = list(EpochIterator(batches._stream))
    assert [int(batch[0]) for batch, _ in given] == [7, 8, 9]
    assert given[0][1] == "epoch 1, step 0"
    batches.close()


def test_a_batch_that_was_begun_is_let_go_of_when_the_stream_is_left():
    dead = []

    class Held(Recorded):
        def begin(self, batch, where):
            batch = batch.view(Batch)
            dead.append(weakref.ref(batch))
            return super().begin(batch, where)

    gc.disable()
    try:
        batches = batches_of(Held(), (2, "thread"), prefetch_factor=4)
        when_ready(batches)
        batches.close()
        del batches
        assert dead
        assert all(ref() is None for ref in dead)
    finally:
        gc.enable()


class Interrupted(Recorded):
    """Ctrl-C hits while the second batch is begun."""

    def begin(self, batch, where):
        if self.calls:
            raise KeyboardInterrupt
        return super().begin(batch, where)


def test_ctrl_c_while_a_batch_is_begun_ahead_closes_the_stream_and_counts_nothing():
    batches = batches_of(Interrupted(), (2, "process"), prefetch_factor=4)
    look_until(batches._stream, 0, 1)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert batches.epoch.progress.given.num_steps == 0
    with pytest.raises(StopIteration):
        next(batches)


def test_a_sampler_that_raises_while_looking_ahead_keeps_no_workers_alive(monkeypatch):
    def broken():
        yield from ()
        raise KeyError("the sampler")

    # Worker 1 is ready only when the stream looks ahead, and its first step is drawn then.
    monkeypatch.setattr(ProcessBackend, "await_start", lambda backend: (1,))
    batches = batches_of(Recorded(), indices=[0, 1], max_workers=2, prefetch_factor=1)
    stream = batches._stream
    stream._tasks = broken()
    with monkeypatch.context() as patched:
        patched.setattr(stream.backend, "events", lambda timeout_s: [WorkerReady(1)])
        stream._begin_next(stream._hook)
    assert stream._overdue
    ref = weakref.ref(stream)
    gc.disable()
    try:
        del stream, batches
        assert ref() is None
    finally:
        gc.enable()
