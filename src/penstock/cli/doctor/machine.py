# SPDX-License-Identifier: Apache-2.0
"""Cores, memory, shared memory and limits, as this process has them."""

from __future__ import annotations

import math
import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.cli.doctor.finding import Finding
from penstock.errors import TransportError
from penstock.insight.budgets import cores_allowed, cores_by_affinity
from penstock.system_limits import (
    descriptors_needed,
    format_bytes,
    group_folders,
    memory_now,
    num_open_files,
    read_text,
)
from penstock.transport.memory import Mapping, create_segment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cli.doctor.finding import Status

__all__ = ["container_kind", "look_at_limits", "look_at_machine", "look_at_shared_memory"]

_ROOT: Final = Path("/")
_MACHINE: Final = "machine"
_SHARED: Final = "shared memory"
_LIMITS: Final = "limits"

# A process that has imported torch's CPU build has 220 MB resident: this leaves a main process,
# some workers, and their batches. With numpy alone, much less will do.
_COMFORTABLE_BYTES: Final = 2_000_000_000
_SHM_BYTES: Final = 1_000_000_000  # docker gives /dev/shm 64 MB, a machine half of its memory
_FEW_PROCESSES: Final = 100  # 16 workers, and for each some threads of its libraries
_TRIAL_BYTES: Final = 1 << 20


def look_at_machine(root: Path = _ROOT) -> Iterator[Finding]:
    """Yield what there is of cores and memory.

    Args:
        root: Below it lie `proc`, `sys` and `dev`.
    """
    yield _container(root)
    yield _cores(root)
    yield _load()
    yield from _memory(root)
    yield from _overcommit(root)


def look_at_shared_memory(root: Path = _ROOT) -> Iterator[Finding]:
    """Yield whether batches can lie in shared memory, and what /dev/shm has for others."""
    yield _arena()
    yield from _dev_shm(root)


def look_at_limits(root: Path = _ROOT) -> Iterator[Finding]:
    """Yield the limits of this process that a loader can run into."""
    yield _open_files()
    yield _address_space()
    yield _locked_memory()
    yield _processes(root)


def container_kind(root: Path = _ROOT) -> str | None:
    """Return what kind of container this process is in, None if none shows.

    Args:
        root: As of `look_at_machine`.
    """
    if (root / ".dockerenv").exists():
        return "Docker"
    if (root / "run/.containerenv").exists():
        return "Podman"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "Kubernetes"
    groups = read_text(root / "proc/self/cgroup")
    for word, kind in (("kubepods", "Kubernetes"), ("docker", "Docker"), ("lxc", "LXC")):
        if f"/{word}" in groups:
            return kind
    return None


def _container(root: Path) -> Finding:
    kind = container_kind(root)
    found = f"{kind}: its limits are counted below" if kind else "none found"
    return Finding(_MACHINE, "container", found, values={"kind": kind})


def _cores(root: Path) -> Finding:
    in_machine, by_affinity = os.cpu_count() or 1, cores_by_affinity()
    usable = cores_allowed(root / "proc", root / "sys/fs/cgroup")
    quota = usable if usable < by_affinity else None
    said = "no lower CPU quota" if quota is None else f"a CPU quota of {quota:g}"
    found = f"{usable:g} usable: {in_machine} in the machine, {by_affinity:g} by affinity, {said}"
    values = {"machine": in_machine, "affinity": by_affinity, "quota": quota, "usable": usable}
    if quota is None:
        return Finding(_MACHINE, "cores", found, values=values)
    most = math.ceil(quota)
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) <= most:
        return Finding(_MACHINE, "cores", f"{found}; OMP_NUM_THREADS={wanted}", values=values)
    remedy = (
        f"Libraries see {by_affinity:g} cores and start a thread for each; when the quota is used "
        f"up, all of them stop. Set OMP_NUM_THREADS={most}. Of workers that compute take {most} at "
        "most; of those that wait for reads there may be more."
    )
    return Finding(_MACHINE, "cores", found, remedy, "advice", values)


def _load() -> Finding:
    in_machine = os.cpu_count() or 1
    load = os.getloadavg()[0]
    found = f"{load:.1f} programs ran or waited on average, in the last minute"
    values = {"load": round(load, 2)}
    # Of the whole machine, also in a container: so it is compared with all cores.
    if load < in_machine / 2:
        return Finding(_MACHINE, "load", found, values=values)
    remedy = (
        f"Others use much of the {in_machine} cores: workers get less, and timings mean little. "
        "See `top`; wait, or ask for cores of your own."
    )
    return Finding(_MACHINE, "load", found, remedy, "advice", values)


