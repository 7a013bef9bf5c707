# SPDX-License-Identifier: Apache-2.0
"""The verdict on made-up trainings: right in each, and never absurd."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.insight.model import DELIVERY_S
from penstock.insight.stats import SlowSample, Span
from penstock.insight.verdict import BOTTLENECKS, Inputs, judge

MS = 1e-3
HANDED = DELIVERY_S  # for the main process to receive a batch


def training(
    batches=200,
    *,
    workers=2,
    cores=8.0,
    trainer=8 * MS,
    trainer_cpu=None,
    read=0.0,
    compute=0.0,
    collate=0.0,
    send=0.0,
    wait=None,
    idle=None,
    starved=0.0,
    cpu=None,
    num_ready=0.0,
    lookahead=None,
    slowest=(),
    backend="process",
    run=None,
    pause=0.0,
    keeps_workers=False,
    is_auto=False,
    **more,
):
    """Judge a training of figures per batch; waits and idle time are what follows from them."""
    busy = read + compute + collate + send
    period = max(trainer, busy / workers) if workers else trainer + busy
    if wait is None:
        wait = period - trainer
    period = trainer + wait
    if idle is None:
        idle = max(period * workers - busy, 0.0)
    fields = {
        "batches": batches,
        "samples": 32 * batches,
        "bytes": 10_000_000 * batches,
        "seconds": batches * period,
        "wait_s": batches * wait,
        "consumer_s": batches * trainer,
        "trainer_cpu_s": batches * (trainer if trainer_cpu is None else trainer_cpu),
        "idle_s": batches * idle,
        "read_s": batches * read,
        "compute_s": batches * compute,
        "collate_s": batches * collate,
        "send_s": batches * send,
        "starved_s": batches * starved,
        "worker_cpu_s": batches * (compute + collate + send - starved if cpu is None else cpu),
        **more,
    }
    return judge(
        Inputs(
            Span(**fields),
            num_workers=workers,
            cores=cores,
            num_ready=num_ready,
            lookahead=2 * workers if lookahead is None else lookahead,
            slowest=slowest,
            backend=backend,
            run=run,
            pause_s=batches * pause,
            keeps_workers=keeps_workers,
            is_auto=is_auto,
        )
    )


def advised_workers(verdict):
    found = re.search(r"num_workers=(\d+)", verdict.remedy)
    assert found, verdict.remedy
    return int(found[1])


@pytest.mark.parametrize("batches", [0, 1, 7])
def test_a_few_batches_tell_nothing(batches):
    verdict = training(batches, compute=40 * MS)
    assert verdict.bottleneck == "nothing yet"
    assert verdict.expected_gain is None


def test_the_first_batches_of_epochs_are_not_among_those_that_are_too_few():
    verdict = training(10, compute=40 * MS, starts=3)
    assert verdict.text == (
        "Too few batches to tell: 7 besides the first of each epoch, and 8 are needed."
    )


def test_with_batches_ready_there_is_nothing_to_do():
    verdict = training(compute=12 * MS, trainer=10 * MS, num_ready=3.4)
    assert verdict.bottleneck == "trainer"
    assert (verdict.remedy, verdict.expected_gain) == ("", None)
    assert verdict.text == (
        "The main process waits 0 % of the time: 3.4 batches lie ready. There is nothing to do."
    )


def test_cheap_cores_that_idle_call_for_workers():
    verdict = training(compute=41 * MS, cpu=38 * MS, cores=16.0)
    assert verdict.bottleneck == "workers"
    assert verdict.text == (
        "The main process waits 61 % of the time: a batch takes 41 ms, 38 ms of it CPU. 2 workers "
        "could make 49 a second, and the main process could take 119."
    )
    assert advised_workers(verdict) == 6
    assert verdict.expected_gain == pytest.approx(
        20.5e-3 / (8 * MS + HANDED)
    )  # up to the main process's own rate


def test_workers_bring_no_more_than_cores_allow():
    verdict = training(compute=40 * MS, trainer=2 * MS, cores=4.0)
    assert verdict.bottleneck == "workers"
    assert verdict.expected_gain == pytest.approx(4 / (42 * MS + HANDED) * 20 * MS)
    assert advised_workers(verdict) == 4  # one for each core, as they wait for nothing


def test_with_all_cores_taken_workers_do_not_help():
    verdict = training(workers=4, compute=40 * MS, trainer=1 * MS, cores=4.0)
    assert verdict.bottleneck == "cpu"
    assert "num_workers" not in verdict.remedy
    assert verdict.expected_gain == pytest.approx(4 / (21 * MS + HANDED) / 100)
    assert "More workers would not help" in verdict.text


def test_cores_that_others_take_are_said_to_be():
    verdict = training(compute=40 * MS, starved=20 * MS, cores=8.0)
    assert verdict.bottleneck == "cpu"
    assert "20 ms a batch for one: other programs seem to take the rest" in verdict.text
    assert verdict.expected_gain == pytest.approx(2.0)  # half of 20 ms, and of waiting 20 ms for it


OF_FAR_DATA = (
    'of data in object storage, local_cache="/fast/disk:60GB" keeps what was read and reads ahead.'
)


def test_reads_wait_without_cpu_so_more_may_wait_at_a_time():
    verdict = training(read=640 * MS, compute=10 * MS, trainer=50 * MS, cores=2.0)
    assert verdict.bottleneck == "storage"
    assert advised_workers(verdict) == 16
    assert verdict.expected_gain == pytest.approx(0.325 / (50 * MS + HANDED))
    assert "640 ms of it waiting for reads" in verdict.text
    assert verdict.remedy.endswith(f"(`penstock pack`); {OF_FAR_DATA}")


def test_a_few_slow_files_are_named():
    slowest = [SlowSample(n, name, 0.5, 0, n, 0) for n, name in enumerate(["a.tif", None])]
    verdict = training(
        compute=48 * MS, timed=6400, timed_s=9.6, slow=64, slow_s=6.4, slowest=slowest
    )
    assert verdict.bottleneck == "slow source"
    assert "1 % of the samples take 67 % of the time" in verdict.text
    assert "a.tif (500 ms), sample 1 (500 ms)" in verdict.text
    assert verdict.expected_gain == pytest.approx(24e-3 / (8 * MS + HANDED))


def test_collating_that_takes_longer_than_the_samples_is_named():
    verdict = training(compute=10 * MS, collate=30 * MS)
    assert verdict.bottleneck == "collate"
    assert "30 ms of the 40 ms" in verdict.text
    # Its 10 MB are copied once in any case: that leaves 11 ms for 2 workers.
    assert verdict.expected_gain == pytest.approx(20e-3 / (8 * MS + HANDED))
    assert "get_batch" in verdict.remedy


@pytest.mark.parametrize(
    ("wait", "expected", "text"),
    [
        (0.42, "trainer", "There is nothing to do."),
        (0.43, "trainer", "No setting of the loader would bring as much as 15 %."),
        (1.1, "trainer", "No setting of the loader would bring as much as 15 %."),
        (1.7, "workers", "4 workers could make 100 a second"),
    ],
)
def test_a_remedy_is_named_where_it_brings_clearly_more(wait, expected, text):
    verdict = training(workers=4, compute=40 * MS, wait=wait * MS, idle=0.0)
    assert verdict.bottleneck == expected
    assert text in verdict.text
    assert bool(verdict.remedy) == (expected == "workers")


def test_workers_that_idle_while_the_main_process_waits_are_to_work_further_ahead():
    verdict = training(workers=4, compute=16 * MS, wait=4 * MS, lookahead=8)
    assert verdict.bottleneck == "bursts"
    assert "prefetch_factor=4 instead of 2" in verdict.remedy
    assert verdict.expected_gain == pytest.approx(12e-3 / (8 * MS + HANDED))


def test_workers_that_starve_the_main_process_are_to_be_fewer():
    verdict = training(
        workers=8, compute=20 * MS, trainer=20 * MS, cores=4.0, trainer_starved_s=200 * 6 * MS,
        trainer_cpu=12 * MS, num_ready=6,
    )  # fmt: skip
    assert verdict.bottleneck == "contention"
    assert advised_workers(verdict) == 2
    assert verdict.expected_gain == pytest.approx(20e-3 / (14 * MS + HANDED))


def test_workers_that_use_less_than_the_main_process_lacks_are_not_blamed():
    verdict = training(
        workers=2, compute=1 * MS, trainer=250 * MS, cores=2.0, trainer_starved_s=200 * 160 * MS,
        trainer_cpu=80 * MS, num_ready=4,
    )  # fmt: skip
    assert verdict.bottleneck == "contention"
    assert "Other programs, or threads of the loop itself" in verdict.text
    assert verdict.expected_gain is None
    assert "num_workers" not in verdict.remedy


def test_without_workers_the_main_process_makes_batches_itself():
    verdict = training(workers=0, compute=40 * MS, cores=8.0)
    assert verdict.bottleneck == "workers"
    assert advised_workers(verdict) == 6
    assert verdict.expected_gain == pytest.approx(48e-3 / (8 * MS + HANDED))


def test_without_workers_slow_reads_are_storage_and_workers_the_remedy():
    verdict = training(workers=0, read=40 * MS, compute=2 * MS, cores=2.0)
    assert verdict.bottleneck == "storage"
    assert advised_workers(verdict) == 6
    assert verdict.expected_gain == pytest.approx(50e-3 / (8 * MS + HANDED))
    assert verdict.remedy.endswith(OF_FAR_DATA.replace("of", "Of", 1))
    assert "local_cache" not in training(workers=0, compute=40 * MS, cores=8.0).remedy


START = {
    "compute": 12 * MS, "trainer": 10 * MS, "wait": 15 * MS, "first_wait_s": 3.0, "idle": 10 * MS,
}  # fmt: skip


SLOW = {"compute": 48 * MS, "timed": 6400, "timed_s": 9.6, "slow_s": 6.4}
STARVES = {"trainer": 20 * MS, "trainer_starved_s": 200 * 6 * MS}
ONE_EACH = Span(batches=20, starts=20, wait_s=2.0, first_wait_s=2.0, seconds=2.2)
CASES = {  # figures, verdict, what it says, and what not
    "workers that are not needed": (
        {"workers": 8, "compute": 12 * MS, "trainer": 10 * MS},
        "trainer", "There is nothing to do. 2 workers of the 8 would do.", None),
    "collate": ({"compute": 24.1 * MS, "collate": 15.9 * MS}, "workers", "", None),
    "more collate": ({"compute": 23.9 * MS, "collate": 16.1 * MS}, "collate", "", None),
    "reads": ({"compute": 20.1 * MS, "read": 19.9 * MS}, "workers", "", None),
    "more reads": ({"compute": 19.9 * MS, "read": 20.1 * MS}, "storage", "", None),
    "sending": ({"compute": 10 * MS, "send": 30 * MS}, "transport", "10.0 MB", None),
    "sending numbers": (
        {"compute": 6 * MS, "send": 6 * MS, "trainer": 1 * MS, "bytes": 200 * 23_552},
        "transport", "23.6 kB", "uint8"),
    "many slow samples": (SLOW | {"slow": 2000}, "workers", "", None),
    "workers idle behind slow files": (
        SLOW | {"slow": 64, "workers": 8, "wait": 40 * MS}, "slow source", "", None),
    "one core": (
        {"workers": 1, "compute": 20 * MS, "trainer": 4 * MS, "wait": 20 * MS, "cores": 1.0},
        "cpu", "", None),
    "one core, no workers": (
        {"workers": 0, "compute": 40 * MS, "cores": 1.0}, "cpu", "", "num_workers"),
    "workers keep each other from cores": (
        {"workers": 8, "compute": 40 * MS, "starved": 20 * MS, "trainer": 1 * MS, "cores": 6.0},
        "cpu", "a worker waits 20 ms a batch for one. More workers", "other programs"),
    "a single worker is not taken away": (
        STARVES | {"workers": 1, "compute": 8 * MS, "cores": 1.0, "trainer_cpu": 8 * MS},
        "contention", "", "num_workers"),
    "waits for its device while threads idle": (
        {"compute": 8 * MS, "trainer": 20 * MS, "trainer_cpu": 1 * MS, "backend": "thread"},
        "trainer", "", None),
    "threads where other programs have the cores": (
        {"compute": 18 * MS, "starved": 10 * MS, "read": 6 * MS, "workers": 3, "backend": "thread",
         "trainer": 0.02 * MS, "wait": 11 * MS, "cores": 2.0,
         "timed": 6400, "timed_s": 9.6, "slow": 64, "slow_s": 6.4},
        "cpu", "Another number of workers would bring little", None),
    "processes that take one core together": (
        {"workers": 4, "compute": 10 * MS, "read": 30 * MS, "trainer": 1 * MS},
        "storage", "", None),
    "the first wait of a run": (START | {"starts": 1}, "trainer", "", None),
    "epochs of one batch": ({"batches": 20, "starts": 20, "run": ONE_EACH}, "start", "", None),
    "seeding that is little of the time": (
        {"compute": 40 * MS, "trainer": 0.05 * MS, "seed_s": 200 * 0.7 * MS}, "workers", "", None),
    "no prefetch has helped": (
        {"workers": 4, "compute": 16 * MS, "wait": 4 * MS, "lookahead": 32},
        "bursts", "", "prefetch_factor"),
    "cheap batches that come late": (
        {"workers": 2, "compute": 0.5 * MS, "trainer": 0.05 * MS, "wait": 0.9 * MS},
        "transport", "", "prefetch_factor"),
    "workers on Ray lack cores": (
        {"compute": 40 * MS, "starved": 20 * MS, "cores": 2.0, "backend": "ray"},
        "cpu", "a worker waits 20 ms a batch for one", "inf"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_training_has_its_verdict(name):
    figures, bottleneck, said, not_said = CASES[name]
    verdict = training(**figures)
    assert verdict.bottleneck == bottleneck
    assert said in str(verdict)
    assert not_said is None or not_said not in str(verdict)


LOCKED = {"compute": 10 * MS, "read": 30 * MS, "workers": 4, "backend": "thread"}


def test_threads_that_take_one_core_together_are_to_be_processes():
    verdict = training(**LOCKED, trainer=1 * MS)
    assert verdict.bottleneck == "gil"
    assert "They may wait for Python's lock" in verdict.text
    assert "if not, take more threads" in verdict.remedy
    # It was one in 10 ms. The main process takes 1 ms; an eighth more, as 8 processes share its
    # cores.
    assert verdict.expected_gain == pytest.approx(10 / 1.125 / (1 + HANDED / (1.125 * MS)))
    assert advised_workers(verdict) == 8


def test_one_thread_that_holds_the_lock_all_the_time_is_not_given_others():
    verdict = training(compute=8 * MS, trainer=1 * MS, workers=1, backend="thread", cores=2.0)
    assert verdict.bottleneck == "gil"
    assert verdict.expected_gain == pytest.approx(2 * 8 * MS / (9 * MS + 2 * HANDED))


def test_more_threads_bring_no_more_than_the_lock_allows():
    verdict = training(
        read=30 * MS, compute=8 * MS, trainer=1 * MS, trainer_cpu=0.0, backend="thread"
    )
    assert verdict.bottleneck == "storage"
    assert verdict.expected_gain == pytest.approx(19 / 8)  # 8 ms of CPU for a batch every 19 ms


def test_waits_at_the_start_of_epochs_are_told_from_others():
    verdict = training(
        compute=12 * MS, trainer=10 * MS, wait=15 * MS, first_wait_s=3.0, starts=10, idle=10 * MS
    )
    assert verdict.bottleneck == "start"
    assert "300 ms each time" in verdict.text
    assert "persistent_workers=True" in verdict.remedy
    assert verdict.expected_gain == pytest.approx(2.5)


def test_starts_are_judged_by_the_run_as_one_window_holds_none():
    run = Span(
        batches=1500, starts=5, wait_s=150.0, first_wait_s=150.0, consumer_s=150.0, seconds=300.0
    )
    verdict = training(compute=12 * MS, trainer=100 * MS, run=run)
    assert verdict.bottleneck == "start"
    assert "50 % of the time" in verdict.text
    assert verdict.expected_gain == pytest.approx(2.0)


@pytest.mark.parametrize(("keeps", "advised"), [(True, "longer epochs"), (False, "Keep the w")])
def test_at_starts_the_advice_depends_on_whether_workers_are_kept(keeps, advised):
    verdict = training(
        compute=12 * MS, trainer=10 * MS, wait=15 * MS, first_wait_s=3.0, starts=10, idle=10 * MS,
        keeps_workers=keeps,
    )  # fmt: skip
    assert verdict.bottleneck == "start"
    assert advised in verdict.remedy


def test_pauses_of_the_main_process_bound_what_a_remedy_brings():
    verdict = training(workers=1, compute=20 * MS, trainer=5 * MS, pause=20 * MS)
    assert verdict.bottleneck == "workers"
    assert "waits 38 % of the time" in verdict.text
    assert verdict.expected_gain == pytest.approx(40e-3 / (25 * MS + HANDED))


SECONDS = st.floats(0, 1e4)
SPANS = st.builds(
    Span,
    batches=st.integers(0, 10_000),
    samples=st.integers(0, 10**6),
    bytes=st.integers(0, 10**12),
    starts=st.integers(0, 100),
    timed=st.integers(0, 1000),
    slow=st.integers(0, 1000),
    **{
        name: SECONDS
        for name in Span.__dataclass_fields__
        if name.endswith("_s") or name == "seconds"
    },
)
SLOWEST = st.lists(
    st.builds(
        SlowSample,
        index=st.one_of(st.none(), st.integers(), st.text(), st.tuples(st.integers())),
        name=st.one_of(st.none(), st.text()),
        seconds=SECONDS,
        epoch=st.just(0),
        step=st.just(0),
        worker_id=st.just(0),
    ),
    max_size=4,
)
OPTIONS = st.fixed_dictionaries(
    {
        "num_workers": st.integers(0, 64),
        "cores": st.floats(0.05, 256),
        "num_ready": st.floats(0, 100),
        "lookahead": st.integers(0, 300),
        "slowest": SLOWEST,
        "backend": st.sampled_from(["serial", "process", "thread"]),
        "run": st.one_of(st.none(), SPANS),
        "pause_s": SECONDS,
        "keeps_workers": st.booleans(),
        "is_auto": st.booleans(),
    }
)


@settings(max_examples=300, deadline=None)
@given(span=SPANS, options=OPTIONS)
def test_a_verdict_on_any_figures_is_sound(span, options):
    verdict = judge(Inputs(span, **options))
    gain = verdict.expected_gain
    assert verdict.bottleneck in BOTTLENECKS
    assert gain is None or (gain >= 1 and math.isfinite(gain))
    assert verdict.text
    assert str(verdict).startswith(verdict.text)
    for share in re.findall(r"([\d.]+) %", str(verdict)):
        assert 0 <= float(share) <= 100
    assert not re.search(r"\b(nan|inf)\b", verdict.remedy)
    assert (verdict.remedy == "") == (verdict.bottleneck in ("nothing yet", "trainer"))


@settings(max_examples=300, deadline=None)
@given(span=SPANS, options=OPTIONS)
def test_who_hardly_waits_is_never_told_to_add_workers(span, options):
    assume(span.wait_share < 0.05)
    verdict = judge(Inputs(span, **{**options, "run": None}))
    assert verdict.bottleneck in ("nothing yet", "trainer", "contention", "gil")
    if verdict.bottleneck != "gil" and (found := re.search(r"num_workers=(\d+)", verdict.remedy)):
        assert int(found[1]) < options["num_workers"]


@settings(max_examples=300, deadline=None)
@given(span=SPANS, options=OPTIONS, more_s=st.floats(0, 1e4))
def test_who_waits_longer_is_not_told_that_there_is_nothing_to_do(span, options, more_s):
    options = {**options, "pause_s": 0.0, "run": None}
    before = judge(Inputs(span, **options))
    longer = dataclasses.replace(span, wait_s=span.wait_s + more_s)
    after = judge(Inputs(longer, **options))
    if before.bottleneck not in ("nothing yet", "trainer", "start"):
        assert after.bottleneck not in ("nothing yet", "trainer")


@settings(max_examples=200, deadline=None)
@given(
    compute=st.floats(0.001, 1.0),
    trainer=st.floats(0.001, 1.0),
    workers=st.integers(1, 16),
    cores=st.integers(1, 64),
)
def test_the_gain_is_never_more_than_without_any_wait(compute, trainer, workers, cores):
    verdict = training(compute=compute, trainer=trainer, workers=workers, cores=float(cores))
    waits = max(compute / workers - trainer, 0) / max(compute / workers, trainer)
    if verdict.expected_gain is not None:
        assert verdict.expected_gain <= 1 / (1 - waits) * (1 + 1e-9)
    if waits >= 0.14:
        assert verdict.bottleneck in ("workers", "cpu")


def test_workers_on_ray_are_not_bound_by_the_main_processes_cores():
    here = training(workers=2, compute=40 * MS, trainer=2 * MS, cores=2.0)
    away = training(workers=2, compute=40 * MS, trainer=2 * MS, cores=2.0, backend="ray")
    assert (here.bottleneck, away.bottleneck) == ("cpu", "workers")
    assert away.expected_gain > 5


def test_batches_that_come_over_more_slowly_than_they_are_made_want_no_workers():
    cheap = {"compute": 0.05 * MS, "collate": 0.02 * MS, "trainer": 0.01 * MS}
    for workers in (1, 2, 4):
        verdict = training(workers=workers, wait=0.28 * MS, **cheap)
        assert verdict.bottleneck == "transport"
        assert "num_workers=0 would give about 2.2 x" in verdict.remedy
        assert "prefetch_factor" not in verdict.remedy
    verdict = training(workers=0, **cheap)
    assert verdict.bottleneck == "transport"
    assert "batches larger" in verdict.remedy
    assert "num_workers=" not in verdict.remedy
    assert verdict.expected_gain is None
    # Where the work is worth it, they are advised as ever.
    assert advised_workers(training(workers=0, compute=4 * MS, trainer=1 * MS)) == 4
    slower = training(workers=2, compute=8 * MS, trainer=1 * MS)
    assert slower.bottleneck == "workers"


@pytest.mark.parametrize("workers", [0, 1])
def test_seeding_that_takes_most_of_the_time_is_named_with_its_cure(workers):
    verdict = training(
        workers=workers, compute=0.9 * MS, trainer=0.05 * MS, seed_s=200 * 0.7 * MS, bytes=200_000
    )
    assert verdict.bottleneck == "seeding"
    assert "takes 0.70 ms of the 0.90 ms that a batch costs, 0.02 ms a sample" in verdict.text
    assert "`__getitems__(indices)`" in verdict.remedy
    assert 1.15 < verdict.expected_gain < 4


@pytest.mark.parametrize(
    "figures",
    [
        {"compute": 40 * MS},
        {"read": 40 * MS},
        {"workers": 1, "compute": 40 * MS, "cores": 16.0},
    ],
)
def test_who_leaves_workers_to_the_loader_is_not_told_to_choose_them(figures):
    verdict = training(**figures, is_auto=True)
    assert verdict.bottleneck in ("workers", "storage")
    assert verdict.remedy
    assert verdict.expected_gain is None
    assert "prefetch_factor=" not in verdict.remedy
    assert not re.search(r"num_workers=\d", verdict.remedy)


def test_batches_that_lack_cores_are_not_taken_for_uneven_ones():
    figures = {"workers": 4, "compute": 16 * MS, "wait": 4 * MS, "lookahead": 8}
    assert training(**figures, starved=0.1 * MS).bottleneck == "bursts"
    assert "prefetch_factor" not in training(**figures, starved=2 * MS).remedy


def test_a_gain_is_no_more_than_copying_the_batch_leaves():
    heavy = training(workers=1, compute=0.1 * MS, collate=4 * MS, trainer=0.1 * MS,
                     bytes=200 * 40_000_000)  # fmt: skip
    light = training(workers=1, compute=0.1 * MS, collate=4 * MS, trainer=0.1 * MS)
    assert (heavy.bottleneck, light.bottleneck) == ("workers", "collate")
    # 10 MB are copied in 1 ms.
    assert light.expected_gain == pytest.approx(4.1 / 1.1)
