# SPDX-License-Identifier: Apache-2.0
"""What the machine around the main process gives and takes: memory, its limits, and descriptors.

Guarantees
    Everything here only reads, and what the system does not tell is None: on macOS all of it.
    Nothing here is called while batches flow: a look at memory takes 0.4 ms.

Assumptions
    Control groups are mounted where every distribution mounts them, below /sys/fs/cgroup. In a
    container the path that /proc/self/cgroup names may be the host's; what exists of it, and the
    root of the mount, is what counts for this process.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "SystemMemory",
    "advice_on_kill",
    "check_descriptors",
    "describe_memory",
    "descriptors_needed",
    "format_bytes",
    "group_folders",
    "memory_now",
    "memory_warning",
    "num_open_files",
    "read_text",
    "signal_name",
]

_PROC: Final = Path("/proc")
_MUCH_LEFT: Final = 0.2  # share of all memory with which it is unlikely to have run out
_LESS_MEMORY: Final = "try fewer workers or a smaller prefetch_factor"
_CGROUPS: Final = Path("/sys/fs/cgroup")
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
    """The memory of the machine and of this process's control group, in bytes, at one moment.

    Attributes:
        total_bytes: What the machine has.
        available_bytes: What it could give without swapping (`MemAvailable`).
        limit_bytes: The limit of the control group that is nearest to its limit; None if there is
            no limit.
        used_bytes: What that group uses, page cache included.
        cache_bytes: How much of `used_bytes` is inactive page cache, which the system takes back
            before it lets the limit hurt.
        group_oom_kills: Processes of this process's own control group that the OOM killer ended,
            since the group was made.
        machine_oom_kills: Processes of the machine that it ended, since the machine started.
    """

    total_bytes: int | None = None
    available_bytes: int | None = None
    limit_bytes: int | None = None
    used_bytes: int | None = None
    cache_bytes: int = 0
    group_oom_kills: int | None = None
    machine_oom_kills: int | None = None

    @property
    def left_in_group_bytes(self) -> int | None:
        """What the control group's limit leaves; None without a limit."""
        if self.limit_bytes is None or self.used_bytes is None:
            return None
        return max(self.limit_bytes - max(self.used_bytes - self.cache_bytes, 0), 0)

    @property
    def left_bytes(self) -> int | None:
        """What this process may still take: the least of machine and control group.

        Example:
            >>> SystemMemory(available_bytes=900, limit_bytes=500, used_bytes=300).left_bytes
            200
        """
        known = [b for b in (self.available_bytes, self.left_in_group_bytes) if b is not None]
        return min(known, default=None)


def memory_now(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> SystemMemory:
    """Return what memory there is at this moment, for this process.

    Args:
        proc: Where the system tells about itself.
        cgroups: Where control groups are mounted, of version 2, of version 1, or of both.

    Concurrency:
        Any thread and process.

    Reference:
        The kernel's admin-guide/cgroup-v2 and cgroup-v1/memory. That inactive page cache does not
        count as used is the "working set" of Kubernetes, and what `docker stats` shows.

    Example:
        >>> memory_now(proc=Path("/nowhere"), cgroups=Path("/nowhere")) == SystemMemory()
        True
    """
    machine = _numbers(proc / "meminfo")
    groups = list(_groups(proc / "self" / "cgroup", cgroups))
    limits = [limit for group in groups if (limit := group.limit()) is not None]
    tightest = min(limits, key=lambda limit: limit.left_bytes, default=None)
    return SystemMemory(
        total_bytes=_kibibytes(machine.get("MemTotal:")),
        available_bytes=_kibibytes(machine.get("MemAvailable:")),
        limit_bytes=tightest and tightest.limit_bytes,
        used_bytes=tightest and tightest.used_bytes,
        cache_bytes=tightest.cache_bytes if tightest else 0,
        group_oom_kills=groups[0].oom_kills() if groups else None,
        machine_oom_kills=_numbers(proc / "vmstat").get("oom_kill"),
    )


class _Limit(NamedTuple):
    limit_bytes: int
    used_bytes: int
    cache_bytes: int

    @property
    def left_bytes(self) -> int:
        return self.limit_bytes - self.used_bytes + self.cache_bytes


class _Files(NamedTuple):
    """How one version of control groups names its files, and what stands in them."""

    limit: str
    usage: str
    events: str
    inactive: str  # with all groups below, as the usage is


_VERSION_1: Final = _Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file"
)
_VERSION_2: Final = _Files("memory.max", "memory.current", "memory.events", "inactive_file")


