# SPDX-License-Identifier: Apache-2.0
"""What ranks read through a pool; imported by the ranks, by Ray's workers and by the test."""

from __future__ import annotations

import os
import threading
import weakref

import numpy as np

from penstock import Loader, get_worker_info, sample_rng
from penstock.data import IterableDataset, shard
from penstock.sampling import DistributedSampler

SEED = 7
LENGTH = 240
BATCH_SIZE = 4
TABLE_BYTES = 3 << 20


class Noise:
    """Samples that show whose random numbers they were made with."""

    def __init__(self, salt=0):
        self.salt = salt
        self.table = np.full(TABLE_BYTES, salt, np.uint8)

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        drawn = [sample_rng().random(), np.random.random(), float(self.table[index])]
        return {"index": index, "drawn": np.array(drawn)}


class Deadly(Noise):
    """Ends the process that reads one of its samples."""

    def __init__(self, bad):
        super().__init__()
        self.bad = bad

    def __getitem__(self, index):
        if index == self.bad and get_worker_info() is not None:
            os._exit(3)
        return super().__getitem__(index)


class Gated(Noise):
    """Waits at a gate, an actor, with some of its samples."""

    def __init__(self, waiting, gate):
        super().__init__()
        self.waiting = frozenset(waiting)
        self.gate = gate

    def __getitem__(self, index):
        if index in self.waiting:
            import ray

            ray.get(ray.get_actor(self.gate, namespace="penstock").passed.remote())
        return super().__getitem__(index)


class Stuck(Noise):
    """Never ends one of its samples."""

    def __init__(self, bad):
        super().__init__()
        self.bad = bad

    def __getitem__(self, index):
        if index == self.bad and get_worker_info() is not None:
            threading.Event().wait()
        return super().__getitem__(index)


class Twins(Noise):
    """Has two large arrays with the same content."""

    def __init__(self):
        super().__init__()
        self.twin = self.table.copy()


class Stream(IterableDataset):
    """The same, as a stream that deals itself out to ranks and workers."""

    def __iter__(self):
        for index in shard(range(LENGTH)):
            drawn = [sample_rng().random(), np.random.random()]
            yield {"index": index, "drawn": np.array(drawn)}


class WhoAmI:
    """Says what the worker knows of itself, by us and by torch."""

    def __init__(self, salt):
        self.salt = salt

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        import torch.utils.data

        ours, torchs = get_worker_info(), torch.utils.data.get_worker_info()
        told = [ours.id, ours.num_workers, ours.dataset.salt, ours.dataset is self]
        told += [torchs.id, torchs.num_workers, torchs.dataset.salt, torchs.dataset is self]
        return {"index": index, "drawn": np.array(told)}


class TakesTurns:
    """Tells the umpire whose sample is being made, and goes on when both ranks want the worker."""

    def __init__(self, rank, umpire):
        self.rank = rank
        self.umpire = umpire

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        import ray

        umpire = ray.get_actor(self.umpire, namespace="penstock")
        ray.get(umpire.until_both_want.remote(self.rank))
        return {"index": index, "drawn": np.zeros(1)}


class InitEnds(Noise):
    """Ends the process that opens it."""

    def __setstate__(self, state):
        os._exit(4)


all_cyclic = weakref.WeakSet()


class Cyclic:
    """Says how many of its kind are alive; only the garbage collection ends one."""

    def __init__(self):
        self.itself = self

    def __setstate__(self, state):
        self.__dict__.update(state)
        all_cyclic.add(self)

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return {"index": index, "num_alive": len(all_cyclic)}


DATASETS = {
    "cyclic": Cyclic,
    "noise": Noise,
    "deadly": Deadly,
    "gated": Gated,
    "stuck": Stuck,
    "twins": Twins,
    "stream": Stream,
    "who am I": WhoAmI,
    "takes turns": TakesTurns,
    "ends at once": InitEnds,
}


def loader_of(dataset, rank, world_size, *, args=(), torchs=False, **options):
    """A rank's loader; `options` as the loader has them."""
    data = DATASETS[dataset](*args)
    options = {"batch_size": BATCH_SIZE, "seed": SEED, **options}
    if not isinstance(data, IterableDataset):
        options["sampler"] = DistributedSampler(data, world_size, rank, seed=SEED)
    if torchs:
        from penstock.torch import DataLoader

        return DataLoader(data, **options)
    return Loader(data, **options)


def told(batch):
    """A batch as JSON has it, with all its bits."""
    return [batch["index"].tolist(), np.asarray(batch["drawn"]).tobytes().hex()]
