# SPDX-License-Identifier: Apache-2.0
"""However the main process ends, with workers inside samples, nothing of it is left in 5 s.

`test_lifecycle.py` has the endings with idle workers. Here four workers are stuck, which is what
makes an ending slow; and a forked child, a garbage collector or a full system get in between.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from tests.process.faulty_datasets import BAD, Rows

from penstock import Loader

METHODS = ("fork", "forkserver", "spawn")
NUM_WORKERS = 4
ENDING_S = 5.0  # in total, however many workers
LONGEST_S = 60.0  # for a script as a whole


@contextlib.contextmanager
def program(body, *command):
    """Run a training in a process of its own; `command` runs it, if not Python by itself."""
    head = f"""
        import ctypes, gc, os, signal, sys, threading
        sys.path[:0] = {sys.path!r}
        import numpy as np
        from penstock import Loader
        from tests.process.faulty_datasets import Gluttonous, Rows, Stuck

        def start(dataset, **options):
            stream = iter(Loader(dataset, batch_size=2, num_workers={NUM_WORKERS}, **options))
            pids = " ".join(str(p.pid) for p in stream.backend.processes)
            os.write(1, f"pids {{pids}}\\n".encode())  # at once: the workers write there as well
            return stream

        def wait_for_go():
            assert sys.stdin.readline() == "go\\n"

        def holdings():
            with open("/proc/self/maps") as maps:
                num_slots = sum("memfd:penstock" in line for line in maps)
            return len(os.listdir("/proc/self/fd")), threading.active_count(), num_slots

        signal.signal(signal.SIGINT, signal.default_int_handler)  # CI may have it ignored
    """
    script = textwrap.dedent(head) + textwrap.dedent(body)
    with subprocess.Popen(
        [*command, sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def stuck_workers_of(process):
    """Return the workers, once all of them are in the middle of a sample."""
    workers, num_stuck = [], 0
    while not workers or num_stuck < NUM_WORKERS:
        line = process.stdout.readline()
        assert line, finish(process)
        if line.startswith("pids"):
            workers = [psutil.Process(int(pid)) for pid in line.split()[1:]]
        else:
            assert line == "stuck\n"
            num_stuck += 1
    return workers


def say_go(process):
    process.stdin.write("go\n")
    process.stdin.flush()


def finish(process):
    """Return what it printed by its end."""
    return process.communicate(timeout=LONGEST_S)


def assert_gone_in_time(processes, begun):
    left_s = begun + ENDING_S - time.monotonic()
    _, alive = psutil.wait_procs(processes, timeout=max(left_s, 0.0))
    for process in alive:
        process.kill()
    assert alive == []


# Each leaves the main process running, in which nothing may be left. A fifth batch never comes.
LOOPS = {
    "break": """
        for batch in start(DATASET):
            wait_for_go()
            break
    """,
    "exception": """
        try:
            for batch in start(DATASET):
                wait_for_go()
                raise LookupError
        except LookupError:
            pass
    """,
    "interrupt": """
        try:
            for step, batch in enumerate(start(DATASET)):
                if step == 3:
                    wait_for_go()
        except KeyboardInterrupt:
            pass
    """,
    "close": """
        stream = start(DATASET)
        next(stream)
        wait_for_go()
        stream.close()
        del stream
    """,
    "cycle": """
        class Program:
            pass
        program = Program()
        program.itself, program.stream = program, start(DATASET)
        wait_for_go()
        del program
        gc.collect()
    """,
}


@pytest.mark.parametrize(
    ("loop", "heeds_sigterm"),
    [*((loop, True) for loop in LOOPS), ("break", False), ("interrupt", False)],
)
def test_a_loop_left_while_all_workers_are_stuck_leaves_nothing(loop, heeds_sigterm):
    dataset = f"Stuck(8, heeds_sigterm={heeds_sigterm})"
    with program(
        "before = holdings()"
        + textwrap.dedent(LOOPS[loop]).replace("DATASET", dataset)
        + "batch = None\nprint(before == holdings(), before, holdings())"
    ) as process:
        workers = stuck_workers_of(process)
        begun = time.monotonic()
        say_go(process)
        if loop == "interrupt":
            process.send_signal(signal.SIGINT)
        assert_gone_in_time(workers, begun)
        out, err = finish(process)
        assert (process.returncode, err) == (0, "")
        assert out.startswith("True"), out


# How the main process ends, and its exit code.
TRAINERS = {
    "end of the script": ("stream = start(DATASET); wait_for_go()", 0),
    "sys.exit": ("stream = start(DATASET); wait_for_go(); sys.exit(7)", 7),
    "os._exit": ("stream = start(DATASET); wait_for_go(); os._exit(7)", 7),
    "uncaught exception": ("stream = start(DATASET); wait_for_go(); raise LookupError", 1),
    "SIGINT": ("for batch in start(DATASET): pass", -signal.SIGINT),
    "SIGTERM": ("for batch in start(DATASET): pass", -signal.SIGTERM),
    "SIGTERM, handled": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nfor batch in start(DATASET): pass",
        7,
    ),
    "SIGKILL": ("for batch in start(DATASET): pass", -signal.SIGKILL),
}


@pytest.mark.parametrize(
    ("how", "heeds_sigterm"),
    [
        *((how, True) for how in TRAINERS),
        ("end of the script", False),
        ("SIGTERM, handled", False),
        ("SIGKILL", False),
    ],
)
def test_a_main_process_that_ends_while_all_workers_are_stuck_leaves_none(how, heeds_sigterm):
    body, code = TRAINERS[how]
    with program(body.replace("DATASET", f"Stuck(8, heeds_sigterm={heeds_sigterm})")) as process:
        workers = stuck_workers_of(process)
        begun = time.monotonic()
        if how.startswith("SIG"):
            process.send_signal(getattr(signal, how.partition(",")[0]))
        else:
            say_go(process)
        assert_gone_in_time(workers, begun)
        finish(process)
        assert time.monotonic() - begun < ENDING_S
        assert process.returncode == code


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_main_process_s_stuck_workers_end_though_a_child_of_it_lives_on(method):
    with program(f"""
        stream = start(Stuck(8), multiprocessing_context="{method}")
        next(stream)
        wait_for_go()
        if (pid := os.fork()) == 0:
            signal.pause()
        print(pid, flush=True)
        signal.pause()
    """) as process:
        workers = stuck_workers_of(process)
        say_go(process)
        child = psutil.Process(int(process.stdout.readline()))
        try:
            begun = time.monotonic()
            process.kill()
            assert_gone_in_time(workers, begun)
        finally:
            child.kill()
            finish(process)


@pytest.mark.parametrize("method", METHODS)
def test_a_forked_child_that_exits_as_programs_do_leaves_the_workers_alone(method):
    # With sys.exit, unlike os._exit, multiprocessing ends what it takes for the child's children.
    with program(f"""
        stream = start(Rows(), multiprocessing_context="{method}")
        next(stream)
        if (pid := os.fork()) == 0:
            sys.exit(0)
        print(os.waitpid(pid, 0)[1], sum(1 for _ in stream))
    """) as process:
        out, err = finish(process)
        assert (out.splitlines()[1:], err) == (["0 31"], "")


def slots_mapped():
    with open("/proc/self/maps") as maps:
        return sum("memfd:penstock" in line for line in maps)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(["loader", "stream", "batches"])))
def test_loader_iterator_and_batches_may_go_in_any_order(order, persistent):
    slots_before = slots_mapped()
    held = {"loader": Loader(Rows(), batch_size=2, num_workers=2, persistent_workers=persistent)}
    held["stream"] = iter(held["loader"])
    held["batches"] = [next(held["stream"]) for _ in range(3)]
    gc.disable()
    try:
        for name in order:
            del held[name]
            if "batches" in held:
                assert [batch[1, -1] for batch in held["batches"]] == [1, 3, 5]
            if "stream" in held:
                assert next(held["stream"])[0, 0] % 2 == 0
        assert multiprocessing.active_children() == []
        assert slots_mapped() == slots_before
    finally:
        gc.enable()


class Owner:
    """Something in a reference cycle with all it owns."""

    def __init__(self, **owned):
        self.itself = self
        self.owned = owned


@pytest.mark.parametrize("persistent", [False, True])
def test_a_reference_cycle_of_all_is_collected_whole(persistent):
    slots_before = slots_mapped()
    loader = Loader(Rows(), batch_size=2, num_workers=2, persistent_workers=persistent)
    stream = iter(loader)
    Owner(loader=loader, stream=stream, batch=next(stream))
    del loader, stream
    gc.collect()
    assert multiprocessing.active_children() == []
    assert slots_mapped() == slots_before


# Limits


LIMIT_BYTES = 300 << 20


@pytest.fixture
def cgroup():
    """Return a memory cgroup of `LIMIT_BYTES`, inside the one that the environment names.

    It is never made of its own accord: the tree of cgroups belongs to who runs the machine.
    """
    parent = os.environ.get("PENSTOCK_TEST_CGROUP")
    if parent is None:
        pytest.skip("PENSTOCK_TEST_CGROUP names no memory cgroup in which tests may make their own")
    folder = Path(parent) / f"penstock-test-{os.getpid()}"
    folder.mkdir()
    try:
        for name in ("memory.max", "memory.limit_in_bytes"):  # cgroup v2 and v1
            if (folder / name).exists():
                (folder / name).write_text(str(LIMIT_BYTES))
        yield folder
    finally:
        folder.rmdir()


def joining(cgroup):
    """Return what runs a script inside the cgroup."""
    return ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$0" "$@"']


def test_a_worker_killed_for_its_memory_is_told_so_with_the_figures(cgroup):
    with program(
        """
        from penstock.errors import WorkerDied
        try:
            for batch in start(Gluttonous()):
                pass
        except WorkerDied as error:
            print(" ".join(str(error).split()))
        """,
        *joining(cgroup),
    ) as process:
        out, err = finish(process)
        message = out.splitlines()[-1]
        assert "killed by SIGKILL" in message
        assert "of 315 MB left" in message  # the limit, 300 MiB
        assert "OOM killer ended it. Memory ran out" in message
        assert err == ""


def test_under_a_policy_a_sample_that_takes_too_much_memory_is_skipped(cgroup):
    with program(
        """
        loader = Loader(Gluttonous(), batch_size=2, num_workers=2, on_error="skip")
        print(sum(len(batch) for batch in loader), [f.index for f in loader.failures])
        """,
        *joining(cgroup),
    ) as process:
        out, err = finish(process)
        assert out == f"63 [{BAD}]\n"
        assert "UserWarning" in err
