# SPDX-License-Identifier: Apache-2.0
"""The contract of `penstock.engine.backends.Backend`."""

import time

import numpy as np
import pytest

from penstock.data.dataset import Dataset, IterableDataset
from penstock.engine.plan import Epoch, Plan, WorkerSpec
from penstock.engine.recover import NO_BATCH
from penstock.engine.scheduler import TaskDone, WorkerExhausted, WorkerLost, WorkerReady
from penstock.engine.task import Task
from penstock.engine.timing import row_of_worker, sample_us_of
from penstock.faults import FaultPolicy


class Squares(Dataset):
    """100 samples: i, and 2,000 floats of value i * i; those in `broken` raise KeyError."""

    def __init__(self, broken=frozenset()):
        """Set which samples raise."""
        self.broken = broken

    def __len__(self):
        """Samples."""
        return 100

    def __getitem__(self, index):
        """Return one sample."""
        if index in self.broken:
            raise KeyError(f"sample {index} is broken")
        return {"index": index, "data": np.full(2000, index * index, np.float32)}


class Countdown(IterableDataset):
    """Yields `length - 1, …, 0`."""

    def __init__(self, length):
        """Keep the length."""
        self.length = length

    def __iter__(self):
        """Count down."""
        return iter(range(self.length - 1, -1, -1))


