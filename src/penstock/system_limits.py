# SPDX-License-Identifier: Apache-2.0
"""What the system leaves to this process: memory, by machine and control group, and descriptors.

Everything here only reads; what the system has no figure for is None, as all of it on macOS. A look
at memory takes 0.4 ms, so it is for no hot path.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import ConfigError
from penstock.lines import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")
# Of a control group by its version: its limit, what it uses, its events, and, in memory.stat, the
# inactive page cache of it and of all groups below.
_FILES: Final = {
    2: "memory.max memory.current memory.events inactive_file",
    1: "memory.limit_in_bytes memory.usage_in_bytes memory.oom_control total_inactive_file",
}
_NO_LIMIT_BYTES: Final = 1 << 60  # version 1 writes "none" as the largest number of whole pages

# Held for each worker in the main process, under every start method: its channel, its sentinel, the
# end of the pipe by which multiprocessing tells it of our death, and its pidfd.
_DESCRIPTORS_PER_WORKER: Final = 4
# For a moment, beside those: 7 to 8 under fork, 7 to 9 under spawn and 10 under forkserver. It is
# what starting one worker takes, or what arrives at one read: four batches of two new slots each.
# Four are the fork server's, the resource tracker's, and the parent-death watch's two, for good.
_DESCRIPTORS_IN_PASSING: Final = 12


@dataclass(frozen=True, slots=True)
class SystemMemory:
    """The memory of the machine and of this process's control group, at one moment.

    Attributes:
        total_bytes: Of the machine.
        available_bytes: What the machine could give without swapping (`MemAvailable`).
        limit_bytes: Of the control group that is nearest to its limit; None without a limit.
        left_in_group_bytes: What that limit leaves; inactive page cache does not count as used.
        group_oom_kills: Processes of the own control group that the OOM killer has ended.
    """

    total_bytes: int | None = None
    available_bytes: int | None = None
    limit_bytes: int | None = None
    left_in_group_bytes: int | None = None
    group_oom_kills: int | None = None

    @property
    def left_bytes(self) -> int | None:
        """What this process may still take: the least of machine and control group."""
        known = [b for b in (self.available_bytes, self.left_in_group_bytes) if b is not None]
        return min(known, default=None)


def memory_now(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> SystemMemory:
    """Return what memory there is at this moment, for this process.

    Args:
        proc: Where /proc is mounted.
        cgroups: Where control groups are mounted, of version 2, of version 1, or of both.

    Reference:
        The kernel's admin-guide/cgroup-v2 and cgroup-v1/memory; the "working set" of Kubernetes.
    """
    machine = _numbers(proc / "meminfo")
    limits: list[tuple[int, int]] = []  # what is left, and of how much
    oom_kills = None
    for version, folder in group_folders("memory", proc / "self" / "cgroup", cgroups):
        limit_file, usage_file, events_file, inactive = _FILES[version].split()
        if oom_kills is None:  # else a group above it
            oom_kills = _numbers(folder / events_file).get("oom_kill")
        limit, used = read_text(folder / limit_file).strip(), read_text(folder / usage_file).strip()
        if not (limit.isdecimal() and used.isdecimal()):  # "max", or a group without memory's files
            continue
        if int(limit) < _NO_LIMIT_BYTES:
            cache_bytes = _numbers(folder / "memory.stat").get(inactive, 0)
            used_bytes = max(int(used) - cache_bytes, 0)
            limits.append((max(int(limit) - used_bytes, 0), int(limit)))
    left_bytes, limit_bytes = min(limits, default=(None, None))
    return SystemMemory(
        total_bytes=machine.get("MemTotal:"),
        available_bytes=machine.get("MemAvailable:"),
        limit_bytes=limit_bytes,
        left_in_group_bytes=left_bytes,
        group_oom_kills=oom_kills,
    )


def group_folders(controller: str, memberships: Path, cgroups: Path) -> Iterator[tuple[int, Path]]:
    """Yield version (1 or 2) and folder of this process's control groups, up to the root.

    Args:
        controller: "memory" or "cpu".
        memberships: The process's own list, /proc/self/cgroup. In a container its paths may be the
            host's: folders that do not exist are yielded too.
        cgroups: Where control groups are mounted.
    """
    for line in read_text(memberships).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # Above the mount ("/../other") nothing can be seen.
        own = Path(*[part for part in path.split("/") if part not in ("", "..")])
        if number == "0" and not controllers:
            yield from ((2, cgroups / folder) for folder in (own, *own.parents))
        elif controller in controllers.split(","):
            yield from ((1, cgroups / controller / folder) for folder in (own, *own.parents))


def read_text(path: Path) -> str:
    """Return what stands in a file; nothing if it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text()
    return ""


