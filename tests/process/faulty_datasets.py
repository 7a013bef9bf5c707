# SPDX-License-Identifier: Apache-2.0
"""Faults, and datasets in which one strikes at one place of a worker's life.

The module imports numpy and Penstock's core alone, so that a spawned worker starts quickly.
"""

from __future__ import annotations

import ctypes
import multiprocessing.util
import os
import resource
import signal
import sys
import threading

import numpy as np
from tests.support.datasets import Rows

from penstock import sample_rng
from penstock.collate import default_collate

LENGTH = 32
BAD = 13  # the one sample that a fault hits


class Broken(Exception):
    """What the fault "raise" raises."""


def raise_it():
    raise Broken("broken on purpose")


def raise_unpicklable():
    class Local(Exception):
        """Neither its class can be looked up, nor its argument be pickled."""

    raise Local("not to be pickled", threading.Lock())


def exit_0():
    sys.exit(0)


def exit_3():
    os._exit(3)


def read_null_pointer():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file in the working folder
    ctypes.string_at(0)


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_ever():
    threading.Event().wait()


def ask_for_an_exbibyte():
    np.empty(2**60, np.uint8)


FAULTS = {
    "raise": raise_it,
    "unpicklable": raise_unpicklable,
    "sys.exit(0)": exit_0,
    "os._exit(3)": exit_3,
    "SIGSEGV": read_null_pointer,
    "SIGKILL": kill_itself,
    "hang": wait_for_ever,
    "MemoryError": ask_for_an_exbibyte,
}


def strike(fault):
    """Let the fault happen, if this is a worker: never in the main process."""
    if fault is not None and is_worker():
        FAULTS[fault]()


def is_worker():
    """Whether this is a process of multiprocessing's, or one that Ray started for an actor."""
    if multiprocessing.parent_process() is not None:
        return True
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().worker.mode == 1


class Samples:
    """Samples with random numbers of their own; `BAD` is struck in `__getitem__`."""

    def __init__(self, fault=None):
        self.fault = fault

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        if index == BAD:
            strike(self.fault)
        return {
            "index": index,
            "own": sample_rng().random(5),
            "global": np.random.random(),
            "name": f"sample {index}",
        }

    def describe(self, index):
        return f"file-{index}.bin"


class Batches(Samples):
    """The same, read a batch at a time."""

    def get_batch(self, indices, alloc):
        if BAD in indices:
            strike(self.fault)
        own = alloc((len(indices), 5), np.float64)
        for k in range(len(indices)):
            own[k] = sample_rng(k).random(5)
        return {"index": indices.copy(), "own": own}


class Unpickles(Samples):
    """The fault strikes when the dataset is unpickled."""

    def __setstate__(self, state):
        strike(state["fault"])
        self.__dict__.update(state)

    def __getitem__(self, index):
        return Samples()[index]


class StrikesWhenSent(str):
    """A string whose pickling is the fault."""

    def __new__(cls, text, fault=None):
        self = super().__new__(cls, text)
        self.fault = fault
        return self

    def __reduce__(self):
        strike(self.fault)
        return str, (str(self),)


class Sends(Samples):
    """The name of `BAD` strikes when its batch is sent."""

    def __getitem__(self, index):
        sample = Samples()[index]
        sample["name"] = StrikesWhenSent(sample["name"], self.fault if index == BAD else None)
        return sample


class Collates:
    """The default collate; a batch with `BAD` is struck."""

    def __init__(self, fault):
        self.fault = fault

    def __call__(self, samples):
        if any(sample["index"] == BAD for sample in samples):
            strike(self.fault)
        return default_collate(samples)


class StartsUp:
    """A `worker_init_fn` that is struck."""

    def __init__(self, fault):
        self.fault = fault

    def __call__(self, worker_id):
        strike(self.fault)


class Noting:
    """A `worker_init_fn` that makes a file."""

    def __init__(self, path):
        self.path = path

    def __call__(self, worker_id):
        self.path.touch()


class ShutsDown:
    """A `worker_init_fn` that lets the fault strike when its worker ends.

    `atexit` would not do: under fork and forkserver Python 3.11 leaves it out. A finalizer of
    multiprocessing runs under all start methods, and is where queues and pools clean up.
    """

    def __init__(self, fault):
        self.fault = fault

    def __call__(self, worker_id):
        multiprocessing.util.Finalize(None, strike, (self.fault,), exitpriority=1)


def faulty(place, fault):
    """Return the arguments of a loader in which `fault` strikes at `place`."""
    return {
        "worker init": lambda: {"dataset": Samples(), "worker_init_fn": StartsUp(fault)},
        "unpickling": lambda: {"dataset": Unpickles(fault)},
        "__getitem__": lambda: {"dataset": Samples(fault)},
        "get_batch": lambda: {"dataset": Batches(fault)},
        "collate": lambda: {"dataset": Samples(), "collate_fn": Collates(fault)},
        "sending": lambda: {"dataset": Sends(fault)},
        "shutdown": lambda: {"dataset": Samples(), "worker_init_fn": ShutsDown(fault)},
    }[place]()


class Blocking(Rows):
    """From sample `at` on, samples wait for ever."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def __getitem__(self, index):
        if index >= self.at:
            wait_for_ever()
        return super().__getitem__(index)


class Stuck(Rows):
    """From sample `at` on, samples take for ever; each worker says so on standard output."""

    def __init__(self, at, *, heeds_sigterm=True):
        super().__init__()
        self.at = at
        self.heeds_sigterm = heeds_sigterm

    def __getitem__(self, index):
        if index >= self.at:
            if not self.heeds_sigterm:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(1, b"stuck\n")
            wait_for_ever()
        return super().__getitem__(index)


class Gluttonous(Rows):
    """Sample `BAD` takes a gigabyte of memory, page after page."""

    def __getitem__(self, index):
        if index == BAD:
            np.ones(2**30, np.uint8)
        return super().__getitem__(index)


class Forking(Rows):
    """Sample 5 forks a child, which ends in the given way; the worker waits for it."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def __getitem__(self, index):
        if index == 5:
            pid = os.fork()
            if pid == 0:
                if self.how == "raises":
                    os.closerange(2, 3)  # where its traceback goes
                    raise ValueError("in the child")
                sys.exit(3)
            os.waitpid(pid, 0)
        return super().__getitem__(index)


class Ends(Rows):
    """Sample 13 ends its worker."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def __getitem__(self, index):
        if index == 13:
            if self.how == "sys.exit":
                self.leave()
            elif self.how == "os._exit":
                os._exit(3)
            elif self.how.startswith("SIG"):
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                os.kill(os.getpid(), getattr(signal, self.how))
            else:
                os.closerange(3, 256)
        return super().__getitem__(index)

    def leave(self):
        sys.exit(3)
