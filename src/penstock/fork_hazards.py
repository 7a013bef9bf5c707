# SPDX-License-Identifier: Apache-2.0
"""Hazards of a fork in this process: threads of libraries, and a device in use.

A forked worker is a copy of the main process with one thread: code that relies on another thread
waits there for ever. Most libraries name their threads. Those of GNU OpenMP have no names, and are
recognised by waiting in its code.

A thread that cannot be identified is not counted, as a warning ends programs that take warnings as
errors. Some libraries are no hazard: OpenBLAS, Arrow, jemalloc, and the OpenMP of LLVM and Intel
renew themselves in a child; torch's own GNU OpenMP is not used, as workers run torch with one
thread.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


_THREAD_NAMES: Final = {
    "gRPC": re.compile(r"grpc|event_engine$"),
    "tokio (Rust)": re.compile(r"tokio-"),
    "Polars (Rust)": re.compile(r"polars-\d"),  # its import starts "polars-ooc-clea"
    "rayon (Rust)": re.compile(r"rayon"),
}
_IS_OPENMP: Final = re.compile(r" r-xp .*/lib(gomp|i?omp5?)\b[^/]*\.so[^/]*$")
_IN_TORCH: Final = re.compile(r"/torch(/lib|\.libs)/")

_has_warned = False


def warn_of_fork(*, stacklevel: int = 2) -> None:
    """Warn, once in the life of this process, if workers that are forked now may hang or fail.

    It takes 1 ms with torch, 3 with scikit-learn, nearly all for the kernel's list of files.

    Args:
        stacklevel: Level as for `warnings.warn` in place of this call: 1 is the line that calls.
    """
    global _has_warned
    if _has_warned:
        return
    found = running_hazards()
    if device := busy_device(sys.modules):
        found.append(f"torch has initialised {device}")
    if found:
        _has_warned = True
        warnings.warn(
            f"Workers are about to be forked, and that is not safe here: {', '.join(found)}, and a "
            "worker that uses this waits for ever or fails. Choose "
            'multiprocessing_context="forkserver" (or "spawn"), or begin to use it only after the '
            "workers have started.",
            RuntimeWarning,
            stacklevel=stacklevel + 1,
        )


@contextlib.contextmanager
def opencv_at_rest() -> Iterator[None]:
    """End OpenCV's idle threads, so that processes may be forked in the block.

    They start again when they are next used. Threads at work for another Python thread go on.
    """
    cv2: Any = sys.modules.get("cv2")
    number = cv2.getNumThreads() if hasattr(cv2, "setNumThreads") else 1
    if number <= 1:
        yield
        return
    cv2.setNumThreads(1)
    try:
        yield
    finally:
        cv2.setNumThreads(number)


def busy_device(modules: Mapping[str, object]) -> str | None:
    """Return the device that torch has initialised, None if none; `modules` are `sys.modules`."""
    for name, title in (("torch.cuda", "CUDA"), ("torch.xpu", "XPU")):
        is_initialized = getattr(modules.get(name), "is_initialized", None)
        if is_initialized is not None and is_initialized():
            return title
    return None


def running_hazards() -> list[str]:
    """Return what runs now and would not survive a fork; libraries are found on Linux only."""
    found, unnamed = set(), []
    of_python = {thread.native_id for thread in threading.enumerate()}
    with contextlib.suppress(OSError):
        for tid in set(map(int, os.listdir("/proc/self/task"))) - of_python:
            if title := library_of(_read(f"/proc/self/task/{tid}/comm")):
                found.add(title)
            else:
                unnamed.append(tid)
    if unnamed and _wait_in_openmp(unnamed, _read("/proc/self/maps")):
        found.add("GNU OpenMP")
    return [f"threads of {title} run" for title in sorted(found)]


def library_of(thread_name: str) -> str | None:
    """Return the library whose thread has that name; None if it is no known hazard."""
    for title, names in _THREAD_NAMES.items():
        if names.match(thread_name):  # Ray's gRPC is used by no worker
            return None if title == "gRPC" and "ray._raylet" in sys.modules else title
    return None


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""  # the thread has ended, or the system does not say


def _wait_in_openmp(tids: list[int], maps: str) -> bool:
    """Whether one of the threads waits in the code of a GNU OpenMP that is not torch's."""
    lines = [line for line in maps.splitlines() if "omp" in line and _IS_OPENMP.search(line)]
    others = [line for line in lines if not _IN_TORCH.search(line)]
    if others == lines and "/libtorch_cpu.so" in maps:
        return False  # torch shares it, as conda installs it: then the threads may be torch's
    spans = [line.split()[0].split("-") for line in others if "/libgomp" in line]
    for tid in tids if spans else ():
        counter = _read(f"/proc/self/task/{tid}/syscall").split()[-1:]
        at = int(counter[0], 16) if counter not in ([], ["running"]) else 0
        if any(int(start, 16) <= at < int(stop, 16) for start, stop in spans):
            return True
    return False
