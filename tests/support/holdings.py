# SPDX-License-Identifier: Apache-2.0
"""What a process holds: children, threads, descriptors, shared memory, mapped slots."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from multiprocessing import forkserver, resource_sharer, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

SHM = Path("/dev/shm")
FDS = Path("/proc/self/fd")
MAPS = Path("/proc/self/maps")
# Opened at first use and kept for the life of the process.
# "pym-": the heap that multiprocessing's own `Value` and `Array` live in.
KEPT_FOR_EVER = ("/dev/urandom", "/dev/random", "/dev/shm/pym-")


@dataclass(frozen=True)
class Holdings:
    """What this process holds at one moment."""

    children: frozenset[psutil.Process]
    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[int, str]]
    shared_memory: frozenset[str]
    num_slots_mapped: int

    @classmethod
    def now(cls, num_slots_mapped: int | None = None) -> Holdings:
        """Return what is held; looking for mapped slots is left out where their number is given."""
        return cls(
            children=frozenset(_children_of(os.getpid())),
            threads=frozenset(t for t in threading.enumerate() if not t.daemon),
            descriptors=frozenset(_descriptors()),
            shared_memory=frozenset(_shared_memory()),
            num_slots_mapped=(
                len(sizes_of_mapped_slots()) if num_slots_mapped is None else num_slots_mapped
            ),
        )

    def left_since(self, before: Holdings) -> list[str]:
        """Say what is held now, was not before, and is not multiprocessing's own for good."""
        servers, server_fds = servers_of_multiprocessing()
        children = [p for p in self.children - before.children if p.pid not in servers]
        new_fds = sorted(self.descriptors - before.descriptors)
        descriptors = [(n, target) for n, target in new_fds if n not in server_fds]
        shared_memory = sorted(self.shared_memory - before.shared_memory)
        return [
            *(f"child process {_described(p)}" for p in children),
            *(f"thread {t.name}" for t in self.threads - before.threads),
            *(f"file descriptor {n} -> {target}" for n, target in descriptors),
            *(
                ["mapped slots of batches"]
                if self.num_slots_mapped > before.num_slots_mapped
                else []
            ),
            *(f"/dev/shm/{name}" for name in shared_memory if not _is_held_elsewhere(name)),
        ]


def sizes_of_mapped_slots() -> list[int]:
    """Return the size in bytes of each mapping of a slot; none outside Linux."""
    if not MAPS.exists():
        return []
    with MAPS.open() as maps:
        ends = [line.split()[0].split("-") for line in maps if "memfd:penstock" in line]
    return [int(stop, 16) - int(start, 16) for start, stop in ends]


def _children_of(pid: int) -> Iterator[psutil.Process]:
    """Yield the children of a process and theirs.

    The kernel's own list, where there is one: psutil reads every process of the machine.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
            yield from psutil.Process(pid).children(recursive=True)
            return
    except FileNotFoundError:  # it has just ended
        return
    for thread in threads:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                with contextlib.suppress(psutil.NoSuchProcess):
                    yield psutil.Process(int(child))
                yield from _children_of(int(child))


def _shared_memory() -> Iterator[str]:
    """Names in /dev/shm, without semaphores.

    Penstock makes none; torch's loader, the peer of many tests, does, and so does any program that
    happens to run beside the tests.
    """
    if SHM.is_dir():
        yield from (name for name in os.listdir(SHM) if not name.startswith("sem."))


def _descriptors() -> Iterator[tuple[int, str]]:
    if not FDS.is_dir():  # not Linux
        return
    for name in os.listdir(FDS):
        try:
            target = os.readlink(FDS / name)
        except FileNotFoundError:  # the one that listed the folder
            continue
        if not target.startswith(KEPT_FOR_EVER):
            yield int(name), target


def servers_of_multiprocessing() -> tuple[set[int | None], set[int | None]]:
    """Return process ids and descriptors of the resource tracker, fork server and resource sharer.

    multiprocessing starts each once, at first need, and keeps it until the interpreter ends.
    """
    tracker, server = resource_tracker._resource_tracker, forkserver._forkserver
    pids = {tracker._pid, server._forkserver_pid}
    fds = {tracker._fd, server._forkserver_alive_fd}
    # The thread that hands out descriptors; torch's loader needs it for tensors as indices.
    if (listener := resource_sharer._resource_sharer._listener) is not None:
        fds.add(listener._listener._socket.fileno())
    return pids, fds


def _is_held_elsewhere(name: str) -> bool:
    """Whether a process that is not ours has it mapped, or it is gone by now.

    Known by its inode: a semaphore is mapped before it gets its name.
    """
    try:
        inode = str(os.stat(SHM / name).st_ino)
    except FileNotFoundError:
        return True
    ours = {p.pid for p in _children_of(os.getpid())} | {os.getpid()}
    for pid in set(psutil.pids()) - ours:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        if any(" /dev/shm/" in line and line.split()[4] == inode for line in lines):
            return True
    return not (SHM / name).exists()


def _described(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({process.status()}): {' '.join(process.cmdline())}"
    except psutil.Error:
        return f"{process.pid} (ended, not waited for)"
