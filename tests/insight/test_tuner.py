# SPDX-License-Identifier: Apache-2.0
"""The tuner finds about the best setting within 200 batches, keeps to its budgets, then rests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.insight.training import Regime, Training, best_rate, fixed_rate

from penstock.engine.timing import WorkerSettings
from penstock.insight.budgets import Auto
from penstock.insight.tuner import SteadyState, Tuner

READS = Regime(read_s=0.02, trainer_s=0.005, cores=2)
CPU = Regime(compute_s=0.02, trainer_s=0.005, cores=8)
REGIMES = {
    "cpu, 2 cores": Regime(compute_s=0.01, trainer_s=0.001, cores=2),
    "cpu, 4 cores": Regime(compute_s=0.01, trainer_s=0.0005, cores=4),
    "cpu, 16 cores": Regime(compute_s=0.04, trainer_s=0.001, cores=16),
    "cpu, enough cores": Regime(compute_s=0.04, trainer_s=0.010, cores=8),
    "reads of 20 ms": READS,
    "reads of 20 ms, quick main process": replace(READS, trainer_s=0.001),
    "reads of 20 ms, one core": replace(READS, cores=1),
    "trainer": Regime(compute_s=0.002, trainer_s=0.02, cores=2),
    "mixed, 2 cores": Regime(read_s=0.01, compute_s=0.01, trainer_s=0.001, cores=2),
    "mixed, 4 cores": Regime(read_s=0.01, compute_s=0.005, trainer_s=0.001, cores=4),
    "main process on a core": Regime(compute_s=0.01, trainer_cpu_s=0.01, cores=2),
    "storage at its limit": Regime(
        read_s=0.02, compute_s=0.001, trainer_s=0.001, parallel_reads=4, cores=2
    ),
    "a lock": Regime(read_s=0.005, compute_s=1e-4, trainer_s=0.001, parallel_reads=1),
    "1 ms": Regime(compute_s=0.001, trainer_s=0.001, cores=2),
    "3 ms": Regime(read_s=0.003, compute_s=0.001, trainer_s=0.001, cores=2),
    "workers start slowly": replace(CPU, start_s=1.0),
    "short epochs": replace(READS, batches_per_epoch=50),
    "short epochs, new workers": replace(READS, batches_per_epoch=50, keeps_workers=False),
    "tiny epochs, new workers": replace(CPU, batches_per_epoch=10, keeps_workers=False),
    "run queue unknown": Regime(compute_s=0.01, trainer_s=0.001, cores=2, tells_starved=False),
}


def tuned(*parts, limits=None, seed=0, **options):
    """Return a training after so many batches of each regime."""
    tuner = Tuner(limits or Auto(), cores=parts[0][0].cores, **options)
    training = Training(parts[0][0], tuner.workers, seed=seed)
    for regime, num_batches in parts:
        training.regime = regime
        training.run(num_batches, tuner.observe, lambda: tuner.reason)
    assert all(change.num_workers <= tuner.max_workers for change in training.changes)
    return training


@pytest.mark.parametrize("name", REGIMES)
def test_within_200_batches_it_gives_nearly_what_the_best_fixed_settings_give(name):
    regime = REGIMES[name]
    best = best_rate(regime)
    for seed in (0, 1):
        training = tuned((regime, 200), seed=seed)
        assert fixed_rate(regime, training.workers) >= 0.9 * best, training.changes


@pytest.mark.parametrize("name", REGIMES)
def test_it_comes_to_rest(name):
    training = tuned((REGIMES[name], 1200), seed=2)
    assert len(training.changes) <= 6
    assert all(change.step <= 500 for change in training.changes)


@pytest.mark.parametrize("seed", range(3))
def test_batches_that_differ_much_do_not_keep_it_busy(seed):
    regime = Regime(compute_s=0.01, trainer_s=0.01, slow_every=20, slow_factor=10)
    training = tuned((regime, 1200), seed=seed)
    assert len(training.changes) <= 8
    assert fixed_rate(regime, training.workers) >= 0.85 * best_rate(regime)


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("trainer_s", [0.0005, 0.02])
def test_with_one_core_work_on_the_cpu_gets_one_or_two_workers(trainer_s, tells):
    regime = Regime(compute_s=0.01, trainer_s=trainer_s, cores=1, tells_starved=tells)
    for seed in range(3):
        training = tuned((regime, 400), seed=seed)
        assert all(change.num_workers <= 2 for change in training.changes)


def test_a_main_process_that_slows_down_needs_fewer_workers():
    training = tuned((READS, 300), (replace(READS, trainer_s=0.05), 300))
    assert training.changes[0].num_workers >= 4
    assert training.workers.num_workers == 1
    assert "workers are at work" in training.changes[-1].reason


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (READS, replace(READS, read_s=0.06)),
        (replace(READS, trainer_s=0.05), READS),
        (CPU, replace(CPU, compute_s=0.05)),
    ],
    ids=["slower storage", "quicker main process", "heavier samples"],
)
def test_it_begins_anew_when_costs_change_for_good(before, after):
    training = tuned((before, 300), (after, 500))
    assert training.changes[-1].step > 300
    assert fixed_rate(after, training.workers) >= 0.9 * best_rate(after)


def test_a_pause_of_the_main_process_changes_nothing():
    training = tuned((READS, 150), (replace(READS, trainer_s=1.0), 2), (READS, 300))
    assert all(change.step <= 150 for change in training.changes)


@pytest.mark.parametrize("cores", [0.5, 1, 2, 2.5, 4])
def test_a_cpu_budget_is_never_exceeded(cores):
    regime = Regime(read_s=0.01, compute_s=0.01, trainer_s=0.001, cores=8)
    for seed in range(2):
        training = tuned((regime, 300), limits=Auto(cpu=cores), seed=seed)
        for change in training.changes:  # half of a worker's time is on a core; 10 %: noise
            assert change.num_workers == 1 or change.num_workers / 2 <= 1.1 * cores


@pytest.mark.parametrize("num_others", [3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_a_machine_that_others_use_too_costs_no_workers(num_others, seed):
    busy = replace(REGIMES["cpu, 2 cores"], others=num_others, noise=0.4)
    training = tuned((busy, 600), seed=seed)
    assert [change.num_workers for change in training.changes] in ([2], [2, 2])
    assert training.workers.prefetch_factor <= 4


@pytest.mark.parametrize("seed", range(4))
def test_load_that_comes_during_a_trial_does_not_speak_against_it(seed):
    quiet = REGIMES["cpu, 2 cores"]
    training = tuned((quiet, 16), (replace(quiet, others=3), 400), (quiet, 200), seed=seed)
    assert training.rate(100) >= 0.9 * best_rate(quiet)
    assert min(change.num_workers for change in training.changes) == 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cores", [2, 8])
@pytest.mark.parametrize("trainer_cpu_s", [0.0001, 0.01])
def test_threads_that_only_wait_for_each_other_stay_few(trainer_cpu_s, cores, seed):
    regime = Regime(
        compute_s=0.01, trainer_s=0.001, trainer_cpu_s=trainer_cpu_s, cores=cores, lock_share=1.0
    )
    training = tuned((regime, 600), seed=seed, shares_lock=True)
    assert all(change.num_workers <= 4 for change in training.changes)
    assert training.workers.num_workers <= 3


@pytest.mark.parametrize(
    "regime",
    [
        replace(READS, compute_s=0.0005, lock_share=1.0),
        replace(READS, compute_s=0.0003, trainer_s=0.001, lock_share=1.0),
        REGIMES["cpu, 2 cores"],
        replace(REGIMES["cpu, 4 cores"], lock_share=0.5),
        REGIMES["cpu, 16 cores"],
    ],
    ids=["reads", "reads, quick main process", "2 cores", "half in a lock", "16 cores"],
)
def test_threads_that_bring_something_are_kept(regime):
    for seed in range(2):
        training = tuned((regime, 250), seed=seed, shares_lock=True)
        assert fixed_rate(regime, training.workers) >= 0.9 * best_rate(regime), training.changes


def test_workers_with_threads_of_their_own_are_not_taken_for_slow_ones():
    regime = Regime(compute_s=0.01, trainer_s=0.01, cores=16, threads=4)
    training = tuned((regime, 300))
    assert all(change.num_workers <= 2 for change in training.changes)


@pytest.mark.parametrize("seed", range(4))
def test_a_few_very_slow_batches_are_worked_ahead_of(seed):
    regime = Regime(compute_s=0.01, trainer_s=0.01, slow_every=50, slow_factor=50, cores=8)
    training = tuned((regime, 1500), seed=seed)
    assert len(training.changes) <= 8
    assert fixed_rate(regime, training.workers) >= 0.6 * best_rate(regime)


@pytest.mark.parametrize("seed", range(2))
def test_costs_that_go_to_and_fro_do_not_keep_it_busy(seed):
    to, fro = READS, replace(READS, read_s=0.005)
    training = tuned(*[(to, 100), (fro, 100)] * 20, seed=seed)
    assert len(training.changes) <= 8


def test_a_memory_budget_bounds_batches_under_way():
    regime = replace(READS, trainer_s=0.001, batch_bytes=20_000_000)
    training = tuned((regime, 300), limits=Auto(memory=500_000_000))
    for n, factor in [(c.num_workers, c.prefetch_factor) for c in training.changes]:
        # One slot more than batches under way: the main process holds the last.
        assert n * (50_000_000 + (factor + 1) * regime.batch_bytes) <= 500_000_000
    assert training.workers.num_workers > 1
    assert "memory is enough for" in training.changes[0].reason


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ({"is_forked": False}, 4, 4),  # each is 229 MB
        ({}, 10, 18),  # all of it may be the main process's
        ({"shares_lock": True}, 20, 32),
    ],
    ids=["spawn", "fork", "threads"],
)
def test_memory_that_workers_take_counts(options, least, most):
    rss = {} if "shares_lock" in options else {"rss_bytes": 229_000_000}
    regime = replace(READS, trainer_s=0.0005, batch_bytes=1000, **rss)
    training = tuned((regime, 1200), limits=Auto(memory=950_000_000), **options)
    assert least <= training.workers.num_workers <= most


def test_a_memory_budget_may_be_any_number():
    training = tuned((replace(READS, batch_bytes=20_000_000), 100), limits=Auto(None, 5e8))
    assert isinstance(training.workers.num_workers, int)


def test_another_iterator_in_the_same_epoch_begins_anew():
    workers = WorkerSettings(4, 2)
    training, steady = Training(READS, workers), SteadyState(workers, 0)
    training.run(60)
    assert steady_of(steady, training.records)[-8:] == [True] * 8
    training.leave_epoch()
    training.run(16)
    assert {record.epoch for record in training.records} == {0}
    assert steady_of(steady, training.records[60:]) == [False] * 7 + [True] * 9


def steady_of(steady, records):
    return [steady.is_steady(record) for record in records]


def test_batches_that_outgrow_memory_cost_workers_at_once():
    small = replace(READS, trainer_s=0.001, batch_bytes=2_000_000)
    large = replace(small, batch_bytes=200_000_000)
    training = tuned((small, 150), (large, 300), limits=Auto(memory=4_000_000_000))
    n, factor = training.workers
    assert n * factor * large.batch_bytes <= 4_000_000_000


def test_the_reason_gives_figures():
    training = tuned((replace(READS, noise=0.0), 100))
    assert training.changes[0].num_workers == 5
    assert training.changes[0].reason == (
        "a batch takes 20 ms in a worker and 5.1 ms in the main process: 5 workers can keep up"
    )


@pytest.mark.parametrize(
    ("limits", "cores", "workers"),
    [
        (Auto(), 1.0, 1),
        (Auto(), 2.0, 1),
        (Auto(), 4.0, 2),
        (Auto(cpu=1), 8.0, 1),
        (Auto(cpu=2), 8.0, 2),
        (Auto(memory=1), 8.0, 1),
    ],
)
def test_it_begins_small(limits, cores, workers):
    assert Tuner(limits, cores=cores).workers == WorkerSettings(workers, 2)


def test_the_ceiling_follows_cores_and_memory():
    assert Tuner(Auto(), cores=2).max_workers == 32
    assert Tuner(Auto(), cores=64).max_workers == 256
    assert Tuner(Auto(), cores=2, memory_left_bytes=1_000_000_000).max_workers == 10
    assert Tuner(Auto(memory=100_000_000), cores=2).max_workers == 2
