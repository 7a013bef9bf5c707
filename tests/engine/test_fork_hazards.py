# SPDX-License-Identifier: Apache-2.0
"""A warning comes before a fork that may hang, and only then: real libraries, each in a process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import types
from pathlib import Path

import numpy as np
import pytest

from penstock.engine.fork_hazards import (
    _Code,
    _is_openmp_shared_with_torch,
    _owner,
    busy_device,
    hazard_of,
)

# These run threads of libraries on purpose, so each has a process of its own.
HEAD = f"""
    import os, sys, time, warnings
    sys.path[:0] = {sys.path!r}
    import numpy as np
    from penstock.engine.fork_hazards import running_hazards, warn_of_fork

    def num_threads():
        return len(os.listdir("/proc/self/task"))

    def report():
        # Pools spin for a moment after their work; a thread on a processor cannot be told.
        deadline = time.monotonic() + 20
        while any(state(tid) == "R" for tid in os.listdir("/proc/self/task") if int(tid) != os.getpid()):
            assert time.monotonic() < deadline
        print({{library.title: count for library, count in running_hazards().items()}})

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
    not Path("/proc/self/task").exists(), reason="threads can be told on Linux only"
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


def test_threads_that_opencv_runs_are_counted():
    pytest.importorskip("cv2")
    counted = run("""
        import cv2
        cv2.setNumThreads(4)
        before = num_threads()
        report()
        blur()
        assert num_threads() == before + 3
        report()
        cv2.setNumThreads(1)  # what the warning advises
        blur()
        assert num_threads() == before
        report()
    """)
    assert counted == ["{}", "{'OpenCV': 3}", "{}"]


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
    assert counted == ["{}", "{'GNU OpenMP': 2}"]


def test_threads_of_numpy_and_torch_are_no_hazard():
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
    assert counted == ["{}", "0"]


def test_idle_threads_of_opencv_are_ended_for_the_fork_and_come_back():
    pytest.importorskip("cv2")
    said = run("""
        import cv2, signal
        from penstock.engine.fork_hazards import opencv_at_rest
        cv2.setNumThreads(3)
        blur()
        report()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_fork()
        print(len(caught))
        blur()
        with opencv_at_rest():
            report()
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)  # ends a child that waits for ever
                cv2.setNumThreads(1)
                blur()
                os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), cv2.getNumThreads())
        blur()
        report()
    """)
    assert said == ["{'OpenCV': 2}", "0", "{}", "0 3", "{'OpenCV': 2}"]


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
        "{'GNU OpenMP': 1}",
        "RuntimeWarning Workers are about to be forked, and that is not safe here. 1 thread of "
        "GNU OpenMP run: the first parallel loop in a worker waits for ever for threads that do "
        'not exist there. Choose multiprocessing_context="forkserver" (or "spawn"). For GNU '
        "OpenMP, training that computes with one thread (OMP_NUM_THREADS=1) helps as well.",
    ]


def test_what_the_warning_says_of_opencv_is_so():
    pytest.importorskip("cv2")
    said = run("""
        import cv2, signal
        cv2.setNumThreads(3)
        blur()
        report()
        pid = os.fork()
        if pid == 0:
            signal.alarm(2)  # ends the child that waits for ever
            cv2.setNumThreads(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGALRM)
    """)
    assert said == ["{'OpenCV': 2}", "True"]


