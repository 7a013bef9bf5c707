# SPDX-License-Identifier: Apache-2.0
"""What a worker decides, in one process: each fault, in each way of reading, under each policy."""

from __future__ import annotations

import contextlib
import gc
import itertools
import pickle
import weakref
from dataclasses import dataclass

import numpy as np
import pytest

from penstock.engine.assembly import PlainOutput
from penstock.engine.plan import BatchIndices, RetryHints, WorkerSpec
from penstock.engine.recover import NO_BATCH
from penstock.engine.status_page import StatusWriter
from penstock.engine.task import (
    BeginEpoch,
    Kind,
    Task,
    WorkerIdentity,
    decode_result,
    encode_result,
)
from penstock.engine.task_runner import TaskRunner
from penstock.engine.timing import num_samples_of, row_of_worker
from penstock.engine.worker_table import KnownWorker
from penstock.faults import FaultPolicy

BAD = 5  # the sample that is bad
ALONE = WorkerIdentity()
BATCHES = [[0, 1, 2, 3], [4, BAD, 6, 7], [8, 9, 10, 11]]


class Broken(Exception):
    """Raised by what is bad."""


class Known(KnownWorker):
    def __str__(self):
        return f"worker {self.worker_id} (of the test)"


class Samples:
    """Sample i is the array [i, i]."""

    collates = False  # whether a bad sample shows in the collate function only
    length = 12

    def __init__(self, how="raise"):
        self.how = how
        self.attempts = []

    def __len__(self):
        return self.length

    def sample(self, index):
        self.attempts.append(int(index))
        if index == BAD and self.how == "raise":
            raise Broken(f"sample {index}")
        if index == BAD and self.how == "once" and self.attempts.count(BAD) == 1:
            raise Broken(f"sample {index}, at first")
        if index == BAD and self.how == "odd":
            return np.array([index])
        if index == BAD and self.how == "stop":
            raise StopIteration
        if index == BAD and self.how == "exit":
            raise SystemExit(3)
        return np.array([index, index])


class OneByOne(Samples):
    def __getitem__(self, index):
        return self.sample(index)


class Together(OneByOne):
    def __getitems__(self, indices):
        return [self.sample(index) for index in indices]


class Whole(OneByOne):
    def get_batch(self, indices, alloc):
        samples = [self.sample(index) for index in indices]
        batch = alloc((len(samples), 2), np.int64)
        for row, sample in zip(batch, samples, strict=True):
            row[:] = sample if len(sample) == 2 else pytest.fail("collated")
        return batch


class Generator(Samples):
    def __iter__(self):
        for index in range(self.length):
            yield self.sample(index)


class Iterator(Samples):
    """Goes on after it has raised."""

    def __iter__(self):
        self.at = iter(range(self.length))
        return self

    def __next__(self):
        return self.sample(next(self.at))


MAPS = [OneByOne, Together, Whole]
STREAMS = [Generator, Iterator]
POLICIES = {
    "raise": FaultPolicy(),
    "skip": FaultPolicy(on_error="skip"),
    "replace": FaultPolicy(on_error="replace"),
    "retry": FaultPolicy(retries=1),
    "retry and skip": FaultPolicy(on_error="skip", retries=1),
}


@dataclass
class Worker:
    """A runner whose dataset lies open."""

    runner: TaskRunner
    dataset: object

    def run(self, step, indices, **options):
        return self.runner.run(Task(1, step, indices, **options))

    def run_all(self):
        return [self.run(step, indices) for step, indices in enumerate(BATCHES)]


def worker_of(dataset, *, identity=ALONE, begin=True, **options):
    spec = WorkerSpec(
        dataset,
        isinstance(dataset, (Generator, Iterator)),
        is_batched=True,
        batch_size=4,
        **options,
    )
    runner = TaskRunner(PlainOutput(), StatusWriter(), identity)
    runner.set_up(lambda: spec)
    if begin:
        runner.begin_epoch(BeginEpoch(1, 0))
    return Worker(runner, dataset)


def firsts(batch):
    return batch[:, 0].tolist()


