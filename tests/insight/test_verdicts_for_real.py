# SPDX-License-Identifier: Apache-2.0
"""Verdicts on real loaders of which the bottleneck is known. On any machine, so no figures."""

from __future__ import annotations

import time

import numpy as np
import pytest

from penstock import Loader


class Samples:
    """Each costs what `cost` does."""

    def __init__(self, cost, length=480):
        self.cost, self.length = cost, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.cost(index)
        return np.zeros(16, np.float32)


def burn(seconds):
    """Take CPU in Python, with its lock held."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def quick(_):
    pass


def computing(_):
    burn(0.001)


def reading(_):
    time.sleep(0.02)


def slow_one_in_fifty(index):
    time.sleep(0.15 if index % 50 == 7 else 0.002)


def slow_collate(samples):
    burn(0.012)
    return np.stack(samples)


def verdict_of(dataset, *, step=quick, batches=40, **options):
    """Judge the first batches of a training."""
    loader = Loader(dataset, batch_size=8, monitor="full", **options)
    for number, _ in enumerate(loader, 1):
        step(number)
        if number == batches:
            break
    return loader.stats().verdict


THREADS = {"num_workers": 3, "backend": "thread"}
TRAININGS = {  # a dataset, options, what may be found, and what it says
    "computing": (Samples(computing), {"num_workers": 2}, {"workers", "cpu"}, ""),
    "reading": (Samples(reading), {"num_workers": 2, "batches": 20}, {"storage"}, "num_workers="),
    # Or no core is free for it.
    "collating": (
        Samples(quick), {"num_workers": 1, "collate_fn": slow_collate}, {"collate", "cpu"}, ""),
    "slow files, and workers that idle behind them": (
        Samples(slow_one_in_fifty), {"num_workers": 4, "batches": 50}, {"slow source"}, "sample "),
    # On one core, or where others have them all, threads make no difference.
    "threads of Python code": (Samples(computing), THREADS | {"batches": 60}, {"gil", "cpu"}, ""),
    "threads that wait": (Samples(reading), THREADS | {"batches": 30}, {"storage"}, ""),
    "threads that wait, and a step": (
        Samples(reading), THREADS | {"batches": 30, "step": lambda _: time.sleep(0.01)},
        {"storage"}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAININGS)
def test_the_bottleneck_of_a_training_is_found(name):
    dataset, options, bottlenecks, said = TRAININGS[name]
    verdict = verdict_of(dataset, **options)
    assert verdict.bottleneck in bottlenecks
    assert said in str(verdict)
    if verdict.bottleneck == "gil":
        assert 'backend="process"' in verdict.remedy


def share_of_waiting(loader, batches=30, step_s=0.05):
    """Train for a while; return the share of the time after the first batch that was waited."""
    iterator = iter(loader)
    next(iterator)
    waited_s, begun = 0.0, time.monotonic()
    for _ in range(batches):
        time.sleep(step_s)
        asked = time.monotonic()
        next(iterator)
        waited_s += time.monotonic() - asked
    return waited_s / (time.monotonic() - begun)


def test_a_slow_main_process_has_nothing_to_do():
    # Where other programs keep all cores busy its worker comes late, and the main process does
    # wait.
    for _ in range(20):
        loader = Loader(Samples(quick), batch_size=8, num_workers=1, monitor="full")
        share = share_of_waiting(loader)
        if share < 0.03 and loader.stats().verdict.bottleneck != "contention":
            break
    assert share < 0.03, "no core was free for a quick worker, twenty times in a row"
    assert loader.stats().verdict.bottleneck == "trainer"


class Together(Samples):
    """The same, read at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_seeding_for_each_sample_is_measured(num_workers):
    one_by_one, at_once = (
        Loader(kind(quick, 3200), batch_size=32, num_workers=num_workers, monitor="full")
        for kind in (Samples, Together)
    )
    for loader in (one_by_one, at_once):
        list(loader)
    each, once = one_by_one.stats(), at_once.stats()
    assert 0 < 2 * once.run.seed_s < each.run.seed_s < each.run.busy_s
    if not num_workers:
        assert each.verdict.bottleneck == "seeding"
    assert once.verdict.bottleneck != "seeding"
