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
    """Sample i is (i, a number drawn for it, the epoch that the worker was told)."""

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
        self.num_read = CONTEXT.Value("i", 0)
        self.is_ahead = CONTEXT.Event()

    def __getitem__(self, index):
        with self.num_read.get_lock():
            self.num_read.value += 1
            if self.num_read.value > LENGTH:
                self.is_ahead.set()
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


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_the_next_epoch_is_under_way_before_the_last_batch_is_taken(backend):
    dataset = Counting()
    batches = iter(loader_of(dataset, backend))
    for _ in range(LENGTH // BATCH - 1):
        next(batches)
    assert dataset.is_ahead.wait(30)
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
    assert dataset.num_read.value == LENGTH
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


def test_an_epoch_that_is_left_early_is_followed_by_a_whole_one():
    kept, new = loader_of(Numbers()), loader_of(Numbers(), kept=False)
    for loader in (kept, new):
        loader.found = [next(iter(loader)).tolist(), *epochs_of(loader, 2)]
    assert kept.found == new.found


class Killing(Numbers):
    """Ends the worker once, at the first sample of epoch 1."""

    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def __getitem__(self, index):
        if self.epoch == 1 and not self.flag.is_set():
            self.flag.set()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_worker_that_dies_in_the_next_epoch_costs_neither():
    dataset = Killing(CONTEXT.Event())
    policy = FaultPolicy(max_respawns=1)
    loader = loader_of(dataset, num_workers=1, on_error=policy)
    found = epochs_of(loader, 3)
    assert dataset.flag.is_set()
    assert found == epochs_of(loader_of(Numbers(), kept=False), 3)


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