@pytest.mark.parametrize("kind", MAPS + STREAMS)
@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_fault_every_way_of_reading_gives_the_same_under_every_policy(kind, policy):
    worker = worker_of(kind("none"), faults=POLICIES[policy])
    results = worker.run_all()
    assert [result.kind for result in results] == [Kind.DONE] * 3
    assert [firsts(result.batch()) for result in results] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11],
    ]  # fmt: skip
    assert not any(result.bad for result in results)


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ["raise", "once", "stop"])
def test_a_sample_of_a_map_that_raises(kind, policy, how):
    faults = POLICIES[policy]
    worker = worker_of(kind(how), faults=faults, covers_dataset=True)
    first, second, third = worker.run_all()
    assert firsts(first.batch()) == [0, 1, 2, 3]
    assert firsts(third.batch()) == [8, 9, 10, 11]  # the worker goes on
    if how == "once" and (faults.retries or (faults.tolerates and kind is not OneByOne)):
        # What is read together is read once more, one by one, before a sample is to blame.
        assert firsts(second.batch()) == [4, 5, 6, 7]
        assert not second.bad
    elif faults.on_error == "raise":
        assert second.kind == Kind.FAILED
        error = second.payload
        assert isinstance(error, StopIteration if how == "stop" else Broken)
        assert "5" in " ".join(error.__notes__)
        with pytest.raises(type(error)):
            second.batch()
    else:
        batch = firsts(second.batch())
        (bad,) = second.bad
        assert bad.index == BAD
        assert isinstance(bad.error, StopIteration if how == "stop" else Broken)
        assert second.num_asked == 4
        if faults.on_error == "skip":
            assert batch == [4, 6, 7]
            assert bad.replaced_by is None
        else:
            assert batch == [4, bad.replaced_by, 6, 7]
            assert bad.replaced_by != BAD


@pytest.mark.parametrize("policy", POLICIES)
def test_a_generator_ends_with_the_sample_that_raises(policy):
    faults = POLICIES[policy]
    first, second, third = worker_of(Generator("raise"), faults=faults).run_all()
    assert firsts(first.batch()) == [0, 1, 2, 3]
    assert second.kind == Kind.FAILED
    assert isinstance(second.payload, Broken)
    if faults.tolerates:
        assert "A generator ends" in " ".join(second.payload.__notes__)
    assert third.kind == Kind.EXHAUSTED


@pytest.mark.parametrize("policy", POLICIES)
def test_an_iterator_that_goes_on_gives_the_next_sample_in_the_place_of_a_bad_one(policy):
    faults = POLICIES[policy]
    worker = worker_of(Iterator("raise"), faults=faults)
    first, second, third = worker.run_all()
    assert firsts(first.batch()) == [0, 1, 2, 3]
    if not faults.tolerates:
        assert second.kind == Kind.FAILED
        assert firsts(third.batch()) == [6, 7, 8, 9]
    elif faults.on_error == "skip":
        assert firsts(second.batch()) == [4, 6, 7]
        assert [type(bad.error) for bad in second.bad] == [Broken]
        assert firsts(third.batch()) == [8, 9, 10, 11]
    else:
        assert firsts(second.batch()) == [4, 6, 7, 8]
        assert firsts(third.batch()) == [9, 10, 11]


@pytest.mark.parametrize("kind", [OneByOne, Together, Iterator])
@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
def test_a_sample_that_does_not_collate(kind, policy):
    worker = worker_of(kind("odd"), faults=POLICIES[policy], covers_dataset=True)
    _, second, third = worker.run_all()
    assert third.kind == Kind.DONE
    if policy == "raise":
        assert second.kind == Kind.FAILED
        return
    (bad,) = second.bad
    batch = firsts(second.batch())
    assert BAD not in batch
    assert len(batch) == (3 if policy == "skip" else 4)
    if kind is not Iterator:
        assert bad.index == BAD


@pytest.mark.parametrize(
    ("kind", "policy"), list(itertools.product([OneByOne, Together, Iterator, Generator], POLICIES))
)
def test_an_exit_is_no_result(kind, policy):
    """It leaves the runner as what it is: the backend ends the worker."""
    worker = worker_of(kind("exit"), faults=POLICIES[policy])
    worker.run(0, BATCHES[0])
    with pytest.raises(SystemExit):
        worker.run(1, BATCHES[1])


def test_a_batch_of_bad_samples_alone_is_empty_if_they_are_skipped():
    worker = worker_of(OneByOne("raise"), faults=POLICIES["skip"])
    result = worker.run(0, [BAD])
    assert result.kind == Kind.EMPTY
    assert result.batch() is NO_BATCH
    assert [bad.index for bad in result.bad] == [BAD]
    assert result.num_asked == 1


