# SPDX-License-Identifier: Apache-2.0
"""Datasets of draws whose workers are ended, and a program that holds the interpreter.

    python -m tests.process.deadly_datasets METHOD

The module imports neither torch nor pytest, so that a spawned worker starts quickly.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np

from penstock import Loader, sample_rng
from penstock.data import IterableDataset, shard


class Noise:
    """Sample i is i, a draw of its own stream, and one of numpy's global generator."""

    def __init__(self, length=48):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return np.array([index, sample_rng().random(), np.random.random()])


class Stream(IterableDataset):
    """A share of 0, 1, 2 … with draws; without state, so that a lost place is replayed."""

    def __iter__(self):
        for index in shard(range(60)):
            yield np.array([index, sample_rng().random()])


class Kept(IterableDataset):
    """The same with a state."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        mine = list(shard(range(60)))
        while self.at < len(mine):
            self.at += 1
            yield np.array([mine[self.at - 1], sample_rng().random()])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class HoldsThePython(Noise):
    """From sample 8 on native code holds the interpreter."""

    def __getitem__(self, index):
        if index >= 8:
            ctypes.PyDLL(None).sleep(600)
        return super().__getitem__(index)


if __name__ == "__main__":
    loader = Loader(
        HoldsThePython(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1]
    )
    stream = iter(loader)
    next(stream), next(stream)
    sys.stdout.write(" ".join(str(p.pid) for p in stream.backend.processes) + "\n")
    sys.stdout.flush()
    next(stream)
