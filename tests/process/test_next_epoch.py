# SPDX-License-Identifier: Apache-2.0
"""Kept workers begin the next epoch while the last batches of this one are still to be taken."""

from __future__ import annotations

import multiprocessing
import os
import signal

import numpy as np
import pytest

from penstock import FaultPolicy, Loader, sample_rng
from penstock.data import Dataset
from penstock.sampling import RandomSampler

LENGTH, BATCH = 24, 4
CONTEXT = multiprocessing.get_context("fork")
# Other tests of this process may have left threads of OpenCV, which is not used here.
pytestmark = pytest.mark.filterwarnings("ignore:Workers are about to be forked")


class Numbers(Dataset):
    """Sample i is (i, a number drawn for it, the epoch that was set in its worker)."""

    epoch = -1

    def __init__(self, length=LENGTH):
        self.length = length

    def __len__(self):
        return self.length

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return np.array([index, sample_rng().integers(1 << 30), self.epoch])


class Plain(Dataset):
    """The same without a `set_epoch`: threads may share it."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return np.array([index, sample_rng().integers(1 << 30)])


class Counting(Plain):
    """Sets `is_ahead` when more samples were read than an epoch has."""

    def __init__(self):
        # Not attributes: workers would not begin ahead.
        num_read, is_ahead = CONTEXT.Value("i", 0), CONTEXT.Event()
        self.num_read, self.is_ahead = (lambda: num_read), (lambda: is_ahead)

    def __getitem__(self, index):
        num_read = self.num_read()
        with num_read.get_lock():
            num_read.value += 1
            if num_read.value > LENGTH:
                self.is_ahead().set()
        return super().__getitem__(index)


def loader_of(dataset, backend="process", *, kept=True, **options):
    options = {"shuffle": True, "seed": 3, "num_workers": 2, **options}
    if backend == "process":
        options["multiprocessing_context"] = CONTEXT
    return Loader(dataset, BATCH, backend=backend, persistent_workers=kept, **options)


def epochs_of(loader, count, before=lambda loader, epoch: None):
    found = []
    for epoch in range(count):
        before(loader, epoch)
        found.append([batch.tolist() for batch in loader])
    return found


def test_the_next_epoch_is_under_way_before_the_last_batch_is_taken():
    dataset = Counting()
    batches = iter(loader_of(dataset))
    for _ in range(LENGTH // BATCH - 1):
        next(batches)
    assert dataset.is_ahead().wait(30)
    assert len(list(batches)) == 1
    del batches


@pytest.mark.parametrize(
    "options",
    [
        {"persistent_workers": False},
        {"seed": None},
        {"sampler": list(range(LENGTH)), "shuffle": None},  # nothing is known of its next order
    ],
    ids=["not kept", "no seed", "a sampler of the user's"],
)
def test_of_other_loaders_no_more_is_read_than_is_asked_for(options):
    DataLoader = pytest.importorskip("penstock.torch").DataLoader
    dataset = Counting()
    options = {"seed": 3, "persistent_workers": True, "shuffle": True, **options}
    loader = DataLoader(dataset, BATCH, num_workers=2, multiprocessing_context=CONTEXT, **options)
    assert len(list(loader)) == LENGTH // BATCH
    assert dataset.num_read().value == LENGTH
    del loader


@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize("dataset", [Numbers(), Plain(), Numbers(length=5), Numbers(length=1)])
@pytest.mark.parametrize("workers", [1, 3])
def test_batches_are_what_they_are_with_new_workers(backend, dataset, workers):
    found = epochs_of(loader_of(dataset, backend, num_workers=workers), 4)
    assert found == epochs_of(loader_of(dataset, backend, kept=False, num_workers=workers), 4)


def skips(loader, epoch):
    if epoch == 2:
        loader.set_epoch(7)


def repeats(loader, epoch):
    if epoch:
        loader.set_epoch(0)


def resumes(loader, epoch):
    if epoch == 2:
        state = loader.state_dict()
        state["epoch"], state["batches"], state["samples"] = 1, 2, 2 * BATCH
        loader.load_state_dict(state)


def reseeds_the_sampler(loader, epoch):
    if epoch == 1:
        loader.batch_sampler.sampler = RandomSampler(loader.dataset, seed=9)


@pytest.mark.parametrize("before", [skips, repeats, resumes, reseeds_the_sampler])
@pytest.mark.parametrize("backend", ["process", "thread"])
def test_what_was_foreseen_and_does_not_come_is_dropped(backend, before):
    kept, new = (loader_of(Numbers(), backend, kept=kept) for kept in (True, False))
    assert epochs_of(kept, 4, before) == epochs_of(new, 4, before)


def test_an_epoch_that_is_resumed_is_not_the_whole_one_that_was_foreseen():
    loader = loader_of(Numbers(), prefetch_factor=LENGTH)
    iter(loader)  # all of epoch 0 is drawn, and nothing of epoch 1
    foreseen = loader._stream._ahead.generation
    resumes(loader, 2)
    batches = iter(loader)
    assert loader._stream.backend._table.generation != foreseen
    assert len(list(batches)) == LENGTH // BATCH - 2


def test_an_epoch_that_is_left_early_is_followed_by_a_whole_one():
    kept, new = loader_of(Numbers()), loader_of(Numbers(), kept=False)
    for loader in (kept, new):
        loader.found = [next(iter(loader)).tolist(), *epochs_of(loader, 2)]
    assert kept.found == new.found


class Killing(Numbers):
    """Ends the worker once, at a sample of epoch 1."""

    def __init__(self):
        super().__init__()
        flag = CONTEXT.Event()
        self.flag = lambda: flag

    def __getitem__(self, index):
        if self.epoch == 1 and not self.flag().is_set():
            self.flag().set()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("max_respawns", [0, 1])
def test_a_worker_that_dies_in_the_next_epoch_costs_this_one_nothing(max_respawns, workers):
    """Not even a respawn: the epoch under way has not asked for that sample."""
    dataset = Killing()
    policy = FaultPolicy(max_respawns=max_respawns)
    loader = loader_of(dataset, num_workers=workers, on_error=policy)
    batches = iter(loader)
    found = [next(batches).tolist() for _ in range(LENGTH // BATCH - 1)]
    assert dataset.flag().wait(30)
    found.append(next(batches).tolist())
    assert next(batches, None) is None
    expected = epochs_of(loader_of(Numbers(), kept=False), 3)
    assert found == expected[0]
    if max_respawns:
        assert epochs_of(loader, 2) == expected[1:]
    del batches, loader


class Staged(Plain):
    """What it gives depends on what the main process has set."""

    def __init__(self):
        self.stage = CONTEXT.Value("i", 0)

    def __getitem__(self, index):
        return np.array([index, self.stage.value])


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_what_the_main_process_sets_between_epochs_is_seen_from_their_first_batch_on(backend):
    dataset = Staged()
    loader = loader_of(dataset, backend)
    for epoch in range(3):
        dataset.stage.value = epoch
        assert {int(stage) for batch in loader for stage in batch[:, 1]} == {epoch}
    del loader


def test_threads_see_an_attribute_that_is_set_between_epochs():
    class Attribute(Plain):
        stage = 0

        def __getitem__(self, index):
            return np.array([index, self.stage])

    dataset = Attribute()
    loader = loader_of(dataset, "thread")
    for epoch in range(3):
        dataset.stage = epoch
        assert {int(stage) for batch in loader for stage in batch[:, 1]} == {epoch}
    del loader


class Noting(Numbers):
    """Writes down the epochs that are set in its worker."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def set_epoch(self, epoch):
        super().set_epoch(epoch)
        with open(self.path, "a") as file:
            file.write(f"{epoch} ")


def test_who_chooses_another_epoch_once_is_not_foreseen_again(tmp_path):
    loader = loader_of(Noting(tmp_path / "epochs"), num_workers=1)
    for _ in range(4):
        loader.set_epoch(0)
        assert len(list(loader)) == LENGTH // BATCH
    del loader
    assert (tmp_path / "epochs").read_text().split() == ["0", "1", "0", "0", "0"]


def test_no_tasks_are_remembered_of_epochs_that_are_over():
    loader = loader_of(Numbers())
    for _ in range(10):
        next(iter(loader))
        list(loader)
    table = loader._stream.backend._table
    assert all(len(worker.tasks) <= 1 for worker in table.workers.values())
    del loader


class Failing(Numbers):
    def __getitem__(self, index):
        if self.epoch == 1 and index == 5:
            raise KeyError(index)
        return super().__getitem__(index)


def test_an_error_of_the_next_epoch_is_raised_in_it():
    loader = loader_of(Failing())
    assert len(list(loader)) == LENGTH // BATCH
    with pytest.raises(KeyError) as raised:
        list(loader)
    assert any("epoch 1" in note for note in raised.value.__notes__)
    del loader