def _memory(root: Path) -> Iterator[Finding]:
    now = memory_now(root / "proc", root / "sys/fs/cgroup")
    values = {
        "total_bytes": now.total_bytes,
        "available_bytes": now.available_bytes,
        "limit_bytes": now.limit_bytes,
        "left_bytes": now.left_bytes,
    }
    if now.left_bytes is None or now.total_bytes is None or now.available_bytes is None:
        yield Finding(_MACHINE, "memory", "the system does not tell", values=values)
        return
    found = f"{format_bytes(now.available_bytes)} of {format_bytes(now.total_bytes)} available"
    if now.limit_bytes is not None and now.left_in_group_bytes is not None:
        left = format_bytes(now.left_in_group_bytes)
        found += f"; the control group has {left} of {format_bytes(now.limit_bytes)} left"
    else:
        found += "; no limit of a control group"
    remedy = _memory_advice(now.left_bytes)
    yield Finding(_MACHINE, "memory", found, remedy, "advice" if remedy else "ok", values)
    if now.group_oom_kills:
        yield Finding(
            _MACHINE,
            "OOM killer",
            f"it has ended {now.group_oom_kills:,} processes of this control group so far",
            "Workers may have been among them. Raise the memory limit, or lower num_workers, "
            "prefetch_factor or batch_size.",
            "advice",
            {"group_oom_kills": now.group_oom_kills},
        )


def _memory_advice(left_bytes: int) -> str:
    if left_bytes >= _COMFORTABLE_BYTES:
        return ""
    return (
        f"{format_bytes(left_bytes)} are little: a process that imports torch takes some 220 MB. "
        "End other programs or raise the limit; fewer workers and smaller batches need less."
    )


def _overcommit(root: Path) -> Iterator[Finding]:
    mode = read_text(root / "proc/sys/vm/overcommit_memory").strip()
    if mode != "2":
        return
    yield Finding(
        _MACHINE,
        "overcommit",
        "strict (vm.overcommit_memory=2): memory counts when it is asked for, not when it is used",
        "A fork asks for the main process's whole memory once more and may be refused: take "
        'multiprocessing_context="forkserver", or set vm.overcommit_memory=0.',
        "advice",
        {"overcommit_memory": 2},
    )


def _arena() -> Finding:
    is_memfd = hasattr(os, "memfd_create")
    values = {"memfd": is_memfd}
    try:
        fd = create_segment(_TRIAL_BYTES)
        try:
            written = Mapping(fd, _TRIAL_BYTES).bytes()
            written[:] = 7
            is_shared = bool(np.all(Mapping(fd, _TRIAL_BYTES).bytes() == 7))
        finally:
            os.close(fd)
    except TransportError as error:
        remedy = "Batches cannot be handed over: see the limits below, or take num_workers=0."
        return Finding(_SHARED, "batches", str(error), remedy, "problem", values)
    if not is_shared:
        return Finding(
            _SHARED,
            "batches",
            "what was written to a segment does not show in a second mapping of it",
            "The system's shared memory does not work (an emulated kernel?): take num_workers=0.",
            "problem",
            values,
        )
    way = "by memfd" if is_memfd else "by shm_open, unlinked at once"
    found = f"nameless ({way}): they count as memory of the control group, not against /dev/shm"
    return Finding(_SHARED, "batches", found, values=values)


