# SPDX-License-Identifier: Apache-2.0
"""A warning comes before a fork that may hang, and only then: real libraries, each in a process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
from tests.support.processes import python

from penstock import fork_hazards
from penstock.fork_hazards import _wait_in_openmp, busy_device, library_of

# These run threads of libraries on purpose, so each has a process of its own.
HEAD = f"""
    import os, sys, time, warnings
    sys.path[:0] = {sys.path!r}
    import numpy as np
    from penstock.fork_hazards import running_hazards, warn_of_fork

    def num_threads():
        return len(os.listdir("/proc/self/task"))

    def report():
        # Pools spin for a moment after their work; where a running thread is, cannot be noted.
        deadline = time.monotonic() + 20
        while any(state(tid) == "R" for tid in os.listdir("/proc/self/task") if int(tid) != os.getpid()):
            assert time.monotonic() < deadline
        print(running_hazards())

    def state(tid):
        try:
            with open(f"/proc/self/task/{{tid}}/stat") as stat:
                return stat.read().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return "X"  # it was joined; the kernel lists it for a moment longer

    def blur():
        cv2.GaussianBlur(np.zeros((2000, 2000, 3), np.uint8), (9, 9), 2)
"""  # noqa: E501

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="threads can be noted on Linux only"
)


def run(body):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HEAD) + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_opencv_runs_is_not_counted_as_it_is_ended_for_the_fork():
    pytest.importorskip("cv2")
    counted = run("""
        import cv2
        cv2.setNumThreads(4)
        before = num_threads()
        blur()
        assert num_threads() == before + 3
        report()
    """)
    assert counted == ["[]"]


def test_threads_of_gnu_openmp_that_are_not_torchs_are_counted():
    pytest.importorskip("sklearn")
    counted = run("""
        os.environ["OMP_NUM_THREADS"] = "3"
        from sklearn.cluster import KMeans
        report()
        before = num_threads()
        KMeans(3, n_init=1, random_state=0).fit(np.random.default_rng(0).random((5000, 10)))
        assert num_threads() > before
        report()
    """)
    assert counted == ["[]", "['threads of GNU OpenMP run']"]


def test_threads_of_numpy_and_torch_are_no_hazard():
    pytest.importorskip("torch")
    counted = run("""
        import threading
        import torch
        ones = np.ones((1000, 1000))
        ones @ ones
        torch.set_num_threads(3)
        torch.ones(2000, 2000).exp_()
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait)
        thread.start()
        assert num_threads() >= 4
        report()
        stop.set()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_fork()
        print(len(caught))
    """)
    assert counted == ["[]", "0"]


def test_an_event_loop_in_another_thread_is_one():
    counted = run("""
        import asyncio, threading
        def begin(name):
            loop, begun = asyncio.new_event_loop(), threading.Event()
            loop.call_soon(begun.set)
            threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
            begun.wait()
        for name in ("IOPub", "wandb-AsyncioManager-main", "fsspecIO"):
            begin(name)
        report()
        begin("downloads")
        report()

        async def main():  # the thread that forks is in the child as well
            report()
        asyncio.run(main())
    """)
    loop = "[\"the thread 'downloads' runs an event loop\"]"
    assert counted == ["[]", loop, loop]


def test_threads_of_grpc_are_counted_unless_they_may_be_rays():
    pytest.importorskip("grpc")
    counted = run("""
        import grpc
        report()
        channel = grpc.insecure_channel("localhost:1")
        report()
        sys.modules["ray._raylet"] = None
        report()
        os._exit(print(flush=True) or 0)
    """)
    assert counted == ["[]", "['threads of gRPC run']", "[]", ""]


def test_idle_threads_of_opencv_are_ended_for_the_fork_and_come_back():
    pytest.importorskip("cv2")
    said = run("""
        import cv2, signal
        from penstock.fork_hazards import opencv_at_rest
        cv2.setNumThreads(3)
        before = num_threads()
        blur()
        assert num_threads() == before + 2
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_fork()
        print(len(caught))
        with opencv_at_rest():
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)  # ends a child that waits for ever
                cv2.setNumThreads(1)
                blur()
                os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), cv2.getNumThreads())
        before = num_threads()  # OpenBLAS ended its own
        blur()
        assert num_threads() == before + 2
    """)
    assert said == ["0", "0 3"]


def test_the_warning_comes_once_and_says_what_runs_and_what_to_do():
    pytest.importorskip("sklearn")
    said = run("""
        os.environ["OMP_NUM_THREADS"] = "2"
        from sklearn.cluster import KMeans
        KMeans(3, n_init=1, random_state=0).fit(np.random.default_rng(0).random((5000, 10)))
        report()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                warn_of_fork(stacklevel=1)
        for one in caught:
            print(one.category.__name__, one.message)
    """)
    assert said == [
        "['threads of GNU OpenMP run']",
        "RuntimeWarning Workers are about to be forked, and that is not safe here: threads of GNU "
        "OpenMP run, and a worker that uses this waits for ever or fails. Choose "
        'multiprocessing_context="forkserver" (or "spawn"), or begin to use it only after the '
        "workers have started.",
    ]


def test_a_program_is_warned_of_its_workers_forks_once_and_at_its_own_line():
    # Python warns as well from 3.12 on, of each fork beside a thread, and hides it as it is no line
    # of the program.
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONWARNINGS", "PYTHONDEVMODE")
    }
    done = python(
        "-c",
        f"""
        import asyncio, sys, threading
        sys.path[:0] = {sys.path!r}
        from penstock import Loader
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        for _ in range(2):
            list(Loader(range(6), num_workers=2, multiprocessing_context="fork"))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        """,
        env=environment,
    )
    (warned,) = (line for line in done.stderr.splitlines() if "Warning" in line)
    assert warned.startswith("<string>:9: RuntimeWarning: Workers are about to be forked")


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("grpc_global_tim", "gRPC"),
        ("event_engine", "gRPC"),
        ("tokio-rt-worker", "tokio (Rust)"),
        ("tokio-runtime-w", "tokio (Rust)"),
        ("polars-0", "Polars (Rust)"),
        ("polars-ooc-clea", None),
        ("rayon-worker-1", "rayon (Rust)"),
        ("jemalloc_bg_thd", None),
        ("pt_main_thread", None),
        ("python", None),
    ],
)
def test_a_thread_is_known_by_its_name(name, title, monkeypatch):
    monkeypatch.delitem(sys.modules, "ray._raylet", raising=False)
    assert library_of(name) == title


TORCHS, CONDAS = "/env/torch/lib/libgomp.so.1", "/env/lib/libgomp.so.1"
WHEELS, TORCH = "/env/torch.libs/libgomp-a34b3233.so.1.0.0", "/env/torch/lib/libtorch_cpu.so"


@pytest.mark.parametrize(
    ("paths", "is_hazard"),
    [
        ([CONDAS, "/env/lib/libother.so"], True),
        (["/env/scikit_learn.libs/libgomp-e985bcbb.so.1.0.0"], True),
        ([TORCH, TORCHS, CONDAS], True),
        ([TORCH, CONDAS], False),  # torch may use it
        ([TORCH, TORCHS], False),
        ([TORCH, WHEELS], False),
        (["/env/lib/libiomp5.so"], False),
        (["/env/lib/libomp.so"], False),
        (["/usr/lib/libc.so.6"], False),
    ],
)
def test_whose_openmp_a_thread_waits_in_is_told_by_the_file(paths, is_hazard, monkeypatch):
    in_use = CONDAS if CONDAS in paths else paths[-1]
    maps = "".join(
        f"{k}0000-{k}1000 r--p 0 08:01 1 {path}\n{k}1000-{k}2000 r-xp 1000 08:01 1 {path}\n"
        for k, path in enumerate(paths, start=1)
    )
    counter = f"0x{1 + paths.index(in_use)}1010"
    states = {"/proc/self/task/7/syscall": "running\n", "/proc/self/task/8/syscall": ""}
    states["/proc/self/task/9/syscall"] = f"202 0x1 0x80 0x2 0x0 0x0 0x0 0x7ffc0000 {counter}\n"
    monkeypatch.setattr(fork_hazards, "_read", states.__getitem__)
    assert _wait_in_openmp([7, 8, 9], maps) is is_hazard
    assert not _wait_in_openmp([7, 8], maps)


def test_a_device_in_use_is_named_without_importing_anything():
    def module(is_initialized):
        return types.SimpleNamespace(is_initialized=lambda: is_initialized)

    assert busy_device({}) is None
    assert busy_device({"torch.cuda": module(False), "torch.xpu": module(False)}) is None
    assert busy_device({"torch.cuda": module(True), "torch.xpu": module(True)}) == "CUDA"
    assert busy_device({"torch.cuda": module(False), "torch.xpu": module(True)}) == "XPU"


def test_a_device_that_torch_did_not_initialise_is_not_in_use():
    pytest.importorskip("torch")
    said = run("""
        import torch
        from penstock.fork_hazards import busy_device
        print(busy_device(sys.modules), torch.cuda.is_initialized())
    """)
    assert said == ["None False"]
