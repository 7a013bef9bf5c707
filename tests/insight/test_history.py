# SPDX-License-Identifier: Apache-2.0
"""What is kept of batches: sums that add up, a window, the slowest samples; for any thread."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.insight.batches import batch

from penstock.engine.timing import UNKNOWN, EpochEnd
from penstock.insight.history import History

MS = 1_000_000
S = 1_000_000_000


def record(step=0, **given):
    """A batch: by default of 4 samples, waited for 3 ms after 1 ms of the main process's own."""
    asked_ns = given.pop("asked_ns", step * 4 * MS)
    fields = {
        "step": step,
        "pid": 7,
        "asked_ns": asked_ns,
        "given_ns": asked_ns + 3 * MS,
        "consumer_ns": MS,
        "num_samples": 4,
        "num_workers": 2,
        "lookahead": 4,
        "begun_ns": asked_ns,
        "ended_ns": asked_ns + 3 * MS,
        "fetch_ns": 2 * MS,
    }
    return batch(**{**fields, **given})


def stats_of(history):
    return history.stats(num_workers=2, prefetch_factor=2, cores=4.0)


def kept(history):
    history.fold()
    return history._rows.last()


def epochs_of(history):
    return {e.epoch: e.span.batches for e in history.recording({}, [], stats_of(history)).epochs}


def history_of(records, dataset=None, **options):
    history = History(dataset, **options)
    for one in records:
        history.add(*one)
    return history


# Times of a worker's first batch say little of its samples, so tests begin with another one.
FIRST = record(0)


def microseconds(*times):
    return np.array(times, np.uint32).tobytes()


def test_sums_are_those_of_the_batches():
    history = history_of(
        record(
            step,
            num_failed=step % 2,
            idle_ns=2 * MS,
            collate_ns=MS,
            send_ns=MS // 2,
            slot_ns=MS // 4,
            cpu_ns=MS,
            num_bytes=100,
            trainer_cpu_ns=MS // 2,
        )
        for step in range(300)
    )
    run = stats_of(history).run
    assert (run.batches, run.samples, run.failed, run.bytes) == (300, 1200, 150, 30_000)
    assert run.wait_s == pytest.approx(0.9)
    assert run.consumer_s == pytest.approx(0.3)
    assert run.seconds == pytest.approx(1.2)
    assert run.wait_share == pytest.approx(0.75)
    assert run.idle_s == pytest.approx(0.6)
    assert run.read_s == pytest.approx(0.6)  # 3 ms, of it 1 ms of CPU
    assert run.compute_s == pytest.approx(0)
    assert run.collate_s == pytest.approx(0.3)
    assert run.send_s == pytest.approx(0.15)
    assert run.slot_s == pytest.approx(0.075)
    assert run.worker_cpu_s == pytest.approx(0.3)
    assert run.trainer_cpu_s == pytest.approx(0.15)


def test_the_time_between_epochs_counts_for_nobody():
    first = [record(step) for step in range(10)]
    later = [
        record(step, epoch=1, asked_ns=100 * S + step * 4 * MS, consumer_ns=MS * (step > 0))
        for step in range(10)
    ]
    stats = stats_of(history_of(first + later))
    assert stats.run.seconds == pytest.approx(20 * 0.003 + 19 * 0.001)
    assert stats.run.starts == 1
    assert stats.run.first_wait_s == pytest.approx(0.006)  # the worker's first, and the epoch's


def test_an_epoch_has_sums_of_its_own_until_the_next_begins():
    history = history_of(record(step) for step in range(5))
    history.epoch_ended(0)
    assert stats_of(history).epoch.batches == 5
    history.add(*record(0, epoch=1))
    stats = stats_of(history)
    assert (stats.epoch_number, stats.epoch.batches, stats.run.batches) == (1, 1, 6)
    assert epochs_of(history) == {0: 5, 1: 1}


def test_an_epoch_without_a_batch_has_sums_of_nothing():
    history = history_of([record(0)])
    history.epoch_ended(3)
    stats = stats_of(history)
    assert (stats.epoch_number, stats.epoch.batches) == (3, 0)


def test_the_window_is_the_last_ten_seconds():
    history = history_of(record(step, asked_ns=step * 50 * MS) for step in range(1000))
    assert stats_of(history).window.batches == 200


def test_the_window_has_64_batches_however_long_they_take():
    history = history_of(record(step, asked_ns=step * S) for step in range(100))
    assert stats_of(history).window.batches == 64


def test_the_window_begins_when_all_new_workers_are_at_work():
    old = [record(step, num_workers=2, worker_id=step % 2) for step in range(100)]
    new = [
        record(step, num_workers=3, lookahead=6, worker_id=step % 3 if step > 110 else step % 2)
        for step in range(100, 130)
    ]
    # Worker 2 gives its first at step 113, and six were under way.
    assert stats_of(history_of(old + new)).window.batches == 130 - 113 - 1 - 6
    assert stats_of(history_of(old + new[:10])).verdict.bottleneck == "nothing yet"


