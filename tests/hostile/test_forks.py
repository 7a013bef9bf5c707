# SPDX-License-Identifier: Apache-2.0
"""A fork at any moment of a loader, by a child that does anything, disturbs neither side."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import traceback

import numpy as np
import pytest
from tests.support.datasets import Rows

from penstock import Loader
from penstock.errors import ConfigError

NUM_BATCHES = 16
LONGEST_S = 60
BACKENDS = {"process": (2, "process"), "thread": (2, "thread"), "serial": (0, "process")}


def loader_of(backend, **options):
    num_workers, backend = BACKENDS[backend]
    # A batch of 4 takes 1.1 MB: serial loaders have a pool from 1 MiB.
    rows = Rows(4 * NUM_BATCHES, 70_000)
    return Loader(rows, batch_size=4, num_workers=num_workers, backend=backend, **options)


def is_batch(batch, step):
    return bool((batch == np.arange(4 * step, 4 * step + 4)[:, None]).all())


class State:
    """A loader somewhere in its life, and what the main process holds."""

    def __init__(self, backend, moment):
        self.go = os.pipe()
        persistent = moment.startswith("kept") and BACKENDS[backend][0] > 0
        self.backend = backend
        self.loader = loader_of(backend, persistent_workers=persistent)
        self.stream, self.held = None, []
        if "between" in moment or moment == "after an epoch":
            self.held = [batch[1:] for batch in list(self.loader)[:2]]
        if moment.endswith("within an epoch"):
            self.stream = iter(self.loader)
            self.held = [next(self.stream)[1:] for _ in range(2)]
        if moment == "at the end of an epoch":
            self.stream = iter(self.loader)
            self.held = [batch[1:] for batch in itertools.islice(self.stream, NUM_BATCHES)][:2]

    def are_held_right(self):
        return all(
            bool((rows == np.arange(4 * step + 1, 4 * step + 4)[:, None]).all())
            for step, rows in enumerate(self.held)
        )

    def rest_is_right(self):
        """Take what is left of the epoch, or a whole one."""
        batches = list(self.loader if self.stream is None else self.stream)
        first = NUM_BATCHES - len(batches)
        return all(is_batch(batch, step) for step, batch in enumerate(batches, start=first))


MOMENTS = [
    "before an epoch", "within an epoch", "at the end of an epoch", "after an epoch",
    "kept workers, between epochs", "kept workers, within an epoch",
]  # fmt: skip


def wait_for_parent(state):
    """Look at what is held when the parent has used its memory many times over."""
    os.read(state.go[0], 1)
    return state.are_held_right()


def drop_all(state):
    state.stream = state.loader = None
    gc.collect()
    return state.are_held_right()


def own_loader(state):
    # Whatever the default is: see the last test.
    options = {"multiprocessing_context": "fork"} if state.backend == "process" else {}
    batches = enumerate(loader_of(state.backend, **options))
    return all(is_batch(batch, step) for step, batch in batches) and state.are_held_right()


def write_into_what_is_held(state):
    """Its own copy, or the parent's memory: by itself it has to see what it wrote."""
    copies = [rows.copy() for rows in state.held]
    for rows in copies:
        rows += 1
    return state.are_held_right()


def fork_again(state):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if wait_for_parent(state) else 1)
    return os.waitpid(pid, 0)[1] == 0


def leave_by_an_exception(state):
    raise LookupError("on purpose")


def leave_by_sys_exit(state):
    sys.exit(0)


def start_a_process(state):
    import multiprocessing

    process = multiprocessing.get_context("fork").Process(target=state.are_held_right)
    process.start()
    process.join()
    return process.exitcode == 0


def run_a_program(state):
    import subprocess

    return subprocess.run(["true"], check=False).returncode == 0 and state.are_held_right()


def close_descriptors(state):
    os.closerange(3, 400)
    return state.are_held_right()


def be_killed(state):
    os.kill(os.getpid(), signal.SIGKILL)


ACTS = [
    wait_for_parent, drop_all, own_loader, write_into_what_is_held, fork_again,
    leave_by_an_exception, leave_by_sys_exit, start_a_process, run_a_program, close_descriptors,
    be_killed,
]  # fmt: skip
ENDS = {leave_by_an_exception: 9, leave_by_sys_exit: 0, be_killed: -signal.SIGKILL}


def complaint(backend, moment, act):
    """Fork, let the child act while the parent goes on; return what is wrong, or None."""
    state = State(backend, moment)
    pid = os.fork()
    if pid == 0:
        code = 8
        try:
            signal.alarm(LONGEST_S)
            code = 0 if act(state) else 1
        except SystemExit as error:
            code = error.code
        except LookupError:
            code = 9
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    is_right = state.rest_is_right() and state.are_held_right()
    os.write(state.go[1], b"xx")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for end in state.go:
        os.close(end)
    if code != ENDS.get(act, 0):
        return f"the child ended by {code}"
    return None if is_right else "the parent has other batches"


def wrong_of(cases):
    found = {case: complaint(case[0], case[1], case[2]) for case in cases}
    return [f"{c[0]}, {c[1]}, {c[2].__name__}: {why}" for c, why in found.items() if why]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fork_within_an_epoch_disturbs_neither_side(backend):
    assert wrong_of((backend, "within an epoch", act) for act in ACTS) == []


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fork_at_any_moment_disturbs_neither_side(backend, moment):
    assert wrong_of((backend, moment, act) for act in ACTS) == []


def test_workers_of_a_fork_server_in_a_forked_child_are_refused_with_the_reason():
    list(loader_of("process", multiprocessing_context="forkserver"))
    pid = os.fork()
    if pid == 0:
        code = 8
        try:
            list(loader_of("process", multiprocessing_context="forkserver"))
        except ConfigError as error:
            code = 0 if "the fork server is no child of this" in str(error) else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
