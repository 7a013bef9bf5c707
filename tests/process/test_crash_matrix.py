# SPDX-License-Identifier: Apache-2.0
"""The crash matrix: what a loader does about each fault, wherever in a worker's life it strikes.

One cell is a fault, a place, a start method, and the loader's `on_error`. The table below says how
each cell ends; two workers load 32 samples in batches of 4, and of these sample 13 is struck.
"""

from __future__ import annotations

import multiprocessing
import re
import time
import traceback
import warnings
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest
from tests.process.faulty_datasets import BAD, FAULTS, Broken, Samples, faulty
from tests.support.comparing import assert_same
from tests.support.processes import but_of_forks

from penstock import Loader
from penstock.engine.backends import process
from penstock.errors import WorkerDied, WorkerTimeout
from penstock.faults import FaultPolicy
from penstock.torch import DataLoader

BATCH_SIZE = 4
METHODS = ("fork", "forkserver", "spawn")
PLACES_OF_SAMPLES = ("__getitem__", "get_batch", "collate", "sending")
ENDING_S = 5.0  # in which all workers are gone
# A worker has to be stuck for half of it to be taken for that, and to be up before: a fresh
# interpreter takes a second for it on a busy machine.
TIMEOUT_S = {"fork": 2.0, "forkserver": 2.0, "spawn": 4.0}


@dataclass(frozen=True)
class Raises:
    """The user's exception is raised, or one with its text, at the batch it concerns."""

    kind: type[BaseException]
    said: str


@dataclass(frozen=True)
class Dies:
    """`WorkerDied` is raised, and says how the worker ended."""

    said: str


@dataclass(frozen=True)
class TimesOut:
    """`WorkerTimeout` is raised, and shows where the worker is stuck."""


@dataclass(frozen=True)
class Skips:
    """All samples but the bad one come, and that one is listed with this error."""

    kind: type[BaseException]
    said: str


@dataclass(frozen=True)
class Unharmed:
    """All samples come, nothing is raised, and the workers are gone in time."""


BROKEN = Raises(Broken, "broken on purpose")
AS_TEXT = Raises(RuntimeError, "Local: .*not to be pickled")
NO_MEMORY = Raises(MemoryError, "Unable to allocate 1.00 EiB")
SKIPS_BROKEN = Skips(Broken, "broken on purpose")
SKIPS_AS_TEXT = Skips(RuntimeError, "Local: .*not to be pickled")
SKIPS_NO_MEMORY = Skips(MemoryError, "Unable to allocate 1.00 EiB")
EXITS_0 = Dies("exited with code 0")
EXITS_3 = Dies("exited with code 3")
SEGFAULTS = Dies("killed by SIGSEGV(?!.*task_runner.py).*read_null_pointer")
KILLED = Dies("killed by SIGKILL")
STUCK = Dies("killed, as no batch came within .?timeout.* while it was starting")
SKIPS_EXIT_0 = Skips(WorkerDied, "exited with code 0")
SKIPS_EXIT_3 = Skips(WorkerDied, "exited with code 3")
SKIPS_SEGFAULT = Skips(WorkerDied, "killed by SIGSEGV")
SKIPS_KILLED = Skips(WorkerDied, "killed by SIGKILL")
SKIPS_STUCK = Skips(WorkerDied, "killed, as no batch came within .?timeout")

# Fault: on_error="raise", on_error="skip"
# fmt: off
# What sets a worker up is no sample, so there is nothing to skip.
SETTING_UP = {
    "raise":       (BROKEN,     BROKEN),
    "unpicklable": (AS_TEXT,    AS_TEXT),
    "sys.exit(0)": (EXITS_0,    EXITS_0),
    "os._exit(3)": (EXITS_3,    EXITS_3),
    "SIGSEGV":     (SEGFAULTS,  SEGFAULTS),
    "SIGKILL":     (KILLED,     KILLED),
    "hang":        (TimesOut(), STUCK),
    "MemoryError": (NO_MEMORY,  NO_MEMORY),
}
IN_A_SAMPLE = {
    "raise":       (BROKEN,     SKIPS_BROKEN),
    "unpicklable": (AS_TEXT,    SKIPS_AS_TEXT),
    "sys.exit(0)": (EXITS_0,    SKIPS_EXIT_0),
    "os._exit(3)": (EXITS_3,    SKIPS_EXIT_3),
    "SIGSEGV":     (SEGFAULTS,  SKIPS_SEGFAULT),
    "SIGKILL":     (KILLED,     SKIPS_KILLED),
    "hang":        (TimesOut(), SKIPS_STUCK),
    "MemoryError": (NO_MEMORY,  SKIPS_NO_MEMORY),
}
MATRIX = {
    "worker init": SETTING_UP,
    "unpickling": SETTING_UP,
    **dict.fromkeys(PLACES_OF_SAMPLES, IN_A_SAMPLE),
    # All batches are there by then; what a worker does while it ends is no one's loss.
    "shutdown": dict.fromkeys(FAULTS, (Unharmed(), Unharmed())),
}
# fmt: on