def test_a_collate_that_never_works_is_raised_under_any_policy():
    def collate(samples):
        raise Broken("collate")

    for faults in POLICIES.values():
        worker = worker_of(OneByOne("none"), faults=faults, collate_fn=collate)
        result = worker.run(0, BATCHES[0])
        assert result.kind == Kind.FAILED
        assert str(result.payload) == "collate"


class Slices(Samples):
    def __getitem__(self, index):
        raise NotImplementedError

    def __getitems__(self, indices):
        return [self.sample(index) for index in range(self.length)[indices]]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "hints", [None, RetryHints(alone=True), RetryHints(quarantined=((1, "", ""),))]
)
def test_indices_that_cannot_be_listed_are_read_at_once(policy, hints):
    worker = worker_of(Slices("none"), faults=POLICIES[policy])
    result = worker.run(0, slice(0, 12, 4), hints=hints)
    assert firsts(result.batch()) == [0, 4, 8]


def test_what_a_collate_function_raises_is_told_whatever_it_was_given():
    class Boxes(OneByOne):
        def __getitems__(self, indices):
            return object()

    def collate(box):
        raise Broken("collate")

    result = worker_of(Boxes(), collate_fn=collate).run(0, BATCHES[0])
    assert type(result.payload) is Broken
    assert "while collating samples [0, 1, 2, 3] of the dataset" in result.payload.__notes__


def test_a_quarantined_sample_is_not_read():
    hints = RetryHints(quarantined=((BAD, "ended two workers", "its stack"),))
    for policy, expected in (("skip", [4, 6, 7]), ("raise", None)):
        worker = worker_of(OneByOne("none"), faults=POLICIES[policy])
        result = worker.run(1, BATCHES[1], hints=hints)
        assert BAD not in worker.dataset.attempts
        if expected is None:
            assert result.kind == Kind.FAILED
        else:
            assert firsts(result.batch()) == expected
            assert result.bad[0].traceback == "its stack"


def test_a_worker_that_cannot_be_set_up_answers_every_task_with_what_was_raised():
    def load():
        raise Broken("no dataset")

    runner = TaskRunner(PlainOutput(), StatusWriter())
    runner.set_up(load)
    for generation in (1, 2):
        runner.begin_epoch(BeginEpoch(generation, 0))
        for step in (0, 1):
            result = runner.run(Task(generation, step, [0]))
            assert (result.generation, result.step) == (generation, step)
            assert result.kind == Kind.FAILED
            with pytest.raises(Broken, match="no dataset") as raised:
                result.batch()
            assert "while the worker was starting" in raised.value.__notes__


@pytest.mark.parametrize("fails_in", ["set_epoch", "__iter__"])
def test_an_epoch_that_cannot_begin_answers_its_tasks_and_the_next_one_may_work(fails_in):
    class Late(Generator):
        fails = True

        def set_epoch(self, epoch):
            if fails_in == "set_epoch" and self.fails:
                raise Broken("not yet")

        def __iter__(self):
            if fails_in == "__iter__" and self.fails:
                raise Broken("not yet")
            return super().__iter__()

    worker = worker_of(Late("none"), begin=False)
    worker.runner.begin_epoch(BeginEpoch(1, 7, is_announced=True))
    result = worker.run(0, BATCHES[0])
    assert result.kind == Kind.FAILED
    assert "while epoch 7 began" in result.payload.__notes__
    worker.dataset.fails = False
    worker.runner.begin_epoch(BeginEpoch(2, 8, is_announced=True))
    assert firsts(worker.runner.run(Task(2, 0, BATCHES[0])).batch()) == [0, 1, 2, 3]


def test_the_end_of_a_shard_is_reported_once():
    worker = worker_of(Generator("none"))
    worker.run_all()
    assert worker.run(3, BATCHES[0]).kind == Kind.EXHAUSTED
    assert worker.run(4, BATCHES[0]) is None
    worker.runner.begin_epoch(BeginEpoch(2, 1))
    assert worker.runner.run(Task(2, 0, BATCHES[0])).kind == Kind.DONE


def test_bad_samples_at_the_end_of_a_shard_come_with_the_end():
    class Rotten(Iterator):
        def sample(self, index):
            raise Broken(f"sample {index}")

    worker = worker_of(Rotten(), faults=POLICIES["skip"])
    results = worker.run_all()
    assert [result.kind for result in results] == [Kind.EMPTY] * 3
    end = worker.run(3, BATCHES[0])
    assert (end.kind, end.num_asked, list(end.bad)) == (Kind.EXHAUSTED, 0, [])


