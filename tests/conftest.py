# SPDX-License-Identifier: Apache-2.0
"""What every test is held to: it leaves no process, thread, descriptor or shared memory behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing import forkserver, resource_sharer, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import numpy as np
import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

# Before anybody imports Albumentations, which asks the network for a newer one then.
os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"

# By itself hypothesis fails an example that takes 200 ms, which on a busy machine means nothing.
hypothesis.settings.register_profile("no clock", deadline=None)
hypothesis.settings.load_profile("no clock")

# A shell starts what goes on in the background with Ctrl-C switched off, and children inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHM = Path("/dev/shm")
FDS = Path("/proc/self/fd")
MAPS = Path("/proc/self/maps")
# Opened at first use and kept for the life of the process.
# "pym-": the heap that multiprocessing's own `Value` and `Array` live in.
KEPT_FOR_EVER = ("/dev/urandom", "/dev/random", "/dev/shm/pym-")
GRACE_S = 5.0  # a worker that was told to stop is gone by then; the promise of the shutdown page


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
        return cls(
            children=frozenset(psutil.Process().children(recursive=True)),
            threads=frozenset(t for t in threading.enumerate() if not t.daemon),
            descriptors=frozenset(_descriptors()),
            shared_memory=frozenset(_shared_memory()),
            num_slots_mapped=(
                _num_slots_mapped() if num_slots_mapped is None else num_slots_mapped
            ),
        )

    def left_since(self, before: Holdings) -> list[str]:
        """Say what is held now, was not before, and is not multiprocessing's own for good."""
        servers, server_fds = _servers_of_multiprocessing()
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


def _shared_memory() -> Iterator[str]:
    """Names in /dev/shm, without semaphores.

    Penstock makes none; torch's loader, the peer of many tests, does, and so does any program that
    happens to run beside the tests.
    """
    if SHM.is_dir():
        yield from (name for name in os.listdir(SHM) if not name.startswith("sem."))


def _num_slots_mapped() -> int:
    if not MAPS.exists():  # not Linux
        return 0
    with MAPS.open() as maps:
        return sum("memfd:penstock" in line for line in maps)


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


def _servers_of_multiprocessing() -> tuple[set[int | None], set[int | None]]:
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
    ours = {p.pid for p in psutil.Process().children(recursive=True)} | {os.getpid()}
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


_slots_found = [0]


def pytest_collection_finish() -> None:
    """What exists now stays, and the collector need not look at it again, in any test or worker.

    There are a million objects: a collection takes a third of a second with them.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """After the test nothing is left that it did not find.

    The first look is cheap and mostly the last; where something is left, the test gets a garbage
    collection and the time that a worker has for its exit.
    """
    # Looking for mapped slots takes milliseconds; there are those that the last test found.
    before = Holdings.now(_slots_found[-1])
    yield
    after = Holdings.now()
    _slots_found[:] = [after.num_slots_mapped]
    if not after.left_since(before):
        return
    gc.collect()
    servers, _ = _servers_of_multiprocessing()
    ending = [p for p in Holdings.now().children - before.children if p.pid not in servers]
    psutil.wait_procs(ending, timeout=GRACE_S)
    after = Holdings.now()
    _slots_found[:] = [after.num_slots_mapped]
    left = after.left_since(before)
    assert not left, "the test left behind:\n  " + "\n  ".join(left)


@pytest.fixture(autouse=True)
def restore_randomness() -> Iterator[None]:
    """The global generators are after each test as they were before."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    torch = sys.modules.get("torch")
    of_torch = None if torch is None else torch.get_rng_state()
    yield
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    if torch is not None:
        torch.set_rng_state(of_torch)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with the real data; the test is skipped where there is none."""
    named = os.environ.get("PENSTOCK_TEST_DATA")
    folder = Path(named) if named else Path(__file__).parents[2] / "shared" / "data"
    if folder.is_dir():
        return folder
    reason = f"no real data at {folder}: name its folder in PENSTOCK_TEST_DATA"
    if os.environ.get("PENSTOCK_REQUIRE_DATA") == "1":
        pytest.fail(f"{reason}. PENSTOCK_REQUIRE_DATA=1 forbids to skip.")
    pytest.skip(reason)