IMPOSSIBLE = {
    (
        "unpickling",
        "fork",
    ): "nothing is unpickled: a forked worker has the main process's own object",
}


# A spawned worker takes a second to start, so only these places are tried with it every time;
# `make slow` tries all.
SPAWNED_EVERY_TIME = ("worker init", "__getitem__")
# What is raised in a task stays in the worker's `TaskRunner` (tests/engine/test_task_runner.py has
# each such fault), and a task that hangs is noticed by the main process: neither depends on how
# workers were started.
IN_A_TASK = ("__getitem__", "get_batch", "collate", "sending")
SAME_HOWEVER_STARTED = ("raise", "MemoryError", "hang")


def marks_of(place, fault, method):
    is_in_worker = method != "fork" and place in IN_A_TASK and fault in SAME_HOWEVER_STARTED
    is_slow = is_in_worker or (method == "spawn" and place not in SPAWNED_EVERY_TIME)
    return [pytest.mark.slow] if is_slow else []


def cells(column):
    """Return place, fault, start method and outcome of each cell that can be."""
    return [
        pytest.param(
            place,
            fault,
            method,
            outcomes[column],
            id=f"{place}-{fault}-{method}",
            marks=marks_of(place, fault, method),
        )
        for place, faults in MATRIX.items()
        for fault, outcomes in faults.items()
        for method in METHODS
        if (place, method) not in IMPOSSIBLE
    ]


def load(place, fault, method, on_error, loader_class=Loader, **options):
    """Return a loader in which the fault strikes at the place."""
    return loader_class(
        **faulty(place, fault),
        batch_size=BATCH_SIZE,
        num_workers=2,
        timeout=TIMEOUT_S[method] if fault == "hang" and place != "shutdown" else 0,
        multiprocessing_context=method,
        on_error=on_error,
        **options,
    )


def good_batches(place, without=()):
    """Return what a loader without workers and faults gives, less the samples `without`."""
    loader = Loader(**faulty(place, None), batch_size=BATCH_SIZE)
    return [_only(batch, ~np.isin(batch["index"], without)) for batch in loader]


def _only(batch, kept):
    return {
        key: column[kept]
        if isinstance(column, np.ndarray)
        else [str(name) for name, keep in zip(column, kept, strict=True) if keep]
        for key, column in batch.items()
    }


def drain(stream):
    """Return the batches that come, and what was raised, if anything."""
    batches = []
    try:
        for batch in stream:
            batches.append(batch)  # noqa: PERF402 - those before the error count
    except Exception as error:
        return batches, error.with_traceback(None)  # its frames hold the stream
    return batches, None


def batches_of(loader):
    """Return the batches of an epoch that loses one sample, and says so at its end."""
    with closing(iter(loader)) as stream, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches, error = drain(stream)
    if error is not None:
        raise error
    (warned,) = but_of_forks(caught)
    assert warned.category is UserWarning
    assert_said(r"\b1\b.*sample", str(warned.message))
    return batches


def assert_ends_with(error, outcome, place):
    said = "".join(traceback.format_exception_only(error))  # notes included
    if isinstance(outcome, Raises):
        assert isinstance(error, outcome.kind)
        assert_said(outcome.said, said)
        if place in PLACES_OF_SAMPLES:
            assert_said(rf"\b{BAD}\b", said)
    elif isinstance(outcome, Dies):
        assert type(error) is WorkerDied
        assert_said(outcome.said, said)
        if place in PLACES_OF_SAMPLES:
            assert_said(", epoch 0. It held steps", said)
    else:
        assert type(error) is WorkerTimeout
        assert_said("wait_for_ever", said)


def assert_said(pattern, text):
    assert re.search(pattern, text, re.DOTALL), text


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    """A worker that hangs has its time to end by itself; how long is `test_endings.py`'s to say."""
    monkeypatch.setattr(process, "_GRACE_S", 0.5)


def assert_unharmed(stream, expected):
    batches = [next(stream) for _ in expected]
    begun = time.monotonic()
    with pytest.raises(StopIteration):
        next(stream)
    assert_all_gone_since(begun)
    assert_same(expected, batches)


def assert_all_gone_since(begun):
    assert multiprocessing.active_children() == []
    assert time.monotonic() - begun < ENDING_S


def test_the_table_has_every_cell():
    assert set(MATRIX) == {"worker init", "unpickling", *PLACES_OF_SAMPLES, "shutdown"}
    assert all(list(faults) == list(FAULTS) for faults in MATRIX.values())
    num_cells = len(MATRIX) * len(FAULTS) * len(METHODS)
    for column in (0, 1):
        assert len(list(cells(column))) == num_cells - len(IMPOSSIBLE) * len(FAULTS)


