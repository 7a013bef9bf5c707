# SPDX-License-Identifier: Apache-2.0
"""Workers come and go while an epoch runs, and the stream does not show it."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.streams import open_stream

import penstock
from penstock import FaultPolicy, Loader
from penstock.engine.backends.process import ProcessBackend
from penstock.engine.plan import Epoch, Plan, WorkerSpec
from penstock.engine.timing import WorkerSettings
from penstock.epochs import EpochIterator
from penstock.insight.monitor import AutoWorkers
from penstock.torch import DataLoader

CHANGES = st.dictionaries(
    st.integers(0, 60),
    st.builds(WorkerSettings, st.integers(1, 4), st.integers(1, 3)),
    min_size=1,
    max_size=5,
)


FIRST = WorkerSettings(2, 2)


class Noisy(torch.utils.data.Dataset):
    """Draws from every generator."""

    def __init__(self, length=150):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        drawn = [penstock.sample_rng().random(), np.random.random(), float(torch.rand(()))]
        return np.array([index, *drawn])


class Scripted:
    """In the place of the tuner: changes the workers after the batches that it is noted."""

    reason = "as the test says"
    max_workers = 4

    def __init__(self, changes, first=FIRST):
        self.changes = changes
        self.workers = first
        self.num_seen = 0
        self.seen = []

    def observe(self, record):
        self.seen.append((record.num_workers, record.lookahead))
        workers = self.changes.get(self.num_seen)
        self.num_seen += 1
        if workers is not None:
            self.workers = workers
        return workers


def scripted(changes, kind=Loader, **options):
    loader = kind(Noisy(), batch_size=4, num_workers="auto", seed=7, shuffle=True, **options)
    loader._monitor._tuner = Scripted(changes)
    return loader


def equal(first, second):
    return len(first) == len(second) and all(
        np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(first, second, strict=True)
    )


def plain(epochs=1, **options):
    loader = Loader(Noisy(), batch_size=4, seed=7, shuffle=True, **options)
    return [batch for _ in range(epochs) for batch in loader]


@settings(max_examples=8, deadline=None)
@given(changes=CHANGES, persistent=st.booleans())
def test_the_stream_is_that_of_no_workers_however_they_change(changes, persistent):
    loader = scripted(changes, persistent_workers=persistent)
    batches = [batch for _ in range(2) for batch in loader]
    assert equal(batches, plain(epochs=2))
    assert loader._monitor._tuner.num_seen == 76
    loader._stream and loader._stream.close()


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_workers_of_both_kinds_follow_what_is_asked(backend):
    class Drawless(Noisy):
        def __getitem__(self, index):
            return np.array([index, penstock.sample_rng().random()])

    changes = {3: WorkerSettings(4, 2), 12: WorkerSettings(1, 1), 20: WorkerSettings(3, 3)}
    loader = Loader(Drawless(), batch_size=4, num_workers="auto", seed=7, backend=backend)
    loader._monitor._tuner = tuner = Scripted(changes)
    batches = list(loader)
    assert equal(batches, list(Loader(Drawless(), batch_size=4, seed=7)))
    assert tuner.seen[0] == (2, 4)
    assert [tuner.seen[step][1] for step in (4, 13, 21)] == [8, 1, 9]
    assert tuner.seen[13][0] == 1  # those who leave are not counted, nor those still starting
    assert all(num_workers <= 4 for num_workers, _ in tuner.seen)
    assert [c.num_workers for c in loader.stats().changes] == [4, 1, 3]
    assert loader.stats().num_workers == 3


def test_workers_may_change_while_workers_are_killed():
    class Killing(Noisy):
        def __getitem__(self, index):
            flag = self.folder / str(index)
            if index in (11, 60, 99) and not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    def batches(folder, **options):
        data = Killing()
        data.folder = folder
        loader = Loader(data, batch_size=4, seed=7, **options)
        if options:
            loader._monitor._tuner = Scripted(
                {1: WorkerSettings(4, 2), 8: WorkerSettings(1, 2), 14: WorkerSettings(3, 2)}
            )
        return list(loader)

    import pathlib
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        killed = batches(folder, num_workers="auto", on_error=FaultPolicy("skip", max_respawns=10))
        assert len(list(folder.iterdir())) == 3, "no one was killed"
        assert equal(killed, batches(folder))


def test_auto_is_refused_for_an_iterable_and_says_why():
    class Stream(penstock.data.IterableDataset):
        def __iter__(self):
            return iter(range(3))

    with pytest.raises(penstock.errors.ConfigError, match="needs a map-style dataset"):
        Loader(Stream(), num_workers="auto")


def test_the_number_of_workers_is_an_integer_that_other_programs_can_hand_on():
    loader = DataLoader(Noisy(), num_workers="auto")
    assert isinstance(loader.num_workers, AutoWorkers)
    assert loader.num_workers >= 1
    again = DataLoader(Noisy(), num_workers=loader.num_workers)
    assert isinstance(again.num_workers, AutoWorkers)


def dies_as_a_newcomer(newcomers, worker_id):
    if worker_id >= 2:
        newcomers.put(os.getpid())
        os._exit(3)


def test_training_goes_on_without_a_worker_that_never_gets_to_work():
    newcomers = multiprocessing.SimpleQueue()
    loader = scripted(
        {3: WorkerSettings(4, 2)}, worker_init_fn=functools.partial(dies_as_a_newcomer, newcomers)
    )

    def train():
        for step, batch in enumerate(loader):
            if step == 4:  # both are dead before most of the epoch is asked for
                for _ in range(2):
                    # the main process has waited for it
                    with contextlib.suppress(ChildProcessError):
                        os.waitid(os.P_PID, newcomers.get(), os.WEXITED | os.WNOWAIT)
            yield batch

    with pytest.warns(RuntimeWarning, match="worker [23], which was to be added, never got to"):
        batches = list(train())
    assert equal(batches, plain())


def test_training_goes_on_where_the_system_gives_no_more_workers(monkeypatch):
    def no_memory(backend, worker_id):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(ProcessBackend, "add_worker", no_memory)
    loader = scripted({3: WorkerSettings(4, 2)})
    with pytest.warns(RuntimeWarning, match="it could not be started: OSError"):
        batches = list(loader)
    assert equal(batches, plain())


def test_training_goes_on_when_the_accounts_fail():
    loader = scripted({})

    def fail(record):
        raise ZeroDivisionError("of the tuner")

    loader._monitor._tuner.observe = fail
    with pytest.warns(RuntimeWarning, match="accounts have failed, .*: ZeroDivisionError"):
        batches = list(loader)
    assert equal(batches, plain())


def test_a_number_that_is_added_again_draws_other_random_numbers():
    class Drawing(Noisy):
        def __getitem__(self, index):
            return float(np.random.random())

    loader = Loader(Drawing(400), batch_size=4, num_workers="auto", seed=0)
    loader._seed = None  # as of torch's loader without a seed
    loader._monitor._tuner = Scripted(
        {5: WorkerSettings(4, 2), 30: WorkerSettings(1, 2), 50: WorkerSettings(4, 2)}
    )
    drawn = np.concatenate(list(loader))
    assert len(np.unique(drawn)) == 400


def test_a_number_that_is_assigned_later_is_what_counts():
    loader = Loader(Noisy(), batch_size=4, num_workers="auto", seed=7)
    loader.num_workers = 0
    assert len(list(loader)) == 38
    assert loader.stats().backend == "serial"


def test_what_stands_between_batches_is_the_main_processes_and_a_failed_batch_is_not():
    class Fails(Noisy):
        def __getitem__(self, index):
            if index % 2:
                raise KeyError(index)
            return index

    seen = []

    class Observer:
        measures = True
        light = ()

        def batch_given(self, row, indices, sample_us, epoch):
            seen.append(row)

        def epoch_ended(self, epoch, end):
            seen.append(end)

        def worker_replaced(self):
            pass

        def epoch_left(self, epoch):
            pass

    spec = WorkerSpec(Fails(6), False, is_batched=True)
    epoch = Epoch(0, iter([[k] for k in range(6)]))
    batches = EpochIterator(open_stream(Plan(spec, 0), epoch, None, Observer()))
    while True:
        try:
            next(batches)
        except KeyError:
            continue
        except StopIteration:
            break
    assert [row.step for row in seen[:-1]] == [0, 2, 4]
    begun = [noted.asked_ns - noted.consumer_ns for noted in seen[1:]]
    given = [row.given_ns for row in seen[:-1]]
    # The main process's own code begins anew where a batch failed, not at the batch before it.
    assert all(own_ns > before for own_ns, before in zip(begun, given, strict=True))


def test_a_sampler_that_raises_as_workers_are_added_keeps_no_stream_that_is_left():
    class Observer:
        measures = True

        def batch_given(self, row, indices, sample_us, epoch):
            return WorkerSettings(1, 4)

        def epoch_left(self, epoch):
            pass

    def indices():
        yield from ([0], [1], [2])
        raise KeyError("the sampler")

    plan = Plan(
        WorkerSpec(np.arange(6), False, is_batched=True), 0, 1, prefetch_factor=2, backend="thread"
    )
    batches = EpochIterator(open_stream(plan, Epoch(0, indices()), None, Observer()))
    next(batches)
    stream = weakref.ref(batches._stream)
    assert stream()._overdue
    gc.disable()  # a cycle would keep the workers until a collection
    try:
        del batches
        assert stream() is None
    finally:
        gc.enable()