def test_what_workers_wait_for_between_epochs_is_not_their_idle_time():
    later = [
        record(
            step,
            epoch=1,
            asked_ns=100 * S + step * 4 * MS,
            consumer_ns=MS * (step > 0),
            idle_ns=MS if step else 99 * S,
        )
        for step in range(10)
    ]
    assert stats_of(history_of([record(0), *later])).run.idle_s == pytest.approx(0.009)


def test_rare_long_steps_of_the_main_process_are_no_spare_capacity():
    # A step of 1 ms, every 25th 300 ms, when the worker comes to idle; a batch takes it 16 ms.
    records, now = [], 0
    for step in range(200):
        own = 300 * MS if step % 25 == 24 else MS
        now += own
        wait = 0 if step % 25 in (24, 0) else 15 * MS
        one = record(
            step,
            num_workers=1,
            lookahead=2,
            asked_ns=now,
            given_ns=now + wait,
            consumer_ns=own,
            begun_ns=now,
            ended_ns=now + 16 * MS,
            idle_ns=270 * MS if step % 25 == 24 else 0,
            fetch_ns=16 * MS,
            cpu_ns=16 * MS,
        )
        now += wait
        records.append(one)
    history = history_of(records)
    verdict = history.stats(num_workers=1, prefetch_factor=2, cores=8.0).verdict
    assert verdict.bottleneck == "workers"
    assert verdict.expected_gain == pytest.approx(648 / (324 + 0.04 * 24), rel=0.05)


def test_the_step_after_an_epoch_s_last_batch_counts():
    history = History()
    for epoch in range(10):
        now = epoch * S
        history.add(*record(0, epoch=epoch, asked_ns=now, consumer_ns=0))
        history.epoch_ended(epoch, EpochEnd(now + 13 * MS, 10 * MS))
    stats = stats_of(history)
    assert stats.epoch.seconds == pytest.approx(0.013)
    assert stats.window.seconds == pytest.approx(0.13)
    assert stats.run.wait_share == pytest.approx(3 / 13)


def test_an_epoch_that_is_gone_through_again_has_sums_of_its_own():
    history = History()
    for _ in range(3):
        for step in range(10):
            history.add(*record(step))
        history.epoch_ended(0)
    assert stats_of(history).epoch.batches == 10
    for _ in range(2):  # left before its end
        for step in range(5):
            history.add(*record(step, consumer_ns=MS * (step > 0)))
    stats = stats_of(history)
    assert (stats.epoch.batches, stats.run.batches) == (5, 40)


def test_batches_are_judged_by_the_workers_that_made_them():
    # 40 ms of a worker each, and the main process takes 25 a second.
    batches = [
        record(step, num_workers=1, asked_ns=step * 80 * MS, consumer_ns=40 * MS, **made)
        for step, made in enumerate([{"cpu_ns": 78 * MS, "fetch_ns": 78 * MS}] * 64)
    ]
    batches = [
        b._replace(
            row=b.row._replace(given_ns=b.row.asked_ns + 40 * MS, ended_ns=b.row.begun_ns + 78 * MS)
        )
        for b in batches
    ]
    verdict = history_of(batches).stats(num_workers=8, prefetch_factor=2, cores=8.0).verdict
    assert verdict.bottleneck == "workers"
    assert "1 worker could make 13 a second" in verdict.text


def test_no_more_than_asked_for_is_kept_and_sums_lose_nothing():
    history = history_of((record(step) for step in range(1000)), keep=150)
    assert kept(history)["step"].tolist() == list(range(850, 1000))
    assert stats_of(history).run.batches == 1000


def test_batches_come_back_as_they_were_but_for_what_is_large():
    given = [
        record(0, indices=[1, 2, 3, 4], sample_us=microseconds(1, 2, 3, 4)),
        record(1, starved_ns=5, trainer_starved_ns=6, pool_bytes=7, rss_bytes=8, num_bytes=9),
    ]
    rows = kept(history_of(given))
    first, second = rows[list(given[0].row._fields)].tolist()
    assert second == given[1].row
    assert first == given[0].row
    assert rows["trainer_starved_ns"][0] == UNKNOWN
    assert rows["starved_ns"][0] == UNKNOWN


def test_memory_is_told_at_its_peak():
    history = history_of(
        record(step, worker_id=step % 2, pool_bytes=pool, rss_bytes=rss)
        for step, (pool, rss) in enumerate([(10, 5), (20, 7), (40, 6), (1, 1)])
    )
    history.add(*record(4, worker_id=0, pool_bytes=5))
    stats = stats_of(history)
    assert stats.slot_bytes == 60
    assert stats.worker_rss_bytes == {0: 6, 1: 7}


def test_a_loader_without_workers_is_serial():
    history = history_of([record(0, num_workers=0)], backend="process")
    stats = history.stats(num_workers=0, prefetch_factor=2, cores=1.0)
    assert stats.backend == "serial"