def _dev_shm(root: Path) -> Iterator[Finding]:
    if sys.platform != "linux":
        return
    name, folder = "/dev/shm", root / "dev/shm"
    try:
        disk = os.statvfs(folder)
    except OSError as error:
        yield Finding(
            _SHARED,
            name,
            f"cannot be used: {error.strerror}",
            "Penstock needs none, but multiprocessing's locks and queues and torch's own loader "
            "do: mount a tmpfs there.",
            "advice",
            {"size_bytes": None, "free_bytes": None},
        )
        return
    size_bytes, free_bytes = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    found = (
        f"{format_bytes(free_bytes)} of {format_bytes(size_bytes)} free; for torch's own loader "
        "and Ray, Penstock's batches do not lie there"
    )
    values = {"size_bytes": size_bytes, "free_bytes": free_bytes}
    if free_bytes >= _SHM_BYTES:
        yield Finding(_SHARED, name, found, values=values)
        return
    remedy = (
        "Only if torch's own DataLoader or Ray runs here too: docker run --shm-size=8g, or an "
        "emptyDir with medium: Memory in Kubernetes."
    )
    yield Finding(_SHARED, name, found, remedy, "advice", values)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = num_open_files()
    values = {"soft": _known(soft), "hard": _known(hard), "open": num_open}
    if soft == resource.RLIM_INFINITY or num_open is None:
        return Finding(_LIMITS, "open files", f"limit {_limit(soft)}", values=values)
    per_worker = descriptors_needed(1) - descriptors_needed(0)
    num_workers = max((soft - num_open - descriptors_needed(0)) // per_worker, 0)
    values["num_workers"] = num_workers
    found = (
        f"limit {soft:,} (at most {_limit(hard)}), {num_open} open: enough for {num_workers:,} "
        f"worker{'' if num_workers == 1 else 's'}"
    )
    wanted = max(math.ceil(cores_allowed()), 2)
    if num_workers >= wanted:
        return Finding(_LIMITS, "open files", found, values=values)
    needed = num_open + descriptors_needed(wanted)
    remedy = f"{wanted} workers need {needed}: `ulimit -n {max(needed, 1024)}` in the shell."
    status: Status = "problem" if num_workers < 2 else "advice"
    return Finding(_LIMITS, "open files", found, remedy, status, values)


def _address_space() -> Finding:
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    values = {"soft": _known(soft)}
    if soft == resource.RLIM_INFINITY:
        return Finding(_LIMITS, "address space", "no limit", values=values)
    return Finding(
        _LIMITS,
        "address space",
        f"limited to {format_bytes(soft)}",
        "Batches, libraries and a GPU's driver (tens of GB of addresses, hardly any memory) count: "
        "`ulimit -v unlimited`, and limit memory by a control group.",
        "advice",
        values,
    )


def _locked_memory() -> Finding:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    size = "no limit" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    found = f"{size}; does not matter: CUDA's driver locks pages itself (pin_memory=, device=)"
    return Finding(_LIMITS, "locked memory", found, values={"soft": _known(soft)})


def _processes(root: Path) -> Finding:
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    of_user = _left_of_user(soft, root)
    in_group = min(_left_of_pids(root), default=None)
    values = {"soft": _known(soft), "left_of_user": of_user, "left_in_group": in_group}
    found = f"{_limit(soft)} for this user"
    if of_user is not None:
        found += f", {of_user:,} left"
    if in_group is None:
        found += "; no limit of a control group"
    else:
        found += f"; {in_group:,} left in the group"
    raises = []
    if of_user is not None and of_user < _FEW_PROCESSES:
        raises.append("the user's limit (`ulimit -u`)")
    if in_group is not None and in_group < _FEW_PROCESSES:
        raises.append("pids.max (docker run --pids-limit)")
    if not raises:
        return Finding(_LIMITS, "processes", found, values=values)
    remedy = (
        "Each worker is one, and so is each thread of its libraries: raise "
        f"{' and '.join(raises)}, or lower num_workers."
    )
    return Finding(_LIMITS, "processes", found, remedy, "advice", values)


def _left_of_user(soft: int, root: Path) -> int | None:
    """Return how many processes and threads the user's limit still allows; None if all.

    Those of other containers count as well and cannot be seen: there may be fewer.
    """
    uid = os.getuid()
    if uid == 0 or soft == resource.RLIM_INFINITY:  # root is not held to it
        return None
    num_tasks = 0
    for status in (root / "proc").glob("[0-9]*/status"):
        fields = dict(line.partition(":")[::2] for line in read_text(status).splitlines())
        if fields.get("Uid", "").split()[:1] == [str(uid)]:
            num_tasks += int(fields["Threads"])
    return max(soft - num_tasks, 0)


def _left_of_pids(root: Path) -> Iterator[int]:
    """Yield how many processes and threads each control group with a limit still allows."""
    for _, folder in group_folders("pids", root / "proc/self/cgroup", root / "sys/fs/cgroup"):
        most = read_text(folder / "pids.max").strip()
        current = read_text(folder / "pids.current").strip()
        if most.isdecimal() and current.isdecimal():  # not the word "max"
            yield max(int(most) - int(current), 0)


def _known(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _limit(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