class _Group(NamedTuple):
    """One control group with a memory controller."""

    folder: Path
    files: _Files

    def limit(self) -> _Limit | None:
        limit_bytes = _number(self.folder / self.files.limit)
        used_bytes = _number(self.folder / self.files.usage)
        if limit_bytes is None or used_bytes is None or limit_bytes >= _NO_LIMIT_BYTES:
            return None
        cache_bytes = _numbers(self.folder / "memory.stat").get(self.files.inactive, 0)
        return _Limit(limit_bytes, used_bytes, min(cache_bytes, used_bytes))

    def oom_kills(self) -> int | None:
        return _numbers(self.folder / self.files.events).get("oom_kill")


def _groups(memberships: Path, cgroups: Path) -> Iterator[_Group]:
    """Yield the groups that this process is in, from its own up to the root."""
    for version, folder in group_folders("memory", memberships, cgroups):
        group = _Group(folder, _VERSION_1 if version == 1 else _VERSION_2)
        # The root of version 2 has neither file, nor has a mount without the memory controller.
        if (folder / group.files.usage).exists():
            yield group


def group_folders(controller: str, memberships: Path, cgroups: Path) -> Iterator[tuple[int, Path]]:
    """Yield where a control group of this process may keep a controller's files.

    Args:
        controller: "memory", "cpu" or "pids".
        memberships: The process's own list, /proc/self/cgroup.
        cgroups: Where control groups are mounted.

    Yields:
        Version, 1 or 2, and folder, from the process's own up to the root. What it does not show
        (a container's view ends somewhere) does not exist.
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


def _number(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None  # not the word "max"


def _numbers(path: Path) -> dict[str, int]:
    """Return the lines "name number" of a file."""
    numbers = {}
    for line in read_text(path).splitlines():
        name, _, rest = line.partition(" ")
        number = rest.split(maxsplit=1)[:1]
        if number and number[0].isdecimal():
            numbers[name] = int(number[0])
    return numbers


def _kibibytes(number: int | None) -> int | None:
    return None if number is None else number * 1024


def describe_memory(
    now: SystemMemory, before: SystemMemory | None, peak_rss_bytes: int | None
) -> str:
    """Return what memory has to say about a worker that was killed, in a few plain sentences.

    Only what is known is said. That the OOM killer ended the worker is said when it ended a process
    of this control group since `before`; when it only ended some process of the machine, that is
    said. If the text does not contain "OOM killer", no such end was counted.

    Args:
        now: Memory after the death.
        before: Memory while the worker was alive, as early as the epoch's start.
        peak_rss_bytes: The most resident memory that the worker reported.

    Returns:
        The sentences, without a space at the ends; empty if nothing is known.

    Example:
        >>> describe_memory(SystemMemory(16_000_000_000, 300_000_000), None, 11_200_000_000)
        'It had used up to 11.2 GB. The machine has 300 MB of 16.0 GB left.'
    """
    before = before or SystemMemory()
    sentences = []
    if peak_rss_bytes is not None:
        sentences.append(f"It had used up to {format_bytes(peak_rss_bytes)}.")
    sentences += _on_what_is_left(now)
    in_group, in_machine = now.group_oom_kills, now.machine_oom_kills
    if _has_risen(in_group, before.group_oom_kills):
        sentences.append("The system's OOM killer ended it.")
    elif in_group is None and _has_risen(in_machine, before.machine_oom_kills):
        sentences.append("The system's OOM killer ended a process of this machine meanwhile.")
    return " ".join(sentences)


def advice_on_kill(
    now: SystemMemory, before: SystemMemory | None, peak_rss_bytes: int | None
) -> str:
    """Return what to do about a worker that was ended by SIGKILL, the likelier cause first.

    What the dead worker held is free again in `now`, so that is taken off what is left.

    Args:
        now: As for `describe_memory`.
        before: As for `describe_memory`.
        peak_rss_bytes: As for `describe_memory`.

    Example:
        >>> advice_on_kill(SystemMemory(16_000_000_000, 300_000_000), None, None)[:25]
        'Often memory ran out: try'
        >>> advice_on_kill(SystemMemory(16_000_000_000, 12_000_000_000), None, 200_000_000)[:22]
        'Somebody or something '
    """
    if _has_risen(now.group_oom_kills, (before or SystemMemory()).group_oom_kills):
        return f"Memory ran out: {_LESS_MEMORY}, and look at what the sample takes."
    held = peak_rss_bytes or 0
    much = [
        left - held > _MUCH_LEFT * whole
        for left, whole in (
            (now.available_bytes, now.total_bytes),
            (now.left_in_group_bytes, now.limit_bytes),
        )
        if left is not None and whole is not None
    ]
    if much and all(much):
        return (
            "Somebody or something killed it (kill -9, a job scheduler, a container's limit). If "
            f"memory ran out for a moment, {_LESS_MEMORY}."
        )
    return (
        f"Often memory ran out: {_LESS_MEMORY}. Otherwise somebody or something killed it (kill "
        "-9, a job scheduler)."
    )


def _on_what_is_left(now: SystemMemory) -> Iterator[str]:
    if now.available_bytes is not None and now.total_bytes is not None:
        yield (
            f"The machine has {format_bytes(now.available_bytes)} of "
            f"{format_bytes(now.total_bytes)} left."
        )
    if now.limit_bytes is not None and now.left_in_group_bytes is not None:
        yield (
            f"The control group (the container) has {format_bytes(now.left_in_group_bytes)} of "
            f"{format_bytes(now.limit_bytes)} left."
        )


def _has_risen(now: int | None, before: int | None) -> bool:
    return now is not None and before is not None and now > before


def memory_warning(batch_bytes: int, batches_in_flight: int, now: SystemMemory) -> str | None:
    """Return a warning if the batches on their way need more memory than is left, else None.

    Args:
        batch_bytes: Size of one batch.
        batches_in_flight: How many exist at a time, those that workers hold ready included.
        now: Memory, taken before the batches were made.

    Example:
        >>> memory_warning(500_000_000, 16, SystemMemory(available_bytes=3_000_000_000))
        '16 batches of 500 MB on their way need 8.0 GB, and this machine has 3.0 GB left: ...'
    """
    needed_bytes = batch_bytes * batches_in_flight
    left_bytes = now.left_bytes
    if left_bytes is None or needed_bytes <= left_bytes:
        return None
    if left_bytes == now.left_in_group_bytes and now.limit_bytes is not None:
        whose = f"the control group (the container; limit {format_bytes(now.limit_bytes)})"
    else:
        whose = "this machine"
    return (
        f"{batches_in_flight} batches of {format_bytes(batch_bytes)} on their way need "
        f"{format_bytes(needed_bytes)}, and {whose} has {format_bytes(left_bytes)} left: workers "
        "may be killed. Lower num_workers, prefetch_factor or batch_size."
    )


def descriptors_needed(num_workers: int) -> int:
    """Return how many descriptors the main process has to open for `num_workers` processes.

    Example:
        >>> descriptors_needed(4)
        28
    """
    return _DESCRIPTORS_PER_WORKER * num_workers + _DESCRIPTORS_IN_PASSING


def check_descriptors(num_workers: int) -> None:
    """Check, before workers start, that this process may open the descriptors they need.

    Batches take none: their memory is mapped and its descriptor closed at once.

    Raises:
        ConfigError: the limit (RLIMIT_NOFILE, the soft one) leaves too few.

    Example:
        >>> check_descriptors(2)
    """
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


def num_open_files() -> int | None:
    """Return how many descriptors this process has open; None where the system does not tell."""
    for folder in ("/proc/self/fd", "/dev/fd"):  # Linux; macOS and BSD
        with contextlib.suppress(OSError):
            return len(os.listdir(folder)) - 1  # without the one that lists the folder
    return None


def format_bytes(num_bytes: int) -> str:
    """Return a size for people, in decimal units, with two to three digits.

    Example:
        >>> format_bytes(1_234_567_890), format_bytes(260_400_000), format_bytes(999)
        ('1.2 GB', '260 MB', '999 bytes')
    """
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    size = float(num_bytes)
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1000
        if size < 999.5 or unit == "TB":
            break
    return f"{size:.1f} {unit}" if size < 99.95 else f"{size:.0f} {unit}"


def signal_name(number: int) -> str:
    """Return what a signal is called.

    Example:
        >>> signal_name(9), signal_name(40)  # real-time signals have no names
        ('SIGKILL', 'signal 40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
