# SPDX-License-Identifier: Apache-2.0
"""Time, CPU and memory of a process and everything below it.

psutil is imported inside the functions: a spawned worker imports the benchmark file, and this one
with it, and must not pay for what only the contender's main process uses.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import psutil

__all__ = ["Meter", "Reading", "private_memory_bytes", "tree_memory_bytes"]


@dataclass(frozen=True, slots=True)
class Reading:
    """What one contender measured in one round.

    Attributes:
        value: The benchmark's own figure, in the benchmark's unit.
        wall_s: Seconds of the timed part.
        cpu_s: CPU seconds of the timed part, user and system, workers included.
        num_batches: Batches delivered in the timed part.
        more: Further figures, each with its unit in its name.
        series: Further figures over the course of the run, in order.
    """

    value: float
    wall_s: float
    cpu_s: float
    num_batches: int
    more: dict[str, float]
    series: dict[str, list[float]]

    @classmethod
    def of(
        cls,
        meter: Meter,
        value: float,
        num_batches: int,
        more: dict[str, float] | None = None,
        series: dict[str, list[float]] | None = None,
    ) -> Reading:
        """Return the reading of a finished `meter`."""
        return cls(value, meter.wall_s, meter.cpu_s, num_batches, more or {}, series or {})


class Meter:
    """A block's wall and CPU seconds, with the CPU of live and of ended workers.

    CPU of live workers comes from the system's own account, which counts in ticks of 10 ms on
    Linux, so a timed part should take a second or more. Both clocks' own cost lies outside the
    timed part.
    """

    def __init__(self) -> None:
        """Nothing runs until the block is entered."""
        self.wall_s = 0.0
        self.cpu_s = 0.0

    def __enter__(self) -> Meter:
        """Begin."""
        self._cpu_s = _tree_cpu_s()
        self._start_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self.wall_s = time.perf_counter() - self._start_s
        self.cpu_s = _tree_cpu_s() - self._cpu_s

    def elapsed_s(self) -> float:
        """Return the seconds since the block was entered."""
        return time.perf_counter() - self._start_s


def _tree_cpu_s() -> float:
    import psutil

    # A worker that ends between two calls moves from the second sum to the first: nothing is lost.
    own = resource.getrusage(resource.RUSAGE_SELF)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total_s = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total_s += times.user + times.system + times.children_user + times.children_system
    return total_s


def private_memory_bytes(pids: Iterable[int]) -> int:
    """Return the memory that would be free at once if these processes ended (USS), summed."""
    import psutil

    return sum(psutil.Process(pid).memory_full_info().uss for pid in pids)


def tree_memory_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants, each shared page counted once.

    That is the sum of the proportional set sizes (PSS). Where the system has none (not Linux), it
    is the sum of the resident sizes, which counts shared pages once per process. Shared memory that
    no process of the tree has mapped at this moment is not seen.
    """
    import psutil

    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(_memory_bytes(process) for process in processes)


def _memory_bytes(process: psutil.Process) -> int:
    import psutil

    try:
        info = process.memory_full_info()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
    size_bytes: int = getattr(info, "pss", info.rss)
    return size_bytes