def _numbers(path: Path) -> dict[str, int]:
    """Return the lines "name number", with or without "kB", of a file."""
    numbers = {}
    for line in read_text(path).splitlines():
        match line.split():
            case name, number, *unit if number.isdecimal():
                numbers[name] = int(number) * (1024 if unit == ["kB"] else 1)
    return numbers


def advice_on_kill(
    now: SystemMemory, before: SystemMemory | None, peak_rss_bytes: int | None
) -> str:
    """Return the figures of memory about a worker that SIGKILL ended, and what to do.

    Args:
        now: Memory after the death.
        before: Memory while the worker was alive, as early as the epoch's start.
        peak_rss_bytes: The most resident memory that the worker reported.
    """
    said = [] if peak_rss_bytes is None else [f"It had used up to {format_bytes(peak_rss_bytes)}."]
    for whose, left, whole in (
        ("machine", now.available_bytes, now.total_bytes),
        ("control group (the container)", now.left_in_group_bytes, now.limit_bytes),
    ):
        if left is not None and whole is not None:
            said.append(f"The {whose} has {format_bytes(left)} of {format_bytes(whole)} left.")
    kills_before = None if before is None else before.group_oom_kills
    if kills_before is not None and (now.group_oom_kills or 0) > kills_before:
        said.append("The system's OOM killer ended it. Memory ran out:")
    else:
        said.append(
            "Something killed it from outside (kill -9, a job scheduler, a container's limit), or "
            "memory ran out for a moment:"
        )
    return " ".join([*said, "try fewer workers or a smaller prefetch_factor."])


def memory_warning(batch_bytes: int, batches_in_flight: int, now: SystemMemory) -> str | None:
    """Return a warning if the batches on their way need more memory than is left, else None."""
    needed_bytes = batch_bytes * batches_in_flight
    left_bytes = now.left_bytes
    if left_bytes is None or needed_bytes <= left_bytes:
        return None
    is_machine = left_bytes == now.available_bytes
    whose = "this machine" if is_machine else "the control group (the container)"
    return (
        f"{batches_in_flight} batches of {format_bytes(batch_bytes)} on their way need "
        f"{format_bytes(needed_bytes)}, and {whose} has {format_bytes(left_bytes)} left: workers "
        "may be killed. Lower num_workers, prefetch_factor or batch_size."
    )


def descriptors_needed(num_workers: int) -> int:
    """Return how many descriptors the main process has to open for `num_workers` processes."""
    return _DESCRIPTORS_PER_WORKER * num_workers + _DESCRIPTORS_IN_PASSING


def check_descriptors(num_workers: int) -> None:
    """Raise ConfigError if the limit (RLIMIT_NOFILE) leaves workers too few descriptors."""
    import resource  # not on Windows

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    num_open = num_open_files()
    needed = descriptors_needed(num_workers)
    if limit == resource.RLIM_INFINITY or num_open is None or limit - num_open >= needed:
        return
    raise ConfigError(
        f"num_workers={num_workers} needs {needed} more open files, and this process may open "
        f"{max(limit - num_open, 0)}: its limit is {limit}, and {num_open} are open. Raise the "
        f"limit to at least {num_open + needed} (`ulimit -n` in the shell, or resource.setrlimit("
        "resource.RLIMIT_NOFILE, ...) in the program), close files, or lower num_workers."
    )


def cores_by_affinity() -> float:
    """Return how many cores this process may run on, whatever quota it has for them."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return float(len(os.sched_getaffinity(0)))
    return float(os.cpu_count() or 1)


def num_open_files() -> int | None:
    """Return how many descriptors this process has open; None where it cannot be seen."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/dev/fd")) - 1  # without the one that lists the folder
    return None


def signal_name(number: int) -> str:
    """Return what a signal is called; a real-time one has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