@pytest.mark.parametrize(
    ("path", "title"),
    [
        ("/env/cv2/cv2.abi3.so", "OpenCV"),
        ("/env/cv2/python-3.11/cv2.cpython-311-x86_64-linux-gnu.so", "OpenCV"),
        ("/usr/lib/libopencv_core.so.4.10.0", "OpenCV"),
        ("/usr/lib/x86_64-linux-gnu/libgomp.so.1.0.0", "GNU OpenMP"),
        ("/env/scikit_learn.libs/libgomp-e985bcbb.so.1.0.0", "GNU OpenMP"),
        ("/env/grpc/_cython/cygrpc.cpython-311-x86_64-linux-gnu.so", "gRPC"),
        ("/usr/lib/libgrpc.so.39", "gRPC"),
        ("/usr/lib/libgrpc++.so.1.62", "gRPC"),
        ("/env/site-packages/torch/lib/libgomp.so.1", None),
        ("/env/site-packages/torch.libs/libgomp-a34b3233.so.1.0.0", None),
        ("/env/lib/libiomp5.so", None),
        ("/env/lib/libomp.so", None),
        ("/env/numpy.libs/libscipy_openblas64_-32a4b2a6.so", None),
        ("/env/opencv_python.libs/libopenblasp-r0-59ffcd50.3.15.so", None),
        ("/home/cv2/lib/libother.so", None),
        ("/usr/lib/libc.so.6", None),
    ],
)
def test_a_file_is_known_by_its_name(path, title):
    library = hazard_of(path)
    assert (library and library.title) == title


@pytest.mark.parametrize(
    ("paths", "is_shared"),
    [
        (["/env/torch/lib/libtorch_cpu.so", "/env/lib/libgomp.so.1"], True),
        (["/env/torch/lib/libtorch_cpu.so", "/env/torch/lib/libgomp.so.1"], False),
        (["/env/lib/libgomp.so.1", "/env/lib/libother.so"], False),
    ],
)
def test_an_openmp_that_torch_may_use_is_no_hazard(paths, is_shared):
    assert _is_openmp_shared_with_torch(paths) is is_shared


MAPS = b"""\
1000-2000 r--p 00000000 08:01 11 /lib/libc.so.6
2000-3000 r-xp 00001000 08:01 11 /lib/libc.so.6
3000-4000 rw-p 00000000 00:00 0
5000-6000 r-xp 00000000 08:01 12 /env/cv2/cv2.abi3.so
7000-8000 r-xp 00000000 08:01 13 /my files/libpool.so
9000-a000 r-xp 00000000 00:00 0 [vdso]
"""
LIBC, CV2, POOL = 0x2010, 0x5010, 0x7010
STACK = 0x40000


def owner(words):
    return _owner(np.array(words, np.uintp).tobytes(), STACK, _Code(MAPS))


def test_a_thread_is_owned_by_the_library_that_the_c_library_started():
    assert owner([LIBC, 7, CV2, CV2, LIBC, LIBC, 0]) == "/env/cv2/cv2.abi3.so"
    assert owner([LIBC, CV2, 1, POOL, LIBC]) == "/my files/libpool.so"  # a pool that calls OpenCV
    assert owner([LIBC, CV2, POOL, LIBC, CV2]) == "/my files/libpool.so"  # CV2 is no frame there


def test_a_thread_whose_start_is_out_of_sight_is_nobodys():
    assert owner([CV2, 1, 2]) is None
    assert owner([LIBC, LIBC, 0x9010, 0x1010, 0xFFFFFFFFFFFF]) is None
    assert owner([]) is None


def test_what_lies_behind_the_thread_block_is_not_read():
    block = STACK + 4 * 8  # glibc's: its own address, something, its own address
    assert owner([LIBC, POOL, LIBC, 0, block, 0, block, CV2, LIBC]) == "/my files/libpool.so"


def test_a_device_in_use_is_named_without_importing_anything():
    def module(is_initialized):
        return types.SimpleNamespace(is_initialized=lambda: is_initialized)

    assert busy_device({}) is None
    assert busy_device({"torch.cuda": module(False), "torch.xpu": module(False)}) is None
    assert busy_device({"torch.cuda": module(True), "torch.xpu": module(True)}) == "CUDA"
    assert busy_device({"torch.cuda": module(False), "torch.xpu": module(True)}) == "XPU"


def test_a_device_that_torch_did_not_initialise_is_not_in_use():
    said = run("""
        import torch
        from penstock.engine.fork_hazards import busy_device
        print(busy_device(sys.modules), torch.cuda.is_initialized())
    """)
    assert said == ["None False"]