class BackendContract:
    """Subclass it, say which backend, and pytest runs the contract.

    Example:
        class TestProcess(BackendContract):
            num_workers = 2

            def open(self, plan):
                return ProcessBackend(plan)
    """

    num_workers = 1
    generation = 0  # of the epoch that was begun last

    def open(self, plan):
        """Return the backend under test, not yet started."""
        raise NotImplementedError

    def started(self, dataset, **options):
        """Return a started backend that batches `dataset`."""
        spec = WorkerSpec(dataset, isinstance(dataset, IterableDataset), is_batched=True, **options)
        plan = Plan(spec, base_seed=0, num_workers=self.num_workers, max_workers=self.max_workers())
        backend = self.open(plan)
        backend.start()
        self.generation = backend.begin_epoch(Epoch(0, iter(())))
        return backend

    def collect(self, backend, count):
        """Return the next `count` events."""
        events = []
        while len(events) < count:
            came = backend.events(30.0)
            assert came, "no event came within 30 s"
            events += came
        return events

    def run_one(self, backend, worker_id, step, indices):
        """Run one task to its event."""
        backend.submit(worker_id, Task(self.generation, step, indices))
        (event,) = self.collect(backend, 1)
        return event

    def test_a_task_becomes_a_batch_of_its_worker_and_step(self):
        """Indices may be a list or an array, and the batch is theirs."""
        backend = self.started(Squares())
        tasks = [[3, 1], np.array([2, 5]), [7]]
        for step, indices in enumerate(tasks):
            worker_id = step % self.num_workers
            event = self.run_one(backend, worker_id, step, indices)
            assert isinstance(event, TaskDone)
            assert (event.worker_id, event.step) == (worker_id, step)
            batch = event.outcome.batch()
            assert batch["index"].tolist() == list(indices)
            assert (batch["data"] == (batch["index"] ** 2)[:, None]).all()
        backend.close()

    def test_what_the_dataset_raises_comes_with_its_type_and_the_worker_goes_on(self):
        """The exception says which sample."""
        backend = self.started(Squares(broken=frozenset({4})))
        event = self.run_one(backend, 0, 0, [3, 4])
        with pytest.raises(KeyError, match="sample 4 is broken") as raised:
            event.outcome.batch()
        assert any("sample 4" in note for note in raised.value.__notes__)
        event = self.run_one(backend, 0, 1, [5])
        assert event.outcome.batch()["index"].tolist() == [5]
        backend.close()

    def test_the_end_of_an_iterable_is_told_once(self):
        """The batch before it is shorter."""
        backend = self.started(Countdown(3))
        for epoch in range(2):
            if epoch:
                self.generation = backend.begin_epoch(Epoch(epoch, iter(())))  # iterates anew
            events = [self.run_one(backend, 0, step, [None, None]) for step in range(3)]
            assert [type(event) for event in events] == [TaskDone, TaskDone, WorkerExhausted]
            batches = [event.outcome.batch().tolist() for event in events[:2]]
            assert batches == [[2, 1], [0]]
        backend.close()

    def test_batches_that_are_held_keep_their_values(self):
        """While many others are made, and when the backend is closed."""
        backend = self.started(Squares())
        held = []
        for step in range(60):
            event = self.run_one(backend, step % self.num_workers, step, [step])
            held.append(event.outcome.batch())
        backend.close()
        for step, batch in enumerate(held):
            assert (batch["data"] == step * step).all()

    def end_worker(self, backend, worker_id):
        """End a worker by force, and return when it has ended; False where none can die."""
        return False

    def test_a_death_is_told_once_and_the_worker_that_takes_the_place_does_its_tasks(self):
        """The other workers' tasks are not disturbed."""
        backend = self.started(Squares())
        if self.end_worker(backend, 0):
            (death,) = self.collect(backend, 1)
            assert isinstance(death, WorkerLost)
            assert death.worker_id == 0
            assert not backend.is_whole
            backend.respawn(0)
            assert backend.is_whole
        for step in range(2 * self.num_workers):
            event = self.run_one(backend, step % self.num_workers, step, [step])
            assert isinstance(event, TaskDone)
            assert event.outcome.batch()["index"].tolist() == [step]
        backend.close()

    def max_workers(self):
        """Return how many workers the backend may be asked to have; 0 if their number is fixed."""
        return self.num_workers + 2

    def test_workers_may_be_added_and_removed_while_an_epoch_runs(self):
        """A removal is no death, the batches stay, and the number can be added again."""
        backend = self.started(Squares())
        newcomers = range(self.num_workers, self.max_workers())
        held = []
        for turn in range(2):
            for worker_id in newcomers:
                backend.add_worker(worker_id)
            ready = self.collect(backend, len(newcomers))
            assert {type(event) for event in ready} <= {WorkerReady}
            assert sorted(event.worker_id for event in ready) == list(newcomers)
            for worker_id in [*range(self.num_workers), *newcomers]:
                event = self.run_one(backend, worker_id, len(held), [len(held)])
                assert (type(event), event.worker_id) == (TaskDone, worker_id)
                held.append(event.outcome.batch())
            for worker_id in newcomers:
                backend.remove_worker(worker_id)
            assert backend.is_whole
            self.generation = backend.begin_epoch(Epoch(turn + 1, iter(())))
        for step, batch in enumerate(held):
            assert (batch["data"] == step * step).all()
        backend.close()

    def test_a_batch_comes_with_the_account_of_what_it_took(self):
        """By a clock that all processes share; parts do not exceed the whole."""
        backend = self.started(Squares())
        begun = time.monotonic_ns()
        event = self.run_one(backend, 0, 0, list(range(50)))
        sent = event.outcome.times
        times = row_of_worker(sent)
        assert begun <= times.begun_ns <= times.ended_ns <= time.monotonic_ns()
        assert times.num_samples == 50
        assert times.num_bytes >= 50 * 2000 * 4
        assert times.fetch_ns > 0
        assert times.collate_ns > 0
        assert times.fetch_ns + times.collate_ns <= times.ended_ns - times.begun_ns
        assert times.cpu_ns > 0
        assert len(sample_us_of(sent)) in (0, 50 * 4)
        backend.close()

    def test_samples_that_the_policy_leaves_out_are_told_with_the_batch(self):
        """With what they raised, and how many had been asked for."""
        policy = FaultPolicy("skip")
        backend = self.started(Squares(broken=frozenset({4, 6})), faults=policy)
        outcome = self.run_one(backend, 0, 0, [3, 4, 5, 6]).outcome
        assert outcome.batch()["index"].tolist() == [3, 5]
        assert outcome.num_asked == 4
        assert [bad.index for bad in outcome.bad] == [4, 6]
        assert all(isinstance(bad.error, KeyError) for bad in outcome.bad)
        outcome = self.run_one(backend, 0, 1, [4]).outcome
        assert outcome.batch() is NO_BATCH
        backend.close()

    def test_closing_is_quick_and_may_be_repeated(self):
        """Even with tasks under way."""
        backend = self.started(Squares())
        for step in range(self.num_workers):
            backend.submit(step, Task(self.generation, step, [step]))
        begun = time.monotonic()
        backend.close()
        backend.close()
        assert time.monotonic() - begun < 5.0
