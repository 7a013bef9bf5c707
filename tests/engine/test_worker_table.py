# SPDX-License-Identifier: Apache-2.0
"""What the main process makes of results and deaths, without a worker."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine.plan import (
    BatchIndices,
    Epoch,
    Given,
    Plan,
    Progress,
    ShardPosition,
    WorkerSpec,
)
from penstock.engine.scheduler import TaskDone, WorkerExhausted, WorkerReady
from penstock.engine.status_page import Phase, StatusSnapshot
from penstock.engine.task import Kind, Task, TaskResult, report_exception
from penstock.engine.worker_table import KnownWorker, WorkerTable


class Worker(KnownWorker):
    def __str__(self):
        return f"worker {self.worker_id} (pid {self.pid})"


def table_of(num_workers=2, *, is_iterable=False, begun=True):
    spec = WorkerSpec(list(range(100)), is_iterable, is_batched=True, batch_size=2)
    table = WorkerTable(Plan(spec, base_seed=7, num_workers=num_workers))
    for worker_id in range(num_workers):
        table.add(Worker(worker_id, 10 + worker_id))
    if begun:
        table.begin_epoch(Epoch(0, iter(())))
    return table


def task_for(table, worker, step, generation=None, indices=(3, 4)):
    task = Task(generation or table.generation, step, indices)
    worker.note(task)
    return task


def result_of(task, kind=Kind.DONE, **fields):
    return TaskResult(task.generation, task.step, kind, **fields)


def snapshot(task, phase=Phase.READING, number=None):
    return StatusSnapshot(task.generation, task.step, phase, number, (), 0, 1.5)


def test_a_result_of_the_epoch_is_an_event_and_its_task_is_answered():
    table = table_of()
    worker = table.workers[1]
    task = task_for(table, worker, 5)
    assert list(worker.tasks) == [(1, 5)]
    result = result_of(task, payload="batch")
    assert table.accept(worker, result) == TaskDone(1, 5, result)
    assert (result.pid, worker.tasks) == (11, {})


def test_what_comes_of_an_earlier_epoch_is_dropped():
    table = table_of()
    worker = table.workers[0]
    task = task_for(table, worker, 0)
    table.begin_epoch(Epoch(1, iter(())))
    assert worker.tasks == {}
    assert table.accept(worker, result_of(task)) is None


def test_what_comes_of_a_worker_that_is_gone_or_was_replaced_is_dropped():
    table = table_of()
    worker = table.workers[0]
    task = task_for(table, worker, 0)
    table.add(Worker(0, 99))
    assert table.accept(worker, result_of(task)) is None
    other = table.workers[1]
    task = task_for(table, other, 1)
    table.death(other, table.activity(other, snapshot(task)), "It ended", "")
    assert table.accept(other, result_of(task)) is None


def test_a_worker_that_joins_is_ready_in_its_epoch_only():
    table = table_of()
    worker = table.workers[0]
    ready = TaskResult(1, -1, Kind.READY)
    assert table.accept(worker, ready) == WorkerReady(0, ready)
    assert table.accept(worker, TaskResult(0, -1, Kind.READY)) is None


def test_an_exception_of_another_process_is_one_again_with_a_note_of_where_it_was():
    table = table_of()
    worker = table.workers[0]
    task = task_for(table, worker, 3)
    report = report_exception(LookupError("sample 4"))
    event = table.accept(worker, result_of(task, Kind.FAILED, payload=report))
    with pytest.raises(LookupError, match="sample 4") as raised:
        event.outcome.batch()
    assert "in worker 0 (pid 10), epoch 0, step 3" in raised.value.__notes__


def test_a_worker_that_takes_a_place_goes_on_where_the_one_before_was():
    table = table_of(is_iterable=True)
    worker = table.workers[0]
    for num_batches, state in ((1, b"a"), (2, None)):
        task = task_for(table, worker, num_batches)
        position = ShardPosition(num_batches, False, 1, state)
        event = table.accept(worker, result_of(task, position=position))
        assert event.outcome.position.state == b"a"  # it still holds
    table.add(Worker(0, 99))
    assert table.message_of(table.workers[0]).position == ShardPosition(2, False, 1, b"a")


def test_an_epoch_begins_where_its_batches_were_given():
    table = table_of(is_iterable=True)
    given = Given(4, shards={1: ShardPosition(2)})
    table.begin_epoch(Epoch(3, iter(()), Progress(given, given), is_announced=True))
    assert table.message_of(table.workers[1]) == (2, 3, True, ShardPosition(2), False)
    assert table.message_of(table.workers[0]) == (2, 3, True, None, False)


def test_the_end_of_a_shard_is_an_event_with_its_last_bad_samples():
    table = table_of(is_iterable=True)
    result = result_of(task_for(table, table.workers[0], 0), Kind.EXHAUSTED, num_asked=1)
    assert table.accept(table.workers[0], result) == WorkerExhausted(0, 0, result)


def test_two_workers_with_the_same_first_sample_are_named(caplog):
    table = table_of(is_iterable=True)
    for worker in table.workers.values():
        notices = {"first_digest": b"same"}
        table.accept(worker, result_of(task_for(table, worker, 0), notices=notices))
    assert "both began list with the same sample" in caplog.text


@pytest.mark.parametrize(
    ("phase", "number", "sample", "words"),
    [
        (Phase.READING, 1, 4, "while reading sample 4 of step 2"),
        (Phase.COLLATING, None, None, "while collating samples [3, 4] of step 2"),
        (Phase.WAITING, None, None, "between two tasks"),
    ],
)
def test_a_death_says_what_the_worker_was_doing(phase, number, sample, words):
    table = table_of()
    worker = table.workers[0]
    task = task_for(table, worker, 2, indices=BatchIndices(np.array([3, 4]), 0, 1))
    activity = table.activity(worker, snapshot(task, phase, number))
    lost = table.death(worker, activity, "Worker 0 ended", "Look.", limit=3)
    assert (lost.reason, lost.advice, lost.limit) == (f"Worker 0 ended {words}", "Look.", 3)
    assert (lost.sample, lost.counts) == (sample, True)
    assert lost.step == (None if phase is Phase.WAITING else 2)
    assert worker.is_gone


def test_the_progress_of_a_batch_that_cannot_be_counted_is_told():
    table = table_of()
    worker = table.workers[0]
    task = task_for(table, worker, 0, indices=slice(0, 4))
    seen = snapshot(task, Phase.COLLATING)._replace(still_s=1.0)
    words, still_s = table.progress(worker, seen, "")
    assert "while collating samples slice(0, 4, None) of step 0 (1 of 1 samples" in words
    assert still_s == 1.0


def test_an_epoch_begun_ahead_is_heard_beside_the_one_under_way_until_another_begins():
    table = table_of()
    worker = table.workers[0]
    now = task_for(table, worker, 0)
    generation = table.begin_ahead(Epoch(1, iter(()), is_announced=True))
    assert table.message_of(worker, generation) == (generation, 1, True, None, False)
    ahead = task_for(table, worker, 0, generation=generation)
    assert table.accept(worker, result_of(ahead)).outcome.generation == generation
    assert table.accept(worker, result_of(now)).outcome.generation == 1
    late = task_for(table, worker, 1, generation=generation)
    table.begin_epoch(Epoch(1, iter(())))
    assert worker.tasks == {}
    assert table.accept(worker, result_of(late)) is None


def test_an_epoch_begun_ahead_that_comes_is_the_one_under_way():
    table = table_of()
    worker = table.workers[0]
    left = task_for(table, worker, 9)
    generation = table.begin_ahead(Epoch(1, iter(())))
    ahead = task_for(table, worker, 0, generation=generation)
    table.adopt_ahead(generation, Epoch(1, iter(())))
    assert list(worker.tasks) == [(generation, 0)]
    assert table.accept(worker, result_of(left)) is None
    assert isinstance(table.accept(worker, result_of(ahead)), TaskDone)
    table.begin_epoch(Epoch(2, iter(())))
    assert table.generation > generation


def test_a_death_over_a_sample_of_the_next_epoch_counts_for_nothing_in_this_one():
    table = table_of()
    worker = table.workers[0]
    generation = table.begin_ahead(Epoch(1, iter(())))
    ahead = task_for(table, worker, 0, generation=generation)
    activity = table.activity(worker, snapshot(ahead, number=0))
    lost = table.death(worker, activity, "Worker 0 ended", "")
    assert (lost.step, lost.sample, lost.counts) == (None, None, False)
    assert "samples of the next epoch" in lost.reason