def test_a_worker_that_joins_says_once_that_it_can_begin():
    worker = worker_of(OneByOne("none"), identity=WorkerIdentity(joins_late=True), begin=False)
    ready = worker.runner.begin_epoch(BeginEpoch(4, 0))
    assert (ready.kind, ready.generation, ready.step) == (Kind.READY, 4, -1)
    assert worker.runner.begin_epoch(BeginEpoch(5, 1)) is None


def test_what_was_found_out_comes_with_the_next_result():
    worker = worker_of(OneByOne("none"))
    worker.runner.notices["states"] = {"random": b"digest"}
    first, second, _ = worker.run_all()
    assert first.notices == {"states": {"random": b"digest"}}
    assert second.notices is None


def test_random_numbers_are_decided_by_the_place_and_not_by_who_reads():
    class Random(Samples):
        def __getitem__(self, index):
            return np.array([index, np.random.randint(1 << 30)])

    def drawn(*places):
        worker = worker_of(Random(), seed=3)
        results = [worker.run(k, BatchIndices(i, p, 1)) for k, (i, p) in enumerate(places)]
        return [result.batch().tolist() for result in results]

    (one, two) = drawn(([0, 1], 0), ([2, 3], 2))
    (other,) = drawn(([2, 3], 2))
    assert two == other
    assert one != two


@pytest.mark.parametrize("max_respawns", [0, 1])
def test_where_stuck_workers_are_replaced_samples_are_watched_whatever_they_take(max_respawns):
    status, faults = StatusWriter(), FaultPolicy(max_respawns=max_respawns)
    runner = TaskRunner(PlainOutput(), status)
    runner.set_up(lambda: WorkerSpec(OneByOne("none"), False, is_batched=True, faults=faults))
    runner.begin_epoch(BeginEpoch(1, 0))
    assert status.is_watched is (max_respawns > 0)


@pytest.mark.parametrize("is_measured", [True, False])
def test_times_are_taken_where_they_are_asked_for(is_measured):
    worker = worker_of(OneByOne("none"))
    result = worker.run(0, BATCHES[0], is_measured=is_measured)
    row = row_of_worker(result.times)
    assert row.num_samples == num_samples_of(result.times) == 4
    assert (row.ended_ns > row.begun_ns) is is_measured


def test_a_result_crosses_to_another_process():
    worker = worker_of(OneByOne("raise"), faults=POLICIES["skip"])
    result = worker.run(1, BATCHES[1])
    result.payload = b"packed"
    again, (more,) = decode_result(encode_result(result, (1, 2)))
    assert more == (1, 2)
    for name in ("generation", "step", "kind", "payload", "position", "num_asked", "times"):
        assert getattr(again, name) == getattr(result, name)
    (bad,) = again.bad
    assert bad.index == BAD
    assert isinstance(pickle.loads(bad.error.pickled), Broken)


@pytest.mark.parametrize("kind", [OneByOne, Iterator])
def test_no_result_keeps_what_raised_alive(kind):
    """Its traceback has the frames of the runner; a result in one of them would be a cycle."""

    class Local(Broken):
        pass

    class Fails(kind):
        def sample(self, index):
            raise Local

    worker = worker_of(Fails())
    gc.disable()
    try:
        result = worker.run(0, [0])
        ref = weakref.ref(result.payload)
        with contextlib.suppress(Local):
            result.batch()
        assert ref() is None
    finally:
        gc.enable()


def test_a_sample_that_is_tried_is_collated_and_packed_by_itself_and_dropped():
    collated = []

    def collate(samples):
        collated.append([int(sample[0]) for sample in samples])
        return samples

    spec = WorkerSpec(OneByOne(), False, True, collate_fn=collate)
    runner = TaskRunner(PlainOutput(), StatusWriter(), ALONE)
    runner.set_up(lambda: spec)
    runner.begin_epoch(BeginEpoch(1, 0))
    runner.maker.try_sample([4, BAD, 6, 7], 2, None)
    runner.maker.try_sample([4, BAD, 6, 7], 1, RetryHints())  # raises: `make` will tell
    assert collated == [[6]]
    assert list(runner.maker.recovery.take_bad()) == []
