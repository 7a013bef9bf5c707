# SPDX-License-Identifier: Apache-2.0
"""Recordings of runs that never were: batches reckoned, and added to a real `History`."""

from __future__ import annotations

import types
from dataclasses import dataclass

import numpy as np
from tests.insight.batches import batch

from penstock.faults import Failure
from penstock.insight.history import History
from penstock.insight.stats import Change

MS = 1_000_000
START_NS = 5_000_000_000_000  # a machine that has been up for a while


class Photos:
    """A dataset with classes and file names, of which no sample is ever read."""

    def __init__(self, class_names, counts, name="photos/{:05d}.jpg"):
        self.classes = list(class_names)
        self.labels = np.repeat(np.arange(len(counts)), counts)
        self._name = name

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        raise AssertionError("a report reads no sample")

    def describe(self, index):
        return self._name.format(index)


@dataclass(frozen=True)
class Run:
    """What a batch costs, in milliseconds, and how many there are."""

    batches: int = 400
    per_epoch: int = 160
    workers: int = 3
    lookahead: int = 6
    batch_size: int = 32
    idle_start_ms: float = 40
    read_ms: float = 12
    compute_ms: float = 60
    collate_ms: float = 5
    send_ms: float = 2
    trainer_ms: float = 18
    between_epochs_ms: float = 900
    backend: str = "process"
    seed: int = 0


def recording_of(run=None, *, dataset=None, failures=(), changes=(), keep=10_000, settings=None):
    """Return the recording of a run."""
    run = run or Run()
    dataset = Photos(["cat", "dog", "owl"], [900, 500, 100]) if dataset is None else dataset
    history = History(dataset, backend=run.backend, keep=keep)
    for one in batches_of(run, len(dataset)):
        history.add(*one)
    for change in changes:
        history.changes.append(change)
    stats = history.stats(num_workers=run.workers, prefetch_factor=2, cores=4.0)
    noted = {"batch_size": run.batch_size, "num_workers": run.workers, "seed": 7}
    return history.recording(noted | (settings or {}), list(failures), stats)


def batches_of(run, num_samples):
    """Yield the batches, in the order in which the main process takes them."""
    rng = np.random.default_rng(run.seed)
    num_seats = max(run.workers, 1)
    free = [START_NS + round(run.idle_start_ms * MS)] * num_seats
    given, made = [], []
    for number in range(run.batches):
        epoch, step = divmod(number, run.per_epoch)
        is_first = step == 0
        before = given[-1] if given else START_NS
        own = 0 if is_first else round(run.trainer_ms * MS * rng.uniform(0.8, 1.2))
        pause = round(run.between_epochs_ms * MS) if is_first and number else 0
        asked = before + own + pause
        times = _made(run, rng, free, given, number, asked)
        done = max(asked, times.ended_ns)
        given.append(done)
        made.append(times.ended_ns)
        ready = sum(ended < asked for ended in made[-run.lookahead :])
        yield batch(
            epoch=epoch,
            step=step,
            worker_id=times.worker_id,
            pid=4000 + times.worker_id,
            asked_ns=asked,
            given_ns=done,
            consumer_ns=own,
            trainer_cpu_ns=own // 3,
            trainer_starved_ns=0,
            num_failed=int(number % 97 == 5),
            indices=rng.integers(0, num_samples, run.batch_size) if num_samples else None,
            num_ready=ready,
            num_workers=run.workers,
            lookahead=run.lookahead,
            **times.noted,
        )


def _made(run, rng, free, given, number, asked):
    """Have the seat that is free first make a batch, at most `lookahead` ahead of the loop."""
    seat = int(np.argmin(free))
    may = given[number - run.lookahead] if number >= run.lookahead else START_NS
    may = max(may, asked) if not run.workers else may
    begun = max(free[seat], may)
    parts = [
        round(ms * MS * rng.uniform(0.7, 1.3))
        for ms in (run.read_ms, run.compute_ms, run.collate_ms, run.send_ms)
    ]
    read, compute, collate, send = parts
    ended = begun + sum(parts) + round(0.05 * MS)
    per_sample_us = np.full(run.batch_size, (read + compute) // run.batch_size // 1000, np.uint32)
    per_sample_us[number % run.batch_size] += rng.integers(0, 9000)
    noted = {
        "begun_ns": begun,
        "ended_ns": ended,
        "idle_ns": begun - free[seat],
        "fetch_ns": read + compute,
        "collate_ns": collate,
        "send_ns": send,
        "cpu_ns": ended - begun - read,
        "starved_ns": 0,
        "num_bytes": 19_267_584,
        "sample_us": per_sample_us.tobytes(),
        "pool_bytes": 19_267_584 * min(3, 1 + number // 40),
        "rss_bytes": 310_000_000 + 9_000_000 * seat + number * 1000,
        "num_samples": run.batch_size,
    }
    free[seat] = ended
    return types.SimpleNamespace(worker_id=seat, ended_ns=ended, noted=noted)


def failure(index=7, name="photos/broken.jpg", error=None, **changed):
    """Return a failed sample."""
    known = {"index": index, "name": name, "error": error or ValueError("truncated image")}
    known |= {"traceback": "", "epoch": 0, "step": 5, "worker_id": 1}
    return Failure(**(known | changed))


def change(step, num_workers, reason, epoch=0):
    """Return a change of workers."""
    return Change(epoch, step, num_workers, 2, reason)
