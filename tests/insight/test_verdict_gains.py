# SPDX-License-Identifier: Apache-2.0
"""What a verdict promises, held against what the advised setting brings, on made-up loads.

A load is a `Regime`: what a batch costs, whatever makes it. A setting is workers, and whether it is
of threads. The verdict on a load under one setting is followed, and the load runs again.
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.insight.training import Regime, Training

from penstock.engine.timing import WorkerSettings
from penstock.insight.rows import Sums, mean_ready, rows_of, without_pauses
from penstock.insight.verdict import RULES, Inputs, judge

MS = 1e-3
HANDED = {"send_s": 0.15 * MS, "take_s": 0.25 * MS, "serial_s": 0.03 * MS}
TWO_CORES = Regime(
    cores=2, noise=0.0, start_s=0.0, first_s=0.0, trainer_cpu_s=0.03 * MS, num_samples=32, **HANDED
)
LOADS = {
    "ints": replace(TWO_CORES, compute_s=0.01 * MS, collate_s=0.015 * MS, batch_bytes=256),
    "ints, seeded": replace(
        TWO_CORES, compute_s=0.75 * MS, seed_s=0.7 * MS, collate_s=0.04 * MS, serial_s=0.15 * MS
    ),
    "rows, seeded": replace(
        TWO_CORES, compute_s=0.9 * MS, seed_s=0.7 * MS, collate_s=0.1 * MS, serial_s=0.15 * MS
    ),
    "1 ms of CPU": replace(TWO_CORES, compute_s=1 * MS),
    "1 ms of CPU, 8 cores": replace(TWO_CORES, compute_s=1 * MS, cores=8),
    "64 ms of CPU": replace(TWO_CORES, compute_s=64 * MS),
    "64 ms of CPU, 8 cores": replace(TWO_CORES, compute_s=64 * MS, cores=8),
    "160 ms of reads": replace(TWO_CORES, read_s=160 * MS, compute_s=2.5 * MS),
    "reads and CPU": replace(TWO_CORES, read_s=20 * MS, compute_s=20 * MS),
    "10 MB, trivial reads": replace(TWO_CORES, collate_s=1 * MS, batch_bytes=10_000_000),
    "slow consumer": replace(TWO_CORES, compute_s=5 * MS, trainer_s=20 * MS),
    "consumer on a core": replace(TWO_CORES, compute_s=20 * MS, trainer_cpu_s=15 * MS),
    "tokens": replace(TWO_CORES, compute_s=0.02 * MS, collate_s=0.1 * MS, batch_bytes=23_552),
    "tokens, sent slowly": replace(
        TWO_CORES, compute_s=0.02 * MS, collate_s=0.1 * MS, send_s=1 * MS, batch_bytes=23_552
    ),
    "float32 images": replace(
        TWO_CORES, compute_s=30 * MS, collate_s=2 * MS, trainer_s=10 * MS, batch_bytes=19_000_000
    ),
}


class Setting(NamedTuple):
    """Workers, batches under way per worker, and whether they are threads."""

    num_workers: int
    prefetch_factor: int = 2
    backend: str = "process"


class Step(NamedTuple):
    """What a verdict was made of, and what it said."""

    load: Regime
    setting: Setting
    rate: float
    text: str


NO_GAIN = "it promises none"
NOT_FOLLOWED = {  # what rules say that `advised` cannot do, each with the reason
    "_start": "the loads here are one long epoch",
    "_too_few": NO_GAIN,
    "_unmeasured": NO_GAIN,
    "_nothing_to_do": NO_GAIN,
    "_contention": "no load here leaves the main process enough to gain by fewer workers",
    "_slow_source": "the batches of the loads here cost all the same",
    "_bursts": "the batches of the loads here cost all the same",
    "_collate": "a bound: how much a simpler collate saves is the dataset's matter",
    "_transport": "a bound: how much less is sent is the dataset's matter",
    "_cpu": "half the CPU is an example: how much less it can be is the dataset's matter",
    "_no_setting": NO_GAIN,
    "_none_of_these": NO_GAIN,
}
SETTINGS = [Setting(n) for n in (0, 1, 2, 3, 6)] + [Setting(n, 2, "thread") for n in (1, 2)]


@functools.cache
def run(load, setting):
    """Train with a load under a setting.

    Returns:
        The verdict, the batches per second, and the name of the function that said the verdict.
    """
    lookahead, backend = setting.num_workers * setting.prefetch_factor, setting.backend
    if backend == "thread":  # nothing is packed, and Python's lock is one
        load = replace(load, send_s=0.01 * MS, take_s=0.06 * MS, lock_share=1.0)
    training = Training(load, WorkerSettings(setting.num_workers, setting.prefetch_factor))
    training.run(120 + 2 * lookahead)
    rate = training.rate(64)
    rows = without_pauses(rows_of(training.records)[-64:])
    inputs = Inputs(
        Sums.of(rows).span(),
        num_workers=setting.num_workers,
        cores=load.cores,
        num_ready=mean_ready(rows),
        lookahead=lookahead,
        backend=backend,
    )
    verdict = judge(inputs)
    held = (rule.says for rule in RULES if rule.holds(inputs))
    says = next(says for says in held if says(inputs).text == verdict.text)
    return verdict, rate, says.__name__


def advised(load, setting, verdict):
    """Return the load and the setting that a verdict names; the present ones if it names none."""
    remedy = verdict.remedy
    if verdict.bottleneck == "seeding":  # read at once, they are seeded once
        left_s = load.seed_s / load.num_samples
        load = replace(load, compute_s=load.compute_s - load.seed_s + left_s, seed_s=left_s)
    workers = re.search(r"num_workers=(\d+)", remedy)
    prefetch = re.search(r"prefetch_factor=(\d+)", remedy)
    return load, Setting(
        int(workers[1]) if workers else setting.num_workers,
        int(prefetch[1]) if prefetch else setting.prefetch_factor,
        "process" if 'backend="process"' in remedy else setting.backend,
    )


def follow(load, setting, most=8):
    """Do what verdicts say until they say nothing more; return each load, setting and rate."""
    path = []
    for _ in range(most):
        verdict, rate, _ = run(load, setting)
        path.append(Step(load, setting, rate, str(verdict)))
        load, setting = advised(load, setting, verdict)
        if (load, setting) == path[-1][:2]:
            return path
    raise AssertionError(path)


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s.num_workers} {s.backend}")
def test_an_advised_setting_brings_what_the_verdict_promises(name, setting):
    load = LOADS[name]
    verdict, rate, says = run(load, setting)
    other = advised(load, setting, verdict)
    promised = verdict.expected_gain
    if other == (load, setting):
        assert promised is None or NOT_FOLLOWED[says] != NO_GAIN, verdict
        return
    gain = run(*other)[1] / rate
    assert promised is None or promised >= 1.15, verdict
    assert gain >= 1.1, (str(verdict), gain)
    if promised is not None and "up to" not in verdict.remedy:
        assert 0.75 <= gain / promised <= 1.6, (str(verdict), gain)


def test_what_every_rule_says_is_followed_or_listed_with_the_reason_why_not():
    followed = set()
    for load, setting in itertools.product(LOADS.values(), SETTINGS):
        verdict, _, says = run(load, setting)
        if advised(load, setting, verdict) != (load, setting):
            followed.add(says)
    assert sorted([*followed, *NOT_FOLLOWED]) == sorted({rule.says.__name__ for rule in RULES})


@pytest.mark.parametrize("name", LOADS)
def test_following_verdicts_ends_near_the_best_setting_from_anywhere(name):
    for setting in SETTINGS:
        path = follow(LOADS[name], setting)
        assert len({step[:2] for step in path}) == len(path) <= 4, path
        best = max(run(path[-1].load, Setting(n))[1] for n in (0, 1, 2, 3, 4, 6, 8, 16, 32))
        assert path[-1].rate >= 0.65 * best or setting.backend == "thread", path


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s.num_workers} {s.backend}")
@pytest.mark.parametrize("cores", [1, 2, 4, 8])
def test_work_on_the_cpu_is_never_given_more_workers_than_cores(setting, cores):
    for compute_s in (0.5 * MS, 5 * MS, 64 * MS):
        load = replace(TWO_CORES, compute_s=compute_s, read_s=0.05 * compute_s, cores=cores)
        _, other = advised(load, setting, run(load, setting)[0])
        assert other.num_workers <= max(cores, setting.num_workers)


SECONDS = st.floats(-5, -1).map(lambda exponent: 10**exponent)
ANY_LOAD = st.builds(
    Regime,
    read_s=st.just(0.0) | SECONDS,
    compute_s=SECONDS,
    collate_s=st.just(0.0) | SECONDS,
    trainer_s=st.just(0.0) | SECONDS,
    trainer_cpu_s=st.floats(-5, -2).map(lambda exponent: 10**exponent),
    send_s=st.floats(0.05 * MS, 0.3 * MS),
    take_s=st.floats(0.1 * MS, 0.35 * MS),
    serial_s=st.floats(0.02 * MS, 0.05 * MS),
    cores=st.sampled_from([1, 2, 4, 8]),
    noise=st.just(0.0),
    start_s=st.just(0.0),
    first_s=st.just(0.0),
    num_samples=st.just(32),
)


@settings(max_examples=30, deadline=None)
@given(load=ANY_LOAD, setting=st.sampled_from(SETTINGS[:5]))
def test_following_verdicts_never_returns_to_a_setting_that_was_left(load, setting):
    path = follow(load, setting, most=6)
    rates = [step.rate for step in path]
    assert len({step.setting for step in path}) == len(path)
    assert all(after >= before for before, after in itertools.pairwise(rates)), path