def test_the_slowest_samples_are_named_each_once_the_longest_first():
    class Files(list):
        samples = tuple((f"{n}.jpg", 0) for n in range(8))

    history = history_of(
        (
            record(step, indices=[3, 4, 5, 6], sample_us=microseconds(50, 9000 + step, 60, 70))
            for step in range(20)
        ),
        Files(range(8)),
    )
    slowest = stats_of(history).slowest
    assert [s.index for s in slowest] == [4, 6, 5, 3]
    assert (slowest[0].name, slowest[0].seconds, slowest[0].step) == ("4.jpg", 0.009019, 19)


def test_twenty_slow_samples_are_remembered_of_all():
    times = np.random.default_rng(0).permutation(2000) + 10
    history = history_of(
        [FIRST]
        + [
            record(n, indices=np.arange(n * 20, n * 20 + 20), sample_us=microseconds(*part))
            for n, part in enumerate(times.reshape(100, 20))
        ]
    )
    slowest = stats_of(history).slowest
    assert [round(s.seconds * 1e6) for s in slowest] == sorted(times.tolist())[:-21:-1]
    assert [s.index for s in slowest] == np.argsort(times)[:-21:-1].tolist()


def test_what_a_worker_s_first_batch_takes_is_not_put_down_to_its_samples():
    history = history_of(
        record(
            step,
            worker_id=step % 2,
            pid=7 + (step >= 20),
            indices=[step],
            sample_us=microseconds(300_000 if step in (0, 1, 20, 21) else 1000),
        )
        for step in range(40)
    )
    stats = stats_of(history)
    assert stats.window.slow == 0
    assert max(s.seconds for s in stats.slowest) == 0.001


def test_samples_far_beyond_the_typical_one_are_counted_as_slow():
    timed = (
        record(step, sample_us=microseconds(500, 500, 500, 500 if step % 4 else 8000))
        for step in range(80)
    )
    window = stats_of(history_of([FIRST, *timed])).window
    assert (window.timed, window.slow) == (320, 20)
    assert window.slow_s == pytest.approx(0.16)
    assert window.timed_s == pytest.approx(0.16 + 300 * 0.0005)


@pytest.mark.parametrize(
    "indices",
    [
        None,
        ["a", "b"],
        [(1, 2), (3, 4)],
        [[1], [2, 3]],
        [{1}, {2}],
        "key",
        7,
        [None, None],
        [9e9, 1],
    ],
)
def test_keys_of_any_kind_are_put_up_with(indices):
    history = history_of(
        record(n, indices=indices, sample_us=microseconds(5, 6)) for n in range(10)
    )
    stats = stats_of(history)
    assert stats.run.batches == 10
    assert len(stats.slowest) >= 1


def test_a_dataset_that_answers_nonsense_does_not_reach_the_training():
    class Hostile:
        def __len__(self):
            raise RuntimeError("no length")

        def __getattr__(self, name):
            raise RuntimeError(f"no {name}")

        def __getitem__(self, index):
            raise AssertionError("a sample was read")

    history = history_of(
        (record(n, indices=[n], sample_us=microseconds(5000)) for n in range(200)), Hostile()
    )
    stats = stats_of(history)
    assert stats.run.batches == 200
    assert stats.slowest[0].name is None


def test_samples_for_which_no_core_was_free_are_no_evidence():
    timed = (
        record(
            step,
            sample_us=microseconds(500, 500, 500, 9000 if step % 4 == 0 else 500),
            starved_ns=MS if step % 4 == 0 else 0,
        )
        for step in range(1, 81)
    )
    window = stats_of(history_of([FIRST, *timed])).window
    assert (window.timed, window.slow) == (240, 0)


@settings(max_examples=30, deadline=None)
@given(
    keep=st.integers(1, 300),
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=6),
)
def test_sums_and_kept_batches_do_not_depend_on_when_they_are_asked_for(keep, sizes):
    asked, silent = History(keep=keep), History(keep=keep)
    steps = itertools.count()
    for size in sizes:
        for step in itertools.islice(steps, size):
            one = record(step, epoch=step // 37, cpu_ns=step, num_ready=step % 3)
            asked.add(*one)
            silent.add(*one)
        stats_of(asked)
    assert (kept(asked) == kept(silent)).all()
    total = sum(sizes)
    assert kept(asked)["step"].tolist() == list(range(total))[-keep:]
    ours, theirs = stats_of(asked), stats_of(silent)
    assert ours.run == theirs.run
    assert ours.epoch == theirs.epoch
    assert ours.window == theirs.window
    assert sum(epochs_of(asked).values()) == total


def test_reading_from_other_threads_loses_no_batch():
    history = History([0] * 4)
    total, seen, is_over = 20_000, [], threading.Event()

    def read():
        while not is_over.is_set():
            seen.append(stats_of(history).run.batches)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for step in range(total):
        history.add(*record(step, indices=[0, 1], sample_us=microseconds(1, 2)))
    is_over.set()
    for reader in readers:
        reader.join()
    stats = stats_of(history)
    assert stats.run.batches == total
    assert stats.run.timed == 2 * (total - 1)
    assert all(0 <= number <= total for number in seen)
    assert kept(history)["step"].tolist() == list(range(total))[-10_000:]
