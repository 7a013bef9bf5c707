# SPDX-License-Identifier: Apache-2.0
"""Where a worker's time goes."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from penstock.engine import status_page, timing
from penstock.engine.status_page import Phase, StatusWriter
from penstock.engine.timing import UNKNOWN, CoreTime, RunQueue, row_of_worker, sample_us_of
from penstock.insight.rows import Sums, rows_of
from penstock.torch import DataLoader


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
    monkeypatch.setattr(status_page, "time", clock)
    return clock


def spin(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_the_phases_of_a_task_add_up_to_it(clock):
    status = StatusWriter()
    status.begin_task(0, 0)
    clock.pass_by(2_000_000)
    status.phase(Phase.COLLATING)
    clock.pass_by(1_000_000)
    status.phase(Phase.SENDING)
    clock.pass_by(500)
    times = row_of_worker(status.take_times())
    assert (times.fetch_ns, times.collate_ns, times.send_ns) == (2_000_000, 1_000_000, 500)
    assert times.ended_ns - times.begun_ns == 3_000_500


def test_time_between_two_tasks_goes_into_the_second_and_nothing_else_does(clock):
    status = StatusWriter()
    status.begin_task(0, 0)
    clock.pass_by(5_000_000)
    status.phase(Phase.SENDING)
    status.take_times()
    clock.pass_by(2_000_000)  # sending goes on
    status.phase(Phase.WAITING)
    clock.pass_by(1_000_000)
    status.begin_task(0, 0)
    times = row_of_worker(status.take_times())
    assert (times.send_ns, times.idle_ns, times.fetch_ns) == (2_000_000, 1_000_000, 0)


def test_a_task_that_failed_leaves_nothing_to_the_next(clock):
    status = StatusWriter()
    status.begin_task(0, 0)
    clock.pass_by(3_000_000)
    status.phase(Phase.WAITING)
    status.begin_task(0, 0)
    assert row_of_worker(status.take_times()).fetch_ns == 0


class Core:
    """Work of which a CPU clock and the scheduler tell what the test says, and who asked."""

    def __init__(self, monkeypatch):
        self.cpu_ns = 0
        self.starved_ns = 0
        core = self

        class Queue:
            def waited_ns(self):
                return core.starved_ns

            def close(self):
                pass

        monkeypatch.setattr(timing, "RunQueue", Queue)
        self.time = CoreTime(lambda: self.cpu_ns)

    def work(self, took_ns, cpu_ns, starved_ns=0):
        """Return what is noted of a piece."""
        self.time.begin()
        self.cpu_ns += cpu_ns
        self.starved_ns += starved_ns
        return self.time.end(took_ns)


def test_each_piece_of_work_is_measured(monkeypatch):
    core = Core(monkeypatch)
    pieces = [(15_000_000 >> k, 1_000_000 * k, 1000 * k) for k in range(9)]
    assert [core.work(*piece) for piece in pieces] == [piece[1:] for piece in pieces]


def test_nothing_is_measured_of_work_that_another_thread_takes_over(monkeypatch):
    core = Core(monkeypatch)
    core.work(20_000_000, 10_000_000)
    core.time.begin()
    core.cpu_ns += 999_000_000
    noted = []
    thread = threading.Thread(target=lambda: noted.append(core.time.end(30_000_000)))
    thread.start()
    thread.join()
    assert noted == [(30_000_000, UNKNOWN)]


def test_where_the_system_does_not_tell_of_its_run_queue_nothing_is_made_up(monkeypatch):
    core = Core(monkeypatch)
    core.starved_ns = None
    for took_ns in (20_000_000, *[1000] * 100):
        core.time.begin()
        assert core.time.end(took_ns) == (0, UNKNOWN)


def test_a_task_switch_as_the_run_queue_is_read_is_part_of_the_task(clock, monkeypatch):
    core = Core(monkeypatch)

    def waited_ns(queue):
        waited_ns = core.starved_ns
        core.starved_ns += 1_000_000
        clock.pass_by(1_000_000)
        return waited_ns

    monkeypatch.setattr(timing.RunQueue, "waited_ns", waited_ns)
    status = StatusWriter(cpu_clock=lambda: 0)
    status.begin_task(0, 0)
    status.phase(Phase.SENDING)
    row = row_of_worker(status.take_times())
    assert row.starved_ns == row.fetch_ns == 1_000_000


def test_time_in_the_dataset_that_takes_no_cpu_is_reading_and_the_rest_is_computing():
    status = StatusWriter()
    status.begin_task(0, 0)
    blocked = threading.Event()
    blocked.wait(0.02)
    spin(0.005)
    status.phase(Phase.SENDING)
    row = row_of_worker(status.take_times())
    status.close()
    span = Sums.of(rows_of([row])).span()
    assert 0.015 < span.read_s <= row.fetch_ns / 1e9
    assert span.compute_s >= 0.004
    assert span.read_s + span.compute_s == pytest.approx(row.fetch_ns / 1e9)


def timed(durations):
    status = StatusWriter()
    for _ in range(2):  # the first task decides whether samples of the second are timed
        status.begin_task(0, 0)
        for number, seconds in enumerate(durations):
            status.sample(number)
            spin(seconds)
        status.phase(Phase.COLLATING)
        status.num_samples = len(durations)
        times = status.take_times()
    return times


def test_every_sample_is_timed():
    durations = [0.001, 0.004, 0.002]
    times = timed(durations)
    took_us = np.frombuffer(sample_us_of(times), np.uint32)
    assert (took_us >= np.array(durations) * 0.99e6).all()
    assert took_us.sum() * 1000 <= row_of_worker(times).fetch_ns


def test_samples_that_are_quick_are_not_timed():
    assert sample_us_of(timed([0.0] * 64)) == b""


def test_of_quick_samples_only_the_number_is_written():
    status = StatusWriter()
    followed = []
    for _ in range(32):
        status.begin_task(0, 0)
        followed.append(status.number_cell() is None)
        status.phase(Phase.COLLATING)
        status.num_samples = 1_000_000  # so quick that no pause of this process makes them slow
        status.take_times()
    # The first decides; later some are timed all the same, as samples may have become slow.
    assert [task for task, is_followed in enumerate(followed) if is_followed] == [0, 16]
    status.is_watched = True
    assert status.number_cell() is None


def test_a_sample_that_nobody_follows_is_named_when_it_fails(monkeypatch):
    followed = []
    monkeypatch.setattr(StatusWriter, "sample", lambda _, number: followed.append(number))

    class Quick:
        def __len__(self):
            return 600

        def __getitem__(self, index):
            if index == 500:
                raise ValueError("no such number")
            return index

    batches = iter(DataLoader(Quick(), batch_size=8))  # a seed would follow every sample
    for _ in range(62):
        next(batches)
    followed.clear()
    with pytest.raises(ValueError, match="no such number") as caught:
        next(batches)
    assert followed == []
    assert any("while reading sample 500 of the dataset" in n for n in caught.value.__notes__)


def test_samples_that_were_tried_twice_are_not_told():
    status = StatusWriter()
    status.begin_task(0, 0)
    for number in (0, 1, 1):
        status.sample(number)
        spin(0.001)
    status.phase(Phase.COLLATING)
    status.num_samples = 2
    assert sample_us_of(status.take_times()) == b""


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


def test_one_that_was_interrupted_before_it_began_is_dropped_in_silence(recwarn, capsys):
    # Ctrl-C between the making of the object and its first line: `__del__` still runs.
    RunQueue.__new__(RunQueue).__del__()
    assert not recwarn.list
    assert capsys.readouterr().err == ""
