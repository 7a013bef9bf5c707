# SPDX-License-Identifier: Apache-2.0
"""What is known of a loader before and after the first question."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from penstock import Loader
from penstock.errors import ConfigError
from penstock.torch import DataLoader

NUM_BATCHES = 40


class Slow:
    """Batches of 6 ms."""

    def __len__(self):
        return 4 * NUM_BATCHES

    def __getitem__(self, index):
        time.sleep(0.0015)
        return index


def cheap(kind=Loader, num_workers=0, **options):
    return kind(range(4 * NUM_BATCHES), 4, num_workers=num_workers, **options)


@pytest.mark.parametrize("kind", [Loader, DataLoader])
@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1}, {"num_workers": 1, "backend": "thread"}, {"seed": 3}]
)
def test_of_cheap_batches_waiting_is_known_and_why_is_not(kind, options):
    loader = cheap(kind, **options)
    assert sum(1 for _ in loader) == NUM_BATCHES
    stats = loader.stats()
    assert (stats.run.batches, stats.run.samples) == (NUM_BATCHES, 4 * NUM_BATCHES)
    assert stats.run.starts == 1
    assert 0 < stats.run.wait_s < stats.run.seconds
    assert (stats.run.compute_s, stats.run.worker_cpu_s) == (0, 0)
    assert stats.verdict.bottleneck in {"unknown", "trainer"}


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_the_first_question_has_the_batches_after_it_measured(options):
    loader = cheap(**options)
    batches = iter(loader)
    for _ in range(10):
        next(batches)
    assert loader.stats().run.compute_s == 0
    rest = sum(1 for _ in batches)
    stats = loader.stats()
    assert stats.run.batches == 10 + rest == NUM_BATCHES
    assert stats.run.starts == 1  # to be measured is no new beginning
    assert stats.run.compute_s > 0
    assert stats.verdict.bottleneck != "unknown"


def test_batches_that_come_seldom_are_measured_unasked():
    loader = Loader(Slow(), 4)
    for _ in loader:
        pass
    assert loader.stats().window.read_s > 0.1


@pytest.mark.parametrize(
    "ask",
    [
        lambda loader, path: loader.report(path),
        lambda loader, path: loader.trace(path),
        lambda loader, path: loader.subscribe(lambda stats: None),
    ],
    ids=["report", "trace", "subscribe"],
)
def test_whoever_asks_has_the_next_epoch_measured(ask, tmp_path):
    loader = cheap()
    ask(loader, tmp_path / "page")
    list(loader)
    assert loader.stats().run.compute_s > 0


@pytest.mark.parametrize(("monitor", "is_measured"), [("full", True), ("light", False)])
def test_the_user_may_say_it(monitor, is_measured):
    loader = cheap(monitor=monitor)
    for _ in range(2):
        list(loader)
        assert (loader.stats().run.compute_s > 0) is is_measured
    with pytest.raises(ConfigError, match="monitor must be one of"):
        cheap(monitor="none")


def test_the_loops_own_time_is_that_between_two_batches():
    loader = cheap()
    begun = time.monotonic()
    for step, _ in enumerate(loader):
        if step in (0, NUM_BATCHES - 1):  # the last one's is behind the last batch
            time.sleep(0.05)
    took_s = time.monotonic() - begun
    run = loader.stats().run
    assert run.consumer_s >= 0.05
    assert run.seconds - run.wait_s - run.consumer_s >= 0.05
    assert run.seconds <= took_s


def test_a_page_and_a_trace_of_it_show_no_work_that_nobody_saw(tmp_path):
    loader = cheap()
    list(loader)
    loader.report(tmp_path / "run.html")
    events = json.loads(loader.trace(tmp_path / "run.json").read_text())["traceEvents"]
    assert {e["name"] for e in events if e["ph"] == "X"} <= {"wait for batch", "own code"}
    assert not [e for e in events if e["ph"] in "sf"]
    assert min(e["ts"] for e in events) >= 0


def test_the_first_measured_batch_has_its_own_bytes():
    loader = Loader(np.zeros((200, 64)), 4)
    batches = iter(loader)
    for _ in range(20):
        next(batches)
    loader.stats()
    for _ in range(10):
        next(batches)
    window = loader.stats().window
    assert window.bytes == window.batches * 4 * 64 * 8


@pytest.mark.parametrize("num_workers", [0, 1])
def test_accounts_that_fail_end_and_training_goes_on(num_workers, monkeypatch):
    loader = Loader(range(5000), 1, num_workers=num_workers)

    def fail():
        raise ZeroDivisionError("accounts")

    # Each way passes here: a slow machine's batches are long, and then measured one by one.
    monkeypatch.setattr(loader._monitor._history, "_fold", fail)
    with pytest.warns(RuntimeWarning, match="accounts have failed"):
        assert [int(batch[0]) for batch in loader] == list(range(5000))


def test_long_batches_after_many_short_ones_are_measured():
    class Later(Slow):
        def __len__(self):
            return 1200

        def __getitem__(self, index):
            return super().__getitem__(index) if index >= 1000 else index

    loader = Loader(Later(), 4)
    list(loader)
    assert loader.stats().window.read_s > 0.1


def test_memory_does_not_grow_with_the_batches():
    loader = Loader(np.arange(20_000), 1)
    for _ in loader:
        pass
    assert len(loader._monitor.light) < 5_000


def test_what_is_summed_over_measured_batches_says_over_how_many():
    loader = Loader(np.zeros((60, 8)), 4)
    batches = iter(loader)
    for _ in range(10):
        next(batches)
    loader.stats()
    for _ in range(3):
        next(batches)
    stats = loader.stats()
    assert (stats.run.batches, stats.run.measured) == (13, 3)
    assert stats.run.bytes == 3 * 4 * 8 * 8
    assert stats.verdict.bottleneck == "nothing yet"