@pytest.mark.parametrize(("place", "fault", "method", "outcome"), cells(0))
def test_without_a_policy_an_epoch_ends_as_the_table_says(place, fault, method, outcome):
    with closing(iter(load(place, fault, method, "raise"))) as stream:
        if isinstance(outcome, Unharmed):
            assert_unharmed(stream, good_batches(place))
            return
        batches, error = drain(stream)
        assert_ends_with(error, outcome, place)
        if isinstance(outcome, Dies):
            assert next(stream, None) is None
        assert len(batches) <= (BAD // BATCH_SIZE if place in PLACES_OF_SAMPLES else 0)
        assert_same(good_batches(place)[: len(batches)], batches)
        begun = time.monotonic()
    assert_all_gone_since(begun)


@pytest.mark.parametrize(("place", "fault", "method", "outcome"), cells(1))
def test_under_skip_an_epoch_ends_as_the_table_says(place, fault, method, outcome):
    if isinstance(outcome, Skips):
        assert_goes_on_without_the_bad_sample(place, fault, method, outcome)
        return
    # One worker more is enough to see that none can be set up.
    loader = load(place, fault, method, FaultPolicy("skip", max_respawns=1))
    with closing(iter(loader)) as stream:
        if isinstance(outcome, Unharmed):
            assert_unharmed(stream, good_batches(place))
        else:
            batches, error = drain(stream)
            assert batches == []
            assert_ends_with(error, outcome, place)
        assert loader.failures == []
        begun = time.monotonic()
    assert_all_gone_since(begun)


def assert_goes_on_without_the_bad_sample(place, fault, method, outcome, **options):
    loader = load(place, fault, method, "skip", **options)
    batches = batches_of(loader)
    assert_same(good_batches(place, without=[BAD]), batches)
    assert_is_the_bad_sample(loader.failures, outcome)
    assert loader.failures[0].replaced_by is None


def assert_is_the_bad_sample(failures, outcome):
    (failure,) = failures
    assert (failure.index, failure.name) == (BAD, f"file-{BAD}.bin")
    assert (failure.epoch, failure.step) == (0, BAD // BATCH_SIZE)
    assert isinstance(failure.error, outcome.kind)
    assert_said(outcome.said, str(failure.error))


@pytest.mark.parametrize("fault", ["raise", "os._exit(3)", "SIGKILL", "hang"])
@pytest.mark.parametrize("place", PLACES_OF_SAMPLES)
def test_under_replace_another_sample_takes_the_place_whatever_the_fault(place, fault):
    loader = load(place, fault, "fork", "replace")
    batches = batches_of(loader)
    assert_is_the_bad_sample(loader.failures, MATRIX[place][fault][1])
    replacement = loader.failures[0].replaced_by
    assert replacement == replacement_without_workers()
    indices = np.concatenate([batch["index"] for batch in batches])
    assert [len(batch["index"]) for batch in batches] == [BATCH_SIZE] * 8
    assert indices.tolist() == [*range(BAD), replacement, *range(BAD + 1, 32)]
    kept = [
        _only(batch, indices[4 * k : 4 * k + 4] == np.arange(4 * k, 4 * k + 4))
        for k, batch in enumerate(batches)
    ]
    assert_same(good_batches(place, without=[BAD]), kept)


class RaisesAnywhere(Samples):
    """The bad sample raises in the main process as well."""

    def __getitem__(self, index):
        if index == BAD:
            raise Broken("broken on purpose")
        return super().__getitem__(index)


def replacement_without_workers():
    loader = Loader(RaisesAnywhere(), batch_size=BATCH_SIZE, on_error="replace")
    batches_of(loader)
    return loader.failures[0].replaced_by


TORCH_CELLS = [
    ("__getitem__", "raise", "fork"),
    ("__getitem__", "SIGKILL", "fork"),
    ("__getitem__", "os._exit(3)", "spawn"),
    ("collate", "SIGSEGV", "fork"),
    ("sending", "sys.exit(0)", "fork"),
]


@pytest.mark.parametrize(("place", "fault", "method"), TORCH_CELLS)
def test_torch_s_loader_ends_as_the_table_says(place, fault, method):
    outcome, _ = MATRIX[place][fault]
    with closing(iter(load(place, fault, method, "raise", DataLoader))) as stream:
        batches, error = drain(stream)
    assert_ends_with(error, outcome, place)
    assert len(batches) <= BAD // BATCH_SIZE


@pytest.mark.parametrize(("place", "fault", "method"), TORCH_CELLS)
def test_torch_s_loader_goes_on_without_the_bad_sample(place, fault, method):
    loader = load(place, fault, method, "skip", DataLoader, seed=0)
    batches = batches_of(loader)
    assert_is_the_bad_sample(loader.failures, MATRIX[place][fault][1])
    indices = [index for batch in batches for index in batch["index"].tolist()]
    assert indices == [index for index in range(32) if index != BAD]
