# SPDX-License-Identifier: Apache-2.0
"""Where a worker's time goes."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from penstock.engine import stopwatch
from penstock.engine.logbook import Notes, Phase
from penstock.engine.stopwatch import RunQueue, Stopwatch

NAMED = {"idle": 0, "fetch": 1, "collate": 2, "send": 3}


class Clock:
    """Time that passes when the test says so."""

    def __init__(self):
        self.now_ns = 1_000

    def monotonic_ns(self):
        return self.now_ns

    def process_time_ns(self):
        return self.now_ns

    def pass_by(self, nanoseconds):
        self.now_ns += nanoseconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stopwatch, "time", clock)
    return clock


def spin(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_the_phases_of_a_task_add_up_to_it(clock):
    watch = Stopwatch(4)
    watch.begin_task(1, carried=(0, 3))
    clock.pass_by(2_000_000)
    watch.enter(2)
    clock.pass_by(1_000_000)
    watch.enter(3)
    clock.pass_by(500)
    times = watch.take(**NAMED)
    assert (times.fetch_ns, times.collate_ns, times.send_ns) == (2_000_000, 1_000_000, 500)
    assert times.busy_ns == 3_000_500


def test_time_between_two_tasks_goes_into_the_second_and_nothing_else_does(clock):
    watch = Stopwatch(4)
    watch.begin_task(1, carried=(0, 3))
    clock.pass_by(5_000_000)
    watch.enter(3)
    watch.take(**NAMED)
    clock.pass_by(2_000_000)  # sending goes on
    watch.enter(0)
    clock.pass_by(1_000_000)
    watch.begin_task(1, carried=(0, 3))
    times = watch.take(**NAMED)
    assert (times.send_ns, times.idle_ns, times.fetch_ns) == (2_000_000, 1_000_000, 0)


def test_a_task_that_failed_leaves_nothing_to_the_next(clock):
    watch = Stopwatch(4)
    watch.begin_task(1, carried=(0, 3))
    clock.pass_by(3_000_000)
    watch.enter(0)
    watch.begin_task(1, carried=(0, 3))
    assert watch.take(**NAMED).fetch_ns == 0


def test_of_short_tasks_all_time_is_taken_for_computing_and_of_long_ones_it_is_asked(clock):
    asked = []

    def cpu_clock():
        asked.append(clock.now_ns)
        return 7

    watch = Stopwatch(4, cpu_clock)
    times = []
    for took_ns in (100_000, 100_000, 5_000_000, 5_000_000):
        watch.begin_task(1, carried=(0, 3))
        clock.pass_by(took_ns)
        times.append(watch.take(**NAMED))
    assert [t.cpu_ns for t in times] == [0, 100_000, 5_000_000, 0]
    assert len(asked) == 4, "once before and once after the first and the last"


def test_time_in_the_dataset_that_takes_no_cpu_is_reading_and_the_rest_is_computing():
    notes = Notes()
    notes.begin_task(0, 0)
    blocked = threading.Event()
    blocked.wait(0.02)
    spin(0.005)
    notes.phase(Phase.SENDING)
    times = notes.take_times()
    assert 0.015e9 < times.read_ns <= times.fetch_ns
    assert times.compute_ns >= 4_000_000
    assert times.read_ns + times.compute_ns == times.fetch_ns


def timed(durations):
    notes = Notes()
    for _ in range(2):  # the first task decides whether samples of the second are timed
        notes.begin_task(0, 0)
        for number, seconds in enumerate(durations):
            notes.sample(number)
            spin(seconds)
        notes.phase(Phase.COLLATING)
        notes.batch_of(len(durations))
        times = notes.take_times()
    return times


def test_every_sample_is_timed():
    durations = [0.001, 0.004, 0.002]
    took_us = np.frombuffer(timed(durations).sample_us, np.uint32)
    assert (took_us >= np.array(durations) * 0.99e6).all()
    assert took_us.sum() * 1000 <= timed(durations).fetch_ns * 10


def test_samples_that_are_quick_are_not_timed():
    assert timed([0.0] * 64).sample_us == b""


def test_samples_that_were_tried_twice_are_not_told():
    notes = Notes()
    notes.begin_task(0, 0)
    for number in (0, 1, 1):
        notes.sample(number)
        spin(0.001)
    notes.phase(Phase.COLLATING)
    notes.batch_of(2)
    assert notes.take_times().sample_us == b""


@pytest.mark.skipif(
    not os.path.exists("/proc/thread-self/schedstat"), reason="the kernel tells nothing"
)
def test_the_time_on_the_run_queue_grows_and_its_descriptor_is_closed():
    queue = RunQueue()
    first = queue.waited_ns()
    spin(0.01)
    assert queue.waited_ns() >= first >= 0
    queue.close()
    queue.close()
    assert queue.waited_ns() is None
