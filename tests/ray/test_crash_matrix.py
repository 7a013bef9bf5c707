# SPDX-License-Identifier: Apache-2.0
"""The crash matrix of process workers, with Ray's actors: the same faults in the same places.

What differs is what is known of an end: of one by a signal Ray says no more than that the process
is gone. `make test` takes the cells of each fault and of each place once; `make slow` takes all.
"""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from tests.process import test_crash_matrix as processes
from tests.process.faulty_datasets import BAD, faulty
from tests.process.test_crash_matrix import (
    BATCH_SIZE,
    BROKEN,
    MATRIX,
    PLACES_OF_SAMPLES,
    Dies,
    Skips,
    TimesOut,
    Unharmed,
    assert_ends_with,
    assert_is_the_bad_sample,
    batches_of,
    drain,
    good_batches,
    replacement_without_workers,
)
from tests.support.comparing import assert_same

from penstock import Loader
from penstock.errors import WorkerDied
from penstock.faults import FaultPolicy
from penstock.torch import DataLoader

TIMEOUT_S = 8.0  # from the moment when both actors are up
ENDED = "ended with SystemExit: 0"
GONE = "is gone while"
STUCK = "was killed, as no batch came within .?timeout"
KNOWN_BY_RAY = {
    "sys.exit(0)": ENDED,
    "os._exit(3)": GONE,
    "SIGSEGV": GONE,
    "SIGKILL": GONE,
    "hang": STUCK,
}
EVERY_TIME = {
    *[("__getitem__", fault) for fault in MATRIX["__getitem__"]],
    *[(place, "os._exit(3)") for place in MATRIX],
    ("worker init", "raise"),
    ("unpickling", "raise"),
}


def outcome_of(place, fault, column):
    """Return what the table of processes says, in the words that Ray's workers have for it."""
    outcome = MATRIX[place][fault][column]
    if isinstance(outcome, Dies):
        return Dies(KNOWN_BY_RAY[fault])
    if isinstance(outcome, Skips) and outcome.kind is WorkerDied:
        return Skips(WorkerDied, KNOWN_BY_RAY[fault])
    return outcome


CELLS = [
    pytest.param(
        place,
        fault,
        id=f"{place}-{fault}",
        marks=[] if (place, fault) in EVERY_TIME else [pytest.mark.slow],
    )
    for place, faults in MATRIX.items()
    for fault in faults
]


@pytest.fixture(autouse=True)
def _connected(cluster):
    pass


def load(place, fault, on_error, loader_class=Loader, **options):
    return loader_class(
        **faulty(place, fault),
        batch_size=BATCH_SIZE,
        num_workers=2,
        timeout=TIMEOUT_S if fault == "hang" and place != "shutdown" else 0,
        on_error=on_error,
        backend="ray",
        **options,
    )


def assert_unharmed(stream, expected):
    assert_same([next(stream) for _ in expected], expected)
    with pytest.raises(StopIteration):
        next(stream)


@pytest.mark.parametrize(("place", "fault"), CELLS)
def test_without_a_policy_an_epoch_ends_as_with_processes(place, fault):
    outcome = outcome_of(place, fault, 0)
    with closing(iter(load(place, fault, "raise"))) as stream:
        if isinstance(outcome, Unharmed):
            assert_unharmed(stream, good_batches(place))
            return
        batches, error = drain(stream)
        if isinstance(outcome, TimesOut) and place in ("worker init", "unpickling"):
            assert "while it was starting" in str(error) or "wait_for_ever" in str(error)
        else:
            assert_ends_with(error, outcome, place)
        assert len(batches) <= (BAD // BATCH_SIZE if place in PLACES_OF_SAMPLES else 0)
        assert_same(batches, good_batches(place)[: len(batches)])


@pytest.mark.parametrize(("place", "fault"), CELLS)
def test_under_skip_an_epoch_ends_as_with_processes(place, fault):
    outcome = outcome_of(place, fault, 1)
    if isinstance(outcome, Skips):
        loader = load(place, fault, "skip")
        assert_same(batches_of(loader), good_batches(place, without=[BAD]))
        assert_is_the_bad_sample(loader.failures, outcome)
        return
    loader = load(place, fault, FaultPolicy("skip", max_respawns=1))
    with closing(iter(loader)) as stream:
        if isinstance(outcome, Unharmed):
            assert_unharmed(stream, good_batches(place))
        else:
            batches, error = drain(stream)
            assert batches == []
            assert_ends_with(error, outcome, place)
    assert loader.failures == []


def test_under_replace_another_sample_takes_the_place_of_one_that_kills():
    loader = load("__getitem__", "os._exit(3)", "replace")
    batches = batches_of(loader)
    assert_is_the_bad_sample(loader.failures, Skips(WorkerDied, GONE))
    assert loader.failures[0].replaced_by == replacement_without_workers()
    indices = np.concatenate([batch["index"] for batch in batches])
    expected = [*range(BAD), loader.failures[0].replaced_by, *range(BAD + 1, 32)]
    assert indices.tolist() == expected


def test_torch_s_loader_goes_on_without_the_sample_that_kills():
    loader = load("__getitem__", "os._exit(3)", "skip", DataLoader, seed=0)
    indices = [index for batch in batches_of(loader) for index in batch["index"].tolist()]
    assert indices == [index for index in range(32) if index != BAD]


def test_the_exception_of_a_sample_has_its_own_type_and_names_the_sample_and_the_worker():
    with closing(iter(load("__getitem__", "raise", "raise"))) as stream:
        _, error = drain(stream)
    assert_ends_with(error, BROKEN, "__getitem__")
    assert any("in worker" in note and "step 3" in note for note in error.__notes__)


def test_every_cell_is_there():
    assert len(CELLS) == len(MATRIX) * len(processes.FAULTS)
    assert {fault for _, fault in EVERY_TIME} == set(processes.FAULTS)
