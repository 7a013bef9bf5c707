# SPDX-License-Identifier: Apache-2.0
"""Versions, the threads of libraries, and how worker processes start."""

from __future__ import annotations

import math
import multiprocessing
import os
import platform
import sys
import sysconfig
import threading
from importlib import metadata
from typing import TYPE_CHECKING, Final

import numpy as np

import penstock
from penstock.cli.doctor.finding import Finding
from penstock.insight.budgets import cores_allowed

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["look_at_interpreter", "look_at_start_method", "look_at_threads"]

_ENVIRONMENT: Final = "environment"
_WORKERS: Final = "workers"
_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_START_METHODS: Final = {
    "fork": (
        "workers are copies of the main process and start at once. Threads of libraries do not "
        "survive "
        "in them, nor does a GPU in use: a warning tells of either, and "
        'multiprocessing_context="forkserver" helps'
    ),
    "forkserver": (
        "workers start from a clean process: the dataset has to pickle, and the program needs "
        'if __name__ == "__main__":'
    ),
    "spawn": (
        "each worker is a new interpreter: the dataset has to pickle, and the program needs "
        'if __name__ == "__main__":'
    ),
}


def look_at_interpreter() -> Iterator[Finding]:
    """Yield what Penstock, Python and the system are."""
    yield _penstock()
    version = platform.python_version()
    has_gil = not sysconfig.get_config_var("Py_GIL_DISABLED")
    build = "" if has_gil else ", free-threaded build"
    yield Finding(
        _ENVIRONMENT,
        "Python",
        f"{version} ({platform.python_implementation()}{build}), {sys.executable}",
        values={"version": version, "executable": sys.executable, "free_threaded": not has_gil},
    )
    yield _system()


def _penstock() -> Finding:
    version, folder = penstock.__version__, os.path.dirname(penstock.__file__)
    found = f"{version}, {folder}"
    values = {"version": version, "folder": folder}
    try:
        installed = metadata.version("penstock")
    except metadata.PackageNotFoundError:
        remedy = "What its extras need cannot be told: install it, `pip install .` in the clone."
        found += ": not installed, only on the path"
        return Finding(_ENVIRONMENT, "penstock", found, remedy, "advice", values)
    if installed != version:
        remedy = "Install it anew, so that its metadata tells what this version needs."
        found += f": the installed metadata is of {installed}"
        return Finding(_ENVIRONMENT, "penstock", found, remedy, "advice", values)
    return Finding(_ENVIRONMENT, "penstock", found, values=values)


def _system() -> Finding:
    found = platform.platform()
    values = {"platform": found}
    if platform.system() == "Linux":
        return Finding(_ENVIRONMENT, "system", found, values=values)
    remedy = "Penstock is tested on Linux only; shared memory takes another path here."
    return Finding(_ENVIRONMENT, "system", found, remedy, "advice", values)


def look_at_threads() -> Finding:
    """Return how many threads numpy's BLAS has, which each worker has as well.

    To be called while no other library with threads is loaded.
    """
    blas = _blas_name()
    num_threads = 1 + _num_native_threads()
    usable = math.ceil(cores_allowed())
    set_to = {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ}
    variables = ", ".join(f"{name}={value}" for name, value in set_to.items())
    found = f"numpy's BLAS ({blas}) runs {num_threads} here, and in each worker that multiplies"
    found += f" matrices; {variables or 'OMP_NUM_THREADS is not set'}"
    found += ". torch and OpenCV run 1 in a worker"
    values = {"blas": blas, "threads": num_threads, **set_to}
    if num_threads <= usable:
        return Finding(_WORKERS, "threads", found, values=values)
    remedy = (
        f"That is more than the {usable} usable cores, and workers multiply it: set "
        f"OMP_NUM_THREADS={usable}, or 1 where transforms multiply matrices."
    )
    return Finding(_WORKERS, "threads", found, remedy, "advice", values)


def _blas_name() -> str:
    config = np.show_config(mode="dicts")
    assert isinstance(config, dict)
    blas = config.get("Build Dependencies", {}).get("blas", {})
    return str(blas.get("name", "unknown"))


def _num_native_threads() -> int:
    """Return how many threads run that Python has not started."""
    try:
        num_all = len(os.listdir("/proc/self/task"))
    except OSError:  # not Linux
        return 0
    return max(num_all - threading.active_count(), 0)


def look_at_start_method() -> Finding:
    """Return how workers start unless a program chooses, and what follows from it."""
    all_methods = multiprocessing.get_all_start_methods()
    method = multiprocessing.get_start_method(allow_none=True) or all_methods[0]
    found = f"{method}, Python's default here: {_START_METHODS[method]}"
    return Finding(_WORKERS, "start method", found, values={"start_method": method})
