# SPDX-License-Identifier: Apache-2.0
"""Where a worker's time goes."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from penstock.engine.logbook import Notes, Phase
from penstock.engine.stopwatch import RunQueue, Stopwatch

NAMED = {"idle": 0, "fetch": 1, "collate": 2, "send": 3}


def spin(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_the_phases_of_a_task_add_up_to_it():
    watch = Stopwatch(4)
    watch.begin_task(1, carried=(0, 3))
    spin(0.002)
    watch.enter(2)
    spin(0.001)
    watch.enter(3)
    times = watch.take(**NAMED)
    assert times.fetch_ns >= 2_000_000
    assert times.collate_ns >= 1_000_000
    assert times.fetch_ns + times.collate_ns + times.send_ns == times.busy_ns


def test_time_between_two_tasks_goes_into_the_second_and_nothing_else_does():
    watch = Stopwatch(4)
    watch.begin_task(1, carried=(0, 3))
    spin(0.005)
    watch.enter(3)
    watch.take(**NAMED)
    spin(0.002)  # sending goes on
    watch.enter(0)
    spin(0.001)
    watch.begin_task(1, carried=(0, 3))
    times = watch.take(**NAMED)
    assert times.send_ns >= 2_000_000
    assert times.idle_ns >= 1_000_000
    assert times.fetch_ns < 5_000_000, "the task before was counted again"


def test_a_task_that_failed_leaves_nothing_to_the_next():
    watch = Stopwatch(4)
    watch.begin_task(1, carried=(0, 3))
    spin(0.003)
    watch.enter(0)
    watch.begin_task(1, carried=(0, 3))
    assert watch.take(**NAMED).fetch_ns < 3_000_000


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
